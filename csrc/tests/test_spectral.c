/* Stable rank: kernels against one element at a time, passes against products in double, bounds against their
 * definitions with dense matrices, results against all eigenvalues; every tier, layout and failing
 * allocation. */
#include "../core/tm_memory.h"
#include "../core/tm_random.h"
#include "../core/tm_spectral_parts.h"
#include "runner.h"

#include "../core/tm_blas.h"

#include <math.h>
#include <stdlib.h>

#define B TM_SPECTRAL_BLOCK
#define ROWS TM_SPECTRAL_ROWS

static uint64_t digest, seed;

static void digest_bytes(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word = 0;
        memcpy(&word, (const char *)data + i, bytes - i < 8 ? bytes - i : 8);
        digest = (digest ^ word) * UINT64_C(0x100000001b3);
        digest ^= digest >> 29;
    }
}

/* A generator of its own: the digest must not depend on the tests before. In [-1, 1), 24 bits. */
static double next_value(void) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (double)(int64_t)((seed ^ seed >> 31) >> 40) * 0x1p-23 - 1;
}

/* --- kernels ------------------------------------------------------------------------------------------- */

/* Dot product of one row and one vector of a block, by the contract of the lanes. */
#define DOT(name, real, lanes)                                                                               \
    static double name(const real *w, size_t columns, const real *v, int j) {                                \
        real lane[lanes] = {0};                                                                              \
        for (size_t c = 0; c < columns - columns % lanes; c++) {                                             \
            const real product = w[c] * v[(c / lanes * B + (size_t)j) * lanes + c % lanes];                  \
            lane[c % lanes] += product;                                                                      \
        }                                                                                                    \
        real tail[lanes] = {0};                                                                              \
        for (size_t c = columns - columns % lanes; c < columns; c++) {                                       \
            tail[c % lanes] = w[c] * v[(c / lanes * B + (size_t)j) * lanes + c % lanes];                     \
        }                                                                                                    \
        for (size_t half = lanes / 2; half > 0; half /= 2) {                                                 \
            for (size_t l = 0; l < half; l++) {                                                              \
                lane[l] += lane[l + half];                                                                   \
                tail[l] += tail[l + half];                                                                   \
            }                                                                                                \
        }                                                                                                    \
        return (double)lane[0] + (double)tail[0];                                                            \
    }
DOT(dot_f32, float, TM_SPECTRAL_LANES_F32)
DOT(dot_f64, double, TM_SPECTRAL_LANES_F64)

#define CHECK_KERNELS(name, real, lanes, dot, forward, backward, fold)                                       \
    static void name(size_t columns, size_t rows) {                                                          \
        enum { SPAN = TM_SPECTRAL_SPAN_BYTES / sizeof(real) };                                               \
        static _Alignas(64) real v[SPAN * B], z[SPAN * B], before[SPAN * B], w[TM_SPECTRAL_TILE][SPAN + 1];  \
        static double sums[B * SPAN], start[B * SPAN];                                                       \
        tm_spectral_ahead ahead = {{NULL, NULL, NULL, NULL}, 64};                                            \
        double y[ROWS][B];                                                                                   \
        real factor[TM_SPECTRAL_TILE][B];                                                                    \
        const real *row[TM_SPECTRAL_TILE];                                                                   \
        const size_t padded = (columns + lanes - 1) / lanes * lanes;                                         \
        const tm_table *table = tm_table_get();                                                              \
        int wrong = 0;                                                                                       \
        for (size_t i = 0; i < padded * B; i++) {                                                            \
            const size_t c = i / (B * lanes) * lanes + i % lanes;                                            \
            v[i] = c < columns ? (real)next_value() : 0;                                                     \
            z[i] = before[i] = (real)next_value();                                                           \
        }                                                                                                    \
        for (size_t r = 0; r < TM_SPECTRAL_TILE; r++) {                                                      \
            row[r] = w[r < rows ? r : rows - 1] + columns % 2; /* no alignment is asked for */               \
            for (size_t c = 0; c <= columns; c++) {                                                          \
                w[r][c] = (real)next_value();                                                                \
            }                                                                                                \
            for (int j = 0; j < B; j++) {                                                                    \
                factor[r][j] = (real)next_value();                                                           \
            }                                                                                                \
        }                                                                                                    \
        for (size_t r = 0; r < ROWS; r++) {                                                                  \
            ahead.row[r] = columns % 2 ? (const char *)w[r] : NULL;                                          \
            for (int j = 0; j < B; j++) {                                                                    \
                y[r][j] = 0;                                                                                 \
            }                                                                                                \
        }                                                                                                    \
        table->spectral->forward(row, columns, v, y, &ahead);                                                \
        for (size_t r = 0; r < ROWS; r++) {                                                                  \
            for (int j = 0; j < B; j++) {                                                                    \
                wrong += y[r][j] != dot(row[r], columns, v, j);                                              \
            }                                                                                                \
        }                                                                                                    \
        CHECK(wrong == 0, "forward, %d columns: %d wrong", (int)columns, wrong);                             \
        table->spectral->backward(row, rows, columns, (const real(*)[B])factor, z);                          \
        for (size_t c = 0; c < columns; c++) {                                                               \
            for (size_t j = 0; j < B; j++) {                                                                 \
                const size_t place = (c / lanes * B + j) * lanes + c % lanes;                                \
                real sum = before[place];                                                                    \
                for (size_t r = 0; r < rows; r++) {                                                          \
                    const real product = row[r][c] * factor[r][j];                                           \
                    sum += product;                                                                          \
                }                                                                                            \
                wrong += z[place] != sum;                                                                    \
                sums[j * padded + c] = start[j * padded + c] = (double)before[place];                        \
                before[place] = sum;                                                                         \
            }                                                                                                \
        }                                                                                                    \
        CHECK(wrong == 0, "backward, %d columns, %d rows: %d wrong", (int)columns, (int)rows, wrong);        \
        table->spectral->fold(z, padded, 0x1p-7, sums);                                                      \
        for (size_t c = 0; c < columns; c++) {                                                               \
            for (size_t j = 0; j < B; j++) {                                                                 \
                const size_t place = (c / lanes * B + j) * lanes + c % lanes;                                \
                const double product = 0x1p-7 * (double)before[place];                                       \
                wrong += z[place] != 0 || sums[j * padded + c] != start[j * padded + c] + product;           \
            }                                                                                                \
        }                                                                                                    \
        CHECK(wrong == 0, "fold, %d columns: %d wrong", (int)columns, wrong);                                \
        digest_bytes(y, sizeof y);                                                                           \
    }
