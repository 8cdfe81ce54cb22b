#include "tm_tree.h"

#include <math.h>

static double scale_by_4(double value, int64_t exponent) {
    if (exponent < -1100) { /* 2^-2200 takes any double to 0 */
        return 0.0;
    }
    return ldexp(value, (int)(2 * exponent));
}

/* Plain addition where exponents agree and the sum is a double. Else both are brought to the larger exponent:
 * what the smaller loses lies 2^-1000 or more below the result. Symmetric, hence independent of who is left.
 */
tm_scaled tm_scaled_add(tm_scaled a, tm_scaled b) {
    tm_scaled sum = {a.value + b.value, 0};
    if (!isfinite(a.value) || !isfinite(b.value)) {
        return sum;
    }
    if (a.value == 0.0) {
        return b;
    }
    if (b.value == 0.0) {
        return a;
    }
    sum.exponent = a.exponent > b.exponent ? a.exponent : b.exponent;
    for (;;) {
        sum.value =
            scale_by_4(a.value, a.exponent - sum.exponent) + scale_by_4(b.value, b.exponent - sum.exponent);
        if (isfinite(sum.value)) {
            return sum;
        }
        sum.exponent++;
    }
}

void tm_tree_init(tm_tree *tree, tm_merge merge) {
    tree->merge = merge;
    tree->depth = 0;
}

static void merge_top(tm_tree *tree, int64_t chunks) {
    int left = tree->depth - 2;
    tree->merge(&tree->record[left], &tree->record[left + 1]);
    tree->span[left].chunks = chunks;
    tree->depth--;
}

static int is_node(int64_t first, int64_t chunks) {
    return chunks > 0 && (chunks & (chunks - 1)) == 0 && first % chunks == 0;
}

static int top_are_siblings(const tm_tree *tree) {
    if (tree->depth < 2) {
        return 0;
    }
    int64_t first = tree->span[tree->depth - 2].first, chunks = tree->span[tree->depth - 2].chunks;
    return chunks > 0 && chunks == tree->span[tree->depth - 1].chunks && chunks <= INT64_MAX / 2 &&
           first % (2 * chunks) == 0 && tree->span[tree->depth - 1].first == first + chunks;
}

void tm_tree_push(tm_tree *tree, const tm_record *record, int64_t first, int64_t chunks) {
    int top = tree->depth++;
    tree->record[top] = *record;
    tree->span[top].first = first;
    tree->span[top].chunks = chunks;
    if (!is_node(first, chunks) || tree->depth == TM_TREE_DEPTH) { /* ranges with gaps could fill the stack */
        tree->span[top].chunks = 0;
        while (tree->depth > 1) {
            merge_top(tree, 0);
        }
        return;
    }
    while (top_are_siblings(tree)) {
        merge_top(tree, 2 * tree->span[tree->depth - 2].chunks);
    }
}

const tm_record *tm_tree_finish(tm_tree *tree) {
    if (tree->depth == 0) {
        return NULL;
    }
    while (tree->depth > 1) {
        merge_top(tree, 0);
    }
    return &tree->record[0];
}
