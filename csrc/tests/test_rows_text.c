/* Decimals against printf and strtod; rows of text, each allocation failed. */
#include "../core/tm_decimal.h"
#include "../core/tm_memory.h"
#include "../core/tm_rows_text.h"
#include "digest.h"
#include "runner.h"

#include <math.h>
#include <stdlib.h>

static uint64_t seed = 1, digest = DIGEST_START;

static uint64_t next_bits(void) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (seed ^ seed >> 31) * UINT64_C(0x9e3779b97f4a7c15);
}

/* The digits of a number without sign, point, exponent and zeros at both ends; returns how many. */
static int digits_of(const char *text, char *digits) {
    int count = 0, kept = 0;
    for (; *text != '\0' && *text != 'e'; text++) {
        if (*text >= '0' && *text <= '9' && (count > 0 || *text != '0')) {
            digits[count++] = *text;
            kept = *text != '0' ? count : kept;
        }
    }
    digits[kept] = '\0';
    return kept;
}

/* It reads back, nothing shorter does, and of its length it is the closest. */
static void check_decimal(double value, int is_float) {
    char ours[TM_DECIMAL_MOST + 1], other[64];
    char *end = is_float ? tm_decimal_f32(ours, (float)value) : tm_decimal_f64(ours, value);
    CHECK(end - ours <= TM_DECIMAL_MOST, "%g takes %d characters", value, (int)(end - ours));
    *end = '\0';
    digest_bytes(&digest, ours, (size_t)(end - ours));
    const double back = is_float ? (double)strtof(ours, NULL) : strtod(ours, NULL);
    CHECK(same_double(back, value), "%.17g reads back as %s", value, ours);
    char own_digits[40], other_digits[40];
    const int digits = digits_of(ours, own_digits);
    for (int precision = digits > 1 ? digits - 1 : digits; precision > 0 && precision <= digits;
         precision++) {
        snprintf(other, sizeof other, "%.*e", precision - 1, value);
        const double read = is_float ? (double)strtof(other, NULL) : strtod(other, NULL);
        if (precision < digits) {
            CHECK(!same_double(read, value), "%s is shorter than %s", other, ours);
        } else if (same_double(read, value)) {
            digits_of(other, other_digits);
            CHECK(strcmp(own_digits, other_digits) == 0, "%s is closer than %s", other, ours);
        }
    }
}

static void check_decimals(void) {
    static const double values[] = {0.0,
                                    1.0,
                                    0.1,
                                    1e16,
                                    9999999999999998.0,
                                    1e-4,
                                    9.9e-5,
                                    1e22,
                                    1e23,
                                    5e-324,
                                    2.2250738585072014e-308,
                                    1.7976931348623157e308,
                                    9007199254740992.0,
                                    123456.0};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        check_decimal(values[i], 0);
        check_decimal(-values[i], 0);
    }
    for (int e = -1074; e < 1024; e++) {
        check_decimal(ldexp(1, e), 0);
        check_decimal(nextafter(ldexp(1, e), 0), 0);
    }
    for (int e = -149; e < 128; e++) {
        check_decimal(ldexp(1, e), 1);
        check_decimal((double)nextafterf(ldexpf(1, e), 0), 1);
    }
    for (int i = 0; i < 50000; i++) {
        const uint64_t bits = next_bits();
        const uint32_t half = (uint32_t)(bits >> 32);
        double value;
        float single;
        memcpy(&value, &bits, sizeof value);
        memcpy(&single, &half, sizeof single);
        if (isfinite(value)) {
            check_decimal(value, 0);
        }
        if (isfinite(single)) {
            check_decimal((double)single, 1);
        }
        check_decimal((double)(bits >> 44) / 1000, 0);
    }
}

static void check_integers(void) {
    char ours[TM_DECIMAL_MOST + 1], other[32];
    for (int i = 0; i < 64; i++) {
        const uint64_t bits = UINT64_MAX >> i;
        *tm_decimal_u64(ours, bits) = '\0';
        snprintf(other, sizeof other, "%llu", (unsigned long long)bits);
        CHECK(strcmp(ours, other) == 0, "%s is not %s", ours, other);
        *tm_decimal_i64(ours, (int64_t)(bits + 1)) = '\0';
        snprintf(other, sizeof other, "%lld", (long long)(bits + 1));
        CHECK(strcmp(ours, other) == 0, "%s is not %s", ours, other);
    }
}

