/* Statistics for processors that run 512-bit operations as two halves (tm_halves.h): the plain loops of
 * stats_float.h with the same arithmetic on the same lanes. Extremes come from the elements' bits, because
 * integer operations run on all units and comparisons of floats only on those that add and convert. */

typedef struct halves_sums {
    tm_parts sum, sumsq;
} halves_sums;

TM_INLINE void halves_load(halves_sums *sums, const tm_stats_state *state, int even_odd) {
    tm_parts_load(&sums->sum, state->sum, even_odd);
    tm_parts_load(&sums->sumsq, state->sumsq, even_odd);
}

/* Returns 0, leaving the state alone, if a lane of squares is not finite. */
TM_INLINE int halves_store(tm_stats_state *state, const halves_sums *sums, int even_odd) {
    double sumsq[TM_LANES];
    tm_parts_store(sumsq, &sums->sumsq, even_odd);
    if (!tm_lanes_finite(sumsq)) {
        return 0;
    }
    memcpy(state->sumsq, sumsq, sizeof sumsq);
    tm_parts_store(state->sum, &sums->sum, even_odd);
    return 1;
}

/* x * 1 + sum is sum + x, on the units that multiply. */
TM_INLINE void halves_add(halves_sums *sums, const float *row) {
    const __m256d one = _mm256_set1_pd(1);
    for (int i = 0; i < TM_PARTS; i++) {
        const __m256d x = tm_part_of_row(row, i), sum = sums->sum.part[i];
        sums->sum.part[i] = i % 2 ? _mm256_add_pd(sum, x) : _mm256_fmadd_pd(x, one, sum);
        sums->sumsq.part[i] = _mm256_fmadd_pd(x, x, sums->sumsq.part[i]);
    }
}

TM_NOINLINE int stats_halves_plain_f32(tm_stats_state *state, const float *p, size_t rows) {
    __m512i least = _mm512_set1_epi32(-1), most = _mm512_setzero_si512();
    __m512i signed_least = _mm512_set1_epi32(INT32_MAX), signed_most = _mm512_set1_epi32(INT32_MIN);
    const float *start = p;
    halves_sums sums;
    halves_load(&sums, state, 0);
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        halves_add(&sums, p);
        for (int l = 0; l < TM_LANES; l += 16) {
            const __m512i bits = _mm512_loadu_si512(p + l);
            least = _mm512_min_epu32(least, bits);
            most = _mm512_max_epu32(most, bits);
            signed_least = _mm512_min_epi32(signed_least, bits);
            signed_most = _mm512_max_epi32(signed_most, bits);
        }
    }
    if (!halves_store(state, &sums, 0)) {
        return 0;
    }
    /* As in stats_float.h for 16-bit floats; the signed minimum only tells of a -0. */
    const uint32_t low = _mm512_reduce_min_epu32(least), high = _mm512_reduce_max_epu32(most);
    const int32_t signed_high = _mm512_reduce_max_epi32(signed_most);
    const uint32_t end_bits[2] = {high >> 31 ? high : low, signed_high < 0 ? low : (uint32_t)signed_high};
    float ends[2];
    memcpy(ends, end_bits, sizeof ends);
    tm_stats_extremes(state, ends[0], ends[1]);
    if (low == 0 || _mm512_reduce_min_epi32(signed_least) == INT32_MIN) {
        state->n_zero += stats_count_zeros_f32(start, rows);
    }
    return 1;
}

/* Few accumulators of extremes: with more of them fewer registers are left for rows on their way from memory
 * (30 instead of 35 GB/s). */
