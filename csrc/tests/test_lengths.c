/* Every dtype, tail length, alignment and position of a non-finite value, in every tier, against the scalar
 * reference: bits, not tolerances. */
#include "runner.h"

#include <math.h>
#include <stdlib.h>

static void check_array(const void *data, int64_t n, tm_dtype dtype, const char *what) {
    tm_stats expect = reference_stats(data, n, dtype);
    double norms[3];
    for (int order = 0; order < 3; order++) {
        norms[order] = reference_norm(data, n, dtype, (tm_norm_order)order);
    }
    const char *tier;
    for (int i = 0; (tier = use_tier(i)) != NULL; i++) {
        const char *name = tm_dtype_name(dtype);
        tm_view view = flat(data, n, dtype);
        tm_stats got = stats_of(view, 1);
        CHECK(same_stats(&got, &expect), "%s %s n=%lld %s: stats", tier, name, (long long)n, what);
        for (int order = 0; order < 3; order++) {
            double norm = norm_of(view, (tm_norm_order)order, 1);
            CHECK(same_double(norm, norms[order]), "%s %s n=%lld %s: norm %d is %.17g, not %.17g", tier, name,
                  (long long)n, what, order, norm, norms[order]);
        }
        tm_nonfinite found = scan_of(view, 1);
        CHECK(found.index == expect.first_bad, "%s %s n=%lld %s: scan", tier, name, (long long)n, what);
    }
}

static void check_short(tm_dtype dtype) {
    _Alignas(64) char buffer[202 * 8 + 64];
    size_t size = tm_dtype_size(dtype);
    for (int64_t n = 0; n <= 200; n++) {
        size_t offset = (size_t)(n % 9); /* aligned, element-aligned and misaligned starts */
        fill_finite(buffer + offset, n, dtype);
        check_array(buffer + offset, n, dtype, "finite");
        if (size > 1 || dtype < TM_I8) {
            for (int kind = 0; n > 0 && kind < 3; kind++) {
                if (put_nonfinite(buffer + offset, (int64_t)(next_random() % (uint64_t)n), dtype, kind)) {
                    check_array(buffer + offset, n, dtype, "non-finite");
                }
            }
        }
    }
}

/* One non-finite value at each place of a block with a tail. */
static void check_positions(tm_dtype dtype) {
    _Alignas(64) char clean[100 * 8], buffer[100 * 8];
    fill_finite(clean, 100, dtype);
    for (int64_t at = 0; at < 100; at++) {
        memcpy(buffer, clean, sizeof buffer);
        if (put_nonfinite(buffer, at, dtype, (int)(at % 3)) || put_nonfinite(buffer, at, dtype, 0)) {
            check_array(buffer, 100, dtype, "one position");
        }
    }
}

/* Blocks without a negative or without a positive element, and with zeros of one sign or both. */
static void check_signs(tm_dtype dtype) {
    _Alignas(64) char buffer[100 * 8];
    const size_t size = tm_dtype_size(dtype);
    for (int set = 0; set < 12; set++) { /* sign: none, all, as it comes; zeros: none, -0, +0, both */
        fill_finite(buffer, 100, dtype);
        for (size_t i = 0; i < 100; i++) {
            char *top = buffer + (i + 1) * size - 1; /* little-endian */
            *top = (char)(set % 3 == 0 ? *top & 0x7f : set % 3 == 1 ? *top | 0x80 : *top);
            if (set / 3 >> (i % 2) & 1) {
                memset(buffer + i * size, 0, size);
                *top = (char)(i % 2 ? 0 : 0x80);
            }
        }
        check_array(buffer, 100, dtype, "signs");
    }
}

static void check_long(tm_dtype dtype) {
    static const int64_t lengths[] = {8191, 8192, 8225, 65535, 65536, 65537, 131071, 131073, 5 * 65536 + 33};
    size_t size = tm_dtype_size(dtype);
    char *buffer = aligned_alloc(64, (5 * 65536 + 64) * size);
    if (buffer == NULL) {
        CHECK(0, "no memory for the test");
        return;
    }
    fill_finite(buffer, 5 * 65536 + 64, dtype);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        if (sampled()) {
            check_array(buffer, lengths[i], dtype, "long");
        }
    }
    memmove(buffer + 1, buffer, (65536 + 77) * size);
    check_array(buffer + 1, 65536 + 77, dtype, "long, misaligned");
    fill_finite(buffer, 5 * 65536 + 64, dtype);
    int64_t n = 3 * 65536 + 5;
    for (int kind = 0; kind < 3; kind++) {
        if (put_nonfinite(buffer, n - 1 - kind * 40000, dtype, kind) && sampled()) {
            check_array(buffer, n, dtype, "long, non-finite");
        }
    }
    free(buffer);
}

void test_lengths(void) {
    for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
        check_short((tm_dtype)dtype);
        check_positions((tm_dtype)dtype);
        if (dtype <= TM_BF16) {
            check_signs((tm_dtype)dtype);
        }
        check_long((tm_dtype)dtype);
    }
    tm_dispatch_init(NULL);
}