CHECK_KERNELS(check_f32, float, TM_SPECTRAL_LANES_F32, dot_f32, forward_f32, backward_f32, fold_f32)
CHECK_KERNELS(check_f64, double, TM_SPECTRAL_LANES_F64, dot_f64, forward_f64, backward_f64, fold_f64)

static void check_kernels(void) {
    for (size_t columns = 1; columns < 70; columns++) {
        check_f32(columns, 1 + columns % 11);
        check_f64(columns, 1 + columns % 13);
    }
    check_f32(TM_SPECTRAL_SPAN_BYTES / 4, TM_SPECTRAL_TILE);
    check_f64(TM_SPECTRAL_SPAN_BYTES / 8, TM_SPECTRAL_TILE);
    check_f32(TM_SPECTRAL_SPAN_BYTES / 4 - 5, 2);
    double y[9][B], s[B][B], expected[B][B];
    int wrong = 0;
    for (int r = 0; r < 9; r++) {
        for (int j = 0; j < B; j++) {
            y[r][j] = next_value();
        }
    }
    memset(s, 0, sizeof s);
    memset(expected, 0, sizeof expected);
    tm_table_get()->spectral->gram((const double (*)[B])y, 9, s);
    for (int i = 0; i < B; i++) {
        for (int j = 0; j < B; j++) {
            for (int r = 0; r < 9; r++) {
                const double product = y[r][i] * y[r][j];
                expected[i][j] += product;
            }
            wrong += s[i][j] != expected[i][j];
        }
    }
    CHECK(wrong == 0, "gram: %d wrong", wrong);
}

/* --- passes -------------------------------------------------------------------------------------------- */

static void *must_allocate(size_t count, size_t size) {
    void *memory = malloc(count * size);
    if (memory == NULL) {
        fprintf(stderr, "no memory for a test\n");
        exit(2);
    }
    return memory;
}

/* n elements of magnitude 2 at most; float16 and bfloat16 by their bits. */
static void fill(void *data, int64_t n, tm_dtype dtype) {
    for (int64_t i = 0; i < n; i++) {
        const double value = next_value();
        const float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        if (dtype == TM_F64) {
            ((double *)data)[i] = value;
        } else if (dtype == TM_F32) {
            ((float *)data)[i] = single;
        } else if (dtype == TM_BF16) {
            ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        } else {
            ((uint16_t *)data)[i] =
                (uint16_t)((bits & 0x3ff) | 0x3400 | (bits >> 16 & 0x8000)); /* .25 to .5 */
        }
    }
}

static tm_view view_of(const void *data, const int64_t *shape, const int64_t *strides, tm_dtype dtype) {
    return (tm_view){.data = data,
                     .shape = shape,
                     .strides = strides,
                     .n = shape[0] * shape[1],
                     .ndim = 2,
                     .dtype = dtype};
}

