/* Rows of the AVX-512 tier, by intrinsics. Lanes, their order and their arithmetic are those of diff_float.h.
 *
 * A Zen 4 core has two pipes that multiply and two that add and convert, each half of a 512-bit register
 * wide. Eight doubles made of a register of floats cost four half-width operations, made of floats in memory,
 * four at a time, two. So narrow rows are added as 256-bit doubles from memory, and 16-bit elements are first
 * widened into a buffer in L1. float64 rows, which only wait for memory, are not prefetched: two streams that
 * the hardware follows by itself are read at 33 GB/s, with prefetches at any distance at 25 to 31. float32
 * rows have twice the arithmetic a byte: 25 GB/s without, 31 with. */

typedef struct diff_lanes {
    __m256d diff[8], weight[8];
} diff_lanes;

TM_INLINE void diff_lanes_load(diff_lanes *lanes, const tm_diff_state *state) {
    for (int l = 0; l < 8; l++) {
        lanes->diff[l] = _mm256_loadu_pd(state->diff + 4 * l);
        lanes->weight[l] = _mm256_loadu_pd(state->weight + 4 * l);
    }
}

TM_INLINE void diff_lanes_store(tm_diff_state *state, const diff_lanes *lanes) {
    for (int l = 0; l < 8; l++) {
        _mm256_storeu_pd(state->diff + 4 * l, lanes->diff[l]);
        _mm256_storeu_pd(state->weight + 4 * l, lanes->weight[l]);
    }
}

/* 1 * a - b and 1 * a + b are rounded once, as a - b and a + b: half of them go to the pipes that multiply,
 * so that all four have the same work. */
TM_INLINE void diff_lanes_add(diff_lanes *lanes, const float *now, const float *before) {
    const __m256d one = _mm256_set1_pd(1);
    for (int l = 0; l < 8; l++) {
        __m256d y = _mm256_cvtps_pd(_mm_loadu_ps(before + 4 * l));
        __m256d x = _mm256_cvtps_pd(_mm_loadu_ps(now + 4 * l));
        __m256d difference = l % 2 ? _mm256_sub_pd(x, y) : _mm256_fmsub_pd(x, one, y);
        __m256d square = _mm256_mul_pd(difference, difference);
        lanes->diff[l] =
            l % 2 ? _mm256_fmadd_pd(square, one, lanes->diff[l]) : _mm256_add_pd(lanes->diff[l], square);
        lanes->weight[l] = _mm256_fmadd_pd(y, y, lanes->weight[l]);
    }
}

/* Squares are not negative: their sum is finite only if every lane is (narrow elements cannot overflow it).
 */
TM_INLINE int diff_lanes_finite(const diff_lanes *lanes) {
    __m256d sum = lanes->diff[0];
    for (int l = 1; l < 8; l++) {
        sum = _mm256_add_pd(sum, lanes->diff[l]);
    }
    return _mm256_cmp_pd_mask(sum, _mm256_set1_pd(__builtin_inf()), _CMP_LT_OQ) == 0xf;
}

TM_NOINLINE int64_t diff_rows_f64(tm_diff_state *state, const double *now, const double *before,
                                  size_t rows) {
    const __m512i one = _mm512_set1_epi64(1);
    __m512i same = _mm512_setzero_si512();
    __m512d diff[4], weight[4];
    for (int l = 0; l < 4; l++) {
        diff[l] = _mm512_loadu_pd(state->diff + 8 * l);
        weight[l] = _mm512_loadu_pd(state->weight + 8 * l);
    }
    for (; rows > 0; rows--, now += TM_LANES, before += TM_LANES) {
        for (int l = 0; l < 4; l++) {
            __m512d x = _mm512_loadu_pd(now + 8 * l), y = _mm512_loadu_pd(before + 8 * l);
            __m512d difference = _mm512_sub_pd(x, y);
            __mmask8 equal = _mm512_cmpeq_epi64_mask(_mm512_castpd_si512(x), _mm512_castpd_si512(y));
            diff[l] = _mm512_add_pd(diff[l], _mm512_mul_pd(difference, difference));
            weight[l] = _mm512_add_pd(weight[l], _mm512_mul_pd(y, y));
            same = _mm512_mask_add_epi64(same, equal, same, one);
        }
    }
    for (int l = 0; l < 4; l++) {
        _mm512_storeu_pd(state->diff + 8 * l, diff[l]);
        _mm512_storeu_pd(state->weight + 8 * l, weight[l]);
    }
    return _mm512_reduce_add_epi64(same);
}

TM_NOINLINE int64_t diff_rows_f32(tm_diff_state *state, const float *now, const float *before, size_t rows) {
    const __m512i one = _mm512_set1_epi32(1);
    __m512i same = _mm512_setzero_si512();
    diff_lanes lanes;
    diff_lanes_load(&lanes, state);
    for (; rows > 0; rows--, now += TM_LANES, before += TM_LANES) {
        for (int offset = 0; offset < TM_LANES * (int)sizeof *now; offset += 64) {
            __builtin_prefetch((const char *)now + 2048 + offset, 0, 3);
            __builtin_prefetch((const char *)before + 2048 + offset, 0, 3);
        }
        diff_lanes_add(&lanes, now, before);
        for (int l = 0; l < TM_LANES; l += 16) {
            __m512i x = _mm512_loadu_si512(now + l), y = _mm512_loadu_si512(before + l);
            same = _mm512_mask_add_epi32(same, _mm512_cmpeq_epi32_mask(x, y), same, one);
        }
    }
    diff_lanes_store(state, &lanes);
    return _mm512_reduce_add_epi32(same);
}

