/* The statistics of a part of a tensor, for families that take them along with other work; private to
 * csrc/core. */
#ifndef TM_STATISTICS_H
#define TM_STATISTICS_H

#include "tm_table.h"
#include "tm_tree.h"

/* Somebody who looks at each block of elements once its statistics are taken and while it is cached. */
typedef struct tm_visitor {
    void (*block)(void *context, const void *elements, int64_t count);
    void *context;
    int64_t most; /* elements in a block, a multiple of TM_LANES */
} tm_visitor;

/* Chunks [first, first + chunks) of a view, in C order. visitor: NULL for none. */
void tm_statistics_read(const tm_table *table, const tm_view *view, int64_t first, int64_t chunks,
                        const tm_visitor *visitor, tm_stats *stats);

/* A tm_merge for records that are, or start with, a tm_stats. */
void tm_statistics_merge(tm_record *left, const tm_record *right);

#endif
