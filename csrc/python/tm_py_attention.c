/* attention_logits: q, k and a mask in intervals in; the sums of each head, and of each row if wanted, out.
 */
#include "tm_functions.h"

#include "../core/tm_attention.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

#include <string.h>

#define FIELDS (sizeof(tm_attention_sums) / sizeof(double))

/* One array, opened as a list of one, so that errors name the argument. */
static int open_one(tm_views *views, tm_state *state, PyObject *object, const char *argument) {
    PyObject *list = PyTuple_Pack(1, object);
    if (list == NULL)
        return -1;
    const int done = tm_views_open_as(views, state, list, Py_None, argument, TM_VIEWS_SHAPES);
    Py_DECREF(list);
    if (done == 0 && views->views[0].ndim < 3) {
        PyErr_Format(PyExc_ValueError, "%s must be [..., heads, sequence, depth], not of %d axes", argument,
                     (int)views->views[0].ndim);
        return -1;
    }
    return done;
}

/* A 1-D array of `wanted` elements (any number if negative, which comes back), or None for NULL. */
static int read_list(PyObject *object, const char *name, tm_dtype dtype, int64_t *wanted, const void **data) {
    int64_t shape[1];
    void *memory = NULL;
    *data = NULL;
    if (object == Py_None)
        return 0;
    if (tm_numpy_read(object, name, dtype, 1, 0, &memory, shape) < 0)
        return -1;
    if (*wanted >= 0 && shape[0] != *wanted) {
        PyErr_Format(PyExc_ValueError, "%s must have %lld elements, not %lld", name, (long long)*wanted,
                     (long long)shape[0]);
        return -1;
    }
    *wanted = shape[0];
    *data = memory;
    return 0;
}

/* The mask: (bounds, kept, kept_starts, rows, heads, sinks). */
static int read_mask(PyObject *const *args, PyObject *sinks, tm_attention *input) {
    const int ndim = input->q.ndim;
    int64_t shape[3], heads = input->q.shape[ndim - 3], kept = -1, any = -1;
    void *bounds = NULL;
    const void *lists[5] = {NULL};
    if (tm_numpy_read(args[0], "bounds", TM_I64, 3, 0, &bounds, shape) < 0)
        return -1;
    int64_t starts = shape[0] + 1;
    if (read_list(args[1], "kept", TM_I64, &kept, &lists[0]) < 0 ||
        read_list(args[2], "kept_starts", TM_I64, &starts, &lists[1]) < 0 ||
        read_list(args[3], "rows", TM_I64, &any, &lists[2]) < 0 ||
        read_list(args[4], "heads", TM_BOOL, &heads, &lists[3]) < 0 ||
        read_list(sinks, "sinks", TM_F64, &heads, &lists[4]) < 0)
        return -1;
    input->mask_batches = shape[0];
    input->row_count = shape[1];
    input->bounds = bounds;
    input->kept = lists[0];
    input->kept_starts = lists[1];
    input->rows = lists[2];
    input->heads = lists[3];
    input->sinks = lists[4];
    int consistent = shape[2] == 2 && (input->rows == NULL || any == shape[1]) &&
                     (input->kept == NULL) == (input->kept_starts == NULL);
    if (consistent && input->kept != NULL)
        consistent = input->kept_starts[0] == 0 && input->kept_starts[shape[0]] == kept;
    for (int64_t b = 0; consistent && input->kept != NULL && b < shape[0]; b++)
        consistent = input->kept_starts[b] <= input->kept_starts[b + 1];
    if (!consistent) {
        PyErr_SetString(PyExc_ValueError, "bounds, kept, kept_starts and rows contradict each other");
        return -1;
    }
    return 0;
}

/* New reference: (m, l, z, keys), each [batches, heads, rows], with `each` pointing into them. */
static PyObject *new_each(const tm_attention *input, tm_attention_each *each) {
    const int ndim = input->q.ndim;
    int64_t shape[3] = {1, input->q.shape[ndim - 3], input->row_count};
    void *data[4] = {NULL};
    PyObject *arrays[4] = {NULL}, *result = NULL;
    for (int axis = 0; axis < ndim - 3; axis++)
        shape[0] *= input->q.shape[axis];
    for (int i = 0; i < 4; i++) {
        arrays[i] = tm_numpy_new(i < 3 ? TM_F64 : TM_I64, 3, shape, &data[i]);
        if (arrays[i] == NULL)
            goto done;
    }
    *each = (tm_attention_each){.max = data[0], .sum = data[1], .z = data[2], .keys = data[3]};
    /* heads that are not read */
    for (int64_t i = 0; i < shape[0] * shape[1] * shape[2]; i++) {
        each->max[i] = -Py_HUGE_VAL;
        each->sum[i] = each->z[i] = 0.0;
        each->keys[i] = 0;
    }
    result = PyTuple_Pack(4, arrays[0], arrays[1], arrays[2], arrays[3]);
done:
    for (int i = 0; i < 4; i++)
        Py_XDECREF(arrays[i]);
    return result;
}

/* (q, k, bounds, kept, kept_starts, rows, heads, scale, cap, sinks, scores, per_row, threads) -> (float64
 * [heads, fields of tm_attention_sums], None or (m, l, z, keys)) */
PyObject *tm_py_attention_logits(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL, *sums = NULL, *rows = NULL;
    tm_views q, k;
    tm_attention input = {0};
    tm_attention_each each = {0};
    tm_error error;
    void *data = NULL;
    if (tm_arguments_count("attention_logits", count, 13) < 0)
        return NULL;
    input.scale = PyFloat_AsDouble(args[7]);
    input.cap = PyErr_Occurred() ? 0 : PyFloat_AsDouble(args[8]);
    input.scores = PyErr_Occurred() ? 0 : PyObject_IsTrue(args[10]);
    const int per_row = PyErr_Occurred() ? 0 : PyObject_IsTrue(args[11]);
    if (PyErr_Occurred() || tm_arguments_threads(args[12], &input.threads) < 0)
        return NULL;
    memset(&q, 0, sizeof q);
    memset(&k, 0, sizeof k);
    if (open_one(&q, tm_state_of(module), args[0], "q") < 0 ||
        open_one(&k, tm_state_of(module), args[1], "k") < 0)
        goto done;
    input.q = q.views[0];
    input.k = k.views[0];
    if (read_mask(args + 2, args[9], &input) < 0)
        goto done;
    const int64_t shape[2] = {input.q.shape[input.q.ndim - 3], FIELDS};
    sums = tm_numpy_new(TM_F64, 2, shape, &data);
    rows = per_row ? new_each(&input, &each) : Py_NewRef(Py_None);
    if (sums == NULL || rows == NULL)
        goto done;
    PyThreadState *thread = tm_drop_gil(q.bytes + k.bytes);
    const tm_status status = tm_attention_logits(&input, &each, data, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = PyTuple_Pack(2, sums, rows);
done:
    Py_XDECREF(sums);
    Py_XDECREF(rows);
    tm_views_close(&q);
    tm_views_close(&k);
    return result;
}
