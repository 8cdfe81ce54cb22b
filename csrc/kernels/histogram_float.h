/* Template: exponents and magnitudes of one float dtype (parameters: each_float.h). */

#define TM_MAGNITUDE TM_PASTE(magnitude_, TM_NAME)
#define TM_CODE TM_SINT
#define TM_ELEMENT TM_SINT
#define TM_BINS TM_PASTE(bins_, TM_NAME)
#define TM_COUNT_BELOW TM_PASTE(count_below_, TM_NAME)

TM_INLINE TM_SINT TM_MAGNITUDE(TM_SINT bits) {
    return (TM_SINT)(bits & TM_SABS);
}

/* Elements whose magnitude code is below `code`. */
TM_NOINLINE int64_t TM_COUNT_BELOW(const TM_SINT *p, size_t n, TM_SINT code) {
    TM_SINT count[TM_LANES] = {0};
    int64_t total = 0;
    size_t i = 0;
    for (; n - i >= TM_LANES; i += TM_LANES) {
        for (int l = 0; l < TM_LANES; l++) {
            count[l] = (TM_SINT)(count[l] + (TM_MAGNITUDE(p[i + (size_t)l]) < code));
        }
    }
    for (; i < n; i++) {
        total += TM_MAGNITUDE(p[i]) < code;
    }
    for (int l = 0; l < TM_LANES; l++) {
        total += count[l];
    }
    return total;
}

/* Bytes 0 and 255 stand for zero and the non-finite values too, which few groups have: a second look tells
 * them apart. */
TM_NOINLINE void TM_PASTE(tell_apart_, TM_NAME)(tm_exponent_counts *counts, const TM_SINT *bits, size_t n) {
    const int64_t zero = TM_COUNT_BELOW(bits, n, 1), finite = TM_COUNT_BELOW(bits, n, TM_SINF);
    counts->zero += zero;
    counts->bin[0] -= zero;
    if (finite < (int64_t)n) {
        const int64_t not_nan = TM_COUNT_BELOW(bits, n, TM_SINF + 1);
        counts->inf += not_nan - finite;
        counts->nan += (int64_t)n - not_nan;
        counts->bin[255] -= (int64_t)n - finite;
    }
    /* The code of the least normal number is the exponent's lowest bit. */
    counts->subnormal += TM_COUNT_BELOW(bits, n, TM_SINF & -TM_SINF) - zero;
}

static void TM_PASTE(exponents_, TM_NAME)(tm_exponent_counts *counts, const void *data, size_t n) {
    _Alignas(64) uint8_t bins[TM_TALLY_GROUP];
    const TM_STORE *p = data;
    while (n > 0) {
        const size_t group = n < TM_TALLY_GROUP ? n : TM_TALLY_GROUP;
        const int64_t edges = counts->bin[0] + counts->bin[255];
        TM_BINS(bins, p, group);
        tm_tally_group(counts->bin, bins, group, p + group);
        if (counts->bin[0] + counts->bin[255] > edges) {
            TM_PASTE(tell_apart_, TM_NAME)(counts, (const TM_SINT *)p, group);
        }
        p += group;
        n -= group;
    }
}

#include "histogram_at_least.h"

#undef TM_MAGNITUDE
#undef TM_CODE
#undef TM_ELEMENT
#undef TM_BINS
#undef TM_COUNT_BELOW