static void check_pass(tm_dtype dtype, int64_t m, int64_t n, int used, int shift) {
    const int64_t shape[2] = {m, n};
    void *data = must_allocate((size_t)(m * n), 8);
    double *v = must_allocate((size_t)(B * n), sizeof *v), *z = must_allocate((size_t)(B * n), sizeof *z);
    double *y = must_allocate((size_t)(m * B), sizeof *y);
    const double scale = ldexp(1.0, -shift), unit = dtype == TM_F64 ? 0x1p-52 : 0x1p-23;
    fill(data, m * n, dtype);
    for (int64_t i = 0; i < B * n; i++) {
        v[i] = next_value();
    }
    const tm_view view = view_of(data, shape, NULL, dtype);
    tm_matrix matrix;
    tm_rows rows;
    tm_pass_sums sums;
    tm_error error = {""};
    tm_matrix_init(&matrix, &view, 0);
    tm_rows_init(&rows, tm_table_get(), &matrix);
    CHECK(tm_spectral_pass(&rows, v, used, shift, 1, 1, z, &sums, &error) == TM_OK, "%s", error.text);
    double sumsq = 0, absmax = 0;
    for (int64_t i = 0; i < m; i++) {
        memset(y + i * B, 0, B * sizeof *y);
        for (int64_t c = 0; c < n; c++) {
            const double w = reference_value(data, i * n + c, dtype);
            sumsq += w * scale * (w * scale);
            absmax = fabs(w) > absmax ? fabs(w) : absmax;
            for (int j = 0; j < used; j++) {
                y[i * B + j] += w * scale * v[j * n + c];
            }
        }
    }
    CHECK(sums.absmax == absmax, "absmax %g, not %g", sums.absmax, absmax);
    CHECK(fabs(sums.sumsq - sumsq) <= 1e-12 * sumsq, "sumsq %g, not %g", sums.sumsq, sumsq);
    for (int i = 0; i < B; i++) {
        for (int j = 0; j < B; j++) {
            double gram = 0;
            for (int64_t r = 0; r < m && i < used && j < used; r++) {
                gram += y[r * B + i] * y[r * B + j];
            }
            CHECK(fabs(sums.gram[i][j] - gram) <= 64 * unit * sumsq * (double)n, "gram %d %d: %g, not %g", i,
                  j, sums.gram[i][j], gram);
        }
    }
    int wrong = 0;
    for (int j = 0; j < used; j++) {
        for (int64_t c = 0; c < n; c++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < m; i++) {
                const double term = reference_value(data, i * n + c, dtype) * scale * y[i * B + j];
                sum += term;
                size += fabs(term);
            }
            wrong += !(fabs(z[j * n + c] - sum) <= 64 * unit * (size + scale * scale));
        }
    }
    CHECK(wrong == 0, "%s, %d x %d: %d of z wrong", tm_dtype_name(dtype), (int)m, (int)n, wrong);
    digest_bytes(z, (size_t)(used * n) * sizeof *z);
    digest_bytes(&sums, sizeof sums);
    free(y);
    free(z);
    free(v);
    free(data);
}

static int allowed;

static void *failing_once(size_t bytes) {
    return allowed-- != 0 ? malloc(bytes) : NULL;
}

/* Two workers, and the one that goes on when there is no memory for two: the same bits. */
static void check_pass_threads(void) {
    const int64_t shape[2] = {2100, 4100};
    const int64_t n = shape[1];
    float *data = must_allocate((size_t)(shape[0] * n), sizeof *data);
    double *v = must_allocate((size_t)(B * n), sizeof *v), *z[4];
    tm_pass_sums sums[4];
    const tm_view view = view_of(data, shape, NULL, TM_F32);
    tm_matrix matrix;
    tm_rows rows;
    tm_error error = {""};
    fill(data, shape[0] * n, TM_F32);
    for (int64_t i = 0; i < B * n; i++) {
        v[i] = next_value();
    }
    tm_matrix_init(&matrix, &view, 0);
    tm_rows_init(&rows, tm_table_get(), &matrix);
    for (int i = 0; i < 4; i++) {
        z[i] = must_allocate((size_t)(B * n), sizeof *z[i]);
        allowed = i == 0 ? -1 : i - 2; /* all at 2 threads; the first, the second fails */
        tm_memory_set_allocator(failing_once);
        const tm_status status = tm_spectral_pass(&rows, v, B, 0, 1, i == 0 ? 1 : 2, z[i], &sums[i], &error);
        tm_memory_set_allocator(NULL);
        CHECK(status == TM_OK, "%s", error.text);
        CHECK(memcmp(z[i], z[0], (size_t)(B * n) * sizeof *z[i]) == 0, "z of run %d", i);
        CHECK(memcmp(&sums[i], &sums[0], sizeof sums[i]) == 0, "sums of run %d", i);
    }
    for (int i = 0; i < 4; i++) {
        free(z[i]);
    }
    free(v);
    free(data);
}

