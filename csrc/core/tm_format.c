#include "tm_format.h"

#include "tm_exact.h"

#include <math.h>
#include <string.h>

static const struct {
    const char *name;
    int mantissa_bits, min_exponent;
    double largest;
} formats[TM_FORMAT_COUNT] = {
#define TM_FORMAT_ROW(enum_name, text, mantissa, exponent, largest)                                          \
    [TM_FORMAT_##enum_name] = {text, mantissa, exponent, largest},
    TM_FORMATS(TM_FORMAT_ROW)
#undef TM_FORMAT_ROW
};

const char *tm_format_name(tm_format format) {
    return (unsigned)format < TM_FORMAT_COUNT ? formats[format].name : "unknown";
}

/* "float6_e2m3fn" may be "fp6_e2m3fn", "f6_e2m3fn" or "e2m3fn". */
static int is_name_of(const char *name, const char *full) {
    static const char *const prefixes[] = {"float", "fp", "f"};
    const char *width = full + strlen("float"), *suffix = strchr(full, '_');
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        size_t length = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], length) == 0 && strcmp(name + length, width) == 0) {
            return 1;
        }
    }
    return suffix != NULL && strcmp(name, suffix + 1) == 0;
}

tm_format tm_format_from_name(const char *name) {
    tm_dtype dtype = tm_dtype_from_name(name);
    const char *full = dtype < TM_DTYPE_COUNT ? tm_dtype_name(dtype) : name;
    for (int i = 0; i < TM_FORMAT_COUNT; i++) {
        if (strcmp(full, formats[i].name) == 0) {
            return (tm_format)i;
        }
    }
    for (int i = TM_FORMAT_E2M3FN; i < TM_FORMAT_COUNT; i++) {
        if (is_name_of(name, formats[i].name)) {
            return (tm_format)i;
        }
    }
    return TM_FORMAT_COUNT;
}

tm_format_limits tm_format_limits_of(tm_format format) {
    const int bits = formats[format].mantissa_bits, least = formats[format].min_exponent;
    const double largest = formats[format].largest;
    const double last_place = ldexp(1.0, ilogb(largest) - bits);
    return (tm_format_limits){
        .flush = ldexp(1.0, least - bits - 1),
        .min_normal = ldexp(1.0, least),
        .overflow = largest + last_place / 2,
        .tie_overflows = fmod(largest / last_place, 2.0) == 1.0, /* the even neighbour is the one above */
    };
}

/* An exact magnitude: mantissa * 2^exponent. */
typedef struct magnitude {
    tm_u128 mantissa;
    int exponent;
} magnitude;

static magnitude of_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    const tm_exact_parts parts = tm_exact_split(bits);
    return (magnitude){parts.mantissa, parts.position - 1074};
}

/* The highest bit to the top; 0 gets an exponent below all others. */
static magnitude normalised(magnitude x) {
    const uint64_t high = (uint64_t)(x.mantissa >> 64), low = (uint64_t)x.mantissa;
    if (x.mantissa == 0) {
        return (magnitude){0, INT32_MIN};
    }
    const int shift = high != 0 ? __builtin_clzll(high) : 64 + __builtin_clzll(low);
    return (magnitude){x.mantissa << shift, x.exponent - shift};
}

/* Below 0, 0 or above it, as x * factor is below, at or above y. x.mantissa < 2^64, factor.mantissa < 2^53.
 */
static int compare_product(magnitude x, magnitude factor, magnitude y) {
    const magnitude left =
        normalised((magnitude){x.mantissa * factor.mantissa, x.exponent + factor.exponent});
    const magnitude right = normalised(y);
    if (left.exponent != right.exponent) {
        return left.exponent < right.exponent ? -1 : 1;
    }
    return left.mantissa < right.mantissa ? -1 : left.mantissa > right.mantissa;
}

static int is_beyond(magnitude x, double scale, double limit, int inclusive) {
    return compare_product(x, of_double(scale), of_double(limit)) >= (inclusive ? 0 : 1);
}

int tm_format_is_beyond(double value, double scale, double limit, int inclusive) {
    return is_beyond(of_double(value), scale, limit, inclusive);
}

/* The wide float dtypes; an integer's magnitude code is its value. */
typedef struct layout {
    int mantissa_bits, bias;
} layout;

static const layout layouts[] = {
    [TM_F64] = {52, 1023}, [TM_F32] = {23, 127}, [TM_F16] = {10, 15}, [TM_BF16] = {7, 127}};

static magnitude of_code(tm_dtype dtype, uint64_t code) {
    if (dtype > TM_BF16) {
        return (magnitude){code, 0};
    }
    const int bits = layouts[dtype].mantissa_bits, exponent = (int)(code >> bits), normal = exponent != 0;
    const uint64_t fraction = code & ((UINT64_C(1) << bits) - 1);
    return (magnitude){fraction | (uint64_t)normal << bits,
                       exponent - normal + 1 - layouts[dtype].bias - bits};
}

uint64_t tm_format_nonfinite_code(tm_dtype dtype) {
    return dtype > TM_BF16 ? 0 : (uint64_t)(2 * layouts[dtype].bias + 1) << layouts[dtype].mantissa_bits;
}

uint64_t tm_format_first_code(tm_dtype dtype, double scale, double limit, int inclusive) {
    const uint64_t nonfinite = tm_format_nonfinite_code(dtype);
    uint64_t below = 0; /* the value 0, which is beyond no limit */
    uint64_t code = nonfinite != 0 ? nonfinite - 1 : UINT64_MAX >> (64 - 8 * tm_dtype_size(dtype));
    if (!is_beyond(of_code(dtype, code), scale, limit, inclusive)) {
        return nonfinite;
    }
    while (code - below > 1) {
        const uint64_t middle = below + (code - below) / 2;
        if (is_beyond(of_code(dtype, middle), scale, limit, inclusive)) {
            code = middle;
        } else {
            below = middle;
        }
    }
    return code;
}
