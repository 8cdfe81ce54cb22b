/* diff_norm against a scalar reference, bit by bit, in every tier; what it writes and what it refuses. */
#include "digest.h"
#include "runner.h"

#include "../core/tm_diff.h"
#include "../core/tm_memory.h"

#include <math.h>
#include <stdlib.h>

enum { ROOM = 3 * 65536 + 64 };

typedef struct sums {
    double diff, weight;
} sums;

static double lanes_total(double *lane) {
    for (int width = 16; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) {
            lane[l] += lane[l + width];
        }
    }
    return lane[0];
}

/* volatile: the product is rounded before it is added, whatever the compiler would like. */
static double add_square(double sum, double x) {
    volatile double square = x * x;
    return sum + square;
}

static sums reference_chunks(const void *now, const void *before, int64_t n, int64_t first, int64_t chunks,
                             tm_dtype dtype) {
    if (chunks > 1) {
        int64_t left = 1;
        while (left * 2 < chunks) {
            left *= 2;
        }
        sums a = reference_chunks(now, before, n, first, left, dtype);
        sums b = reference_chunks(now, before, n, first + left, chunks - left, dtype);
        return (sums){a.diff + b.diff, a.weight + b.weight};
    }
    double diff[32] = {0}, weight[32] = {0};
    for (int64_t i = first * TM_CHUNK; i < n && i < (first + chunks) * TM_CHUNK; i++) {
        double x = reference_value(now, i, dtype), y = reference_value(before, i, dtype);
        diff[i % 32] = add_square(diff[i % 32], x - y);
        weight[i % 32] = add_square(weight[i % 32], y);
    }
    return (sums){lanes_total(diff), lanes_total(weight)};
}

static tm_difference reference(const void *now, const void *before, int64_t n, tm_dtype dtype) {
    tm_difference d = {.n = n};
    size_t size = tm_dtype_size(dtype);
    sums s = reference_chunks(now, before, n, 0, (n + TM_CHUNK - 1) / TM_CHUNK, dtype);
    d.norm = sqrt(s.diff);
    d.previous_norm = sqrt(s.weight);
    for (int64_t i = 0; i < n; i++) {
        size_t at = (size_t)i * size;
        d.n_same += memcmp((const char *)now + at, (const char *)before + at, size) == 0;
        d.n_nonfinite += !isfinite(reference_value(now, i, dtype) - reference_value(before, i, dtype));
    }
    return d;
}

static int same_difference(const tm_difference *a, const tm_difference *b) {
    return same_double(a->norm, b->norm) && same_double(a->previous_norm, b->previous_norm) && a->n == b->n &&
           a->n_same == b->n_same && a->n_nonfinite == b->n_nonfinite;
}

typedef struct memory {
    char *now, *before, *kept;
} memory;

/* Every fourth element of `before` is that of `now`. */
static void fill(const memory *m, int64_t n, tm_dtype dtype) {
    size_t size = tm_dtype_size(dtype);
    fill_finite(m->now, n, dtype);
    fill_finite(m->before, n, dtype);
    for (size_t i = 0; i < (size_t)n; i += 4) {
        memcpy(m->before + i * size, m->now + i * size, size);
    }
}

static void check(const memory *m, int64_t n, tm_dtype dtype, const char *what) {
    size_t bytes = (size_t)n * tm_dtype_size(dtype);
    tm_view now = flat(m->now, n, dtype), before = flat(m->before, n, dtype);
    tm_difference expect = reference(m->now, m->before, n, dtype), got, each;
    tm_error error = {""};
    memcpy(m->kept, m->before, bytes);
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        for (int update = 0; update < 2; update++) {
            tm_status status = tm_diff_norm(&now, &before, 1, update, 1, &got, &each, &error);
            CHECK(status == TM_OK, "%s", error.text);
            CHECK(same_difference(&got, &expect) && same_difference(&each, &expect),
                  "%s %s n=%lld %s: %.17g, not %.17g", tier_name(tier), tm_dtype_name(dtype), (long long)n,
                  what, got.norm, expect.norm);
            CHECK(memcmp(m->before, update ? m->now : m->kept, bytes) == 0, "%s: wrong bytes", what);
        }
        memcpy(m->before, m->kept, bytes);
    }
}

