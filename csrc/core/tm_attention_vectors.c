/* Query and key rows of any float dtype and layout as floats. */
#include "tm_attention_parts.h"

#include "tm_wide.h"

#include <limits.h>

/* The memory of [batch, head, 0, 0] and the strides of the last two axes. */
void tm_vectors_init(tm_vectors *vectors, const tm_table *table, const tm_view *view, int64_t batch,
                     int64_t head, const int64_t *kept) {
    const int ndim = view->ndim;
    const int64_t item = (int64_t)tm_dtype_size(view->dtype);
    int64_t strides[TM_MAX_NDIM], step = item, offset = 0;
    for (int axis = ndim - 1; axis >= 0; axis--) {
        strides[axis] = view->strides != NULL ? view->strides[axis] : step;
        step *= view->shape[axis];
    }
    offset += head * strides[ndim - 3];
    for (int axis = ndim - 4; axis >= 0; axis--) {
        offset += batch % view->shape[axis] * strides[axis];
        batch /= view->shape[axis];
    }
    const int64_t rows = view->shape[ndim - 2], depth = view->shape[ndim - 1];
    const int64_t row_stride = strides[ndim - 2], column_stride = strides[ndim - 1];
    const tm_view plane = {.data = (const char *)view->data + offset,
                           .shape = view->shape + (ndim - 2),
                           .strides = strides + (ndim - 2),
                           .n = rows * depth,
                           .ndim = 2,
                           .dtype = view->dtype};
    vectors->table = table;
    vectors->dtype = view->dtype;
    vectors->depth = depth;
    vectors->kept = kept;
    vectors->direct = NULL;
    vectors->stride = depth;
    tm_layout_init(&vectors->layout, &plane);
    /* what BLAS takes as it is: rows in order, apart by an int of elements */
    if (view->dtype == TM_F32 && (column_stride == item || depth == 1) &&
        ((uintptr_t)plane.data | (uintptr_t)row_stride) % sizeof(float) == 0 && row_stride >= depth * item &&
        row_stride / item <= INT_MAX) {
        vectors->direct = plane.data;
        vectors->stride = row_stride / item;
    }
}

void tm_vectors_copy(const tm_vectors *vectors, int64_t row, int64_t count, float *out) {
    const int64_t start = row * vectors->depth, n = count * vectors->depth;
    if (vectors->dtype != TM_F64) {
        tm_wide_f32(vectors->table, &vectors->layout, vectors->dtype, start, n, out);
        return;
    }
    double wide[512];
    int64_t step;
    for (int64_t done = 0; done < n; done += step) {
        step = n - done < 512 ? n - done : 512;
        tm_wide_f64(vectors->table, &vectors->layout, TM_F64, start + done, step, wide);
        for (int64_t i = 0; i < step; i++) {
            out[done + i] = (float)wide[i];
        }
    }
}

const float *tm_vectors_read(const tm_vectors *vectors, int64_t first, int64_t count, float *scratch,
                             int64_t *stride) {
    const int64_t *kept = vectors->kept;
    int64_t start = kept != NULL ? kept[first] : first;
    if (kept != NULL && kept[first + count - 1] != start + count - 1) { /* gaps: run by run */
        int64_t run;
        for (int64_t done = 0; done < count; done += run) {
            start = kept[first + done];
            for (run = 1; done + run < count && kept[first + done + run] == start + run;) {
                run++;
            }
            tm_vectors_copy(vectors, start, run, scratch + done * vectors->depth);
        }
    } else if (vectors->direct != NULL) {
        *stride = vectors->stride;
        return vectors->direct + start * vectors->stride;
    } else {
        tm_vectors_copy(vectors, start, count, scratch);
    }
    *stride = vectors->depth;
    return scratch;
}
