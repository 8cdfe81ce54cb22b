/* A counter-based stream of Gaussians, apart from every generator of the host: guarantees that rest on
 * independent draws hold only if nobody else made numbers from the same stream. */
#ifndef TM_RANDOM_H
#define TM_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; 2011).
 */
void tm_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* n standard normal numbers by the Box-Muller transform of 32-bit uniforms: a function of (seed, a, b, c) and
 * nothing else, up to the last bit of libm's logarithm and cosine. c < 2^24. */
void tm_gaussians(uint64_t seed, uint32_t a, uint32_t b, uint32_t c, size_t n, double *out);

#endif
