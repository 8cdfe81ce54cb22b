/* expert_load, expert_metrics, common_assignments: arguments in, one call of the core, values out. */
#include "tm_functions.h"

#include "../core/tm_moe.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

#include <math.h>
#include <string.h>

static int is_integer(tm_dtype dtype) {
    return dtype >= TM_I8 && dtype <= TM_U64;
}

/* 0, or -1 with a TypeError that says where the ids that are no integers stand. */
static int refuse_others(tm_views *views) {
    for (size_t i = 0; i < views->count; i++) {
        const tm_dtype dtype = views->views[i].dtype;
        if (!is_integer(dtype)) {
            tm_views_refuse(views, (Py_ssize_t)i, PyExc_TypeError, "expert ids must be integers, not %s: %s",
                            tm_dtype_name(dtype),
                            dtype == TM_BOOL
                                ? "a routing mask is counted by mask.sum(axis=0)"
                                : "pass .astype(numpy.int64), or the ids rather than the weights");
            return -1;
        }
    }
    return 0;
}

static int read_experts(PyObject *object, int64_t *experts) {
    return tm_arguments_int(object, "num_experts", 1, TM_MAX_EXPERTS, experts);
}

PyObject *tm_py_expert_load(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL, *counts = NULL, *invalid = NULL;
    int64_t experts, *count_data, *invalid_data;
    tm_views views;
    tm_error error;
    int threads;
    if (tm_arguments_count("expert_load", count, 4) < 0 || read_experts(args[1], &experts) < 0 ||
        tm_arguments_threads(args[3], &threads) < 0)
        return NULL;
    const int per_tensor = PyObject_IsTrue(args[2]);
    if (per_tensor < 0)
        return NULL;
    if (tm_views_open_as(&views, tm_state_of(module), args[0], Py_None, "indices", 0) < 0 ||
        refuse_others(&views) < 0)
        goto done;
    const int64_t shape[2] = {(int64_t)views.count, experts};
    void *data[2];
    counts = tm_numpy_new(TM_I64, per_tensor ? 2 : 1, per_tensor ? shape : shape + 1, &data[0]);
    invalid = tm_numpy_new(TM_I64, per_tensor ? 1 : 0, shape, &data[1]);
    if (counts == NULL || invalid == NULL)
        goto done;
    count_data = data[0];
    invalid_data = data[1];
    PyThreadState *thread = tm_drop_gil(views.bytes);
    const tm_status status = tm_expert_load(views.views, views.count, experts, per_tensor, threads,
                                            count_data, invalid_data, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else if (per_tensor)
        result = PyTuple_Pack(2, counts, invalid);
    else
        result = Py_BuildValue("(OL)", counts, (long long)*invalid_data);
done:
    Py_XDECREF(counts);
    Py_XDECREF(invalid);
    tm_views_close(&views);
    return result;
}

/* (window, hold, capacity factor or None, ranks). */
static int read_options(PyObject *object, tm_expert_options *options) {
    PyObject *factor;
    long long window, hold, ranks;
    if (!PyTuple_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "options must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(object, "LLOL", &window, &hold, &factor, &ranks))
        return -1;
    options->window = window;
    options->hold = hold;
    options->ranks = ranks;
    options->capacity_factor = factor == Py_None ? (double)NAN : PyFloat_AsDouble(factor);
    return factor != Py_None && options->capacity_factor == -1 && PyErr_Occurred() ? -1 : 0;
}

/* int64 [1 or layers, experts, replicas], or None. */
static int read_placement(PyObject *object, tm_expert_options *options) {
    int64_t shape[3];
    void *data;
    if (object == Py_None)
        return 0;
    if (tm_numpy_read(object, "placement", TM_I64, 3, 0, &data, shape) < 0)
        return -1;
    if ((shape[0] != 1 && shape[0] != options->layers) || shape[1] != options->experts) {
        PyErr_SetString(PyExc_ValueError, "placement does not have the layers and experts of counts");
        return -1;
    }
    options->placement = data;
    options->placement_layers = shape[0];
    options->replicas = shape[2];
    return 0;
}

/* float64 [layers, groups, experts], or None; float64 [layers], or None. */
static int read_groups(PyObject *groups, PyObject *dropped, tm_expert_options *options) {
    int64_t shape[3];
    void *data;
    if (groups != Py_None) {
        if (tm_numpy_read(groups, "group counts", TM_F64, 3, 0, &data, shape) < 0)
            return -1;
        if (shape[0] != options->layers || shape[1] < 1 || shape[2] != options->experts) {
            PyErr_SetString(PyExc_ValueError, "group counts do not have the layers and experts of counts");
            return -1;
        }
        options->group_counts = data;
        options->groups = shape[1];
    }
    if (dropped != Py_None) {
        if (tm_numpy_read(dropped, "dropped", TM_F64, 1, 0, &data, shape) < 0)
            return -1;
        if (shape[0] != options->layers) {
            PyErr_SetString(PyExc_ValueError, "dropped does not have the layers of counts");
            return -1;
        }
        options->dropped = data;
    }
    return 0;
}

/* The state's arrays, in the order of tm_expert_state; sizes are those of the counts and the window. */
static int read_state(PyObject *object, const tm_expert_options *options, tm_expert_state *state) {
    static const struct {
        const char *name;
        tm_dtype dtype;
        int ndim;
    } parts[] = {{"steps", TM_I64, 1},   {"total", TM_F64, 2},   {"pooled", TM_F64, 2},
                 {"ring", TM_F64, 3},    {"share", TM_F64, 2},   {"dead_age", TM_F64, 2},
                 {"hot_age", TM_F64, 2}, {"cold_age", TM_F64, 2}};
    enum { PARTS = sizeof parts / sizeof *parts };
    void *data[PARTS];
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != PARTS) {
        PyErr_SetString(PyExc_TypeError, "state must be a tuple of its arrays");
        return -1;
    }
    for (int i = 0; i < PARTS; i++) {
        const int64_t wanted[3] = {options->layers, parts[i].ndim == 3 ? options->window : options->experts,
                                   options->experts};
        int64_t shape[3];
        if (tm_numpy_read(PyTuple_GET_ITEM(object, i), parts[i].name, parts[i].dtype, parts[i].ndim, 1,
                          &data[i], shape) < 0)
            return -1;
        if (memcmp(shape, wanted, (size_t)parts[i].ndim * sizeof *shape) != 0) {
            PyErr_Format(PyExc_ValueError, "state.%s does not have the shape of counts and window",
                         parts[i].name);
            return -1;
        }
    }
    *state = (tm_expert_state){data[0], data[1], data[2], data[3], data[4], data[5], data[6], data[7]};
    return 0;
}

PyObject *tm_py_expert_metrics(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL, *metric = NULL, *rank_load = NULL;
    tm_expert_options options = {0};
    tm_expert_state state;
    tm_error error;
    void *data, *metric_data, *rank_data;
    int64_t shape[3];
    (void)module;
    /* counts in place 0 of the first axis; the ages of dead, hot and cold experts come into those behind */
    if (tm_arguments_count("expert_metrics", count, 6) < 0 ||
        tm_numpy_read(args[0], "counts", TM_F64, 3, 1, &data, shape) < 0 ||
        read_options(args[1], &options) < 0)
        return NULL;
    if (shape[0] != 4) {
        PyErr_SetString(PyExc_ValueError, "counts must have four places: theirs and those of three ages");
        return NULL;
    }
    options.layers = shape[1];
    options.experts = shape[2];
    if (read_placement(args[2], &options) < 0 || read_groups(args[3], args[4], &options) < 0 ||
        read_state(args[5], &options, &state) < 0)
        return NULL;
    const int64_t metric_shape[2] = {TM_EXPERT_METRIC_COUNT, options.layers};
    const int64_t rank_shape[2] = {options.layers, options.ranks > 0 ? options.ranks : 0};
    metric = tm_numpy_new(TM_F64, 2, metric_shape, &metric_data);
    rank_load = tm_numpy_new(TM_F64, 2, rank_shape, &rank_data);
    if (metric == NULL || rank_load == NULL)
        goto done;
    double *counts = data;
    const int64_t numbers = options.layers * options.experts;
    const tm_expert_results results = {.metric = metric_data,
                                       .dead_age = counts + numbers,
                                       .hot_age = counts + 2 * numbers,
                                       .cold_age = counts + 3 * numbers,
                                       .rank_load = rank_data};
    PyThreadState *thread = tm_drop_gil((size_t)(numbers * (1 + options.groups)) * sizeof(double));
    const tm_status status = tm_expert_metrics(counts, &options, &state, &results, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = PyTuple_Pack(2, metric, rank_load);
done:
    Py_XDECREF(metric);
    Py_XDECREF(rank_load);
    return result;
}

PyObject *tm_py_common_assignments(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    int64_t k, experts, common = 0;
    tm_views before, after;
    tm_error error;
    if (tm_arguments_count("common_assignments", count, 4) < 0 ||
        tm_arguments_int(args[2], "k", 1, INT64_MAX, &k) < 0 || read_experts(args[3], &experts) < 0)
        return NULL;
    if (tm_views_open_as(&before, tm_state_of(module), args[0], Py_None, "before", 0) < 0 ||
        refuse_others(&before) < 0)
        goto close_before;
    if (tm_views_open_as(&after, tm_state_of(module), args[1], Py_None, "after", 0) < 0 ||
        refuse_others(&after) < 0)
        goto close_after;
    if (before.count != 1 || after.count != 1) {
        PyErr_SetString(PyExc_TypeError, "before and after must be one array each");
        goto close_after;
    }
    PyThreadState *thread = tm_drop_gil(before.bytes + after.bytes);
    const tm_status status = tm_common_assignments(before.views, after.views, k, experts, &common, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = PyLong_FromLongLong(common);
close_after:
    tm_views_close(&after);
close_before:
    tm_views_close(&before);
    return result;
}
