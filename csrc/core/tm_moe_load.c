/* expert_load and the overlap of two assignments: ids become slots in the kernels, counts are integers, and
 * so no tree is needed. */
#include "tm_moe.h"

#include "tm_layout.h"
#include "tm_memory.h"
#include "tm_threads.h"
#include "tm_work.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define PIECE (INT64_C(1) << 30) /* ids between two looks at a table's room */

static tm_status check_ids(const tm_table *table, const tm_view *view, size_t index, tm_error *error) {
    if ((unsigned)view->dtype < TM_DTYPE_COUNT && table->moe->slots[view->dtype] == NULL) {
        return tm_fail(error, TM_ERR_DTYPE, "tensor %zu: expert ids must be integers, not %s", index,
                       tm_dtype_name(view->dtype));
    }
    return tm_layout_check(view, index, error);
}

static tm_status check_experts(int64_t experts, tm_error *error) {
    if (experts < 1 || experts > TM_MAX_EXPERTS) {
        return tm_fail(error, TM_ERR_VALUE, "the number of experts must be from 1 to %d, not %lld",
                       TM_MAX_EXPERTS, (long long)experts);
    }
    return TM_OK;
}

typedef struct load_call {
    const tm_table *table;
    const tm_view *views;
    size_t count;
    uint32_t experts;
    int per_tensor, workers;
    int64_t *counts, *invalid;
    const tm_plan *plan;
    uint32_t *large; /* [workers][experts + 1], or NULL: the tables fit on the stack */
    atomic_size_t next_unit, next_worker;
} load_call;

/* One worker's tables. They are flushed when another tensor with counts of its own begins, and before a
 * uint32 could overflow. */
typedef struct load_worker {
    const load_call *call;
    uint32_t *tables;
    int shape;
    size_t table_count, stride;
    size_t tensor;
    int64_t seen; /* ids in the tables */
} load_worker;

static void begin(load_worker *worker, const load_call *call, uint32_t *small, uint32_t *large) {
    *worker = (load_worker){.call = call, .tables = small};
    if (large != NULL) {
        worker->tables = large;
        worker->shape = TM_MOE_1;
        worker->table_count = 1;
    } else if (call->experts < TM_MOE_STRIDE_8) {
        worker->shape = TM_MOE_8;
        worker->table_count = 8;
        worker->stride = TM_MOE_STRIDE_8;
    } else {
        worker->shape = TM_MOE_4;
        worker->table_count = 4;
        worker->stride = TM_MOE_STRIDE_4;
    }
    for (size_t t = 0; t < worker->table_count; t++) {
        memset(worker->tables + t * worker->stride, 0, ((size_t)call->experts + 1) * sizeof *worker->tables);
    }
}

/* Workers share the counts; sums of integers don't depend on who comes first. */
static void add(const load_call *call, int64_t *to, int64_t value) {
    if (call->workers > 1) {
        __atomic_fetch_add(to, value, __ATOMIC_RELAXED);
    } else {
        *to += value;
    }
}

static void flush(load_worker *worker) {
    const load_call *call = worker->call;
    uint32_t *sum = worker->tables, experts = call->experts;
    size_t place = call->per_tensor ? worker->tensor : 0;
    if (worker->seen == 0) {
        return;
    }
    for (size_t t = 1; t < worker->table_count; t++) {
        uint32_t *table = worker->tables + t * worker->stride;
        for (size_t e = 0; e <= experts; e++) {
            sum[e] += table[e];
            table[e] = 0;
        }
    }
    for (size_t e = 0; e < experts; e++) {
        if (sum[e] != 0) {
            add(call, &call->counts[place * experts + e], sum[e]);
        }
    }
    add(call, &call->invalid[place], sum[experts]);
    memset(sum, 0, ((size_t)experts + 1) * sizeof *sum);
    worker->seen = 0;
}

static void count_range(load_worker *worker, size_t tensor, int64_t start, int64_t count) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    const load_call *call = worker->call;
    const tm_view *view = &call->views[tensor];
    tm_layout layout;
    int64_t step;

    if (call->per_tensor && tensor != worker->tensor) {
        flush(worker);
    }
    worker->tensor = tensor;
    tm_layout_init(&layout, view);
    for (int64_t done = 0; done < count; done += step) {
        int64_t piece = count - done < PIECE ? count - done : PIECE;
        if (worker->seen > (int64_t)UINT32_MAX - piece) {
            flush(worker);
        }
        const void *block = tm_layout_block(&layout, start + done, piece, scratch, &step);
        call->table->moe->count[worker->shape][view->dtype](worker->tables, block, (size_t)step,
                                                            call->experts);
        worker->seen += step;
    }
}

static void count_units(void *context) {
    load_call *call = context;
    uint32_t small[TM_MOE_SMALL_WORDS], *large = NULL;
    load_worker worker;

    if (call->large != NULL) {
        size_t place = atomic_fetch_add_explicit(&call->next_worker, 1, memory_order_relaxed);
        large = call->large + place * ((size_t)call->experts + 1);
    }
    begin(&worker, call, small, large);
    if (call->workers == 1) {
        for (size_t i = 0; i < call->count; i++) {
            count_range(&worker, i, 0, call->views[i].n);
        }
    } else {
        size_t i;
        while ((i = atomic_fetch_add_explicit(&call->next_unit, 1, memory_order_relaxed)) <
               call->plan->count) {
            const tm_unit *unit = &call->plan->units[i];
            int64_t start = unit->first * TM_CHUNK, most = unit->chunks * TM_CHUNK;
            int64_t rest = call->views[unit->tensor].n - start;
            count_range(&worker, unit->tensor, start, rest < most ? rest : most);
        }
    }
    flush(&worker);
}

