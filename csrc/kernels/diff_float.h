/* Template: differences of one float dtype (parameters: each_float.h). Nothing is masked: a NaN or infinite
 * difference stays in its lane, where the end of a few rows finds it. */

#define TM_ROWS TM_PASTE(diff_rows_, TM_NAME)
#define TM_NONFINITE TM_PASTE(diff_nonfinite_, TM_NAME)
#define TM_TAKE TM_PASTE(diff_take_, TM_NAME)
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

#if !defined(TM_DIFF_AVX512) || !TM_HALF
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

/* Whole rows, counted and copied as many at a time as L1 still holds. */
static void TM_TAKE(tm_diff_state *state, const TM_STORE *now, const TM_STORE *before, TM_STORE *to,
                    size_t rows) {
    const size_t room = (to != NULL ? DIFF_STORE_BYTES : DIFF_BYTES) / (TM_LANES * sizeof *now);
    while (rows > 0) {
        size_t some = rows < room ? rows : room;
        state->n_same += TM_ROWS(state, now, before, some);
        if (diff_count_nonfinite(state->diff) > 0) {
            for (size_t r = 0; r < some; r++) {
                state->n_nonfinite += TM_NONFINITE(now + r * TM_LANES, before + r * TM_LANES);
            }
        }
        if (to != NULL) {
            memcpy(to, now, some * TM_LANES * sizeof *now);
            to += some * TM_LANES;
        }
        now += some * TM_LANES;
        before += some * TM_LANES;
        rows -= some;
    }
}
#endif

/* Some elements, at most a row, beginning with lane `first`. */
static void TM_PASTE(diff_part_, TM_NAME)(tm_diff_state *state, const TM_STORE *now, const TM_STORE *before,
                                          TM_STORE *to, size_t first, size_t n) {
    TM_STORE x[TM_LANES] = {0}, y[TM_LANES] = {0};
    memcpy(x + first, now, n * sizeof *now);
    memcpy(y + first, before, n * sizeof *before);
    TM_TAKE(state, x, y, NULL, 1);
    state->n_same -= (int64_t)(TM_LANES - n);
    if (to != NULL) {
        memcpy(to, now, n * sizeof *now);
    }
}

static void TM_PASTE(diff_block_, TM_NAME)(tm_diff_state *state, const void *now, const void *before,
                                           void *to, size_t n, const double *byte_values) {
    const TM_STORE *x = now, *y = before;
    TM_STORE *out = to;
    size_t head = diff_head(now, before, n, sizeof *x), rows = (n - head) / TM_LANES;
    size_t done = head + rows * TM_LANES;
    (void)byte_values;
    if (head > 0) {
        diff_turn(state, head);
        TM_PASTE(diff_part_, TM_NAME)(state, x, y, out, TM_LANES - head, head);
    }
    TM_TAKE(state, x + head, y + head, out != NULL ? out + head : NULL, rows);
    if (n > done) {
        TM_PASTE(diff_part_, TM_NAME)(state, x + done, y + done, out != NULL ? out + done : NULL, 0,
                                      n - done);
    }
    if (head > 0) {
        diff_turn(state, TM_LANES - head);
    }
}

#undef TM_ROWS
#undef TM_NONFINITE
#undef TM_TAKE
#undef TM_ROW
