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

/* The exponent of a power of two near `absmax` (> 0, finite) whose inverse is a normal number. */
int tm_rescue_exponent(double absmax);

/* Sum of squares of the chunk's finite elements, scaled by a power of two near `absmax` (> 0, finite). */
tm_scaled tm_rescue_f64(const tm_table *table, const tm_layout *layout, int64_t start, int64_t count,
                        double absmax);

/* The chunk's sum of squares in any range, non-finite elements included, given its plain sum: that sum,
 * unless the chunk, still cached, must be read again. */
tm_scaled tm_rescued_f64(const tm_table *table, const tm_layout *layout, int64_t start, int64_t count,
                         double plain);

/* The root of a sum of squares: the exponent of 4 becomes an exponent of 2. */
double tm_scaled_root(tm_scaled sumsq);

/* As a plain double: inf or 0 outside its range. */
double tm_scaled_value(tm_scaled scaled);

#endif
