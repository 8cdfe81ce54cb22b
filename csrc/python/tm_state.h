/* What one instance of the module owns. There is no mutable static in this directory but NumPy's function
 * table (tm_numpy.c), which NumPy itself keeps per process. */
#ifndef TM_STATE_H
#define TM_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../core/tm_cpu.h"
#include "tm_dlpack.h"

#define TM_EXCHANGE_SLOTS 8 /* tensor types seen at once; a model has two (Tensor, Parameter) */

/* One tensor type and its exchange table. The type is held weakly, so a class made on the fly can die; its
 * slot then matches nothing, even when another type gets the same address. */
typedef struct tm_exchange_slot {
    PyObject *type_ref;            /* owned weak reference, NULL: empty */
    const tm_dl_exchange_api *api; /* lives as long as the process, by DLPack's contract */
} tm_exchange_slot;

typedef struct tm_state {
    PyObject *stats_dtype; /* owned: the structured dtype of tm_stats */

    /* owned interned strings */
    PyObject *str_exchange_api, *str_dlpack, *str_dlpack_device, *str_is_neg, *str_requires_grad, *str_detach;
    PyObject *str_device, *str_mask;
    PyObject *dlpack_kwnames; /* owned: ("max_version",) */
    PyObject *dlpack_version; /* owned: (1, 0) */

    tm_exchange_slot exchange[TM_EXCHANGE_SLOTS];
    size_t exchange_next; /* the slot to overwrite next */

    PyObject *tier_requested; /* owned: TRAINMON_CPU at import as str, or None */
} tm_state;

/* The state of the module that a function was called on. */
static inline tm_state *tm_state_of(PyObject *module) {
    return (tm_state *)PyModule_GetState(module);
}

#endif
