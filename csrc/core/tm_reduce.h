/* The reductions over lists of tensors: statistics, norms, search for a non-finite element.
 *
 * All of them read each tensor once, in C order, in chunks of TM_CHUNK elements counted from the tensor's
 * start. A chunk's value does not depend on the ISA tier; chunks are merged by one pairwise tree over chunk
 * numbers, so that results do not depend on `threads` either. NaN and infinities are recognised by their
 * bits. Memory is needed only with more than one worker thread, in proportion to the number of tensors; when
 * that allocation or the start of a thread fails the call goes on with fewer workers, to the same bits. */
#ifndef TM_REDUCE_H
#define TM_REDUCE_H

#include "tm_status.h"
#include "tm_view.h"

#define TM_CHUNK 65536

/* Statistics of one tensor. Sums and extremes run over the finite elements only. With no finite element sum
 * and sumsq are 0 and min, max, absmax are NaN. A zero min or max is +0.0, whatever zeros there were. The sum
 * of squares is sumsq_scaled * 4^scale_exponent whatever its size; sumsq is the same number as a plain double
 * (inf or 0 when outside its range; only float64 can be). The sum of squared deviations from the mean is
 * m2_scaled * 4^scale_exponent; a chunk in which the subtraction of sums would lose half of the digits is
 * read a second time for it. A float64 sum whose partial sums leave double's range is inf or NaN, and
 * m2_scaled with it. */
typedef struct tm_stats {
    int64_t n;
    double sum, sumsq, min, max, absmax;
    int64_t n_nan, n_posinf, n_neginf, n_zero;
    int64_t first_bad; /* C-order index of the first non-finite element, -1 if none */
    double sumsq_scaled;
    int64_t scale_exponent;
    double m2_scaled;
} tm_stats;

typedef enum tm_norm_order { TM_NORM_2, TM_NORM_1, TM_NORM_INF } tm_norm_order;

typedef struct tm_nonfinite {
    int64_t tensor; /* position in the list, -1 if everything is finite */
    int64_t index;  /* C-order index of the element in that tensor */
    double value;   /* NaN, +inf or -inf */
} tm_nonfinite;

/* out: [count]. */
TM_NODISCARD tm_status tm_tensor_stats(const tm_view *views, size_t count, int threads, tm_stats *out,
                                       tm_error *error);

/* Combines the records of disjoint pieces of one tensor, or of several tensors read as one: piece i starts at
 * element offsets[i] of the whole (NULL: one after the other); offsets ascend. Counts and extremes come out
 * the same for any split. The sums have the very bits of the whole if every piece is a node of the whole's
 * tree: a power of two 2^k of chunks starting at a multiple of 2^k chunks, the last piece being as long as it
 * likes from such a start (shards of equal power-of-two size are such nodes; other splits at chunk borders
 * get there by one view, hence one record, per node). */
TM_NODISCARD tm_status tm_merge_stats(const tm_stats *records, const int64_t *offsets, size_t count,
                                      tm_stats *out, tm_error *error);

/* The norm of all tensors taken as one vector; propagates as torch does: NaN if any element is NaN, else inf
 * if any is infinite. per_tensor: [count] or NULL. An empty list or tensor has norm 0. */
TM_NODISCARD tm_status tm_multi_norm(const tm_view *views, size_t count, tm_norm_order order, int threads,
                                     double *total, double *per_tensor, tm_error *error);

/* Stops at the first non-finite element, in list order then C order. */
TM_NODISCARD tm_status tm_scan_nonfinite(const tm_view *views, size_t count, int threads, tm_nonfinite *out,
                                         tm_error *error);

/* The read that benchmarks divide by: adds 64-bit words, prefetching, in the kernels' tier. The result only
 * keeps the compiler from dropping the read. Needs tm_dispatch_init, like all of the above; 0 without it. */
uint64_t tm_plain_read(const void *data, size_t bytes);
uint64_t tm_plain_read_views(const tm_view *views, size_t count);

#endif
