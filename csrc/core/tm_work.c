#include "tm_work.h"

#include "tm_layout.h"
#include "tm_memory.h"
#include "tm_threads.h"

#include <stdatomic.h>
#include <stdlib.h>

/* More units than this per list only cost memory; fewer would leave workers idle at the end. */
#define TM_SPARE_UNITS 1024

static size_t units_at(const tm_view *views, size_t count, int64_t unit_chunks) {
    size_t units = 0;
    for (size_t i = 0; i < count; i++) {
        units += (size_t)((tm_chunks_of(views[i].n) + unit_chunks - 1) / unit_chunks);
    }
    return units;
}

static void cut(tm_plan *plan, const tm_view *views, size_t count) {
    int64_t unit_chunks = 1;
    size_t units;
    while ((units = units_at(views, count, unit_chunks)) > count + TM_SPARE_UNITS) {
        unit_chunks *= 2;
    }
    plan->units = tm_allocate(units, sizeof *plan->units);
    if (plan->units == NULL) {
        plan->workers = 1;
        return;
    }
    for (size_t i = 0; i < count; i++) {
        int64_t chunks = tm_chunks_of(views[i].n);
        for (int64_t first = 0; first < chunks; first += unit_chunks) {
            int64_t rest = chunks - first;
            plan->units[plan->count++] = (tm_unit){i, first, rest < unit_chunks ? rest : unit_chunks};
        }
    }
}

tm_status tm_plan_make(tm_plan *plan, const tm_table *table, const tm_view *views, size_t count, int threads,
                       tm_error *error) {
    *plan = (tm_plan){.workers = 1};
    if (threads < 1) {
        return tm_fail(error, TM_ERR_VALUE, "threads must be 1 or more, not %d", threads);
    }
    double bytes = 0;
    for (size_t i = 0; i < count; i++) {
        tm_status status = tm_layout_check(&views[i], i, error);
        if (status != TM_OK) {
            return status;
        }
        bytes += (double)views[i].n * (double)tm_dtype_size(views[i].dtype);
    }
    double worth = bytes / (double)table->worker_bytes;
    int limit = threads < TM_MAX_WORKERS ? threads : TM_MAX_WORKERS;
    plan->workers = worth < limit ? (int)worth : limit;
    if (plan->workers > 1) {
        cut(plan, views, count);
    } else {
        plan->workers = 1;
    }
    return TM_OK;
}

void tm_plan_release(tm_plan *plan) {
    free(plan->units);
    *plan = (tm_plan){.workers = 1};
}

typedef struct shared_work {
    const tm_reduction *reduction;
    const tm_plan *plan;
    tm_record *records; /* [plan->count], each written by the worker that took the unit */
    atomic_size_t next;
} shared_work;

static void take_units(void *context) {
    shared_work *shared = context;
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&shared->next, 1, memory_order_relaxed);
        if (i >= shared->plan->count) {
            return;
        }
        const tm_unit *unit = &shared->plan->units[i];
        const tm_reduction *reduction = shared->reduction;
        reduction->read(reduction->context, unit->tensor, unit->first, unit->chunks, &shared->records[i]);
    }
}

/* Units of a tensor follow one another and are nodes of its tree: pushing them merges as one thread would. */
static void fold_units(const shared_work *shared) {
    const tm_reduction *reduction = shared->reduction;
    size_t i = 0;
    tm_tree tree;

    for (size_t tensor = 0; tensor < reduction->count; tensor++) {
        tm_tree_init(&tree, reduction->merge);
        for (; i < shared->plan->count && shared->plan->units[i].tensor == tensor; i++) {
            tm_tree_push(&tree, &shared->records[i], shared->plan->units[i].first,
                         shared->plan->units[i].chunks);
        }
        const tm_record *folded = tm_tree_finish(&tree);
        tm_record empty;
        if (folded == NULL) {
            reduction->read(reduction->context, tensor, 0, 0, &empty);
            folded = &empty;
        }
        reduction->take(reduction->context, tensor, folded);
    }
}

tm_status tm_reduction_run(const tm_reduction *reduction, int threads, tm_error *error) {
    tm_plan plan;
    tm_record *records = NULL;
    tm_status status =
        tm_plan_make(&plan, reduction->table, reduction->views, reduction->count, threads, error);
    if (status != TM_OK) {
        return status;
    }
    if (plan.workers > 1) {
        records = tm_allocate(plan.count, sizeof *records);
    }
    if (records != NULL) {
        shared_work shared = {reduction, &plan, records, 0};
        tm_threads_run(plan.workers, take_units, &shared);
        fold_units(&shared);
    } else {
        for (size_t i = 0; i < reduction->count; i++) {
            tm_record record;
            reduction->read(reduction->context, i, 0, tm_chunks_of(reduction->views[i].n), &record);
            reduction->take(reduction->context, i, &record);
        }
    }
    free(records);
    tm_plan_release(&plan);
    return TM_OK;
}
