/* Arithmetic in GF(2)[z] modulo the polynomials of tm_fingerprint_kernels.h, for the few products that a
 * fingerprint needs beside its kernels. `width` is TM_FINGERPRINT_64 or _128. */
#ifndef TM_GF_H
#define TM_GF_H

#include "tm_table.h"

static inline tm_gf tm_gf_add(tm_gf a, tm_gf b) {
    return (tm_gf){a.low ^ b.low, a.high ^ b.high};
}

tm_gf tm_gf_multiply(int width, tm_gf a, tm_gf b);

/* z^exponent. */
tm_gf tm_gf_power(const tm_table *table, int width, uint64_t exponent);

/* For dispatch: power[j] = z^(2^j). */
void tm_gf_fill_powers(int width, tm_gf power[64]);

/* Many products with one factor, 4 bits at a time. */
typedef struct tm_gf_multiplier {
    tm_gf product[32][16]; /* [j][i]: i * z^(4j) * factor */
} tm_gf_multiplier;

void tm_gf_multiplier_init(tm_gf_multiplier *multiplier, int width, tm_gf factor);
tm_gf tm_gf_multiplier_apply(const tm_gf_multiplier *multiplier, tm_gf a);

#endif
