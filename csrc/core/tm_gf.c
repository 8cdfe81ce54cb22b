#include "tm_gf.h"

/* a * z^count, 0 < count <= 4: what leaves at the top comes back as the low powers of the polynomial. */
static tm_gf shift(int width, tm_gf a, int count) {
    if (width == TM_FINGERPRINT_64) {
        uint64_t over = a.low >> (64 - count);
        return (tm_gf){a.low << count ^ over ^ over << 1 ^ over << 3 ^ over << 4, 0};
    }
    uint64_t over = a.high >> (64 - count);
    return (tm_gf){a.low << count ^ over ^ over << 1 ^ over << 2 ^ over << 7,
                   a.high << count | a.low >> (64 - count)};
}

/* The products of a with 0 to 15. */
static void fill_products(int width, tm_gf a, tm_gf product[16]) {
    product[0] = (tm_gf){0, 0};
    product[1] = a;
    for (int i = 2; i < 16; i += 2) {
        product[i] = shift(width, product[i / 2], 1);
        product[i + 1] = tm_gf_add(product[i], a);
    }
}

static unsigned nibble(tm_gf a, int j) {
    return (unsigned)((j < 16 ? a.low : a.high) >> 4 * (j % 16) & 15);
}

tm_gf tm_gf_multiply(int width, tm_gf a, tm_gf b) {
    tm_gf product[16], sum = {0, 0};
    fill_products(width, b, product);
    for (int j = width == TM_FINGERPRINT_64 ? 15 : 31; j >= 0; j--) {
        sum = tm_gf_add(shift(width, sum, 4), product[nibble(a, j)]);
    }
    return sum;
}

void tm_gf_fill_powers(int width, tm_gf power[64]) {
    power[0] = (tm_gf){2, 0};
    for (int j = 1; j < 64; j++) {
        power[j] = tm_gf_multiply(width, power[j - 1], power[j - 1]);
    }
}

tm_gf tm_gf_power(const tm_table *table, int width, uint64_t exponent) {
    tm_gf result = {1, 0};
    int first = 1;
    for (int j = 0; exponent != 0; j++, exponent >>= 1) {
        if (exponent & 1) {
            result =
                first ? table->gf_power[width][j] : tm_gf_multiply(width, result, table->gf_power[width][j]);
            first = 0;
        }
    }
    return result;
}

void tm_gf_multiplier_init(tm_gf_multiplier *multiplier, int width, tm_gf factor) {
    for (int j = 0; j < 32; j++) {
        fill_products(width, factor, multiplier->product[j]);
        factor = shift(width, factor, 4);
    }
}

tm_gf tm_gf_multiplier_apply(const tm_gf_multiplier *multiplier, tm_gf a) {
    tm_gf sum = {0, 0};
    for (int j = 0; j < 32; j++) {
        sum = tm_gf_add(sum, multiplier->product[j][nibble(a, j)]);
    }
    return sum;
}
