/* The hot rows: what one row of TM_LANES elements adds to sums and extremes. Plain C, except where a number
 * says that the compiler needs help. */
#ifndef TM_ROWS_H
#define TM_ROWS_H

#include "tm_widen.h"

/* AVX-512 intrinsics, because gcc 12 makes doubles of a vector of 16 floats by extracting halves (three
 * instructions for 8, one from memory), counts zeros in three instructions and does not know vrange. In cache
 * (64 KiB, one Sapphire Rapids core), plain C against this: float32 statistics 32 and 39 GB/s, float64 55
 * and 64. */
#if defined(__AVX512F__)
TM_INLINE void tm_sums_row_float(double *sum, double *sumsq, const float *x) {
    for (int l = 0; l < TM_LANES; l += 8) {
        __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(x + l));
        _mm512_storeu_pd(sum + l, _mm512_add_pd(_mm512_loadu_pd(sum + l), wide));
        _mm512_storeu_pd(sumsq + l, _mm512_fmadd_pd(wide, wide, _mm512_loadu_pd(sumsq + l)));
    }
}

TM_INLINE void tm_squares_row_float(double *sumsq, const float *x) {
    for (int l = 0; l < TM_LANES; l += 8) {
        __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(x + l));
        _mm512_storeu_pd(sumsq + l, _mm512_fmadd_pd(wide, wide, _mm512_loadu_pd(sumsq + l)));
    }
}

TM_INLINE void tm_magnitudes_row_float(double *sum, const float *x) {
    for (int l = 0; l < TM_LANES; l += 8) {
        __m512d magnitude = _mm512_abs_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x + l)));
        _mm512_storeu_pd(sum + l, _mm512_add_pd(_mm512_loadu_pd(sum + l), magnitude));
    }
}

/* range with selector 2: whichever has the smaller magnitude, without its sign. */
TM_INLINE void tm_nearest_row_float(float *nearest, const float *x) {
    for (int l = 0; l < TM_LANES; l += 16) {
        _mm512_storeu_ps(nearest + l,
                         _mm512_range_ps(_mm512_loadu_ps(nearest + l), _mm512_loadu_ps(x + l), 10));
    }
}

TM_INLINE void tm_nearest_row_double(double *nearest, const double *x) {
    for (int l = 0; l < TM_LANES; l += 8) {
        _mm512_storeu_pd(nearest + l,
                         _mm512_range_pd(_mm512_loadu_pd(nearest + l), _mm512_loadu_pd(x + l), 10));
    }
}

TM_INLINE void tm_zeros_row_half(int16_t *zero, const uint16_t *p) {
    __m512i count = _mm512_loadu_si512(zero);
    __mmask32 is_zero = _mm512_testn_epi16_mask(_mm512_loadu_si512(p), _mm512_set1_epi16(INT16_MAX));
    _mm512_storeu_si512(zero, _mm512_mask_sub_epi16(count, is_zero, count, _mm512_set1_epi16(-1)));
}
#else
TM_INLINE void tm_sums_row_float(double *sum, double *sumsq, const float *x) {
    for (int l = 0; l < TM_LANES; l++) {
        double wide = x[l];
        sum[l] += wide;
        sumsq[l] = TM_ADD_EXACT_SQUARE(sumsq[l], wide);
    }
}

TM_INLINE void tm_squares_row_float(double *sumsq, const float *x) {
    for (int l = 0; l < TM_LANES; l++) {
        double wide = x[l];
        sumsq[l] = TM_ADD_EXACT_SQUARE(sumsq[l], wide);
    }
}

TM_INLINE void tm_magnitudes_row_float(double *sum, const float *x) {
    for (int l = 0; l < TM_LANES; l++) {
        sum[l] += (double)__builtin_fabsf(x[l]);
    }
}

TM_INLINE void tm_nearest_row_float(float *nearest, const float *x) {
    for (int l = 0; l < TM_LANES; l++) {
        float magnitude = __builtin_fabsf(x[l]);
        nearest[l] = magnitude < nearest[l] ? magnitude : nearest[l];
    }
}

TM_INLINE void tm_nearest_row_double(double *nearest, const double *x) {
    for (int l = 0; l < TM_LANES; l++) {
        double magnitude = __builtin_fabs(x[l]);
        nearest[l] = magnitude < nearest[l] ? magnitude : nearest[l];
    }
}

TM_INLINE void tm_zeros_row_half(int16_t *zero, const uint16_t *p) {
    for (int l = 0; l < TM_LANES; l++) {
        zero[l] = (int16_t)(zero[l] + ((p[l] & INT16_MAX) == 0));
    }
}
#endif

/* 16-bit elements are widened group by group into a buffer that stays in L1, so that the loop over doubles
 * finds floats in memory and has all registers for lanes. float64 and float32 rows are read where they are.
 */
#define TM_GROUP_ROWS 32

#define TM_DEFINE_GROUP(name)                                                                                \
    TM_NOINLINE const float *tm_group_##name(const uint16_t *p, float *buffer, size_t rows) {                \
        for (size_t r = 0; r < rows; r++) {                                                                  \
            tm_row_##name(p + r * TM_LANES, buffer + r * TM_LANES);                                          \
        }                                                                                                    \
        return buffer;                                                                                       \
    }
TM_DEFINE_GROUP(f16)
TM_DEFINE_GROUP(bf16)
#undef TM_DEFINE_GROUP

/* float64 squares are rounded: no fusing. */
TM_INLINE void tm_sums_row_double(double *sum, double *sumsq, const double *x) {
    for (int l = 0; l < TM_LANES; l++) {
        sum[l] += x[l];
        sumsq[l] = TM_ADD_ROUNDED_SQUARE(sumsq[l], x[l]);
    }
}

TM_INLINE void tm_squares_row_double(double *sumsq, const double *x) {
    for (int l = 0; l < TM_LANES; l++) {
        sumsq[l] = TM_ADD_ROUNDED_SQUARE(sumsq[l], x[l]);
    }
}

TM_INLINE void tm_magnitudes_row_double(double *sum, const double *x) {
    for (int l = 0; l < TM_LANES; l++) {
        sum[l] += __builtin_fabs(x[l]);
    }
}

#endif
