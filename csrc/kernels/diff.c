/* Differences of a chunk (contract: tm_diff_kernels.h). The difference of two widened elements is rounded, so
 * its square is too and nothing may be fused; the square of a narrow element is exact. */
#include "tm_bytes.h"
#include "tm_widen.h"

#include <string.h>

TM_INLINE void diff_row_double(double *diff, double *weight, const double *now, const double *before) {
    for (int l = 0; l < TM_LANES; l++) {
        double difference = now[l] - before[l];
        diff[l] = TM_ADD_ROUNDED_SQUARE(diff[l], difference);
        weight[l] = TM_ADD_ROUNDED_SQUARE(weight[l], before[l]);
    }
}

/* How many of a row of doubles are NaN or infinite. */
TM_NOINLINE int64_t diff_count_nonfinite(const double *row) {
    const tm_int64 *bits = (const tm_int64 *)row;
    int64_t count = 0;
    for (int l = 0; l < TM_LANES; l++) {
        count += (bits[l] & INT64_MAX) >= INT64_C(0x7ff0000000000000);
    }
    return count;
}

/* Rows that are copied while L1 holds them are fewer: reading and writing alternate, and the memory does
 * both. */
enum { DIFF_BYTES = 8192, DIFF_STORE_BYTES = 4096 };

/* How many elements stand before the first that begins a line of both arrays; 0 if none does, or if it is not
 * worth it. Large arrays of NumPy begin 16 bytes after a line, and rows across lines are loaded and, more so,
 * stored more slowly (float32 with `to`, from memory: 23 and 32 GB/s). */
TM_INLINE size_t diff_head(const void *now, const void *before, size_t n, size_t item) {
    size_t over = (uintptr_t)before % 64;
    return over > 0 && over == (uintptr_t)now % 64 && n >= 64 * TM_LANES ? (64 - over) / item : 0;
}

/* Lane l takes the place of lane l - by: rows then begin `by` elements later. */
TM_INLINE void diff_turn_lanes(double *lane, size_t by) {
    double twice[2 * TM_LANES];
    memcpy(twice, lane, sizeof twice / 2);
    memcpy(twice + TM_LANES, lane, sizeof twice / 2);
    memcpy(lane, twice + by, sizeof twice / 2);
}

TM_INLINE void diff_turn(tm_diff_state *state, size_t by) {
    diff_turn_lanes(state->diff, by);
    diff_turn_lanes(state->weight, by);
}

#if defined(__AVX512BW__)
#    define TM_DIFF_AVX512
#    include "diff_avx512.h"
#else
#    include "tm_rows.h"
#    include "tm_same.h"

TM_INLINE void diff_row_float(double *diff, double *weight, const float *now, const float *before) {
    for (int l = 0; l < TM_LANES; l++) {
        double wide = before[l], difference = now[l] - wide;
        diff[l] = TM_ADD_ROUNDED_SQUARE(diff[l], difference);
        weight[l] = TM_ADD_EXACT_SQUARE(weight[l], wide);
    }
}

TM_SAME(int16_t)
TM_SAME(tm_int32)
TM_SAME(tm_int64)
#endif

#define TM_TEMPLATE "diff_float.h"
#include "each_float.h"
#undef TM_TEMPLATE

/* Dtypes whose speed nobody waits for: element by element to doubles, with the arithmetic of the others. */
#define TM_DIFF_BLOCK(name, store, value)                                                                    \
    static void diff_block_##name(tm_diff_state *state, const void *now, const void *before, void *to,       \
                                  size_t n, const double *byte_values) {                                     \
        const store *p = now, *q = before;                                                                   \
        store *out = to;                                                                                     \
        (void)byte_values;                                                                                   \
        for (; n > 0; p += TM_LANES, q += TM_LANES) {                                                        \
            double x[TM_LANES] = {0}, y[TM_LANES] = {0}, difference[TM_LANES];                               \
            size_t width = n < TM_LANES ? n : TM_LANES;                                                      \
            tm_prefetch_near(p, TM_LANES * sizeof *p);                                                       \
            tm_prefetch_near(q, TM_LANES * sizeof *q);                                                       \
            for (size_t l = 0; l < width; l++) {                                                             \
                x[l] = value(p[l]);                                                                          \
                y[l] = value(q[l]);                                                                          \
                state->n_same += p[l] == q[l];                                                               \
            }                                                                                                \
            for (int l = 0; l < TM_LANES; l++) {                                                             \
                difference[l] = x[l] - y[l];                                                                 \
            }                                                                                                \
            diff_row_double(state->diff, state->weight, x, y);                                               \
            state->n_nonfinite += diff_count_nonfinite(difference);                                          \
            if (out != NULL) {                                                                               \
                memcpy(out, p, width * sizeof *p);                                                           \
                out += width;                                                                                \
            }                                                                                                \
            n -= width;                                                                                      \
        }                                                                                                    \
    }
#define TM_DIFF_CAST(element) ((double)(element))
#define TM_DIFF_LOOK_UP(code) (byte_values[code])
TM_DIFF_BLOCK(i16, int16_t, TM_DIFF_CAST)
TM_DIFF_BLOCK(i32, int32_t, TM_DIFF_CAST)
TM_DIFF_BLOCK(i64, int64_t, TM_DIFF_CAST)
TM_DIFF_BLOCK(u16, uint16_t, TM_DIFF_CAST)
TM_DIFF_BLOCK(u32, uint32_t, TM_DIFF_CAST)
TM_DIFF_BLOCK(u64, uint64_t, TM_DIFF_CAST)
TM_DIFF_BLOCK(byte, uint8_t, TM_DIFF_LOOK_UP)

static void diff_finish(tm_diff_state *state) {
    state->total_diff = tm_lane_total(state->diff);
    state->total_weight = tm_lane_total(state->weight);
}

const tm_diff_kernels TM_TIERED(tm_diff_kernels_) = {
    .block = {[TM_F64] = diff_block_f64,
              [TM_F32] = diff_block_f32,
              [TM_F16] = diff_block_f16,
              [TM_BF16] = diff_block_bf16,
              [TM_I16] = diff_block_i16,
              [TM_I32] = diff_block_i32,
              [TM_I64] = diff_block_i64,
              [TM_U16] = diff_block_u16,
              [TM_U32] = diff_block_u32,
              [TM_U64] = diff_block_u64,
              TM_BYTE_ROWS(diff_block_byte)},
    .finish = diff_finish,
};
