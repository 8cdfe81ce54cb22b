/* compare against a scalar reference, bit by bit, in every tier: one dtype, two dtypes, threads, merging. */
#include "digest.h"
#include "runner.h"

#include "../core/tm_compare.h"
#include "../core/tm_memory.h"

#include <math.h>
#include <stdlib.h>

enum { ROOM = 3 * 65536 + 64 };

/* ---- the reference ---- */

typedef struct sums {
    double of[5]; /* |a - b|, its square, a^2, b^2, a b */
} sums;

static double lanes_total(double *lane) {
    for (int width = 16; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) {
            lane[l] += lane[l + width];
        }
    }
    return lane[0];
}

static sums reference_sums(const double *x, const double *y, int64_t n, int64_t first, int64_t chunks) {
    sums result = {{0}};
    if (chunks > 1) {
        int64_t left = 1;
        while (left * 2 < chunks) {
            left *= 2;
        }
        sums a = reference_sums(x, y, n, first, left),
             b = reference_sums(x, y, n, first + left, chunks - left);
        for (int k = 0; k < 5; k++) {
            result.of[k] = a.of[k] + b.of[k];
        }
        return result;
    }
    double lane[5][32] = {{0}};
    for (int64_t i = first * TM_CHUNK; i < n && i < (first + chunks) * TM_CHUNK; i++) {
        if (isfinite(x[i]) && isfinite(y[i])) {
            double error = x[i] - y[i];
            volatile double terms[5] = {fabs(error), error * error, x[i] * x[i], y[i] * y[i], x[i] * y[i]};
            for (int k = 0; k < 5; k++) {
                lane[k][i % 32] += terms[k];
            }
        }
    }
    for (int k = 0; k < 5; k++) {
        result.of[k] = lanes_total(lane[k]);
    }
    return result;
}

/* Mantissa bits and smallest normal exponent; mantissa -1: not a float. */
static void format_of(tm_dtype dtype, int *mantissa, int *exponent) {
    static const int formats[][2] = {
        [TM_F64] = {52, -1022},        [TM_F32] = {23, -126},   [TM_F16] = {10, -14},
        [TM_BF16] = {7, -126},         [TM_F8E4M3FN] = {3, -6}, [TM_F8E4M3FNUZ] = {3, -7},
        [TM_F8E5M2] = {2, -14},        [TM_F8E3M4] = {4, -2},   [TM_F8E5M2FNUZ] = {2, -15},
        [TM_F8E4M3B11FNUZ] = {3, -10}, [TM_F8E4M3] = {3, -6},   [TM_F8E8M0FNU] = {0, -127}};
    *mantissa = dtype <= TM_F8E8M0FNU ? formats[dtype][0] : -1;
    *exponent = dtype <= TM_F8E8M0FNU ? formats[dtype][1] : 0;
}

/* Steps of the format from 0 to the value, which is rounded to them. */
static int64_t code_of(double value, int mantissa, int exponent) {
    int power;
    frexp(value, &power);
    power = power - 1 > exponent && value != 0 ? power - 1 : exponent;
    int64_t steps = (int64_t)(power - exponent) << mantissa;
    double fraction = ldexp(ldexp(fabs(value), mantissa / 2 - power), mantissa - mantissa / 2),
           whole = floor(fraction);
    int64_t code = steps + (int64_t)whole;
    if (fraction - whole > 0.5 || (fraction - whole == 0.5 && code % 2 != 0)) {
        code++;
    }
    return value < 0 ? -code : code;
}

