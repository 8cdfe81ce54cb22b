/* sign_agreement against a scalar reference: every dtype beside every other, in every tier. */
#include "digest.h"
#include "runner.h"

#include "../core/tm_memory.h"
#include "../core/tm_sign.h"

#include <stdlib.h>

enum { ROOM = 3 * 65536 + 64 };

static int sign_at(const void *data, int64_t i, tm_dtype dtype) {
    double x = reference_value(data, i, dtype);
    return (x > 0) - (x < 0);
}

static tm_sign_counts reference(const void *a, tm_dtype a_dtype, const void *b, tm_dtype b_dtype, int64_t n) {
    tm_sign_counts counts = {0, 0};
    for (int64_t i = 0; i < n; i++) {
        int product = sign_at(a, i, a_dtype) * sign_at(b, i, b_dtype);
        counts.same += product > 0;
        counts.opposite += product < 0;
    }
    return counts;
}

static int same_counts(const tm_sign_counts *a, const tm_sign_counts *b) {
    return a->same == b->same && a->opposite == b->opposite;
}

static void check(const char *a, tm_dtype a_dtype, const char *b, tm_dtype b_dtype, int64_t n) {
    tm_view x = flat(a, n, a_dtype), y = flat(b, n, b_dtype);
    tm_sign_counts expect = reference(a, a_dtype, b, b_dtype, n), got;
    tm_error error = {""};
    int64_t seen = -1;
    for (int tier = 0; use_tier(tier) != NULL; tier++) {
        CHECK(tm_sign_agreement(&x, &y, 1, 1, &seen, &got, &error) == TM_OK, "%s", error.text);
        CHECK(seen == n && same_counts(&got, &expect), "tier %d, %s and %s, n=%lld: %lld %lld, not %lld %lld",
              tier, tm_dtype_name(a_dtype), tm_dtype_name(b_dtype), (long long)n, (long long)got.same,
              (long long)got.opposite, (long long)expect.same, (long long)expect.opposite);
    }
    tm_dispatch_init(NULL);
}

static void check_lengths(char *a, char *b, tm_dtype dtype) {
    static const int64_t lengths[] = {0, 1, 31, 63, 64, 65, 1023, 1024, 1025, 65535, 65537, 2 * 65536 + 33};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (lengths[i] > 1025 && !sampled()) {
            continue;
        }
        size_t bytes = (size_t)lengths[i] * tm_dtype_size(dtype);
        fill_finite(a, lengths[i], dtype);
        fill_random(b, bytes);
        check(a, dtype, b, dtype, lengths[i]);
        for (int kind = 0; kind < 3 && lengths[i] > 0; kind++) {
            put_nonfinite(a, (int64_t)(next_random() % (uint64_t)lengths[i]), dtype, kind);
        }
        check(a, dtype, a, dtype, lengths[i]);
    }
}

static void check_pairs(char *a, char *b) {
    for (int left = 0; left < TM_DTYPE_COUNT; left++) {
        for (int right = 0; right < TM_DTYPE_COUNT; right++) {
            fill_random(a, 700 * 8);
            fill_random(b, 700 * 8);
            check(a, (tm_dtype)left, b, (tm_dtype)right, 700);
        }
    }
}

/* One list backwards, the other every second element from an odd address. */
static void check_strides(char *a, char *b, tm_dtype dtype) {
    const int64_t size = (int64_t)tm_dtype_size(dtype);
    int64_t n = 5000, back = -size, apart = 2 * size + 1;
    tm_view x = {a + (n - 1) * size, &n, &back, n, 1, dtype}, y = {b, &n, &apart, n, 1, dtype};
    char *flat_a = malloc((size_t)(n * size)), *flat_b = malloc((size_t)(n * size));
    tm_error error = {""};
    tm_sign_counts got;
    int64_t seen;
    fill_random(a, (size_t)(n * size));
    fill_random(b, (size_t)(n * apart));
    if (flat_a != NULL && flat_b != NULL) {
        for (int64_t i = 0; i < n; i++) {
            memcpy(flat_a + i * size, a + (n - 1 - i) * size, (size_t)size);
            memcpy(flat_b + i * size, b + i * apart, (size_t)size);
        }
        tm_sign_counts expect = reference(flat_a, dtype, flat_b, dtype, n);
        CHECK(tm_sign_agreement(&x, &y, 1, 1, &seen, &got, &error) == TM_OK, "%s", error.text);
        CHECK(same_counts(&got, &expect), "%s strided", tm_dtype_name(dtype));
    }
    free(flat_a);
    free(flat_b);
}

