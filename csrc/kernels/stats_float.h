/* Template: statistics of one float dtype (parameters: each_float.h). */

#define TM_PLAIN TM_PASTE(stats_plain_, TM_NAME)
#define TM_MASKED TM_PASTE(stats_masked_, TM_NAME)
#define TM_ROW TM_PASTE(tm_row_, TM_NAME)
#define TM_EXTREMES TM_PASTE(stats_extremes_, TM_NAME)
#define TM_EXTREMES_BEGIN TM_PASTE(stats_extremes_begin_, TM_NAME)
#define TM_EXTREMES_ROW TM_PASTE(stats_extremes_row_, TM_NAME)
#define TM_COUNT_ZEROS TM_PASTE(stats_count_zeros_, TM_NAME)
#define TM_EXTREMES_END TM_PASTE(stats_extremes_end_, TM_NAME)

#if TM_HALF
/* Extremes of 16-bit floats from their bits, half as many vectors as widened: as unsigned numbers the
 * negative ones come last, as signed ones first, and both grow with the magnitude. Hence the largest is the
 * signed maximum, or the unsigned minimum if all are negative; the smallest is the unsigned maximum if one is
 * negative, else the unsigned minimum. Non-finite ones don't get here. */
typedef struct TM_EXTREMES {
    uint16_t low[TM_LANES], high[TM_LANES];
    int16_t signed_high[TM_LANES], zero[TM_LANES];
} TM_EXTREMES;

TM_INLINE void TM_EXTREMES_BEGIN(TM_EXTREMES *extremes) {
    for (int l = 0; l < TM_LANES; l++) {
        extremes->low[l] = UINT16_MAX;
        extremes->high[l] = 0;
        extremes->signed_high[l] = INT16_MIN;
        extremes->zero[l] = 0;
    }
}

TM_INLINE void TM_EXTREMES_ROW(TM_EXTREMES *extremes, const TM_STORE *p) {
    const int16_t *bits = (const int16_t *)p;
    for (int l = 0; l < TM_LANES; l++) {
        extremes->low[l] = p[l] < extremes->low[l] ? p[l] : extremes->low[l];
        extremes->high[l] = p[l] > extremes->high[l] ? p[l] : extremes->high[l];
        extremes->signed_high[l] = bits[l] > extremes->signed_high[l] ? bits[l] : extremes->signed_high[l];
    }
    tm_zeros_row_half(extremes->zero, p);
}

TM_INLINE void TM_EXTREMES_END(TM_EXTREMES *extremes, tm_stats_state *state, const TM_STORE *start,
                               size_t rows) {
    (void)start, (void)rows;
    TM_STORE ends[TM_LANES] = {0};
    TM_WIDE buffer[TM_LANES];
    TM_FOLD(extremes->low, <);
    TM_FOLD(extremes->high, >);
    TM_FOLD(extremes->signed_high, >);
    TM_FOLD_SUM(extremes->zero);
    ends[0] = extremes->high[0] & 0x8000 ? extremes->high[0] : extremes->low[0];
    ends[1] = extremes->low[0] & 0x8000 ? extremes->low[0] : (TM_STORE)extremes->signed_high[0];
    const TM_WIDE *x = TM_ROW(ends, buffer);
    tm_stats_extremes(state, x[0], x[1]);
    state->n_zero += extremes->zero[0];
}
#else
/* `nearest` to zero tells whether a block has zeros; few blocks do, and those are counted in a second look:
 * one instruction an element less than counting always. */
typedef struct TM_EXTREMES {
    TM_WIDE low[TM_LANES], high[TM_LANES], nearest[TM_LANES];
} TM_EXTREMES;

TM_INLINE void TM_EXTREMES_BEGIN(TM_EXTREMES *extremes) {
    for (int l = 0; l < TM_LANES; l++) {
        extremes->low[l] = (TM_WIDE)INFINITY;
        extremes->high[l] = (TM_WIDE)-INFINITY;
        extremes->nearest[l] = (TM_WIDE)INFINITY;
    }
}

TM_INLINE void TM_EXTREMES_ROW(TM_EXTREMES *extremes, const TM_STORE *x) {
    for (int l = 0; l < TM_LANES; l++) {
        extremes->low[l] = x[l] < extremes->low[l] ? x[l] : extremes->low[l];
        extremes->high[l] = x[l] > extremes->high[l] ? x[l] : extremes->high[l];
    }
    TM_PASTE(tm_nearest_row_, TM_WIDE)(extremes->nearest, x);
}

TM_NOINLINE int64_t TM_COUNT_ZEROS(const TM_STORE *x, size_t rows) {
    TM_INT zero[TM_LANES] = {0};
    for (size_t r = 0; r < rows; r++, x += TM_LANES) {
        for (int l = 0; l < TM_LANES; l++) {
            zero[l] += x[l] == 0;
        }
    }
    TM_FOLD_SUM(zero);
    return zero[0];
}

TM_INLINE void TM_EXTREMES_END(TM_EXTREMES *extremes, tm_stats_state *state, const TM_STORE *start,
                               size_t rows) {
    TM_FOLD(extremes->low, <);
    TM_FOLD(extremes->high, >);
    TM_FOLD(extremes->nearest, <);
    tm_stats_extremes(state, extremes->low[0], extremes->high[0]);
    state->n_zero += extremes->nearest[0] == 0 ? TM_COUNT_ZEROS(start, rows) : 0;
}
#endif

