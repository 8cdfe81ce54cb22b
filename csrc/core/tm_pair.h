/* Two views of one shape read side by side, block by block. */
#ifndef TM_PAIR_H
#define TM_PAIR_H

#include "tm_layout.h"

/* Half a scratch of each view: with what is made of the elements the first cache holds them. */
#define TM_PAIR_BYTES (TM_SCRATCH_BYTES / 2)

typedef struct tm_pair {
    tm_layout a, b;
} tm_pair;

/* A block of both; the places are in the layouts or in the scratches. */
typedef struct tm_pair_block {
    const void *a, *b;
    int64_t n;
    _Alignas(64) char a_scratch[TM_PAIR_BYTES];
    _Alignas(64) char b_scratch[TM_PAIR_BYTES];
} tm_pair_block;

/* Both views must have passed tm_layout_check and have the same number of elements. */
static inline void tm_pair_init(tm_pair *pair, const tm_view *a, const tm_view *b) {
    tm_layout_init(&pair->a, a);
    tm_layout_init(&pair->b, b);
}

/* Elements [start, start + block->n) in C order, at most `rest` and at most `room`; `room` elements of either
 * must fit into TM_PAIR_BYTES. */
static inline void tm_pair_take(const tm_pair *pair, int64_t start, int64_t rest, int64_t room,
                                tm_pair_block *block) {
    int64_t step;
    block->n = rest < room ? rest : room;
    block->a = tm_layout_block(&pair->a, start, block->n, block->a_scratch, &step);
    block->b = tm_layout_block(&pair->b, start, block->n, block->b_scratch, &step);
}

/* Two lists that are to be read in pairs: every view is sound, and partners have as many elements. names: of
 * the two lists, for errors. */
TM_NODISCARD tm_status tm_pairs_check(const tm_view *a, const tm_view *b, size_t count,
                                      const char *const names[2], int same_dtype, tm_error *error);

#endif
