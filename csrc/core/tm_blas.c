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
