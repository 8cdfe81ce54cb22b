/* What the files of the spectral family share; private to them. */
#ifndef TM_SPECTRAL_PARTS_H
#define TM_SPECTRAL_PARTS_H

#include "tm_layout.h"
#include "tm_spectral.h"
#include "tm_table.h"

/* Rows of a matrix as floats or doubles, in place where they can be. */
typedef struct tm_rows {
    const tm_table *table;
    tm_layout layout;
    tm_dtype dtype;
    int64_t rows, columns;
    int wide;           /* products in double: float64 input */
    int direct;         /* every row is contiguous and aligned */
    int64_t row_stride; /* bytes, if direct */
} tm_rows;

void tm_rows_init(tm_rows *rows, const tm_table *table, const tm_matrix *matrix);

/* Columns [first, first + count) of one row in the matrix' own type; scratch: room for
 * them, aligned. */
const void *tm_rows_piece(const tm_rows *rows, int64_t row, int64_t first, int64_t count, void *scratch);

/* What a pass sums up, in the scale 2^-shift of the matrix. */
typedef struct tm_pass_sums {
    double gram[TM_SPECTRAL_BLOCK][TM_SPECTRAL_BLOCK]; /* Y'Y */
    double sumsq;                                      /* of all elements; first pass only, so is: */
    double absmax;                                     /* NaN or inf if an element is; not scaled */
} tm_pass_sums;

/* One read of W' = W * 2^-shift: y = W' v', z = W'' y for the `used` rows of v [used][columns]; z the same.
 */
TM_NODISCARD tm_status tm_spectral_pass(const tm_rows *rows, const double *v, int used, int shift, int first,
                                        int threads, double *z, tm_pass_sums *sums, tm_error *error);

/* Elements from 2^TM_SHIFT_FREE_LOW to 2^TM_SHIFT_FREE_HIGH need no shift; else the shift for `absmax`. */
int tm_spectral_shift(double absmax, int wide);

/* Orthonormal rows [count][n] that span what the rows of `x` span beyond the `d` orthonormal rows of `basis`;
 * directions shorter than `floor` are left out. In place; returns how many rows are left. work: [d + 8][8].
 */
int tm_orthonormalise(double *x, int count, int64_t n, const double *basis, int d, double floor,
                      double *work);

/* x -= basis' (basis x'), row by row of x; the coefficients [d][count] are written. */
void tm_project_out(double *x, int count, int64_t n, const double *basis, int d, double *coefficients);

/* Everything the bounds need, in the basis of Ritz vectors: no length of the matrix in it. */
typedef struct tm_ritz {
    int d;               /* Ritz values */
    int residuals;       /* columns of F: new directions, 0 if the space is invariant */
    int draws;           /* columns of C: independent Gaussian vectors */
    const double *theta; /* [d], ascending */
    const double *f;     /* [d][TM_SPECTRAL_BLOCK] residuals of the Ritz pairs */
    const double *c;     /* [d][TM_SPECTRAL_BLOCK] coordinates of the draws */
    double sumsq;        /* trace of A */
    double quantile;     /* tm_chi2_quantile(epsilon, draws) */
    double trusted;      /* Ritz values below this share of the largest are noise */
} tm_ritz;

/* low <= lambda <= high, before any allowance for rounding. */
void tm_spectral_bounds(const tm_ritz *ritz, double *low, double *high);

/* The value that a chi-squared variable of `degrees` (even) degrees of freedom stays below with probability
 * epsilon. */
double tm_chi2_quantile(double epsilon, int degrees);

TM_NODISCARD tm_status tm_spectral_exact(const tm_rows *rows, tm_spectral *out, tm_error *error);
TM_NODISCARD tm_status tm_spectral_iterate(const tm_rows *rows, const tm_matrix *matrix, uint32_t serial,
                                           const tm_spectral_options *options, int threads, tm_spectral *out,
                                           tm_error *error);

/* The numbers of a stop without a result. */
void tm_spectral_null(tm_spectral *out, tm_spectral_stop stop, int64_t passes);

#endif
