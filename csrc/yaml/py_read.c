/* libyaml events -> a tree of Nodes with positions. Contract: py_config.h; what a Node is: py_module.c.
 *
 * Iterative, over a stack of open collections of fixed size, so the depth of the text can't overflow the C
 * stack. There is one event, and one place that deletes it. Semantic flaws (duplicate key, unknown tag, ...)
 * are collected and reading goes on; a syntax error or a limit ends it. Either way one ParseError tells all.
 */
#include "py_config.h"
#include "py_problems.h"
#include "text.h"

#include <stdbool.h>
#include <string.h>
#include <yaml.h>

#define MAX_NUMBER_LENGTH 1000 /* a longer integer is a mistake, and quadratic to convert */

/* One open mapping or sequence. */
typedef struct frame {
    PyObject *items;  /* owned: dict key -> Node, or list of Nodes */
    PyObject *keys;   /* owned: dict key -> (line, column); NULL in a sequence */
    PyObject *merges; /* owned: list of mapping Nodes behind `<<`, NULL if there were none */
    PyObject *key;    /* owned: the key whose value comes next, NULL if a key comes next */
    yaml_mark_t mark;
    bool merging;        /* the key is `<<` */
    bool duplicate;      /* the key was there before: its value is dropped */
    Py_ssize_t anchor;   /* index into the anchors, -1 if none */
    size_t nodes_before; /* the count of nodes when the collection began */
    size_t height;       /* of the highest child; a scalar has 0 */
} frame;

typedef struct anchor {
    PyObject *node; /* owned: NULL while its collection is still open */
    size_t nodes;   /* aliases inside it expanded */
    size_t height;
} anchor;

typedef struct reader {
    const config_state *state;
    const config_limits *limits;
    frame *frames;  /* limits->depth of them */
    size_t depth;   /* open frames */
    size_t nodes;   /* so far, aliases expanded */
    PyObject *root; /* owned */
    config_problems problems;
    PyObject *names; /* owned: dict anchor name -> index of the latest such anchor */
    anchor *anchors;
    size_t n_anchors;
    size_t room; /* allocated anchors */
    size_t documents;
} reader;

/* A finished value on its way into the tree. */
typedef struct built {
    PyObject *node; /* owned */
    size_t nodes;
    size_t height;
    yaml_mark_t mark;
} built;

#define AT(mark) (mark).line + 1, (mark).column + 1

/* ---- nodes ---- */

/* A Node; takes `value`, which may be NULL (then NULL). `text` and `keys` are borrowed and may be NULL. */
static PyObject *make_node(const reader *r, PyObject *value, PyObject *text, bool plain, yaml_mark_t mark,
                           PyObject *keys) {
    if (value == NULL) {
        return NULL;
    }
    PyObject *node = PyStructSequence_New(r->state->node_type);
    if (node == NULL) {
        Py_DECREF(value);
        return NULL;
    }
    PyStructSequence_SET_ITEM(node, NODE_VALUE, value); /* the node owns the items from here on */
    PyStructSequence_SET_ITEM(node, NODE_TEXT, Py_NewRef(text == NULL ? Py_None : text));
    PyStructSequence_SET_ITEM(node, NODE_PLAIN, PyBool_FromLong(plain));
    PyStructSequence_SET_ITEM(node, NODE_LINE, PyLong_FromSize_t(mark.line + 1));
    PyStructSequence_SET_ITEM(node, NODE_COLUMN, PyLong_FromSize_t(mark.column + 1));
    PyStructSequence_SET_ITEM(node, NODE_KEYS, Py_NewRef(keys == NULL ? Py_None : keys));
    if (PyErr_Occurred()) {
        Py_DECREF(node);
        return NULL;
    }
    return node;
}

static PyObject *value_of(PyObject *node) {
    return PyStructSequence_GET_ITEM(node, NODE_VALUE); /* borrowed */
}

static PyObject *position(yaml_mark_t mark) {
    return Py_BuildValue("(nn)", (Py_ssize_t)mark.line + 1, (Py_ssize_t)mark.column + 1);
}

/* Counts `more` nodes; -1 when the limit is passed. */
static int count(reader *r, size_t more, yaml_mark_t mark, bool alias) {
    if (more > r->limits->nodes - r->nodes) {
        return config_stop(
            &r->problems,
            config_complain(
                &r->problems, AT(mark),
                alias ? "the aliases (*name) expand to more than %zu values; write the values out or "
                        "use fewer aliases"
                      : "more than %zu values; a configuration is smaller",
                r->limits->nodes));
    }
    r->nodes += more;
    return 0;
}

