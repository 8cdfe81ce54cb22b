/* Views to blocks. Strides of length-1 axes mean nothing and are dropped; a zero stride repeats an element; a
 * negative one runs backwards. Whatever is not contiguous and aligned is copied, element by element or run by
 * run, into a scratch block that stays in L1, and read there by the same kernel. */
#include "tm_layout.h"

#include <string.h>

tm_status tm_layout_check(const tm_view *view, size_t index, tm_error *error) {
    if ((unsigned)view->dtype >= TM_DTYPE_COUNT) {
        return tm_fail(error, TM_ERR_DTYPE, "tensor %zu: dtype %d is unknown", index, (int)view->dtype);
    }
    int64_t item = (int64_t)tm_dtype_size(view->dtype);
    if (view->n < 0 || view->n > INT64_MAX / item) {
        return tm_fail(error, TM_ERR_VALUE, "tensor %zu: %lld elements are out of range", index,
                       (long long)view->n);
    }
    if (view->data == NULL && view->n > 0) {
        return tm_fail(error, TM_ERR_VALUE, "tensor %zu: no data", index);
    }
    if (view->strides == NULL) {
        return TM_OK;
    }
    if (view->ndim < 0 || view->ndim > TM_MAX_NDIM) {
        return tm_fail(error, TM_ERR_VALUE, "tensor %zu: %d dimensions, at most %d are supported", index,
                       (int)view->ndim, TM_MAX_NDIM);
    }
    int64_t n = 1;
    for (int32_t axis = 0; axis < view->ndim; axis++) {
        int64_t length = view->shape[axis];
        if (length < 0 || (length > 0 && n > INT64_MAX / length)) {
            return tm_fail(error, TM_ERR_VALUE, "tensor %zu: axis %d has length %lld", index, (int)axis,
                           (long long)length);
        }
        n *= length;
    }
    if (n != view->n) {
        return tm_fail(error, TM_ERR_VALUE, "tensor %zu: its shape holds %lld elements, not %lld", index,
                       (long long)n, (long long)view->n);
    }
    return TM_OK;
}

static int is_aligned(const tm_layout *layout) {
    return ((uintptr_t)layout->data & (layout->item - 1)) == 0;
}

void tm_layout_init(tm_layout *layout, const tm_view *view) {
    layout->data = view->data;
    layout->n = view->n;
    layout->item = tm_dtype_size(view->dtype);
    layout->ndim = 0;
    int64_t item = (int64_t)layout->item;

    if (view->strides == NULL) {
        layout->shape[0] = view->n;
        layout->strides[0] = item;
        layout->ndim = 1;
    } else if (view->n > 0) {
        for (int32_t axis = 0; axis < view->ndim; axis++) {
            int64_t length = view->shape[axis], stride = view->strides[axis];
            if (length == 1) {
                continue;
            }
            int last = layout->ndim - 1;
            /* outer axis `last` and this one are one axis if a step of the outer is `length` steps of this;
             * divided rather than multiplied so that wild strides cannot overflow */
            if (last >= 0 && layout->strides[last] % length == 0 &&
                layout->strides[last] / length == stride) {
                layout->shape[last] *= length;
                layout->strides[last] = stride;
            } else {
                layout->shape[layout->ndim] = length;
                layout->strides[layout->ndim] = stride;
                layout->ndim++;
            }
        }
    }
    int contiguous = layout->n <= 1 || (layout->ndim == 1 && layout->strides[0] == item);
    layout->straight = contiguous && is_aligned(layout);
    if (layout->ndim == 0) { /* a scalar, misaligned perhaps */
        layout->shape[0] = 1;
        layout->strides[0] = item;
        layout->ndim = 1;
    }
}

/* `count` elements from one row to another; one of the strides is `item`. memcpy with a constant size is a
 * load and a store that need no alignment. */
#define TM_COPY(size, to_stride, from_stride)                                                                \
    for (int64_t i = 0; i < count; i++) {                                                                    \
        memcpy(to + i * (to_stride), from + i * (from_stride), (size));                                      \
    }
#define TM_COPY_ITEMS(size)                                                                                  \
    if (to_stride == (size)) {                                                                               \
        TM_COPY(size, (size), from_stride)                                                                   \
    } else {                                                                                                 \
        TM_COPY(size, to_stride, (size))                                                                     \
    }
static void copy_run(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t count,
                     size_t item) {
    if (to_stride == from_stride) {
        memcpy(to, from, (size_t)count * item);
        return;
    }
    switch (item) {
    case 1:
        TM_COPY_ITEMS(1)
        break;
    case 2:
        TM_COPY_ITEMS(2)
        break;
    case 4:
        TM_COPY_ITEMS(4)
        break;
    default:
        TM_COPY_ITEMS(8)
        break;
    }
}
#undef TM_COPY_ITEMS
#undef TM_COPY

/* Calls copy_run for each run of elements [start, start + count) along the last axis: from the view to `out`,
 * or to the view from `in`; the other one is NULL. */
static void walk(const tm_layout *layout, int64_t start, int64_t count, char *out, const char *in) {
    int last = layout->ndim - 1;
    int64_t at[TM_MAX_NDIM], item = (int64_t)layout->item;
    char *row = (char *)layout->data; /* written only with `in`: the caller says that it may be */

    for (int axis = last; axis >= 0; axis--) {
        at[axis] = start % layout->shape[axis];
        start /= layout->shape[axis];
        row += at[axis] * layout->strides[axis];
    }
    for (;;) {
        int64_t run = layout->shape[last] - at[last];
        run = run < count ? run : count;
        if (in != NULL) {
            copy_run(row, layout->strides[last], in, item, run, layout->item);
            in += run * item;
        } else {
            copy_run(out, item, row, layout->strides[last], run, layout->item);
            out += run * item;
        }
        count -= run;
        if (count == 0) {
            return;
        }
        row -= at[last] * layout->strides[last]; /* the run reached the axis' end: back to its start, */
        at[last] = 0;
        for (int axis = last - 1; axis >= 0; axis--) { /* and one step on the next axis out */
            row += layout->strides[axis];
            if (++at[axis] < layout->shape[axis]) {
                break;
            }
            row -= at[axis] * layout->strides[axis];
            at[axis] = 0;
        }
    }
}

const void *tm_layout_block(const tm_layout *layout, int64_t start, int64_t count, void *scratch,
                            int64_t *step) {
    if (layout->straight) {
        *step = count;
        return layout->data + start * (int64_t)layout->item;
    }
    int64_t room = TM_SCRATCH_BYTES / (int64_t)layout->item;
    *step = count < room ? count : room;
    walk(layout, start, *step, scratch, NULL);
    return scratch;
}

void tm_layout_store(const tm_layout *layout, int64_t start, int64_t count, const void *from) {
    walk(layout, start, count, NULL, from);
}
