/* tensor_stats and merge_stats: chunks to records, records to records. */
#include "tm_deviation.h"
#include "tm_layout.h"
#include "tm_rescue.h"
#include "tm_statistics.h"
#include "tm_work.h"

#include <math.h>
#include <string.h>

/* Extremes of nothing are NaN and give way to any number. */
static double lower(double a, double b) {
    return isnan(a) || b < a ? b : a;
}

static double higher(double a, double b) {
    return isnan(a) || b > a ? b : a;
}

static tm_stats empty_stats(void) {
    return (tm_stats){.min = NAN, .max = NAN, .absmax = NAN, .first_bad = -1};
}

static void set_sumsq(tm_stats *stats, tm_scaled sumsq) {
    stats->sumsq_scaled = sumsq.value;
    stats->scale_exponent = sumsq.exponent;
    stats->sumsq = tm_scaled_value(sumsq);
}

void tm_statistics_merge(tm_record *left, const tm_record *right) {
    tm_stats *a = &left->stats;
    const tm_stats *b = &right->stats;
    tm_scaled sumsq = tm_scaled_add((tm_scaled){a->sumsq_scaled, a->scale_exponent},
                                    (tm_scaled){b->sumsq_scaled, b->scale_exponent});

    a->m2_scaled = tm_merged_deviation(a, b, sumsq.exponent);
    a->n += b->n;
    a->sum += b->sum;
    a->min = lower(a->min, b->min);
    a->max = higher(a->max, b->max);
    a->absmax = higher(a->absmax, b->absmax);
    a->n_nan += b->n_nan;
    a->n_posinf += b->n_posinf;
    a->n_neginf += b->n_neginf;
    a->n_zero += b->n_zero;
    if (b->first_bad >= 0 && (a->first_bad < 0 || b->first_bad < a->first_bad)) {
        a->first_bad = b->first_bad;
    }
    set_sumsq(a, sumsq);
}

typedef struct stats_call {
    const tm_table *table;
    const tm_view *views;
    tm_stats *out; /* borrowed, [count] */
} stats_call;

static void begin(tm_stats_state *state, tm_dtype dtype) {
    size_t used = tm_dtype_is_byte(dtype) ? sizeof *state : offsetof(tm_stats_state, bytes);
    memset(state, 0, used);
    state->min = INFINITY;
    state->max = -INFINITY;
    state->first_bad = -1;
}

/* One chunk, elements [start, start + count) of the tensor. */
static void read_chunk(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start,
                       int64_t count, const tm_visitor *visitor, tm_stats *stats) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    tm_stats_state state;
    int64_t step;

    begin(&state, dtype);
    for (int64_t done = 0; done < count; done += step) {
        int64_t most = visitor != NULL && visitor->most < count - done ? visitor->most : count - done;
        const void *block = tm_layout_block(layout, start + done, most, scratch, &step);
        table->stats->block[dtype](&state, block, (size_t)step);
        if (visitor != NULL) {
            visitor->block(visitor->context, block, step);
        }
    }
    table->stats->finish[dtype](&state, tm_byte_values(dtype));

    *stats = empty_stats();
    stats->n = count;
    stats->sum = state.total_sum;
    stats->n_nan = state.n_nan;
    stats->n_posinf = state.n_posinf;
    stats->n_neginf = state.n_neginf;
    stats->n_zero = state.n_zero;
    stats->first_bad = state.first_bad < 0 ? -1 : start + state.first_bad;
    tm_scaled sumsq = {state.total_sumsq, 0};
    if (count > state.n_nan + state.n_posinf + state.n_neginf) {
        stats->min = state.min;
        stats->max = state.max;
        stats->absmax = fabs(state.min) > fabs(state.max) ? fabs(state.min) : fabs(state.max);
        if (dtype == TM_F64 && tm_needs_rescue(sumsq.value) && stats->absmax > 0) {
            sumsq = tm_rescue_f64(table, layout, start, count, stats->absmax);
        }
    }
    set_sumsq(stats, sumsq);
    stats->m2_scaled = tm_chunk_deviation(table, layout, dtype, start, stats);
}

void tm_statistics_read(const tm_table *table, const tm_view *view, int64_t first, int64_t chunks,
                        const tm_visitor *visitor, tm_stats *stats) {
    tm_record record = {.stats = empty_stats()};
    tm_layout layout;
    tm_tree tree;

    tm_layout_init(&layout, view);
    tm_tree_init(&tree, tm_statistics_merge);
    for (int64_t chunk = first; chunk < first + chunks; chunk++) {
        int64_t start = chunk * TM_CHUNK, rest = view->n - start;
        read_chunk(table, &layout, view->dtype, start, rest < TM_CHUNK ? rest : TM_CHUNK, visitor,
                   &record.stats);
        if (chunks > 1) {
            tm_tree_push(&tree, &record, chunk, 1);
        }
    }
    *stats = chunks > 1 ? tm_tree_finish(&tree)->stats : record.stats;
}

static void read_stats(const void *context, size_t tensor, int64_t first, int64_t chunks, tm_record *record) {
    const stats_call *call = context;
    tm_statistics_read(call->table, &call->views[tensor], first, chunks, NULL, &record->stats);
}

static void take_stats(void *context, size_t tensor, const tm_record *record) {
    stats_call *call = context;
    call->out[tensor] = record->stats;
}

tm_status tm_tensor_stats(const tm_view *views, size_t count, int threads, tm_stats *out, tm_error *error) {
    stats_call call = {.views = views, .out = out};
    tm_status status = tm_table_require(&call.table, error);
    if (status != TM_OK) {
        return status;
    }
    tm_reduction reduction = {.table = call.table,
                              .views = views,
                              .count = count,
                              .read = read_stats,
                              .merge = tm_statistics_merge,
                              .take = take_stats,
                              .context = &call};
    return tm_reduction_run(&reduction, threads, error);
}

tm_status tm_merge_stats(const tm_stats *records, const int64_t *offsets, size_t count, tm_stats *out,
                         tm_error *error) {
    tm_tree tree;
    int64_t end = 0; /* of the pieces so far */

    tm_tree_init(&tree, tm_statistics_merge);
    for (size_t i = 0; i < count; i++) {
        tm_record record = {.stats = records[i]};
        int64_t start = offsets != NULL ? offsets[i] : end;
        if (records[i].n < 0 || start < end || records[i].n > INT64_MAX - start) {
            return tm_fail(error, TM_ERR_VALUE,
                           "record %zu: %lld elements from offset %lld, expected an offset of %lld or more",
                           i, (long long)records[i].n, (long long)start, (long long)end);
        }
        end = start + records[i].n;
        if (records[i].n == 0) {
            continue;
        }
        record.stats.first_bad += record.stats.first_bad >= 0 ? start : 0;
        tm_tree_push(&tree, &record, start / TM_CHUNK,
                     start % TM_CHUNK == 0 ? tm_chunks_of(records[i].n) : 0);
    }
    const tm_record *merged = tm_tree_finish(&tree);
    *out = merged != NULL ? merged->stats : empty_stats();
    return TM_OK;
}