/* ---- anchors ---- */

/* Registers the anchor `name` (NULL: none) and returns its index through `index` (-1: none). */
static int open_anchor(reader *r, const yaml_char_t *name, Py_ssize_t *index) {
    *index = -1;
    if (name == NULL) {
        return 0;
    }
    if (r->n_anchors == r->room) {
        size_t room = r->room == 0 ? 16 : 2 * r->room; /* bounded by the count of nodes */
        anchor *grown = PyMem_Realloc(r->anchors, room * sizeof(anchor));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        r->anchors = grown;
        r->room = room;
    }
    PyObject *number = PyLong_FromSize_t(r->n_anchors);
    if (number == NULL) {
        return -1;
    }
    int status = PyDict_SetItemString(r->names, (const char *)name, number);
    Py_DECREF(number);
    if (status < 0) {
        return -1;
    }
    *index = (Py_ssize_t)r->n_anchors;
    r->anchors[r->n_anchors++] = (anchor){0};
    return 0;
}

static void close_anchor(reader *r, Py_ssize_t index, const built *value) {
    if (index >= 0) {
        r->anchors[index] =
            (anchor){.node = Py_NewRef(value->node), .nodes = value->nodes, .height = value->height};
    }
}

/* The anchor that an alias names; NULL after a problem or an exception. Borrowed from the reader. */
static const anchor *find_anchor(reader *r, const yaml_event_t *event) {
    PyObject *name = PyUnicode_FromString((const char *)event->data.alias.anchor);
    if (name == NULL) {
        return NULL;
    }
    const anchor *found = NULL;
    PyObject *index = PyDict_GetItemWithError(r->names, name); /* borrowed */
    if (index == NULL) {
        if (!PyErr_Occurred()) {
            config_stop(&r->problems, config_complain(&r->problems, AT(event->start_mark),
                                                      "no anchor &%U before the alias *%U", name, name));
        }
    } else {
        const anchor *candidate = &r->anchors[PyLong_AsSsize_t(index)];
        if (candidate->node == NULL) {
            config_stop(&r->problems,
                        config_complain(&r->problems, AT(event->start_mark),
                                        "the alias *%U stands inside its own anchor &%U", name, name));
        } else {
            found = candidate;
        }
    }
    Py_DECREF(name);
    return found;
}

/* ---- keys, values, merges ---- */

static int take_key(reader *r, frame *f, PyObject *text, bool merge, yaml_mark_t mark) {
    f->merging = merge;
    f->duplicate = false;
    if (!merge) {
        PyObject *first = PyDict_GetItemWithError(f->keys, text); /* borrowed */
        if (first == NULL && PyErr_Occurred()) {
            return -1;
        }
        if (first != NULL) {
            f->duplicate = true;
            if (config_complain(&r->problems, AT(mark), "duplicate key '%U' (first in line %S)", text,
                                PyTuple_GET_ITEM(first, 0)) < 0) {
                return -1;
            }
        } else {
            PyObject *where = position(mark);
            int status = where == NULL ? -1 : PyDict_SetItem(f->keys, text, where);
            Py_XDECREF(where);
            if (status < 0) {
                return -1;
            }
        }
    }
    f->key = Py_NewRef(text);
    return 0;
}

