/* The only way to NumPy's C API; this header has none of NumPy's types, so that nobody else includes theirs.
 * All functions need the GIL and set a Python error when they fail. */
#ifndef TM_NUMPY_H
#define TM_NUMPY_H

#include "tm_state.h"

#include "../core/tm_reduce.h"

int tm_numpy_import(void); /* once, in module exec */

int tm_numpy_is_array(PyObject *object); /* ndarray or a subclass */

/* New reference: the structured dtype whose fields are those of tm_stats, in order. */
PyObject *tm_numpy_stats_dtype(void);

/* New arrays, [count] or 0-d when count is -1; *data is theirs. */
PyObject *tm_numpy_new_stats(PyObject *dtype, Py_ssize_t count, tm_stats **data);
PyObject *tm_numpy_new_float64(Py_ssize_t count, double **data);

/* A new C-ordered array, not filled; dtype: one that NumPy has itself. */
PyObject *tm_numpy_new(tm_dtype dtype, int ndim, const int64_t *shape, void **data);

/* The memory of a C-ordered, aligned 1-D array of exactly this dtype; -1 for anything else. Borrowed. */
int tm_numpy_read_stats(PyObject *object, PyObject *dtype, const tm_stats **data, Py_ssize_t *count);
/* The memory of a C-ordered, aligned array of exactly this dtype and number of axes, shape in [ndim]; else -1
 * with a TypeError that names the argument. writable: it must be. Borrowed. */
int tm_numpy_read(PyObject *object, const char *name, tm_dtype dtype, int ndim, int writable, void **data,
                  int64_t *shape);
int tm_numpy_read_int64(PyObject *object, const int64_t **data, Py_ssize_t *count);

/* The C API that this file was compiled against and asks for, and what the NumPy in the process offers. */
unsigned tm_numpy_api_built(void), tm_numpy_api_target(void), tm_numpy_api_running(void);

#endif
