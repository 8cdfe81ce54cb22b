/* Search for the first non-finite element of a block (contract: tm_kernels.h). */
#include "tm_widen.h"

#include "tm_bytes.h"

#define TM_TEMPLATE "scan_float.h"
#include "each_float.h"
#undef TM_TEMPLATE

#define TM_FLOAT8_SCAN(enum_name, name, offset, mask, first)                                                 \
    static size_t scan_##name(const void *data, size_t n) {                                                  \
        return tm_bytes_find(data, n, offset, mask, first);                                                  \
    }
TM_FLOAT8S(TM_FLOAT8_SCAN)
#undef TM_FLOAT8_SCAN

#define TM_FLOAT8_ROW(enum_name, name, offset, mask, first) [TM_##enum_name] = scan_##name,

const tm_scan_kernels TM_TIERED(tm_scan_kernels_) = {
    .find = {TM_FLOAT8S(TM_FLOAT8_ROW)[TM_F64] = scan_f64, [TM_F32] = scan_f32, [TM_F16] = scan_f16,
             [TM_BF16] = scan_bf16},
};