static void check_lengths(const memory *m, tm_dtype dtype) {
    static const int64_t lengths[] = {
        0, 1, 31, 32, 33, 63, 64, 1023, 1024, 65535, 65536, 65537, 3 * 65536 + 33};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (lengths[i] > 1024 && !sampled()) {
            continue;
        }
        fill(m, lengths[i], dtype);
        check(m, lengths[i], dtype, "finite");
        for (int kind = 0; kind < 3 && lengths[i] > 0; kind++) {
            int64_t at = (int64_t)(next_random() % (uint64_t)lengths[i]);
            if (put_nonfinite(m->now, at, dtype, kind)) {
                check(m, lengths[i], dtype, "non-finite now");
                put_nonfinite(m->before, (at + 7) % lengths[i], dtype, kind);
                check(m, lengths[i], dtype, "non-finite both");
            }
        }
    }
}

/* Elements before the first line of both arrays, with what isn't finite among them or after the last whole
 * row; what lies around the previous stays. */
static void check_lines(const memory *m, tm_dtype dtype) {
    size_t size = tm_dtype_size(dtype);
    for (size_t over = 64; over < 128; over += over < 64 + 4 * size ? size : 5 * size) {
        for (size_t apart = 0; apart <= size; apart += size) {
            memory shifted = {m->now + over, m->before + over + apart, m->kept};
            int64_t n = 2048 + (int64_t)(next_random() % 700);
            char *behind = shifted.before + (size_t)n * size, *front = shifted.before - 1;
            *front = *behind = 'g';
            fill(&shifted, n, dtype);
            check(&shifted, n, dtype, "lines");
            if (put_nonfinite(shifted.now, n - 1, dtype, (int)(over / size) % 3)) {
                check(&shifted, n, dtype, "lines, last");
                put_nonfinite(shifted.before, 0, dtype, 0);
                check(&shifted, n, dtype, "lines, first");
            }
            CHECK(*front == 'g' && *behind == 'g', "%s: written around", tm_dtype_name(dtype));
        }
    }
}

/* The tensor reversed, the previous every second element of its memory. */
static void check_strides(const memory *m, tm_dtype dtype) {
    int64_t n = 70000, size = (int64_t)tm_dtype_size(dtype), back = -size, apart = 2 * size + 1;
    tm_view now = {m->now + (n - 1) * size, &n, &back, n, 1, dtype};
    tm_view before = {m->before, &n, &apart, n, 1, dtype};
    char *a = malloc((size_t)(n * size)), *b = malloc((size_t)(n * size));
    tm_error error = {""};
    tm_difference got;
    fill_random(m->before, (size_t)(n * apart));
    fill_random(m->now, (size_t)(n * size));
    memcpy(m->kept, m->before, (size_t)(n * apart));
    for (int64_t i = 0; a != NULL && b != NULL && i < n; i++) {
        memcpy(a + i * size, m->now + (n - 1 - i) * size, (size_t)size);
        memcpy(b + i * size, m->before + i * apart, (size_t)size);
        memcpy(m->kept + i * apart, a + i * size, (size_t)size);
    }
    if (a != NULL && b != NULL && dtype != TM_F64) { /* random float64 bits need the rescue */
        tm_difference expect = reference(a, b, n, dtype);
        CHECK(tm_diff_norm(&now, &before, 1, 0, 1, &got, NULL, &error) == TM_OK, "%s", error.text);
        CHECK(same_difference(&got, &expect), "%s strided", tm_dtype_name(dtype));
    }
    CHECK(tm_diff_norm(&now, &before, 1, 1, 1, &got, NULL, &error) == TM_OK, "%s", error.text);
    CHECK(memcmp(m->before, m->kept, (size_t)(n * apart)) == 0, "%s: strided store", tm_dtype_name(dtype));
    free(a);
    free(b);
}

