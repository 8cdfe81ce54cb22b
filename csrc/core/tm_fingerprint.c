/* fingerprint: tensors and pieces of tensors as runs of bytes at known positions. */
#include "tm_fingerprint.h"

#include "tm_layout.h"
#include "tm_print.h"
#include "tm_work.h"

#include <string.h>

/* A position must leave room for 8 * position in 64 bits. */
#define TM_MAX_BYTES (INT64_C(1) << 60)

/* A piece in its whole: runs of consecutive bytes, numbered in C order. */
typedef struct piece_runs {
    int64_t elements;                                 /* of one run */
    int64_t item, first;                              /* bytes: of an element, before the first run */
    int ndim;                                         /* axes that count the runs */
    int64_t shape[TM_MAX_NDIM], strides[TM_MAX_NDIM]; /* strides in bytes of the whole */
} piece_runs;

static void place_runs(piece_runs *runs, const tm_view *view, const tm_piece *piece) {
    int64_t stride = (int64_t)tm_dtype_size(view->dtype);
    *runs = (piece_runs){.elements = view->n, .item = stride};
    if (piece == NULL || piece->whole == NULL) {
        return;
    }
    int axis = view->ndim - 1;
    for (; axis > 0 && view->shape[axis] == piece->whole[axis]; axis--) {
        stride *= view->shape[axis];
    }
    if (view->n == 0 || axis < 0) {
        return;
    }
    runs->elements = stride / runs->item * view->shape[axis];
    runs->first = stride * piece->start[axis];
    runs->ndim = axis;
    while (axis-- > 0) {
        stride *= piece->whole[axis + 1];
        runs->first += stride * piece->start[axis];
        runs->shape[axis] = view->shape[axis];
        runs->strides[axis] = stride;
    }
}

static int64_t run_position(const piece_runs *runs, int64_t run) {
    int64_t position = runs->first;
    for (int axis = runs->ndim - 1; axis >= 0; axis--) {
        position += run % runs->shape[axis] * runs->strides[axis];
        run /= runs->shape[axis];
    }
    return position;
}

static tm_status check_piece(const tm_view *view, const tm_piece *piece, size_t index, tm_error *error) {
    int64_t bytes = (int64_t)tm_dtype_size(view->dtype);
    if (piece == NULL || piece->whole == NULL) {
        return view->n <= TM_MAX_BYTES / bytes
                   ? TM_OK
                   : tm_fail(error, TM_ERR_VALUE, "tensor %zu: more than 2^60 bytes", index);
    }
    for (int axis = 0; axis < view->ndim; axis++) {
        int64_t whole = piece->whole[axis], start = piece->start[axis], length = view->shape[axis];
        if (start < 0 || start > whole || length > whole - start) {
            return tm_fail(error, TM_ERR_VALUE,
                           "tensor %zu: axis %d of its piece, %lld elements from %lld, is not inside the "
                           "whole's %lld",
                           index, axis, (long long)length, (long long)start, (long long)whole);
        }
        if (whole > 0 && bytes > TM_MAX_BYTES / whole) {
            return tm_fail(error, TM_ERR_VALUE, "tensor %zu: its whole has more than 2^60 bytes", index);
        }
        bytes *= whole > 0 ? whole : 1;
    }
    return TM_OK;
}

typedef struct print_call {
    const tm_table *table;
    const tm_view *views;
    const tm_piece *pieces; /* borrowed, [count] or NULL */
    int width;
    uint64_t (*out)[2]; /* borrowed, [count] */
} print_call;

/* Elements [start, start + count) as if their first byte were at 0. */
static tm_gf read_elements(const print_call *call, const tm_layout *layout, int64_t start, int64_t count) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    int64_t step;
    if (count <= TM_PRINT_SMALL / (int64_t)layout->item) {
        const void *block = tm_layout_block(layout, start, count, scratch, &step);
        return tm_print_small(call->table, call->width, block, (size_t)count * layout->item, layout->item);
    }
    tm_print print;
    tm_print_begin(&print, call->table, call->width, layout->item);
    for (int64_t done = 0; done < count; done += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        tm_print_add(&print, block, (size_t)step * layout->item);
    }
    return tm_print_end(&print, 0);
}

#define TM_FILLED_BYTES 4096 /* a multiple of TM_PRINT_ROW */

/* A stream of elements and of zeros between them. */
typedef struct filled {
    tm_print print;
    size_t used;
    _Alignas(64) char bytes[TM_FILLED_BYTES];
} filled;

/* from: NULL for zeros. */
static void append(filled *stream, const char *from, int64_t count) {
    while (count > 0) {
        int64_t room = TM_FILLED_BYTES - (int64_t)stream->used, part = count < room ? count : room;
        if (from != NULL) {
            memcpy(stream->bytes + stream->used, from, (size_t)part);
            from += part;
        } else {
            memset(stream->bytes + stream->used, 0, (size_t)part);
        }
        stream->used += (size_t)part;
        count -= part;
        if (stream->used == TM_FILLED_BYTES) {
            tm_print_add(&stream->print, stream->bytes, TM_FILLED_BYTES);
            stream->used = 0;
        }
    }
}