static uint64_t distance_of(const void *a, const void *b, int64_t i, tm_dtype a_dtype, tm_dtype b_dtype) {
    double x = reference_value(a, i, a_dtype), y = reference_value(b, i, b_dtype);
    if (a_dtype == b_dtype && (a_dtype == TM_I64 || a_dtype == TM_U64)) {
        int64_t p, q;
        memcpy(&p, (const char *)a + 8 * i, 8);
        memcpy(&q, (const char *)b + 8 * i, 8);
        int larger = a_dtype == TM_I64 ? p > q : (uint64_t)p > (uint64_t)q;
        return larger ? (uint64_t)p - (uint64_t)q : (uint64_t)q - (uint64_t)p;
    }
    int mantissa, exponent, other, other_exponent;
    format_of(a_dtype, &mantissa, &exponent);
    format_of(b_dtype, &other, &other_exponent);
    if (mantissa < 0 ||
        (other >= 0 && (other < mantissa || (other == mantissa && other_exponent > exponent)))) {
        mantissa = other;
        exponent = other_exponent;
    }
    if (mantissa < 0) {
        double difference = fabs(x - y);
        return difference < 0x1p64 ? (uint64_t)difference : UINT64_MAX;
    }
    int64_t p = code_of(x, mantissa, exponent), q = code_of(y, mantissa, exponent);
    return p > q ? (uint64_t)p - (uint64_t)q : (uint64_t)q - (uint64_t)p;
}

static int is_identical(const void *a, const void *b, int64_t i, tm_dtype a_dtype, tm_dtype b_dtype) {
    size_t size = tm_dtype_size(a_dtype);
    if (a_dtype == b_dtype) {
        return memcmp((const char *)a + (size_t)i * size, (const char *)b + (size_t)i * size, size) == 0;
    }
    return same_double(reference_value(a, i, a_dtype), reference_value(b, i, b_dtype));
}

static void reference_nonfinite(tm_comparison *c, double x, double y) {
    int nan_x = isnan(x), nan_y = isnan(y);
    c->n_nan_both += nan_x && nan_y;
    c->n_nan_a += nan_x && !nan_y;
    c->n_nan_b += nan_y && !nan_x;
    if (!nan_x && !nan_y) {
        c->n_inf_same += isinf(x) && x == y;
        c->n_inf_opposite += isinf(x) && x == -y;
        c->n_inf_a += isinf(x) && isfinite(y);
        c->n_inf_b += isinf(y) && isfinite(x);
    }
}

/* All but what is derived from sums, and the places' values. */
static tm_comparison reference(const void *a, const void *b, int64_t n, tm_dtype a_dtype, tm_dtype b_dtype,
                               double *x, double *y) {
    tm_comparison c = {.n = n};
    c.first_difference.index = c.max_abs_at.index = c.max_rel_at.index = -1;
    for (int64_t i = 0; i < n; i++) {
        x[i] = reference_value(a, i, a_dtype);
        y[i] = reference_value(b, i, b_dtype);
        int identical = is_identical(a, b, i, a_dtype, b_dtype);
        c.n_identical += identical;
        if (!identical && c.first_difference.index < 0) {
            c.first_difference.index = i;
        }
        if (!isfinite(x[i]) || !isfinite(y[i])) {
            reference_nonfinite(&c, x[i], y[i]);
            continue;
        }
        c.n_finite++;
        c.n_zero_sign += x[i] == 0 && y[i] == 0 && !signbit(x[i]) != !signbit(y[i]);
        c.n_zero_reference += y[i] == 0 && x[i] != 0;
        uint64_t distance = distance_of(a, b, i, a_dtype, b_dtype), rest = distance;
        int bin = 0;
        for (; rest != 0; rest >>= 1) {
            bin++;
        }
        c.ulp[bin]++;
        c.max_ulp = distance > c.max_ulp ? distance : c.max_ulp;
        double error = fabs(x[i] - y[i]), relative = y[i] == 0 ? 0 : error / fabs(y[i]);
        if (error > c.max_abs) {
            c.max_abs = error;
            c.max_abs_at.index = i;
        }
        if (relative > c.max_rel) {
            c.max_rel = relative;
            c.max_rel_at.index = i;
        }
    }
    c.max_abs = c.n_finite > 0 ? c.max_abs : (double)NAN;
    c.max_rel = c.n_finite > c.n_zero_reference ? c.max_rel : (double)NAN;
    sums s = reference_sums(x, y, n, 0, (n + TM_CHUNK - 1) / TM_CHUNK);
    c.sum_abs = s.of[0];
    c.error_sq.value = s.of[1];
    c.a_sq.value = s.of[2];
    c.b_sq.value = s.of[3];
    c.dot.value = s.of[4];
    return c;
}

