/* loss_add, loss_add_value, loss_add_state, loss_means, loss_layout: the state of a LossAccumulator is an
 * int64 array of shape [rows, TM_LOSS_WORDS] that the Python object owns. It changes only while the GIL is
 * held, all at once. */
#include "tm_functions.h"

#include "../core/tm_loss.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

#include <string.h>

static int read_state(PyObject *object, const char *name, int writable, int64_t **words, int64_t *rows) {
    int64_t shape[2];
    void *data = NULL;
    if (tm_numpy_read(object, name, TM_I64, 2, writable, &data, shape) < 0)
        return -1;
    if (shape[0] < 1 || shape[1] != TM_LOSS_WORDS) {
        PyErr_Format(PyExc_ValueError, "%s must have the shape [1 + buckets, %d], not [%lld, %lld]", name,
                     (int)TM_LOSS_WORDS, (long long)shape[0], (long long)shape[1]);
        return -1;
    }
    *words = data;
    *rows = shape[0];
    return 0;
}

/* One array, or None where `optional`: opened as a list of one, so that errors name the argument. */
static int open_one(tm_views *views, tm_state *state, PyObject *object, const char *argument) {
    PyObject *list = PyTuple_Pack(1, object);
    if (list == NULL) {
        memset(views, 0, sizeof *views);
        return -1;
    }
    const int done = tm_views_open_as(views, state, list, Py_None, argument, 0);
    Py_DECREF(list);
    return done;
}

PyObject *tm_py_loss_add(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    static const char *const names[3] = {"losses", "weights", "buckets"};
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL;
    tm_views views[3];
    const tm_view *view[3] = {NULL, NULL, NULL};
    size_t bytes = 0;
    tm_loss_batch batch = {0};
    tm_error error;
    int64_t *words = NULL, rows = 0;
    int opened = 0;
    if (tm_arguments_count("loss_add", count, 4) < 0 || read_state(args[0], "state", 1, &words, &rows) < 0)
        return NULL;
    if ((rows > 1) != (args[3] != Py_None)) {
        PyErr_SetString(PyExc_ValueError, rows > 1
                                              ? "buckets are needed: this accumulator was made with some"
                                              : "buckets are not known: make LossAccumulator(buckets=...)");
        return NULL;
    }
    for (; opened < 3; opened++) {
        if (opened > 0 && args[1 + opened] == Py_None) {
            memset(&views[opened], 0, sizeof views[opened]);
            continue;
        }
        if (open_one(&views[opened], state, args[1 + opened], names[opened]) < 0) {
            opened++;
            goto done;
        }
        view[opened] = &views[opened].views[0];
        bytes += views[opened].bytes;
    }
    PyThreadState *thread = tm_drop_gil(bytes);
    const tm_status status = tm_loss_collect(&batch, rows - 1, view[0], view[1], view[2], &error);
    tm_take_gil(thread);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        goto done;
    }
    tm_loss_add_batch(words, &batch);
    result = Py_NewRef(Py_None);
done:
    tm_loss_release(&batch);
    for (int i = 0; i < opened; i++) {
        if (i == 0 || args[1 + i] != Py_None)
            tm_views_close(&views[i]);
    }
    return result;
}

PyObject *tm_py_loss_add_value(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_loss_batch batch;
    tm_error error;
    int64_t *words = NULL, rows = 0, tokens = 0;
    (void)module;
    if (tm_arguments_count("loss_add_value", count, 4) < 0 ||
        read_state(args[0], "state", 1, &words, &rows) < 0)
        return NULL;
    const double value = PyFloat_AsDouble(args[1]);
    const int is_mean = PyObject_IsTrue(args[2]);
    if (is_mean < 0 || PyErr_Occurred() || tm_arguments_int(args[3], "n", 0, INT64_MAX, &tokens) < 0)
        return NULL;
    if (rows > 1) {
        PyErr_SetString(PyExc_ValueError, "buckets are needed: this accumulator was made with some");
        return NULL;
    }
    if (tokens == 0)
        Py_RETURN_NONE;
    const tm_status status = tm_loss_collect_value(&batch, value, is_mean, tokens, &error);
    if (status != TM_OK) {
        tm_raise_status(status, &error);
        return NULL;
    }
    tm_loss_add_batch(words, &batch);
    tm_loss_release(&batch);
    Py_RETURN_NONE;
}

PyObject *tm_py_loss_add_state(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t *words = NULL, *others = NULL, rows = 0, other_rows = 0;
    (void)module;
    if (tm_arguments_count("loss_add_state", count, 2) < 0 ||
        read_state(args[0], "state", 1, &words, &rows) < 0 ||
        read_state(args[1], "other", 0, &others, &other_rows) < 0)
        return NULL;
    if (rows != other_rows) {
        PyErr_Format(PyExc_ValueError, "the other accumulator has %lld buckets, this one %lld",
                     (long long)(other_rows - 1), (long long)(rows - 1));
        return NULL;
    }
    tm_loss_add_state(words, others, rows);
    Py_RETURN_NONE;
}

PyObject *tm_py_loss_means(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    int64_t *words = NULL, rows = 0, row = 0;
    double mean, mean_of_means;
    (void)module;
    if (tm_arguments_count("loss_means", count, 2) < 0 ||
        read_state(args[0], "state", 0, &words, &rows) < 0 ||
        tm_arguments_int(args[1], "row", 0, rows - 1, &row) < 0)
        return NULL;
    if (!tm_loss_means(words + row * TM_LOSS_WORDS, &mean, &mean_of_means))
        Py_RETURN_NONE;
    return Py_BuildValue("(dd)", mean, mean_of_means);
}

PyObject *tm_py_loss_layout(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module, (void)args;
    if (tm_arguments_count("loss_layout", count, 0) < 0)
        return NULL;
    PyObject *fields = PyDict_New();
#define FIELD(name, digits)                                                                                  \
    if (fields != NULL) {                                                                                    \
        PyObject *place = Py_BuildValue("(ii)", (int)TM_LOSS_##name, (int)(digits));                         \
        if (place == NULL || PyDict_SetItemString(fields, #name, place) < 0)                                 \
            Py_CLEAR(fields);                                                                                \
        Py_XDECREF(place);                                                                                   \
    }
    TM_LOSS_FIELDS(FIELD)
#undef FIELD
    return fields;
}
