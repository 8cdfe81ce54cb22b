/* The runner's own stand-in for BLAS, held against definitions. */
#include "../core/tm_blas.h"
#include "runner.h"

#include <math.h>

void test_blas(void) {
    const double a[6] = {1, 2, 3, 4, 5, 6}, b[6] = {1, 0, -1, 2, 1, 1};
    double c[4] = {1, 1, 1, 1};
    tm_blas_dgemm(0, 1, 2, 2, 3, 2.0, a, 3, b, 3, 1.0, c, 2); /* 2 A B' + C */
    CHECK(c[0] == -3 && c[1] == 15 && c[2] == -3 && c[3] == 39, "%g %g %g %g", c[0], c[1], c[2], c[3]);
    double matrix[9] = {2, -1, 0, -1, 2, -1, 0, -1, 2}, values[3], work[128];
    CHECK(tm_blas_eigen_work(3, 1) <= 128 && tm_blas_eigen(3, matrix, values, 1, work) == 0, "eigen");
    for (int i = 0; i < 3; i++) {
        double expected = 2 - 2 * cos((i + 1) * acos(-1.0) / 4);
        CHECK(fabs(values[i] - expected) < 1e-14, "%g", values[i]);
        const double *v = matrix + 3 * i;
        CHECK(fabs(2 * v[0] - v[1] - expected * v[0]) < 1e-14, "vector %d", i);
        CHECK(fabs(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] - 1) < 1e-14, "unit vector %d", i);
    }
}