/* ---- the checks ---- */

typedef struct memory {
    char *a, *b;
    double *x, *y;
} memory;

static int same_scaled(tm_scaled a, tm_scaled b) {
    return same_double(a.value, b.value) && a.exponent == b.exponent;
}

static void check_record(const tm_comparison *got, const tm_comparison *expect, const char *what) {
    CHECK(memcmp(&got->n, &expect->n, (size_t)((const char *)&got->max_ulp - (const char *)&got->n)) == 0,
          "%s: counts", what);
    CHECK(got->max_ulp == expect->max_ulp, "%s: %llx, not %llx", what, (unsigned long long)got->max_ulp,
          (unsigned long long)expect->max_ulp);
    CHECK(memcmp(got->ulp, expect->ulp, sizeof got->ulp) == 0, "%s: bins", what);
    CHECK(same_double(got->max_abs, expect->max_abs) && same_double(got->max_rel, expect->max_rel),
          "%s: largest errors %g %g, not %g %g", what, got->max_abs, got->max_rel, expect->max_abs,
          expect->max_rel);
    CHECK(got->first_difference.index == expect->first_difference.index &&
              got->max_abs_at.index == expect->max_abs_at.index &&
              got->max_rel_at.index == expect->max_rel_at.index,
          "%s: places", what);
    CHECK(same_double(got->sum_abs, expect->sum_abs) && same_scaled(got->error_sq, expect->error_sq) &&
              same_scaled(got->a_sq, expect->a_sq) && same_scaled(got->b_sq, expect->b_sq) &&
              same_scaled(got->dot, expect->dot),
          "%s: sums", what);
}

static void check(const memory *m, int64_t n, tm_dtype a_dtype, tm_dtype b_dtype, const char *what) {
    tm_view a = flat(m->a, n, a_dtype), b = flat(m->b, n, b_dtype);
    tm_comparison expect = reference(m->a, m->b, n, a_dtype, b_dtype, m->x, m->y), each, total;
    tm_error error = {""};
    char text[120];
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        tm_status status = tm_compare(&a, &b, 1, 1, &each, &total, &error);
        CHECK(status == TM_OK, "%s", error.text);
        snprintf(text, sizeof text, "%s %s %s n=%lld %s", tier_name(tier), tm_dtype_name(a_dtype),
                 tm_dtype_name(b_dtype), (long long)n, what);
        check_record(&each, &expect, text);
        CHECK(n == 0 || memcmp(&each, &total, sizeof each) == 0, "%s: total", text);
    }
}

/* Elements of b that are those of a, then neighbours of them, then others. */
static void fill(const memory *m, int64_t n, tm_dtype dtype) {
    size_t size = tm_dtype_size(dtype);
    fill_finite(m->a, n, dtype);
    fill_finite(m->b, n, dtype);
    for (size_t i = 0; i < (size_t)n; i++) {
        if (i % 4096 < 2048 || i % 4 != 0) {
            memcpy(m->b + i * size, m->a + i * size, size);
        }
        if (i % 4096 >= 3000 && i % 4 == 1) { /* one bit up or down */
            m->b[i * size] = (char)(m->b[i * size] ^ 1);
            if (!isfinite(reference_value(m->b, (int64_t)i, dtype))) {
                memcpy(m->b + i * size, m->a + i * size, size);
            }
        }
    }
}

static void check_lengths(const memory *m, tm_dtype dtype) {
    static const int64_t lengths[] = {0,    1,    31,   32,    33,    1023,
                                      1024, 1025, 4096, 65535, 65537, 2 * 65536 + 3033};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (lengths[i] > 4096 && !sampled()) {
            continue;
        }
        fill(m, lengths[i], dtype);
        check(m, lengths[i], dtype, dtype, "finite");
        for (int kind = 0; kind < 3 && lengths[i] > 0; kind++) {
            int64_t at = (int64_t)(next_random() % (uint64_t)lengths[i]);
            if (put_nonfinite(m->a, at, dtype, kind)) {
                check(m, lengths[i], dtype, dtype, "non-finite a");
                put_nonfinite(m->b, (at + 7 * kind) % lengths[i], dtype, (kind + 1) % 3);
                check(m, lengths[i], dtype, dtype, "non-finite both");
            }
        }
    }
}