static void check_rescue(const memory *m) {
    static const double scales[] = {1e-300, 5e-324, 1e-160, 1e155, 1e300};
    double *now = (double *)(void *)m->now, *before = (double *)(void *)m->before;
    tm_view views[] = {flat(now, 65536 + 9, TM_F64), flat(before, 65536 + 9, TM_F64)};
    tm_error error = {""};
    tm_difference got;
    for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
        for (int update = 0; update < 2; update++) {
            for (int i = 0; i < 65536 + 9; i++) {
                now[i] = i % 2 ? 4 * scales[s] : -scales[s];
                before[i] = i % 2 ? scales[s] : 2 * scales[s];
            }
            double root = sqrt(65536 + 9.0), small = sqrt(32768 + 4.0 + 4 * (32768 + 5.0));
            CHECK(tm_diff_norm(&views[0], &views[1], 1, update, 1, &got, NULL, &error) == TM_OK, "%s",
                  error.text);
            double bound = scales[s] < 1e-300 ? 1e-2 : 1e-12; /* the norm may be subnormal too */
            CHECK(fabs(got.norm / scales[s] - 3 * root) <= bound * root, "%g: %g", scales[s], got.norm);
            CHECK(fabs(got.previous_norm / scales[s] - small) <= bound * small, "%g: %g", scales[s],
                  got.previous_norm);
            CHECK(got.n_nonfinite == 0, "%g: %lld", scales[s], (long long)got.n_nonfinite);
        }
    }
}

static int allocations_left;

static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

enum { TENSORS = 5 };
static const int64_t lengths[TENSORS] = {0, 5, 65536 * 2 + 4, 1, 65000};

/* Threads and failing allocations change no bit, or nothing is written at all. */
static void check_list(const memory *m, tm_dtype dtype) {
    tm_view now[TENSORS], before[TENSORS];
    tm_difference one, each[TENSORS], many, many_each[TENSORS];
    tm_error error = {""};
    int64_t total = 0, size = (int64_t)tm_dtype_size(dtype);
    for (int i = 0; i < TENSORS; i++) {
        now[i] = flat(m->now + total * size, lengths[i], dtype);
        before[i] = flat(m->before + total * size, lengths[i], dtype);
        total += lengths[i];
    }
    size_t bytes = (size_t)(total * size);
    fill(m, total, dtype);
    memcpy(m->kept, m->before, bytes);
    CHECK(tm_diff_norm(now, before, TENSORS, 0, 1, &one, each, &error) == TM_OK, "%s", error.text);
    for (int threads = 1; threads <= 7; threads += 2) {
        for (int left = 0; left < 4; left++) {
            allocations_left = left;
            tm_memory_set_allocator(failing);
            tm_status status = tm_diff_norm(now, before, TENSORS, 1, threads, &many, many_each, &error);
            tm_memory_set_allocator(NULL);
            CHECK(status == (left == 0 ? TM_ERR_MEMORY : TM_OK), "%d allocations: %s", left, error.text);
            CHECK(memcmp(m->before, left == 0 ? m->kept : m->now, bytes) == 0, "%d allocations", left);
            for (int i = 0; left > 0 && i < TENSORS; i++) {
                CHECK(same_difference(&each[i], &many_each[i]), "%s: tensor %d", tm_dtype_name(dtype), i);
            }
            CHECK(left == 0 || same_difference(&one, &many), "%s: %d threads", tm_dtype_name(dtype), threads);
            memcpy(m->before, m->kept, bytes);
        }
    }
}

static void digest_difference(uint64_t *digest, const tm_difference *d) {
    digest_doubles(digest, (double[]){d->norm, d->previous_norm}, 2);
    digest_integers(digest, (int64_t[]){d->n, d->n_same, d->n_nonfinite}, 3);
}

