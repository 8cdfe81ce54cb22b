/* The C runner's checks. A failed check prints where and what, and the run goes on. */
#ifndef RUNNER_H
#define RUNNER_H

#include "../core/tm_dispatch.h"
#include "../core/tm_reduce.h"

#include <stdio.h>
#include <string.h>

extern long checks_made, checks_failed;

#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        checks_made++;                                                                                       \
        if (!(condition) && checks_failed++ < 40) {                                                          \
            fprintf(stderr, "%s:%d: %s is false: ", __FILE__, __LINE__, #condition);                         \
            fprintf(stderr, __VA_ARGS__);                                                                    \
            fputc('\n', stderr);                                                                             \
        }                                                                                                    \
    } while (0)

/* The same bits, all NaNs being equal. */
int same_double(double a, double b);
int same_stats(const tm_stats *a, const tm_stats *b);

/* Tiers of this machine and build: tier_name(i) is NULL behind the last. */
const char *tier_name(int index);

/* Switches to a tier and returns its name. Behind the last one, the AVX-512 kernels that this machine does
 * not choose (tm_dispatch_set_halves); then NULL. */
const char *use_tier(int index);

/* Calls that must succeed. */
tm_stats stats_of(tm_view view, int threads);
double norm_of(tm_view view, tm_norm_order order, int threads);
tm_nonfinite scan_of(tm_view view, int threads);

static inline tm_view flat(const void *data, int64_t n, tm_dtype dtype) {
    return (tm_view){.data = data, .n = n, .ndim = 1, .dtype = dtype};
}

/* Pseudo-random bits, the same on every machine. */
uint64_t next_random(void);
void fill_random(void *data, size_t bytes);
/* Elements with signs, zeros and ordinary magnitudes; no non-finite ones. */
void fill_finite(void *data, int64_t n, tm_dtype dtype);
/* One of the dtype's non-finite values, `kind` 0 NaN, 1 +inf, 2 -inf; returns 0 if it has none. */
int put_nonfinite(void *data, int64_t index, tm_dtype dtype, int kind);

/* 1, or with TM_TEST_SAMPLE=n in one call of n: for long lists of cases where instructions are slow
 * (emulated, valgrind). Never within a digest. */
int sampled(void);

/* Straightforward scalar definitions, one element at a time. */
double reference_byte(unsigned char code, tm_dtype dtype);
double reference_value(const void *data, int64_t index, tm_dtype dtype);
tm_stats reference_stats(const void *data, int64_t n, tm_dtype dtype);
double reference_norm(const void *data, int64_t n, tm_dtype dtype, tm_norm_order order);

/* One line a test file: void test_<name>(void) in test_<name>.c. */
#define TM_TESTS(X)                                                                                          \
    X(cpu)                                                                                                   \
    X(dtype)                                                                                                 \
    X(bits)                                                                                                  \
    X(patterns)                                                                                              \
    X(lengths)                                                                                               \
    X(layout)                                                                                                \
    X(widen)                                                                                                 \
    X(fingerprint)                                                                                           \
    X(stage)                                                                                                 \
    X(rescue)                                                                                                \
    X(merge)                                                                                                 \
    X(loss)                                                                                                  \
    X(rows_text)                                                                                             \
    X(compare)                                                                                               \
    X(diff)                                                                                                  \
    X(attention)                                                                                             \
    X(blas)                                                                                                  \
    X(histogram)                                                                                             \
    X(detect)                                                                                                \
    X(moe)                                                                                                   \
    X(sign)                                                                                                  \
    X(spectral)                                                                                              \
    X(threads)

#define TM_DECLARE_TEST(name) void test_##name(void);
TM_TESTS(TM_DECLARE_TEST)
#undef TM_DECLARE_TEST

#endif
