/* stage and stage_size: an arena found or made, one call of the core, records and words out. */
#include "tm_functions.h"

#include "../core/tm_stage.h"
#include "tm_arguments.h"
#include "tm_numpy.h"
#include "tm_prints.h"

/* New int64 array with the place of each tensor; *bytes: what they need. */
static PyObject *new_offsets(const tm_views *views, int64_t **offsets, int64_t *bytes) {
    const int64_t shape[1] = {(int64_t)views->count};
    void *data = NULL;
    tm_error error;
    PyObject *array = tm_numpy_new(TM_I64, 1, shape, &data);
    if (array == NULL)
        return NULL;
    const tm_status status = tm_stage_place(views->views, views->count, data, bytes, &error);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        Py_CLEAR(array);
    }
    *offsets = data;
    return array;
}

PyObject *tm_py_stage_size(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    int64_t *offsets = NULL, bytes = 0;
    tm_views views;
    if (tm_arguments_count("stage_size", count, 1) < 0)
        return NULL;
    if (tm_views_open(&views, tm_state_of(module), args[0], Py_None) == 0) {
        PyObject *places = new_offsets(&views, &offsets, &bytes);
        if (places != NULL)
            result = PyLong_FromLongLong(bytes);
        Py_XDECREF(places);
    }
    tm_views_close(&views);
    return result;
}

/* The caller's arena as bytes in a row; -1 with a Python error. */
static int open_arena(tm_views *views, tm_state *state, PyObject *arena, char **data, size_t *size) {
    if (tm_views_open_as(views, state, arena, Py_None, "arena", TM_VIEWS_WRITABLE) < 0)
        return -1;
    if (views->count != 1 || views->views[0].strides != NULL) {
        PyErr_SetString(PyExc_ValueError, "arena must be one array or buffer in C order");
        return -1;
    }
    *data = (char *)(uintptr_t)views->views[0].data; /* opened as writable */
    *size = views->bytes;
    return 0;
}

/* New arena, a uint8 array with room to start at a multiple of TM_STAGE_ALIGN. */
static PyObject *new_arena(int64_t bytes, char **data, size_t *skip) {
    const int64_t shape[1] = {bytes + TM_STAGE_ALIGN - 1};
    void *memory = NULL;
    PyObject *array = tm_numpy_new(TM_U8, 1, shape, &memory);
    if (array != NULL) {
        *skip = (size_t)(-(uintptr_t)memory % TM_STAGE_ALIGN);
        *data = (char *)memory + *skip;
    }
    return array;
}

PyObject *tm_py_stage(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL, *arena = NULL, *places = NULL, *stats = NULL, *prints = NULL, *kinds = NULL;
    int64_t *offsets = NULL, bytes = 0, bits = 0;
    uint64_t (*words)[2] = NULL;
    tm_stats *records = NULL;
    char *memory = NULL;
    size_t size = 0, skip = 0;
    tm_views views, arena_views = {.views = arena_views.inline_views};
    tm_error error;
    int threads;
    if (tm_arguments_count("stage", count, 5) < 0 || tm_arguments_int(args[3], "bits", 64, 128, &bits) < 0 ||
        tm_arguments_threads(args[4], &threads) < 0)
        return NULL;
    if (tm_views_open_as(&views, state, args[0], args[1], "tensors", TM_VIEWS_SHAPES) < 0)
        goto done;
    places = new_offsets(&views, &offsets, &bytes);
    if (places == NULL)
        goto done;
    if (args[2] == Py_None) {
        arena = new_arena(bytes, &memory, &skip);
        size = (size_t)bytes;
    } else if (open_arena(&arena_views, state, args[2], &memory, &size) == 0) {
        arena = Py_NewRef(args[2]);
    }
    if (arena == NULL)
        goto done;
    stats = tm_numpy_new_stats(state->stats_dtype, (Py_ssize_t)views.count, &records);
    prints = stats != NULL ? tm_prints_new(views.count, &words) : NULL;
    kinds = prints != NULL ? tm_prints_kinds(&views) : NULL;
    if (kinds == NULL)
        goto done;
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status =
        tm_stage(views.views, views.count, memory, size, (int)bits, threads, records, words, offsets, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = Py_BuildValue("(OnLOOOO)", arena, (Py_ssize_t)skip, (long long)bytes, places, stats, prints,
                               kinds);
done:
    Py_XDECREF(arena);
    Py_XDECREF(places);
    Py_XDECREF(stats);
    Py_XDECREF(prints);
    Py_XDECREF(kinds);
    tm_views_close(&arena_views);
    tm_views_close(&views);
    return result;
}
