/* The module trainmon._core: its state, its functions, and what happens at import: NumPy's C API, the
 * dispatch table filled for the tier of this machine (TRAINMON_CPU), the strings and the dtype that calls
 * need. */
#include "tm_functions.h"

#include "../core/tm_blas.h"
#include "../core/tm_dispatch.h"
#include "tm_numpy.h"

#include <stdlib.h>

PyDoc_STRVAR(module_doc,
             "The compiled part of trainmon. Use trainmon.ops: it has the keywords and the documentation.");

static PyMethodDef methods[] = {
#define TM_LIST_FUNCTION(name, arguments)                                                                    \
    {#name, (PyCFunction)(void (*)(void))tm_py_##name, METH_FASTCALL,                                        \
     PyDoc_STR(#name arguments "\n--\n\nSee trainmon.ops.")},
    TM_FUNCTIONS(TM_LIST_FUNCTION)
#undef TM_LIST_FUNCTION
        {NULL, NULL, 0, NULL},
};

static int make_strings(tm_state *state) {
    const struct {
        PyObject **slot;
        const char *text;
    } strings[] = {
        {&state->str_exchange_api, "__dlpack_c_exchange_api__"},
        {&state->str_dlpack, "__dlpack__"},
        {&state->str_dlpack_device, "__dlpack_device__"},
        {&state->str_is_neg, "is_neg"},
        {&state->str_requires_grad, "requires_grad"},
        {&state->str_detach, "detach"},
        {&state->str_device, "device"},
        {&state->str_mask, "mask"},
    };
    for (size_t i = 0; i < sizeof strings / sizeof strings[0]; i++) {
        *strings[i].slot = PyUnicode_InternFromString(strings[i].text);
        if (*strings[i].slot == NULL)
            return -1;
    }
    state->dlpack_kwnames = Py_BuildValue("(s)", "max_version");
    state->dlpack_version = Py_BuildValue("(ii)", TM_DL_MAJOR, 0);
    return state->dlpack_kwnames == NULL || state->dlpack_version == NULL ? -1 : 0;
}

/* Fills the dispatch table; a request that this machine can't meet is a warning, and the best tier runs. */
static int choose_tier(tm_state *state) {
    const char *requested = getenv("TRAINMON_CPU");
    tm_dispatch_init(requested);
    state->tier_requested =
        requested != NULL && requested[0] != '\0' ? PyUnicode_DecodeFSDefault(requested) : Py_NewRef(Py_None);
    if (state->tier_requested == NULL)
        return -1;
    const tm_dispatch_info *info = tm_dispatch_describe();
    return info->warn ? PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "trainmon: %s", info->reason) : 0;
}

static int module_exec(PyObject *module) {
    tm_state *state = tm_state_of(module);
#if PY_VERSION_HEX < 0x030c0000
    /* Newer interpreters refuse by the slot below. NumPy's C API serves the main interpreter only. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "trainmon._core can't be loaded in a subinterpreter");
        return -1;
    }
#endif
    if (tm_numpy_import() < 0 || make_strings(state) < 0)
        return -1;
    state->stats_dtype = tm_numpy_stats_dtype();
    if (state->stats_dtype == NULL || PyModule_AddObjectRef(module, "STATS_DTYPE", state->stats_dtype) < 0)
        return -1;
    tm_blas_init();
    return choose_tier(state);
}

#define FOR_EACH_OWNED(X)                                                                                    \
    X(stats_dtype)                                                                                           \
    X(str_exchange_api)                                                                                      \
    X(str_dlpack)                                                                                            \
    X(str_dlpack_device)                                                                                     \
    X(str_is_neg)                                                                                            \
    X(str_requires_grad)                                                                                     \
    X(str_detach)                                                                                            \
    X(str_device)                                                                                            \
    X(str_mask)                                                                                              \
    X(dlpack_kwnames)                                                                                        \
    X(dlpack_version)                                                                                        \
    X(tier_requested)

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    tm_state *state = tm_state_of(module);
    if (state == NULL) /* not yet made */
        return 0;
#define VISIT(member) Py_VISIT(state->member);
    FOR_EACH_OWNED(VISIT)
#undef VISIT
    for (size_t i = 0; i < TM_EXCHANGE_SLOTS; i++)
        Py_VISIT(state->exchange[i].type_ref);
    return 0;
}

static int module_clear(PyObject *module) {
    tm_state *state = tm_state_of(module);
    if (state == NULL)
        return 0;
#define CLEAR(member) Py_CLEAR(state->member);
    FOR_EACH_OWNED(CLEAR)
#undef CLEAR
    for (size_t i = 0; i < TM_EXCHANGE_SLOTS; i++)
        Py_CLEAR(state->exchange[i].type_ref);
    return 0;
}

static void module_free(void *module) {
    (void)module_clear((PyObject *)module);
}

static PyModuleDef_Slot slots[] = {
    /* ISO C converts a function pointer to void * only by way of an integer. */
    {Py_mod_exec, (void *)(uintptr_t)module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030d0000
    {Py_mod_gil, Py_MOD_GIL_USED}, /* the exchange slots have no lock of their own */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "trainmon._core",
    .m_doc = module_doc,
    .m_size = sizeof(tm_state), /* zeroed by the interpreter */
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void) {
    return PyModuleDef_Init(&definition);
}
