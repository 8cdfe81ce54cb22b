/* The single door to NumPy: arrays in as views, arrays out. The only file that includes NumPy's headers. */
#include "tm_numpy.h"

#include "../core/tm_dtype.h"
#include "tm_views.h"

#include <stddef.h>
#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION /* compiled with NumPy 2, runs from 1.26 on */
#include <numpy/arrayobject.h>

_Static_assert(sizeof(npy_intp) == sizeof(int64_t), "axes are passed on as int64_t");
_Static_assert(sizeof(tm_stats) == 14 * 8, "the dtype below has no padding");

int tm_numpy_import(void) {
    import_array1(-1);
    return 0;
}

int tm_numpy_is_array(PyObject *object) {
    return PyArray_Check(object);
}

unsigned tm_numpy_api_built(void) {
    return NPY_API_VERSION;
}

unsigned tm_numpy_api_target(void) {
    return NPY_FEATURE_VERSION;
}

unsigned tm_numpy_api_running(void) {
    return PyArray_GetNDArrayCFeatureVersion();
}

/* ---- arrays in ---- */

static tm_dtype by_size(int size, tm_dtype one, tm_dtype two, tm_dtype four, tm_dtype eight) {
    return size == 1 ? one : size == 2 ? two : size == 4 ? four : size == 8 ? eight : TM_DTYPE_COUNT;
}

/* Types that other packages register (ml_dtypes) are known by the name of their scalar type, so that the
 * package need not be imported. Only our canonical names count, and only formats that NumPy doesn't have. */
static tm_dtype registered_dtype(const PyTypeObject *scalar, int size) {
    const char *dot = strrchr(scalar->tp_name, '.');
    const char *name = dot != NULL ? dot + 1 : scalar->tp_name;
    const tm_dtype dtype = tm_dtype_from_name(name);
    if (dtype < TM_BF16 || dtype > TM_F8E8M0FNU || strcmp(name, tm_dtype_name(dtype)) != 0 ||
        tm_dtype_size(dtype) != (size_t)size)
        return TM_DTYPE_COUNT;
    return dtype;
}

static tm_dtype dtype_of(PyArrayObject *array) {
    PyArray_Descr *descr = PyArray_DESCR(array);
    const int size = (int)PyArray_ITEMSIZE(array);
    if (PyTypeNum_ISUSERDEF(descr->type_num))
        return registered_dtype(descr->typeobj, size);
    switch (descr->kind) {
    case 'f':
        return by_size(size, TM_DTYPE_COUNT, TM_F16, TM_F32, TM_F64);
    case 'i':
        return by_size(size, TM_I8, TM_I16, TM_I32, TM_I64);
    case 'u':
        return by_size(size, TM_U8, TM_U16, TM_U32, TM_U64);
    case 'b':
        return TM_BOOL;
    default:
        return TM_DTYPE_COUNT;
    }
}

/* A masked array would be read with its masked elements, silently. */
static int is_masked(const tm_views *views, PyObject *array) {
    return !PyArray_CheckExact(array) && PyObject_HasAttr((PyObject *)Py_TYPE(array), views->state->str_mask);
}

tm_door tm_numpy_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view) {
    if (!PyArray_Check(object))
        return TM_DOOR_OTHER;
    PyArrayObject *array = (PyArrayObject *)object;
    const tm_dtype dtype = dtype_of(array);
    if (dtype == TM_DTYPE_COUNT)
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "dtype %S can't be read: it must be a real float, an integer or bool",
                               (PyObject *)PyArray_DESCR(array));
    if (!PyArray_ISNOTSWAPPED(array))
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "dtype %R has the byte order of another machine (byte-swapped): pass "
                               ".astype('%s')",
                               (PyObject *)PyArray_DESCR(array), tm_dtype_name(dtype));
    if (is_masked(views, object))
        return tm_views_refuse(
            views, position, PyExc_TypeError,
            "a masked array's mask would be ignored: pass .filled(value) or .compressed()");
    if (tm_views_check_writable(views, position, !PyArray_ISWRITEABLE(array)) != TM_DOOR_OPEN)
        return TM_DOOR_ERROR;
    view->data = PyArray_DATA(array);
    view->dtype = dtype;
    view->ndim = PyArray_NDIM(array);
    if (PyArray_IS_C_CONTIGUOUS(array) && !views->shapes) {
        view->n = PyArray_SIZE(array);
        view->shape = NULL;
        view->strides = NULL;
        return TM_DOOR_OPEN;
    }
    int64_t shape[TM_MAX_NDIM], strides[TM_MAX_NDIM];
    for (int axis = 0; axis < view->ndim; axis++) {
        shape[axis] = PyArray_DIM(array, axis);
        strides[axis] = PyArray_STRIDE(array, axis);
    }
    return tm_views_place(views, position, view, shape, strides, 1);
}

/* ---- arrays out ---- */

