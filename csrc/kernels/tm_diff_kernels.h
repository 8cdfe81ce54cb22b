/* Differences of two lists of tensors (contract of chunks, blocks and lanes: tm_kernels.h). */
#ifndef TM_DIFF_KERNELS_H
#define TM_DIFF_KERNELS_H

#include "../core/tm_dtype.h"

#include <stddef.h>
#include <stdint.h>

typedef struct tm_diff_state {
    double diff[32], weight[32]; /* sums of squares of now - before and of before, by lane */
    int64_t n_same;              /* elements whose bits are equal */
    int64_t n_nonfinite;         /* differences that are NaN or infinite */
    double total_diff, total_weight;
} tm_diff_state;

typedef struct tm_diff_kernels {
    /* Up to a whole chunk. to: where `now` is copied to, `before` itself perhaps, or NULL. One-byte dtypes
     * look their values up. */
    void (*block[TM_DTYPE_COUNT])(tm_diff_state *state, const void *now, const void *before, void *to,
                                  size_t n, const double *byte_values);
    void (*finish)(tm_diff_state *state);
} tm_diff_kernels;

#endif
