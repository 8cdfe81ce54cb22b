/* Orthogonal bases of long vectors: products through BLAS, small blocks by Gram-Schmidt, twice each. */
#include "tm_blas.h"
#include "tm_spectral_parts.h"

#include <math.h>

#define LANES 8
static double dot(const double *x, const double *y, int64_t n) {
    double lane[LANES] = {0}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += x[i + l] * y[i + l];
        }
    }
    for (; i < n; i++) {
        sum += x[i] * y[i];
    }
    for (int l = 0; l < LANES; l++) {
        sum += lane[l];
    }
    return sum;
}

static void subtract(double *x, double factor, const double *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        x[i] -= factor * y[i];
    }
}

static void swap(double *x, double *y, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        double value = x[i];
        x[i] = y[i];
        y[i] = value;
    }
}

void tm_project_out(double *x, int count, int64_t n, const double *basis, int d, double *coefficients) {
    int length = (int)n;
    tm_blas_dgemm(0, 1, d, count, length, 1.0, basis, length, x, length, 0.0, coefficients, count);
    tm_blas_dgemm(1, 0, count, length, d, -1.0, coefficients, count, basis, length, 1.0, x, length);
}

/* Pivoted: the longest of what is left comes next, so that a dependent block loses its shortest directions.
 */
static int gram_schmidt(double *x, int count, int64_t n, double floor) {
    for (int i = 0; i < count; i++) {
        double *row = x + i * n;
        double longest = -1;
        int pivot = i;
        for (int j = i; j < count; j++) {
            double square = dot(x + j * n, x + j * n, n);
            if (square > longest) {
                longest = square;
                pivot = j;
            }
        }
        if (!(sqrt(longest) > floor)) {
            return i;
        }
        if (pivot != i) {
            swap(row, x + pivot * n, n);
        }
        for (int j = 0; j < i; j++) { /* again: what rounding left of the earlier ones */
            subtract(row, dot(row, x + j * n, n), x + j * n, n);
        }
        double scale = 1 / sqrt(dot(row, row, n));
        for (int64_t l = 0; l < n; l++) {
            row[l] *= scale;
        }
        for (int j = i + 1; j < count; j++) {
            subtract(x + j * n, dot(x + j * n, row, n), row, n);
        }
    }
    return count;
}

int tm_orthonormalise(double *x, int count, int64_t n, const double *basis, int d, double floor,
                      double *work) {
    count = gram_schmidt(x, count, n, floor);
    if (count > 0 && d > 0) { /* short directions have grown, and with them their part in the basis */
        tm_project_out(x, count, n, basis, d, work);
        count = gram_schmidt(x, count, n, 0.5);
    }
    return count;
}
