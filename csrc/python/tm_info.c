/* cpu_info and build_info: which tier runs and why, what this build has and what it is linked with. */
#include "tm_functions.h"

#include "../core/tm_blas.h"
#include "../core/tm_dispatch.h"
#include "../core/tm_dtype.h"
#include "tm_arguments.h"
#include "tm_numpy.h"

#if defined(__x86_64__) && !defined(TM_NO_X86_TIERS)
#    define BEST_COMPILED TM_TIER_AVX512
#else
#    define BEST_COMPILED TM_TIER_BASELINE
#endif

#if defined(__clang__)
#    define COMPILER __VERSION__ /* begins with the name */
#elif defined(__GNUC__)
#    define COMPILER "gcc " __VERSION__
#else
#    define COMPILER "unknown"
#endif

#if defined(__SANITIZE_ADDRESS__)
#    define HAS_ASAN 1
#elif defined(__has_feature)
#    if __has_feature(address_sanitizer)
#        define HAS_ASAN 1
#    endif
#endif

/* Puts a new reference under a key and gives it up; -1 with a Python error, also when `value` is NULL. */
static int put(PyObject *dict, const char *key, PyObject *value) {
    if (value == NULL)
        return -1;
    const int status = PyDict_SetItemString(dict, key, value);
    Py_DECREF(value);
    return status;
}

static int put_text(PyObject *dict, const char *key, const char *text) {
    return put(dict, key, PyUnicode_FromString(text));
}

static int append(PyObject *list, const char *text) {
    PyObject *value = PyUnicode_FromString(text);
    if (value == NULL)
        return -1;
    const int status = PyList_Append(list, value);
    Py_DECREF(value);
    return status;
}

/* New list of the tiers up to and including `best`, slowest first. */
static PyObject *tiers_up_to(tm_tier best) {
    PyObject *list = PyList_New(0);
    for (int tier = TM_TIER_BASELINE; list != NULL && tier <= (int)best; tier++)
        if (append(list, tm_tier_name((tm_tier)tier)) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *dtype_names(void) {
    PyObject *list = PyList_New(0);
    for (int dtype = 0; list != NULL && dtype < TM_DTYPE_COUNT; dtype++)
        if (append(list, tm_dtype_name((tm_dtype)dtype)) < 0)
            Py_CLEAR(list);
    return list;
}

/* What this build has on beyond the ordinary. */
static const char *const switch_names[] = {
#ifndef __OPTIMIZE__
    "debug",
#endif
#ifdef HAS_ASAN
    "address sanitizer",
#endif
    NULL};

static PyObject *switches(void) {
    PyObject *list = PyList_New(0);
    for (const char *const *name = switch_names; list != NULL && *name != NULL; name++)
        if (append(list, *name) < 0)
            Py_CLEAR(list);
    return list;
}

static PyObject *family_tiers(const tm_dispatch_info *info) {
    PyObject *dict = PyDict_New();
    for (int family = 0; dict != NULL && family < TM_FAMILY_COUNT; family++)
        if (put_text(dict, tm_family_name((tm_family)family), tm_tier_name(info->family[family])) < 0)
            Py_CLEAR(dict);
    return dict;
}

PyObject *tm_py_cpu_info(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)args;
    if (tm_arguments_count("cpu_info", count, 0) < 0)
        return NULL;
    const tm_dispatch_info *info = tm_dispatch_describe(); /* filled in module exec */
    PyObject *dict = PyDict_New();
    if (dict == NULL)
        return NULL;
    if (put_text(dict, "tier", tm_tier_name(info->tier)) < 0 || put_text(dict, "reason", info->reason) < 0 ||
        put(dict, "requested", Py_NewRef(tm_state_of(module)->tier_requested)) < 0 ||
        put(dict, "available", tiers_up_to(info->machine)) < 0 ||
        put(dict, "compiled", tiers_up_to(BEST_COMPILED)) < 0 ||
        put(dict, "families", family_tiers(info)) < 0)
        Py_CLEAR(dict);
    return dict;
}

static PyObject *blas_info(void) {
    PyObject *dict = PyDict_New();
    if (dict == NULL)
        return NULL;
    if (put_text(dict, "config", tm_blas_config()) < 0 || put_text(dict, "core", tm_blas_core()) < 0 ||
        put_text(dict, "threading", tm_blas_threading()) < 0 ||
        put(dict, "threads", PyLong_FromLong(tm_blas_threads())) < 0 ||
        put(dict, "works", PyBool_FromLong(tm_blas_works())) < 0)
        Py_CLEAR(dict);
    return dict;
}

static PyObject *numpy_info(void) {
    return Py_BuildValue("{sIsIsI}", "api_built", tm_numpy_api_built(), "api_target", tm_numpy_api_target(),
                         "api_running", tm_numpy_api_running());
}

PyObject *tm_py_build_info(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    (void)args;
    if (tm_arguments_count("build_info", count, 0) < 0)
        return NULL;
    PyObject *dict = PyDict_New();
    if (dict == NULL)
        return NULL;
    if (put(dict, "dtypes", dtype_names()) < 0 || put_text(dict, "compiler", COMPILER) < 0 ||
        put(dict, "switches", switches()) < 0 || put(dict, "numpy", numpy_info()) < 0 ||
        put(dict, "blas", blas_info()) < 0)
        Py_CLEAR(dict);
    return dict;
}
