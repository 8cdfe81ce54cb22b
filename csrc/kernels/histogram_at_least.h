/* Template: elements from each of a list of magnitudes on. Parameters: TM_NAME, TM_ELEMENT (type that the
 * memory is read as), TM_CODE (integer of its size that holds every code) and TM_MAGNITUDE, element to code.
 *
 * A group stays in L1. Its least and its largest code decide most thresholds; the others take a look each. */

#define TM_COUNT_FROM TM_PASTE(count_from_, TM_NAME)

TM_NOINLINE int64_t TM_COUNT_FROM(const TM_ELEMENT *p, size_t rows, TM_CODE code) {
    TM_CODE count[TM_LANES] = {0};
    int64_t total = 0;
    for (size_t r = 0; r < rows; r++, p += TM_LANES) {
        for (int l = 0; l < TM_LANES; l++) {
            count[l] = (TM_CODE)(count[l] + (TM_MAGNITUDE(p[l]) >= code));
        }
    }
    for (int l = 0; l < TM_LANES; l++) {
        total += (int64_t)count[l];
    }
    return total;
}

static void TM_PASTE(at_least_, TM_NAME)(int64_t *counts, const uint64_t *codes, size_t count,
                                         const void *data, size_t n) {
    const TM_ELEMENT *p = data;
    while (n > 0) {
        const size_t group = n < TM_AT_LEAST_GROUP ? n : TM_AT_LEAST_GROUP;
        const size_t rows = group / TM_LANES, tail = rows * TM_LANES;
        TM_CODE low[TM_LANES], high[TM_LANES] = {0};
        for (int l = 0; l < TM_LANES; l++) {
            low[l] = TM_MAGNITUDE(p[0]);
        }
        for (size_t r = 0; r < rows; r++) {
            const TM_ELEMENT *row = p + r * TM_LANES;
            tm_prefetch_row(row, TM_LANES * sizeof *row);
            for (int l = 0; l < TM_LANES; l++) {
                const TM_CODE code = TM_MAGNITUDE(row[l]);
                low[l] = code < low[l] ? code : low[l];
                high[l] = code > high[l] ? code : high[l];
            }
        }
        for (size_t i = tail; i < group; i++) {
            const TM_CODE code = TM_MAGNITUDE(p[i]);
            low[0] = code < low[0] ? code : low[0];
            high[0] = code > high[0] ? code : high[0];
        }
        for (int l = 1; l < TM_LANES; l++) {
            low[0] = low[l] < low[0] ? low[l] : low[0];
            high[0] = high[l] > high[0] ? high[l] : high[0];
        }
        for (size_t t = 0; t < count; t++) {
            if (codes[t] == 0 || codes[t] > (uint64_t)high[0]) {
                continue;
            }
            if (codes[t] <= (uint64_t)low[0]) {
                counts[t] += (int64_t)group;
                continue;
            }
            counts[t] += TM_COUNT_FROM(p, rows, (TM_CODE)codes[t]);
            for (size_t i = tail; i < group; i++) {
                counts[t] += TM_MAGNITUDE(p[i]) >= (TM_CODE)codes[t];
            }
        }
        p += group;
        n -= group;
    }
}

#undef TM_COUNT_FROM
