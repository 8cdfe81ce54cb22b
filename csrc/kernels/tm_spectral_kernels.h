/* The kernels of the spectral pass: Y = W V and Z += W'Y for a few rows of W and a block of vectors. */
#ifndef TM_SPECTRAL_KERNELS_H
#define TM_SPECTRAL_KERNELS_H

#include <stddef.h>

#define TM_SPECTRAL_BLOCK 8   /* vectors that one read of W serves */
#define TM_SPECTRAL_ROWS 4    /* rows of W that a kernel takes at a time */
#define TM_SPECTRAL_SPAN 1024 /* columns at most: vectors of one span stay in L1 beside the rows */
#define TM_SPECTRAL_LANES_F32 16
#define TM_SPECTRAL_LANES_F64 8

/* `w` points to TM_SPECTRAL_ROWS rows of `columns` elements (the last ones may repeat a row). Vector j of a
 * block starts `stride` elements behind vector j - 1; blocks are padded to a multiple of the lanes with zeros
 * (v) or spare room (z). A product is rounded before it is added: no tier fuses, so that all have the bits of
 * baseline.
 *
 * forward: y[r][j] += w[r] . v[j]. Column c goes to lane c % lanes, lanes are added l and l + half, and so
 * on; one span's dot product is then added to the double. backward: z[j][c] += w[0][c] * y[0][j] + ..., row
 * by row; rows from `rows` on are left out. */
typedef struct tm_spectral_kernels {
    void (*forward_f32)(const float *const *w, size_t columns, const float *v, size_t stride,
                        double (*y)[TM_SPECTRAL_BLOCK]);
    void (*backward_f32)(const float *const *w, size_t rows, size_t columns,
                         const float (*y)[TM_SPECTRAL_BLOCK], float *z, size_t stride);
    void (*forward_f64)(const double *const *w, size_t columns, const double *v, size_t stride,
                        double (*y)[TM_SPECTRAL_BLOCK]);
    void (*backward_f64)(const double *const *w, size_t rows, size_t columns,
                         const double (*y)[TM_SPECTRAL_BLOCK], double *z, size_t stride);
    /* s += y'y over `rows` rows, row by row. */
    void (*gram)(const double (*y)[TM_SPECTRAL_BLOCK], size_t rows, double (*s)[TM_SPECTRAL_BLOCK]);
} tm_spectral_kernels;

#endif
