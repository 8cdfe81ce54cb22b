/* attention_logits: checks, bundles of heads, units for the workers, sums of their results in a fixed order.
 */
#include "tm_attention.h"

#include "tm_attention_parts.h"
#include "tm_memory.h"
#include "tm_threads.h"
#include "tm_wide.h"

#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define WORKER_PRODUCTS 8e6 /* multiplications that are worth a thread: 0.2 ms or so */
#define MAX_DEPTH 65536

tm_attention_mask tm_attention_mask_of(const tm_attention_call *call, int64_t batch) {
    const tm_attention *input = call->input;
    const int64_t number = input->mask_batches > 1 ? batch : 0;
    tm_attention_mask mask = {.bounds = input->bounds + 2 * number * input->row_count, .keys = call->keys};
    if (input->kept != NULL) {
        mask.kept = input->kept + input->kept_starts[number];
        mask.keys = input->kept_starts[number + 1] - input->kept_starts[number];
    }
    return mask;
}

/* ---- checks ---- */

static tm_status check_view(const tm_table *table, const tm_view *view, const char *name, tm_error *error) {
    if ((unsigned)view->dtype < TM_DTYPE_COUNT && view->dtype != TM_F64 &&
        (view->dtype >= TM_I8 || !tm_wide_has_f32(table, view->dtype))) {
        return tm_fail(error, TM_ERR_DTYPE, "%s must be floats, not %s", name, tm_dtype_name(view->dtype));
    }
    if (view->ndim < 3) {
        return tm_fail(error, TM_ERR_VALUE, "%s must be [..., heads, sequence, depth], not of %d axes", name,
                       (int)view->ndim);
    }
    return tm_layout_check(view, 0, error);
}

static tm_status check_shapes(tm_attention_call *call, tm_error *error) {
    const tm_view *q = &call->input->q, *k = &call->input->k;
    const int ndim = q->ndim;
    int same = k->ndim == ndim && q->shape[ndim - 1] == k->shape[ndim - 1];
    call->batches = 1;
    for (int axis = 0; axis < ndim - 3 && same; axis++) {
        same = q->shape[axis] == k->shape[axis];
        call->batches *= q->shape[axis];
    }
    if (!same) {
        return tm_fail(error, TM_ERR_VALUE,
                       "q and k differ in the axes before the heads, or in the last one");
    }
    call->heads = q->shape[ndim - 3];
    call->key_heads = k->shape[ndim - 3];
    call->queries = q->shape[ndim - 2];
    call->keys = k->shape[ndim - 2];
    call->depth = q->shape[ndim - 1];
    if (call->key_heads < 1 || call->heads % call->key_heads != 0) {
        return tm_fail(error, TM_ERR_VALUE, "%lld heads of q can't share %lld heads of k",
                       (long long)call->heads, (long long)call->key_heads);
    }
    if (call->depth < 1 || call->depth > MAX_DEPTH) {
        return tm_fail(error, TM_ERR_VALUE, "the last axis must have a length from 1 to %d, not %lld",
                       MAX_DEPTH, (long long)call->depth);
    }
    return TM_OK;
}

/* Ascending and within [0, limit). */
static int ascends(const int64_t *list, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; i++) {
        if (list[i] < (i > 0 ? list[i - 1] + 1 : 0) || list[i] >= limit) {
            return 0;
        }
    }
    return 1;
}

