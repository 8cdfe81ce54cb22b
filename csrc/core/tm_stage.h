/* Staging: tensors copied one behind the other into an arena, statistics and fingerprints in the same read.
 */
#ifndef TM_STAGE_H
#define TM_STAGE_H

#include "tm_reduce.h"

#include <stddef.h>

#define TM_STAGE_ALIGN 64

/* Where each tensor goes: offsets[i] is a multiple of TM_STAGE_ALIGN, tensors follow one another in list
 * order, *bytes is what all of them need. */
TM_NODISCARD tm_status tm_stage_place(const tm_view *views, size_t count, int64_t *offsets, int64_t *bytes,
                                      tm_error *error);

/* Copies every tensor in C order to its place in `arena` (`size` bytes, any alignment; it may not overlap a
 * tensor); gaps between tensors become zero. Refuses before it writes. stats, prints (low word first):
 * [count], the same as tm_tensor_stats and tm_fingerprint return. */
TM_NODISCARD tm_status tm_stage(const tm_view *views, size_t count, void *arena, size_t size, int bits,
                                int threads, tm_stats *stats, uint64_t (*prints)[2], const int64_t *offsets,
                                tm_error *error);

#endif
