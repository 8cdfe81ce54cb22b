/* The extension module `trainmon._config`: YAML text in, a tree of Nodes with positions out.
 *
 * Knows libyaml only through py_read.c, and nothing of the schema. Multi-phase initialisation, all state in
 * the module, no mutable static: several interpreters may each have their own, with a GIL of its own. */
#include "py_config.h"

static config_state *state_of(PyObject *module) {
    return PyModule_GetState(module); /* never NULL: the definition below has a size */
}

/* ---- load ---- */

PyDoc_STRVAR(
    load_doc,
    "load(text, filename, *, max_bytes=MAX_BYTES, max_depth=MAX_DEPTH, max_nodes=MAX_NODES)\n--\n\n"
    "Read one YAML document from UTF-8 bytes and return its root Node.\n\n"
    "Scalars follow YAML 1.1 as PyYAML reads it, except that timestamps stay text. Keys are text as "
    "written.\n"
    "Aliases and merge keys are expanded (a Node may be shared); the limits count them expanded. An empty\n"
    "document is a Node with the value None. `filename` is used in messages only.\n\n"
    "Raises ParseError for any flaw of the text, ValueError for a limit out of range.");

static PyObject *load(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"text", "filename", "max_bytes", "max_depth", "max_nodes", NULL};
    Py_buffer text = {0};
    PyObject *filename = NULL; /* borrowed from args */
    PyObject *root = NULL;
    Py_ssize_t bytes = (Py_ssize_t)CONFIG_MAX_BYTES;
    Py_ssize_t depth = (Py_ssize_t)CONFIG_MAX_DEPTH;
    Py_ssize_t nodes = (Py_ssize_t)CONFIG_MAX_NODES;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*U|$nnn:load", names, &text, &filename, &bytes, &depth,
                                     &nodes)) {
        return NULL; /* releases `text` itself */
    }
    if (bytes < 1 || nodes < 1 || depth < 1 || depth > (Py_ssize_t)CONFIG_DEPTH_CEILING) {
        PyErr_Format(PyExc_ValueError, "max_bytes and max_nodes must be at least 1, max_depth 1 to %zu",
                     CONFIG_DEPTH_CEILING);
        goto done;
    }
    config_limits limits = {.bytes = (size_t)bytes, .depth = (size_t)depth, .nodes = (size_t)nodes};
    root = config_read(state_of(module), text.buf, (size_t)text.len, filename, &limits);
done:
    PyBuffer_Release(&text);
    return root;
}

static PyMethodDef methods[] = {
    {"load", (PyCFunction)(void (*)(void))load, METH_VARARGS | METH_KEYWORDS, load_doc},
    {NULL, NULL, 0, NULL},
};

/* ---- module ---- */

static PyStructSequence_Field node_fields[] = {
    [NODE_VALUE] = {"value", "None, bool, int, float or str; a tuple of Nodes; or a dict from key to Node"},
    [NODE_TEXT] = {"text", "the scalar as written (quotes and escapes resolved); None for a collection"},
    [NODE_PLAIN] = {"plain", "True for a scalar without quotes"},
    [NODE_LINE] = {"line", "1-based"},
    [NODE_COLUMN] = {"column", "1-based, in code points"},
    [NODE_KEYS] = {"keys", "a dict from key to (line, column) of the key; None unless a mapping"},
    [NODE_FIELDS] = {NULL, NULL},
};

static PyStructSequence_Desc node_desc = {
    .name = "trainmon._config.Node",
    .doc = "A value of a YAML document and where it stands. A merged or aliased value stands where it is "
           "written.",
    .fields = node_fields,
    .n_in_sequence = NODE_FIELDS,
};

PyDoc_STRVAR(parse_error_doc,
             "A text is no acceptable YAML document. `problems` is a tuple of (line, column, text), "
             "`filename` the name\n"
             "given to load(); the message has one line a problem: filename:line:column: text.");

static int execute(PyObject *module) {
    config_state *state = state_of(module);
    state->node_type = PyStructSequence_NewType(&node_desc);
    if (state->node_type == NULL || PyModule_AddObjectRef(module, "Node", (PyObject *)state->node_type) < 0) {
        return -1;
    }
    state->parse_error =
        PyErr_NewExceptionWithDoc("trainmon._config.ParseError", parse_error_doc, PyExc_ValueError, NULL);
    if (state->parse_error == NULL || PyModule_AddObjectRef(module, "ParseError", state->parse_error) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "MAX_BYTES", (long)CONFIG_MAX_BYTES) < 0 ||
                   PyModule_AddIntConstant(module, "MAX_DEPTH", (long)CONFIG_MAX_DEPTH) < 0 ||
                   PyModule_AddIntConstant(module, "MAX_NODES", (long)CONFIG_MAX_NODES) < 0
               ? -1
               : 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    Py_VISIT(state_of(module)->node_type);
    Py_VISIT(state_of(module)->parse_error);
    return 0;
}

static int clear(PyObject *module) {
    Py_CLEAR(state_of(module)->node_type);
    Py_CLEAR(state_of(module)->parse_error);
    return 0;
}

static void destroy(void *module) {
    (void)clear(module);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)(uintptr_t)execute},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "trainmon._config",
    .m_doc = "YAML with positions, over libyaml. See trainmon.config for the schema.",
    .m_size = sizeof(config_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
    .m_free = destroy,
};

PyMODINIT_FUNC PyInit__config(void) {
    return PyModuleDef_Init(&definition);
}
