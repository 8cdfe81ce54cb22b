/* diff_norm: two lists read side by side, block by block. */
#include "tm_diff.h"

#include "tm_overlap.h"
#include "tm_pair.h"
#include "tm_rescue.h"
#include "tm_work.h"

#include <math.h>
#include <string.h>

static void merge_diff(tm_record *left, const tm_record *right) {
    tm_diff_record *a = &left->diff;
    const tm_diff_record *b = &right->diff;
    a->diff = tm_scaled_add(a->diff, b->diff);
    a->weight = tm_scaled_add(a->weight, b->weight);
    a->n_same += b->n_same;
    a->n_nonfinite += b->n_nonfinite;
}

typedef struct diff_call {
    const tm_table *table;
    const tm_view *views, *previous;
    int update;
    tm_difference *per_tensor; /* borrowed, [count] or NULL */
    int64_t n;                 /* elements taken so far */
    tm_tree *total;            /* borrowed, for it is large and needs no zeros */
} diff_call;

/* A tensor and its previous. */
typedef struct job {
    const tm_table *table;
    tm_dtype dtype;
    int store;    /* the tensor goes to its previous */
    tm_pair pair; /* tensor, previous */
} job;

static void store(const job *p, int64_t start, int64_t count) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    int64_t step;
    for (int64_t done = 0; done < count; done += step) {
        const void *now = tm_layout_block(&p->pair.a, start + done, count - done, scratch, &step);
        tm_layout_store(&p->pair.b, start + done, step, now);
    }
}

/* The norm kernels over the differences of a float64 chunk: for the rescue only. factor 0: the largest
 * magnitude, else the sum of squares of factor * difference. */
static double read_differences(const job *p, int64_t start, int64_t count, double factor) {
    const tm_norm_kernels *norm = p->table->norm;
    int order = factor == 0 ? TM_KERNEL_NORM_INF : TM_KERNEL_NORM_2;
    double difference[TM_PAIR_BYTES / sizeof(double)];
    tm_norm_state state;
    tm_pair_block b;

    memset(&state, 0, offsetof(tm_norm_state, bytes));
    for (int64_t done = 0; done < count; done += b.n) {
        tm_pair_take(&p->pair, start + done, count - done, TM_PAIR_BYTES / sizeof(double), &b);
        const double *now = b.a, *before = b.b;
        for (int64_t i = 0; i < b.n; i++) {
            difference[i] = now[i] - before[i];
        }
        if (factor == 0) {
            norm->block[order][TM_F64](&state, difference, (size_t)b.n);
        } else {
            norm->scaled_f64(&state, difference, (size_t)b.n, factor);
        }
    }
    norm->finish[order][TM_F64](&state, NULL);
    return state.total;
}

/* Differences of equal bits are 0 or, then the sum shows it, NaN: there is nothing to look for. */
static void rescue(const job *p, int64_t start, int64_t count, tm_diff_record *record) {
    if (tm_needs_rescue(record->diff.value) && record->n_same < count) {
        double absmax = read_differences(p, start, count, 0);
        if (absmax > 0 && isfinite(absmax)) {
            int exponent = tm_rescue_exponent(absmax);
            record->diff = (tm_scaled){read_differences(p, start, count, ldexp(1.0, -exponent)), exponent};
        }
    }
    record->weight = tm_rescued_f64(p->table, &p->pair.b, start, count, record->weight.value);
}

/* One chunk. What is read again must not be overwritten before: a float64 chunk is stored when its sums are
 * final, other dtypes by the kernel while they are in the first cache. */
