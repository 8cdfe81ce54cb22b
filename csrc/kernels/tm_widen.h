/* Rows of TM_LANES float16 or bfloat16 elements as float, exactly, subnormals and non-finite values included.
 */
#ifndef TM_WIDEN_H
#define TM_WIDEN_H

#include "tm_lanes.h"

#if defined(__AVX512F__) || defined(__F16C__)
#    include <immintrin.h>
#endif

typedef int64_t __attribute__((may_alias)) tm_int64;
typedef int32_t __attribute__((may_alias)) tm_int32;
typedef uint32_t __attribute__((may_alias)) tm_bits32;

TM_INLINE const double *tm_row_f64(const double *p, double *buffer) {
    (void)buffer;
    return p;
}

TM_INLINE const float *tm_row_f32(const float *p, float *buffer) {
    (void)buffer;
    return p;
}

/* A bfloat16 is the upper half of its float. With AVX-512 one word permutation puts 16 of them there;
 * widening and shifting takes twice the instructions (bfloat16 statistics in cache: 16 -> 18 GB/s).
 */
TM_INLINE const float *tm_row_bf16(const uint16_t *p, float *buffer) {
#if defined(__AVX512BW__)
    __m512i row = _mm512_loadu_si512(p);
    for (int half = 0; half < 2; half++) {
        __m512i element =
            _mm512_add_epi32(_mm512_set1_epi32(half * TM_LANES / 2),
                             _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
        __m512i index = _mm512_slli_epi32(element, 16); /* its upper words choose, the lower ones become 0 */
        _mm512_storeu_si512(buffer + half * TM_LANES / 2,
                            _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, index, row));
    }
#else
    tm_bits32 *bits = (tm_bits32 *)buffer;
    for (int l = 0; l < TM_LANES; l++) {
        bits[l] = (uint32_t)p[l] << 16;
    }
#endif
    return buffer;
}

/* With F16C the conversion is one instruction for 8 or 16 elements; the compiler does not find it by itself.
 */
TM_INLINE const float *tm_row_f16(const uint16_t *p, float *buffer) {
#if defined(__AVX512F__)
    for (int l = 0; l < TM_LANES; l += 16) {
        _mm512_storeu_ps(buffer + l,
                         _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(p + l))));
    }
#elif defined(__F16C__)
    for (int l = 0; l < TM_LANES; l += 8) {
        _mm256_storeu_ps(buffer + l,
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + l))));
    }
#else
    tm_bits32 *bits = (tm_bits32 *)buffer;
    /* Exponent and mantissa move to float's places. A normal number gets the difference of the biases (112);
     * a subnormal one is read as 2^-14 * (1 + m / 1024), from which 2^-14 is taken away, exactly and without
     * a subnormal float; the exponent of non-finite ones becomes all ones. */
    for (int l = 0; l < TM_LANES; l++) {
        uint32_t magnitude = p[l] & UINT32_C(0x7fff);
        bits[l] = (magnitude << 13) + (magnitude < 0x400 ? UINT32_C(113) << 23 : UINT32_C(112) << 23);
    }
    float excess[TM_LANES];
    tm_bits32 *excess_bits = (tm_bits32 *)excess;
    for (int l = 0; l < TM_LANES; l++) { /* as bits: a choice between floats is not vectorised */
        excess_bits[l] = (p[l] & UINT32_C(0x7fff)) < 0x400 ? UINT32_C(113) << 23 : 0;
    }
    for (int l = 0; l < TM_LANES; l++) {
        buffer[l] -= excess[l];
    }
    for (int l = 0; l < TM_LANES; l++) {
        uint32_t magnitude = p[l] & UINT32_C(0x7fff);
        bits[l] |= (magnitude >= 0x7c00 ? UINT32_C(0x7f800000) : 0) | (p[l] & UINT32_C(0x8000)) << 16;
    }
#endif
    return buffer;
}

#endif
