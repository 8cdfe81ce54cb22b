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

TM_NOINLINE void same_rows(product_sums *next, const tm_compare_sums *sums, const double *x, size_t rows) {
    double a_sq[TM_LANES], b_sq[TM_LANES], dot[TM_LANES];
    memcpy(a_sq, sums->a_sq, sizeof a_sq);
    memcpy(b_sq, sums->b_sq, sizeof b_sq);
    memcpy(dot, sums->dot, sizeof dot);
    for (size_t r = 0; r < rows; r++, x += TM_LANES) {
        for (int l = 0; l < TM_LANES; l++) {
            double square = x[l] * x[l];
            a_sq[l] += square;
            b_sq[l] += square;
            dot[l] += square;
        }
    }
    memcpy(next->a_sq, a_sq, sizeof a_sq);
    memcpy(next->b_sq, b_sq, sizeof b_sq);
    memcpy(next->dot, dot, sizeof dot);
}

TM_NOINLINE void product_rows(product_sums *next, const tm_compare_sums *sums, const double *x,
                              const double *y, size_t rows) {
    double a_sq[TM_LANES], b_sq[TM_LANES], dot[TM_LANES];
    memcpy(a_sq, sums->a_sq, sizeof a_sq);
    memcpy(b_sq, sums->b_sq, sizeof b_sq);
    memcpy(dot, sums->dot, sizeof dot);
    for (size_t r = 0; r < rows; r++, x += TM_LANES, y += TM_LANES) {
        for (int l = 0; l < TM_LANES; l++) {
            a_sq[l] = TM_ADD_ROUNDED_SQUARE(a_sq[l], x[l]);
            b_sq[l] = TM_ADD_ROUNDED_SQUARE(b_sq[l], y[l]);
            dot[l] += x[l] * y[l];
        }
    }
    memcpy(next->a_sq, a_sq, sizeof a_sq);
    memcpy(next->b_sq, b_sq, sizeof b_sq);
    memcpy(next->dot, dot, sizeof dot);
}

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

static int compare_add_same(tm_compare_sums *sums, const double *x, size_t n) {
    product_sums next;
    same_rows(&next, sums, x, rows_of(n));
    return accept(sums, &next, 0);
}

/* ---- errors ---- */

/* What a block can hold: its largest error, whether a relative error may be above the largest so far (gap not
 * above 0), its smallest reference. */
typedef struct block_bounds {
    double largest, gap, smallest_reference;
} block_bounds;

TM_NOINLINE void error_rows(tm_compare_sums *sums, const double *x, const double *y, size_t rows) {
    double error[TM_LANES], error_sq[TM_LANES];
    memcpy(error, sums->error, sizeof error);
    memcpy(error_sq, sums->error_sq, sizeof error_sq);
    for (size_t r = 0; r < rows; r++, x += TM_LANES, y += TM_LANES) {
        for (int l = 0; l < TM_LANES; l++) {
            double difference = x[l] - y[l];
            error[l] += __builtin_fabs(difference);
            error_sq[l] = TM_ADD_ROUNDED_SQUARE(error_sq[l], difference);
        }
    }
    memcpy(sums->error, error, sizeof error);
    memcpy(sums->error_sq, error_sq, sizeof error_sq);
}

/* A quotient above max_rel needs an error of max_rel * |y|, rounded, or more: one product instead of a
 * division; an error of 0 has none. Extremes have no order: fewer lanes. */
#define TM_BOUND_LANES 16
TM_NOINLINE block_bounds bound_rows(const double *x, const double *y, size_t rows, double max_rel) {
    double largest[TM_BOUND_LANES], gap[TM_BOUND_LANES], smallest[TM_BOUND_LANES];
    for (int l = 0; l < TM_BOUND_LANES; l++) {
        largest[l] = 0;
        gap[l] = smallest[l] = INFINITY;
    }
    for (size_t r = 0; r < rows * (TM_LANES / TM_BOUND_LANES);
         r++, x += TM_BOUND_LANES, y += TM_BOUND_LANES) {
        for (int l = 0; l < TM_BOUND_LANES; l++) {
            double magnitude = __builtin_fabs(x[l] - y[l]), reference = __builtin_fabs(y[l]);
            double bound = max_rel * reference;
            bound = (bound > 0x1p-1074 ? bound : 0x1p-1074) - magnitude;
            largest[l] = magnitude > largest[l] ? magnitude : largest[l];
            gap[l] = bound < gap[l] ? bound : gap[l];
            smallest[l] = reference < smallest[l] ? reference : smallest[l];
        }
    }
    for (int l = 1; l < TM_BOUND_LANES; l++) {
        largest[0] = largest[l] > largest[0] ? largest[l] : largest[0];
        gap[0] = gap[l] < gap[0] ? gap[l] : gap[0];
        smallest[0] = smallest[l] < smallest[0] ? smallest[l] : smallest[0];
    }
    return (block_bounds){largest[0], gap[0], smallest[0]};
}

TM_NOINLINE int64_t count_zero_references(const double *x, const double *y, size_t n) {
    int64_t count = 0;
    for (size_t i = 0; i < n; i++) {
        count += y[i] == 0 && x[i] != 0;
    }
    return count;
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
                       size_t n, int64_t index, int force) {
    product_sums next;
    product_rows(&next, sums, x, y, rows_of(n));
    if (!accept(sums, &next, force)) {
        return 0;
    }
    error_rows(sums, x, y, rows_of(n));
    block_bounds bounds = bound_rows(x, y, rows_of(n), worst->max_rel);
    if (bounds.largest > worst->max_abs) {
        find_max_abs(worst, x, y, index, bounds.largest);
    }
    if (bounds.gap <= 0) {
        find_max_rel(worst, x, y, n, index);
    }
    if (bounds.smallest_reference == 0) {
        worst->n_zero_reference += count_zero_references(x, y, n);
    }
    return 1;
}

