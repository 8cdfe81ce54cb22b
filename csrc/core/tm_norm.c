/* multi_norm: sums of squares, sums of magnitudes, largest magnitudes. */
#include "tm_layout.h"
#include "tm_rescue.h"
#include "tm_work.h"

#include <math.h>
#include <string.h>

static void merge_sum(tm_record *left, const tm_record *right) {
    left->norm = tm_scaled_add(left->norm, right->norm);
}

/* NaN wins, whichever side it is on. */
static void merge_max(tm_record *left, const tm_record *right) {
    if (isnan(right->norm.value) || right->norm.value > left->norm.value) {
        left->norm = right->norm;
    }
}

typedef struct norm_call {
    const tm_table *table;
    const tm_view *views;
    int order;          /* TM_KERNEL_NORM_* */
    double *per_tensor; /* borrowed, [count] or NULL */
    tm_tree total;
} norm_call;

static double read_blocks(const tm_table *table, int order, const tm_layout *layout, tm_dtype dtype,
                          int64_t start, int64_t count) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    tm_norm_state state;
    int64_t step;

    memset(&state, 0, tm_dtype_is_byte(dtype) ? sizeof state : offsetof(tm_norm_state, bytes));
    for (int64_t done = 0; done < count; done += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        table->norm->block[order][dtype](&state, block, (size_t)step);
    }
    table->norm->finish[order][dtype](&state, tm_byte_values(dtype));
    return state.total;
}

/* Only a float64 sum of squares can leave the range of double. */
static tm_scaled read_chunk(const norm_call *call, const tm_layout *layout, tm_dtype dtype, int64_t start,
                            int64_t count) {
    double plain = read_blocks(call->table, call->order, layout, dtype, start, count);
    if (call->order == TM_KERNEL_NORM_2 && dtype == TM_F64) {
        return tm_rescued_f64(call->table, layout, start, count, plain);
    }
    return (tm_scaled){plain, 0};
}

static tm_merge merge_of(int order) {
    return order == TM_KERNEL_NORM_INF ? merge_max : merge_sum;
}

static void read_norm(const void *context, size_t tensor, int64_t first, int64_t chunks, tm_record *record) {
    const norm_call *call = context;
    const tm_view *view = &call->views[tensor];
    tm_layout layout;
    tm_tree tree;

    record->norm = (tm_scaled){0, 0};
    tm_layout_init(&layout, view);
    tm_tree_init(&tree, merge_of(call->order));
    for (int64_t chunk = first; chunk < first + chunks; chunk++) {
        int64_t start = chunk * TM_CHUNK, rest = view->n - start;
        record->norm = read_chunk(call, &layout, view->dtype, start, rest < TM_CHUNK ? rest : TM_CHUNK);
        if (chunks > 1) {
            tm_tree_push(&tree, record, chunk, 1);
        }
    }
    if (chunks > 1) {
        *record = *tm_tree_finish(&tree);
    }
}

static double finish_norm(int order, tm_scaled record) {
    return order == TM_KERNEL_NORM_2 ? tm_scaled_root(record) : tm_scaled_value(record);
}

static void take_norm(void *context, size_t tensor, const tm_record *record) {
    norm_call *call = context;
    if (call->per_tensor != NULL) {
        call->per_tensor[tensor] = finish_norm(call->order, record->norm);
    }
    tm_tree_push(&call->total, record, (int64_t)tensor, 1);
}

tm_status tm_multi_norm(const tm_view *views, size_t count, tm_norm_order order, int threads, double *total,
                        double *per_tensor, tm_error *error) {
    static const int kernels[] = {
        [TM_NORM_2] = TM_KERNEL_NORM_2, [TM_NORM_1] = TM_KERNEL_NORM_1, [TM_NORM_INF] = TM_KERNEL_NORM_INF};
    norm_call call;
    call.views = views;
    call.per_tensor = per_tensor;
    tm_status status = tm_table_require(&call.table, error);
    if (status != TM_OK) {
        return status;
    }
    if ((unsigned)order > TM_NORM_INF) {
        return tm_fail(error, TM_ERR_VALUE, "norm order %d is not one of 2, 1, inf", (int)order);
    }
    call.order = kernels[order];
    tm_tree_init(&call.total, merge_of(call.order));
    tm_reduction reduction = {.table = call.table,
                              .views = views,
                              .count = count,
                              .read = read_norm,
                              .merge = merge_of(call.order),
                              .take = take_norm,
                              .context = &call};
    status = tm_reduction_run(&reduction, threads, error);
    if (status == TM_OK) {
        const tm_record *sum = tm_tree_finish(&call.total);
        *total = sum != NULL ? finish_norm(call.order, sum->norm) : 0.0;
    }
    return status;
}