/* Rows that grow by 2^72 within a tile, in place, and every second column of a wider matrix, whose tiles have
 * another height: the same bits, and the right ones. */
static void check_pass_layouts(tm_dtype dtype) {
    enum { ROWS_GROWN = 37, COLUMNS = 1100 };
    const int64_t item = (int64_t)tm_dtype_size(dtype), shape[2] = {ROWS_GROWN, COLUMNS};
    const int64_t strides[2] = {2 * COLUMNS * item, 2 * item};
    char *data = must_allocate(2 * ROWS_GROWN * COLUMNS, 8), *dense = must_allocate(ROWS_GROWN * COLUMNS, 8);
    double *v = must_allocate(B * COLUMNS, sizeof *v), *z[2], y[ROWS_GROWN];
    const tm_view views[2] = {view_of(dense, shape, NULL, dtype), view_of(data, shape, strides, dtype)};
    tm_pass_sums sums[2];
    tm_error error = {""};
    for (int64_t i = 0; i < ROWS_GROWN * COLUMNS; i++) {
        const double value = i / COLUMNS == 3 ? 0 : ldexp(next_value(), (int)(i / COLUMNS) * 2 - 30);
        if (dtype == TM_F64) {
            ((double *)(void *)dense)[i] = ((double *)(void *)data)[2 * i] = value;
        } else {
            ((float *)(void *)dense)[i] = ((float *)(void *)data)[2 * i] = (float)value;
        }
    }
    for (int64_t i = 0; i < B * COLUMNS; i++) {
        v[i] = next_value();
    }
    for (int i = 0; i < 2; i++) {
        tm_matrix matrix;
        tm_rows rows;
        tm_matrix_init(&matrix, &views[i], 0);
        tm_rows_init(&rows, tm_table_get(), &matrix);
        z[i] = must_allocate(B * COLUMNS, sizeof *z[i]);
        CHECK(tm_spectral_pass(&rows, v, B, 0, 1, 1, z[i], &sums[i], &error) == TM_OK, "%s", error.text);
    }
    CHECK(memcmp(z[0], z[1], B * COLUMNS * sizeof *z[0]) == 0, "z of two layouts");
    CHECK(memcmp(&sums[0], &sums[1], sizeof sums[0]) == 0, "sums of two layouts");
    int wrong = 0;
    for (int64_t r = 0; r < ROWS_GROWN; r++) {
        y[r] = 0;
        for (int64_t c = 0; c < COLUMNS; c++) {
            y[r] += reference_value(dense, r * COLUMNS + c, dtype) * v[c];
        }
    }
    for (int64_t c = 0; c < COLUMNS; c++) {
        double sum = 0, size = 0;
        for (int64_t r = 0; r < ROWS_GROWN; r++) {
            const double w = reference_value(dense, r * COLUMNS + c, dtype);
            sum += w * y[r];
            size += fabs(w) * ldexp(COLUMNS, (int)r * 2 - 30);
        }
        wrong += !(fabs(z[0][c] - sum) <= 0x1p-20 * size);
    }
    CHECK(wrong == 0, "rows that grow: %d of z wrong", wrong);
    free(z[0]);
    free(z[1]);
    free(v);
    free(dense);
    free(data);
}

/* --- bounds -------------------------------------------------------------------------------------------- */

enum { D = 24, SIDE = D + B };

/* The smallest and the largest eigenvalue of a symmetric matrix. */
static void extremes(double *a, int n, double *least, double *most) {
    double values[SIDE], work[SIDE * SIDE + 1];
    CHECK(tm_blas_eigen(n, a, values, 0, work) == 0, "eigenvalues");
    *least = values[0];
    *most = values[n - 1];
}

/* A likely eigenvalue t: quantile (I + F_t'F_t) - X'X is not positive definite. */
static int is_likely(const tm_ritz *ritz, double t) {
    double ft[D][B], x[B][B] = {{0}}, a[B * B], least, most;
    const int k = ritz->residuals;
    for (int i = 0; i < ritz->d; i++) {
        for (int j = 0; j < k; j++) {
            ft[i][j] = ritz->f[i * B + j] / (t - ritz->theta[i]);
            for (int q = 0; q < ritz->draws; q++) {
                x[q][j] += ritz->c[i * B + q] * ft[i][j];
            }
        }
    }
    for (int i = 0; i < k; i++) {
        for (int j = 0; j < k; j++) {
            double sum = i == j;
            for (int l = 0; l < ritz->d; l++) {
                sum += ft[l][i] * ft[l][j];
            }
            sum *= ritz->quantile;
            for (int q = 0; q < ritz->draws; q++) {
                sum -= x[q][i] * x[q][j];
            }
            a[i * k + j] = sum;
        }
    }
    extremes(a, k, &least, &most);
    return !(least > 0);
}

