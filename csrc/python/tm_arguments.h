/* What every function of the module does with its arguments, its errors and the GIL. */
#ifndef TM_ARGUMENTS_H
#define TM_ARGUMENTS_H

#include "../core/tm_status.h"
#include "tm_views.h"

#define TM_GIL_FREE_BYTES 65536 /* below, handing the GIL over costs as much as the work */

/* 0, or -1 with a TypeError. */
int tm_arguments_count(const char *function, Py_ssize_t count, Py_ssize_t wanted);

/* 0, or -1 with a TypeError or a ValueError that names the argument and its range. */
int tm_arguments_int(PyObject *object, const char *name, int64_t low, int64_t high, int64_t *value);
int tm_arguments_threads(PyObject *object, int *threads);

/* Raises the status as the Python exception of its kind; nothing for TM_OK. */
void tm_raise_status(tm_status status, const tm_error *error);

/* Which NaN comes out depends on the order of evaluation; one NaN for all keeps results equal bit for bit. */
static inline double tm_one_nan(double value) {
    return Py_IS_NAN(value) ? Py_NAN : value;
}

/* Drops the GIL for work on more than TM_GIL_FREE_BYTES; NULL: it was kept. Without it nothing may touch
 * Python. */
PyThreadState *tm_drop_gil(size_t bytes);
void tm_take_gil(PyThreadState *thread);

#endif
