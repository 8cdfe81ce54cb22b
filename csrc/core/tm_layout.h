/* A view made ready for reading: axes coalesced, and the answer to "can the kernel read it in place?". */
#ifndef TM_LAYOUT_H
#define TM_LAYOUT_H

#include "tm_status.h"
#include "tm_view.h"

#define TM_SCRATCH_BYTES                                                                                     \
    16384 /* one third of a small L1, and a multiple of TM_LANES elements of any size                        \
           */

typedef struct tm_layout {
    const char *data;
    int64_t n;
    size_t item;
    int straight; /* contiguous and aligned: blocks are read in place */
    int ndim;     /* axes left, outermost first; none of length 1; undefined when straight */
    int64_t shape[TM_MAX_NDIM], strides[TM_MAX_NDIM];
} tm_layout;

/* Refuses a view whose dtype, ndim, shape or n contradict each other; `index` is its place in the list. */
TM_NODISCARD tm_status tm_layout_check(const tm_view *view, size_t index, tm_error *error);

/* The view must have passed tm_layout_check. */
void tm_layout_init(tm_layout *layout, const tm_view *view);

/* Elements [start, start + *step) in C order, contiguous and aligned: in place with *step = count, or copied
 * to scratch (TM_SCRATCH_BYTES, aligned for any element) with *step <= count. count > 0. */
const void *tm_layout_block(const tm_layout *layout, int64_t start, int64_t count, void *scratch,
                            int64_t *step);

/* The way back: elements [start, start + count) of the view become `from`, which is contiguous. The view's
 * memory must be writable, and `from` apart from it. */
void tm_layout_store(const tm_layout *layout, int64_t start, int64_t count, const void *from);

#endif
