/* Sorts counts (contract: tm_moe_kernels.h): as integers, by radix. The counts of a step are mostly whole and
 * near each other, so few bits tell them apart: one or two passes. */
#ifndef TM_MOE_SORT_H
#define TM_MOE_SORT_H

#include "tm_lanes.h"

#define TM_MOE_DIGIT_BITS 8
#define TM_MOE_FEW 32 /* sorted by insertion */

static void sort_few(uint64_t *keys, size_t n) {
    for (size_t i = 1; i < n; i++) {
        uint64_t key = keys[i];
        size_t at = i;
        for (; at > 0 && keys[at - 1] > key; at--) {
            keys[at] = keys[at - 1];
        }
        keys[at] = key;
    }
}

/* Keys below 2^bits, in passes of equal width; returns where the result is. Neighbours count in two tables:
 * equal ones would wait for each other. */
static uint64_t *sort_many(uint64_t *from, uint64_t *to, size_t n, int bits) {
    const int passes = (bits + TM_MOE_DIGIT_BITS - 1) / TM_MOE_DIGIT_BITS;
    const int width = (bits + passes - 1) / passes;
    const uint64_t digits = UINT64_C(1) << width, mask = digits - 1;
    for (int shift = 0; shift < bits; shift += width) {
        uint32_t start[2][1 << TM_MOE_DIGIT_BITS], at = 0;
        size_t i = 0;
        memset(start[0], 0, digits * sizeof **start);
        memset(start[1], 0, digits * sizeof **start);
        for (; i + 1 < n; i += 2) {
            start[0][from[i] >> shift & mask]++;
            start[1][from[i + 1] >> shift & mask]++;
        }
        if (i < n) {
            start[0][from[i] >> shift & mask]++;
        }
        for (uint64_t digit = 0; digit < digits; digit++) {
            const uint32_t count = start[0][digit] + start[1][digit];
            start[0][digit] = at;
            at += count;
        }
        for (i = 0; i < n; i++) {
            to[start[0][from[i] >> shift & mask]++] = from[i];
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    return from;
}

TM_NOINLINE void layer_sort(double *restrict sorted, const double *restrict counts, size_t n, uint64_t *keys,
                            uint64_t *spare) {
    /* c + 2^52 has the bits of 2^52, plus c if c is whole: the order is that of c, and no digit is lost where
     * subtracting gives c again. */
    const uint64_t whole = tm_moe_bits(0x1p52);
    uint64_t lossy = 0, least = UINT64_MAX, most = 0, *ordered = keys;
    for (size_t i = 0; i < n; i++) {
        const double shifted = counts[i] + 0x1p52;
        lossy |= tm_moe_bits(shifted - 0x1p52) ^ tm_moe_bits(counts[i]);
        keys[i] = tm_moe_bits(shifted) - whole;
    }
    for (size_t i = 0; lossy != 0 && i < n; i++) {
        keys[i] = tm_moe_bits(counts[i] + 0.0); /* numbers without a sign are ordered as their bits are */
    }
    for (size_t i = 0; i < n; i++) {
        least = keys[i] < least ? keys[i] : least;
        most = keys[i] > most ? keys[i] : most;
    }
    if (n <= TM_MOE_FEW) {
        least = 0;
        sort_few(keys, n);
    } else if (most > least) {
        for (size_t i = 0; i < n; i++) {
            keys[i] -= least;
        }
        ordered = sort_many(keys, spare, n, 64 - __builtin_clzll(most - least));
    } else {
        least = 0; /* all are equal, and stand as they are */
    }
    for (size_t i = 0; i < n; i++) {
        const uint64_t key = ordered[i] + least;
        sorted[i] = lossy != 0 ? tm_moe_value(key) : tm_moe_value(key + whole) - 0x1p52;
    }
}

#endif
