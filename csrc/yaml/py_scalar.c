/* Turns resolved scalars into Python values. Contract: py_config.h. */
#include "py_config.h"

#include <string.h>

/* The text without underscores, sign split off: `digits` owned by the caller (PyMem_Free), NULL with
 * MemoryError. */
static char *bare_digits(PyObject *text, int *sign) {
    Py_ssize_t length = 0;
    const char *source = PyUnicode_AsUTF8AndSize(text, &length); /* borrowed from text */
    if (source == NULL) {
        return NULL;
    }
    char *digits = PyMem_Malloc((size_t)length + 1);
    if (digits == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    *sign = 1;
    size_t used = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        if (i == 0 && (source[i] == '-' || source[i] == '+')) {
            *sign = source[i] == '-' ? -1 : 1;
        } else if (source[i] != '_') {
            digits[used++] = source[i];
        }
    }
    digits[used] = '\0';
    return digits;
}

/* value * 60 + part; steals `value`. */
static PyObject *next_sixty(PyObject *value, const char *part) {
    PyObject *sixty = NULL;
    PyObject *shifted = NULL;
    PyObject *place = NULL;
    PyObject *sum = NULL;
    sixty = PyLong_FromLong(60);
    if (sixty == NULL) {
        goto done;
    }
    shifted = PyNumber_Multiply(value, sixty);
    if (shifted == NULL) {
        goto done;
    }
    place = PyLong_FromString(part, NULL, 10);
    if (place == NULL) {
        goto done;
    }
    sum = PyNumber_Add(shifted, place);
done:
    Py_XDECREF(place);
    Py_XDECREF(shifted);
    Py_XDECREF(sixty);
    Py_DECREF(value);
    return sum;
}

static PyObject *sexagesimal_int(char *digits) {
    PyObject *value = PyLong_FromLong(0);
    for (char *part = digits; value != NULL && part != NULL;) {
        char *colon = strchr(part, ':');
        if (colon != NULL) {
            *colon = '\0';
        }
        value = next_sixty(value, part);
        part = colon == NULL ? NULL : colon + 1;
    }
    return value;
}

static PyObject *signed_int(PyObject *text, int base) {
    int sign = 1;
    PyObject *value = NULL;
    char *digits = bare_digits(text, &sign);
    if (digits == NULL) {
        return NULL;
    }
    if (base == 60) {
        value = sexagesimal_int(digits);
    } else {
        /* Python wants no 0b or 0x in front of the digits of an explicit base 2 or 16, but takes it. */
        value = PyLong_FromString(digits, NULL, base);
    }
    PyMem_Free(digits);
    if (value != NULL && sign < 0) {
        PyObject *positive = value;
        value = PyNumber_Negative(positive);
        Py_DECREF(positive);
    }
    return value;
}

/* Sums from the last part to the first, in the order of PyYAML: the rounding is then the same. */
static double sexagesimal_float(char *digits) {
    double value = 0.0;
    double base = 1.0;
    for (;;) {
        char *colon = strrchr(digits, ':');
        value += PyOS_string_to_double(colon == NULL ? digits : colon + 1, NULL, NULL) * base;
        if (colon == NULL) {
            return value;
        }
        *colon = '\0';
        base *= 60.0;
    }
}

static PyObject *signed_float(PyObject *text, int sixty) {
    int sign = 1;
    char *digits = bare_digits(text, &sign);
    if (digits == NULL) {
        return NULL;
    }
    double value = sixty ? sexagesimal_float(digits) : PyOS_string_to_double(digits, NULL, NULL);
    PyMem_Free(digits);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(sign * value);
}

PyObject *config_float(PyObject *text) {
    return signed_float(text, 0);
}

PyObject *config_scalar(tm_scalar_kind kind, PyObject *text) {
    switch (kind) {
    case TM_SCALAR_NULL:
        Py_RETURN_NONE;
    case TM_SCALAR_TRUE:
        Py_RETURN_TRUE;
    case TM_SCALAR_FALSE:
        Py_RETURN_FALSE;
    case TM_SCALAR_INT2:
        return signed_int(text, 2);
    case TM_SCALAR_INT8:
        return signed_int(text, 8);
    case TM_SCALAR_INT10:
        return signed_int(text, 10);
    case TM_SCALAR_INT16:
        return signed_int(text, 16);
    case TM_SCALAR_INT60:
        return signed_int(text, 60);
    case TM_SCALAR_FLOAT10:
        return signed_float(text, 0);
    case TM_SCALAR_FLOAT60:
        return signed_float(text, 1);
    case TM_SCALAR_INF:
        return PyFloat_FromDouble(Py_HUGE_VAL);
    case TM_SCALAR_NEGATIVE_INF:
        return PyFloat_FromDouble(-Py_HUGE_VAL);
    case TM_SCALAR_NAN:
        return PyFloat_FromDouble(Py_NAN);
    case TM_SCALAR_TEXT:
        break;
    }
    return Py_NewRef(text);
}
