/* Every bit pattern of the narrow formats, alone and in company, in every tier; and classified right in every
 * lane of every kernel and in every place of tails of every length. */
#include "runner.h"

#include "../core/tm_histogram.h"
#include "../core/tm_table.h"

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

/* ---- in every place ----
 *
 * Patterns of one class side by side: each can add at most one to the count of its class, so that a count
 * equal to the number of elements proves all of them. Windows of every length up to LONGEST, started at every
 * pattern, put each pattern in every lane of a row and in every place of every tail. */

enum {
    LONGEST = 64, /* a row of the histogram, two rows of the statistics */
    CLASS_NAN = 512,
    CLASS_POSINF,
    CLASS_NEGINF,
    CLASS_ZERO,
    CLASSES
};

/* The bin, and whether the value is subnormal in its dtype, for finite values other than zero. */
static int class_of(double value, tm_dtype dtype) {
    int exponent;
    if (isnan(value)) {
        return CLASS_NAN;
    }
    if (isinf(value)) {
        return value > 0 ? CLASS_POSINF : CLASS_NEGINF;
    }
    if (value == 0) {
        return CLASS_ZERO;
    }
    frexp(value, &exponent);
    const int bin = exponent + 126 < 0 ? 0 : exponent + 126;
    return 2 * bin + (dtype == TM_F16 ? bin < 113 : bin < 1);
}

static int counts_of_class(const tm_stats_state *got, int kind, int64_t n) {
    return got->n_nan == (kind == CLASS_NAN ? n : 0) && got->n_posinf == (kind == CLASS_POSINF ? n : 0) &&
           got->n_neginf == (kind == CLASS_NEGINF ? n : 0) && got->n_zero == (kind == CLASS_ZERO ? n : 0) &&
           got->first_bad == (kind >= CLASS_NAN && kind <= CLASS_NEGINF ? 0 : -1);
}

/* Counts pile up over the windows; nothing may be outside the class. */
static int is_exponent_class(const tm_exponent_counts *got, int kind, int64_t n) {
    tm_exponent_counts expect = {.nan = kind == CLASS_NAN ? n : 0,
                                 .inf = kind == CLASS_POSINF || kind == CLASS_NEGINF ? n : 0,
                                 .zero = kind == CLASS_ZERO ? n : 0};
    if (kind < CLASS_NAN) {
        expect.bin[kind / 2] = n;
        expect.subnormal = kind % 2 ? n : 0;
    }
    return memcmp(got, &expect, sizeof expect) == 0;
}

/* `patterns`: the class's, repeated until there are LONGEST more than it has. */
static void check_class(const uint16_t *patterns, int64_t count, int kind, tm_dtype dtype, const char *tier) {
    const tm_table *table = tm_table_get();
    tm_exponent_counts exponents = {.zero = 0};
    int64_t seen = 0, wrong_stats = 0, wrong_scans = 0;
    for (int64_t start = 0; start < count; start++) {
        for (int64_t n = 1; n <= LONGEST; n++) {
            if (!sampled()) {
                continue;
            }
            _Alignas(64) uint16_t block[LONGEST];
            memcpy(block, patterns + start, (size_t)n * sizeof *block);
            tm_stats_state state;
            memset(&state, 0, offsetof(tm_stats_state, bytes));
            state.min = INFINITY;
            state.max = -INFINITY;
            state.first_bad = -1;
            table->stats->block[dtype](&state, block, (size_t)n);
            wrong_stats += !counts_of_class(&state, kind, n);
            table->histogram->exponents[dtype](&exponents, block, (size_t)n);
            seen += n;
            size_t bad = kind >= CLASS_NAN && kind <= CLASS_NEGINF ? 0 : (size_t)n;
            wrong_scans += table->scan->find[dtype](block, (size_t)n) != bad;
        }
    }
    CHECK(wrong_stats == 0, "%s %s kind %d: stats of %lld windows", tier, tm_dtype_name(dtype), kind,
          (long long)wrong_stats);
    CHECK(wrong_scans == 0, "%s %s kind %d: scans of %lld windows", tier, tm_dtype_name(dtype), kind,
          (long long)wrong_scans);
    CHECK(is_exponent_class(&exponents, kind, seen), "%s %s kind %d: exponents", tier, tm_dtype_name(dtype),
          kind);
}

static void check_every_place(tm_dtype dtype, const char *tier) {
    uint16_t *patterns = malloc((65536 + LONGEST) * sizeof *patterns);
    int *kinds = malloc(65536 * sizeof *kinds);
    for (unsigned i = 0; i < 65536 && kinds != NULL; i++) {
        uint16_t pattern = (uint16_t)i;
        kinds[i] = class_of(reference_value(&pattern, 0, dtype), dtype);
    }
    for (int kind = 0; kind < CLASSES && patterns != NULL && kinds != NULL; kind++) {
        int64_t count = 0;
        for (unsigned i = 0; i < 65536; i++) {
            if (kinds[i] == kind) {
                patterns[count++] = (uint16_t)i;
            }
        }
        for (int64_t i = 0; i < LONGEST && count > 0; i++) {
            patterns[count + i] = patterns[i % count];
        }
        check_class(patterns, count, kind, dtype, tier);
    }
    CHECK(patterns != NULL && kinds != NULL, "no memory for the test");
    free(kinds);
    free(patterns);
}

