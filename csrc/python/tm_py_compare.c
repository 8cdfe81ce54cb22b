/* compare and the merging of its records, which leave as rows of words: trainmon.ops names their fields. */
#include "tm_functions.h"

#include "../core/tm_compare.h"
#include "tm_arguments.h"
#include "tm_numpy.h"
#include "tm_pairs.h"

enum { WORDS = sizeof(tm_comparison) / 8 };
_Static_assert(sizeof(tm_comparison) % 8 == 0, "a record is a row of words");

/* New reference: int64 [count, WORDS]; *records is its memory. */
static PyObject *new_records(size_t count, tm_comparison **records) {
    const int64_t shape[2] = {(int64_t)count, WORDS};
    void *data = NULL;
    PyObject *array = tm_numpy_new(TM_I64, 2, shape, &data);
    *records = data;
    return array;
}

/* int64 [arrays + 1, WORDS]: a record a pair, then their total. */
PyObject *tm_py_compare(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL;
    tm_comparison *records;
    tm_views a, b;
    tm_error error;
    int threads;
    if (tm_arguments_count("compare", count, 3) < 0 || tm_arguments_threads(args[2], &threads) < 0)
        return NULL;
    if (tm_views_open_as(&a, state, args[0], Py_None, "a", TM_VIEWS_SHAPES) < 0) {
        tm_views_close(&a);
        return NULL;
    }
    if (tm_views_open_as(&b, state, args[1], Py_None, "b", TM_VIEWS_SHAPES) < 0 ||
        tm_pairs_agree(&a, &b, "in a", "its partner in a", 0) < 0)
        goto done;
    result = new_records(a.count + 1, &records);
    if (result == NULL)
        goto done;
    PyThreadState *thread = tm_drop_gil(a.bytes + b.bytes);
    const tm_status status =
        tm_compare(a.views, b.views, a.count, threads, records, records + a.count, &error);
    tm_take_gil(thread);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        Py_CLEAR(result);
    }
done:
    tm_views_close(&b);
    tm_views_close(&a);
    return result;
}

/* int64 [records, WORDS] to int64 [1, WORDS]. */
PyObject *tm_py_merge_comparisons(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t shape[2];
    void *data;
    tm_comparison *total;
    (void)module;
    if (tm_arguments_count("merge_comparisons", count, 1) < 0 ||
        tm_numpy_read(args[0], "records", TM_I64, 2, 0, &data, shape) < 0)
        return NULL;
    if (shape[1] != WORDS) {
        PyErr_Format(PyExc_ValueError, "records must have %d words each", (int)WORDS);
        return NULL;
    }
    PyObject *result = new_records(1, &total);
    if (result != NULL)
        tm_merge_comparisons(data, (size_t)shape[0], total);
    return result;
}
