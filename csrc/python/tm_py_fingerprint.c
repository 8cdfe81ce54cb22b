/* fingerprint: pieces as tuples of ints in, words and what was read out. */
#include "tm_functions.h"

#include "../core/tm_fingerprint.h"
#include "tm_arguments.h"
#include "tm_numpy.h"
#include "tm_prints.h"

PyObject *tm_prints_new(size_t count, uint64_t (**prints)[2]) {
    const int64_t shape[2] = {(int64_t)count, 2};
    void *data = NULL;
    PyObject *array = tm_numpy_new(TM_U64, 2, shape, &data);
    *prints = data;
    return array;
}

static PyObject *shape_tuple(const int64_t *shape, int ndim) {
    PyObject *tuple = PyTuple_New(ndim);
    for (int axis = 0; tuple != NULL && axis < ndim; axis++) {
        PyObject *length = PyLong_FromLongLong(shape[axis]);
        if (length == NULL)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, axis, length); /* stolen */
    }
    return tuple;
}

PyObject *tm_prints_kinds(const tm_views *views) {
    PyObject *list = PyList_New((Py_ssize_t)views->count);
    for (size_t i = 0; list != NULL && i < views->count; i++) {
        const tm_view *view = &views->views[i];
        PyObject *name = PyUnicode_InternFromString(tm_dtype_name(view->dtype));
        PyObject *shape = shape_tuple(view->shape, view->ndim);
        PyObject *pair = name != NULL && shape != NULL ? PyTuple_Pack(2, name, shape) : NULL;
        Py_XDECREF(name);
        Py_XDECREF(shape);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, pair); /* stolen */
    }
    return list;
}

/* `ndim` ints of a tuple; -1 with a Python error. */
static int read_axes(PyObject *tuple, size_t position, const char *what, int ndim, int64_t *out) {
    char name[64];
    if (PyTuple_GET_SIZE(tuple) != ndim) {
        PyErr_Format(PyExc_ValueError, "pieces[%zu]: the %s has %zd axes, the tensor %d", position, what,
                     PyTuple_GET_SIZE(tuple), ndim);
        return -1;
    }
    PyOS_snprintf(name, sizeof name, "pieces[%zu]: an axis of the %s", position, what);
    for (int axis = 0; axis < ndim; axis++)
        if (tm_arguments_int(PyTuple_GET_ITEM(tuple, axis), name, 0, INT64_MAX, &out[axis]) < 0)
            return -1;
    return 0;
}

/* A tuple of None or (global shape, start); pieces and axes are freed by the caller, also on failure. */
static int read_pieces(PyObject *tuple, const tm_views *views, tm_piece **pieces, int64_t **axes) {
    size_t total = 0;
    if (!PyTuple_Check(tuple) || (size_t)PyTuple_GET_SIZE(tuple) != views->count) {
        PyErr_Format(PyExc_ValueError, "pieces must have one entry for each of the %zu tensors",
                     views->count);
        return -1;
    }
    for (size_t i = 0; i < views->count; i++)
        total += 2 * (size_t)views->views[i].ndim;
    *pieces = PyMem_Calloc(views->count + 1, sizeof **pieces);
    *axes = PyMem_Calloc(total + 1, sizeof **axes);
    if (*pieces == NULL || *axes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    int64_t *next = *axes;
    for (size_t i = 0; i < views->count; i++) {
        PyObject *piece = PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), *whole, *start;
        const int ndim = views->views[i].ndim;
        if (piece == Py_None)
            continue;
        if (!PyArg_ParseTuple(piece, "O!O!", &PyTuple_Type, &whole, &PyTuple_Type, &start))
            return -1;
        if (read_axes(whole, i, "global shape", ndim, next) < 0 ||
            read_axes(start, i, "start", ndim, next + ndim) < 0)
            return -1;
        (*pieces)[i] = (tm_piece){.whole = next, .start = next + ndim};
        next += 2 * ndim;
    }
    return 0;
}

PyObject *tm_py_fingerprint(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL, *prints = NULL, *kinds = NULL;
    uint64_t (*words)[2] = NULL;
    tm_piece *pieces = NULL;
    int64_t *axes = NULL, bits = 0;
    tm_views views;
    tm_error error;
    int threads;
    if (tm_arguments_count("fingerprint", count, 4) < 0 ||
        tm_arguments_int(args[2], "bits", 64, 128, &bits) < 0 || tm_arguments_threads(args[3], &threads) < 0)
        return NULL;
    if (tm_views_open_as(&views, tm_state_of(module), args[0], Py_None, "tensors", TM_VIEWS_SHAPES) < 0)
        goto done;
    if (args[1] != Py_None && read_pieces(args[1], &views, &pieces, &axes) < 0)
        goto done;
    prints = tm_prints_new(views.count, &words);
    kinds = prints != NULL ? tm_prints_kinds(&views) : NULL;
    if (kinds == NULL)
        goto done;
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status =
        tm_fingerprint(views.views, pieces, views.count, (int)bits, threads, words, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = PyTuple_Pack(2, prints, kinds);
done:
    Py_XDECREF(prints);
    Py_XDECREF(kinds);
    PyMem_Free(pieces);
    PyMem_Free(axes);
    tm_views_close(&views);
    return result;
}