/* From memory eight elements are one operation, sixteen of a register four. */
TM_INLINE void diff_widen_f16(float *out, const uint16_t *row, __m512i elements) {
    (void)elements;
    for (int l = 0; l < TM_LANES; l += 8) {
        _mm256_store_ps(out + l, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(row + l))));
    }
}

/* Word permutations that fill the upper halves of floats, as in tm_row_bf16. */
TM_INLINE void diff_widen_bf16(float *out, const uint16_t *row, __m512i elements) {
    const __m512i low =
        _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16));
    (void)row;
    _mm512_store_si512(out, _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, low, elements));
    _mm512_store_si512(out + 16, _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, high, elements));
}

/* Rows are widened into a ring, some rows ahead of those that are added, so that the loads find finished
 * stores and all units have work at any time (one loop after the other: bfloat16 in cache 26 -> 21 GB/s). An
 * element is copied to `to` when it is widened; the ring keeps the rows of a group until its lanes are looked
 * at. */
enum { DIFF_AHEAD = 4, DIFF_GROUP = 32, DIFF_RING = 64 };

/* The arithmetic of 16-bit rows fills the window in which loads run ahead (from memory without prefetches 19
 * GB/s, with either one 21, with both 23). */
TM_INLINE void diff_prefetch(const void *row) {
    __builtin_prefetch((const char *)row + 2048, 0, 3);
    __builtin_prefetch((const char *)row + 8192, 0, 2);
}

/* Differences of a row of the ring that are not finite. */
TM_NOINLINE int64_t diff_count_floats(const float *x, const float *y) {
    double difference[TM_LANES];
    for (int l = 0; l < TM_LANES; l++) {
        difference[l] = (double)x[l] - (double)y[l];
    }
    return diff_count_nonfinite(difference);
}

#define TM_DIFF_RING(name)                                                                                   \
    TM_INLINE int64_t diff_ring_##name(float *x_slot, float *y_slot, const uint16_t *now,                    \
                                       const uint16_t *before, uint16_t *to) {                               \
        __m512i x = _mm512_loadu_si512(now), y = _mm512_loadu_si512(before);                                 \
        diff_prefetch(now);                                                                                  \
        diff_prefetch(before);                                                                               \
        diff_widen_##name(x_slot, now, x);                                                                   \
        diff_widen_##name(y_slot, before, y);                                                                \
        if (to != NULL) {                                                                                    \
            _mm512_storeu_si512(to, x);                                                                      \
        }                                                                                                    \
        return __builtin_popcount(_mm512_cmpeq_epi16_mask(x, y));                                            \
    }                                                                                                        \
                                                                                                             \
    TM_NOINLINE void diff_take_##name(tm_diff_state *state, const uint16_t *now, const uint16_t *before,     \
                                      uint16_t *to, size_t rows) {                                           \
        _Alignas(64) float x[DIFF_RING][TM_LANES], y[DIFF_RING][TM_LANES];                                   \
        size_t widened = 0, added = 0;                                                                       \
        int64_t same = 0;                                                                                    \
        diff_lanes lanes;                                                                                    \
        diff_lanes_load(&lanes, state);                                                                      \
        while (added < rows) {                                                                               \
            size_t first = added, end = rows - added < DIFF_GROUP ? rows : added + DIFF_GROUP;               \
            size_t ahead = rows - added < DIFF_GROUP + DIFF_AHEAD ? rows : end + DIFF_AHEAD;                 \
            for (; widened < ahead; widened++) {                                                             \
                size_t slot = widened % DIFF_RING;                                                           \
                if (widened >= added + DIFF_AHEAD) {                                                         \
                    diff_lanes_add(&lanes, x[added % DIFF_RING], y[added % DIFF_RING]);                      \
                    added++;                                                                                 \
                }                                                                                            \
                same += diff_ring_##name(x[slot], y[slot], now, before, to);                                 \
                now += TM_LANES;                                                                             \
                before += TM_LANES;                                                                          \
                to += to != NULL ? TM_LANES : 0;                                                             \
            }                                                                                                \
            for (; added < end; added++) {                                                                   \
                diff_lanes_add(&lanes, x[added % DIFF_RING], y[added % DIFF_RING]);                          \
            }                                                                                                \
            if (!diff_lanes_finite(&lanes)) {                                                                \
                for (size_t r = first; r < end; r++) {                                                       \
                    state->n_nonfinite += diff_count_floats(x[r % DIFF_RING], y[r % DIFF_RING]);             \
                }                                                                                            \
            }                                                                                                \
        }                                                                                                    \
        diff_lanes_store(state, &lanes);                                                                     \
        state->n_same += same;                                                                               \
    }
TM_DIFF_RING(f16)
TM_DIFF_RING(bf16)
#undef TM_DIFF_RING
