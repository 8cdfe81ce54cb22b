/* Rows of the AVX-512 tier, by intrinsics: elements stay in registers from the load to the lanes, and equal
 * bits are counted on the way. Lanes, their order and their arithmetic are those of diff_float.h. In cache
 * (two times 64 KiB, one Zen 4 core), what gcc makes of diff_float.h against this, GB/s of both arrays:
 * float64 59 and 88, float32 36 and 45, bfloat16 and float16 15 and 21. */

typedef struct diff_lanes {
    __m512d diff[4], weight[4];
} diff_lanes;

TM_INLINE void diff_add_double(diff_lanes *lanes, int l, __m512d now, __m512d before) {
    __m512d difference = _mm512_sub_pd(now, before);
    lanes->diff[l] = _mm512_add_pd(lanes->diff[l], _mm512_mul_pd(difference, difference));
    lanes->weight[l] = _mm512_add_pd(lanes->weight[l], _mm512_mul_pd(before, before));
}

/* now * 1 - before is now - before: the conversions crowd the units that add (float32 42 and 45 GB/s). */
TM_INLINE void diff_add_float(diff_lanes *lanes, int l, __m256 now, __m256 before) {
    __m512d wide = _mm512_cvtps_pd(before);
    __m512d difference = _mm512_fmsub_pd(_mm512_cvtps_pd(now), _mm512_set1_pd(1), wide);
    lanes->diff[l] = _mm512_add_pd(lanes->diff[l], _mm512_mul_pd(difference, difference));
    lanes->weight[l] = _mm512_fmadd_pd(wide, wide, lanes->weight[l]);
}

TM_INLINE void diff_row_f64(diff_lanes *lanes, const double *now, const double *before) {
    for (int l = 0; l < 4; l++) {
        diff_add_double(lanes, l, _mm512_loadu_pd(now + 8 * l), _mm512_loadu_pd(before + 8 * l));
    }
}

TM_INLINE void diff_row_f32(diff_lanes *lanes, const float *now, const float *before) {
    for (int l = 0; l < 4; l++) {
        diff_add_float(lanes, l, _mm256_loadu_ps(now + 8 * l), _mm256_loadu_ps(before + 8 * l));
    }
}

TM_INLINE void diff_row_f16(diff_lanes *lanes, const uint16_t *now, const uint16_t *before) {
    for (int l = 0; l < 4; l++) {
        __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(now + 8 * l));
        __m128i y = _mm_loadu_si128((const __m128i *)(const void *)(before + 8 * l));
        diff_add_float(lanes, l, _mm256_cvtph_ps(x), _mm256_cvtph_ps(y));
    }
}

/* Of 16 elements those at even places make eight floats by a shift, those at odd places by a mask: lanes in
 * registers are 0 2 .. 14, 1 3 .. 15, 16 18 .. 30, 17 19 .. 31. */
TM_INLINE __m256 diff_even(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

TM_INLINE __m256 diff_odd(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(INT32_C(-0x10000))));
}

TM_INLINE void diff_row_bf16(diff_lanes *lanes, const uint16_t *now, const uint16_t *before) {
    for (int half = 0; half < 2; half++) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(now + 16 * half));
        __m256i y = _mm256_loadu_si256((const __m256i *)(const void *)(before + 16 * half));
        diff_add_float(lanes, 2 * half, diff_even(x), diff_even(y));
        diff_add_float(lanes, 2 * half + 1, diff_odd(x), diff_odd(y));
    }
}

TM_INLINE void diff_load(__m512d lanes[4], const double *from, int even_odd) {
    const __m512i even = _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14);
    const __m512i odd = _mm512_setr_epi64(1, 3, 5, 7, 9, 11, 13, 15);
    for (int l = 0; l < 4; l += 2) {
        __m512d low = _mm512_loadu_pd(from + 8 * l), high = _mm512_loadu_pd(from + 8 * l + 8);
        lanes[l] = even_odd ? _mm512_permutex2var_pd(low, even, high) : low;
        lanes[l + 1] = even_odd ? _mm512_permutex2var_pd(low, odd, high) : high;
    }
}

TM_INLINE void diff_store(double *to, const __m512d lanes[4], int even_odd) {
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    for (int l = 0; l < 4; l += 2) {
        __m512d a = lanes[l], b = lanes[l + 1];
        _mm512_storeu_pd(to + 8 * l, even_odd ? _mm512_permutex2var_pd(a, low, b) : a);
        _mm512_storeu_pd(to + 8 * l + 8, even_odd ? _mm512_permutex2var_pd(a, high, b) : b);
    }
}

/* Counters as wide as the elements: a block has at most TM_BLOCK_ROWS rows. */
#define TM_DIFF_ROWS(name, store, bits, even_odd)                                                            \
    TM_NOINLINE int64_t diff_rows_##name(tm_diff_state *state, const store *now, const store *before,        \
                                         size_t rows) {                                                      \
        const __m512i one = _mm512_set1_epi##bits(1);                                                        \
        __m512i same = _mm512_setzero_si512();                                                               \
        int##bits##_t counts[512 / bits];                                                                    \
        int64_t total = 0;                                                                                   \
        diff_lanes lanes;                                                                                    \
        diff_load(lanes.diff, state->diff, even_odd);                                                        \
        diff_load(lanes.weight, state->weight, even_odd);                                                    \
        for (; rows > 0; rows--, now += TM_LANES, before += TM_LANES) {                                      \
            tm_prefetch_near(now, TM_LANES * sizeof *now);                                                   \
            tm_prefetch_near(before, TM_LANES * sizeof *before);                                             \
            diff_row_##name(&lanes, now, before);                                                            \
            for (int l = 0; l < TM_LANES; l += 512 / bits) {                                                 \
                __m512i x = _mm512_loadu_si512(now + l), y = _mm512_loadu_si512(before + l);                 \
                same = _mm512_mask_add_epi##bits(same, _mm512_cmpeq_epi##bits##_mask(x, y), same, one);      \
            }                                                                                                \
        }                                                                                                    \
        diff_store(state->diff, lanes.diff, even_odd);                                                       \
        diff_store(state->weight, lanes.weight, even_odd);                                                   \
        _mm512_storeu_si512(counts, same);                                                                   \
        for (int l = 0; l < 512 / bits; l++) {                                                               \
            total += counts[l];                                                                              \
        }                                                                                                    \
        return total;                                                                                        \
    }
TM_DIFF_ROWS(f64, double, 64, 0)
TM_DIFF_ROWS(f32, float, 32, 0)
TM_DIFF_ROWS(f16, uint16_t, 16, 0)
TM_DIFF_ROWS(bf16, uint16_t, 16, 1)
#undef TM_DIFF_ROWS