/* The deterministic bounds by dense matrices: Nyström's, and the block matrix with what it leaves over. */
static void dense_bounds(const tm_ritz *ritz, double *low, double *high) {
    const double top = ritz->theta[ritz->d - 1];
    double a[SIDE * SIDE], least, block, trace = 0;
    const int k = ritz->residuals;
    int first = 0;
    while (ritz->theta[first] < ritz->trusted * top) {
        first++;
    }
    const int d = ritz->d - first, side = d + k;
    const double *theta = ritz->theta + first, *f = ritz->f + first * B;
    for (int i = 0; i < d; i++) {
        for (int j = 0; j < d; j++) {
            double dot = 0;
            for (int l = 0; l < k; l++) {
                dot += f[i * B + l] * f[j * B + l];
            }
            a[i * d + j] = (i == j ? theta[i] : 0) + dot / sqrt(theta[i] * theta[j]);
        }
        trace += a[i * d + i];
    }
    extremes(a, d, &least, low);
    const double rho = ritz->sumsq > trace ? ritz->sumsq - trace : 0;
    memset(a, 0, sizeof a);
    for (int i = 0; i < d; i++) {
        a[i * side + i] = theta[i];
        for (int j = 0; j < k; j++) {
            a[i * side + d + j] = a[(d + j) * side + i] = f[i * B + j];
            for (int l = 0; l < k; l++) {
                a[(d + l) * side + d + j] += f[i * B + l] * f[i * B + j] / theta[i];
            }
        }
    }
    for (int j = 0; j < k; j++) {
        a[(d + j) * side + d + j] += rho;
    }
    extremes(a, side, &least, &block);
    *high = fmin(fmin(*low + rho, ritz->sumsq), block);
}

static void check_bounds(int d, int residuals, int draws, double size, double trusted) {
    double theta[D], f[D * B] = {0}, c[D * B] = {0}, trace = 0, low, high, least, most;
    for (int i = 0; i < d; i++) {
        theta[i] = (i > 0 ? theta[i - 1] : 1e-3) + 0.1 * (1 + next_value());
        for (int j = 0; j < residuals; j++) {
            f[i * B + j] = size * next_value() * theta[i];
            trace += f[i * B + j] * f[i * B + j] / theta[i];
        }
        for (int q = 0; q < draws; q++) {
            c[i * B + q] = 2 * next_value();
        }
        trace += theta[i];
    }
    const tm_ritz ritz = {.d = d,
                          .residuals = residuals,
                          .draws = draws,
                          .theta = theta,
                          .f = f,
                          .c = c,
                          .sumsq = trace * (1 + fabs(next_value())),
                          .quantile = tm_chi2_quantile(1e-6, draws),
                          .trusted = trusted};
    tm_spectral_bounds(&ritz, &low, &high);
    if (residuals == 0) {
        CHECK(low == theta[d - 1] && high == low, "%g %g in an invariant space", low, high);
        return;
    }
    dense_bounds(&ritz, &least, &most);
    CHECK(fabs(low - least) <= 1e-12 * least, "low %.17g, not %.17g", low, least);
    CHECK(high >= low && high <= most * (1 + 1e-12), "high %g above %g", high, most);
    double likely = least;
    for (int i = 0; i < 1800; i++) { /* the largest likely value, to one in a hundred of its distance */
        const double t = least + (most - least) * pow(10, -i / 230.0);
        if (t <= least || is_likely(&ritz, t)) {
            likely = t;
            break;
        }
    }
    CHECK(high >= likely * (1 - 1e-12), "%d %d %d: high %.12g misses %.12g", d, residuals, draws, high,
          likely);
    CHECK(high - low <= 1.04 * (likely - least) + 1e-7 * (most - least) + 1e-12 * most,
          "%d %d %d: high - low %g, needed %g", d, residuals, draws, high - low, likely - least);
}

