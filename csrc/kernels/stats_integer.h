/* Template: statistics of one integer dtype (parameters: each_integer.h). */

#define TM_PLAIN TM_PASTE(stats_plain_, TM_NAME)

/* Sums run over `p`, extremes over `q`: the same rows, except that a last row is padded with zeros in the one
 * and with its first element in the other. Extremes are found as integers; the conversion keeps their order.
 */
TM_NOINLINE void TM_PLAIN(tm_stats_state *state, const TM_STORE *p, const TM_STORE *q, size_t rows) {
    double sum[TM_LANES], sumsq[TM_LANES];
    TM_STORE low[TM_LANES], high[TM_LANES];
    TM_COUNT zero[TM_LANES] = {0};

    memcpy(sum, state->sum, sizeof sum);
    memcpy(sumsq, state->sumsq, sizeof sumsq);
    memcpy(low, q, sizeof low);
    memcpy(high, q, sizeof high);
    for (size_t r = 0; r < rows; r++, p += TM_LANES, q += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        for (int l = 0; l < TM_LANES; l++) {
            double wide = (double)p[l];
            sum[l] += wide;
            sumsq[l] = TM_ADD_SQUARE(sumsq[l], wide);
        }
        for (int l = 0; l < TM_LANES; l++) {
            low[l] = q[l] < low[l] ? q[l] : low[l];
            high[l] = q[l] > high[l] ? q[l] : high[l];
            zero[l] = (TM_COUNT)(zero[l] + (p[l] == 0));
        }
    }
    memcpy(state->sum, sum, sizeof sum);
    memcpy(state->sumsq, sumsq, sizeof sumsq);
    TM_FOLD(low, <);
    TM_FOLD(high, >);
    tm_stats_extremes(state, (double)low[0], (double)high[0]);
    for (int l = 0; l < TM_LANES; l++) {
        state->n_zero += zero[l];
    }
}

static void TM_PASTE(stats_block_, TM_NAME)(tm_stats_state *state, const void *data, size_t n) {
    const TM_STORE *p = data;
    state->seen += (int64_t)n;
    while (n >= TM_LANES) {
        size_t rows = n / TM_LANES < TM_BLOCK_ROWS ? n / TM_LANES : TM_BLOCK_ROWS;
        TM_PLAIN(state, p, p, rows);
        p += rows * TM_LANES;
        n -= rows * TM_LANES;
    }
    if (n > 0) {
        TM_STORE zeros[TM_LANES] = {0}, repeated[TM_LANES];
        memcpy(zeros, p, n * sizeof *p);
        for (size_t l = 0; l < TM_LANES; l++) {
            repeated[l] = l < n ? p[l] : p[0];
        }
        TM_PLAIN(state, zeros, repeated, 1);
        state->n_zero -= (int64_t)(TM_LANES - n);
    }
}

#undef TM_PLAIN
