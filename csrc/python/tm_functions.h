/* The functions of the module, by subject; each table entry is METH_FASTCALL with positional arguments only:
 * keywords and defaults are trainmon.ops' part. */
#ifndef TM_FUNCTIONS_H
#define TM_FUNCTIONS_H

#include "tm_state.h"

PyObject *tm_py_tensor_stats(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *tm_py_merge_stats(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *tm_py_multi_norm(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *tm_py_scan_nonfinite(PyObject *module, PyObject *const *args, Py_ssize_t count);
PyObject *tm_py_plain_read(PyObject *module, PyObject *const *args, Py_ssize_t count);

PyObject *tm_py_cpu_info(PyObject *module, PyObject *unused);
PyObject *tm_py_build_info(PyObject *module, PyObject *unused);

#endif
