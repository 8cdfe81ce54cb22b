/* Errors of a block (contract: tm_compare_kernels.h). Sums run over doubles, whatever the elements were: two
 * passes over widened blocks in the first cache cost less than memory, and nothing is fused, so that one loop
 * serves exact and rounded products. The largest errors are looked for only in blocks that can hold one. */
#include "tm_bytes.h"
#include "tm_widen.h"

#include <math.h>

static void compare_prefetch(const void *a, const void *b, size_t a_bytes, size_t b_bytes) {
    for (size_t offset = 0; offset < a_bytes; offset += 64) {
        tm_prefetch_row((const char *)a + offset, 64);
    }
    for (size_t offset = 0; offset < b_bytes; offset += 64) {
        tm_prefetch_row((const char *)b + offset, 64);
    }
}

/* Whether every lane is finite. */
static int all_finite(const double *lane) {
    const tm_int64 *bits = (const tm_int64 *)lane;
    int64_t bad = 0;
    for (int l = 0; l < TM_LANES; l++) {
        bad |= (bits[l] & INT64_MAX) >= INT64_C(0x7ff0000000000000);
    }
    return !bad;
}

/* ---- sums ---- */

/* Squares and products alone: they tell whether all elements are finite before anything is added. */
typedef struct product_sums {
    double a_sq[TM_LANES], b_sq[TM_LANES], dot[TM_LANES];
} product_sums;

/* Two sets of rows: products that are exact may be fused with their addition, others must not be. */
#define TM_COMPARE_PRODUCTS(suffix, add_product)                                                             \
    TM_NOINLINE void same_rows_##suffix(product_sums *next, const tm_compare_sums *sums, const double *x,    \
                                        size_t rows) {                                                       \
        double a_sq[TM_LANES], b_sq[TM_LANES], dot[TM_LANES];                                                \
        memcpy(a_sq, sums->a_sq, sizeof a_sq);                                                               \
        memcpy(b_sq, sums->b_sq, sizeof b_sq);                                                               \
        memcpy(dot, sums->dot, sizeof dot);                                                                  \
        for (size_t r = 0; r < rows; r++, x += TM_LANES) {                                                   \
            for (int l = 0; l < TM_LANES; l++) {                                                             \
                a_sq[l] = add_product(a_sq[l], x[l], x[l]);                                                  \
                b_sq[l] = add_product(b_sq[l], x[l], x[l]);                                                  \
                dot[l] = add_product(dot[l], x[l], x[l]);                                                    \
            }                                                                                                \
        }                                                                                                    \
        memcpy(next->a_sq, a_sq, sizeof a_sq);                                                               \
        memcpy(next->b_sq, b_sq, sizeof b_sq);                                                               \
        memcpy(next->dot, dot, sizeof dot);                                                                  \
    }                                                                                                        \
    TM_NOINLINE void product_rows_##suffix(product_sums *next, const tm_compare_sums *sums, const double *x, \
                                           const double *y, size_t rows) {                                   \
        double a_sq[TM_LANES], b_sq[TM_LANES], dot[TM_LANES];                                                \
        memcpy(a_sq, sums->a_sq, sizeof a_sq);                                                               \
        memcpy(b_sq, sums->b_sq, sizeof b_sq);                                                               \
        memcpy(dot, sums->dot, sizeof dot);                                                                  \
        for (size_t r = 0; r < rows; r++, x += TM_LANES, y += TM_LANES) {                                    \
            for (int l = 0; l < TM_LANES; l++) {                                                             \
                a_sq[l] = add_product(a_sq[l], x[l], x[l]);                                                  \
                b_sq[l] = add_product(b_sq[l], y[l], y[l]);                                                  \
                dot[l] = add_product(dot[l], x[l], y[l]);                                                    \
            }                                                                                                \
        }                                                                                                    \
        memcpy(next->a_sq, a_sq, sizeof a_sq);                                                               \
        memcpy(next->b_sq, b_sq, sizeof b_sq);                                                               \
        memcpy(next->dot, dot, sizeof dot);                                                                  \
    }