/* Elements of several runs as if the first byte were at 0 and the gaps between them held zeros. */
static tm_gf read_runs(const print_call *call, const tm_layout *layout, const piece_runs *runs, int64_t start,
                       int64_t count) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    int64_t gap = runs->strides[runs->ndim - 1] - runs->elements * runs->item;
    int64_t rest = runs->elements - start % runs->elements, step; /* of a run */
    filled stream;
    stream.used = 0;
    tm_print_begin(&stream.print, call->table, call->width, layout->item);
    for (; count > 0; count -= step, start += step) {
        if (rest == 0) {
            append(&stream, NULL, gap);
            rest = runs->elements;
        }
        const void *block = tm_layout_block(layout, start, rest < count ? rest : count, scratch, &step);
        append(&stream, block, step * runs->item);
        rest -= step;
    }
    tm_print_add(&stream.print, stream.bytes, stream.used);
    return tm_print_end(&stream.print, 0);
}

/* Elements that are read at one go: a run, or all runs along the last axis of them where reading zeros
 * between is faster than closing each print (a Zen 4 core, 8 column shards of float32 [4096, 1024]: 1.6 and 4
 * GB/s). */
static int64_t span_of(const piece_runs *runs) {
    if (runs->ndim > 0) {
        int64_t run = runs->elements * runs->item, gap = runs->strides[runs->ndim - 1] - run;
        if (gap <= TM_FILLED_BYTES + 4 * run) {
            return runs->elements * runs->shape[runs->ndim - 1];
        }
    }
    return runs->elements;
}

/* Powers of z as factors: rows of a piece lie at equal distances, which makes a table worth its while. */
typedef struct byte_shifter {
    const print_call *call;
    int64_t latest, tabled; /* distances in bytes; 0: none */
    tm_gf_multiplier multiplier;
} byte_shifter;

static tm_gf shift(byte_shifter *shifter, tm_gf print, int64_t bytes) {
    const print_call *call = shifter->call;
    if (bytes == 0 || (print.low | print.high) == 0) {
        return print;
    }
    if (bytes != shifter->tabled) {
        tm_gf factor = tm_gf_power(call->table, call->width, 8 * (uint64_t)bytes);
        int again = bytes == shifter->latest;
        shifter->latest = bytes;
        if (!again) {
            return tm_gf_multiply(call->width, print, factor);
        }
        tm_gf_multiplier_init(&shifter->multiplier, call->width, factor);
        shifter->tabled = bytes;
    }
    return tm_gf_multiplier_apply(&shifter->multiplier, print);
}

/* From the last span to the first: what is there already moves up by the distance to the span before it. */
static void read_print(const void *context, size_t tensor, int64_t first, int64_t chunks, tm_record *record) {
    const print_call *call = context;
    const tm_view *view = &call->views[tensor];
    int64_t begin = first * TM_CHUNK, end = begin + chunks * TM_CHUNK, position = 0;
    tm_layout layout;
    piece_runs runs;
    byte_shifter shifter = {.call = call};

    record->print = (tm_gf){0, 0};
    if (chunks == 0) {
        return;
    }
    tm_layout_init(&layout, view);
    place_runs(&runs, view, call->pieces != NULL ? &call->pieces[tensor] : NULL);
    end = end < view->n ? end : view->n;
    const int64_t span = span_of(&runs);
    while (end > begin) {
        int64_t start = (end - 1) / span * span;
        start = start > begin ? start : begin;
        int64_t run = start / runs.elements;
        int64_t here = run_position(&runs, run) + (start - run * runs.elements) * runs.item;
        tm_gf print = span > runs.elements ? read_runs(call, &layout, &runs, start, end - start)
                                           : read_elements(call, &layout, start, end - start);
        record->print = tm_gf_add(shift(&shifter, record->print, position - here), print);
        position = here;
        end = start;
    }
    record->print = shift(&shifter, record->print, position);
}

static void merge_print(tm_record *left, const tm_record *right) {
    left->print = tm_gf_add(left->print, right->print);
}

static void take_print(void *context, size_t tensor, const tm_record *record) {
    print_call *call = context;
    call->out[tensor][0] = record->print.low;
    call->out[tensor][1] = record->print.high;
}

tm_status tm_fingerprint(const tm_view *views, const tm_piece *pieces, size_t count, int bits, int threads,
                         uint64_t (*out)[2], tm_error *error) {
    print_call call = {.views = views, .pieces = pieces, .out = out};
    tm_status status = tm_table_require(&call.table, error);
    if (status == TM_OK) {
        status = tm_print_width(bits, &call.width, error);
    }
    for (size_t i = 0; i < count && status == TM_OK; i++) {
        status = tm_layout_check(&views[i], i, error);
        if (status == TM_OK) {
            status = check_piece(&views[i], pieces != NULL ? &pieces[i] : NULL, i, error);
        }
    }
    if (status != TM_OK) {
        return status;
    }
    tm_reduction reduction = {.table = call.table,
                              .views = views,
                              .count = count,
                              .read = read_print,
                              .merge = merge_print,
                              .take = take_print,
                              .context = &call};
    return tm_reduction_run(&reduction, threads, error);
}