static void read_chunk(const job *p, int64_t start, int64_t count, tm_diff_record *record) {
    const int store_late = p->dtype == TM_F64, straight = p->pair.a.straight && p->pair.b.straight;
    const int64_t room = straight ? count : TM_PAIR_BYTES / (int64_t)p->pair.a.item;
    tm_diff_state state;
    tm_pair_block b;

    memset(&state, 0, sizeof state);
    for (int64_t done = 0; done < count; done += b.n) {
        tm_pair_take(&p->pair, start + done, count - done, room, &b);
        void *to = p->store && !store_late && straight ? (void *)b.b : NULL;
        p->table->diff->block[p->dtype](&state, b.a, b.b, to, (size_t)b.n, tm_byte_values(p->dtype));
        if (p->store && !store_late && !straight) {
            tm_layout_store(&p->pair.b, start + done, b.n, b.a);
        }
    }
    p->table->diff->finish(&state);
    *record =
        (tm_diff_record){{state.total_diff, 0}, {state.total_weight, 0}, state.n_same, state.n_nonfinite};
    if (p->dtype == TM_F64) {
        rescue(p, start, count, record);
    }
    if (p->store && store_late) {
        store(p, start, count);
    }
}

static void read_diff(const void *context, size_t tensor, int64_t first, int64_t chunks, tm_record *record) {
    const diff_call *call = context;
    const tm_view *now = &call->views[tensor], *before = &call->previous[tensor];
    job p; /* its layouts are large and need no zeros */
    tm_tree tree;

    p.table = call->table;
    p.dtype = now->dtype;
    p.store = call->update && !tm_same_view(now, before);
    tm_pair_init(&p.pair, now, before);
    record->diff = (tm_diff_record){{0, 0}, {0, 0}, 0, 0};
    tm_tree_init(&tree, merge_diff);
    for (int64_t chunk = first; chunk < first + chunks; chunk++) {
        int64_t start = chunk * TM_CHUNK, rest = now->n - start;
        read_chunk(&p, start, rest < TM_CHUNK ? rest : TM_CHUNK, &record->diff);
        if (chunks > 1) {
            tm_tree_push(&tree, record, chunk, 1);
        }
    }
    if (chunks > 1) {
        *record = *tm_tree_finish(&tree);
    }
}

static tm_difference finish_diff(const tm_diff_record *record, int64_t n) {
    return (tm_difference){.norm = tm_scaled_root(record->diff),
                           .previous_norm = tm_scaled_root(record->weight),
                           .n = n,
                           .n_same = record->n_same,
                           .n_nonfinite = record->n_nonfinite};
}

static void take_diff(void *context, size_t tensor, const tm_record *record) {
    diff_call *call = context;
    int64_t n = call->views[tensor].n;
    if (call->per_tensor != NULL) {
        call->per_tensor[tensor] = finish_diff(&record->diff, n);
    }
    call->n += n;
    tm_tree_push(call->total, record, (int64_t)tensor, 1);
}

tm_status tm_diff_norm(const tm_view *views, const tm_view *previous, size_t count, int update, int threads,
                       tm_difference *total, tm_difference *per_tensor, tm_error *error) {
    static const char *const names[] = {"tensors", "previous"};
    tm_tree tree;
    diff_call call = {
        .views = views, .previous = previous, .update = update, .per_tensor = per_tensor, .total = &tree};
    tm_status status = tm_table_require(&call.table, error);
    if (status == TM_OK) {
        status = tm_pairs_check(views, previous, count, names, 1, error);
    }
    if (status == TM_OK && update) {
        status = tm_overlap_check(views, previous, count, names, error);
    }
    if (status != TM_OK) {
        return status;
    }
    tm_tree_init(&tree, merge_diff);
    tm_reduction reduction = {.table = call.table,
                              .views = views,
                              .count = count,
                              .read = read_diff,
                              .merge = merge_diff,
                              .take = take_diff,
                              .context = &call};
    status = tm_reduction_run(&reduction, threads, error);
    if (status == TM_OK) {
        const tm_record *sum = tm_tree_finish(&tree);
        *total = sum != NULL ? finish_diff(&sum->diff, call.n) : (tm_difference){.n = 0};
    }
    return status;
}
