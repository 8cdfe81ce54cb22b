#include "tm_random.h"

#include <math.h>

void tm_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t x[4] = {counter[0], counter[1], counter[2], counter[3]}, k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p = UINT64_C(0xD2511F53) * x[0], q = UINT64_C(0xCD9E8D57) * x[2];
        uint32_t next[4] = {(uint32_t)(q >> 32) ^ x[1] ^ k0, (uint32_t)q, (uint32_t)(p >> 32) ^ x[3] ^ k1,
                            (uint32_t)p};
        for (int i = 0; i < 4; i++) {
            x[i] = next[i];
        }
        k0 += UINT32_C(0x9E3779B9);
        k1 += UINT32_C(0xBB67AE85);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = x[i];
    }
}

/* In the middle of its 2^-32: never 0 or 1. */
static double uniform(uint32_t word) {
    return (word + 0.5) * 0x1p-32;
}

/* The counter is (block, a, b, c and the block's upper bits): 2^40 blocks of four numbers. */
void tm_gaussians(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, size_t n, double *out) {
    const double turn = 6.283185307179586;
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (size_t i = 0; i < n; i += 4) {
        uint64_t block = i / 4;
        uint32_t counter[4] = {(uint32_t)block, a, b, c << 8 | (uint32_t)(block >> 32)}, word[4];
        double value[4];
        tm_philox(counter, key, word);
        for (int pair = 0; pair < 4; pair += 2) {
            double radius = sqrt(-2.0 * log(uniform(word[pair]))), angle = turn * uniform(word[pair + 1]);
            value[pair] = radius * cos(angle);
            value[pair + 1] = radius * sin(angle);
        }
        for (size_t j = 0; j < 4 && i + j < n; j++) {
            out[i + j] = value[j];
        }
    }
}