#define TM_ADD_ROUNDED(sum, x, y) ((sum) + (x) * (y))
#if defined(__FMA__)
#    define TM_ADD_EXACT(sum, x, y) __builtin_fma((x), (y), (sum))
#else
#    define TM_ADD_EXACT TM_ADD_ROUNDED
#endif
TM_COMPARE_PRODUCTS(rounded, TM_ADD_ROUNDED)
TM_COMPARE_PRODUCTS(exact, TM_ADD_EXACT)

/* 0, with nothing added, for lanes that are not finite unless forced. */
static int accept(tm_compare_sums *sums, const product_sums *next, int force) {
    if (!force && !(all_finite(next->a_sq) && all_finite(next->b_sq))) {
        return 0;
    }
    memcpy(sums->a_sq, next->a_sq, sizeof sums->a_sq);
    memcpy(sums->b_sq, next->b_sq, sizeof sums->b_sq);
    memcpy(sums->dot, next->dot, sizeof sums->dot);
    return 1;
}

static size_t rows_of(size_t n) {
    return (n + TM_LANES - 1) / TM_LANES;
}

static int compare_add_same(tm_compare_sums *sums, const double *x, size_t n, int exact) {
    product_sums next;
    (exact ? same_rows_exact : same_rows_rounded)(&next, sums, x, rows_of(n));
    return accept(sums, &next, 0);
}

/* ---- errors ---- */

/* What a block can hold: its largest error, and the least that is missing to a relative error above the
 * largest so far. A quotient above max_rel needs an error of max_rel * |y|, rounded, or more: one product
 * instead of a division. An error of 0 has none. */
typedef struct block_bounds {
    double largest, gap;
} block_bounds;

TM_NOINLINE block_bounds error_rows(tm_compare_sums *sums, const double *x, const double *y, size_t rows,
                                    double max_rel) {
    double error[TM_LANES], error_sq[TM_LANES], largest[TM_LANES], gap[TM_LANES];
    memcpy(error, sums->error, sizeof error);
    memcpy(error_sq, sums->error_sq, sizeof error_sq);
    for (int l = 0; l < TM_LANES; l++) {
        largest[l] = 0;
        gap[l] = INFINITY;
    }
    for (size_t r = 0; r < rows; r++, x += TM_LANES, y += TM_LANES) {
        for (int l = 0; l < TM_LANES; l++) {
            double difference = x[l] - y[l], magnitude = __builtin_fabs(difference);
            double bound = max_rel * __builtin_fabs(y[l]);
            bound = (bound > 0x1p-1074 ? bound : 0x1p-1074) - magnitude;
            error[l] += magnitude;
            error_sq[l] = TM_ADD_ROUNDED_SQUARE(error_sq[l], difference);
            largest[l] = magnitude > largest[l] ? magnitude : largest[l];
            gap[l] = bound < gap[l] ? bound : gap[l];
        }
    }
    memcpy(sums->error, error, sizeof error);
    memcpy(sums->error_sq, error_sq, sizeof error_sq);
    for (int l = 1; l < TM_LANES; l++) {
        largest[0] = largest[l] > largest[0] ? largest[l] : largest[0];
        gap[0] = gap[l] < gap[0] ? gap[l] : gap[0];
    }
    return (block_bounds){largest[0], gap[0]};
}

/* Differences from a zero reference, which have no relative error. */
TM_NOINLINE int64_t count_zero_references(const double *x, const double *y, size_t n) {
    int64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += (y[i] == 0) & (x[i] != 0);
    }
    return count;
}

/* Whether any other error may be relatively larger. */
TM_NOINLINE int may_exceed(const double *x, const double *y, size_t n, double max_rel) {
    int64_t flag = 0;
    for (size_t i = 0; i < n; i++) {
        double magnitude = __builtin_fabs(x[i] - y[i]);
        flag |= (magnitude >= max_rel * __builtin_fabs(y[i])) & (magnitude > 0) & (y[i] != 0);
    }
    return flag != 0;
}

TM_NOINLINE void find_max_abs(tm_compare_worst *worst, const double *x, const double *y, int64_t index,
                              double largest) {
    int64_t i = 0;
    while (__builtin_fabs(x[i] - y[i]) != largest) {
        i++;
    }
    worst->max_abs = largest;
    worst->max_abs_index = index + i;
}

