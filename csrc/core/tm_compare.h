/* Errors between two lists of tensors: how far a is from b, which is the reference. */
#ifndef TM_COMPARE_H
#define TM_COMPARE_H

#include "tm_status.h"
#include "tm_tree.h"
#include "tm_view.h"

/* An element and its values in both lists; index -1 (and NaN): there is none. */
typedef struct tm_comparison_place {
    int64_t tensor, index;
    double a, b;
} tm_comparison_place;

/* All fields have 8 bytes: one record is a row of words. A pair is finite if both its elements are; errors
 * are those of finite pairs. What is undefined is NaN. */
typedef struct tm_comparison {
    int64_t n, n_identical, n_finite;
    int64_t n_zero_sign;      /* +0 and -0 */
    int64_t n_zero_reference; /* finite, b is zero and a is not: without relative error */
    int64_t n_nan_both, n_nan_a, n_nan_b;
    int64_t n_inf_same, n_inf_opposite, n_inf_a, n_inf_b; /* _a: a infinite, b finite */
    uint64_t max_ulp;
    double max_abs, max_rel;
    double mean_abs, rms_error, norm_error, norm_a, norm_b, rms_a, rms_b, cosine;
    tm_comparison_place first_difference, max_abs_at, max_rel_at;
    double sum_abs;
    tm_scaled error_sq, a_sq, b_sq, dot; /* what merging adds: value * 4^exponent */
    int64_t ulp[TM_ULP_BINS];
} tm_comparison;

/* b[i] has the shape of a[i]; dtypes may differ. each: [count]; total: all pairs taken as one. Elements are
 * widened to double (64-bit integers beyond 2^53 round) and subtracted there. The same bits for any tier and
 * any `threads`. Allocates for `threads` > 1 only. */
TM_NODISCARD tm_status tm_compare(const tm_view *a, const tm_view *b, size_t count, int threads,
                                  tm_comparison *each, tm_comparison *total, tm_error *error);

/* The total of records, the `tensor` of each place being the record's position: what tm_compare gives for the
 * list, to the bit. */
void tm_merge_comparisons(const tm_comparison *records, size_t count, tm_comparison *total);

#endif
