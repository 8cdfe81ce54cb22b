/* sign_agreement: two lists read side by side, block by block. */
#include "tm_sign.h"

#include "tm_pair.h"
#include "tm_work.h"

#include <math.h>

_Static_assert(TM_SIGN_ROOM * sizeof(double) <= TM_PAIR_BYTES, "a block fits beside its partner's");

static void merge_signs(tm_record *left, const tm_record *right) {
    left->signs.same += right->signs.same;
    left->signs.opposite += right->signs.opposite;
}

typedef struct sign_call {
    const tm_table *table;
    const tm_view *a, *b;
    uint8_t byte_signs[TM_DTYPE_COUNT][256]; /* of the one-byte dtypes in the lists */
    int64_t n;
    tm_sign_counts counts;
} sign_call;

static void set_byte_signs(sign_call *call, tm_dtype dtype) {
    const double *values = tm_byte_values(dtype);
    for (int code = 0; code < 256; code++) {
        call->byte_signs[dtype][code] = values[code] > 0   ? TM_SIGN_PLUS
                                        : values[code] < 0 ? TM_SIGN_MINUS
                                                           : TM_SIGN_NONE;
    }
}

static void set_all_byte_signs(sign_call *call, const tm_view *views, size_t count, int *seen) {
    for (size_t i = 0; i < count; i++) {
        const tm_dtype dtype = views[i].dtype;
        if (tm_dtype_is_byte(dtype) && !seen[dtype]) {
            set_byte_signs(call, dtype);
            seen[dtype] = 1;
        }
    }
}

static void read_signs(const void *context, size_t tensor, int64_t first, int64_t chunks, tm_record *record) {
    const sign_call *call = context;
    const tm_view *a = &call->a[tensor], *b = &call->b[tensor];
    const tm_sign_kernels *kernels = call->table->sign;
    const int64_t end = (first + chunks) * TM_CHUNK < a->n ? (first + chunks) * TM_CHUNK : a->n;
    _Alignas(64) uint8_t a_signs[TM_SIGN_ROOM], b_signs[TM_SIGN_ROOM];
    tm_pair pair;
    tm_pair_block block;

    tm_pair_init(&pair, a, b);
    record->signs = (tm_sign_counts){0, 0};
    for (int64_t at = first * TM_CHUNK; at < end; at += block.n) {
        tm_pair_take(&pair, at, end - at, TM_SIGN_ROOM, &block);
        kernels->of[a->dtype](a_signs, block.a, (size_t)block.n, call->byte_signs[a->dtype]);
        kernels->of[b->dtype](b_signs, block.b, (size_t)block.n, call->byte_signs[b->dtype]);
        kernels->count(&record->signs, a_signs, b_signs, (size_t)block.n);
    }
}

static void take_signs(void *context, size_t tensor, const tm_record *record) {
    sign_call *call = context;
    call->n += call->a[tensor].n;
    call->counts.same += record->signs.same;
    call->counts.opposite += record->signs.opposite;
}

tm_status tm_sign_agreement(const tm_view *a, const tm_view *b, size_t count, int threads, int64_t *n,
                            tm_sign_counts *counts, tm_error *error) {
    static const char *const names[] = {"a", "b"};
    int seen[TM_DTYPE_COUNT] = {0};
    sign_call call; /* its table of bytes is large and needs no zeros */
    tm_status status = tm_table_require(&call.table, error);
    if (status == TM_OK) {
        status = tm_pairs_check(a, b, count, names, 0, error);
    }
    if (status != TM_OK) {
        return status;
    }
    call.a = a;
    call.b = b;
    call.n = 0;
    call.counts = (tm_sign_counts){0, 0};
    set_all_byte_signs(&call, a, count, seen);
    set_all_byte_signs(&call, b, count, seen);
    tm_reduction reduction = {.table = call.table,
                              .views = a,
                              .count = count,
                              .read = read_signs,
                              .merge = merge_signs,
                              .take = take_signs,
                              .context = &call};
    status = tm_reduction_run(&reduction, threads, error);
    if (status == TM_OK) {
        *n = call.n;
        *counts = call.counts;
    }
    return status;
}
