/* The last door: objects with the buffer protocol (bytes, memoryview, array.array, ctypes, mmap), their
 * element type read from the format character. */
#include "tm_views.h"

#include "../core/tm_dtype.h"

#include <string.h>

static tm_dtype by_size(Py_ssize_t size, int is_signed) {
    static const tm_dtype types[4][2] = {
        {TM_U8, TM_I8}, {TM_U16, TM_I16}, {TM_U32, TM_I32}, {TM_U64, TM_I64}};
    for (int power = 0; power < 4; power++)
        if (size == (Py_ssize_t)1 << power)
            return types[power][is_signed];
    return TM_DTYPE_COUNT;
}

/* One struct-module character without its byte order mark; TM_DTYPE_COUNT for what is no number we read. */
static tm_dtype dtype_of_format(const char *format, Py_ssize_t size) {
    if (format[0] == '\0' || format[1] != '\0')
        return TM_DTYPE_COUNT;
    tm_dtype dtype = TM_DTYPE_COUNT;
    switch (format[0]) {
    case 'b':
    case 'h':
    case 'i':
    case 'l':
    case 'q':
    case 'n':
        return by_size(size, 1);
    case 'B':
    case 'H':
    case 'I':
    case 'L':
    case 'Q':
    case 'N':
    case 'c':
        return by_size(size, 0);
    case 'e':
        dtype = TM_F16;
        break;
    case 'f':
        dtype = TM_F32;
        break;
    case 'd':
        dtype = TM_F64;
        break;
    case '?':
        dtype = TM_BOOL;
        break;
    default:
        return TM_DTYPE_COUNT;
    }
    return (Py_ssize_t)tm_dtype_size(dtype) == size ? dtype : TM_DTYPE_COUNT;
}

tm_door tm_buffer_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view) {
    if (!PyObject_CheckBuffer(object))
        return TM_DOOR_OTHER;
    const Py_buffer *buffer = tm_views_hold_buffer(views, object, PyBUF_FULL_RO);
    if (buffer == NULL)
        return tm_views_refuse_from(views, position, object);
    if (tm_views_check_writable(views, position, buffer->readonly) != TM_DOOR_OPEN)
        return TM_DOOR_ERROR;

    const char *format = buffer->format != NULL ? buffer->format : "B";
    const int marked = format[0] != '\0' && strchr("@=<>!", format[0]) != NULL;
    const int swapped = marked && strchr(PY_LITTLE_ENDIAN ? ">!" : "<", format[0]) != NULL;
    view->dtype = dtype_of_format(format + marked, buffer->itemsize);
    if (view->dtype == TM_DTYPE_COUNT)
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "buffer format '%s' can't be read: give real numbers, or (buffer, dtype name)",
                               format);
    if (swapped && buffer->itemsize > 1)
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "buffer format '%s' has the byte order of another machine (byte-swapped)",
                               format);
    if (buffer->ndim > TM_MAX_NDIM)
        return tm_views_refuse(views, position, PyExc_TypeError, "%d axes are more than %d", buffer->ndim,
                               TM_MAX_NDIM);
    if (buffer->suboffsets != NULL)
        for (int axis = 0; axis < buffer->ndim; axis++)
            if (buffer->suboffsets[axis] >= 0)
                return tm_views_refuse(views, position, PyExc_TypeError,
                                       "a buffer of pointers (suboffsets) can't be read: copy it first");
    view->data = buffer->buf;
    view->ndim = buffer->ndim;
    int64_t shape[TM_MAX_NDIM], strides[TM_MAX_NDIM];
    for (int axis = 0; axis < buffer->ndim; axis++) {
        /* Without a shape a buffer has one axis, by the protocol. */
        shape[axis] = buffer->shape != NULL ? buffer->shape[axis] : buffer->len / buffer->itemsize;
        if (buffer->strides != NULL)
            strides[axis] = buffer->strides[axis];
    }
    return tm_views_place(views, position, view, shape, buffer->strides != NULL ? strides : NULL, 1);
}
