/* Template: norms of one float dtype (parameters: each_float.h). Nothing is masked: squares and magnitudes
 * are not negative, so a NaN or infinity stays in its lane, and the lanes' tree lets NaN win over infinity,
 * as torch does. */

#define TM_ROWS_2 TM_PASTE(norm_2_rows_, TM_NAME)
#define TM_ROWS_1 TM_PASTE(norm_1_rows_, TM_NAME)
#define TM_ROWS_INF TM_PASTE(norm_inf_rows_, TM_NAME)
#define TM_ROW TM_PASTE(tm_row_, TM_NAME)

#if TM_HALF
#    define TM_SUM_ROWS(lane, row_function)                                                                  \
        _Alignas(64) float buffer[TM_GROUP_ROWS * TM_LANES];                                                 \
        while (rows > 0) {                                                                                   \
            size_t group = rows < TM_GROUP_ROWS ? rows : TM_GROUP_ROWS;                                      \
            const float *x = TM_PASTE(tm_group_, TM_NAME)(p, buffer, group);                                 \
            for (size_t r = 0; r < group; r++, p += TM_LANES, x += TM_LANES) {                               \
                tm_prefetch_row(p, TM_LANES * sizeof *p);                                                    \
                row_function(lane, x);                                                                       \
            }                                                                                                \
            rows -= group;                                                                                   \
        }
#else
#    define TM_SUM_ROWS(lane, row_function)                                                                  \
        for (size_t r = 0; r < rows; r++, p += TM_LANES) {                                                   \
            tm_prefetch_row(p, TM_LANES * sizeof *p);                                                        \
            row_function(lane, p);                                                                           \
        }
#endif

TM_NOINLINE void TM_ROWS_2(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    double sumsq[TM_LANES];
    memcpy(sumsq, state->lane, sizeof sumsq);
    TM_SUM_ROWS(sumsq, TM_PASTE(tm_squares_row_, TM_WIDE))
    memcpy(state->lane, sumsq, sizeof sumsq);
}

TM_NOINLINE void TM_ROWS_1(tm_norm_state *state, const TM_STORE *p, size_t rows) {
    double sum[TM_LANES];
    memcpy(sum, state->lane, sizeof sum);
    TM_SUM_ROWS(sum, TM_PASTE(tm_magnitudes_row_, TM_WIDE))
    memcpy(state->lane, sum, sizeof sum);
}

/* The largest magnitude as a signed integer of the stored type: beyond infinity it is a NaN. */
TM_NOINLINE void TM_ROWS_INF(tm_norm_state *state, const TM_STORE *p, size_t rows) {
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

#undef TM_SUM_ROWS
#undef TM_ROWS_2
#undef TM_ROWS_1
#undef TM_ROWS_INF
#undef TM_ROW
