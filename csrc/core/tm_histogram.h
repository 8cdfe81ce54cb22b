/* Exponents counted on one axis for all dtypes, and the elements that a cast to another format would lose. */
#ifndef TM_HISTOGRAM_H
#define TM_HISTOGRAM_H

#include "tm_format.h"
#include "tm_status.h"
#include "tm_view.h"

/* One row of counts: float32's exponent bins, floor(log2 |x|) + 127 clipped to 0 and 255, of the finite
 * elements other than zero; then zeros, subnormals of the view's own dtype (in their bins too), infinities,
 * NaN. */
enum {
    TM_HISTOGRAM_ZERO = 256,
    TM_HISTOGRAM_SUBNORMAL,
    TM_HISTOGRAM_INF,
    TM_HISTOGRAM_NAN,
    TM_HISTOGRAM_WIDTH
};

/* counts: [count][TM_HISTOGRAM_WIDTH] with per_tensor, else one row over all views. Counts are exact: the
 * same for every tier, thread count and split; rows of pieces add up. Memory is allocated only for threads >
 * 1, and with too little of it the call goes on with fewer workers. */
TM_NODISCARD tm_status tm_exponent_histogram(const tm_view *views, size_t count, int per_tensor, int threads,
                                             int64_t *counts, tm_error *error);

/* One row of counts for `format_count` formats: the finite elements, those of them that are not zero, and for
 * each format those whose scaled value becomes 0 without being 0, becomes subnormal, overflows
 * (tm_format.h). */
enum { TM_CAST_FINITE, TM_CAST_NONZERO, TM_CAST_FIRST };
enum { TM_CAST_UNDERFLOW, TM_CAST_SUBNORMAL, TM_CAST_OVERFLOW, TM_CAST_LOSSES };
#define TM_CAST_WIDTH(format_count) (TM_CAST_FIRST + TM_CAST_LOSSES * (format_count))
#define TM_MAX_FORMATS 16

/* counts: [count or 1][TM_CAST_WIDTH(format_count)], with the promises of tm_exponent_histogram. scale: a
 * finite number above 0; the product is not rounded before the cast. At most TM_MAX_FORMATS formats. */
TM_NODISCARD tm_status tm_cast_losses(const tm_view *views, size_t count, const tm_format *formats,
                                      size_t format_count, double scale, int per_tensor, int threads,
                                      int64_t *counts, tm_error *error);

#endif
