#include "tm_overlap.h"

#include "tm_memory.h"

#include <stdlib.h>
#include <string.h>

int tm_same_view(const tm_view *a, const tm_view *b) {
    if (a->data != b->data || a->n != b->n || a->dtype != b->dtype) {
        return 0;
    }
    if (a->strides == NULL || b->strides == NULL) {
        return a->strides == b->strides;
    }
    size_t axes = (size_t)a->ndim * sizeof *a->strides;
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, axes) == 0 &&
           memcmp(a->strides, b->strides, axes) == 0;
}

typedef struct span {
    uintptr_t begin, end;
    size_t position;
    int written;
} span;

static span span_of(const tm_view *view, size_t position, int written) {
    span result = {(uintptr_t)view->data, (uintptr_t)view->data, position, written};
    uintptr_t item = tm_dtype_size(view->dtype);
    if (view->strides == NULL) {
        result.end += (uintptr_t)view->n * item;
        return result;
    }
    for (int32_t axis = 0; axis < view->ndim; axis++) {
        uintptr_t reach = (uintptr_t)(view->shape[axis] - 1) * (uintptr_t)view->strides[axis];
        if (view->strides[axis] < 0) {
            result.begin += reach; /* wraps: a step back */
        } else {
            result.end += reach;
        }
    }
    result.end += item;
    return result;
}

static int by_begin(const void *left, const void *right) {
    const span *a = left, *b = right;
    return (a->begin > b->begin) - (a->begin < b->begin);
}

static tm_status refuse(const span *a, const span *b, const char *const names[2], tm_error *error) {
    const span *written = a->written ? a : b, *other = a->written ? b : a;
    return tm_fail(error, TM_ERR_VALUE,
                   "%s[%zu]: its memory overlaps that of %s[%zu], and this call writes to it: pass a copy",
                   names[1], written->position, names[other->written], other->position);
}

/* In the order of their beginnings a span overlaps an earlier one if it begins before the furthest end seen:
 * of all spans for a written one, of the written ones for one that is only read. */
static tm_status sweep(const span *spans, size_t count, const char *const names[2], tm_error *error) {
    const span *furthest = NULL, *furthest_written = NULL;
    for (size_t i = 0; i < count; i++) {
        const span *this = &spans[i], *before = this->written ? furthest : furthest_written;
        if (before != NULL && this->begin < before->end) {
            return refuse(before, this, names, error);
        }
        if (furthest == NULL || this->end > furthest->end) {
            furthest = this;
        }
        if (this->written && (furthest_written == NULL || this->end > furthest_written->end)) {
            furthest_written = this;
        }
    }
    return TM_OK;
}

tm_status tm_overlap_check(const tm_view *read, const tm_view *written, size_t count,
                           const char *const names[2], tm_error *error) {
    size_t used = 0;
    span *spans = tm_allocate(count > 0 ? count : 1, 2 * sizeof *spans);
    if (spans == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory to compare the places of %zu tensors", count);
    }
    for (size_t i = 0; i < count; i++) {
        if (written[i].n > 0) {
            spans[used++] = span_of(&written[i], i, 1);
        }
        if (read[i].n > 0 && !tm_same_view(&read[i], &written[i])) {
            spans[used++] = span_of(&read[i], i, 0);
        }
    }
    qsort(spans, used, sizeof *spans, by_begin);
    tm_status status = sweep(spans, used, names, error);
    free(spans);
    return status;
}
