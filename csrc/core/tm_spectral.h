/* The stable rank ‖W‖_F^2 / sigma_1^2 of matrices, with a certified interval (docs/kernels/spectral.md).
 *
 * Block Krylov iteration on A = W'W: an iteration reads W once and serves 8 vectors. The lower bound of
 * lambda = sigma_1^2 is deterministic, the upper one holds with probability 1 - epsilon over the draws of
 * tm_random.h. Matrices with a side up to `exact_side` take the eigenvalues of their Gram matrix instead.
 * Working memory of a matrix: 64 bytes times its row length for each iteration, never side times side. */
#ifndef TM_SPECTRAL_H
#define TM_SPECTRAL_H

#include "tm_status.h"
#include "tm_view.h"

#define TM_SPECTRAL_WARM 2 /* vectors that a matrix carries from call to call */
#define TM_SPECTRAL_MAX_PASSES 24

typedef enum tm_spectral_stop {
    TM_STOP_TOLERANCE, /* the interval is narrow enough */
    TM_STOP_PASSES,    /* TM_SPECTRAL_MAX_PASSES were not enough; the interval is right all the same */
    TM_STOP_EXACT,     /* Gram matrix: low = high */
    TM_STOP_ZERO,      /* no element that is not 0: all numbers NaN */
    TM_STOP_NONFINITE  /* a NaN or an infinity: all numbers NaN */
} tm_spectral_stop;

typedef struct tm_spectral {
    double stable_rank, low, high; /* low <= stable rank <= high = stable_rank */
    double sigma;                  /* lower bound of the largest singular value */
    double norm;                   /* Frobenius */
    int64_t passes;                /* reads of the matrix */
    int64_t stopped_by;            /* tm_spectral_stop */
} tm_spectral;

typedef struct tm_spectral_options {
    double tolerance; /* half width wanted, relative */
    double epsilon;   /* probability that `low` is wrong */
    uint64_t seed;
    uint32_t step; /* draws of two steps are independent */
    int64_t exact_side;
    int threads;
} tm_spectral_options;

/* A matrix as the iteration sees it: a view of 1 axis (one row) or more (first axis times the rest), its
 * vectors being `columns` long. A view that is contiguous along its first axis only is taken transposed. */
typedef struct tm_matrix {
    const void *data;
    tm_dtype dtype;
    int32_t ndim;
    int strided; /* else in C order, and strides are not set */
    int64_t shape[TM_MAX_NDIM], strides[TM_MAX_NDIM];
    int64_t rows, columns;
    const float *warm; /* borrowed [TM_SPECTRAL_WARM][columns], or NULL: cold */
    float *warm_after; /* borrowed [TM_SPECTRAL_WARM][columns]; zeros where there is no vector to carry */
} tm_matrix;

/* How many matrices a view of this shape is: its first axis when it has three, else 1. */
int64_t tm_matrix_count(const tm_view *view);

/* Matrix `index` of the view, which must have a shape and pass tm_layout_check; warm vectors are not set. */
void tm_matrix_init(tm_matrix *matrix, const tm_view *view, int64_t index);

/* out: [count]. Results don't depend on `threads`. TM_ERR_DTYPE for integers and bool. */
TM_NODISCARD tm_status tm_stable_rank(const tm_matrix *matrices, size_t count,
                                      const tm_spectral_options *options, tm_spectral *out, tm_error *error);

#endif
