/* Statistics of a chunk: sums, extremes and counters in one read (contract: tm_kernels.h). */
#include "tm_bytes.h"
#include "tm_rows.h"

#include <math.h>
#include <string.h>

/* Halves `lane` until lane[0] holds the extreme (or the sum) of all. */
#define TM_FOLD(lane, better)                                                                                \
    for (int width = TM_LANES / 2; width > 0; width /= 2) {                                                  \
        for (int l = 0; l < width; l++) {                                                                    \
            (lane)[l] = (lane)[l + width] better(lane)[l] ? (lane)[l + width] : (lane)[l];                   \
        }                                                                                                    \
    }
#define TM_FOLD_SUM(lane)                                                                                    \
    for (int width = TM_LANES / 2; width > 0; width /= 2) {                                                  \
        for (int l = 0; l < width; l++) {                                                                    \
            (lane)[l] += (lane)[l + width];                                                                  \
        }                                                                                                    \
    }

/* Adding +0.0 turns -0.0 into +0.0 and nothing else: a zero extreme has one sign whatever the order was. */
TM_INLINE void tm_stats_extremes(tm_stats_state *state, double low, double high) {
    state->min = (low < state->min ? low : state->min) + 0.0;
    state->max = (high > state->max ? high : state->max) + 0.0;
}

TM_INLINE int tm_lanes_finite(const double *lane) {
    const tm_int64 *bits = (const tm_int64 *)lane;
    int64_t bad[TM_LANES];
    for (int l = 0; l < TM_LANES; l++) {
        bad[l] = (bits[l] & INT64_MAX) >= INT64_C(0x7ff0000000000000);
    }
    TM_FOLD_SUM(bad);
    return bad[0] == 0;
}

/* The block function of one float dtype: `plain` reads whole rows and says 0 where they have to be classified
 * (contracts: stats_float.h). */
#define TM_STATS_BLOCK(prefix, name, store, plain, most_rows)                                                \
    static void TM_PASTE(prefix, name)(tm_stats_state * state, const void *data, size_t n) {                 \
        const store *p = data;                                                                               \
        while (n >= TM_LANES) {                                                                              \
            size_t rows = n / TM_LANES < (most_rows) ? n / TM_LANES : (most_rows);                           \
            size_t elements = rows * TM_LANES;                                                               \
            if (!(plain)(state, p, rows)) {                                                                  \
                TM_PASTE(stats_masked_, name)(state, p, elements, rows);                                     \
            }                                                                                                \
            state->seen += (int64_t)elements;                                                                \
            p += elements;                                                                                   \
            n -= elements;                                                                                   \
        }                                                                                                    \
        if (n > 0) {                                                                                         \
            store padded[TM_LANES];                                                                          \
            memset(padded, 0xff, sizeof padded); /* NaN in every format */                                   \
            memcpy(padded, p, n * sizeof *p);                                                                \
            TM_PASTE(stats_masked_, name)(state, padded, n, 1);                                              \
            state->seen += (int64_t)n;                                                                       \
        }                                                                                                    \
    }

#define TM_TEMPLATE "stats_float.h"
#include "each_float.h"
#undef TM_TEMPLATE
#define TM_TEMPLATE "stats_integer.h"
#include "each_integer.h"
#undef TM_TEMPLATE

#if defined(__AVX512BW__)
#    include "tm_halves.h"

#    include "stats_halves.h"
#endif

#define TM_FLOAT8_BLOCK(enum_name, name, offset, mask, first)                                                \
    static void stats_block_##name(tm_stats_state *state, const void *data, size_t n) {                      \
        tm_bytes_count(&state->bytes, data, n);                                                              \
        if (state->first_bad < 0) {                                                                          \
            size_t i = tm_bytes_find(data, n, offset, mask, first);                                          \
            state->first_bad = i < n ? state->seen + (int64_t)i : -1;                                        \
        }                                                                                                    \
        state->seen += (int64_t)n;                                                                           \
    }
TM_FLOAT8S(TM_FLOAT8_BLOCK)
#undef TM_FLOAT8_BLOCK

