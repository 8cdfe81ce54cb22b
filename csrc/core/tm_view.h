/* A borrowed, read-only look at one tensor in host memory. The core neither allocates nor frees what a view
 * points to: whoever made the view keeps the tensor, its shape and its strides alive until the call returns.
 */
#ifndef TM_VIEW_H
#define TM_VIEW_H

#include "tm_dtype.h"

#include <stdint.h>

#define TM_MAX_NDIM 64 /* NumPy's own limit since 2.0 */

typedef struct tm_view {
    const void *data;     /* element [0, ..., 0]; any alignment; may be NULL when n == 0 */
    const int64_t *shape; /* [ndim], borrowed; not read when strides is NULL */
    const int64_t
        *strides; /* [ndim] in bytes, borrowed; 0 and negative allowed; NULL: n elements, C-contiguous */
    int64_t n;    /* number of elements, product of shape; 1 for 0-d */
    int32_t ndim;
    tm_dtype dtype;
} tm_view;

#endif
