#include "tm_pair.h"

tm_status tm_pairs_check(const tm_view *a, const tm_view *b, size_t count, const char *const names[2],
                         int same_dtype, tm_error *error) {
    for (size_t i = 0; i < count; i++) {
        tm_status status = tm_layout_check(&a[i], i, error);
        if (status == TM_OK) {
            status = tm_layout_check(&b[i], i, error);
        }
        if (status != TM_OK) {
            return status;
        }
        if (same_dtype && b[i].dtype != a[i].dtype) {
            return tm_fail(error, TM_ERR_DTYPE, "%s[%zu]: dtype %s, %s[%zu] has %s", names[1], i,
                           tm_dtype_name(b[i].dtype), names[0], i, tm_dtype_name(a[i].dtype));
        }
        if (b[i].n != a[i].n) {
            return tm_fail(error, TM_ERR_VALUE, "%s[%zu]: %lld elements, %s[%zu] has %lld", names[1], i,
                           (long long)b[i].n, names[0], i, (long long)a[i].n);
        }
    }
    return TM_OK;
}
