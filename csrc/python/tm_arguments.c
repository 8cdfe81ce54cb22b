#include "tm_arguments.h"

#define MAX_THREADS 1024

int tm_arguments_count(const char *function, Py_ssize_t count, Py_ssize_t wanted) {
    if (count == wanted)
        return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd positional arguments, not %zd", function, wanted, count);
    return -1;
}

int tm_arguments_int(PyObject *object, const char *name, int64_t low, int64_t high, int64_t *value) {
    int overflow = 0;
    PyObject *index = PyNumber_Index(object);
    if (index == NULL)
        return -1;
    const long long number = PyLong_AsLongLongAndOverflow(index, &overflow);
    Py_DECREF(index);
    if (number == -1 && PyErr_Occurred())
        return -1;
    if (overflow != 0 || number < low || number > high) {
        PyErr_Format(PyExc_ValueError, "%s must be from %lld to %lld, not %S", name, (long long)low,
                     (long long)high, object);
        return -1;
    }
    *value = number;
    return 0;
}

int tm_arguments_threads(PyObject *object, int *threads) {
    int64_t value = 0;
    if (tm_arguments_int(object, "threads", 1, MAX_THREADS, &value) < 0)
        return -1;
    *threads = (int)value;
    return 0;
}

void tm_raise_status(tm_status status, const tm_error *error) {
    PyObject *exception = PyExc_SystemError;
    switch (status) {
    case TM_OK:
        return;
    case TM_ERR_MEMORY:
        exception = PyExc_MemoryError;
        break;
    case TM_ERR_VALUE:
        exception = PyExc_ValueError;
        break;
    case TM_ERR_DTYPE:
        exception = PyExc_TypeError;
        break;
    case TM_ERR_THREAD:
        exception = PyExc_RuntimeError;
        break;
    }
    PyErr_SetString(exception, error->text);
}

PyThreadState *tm_drop_gil(size_t bytes) {
    return bytes > TM_GIL_FREE_BYTES ? PyEval_SaveThread() : NULL;
}

void tm_take_gil(PyThreadState *thread) {
    if (thread != NULL)
        PyEval_RestoreThread(thread);
}
