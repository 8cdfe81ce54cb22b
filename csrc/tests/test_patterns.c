/* Every bit pattern of the narrow formats, alone and in company, in every tier. */
#include "runner.h"

#include <math.h>
#include <stdlib.h>

static void check_pattern(const void *element, tm_dtype dtype, unsigned pattern, const char *tier) {
    char row[64 * 2];
    size_t size = tm_dtype_size(dtype);
    double value = reference_value(element, 0, dtype);
    for (size_t i = 0; i < 64; i++) {
        memcpy(row + i * size, element, size);
    }
    tm_stats one = stats_of(flat(element, 1, dtype), 1), many = stats_of(flat(row, 64, dtype), 1);
    tm_stats expect = reference_stats(element, 1, dtype), expect_many = reference_stats(row, 64, dtype);
    CHECK(same_stats(&one, &expect), "%s %s pattern %#x", tier, tm_dtype_name(dtype), pattern);
    CHECK(same_stats(&many, &expect_many), "%s %s pattern %#x, 64 times", tier, tm_dtype_name(dtype),
          pattern);
    double expect_norm = isfinite(value) ? fabs(value) : isnan(value) ? (double)NAN : (double)INFINITY;
    CHECK(same_double(norm_of(flat(row, 64, dtype), TM_NORM_INF, 1), expect_norm), "%s %s pattern %#x", tier,
          tm_dtype_name(dtype), pattern);
    tm_nonfinite found = scan_of(flat(row, 64, dtype), 1);
    CHECK(found.tensor == (isfinite(value) ? -1 : 0), "%s %s pattern %#x", tier, tm_dtype_name(dtype),
          pattern);
    CHECK(isfinite(value) || same_double(found.value, value), "%s %s pattern %#x", tier, tm_dtype_name(dtype),
          pattern);
}

static void check_all_at_once(tm_dtype dtype, const char *tier) {
    size_t size = tm_dtype_size(dtype);
    unsigned count = size == 1 ? 256 : 65536;
    unsigned char *all = malloc(count * size);
    for (unsigned i = 0; i < count && all != NULL; i++) {
        uint16_t pattern = (uint16_t)i;
        memcpy(all + i * size, &pattern, size); /* little-endian machines only, as is decode's caller */
    }
    if (all != NULL) {
        tm_stats got = stats_of(flat(all, count, dtype), 1), expect = reference_stats(all, count, dtype);
        CHECK(same_stats(&got, &expect), "%s %s: all patterns", tier, tm_dtype_name(dtype));
    }
    free(all);
}

void test_patterns(void) {
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            size_t size = tm_dtype_size((tm_dtype)dtype);
            if (size > 2) {
                continue;
            }
            for (unsigned i = 0; i < (size == 1 ? 256U : 65536U); i++) {
                if (!sampled()) {
                    continue;
                }
                uint16_t pattern = (uint16_t)i;
                check_pattern(&pattern, (tm_dtype)dtype, i, tier_name(tier));
            }
            check_all_at_once((tm_dtype)dtype, tier_name(tier));
        }
    }
}
