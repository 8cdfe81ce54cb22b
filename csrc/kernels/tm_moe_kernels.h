/* Counting expert ids: what the core and the kernels of the family agree on. */
#ifndef TM_MOE_KERNELS_H
#define TM_MOE_KERNELS_H

#include "../core/tm_dtype.h"

#include <stdint.h>

/* Where counts go. Neighbours go to different tables, so that a run of equal ids does not wait for its own
 * stores; the strides are constants of the kernels, not powers of two, so that equal ids of different tables
 * do not share the low bits of their addresses. Slot `experts` of a table counts the ids outside the range.
 */
enum { TM_MOE_8, TM_MOE_4, TM_MOE_1, TM_MOE_SHAPES };

#define TM_MOE_STRIDE_8 528
#define TM_MOE_STRIDE_4 2064
#define TM_MOE_SMALL_WORDS (4 * TM_MOE_STRIDE_4) /* holds either of the shapes with a stride */

typedef struct tm_moe_kernels {
    /* Adds a block's ids to the tables of a shape; NULL where the dtype is not an integer. The caller flushes
     * before 2^32 ids. 0 < experts < 2^31, below the shape's stride. */
    void (*count[TM_MOE_SHAPES][TM_DTYPE_COUNT])(uint32_t *tables, const void *ids, size_t n,
                                                 uint32_t experts);
    /* Each id as a slot: itself, or `experts` if it is outside [0, experts). */
    void (*slots[TM_DTYPE_COUNT])(uint32_t *out, const void *ids, size_t n, uint32_t experts);
} tm_moe_kernels;

#endif
