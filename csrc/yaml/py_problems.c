/* Collects the flaws of a text and raises them as one ParseError; finds those that the bytes alone show.
 * Contract: py_problems.h. */
#include "py_problems.h"
#include "text.h"

#include <stdarg.h>
#include <string.h>

#define MAX_PROBLEMS 100

/* Notes a problem; 0, or -1 with MemoryError. */
int config_complain(config_problems *p, size_t line, size_t column, const char *format, ...) {
    if (PyList_GET_SIZE(p->list) >= MAX_PROBLEMS) {
        return 0;
    }
    va_list arguments;
    va_start(arguments, format);
    PyObject *text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    if (text == NULL) {
        return -1;
    }
    PyObject *problem =
        Py_BuildValue("(nnN)", (Py_ssize_t)line, (Py_ssize_t)column, text); /* N: takes `text` */
    if (problem == NULL) {
        return -1;
    }
    int status = PyList_Append(p->list, problem);
    Py_DECREF(problem);
    return status;
}

/* Ends the reading after a problem was noted: always -1, without an exception unless noting it failed. */
int config_stop(config_problems *p, int noted) {
    p->stopped = noted == 0;
    return -1;
}

/* Raises what was noted. */
void config_raise(const config_problems *p, const config_state *state, PyObject *filename) {
    PyObject *lines = NULL;
    PyObject *newline = NULL;
    PyObject *message = NULL;
    PyObject *error = NULL;
    PyObject *all = NULL;
    lines = PyList_New(0);
    if (lines == NULL) {
        goto done;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(p->list); i++) {
        PyObject *problem = PyList_GET_ITEM(p->list, i); /* borrowed */
        PyObject *line = PyUnicode_FromFormat("%U:%S:%S: %S", filename, PyTuple_GET_ITEM(problem, 0),
                                              PyTuple_GET_ITEM(problem, 1), PyTuple_GET_ITEM(problem, 2));
        int status = line == NULL ? -1 : PyList_Append(lines, line);
        Py_XDECREF(line);
        if (status < 0) {
            goto done;
        }
    }
    newline = PyUnicode_FromString("\n");
    message = newline == NULL ? NULL : PyUnicode_Join(newline, lines);
    error = message == NULL ? NULL : PyObject_CallOneArg(state->parse_error, message);
    all = error == NULL ? NULL : PyList_AsTuple(p->list);
    if (all == NULL || PyObject_SetAttrString(error, "problems", all) < 0 ||
        PyObject_SetAttrString(error, "filename", filename) < 0) {
        goto done;
    }
    PyErr_SetObject(state->parse_error, error);
done:
    Py_XDECREF(all);
    Py_XDECREF(error);
    Py_XDECREF(message);
    Py_XDECREF(newline);
    Py_XDECREF(lines);
}

/* Notes what makes the bytes no text; -1 then, or with an exception. */
int config_check_text(config_problems *p, const unsigned char *text, size_t length, size_t most) {
    if (length > most) {
        return config_stop(p,
                           config_complain(p, 1, 1, "%zu bytes are too many; a configuration has at most %zu",
                                           length, most));
    }
    tm_text_flaw flaw;
    tm_text_check(text, length, &flaw);
    switch (flaw.kind) {
    case TM_TEXT_GOOD:
        return 0;
    case TM_TEXT_UTF16:
        return config_stop(
            p, config_complain(p, 1, 1, "the text is UTF-16 (by its byte order mark); save it as UTF-8"));
    case TM_TEXT_UTF32:
        return config_stop(
            p, config_complain(p, 1, 1, "the text is UTF-32 (by its byte order mark); save it as UTF-8"));
    case TM_TEXT_NOT_UTF8:
        return config_stop(p, config_complain(p, flaw.line, flaw.column,
                                              "the byte 0x%02x is not UTF-8; save the text as UTF-8",
                                              flaw.value));
    case TM_TEXT_NUL:
        return config_stop(p, config_complain(p, flaw.line, flaw.column,
                                              "a NUL character; if the text is UTF-16, save it as UTF-8"));
    case TM_TEXT_CONTROL:
        break;
    }
    return config_stop(
        p, config_complain(p, flaw.line, flaw.column,
                           "the control character U+%04x is not allowed; in double quotes write \\u%04x",
                           flaw.value, flaw.value));
}

/* What usually causes libyaml's commonest messages. */
static const struct {
    const char *problem;
    const char *advice;
} advices[] = {
    {"found character that cannot start any token",
     "; indent with spaces, not tabs, and quote a text that begins with @, ` or %"},
    {"mapping values are not allowed in this context",
     "; check the indentation, or quote a text that contains ': '"},
    {"could not find expected ':'", "; a key without colon, or a text that needs quotes"},
};

const char *config_advice(const char *problem) {
    for (size_t i = 0; i < sizeof(advices) / sizeof(advices[0]); i++) {
        if (strcmp(advices[i].problem, problem) == 0) {
            return advices[i].advice;
        }
    }
    return "";
}
