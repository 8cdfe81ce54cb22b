/* write_rows: columns in, bytes out. Views and texts are taken first, the text is made without the GIL. */
#include "tm_functions.h"

#include "../core/tm_rows_text.h"
#include "tm_arguments.h"

#include <stdlib.h>

/* The UTF-8 of a str, borrowed from it. A str with lone surrogates has none: its bytes are added to `kept`.
 */
static int take_text(PyObject *object, PyObject *column, Py_ssize_t row, PyObject *kept, tm_text *text) {
    Py_ssize_t length = 0;
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "column %R: row %zd must be a str or None, not %.100s", column, row,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    text->data = PyUnicode_AsUTF8AndSize(object, &length);
    if (text->data == NULL && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear();
        PyObject *bytes = PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass");
        if (bytes == NULL)
            return -1;
        const int failed = PyList_Append(kept, bytes);
        Py_DECREF(bytes); /* the list has it */
        if (failed < 0)
            return -1;
        text->data = PyBytes_AS_STRING(bytes);
        length = PyBytes_GET_SIZE(bytes);
    }
    text->length = (size_t)length;
    return text->data == NULL ? -1 : 0;
}

static int check_rows(PyObject *name, Py_ssize_t own, PyObject *first, Py_ssize_t rows) {
    if (own == rows)
        return 0;
    PyErr_Format(PyExc_ValueError, "column %R has %zd rows, %R has %zd", name, own, first, rows);
    return -1;
}

static int check_axes(PyObject *name, const char *what, const tm_view *view) {
    if (view->ndim == 1)
        return 0;
    PyErr_Format(PyExc_ValueError, "column %R: %s must have one axis, not %d", name, what, (int)view->ndim);
    return -1;
}

/* A tuple of str and None. */
static int take_texts(PyObject *tuple, PyObject *name, PyObject *kept, tm_text *texts) {
    for (Py_ssize_t row = 0; row < PyTuple_GET_SIZE(tuple); row++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, row);
        if (item == Py_None)
            texts[row] = (tm_text){NULL, 0};
        else if (take_text(item, name, row, kept, &texts[row]) < 0)
            return -1;
    }
    return 0;
}

/* The call's arguments, and what they become. */
typedef struct request {
    PyObject *plan;          /* borrowed: a tuple of (name, texts or None, has a mask) */
    tm_views numbers, masks; /* of the columns that have them, in order */
    PyObject *kept;          /* owned list */
    tm_column *columns;      /* owned */
    tm_text *texts;          /* owned: [text columns, rows] */
    Py_ssize_t rows;
} request;

static int take_columns(request *call) {
    const Py_ssize_t count = PyTuple_GET_SIZE(call->plan);
    PyObject *first = NULL;
    size_t number = 0, mask = 0, text_columns = 0;
    for (Py_ssize_t c = 0; c < count; c++) {
        PyObject *name, *texts;
        int masked;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(call->plan, c), "UOp", &name, &texts, &masked) ||
            take_text(name, name, -1, call->kept, &call->columns[c].name) < 0)
            return -1;
        tm_column *column = &call->columns[c];
        Py_ssize_t own;
        if (PyTuple_Check(texts)) {
            own = PyTuple_GET_SIZE(texts);
            text_columns++;
        } else {
            column->view = call->numbers.views[number++];
            own = (Py_ssize_t)column->view.n;
            if (check_axes(name, "its values", &column->view) < 0)
                return -1;
        }
        if (c == 0) {
            first = name;
            call->rows = own;
        }
        if (check_rows(name, own, first, call->rows) < 0)
            return -1;
        if (masked) {
            column->valid = &call->masks.views[mask++];
            if (check_axes(name, "its mask", column->valid) < 0 ||
                check_rows(name, (Py_ssize_t)column->valid->n, first, call->rows) < 0)
                return -1;
            if (column->valid->dtype != TM_BOOL) {
                PyErr_Format(PyExc_TypeError, "column %R: its mask must be bool, not %s", name,
                             tm_dtype_name(column->valid->dtype));
                return -1;
            }
        }
    }
    call->texts = PyMem_Calloc(text_columns * (size_t)call->rows + 1, sizeof *call->texts);
    if (call->texts == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    tm_text *next = call->texts;
    for (Py_ssize_t c = 0; c < count; c++) {
        PyObject *entry = PyTuple_GET_ITEM(call->plan, c), *texts = PyTuple_GET_ITEM(entry, 1);
        if (PyTuple_Check(texts)) {
            if (take_texts(texts, PyTuple_GET_ITEM(entry, 0), call->kept, next) < 0)
                return -1;
            call->columns[c].texts = next;
            next += call->rows;
        }
    }
    return 0;
}

PyObject *tm_py_write_rows(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL;
    request call = {0};
    tm_rows_text out = {0};
    tm_error error;
    if (tm_arguments_count("write_rows", count, 6) < 0)
        return NULL;
    const int json = PyObject_IsTrue(args[4]), header = PyObject_IsTrue(args[5]);
    if (json < 0 || header < 0)
        return NULL;
    if (!PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "columns must be a tuple");
        return NULL;
    }
    call.plan = args[0];
    if (tm_views_open_as(&call.numbers, state, args[1], args[2], "columns", 0) < 0 ||
        tm_views_open_as(&call.masks, state, args[3], Py_None, "valid", 0) < 0)
        goto done;
    const size_t columns = (size_t)PyTuple_GET_SIZE(call.plan);
    call.kept = PyList_New(0);
    if (call.kept == NULL)
        goto done;
    call.columns = PyMem_Calloc(columns + 1, sizeof *call.columns);
    if (call.columns == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    if (take_columns(&call) < 0)
        goto done;
    PyThreadState *thread = tm_drop_gil(8 * columns * (size_t)call.rows);
    const tm_status status = tm_rows_write(json ? TM_ROWS_JSON : TM_ROWS_CSV, call.columns, columns,
                                           call.rows, header, &out, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = PyBytes_FromStringAndSize(out.data, (Py_ssize_t)out.length);
done:
    free(out.data);
    PyMem_Free(call.texts);
    PyMem_Free(call.columns);
    Py_XDECREF(call.kept);
    tm_views_close(&call.masks);
    tm_views_close(&call.numbers);
    return result;
}
