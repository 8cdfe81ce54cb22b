/* The kernels of the spectral pass: Y = W V and Z += W'Y for a tile of rows of W and a block of vectors. */
#ifndef TM_SPECTRAL_KERNELS_H
#define TM_SPECTRAL_KERNELS_H

#include <stddef.h>

#define TM_SPECTRAL_BLOCK 8         /* vectors that one read of W serves */
#define TM_SPECTRAL_ROWS 4          /* rows that forward takes at a time */
#define TM_SPECTRAL_TILE 64         /* rows of a tile at most */
#define TM_SPECTRAL_SPAN_BYTES 2048 /* of a row at most: 8 vectors' parts stay in L1 beside the rows' */
#define TM_SPECTRAL_LANES_F32 16
#define TM_SPECTRAL_LANES_F64 8

/* Where the same columns of later rows lie: forward fetches them into L2, `step` bytes for each group of
 * lanes. All NULL: nothing to fetch. */
typedef struct tm_spectral_ahead {
    const char *row[TM_SPECTRAL_ROWS];
    size_t step;
} tm_spectral_ahead;

/* Rows of `columns` elements; no alignment is asked for. A block of vectors lies as [columns / lanes][vector]
 * [lane], aligned to 64 bytes: vectors of a power of two apart would share the cache's sets. It is padded to
 * a multiple of the lanes with zeros (v) or spare room (z). A product is rounded before it is added: no tier
 * fuses, so that all have the bits of baseline.
 *
 * forward, TM_SPECTRAL_ROWS rows (the last ones may repeat a row): y[r][j] += w[r] . v[j]. Column c goes to
 * lane c % lanes, lanes are added l and l + half, and so on; one span's dot product is then added to the
 * double. backward, up to TM_SPECTRAL_TILE rows: z[j][c] += w[0][c] * y[0][j] + ..., row by row. fold, the
 * panel of `columns` columns (padded): z[j][c] += factor * panel[j][c] and the panel is cleared; vectors of z
 * are `columns` apart. */
typedef struct tm_spectral_kernels {
    void (*forward_f32)(const float *const *w, size_t columns, const float *v, double (*y)[TM_SPECTRAL_BLOCK],
                        const tm_spectral_ahead *ahead);
    void (*backward_f32)(const float *const *w, size_t rows, size_t columns,
                         const float (*y)[TM_SPECTRAL_BLOCK], float *z);
    void (*fold_f32)(float *panel, size_t columns, double factor, double *z);
    void (*forward_f64)(const double *const *w, size_t columns, const double *v,
                        double (*y)[TM_SPECTRAL_BLOCK], const tm_spectral_ahead *ahead);
    void (*backward_f64)(const double *const *w, size_t rows, size_t columns,
                         const double (*y)[TM_SPECTRAL_BLOCK], double *z);
    void (*fold_f64)(double *panel, size_t columns, double factor, double *z);
    /* s += y'y over `rows` rows, row by row. */
    void (*gram)(const double (*y)[TM_SPECTRAL_BLOCK], size_t rows, double (*s)[TM_SPECTRAL_BLOCK]);
} tm_spectral_kernels;

#endif