/* Remembers the mapping, or the mappings of a sequence, behind `<<`. */
static int take_merge(reader *r, frame *f, const built *value) {
    PyObject *source = value_of(value->node);
    bool many = PyTuple_Check(source);
    if (f->merges == NULL && (f->merges = PyList_New(0)) == NULL) {
        return -1;
    }
    Py_ssize_t n = many ? PyTuple_GET_SIZE(source) : 1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *node = many ? PyTuple_GET_ITEM(source, i) : value->node; /* borrowed */
        if (!PyDict_Check(value_of(node))) {
            return config_complain(&r->problems, AT(value->mark),
                                   "a mapping or a list of mappings was expected after <<");
        }
        if (PyList_Append(f->merges, node) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Puts a finished value where it belongs; takes value->node, on failure too. */
static int place(reader *r, const built *value) {
    int status = -1;
    if (r->depth == 0) {
        r->root = Py_NewRef(value->node);
        status = 0;
        goto done;
    }
    frame *f = &r->frames[r->depth - 1];
    if (value->height > f->height) {
        f->height = value->height;
    }
    if (f->keys == NULL) {
        status = PyList_Append(f->items, value->node);
        goto done;
    }
    if (f->merging) {
        status = take_merge(r, f, value);
    } else {
        status = f->duplicate ? 0 : PyDict_SetItem(f->items, f->key, value->node);
    }
    Py_CLEAR(f->key);
done:
    Py_DECREF(value->node);
    return status;
}

/* Adds to `items` and `keys` what `source_items` and `source_keys` have and they lack. */
static int fill(PyObject *items, PyObject *keys, PyObject *source_items, PyObject *source_keys) {
    return PyDict_Merge(items, source_items, 0) < 0 || PyDict_Merge(keys, source_keys, 0) < 0 ? -1 : 0;
}

/* Merged keys into the mapping: its own keys win wherever they stand, then the earlier source. */
static int flatten(frame *f) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(f->merges); i++) {
        PyObject *node = PyList_GET_ITEM(f->merges, i); /* borrowed */
        if (fill(f->items, f->keys, value_of(node), PyStructSequence_GET_ITEM(node, NODE_KEYS)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- events ---- */

static const char *core_tag(const yaml_char_t *tag) {
    static const char prefix[] = "tag:yaml.org,2002:";
    const char *text = (const char *)tag;
    return strncmp(text, prefix, sizeof(prefix) - 1) == 0 ? text + sizeof(prefix) - 1 : NULL;
}

static bool is(const char *name, const char *wanted) {
    return name != NULL && strcmp(name, wanted) == 0;
}

static int complain_tag(reader *r, const yaml_char_t *tag, yaml_mark_t mark) {
    return config_complain(&r->problems, AT(mark), "the tag %s is not supported; remove it",
                           (const char *)tag);
}

static bool integer_kind(tm_scalar_kind kind) {
    return kind >= TM_SCALAR_INT2 && kind <= TM_SCALAR_INT60;
}

static bool float_kind(tm_scalar_kind kind) {
    return kind >= TM_SCALAR_FLOAT10 && kind <= TM_SCALAR_NAN;
}

static bool key_comes_next(const reader *r) {
    return r->depth > 0 && r->frames[r->depth - 1].keys != NULL && r->frames[r->depth - 1].key == NULL;
}

/* The value of a scalar with an explicit standard tag: a new reference; NULL after an exception. A text that
 * the tag does not fit is a problem, and stays text. */
static PyObject *tagged_value(reader *r, const yaml_event_t *event, PyObject *text, tm_scalar_kind kind) {
    const char *name = core_tag(event->data.scalar.tag);
    const char *source = (const char *)event->data.scalar.value;
    if (strcmp((const char *)event->data.scalar.tag, "!") == 0 || is(name, "str") || is(name, "timestamp") ||
        (is(name, "merge") && key_comes_next(r))) {
        return Py_NewRef(text);
    }
    if (is(name, "float") && !float_kind(kind) && tm_scalar_is_number(source, event->data.scalar.length)) {
        return config_float(text);
    }
    if ((is(name, "int") && integer_kind(kind)) || (is(name, "float") && float_kind(kind)) ||
        (is(name, "bool") && (kind == TM_SCALAR_TRUE || kind == TM_SCALAR_FALSE)) ||
        (is(name, "null") && kind == TM_SCALAR_NULL)) {
        return config_scalar(kind, text);
    }
    int noted = 0;
    if (is(name, "int") || is(name, "float") || is(name, "bool") || is(name, "null")) {
        noted = config_complain(&r->problems, AT(event->start_mark), "'%U' is no value for the tag !!%s",
                                text, name);
    } else {
        noted = complain_tag(r, event->data.scalar.tag, event->start_mark);
    }
    return noted < 0 ? NULL : Py_NewRef(text);
}

static PyObject *scalar_value(reader *r, const yaml_event_t *event, PyObject *text) {
    bool plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    size_t length = event->data.scalar.length;
    if (event->data.scalar.tag == NULL && !plain) {
        return Py_NewRef(text);
    }
    tm_scalar_kind kind = tm_scalar_resolve((const char *)event->data.scalar.value, length);
    if (integer_kind(kind) && length > MAX_NUMBER_LENGTH) {
        return config_complain(&r->problems, AT(event->start_mark),
                               "an integer of %zu characters is too long", length) < 0
                   ? NULL
                   : Py_NewRef(text);
    }
    return event->data.scalar.tag == NULL ? config_scalar(kind, text) : tagged_value(r, event, text, kind);
}

static int on_scalar(reader *r, const yaml_event_t *event) {
    int status = -1;
    Py_ssize_t index = -1;
    bool plain = event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
    built value = {.nodes = 1, .mark = event->start_mark};
    PyObject *text = PyUnicode_DecodeUTF8((const char *)event->data.scalar.value,
                                          (Py_ssize_t)event->data.scalar.length, "strict");
    if (text == NULL || count(r, 1, value.mark, false) < 0 ||
        open_anchor(r, event->data.scalar.anchor, &index) < 0) {
        goto done;
    }
    value.node = make_node(r, scalar_value(r, event, text), text, plain, value.mark, NULL);
    if (value.node == NULL) {
        goto done;
    }
    close_anchor(r, index, &value);
    if (key_comes_next(r)) {
        const yaml_char_t *tag = event->data.scalar.tag;
        bool merge = tag == NULL ? plain && PyUnicode_CompareWithASCIIString(text, "<<") == 0
                                 : is(core_tag(tag), "merge");
        status = take_key(r, &r->frames[r->depth - 1], text, merge, value.mark);
        Py_CLEAR(value.node);
    } else {
        status = place(r, &value); /* takes value.node */
    }
done:
    Py_XDECREF(text);
    return status;
}

static int on_alias(reader *r, const yaml_event_t *event) {
    const anchor *target = find_anchor(r, event);
    if (target == NULL) {
        return -1;
    }
    PyObject *text = PyStructSequence_GET_ITEM(target->node, NODE_TEXT); /* borrowed; None unless a scalar */
    if (key_comes_next(r)) {
        if (text == Py_None) {
            return config_stop(&r->problems, config_complain(&r->problems, AT(event->start_mark),
                                                             "a key is text, not a list or a mapping"));
        }
        return count(r, 1, event->start_mark, true) < 0
                   ? -1
                   : take_key(r, &r->frames[r->depth - 1], text, false, event->start_mark);
    }
    if (r->depth + target->height > r->limits->depth) {
        return config_stop(&r->problems, config_complain(&r->problems, AT(event->start_mark),
                                                         "nested deeper than %zu levels (aliases expanded)",
                                                         r->limits->depth));
    }
    if (count(r, target->nodes, event->start_mark, true) < 0) {
        return -1;
    }
    built value = {
        .node = Py_NewRef(target->node), /* given to place() */
        .nodes = target->nodes,
        .height = target->height,
        .mark = event->start_mark,
    };
    return place(r, &value);
}

static int on_start(reader *r, yaml_mark_t mark, const yaml_char_t *name, const yaml_char_t *tag,
                    bool mapping) {
    if (key_comes_next(r)) {
        return config_stop(&r->problems,
                           config_complain(&r->problems, AT(mark), "a key is text, not a list or a mapping"));
    }
    if (r->depth == r->limits->depth) {
        return config_stop(&r->problems, config_complain(&r->problems, AT(mark),
                                                         "nested deeper than %zu levels", r->limits->depth));
    }
    if (tag != NULL && strcmp((const char *)tag, "!") != 0 && !is(core_tag(tag), mapping ? "map" : "seq") &&
        complain_tag(r, tag, mark) < 0) {
        return -1;
    }
    size_t before = r->nodes;
    if (count(r, 1, mark, false) < 0) {
        return -1;
    }
    frame *f = &r->frames[r->depth++]; /* from here on released with the reader */
    *f = (frame){.mark = mark, .anchor = -1, .nodes_before = before};
    f->items = mapping ? PyDict_New() : PyList_New(0);
    if (f->items == NULL || (mapping && (f->keys = PyDict_New()) == NULL)) {
        return -1;
    }
    return open_anchor(r, name, &f->anchor);
}

static void release_frame(frame *f) {
    Py_CLEAR(f->items);
    Py_CLEAR(f->keys);
    Py_CLEAR(f->merges);
    Py_CLEAR(f->key);
}

static int on_end(reader *r) {
    frame *f = &r->frames[r->depth - 1];
    if (f->merges != NULL && flatten(f) < 0) {
        return -1;
    }
    PyObject *value = f->keys == NULL ? PyList_AsTuple(f->items) : Py_NewRef(f->items);
    built node = {
        .node = make_node(r, value, NULL, false, f->mark, f->keys), /* takes `value` */
        .nodes = r->nodes - f->nodes_before,
        .height = f->height + 1,
        .mark = f->mark,
    };
    if (node.node == NULL) {
        return -1;
    }
    close_anchor(r, f->anchor, &node);
    release_frame(f);
    r->depth--;
    return place(r, &node); /* takes node.node */
}

/* 1: go on, 0: the stream ended, -1: stopped, or an exception is set. */
static int take(reader *r, const yaml_event_t *event) {
    int status = 0;
    switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
        if (r->documents++ > 0) {
            status = config_stop(&r->problems,
                                 config_complain(&r->problems, AT(event->start_mark),
                                                 "a second document; a configuration is one document"));
        }
        break;
    case YAML_SCALAR_EVENT:
        status = on_scalar(r, event);
        break;
    case YAML_ALIAS_EVENT:
        status = on_alias(r, event);
        break;
    case YAML_SEQUENCE_START_EVENT:
        status = on_start(r, event->start_mark, event->data.sequence_start.anchor,
                          event->data.sequence_start.tag, false);
        break;
    case YAML_MAPPING_START_EVENT:
        status = on_start(r, event->start_mark, event->data.mapping_start.anchor,
                          event->data.mapping_start.tag, true);
        break;
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT:
        status = on_end(r);
        break;
    case YAML_STREAM_END_EVENT:
        return 0;
    case YAML_NO_EVENT:
    case YAML_STREAM_START_EVENT:
    case YAML_DOCUMENT_END_EVENT:
        break;
    }
    return status < 0 ? -1 : 1;
}

/* Notes what libyaml found wrong; always -1. */
static int parser_failed(reader *r, const yaml_parser_t *parser) {
    if (parser->error == YAML_MEMORY_ERROR) {
        PyErr_NoMemory();
        return -1;
    }
    const char *problem = parser->problem == NULL ? "not YAML" : parser->problem;
    const char *advice = config_advice(problem);
    yaml_mark_t mark = parser->problem_mark;
    if (parser->context == NULL) {
        return config_stop(&r->problems, config_complain(&r->problems, AT(mark), "%s%s", problem, advice));
    }
    return config_stop(&r->problems,
                       config_complain(&r->problems, AT(mark), "%s%s (%s from line %zu, column %zu)", problem,
                                       advice, parser->context, AT(parser->context_mark)));
}

static int parse(reader *r, const unsigned char *text, size_t length) {
    yaml_parser_t parser;
    if (!yaml_parser_initialize(&parser)) {
        PyErr_NoMemory();
        return -1;
    }
    yaml_parser_set_input_string(&parser, text, length);
    yaml_parser_set_encoding(&parser, YAML_UTF8_ENCODING);
    int status = 1;
    while (status > 0) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            status = parser_failed(r, &parser); /* libyaml leaves no event behind */
            break;
        }
        status = take(r, &event);
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    return status;
}

static void release(reader *r) {
    for (size_t i = 0; i < r->depth; i++) {
        release_frame(&r->frames[i]);
    }
    for (size_t i = 0; i < r->n_anchors; i++) {
        Py_XDECREF(r->anchors[i].node);
    }
    PyMem_Free(r->anchors);
    PyMem_Free(r->frames);
    Py_XDECREF(r->names);
    Py_XDECREF(r->problems.list);
    Py_XDECREF(r->root);
}

PyObject *config_read(const config_state *state, const char *text, size_t length, PyObject *filename,
                      const config_limits *limits) {
    PyObject *result = NULL;
    reader r = {.state = state, .limits = limits};
    const unsigned char *bytes = (const unsigned char *)text;
    size_t bom = tm_text_bom(bytes, length);
    r.problems.list = PyList_New(0);
    r.names = PyDict_New();
    if (r.problems.list == NULL || r.names == NULL) {
        goto done;
    }
    r.frames = PyMem_Calloc(limits->depth, sizeof(frame));
    if (r.frames == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int status = config_check_text(&r.problems, bytes + bom, length - bom, limits->bytes);
    if (status == 0) {
        status = parse(&r, bytes + bom, length - bom);
    }
    if (status < 0 && !r.problems.stopped) {
        goto done; /* with an exception set */
    }
    if (PyList_GET_SIZE(r.problems.list) > 0) {
        config_raise(&r.problems, state, filename);
    } else if (r.root != NULL) {
        result = Py_NewRef(r.root);
    } else { /* no document at all: what an empty document is, nothing at the first place */
        result = make_node(&r, Py_NewRef(Py_None), NULL, true, (yaml_mark_t){0}, NULL);
    }
done:
    release(&r);
    return result;
}
