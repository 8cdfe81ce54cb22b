/* Differences between two lists of tensors, with the second list optionally brought up to date. */
#ifndef TM_DIFF_H
#define TM_DIFF_H

#include "tm_status.h"
#include "tm_view.h"

#include <stddef.h>

typedef struct tm_difference {
    double norm; /* of tensor - previous: NaN if any difference is NaN, else inf if any is infinite */
    double previous_norm; /* of previous, by the same rule */
    int64_t n;            /* elements */
    int64_t n_same;       /* elements whose bits are equal */
    int64_t n_nonfinite;  /* differences that are NaN or infinite */
} tm_difference;

/* previous[i] has the dtype and the shape of views[i]. total: all pairs taken as one; per_tensor: [count] or
 * NULL. update: 1 copies each tensor into its previous, bit for bit, whatever lies between their layouts;
 * then no written memory may overlap any other view of the call, except that a previous may be its tensor
 * itself. Everything is checked before the first byte is written. Elements are widened to double (64-bit
 * integers beyond 2^53 round) and subtracted there; the same bits for any tier and any `threads`. Allocates
 * for `threads` > 1, as other reductions do, and for the check of `update`: TM_ERR_MEMORY if that fails. */
TM_NODISCARD tm_status tm_diff_norm(const tm_view *views, const tm_view *previous, size_t count, int update,
                                    int threads, tm_difference *total, tm_difference *per_tensor,
                                    tm_error *error);

#endif
