/* The only way to OpenBLAS. Compute-bound work goes through here; nothing else includes BLAS headers. */
#ifndef TM_BLAS_H
#define TM_BLAS_H

#include <stddef.h>

/* Sets one thread for the whole process' copy of OpenBLAS that this library is linked with. The only place
 * that sets a thread count. */
void tm_blas_init(void);

const char *tm_blas_config(void); /* OpenBLAS' own line: version and build options */
const char *tm_blas_core(void);   /* the core whose kernels it chose, "Haswell" and the like */
int tm_blas_threads(void);
const char *tm_blas_threading(void); /* "serial", "pthread" or "openmp" */

/* 1 when a small dot product comes out right, so that the library is linked, loaded and runs here. */
int tm_blas_works(void);

/* Row-major products C = alpha * op(A) op(B) + beta * C, op(A) [m, k], op(B) [k, n]; a leading dimension is
 * the distance between rows in elements. Sizes are ints because BLAS' are: callers cut larger work into
 * blocks. */
void tm_blas_sgemm(int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a,
                   int lda, const float *b, int ldb, float beta, float *c, int ldc);
void tm_blas_dgemm(int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                   int lda, const double *b, int ldb, double beta, double *c, int ldc);

/* Eigenvalues (ascending, [n]) of the symmetric row-major matrix a [n, n]; with `vectors` row i of a becomes
 * the unit eigenvector of values[i], else a is destroyed. `a` must be finite. work: tm_blas_eigen_work(n)
 * doubles from the caller. 0, or LAPACK's info (no convergence). */
size_t tm_blas_eigen_work(int n, int vectors);
int tm_blas_eigen(int n, double *a, double *values, int vectors, double *work);

#endif
