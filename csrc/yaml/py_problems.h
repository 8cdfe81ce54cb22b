/* The flaws of a text, collected while it is read: semantic ones go on, syntax errors and limits stop the
 * reading. */
#ifndef TM_YAML_PY_PROBLEMS_H
#define TM_YAML_PY_PROBLEMS_H

#include "py_config.h"

#include <stdbool.h>

typedef struct config_problems {
    PyObject *list; /* owned by the reader: (line, column, text) tuples, 1-based */
    bool stopped;   /* a problem that ends the reading was noted */
} config_problems;

/* Notes a problem (PyUnicode_FromFormat's formats); 0, or -1 with MemoryError. Beyond a hundred they are
 * dropped. */
int config_complain(config_problems *p, size_t line, size_t column, const char *format, ...);

/* Ends the reading after a problem was noted: always -1, without an exception unless noting it failed. */
int config_stop(config_problems *p, int noted);

/* Sets the ParseError that tells all problems, or MemoryError. */
void config_raise(const config_problems *p, const config_state *state, PyObject *filename);

/* 0 if the bytes (behind a byte order mark) are a text of at most `most` bytes; else as config_stop. */
int config_check_text(config_problems *p, const unsigned char *text, size_t length, size_t most);

/* What to do about a message of libyaml: text to put behind it, empty if nothing is known. */
const char *config_advice(const char *problem);

#endif
