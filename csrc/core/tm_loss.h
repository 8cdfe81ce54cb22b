/* Token-weighted sums of losses, exact: any order, split or number of processes gives the same bits.
 *
 * A state is rows of TM_LOSS_WORDS int64 words: row 0 for all tokens, row 1 + b for bucket b. Every field is
 * digits of 32 bits, lowest first. States add word by word; tm_loss_add_state brings the sum into the one
 * normalised form. */
#ifndef TM_LOSS_H
#define TM_LOSS_H

#include "tm_exact.h"
#include "tm_status.h"
#include "tm_view.h"

/* X(name, digits): the fields of a row, in order. */
#define TM_LOSS_FIELDS(X)                                                                                    \
    X(SUM, TM_EXACT_DIGITS)   /* weight * loss over the finite losses */                                     \
    X(MEANS, TM_EXACT_DIGITS) /* the means of pairs, each rounded to double */                               \
    X(TOKENS, 4)              /* sum of weights */                                                           \
    X(PAIRS, 2)               /* pairs with tokens */                                                        \
    X(MASKED, 2)              /* losses of weight 0 */                                                       \
    X(NAN, 2)                 /* losses with weight that are NaN, */                                         \
    X(POSINF, 2)              /* +inf, */                                                                    \
    X(NEGINF, 2)              /* -inf */                                                                     \
    X(INVALID, 2)             /* losses with weight whose bucket id is none; row 0 only */

enum {
#define TM_LOSS_OFFSETS(name, digits) TM_LOSS_##name, TM_LOSS_##name##_END = TM_LOSS_##name + (digits) - 1,
    TM_LOSS_FIELDS(TM_LOSS_OFFSETS)
#undef TM_LOSS_OFFSETS
        TM_LOSS_WORDS
};

/* One call's sums, kept apart from the state until all of it is known to be right. */
typedef struct tm_loss_pair tm_loss_pair;
typedef struct tm_loss_batch {
    int64_t buckets;
    tm_loss_pair *pairs; /* owned: [buckets + 1], the last for ids that are none */
    int64_t invalid;
} tm_loss_batch;

/* Reads losses (floats), weights (integers or bool, or NULL: 1 each) and ids (integers, NULL iff buckets is
 * 0), all of the same number of elements. A negative weight, or one beyond int64, is an error. Release in
 * both cases. */
TM_NODISCARD tm_status tm_loss_collect(tm_loss_batch *batch, int64_t buckets, const tm_view *losses,
                                       const tm_view *weights, const tm_view *ids, tm_error *error);
/* The sum `value`, or the mean `value`, of `tokens` > 0 tokens. */
TM_NODISCARD tm_status tm_loss_collect_value(tm_loss_batch *batch, double value, int is_mean, int64_t tokens,
                                             tm_error *error);
void tm_loss_release(tm_loss_batch *batch);

/* Adds the batch to a state of 1 + batch->buckets rows: one pair for all tokens, and one a bucket. */
void tm_loss_add_batch(int64_t *state, const tm_loss_batch *batch);

/* Adds a state, or a sum of states: words of magnitude below 2^61. */
void tm_loss_add_state(int64_t *state, const int64_t *other, int64_t rows);

/* Of one row: sum / tokens, and the mean of the pairs' means; 0 for a row without tokens, else 1. */
int tm_loss_means(const int64_t *row, double *mean, double *mean_of_means);

#endif
