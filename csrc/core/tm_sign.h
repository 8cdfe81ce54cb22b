/* How often two lists of tensors have the same sign, element by element. */
#ifndef TM_SIGN_H
#define TM_SIGN_H

#include "tm_status.h"
#include "tm_tree.h"
#include "tm_view.h"

/* b[i] has as many elements as a[i]; dtypes may differ. Zeros and NaN have no sign, infinities have one.
 * Counts are exact: the same for every tier, thread count and split. Memory is allocated only for threads >
 * 1, and with too little of it the call goes on with fewer workers. */
TM_NODISCARD tm_status tm_sign_agreement(const tm_view *a, const tm_view *b, size_t count, int threads,
                                         int64_t *n, tm_sign_counts *counts, tm_error *error);

#endif