PyObject *tm_numpy_stats_dtype(void) {
    static const char *const fields[] = {"n",         "sum",          "sumsq",          "min",      "max",
                                         "absmax",    "n_nan",        "n_posinf",       "n_neginf", "n_zero",
                                         "first_bad", "sumsq_scaled", "scale_exponent", "m2_scaled"};
    static const char kinds[] = "idddddiiiiidid"; /* i int64, d float64: the members of tm_stats in order */
    const Py_ssize_t count = (Py_ssize_t)(sizeof fields / sizeof fields[0]);
    PyArray_Descr *dtype = NULL;
    PyObject *list = PyList_New(count);
    if (list == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = Py_BuildValue("(ss)", fields[i], kinds[i] == 'i' ? "i8" : "f8");
        if (pair == NULL)
            goto done;
        PyList_SET_ITEM(list, i, pair); /* stolen */
    }
    if (PyArray_DescrConverter(list, &dtype) == NPY_FAIL)
        dtype = NULL;
done:
    Py_DECREF(list);
    return (PyObject *)dtype;
}

/* A structured array over the memory of a plain one: NumPy prepares new memory field by field, which for 14
 * fields takes 0.5 us, as long as the statistics of a few thousand elements; a second array head takes less
 * than 0.1. */
PyObject *tm_numpy_new_stats(PyObject *dtype, Py_ssize_t count, tm_stats **data) {
    npy_intp shape[1] = {count}, words[1] = {(count < 0 ? 1 : count) * (npy_intp)(sizeof(tm_stats) / 8)};
    PyObject *memory = PyArray_SimpleNew(1, words, NPY_INT64);
    if (memory == NULL)
        return NULL;
    *data = PyArray_DATA((PyArrayObject *)memory);
    Py_INCREF(dtype); /* the array steals one */
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)dtype, count < 0 ? 0 : 1, shape,
                                           NULL, *data, NPY_ARRAY_CARRAY, NULL);
    if (array == NULL) {
        Py_DECREF(memory);
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)array, memory) < 0) /* steals `memory`, also on failure */
        Py_CLEAR(array);
    return array;
}

PyObject *tm_numpy_new_float64(Py_ssize_t count, double **data) {
    npy_intp shape[1] = {count};
    PyObject *array = PyArray_SimpleNew(1, shape, NPY_DOUBLE);
    if (array != NULL)
        *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}

PyObject *tm_numpy_new(tm_dtype dtype, int ndim, const int64_t *shape, void **data) {
    static const int types[TM_DTYPE_COUNT] = {
        [TM_F64] = NPY_DOUBLE, [TM_F32] = NPY_FLOAT,  [TM_F16] = NPY_HALF,   [TM_I8] = NPY_INT8,
        [TM_I16] = NPY_INT16,  [TM_I32] = NPY_INT32,  [TM_I64] = NPY_INT64,  [TM_U8] = NPY_UINT8,
        [TM_U16] = NPY_UINT16, [TM_U32] = NPY_UINT32, [TM_U64] = NPY_UINT64, [TM_BOOL] = NPY_BOOL,
    };
    npy_intp dims[TM_MAX_NDIM];
    for (int axis = 0; axis < ndim; axis++)
        dims[axis] = shape[axis];
    PyObject *array = PyArray_SimpleNew(ndim, dims, types[dtype]);
    if (array != NULL)
        *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}

int tm_numpy_read(PyObject *object, const char *name, tm_dtype dtype, int ndim, int writable, void **data,
                  int64_t *shape) {
    PyArrayObject *array = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_NDIM(array) != ndim || dtype_of(array) != dtype ||
        !PyArray_ISCARRAY_RO(array) || (writable && !PyArray_ISWRITEABLE(array))) {
        PyErr_Format(PyExc_TypeError, "%s must be a contiguous%s %s array with %d axes", name,
                     writable ? ", writable" : "", tm_dtype_name(dtype), ndim);
        return -1;
    }
    for (int axis = 0; axis < ndim; axis++)
        shape[axis] = PyArray_DIM(array, axis);
    *data = PyArray_DATA(array);
    return 0;
}

static int is_plain(PyObject *object) {
    return PyArray_Check(object) && PyArray_NDIM((PyArrayObject *)object) == 1 &&
           PyArray_ISCARRAY_RO((PyArrayObject *)object);
}

int tm_numpy_read_stats(PyObject *object, PyObject *dtype, const tm_stats **data, Py_ssize_t *count) {
    PyArrayObject *array = (PyArrayObject *)object;
    /* NumPy takes records at any address for aligned. */
    if (!is_plain(object) || !PyArray_EquivTypes(PyArray_DESCR(array), (PyArray_Descr *)dtype) ||
        (uintptr_t)PyArray_DATA(array) % _Alignof(tm_stats) != 0) {
        PyErr_SetString(PyExc_TypeError,
                        "records must be a contiguous, aligned 1-D array as tensor_stats returns it");
        return -1;
    }
    *data = PyArray_DATA(array);
    *count = PyArray_SIZE(array);
    return 0;
}

int tm_numpy_read_int64(PyObject *object, const int64_t **data, Py_ssize_t *count) {
    PyArrayObject *array = (PyArrayObject *)object;
    if (!is_plain(object) || PyArray_DESCR(array)->kind != 'i' || PyArray_ITEMSIZE(array) != 8) {
        PyErr_SetString(PyExc_TypeError, "offsets must be a contiguous 1-D int64 array");
        return -1;
    }
    *data = PyArray_DATA(array);
    *count = PyArray_SIZE(array);
    return 0;
}