/* ---- distances in units in the last place ---- */

/* Bins of a block: most blocks have few different ones, which comparisons of whole vectors count; else a
 * table in four parts, so that equal neighbours don't wait for each other. */
TM_NOINLINE void count_bins(int64_t *ulp, const uint8_t *bin, size_t n) {
    uint8_t low_lane[64], high_lane[64], low = UINT8_MAX, high = 0;
    size_t i = 0;
    memset(low_lane, UINT8_MAX, sizeof low_lane);
    memset(high_lane, 0, sizeof high_lane);
    for (; n - i >= 64; i += 64) {
        for (size_t l = 0; l < 64; l++) {
            low_lane[l] = bin[i + l] < low_lane[l] ? bin[i + l] : low_lane[l];
            high_lane[l] = bin[i + l] > high_lane[l] ? bin[i + l] : high_lane[l];
        }
    }
    for (size_t l = 0; l < 64; l++) {
        low = low_lane[l] < low ? low_lane[l] : low;
        high = high_lane[l] > high ? high_lane[l] : high;
    }
    for (size_t k = i; k < n; k++) {
        ulp[bin[k]]++;
    }
    if (i == 0) {
        return;
    }
    if (high - low < 16) {
        for (int value = low; value <= high; value++) {
            uint8_t lane[64] = {0}; /* n / 64 rows: below 256 */
            int64_t count = 0;
            for (size_t k = 0; k < i; k += 64) {
                for (size_t l = 0; l < 64; l++) {
                    lane[l] = (uint8_t)(lane[l] + (bin[k + l] == (uint8_t)value));
                }
            }
            for (size_t l = 0; l < 64; l++) {
                count += lane[l];
            }
            ulp[value] += count;
        }
        return;
    }
    uint16_t part[TM_SUBTABLES][TM_ULP_BINS + 1] = {{0}};
    for (size_t k = 0; k < i; k++) {
        part[k % TM_SUBTABLES][bin[k]]++;
    }
    for (int value = low; value <= high; value++) {
        for (int p = 0; p < TM_SUBTABLES; p++) {
            ulp[value] += part[p][value];
        }
    }
}

/* The bin of a distance: the bits that it needs. Of the bits below the highest one the next is cleared, so
 * that rounding can't carry, and the exponent of the distance as a float tells the highest one; as a signed
 * integer the float is negative where that is the sign's, which is seen apart. By arithmetic, because the
 * compiler would branch. */
#define TM_BIN_OF(bits, number_type, mantissa, below_one)                                                    \
    TM_INLINE uint8_t bin_of_##bits(uint##bits##_t distance) {                                               \
        number_type number = (number_type)(int##bits##_t)(distance & ~(distance >> 1));                      \
        int##bits##_t exponent;                                                                              \
        memcpy(&exponent, &number, sizeof exponent);                                                         \
        exponent = (exponent >> (mantissa)) - (below_one);                                                   \
        exponent &= ~(exponent >> (bits - 1));                                                               \
        return (uint8_t)(exponent | (int##bits##_t)(distance >> (bits - 1)) * bits);                         \
    }
TM_BIN_OF(32, float, 23, 126)
TM_BIN_OF(64, double, 52, 1022)
#undef TM_BIN_OF

static void raise_max_ulp(tm_compare_worst *worst, uint64_t largest) {
    worst->max_ulp = largest > worst->max_ulp ? largest : worst->max_ulp;
}

/* ulp_<name>: `key` orders the elements as integers of `bits` bits; both zeros have key 0. */
#define TM_COMPARE_ULP(name, store, bits, key_type, key)                                                     \
    TM_NOINLINE tm_compare_equal ulp_##name(tm_compare_worst *worst, const void *a, const void *b,           \
                                            size_t n) {                                                      \
        typedef store __attribute__((may_alias)) element;                                                    \
        const element *p = a, *q = b;                                                                        \
        int##bits##_t same = 0, equal = 0;                                                                   \
        uint##bits##_t largest = 0;                                                                          \
        uint8_t bin[TM_COMPARE_ROOM];                                                                        \
        for (size_t i = 0; i < n; i++) {                                                                     \
            key_type x = key(p[i]), y = key(q[i]), high = x > y ? x : y, low = x > y ? y : x;                \
            uint##bits##_t distance = (uint##bits##_t)high - (uint##bits##_t)low;                            \
            same += p[i] == q[i];                                                                            \
            equal += x == y;                                                                                 \
            largest = distance > largest ? distance : largest;                                               \
            bin[i] = bin_of_##bits(distance);                                                                \
        }                                                                                                    \
        raise_max_ulp(worst, largest);                                                                       \
        count_bins(worst->ulp, bin, n);                                                                      \
        return (tm_compare_equal){same, equal};                                                              \
    }
#define TM_KEY_8(code) ((code) < 0 ? -((code) & INT8_MAX) : (code))
#define TM_KEY_16(code) ((code) < 0 ? -((code) & INT16_MAX) : (code))
#define TM_KEY_32(code) ((code) < 0 ? -((code) & INT32_MAX) : (code))
#define TM_KEY_64(code) ((code) < 0 ? -((code) & INT64_MAX) : (code))
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
    uint8_t bin[TM_COMPARE_ROOM];
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
        bin[i] = bin_of_64(distance[i]);
    }
    raise_max_ulp(worst, largest);
    count_bins(worst->ulp, bin, n);
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
