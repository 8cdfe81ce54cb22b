/* Block Krylov iteration of one matrix: basis, projected matrix, residuals, until the interval is narrow. */
#include "tm_blas.h"
#include "tm_memory.h"
#include "tm_random.h"
#include "tm_spectral_parts.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define B TM_SPECTRAL_BLOCK
#define WARM TM_SPECTRAL_WARM
#define MAX_BASIS ((TM_SPECTRAL_MAX_PASSES + 1) * B)

#define SETTLED                                                                                              \
    1e-3 /* what the lower bound may still be short of lambda at the stop, relative, by estimate */

/* Products in float have relative errors of about 1e-7, which divide by a Ritz value in the lower bound: with
 * Ritz values down to 1e-6 of the largest it rose above lambda by up to 2 %. */
typedef struct guards {
    double trusted;   /* share of the largest Ritz value below which the others are noise */
    double floor;     /* residuals shorter than this, times the largest Ritz value, are noise */
    double allowance; /* by which the bounds are widened, relative */
} guards;

static const guards in_float = {1e-2, 1e-6, 1e-5}, in_double = {1e-6, 1e-13, 1e-9};

typedef struct iteration {
    const tm_rows *rows;
    int64_t n;
    int d, last, fresh; /* basis vectors; the first of the last block; the new ones behind d */
    int draws, drawn;   /* Gaussian vectors; the basis vectors that span them */
    int room;           /* vectors that `basis` has room for */
    double *basis;      /* owned [room][n], orthonormal rows */
    double *z;          /* owned [B][n]: what A makes of the last block, then its part outside the basis */
    double *t;          /* owned, and everything below in the same allocation: [MAX_BASIS][MAX_BASIS] */
    double *q;          /* eigenvectors of t, in rows */
    double *theta;      /* [MAX_BASIS] */
    double *c, *coordinates, *f; /* [MAX_BASIS][B]: draws in the basis, in Ritz vectors; residuals */
    double *work;
    double b[B][B]; /* new directions by last block: A's part that leaves the basis */
} iteration;

static void release(iteration *it) {
    free(it->basis);
    free(it->z);
    free(it->t);
}

static tm_status no_memory(const iteration *it, tm_error *error) {
    return tm_fail(error, TM_ERR_MEMORY, "no memory for %d vectors of %lld elements", it->room,
                   (long long)it->n);
}

static tm_status begin(iteration *it, const tm_rows *rows, tm_error *error) {
    *it = (iteration){.rows = rows, .n = rows->columns, .room = 4 * B};
    const size_t square = (size_t)MAX_BASIS * MAX_BASIS, side = (size_t)MAX_BASIS * B;
    size_t eigen = tm_blas_eigen_work(MAX_BASIS, 1), work = eigen > side ? eigen : side;
    it->basis = tm_allocate((size_t)it->room * (size_t)it->n, sizeof *it->basis);
    it->z = tm_allocate((size_t)B * (size_t)it->n, sizeof *it->z);
    it->t = tm_allocate(2 * square + MAX_BASIS + 3 * side + work, sizeof *it->t);
    if (it->basis == NULL || it->z == NULL || it->t == NULL) {
        return no_memory(it, error);
    }
    it->q = it->t + square;
    it->theta = it->q + square;
    it->c = it->theta + MAX_BASIS;
    it->coordinates = it->c + side;
    it->f = it->coordinates + side;
    it->work = it->f + side;
    memset(it->t, 0, square * sizeof *it->t);
    memset(it->c, 0, side * sizeof *it->c);
    return TM_OK;
}

/* Room for another block behind the basis. */
static tm_status reserve(iteration *it, tm_error *error) {
    if (it->d + B <= it->room) {
        return TM_OK;
    }
    it->room *= 2;
    it->room = it->room < MAX_BASIS ? it->room : MAX_BASIS;
    double *wider = tm_allocate((size_t)it->room * (size_t)it->n, sizeof *wider);
    if (wider == NULL) {
        return no_memory(it, error);
    }
    memcpy(wider, it->basis, (size_t)it->d * (size_t)it->n * sizeof *wider);
    free(it->basis);
    it->basis = wider; /* owned */
    return TM_OK;
}

/* Makes a row a unit vector; zero if it has no direction. */
static int normalise(double *x, int64_t n) {
    double high = 0, square = 0;
    for (int64_t i = 0; i < n; i++) {
        double magnitude = fabs(x[i]);
        if (!isfinite(magnitude)) {
            return 0;
        }
        high = magnitude > high ? magnitude : high;
    }
    for (int64_t i = 0; high > 0 && i < n; i++) {
        x[i] /= high;
        square += x[i] * x[i];
    }
    for (int64_t i = 0; high > 0 && i < n; i++) {
        x[i] /= sqrt(square);
    }
    return high > 0;
}