tm_status tm_expert_load(const tm_view *views, size_t count, int64_t experts, int per_tensor, int threads,
                         int64_t *counts, int64_t *invalid, tm_error *error) {
    tm_plan plan;
    const tm_table *table;
    tm_status status = tm_table_require(&table, error);
    if (status != TM_OK || (status = check_experts(experts, error)) != TM_OK) {
        return status;
    }
    for (size_t i = 0; i < count; i++) {
        status = check_ids(table, &views[i], i, error);
        if (status != TM_OK) {
            return status;
        }
    }
    status = tm_plan_make(&plan, table, views, count, threads, error);
    if (status != TM_OK) {
        return status;
    }
    load_call call = {.table = table,
                      .views = views,
                      .count = count,
                      .experts = (uint32_t)experts,
                      .per_tensor = per_tensor,
                      .workers = plan.workers,
                      .counts = counts,
                      .invalid = invalid,
                      .plan = &plan};
    if (experts >= TM_MOE_STRIDE_4) {
        size_t bytes = ((size_t)experts + 1) * sizeof *call.large;
        while ((call.large = tm_allocate((size_t)call.workers, bytes)) == NULL && call.workers > 1) {
            call.workers /= 2;
        }
        if (call.large == NULL) {
            status =
                tm_fail(error, TM_ERR_MEMORY, "no memory for the counts of %lld experts", (long long)experts);
            goto done;
        }
    }
    size_t places = per_tensor ? count : 1;
    memset(counts, 0, places * (size_t)experts * sizeof *counts);
    memset(invalid, 0, places * sizeof *invalid);
    tm_threads_run(call.workers, count_units, &call);
done:
    free(call.large);
    tm_plan_release(&plan);
    return status;
}

/* Ids [start, start + count) as slots. */
static void read_slots(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start,
                       int64_t count, uint32_t experts, uint32_t *out) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    int64_t step;
    for (int64_t done = 0; done < count; done += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        table->moe->slots[dtype](out + done, block, (size_t)step, experts);
    }
}

/* One row: each id before opens a place that one equal id after takes. Places of slot `experts`, which is no
 * expert, are closed before anyone could take them. */
static int64_t common_of_row(const uint32_t *before, const uint32_t *after, int64_t k, uint32_t experts,
                             uint32_t *places) {
    int64_t common = 0;
    for (int64_t i = 0; i < k; i++) {
        places[before[i]]++;
    }
    places[experts] = 0;
    for (int64_t i = 0; i < k; i++) {
        uint32_t free_place = places[after[i]] != 0;
        places[after[i]] -= free_place;
        common += free_place;
    }
    for (int64_t i = 0; i < k; i++) {
        places[before[i]] = 0;
    }
    return common;
}

tm_status tm_common_assignments(const tm_view *before, const tm_view *after, int64_t k, int64_t experts,
                                int64_t *common, tm_error *error) {
    enum { ROOM = 4096 }; /* ids of one side that are slots at a time: both stay in L2 */
    const tm_view *views[2] = {before, after};
    tm_layout layouts[2];
    uint32_t *memory = NULL;
    const tm_table *table;
    tm_status status = tm_table_require(&table, error);
    if (status != TM_OK || (status = check_experts(experts, error)) != TM_OK) {
        return status;
    }
    for (size_t side = 0; side < 2; side++) {
        status = check_ids(table, views[side], side, error);
        if (status != TM_OK) {
            return status;
        }
        tm_layout_init(&layouts[side], views[side]);
    }
    if (k < 1 || before->n % k != 0 || before->n != after->n) {
        return tm_fail(error, TM_ERR_VALUE, "%lld and %lld ids are not the same rows of %lld",
                       (long long)before->n, (long long)after->n, (long long)k);
    }
    *common = 0;
    if (before->n == 0) {
        return TM_OK;
    }
    int64_t rows = k < ROOM ? ROOM / k : 1, room = rows * k;
    memory = tm_allocate((size_t)(2 * room + experts + 1), sizeof *memory);
    if (memory == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory to compare rows of %lld ids", (long long)k);
    }
    uint32_t *slots[2] = {memory, memory + room}, *places = memory + 2 * room;
    memset(places, 0, (size_t)(experts + 1) * sizeof *places);
    for (int64_t start = 0; start < before->n; start += room) {
        int64_t count = before->n - start < room ? before->n - start : room;
        for (int side = 0; side < 2; side++) {
            read_slots(table, &layouts[side], views[side]->dtype, start, count, (uint32_t)experts,
                       slots[side]);
        }
        for (int64_t row = 0; row < count; row += k) {
            *common += common_of_row(slots[0] + row, slots[1] + row, k, (uint32_t)experts, places);
        }
    }
    free(memory);
    return TM_OK;
}