TM_NOINLINE int stats_halves_plain_f64(tm_stats_state *state, const double *p, size_t rows) {
    enum { VECTORS = TM_LANES / 8 };
    __m512d sum[VECTORS], sumsq[VECTORS], nearest[2];
    __m512i most[2], signed_most[2];
    const double *start = p;
    double squares[TM_LANES];
    for (int i = 0; i < VECTORS; i++) {
        sum[i] = _mm512_loadu_pd(state->sum + 8 * i);
        sumsq[i] = _mm512_loadu_pd(state->sumsq + 8 * i);
    }
    for (int i = 0; i < 2; i++) {
        nearest[i] = _mm512_set1_pd(INFINITY);
        most[i] = _mm512_setzero_si512();
        signed_most[i] = _mm512_set1_epi64(INT64_MIN);
    }
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        for (int i = 0; i < VECTORS; i++) {
            const __m512d x = _mm512_loadu_pd(p + 8 * i);
            const __m512i bits = _mm512_castpd_si512(x);
            sum[i] = _mm512_add_pd(sum[i], x);
            sumsq[i] = _mm512_add_pd(sumsq[i], _mm512_mul_pd(x, x));
            most[i % 2] = _mm512_max_epu64(most[i % 2], bits);
            signed_most[i % 2] = _mm512_max_epi64(signed_most[i % 2], bits);
            nearest[i % 2] = _mm512_range_pd(nearest[i % 2], x, 10); /* tm_rows.h */
        }
    }
    for (int i = 0; i < VECTORS; i++) {
        _mm512_storeu_pd(squares + 8 * i, sumsq[i]);
    }
    if (!tm_lanes_finite(squares)) {
        return 0;
    }
    memcpy(state->sumsq, squares, sizeof squares);
    for (int i = 0; i < VECTORS; i++) {
        _mm512_storeu_pd(state->sum + 8 * i, sum[i]);
    }
    const double least = _mm512_reduce_min_pd(_mm512_min_pd(nearest[0], nearest[1]));
    const uint64_t high = _mm512_reduce_max_epu64(_mm512_max_epu64(most[0], most[1]));
    const int64_t signed_high = _mm512_reduce_max_epi64(_mm512_max_epi64(signed_most[0], signed_most[1]));
    double ends[2];
    memcpy(&ends[0], &high, sizeof high);
    memcpy(&ends[1], &signed_high, sizeof signed_high);
    tm_stats_extremes(state, high >> 63 ? ends[0] : least, signed_high < 0 ? -least : ends[1]);
    state->n_zero += least == 0 ? stats_count_zeros_f64(start, rows) : 0;
    return 1;
}

typedef struct halves_half {
    halves_sums sums;
    __m512i least, most, signed_most;
    int64_t zeros;
} halves_half;

TM_INLINE void halves_add_half(halves_half *half, const float *row, const uint16_t *p) {
    const __m512i bits = _mm512_loadu_si512(p);
    halves_add(&half->sums, row);
    half->least = _mm512_min_epu16(half->least, bits);
    half->most = _mm512_max_epu16(half->most, bits);
    half->signed_most = _mm512_max_epi16(half->signed_most, bits);
    half->zeros += __builtin_popcount(_mm512_testn_epi16_mask(bits, _mm512_set1_epi16(INT16_MAX)));
}

#define TM_HALVES_PLAIN(name)                                                                                \
    TM_NOINLINE int stats_halves_plain_##name(tm_stats_state *state, const uint16_t *p, size_t rows) {       \
        stats_extremes_##name extremes = {.zero = {0}};                                                      \
        halves_half half = {.least = _mm512_set1_epi16(-1),                                                  \
                            .most = _mm512_setzero_si512(),                                                  \
                            .signed_most = _mm512_set1_epi16(INT16_MIN)};                                    \
        halves_load(&half.sums, state, TM_EVEN_ODD_##name);                                                  \
        TM_RING_LOOP(name, p, rows, TM_HALVES_ADD);                                                          \
        if (!halves_store(state, &half.sums, TM_EVEN_ODD_##name)) {                                          \
            return 0;                                                                                        \
        }                                                                                                    \
        _mm512_storeu_si512(extremes.low, half.least);                                                       \
        _mm512_storeu_si512(extremes.high, half.most);                                                       \
        _mm512_storeu_si512(extremes.signed_high, half.signed_most);                                         \
        stats_extremes_end_##name(&extremes, state, p, rows);                                                \
        state->n_zero += half.zeros;                                                                         \
        return 1;                                                                                            \
    }
#define TM_HALVES_ADD(row, p) halves_add_half(&half, row, p)
TM_HALVES_PLAIN(f16)
TM_HALVES_PLAIN(bf16)
#undef TM_HALVES_ADD
#undef TM_HALVES_PLAIN

/* A block leaves room in L1 for what its end needs: from memory, blocks of 28 KiB were read at 36 GB/s, of
 * 32 KiB, the whole of Zen 4's L1, at 27 (float32). */
#define TM_HALVES_BLOCK_BYTES 24576
#define TM_HALVES_BLOCK(name, store)                                                                         \
    TM_STATS_BLOCK(stats_halves_block_, name, store, stats_halves_plain_##name,                              \
                   TM_HALVES_BLOCK_BYTES / (TM_LANES * sizeof(store)))
TM_HALVES_BLOCK(f64, double)
TM_HALVES_BLOCK(f32, float)
TM_HALVES_BLOCK(f16, uint16_t)
TM_HALVES_BLOCK(bf16, uint16_t)
#undef TM_HALVES_BLOCK