static void check_all_bounds(void) {
    static const double sizes[] = {1e-6, 1e-3, 0.05, 0.5};
    for (int round = 0; round < 24; round++) {
        const int d = round % 3 == 0 ? 1 + round / 3 : round % 3 == 1 ? 8 : D;
        check_bounds(d, d < B ? d : 1 + round % B, round & 1 ? 8 : 6, sizes[round % 4],
                     round & 4 ? 1e-2 : 0.2);
    }
    check_bounds(5, 0, 8, 0, 1e-2);
    static const struct {
        double epsilon, value;
        int degrees;
    } tables[] = {{0.01, 1.646497, 8}, {0.05, 2.732637, 8}, {0.01, 0.872090, 6}, {0.5, 5.348121, 6}};
    for (size_t i = 0; i < sizeof tables / sizeof tables[0]; i++) {
        const double quantile = tm_chi2_quantile(tables[i].epsilon, tables[i].degrees);
        CHECK(fabs(quantile - tables[i].value) < 1e-6, "%g", quantile);
    }
    const double y = tm_chi2_quantile(1e-9, 6) / 2; /* the tail's first terms: y^3 / 6 (1 - 3 y / 4 + ...) */
    CHECK(fabs(y * y * y / 6 * (1 - 0.75 * y + 0.3 * y * y) / 1e-9 - 1) < 1e-6, "%g", y);
}

/* --- draws --------------------------------------------------------------------------------------------- */

/* The known answers that the generator's authors publish. */
static void check_random(void) {
    static const uint32_t cases[][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e,
         0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb,
         0x5001e420, 0x24126ea1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t out[4];
        tm_philox(cases[i], cases[i] + 4, out);
        CHECK(memcmp(out, cases[i] + 6, sizeof out) == 0, "case %d: %08x", (int)i, out[0]);
    }
    enum { N = 100003 };
    double *x = must_allocate(N, sizeof *x), *y = must_allocate(N, sizeof *y);
    double mean = 0, square = 0, fourth = 0;
    tm_gaussians(7, 1, 2, 3, N, x);
    for (int i = 0; i < N; i++) {
        mean += x[i] / N;
        square += x[i] * x[i] / N;
        fourth += x[i] * x[i] * x[i] * x[i] / N;
    }
    CHECK(fabs(mean) < 0.015 && fabs(square - 1) < 0.02 && fabs(fourth - 3) < 0.15, "moments %g %g %g", mean,
          square, fourth);
    for (int word = 0; word < 5; word++) { /* each of the five words makes another stream */
        const uint32_t other[5] = {word == 0, word == 1, word == 2, word == 3, word == 4};
        tm_gaussians(7 + other[0] + ((uint64_t)other[1] << 32), 1 + other[2], 2 + other[3], 3 + other[4], N,
                     y);
        double product = 0;
        for (int i = 0; i < N; i++) {
            product += x[i] * y[i] / N;
        }
        CHECK(fabs(product) < 0.015, "word %d: %g", word, product);
    }
    tm_gaussians(7, 1, 2, 3, 5, y); /* a shorter draw is the beginning */
    CHECK(memcmp(x, y, 5 * sizeof *x) == 0, "beginning");
    free(x);
    free(y);
}

/* --- results ------------------------------------------------------------------------------------------- */

static const tm_spectral_options defaults = {.tolerance = 0.01, .epsilon = 1e-6, .seed = 1, .threads = 1};

static tm_spectral rank_of(const tm_matrix *matrix, const tm_spectral_options *options) {
    tm_spectral out;
    tm_error error;
    if (tm_stable_rank(matrix, 1, options, &out, &error) != TM_OK) {
        fprintf(stderr, "a call failed: %s\n", error.text);
        exit(2);
    }
    return out;
}

/* ||W||^2 and the largest eigenvalue of W'W from the elements of a view in C order. */
static void truth_of(const double *w, int m, int n, double *sumsq, double *lambda) {
    double *a = must_allocate((size_t)(n * n), sizeof *a),
           *work = must_allocate((size_t)(n * n + n), sizeof *a);
    *sumsq = 0;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int r = 0; r < m; r++) {
                sum += w[r * n + i] * w[r * n + j];
            }
            a[i * n + j] = sum;
        }
        *sumsq += a[i * n + i];
    }
    double *values = must_allocate((size_t)n, sizeof *values);
    CHECK(tm_blas_eigen(n, a, values, 0, work) == 0, "eigenvalues");
    *lambda = values[n - 1];
    free(values);
    free(work);
    free(a);
}

enum { M = 45, N = 37 };

