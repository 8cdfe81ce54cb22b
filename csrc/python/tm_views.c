/* From a call's `tensors` argument to the core's views: which objects are one array, which door opens each
 * element, what is kept alive meanwhile. Knows nothing of NumPy's or DLPack's layouts beyond how to give back
 * what a door left to hold. */
#include "tm_views.h"

#include "../core/tm_dtype.h"
#include "tm_numpy.h"

#include <stdlib.h>
#include <string.h>

#define AXES_IN_BLOCK 1024 /* int64 each; larger than one tensor's 2 * TM_MAX_NDIM */

struct tm_axes {
    tm_axes *next;
    size_t used;
    int64_t values[AXES_IN_BLOCK];
};

struct tm_hold {
    tm_hold *next;
    enum { HOLD_BUFFER, HOLD_MANAGED, HOLD_VERSIONED } kind;
    union {
        Py_buffer buffer;
        tm_dl_managed *managed;
        tm_dl_managed_versioned *versioned;
    } what;
};

/* ---- errors ---- */

static PyObject *take_raised(void) {
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

/* Raises `exception` with `text` (stolen, may be NULL after a failed format), caused by `cause` (stolen or
 * NULL). */
static void raise_at(const tm_views *views, Py_ssize_t position, PyObject *exception, PyObject *text,
                     PyObject *cause) {
    if (text != NULL) {
        PyObject *name = NULL; /* borrowed */
        if (views->names != NULL && position < PyTuple_GET_SIZE(views->names))
            name = PyTuple_GET_ITEM(views->names, position);
        if (name != NULL)
            PyErr_Format(exception, "%s[%zd] (%R): %U", views->argument, position, name, text);
        else
            PyErr_Format(exception, "%s[%zd]: %U", views->argument, position, text);
        Py_DECREF(text);
    }
    if (cause != NULL) {
        PyObject *raised = take_raised();
        if (raised == NULL) {
            Py_DECREF(cause);
            return;
        }
        Py_INCREF(cause);
        PyException_SetContext(raised, cause); /* takes one reference */
        PyException_SetCause(raised, cause);   /* takes the other */
        PyErr_SetObject((PyObject *)Py_TYPE(raised), raised);
        Py_DECREF(raised);
    }
}

tm_door tm_views_refuse(tm_views *views, Py_ssize_t position, PyObject *exception, const char *format, ...) {
    PyObject *cause = take_raised();
    va_list arguments;
    va_start(arguments, format);
    PyObject *text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    raise_at(views, position, exception, text, cause);
    return TM_DOOR_ERROR;
}

/* New reference: the first line of an exception's text. torch appends a stack of C++ frames. */
static PyObject *first_line(PyObject *exception) {
    PyObject *text = PyObject_Str(exception);
    if (text == NULL)
        return NULL;
    const Py_ssize_t end = PyUnicode_FindChar(text, '\n', 0, PyUnicode_GET_LENGTH(text), 1);
    if (end < 0) /* none (-1); -2 can't be, the text is ready */
        return text;
    PyObject *line = PyUnicode_Substring(text, 0, end);
    Py_DECREF(text);
    return line;
}

tm_door tm_views_refuse_from(tm_views *views, Py_ssize_t position, PyObject *object) {
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError))
        return TM_DOOR_ERROR;
    PyObject *cause = take_raised(), *text = NULL;
    PyObject *device = PyObject_GetAttr(object, views->state->str_device);
    PyErr_Clear(); /* an object without a device is named by its type alone */
    PyObject *why = first_line(cause);
    if (why != NULL && device != NULL)
        text = PyUnicode_FromFormat("%s on device '%S' gives no view of its memory: %U",
                                    Py_TYPE(object)->tp_name, device, why);
    else if (why != NULL)
        text = PyUnicode_FromFormat("%s gives no view of its memory: %U", Py_TYPE(object)->tp_name, why);
    Py_XDECREF(device);
    Py_XDECREF(why);
    raise_at(views, position, PyExc_TypeError, text, cause);
    return TM_DOOR_ERROR;
}

/* ---- memory that lives as long as the views ---- */