/* The same on every machine: ordinary elements, then any bits, the previous one element behind. */
static void check_bits(const memory *m) {
    enum { N = 2 * 65536 + 77 };
    uint64_t digest = DIGEST_START, before = seed_random(11);
    tm_difference total, each[2];
    tm_error error = {""};
    for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
        size_t size = tm_dtype_size((tm_dtype)dtype);
        for (int random = 0; random < 2; random++) {
            fill(m, N, (tm_dtype)dtype);
            if (random) {
                fill_random(m->now, N * size);
                memcpy(m->before, m->now + size, (N - 1) * size);
            }
            tm_view now[] = {flat(m->now, N, (tm_dtype)dtype),
                             flat(m->now + 7 * size, 1000, (tm_dtype)dtype)};
            tm_view previous[] = {flat(m->before, N, (tm_dtype)dtype),
                                  flat(m->before + 8 * size, 1000, (tm_dtype)dtype)};
            CHECK(tm_diff_norm(now, previous, 2, 0, 2, &total, each, &error) == TM_OK, "%s", error.text);
            digest_difference(&digest, &total);
            digest_difference(&digest, &each[0]);
            digest_difference(&digest, &each[1]);
        }
    }
    seed_random(before);
    check_digest("diff_norm", digest, UINT64_C(0xd95be91ac43bb537));
}

static void refused(tm_view now, tm_view before, tm_status wanted, const char *what) {
    tm_view views[] = {flat(NULL, 0, before.dtype), now}, previous[] = {flat(NULL, 0, before.dtype), before};
    tm_error error = {""};
    tm_difference got = {.n = -1};
    views[0].dtype = previous[0].dtype = TM_F32;
    CHECK(tm_diff_norm(views, previous, 2, 1, 1, &got, NULL, &error) == wanted, "%s", what);
    CHECK(strstr(error.text, "previous[1]") != NULL && got.n == -1, "%s: %s", what, error.text);
}

static void check_arguments(void) {
    float x[8] = {1, 2, 3, 4, 5, 6, 7, 8}, y[8] = {0};
    int64_t four = 4, two = 8, back = -4;
    tm_error error = {""};
    tm_difference got;
    refused(flat(x, 4, TM_F32), flat(y, 3, TM_F32), TM_ERR_VALUE, "lengths");
    refused(flat(x, 4, TM_F32), flat(y, 4, TM_I32), TM_ERR_DTYPE, "dtypes");
    refused(flat(x, 4, TM_F32), flat(x + 3, 4, TM_F32), TM_ERR_VALUE, "overlap");
    refused((tm_view){x + 3, &four, &back, 4, 1, TM_F32}, flat(x, 4, TM_F32), TM_ERR_VALUE, "reversed");
    refused((tm_view){x, &four, &two, 4, 1, TM_F32}, flat(x, 4, TM_F32), TM_ERR_VALUE, "every second");
    tm_view now = flat(x, 4, TM_F32), before = flat(x + 4, 4, TM_F32);
    CHECK(tm_diff_norm(&now, &before, 1, 1, 0, &got, NULL, &error) == TM_ERR_VALUE, "no threads");
    CHECK(x[4] == 5, "nothing is written");
    CHECK(tm_diff_norm(&now, &before, 1, 1, 1, &got, NULL, &error) == TM_OK && got.norm == 8, "neighbours");
    CHECK(tm_diff_norm(&now, &now, 1, 1, 1, &got, NULL, &error) == TM_OK && got.n_same == 4, "itself");
    CHECK(tm_diff_norm(NULL, NULL, 0, 1, 1, &got, NULL, &error) == TM_OK && got.n == 0, "nothing");
}

void test_diff(void) {
    memory m = {malloc(ROOM * 8), malloc(ROOM * 8), malloc(ROOM * 8)};
    if (m.now == NULL || m.before == NULL || m.kept == NULL) {
        CHECK(0, "no memory for the test");
    } else {
        check_arguments();
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            check_lengths(&m, (tm_dtype)dtype);
            check_lines(&m, (tm_dtype)dtype);
            check_strides(&m, (tm_dtype)dtype);
        }
        check_rescue(&m);
        tm_dispatch_set_worker_bytes(1000);
        for (int tier = 0; tier_name(tier) != NULL; tier++) {
            tm_dispatch_init(tier_name(tier));
            check_bits(&m);
        }
        tm_dispatch_init(NULL);
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            check_list(&m, (tm_dtype)dtype);
        }
        tm_dispatch_set_worker_bytes((size_t)16 << 20);
    }
    free(m.now);
    free(m.before);
    free(m.kept);
}
