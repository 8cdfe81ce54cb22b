#include "tm_exact.h"

#include <math.h>

static void put_part(int64_t *digits, int64_t sign, tm_u128 part, int position) {
    int64_t *digit = digits + (position >> 5);
    part <<= position & 31;
    for (int i = 0; i < 4; i++, part >>= 32) {
        digit[i] += ((int64_t)(uint32_t)part ^ sign) - sign;
    }
}

void tm_exact_put(int64_t *digits, int negative, uint64_t factor, uint64_t weight, int position) {
    const int64_t sign = -(int64_t)(negative != 0);
    put_part(digits, sign, (tm_u128)factor * (uint32_t)weight, position);
    if (weight >> 32 != 0) {
        put_part(digits, sign, (tm_u128)factor * (weight >> 32), position + 32);
    }
}

void tm_exact_normalise(int64_t *digits, int count) {
    int64_t carry = 0;
    for (int i = 0; i < count - 1; i++) {
        const int64_t value = digits[i] + carry;
        digits[i] = value & 0xffffffff;
        carry = value >> 32;
    }
    digits[count - 1] += carry;
}

/* The magnitude's digits; returns whether the number is negative. */
static int take_magnitude(const int64_t *digits, uint32_t *magnitude) {
    const int negative = digits[TM_EXACT_DIGITS - 1] < 0;
    int64_t carry = negative;
    for (int i = 0; i < TM_EXACT_DIGITS; i++) {
        const int64_t value = (negative ? ~digits[i] & 0xffffffff : digits[i]) + carry;
        magnitude[i] = (uint32_t)value;
        carry = value >> 32;
    }
    return negative;
}

/* quotient * 2^exponent and a bit more if `sticky`, to the nearest double; 2^62 <= quotient < 2^63. */
static double round_to_double(uint64_t quotient, int exponent, int sticky) {
    int drop = 63 - 53;
    if (exponent + drop < -1074) {
        drop = -1074 - exponent;
    }
    if (drop > 63) { /* below half of the smallest double */
        return 0;
    }
    const uint64_t half = UINT64_C(1) << (drop - 1), rest = quotient & (2 * half - 1);
    uint64_t kept = quotient >> drop;
    if (rest > half || (rest == half && (sticky || (kept & 1) != 0))) {
        kept++;
    }
    return ldexp((double)kept, exponent + drop);
}

double tm_exact_quotient(const int64_t *digits, tm_u128 divisor) {
    uint32_t magnitude[TM_EXACT_DIGITS];
    const int negative = take_magnitude(digits, magnitude);
    int top = TM_EXACT_DIGITS - 1;
    while (top >= 0 && magnitude[top] == 0) {
        top--;
    }
    if (top < 0) {
        return 0;
    }
    /* Long division bit by bit, below the point too, until 63 bits of the quotient are known. */
    int bit = 32 * top + 31;
    uint64_t quotient = 0;
    tm_u128 rest = 0;
    while (quotient >> 62 == 0) {
        const uint32_t next = bit >= 0 ? magnitude[bit >> 5] >> (bit & 31) & 1 : 0;
        bit--;
        rest = rest << 1 | next;
        const int fits = rest >= divisor;
        rest -= fits ? divisor : 0;
        quotient = quotient << 1 | (uint64_t)fits;
    }
    int sticky = rest != 0;
    for (int i = 0; i < TM_EXACT_DIGITS && 32 * i <= bit; i++) {
        const int within = bit - 32 * i; /* bits 0 to `within` of this digit are unread */
        sticky |= (within >= 31 ? magnitude[i] : magnitude[i] & ((2u << within) - 1)) != 0;
    }
    const double value = round_to_double(quotient, bit + 1 - 1074, sticky);
    return negative ? -value : value;
}