/* 2 * ndim values, the shape and behind it the strides; NULL with a Python error. */
static int64_t *take_axes(tm_views *views, size_t count) {
    tm_axes *block = views->axes;
    if (block == NULL || AXES_IN_BLOCK - block->used < count) {
        block = PyMem_Malloc(sizeof *block);
        if (block == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        block->next = views->axes;
        block->used = 0;
        views->axes = block;
    }
    int64_t *values = block->values + block->used;
    block->used += count;
    return values;
}

static tm_hold *new_hold(tm_views *views) {
    tm_hold *hold = PyMem_Malloc(sizeof *hold);
    if (hold == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    hold->next = views->holds;
    return hold;
}

int tm_views_hold_managed(tm_views *views, tm_dl_managed *managed) {
    tm_hold *hold = new_hold(views);
    if (hold == NULL) {
        if (managed->deleter != NULL)
            managed->deleter(managed);
        return -1;
    }
    hold->kind = HOLD_MANAGED;
    hold->what.managed = managed; /* owned until tm_views_close */
    views->holds = hold;
    return 0;
}

int tm_views_hold_versioned(tm_views *views, tm_dl_managed_versioned *managed) {
    tm_hold *hold = new_hold(views);
    if (hold == NULL) {
        if (managed->deleter != NULL)
            managed->deleter(managed);
        return -1;
    }
    hold->kind = HOLD_VERSIONED;
    hold->what.versioned = managed; /* owned until tm_views_close */
    views->holds = hold;
    return 0;
}

Py_buffer *tm_views_hold_buffer(tm_views *views, PyObject *object, int flags) {
    tm_hold *hold = new_hold(views);
    if (hold == NULL)
        return NULL;
    hold->kind = HOLD_BUFFER;
    if (PyObject_GetBuffer(object, &hold->what.buffer, flags) < 0) {
        PyMem_Free(hold);
        return NULL;
    }
    views->holds = hold; /* the buffer stays where it was filled: exporters may point into it */
    return &hold->what.buffer;
}

static void release(tm_hold *hold) {
    switch (hold->kind) {
    case HOLD_BUFFER:
        PyBuffer_Release(&hold->what.buffer);
        break;
    case HOLD_MANAGED:
        if (hold->what.managed->deleter != NULL)
            hold->what.managed->deleter(hold->what.managed);
        break;
    case HOLD_VERSIONED:
        if (hold->what.versioned->deleter != NULL)
            hold->what.versioned->deleter(hold->what.versioned);
        break;
    }
    PyMem_Free(hold);
}

/* ---- shapes ---- */

/* The product of the shape in *n; -1 when a length is negative or the bytes exceed the address space. An
 * empty axis wins over any overflow of the others. */
static int count_elements(const int64_t *shape, int32_t ndim, size_t size, int64_t *n) {
    int64_t product = 1;
    int empty = 0, overflow = 0;
    for (int32_t axis = 0; axis < ndim; axis++) {
        if (shape[axis] < 0)
            return -1;
        empty |= shape[axis] == 0;
        if (shape[axis] > 0 && product > INT64_MAX / (int64_t)size / shape[axis])
            overflow = 1;
        else
            product *= shape[axis];
    }
    *n = empty ? 0 : product;
    return empty || !overflow ? 0 : -1;
}

/* Strides of axes of length 1 mean nothing, and an array of at most one element has no order. */
static int is_c_order(const int64_t *shape, const int64_t *strides, int32_t ndim, int64_t n, int64_t step) {
    if (strides == NULL || n <= 1)
        return 1;
    for (int32_t axis = ndim - 1; axis >= 0; axis--) {
        if (shape[axis] != 1 && strides[axis] != step)
            return 0;
        step *= shape[axis];
    }
    return 1;
}

tm_door tm_views_check_writable(tm_views *views, Py_ssize_t position, int read_only) {
    if (views->writable && read_only)
        return tm_views_refuse(views, position, PyExc_ValueError, "is read-only, and this call writes to it");
    return TM_DOOR_OPEN;
}

/* Whether two elements share a byte: axes sorted by stride must each step over the one before. A view that
 * this refuses although no bytes meet (interleaved axes) is no harm: it has to be copied. */
static int overlaps_itself(const tm_view *view) {
    int32_t order[TM_MAX_NDIM], used = 0;
    if (view->strides == NULL || view->n <= 1)
        return 0;
    for (int32_t axis = 0; axis < view->ndim; axis++) {
        if (view->shape[axis] == 1)
            continue;
        int32_t place = used++;
        for (; place > 0 && llabs(view->strides[order[place - 1]]) > llabs(view->strides[axis]); place--)
            order[place] = order[place - 1];
        order[place] = axis;
    }
    int64_t extent = (int64_t)tm_dtype_size(view->dtype);
    for (int32_t i = 0; i < used; i++) {
        const int64_t stride = llabs(view->strides[order[i]]);
        if (stride < extent)
            return 1;
        extent += stride * (view->shape[order[i]] - 1);
    }
    return 0;
}

tm_door tm_views_place(tm_views *views, Py_ssize_t position, tm_view *view, const int64_t *shape,
                       const int64_t *strides, int64_t unit) {
    const int32_t ndim = view->ndim;
    const int64_t size = (int64_t)tm_dtype_size(view->dtype);
    if (count_elements(shape, ndim, (size_t)size, &view->n) < 0)
        return tm_views_refuse(views, position, PyExc_ValueError,
                               "its shape has a negative length or more elements than memory can hold");
    if (view->n > 0 && view->data == NULL)
        return tm_views_refuse(
            views, position, PyExc_TypeError,
            "has %lld elements but no host memory (a fake, meta or wrapper tensor?): pass the "
            "local tensor behind it",
            (long long)view->n);
    view->shape = NULL;
    view->strides = NULL;
    const int in_order = is_c_order(shape, strides, ndim, view->n, size / unit);
    if (in_order && !views->shapes)
        return TM_DOOR_OPEN;
    int64_t *axes = take_axes(views, 2 * (size_t)ndim);
    if (axes == NULL)
        return TM_DOOR_ERROR;
    view->shape = axes; /* ours: the tensor may get another shape while the GIL is dropped */
    if (in_order) {
        for (int32_t axis = 0; axis < ndim; axis++)
            axes[axis] = shape[axis];
        return TM_DOOR_OPEN;
    }
    for (int32_t axis = 0; axis < ndim; axis++) {
        if (strides[axis] > INT64_MAX / unit || strides[axis] < -(INT64_MAX / unit))
            return tm_views_refuse(views, position, PyExc_ValueError, "stride %lld is out of range",
                                   (long long)strides[axis]);
        axes[axis] = shape[axis];
        axes[ndim + axis] = strides[axis] * unit;
    }
    view->strides = axes + ndim;
    if (views->writable && overlaps_itself(view))
        return tm_views_refuse(
            views, position, PyExc_ValueError,
            "has elements that share memory (a broadcast or overlapping view), and this call "
            "writes to it: pass a copy");
    return TM_DOOR_OPEN;
}

/* ---- opening ---- */

static tm_door open_untagged(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view) {
    tm_door door = tm_numpy_open(views, position, object, view);
    if (door == TM_DOOR_OTHER)
        door = tm_exchange_open(views, position, object, view);
    if (door == TM_DOOR_OTHER)
        door = tm_capsule_open(views, position, object, view);
    if (door == TM_DOOR_OTHER)
        door = tm_buffer_open(views, position, object, view);
    if (door == TM_DOOR_OTHER && object == Py_None)
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "None is not an array: leave out parameters without a gradient");
    if (door == TM_DOOR_OTHER)
        return tm_views_refuse(
            views, position, PyExc_TypeError,
            "%s is not an array: pass a NumPy array, an object with __dlpack__, a buffer, or "
            "(buffer, dtype name)",
            Py_TYPE(object)->tp_name);
    return door;
}

static int is_tagged(PyObject *object) {
    return PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 2 &&
           PyUnicode_Check(PyTuple_GET_ITEM(object, 1));
}

/* (buffer, dtype name): the memory of the first read as the second; elements of the same size keep shape and
 * strides, bytes in C order become one axis. */
static tm_door open_tagged(tm_views *views, Py_ssize_t position, PyObject *pair, tm_view *view) {
    const char *tag = PyUnicode_AsUTF8(PyTuple_GET_ITEM(pair, 1));
    if (tag == NULL)
        return TM_DOOR_ERROR;
    const tm_dtype dtype = tm_dtype_from_name(tag);
    if (dtype == TM_DTYPE_COUNT)
        return tm_views_refuse(views, position, PyExc_TypeError,
                               "unknown dtype name '%s': use one like 'bf16' or 'float8_e4m3fn' "
                               "(trainmon.build_info()['dtypes'] lists them)",
                               tag);
    const tm_door door = open_untagged(views, position, PyTuple_GET_ITEM(pair, 0), view);
    if (door != TM_DOOR_OPEN)
        return door;
    const size_t had = tm_dtype_size(view->dtype), wanted = tm_dtype_size(dtype);
    if (had != wanted) {
        if (had != 1 || view->strides != NULL || view->n % (int64_t)wanted != 0)
            return tm_views_refuse(
                views, position, PyExc_ValueError,
                "%lld elements of %zu bytes can't be read as '%s': give elements of %zu bytes, "
                "or contiguous bytes in a multiple of %zu",
                (long long)view->n, had, tag, wanted, wanted);
        view->n /= (int64_t)wanted;
        view->ndim = 1;
        view->shape = NULL;
        if (views->shapes) {
            int64_t *axes = take_axes(views, 1);
            if (axes == NULL)
                return TM_DOOR_ERROR;
            axes[0] = view->n;
            view->shape = axes;
        }
    }
    view->dtype = dtype;
    return TM_DOOR_OPEN;
}

/* 1 when `tensors` is one array, 0 when it should be iterated, -1 with a Python error. */
static int is_one_array(tm_state *state, PyObject *tensors) {
    if (PyList_CheckExact(tensors))
        return 0;
    if (PyTuple_CheckExact(tensors))
        return is_tagged(tensors);
    if (tm_numpy_is_array(tensors) || PyObject_CheckBuffer(tensors))
        return 1;
    const int known = tm_exchange_knows(state, tensors);
    return known != 0 ? known : PyObject_HasAttr(tensors, state->str_dlpack);
}

/* The tuple of arrays: owned reference or NULL with a Python error. */
static PyObject *collect(tm_state *state, PyObject *tensors, const char *argument) {
    const int one = is_one_array(state, tensors);
    if (one < 0)
        return NULL;
    if (one)
        return PyTuple_Pack(1, tensors);
    if (PyDict_Check(tensors)) {
        PyErr_Format(PyExc_TypeError, "%s is a mapping: pass %s.values(), and names=%s.keys()", argument,
                     argument, argument);
        return NULL;
    }
    if (PyUnicode_Check(tensors) || (Py_TYPE(tensors)->tp_iter == NULL && !PySequence_Check(tensors))) {
        PyErr_Format(PyExc_TypeError, "%s must be an array or an iterable of arrays, not %s", argument,
                     Py_TYPE(tensors)->tp_name);
        return NULL;
    }
    return PySequence_Tuple(tensors); /* a copy: doors run the tensors' code, which could change a list */
}

int tm_views_open(tm_views *views, tm_state *state, PyObject *tensors, PyObject *names) {
    return tm_views_open_as(views, state, tensors, names, "tensors", 0);
}

int tm_views_open_as(tm_views *views, tm_state *state, PyObject *tensors, PyObject *names,
                     const char *argument, int flags) {
    memset(views, 0, offsetof(tm_views, inline_views));
    views->state = state;
    views->argument = argument;
    views->writable = (flags & TM_VIEWS_WRITABLE) != 0;
    views->shapes = (flags & TM_VIEWS_SHAPES) != 0;
    views->views = views->inline_views;
    if (names != Py_None && !PyTuple_Check(names)) {
        PyErr_Format(PyExc_TypeError, "names must be a tuple of str or None, not %s",
                     Py_TYPE(names)->tp_name);
        return -1;
    }
    views->items = collect(state, tensors, argument);
    if (views->items == NULL)
        return -1;
    const Py_ssize_t count = PyTuple_GET_SIZE(views->items);
    if (names != Py_None) {
        views->names = names;
        if (PyTuple_GET_SIZE(names) != count) {
            PyErr_Format(PyExc_ValueError, "names has %zd entries for %zd tensors", PyTuple_GET_SIZE(names),
                         count);
            return -1;
        }
    }
    if (count > TM_INLINE_VIEWS) {
        views->views = PyMem_Calloc((size_t)count, sizeof *views->views);
        if (views->views == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GET_ITEM(views->items, i);
        tm_view *view = &views->views[i];
        const tm_door door =
            is_tagged(item) ? open_tagged(views, i, item, view) : open_untagged(views, i, item, view);
        if (door != TM_DOOR_OPEN)
            return -1;
        views->bytes += (size_t)view->n * tm_dtype_size(view->dtype);
        views->count++;
    }
    return 0;
}

/* Deleters and buffers may run Python code, which neither sees nor replaces the error that this call fails
 * with. */
static void release_holds(tm_views *views) {
    if (views->holds == NULL)
        return;
    PyObject *raised = take_raised();
    while (views->holds != NULL) {
        tm_hold *next = views->holds->next;
        release(views->holds);
        views->holds = next;
    }
    if (raised != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(raised), raised);
        Py_DECREF(raised);
    }
}

void tm_views_close(tm_views *views) {
    release_holds(views);
    while (views->axes != NULL) {
        tm_axes *next = views->axes->next;
        PyMem_Free(views->axes);
        views->axes = next;
    }
    if (views->views != views->inline_views)
        PyMem_Free(views->views);
    views->views = views->inline_views;
    views->count = 0;
    Py_CLEAR(views->items); /* last: the views point into these */
}
