/* diff_norm: two lists of views that must agree, one call of the core. */
#include "tm_functions.h"

#include "../core/tm_diff.h"
#include "tm_arguments.h"
#include "tm_numpy.h"
#include "tm_pairs.h"

/* (float64 [2, count]: norm, previous_norm; int64 [3, count]: n, n_same, n_nonfinite). */
static PyObject *columns(const tm_difference *each, size_t count) {
    const int64_t float_shape[] = {2, (int64_t)count}, int_shape[] = {3, (int64_t)count};
    void *float_data = NULL, *int_data = NULL;
    PyObject *floats = tm_numpy_new(TM_F64, 2, float_shape, &float_data);
    PyObject *ints = tm_numpy_new(TM_I64, 2, int_shape, &int_data), *result = NULL;
    if (floats != NULL && ints != NULL) {
        double *norms = float_data;
        int64_t *counts = int_data;
        for (size_t i = 0; i < count; i++) {
            norms[i] = tm_one_nan(each[i].norm);
            norms[count + i] = tm_one_nan(each[i].previous_norm);
            counts[i] = each[i].n;
            counts[count + i] = each[i].n_same;
            counts[2 * count + i] = each[i].n_nonfinite;
        }
        result = PyTuple_Pack(2, floats, ints);
    }
    Py_XDECREF(floats);
    Py_XDECREF(ints);
    return result;
}

PyObject *tm_py_diff_norm(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL, *arrays = NULL;
    tm_difference total, *each = NULL;
    tm_views tensors, previous;
    tm_error error;
    int threads;
    if (tm_arguments_count("diff_norm", count, 5) < 0)
        return NULL;
    const int update = PyObject_IsTrue(args[2]);
    const int wants_each = update < 0 ? -1 : PyObject_IsTrue(args[3]);
    if (wants_each < 0 || tm_arguments_threads(args[4], &threads) < 0)
        return NULL;
    if (tm_views_open_as(&tensors, state, args[0], Py_None, "tensors", TM_VIEWS_SHAPES) < 0) {
        tm_views_close(&tensors);
        return NULL;
    }
    const int flags = TM_VIEWS_SHAPES | (update ? TM_VIEWS_WRITABLE : 0);
    if (tm_views_open_as(&previous, state, args[1], Py_None, "previous", flags) < 0)
        goto done;
    if (tm_pairs_agree(&tensors, &previous, "tensors", "its tensor", 1) < 0)
        goto done;
    if (wants_each) {
        each = PyMem_New(tm_difference, tensors.count > 0 ? tensors.count : 1); /* owned */
        if (each == NULL) {
            PyErr_NoMemory();
            goto done;
        }
    }
    PyThreadState *thread = tm_drop_gil(tensors.bytes + previous.bytes);
    const tm_status status =
        tm_diff_norm(tensors.views, previous.views, tensors.count, update, threads, &total, each, &error);
    tm_take_gil(thread);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        goto done;
    }
    arrays = wants_each ? columns(each, tensors.count) : Py_NewRef(Py_None);
    if (arrays != NULL)
        result =
            Py_BuildValue("(ddLLLO)", tm_one_nan(total.norm), tm_one_nan(total.previous_norm),
                          (long long)total.n, (long long)total.n_same, (long long)total.n_nonfinite, arrays);
done:
    Py_XDECREF(arrays);
    PyMem_Free(each);
    tm_views_close(&previous);
    tm_views_close(&tensors);
    return result;
}
