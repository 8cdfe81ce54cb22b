/* tm_blas.h in plain C, so that the C runner needs no OpenBLAS (also when cross-compiled) and has an oracle.
 */
#include "../core/tm_blas.h"

#include <math.h>

void tm_blas_init(void) {
}

const char *tm_blas_config(void) {
    return "plain C";
}

const char *tm_blas_core(void) {
    return "plain";
}

int tm_blas_threads(void) {
    return 1;
}

const char *tm_blas_threading(void) {
    return "serial";
}

int tm_blas_works(void) {
    return 1;
}

#define GEMM(name, real)                                                                                     \
    void name(int transpose_a, int transpose_b, int m, int n, int k, real alpha, const real *a, int lda,     \
              const real *b, int ldb, real beta, real *c, int ldc) {                                         \
        for (int i = 0; i < m; i++) {                                                                        \
            for (int j = 0; j < n; j++) {                                                                    \
                double sum = 0;                                                                              \
                for (int l = 0; l < k; l++) {                                                                \
                    double x = transpose_a ? a[(size_t)l * (size_t)lda + (size_t)i]                          \
                                           : a[(size_t)i * (size_t)lda + (size_t)l];                         \
                    double y = transpose_b ? b[(size_t)j * (size_t)ldb + (size_t)l]                          \
                                           : b[(size_t)l * (size_t)ldb + (size_t)j];                         \
                    sum += x * y;                                                                            \
                }                                                                                            \
                real *out = &c[(size_t)i * (size_t)ldc + (size_t)j];                                         \
                *out = (real)((double)alpha * sum + (beta != 0 ? (double)beta * (double)*out : 0.0));        \
            }                                                                                                \
        }                                                                                                    \
    }
GEMM(tm_blas_sgemm, float)
GEMM(tm_blas_dgemm, double)

size_t tm_blas_eigen_work(int n, int vectors) {
    (void)vectors;
    return (size_t)n * (size_t)n + 1;
}

/* Cyclic Jacobi: rotations until the off-diagonal part is at rounding level; then sorted. */
int tm_blas_eigen(int n, double *a, double *values, int vectors, double *work) {
    double *v = work; /* rows are eigenvectors */
    size_t side = (size_t)n;
    for (size_t i = 0; i < side * side; i++) {
        v[i] = i % (side + 1) == 0 ? 1.0 : 0.0;
    }
    for (int sweep = 0; sweep < 60; sweep++) {
        double off = 0, all = 0;
        for (size_t i = 0; i < side * side; i++) {
            all += a[i] * a[i];
            off += i % (side + 1) == 0 ? 0.0 : a[i] * a[i];
        }
        if (off <= 1e-32 * all) {
            break;
        }
        for (size_t p = 0; p + 1 < side; p++) {
            for (size_t q = p + 1; q < side; q++) {
                double apq = a[p * side + q];
                if (apq == 0.0) {
                    continue;
                }
                double theta = (a[q * side + q] - a[p * side + p]) / (2 * apq);
                double t = (theta < 0 ? -1.0 : 1.0) / (fabs(theta) + sqrt(theta * theta + 1));
                double cosine = 1 / sqrt(t * t + 1), sine = t * cosine;
                for (size_t i = 0; i < side; i++) {
                    double x = a[i * side + p], y = a[i * side + q];
                    a[i * side + p] = cosine * x - sine * y;
                    a[i * side + q] = sine * x + cosine * y;
                }
                for (size_t i = 0; i < side; i++) {
                    double x = a[p * side + i], y = a[q * side + i];
                    a[p * side + i] = cosine * x - sine * y;
                    a[q * side + i] = sine * x + cosine * y;
                    x = v[p * side + i], y = v[q * side + i];
                    v[p * side + i] = cosine * x - sine * y;
                    v[q * side + i] = sine * x + cosine * y;
                }
            }
        }
    }
    for (size_t i = 0; i < side; i++) {
        values[i] = a[i * side + i];
    }
    for (size_t i = 0; i < side; i++) { /* selection sort, vectors along */
        size_t least = i;
        for (size_t j = i + 1; j < side; j++) {
            least = values[j] < values[least] ? j : least;
        }
        double value = values[i];
        values[i] = values[least];
        values[least] = value;
        for (size_t l = 0; l < side; l++) {
            double element = v[i * side + l];
            v[i * side + l] = v[least * side + l];
            v[least * side + l] = element;
        }
    }
    for (size_t i = 0; vectors && i < side * side; i++) {
        a[i] = v[i];
    }
    return 0;
}
