/* Errors between two lists of tensors (contract of chunks, blocks and lanes: tm_kernels.h). A block has at
 * most TM_COMPARE_ROOM elements. */
#ifndef TM_COMPARE_KERNELS_H
#define TM_COMPARE_KERNELS_H

#include "../core/tm_dtype.h"

#include <stddef.h>
#include <stdint.h>

#define TM_COMPARE_ROOM 1024
#define TM_ULP_BINS 65 /* bin 0: distance 0; bin k: from 2^(k-1) to 2^k - 1 */

/* Sums of one chunk by lane, a being compared with b: magnitudes and squares of a - b, squares of a and b,
 * products. */
typedef struct tm_compare_sums {
    double error[32], error_sq[32], a_sq[32], b_sq[32], dot[32];
} tm_compare_sums;

/* What has no order: kept over all chunks that one worker reads of a tensor. */
typedef struct tm_compare_worst {
    double max_abs, max_rel;              /* 0: no difference yet */
    int64_t max_abs_index, max_rel_index; /* the lowest with that value; -1: none */
    uint64_t max_ulp;
    int64_t n_zero_reference; /* b is zero, a is not: no relative error */
    int64_t ulp[TM_ULP_BINS];
} tm_compare_worst;

/* Where a double lies among the values of a coarser float format, whose exponents go on upwards without end:
 * mantissa bits dropped, rounding (nearest, ties to even), and the code of the smallest normal number, below
 * which values are evenly spaced. */
typedef struct tm_ulp_grid {
    int shift;                  /* 52 - mantissa bits */
    int64_t half, even, origin; /* half a step less one, mask of a code's lowest bit; what codes start at */
    double smallest_normal, scale; /* below the first: code = value * scale, rounded */
} tm_ulp_grid;

/* Of a block's finite elements: equal bits, equal values (more by the pairs of +0 and -0). */
typedef struct tm_compare_equal {
    int64_t bits, values;
} tm_compare_equal;

typedef struct tm_compare_kernels {
    void (*prefetch)(const void *a, const void *b, size_t a_bytes, size_t b_bytes);
    /* Widened blocks go on with zeros to the end of their last row of 32 elements. The first: of equal bits
     * in both lists. 0, with nothing added, if a lane of squares would not be finite. `exact`: no product of
     * two elements is rounded. */
    int (*add_same)(tm_compare_sums *sums, const double *x, size_t n, int exact);
    /* Any block; element i has index `index` + i. `force` adds it whatever comes out. */
    int (*add)(tm_compare_sums *sums, tm_compare_worst *worst, const double *x, const double *y, size_t n,
               int64_t index, int exact, int force);
    /* Distances in the dtype's own values, of finite elements. */
    tm_compare_equal (*ulp[TM_DTYPE_COUNT])(tm_compare_worst *worst, const void *a, const void *b, size_t n);
    /* Distances of widened elements: on a grid, or (NULL) their difference as an integer. */
    tm_compare_equal (*ulp_between)(tm_compare_worst *worst, const double *x, const double *y, size_t n,
                                    const tm_ulp_grid *grid);
    /* totals: error, error_sq, a_sq, b_sq, dot */
    void (*finish)(const tm_compare_sums *sums, double totals[5]);
} tm_compare_kernels;

#endif