/* Equal elements have no relative error, nor have those without a reference. */
TM_NOINLINE void find_max_rel(tm_compare_worst *worst, const double *x, const double *y, size_t n,
                              int64_t index) {
    double quotient[TM_COMPARE_ROOM], largest[TM_LANES] = {0};
    size_t whole = n - n % TM_LANES, i = 0;
    for (size_t k = 0; k < n; k++) {
        double reference = __builtin_fabs(y[k]);
        quotient[k] = __builtin_fabs(x[k] - y[k]) / (reference == 0 ? INFINITY : reference);
    }
    for (size_t k = 0; k < whole; k += TM_LANES) {
        for (size_t l = 0; l < TM_LANES; l++) {
            largest[l] = quotient[k + l] > largest[l] ? quotient[k + l] : largest[l];
        }
    }
    for (size_t k = whole; k < n; k++) {
        largest[0] = quotient[k] > largest[0] ? quotient[k] : largest[0];
    }
    for (int l = 1; l < TM_LANES; l++) {
        largest[0] = largest[l] > largest[0] ? largest[l] : largest[0];
    }
    if (largest[0] > worst->max_rel) {
        while (quotient[i] != largest[0]) {
            i++;
        }
        worst->max_rel = largest[0];
        worst->max_rel_index = index + (int64_t)i;
    }
}

static int compare_add(tm_compare_sums *sums, tm_compare_worst *worst, const double *x, const double *y,
                       size_t n, int64_t index, int exact, int force) {
    product_sums next;
    (exact ? product_rows_exact : product_rows_rounded)(&next, sums, x, y, rows_of(n));
    if (!accept(sums, &next, force)) {
        return 0;
    }
    block_bounds bounds = error_rows(sums, x, y, rows_of(n), worst->max_rel);
    if (bounds.largest > worst->max_abs) {
        find_max_abs(worst, x, y, index, bounds.largest);
    }
    if (bounds.gap <= 0) {
        int64_t zero_references = count_zero_references(x, y, n);
        worst->n_zero_reference += zero_references;
        if (zero_references == 0 || may_exceed(x, y, n, worst->max_rel)) {
            find_max_rel(worst, x, y, n, index);
        }
    }
    return 1;
}

/* ---- distances in units in the last place ---- */

/* A distance as the exponent byte of its float: 0 for 0, else 126 + the bits that it needs. Of the bits below
 * the highest one the next is cleared, so that rounding can't carry. */
TM_INLINE uint8_t byte_of_32(uint32_t distance) {
    float number = (float)(distance & ~(distance >> 1));
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return (uint8_t)(bits >> 23);
}

TM_INLINE uint8_t byte_of_64(uint64_t distance) {
    double number = (double)(distance & ~(distance >> 1));
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    bits >>= 52;
    return (uint8_t)(bits == 0 ? 0 : bits - (1023 - 127));
}

static int bin_of(int byte) {
    return byte == 0 ? 0 : byte - 126;
}

/* Most blocks have few different bytes, which comparisons of whole vectors count; others a table in four
 * parts, so that equal neighbours don't wait for each other. */
TM_NOINLINE void count_bytes(int64_t *ulp, const uint8_t *byte, size_t n) {
    uint8_t low_lane[64], high_lane[64], low = UINT8_MAX, high = 0;
    size_t whole = n - n % 64;
    int64_t zeros = 0, seen = 0;
    memset(low_lane, UINT8_MAX, sizeof low_lane);
    memset(high_lane, 0, sizeof high_lane);
    for (size_t k = 0; k < whole; k += 64) {
        for (size_t l = 0; l < 64; l++) { /* the lowest but 0, which wraps to the highest */
            uint8_t before = (uint8_t)(byte[k + l] - 1);
            low_lane[l] = before < low_lane[l] ? before : low_lane[l];
            high_lane[l] = byte[k + l] > high_lane[l] ? byte[k + l] : high_lane[l];
        }
    }
    for (size_t l = 0; l < 64; l++) {
        low = low_lane[l] < low ? low_lane[l] : low;
        high = high_lane[l] > high ? high_lane[l] : high;
    }
    low++; /* 0 if all are 0 */
    for (size_t k = whole; k < n; k++) {
        ulp[bin_of(byte[k])]++;
    }
    if (high - low < 16) {
        for (int value = low; value <= high && value > 0; value++) {
            uint8_t lane[64] = {0}; /* at most TM_COMPARE_ROOM / 64 in each */
            int64_t count = 0;
            for (size_t k = 0; k < whole; k += 64) {
                for (size_t l = 0; l < 64; l++) {
                    lane[l] = (uint8_t)(lane[l] + (byte[k + l] == (uint8_t)value));
                }
            }
            for (size_t l = 0; l < 64; l++) {
                count += lane[l];
            }
            ulp[bin_of(value)] += count;
            seen += count;
        }
        ulp[0] += (int64_t)whole - seen;
        return;
    }
    uint16_t part[TM_SUBTABLES][256] = {{0}};
    for (size_t k = 0; k < whole; k++) {
        part[k % TM_SUBTABLES][byte[k]]++;
    }
    for (int p = 0; p < TM_SUBTABLES; p++) {
        zeros += part[p][0];
        for (int value = low; value <= high; value++) {
            ulp[bin_of(value)] += part[p][value];
        }
    }
    ulp[0] += zeros;
}

