/* Sums of squares of float64 chunks that leave double's range: read again, scaled. */
#ifndef TM_RESCUE_H
#define TM_RESCUE_H

#include "tm_layout.h"
#include "tm_table.h"
#include "tm_tree.h"

/* Whether a chunk's plain sum of squares may have overflowed or lost its small squares. */
static inline int tm_needs_rescue(double sumsq) {
    return sumsq > 1.7976931348623157e308 || sumsq < 1e-290;
}

/* Sum of squares of the chunk's finite elements, scaled by a power of two near `absmax` (> 0, finite). */
tm_scaled tm_rescue_f64(const tm_table *table, const tm_layout *layout, int64_t start, int64_t count,
                        double absmax);

/* As a plain double: inf or 0 outside its range. */
double tm_scaled_value(tm_scaled scaled);

#endif