static void check_two_dtypes(const memory *m, tm_dtype a_dtype, tm_dtype b_dtype) {
    const int64_t n = 2500;
    fill_finite(m->a, n, a_dtype);
    fill_finite(m->b, n, b_dtype);
    check(m, n, a_dtype, b_dtype, "finite");
    if (a_dtype != TM_F64 && b_dtype != TM_F64) { /* whose squares would leave double's range */
        fill_random(m->a, (size_t)n * tm_dtype_size(a_dtype));
        fill_random(m->b, (size_t)n * tm_dtype_size(b_dtype));
        check(m, n, a_dtype, b_dtype, "any bits");
    }
}

static int allocations_left;

static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

enum { TENSORS = 5 };
static const int64_t lengths[TENSORS] = {0, 5, 65536 * 2 + 4, 1, 60000};

/* Threads and failing allocations change no bit; the total is the records merged. */
static void check_list(const memory *m, tm_dtype dtype) {
    static tm_comparison one[TENSORS + 1], many[TENSORS + 1], merged;
    tm_view a[TENSORS], b[TENSORS];
    tm_error error = {""};
    int64_t total = 0, size = (int64_t)tm_dtype_size(dtype);
    for (int i = 0; i < TENSORS; i++) {
        a[i] = flat(m->a + total * size, lengths[i], dtype);
        b[i] = flat(m->b + total * size, lengths[i], dtype);
        total += lengths[i];
    }
    fill(m, total, dtype);
    put_nonfinite(m->a, 70000, dtype, 0);
    CHECK(tm_compare(a, b, TENSORS, 1, one, one + TENSORS, &error) == TM_OK, "%s", error.text);
    tm_merge_comparisons(one, TENSORS, &merged);
    CHECK(memcmp(&merged, one + TENSORS, sizeof merged) == 0, "%s: merged", tm_dtype_name(dtype));
    for (int threads = 2; threads <= 6; threads += 2) {
        for (int left = 0; left < 3; left++) {
            allocations_left = left;
            tm_memory_set_allocator(failing);
            tm_status status = tm_compare(a, b, TENSORS, threads, many, many + TENSORS, &error);
            tm_memory_set_allocator(NULL);
            CHECK(status == TM_OK && memcmp(one, many, sizeof one) == 0, "%s: %d threads, %d allocations: %s",
                  tm_dtype_name(dtype), threads, left, error.text);
        }
    }
}

static void check_ranges(const memory *m) {
    static const double scales[] = {1e300, 1e-300, 5e-324};
    double *a = (double *)(void *)m->a, *b = (double *)(void *)m->b;
    const int64_t n = 65536 + 9;
    tm_view views[] = {flat(a, n, TM_F64), flat(b, n, TM_F64)};
    tm_comparison got, total;
    tm_error error = {""};
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
        for (size_t t = 0; t < sizeof scales / sizeof *scales; t++) {
            for (int64_t i = 0; i < n; i++) {
                a[i] = (i % 2 ? 3 : -3) * scales[s];
                b[i] = (i % 2 ? 4 : -4) * scales[t];
            }
            CHECK(tm_compare(&views[0], &views[1], 1, 1, &got, &total, &error) == TM_OK, "%s", error.text);
            double root = sqrt((double)n), bound = 1e-12 * root;
            CHECK(fabs(got.norm_a / scales[s] - 3 * root) <= (s == 2 ? 1 : bound), "%g", got.norm_a);
            CHECK(fabs(got.norm_b / scales[t] - 4 * root) <= (t == 2 ? 1 : bound), "%g", got.norm_b);
            CHECK(fabs(got.rms_error / got.max_abs - 1) <= 1e-12, "%g %g", got.rms_error, got.max_abs);
            CHECK(fabs(got.cosine - 1) <= 1e-12, "%g", got.cosine);
            CHECK(fabs(total.cosine - 1) <= 1e-12 && total.norm_error == got.norm_error, "total");
        }
    }
}

