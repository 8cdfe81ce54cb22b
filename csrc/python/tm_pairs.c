#include "tm_pairs.h"

/* New reference: the shape as a tuple; for error messages. */
static PyObject *shape_tuple(const tm_view *view) {
    PyObject *shape = PyTuple_New(view->ndim);
    for (int32_t axis = 0; shape != NULL && axis < view->ndim; axis++) {
        PyObject *length = PyLong_FromLongLong((long long)view->shape[axis]);
        if (length == NULL)
            Py_CLEAR(shape);
        else
            PyTuple_SET_ITEM(shape, axis, length); /* stolen */
    }
    return shape;
}

static int same_shape(const tm_view *a, const tm_view *b) {
    if (a->ndim != b->ndim)
        return 0;
    for (int32_t axis = 0; axis < a->ndim; axis++) {
        if (a->shape[axis] != b->shape[axis])
            return 0;
    }
    return 1;
}

static void refuse_shape(tm_views *b, size_t position, const tm_view *wanted_view, const char *partner) {
    PyObject *shape = shape_tuple(&b->views[position]), *wanted = shape_tuple(wanted_view);
    if (shape != NULL && wanted != NULL)
        tm_views_refuse(b, (Py_ssize_t)position, PyExc_ValueError, "has shape %S, %s has %S", shape, partner,
                        wanted);
    Py_XDECREF(shape);
    Py_XDECREF(wanted);
}

int tm_pairs_agree(const tm_views *a, tm_views *b, const char *items, const char *partner, int same_dtype) {
    if (a->count != b->count) {
        PyErr_Format(PyExc_ValueError, "%s has %zu arrays for %zu %s", b->argument, b->count, a->count,
                     items);
        return -1;
    }
    for (size_t i = 0; i < a->count; i++) {
        const tm_view *first = &a->views[i], *second = &b->views[i];
        if (same_dtype && first->dtype != second->dtype) {
            tm_views_refuse(b, (Py_ssize_t)i, PyExc_TypeError, "has dtype %s, %s has %s",
                            tm_dtype_name(second->dtype), partner, tm_dtype_name(first->dtype));
            return -1;
        }
        if (!same_shape(first, second)) {
            refuse_shape(b, i, first, partner);
            return -1;
        }
    }
    return 0;
}