static void check_result(const tm_view *view, int64_t index, const double *w, int m, int n,
                         const char *what) {
    static float warm[2][TM_SPECTRAL_WARM * M];
    double sumsq, lambda;
    truth_of(w, m, n, &sumsq, &lambda);
    for (int round = 0; round < 3; round++) { /* exact, cold, warm */
        tm_spectral_options options = defaults;
        tm_matrix matrix;
        options.exact_side = round == 0 ? 256 : 0;
        options.step = (uint32_t)round;
        tm_matrix_init(&matrix, view, index);
        matrix.warm = round == 2 ? warm[0] : NULL;
        matrix.warm_after = warm[round == 2];
        const tm_spectral out = rank_of(&matrix, &options);
        const double rank = sumsq / lambda;
        CHECK(out.low <= rank * (1 + 1e-12) && rank <= out.high * (1 + 1e-12), "%s, round %d: %g in %g %g",
              what, round, rank, out.low, out.high);
        CHECK(out.stable_rank == out.high && out.low >= 1, "%s: %g", what, out.stable_rank);
        CHECK(out.high <= out.low * 1.0201 && fabs(out.norm - sqrt(sumsq)) <= 1e-12 * out.norm, "%s", what);
        CHECK(out.sigma * out.sigma <= lambda * (1 + 1e-12) && out.sigma * out.sigma >= lambda * 0.998, "%s",
              what);
        CHECK(out.stopped_by == (round == 0 ? TM_STOP_EXACT : TM_STOP_TOLERANCE), "%s: %d", what,
              (int)out.stopped_by);
        if (round == 0) {
            digest_bytes(&out, sizeof out);
        }
        double length = 0, product = 0;
        for (int64_t i = 0; i < matrix.columns; i++) {
            length += (double)matrix.warm_after[i] * matrix.warm_after[i];
            product += (double)matrix.warm_after[i] * matrix.warm_after[matrix.columns + i];
        }
        CHECK(round == 0 ? length == 0 : fabs(length - 1) < 1e-5 && fabs(product) < 1e-5,
              "%s, round %d: carried vectors of length %g", what, round, length);
    }
}

/* One matrix in every dtype and layout. */
static void check_layouts(tm_dtype dtype) {
    static double w[3 * M * N];
    const int64_t item = (int64_t)tm_dtype_size(dtype), shape[2] = {M, N};
    char *data = must_allocate(3 * M * N + 1, 8);
    fill(data, 3 * M * N, dtype);
    for (int i = 0; i < 3 * M * N; i++) {
        w[i] = reference_value(data, i, dtype);
    }
    const tm_view plain = view_of(data, shape, NULL, dtype);
    check_result(&plain, 0, w, M, N, "rows");

    const int64_t deep_shape[3] = {3, M, N};
    const tm_view deep = {.data = data, .shape = deep_shape, .n = 3 * M * N, .ndim = 3, .dtype = dtype};
    CHECK(tm_matrix_count(&deep) == 3 && tm_matrix_count(&plain) == 1, "matrices");
    check_result(&deep, 2, w + 2 * M * N, M, N, "the third of three");

    const int64_t swapped[2] = {N, M}, strides[2] = {item, N * item};
    const tm_view turned =
        view_of(data, swapped, strides, dtype); /* read as it lies: rows of the transpose */
    check_result(&turned, 0, w, M, N, "transposed");

    const int64_t back[2] = {-N * item, -item};
    const tm_view reversed = view_of(data + (M * N - 1) * item, shape, back, dtype);
    check_result(&reversed, 0, w, M, N, "reversed"); /* the same singular values */

    static double third[M * N / 3 + M];
    const int64_t third_shape[2] = {M, N / 3}, third_strides[2] = {N * item, 3 * item};
    const tm_view strided = view_of(data, third_shape, third_strides, dtype);
    for (int i = 0; i < M * (N / 3); i++) {
        third[i] = w[i / (N / 3) * N + i % (N / 3) * 3];
    }
    check_result(&strided, 0, third, M, N / 3, "every third column");

    memmove(data + 1, data, (size_t)(M * N * item));
    const tm_view moved = view_of(data + 1, shape, NULL, dtype);
    check_result(&moved, 0, w, M, N, "misaligned");
    free(data);
}

static void check_edges(void) {
    static const double zeros[6], diagonal[4] = {2, 0, 0, 1};
    double bad[6] = {1, 2, 3, 4, 5, 6};
    for (int exact = 0; exact < 2; exact++) {
        tm_spectral_options options = defaults;
        float carried[TM_SPECTRAL_WARM * 3];
        tm_matrix matrix;
        options.exact_side = exact ? 256 : 0;
        tm_view view = view_of(zeros, (const int64_t[]){2, 3}, NULL, TM_F64);
        tm_matrix_init(&matrix, &view, 0);
        matrix.warm_after = carried;
        tm_spectral out = rank_of(&matrix, &options);
        CHECK(out.stopped_by == TM_STOP_ZERO && isnan(out.high) && isnan(out.norm) && carried[0] == 0,
              "zeros");
        for (int kind = 0; kind < 3; kind++) {
            put_nonfinite(bad, 4, TM_F64, kind);
            view.data = bad;
            tm_matrix_init(&matrix, &view, 0);
            matrix.warm_after = carried;
            out = rank_of(&matrix, &options);
            CHECK(out.stopped_by == TM_STOP_NONFINITE && isnan(out.sigma) && carried[0] == 0, "kind %d",
                  kind);
        }
        view = view_of(diagonal, (const int64_t[]){2, 2}, NULL, TM_F64);
        tm_matrix_init(&matrix, &view, 0);
        matrix.warm_after = carried;
        out = rank_of(&matrix, &options);
        CHECK(fabs(out.high - 1.25) < 1e-8 && fabs(out.sigma - 2) < 1e-8, "%g %g", out.high, out.sigma);
        view = view_of(diagonal, (const int64_t[]){2, 0}, NULL, TM_F64);
        tm_matrix_init(&matrix, &view, 0);
        matrix.warm_after = carried;
        CHECK(rank_of(&matrix, &options).stopped_by == TM_STOP_ZERO, "empty");
    }
}

