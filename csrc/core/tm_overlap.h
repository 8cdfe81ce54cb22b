/* Whether a call that writes through some of its views would disturb the others. */
#ifndef TM_OVERLAP_H
#define TM_OVERLAP_H

#include "tm_status.h"
#include "tm_view.h"

#include <stddef.h>

/* 1 when both views have the same elements in the same places. */
int tm_same_view(const tm_view *a, const tm_view *b);

/* Refuses lists in which the memory of a written view overlaps that of another, except written[i] over the
 * very view read[i]. Views are taken to fill the span between their first and their last byte. `names` are
 * what an error calls the two lists. Allocates: TM_ERR_MEMORY. */
TM_NODISCARD tm_status tm_overlap_check(const tm_view *read, const tm_view *written, size_t count,
                                        const char *const names[2], tm_error *error);

#endif
