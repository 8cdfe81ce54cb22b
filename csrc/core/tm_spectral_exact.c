/* Matrices with a short side: all eigenvalues of the Gram matrix on that side, in double. */
#include "tm_blas.h"
#include "tm_memory.h"
#include "tm_spectral_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define STRETCH (TM_SCRATCH_BYTES / 8) /* elements of a row whose largest is taken at a time */
#define STRIP 256                      /* rows or columns that are added to the Gram matrix at a time */

/* NaN or inf if an element is. */
static double largest(const tm_rows *rows) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    const tm_norm_kernels *norm = rows->table->norm;
    double high = 0;
    tm_norm_state state;
    for (int64_t row = 0; row < rows->rows; row++) {
        for (int64_t c = 0; c < rows->columns; c += STRETCH) {
            int64_t width = rows->columns - c;
            width = width < STRETCH ? width : STRETCH;
            memset(&state, 0, sizeof state);
            norm->block[TM_KERNEL_NORM_INF][rows->dtype](&state, tm_rows_piece(rows, row, c, width, scratch),
                                                         (size_t)width);
            norm->finish[TM_KERNEL_NORM_INF][rows->dtype](&state, tm_byte_values(rows->dtype));
            if (!(state.total <= high)) {
                high = state.total;
                if (!isfinite(high)) {
                    return high;
                }
            }
        }
    }
    return high;
}

/* Rows [row, row + count), columns [first, first + width) as doubles times 2^-exponent, [count][width]; width
 * at most STRIP. */
static void widen(const tm_rows *rows, int64_t row, int64_t count, int64_t first, int64_t width, int exponent,
                  double *out) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    /* in two steps: 2^-exponent itself may be out of range */
    const double half = ldexp(1.0, -(exponent / 2)), rest = ldexp(1.0, exponent / 2 - exponent);
    for (int64_t r = 0; r < count; r++) {
        const void *piece = tm_rows_piece(rows, row + r, first, width, scratch);
        rows->table->widen->to_f64[rows->dtype](out + r * width, piece, (size_t)width,
                                                tm_byte_values(rows->dtype));
    }
    for (int64_t i = 0; i < count * width; i++) {
        out[i] = out[i] * half * rest;
    }
}

tm_status tm_spectral_exact(const tm_rows *rows, tm_spectral *out, tm_error *error) {
    const int64_t m = rows->rows, n = rows->columns, side = m < n ? m : n;
    double absmax = largest(rows);
    if (!isfinite(absmax) || absmax == 0) {
        tm_spectral_null(out, absmax == 0 ? TM_STOP_ZERO : TM_STOP_NONFINITE, 1);
        return TM_OK;
    }
    int exponent; /* the matrix is scaled below 1: no square overflows */
    frexp(absmax, &exponent);
    size_t square = (size_t)side * (size_t)side, work_size = tm_blas_eigen_work((int)side, 0);
    double *memory = tm_allocate(square + (size_t)side * STRIP + (size_t)side + work_size, sizeof *memory);
    if (memory == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory for a matrix of %lld x %lld", (long long)side,
                       (long long)side);
    }
    double *gram = memory, *strip = gram + square, *values = strip + side * STRIP, *work = values + side;
    memset(gram, 0, square * sizeof *gram);
    const int s = (int)side;
    for (int64_t at = 0; at < (m < n ? n : m); at += STRIP) {
        int64_t rest = (m < n ? n : m) - at, length = rest < STRIP ? rest : STRIP;
        if (m < n) {
            widen(rows, 0, m, at, length, exponent, strip);
        } else {
            widen(rows, at, length, 0, n, exponent, strip);
        }
        int width = m < n ? (int)length : s;
        tm_blas_dgemm(m >= n, m < n, s, s, (int)length, 1.0, strip, width, strip, width, 1.0, gram, s);
    }
    double trace = 0;
    for (int64_t i = 0; i < side; i++) {
        trace += gram[i * (side + 1)];
    }
    tm_status status = TM_OK;
    if (tm_blas_eigen(s, gram, values, 0, work) != 0) {
        status =
            tm_fail(error, TM_ERR_VALUE, "the eigenvalues of a matrix of %d x %d did not converge", s, s);
    } else {
        double rank = trace / values[side - 1];
        rank = rank > 1 ? rank : 1;
        rank = rank < (double)side ? rank : (double)side;
        *out = (tm_spectral){.stable_rank = rank,
                             .low = rank,
                             .high = rank,
                             .sigma = ldexp(sqrt(values[side - 1]), exponent),
                             .norm = ldexp(sqrt(trace), exponent),
                             .passes = 2,
                             .stopped_by = TM_STOP_EXACT};
    }
    free(memory);
    return status;
}
