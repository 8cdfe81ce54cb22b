/* Norms of a chunk: only what the order asks for (contract: tm_kernels.h). */
#include "tm_bytes.h"
#include "tm_rows.h"

#include <math.h>
#include <string.h>

/* The block function of one order: whole rows, then a last row padded with zeros, which add +0.0 to sums that
 * are never -0.0 and cannot raise a magnitude. */
#define TM_NORM_BLOCK(order, name, store)                                                                    \
    static void TM_PASTE(norm_##order##_block_, name)(tm_norm_state * state, const void *data, size_t n) {   \
        const store *p = data;                                                                               \
        TM_PASTE(norm_##order##_rows_, name)(state, p, n / TM_LANES);                                        \
        size_t rest = n % TM_LANES;                                                                          \
        if (rest > 0) {                                                                                      \
            store padded[TM_LANES] = {0};                                                                    \
            memcpy(padded, p + (n - rest), rest * sizeof *p);                                                \
            TM_PASTE(norm_##order##_rows_, name)(state, padded, 1);                                          \
        }                                                                                                    \
    }
#define TM_NORM_BLOCKS(name, store)                                                                          \
    TM_NORM_BLOCK(2, name, store)                                                                            \
    TM_NORM_BLOCK(1, name, store)                                                                            \
    TM_NORM_BLOCK(inf, name, store)

#define TM_TEMPLATE "norm_float.h"
#include "each_float.h"
#undef TM_TEMPLATE
#define TM_TEMPLATE "norm_integer.h"
#include "each_integer.h"
#undef TM_TEMPLATE

#if defined(__AVX512BW__)
#    include "tm_halves.h"

#    include "norm_halves.h"
#endif

static void norm_scaled_f64(tm_norm_state *state, const void *data, size_t n, double factor) {
    const double *p = data;
    const tm_int64 *bits = data;
    double sumsq[TM_LANES];
    memcpy(sumsq, state->lane, sizeof sumsq);
    for (; n > 0; p += TM_LANES, bits += TM_LANES) {
        size_t width = n < TM_LANES ? n : TM_LANES;
        for (size_t l = 0; l < width; l++) {
            double x = (bits[l] & INT64_MAX) < INT64_C(0x7ff0000000000000) ? p[l] * factor : 0.0;
            sumsq[l] += x * x;
        }
        n -= width;
    }
    memcpy(state->lane, sumsq, sizeof sumsq);
}

static void norm_block_byte(tm_norm_state *state, const void *data, size_t n) {
    tm_bytes_count(&state->bytes, data, n);
}

static void norm_finish_lanes(tm_norm_state *state, const double *byte_values) {
    (void)byte_values;
    state->total = tm_lane_total(state->lane);
}

static void norm_finish_max(tm_norm_state *state, const double *byte_values) {
    (void)byte_values;
    state->total = state->max;
}

static void norm_2_finish_bytes(tm_norm_state *state, const double *byte_values) {
    uint32_t count[256];
    tm_bytes_merge(&state->bytes, count);
    for (int c = 0; c < 256; c++) { /* a code that did not occur must not bring its NaN in */
        double value = count[c] > 0 ? byte_values[c] : 0.0;
        state->lane[c % TM_LANES] += count[c] * (value * value);
    }
    norm_finish_lanes(state, byte_values);
}

static void norm_1_finish_bytes(tm_norm_state *state, const double *byte_values) {
    uint32_t count[256];
    tm_bytes_merge(&state->bytes, count);
    for (int c = 0; c < 256; c++) {
        double value = count[c] > 0 ? byte_values[c] : 0.0;
        state->lane[c % TM_LANES] += count[c] * __builtin_fabs(value);
    }
    norm_finish_lanes(state, byte_values);
}

static void norm_inf_finish_bytes(tm_norm_state *state, const double *byte_values) {
    uint32_t count[256];
    const tm_int64 *bits = (const tm_int64 *)byte_values;
    int64_t high = 0;
    tm_bytes_merge(&state->bytes, count);
    for (int c = 0; c < 256; c++) {
        int64_t magnitude = count[c] > 0 ? bits[c] & INT64_MAX : 0;
        high = magnitude > high ? magnitude : high;
    }
    memcpy(&state->total, &high, sizeof high);
    state->total = high > INT64_C(0x7ff0000000000000) ? (double)NAN : state->total;
}

#define TM_BLOCK_ROW(order, float_order)                                                                     \
    {[TM_F64] = norm_##float_order##_block_f64,                                                              \
     [TM_F32] = norm_##float_order##_block_f32,                                                              \
     [TM_F16] = norm_##float_order##_block_f16,                                                              \
     [TM_BF16] = norm_##float_order##_block_bf16,                                                            \
     [TM_I16] = norm_##order##_block_i16,                                                                    \
     [TM_I32] = norm_##order##_block_i32,                                                                    \
     [TM_I64] = norm_##order##_block_i64,                                                                    \
     [TM_U16] = norm_##order##_block_u16,                                                                    \
     [TM_U32] = norm_##order##_block_u32,                                                                    \
     [TM_U64] = norm_##order##_block_u64,                                                                    \
     TM_BYTE_ROWS(norm_block_byte)}
#define TM_FINISH_ROW(wide, byte)                                                                            \
    {[TM_F64] = (wide), [TM_F32] = (wide), [TM_F16] = (wide), [TM_BF16] = (wide),                            \
     [TM_I16] = (wide), [TM_I32] = (wide), [TM_I64] = (wide), [TM_U16] = (wide),                             \
     [TM_U32] = (wide), [TM_U64] = (wide), TM_BYTE_ROWS(byte)}

#define TM_NORM_KERNELS(float_2, float_1)                                                                    \
    {                                                                                                        \
        .block = {[TM_KERNEL_NORM_2] = TM_BLOCK_ROW(2, float_2),                                             \
                  [TM_KERNEL_NORM_1] = TM_BLOCK_ROW(1, float_1),                                             \
                  [TM_KERNEL_NORM_INF] = TM_BLOCK_ROW(inf, inf)},                                            \
        .finish = {[TM_KERNEL_NORM_2] = TM_FINISH_ROW(norm_finish_lanes, norm_2_finish_bytes),               \
                   [TM_KERNEL_NORM_1] = TM_FINISH_ROW(norm_finish_lanes, norm_1_finish_bytes),               \
                   [TM_KERNEL_NORM_INF] = TM_FINISH_ROW(norm_finish_max, norm_inf_finish_bytes)},            \
        .scaled_f64 = norm_scaled_f64,                                                                       \
    }

const tm_norm_kernels TM_TIERED(tm_norm_kernels_) = TM_NORM_KERNELS(2, 1);
#if defined(__AVX512BW__)
const tm_norm_kernels tm_norm_kernels_avx512_halves = TM_NORM_KERNELS(halves_2, halves_1);
#endif
