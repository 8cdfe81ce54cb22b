/* Template: norms of one integer dtype (parameters: each_integer.h). */

#define TM_ROWS_2 TM_PASTE(norm_2_rows_, TM_NAME)
#define TM_ROWS_1 TM_PASTE(norm_1_rows_, TM_NAME)
#define TM_ROWS_INF TM_PASTE(norm_inf_rows_, TM_NAME)

TM_NOINLINE void TM_ROWS_2(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    double sumsq[TM_LANES];
    memcpy(sumsq, state->lane, sizeof sumsq);
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        for (int l = 0; l < TM_LANES; l++) {
            double wide = (double)p[l];
            sumsq[l] = TM_ADD_SQUARE(sumsq[l], wide);
        }
    }
    memcpy(state->lane, sumsq, sizeof sumsq);
}

TM_NOINLINE void TM_ROWS_1(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    double sum[TM_LANES];
    memcpy(sum, state->lane, sizeof sum);
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        for (int l = 0; l < TM_LANES; l++) {
            sum[l] += __builtin_fabs((double)p[l]);
        }
    }
    memcpy(state->lane, sum, sizeof sum);
}

/* Magnitudes are unsigned, so that the lowest signed value has one. */
TM_NOINLINE void TM_ROWS_INF(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    TM_UNSIGNED high[TM_LANES] = {0};
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        for (int l = 0; l < TM_LANES; l++) {
            TM_UNSIGNED magnitude = (TM_UNSIGNED)p[l];
#if TM_SIGNED
            magnitude = p[l] < 0 ? (TM_UNSIGNED)(0U - magnitude) : magnitude;
#endif
            high[l] = magnitude > high[l] ? magnitude : high[l];
        }
    }
    for (int l = 0; l < TM_LANES; l++) {
        state->max = (double)high[l] > state->max ? (double)high[l] : state->max;
    }
}

TM_NORM_BLOCKS(TM_NAME, TM_STORE)

#undef TM_ROWS_2
#undef TM_ROWS_1
#undef TM_ROWS_INF