/* The first block: what is carried over, and fresh Gaussian vectors, kept in z meanwhile. */
static void draw(iteration *it, const tm_matrix *matrix, uint32_t serial,
                 const tm_spectral_options *options) {
    const int64_t n = it->n;
    int count = 0;
    for (int i = 0; matrix->warm != NULL && i < WARM; i++) {
        double *row = it->basis + count * n;
        for (int64_t l = 0; l < n; l++) {
            row[l] = (double)matrix->warm[i * n + l];
        }
        count += normalise(row, n);
    }
    it->draws = count > 0 ? B - WARM : B;
    for (int i = 0; i < it->draws; i++) {
        tm_gaussians(options->seed, serial, options->step, (uint32_t)i, (size_t)n, it->z + i * n);
        memcpy(it->basis + (count + i) * n, it->z + i * n, (size_t)n * sizeof *it->z);
        normalise(it->basis + (count + i) * n, n);
    }
    it->d = tm_orthonormalise(it->basis, count + it->draws, n, NULL, 0, 1e-7, NULL);
    it->drawn = it->d;
    for (int i = 0; i < it->d; i++) { /* c = basis z' */
        tm_blas_dgemm(0, 1, 1, it->draws, (int)n, 1.0, it->basis + i * n, (int)n, it->z, (int)n, 0.0,
                      it->c + i * B, B);
    }
}

/* Takes A's last block: fills T, finds its eigenvectors, the new directions and the residuals. */
static tm_status project(iteration *it, const tm_pass_sums *sums, const guards *guard, tm_error *error) {
    const int64_t n = it->n;
    const int d = it->d, block = d - it->last;
    tm_project_out(it->z, block, n, it->basis, d, it->work);
    for (int i = 0; i < d; i++) {
        for (int j = 0; j < block; j++) {
            double value = it->work[i * block + j];
            if (i >= it->last) {
                value = (sums->gram[i - it->last][j] + sums->gram[j][i - it->last]) / 2;
            }
            it->t[i * MAX_BASIS + it->last + j] = value;
            it->t[(it->last + j) * MAX_BASIS + i] = value;
        }
    }
    for (int i = 0; i < d; i++) {
        memcpy(it->q + i * d, it->t + i * MAX_BASIS, (size_t)d * sizeof *it->q);
    }
    if (tm_blas_eigen(d, it->q, it->theta, 1, it->work) != 0) {
        return tm_fail(error, TM_ERR_VALUE, "the eigenvalues of a matrix of %d x %d did not converge", d, d);
    }
    tm_status status = reserve(it, error);
    if (status != TM_OK) {
        return status;
    }
    double *fresh = it->basis + d * n;
    memcpy(fresh, it->z, (size_t)block * (size_t)n * sizeof *fresh);
    it->fresh = tm_orthonormalise(fresh, block, n, it->basis, d, guard->floor * it->theta[d - 1], it->work);
    if (it->fresh > n - d) { /* the space is full: what is left is noise */
        it->fresh = n > d ? (int)(n - d) : 0;
    }
    if (it->fresh > 0) {
        tm_blas_dgemm(0, 1, it->fresh, block, (int)n, 1.0, fresh, (int)n, it->z, (int)n, 0.0, &it->b[0][0],
                      B);
    }
    for (int i = 0; i < d; i++) { /* row i of Q [0 .. 0 B]' and of Q C */
        const double *vector = it->q + i * d;
        for (int j = 0; j < B; j++) {
            double residual = 0, coordinate = 0;
            for (int l = 0; j < it->fresh && l < block; l++) {
                residual += vector[it->last + l] * it->b[j][l];
            }
            for (int l = 0; l < it->drawn; l++) {
                coordinate += vector[l] * it->c[l * B + j];
            }
            it->f[i * B + j] = residual;
            it->coordinates[i * B + j] = coordinate;
        }
    }
    return TM_OK;
}

