/* Counting expert ids: what the core and the kernels of the family agree on. */
#ifndef TM_MOE_KERNELS_H
#define TM_MOE_KERNELS_H

#include "../core/tm_dtype.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Where counts go. Neighbours go to different tables, so that a run of equal ids does not wait for its own
 * stores; the strides are constants of the kernels, not powers of two, so that equal ids of different tables
 * do not share the low bits of their addresses. Slot `experts` of a table counts the ids outside the range.
 */
enum { TM_MOE_8, TM_MOE_4, TM_MOE_1, TM_MOE_SHAPES };

#define TM_MOE_STRIDE_8 528
#define TM_MOE_STRIDE_4 2064
#define TM_MOE_SMALL_WORDS (4 * TM_MOE_STRIDE_4) /* holds either of the shapes with a stride */

static inline uint64_t tm_moe_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline double tm_moe_value(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ln x of a positive, normal x to about 2 ulp; 0 and subnormal numbers give something finite. The same bits
 * on every machine, which the C library does not promise, and free of branches, so that loops over it
 * vectorise.
 *
 * x = 2^k m with m in [sqrt(1/2), sqrt(2)); with s = (m - 1)/(m + 1), ln m = 2 (s + s^3/3 + s^5/5 + ...),
 * where s^2 < 0.0295 and the first term left out is below 2^-58 of s. */
static inline double tm_moe_log(double x) {
    const uint64_t one = UINT64_C(0x3ff0000000000000), root_half = UINT64_C(0x3fe6a09e667f3bcd);
    const uint64_t bits = tm_moe_bits(x), exponent = (bits + (one - root_half)) >> 52; /* k + 1023 */
    const double k = tm_moe_value(exponent | UINT64_C(0x4330000000000000)) - (0x1p52 + 1023);
    const double f = tm_moe_value(bits - (exponent << 52) + one) - 1, s = f / (2 + f), z = s * s;
    double sum = 1.0 / 21;
    sum = sum * z + 1.0 / 19;
    sum = sum * z + 1.0 / 17;
    sum = sum * z + 1.0 / 15;
    sum = sum * z + 1.0 / 13;
    sum = sum * z + 1.0 / 11;
    sum = sum * z + 1.0 / 9;
    sum = sum * z + 1.0 / 7;
    sum = sum * z + 1.0 / 5;
    sum = sum * z + 1.0 / 3;
    return k * 0x1.62e42fefa39efp-1 + 2 * (s + s * z * sum); /* ln 2 */
}

/* The counts of a layer in ascending order, equal ones as one run: its number, how many have it, how many are
 * less. Room for one more than there are counts in each. */
typedef struct tm_moe_runs {
    double *value, *times, *before;
} tm_moe_runs;

typedef struct tm_moe_spread {
    double squares, deviations; /* sum c^2, sum (c - mean)^2 */
    double ranks;               /* sum (2 i - E - 1) c_(i), i from 1 on */
} tm_moe_spread;

typedef struct tm_moe_pools {
    double pooled, total; /* sums over the experts */
} tm_moe_pools;

typedef struct tm_moe_kernels {
    /* Adds a block's ids to the tables of a shape; NULL where the dtype is not an integer. The caller flushes
     * before 2^32 ids. 0 < experts < 2^31, below the shape's stride. */
    void (*count[TM_MOE_SHAPES][TM_DTYPE_COUNT])(uint32_t *tables, const void *ids, size_t n,
                                                 uint32_t experts);
    /* Each id as a slot: itself, or `experts` if it is outside [0, experts). */
    void (*slots[TM_DTYPE_COUNT])(uint32_t *out, const void *ids, size_t n, uint32_t experts);

    /* One layer of n < 2^32 experts. Values are counts, from 0 up; maxima begin at 0. */
    /* Counts below 2^53, -0.0 as 0, whole or not; returns how many runs. keys, spare: room for n each. */
    size_t (*runs)(const tm_moe_runs *out, const double *counts, size_t n, uint64_t *keys, uint64_t *spare);
    double (*sum)(const double *values, size_t n);
    double (*max)(const double *values, size_t n);
    double (*sum_above)(const double *values, size_t n, double border); /* of what each has above it */
    double (*bad)(const double *values, size_t n, double limit);        /* how many are not in [0, limit) */
    /* Over `runs` runs: sum of the counts; of what each has above the border; -sum p ln p, p = value / total;
     * and what the counts are spread by, scaled. */
    double (*runs_sum)(const tm_moe_runs *of, size_t runs);
    double (*runs_above)(const tm_moe_runs *of, size_t runs, double border, double divisor);
    double (*entropy)(const tm_moe_runs *of, size_t runs, double total);
    void (*spread)(tm_moe_spread *out, const tm_moe_runs *of, size_t runs, size_t experts, double mean,
                   double scale);
    /* The pool loses the row and gains the counts, the row becomes them, the total gains them. */
    void (*pool)(tm_moe_pools *out, double *restrict total, double *restrict pooled, double *restrict row,
                 const double *restrict counts, size_t n);
    /* Sum of how far counts / total is from share, which becomes it. */
    double (*churn)(double *restrict share, const double *restrict counts, size_t n, double total);
    /* Ages of the counts on one side of the border grow by one, the others' end; both places get them. How
     * many are `enough` or more. */
    double (*at_most)(double *restrict age, double *restrict copy, const double *restrict counts, size_t n,
                      double border, double enough);
    double (*above)(double *restrict age, double *restrict copy, const double *restrict counts, size_t n,
                    double border, double enough);
    double (*below)(double *restrict age, double *restrict copy, const double *restrict counts, size_t n,
                    double border, double enough);
} tm_moe_kernels;

#endif
