/* Matrices as rows: which axis is which, and where a row lies. */
#include "tm_spectral_parts.h"

int64_t tm_matrix_count(const tm_view *view) {
    return view->ndim == 3 ? view->shape[0] : 1;
}

void tm_matrix_init(tm_matrix *matrix, const tm_view *view, int64_t index) {
    const int first = view->ndim == 3, ndim = view->ndim - first; /* axes of one matrix */
    int64_t item = (int64_t)tm_dtype_size(view->dtype);
    *matrix = (tm_matrix){.data = view->data,
                          .dtype = view->dtype,
                          .ndim = ndim,
                          .strided = view->strides != NULL,
                          .rows = 1,
                          .columns = 1};
    for (int axis = 0; axis < ndim; axis++) {
        int64_t length = view->shape[first + axis];
        matrix->shape[axis] = length;
        if (view->strides != NULL) {
            matrix->strides[axis] = view->strides[first + axis];
        }
        if (axis == 0 && ndim > 1) {
            matrix->rows = length;
        } else {
            matrix->columns *= length;
        }
    }
    if (matrix->columns == 0) {
        matrix->rows = 0;
    }
    if (first && index > 0) {
        int64_t step = view->strides != NULL ? view->strides[0] : matrix->rows * matrix->columns * item;
        matrix->data = (const char *)view->data + index * step;
    }
    if (ndim == 2 && view->strides != NULL && matrix->strides[1] != item && matrix->strides[0] == item) {
        matrix->rows = matrix->shape[1];
        matrix->columns = matrix->shape[0];
        matrix->shape[0] = matrix->rows;
        matrix->shape[1] = matrix->columns;
        matrix->strides[0] = matrix->strides[1];
        matrix->strides[1] = item;
    }
}

void tm_rows_init(tm_rows *rows, const tm_table *table, const tm_matrix *matrix) {
    const tm_view view = {.data = matrix->data,
                          .shape = matrix->shape,
                          .strides = matrix->strided ? matrix->strides : NULL,
                          .n = matrix->rows * matrix->columns,
                          .ndim = matrix->ndim,
                          .dtype = matrix->dtype};
    tm_layout *layout = &rows->layout;
    rows->table = table;
    rows->dtype = matrix->dtype;
    rows->rows = matrix->rows;
    rows->columns = matrix->columns;
    rows->wide = matrix->dtype == TM_F64;
    tm_layout_init(layout, &view);
    int64_t item = (int64_t)layout->item;
    rows->direct = layout->straight;
    rows->row_stride = matrix->columns * item;
    if (!layout->straight && layout->ndim == 2 && layout->shape[0] == matrix->rows &&
        layout->strides[1] == item) {
        uintptr_t places = (uintptr_t)layout->data | (uintptr_t)layout->strides[0];
        rows->direct = places % layout->item == 0;
        rows->row_stride = layout->strides[0];
    }
}

const void *tm_rows_piece(const tm_rows *rows, int64_t row, int64_t first, int64_t count, void *scratch) {
    if (rows->direct) {
        return rows->layout.data + row * rows->row_stride + first * (int64_t)rows->layout.item;
    }
    int64_t step; /* never short: `count` elements fit the scratch */
    return tm_layout_block(&rows->layout, row * rows->columns + first, count, scratch, &step);
}
