/* The kernel families: one line each. Enum, names, table and declarations are made from this list. */
#ifndef TM_FAMILIES_H
#define TM_FAMILIES_H

/* X(ENUM, name): the family has a `tm_<name>_kernels` struct (tm_kernels.h or a header that it includes) and,
 * in each tier, a table `tm_<name>_kernels_<tier>`. */
#define TM_FAMILIES(X)                                                                                       \
    X(STATS, stats)                                                                                          \
    X(NORM, norm)                                                                                            \
    X(SCAN, scan)                                                                                            \
    X(READ, read)                                                                                            \
    X(WIDEN, widen)                                                                                          \
    X(COMPARE, compare)                                                                                      \
    X(MOE, moe)                                                                                              \
    X(DIFF, diff)                                                                                            \
    X(FINGERPRINT, fingerprint)                                                                              \
    X(HISTOGRAM, histogram)                                                                                  \
    X(ATTENTION, attention)                                                                                  \
    X(SIGN, sign)                                                                                            \
    X(SPECTRAL, spectral)

#endif
