/* Blocks as doubles or floats, exactly (contract: tm_kernels.h): for kernels that need one wide type for any
 * input. Kernels that are bound by memory read their dtypes directly instead. */
#include "tm_bytes.h"
#include "tm_widen.h"

#include <string.h>

static void widen_copy_f64(double *out, const void *data, size_t n, const double *byte_values) {
    (void)byte_values;
    memcpy(out, data, n * sizeof *out);
}

static void widen_copy_f32(float *out, const void *data, size_t n, const double *byte_values) {
    (void)byte_values;
    memcpy(out, data, n * sizeof *out);
}

#define TM_WIDEN_PLAIN(suffix, store, wide_name, wide)                                                       \
    static void widen_##suffix##_to_##wide_name(wide *out, const void *data, size_t n,                       \
                                                const double *byte_values) {                                 \
        const store *p = data;                                                                               \
        (void)byte_values;                                                                                   \
        for (size_t i = 0; i < n; i++) {                                                                     \
            out[i] = (wide)p[i];                                                                             \
        }                                                                                                    \
    }
TM_WIDEN_PLAIN(f32, float, f64, double)
TM_WIDEN_PLAIN(i16, int16_t, f64, double)
TM_WIDEN_PLAIN(i32, int32_t, f64, double)
TM_WIDEN_PLAIN(i64, int64_t, f64, double)
TM_WIDEN_PLAIN(u16, uint16_t, f64, double)
TM_WIDEN_PLAIN(u32, uint32_t, f64, double)
TM_WIDEN_PLAIN(u64, uint64_t, f64, double)
TM_WIDEN_PLAIN(i16, int16_t, f32, float)
TM_WIDEN_PLAIN(u16, uint16_t, f32, float)
#undef TM_WIDEN_PLAIN

#define TM_WIDEN_HALF(name)                                                                                  \
    static void widen_##name##_to_f32(float *out, const void *data, size_t n, const double *byte_values) {   \
        const uint16_t *p = data;                                                                            \
        (void)byte_values;                                                                                   \
        for (; n >= TM_LANES; n -= TM_LANES, p += TM_LANES, out += TM_LANES) {                               \
            tm_row_##name(p, out);                                                                           \
        }                                                                                                    \
        if (n > 0) {                                                                                         \
            uint16_t padded[TM_LANES] = {0};                                                                 \
            float row[TM_LANES];                                                                             \
            memcpy(padded, p, n * sizeof *p);                                                                \
            tm_row_##name(padded, row);                                                                      \
            memcpy(out, row, n * sizeof *out);                                                               \
        }                                                                                                    \
    }                                                                                                        \
    static void widen_##name##_to_f64(double *out, const void *data, size_t n, const double *byte_values) {  \
        const uint16_t *p = data;                                                                            \
        float row[TM_LANES];                                                                                 \
        for (; n > 0; p += TM_LANES, out += TM_LANES) {                                                      \
            size_t width = n < TM_LANES ? n : TM_LANES;                                                      \
            widen_##name##_to_f32(row, p, width, byte_values);                                               \
            for (size_t l = 0; l < width; l++) {                                                             \
                out[l] = row[l];                                                                             \
            }                                                                                                \
            n -= width;                                                                                      \
        }                                                                                                    \
    }
TM_WIDEN_HALF(f16)
TM_WIDEN_HALF(bf16)
#undef TM_WIDEN_HALF

static void widen_byte_to_f64(double *out, const void *data, size_t n, const double *byte_values) {
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) {
        out[i] = byte_values[p[i]];
    }
}

static void widen_byte_to_f32(float *out, const void *data, size_t n, const double *byte_values) {
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) {
        out[i] = (float)byte_values[p[i]];
    }
}

const tm_widen_kernels TM_TIERED(tm_widen_kernels_) = {
    .to_f64 = {[TM_F64] = widen_copy_f64,
               [TM_F32] = widen_f32_to_f64,
               [TM_F16] = widen_f16_to_f64,
               [TM_BF16] = widen_bf16_to_f64,
               [TM_I16] = widen_i16_to_f64,
               [TM_I32] = widen_i32_to_f64,
               [TM_I64] = widen_i64_to_f64,
               [TM_U16] = widen_u16_to_f64,
               [TM_U32] = widen_u32_to_f64,
               [TM_U64] = widen_u64_to_f64,
               TM_BYTE_ROWS(widen_byte_to_f64)},
    .to_f32 = {[TM_F32] = widen_copy_f32,
               [TM_F16] = widen_f16_to_f32,
               [TM_BF16] = widen_bf16_to_f32,
               [TM_I16] = widen_i16_to_f32,
               [TM_U16] = widen_u16_to_f32,
               TM_BYTE_ROWS(widen_byte_to_f32)},
};
