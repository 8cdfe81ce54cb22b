/* stable_rank: matrices and warm vectors in, one tuple a matrix and the next warm vectors out. */
#include "tm_functions.h"

#include "../core/tm_spectral.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

/* Sets the warm vectors of one tensor's matrices. `carried` is None or (rows, float32 [matrices, 2,
 * columns]); one that does not fit the tensor's shape means a cold start. -1 with a Python error. */
static int read_warm(PyObject *carried, tm_matrix *matrices, int64_t count) {
    int64_t rows, shape[3];
    void *data;
    if (carried == Py_None)
        return 0;
    if (!PyTuple_Check(carried) || PyTuple_GET_SIZE(carried) != 2) {
        PyErr_SetString(PyExc_TypeError, "state must be what an earlier call of stable_rank returned");
        return -1;
    }
    if (tm_arguments_int(PyTuple_GET_ITEM(carried, 0), "rows", 0, INT64_MAX, &rows) < 0 ||
        tm_numpy_read(PyTuple_GET_ITEM(carried, 1), "the state's vectors", TM_F32, 3, 0, &data, shape) < 0)
        return -1;
    if (count == 0 || shape[0] != count || shape[1] != TM_SPECTRAL_WARM || shape[2] != matrices->columns ||
        rows != matrices->rows)
        return 0;
    for (int64_t i = 0; i < count; i++)
        matrices[i].warm = (const float *)data + i * TM_SPECTRAL_WARM * shape[2];
    return 0;
}

/* New reference: None for matrices that carry nothing, or (rows, vectors) with the vectors to be written. */
static PyObject *new_warm(tm_matrix *matrices, int64_t count, int64_t exact_side) {
    if (count == 0 || matrices->rows <= exact_side || matrices->columns <= exact_side)
        return Py_NewRef(Py_None);
    const int64_t shape[3] = {count, TM_SPECTRAL_WARM, matrices->columns};
    void *data = NULL;
    PyObject *vectors = tm_numpy_new(TM_F32, 3, shape, &data);
    if (vectors == NULL)
        return NULL;
    for (int64_t i = 0; i < count; i++)
        matrices[i].warm_after = (float *)data + i * TM_SPECTRAL_WARM * shape[2];
    return Py_BuildValue("(LN)", (long long)matrices->rows, vectors); /* N: gives the reference up */
}

static PyObject *list_of(const tm_spectral *found, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list != NULL && i < count; i++) {
        const tm_spectral *one = &found[i];
        PyObject *item = Py_BuildValue("(dddddLL)", one->stable_rank, one->low, one->high, one->sigma,
                                       one->norm, (long long)one->passes, (long long)one->stopped_by);
        if (item == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item); /* stolen */
    }
    return list;
}

/* The views' matrices, one after the other: *matrices is PyMem memory. Returns their number, -1 with an
 * error.
 */
static Py_ssize_t take_matrices(const tm_views *views, tm_matrix **matrices) {
    Py_ssize_t count = 0;
    for (size_t i = 0; i < views->count; i++)
        count += (Py_ssize_t)tm_matrix_count(&views->views[i]);
    *matrices = PyMem_Calloc((size_t)count + 1, sizeof **matrices);
    if (*matrices == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    tm_matrix *next = *matrices;
    for (size_t i = 0; i < views->count; i++) {
        for (int64_t j = 0; j < tm_matrix_count(&views->views[i]); j++)
            tm_matrix_init(next++, &views->views[i], j);
    }
    return count;
}

/* (matrices, carried, tolerance, epsilon, seed, step, exact_side, threads): carried is None or a tuple as
 * long as the list, its entries as in read_warm. */
PyObject *tm_py_stable_rank(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL, *list = NULL, *carry = NULL;
    tm_spectral_options options = {0};
    tm_matrix *matrices = NULL;
    tm_spectral *found = NULL;
    int64_t step = 0;
    tm_views views;
    tm_error error;
    if (tm_arguments_count("stable_rank", count, 8) < 0)
        return NULL;
    options.tolerance = PyFloat_AsDouble(args[2]);
    options.epsilon = PyErr_Occurred() ? 0 : PyFloat_AsDouble(args[3]);
    options.seed = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[4]);
    if (PyErr_Occurred() || tm_arguments_int(args[5], "step", 0, UINT32_MAX, &step) < 0 ||
        tm_arguments_int(args[6], "exact_side", 0, 1024, &options.exact_side) < 0 ||
        tm_arguments_threads(args[7], &options.threads) < 0)
        return NULL;
    options.step = (uint32_t)step;
    if (tm_views_open_as(&views, tm_state_of(module), args[0], Py_None, "matrices", TM_VIEWS_SHAPES) < 0)
        goto done;
    if (args[1] != Py_None &&
        (!PyTuple_Check(args[1]) || PyTuple_GET_SIZE(args[1]) != (Py_ssize_t)views.count)) {
        PyErr_Format(PyExc_ValueError, "state is that of another list: this one has %zu tensors",
                     views.count);
        goto done;
    }
    const Py_ssize_t total = take_matrices(&views, &matrices);
    if (total < 0)
        goto done;
    carry = PyTuple_New((Py_ssize_t)views.count);
    found = PyMem_Calloc((size_t)total + 1, sizeof *found);
    if (carry == NULL || found == NULL) {
        if (found == NULL)
            PyErr_NoMemory();
        goto done;
    }
    tm_matrix *next = matrices;
    for (size_t i = 0; i < views.count; i++) {
        const int64_t own = tm_matrix_count(&views.views[i]);
        if (args[1] != Py_None && read_warm(PyTuple_GET_ITEM(args[1], i), next, own) < 0)
            goto done;
        PyObject *entry = new_warm(next, own, options.exact_side);
        if (entry == NULL)
            goto done;
        PyTuple_SET_ITEM(carry, (Py_ssize_t)i, entry); /* stolen */
        next += own;
    }
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status = tm_stable_rank(matrices, (size_t)total, &options, found, &error);
    tm_take_gil(thread);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        goto done;
    }
    list = list_of(found, total);
    if (list != NULL)
        result = PyTuple_Pack(2, list, carry);
done:
    Py_XDECREF(list);
    Py_XDECREF(carry);
    PyMem_Free(found);
    PyMem_Free(matrices);
    tm_views_close(&views);
    return result;
}
