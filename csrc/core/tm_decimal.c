/* Shortest decimals by Schubfach (Raffaello Giulietti, "The Schubfach way to render doubles", 2020): of the
 * numbers d * 10^k that round to the value, one with the fewest digits, and of these the closest. One
 * multiplication with a 128-bit power of ten for the value and for each end of its rounding interval; no
 * loops, no fallback. float takes the same way: its values are doubles with wider intervals. */
#include "tm_decimal.h"

#include "tm_exact.h"
#include "tm_powers.h"

#include <string.h>

typedef struct decimal {
    uint64_t digits; /* value = digits * 10^exponent */
    int exponent;
} decimal;

static int floor_log2_pow10(int e) {
    return e * 1741647 >> 19;
}

/* The upper 64 bits of power * factor / 2^64, the last of them set if anything was cut off. */
static uint64_t multiply(const uint64_t *power, uint64_t factor) {
    const tm_u128 low = (tm_u128)power[1] * factor;
    const tm_u128 product = (tm_u128)power[0] * factor + (uint64_t)(low >> 64);
    return (uint64_t)(product >> 64) | ((uint64_t)product > 1);
}

/* mantissa * 2^exponent > 0; closer_below: the next smaller value is half as far away as the next greater
 * one. */
static decimal shortest(uint64_t mantissa, int exponent, int closer_below) {
    if (exponent <= 0 && exponent > -64 && (mantissa & ((UINT64_C(1) << -exponent) - 1)) == 0) {
        return (decimal){mantissa >> -exponent, 0}; /* an integer below 2^53 */
    }
    const int odd =
        (int)(mantissa & 1); /* an even value wins its ties: the ends of its interval are its own */
    const uint64_t middle = 4 * mantissa, left = middle - 2 + (uint64_t)closer_below, right = middle + 2;
    const int k =
        (exponent * 1262611 - (closer_below ? 524031 : 0)) >> 22; /* floor of log10 of the interval */
    const int shift = exponent + floor_log2_pow10(-k) + 1;
    const uint64_t *power = tm_powers[-k - TM_POWERS_LOWEST];
    const uint64_t lower = multiply(power, left << shift) + (uint64_t)odd;
    const uint64_t upper = multiply(power, right << shift) - (uint64_t)odd;
    const uint64_t value = multiply(power, middle << shift), s = value / 4; /* all three in quarters */
    if (s >= 10) {
        const uint64_t tenth = s / 10; /* one digit less, if exactly one of the two neighbours is inside */
        const int below = lower <= 40 * tenth, above = 40 * tenth + 40 <= upper;
        if (below != above) {
            return (decimal){tenth + (uint64_t)above, k + 1};
        }
    }
    const int below = lower <= 4 * s, above = 4 * s + 4 <= upper;
    if (below != above) {
        return (decimal){s + (uint64_t)above, k};
    }
    const uint64_t half = 4 * s + 2; /* both inside, or none: the closer one, ties to even */
    return (decimal){s + (uint64_t)(value > half || (value == half && (s & 1) != 0)), k};
}

static const char pairs[] = "00010203040506070809101112131415161718192021222324252627282930313233343536373839"
                            "40414243444546474849505152535455565758596061626364656667686970717273747576777879"
                            "8081828384858687888990919293949596979899";

/* Writes the digits so that they end before `end`; returns where they begin. */
static char *digits_before(char *end, uint64_t value) {
    for (; value >= 100; value /= 100) {
        end -= 2;
        memcpy(end, pairs + 2 * (value % 100), 2);
    }
    if (value >= 10) {
        end -= 2;
        memcpy(end, pairs + 2 * value, 2);
    } else {
        *--end = (char)('0' + value);
    }
    return end;
}

static char *zeros(char *out, int count) {
    memset(out, '0', (size_t)count);
    return out + count;
}

static char *text(char *out, const char *from, int count) {
    memcpy(out, from, (size_t)count);
    return out + count;
}

/* As Python prints it: with an exponent below 1e-4 and from 1e16 on. */
static char *write_decimal(char *out, decimal number) {
    char buffer[20], *end = buffer + sizeof buffer;
    const char *digits = digits_before(end, number.digits);
    int count = (int)(end - digits);
    const int point = count + number.exponent; /* digits before the point */
    while (count > 1 && digits[count - 1] == '0') {
        count--;
    }
    if (point <= -4 || point > 16) {
        int exponent = point - 1;
        *out++ = digits[0];
        if (count > 1) {
            *out++ = '.';
            out = text(out, digits + 1, count - 1);
        }
        *out++ = 'e';
        *out++ = exponent < 0 ? '-' : '+';
        exponent = exponent < 0 ? -exponent : exponent;
        if (exponent >= 100) {
            *out++ = (char)('0' + exponent / 100);
            exponent %= 100;
        }
        return text(out, pairs + 2 * exponent, 2);
    }
    if (point <= 0) {
        out = zeros(text(out, "0.", 2), -point);
        return text(out, digits, count);
    }
    if (point < count) {
        out = text(out, digits, point);
        *out++ = '.';
        return text(out, digits + point, count - point);
    }
    out = zeros(text(out, digits, count), point - count);
    return text(out, ".0", 2);
}

char *tm_decimal_f64(char *out, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (bits >> 63 != 0) {
        *out++ = '-';
    }
    if (bits << 1 == 0) {
        return text(out, "0.0", 3);
    }
    const tm_exact_parts parts = tm_exact_split(bits);
    const int closer_below = bits << 12 == 0 && parts.position > 0;
    return write_decimal(out, shortest(parts.mantissa, parts.position - 1074, closer_below));
}

char *tm_decimal_f32(char *out, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (bits >> 31 != 0) {
        *out++ = '-';
    }
    if (bits << 1 == 0) {
        return text(out, "0.0", 3);
    }
    const int exponent = (int)(bits >> 23 & 0xff), normal = exponent != 0;
    const uint64_t mantissa = (bits & 0x7fffff) | (uint64_t)normal << 23;
    const int closer_below = bits << 9 == 0 && exponent > 1;
    return write_decimal(out, shortest(mantissa, exponent - normal - 149, closer_below));
}

char *tm_decimal_u64(char *out, uint64_t value) {
    char buffer[20], *end = buffer + sizeof buffer;
    const char *digits = digits_before(end, value);
    return text(out, digits, (int)(end - digits));
}

char *tm_decimal_i64(char *out, int64_t value) {
    if (value < 0) {
        *out++ = '-';
        return tm_decimal_u64(out, -(uint64_t)value);
    }
    return tm_decimal_u64(out, (uint64_t)value);
}
