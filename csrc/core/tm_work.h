/* Lists of tensors cut into units that workers take; the units are nodes of each tensor's tree, so that the
 * cutting cannot change a bit. */
#ifndef TM_WORK_H
#define TM_WORK_H

#include "tm_table.h"
#include "tm_tree.h"

typedef struct tm_unit {
    size_t tensor;
    int64_t first, chunks;
} tm_unit;

typedef struct tm_plan {
    int workers;    /* 1: read the list without units */
    tm_unit *units; /* owned: tm_plan_release */
    size_t count;
} tm_plan;

/* Checks every view and the thread count, then cuts the list if more than one worker is worth it. */
TM_NODISCARD tm_status tm_plan_make(tm_plan *plan, const tm_table *table, const tm_view *views, size_t count,
                                    int threads, tm_error *error);
void tm_plan_release(tm_plan *plan);

static inline int64_t tm_chunks_of(int64_t n) {
    return n / TM_CHUNK + (n % TM_CHUNK != 0);
}

/* One reduction: how a range of chunks becomes a record, how records merge, who takes a tensor's record. */
typedef struct tm_reduction {
    const tm_table *table;
    const tm_view *views;
    size_t count;
    /* reads `chunks` chunks of views[tensor] from chunk `first`; called by several threads at once */
    void (*read)(const void *context, size_t tensor, int64_t first, int64_t chunks, tm_record *record);
    tm_merge merge;
    /* called in list order by the calling thread */
    void (*take)(void *context, size_t tensor, const tm_record *record);
    void *context;
} tm_reduction;

TM_NODISCARD tm_status tm_reduction_run(const tm_reduction *reduction, int threads, tm_error *error);

#endif
