/* What all kernels share: names, the lanes' tree, prefetch. Everything is static inline: a function of one
 * tier must never become the linker's copy for all. */
#ifndef TM_LANES_H
#define TM_LANES_H

#include "tm_kernels.h"

#include <string.h>

#ifndef TM_TIER
#    error "TM_TIER must name the tier: baseline, avx2 or avx512"
#endif

#define TM_PASTE_(a, b) a##b
#define TM_PASTE(a, b) TM_PASTE_(a, b)
#define TM_TIERED(prefix) TM_PASTE(prefix, TM_TIER)

/* Lane arrays stay in registers only if nothing takes their addresses: what a loop calls is inlined, and a
 * function with such a loop is not inlined itself (gcc 12 then keeps the lanes on the stack: float64
 * statistics in cache fall from 45 to 28 GB/s). */
#if defined(__GNUC__) || defined(__clang__)
#    define TM_INLINE static inline __attribute__((always_inline))
#    define TM_NOINLINE static __attribute__((noinline))
#else
#    define TM_INLINE static inline
#    define TM_NOINLINE static
#endif

/* Rows of TM_LANES elements between two looks at the lanes: a block that met a non-finite value is read again
 * from the cache, and 16-bit counters cannot overflow (512 * 32 < 2^15). */
#define TM_BLOCK_ROWS 512

/* The one order in which lanes are added: l and l + 16, then l and l + 8, ... */
TM_INLINE double tm_lane_total(const double *lane) {
    double half[TM_LANES / 2];
    for (int l = 0; l < TM_LANES / 2; l++) {
        half[l] = lane[l] + lane[l + TM_LANES / 2];
    }
    for (int width = TM_LANES / 4; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) {
            half[l] += half[l + width];
        }
    }
    return half[0];
}

/* acc + x * x for element types whose squares are exact in double: fusing cannot change a bit. */
#if defined(__FMA__)
#    define TM_ADD_EXACT_SQUARE(acc, x) __builtin_fma((x), (x), (acc))
#else
#    define TM_ADD_EXACT_SQUARE(acc, x) ((acc) + (x) * (x))
#endif
#define TM_ADD_ROUNDED_SQUARE(acc, x) ((acc) + (x) * (x))

/* Near lines into L1, far ones into L2 so that they cross into the next page before its turn. Addresses past
 * the end are harmless: a prefetch never faults. With TM_NO_PREFETCH nothing is: Zen 4's own prefetchers do
 * better (tm_halves.h). */
#define TM_PREFETCH_NEAR 3072
#define TM_PREFETCH_FAR 6144
#if defined(TM_NO_PREFETCH)
#    define TM_PREFETCH(address, level) ((void)(address))
#else
#    define TM_PREFETCH(address, level) __builtin_prefetch(address, 0, level)
#endif
TM_INLINE void tm_prefetch_near(const void *row, int bytes) {
    for (int offset = 0; offset < bytes; offset += 64) {
        TM_PREFETCH((const char *)row + TM_PREFETCH_NEAR + offset, 3);
    }
}

TM_INLINE void tm_prefetch_row(const void *row, int bytes) {
    tm_prefetch_near(row, bytes);
    for (int offset = 0; offset < bytes; offset += 64) {
        TM_PREFETCH((const char *)row + TM_PREFETCH_FAR + offset, 2);
    }
}

#endif
