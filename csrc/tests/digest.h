/* Digests of results: one number that every tier, thread count and architecture must reproduce.
 *
 * What goes in is whole or made by the basic operations and roots of IEEE 754. What a libm computes (log,
 * exp) may differ in its last bit from machine to machine and stays out. Input comes from seed_random, so
 * that a digest doesn't depend on the tests before it.
 *
 *     uint64_t digest = DIGEST_START, before = seed_random(1);
 *     ... digest_doubles(&digest, results, count);
 *     seed_random(before);
 *     check_digest("family", digest, UINT64_C(0x...));   prints the number to put here when it differs */
#ifndef DIGEST_H
#define DIGEST_H

#include <stddef.h>
#include <stdint.h>

#define DIGEST_START UINT64_C(0xcbf29ce484222325)

void digest_word(uint64_t *digest, uint64_t word);
void digest_bytes(uint64_t *digest, const void *data, size_t bytes);
void digest_integers(uint64_t *digest, const int64_t *values, size_t count);
/* By their bits, all NaNs being equal. */
void digest_doubles(uint64_t *digest, const double *values, size_t count);
void digest_floats(uint64_t *digest, const float *values, size_t count);

/* next_random goes on from here; returns where it was. */
uint64_t seed_random(uint64_t state);

void check_digest(const char *name, uint64_t digest, uint64_t expected);

#endif