static tm_status check_mask(const tm_attention_call *call, tm_error *error) {
    const tm_attention *input = call->input;
    int good = (input->mask_batches == 1 || input->mask_batches == call->batches) && input->row_count >= 0;
    good = good && (input->rows != NULL ? ascends(input->rows, input->row_count, call->queries)
                                        : input->row_count == call->queries);
    for (int64_t b = 0; good && b < input->mask_batches; b++) {
        if (input->kept != NULL) {
            const int64_t start = input->kept_starts[b], count = input->kept_starts[b + 1] - start;
            good = start >= 0 && count >= 0 && ascends(input->kept + start, count, call->keys);
        }
        const tm_attention_mask mask = tm_attention_mask_of(call, b);
        for (int64_t i = 0; good && i < input->row_count; i++) {
            good = mask.bounds[2 * i] >= 0 && mask.bounds[2 * i] <= mask.bounds[2 * i + 1] &&
                   mask.bounds[2 * i + 1] <= mask.keys;
        }
    }
    if (!good) {
        return tm_fail(error, TM_ERR_VALUE, "rows, bounds or kept keys lie outside of q and k");
    }
    if (!isfinite(input->scale) || (float)input->scale == 0.0f || !(input->cap >= 0)) {
        return tm_fail(error, TM_ERR_VALUE, "scale must be finite and not 0, a cap not negative");
    }
    return TM_OK;
}

/* ---- bundles ---- */

/* Heads of one key head, TM_BUNDLE_HEADS at most; more of them than heads there can't be. */
static tm_status make_bundles(tm_attention_call *call, tm_error *error) {
    const int64_t group = call->heads / call->key_heads;
    int64_t widest = 1;
    call->bundles = tm_allocate((size_t)call->heads + 1, sizeof *call->bundles);
    if (call->bundles == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory for %lld heads", (long long)call->heads);
    }
    for (int64_t head = 0; head < call->heads; head++) {
        tm_bundle *bundle = &call->bundles[call->bundle_count];
        if (call->input->heads != NULL && !call->input->heads[head]) {
            continue;
        }
        if (call->bundle_count > 0 && bundle[-1].key_head == head / group &&
            bundle[-1].count < TM_BUNDLE_HEADS) {
            bundle--;
        } else {
            bundle->key_head = head / group;
            bundle->count = 0;
            call->bundle_count++;
        }
        bundle->head[bundle->count++] = head;
        widest = bundle->count > widest ? bundle->count : widest;
    }
    call->block_rows = TM_TILE_ROWS / widest;
    call->blocks = (call->input->row_count + call->block_rows - 1) / call->block_rows;
    return TM_OK;
}

/* ---- work ---- */

typedef struct shared {
    const tm_attention_call *call;
    void (*work)(const tm_attention_call *call, int64_t number, float *scratch);
    int64_t count;
    float *scratch; /* [workers][floats] */
    size_t floats;  /* a multiple of 16: workers share no cache line, and doubles are aligned */
    atomic_llong next;
    atomic_size_t next_worker;
} shared;

/* From the end: with a causal mask the last units are the longest. */
static void work_on(void *context) {
    shared *s = context;
    float *scratch =
        s->scratch + atomic_fetch_add_explicit(&s->next_worker, 1, memory_order_relaxed) * s->floats;
    int64_t done;
    while ((done = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) < s->count) {
        s->work(s->call, s->count - 1 - done, scratch);
    }
}

/* Products of a pass over all scores. */
static double products(const tm_attention_call *call) {
    const tm_attention *input = call->input;
    double pairs = 0;
    for (int64_t i = 0; i < input->mask_batches * input->row_count; i++) {
        pairs += (double)(input->bounds[2 * i + 1] - input->bounds[2 * i]);
    }
    const double repeats = input->mask_batches > 1 ? 1.0 : (double)call->batches;
    return pairs * repeats * (double)call->depth * (double)call->heads;
}

