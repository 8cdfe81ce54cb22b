/* Attention logits: maxima and softmax denominators of scale * QK^T, without S x S memory
 * (docs/kernels/attention.md).
 *
 * Knows no masks: whoever calls says for each query row which interval of keys it may see, among those keys
 * that any row may see. */
#ifndef TM_ATTENTION_H
#define TM_ATTENTION_H

#include "tm_status.h"
#include "tm_view.h"

#include <stddef.h>

/* What is known of one head, all as double. Counts are exact below 2^53. */
#define TM_ATTENTION_FIELDS(X)                                                                               \
    X(max)            /* the largest row maximum; -inf without one, NaN if a score was NaN */                \
    X(sum_l)          /* sum over counted rows of l = sum of exp(score - row maximum) */                     \
    X(sum_l2)         /* of l^2 */                                                                           \
    X(rows)           /* counted rows */                                                                     \
    X(sum_m)          /* sum of row maxima */                                                                \
    X(sum_inv_l)      /* of 1 / l */                                                                         \
    X(sum_norm)       /* of (l - 1) / (n - 1) over counted rows with n >= 2 keys */                          \
    X(norm_rows)      /* the number of those */                                                              \
    X(sum_z)          /* sum of all scores of counted rows */                                                \
    X(keys)           /* the number of those */                                                              \
    X(nonfinite_rows) /* rows with a NaN or +inf score: not counted */                                       \
    X(empty_rows)     /* rows without a key, or with -inf scores only: not counted */

typedef struct tm_attention_sums {
#define TM_ATTENTION_FIELD(name) double name;
    TM_ATTENTION_FIELDS(TM_ATTENTION_FIELD)
#undef TM_ATTENTION_FIELD
} tm_attention_sums;

/* Borrowed results of single rows, each [batches][heads][row_count] in C order, or all NULL. */
typedef struct tm_attention_each {
    double *max, *sum; /* m and l; -inf and 0 for empty rows, l NaN for nonfinite ones */
    double *z;         /* sum of the row's scores; 0 for empty rows, NaN for nonfinite ones */
    int64_t *keys;     /* n */
} tm_attention_each;

typedef struct tm_attention {
    tm_view q; /* [..., heads, queries, depth] with its shape */
    tm_view k; /* [..., key heads, keys, depth]; heads is a multiple of key heads */
    int64_t row_count;
    const int64_t *rows;   /* [row_count], ascending: the queries to read; NULL: all */
    int64_t mask_batches;  /* 1: one mask for all batches; or as many as batches */
    const int64_t *bounds; /* [mask_batches][row_count][2]: first key and end, counted in kept keys */
    const int64_t *kept;   /* the keys of each mask, ascending, one mask after the other; NULL: all keys */
    const int64_t *kept_starts; /* [mask_batches + 1], into kept */
    const unsigned char *heads; /* [heads]: 0 leaves a head unread; NULL: all are read */
    double scale;               /* finite, not 0 */
    double cap;                 /* 0: none, else scores become cap * tanh(score / cap) */
    const double *sinks;        /* [heads]: a score that each row with a key has besides, or NULL */
    int scores;                 /* 0: only sum_z, keys and the row counts, from sums of keys; no cap */
    int threads;
} tm_attention;

/* out: [heads]. Results don't depend on `threads`. TM_ERR_DTYPE unless q and k are floats. */
TM_NODISCARD tm_status tm_attention_logits(const tm_attention *input, const tm_attention_each *each,
                                           tm_attention_sums *out, tm_error *error);

#endif
