/* Template: norms of one float dtype (parameters: each_float.h). Nothing is masked: squares and magnitudes
 * are not negative, so a NaN or infinity stays in its lane, and the lanes' tree lets NaN win over infinity,
 * as torch does. */

#define TM_ROWS_2 TM_PASTE(norm_2_rows_, TM_NAME)
#define TM_ROWS_1 TM_PASTE(norm_1_rows_, TM_NAME)
#define TM_ROWS_INF TM_PASTE(norm_inf_rows_, TM_NAME)
#define TM_ROW TM_PASTE(tm_row_, TM_NAME)

static void TM_ROWS_2(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    double sumsq[TM_LANES];
    TM_WIDE buffer[TM_LANES];
    memcpy(sumsq, state->lane, sizeof sumsq);
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        const TM_WIDE *x = TM_ROW(p, buffer);
        for (int l = 0; l < TM_LANES; l++) {
            double wide = x[l];
            sumsq[l] = TM_ADD_SQUARE(sumsq[l], wide);
        }
    }
    memcpy(state->lane, sumsq, sizeof sumsq);
}

static void TM_ROWS_1(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    double sum[TM_LANES];
    TM_WIDE buffer[TM_LANES];
    memcpy(sum, state->lane, sizeof sum);
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        const TM_WIDE *x = TM_ROW(p, buffer);
        for (int l = 0; l < TM_LANES; l++) {
            sum[l] += __builtin_fabs((double)x[l]);
        }
    }
    memcpy(state->lane, sum, sizeof sum);
}

/* The largest magnitude as a signed integer of the stored type: beyond infinity it is a NaN. */
static void TM_ROWS_INF(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    TM_SINT high[TM_LANES] = {0};
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        const TM_SINT *bits = (const TM_SINT *)p;
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        for (int l = 0; l < TM_LANES; l++) {
            TM_SINT magnitude = (TM_SINT)(bits[l] & TM_SABS);
            high[l] = magnitude > high[l] ? magnitude : high[l];
        }
    }
    for (int l = 1; l < TM_LANES; l++) {
        high[0] = high[l] > high[0] ? high[l] : high[0];
    }
    if (high[0] > TM_SINF) {
        state->max = NAN;
    } else {
        TM_STORE row[TM_LANES] = {0};
        TM_WIDE buffer[TM_LANES];
        memcpy(row, high, sizeof *row);
        double largest = TM_ROW(row, buffer)[0];
        state->max = largest > state->max ? largest : state->max; /* false while max is NaN: NaN stays */
    }
}

TM_NORM_BLOCKS(TM_NAME, TM_STORE)

#undef TM_ROWS_2
#undef TM_ROWS_1
#undef TM_ROWS_INF
#undef TM_ROW