static int allocations_left;

static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

enum { TENSORS = 5 };
static const int64_t lengths[TENSORS] = {0, 5, 65536 * 2 + 4, 1, 65000};

/* Threads and failing allocations change no count. */
static void check_list(const char *a, const char *b, tm_dtype dtype) {
    tm_view x[TENSORS], y[TENSORS];
    tm_sign_counts one, many;
    tm_error error = {""};
    int64_t total = 0, seen, size = (int64_t)tm_dtype_size(dtype);
    for (int i = 0; i < TENSORS; i++) {
        x[i] = flat(a + total * size, lengths[i], dtype);
        y[i] = flat(b + total * size, lengths[i], dtype);
        total += lengths[i];
    }
    CHECK(tm_sign_agreement(x, y, TENSORS, 1, &seen, &one, &error) == TM_OK && seen == total, "%s",
          error.text);
    for (int threads = 1; threads <= 7; threads += 2) {
        for (int left = 0; left < 4; left++) {
            allocations_left = left;
            tm_memory_set_allocator(failing);
            CHECK(tm_sign_agreement(x, y, TENSORS, threads, &seen, &many, &error) == TM_OK, "%s", error.text);
            tm_memory_set_allocator(NULL);
            CHECK(seen == total && same_counts(&one, &many), "%d threads, %d allocations", threads, left);
        }
    }
}

/* The same on every machine: any bits beside ordinary elements. */
static void check_bits(char *a, char *b) {
    enum { N = 65536 + 77 };
    uint64_t digest = DIGEST_START, before = seed_random(23);
    tm_error error = {""};
    for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
        const tm_dtype other = (tm_dtype)((dtype + 1) % TM_DTYPE_COUNT);
        fill_random(a, N * tm_dtype_size((tm_dtype)dtype));
        fill_finite(b, N, other);
        tm_view x = flat(a, N, (tm_dtype)dtype), y = flat(b, N, other);
        tm_sign_counts counts;
        int64_t n;
        CHECK(tm_sign_agreement(&x, &y, 1, 2, &n, &counts, &error) == TM_OK, "%s", error.text);
        digest_integers(&digest, (int64_t[]){n, counts.same, counts.opposite}, 3);
    }
    seed_random(before);
    check_digest("sign_agreement", digest, UINT64_C(0xbadb43849de1d929));
}

static void check_arguments(void) {
    float x[4] = {1, -2, 0, 4};
    tm_view a[] = {flat(x, 4, TM_F32), flat(x, 4, TM_F32)}, b[] = {flat(x, 4, TM_F32), flat(x, 3, TM_F32)};
    tm_error error = {""};
    tm_sign_counts got = {-1, -1};
    int64_t n = -1;
    CHECK(tm_sign_agreement(a, b, 2, 1, &n, &got, &error) == TM_ERR_VALUE, "lengths");
    CHECK(strstr(error.text, "b[1]") != NULL && n == -1 && got.same == -1, "%s", error.text);
    CHECK(tm_sign_agreement(a, b, 1, 0, &n, &got, &error) == TM_ERR_VALUE, "no threads");
    CHECK(tm_sign_agreement(a, b, 1, 1, &n, &got, &error) == TM_OK && n == 4 && got.same == 3, "itself");
    CHECK(tm_sign_agreement(NULL, NULL, 0, 1, &n, &got, &error) == TM_OK && n == 0 && got.same == 0,
          "nothing");
}

void test_sign(void) {
    char *a = malloc(ROOM * 8), *b = malloc(ROOM * 8);
    if (a == NULL || b == NULL) {
        CHECK(0, "no memory for the test");
    } else {
        check_arguments();
        check_pairs(a, b);
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            check_lengths(a, b, (tm_dtype)dtype);
            check_strides(a, b, (tm_dtype)dtype);
        }
        tm_dispatch_set_worker_bytes(1000);
        for (int tier = 0; use_tier(tier) != NULL; tier++) {
            check_bits(a, b);
        }
        tm_dispatch_init(NULL);
        check_list(a, b, TM_F32);
        check_list(a, b, TM_BF16);
        tm_dispatch_set_worker_bytes((size_t)16 << 20);
    }
    free(a);
    free(b);
}