/* ---- rows ---- */

#define ROWS 3

static const double values[ROWS] = {1.5, NAN, -INFINITY};
static const int16_t codes[2 * ROWS] = {7, 0, -8, 0, 9, 0};
static const unsigned char known[ROWS] = {1, 1, 0};
static const int64_t shape[1] = {ROWS}, strides[1] = {4};

static void make_columns(tm_column *columns, tm_view *mask, tm_text *texts) {
    static const char *const words[ROWS] = {"a,b", "c\"d\n", NULL};
    for (int i = 0; i < ROWS; i++) {
        texts[i] = (tm_text){words[i], words[i] != NULL ? strlen(words[i]) : 0};
    }
    *mask = flat(known, ROWS, TM_BOOL);
    columns[0] = (tm_column){.name = {"x", 1}, .view = flat(values, ROWS, TM_F64)};
    columns[1] = (tm_column){
        .name = {"i\t", 2},
        .view = {.data = codes, .shape = shape, .strides = strides, .n = ROWS, .ndim = 1, .dtype = TM_I16},
        .valid = mask};
    columns[2] = (tm_column){.name = {"t", 1}, .texts = texts};
}

static void check_rows(void) {
    static const char *const expected[2] = {
        "x,i\t,t\n1.5,7,\"a,b\"\nnan,-8,\"c\"\"d\n\"\n-inf,,\n",
        "{\"x\": 1.5, \"i\\t\": 7, \"t\": \"a,b\"}\n{\"x\": \"NaN\", \"i\\t\": -8, \"t\": \"c\\\"d\\n\"}\n"
        "{\"x\": \"-Infinity\", \"i\\t\": null, \"t\": null}\n",
    };
    tm_column columns[3];
    tm_text texts[ROWS];
    tm_view mask;
    tm_error error;
    tm_rows_text out;
    make_columns(columns, &mask, texts);
    for (int format = 0; format < 2; format++) {
        const tm_status status = tm_rows_write((tm_rows_format)format, columns, 3, ROWS, 1, &out, &error);
        CHECK(status == TM_OK, "%s", error.text);
        const size_t length = strlen(expected[format]);
        CHECK(status == TM_OK && out.length == length && memcmp(out.data, expected[format], length) == 0,
              "%.*s", (int)out.length, out.data);
        free(out.data);
    }
    CHECK(tm_rows_write(TM_ROWS_CSV, columns, 3, ROWS + 1, 0, &out, &error) == TM_ERR_VALUE,
          "one row too many");
    free(out.data);
}

static int allowed, used;

static void *failing(size_t bytes) {
    used++;
    return allowed-- > 0 ? malloc(bytes) : NULL;
}

/* Many rows, so that the text grows; each allocation fails once. */
static void check_memory(void) {
    enum { MANY = 3000 };
    static double many[MANY];
    tm_column columns[2] = {{.name = {"x", 1}, .view = flat(many, MANY, TM_F64)},
                            {.name = {"y", 1}, .view = flat(many, MANY, TM_F64)}};
    for (int format = 0; format < 2; format++) {
        int failed = 1;
        for (int calls = 0; failed; calls++) {
            tm_error error = {""};
            tm_rows_text out;
            allowed = calls;
            used = 0;
            tm_memory_set_allocator(failing);
            const tm_status status = tm_rows_write((tm_rows_format)format, columns, 2, MANY, 1, &out, &error);
            tm_memory_set_allocator(NULL);
            failed = used > calls;
            CHECK(status == (failed ? TM_ERR_MEMORY : TM_OK), "%d allocations: status %d", calls,
                  (int)status);
            CHECK(calls < 20, "no end of allocations");
            free(out.data);
        }
    }
}

void test_rows_text(void) {
    check_decimals();
    check_integers();
    check_digest("decimals", digest, UINT64_C(0xbc3cade3b0fba00b));
    check_rows();
    check_memory();
}
