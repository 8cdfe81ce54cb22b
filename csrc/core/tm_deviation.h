/* Sums of squared deviations from the mean, of chunks and of their unions. */
#ifndef TM_DEVIATION_H
#define TM_DEVIATION_H

#include "tm_layout.h"
#include "tm_reduce.h"
#include "tm_table.h"

/* M2 of elements [start, start + count), whose other statistics are complete; in units of 4^scale_exponent.
 */
double tm_chunk_deviation(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start,
                          const tm_stats *stats);

/* M2 of the union of two disjoint pieces, in units of 4^exponent. */
double tm_merged_deviation(const tm_stats *a, const tm_stats *b, int64_t exponent);

#endif
