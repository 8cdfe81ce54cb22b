/* A call's tensors as views of the core: opened by the first door that knows the object, kept alive until
 * tm_views_close. All functions need the GIL. */
#ifndef TM_VIEWS_H
#define TM_VIEWS_H

#include "../core/tm_view.h"
#include "tm_state.h"

#define TM_INLINE_VIEWS 4 /* lists up to this length need no allocation */

typedef struct tm_hold tm_hold; /* something to release after the call: a buffer or a managed tensor */
typedef struct tm_axes tm_axes; /* a block of copied shapes and strides */

typedef struct tm_views {
    tm_state *state;      /* borrowed */
    PyObject *items;      /* owned tuple: keeps every tensor alive */
    PyObject *names;      /* borrowed tuple of str, or NULL */
    tm_view *views;       /* [count]; inline_views or owned */
    size_t count;         /* views opened */
    size_t bytes;         /* bytes that a full read touches */
    const char *argument; /* borrowed: what errors call the list */
    int writable;         /* the call writes to the memory: doors refuse what is read-only */
    int shapes;           /* the call wants every view's shape, that of contiguous ones too */
    tm_hold *holds;       /* owned list */
    tm_axes *axes;        /* owned list */
    tm_view inline_views[TM_INLINE_VIEWS];
} tm_views;

/* What a door answers. */
typedef enum tm_door { TM_DOOR_ERROR = -1, TM_DOOR_OPEN, TM_DOOR_OTHER } tm_door;

/* Opens `tensors` (one array, or any iterable of arrays) in the door order of docs/kernels.md. `names`: a
 * tuple of str as long as the list, or None. 0, or -1 with a Python error; close in both cases. */
int tm_views_open(tm_views *views, tm_state *state, PyObject *tensors, PyObject *names);

/* The same for another argument than "tensors" (a literal), with flags. TM_VIEWS_WRITABLE: the core may write
 * through the views; then read-only memory is a ValueError, and so is a view of which one byte is two
 * elements (broadcast). TM_VIEWS_SHAPES: `shape` is set in every view, of contiguous memory too. */
enum { TM_VIEWS_WRITABLE = 1, TM_VIEWS_SHAPES = 2 };
int tm_views_open_as(tm_views *views, tm_state *state, PyObject *tensors, PyObject *names,
                     const char *argument, int flags);
void tm_views_close(tm_views *views);

/* For the doors. */

/* Sets an error that opens with the position and the name, chained to the error in flight if there is one;
 * always TM_DOOR_ERROR. */
tm_door tm_views_refuse(tm_views *views, Py_ssize_t position, PyObject *exception, const char *format, ...);

/* The same for an error raised by the tensor's own code: an Exception becomes the cause of a TypeError,
 * anything else (KeyboardInterrupt, MemoryError) passes as it is. */
tm_door tm_views_refuse_from(tm_views *views, Py_ssize_t position, PyObject *object);

/* For writable views: a ValueError if the memory is read-only. */
tm_door tm_views_check_writable(tm_views *views, Py_ssize_t position, int read_only);

/* Completes a view whose data, dtype and ndim are set: counts the elements, and copies shape and strides
 * unless the elements lie in C order. strides: [ndim] in units of `unit` bytes, or NULL for C order. */
tm_door tm_views_place(tm_views *views, Py_ssize_t position, tm_view *view, const int64_t *shape,
                       const int64_t *strides, int64_t unit);

/* Things to release when the views close. The caller gives up what it passes, also on failure (-1). */
struct tm_dl_managed;
struct tm_dl_managed_versioned;
int tm_views_hold_managed(tm_views *views, struct tm_dl_managed *managed);
int tm_views_hold_versioned(tm_views *views, struct tm_dl_managed_versioned *managed);

/* Fills a buffer that is released when the views close; NULL with a Python error. */
Py_buffer *tm_views_hold_buffer(tm_views *views, PyObject *object, int flags);

/* The doors. */
tm_door tm_numpy_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view);
tm_door tm_exchange_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view);
tm_door tm_capsule_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view);
tm_door tm_buffer_open(tm_views *views, Py_ssize_t position, PyObject *object, tm_view *view);

/* Whether an object is one array rather than a list of them: 1, 0, or -1 with a Python error. */
int tm_exchange_knows(tm_state *state, PyObject *object);

#endif
