/* The dispatch table as the core's families see it; private to csrc/core. */
#ifndef TM_TABLE_H
#define TM_TABLE_H

#include "../kernels/tm_kernels.h"
#include "tm_dispatch.h"
#include "tm_status.h"

typedef struct tm_table {
    tm_dispatch_info info;
#define TM_FAMILY_POINTER(enum_name, name) const tm_##name##_kernels *name;
    TM_FAMILIES(TM_FAMILY_POINTER)
#undef TM_FAMILY_POINTER
    tm_gf gf_power[TM_FINGERPRINT_WIDTHS][64]; /* z^(2^j), for tm_gf_power */
    size_t worker_bytes;
} tm_table;

/* NULL before tm_dispatch_init; read-only. */
const tm_table *tm_table_get(void);

/* The same with a sentence for the caller. */
TM_NODISCARD tm_status tm_table_require(const tm_table **table, tm_error *error);

static inline int tm_dtype_is_byte(tm_dtype dtype) {
    return tm_dtype_size(dtype) == 1;
}

#endif