/* The two leading Ritz vectors after one more product with A, which the basis has: theta u + residual. */
static void carry(iteration *it, float *out) {
    const int64_t n = it->n;
    int count = it->d < WARM ? it->d : WARM, d = it->d;
    for (int i = 0; i < count; i++) {
        const double *vector = it->q + (d - 1 - i) * d, *residual = it->f + (d - 1 - i) * B;
        double *row = it->z + i * n;
        tm_blas_dgemm(0, 0, 1, (int)n, d, it->theta[d - 1 - i], vector, d, it->basis, (int)n, 0.0, row,
                      (int)n);
        if (it->fresh > 0) {
            tm_blas_dgemm(0, 0, 1, (int)n, it->fresh, 1.0, residual, B, it->basis + d * n, (int)n, 1.0, row,
                          (int)n);
        }
        if (!normalise(row, n)) {
            count = i;
        }
    }
    count = tm_orthonormalise(it->z, count, n, NULL, 0, 1e-7, NULL);
    for (int i = 0; i < WARM; i++) {
        for (int64_t l = 0; l < n; l++) {
            out[i * n + l] = i < count ? (float)it->z[i * n + l] : 0.0f;
        }
    }
}

/* An estimate, not a bound, of the share of lambda that `low` still misses: its last step continued as a
 * geometric series. Before there are three steps, what it has gained over the Ritz value. A guaranteed
 * interval may be narrow while its upper end, the published value, still moves. */
static double missing(const double *lows, int passes, double low, double theta) {
    double step = low - lows[1], before = lows[1] - lows[0];
    if (passes < 3) {
        return low / theta - 1;
    }
    if (step <= 0) {
        return 0;
    }
    return step < before ? step / low * step / (before - step) : 1;
}

static double within(double value, double low, double high) {
    return value < low ? low : value > high ? high : value;
}

tm_status tm_spectral_iterate(const tm_rows *rows, const tm_matrix *matrix, uint32_t serial,
                              const tm_spectral_options *options, int threads, tm_spectral *out,
                              tm_error *error) {
    const guards *guard = rows->wide ? &in_double : &in_float;
    const double side = (double)(rows->rows < rows->columns ? rows->rows : rows->columns);
    const double settled = options->tolerance > 10 * SETTLED ? options->tolerance / 10 : SETTLED;
    double sumsq = 0, low = 0, high = 0, lows[2] = {0, 0}, still = 0;
    int shift = 0, passes = 0, extra = 0, narrow = 0;
    tm_pass_sums sums;
    iteration it;
    tm_status status = begin(&it, rows, error);
    if (status != TM_OK) {
        goto done;
    }
    draw(&it, matrix, serial, options);
    for (;;) {
        status = tm_spectral_pass(rows, it.basis + it.last * it.n, it.d - it.last, shift, passes == 0,
                                  threads, it.z, &sums, error);
        if (status != TM_OK) {
            goto done;
        }
        if (passes == 0) {
            if (!isfinite(sums.absmax) || sums.absmax == 0) {
                tm_spectral_null(out, sums.absmax == 0 ? TM_STOP_ZERO : TM_STOP_NONFINITE, 1 + extra);
                goto done;
            }
            if (extra == 0 && (shift = tm_spectral_shift(sums.absmax, rows->wide)) != 0) {
                extra = 1; /* out of range: once more, scaled */
                continue;
            }
            sumsq = sums.sumsq;
        }
        passes++;
        status = project(&it, &sums, guard, error);
        if (status != TM_OK) {
            goto done;
        }
        const tm_ritz ritz = {.d = it.d,
                              .residuals = it.fresh,
                              .draws = it.draws,
                              .theta = it.theta,
                              .f = it.f,
                              .c = it.coordinates,
                              .sumsq = sumsq,
                              .quantile = tm_chi2_quantile(options->epsilon, it.draws),
                              .trusted = guard->trusted};
        tm_spectral_bounds(&ritz, &low, &high);
        still = missing(lows, passes, low, it.theta[it.d - 1]);
        lows[0] = lows[1];
        lows[1] = low;
        low *= 1 - guard->allowance;
        high *= 1 + guard->allowance;
        narrow = high <= low * (1 + 2 * options->tolerance);
        if ((narrow && still <= settled) || passes == TM_SPECTRAL_MAX_PASSES || it.fresh == 0) {
            break;
        }
        it.last = it.d;
        it.d += it.fresh;
    }
    carry(&it, matrix->warm_after);
    *out = (tm_spectral){.stable_rank = within(sumsq / low, 1, side),
                         .low = within(sumsq / high, 1, side),
                         .high = within(sumsq / low, 1, side),
                         .sigma = ldexp(sqrt(low), shift),
                         .norm = ldexp(sqrt(sumsq), shift),
                         .passes = passes + extra,
                         .stopped_by = narrow ? TM_STOP_TOLERANCE : TM_STOP_PASSES};
done:
    release(&it);
    return status;
}
