/* The interface between the core and the kernels: states that are carried over the blocks of one chunk, and
 * one struct of function pointers per family and tier.
 *
 * A kernel sees contiguous, naturally aligned elements of one chunk. Element i of the chunk (i counted from
 * the chunk's start, over all blocks) goes to lane i % TM_LANES; the lanes are added by one fixed tree when
 * the chunk ends. Every block but a chunk's last one holds a multiple of TM_LANES elements. Lane arithmetic
 * is IEEE double, addition by addition, without contraction, so that the tier only decides how many lanes
 * advance at a time. */
#ifndef TM_KERNELS_H
#define TM_KERNELS_H

#include "../core/tm_dtype.h"
#include "tm_attention_kernels.h"
#include "tm_compare_kernels.h"
#include "tm_diff_kernels.h"
#include "tm_families.h"
#include "tm_fingerprint_kernels.h"
#include "tm_histogram_kernels.h"
#include "tm_moe_kernels.h"
#include "tm_sign_kernels.h"
#include "tm_spectral_kernels.h"

#include <stdint.h>

#define TM_LANES 32

/* One-byte dtypes are counted by code (4 sub-tables: equal neighbours don't wait for each other) and turned
 * into sums when the chunk ends. */
#define TM_SUBTABLES 4
typedef struct tm_byte_counts {
    uint32_t code[TM_SUBTABLES][256];
} tm_byte_counts;

typedef struct tm_stats_state {
    double sum[TM_LANES], sumsq[TM_LANES]; /* finite elements only */
    double min, max;                       /* +inf, -inf while there is no finite element; a zero is +0.0 */
    int64_t n_nan, n_posinf, n_neginf, n_zero;
    int64_t first_bad;             /* counted from the chunk's start; -1 if none */
    int64_t seen;                  /* elements so far */
    double total_sum, total_sumsq; /* set by finish */
    tm_byte_counts bytes;          /* one-byte dtypes only */
} tm_stats_state;

typedef struct tm_stats_kernels {
    void (*block[TM_DTYPE_COUNT])(tm_stats_state *state, const void *data, size_t n);
    void (*finish[TM_DTYPE_COUNT])(tm_stats_state *state, const double *byte_values);
} tm_stats_kernels;

enum { TM_KERNEL_NORM_2, TM_KERNEL_NORM_1, TM_KERNEL_NORM_INF, TM_KERNEL_NORM_COUNT };

typedef struct tm_norm_state {
    double lane[TM_LANES]; /* sums of squares or of absolute values, non-finite ones included */
    double max;            /* inf norm; NaN once an element was NaN */
    double total;          /* set by finish */
    tm_byte_counts bytes;  /* one-byte dtypes only */
} tm_norm_state;

typedef struct tm_norm_kernels {
    void (*block[TM_KERNEL_NORM_COUNT][TM_DTYPE_COUNT])(tm_norm_state *state, const void *data, size_t n);
    void (*finish[TM_KERNEL_NORM_COUNT][TM_DTYPE_COUNT])(tm_norm_state *state, const double *byte_values);
    /* Adds the squares of factor * x over the finite elements of a float64 block to the lanes. */
    void (*scaled_f64)(tm_norm_state *state, const void *data, size_t n, double factor);
} tm_norm_kernels;

typedef struct tm_scan_kernels {
    /* Index of the first non-finite element, n if there is none. NULL where the dtype has none. */
    size_t (*find[TM_DTYPE_COUNT])(const void *data, size_t n);
} tm_scan_kernels;

typedef struct tm_read_kernels {
    uint64_t (*read)(const void *data, size_t bytes); /* sum of the 64-bit words and of the bytes left over */
} tm_read_kernels;

/* Exact widening of a contiguous, aligned block; NULL where a dtype has no exact float (64-bit floats, wide
 * integers). 64-bit integers beyond 2^53 round to nearest. One-byte dtypes look their values up. */
typedef struct tm_widen_kernels {
    void (*to_f64[TM_DTYPE_COUNT])(double *out, const void *data, size_t n, const double *byte_values);
    void (*to_f32[TM_DTYPE_COUNT])(float *out, const void *data, size_t n, const double *byte_values);
} tm_widen_kernels;

#define TM_DECLARE_KERNELS(enum_name, name)                                                                  \
    extern const tm_##name##_kernels tm_##name##_kernels_baseline;                                           \
    extern const tm_##name##_kernels tm_##name##_kernels_avx2;                                               \
    extern const tm_##name##_kernels tm_##name##_kernels_avx512;
TM_FAMILIES(TM_DECLARE_KERNELS)
#undef TM_DECLARE_KERNELS

/* The AVX-512 tier's kernels for processors that run 512-bit operations as two halves: other loops, the same
 * bits. */
extern const tm_stats_kernels tm_stats_kernels_avx512_halves;
extern const tm_norm_kernels tm_norm_kernels_avx512_halves;
extern const tm_histogram_kernels tm_histogram_kernels_avx512_halves;

#endif
