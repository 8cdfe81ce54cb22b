/* detect and what prepares it. A plan is (kinds int64 [D], parameters float64 [D, 8], starts int64 [D + 1],
 * members int64 [starts[D]]): detector d watches members[starts[d]:starts[d + 1]]. The state is one int64
 * array, the words of detector after detector. */
#include "tm_functions.h"

#include "../core/tm_detect.h"
#include "../core/tm_memory.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

#include <stdlib.h>

#define EVENT_WORDS ((int64_t)(sizeof(tm_event) / sizeof(int64_t)))

typedef struct detector_bank {
    tm_detector *detectors; /* owned: free */
    int64_t count, words;
} detector_bank;

static int read_kinds(PyObject *kinds, PyObject *parameters, detector_bank *bank, const int64_t **kind,
                      const double **parameter) {
    int64_t shape[2];
    void *kind_data = NULL, *parameter_data = NULL;
    if (tm_numpy_read(kinds, "kinds", TM_I64, 1, 0, &kind_data, &bank->count) < 0 ||
        tm_numpy_read(parameters, "parameters", TM_F64, 2, 0, &parameter_data, shape) < 0)
        return -1;
    if (shape[0] != bank->count || shape[1] != TM_DETECTOR_PARAMETERS) {
        PyErr_Format(PyExc_ValueError, "parameters must have the shape [%lld, %d]", (long long)bank->count,
                     TM_DETECTOR_PARAMETERS);
        return -1;
    }
    *kind = kind_data;
    *parameter = parameter_data;
    return 0;
}

/* Kinds outside the enum's range stay outside. */
static tm_detector_kind kind_of(int64_t kind) {
    return kind >= 0 && kind < TM_DETECTOR_KINDS ? (tm_detector_kind)kind : TM_DETECTOR_KINDS;
}

