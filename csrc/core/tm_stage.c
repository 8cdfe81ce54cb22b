/* stage: each block is read from memory by its statistics, and copied and folded from the first cache while
 * memory sends what comes later. */
#include "tm_stage.h"

#include "tm_layout.h"
#include "tm_print.h"
#include "tm_statistics.h"
#include "tm_work.h"

#include <string.h>

#define TM_STAGE_BLOCK 12288 /* bytes: source, fold window and lanes share a first cache of 32 KiB */
#define TM_STAGE_AHEAD 16384 /* bytes: what memory sends while a block is folded and stored */
#define TM_STREAM_BYTES ((size_t)4 << 20) /* an arena at least this large is written past the caches */

tm_status tm_stage_place(const tm_view *views, size_t count, int64_t *offsets, int64_t *bytes,
                         tm_error *error) {
    int64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        tm_status status = tm_layout_check(&views[i], i, error);
        if (status != TM_OK) {
            return status;
        }
        int64_t size = views[i].n * (int64_t)tm_dtype_size(views[i].dtype);
        end = (end + TM_STAGE_ALIGN - 1) / TM_STAGE_ALIGN * TM_STAGE_ALIGN;
        if (size > (INT64_C(1) << 60) - end) {
            return tm_fail(error, TM_ERR_VALUE, "tensor %zu: more than 2^60 bytes to stage", i);
        }
        offsets[i] = end;
        end += size;
    }
    *bytes = end;
    return TM_OK;
}

typedef struct stage_call {
    const tm_table *table;
    const tm_view *views;
    const int64_t *offsets; /* borrowed, [count] */
    int64_t bytes;          /* of the arena that are written */
    char *arena;
    int width, streaming;
    tm_stats *stats;       /* borrowed, [count] */
    uint64_t (*prints)[2]; /* borrowed, [count] */
    size_t count;
} stage_call;

typedef struct stage_block {
    const stage_call *call;
    size_t tensor;
    int64_t position; /* bytes of the tensor so far */
    tm_print print;
} stage_block;

/* Where the bytes TM_STAGE_AHEAD later come from, if they lie in one piece in this tensor or the next. */
static const char *bytes_ahead(const stage_block *block) {
    int64_t ahead = block->position + TM_STAGE_AHEAD;
    for (size_t i = block->tensor; i < block->call->count && i <= block->tensor + 1; i++) {
        const tm_view *view = &block->call->views[i];
        int64_t bytes = view->n * (int64_t)tm_dtype_size(view->dtype);
        if (view->strides != NULL) {
            return NULL;
        }
        if (ahead < bytes) {
            return (const char *)view->data + ahead;
        }
        ahead -= bytes;
    }
    return NULL;
}

static void stage_elements(void *context, const void *elements, int64_t count) {
    stage_block *block = context;
    const stage_call *call = block->call;
    char *to = call->arena + call->offsets[block->tensor] + block->position;
    size_t bytes = (size_t)count * block->print.item;
    if (call->streaming) {
        tm_print_copy(&block->print, elements, bytes, to, bytes_ahead(block));
    } else {
        memcpy(to, elements, bytes);
        tm_print_add(&block->print, elements, bytes);
    }
    block->position += (int64_t)bytes;
}

static void read_staged(const void *context, size_t tensor, int64_t first, int64_t chunks,
                        tm_record *record) {
    const stage_call *call = context;
    const tm_view *view = &call->views[tensor];
    size_t item = tm_dtype_size(view->dtype);
    int64_t position = first * TM_CHUNK * (int64_t)item;
    stage_block block = {.call = call, .tensor = tensor, .position = position};
    tm_visitor visitor = {.block = stage_elements, .context = &block, .most = TM_STAGE_BLOCK / (int64_t)item};

    record->staged.print = (tm_gf){0, 0};
    tm_print_begin(&block.print, call->table, call->width, item);
    tm_statistics_read(call->table, view, first, chunks, &visitor, &record->staged.stats);
    if (chunks > 0) {
        record->staged.print = tm_print_end(&block.print, (uint64_t)position);
    }
    if (first + chunks == tm_chunks_of(view->n)) { /* the gap up to the next tensor */
        int64_t next = tensor + 1 < call->count ? call->offsets[tensor + 1] : call->bytes;
        int64_t end = call->offsets[tensor] + block.position;
        memset(call->arena + end, 0, (size_t)(next - end));
    }
    if (call->streaming) {
        tm_print_fence(&block.print);
    }
}

static void merge_staged(tm_record *left, const tm_record *right) {
    left->staged.print = tm_gf_add(left->staged.print, right->staged.print);
    tm_statistics_merge(left, right);
}

static void take_staged(void *context, size_t tensor, const tm_record *record) {
    stage_call *call = context;
    call->stats[tensor] = record->staged.stats;
    call->prints[tensor][0] = record->staged.print.low;
    call->prints[tensor][1] = record->staged.print.high;
}

/* Whether any element of the view lies in [from, from + size). Addresses as numbers: they belong to different
 * objects. */
static int overlaps(const tm_view *view, uintptr_t from, size_t size) {
    uintptr_t low = (uintptr_t)view->data, high = low;
    if (view->n == 0 || size == 0) {
        return 0;
    }
    if (view->strides == NULL) {
        high += (uintptr_t)view->n * tm_dtype_size(view->dtype);
        return low < from + size && from < high;
    }
    for (int32_t axis = 0; axis < view->ndim; axis++) {
        int64_t reach = (view->shape[axis] - 1) * view->strides[axis];
        if (reach < 0) {
            low -= (uintptr_t)-reach;
        } else {
            high += (uintptr_t)reach;
        }
    }
    return low < from + size && from < high + tm_dtype_size(view->dtype);
}

tm_status tm_stage(const tm_view *views, size_t count, void *arena, size_t size, int bits, int threads,
                   tm_stats *stats, uint64_t (*prints)[2], const int64_t *offsets, tm_error *error) {
    stage_call call = {
        .views = views, .offsets = offsets, .arena = arena, .stats = stats, .prints = prints, .count = count};
    tm_status status = tm_table_require(&call.table, error);
    if (status == TM_OK) {
        status = tm_print_width(bits, &call.width, error);
    }
    if (status != TM_OK) {
        return status;
    }
    for (size_t i = 0; i < count; i++) {
        int64_t end = offsets[i] + views[i].n * (int64_t)tm_dtype_size(views[i].dtype);
        call.bytes = end > call.bytes ? end : call.bytes;
    }
    if ((uint64_t)call.bytes > size) {
        return tm_fail(error, TM_ERR_VALUE, "the arena has %zu bytes, the tensors need %lld", size,
                       (long long)call.bytes);
    }
    for (size_t i = 0; i < count; i++) {
        if (overlaps(&views[i], (uintptr_t)arena, (size_t)call.bytes)) {
            return tm_fail(error, TM_ERR_VALUE, "tensor %zu lies in the arena that it would be copied to", i);
        }
    }
    call.streaming = (size_t)call.bytes >= TM_STREAM_BYTES && (uintptr_t)arena % TM_STAGE_ALIGN == 0;
    tm_reduction reduction = {.table = call.table,
                              .views = views,
                              .count = count,
                              .read = read_staged,
                              .merge = merge_staged,
                              .take = take_staged,
                              .context = &call};
    return tm_reduction_run(&reduction, threads, error);
}
