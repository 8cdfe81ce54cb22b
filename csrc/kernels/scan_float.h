/* Template: search in one float dtype (parameters: each_float.h). Reads the bits only, four rows at a time.
 */

static size_t TM_PASTE(scan_, TM_NAME)(const void *data, size_t n) {
    const TM_SINT *p = data;
    size_t i = 0;
    for (; n - i >= 4 * TM_LANES; i += 4 * TM_LANES) {
        TM_SINT high[TM_LANES] = {0};
        tm_prefetch_row(p + i, 4 * TM_LANES * sizeof *p);
        for (size_t row = i; row < i + 4 * TM_LANES; row += TM_LANES) {
            for (int l = 0; l < TM_LANES; l++) {
                TM_SINT magnitude = (TM_SINT)(p[row + (size_t)l] & TM_SABS);
                high[l] = magnitude > high[l] ? magnitude : high[l];
            }
        }
        TM_SINT any = 0;
        for (int l = 0; l < TM_LANES; l++) {
            any = (TM_SINT)(any | (high[l] >= TM_SINF));
        }
        if (any) {
            break;
        }
    }
    while (i < n && (p[i] & TM_SABS) < TM_SINF) {
        i++;
    }
    return i;
}
