/* Partial results over chunk ranges, and the tree that merges them. */
#ifndef TM_TREE_H
#define TM_TREE_H

#include "../kernels/tm_kernels.h"
#include "tm_reduce.h"

/* A sum of squares that no double may be able to hold: value * 4^exponent. NaN and inf have exponent 0. */
typedef struct tm_scaled {
    double value;
    int64_t exponent;
} tm_scaled;

tm_scaled tm_scaled_add(tm_scaled a, tm_scaled b);

typedef struct tm_diff_record {
    tm_scaled diff, weight; /* sums of squares of the differences and of what they are taken from */
    int64_t n_same, n_nonfinite;
} tm_diff_record;

typedef struct tm_compare_record {
    double sum_abs;
    tm_scaled error_sq, a_sq, b_sq, dot;
    double max_abs, max_rel;
    int64_t max_abs_index, max_rel_index, first_difference; /* -1: none */
    uint64_t max_ulp;
} tm_compare_record;

typedef union tm_record {
    tm_stats stats;
    tm_scaled norm; /* sum of squares, sum of magnitudes or largest magnitude */
    tm_diff_record diff;
    tm_compare_record compare;
    tm_sign_counts signs;
    tm_gf print;
    struct {
        tm_stats stats;
        tm_gf print;
    } staged;
} tm_record;

typedef void (*tm_merge)(tm_record *left, const tm_record *right);

/* The pairwise tree over chunk numbers as a stack, like a binary counter: two neighbours of equal size merge
 * as soon as they form an aligned node. What is left at the end merges from the right. The shape depends on
 * chunk numbers only, and the depth is logarithmic: no memory grows with the input. */
#define TM_TREE_DEPTH 72
typedef struct tm_tree {
    tm_merge merge;
    int depth;
    struct {
        int64_t first, chunks; /* chunks 0: not a node of the tree, it has no sibling */
    } span[TM_TREE_DEPTH];
    tm_record record[TM_TREE_DEPTH];
} tm_tree;

void tm_tree_init(tm_tree *tree, tm_merge merge);

/* Ranges come in ascending order. */
void tm_tree_push(tm_tree *tree, const tm_record *record, int64_t first, int64_t chunks);

/* NULL if nothing was pushed. */
const tm_record *tm_tree_finish(tm_tree *tree);

#endif
