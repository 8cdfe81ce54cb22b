/* Exponents and magnitudes counted: what the core and the kernels of the family agree on. */
#ifndef TM_HISTOGRAM_KERNELS_H
#define TM_HISTOGRAM_KERNELS_H

#include "../core/tm_dtype.h"

#include <stdint.h>

#define TM_EXPONENT_BINS 256 /* float32's exponent axis: bin = floor(log2 |x|) + 127, clipped */

typedef struct tm_exponent_counts {
    int64_t bin[TM_EXPONENT_BINS]; /* finite elements other than zero */
    int64_t zero, subnormal;       /* subnormal in the dtype of the memory; counted in their bins too */
    int64_t inf, nan;
} tm_exponent_counts;

typedef struct tm_histogram_kernels {
    /* Adds a block to the counts; NULL for integers of one byte, bool and e8m0fnu, which `bytes` counts. */
    void (*exponents[TM_DTYPE_COUNT])(tm_exponent_counts *counts, const void *data, size_t n);
    /* counts[i] += number of elements whose magnitude code is codes[i] or more; codes[i] == 0 stands for no
     * element. The magnitude code of a float is its bits without the sign (they order magnitudes, then
     * infinity, then NaN), that of an integer its magnitude. NULL for one-byte dtypes. */
    void (*at_least[TM_DTYPE_COUNT])(int64_t *counts, const uint64_t *codes, size_t count, const void *data,
                                     size_t n);
    /* How often each byte occurs, added to times[256]; n < 2^32. */
    void (*bytes)(int64_t *times, const void *data, size_t n);
} tm_histogram_kernels;

#endif