static void raise_max_ulp(tm_compare_worst *worst, uint64_t largest) {
    worst->max_ulp = largest > worst->max_ulp ? largest : worst->max_ulp;
}

/* ulp_<name>: `key` orders the elements as integers of `bits` bits; both zeros have key 0. */
#define TM_COMPARE_ULP(name, store, bits, key_type, key)                                                     \
    TM_NOINLINE tm_compare_equal ulp_##name(tm_compare_worst *worst, const void *a, const void *b,           \
                                            size_t n) {                                                      \
        typedef store __attribute__((may_alias)) element;                                                    \
        const element *p = a, *q = b;                                                                        \
        const int64_t before = worst->ulp[0];                                                                \
        int##bits##_t same = 0;                                                                              \
        uint##bits##_t largest = 0;                                                                          \
        uint8_t byte[TM_COMPARE_ROOM];                                                                       \
        for (size_t i = 0; i < n; i++) {                                                                     \
            key_type x = key(p[i]), y = key(q[i]), high = x > y ? x : y, low = x > y ? y : x;                \
            uint##bits##_t distance = (uint##bits##_t)high - (uint##bits##_t)low;                            \
            same += p[i] == q[i];                                                                            \
            largest = distance > largest ? distance : largest;                                               \
            byte[i] = byte_of_##bits(distance);                                                              \
        }                                                                                                    \
        raise_max_ulp(worst, largest);                                                                       \
        count_bytes(worst->ulp, byte, n);                                                                    \
        return (tm_compare_equal){same, worst->ulp[0] - before};                                             \
    }
