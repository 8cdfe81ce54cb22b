/* OpenBLAS under the symbol prefix that the build found. See tm_blas.h. */
#include "tm_blas.h"

#include TM_BLAS_HEADER

/* TM_BLAS_PREFIX may be empty. Headers that bring a prefix declare the prefixed names themselves. */
#define JOIN_(prefix, name) prefix##name
#define JOIN(prefix, name) JOIN_(prefix, name)
#define BLAS(name) JOIN(TM_BLAS_PREFIX, name)

void tm_blas_init(void) {
    BLAS(openblas_set_num_threads)(1);
}

const char *tm_blas_config(void) {
    return BLAS(openblas_get_config)();
}

const char *tm_blas_core(void) {
    return BLAS(openblas_get_corename)();
}

int tm_blas_threads(void) {
    return BLAS(openblas_get_num_threads)();
}

const char *tm_blas_threading(void) {
    switch (BLAS(openblas_get_parallel)()) {
    case 0:
        return "serial";
    case 1:
        return "pthread";
    default:
        return "openmp";
    }
}

int tm_blas_works(void) {
    /* Eleven elements: more than any kernel's vector, and every product and sum is exact. */
    double x[11], y[11], expected = 0;
    for (int i = 0; i < 11; i++) {
        x[i] = i + 1;
        y[i] = 2 * i - 5;
        expected += x[i] * y[i];
    }
    return BLAS(cblas_ddot)(11, x, 1, y, 1) == expected;
}

void tm_blas_sgemm(int transpose_a, int transpose_b, int m, int n, int k, float alpha, const float *a,
                   int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    BLAS(cblas_sgemm)(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                      transpose_b ? CblasTrans : CblasNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void tm_blas_dgemm(int transpose_a, int transpose_b, int m, int n, int k, double alpha, const double *a,
                   int lda, const double *b, int ldb, double beta, double *c, int ldc) {
    BLAS(cblas_dgemm)(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
                      transpose_b ? CblasTrans : CblasNoTrans, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

/* The headers of OpenBLAS have no LAPACK routines; the libraries do. Fortran adds the length of each string.
 */
extern void BLAS(dsyevd_)(const char *jobz, const char *uplo, const int *n, double *a, const int *lda,
                          double *w, double *work, const int *lwork, int *iwork, const int *liwork, int *info,
                          size_t jobz_length, size_t uplo_length);

/* Divide and conquer, which with vectors takes half the time of QR from 60 columns on. Without vectors 34n is
 * for blocks of 32 columns. The integers lie behind the doubles. */
static size_t double_work(int n, int vectors) {
    const size_t side = (size_t)n;
    return vectors ? 1 + 6 * side + 2 * side * side : 34 * side + 1;
}

static size_t integer_work(int n, int vectors) {
    return vectors ? 3 + 5 * (size_t)n : 1;
}

size_t tm_blas_eigen_work(int n, int vectors) {
    return double_work(n, vectors) + (integer_work(n, vectors) * sizeof(int) + 7) / sizeof(double);
}

/* Column-major output: LAPACK's columns are our rows. */
int tm_blas_eigen(int n, double *a, double *values, int vectors, double *work) {
    int info = 0, length = (int)double_work(n, vectors), integers = (int)integer_work(n, vectors);
    if (n > 0) {
        BLAS(dsyevd_)(vectors ? "V" : "N", "U", &n, a, &n, values, work, &length,
                      (int *)(void *)(work + length), &integers, &info, 1, 1);
    }
    return info;
}
