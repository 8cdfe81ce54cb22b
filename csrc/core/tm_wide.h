/* Parts of a view as doubles or floats, for families that need one type for any input. */
#ifndef TM_WIDE_H
#define TM_WIDE_H

#include "tm_layout.h"
#include "tm_table.h"

/* Elements [start, start + count) in C order. Exact, except for 64-bit integers beyond 2^53 (to nearest). */
void tm_wide_f64(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start, int64_t count,
                 double *out);

/* The same as floats, always exact: only for dtypes with tm_wide_has_f32. */
int tm_wide_has_f32(const tm_table *table, tm_dtype dtype);
void tm_wide_f32(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start, int64_t count,
                 float *out);

/* Integers and bool as int64; uint64 from 2^63 on come out negative, by their bits. */
void tm_wide_i64(const tm_layout *layout, tm_dtype dtype, int64_t start, int64_t count, int64_t *out);

#endif
