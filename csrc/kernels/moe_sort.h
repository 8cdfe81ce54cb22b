/* Sorts counts (contract: tm_moe_kernels.h): as integers, by radix. The counts of a step are mostly whole and
 * near each other, so few bits tell them apart: one table, or two passes. */
#ifndef TM_MOE_SORT_H
#define TM_MOE_SORT_H

#include "tm_lanes.h"

#define TM_MOE_DIGIT_BITS 8
#define TM_MOE_FEW 32 /* sorted by insertion */
#define TM_MOE_CODES                                                                                         \
    1024 /* of one table: a code takes half the time of a count in two passes of the radix                   \
          */

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

/* Keys are codes of numbers: of c + 2^52 less those of 2^52, or those of c. */
TM_INLINE double number_of(uint64_t key, int as_whole) {
    return as_whole ? tm_moe_value(key + tm_moe_bits(0x1p52)) - 0x1p52 : tm_moe_value(key);
}

/* Keys from `least` on, below `least` + codes: one table says how often each occurs. */
static size_t count_runs(const tm_moe_runs *out, const uint64_t *keys, size_t n, uint64_t least, size_t codes,
                         int as_whole) {
    uint32_t table[2][TM_MOE_CODES];
    size_t runs = 0, i = 0, before = 0;
    memset(table[0], 0, codes * sizeof **table);
    memset(table[1], 0, codes * sizeof **table);
    for (; i + 1 < n; i += 2) {
        table[0][keys[i] - least]++;
        table[1][keys[i + 1] - least]++;
    }
    if (i < n) {
        table[0][keys[i] - least]++;
    }
    for (size_t code = 0; code < codes; code++) { /* a code that does not occur is overwritten by the next */
        const size_t times = (size_t)table[0][code] + table[1][code];
        out->value[runs] = number_of(least + code, as_whole);
        out->times[runs] = (double)times;
        out->before[runs] = (double)before;
        before += times;
        runs += times != 0;
    }
    return runs;
}

static size_t sorted_runs(const tm_moe_runs *out, const uint64_t *sorted, size_t n, uint64_t least,
                          int as_whole) {
    size_t runs = 0, before = 0;
    for (size_t i = 1; i <= n; i++) {
        if (i == n || sorted[i] != sorted[i - 1]) {
            out->value[runs] = number_of(sorted[i - 1] + least, as_whole);
            out->times[runs] = (double)(i - before);
            out->before[runs++] = (double)before;
            before = i;
        }
    }
    return runs;
}

TM_NOINLINE size_t layer_runs(const tm_moe_runs *out, const double *counts, size_t n, uint64_t *keys,
                              uint64_t *spare) {
    /* c + 2^52 has the bits of 2^52, plus c if c is whole: the order is that of c, and no digit is lost where
     * subtracting gives c again. */
    const uint64_t whole = tm_moe_bits(0x1p52);
    uint64_t lossy = 0, least = UINT64_MAX, most = 0;
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
        sort_few(keys, n);
        return sorted_runs(out, keys, n, 0, lossy == 0);
    }
    if (most - least < 4 * n && most - least < TM_MOE_CODES) {
        return count_runs(out, keys, n, least, (size_t)(most - least) + 1, lossy == 0);
    }
    for (size_t i = 0; i < n; i++) {
        keys[i] -= least;
    }
    const uint64_t *sorted = sort_many(keys, spare, n, 64 - __builtin_clzll(most - least));
    return sorted_runs(out, sorted, n, least, lossy == 0);
}

#endif
