/* scan_nonfinite: the first non-finite element in list order, then C order. */
#include "tm_layout.h"
#include "tm_threads.h"
#include "tm_work.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

/* Index of the first non-finite element of [start, start + count), -1 if none. */
static int64_t find_in_range(const tm_table *table, const tm_view *view, int64_t start, int64_t count) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    size_t (*find)(const void *, size_t) = table->scan->find[view->dtype];
    tm_layout layout;
    int64_t step;

    if (find == NULL) {
        return -1;
    }
    tm_layout_init(&layout, view);
    for (int64_t done = 0; done < count; done += step) {
        int64_t rest = count - done;
        const void *block = tm_layout_block(&layout, start + done, rest, scratch, &step);
        size_t found = find(block, (size_t)step);
        if (found < (size_t)step) {
            return start + done + (int64_t)found;
        }
    }
    return -1;
}

static double element_value(const tm_view *view, int64_t index) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    tm_layout layout;
    int64_t step;
    uint16_t half;
    float single;
    double value;

    tm_layout_init(&layout, view);
    const void *element = tm_layout_block(&layout, index, 1, scratch, &step);
    switch (view->dtype) {
    case TM_F64:
        memcpy(&value, element, sizeof value);
        break;
    case TM_F32:
        memcpy(&single, element, sizeof single);
        value = single;
        break;
    case TM_F16:
    case TM_BF16: /* non-finite: mantissa 0 is an infinity, in float16 as in bfloat16 */
        memcpy(&half, element, sizeof half);
        value = (half & (view->dtype == TM_F16 ? 0x3ff : 0x7f)) != 0 ? (double)NAN : (double)INFINITY;
        value = half & 0x8000 ? -value : value;
        break;
    default:
        value = tm_byte_values(view->dtype)[*(const unsigned char *)element];
        break;
    }
    return isnan(value) ? (double)NAN : value;
}

typedef struct shared_scan {
    const tm_table *table;
    const tm_view *views;
    const tm_plan *plan;
    atomic_size_t next;
    atomic_size_t first_hit; /* lowest unit with a hit so far; plan->count if none */
} shared_scan;

static int64_t find_in_unit(const tm_table *table, const tm_view *views, const tm_unit *unit) {
    const tm_view *view = &views[unit->tensor];
    int64_t start = unit->first * TM_CHUNK, rest = view->n - start, most = unit->chunks * TM_CHUNK;
    return find_in_range(table, view, start, rest < most ? rest : most);
}

/* Units are taken in order and a worker stops only behind a hit, so every unit before the lowest hit has been
 * searched: the lowest hit is the first. Its index is found again by the caller, in one unit. */
static void scan_units(void *context) {
    shared_scan *shared = context;
    for (;;) {
        size_t i = atomic_fetch_add_explicit(&shared->next, 1, memory_order_relaxed);
        size_t hit = atomic_load_explicit(&shared->first_hit, memory_order_relaxed);
        if (i >= hit) {
            return;
        }
        if (find_in_unit(shared->table, shared->views, &shared->plan->units[i]) >= 0) {
            while (i < hit && !atomic_compare_exchange_weak_explicit(
                                  &shared->first_hit, &hit, i, memory_order_relaxed, memory_order_relaxed)) {
            }
        }
    }
}

static void report(tm_nonfinite *out, const tm_view *views, size_t tensor, int64_t index) {
    out->tensor = (int64_t)tensor;
    out->index = index;
    out->value = element_value(&views[tensor], index);
}

tm_status tm_scan_nonfinite(const tm_view *views, size_t count, int threads, tm_nonfinite *out,
                            tm_error *error) {
    const tm_table *table;
    tm_plan plan;
    tm_status status = tm_table_require(&table, error);
    if (status != TM_OK) {
        return status;
    }
    status = tm_plan_make(&plan, table, views, count, threads, error);
    if (status != TM_OK) {
        return status;
    }
    *out = (tm_nonfinite){-1, -1, 0.0};
    if (plan.workers > 1) {
        shared_scan shared = {
            .table = table, .views = views, .plan = &plan, .next = 0, .first_hit = plan.count};
        tm_threads_run(plan.workers, scan_units, &shared);
        if (shared.first_hit < plan.count) {
            const tm_unit *unit = &plan.units[shared.first_hit];
            report(out, views, unit->tensor, find_in_unit(table, views, unit));
        }
    } else {
        for (size_t i = 0; i < count && out->tensor < 0; i++) {
            int64_t index = find_in_range(table, &views[i], 0, views[i].n);
            if (index >= 0) {
                report(out, views, i, index);
            }
        }
    }
    tm_plan_release(&plan);
    return TM_OK;
}