/* 0, or -1 with an exception. words: where the state's words go; its length must be theirs. */
static int read_plan(PyObject *plan, PyObject *state, int writable, detector_bank *bank) {
    PyObject *kinds, *parameters, *starts, *members;
    const int64_t *kind, *start, *member;
    const double *parameter;
    int64_t boundaries, member_count, available;
    void *start_data = NULL, *member_data = NULL, *state_data = NULL;
    tm_error error;
    if (!PyTuple_Check(plan)) {
        PyErr_SetString(PyExc_TypeError, "plan must be a tuple");
        return -1;
    }
    if (!PyArg_ParseTuple(plan, "OOOO", &kinds, &parameters, &starts, &members) ||
        read_kinds(kinds, parameters, bank, &kind, &parameter) < 0 ||
        tm_numpy_read(starts, "starts", TM_I64, 1, 0, &start_data, &boundaries) < 0 ||
        tm_numpy_read(members, "members", TM_I64, 1, 0, &member_data, &member_count) < 0 ||
        tm_numpy_read(state, "state", TM_I64, 1, writable, &state_data, &available) < 0)
        return -1;
    start = start_data;
    member = member_data;
    int ordered = boundaries == bank->count + 1 && start[0] == 0 && start[bank->count] == member_count;
    for (int64_t d = 0; ordered && d < bank->count; d++)
        ordered = start[d] <= start[d + 1];
    if (!ordered) {
        PyErr_SetString(PyExc_ValueError, "starts must ascend from 0 to the number of members");
        return -1;
    }
    bank->detectors = tm_allocate((size_t)bank->count + 1, sizeof *bank->detectors);
    if (bank->detectors == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    bank->words = 0;
    for (int64_t d = 0; d < bank->count; d++) {
        tm_detector *detector = &bank->detectors[d];
        int64_t words;
        *detector = (tm_detector){.kind = kind_of(kind[d]),
                                  .members = member + start[d],
                                  .count = start[d + 1] - start[d],
                                  .words = (tm_word *)state_data + bank->words};
        for (int i = 0; i < TM_DETECTOR_PARAMETERS; i++)
            detector->p[i] = parameter[d * TM_DETECTOR_PARAMETERS + i];
        const tm_status status = tm_detector_words(detector->kind, detector->p, &words, &error);
        if (status != TM_OK) {
            tm_raise_status(status, &error);
            return -1;
        }
        /* Divided, not multiplied: the product may leave the range. */
        if (detector->count > 0 && words > (available - bank->words) / detector->count)
            break;
        bank->words += words * detector->count;
        if (d + 1 == bank->count && bank->words == available)
            return 0;
    }
    if (bank->count == 0 && available == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "the state's %lld words are not those of the detectors",
                 (long long)available);
    return -1;
}

PyObject *tm_py_detector_rules(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    (void)args;
    if (tm_arguments_count("detector_rules", count, 0) < 0)
        return NULL;
    PyObject *rules = PyTuple_New(TM_DETECTOR_KINDS);
    for (int kind = 0; rules != NULL && kind < TM_DETECTOR_KINDS; kind++) {
        PyObject *rule = Py_BuildValue("(ss)", tm_detector_name(kind), tm_detector_parameters(kind));
        if (rule == NULL)
            Py_CLEAR(rules);
        else
            PyTuple_SET_ITEM(rules, kind, rule);
    }
    return rules;
}

PyObject *tm_py_detector_words(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    detector_bank bank = {0};
    const int64_t *kind;
    const double *parameter;
    void *data = NULL;
    tm_error error;
    (void)module;
    if (tm_arguments_count("detector_words", count, 2) < 0 ||
        read_kinds(args[0], args[1], &bank, &kind, &parameter) < 0)
        return NULL;
    PyObject *result = tm_numpy_new(TM_I64, 1, &bank.count, &data);
    for (int64_t d = 0; result != NULL && d < bank.count; d++) {
        const tm_status status = tm_detector_words(kind_of(kind[d]), parameter + d * TM_DETECTOR_PARAMETERS,
                                                   (int64_t *)data + d, &error);
        if (status != TM_OK) {
            tm_raise_status(status, &error);
            Py_CLEAR(result);
        }
    }
    return result;
}

PyObject *tm_py_detector_reset(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    detector_bank bank = {0};
    (void)module;
    if (tm_arguments_count("detector_reset", count, 2) < 0)
        return NULL;
    if (read_plan(args[0], args[1], 1, &bank) == 0) {
        for (int64_t d = 0; d < bank.count; d++)
            tm_detector_reset(&bank.detectors[d]);
        result = Py_NewRef(Py_None);
    }
    free(bank.detectors);
    return result;
}

PyObject *tm_py_detector_check(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    detector_bank bank = {0};
    tm_error error;
    tm_status status = TM_OK;
    (void)module;
    if (tm_arguments_count("detector_check", count, 2) < 0)
        return NULL;
    if (read_plan(args[0], args[1], 0, &bank) == 0) {
        for (int64_t d = 0; status == TM_OK && d < bank.count; d++)
            status = tm_detector_check_state(&bank.detectors[d], &error);
        if (status != TM_OK)
            tm_raise_status(status, &error);
        else
            result = Py_NewRef(Py_None);
    }
    free(bank.detectors);
    return result;
}

PyObject *tm_py_detect(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    PyObject *result = NULL;
    detector_bank bank = {0};
    tm_detect_call call = {0};
    tm_error error;
    int64_t shape[2], mask_shape[2], event_shape[2], done, found;
    void *values = NULL, *valid = NULL, *events = NULL;
    (void)module;
    if (tm_arguments_count("detect", count, 5) < 0)
        return NULL;
    if (read_plan(args[0], args[1], 1, &bank) < 0 ||
        tm_numpy_read(args[2], "values", TM_F64, 2, 0, &values, shape) < 0 ||
        (args[3] != Py_None && tm_numpy_read(args[3], "valid", TM_BOOL, 2, 0, &valid, mask_shape) < 0) ||
        tm_numpy_read(args[4], "events", TM_I64, 2, 1, &events, event_shape) < 0)
        goto done;
    if (valid != NULL && (mask_shape[0] != shape[0] || mask_shape[1] != shape[1])) {
        PyErr_SetString(PyExc_ValueError, "valid does not have the shape of values");
        goto done;
    }
    if (event_shape[1] != EVENT_WORDS) {
        PyErr_Format(PyExc_ValueError, "events must have the shape [room, %lld]", (long long)EVENT_WORDS);
        goto done;
    }
    call.detectors = bank.detectors;
    call.count = (size_t)bank.count;
    call.values = values;
    call.valid = valid;
    call.steps = shape[0];
    call.series = shape[1];
    call.events = events;
    call.room = event_shape[0];
    /* Kept: a step of a few thousand series takes less than handing the GIL over may, and the state changes.
     */
    const tm_status status = tm_detect_run(&call, &done, &found, &error);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = Py_BuildValue("(LL)", (long long)done, (long long)found);
done:
    free(bank.detectors);
    return result;
}
