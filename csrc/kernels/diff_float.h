/* Template: differences of one float dtype (parameters: each_float.h). Nothing is masked: a NaN or infinite
 * difference stays in its lane, where the end of the block finds it. */

#define TM_ROWS TM_PASTE(diff_rows_, TM_NAME)
#define TM_NONFINITE TM_PASTE(diff_nonfinite_, TM_NAME)
#define TM_ROW TM_PASTE(diff_row_, TM_WIDE)

#if !defined(TM_DIFF_AVX512)
/* Whole rows; returns how many elements have equal bits. */
TM_NOINLINE int64_t TM_ROWS(tm_diff_state *state, const TM_STORE *now, const TM_STORE *before, size_t rows) {
    double diff[TM_LANES], weight[TM_LANES];
    int64_t same = TM_PASTE(tm_same_, TM_SINT)(now, before, TM_LANES * rows);
    memcpy(diff, state->diff, sizeof diff);
    memcpy(weight, state->weight, sizeof weight);
#    if TM_HALF
    _Alignas(64) float x_buffer[TM_GROUP_ROWS * TM_LANES], y_buffer[TM_GROUP_ROWS * TM_LANES];
    while (rows > 0) {
        size_t group = rows < TM_GROUP_ROWS ? rows : TM_GROUP_ROWS;
        const float *x = TM_PASTE(tm_group_, TM_NAME)(now, x_buffer, group);
        const float *y = TM_PASTE(tm_group_, TM_NAME)(before, y_buffer, group);
        for (size_t r = 0; r < group; r++, now += TM_LANES, before += TM_LANES) {
            tm_prefetch_near(now, TM_LANES * sizeof *now);
            tm_prefetch_near(before, TM_LANES * sizeof *before);
            TM_ROW(diff, weight, x + r * TM_LANES, y + r * TM_LANES);
        }
        rows -= group;
    }
#    else
    for (; rows > 0; rows--, now += TM_LANES, before += TM_LANES) {
        tm_prefetch_near(now, TM_LANES * sizeof *now);
        tm_prefetch_near(before, TM_LANES * sizeof *before);
        TM_ROW(diff, weight, now, before);
    }
#    endif
    memcpy(state->diff, diff, sizeof diff);
    memcpy(state->weight, weight, sizeof weight);
    return same;
}
#endif

/* Differences of one row that are not finite. */
TM_NOINLINE int64_t TM_NONFINITE(const TM_STORE *now, const TM_STORE *before) {
    TM_WIDE x_buffer[TM_LANES], y_buffer[TM_LANES];
    const TM_WIDE *x = TM_PASTE(tm_row_, TM_NAME)(now, x_buffer);
    const TM_WIDE *y = TM_PASTE(tm_row_, TM_NAME)(before, y_buffer);
    double difference[TM_LANES];
    for (int l = 0; l < TM_LANES; l++) {
        difference[l] = (double)x[l] - (double)y[l];
    }
    return diff_count_nonfinite(difference);
}

static void TM_PASTE(diff_block_, TM_NAME)(tm_diff_state *state, const void *now, const void *before,
                                           size_t n, const double *byte_values) {
    const TM_STORE *x = now, *y = before;
    TM_STORE x_padded[TM_LANES] = {0}, y_padded[TM_LANES] = {0};
    size_t rows = n / TM_LANES, rest = n % TM_LANES;
    (void)byte_values;
    state->n_same += TM_ROWS(state, x, y, rows);
    if (rest > 0) {
        memcpy(x_padded, x + rows * TM_LANES, rest * sizeof *x);
        memcpy(y_padded, y + rows * TM_LANES, rest * sizeof *y);
        state->n_same += TM_ROWS(state, x_padded, y_padded, 1) - (int64_t)(TM_LANES - rest);
    }
    if (diff_count_nonfinite(state->diff) > 0) {
        for (size_t r = 0; r < rows; r++) {
            state->n_nonfinite += TM_NONFINITE(x + r * TM_LANES, y + r * TM_LANES);
        }
        state->n_nonfinite += TM_NONFINITE(x_padded, y_padded);
    }
}

#undef TM_ROWS
#undef TM_NONFINITE
#undef TM_ROW
