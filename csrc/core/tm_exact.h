/* Exact sums: a fixed-point number as wide as double's whole range and more, in digits of 32 bits.
 *
 * value = sum of digits[i] * 2^(32 i - 1074). Additions go into int64 words without carrying, so that sums of
 * such numbers are sums of their digits, in any order, also across processes. Normalised, all digits but the
 * top one are in [0, 2^32) and the number has one form only; the top digit carries the sign. Private to
 * csrc/core. */
#ifndef TM_EXACT_H
#define TM_EXACT_H

#include <stdint.h>

#define TM_EXACT_DIGITS 70 /* up to 2^1165: 2^78 products of the largest double and the largest int64 */
#define TM_EXACT_MANTISSA_BITS 52
#define TM_EXACT_TOP_POSITION 2045 /* of the largest doubles; infinities and NaN lie one above */

__extension__ typedef unsigned __int128 tm_u128;

/* A finite double is mantissa * 2^(position - 1074), mantissa < 2^53, position from 0 to
 * TM_EXACT_TOP_POSITION. */
typedef struct tm_exact_parts {
    uint64_t mantissa;
    int position, negative;
} tm_exact_parts;

static inline tm_exact_parts tm_exact_split(uint64_t bits) {
    const uint64_t fraction = bits & ((UINT64_C(1) << TM_EXACT_MANTISSA_BITS) - 1);
    const int exponent = (int)(bits >> TM_EXACT_MANTISSA_BITS & 0x7ff), normal = exponent != 0;
    return (tm_exact_parts){.mantissa = fraction | (uint64_t)normal << TM_EXACT_MANTISSA_BITS,
                            .position = exponent - normal,
                            .negative = (int)(bits >> 63)};
}

/* Adds (-1)^negative * factor * weight * 2^(position - 1074), weight < 2^63; factor < 2^63 for weights below
 * 2^32, else 2^53. Moves no digit by more than 2^33. */
void tm_exact_put(int64_t *digits, int negative, uint64_t factor, uint64_t weight, int position);

/* Carries, lowest digit first; the last of the `count` digits keeps what is left. |digits| < 2^62. */
void tm_exact_normalise(int64_t *digits, int count);

/* The quotient with an integer 0 < divisor < 2^127, correctly rounded (ties to even, subnormals too). The
 * number is normalised and its top digit fits 32 bits. */
double tm_exact_quotient(const int64_t *digits, tm_u128 divisor);

#endif
