/* Rows of TM_LANES elements for processors that run a 512-bit operation as two halves (Zen 4). A long vector
 * saves nothing there but instructions, and converting to double costs more: four floats in memory take one
 * operation, eight take four, two of them shuffles. So lanes are eight vectors of four.
 *
 * Nothing is prefetched: the processor's own prefetchers do better (Zen 4 from memory, GB/s with prefetching
 * as in tm_lanes.h and without: float32 norm 33 and 37, statistics 31 and 35; with 4 KiB pages 27 and 30). */
#ifndef TM_HALVES_H
#define TM_HALVES_H

#include "tm_widen.h"

#define TM_PARTS 8

typedef struct tm_parts {
    __m256d part[TM_PARTS];
} tm_parts;

/* How lanes lie in the parts. bfloat16 has two orders, because a shift makes floats of the elements at even
 * places and a mask of those at odd ones: of 16 elements the even ones come first. */
TM_INLINE void tm_parts_load(tm_parts *parts, const double *lanes, int even_odd) {
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    double ordered[TM_LANES];
    for (int l = 0; l < TM_LANES; l += 16) {
        const __m512d low = _mm512_loadu_pd(lanes + l), high = _mm512_loadu_pd(lanes + l + 8);
        _mm512_storeu_pd(ordered + l, even_odd ? _mm512_permutex2var_pd(low, even, high) : low);
        _mm512_storeu_pd(ordered + l + 8, even_odd ? _mm512_permutex2var_pd(low, odd, high) : high);
    }
    for (int i = 0; i < TM_PARTS; i++) {
        parts->part[i] = _mm256_loadu_pd(ordered + 4 * i);
    }
}

TM_INLINE void tm_parts_store(double *lanes, const tm_parts *parts, int even_odd) {
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    double ordered[TM_LANES];
    for (int i = 0; i < TM_PARTS; i++) {
        _mm256_storeu_pd(ordered + 4 * i, parts->part[i]);
    }
    for (int l = 0; l < TM_LANES; l += 16) {
        const __m512d first = _mm512_loadu_pd(ordered + l), second = _mm512_loadu_pd(ordered + l + 8);
        _mm512_storeu_pd(lanes + l, even_odd ? _mm512_permutex2var_pd(first, low, second) : first);
        _mm512_storeu_pd(lanes + l + 8, even_odd ? _mm512_permutex2var_pd(first, high, second) : second);
    }
}

TM_INLINE __m256d tm_part_of_row(const float *row, int i) {
    return _mm256_cvtps_pd(_mm_loadu_ps(row + 4 * i));
}

/* 16-bit elements go through a ring of rows of floats in L1: widened so many rows ahead of their turn that
 * they have left the store buffer, as loading from there is slow (bfloat16 norm, cycles a row: 13, and 7 by
 * way of the ring; whole vectors in registers 8). */
#define TM_RING_AHEAD 8
#define TM_RING_ROWS 16

TM_INLINE float *tm_ring_row(float *ring, size_t row) {
    return ring + row % TM_RING_ROWS * TM_LANES;
}

#define TM_EVEN_ODD_f16 0
TM_INLINE void tm_ring_widen_f16(float *row, const uint16_t *p) {
    for (int l = 0; l < TM_LANES; l += 8) {
        _mm256_store_ps(row + l, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + l))));
    }
}

/* Loads of 16 bytes: NumPy's large arrays begin 16 bytes behind a cache line, and longer ones cross it (norm
 * from memory there: 24 and 29 GB/s). */
#define TM_EVEN_ODD_bf16 1
TM_INLINE void tm_ring_widen_bf16(float *row, const uint16_t *p) {
    for (int l = 0; l < TM_LANES; l += 16) {
        const __m128i *half = (const __m128i *)(const void *)(p + l);
        const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(half));
        const __m256i pairs = _mm256_inserti128_si256(low, _mm_loadu_si128(half + 1), 1);
        const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(INT32_C(-0x10000)));
        _mm256_store_ps(row + l, _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
        _mm256_store_ps(row + l + 8, _mm256_castsi256_ps(odd));
    }
}

/* Does `add(row of floats, row of elements)` for each row. */
#define TM_RING_LOOP(name, p, rows, add)                                                                     \
    do {                                                                                                     \
        _Alignas(64) float ring[TM_RING_ROWS * TM_LANES];                                                    \
        const size_t ahead = (rows) < TM_RING_AHEAD ? (rows) : TM_RING_AHEAD;                                \
        size_t r = 0;                                                                                        \
        for (; r < ahead; r++) {                                                                             \
            tm_ring_widen_##name(tm_ring_row(ring, r), (p) + r * TM_LANES);                                  \
        }                                                                                                    \
        for (r = 0; r + ahead < (rows); r++) {                                                               \
            tm_ring_widen_##name(tm_ring_row(ring, r + ahead), (p) + (r + ahead) * TM_LANES);                \
            add(tm_ring_row(ring, r), (p) + r * TM_LANES);                                                   \
        }                                                                                                    \
        for (; r < (rows); r++) {                                                                            \
            add(tm_ring_row(ring, r), (p) + r * TM_LANES);                                                   \
        }                                                                                                    \
    } while (0)

#endif