static void check_refusals(void) {
    static const struct {
        double tolerance, epsilon;
        int threads;
    } bad[] = {{0, 0.1, 1}, {-1, 0.1, 1}, {INFINITY, 0.1, 1}, {0.1, 0, 1}, {0.1, 0.51, 1}, {0.1, 0.1, 0}};
    static const double one = 1;
    tm_view view = view_of(&one, (const int64_t[]){1, 1}, NULL, TM_F64);
    tm_matrix matrix;
    tm_spectral out;
    tm_error error;
    tm_matrix_init(&matrix, &view, 0);
    matrix.warm_after = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tm_spectral_options options = defaults;
        options.tolerance = bad[i].tolerance;
        options.epsilon = bad[i].epsilon;
        options.threads = bad[i].threads;
        CHECK(tm_stable_rank(&matrix, 1, &options, &out, &error) == TM_ERR_VALUE, "case %d", (int)i);
    }
    matrix.dtype = TM_I32;
    CHECK(tm_stable_rank(&matrix, 1, &defaults, &out, &error) == TM_ERR_DTYPE, "integers");
    CHECK(tm_stable_rank(NULL, 0, &defaults, NULL, &error) == TM_OK, "an empty list");
}

/* Every allocation fails once, in a run long enough for the basis to grow twice. */
static void check_memory(void) {
    enum { SIDE_LONG = 100 };
    double *w = must_allocate(SIDE_LONG * SIDE_LONG, sizeof *w);
    float carried[TM_SPECTRAL_WARM * SIDE_LONG];
    const tm_view view = view_of(w, (const int64_t[]){SIDE_LONG, SIDE_LONG}, NULL, TM_F64);
    tm_matrix matrix;
    fill(w, SIDE_LONG * SIDE_LONG, TM_F64);
    tm_matrix_init(&matrix, &view, 0);
    matrix.warm_after = carried;
    for (int exact = 0; exact < 2; exact++) {
        tm_spectral_options options = defaults;
        options.tolerance = 1e-7;
        options.exact_side = exact ? 256 : 0;
        const tm_spectral expected = rank_of(&matrix, &options);
        CHECK(exact || expected.passes > 8, "%d passes do not grow the basis twice", (int)expected.passes);
        tm_status status = TM_ERR_MEMORY;
        int calls = 0;
        while (status == TM_ERR_MEMORY && calls < 1000) {
            tm_spectral out;
            tm_error error = {""};
            allowed = calls++;
            tm_memory_set_allocator(failing_once);
            status = tm_stable_rank(&matrix, 1, &options, &out, &error);
            tm_memory_set_allocator(NULL);
            CHECK((error.text[0] != '\0') == (status == TM_ERR_MEMORY), "%s", error.text);
            CHECK(status != TM_OK || memcmp(&out, &expected, sizeof out) == 0, "a result after %d calls",
                  calls);
        }
        CHECK(status == TM_OK && calls > (exact ? 1 : 3 + 2 * 8 + 2), "status %d, %d calls", (int)status,
              calls);
    }
    free(w);
}

void test_spectral(void) {
    static const tm_dtype dtypes[] = {TM_F64, TM_F32, TM_F16, TM_BF16};
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        seed = digest = 1;
        check_kernels();
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            check_pass(dtypes[d], 1, 1, B, 0);
            check_pass(dtypes[d], 5, 33, 3, 0);
            check_pass(dtypes[d], 600, 70, B, 0);
            check_pass(dtypes[d], 70, 1100, B, 4);
            check_layouts(dtypes[d]);
        }
        CHECK(digest == UINT64_C(0x4188c5a6b464eb10), "digest 0x%llx", (unsigned long long)digest);
    }
    tm_dispatch_init(NULL);
    check_pass_threads();
    check_pass_layouts(TM_F32);
    check_pass_layouts(TM_F64);
    check_all_bounds();
    check_random();
    check_edges();
    check_refusals();
    check_memory();
}