#define TM_KEY_8(code) ((code) < 0 ? INT8_MIN - (code) : (code))
#define TM_KEY_16(code) ((code) < 0 ? INT16_MIN - (code) : (code))
#define TM_KEY_32(code) ((code) < 0 ? INT32_MIN - (code) : (code))
#define TM_KEY_64(code) ((code) < 0 ? INT64_MIN - (code) : (code))
#define TM_KEY_INTEGER(code) (code)
#define TM_KEY_BOOL(code) ((code) != 0)
TM_COMPARE_ULP(float8, int8_t, 32, int32_t, TM_KEY_8)
TM_COMPARE_ULP(float16, int16_t, 32, int32_t, TM_KEY_16)
TM_COMPARE_ULP(float32, int32_t, 32, int32_t, TM_KEY_32)
TM_COMPARE_ULP(float64, int64_t, 64, int64_t, TM_KEY_64)
TM_COMPARE_ULP(i8, int8_t, 32, int32_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(u8, uint8_t, 32, int32_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(i16, int16_t, 32, int32_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(u16, uint16_t, 32, int32_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(i32, int32_t, 32, int32_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(u32, uint32_t, 32, uint32_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(i64, int64_t, 64, int64_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(u64, uint64_t, 64, uint64_t, TM_KEY_INTEGER)
TM_COMPARE_ULP(bool, uint8_t, 32, int32_t, TM_KEY_BOOL)

/* Codes of doubles on a grid. Rounding by bits carries into the exponent, as it should. Adding 2^52 rounds to
 * an integer and leaves it in the mantissa. */
TM_NOINLINE void grid_codes(int64_t *code, const double *x, size_t n, const tm_ulp_grid *grid) {
    const tm_int64 *bits = (const tm_int64 *)x;
    const int64_t half = grid->half, even = grid->even, origin = grid->origin;
    const int shift = grid->shift;
    for (size_t i = 0; i < n; i++) {
        int64_t magnitude = bits[i] & INT64_MAX;
        int64_t kept = magnitude >> shift;
        union {
            double value;
            int64_t bits;
        } small = {.value = __builtin_fabs(x[i]) * grid->scale + 0x1p52};
        int64_t normal = ((magnitude + half + ((kept - origin) & even)) >> shift) - origin;
        int64_t subnormal = small.bits - INT64_C(0x4330000000000000);
        int64_t value = __builtin_fabs(x[i]) < grid->smallest_normal ? subnormal : normal;
        code[i] = bits[i] < 0 ? -value : value;
    }
}

static tm_compare_equal compare_ulp_between(tm_compare_worst *worst, const double *x, const double *y,
                                            size_t n, const tm_ulp_grid *grid) {
    const tm_int64 *x_bits = (const tm_int64 *)x, *y_bits = (const tm_int64 *)y;
    int64_t codes[2][TM_COMPARE_ROOM];
    uint64_t distance[TM_COMPARE_ROOM], largest = 0;
    uint8_t byte[TM_COMPARE_ROOM];
    tm_compare_equal equal = {0, 0};
    if (grid != NULL) {
        grid_codes(codes[0], x, n, grid);
        grid_codes(codes[1], y, n, grid);
        for (size_t i = 0; i < n; i++) {
            int64_t p = codes[0][i], q = codes[1][i], high = p > q ? p : q, low = p > q ? q : p;
            distance[i] = (uint64_t)high - (uint64_t)low;
        }
    } else {
        for (size_t i = 0; i < n; i++) {
            double difference = __builtin_fabs(x[i] - y[i]);
            distance[i] = difference < 0x1p64 ? (uint64_t)difference : UINT64_MAX;
        }
    }
    for (size_t i = 0; i < n; i++) {
        equal.bits += x_bits[i] == y_bits[i];
        equal.values += x[i] == y[i];
        largest = distance[i] > largest ? distance[i] : largest;
        byte[i] = byte_of_64(distance[i]);
    }
    raise_max_ulp(worst, largest);
    count_bytes(worst->ulp, byte, n);
    return equal;
}

static void compare_finish(const tm_compare_sums *sums, double totals[5]) {
    totals[0] = tm_lane_total(sums->error);
    totals[1] = tm_lane_total(sums->error_sq);
    totals[2] = tm_lane_total(sums->a_sq);
    totals[3] = tm_lane_total(sums->b_sq);
    totals[4] = tm_lane_total(sums->dot);
}

const tm_compare_kernels TM_TIERED(tm_compare_kernels_) = {
    .prefetch = compare_prefetch,
    .add_same = compare_add_same,
    .add = compare_add,
    .ulp = {[TM_F64] = ulp_float64,
            [TM_F32] = ulp_float32,
            [TM_F16] = ulp_float16,
            [TM_BF16] = ulp_float16,
            [TM_F8E4M3FN] = ulp_float8,
            [TM_F8E4M3FNUZ] = ulp_float8,
            [TM_F8E4M3B11FNUZ] = ulp_float8,
            [TM_F8E5M2] = ulp_float8,
            [TM_F8E5M2FNUZ] = ulp_float8,
            [TM_F8E4M3] = ulp_float8,
            [TM_F8E3M4] = ulp_float8,
            [TM_F8E8M0FNU] = ulp_u8, /* no sign */
            [TM_I8] = ulp_i8,
            [TM_I16] = ulp_i16,
            [TM_I32] = ulp_i32,
            [TM_I64] = ulp_i64,
            [TM_U8] = ulp_u8,
            [TM_U16] = ulp_u16,
            [TM_U32] = ulp_u32,
            [TM_U64] = ulp_u64,
            [TM_BOOL] = ulp_bool},
    .ulp_between = compare_ulp_between,
    .finish = compare_finish,
};
