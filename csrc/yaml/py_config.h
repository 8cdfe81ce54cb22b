/* What the Python-facing files of the extension `trainmon._config` share. Only csrc/yaml/py_* include this.
 */
#ifndef TM_YAML_PY_CONFIG_H
#define TM_YAML_PY_CONFIG_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "scalar.h"

typedef struct config_state {
    PyTypeObject *node_type; /* owned: the struct sequence trainmon._config.Node */
    PyObject *parse_error;   /* owned: trainmon._config.ParseError */
} config_state;

/* The fields of a Node, in order. */
enum { NODE_VALUE, NODE_TEXT, NODE_PLAIN, NODE_LINE, NODE_COLUMN, NODE_KEYS, NODE_FIELDS };

typedef struct config_limits {
    size_t bytes; /* of the text */
    size_t depth; /* of collections inside each other, aliases expanded */
    size_t nodes; /* scalars and collections, aliases expanded */
} config_limits;

#define CONFIG_MAX_BYTES ((size_t)1 << 20)
#define CONFIG_MAX_DEPTH ((size_t)64)
#define CONFIG_MAX_NODES ((size_t)100000)
#define CONFIG_DEPTH_CEILING ((size_t)1000) /* deallocating a tree recurses: never nest deeper than this */

/* The Python value of a resolved scalar: a new reference, or NULL with an exception set. `text` is the
 * decoded scalar. */
PyObject *config_scalar(tm_scalar_kind kind, PyObject *text);

/* A number written in any of YAML's or JSON's ways, as a float: a new reference, NULL with an exception set.
 */
PyObject *config_float(PyObject *text);

/* Reads one document: a new reference to its root Node, or NULL with ParseError or MemoryError set. */
PyObject *config_read(const config_state *state, const char *text, size_t length, PyObject *filename,
                      const config_limits *limits);

#endif
