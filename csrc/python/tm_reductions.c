/* tensor_stats, merge_stats, multi_norm, scan_nonfinite, plain_read: arguments in, one call of the core,
 * values out. All views are taken first; the GIL is dropped once, for work that is worth it. */
#include "tm_functions.h"

#include "../core/tm_reduce.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

PyObject *tm_py_tensor_stats(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL;
    tm_stats *records = NULL;
    tm_views views;
    tm_error error;
    int threads;
    if (tm_arguments_count("tensor_stats", count, 3) < 0 || tm_arguments_threads(args[2], &threads) < 0)
        return NULL;
    if (tm_views_open(&views, state, args[0], args[1]) < 0)
        goto done;
    result = tm_numpy_new_stats(state->stats_dtype, (Py_ssize_t)views.count, &records);
    if (result == NULL)
        goto done;
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status = tm_tensor_stats(views.views, views.count, threads, records, &error);
    tm_take_gil(thread);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        Py_CLEAR(result);
    }
done:
    tm_views_close(&views);
    return result;
}

PyObject *tm_py_merge_stats(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    const tm_stats *records = NULL;
    const int64_t *offsets = NULL;
    Py_ssize_t record_count = 0, offset_count = 0;
    tm_error error;
    if (tm_arguments_count("merge_stats", count, 2) < 0)
        return NULL;
    if (tm_numpy_read_stats(args[0], state->stats_dtype, &records, &record_count) < 0)
        return NULL;
    if (args[1] != Py_None) {
        if (tm_numpy_read_int64(args[1], &offsets, &offset_count) < 0)
            return NULL;
        if (offset_count != record_count) {
            PyErr_Format(PyExc_ValueError, "offsets has %zd entries for %zd records", offset_count,
                         record_count);
            return NULL;
        }
    }
    tm_stats *merged = NULL;
    PyObject *result = tm_numpy_new_stats(state->stats_dtype, -1, &merged);
    if (result == NULL)
        return NULL;
    const tm_status status = tm_merge_stats(records, offsets, (size_t)record_count, merged, &error);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        Py_CLEAR(result);
    }
    return result;
}

PyObject *tm_py_multi_norm(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL, *norms = NULL;
    double *per_tensor = NULL, total = 0;
    tm_views views;
    tm_error error;
    int threads;
    if (tm_arguments_count("multi_norm", count, 4) < 0)
        return NULL;
    const long order = PyLong_AsLong(args[1]);
    if (order == -1 && PyErr_Occurred())
        return NULL;
    if (order != TM_NORM_2 && order != TM_NORM_1 && order != TM_NORM_INF) {
        PyErr_Format(PyExc_ValueError, "order code %ld is unknown", order);
        return NULL;
    }
    const int wants_each = PyObject_IsTrue(args[2]);
    if (wants_each < 0 || tm_arguments_threads(args[3], &threads) < 0)
        return NULL;
    if (tm_views_open(&views, state, args[0], Py_None) < 0)
        goto done;
    if (wants_each) {
        norms = tm_numpy_new_float64((Py_ssize_t)views.count, &per_tensor);
        if (norms == NULL)
            goto done;
    }
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status =
        tm_multi_norm(views.views, views.count, (tm_norm_order)order, threads, &total, per_tensor, &error);
    tm_take_gil(thread);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        goto done;
    }
    for (size_t i = 0; per_tensor != NULL && i < views.count; i++)
        per_tensor[i] = tm_one_nan(per_tensor[i]);
    result =
        wants_each ? Py_BuildValue("(dO)", tm_one_nan(total), norms) : PyFloat_FromDouble(tm_one_nan(total));
done:
    Py_XDECREF(norms);
    tm_views_close(&views);
    return result;
}

PyObject *tm_py_scan_nonfinite(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    tm_nonfinite found;
    tm_views views;
    tm_error error;
    int threads;
    if (tm_arguments_count("scan_nonfinite", count, 3) < 0 || tm_arguments_threads(args[2], &threads) < 0)
        return NULL;
    if (tm_views_open(&views, tm_state_of(module), args[0], args[1]) < 0)
        goto done;
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status = tm_scan_nonfinite(views.views, views.count, threads, &found, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else if (found.tensor < 0)
        result = Py_NewRef(Py_None);
    else
        result = Py_BuildValue("(LLd)", (long long)found.tensor, (long long)found.index, found.value);
done:
    tm_views_close(&views);
    return result;
}

PyObject *tm_py_plain_read(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    tm_views views;
    if (tm_arguments_count("plain_read", count, 1) < 0)
        return NULL;
    if (tm_views_open(&views, tm_state_of(module), args[0], Py_None) < 0)
        goto done;
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const uint64_t sum = tm_plain_read_views(views.views, views.count);
    tm_take_gil(thread);
    result = PyLong_FromUnsignedLongLong(sum);
done:
    tm_views_close(&views);
    return result;
}
