/* Template: exponents and magnitudes of one integer dtype (parameters: each_integer.h). */

#define TM_MAGNITUDE TM_PASTE(magnitude_, TM_NAME)
#define TM_CODE TM_UNSIGNED
#define TM_ELEMENT TM_STORE

TM_INLINE TM_UNSIGNED TM_MAGNITUDE(TM_STORE x) {
#if TM_SIGNED
    return (TM_UNSIGNED)(x < 0 ? (TM_UNSIGNED)(0 - (TM_UNSIGNED)x) : (TM_UNSIGNED)x);
#else
    return x;
#endif
}

/* Without the bits that follow a set bit the conversion cannot round up to the next power of two, and the
 * exponent is that of the highest bit. Zero becomes byte 0. */
static void TM_PASTE(exponents_, TM_NAME)(tm_exponent_counts *counts, const void *data, size_t n) {
    _Alignas(64) uint8_t bins[TM_TALLY_GROUP];
    const int64_t before = counts->bin[0];
    const TM_STORE *p = data;
    while (n > 0) {
        const size_t group = n < TM_TALLY_GROUP ? n : TM_TALLY_GROUP;
        for (size_t i = 0; i < group; i++) {
            const TM_UNSIGNED magnitude = TM_MAGNITUDE(p[i]);
            const double power = (double)(TM_UNSIGNED)(magnitude & (TM_UNSIGNED) ~(magnitude >> 1));
            bins[i] = tm_bin_of_double(power);
        }
        tm_tally_group(counts->bin, bins, group, p + group);
        p += group;
        n -= group;
    }
    counts->zero += counts->bin[0] - before;
    counts->bin[0] = before;
}

#include "histogram_at_least.h"

#undef TM_MAGNITUDE
#undef TM_CODE
#undef TM_ELEMENT