/* One bad element among good ones, in every place of arrays up to `longest`: found there, counted once. */
static void check_found(tm_dtype dtype, int64_t longest, const char *tier) {
    const tm_table *table = tm_table_get();
    const size_t size = tm_dtype_size(dtype);
    _Alignas(64) char block[1200 * 2];
    uint16_t one = 0;
    while (reference_value(&one, 0, dtype) != 1) {
        one++;
    }
    for (int64_t i = 0; i < longest; i++) {
        memcpy(block + (size_t)i * size, &one, size);
    }
    for (unsigned i = 0; i < (size == 1 ? 256U : 65536U); i++) {
        uint16_t pattern = (uint16_t)i;
        int64_t wrong = 0;
        if (isfinite(reference_value(&pattern, 0, dtype))) {
            continue;
        }
        for (int64_t at = 0; at < longest; at++) {
            if (!sampled()) {
                continue;
            }
            memcpy(block + (size_t)at * size, &pattern, size);
            wrong += table->scan->find[dtype](block, (size_t)longest) != (size_t)at;
            for (int64_t n = at + 1; n <= longest && n <= at + 32; n++) {
                wrong += table->scan->find[dtype](block, (size_t)n) != (size_t)at;
            }
            memcpy(block + (size_t)at * size, &one, size);
        }
        CHECK(wrong == 0, "%s %s pattern %#x: %lld places", tier, tm_dtype_name(dtype), i, (long long)wrong);
    }
}

/* One-byte dtypes are counted by code: every code in every place of every length up to a row. */
static void check_bytes(const char *tier) {
    unsigned char block[LONGEST];
    for (int code = 0; code < 256; code++) {
        int64_t times[256] = {0}, seen = 0, others = 0;
        for (int64_t n = 1; n <= LONGEST; n++) {
            memset(block, code ^ 0x5a, sizeof block);
            for (int64_t at = 0; at < n; at++) {
                block[at] = (unsigned char)code;
                tm_table_get()->histogram->bytes(times, block, (size_t)n);
                seen += 1 + at;
                others += n - 1 - at;
            }
        }
        CHECK(times[code] == seen && times[code ^ 0x5a] == others, "%s code %#x", tier, (unsigned)code);
    }
}

/* The least normal number: the exponent field 1. */
static double float8_least(tm_dtype dtype) {
    return ldexp(1, dtype == TM_F8E4M3FNUZ      ? -7
                    : dtype == TM_F8E4M3B11FNUZ ? -10
                    : dtype == TM_F8E5M2        ? -14
                    : dtype == TM_F8E5M2FNUZ    ? -15
                    : dtype == TM_F8E3M4        ? -2
                                                : -6);
}

/* A code among ones, in every place of every length: only its own place on the axis may change. */
static void check_code_exponent(unsigned char code, tm_dtype dtype, const char *tier) {
    const tm_table *table = tm_table_get();
    const double value = reference_byte(code, dtype);
    tm_exponent_counts got = {.zero = 0}, expect = {.zero = 0};
    unsigned char one = 0, block[LONGEST];
    int64_t times = 0;
    while (reference_byte(one, dtype) != 1) {
        one++;
    }
    memset(block, one, sizeof block);
    for (int64_t n = 1; n <= LONGEST; n++) {
        for (int64_t at = 0; at < n; at++, times++) {
            block[at] = code;
            table->histogram->exponents[dtype](&got, block, (size_t)n);
            block[at] = one;
            expect.bin[127] += n - 1;
        }
    }
    expect.nan = isnan(value) ? times : 0;
    expect.inf = isinf(value) ? times : 0;
    expect.zero = value == 0 ? times : 0;
    if (isfinite(value) && value != 0) {
        expect.bin[ilogb(value) + 127] += times;
        expect.subnormal = fabs(value) < float8_least(dtype) ? times : 0;
    }
    CHECK(memcmp(&got, &expect, sizeof got) == 0, "%s %s code %#x: exponents", tier, tm_dtype_name(dtype),
          (unsigned)code);
}

/* What the codes of a float8 dtype count as. */
static void check_codes(tm_dtype dtype, const char *tier) {
    unsigned char block[LONGEST];
    for (int code = 0; code < 256; code++) {
        const double value = reference_byte((unsigned char)code, dtype);
        memset(block, code, sizeof block);
        if (tm_table_get()->histogram->exponents[dtype] != NULL) {
            check_code_exponent((unsigned char)code, dtype, tier);
        }
        for (int64_t n = 1; n <= LONGEST; n++) {
            const tm_stats got = stats_of(flat(block, n, dtype), 1);
            CHECK(got.n_nan == (isnan(value) ? n : 0) && got.n_zero == (value == 0 ? n : 0) &&
                      got.n_posinf == (isinf(value) && value > 0 ? n : 0) &&
                      got.n_neginf == (isinf(value) && value < 0 ? n : 0) &&
                      got.first_bad == (isfinite(value) ? -1 : 0),
                  "%s %s code %#x", tier, tm_dtype_name(dtype), (unsigned)code);
        }
    }
}

void test_patterns(void) {
    const char *name;
    for (int tier = 0; (name = use_tier(tier)) != NULL; tier++) {
        check_bytes(name);
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
                check_pattern(&pattern, (tm_dtype)dtype, i, name);
            }
            check_all_at_once((tm_dtype)dtype, name);
            if (dtype == TM_F16 || dtype == TM_BF16) {
                check_every_place((tm_dtype)dtype, name);
                check_found((tm_dtype)dtype, 2 * LONGEST, name);
            } else if (dtype < TM_I8) {
                check_codes((tm_dtype)dtype, name);
                check_found((tm_dtype)dtype, 1024 + LONGEST, name);
            }
        }
    }
    tm_dispatch_init(NULL);
}