static void check_arguments(void) {
    float x[4] = {1, 2, 3, 4};
    tm_view a[] = {flat(x, 4, TM_F32), flat(x, 4, TM_F32)}, b[] = {flat(x, 4, TM_F32), flat(x, 3, TM_F32)};
    tm_comparison each[2], total;
    tm_error error = {""};
    CHECK(tm_compare(a, b, 2, 1, each, &total, &error) == TM_ERR_VALUE, "lengths");
    CHECK(strstr(error.text, "b[1]: 3 elements, a[1] has 4") != NULL, "%s", error.text);
    CHECK(tm_compare(a, b, 1, 0, each, &total, &error) == TM_ERR_VALUE, "threads");
    CHECK(tm_compare(a, b, 0, 1, NULL, &total, &error) == TM_OK && total.n == 0 && isnan(total.max_abs),
          "nothing");
    CHECK(tm_compare(a, b, 1, 1, each, &total, &error) == TM_OK && total.n_identical == 4 &&
              total.cosine == 1,
          "identical");
}

static void digest_record(uint64_t *digest, const tm_comparison *c) {
    digest_integers(digest, &c->n, (size_t)((const int64_t *)(const void *)&c->max_ulp - &c->n));
    digest_word(digest, c->max_ulp);
    digest_doubles(digest, &c->max_abs, 10);
    digest_integers(digest, (int64_t[]){c->first_difference.index, c->max_abs_at.index, c->max_rel_at.index},
                    3);
    digest_doubles(digest, (double[]){c->max_abs_at.a, c->max_abs_at.b, c->max_rel_at.a, c->max_rel_at.b}, 4);
    digest_doubles(digest,
                   (double[]){c->sum_abs, c->error_sq.value, c->a_sq.value, c->b_sq.value, c->dot.value}, 5);
    digest_integers(digest, c->ulp, TM_ULP_BINS);
}

static void check_digests(const memory *m) {
    const int64_t n = 65536 + 3000;
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        uint64_t digest = DIGEST_START, before = seed_random(17);
        tm_comparison each[2], total;
        tm_error error = {""};
        tm_dispatch_init(tier_name(tier));
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            tm_dtype other = (tm_dtype)((dtype + 1) % TM_DTYPE_COUNT);
            fill_random(m->a, (size_t)n * tm_dtype_size((tm_dtype)dtype));
            fill_random(m->b, (size_t)n * 8);
            memcpy(m->b, m->a, 40000 * tm_dtype_size((tm_dtype)dtype));
            tm_view a[] = {flat(m->a, n, (tm_dtype)dtype), flat(m->a, 3000, (tm_dtype)dtype)};
            tm_view b[] = {flat(m->b, n, (tm_dtype)dtype), flat(m->b, 3000, other)};
            CHECK(tm_compare(a, b, 2, 1, each, &total, &error) == TM_OK, "%s", error.text);
            digest_record(&digest, &each[0]);
            digest_record(&digest, &each[1]);
            digest_record(&digest, &total);
        }
        seed_random(before);
        check_digest("compare", digest, UINT64_C(0xb57d544daeaa0120));
    }
}

void test_compare(void) {
    memory m = {malloc(ROOM * 8), malloc(ROOM * 8), malloc(ROOM * 8), malloc(ROOM * 8)};
    if (m.a == NULL || m.b == NULL || m.x == NULL || m.y == NULL) {
        CHECK(0, "no memory for the test");
    } else {
        check_arguments();
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            check_lengths(&m, (tm_dtype)dtype);
            for (int other = 0; other < TM_DTYPE_COUNT; other++) {
                if (other != dtype) {
                    check_two_dtypes(&m, (tm_dtype)dtype, (tm_dtype)other);
                }
            }
        }
        check_digests(&m);
        tm_dispatch_init(NULL);
        check_ranges(&m);
        tm_dispatch_set_worker_bytes(1000);
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            check_list(&m, (tm_dtype)dtype);
        }
        tm_dispatch_set_worker_bytes((size_t)16 << 20);
    }
    free(m.a);
    free(m.b);
    free(m.x);
    free(m.y);
}
