/* exponent_histogram, cast_losses: arguments in, one call of the core, counts out. */
#include "tm_functions.h"

#include "../core/tm_histogram.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

#include <math.h>

typedef struct cast_request {
    tm_format formats[TM_MAX_FORMATS];
    size_t count;
    double scale;
} cast_request;

/* Counts of the tensors, a new int64 array of rows, one a tensor or one over all: of exponents, or of what
 * `casts` would lose. */
static PyObject *count_tensors(PyObject *module, PyObject *tensors, const cast_request *casts, int per_tensor,
                               int threads) {
    const size_t width = casts != NULL ? TM_CAST_WIDTH(casts->count) : TM_HISTOGRAM_WIDTH;
    PyObject *rows = NULL;
    void *counts = NULL;
    tm_views views;
    tm_error error;
    if (tm_views_open(&views, tm_state_of(module), tensors, Py_None) < 0)
        goto done;
    const int64_t shape[2] = {per_tensor ? (int64_t)views.count : 1, (int64_t)width};
    rows = tm_numpy_new(TM_I64, 2, shape, &counts);
    if (rows == NULL)
        goto done;
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status =
        casts != NULL ? tm_cast_losses(views.views, views.count, casts->formats, casts->count, casts->scale,
                                       per_tensor, threads, counts, &error)
                      : tm_exponent_histogram(views.views, views.count, per_tensor, threads, counts, &error);
    tm_take_gil(thread);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        Py_CLEAR(rows);
    }
done:
    tm_views_close(&views);
    return rows;
}

PyObject *tm_py_exponent_histogram(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int threads;
    if (tm_arguments_count("exponent_histogram", count, 3) < 0 || tm_arguments_threads(args[2], &threads) < 0)
        return NULL;
    const int per_tensor = PyObject_IsTrue(args[1]);
    return per_tensor < 0 ? NULL : count_tensors(module, args[0], NULL, per_tensor, threads);
}

/* 0, or -1 with a TypeError or a ValueError that names the format and those that there are. */
static int read_formats(PyObject *names, cast_request *casts) {
    if (!PyTuple_Check(names)) {
        PyErr_SetString(PyExc_TypeError, "to must be a tuple of names of formats");
        return -1;
    }
    if (PyTuple_GET_SIZE(names) > TM_MAX_FORMATS) {
        PyErr_Format(PyExc_ValueError, "to has %zd formats, at most %d are taken at once",
                     PyTuple_GET_SIZE(names), TM_MAX_FORMATS);
        return -1;
    }
    casts->count = (size_t)PyTuple_GET_SIZE(names);
    for (size_t f = 0; f < casts->count; f++) {
        PyObject *item = PyTuple_GET_ITEM(names, (Py_ssize_t)f);
        if (!PyUnicode_Check(item)) {
            PyErr_Format(PyExc_TypeError, "to[%zu] must be a str, not %.80s", f, Py_TYPE(item)->tp_name);
            return -1;
        }
        const char *name = PyUnicode_AsUTF8(item);
        if (name == NULL)
            return -1;
        casts->formats[f] = tm_format_from_name(name);
        if (casts->formats[f] == TM_FORMAT_COUNT) {
            PyErr_Format(PyExc_ValueError,
                         "to[%zu]: %R is no format; there are fp32, fp16, bf16, e4m3fn, e5m2, e4m3, e3m4, "
                         "e4m3fnuz, e4m3b11fnuz, e5m2fnuz, e2m3fn, e3m2fn and e2m1fn",
                         f, item);
            return -1;
        }
    }
    return 0;
}

PyObject *tm_py_cast_losses(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    cast_request casts;
    int threads;
    if (tm_arguments_count("cast_losses", count, 5) < 0 || read_formats(args[1], &casts) < 0 ||
        tm_arguments_threads(args[4], &threads) < 0)
        return NULL;
    casts.scale = PyFloat_AsDouble(args[2]);
    if (casts.scale == -1 && PyErr_Occurred())
        return NULL;
    if (!(isfinite(casts.scale) && casts.scale > 0)) {
        PyErr_Format(PyExc_ValueError, "scale must be a finite number above 0, not %R", args[2]);
        return NULL;
    }
    const int per_tensor = PyObject_IsTrue(args[3]);
    return per_tensor < 0 ? NULL : count_tensors(module, args[0], &casts, per_tensor, threads);
}
