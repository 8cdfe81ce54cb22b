/* The only way to OpenBLAS. Compute-bound work goes through here; nothing else includes BLAS headers. */
#ifndef TM_BLAS_H
#define TM_BLAS_H

/* Sets one thread for the whole process' copy of OpenBLAS that this library is linked with. The only place
 * that sets a thread count. */
void tm_blas_init(void);

const char *tm_blas_config(void); /* OpenBLAS' own line: version and build options */
const char *tm_blas_core(void);   /* the core whose kernels it chose, "Haswell" and the like */
int tm_blas_threads(void);
const char *tm_blas_threading(void); /* "serial", "pthread" or "openmp" */

/* 1 when a small dot product comes out right, so that the library is linked, loaded and runs here. */
int tm_blas_works(void);

#endif