static tm_status run(const tm_attention_call *call,
                     void (*work)(const tm_attention_call *call, int64_t number, float *scratch),
                     int64_t count, size_t floats, double worth, tm_error *error) {
    shared s = {.call = call, .work = work, .count = count, .floats = (floats + 31) / 16 * 16};
    int64_t workers = call->input->threads < TM_MAX_WORKERS ? call->input->threads : TM_MAX_WORKERS;
    workers = (double)workers > worth ? (int64_t)worth : workers;
    workers = workers > count ? count : workers;
    workers = workers < 1 ? 1 : workers;
    while ((s.scratch = tm_allocate((size_t)workers * s.floats, sizeof *s.scratch)) == NULL && workers > 1) {
        workers /= 2;
    }
    if (s.scratch == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory for a tile of scores");
    }
    atomic_init(&s.next, 0);
    atomic_init(&s.next_worker, 0);
    if (workers > 1) {
        tm_threads_run((int)workers, work_on, &s);
    } else {
        work_on(&s);
    }
    free(s.scratch);
    return TM_OK;
}

/* ---- results ---- */

static void add(tm_attention_sums *to, const tm_attention_sums *from) {
    const double max = from->max > to->max || from->max != from->max ? from->max : to->max;
#define TM_ADD(name) to->name += from->name;
    TM_ATTENTION_FIELDS(TM_ADD)
#undef TM_ADD
    to->max = max;
}

/* Units in their order, so that the sums are those of one worker. */
static void collect(const tm_attention_call *call, tm_attention_sums *out) {
    const int64_t passes = call->batches * call->bundle_count;
    for (int64_t head = 0; head < call->heads; head++) {
        out[head] = (tm_attention_sums){.max = -INFINITY};
    }
    for (int64_t item = 0; item < passes; item++) {
        const tm_bundle *bundle = &call->bundles[item % call->bundle_count];
        for (int g = 0; g < bundle->count; g++) {
            tm_attention_sums *head = &out[bundle->head[g]];
            for (int64_t block = 0; call->sums != NULL && block < call->blocks; block++) {
                add(head, &call->sums[(item * call->blocks + block) * TM_BUNDLE_HEADS + g]);
            }
            if (call->means != NULL) {
                add(head, &call->means[item * TM_BUNDLE_HEADS + g]);
            }
        }
    }
}

tm_status tm_attention_logits(const tm_attention *input, const tm_attention_each *each,
                              tm_attention_sums *out, tm_error *error) {
    const tm_attention_each none = {0};
    tm_attention_call call = {.input = input, .each = each != NULL ? each : &none};
    tm_status status = tm_table_require(&call.table, error);
    if (status != TM_OK || (status = check_view(call.table, &input->q, "q", error)) != TM_OK ||
        (status = check_view(call.table, &input->k, "k", error)) != TM_OK ||
        (status = check_shapes(&call, error)) != TM_OK || (status = check_mask(&call, error)) != TM_OK ||
        (status = make_bundles(&call, error)) != TM_OK) {
        goto done;
    }
    const int64_t passes = call.batches * call.bundle_count, units = passes * call.blocks;
    const double worth = products(&call) / WORKER_PRODUCTS;
    if (input->scores) {
        call.status = tm_allocate((size_t)(call.batches * call.heads * input->row_count) + 1, 1);
        call.sums = tm_allocate((size_t)units * TM_BUNDLE_HEADS + 1, sizeof *call.sums);
    }
    if (input->cap == 0) {
        call.means = tm_allocate((size_t)passes * TM_BUNDLE_HEADS + 1, sizeof *call.means);
    }
    if ((input->scores && (call.status == NULL || call.sums == NULL)) ||
        (input->cap == 0 && call.means == NULL)) {
        status = tm_fail(error, TM_ERR_MEMORY, "no memory for the sums of %lld units", (long long)units);
        goto done;
    }
    if (input->scores) {
        status = run(&call, tm_attention_unit, units, tm_attention_unit_floats(call.depth), worth, error);
    }
    if (status == TM_OK && input->cap == 0) {
        status = run(&call, tm_attention_mean, passes, tm_attention_mean_floats(call.depth), worth, error);
    }
    if (status == TM_OK) {
        collect(&call, out);
    }
done:
    free(call.bundles);
    free(call.status);
    free(call.sums);
    free(call.means);
    return status;
}