/* All elements as they come. Returns 0, leaving the state alone, if a lane of squares is no longer finite:
 * squares are never negative, so an infinity or NaN cannot cancel out of its lane, and finite lanes prove
 * finite elements (for float64 an overflow looks the same and takes the masked loop too, which adds the same
 * values). The lanes are copied to locals so that the compiler may keep them in registers. */
TM_NOINLINE int TM_PLAIN(tm_stats_state *state, const TM_STORE *p, size_t rows) {
    double sum[TM_LANES], sumsq[TM_LANES];
    TM_EXTREMES extremes;
    const TM_STORE *start = p;
    size_t n_rows = rows;

    memcpy(sum, state->sum, sizeof sum);
    memcpy(sumsq, state->sumsq, sizeof sumsq);
    TM_EXTREMES_BEGIN(&extremes);
#if TM_HALF
    _Alignas(64) float buffer[TM_GROUP_ROWS * TM_LANES];
    while (rows > 0) {
        size_t group = rows < TM_GROUP_ROWS ? rows : TM_GROUP_ROWS;
        const float *x = TM_PASTE(tm_group_, TM_NAME)(p, buffer, group);
        rows -= group;
        for (size_t r = 0; r < group; r++, p += TM_LANES, x += TM_LANES) {
            tm_prefetch_row(
                p,
                TM_LANES * sizeof *p); /* also keeps gcc from jamming rows together, at a 5th of the speed */
            tm_sums_row_float(sum, sumsq, x);
            TM_EXTREMES_ROW(&extremes, p);
        }
    }
#else
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        TM_PASTE(tm_sums_row_, TM_WIDE)(sum, sumsq, p);
        TM_EXTREMES_ROW(&extremes, p);
    }
#endif
    if (!tm_lanes_finite(sumsq)) {
        return 0;
    }
    memcpy(state->sum, sum, sizeof sum);
    memcpy(state->sumsq, sumsq, sizeof sumsq);
    TM_EXTREMES_END(&extremes, state, start, n_rows);
    return 1;
}

/* Classifies every element by the bits of its magnitude. A non-finite one adds +0.0 to its lane, which
 * changes no bit of it: a lane starts at +0.0 and cannot become -0.0. `n` elements are real; the rest of the
 * last row is padding made of NaN. */
TM_NOINLINE void TM_MASKED(tm_stats_state *state, const TM_STORE *p, size_t n, size_t rows) {
    double sum[TM_LANES], sumsq[TM_LANES];
    TM_WIDE low[TM_LANES], high[TM_LANES];
    TM_INT zero[TM_LANES] = {0}, nan[TM_LANES] = {0}, posinf[TM_LANES] = {0}, neginf[TM_LANES] = {0};
    TM_WIDE buffer[TM_LANES], kept[TM_LANES];
    const TM_STORE *start = p;

    memcpy(sum, state->sum, sizeof sum);
    memcpy(sumsq, state->sumsq, sizeof sumsq);
    for (int l = 0; l < TM_LANES; l++) {
        low[l] = (TM_WIDE)INFINITY;
        high[l] = (TM_WIDE)-INFINITY;
    }
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        const TM_WIDE *x = TM_ROW(p, buffer);
        const TM_INT *bits = (const TM_INT *)x;
        for (int l = 0; l < TM_LANES; l++) {
            kept[l] = (bits[l] & TM_ABS) < TM_INF ? x[l] : 0;
        }
        TM_PASTE(tm_sums_row_, TM_WIDE)(sum, sumsq, kept);
        for (int l = 0; l < TM_LANES; l++) {
            TM_INT magnitude = bits[l] & TM_ABS;
            TM_WIDE above = magnitude < TM_INF ? x[l] : (TM_WIDE)INFINITY;
            TM_WIDE below = magnitude < TM_INF ? x[l] : (TM_WIDE)-INFINITY;
            low[l] = above < low[l] ? above : low[l];
            high[l] = below > high[l] ? below : high[l];
        }
        for (int l = 0; l < TM_LANES; l++) {
            TM_INT magnitude = bits[l] & TM_ABS;
            zero[l] += magnitude == 0;
            nan[l] += magnitude > TM_INF;
            posinf[l] += bits[l] == TM_INF;
            neginf[l] += magnitude == TM_INF && bits[l] < 0;
        }
    }
    memcpy(state->sum, sum, sizeof sum);
    memcpy(state->sumsq, sumsq, sizeof sumsq);
    TM_FOLD(low, <);
    TM_FOLD(high, >);
    TM_FOLD_SUM(zero);
    TM_FOLD_SUM(nan);
    TM_FOLD_SUM(posinf);
    TM_FOLD_SUM(neginf);
    tm_stats_extremes(state, low[0], high[0]);
    int64_t n_nan = nan[0] - (int64_t)(rows * TM_LANES - n);
    state->n_zero += zero[0];
    state->n_nan += n_nan;
    state->n_posinf += posinf[0];
    state->n_neginf += neginf[0];
    if (state->first_bad < 0 && n_nan + posinf[0] + neginf[0] > 0) {
        size_t i = 0;
        while ((((const TM_SINT *)start)[i] & TM_SABS) < TM_SINF) {
            i++;
        }
        state->first_bad = state->seen + (int64_t)i;
    }
}

TM_STATS_BLOCK(stats_block_, TM_NAME, TM_STORE, TM_PLAIN, TM_BLOCK_ROWS)

#undef TM_PLAIN
#undef TM_MASKED
#undef TM_ROW
#undef TM_EXTREMES
#undef TM_EXTREMES_BEGIN
#undef TM_EXTREMES_ROW
#undef TM_EXTREMES_END
#undef TM_COUNT_ZEROS