static void stats_block_byte(tm_stats_state *state, const void *data, size_t n) {
    tm_bytes_count(&state->bytes, data, n);
    state->seen += (int64_t)n;
}

static void stats_finish_lanes(tm_stats_state *state, const double *byte_values) {
    (void)byte_values;
    state->total_sum = tm_lane_total(state->sum);
    state->total_sumsq = tm_lane_total(state->sumsq);
}

/* Code c goes to lane c % TM_LANES with its count as a factor. */
static void stats_finish_bytes(tm_stats_state *state, const double *byte_values) {
    uint32_t count[256];
    const tm_int64 *bits = (const tm_int64 *)byte_values;

    tm_bytes_merge(&state->bytes, count);
    for (int c = 0; c < 256; c++) {
        if (count[c] == 0) {
            continue;
        }
        double value = byte_values[c], times = count[c];
        int64_t magnitude = bits[c] & INT64_MAX;
        if (magnitude < INT64_C(0x7ff0000000000000)) {
            state->sum[c % TM_LANES] += times * value;
            state->sumsq[c % TM_LANES] += times * (value * value);
            state->n_zero += magnitude == 0 ? (int64_t)count[c] : 0;
            tm_stats_extremes(state, value, value);
        } else if (magnitude > INT64_C(0x7ff0000000000000)) {
            state->n_nan += count[c];
        } else if (bits[c] < 0) {
            state->n_neginf += count[c];
        } else {
            state->n_posinf += count[c];
        }
    }
    stats_finish_lanes(state, byte_values);
}

#define TM_FLOAT8_BLOCK_ROW(enum_name, name, offset, mask, first) [TM_##enum_name] = stats_block_##name,
#define TM_FLOAT8_FINISH_ROW(enum_name, name, offset, mask, first) [TM_##enum_name] = stats_finish_bytes,

#define TM_STATS_KERNELS(float_block)                                                                        \
    {                                                                                                        \
        .block = {[TM_F64] = float_block##f64,                                                               \
                  [TM_F32] = float_block##f32,                                                               \
                  [TM_F16] = float_block##f16,                                                               \
                  [TM_BF16] = float_block##bf16,                                                             \
                  TM_FLOAT8S(TM_FLOAT8_BLOCK_ROW)[TM_I8] = stats_block_byte,                                 \
                  [TM_I16] = stats_block_i16,                                                                \
                  [TM_I32] = stats_block_i32,                                                                \
                  [TM_I64] = stats_block_i64,                                                                \
                  [TM_U8] = stats_block_byte,                                                                \
                  [TM_U16] = stats_block_u16,                                                                \
                  [TM_U32] = stats_block_u32,                                                                \
                  [TM_U64] = stats_block_u64,                                                                \
                  [TM_BOOL] = stats_block_byte},                                                             \
        .finish = {[TM_F64] = stats_finish_lanes,                                                            \
                   [TM_F32] = stats_finish_lanes,                                                            \
                   [TM_F16] = stats_finish_lanes,                                                            \
                   [TM_BF16] = stats_finish_lanes,                                                           \
                   TM_FLOAT8S(TM_FLOAT8_FINISH_ROW)[TM_I8] = stats_finish_bytes,                             \
                   [TM_I16] = stats_finish_lanes,                                                            \
                   [TM_I32] = stats_finish_lanes,                                                            \
                   [TM_I64] = stats_finish_lanes,                                                            \
                   [TM_U8] = stats_finish_bytes,                                                             \
                   [TM_U16] = stats_finish_lanes,                                                            \
                   [TM_U32] = stats_finish_lanes,                                                            \
                   [TM_U64] = stats_finish_lanes,                                                            \
                   [TM_BOOL] = stats_finish_bytes},                                                          \
    }

const tm_stats_kernels TM_TIERED(tm_stats_kernels_) = TM_STATS_KERNELS(stats_block_);
#if defined(__AVX512BW__)
const tm_stats_kernels tm_stats_kernels_avx512_halves = TM_STATS_KERNELS(stats_halves_block_);
#endif
