/* How often each value occurs among the bytes of a group: no element waits for another one's store, as with a
 * table of counters, because nothing is stored before the group ends. */
#ifndef TM_TALLY_H
#define TM_TALLY_H

#include "tm_bytes.h"
#include "tm_widen.h"

#define TM_TALLY_ROW 64
#define TM_TALLY_GROUP 4096 /* elements; their bytes and a group of float32 stay in L1 */

typedef struct tm_tally_range {
    int first, last; /* of the bytes other than 0 and 255; first > last: there are none */
    int has_lowest, has_highest;
} tm_tally_range;

/* Prefetches a line a row from `ahead`: memory is not idle while a group is counted. */
TM_NOINLINE tm_tally_range tm_tally_find_range(const uint8_t *bytes, size_t rows, const char *ahead) {
    uint8_t least[TM_TALLY_ROW], most[TM_TALLY_ROW], low[TM_TALLY_ROW], high[TM_TALLY_ROW];
    memset(least, 0xff, sizeof least);
    memset(low, 0xff, sizeof low);
    memset(most, 0, sizeof most);
    memset(high, 0, sizeof high);
    for (size_t r = 0; r < rows; r++, bytes += TM_TALLY_ROW) {
        TM_PREFETCH(ahead + 64 * r, 2);
        for (int l = 0; l < TM_TALLY_ROW; l++) { /* one less than 0 is 255, one more than 255 is 0 */
            const uint8_t less = (uint8_t)(bytes[l] - 1), more = (uint8_t)(bytes[l] + 1);
            least[l] = bytes[l] < least[l] ? bytes[l] : least[l];
            most[l] = bytes[l] > most[l] ? bytes[l] : most[l];
            low[l] = less < low[l] ? less : low[l];
            high[l] = more > high[l] ? more : high[l];
        }
    }
    for (int width = TM_TALLY_ROW / 2; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) {
            least[l] = least[l + width] < least[l] ? least[l + width] : least[l];
            most[l] = most[l + width] > most[l] ? most[l + width] : most[l];
            low[l] = low[l + width] < low[l] ? low[l + width] : low[l];
            high[l] = high[l + width] > high[l] ? high[l + width] : high[l];
        }
    }
    return (tm_tally_range){low[0] + 1, high[0] - 1, least[0] == 0, most[0] == 255};
}

/* At most 255 rows. */
TM_NOINLINE int64_t tm_tally_equal(const uint8_t *bytes, size_t rows, uint8_t value) {
    uint8_t count[TM_TALLY_ROW] = {0};
    int64_t total = 0;
    for (size_t r = 0; r < rows; r++, bytes += TM_TALLY_ROW) {
        for (int l = 0; l < TM_TALLY_ROW; l++) {
            count[l] = (uint8_t)(count[l] + (bytes[l] == value));
        }
    }
    for (int l = 0; l < TM_TALLY_ROW; l++) {
        total += count[l];
    }
    return total;
}

#if defined(__AVX512BW__)
/* 16 values at a time. A table look-up turns each byte into one of 8 bits, or 0 for another value; bits at
 * the same place are then added by full adders on whole vectors, which have counted 16 rows before the first
 * bit is looked at. Two look-ups serve 16 values: 8 instructions for 64 elements, where comparing takes 32.
 * Measured: docs/kernels/histograms.md. */
#    define TM_TALLY_ROUND 16 /* rows */
#    define TM_TALLY_FEW 128

typedef struct tm_tally_adder {
    __m512i ones, twos, fours, eights;
} tm_tally_adder;

TM_INLINE __m512i tm_tally_carry(__m512i *sum, __m512i a, __m512i b) {
    const __m512i carry = _mm512_ternarylogic_epi64(*sum, a, b, 0xe8);
    *sum = _mm512_ternarylogic_epi64(*sum, a, b, 0x96);
    return carry;
}

/* Adds 4 one-hot rows; what overflows `twos` goes to the fours. */
TM_INLINE __m512i tm_tally_four(tm_tally_adder *adder, const __m512i *row) {
    const __m512i twos = tm_tally_carry(&adder->ones, row[0], row[1]);
    return tm_tally_carry(&adder->twos, twos, tm_tally_carry(&adder->ones, row[2], row[3]));
}

TM_INLINE __m512i tm_tally_sixteen(tm_tally_adder *adder, const __m512i *row) {
    __m512i four = tm_tally_four(adder, row);
    const __m512i eight = tm_tally_carry(&adder->fours, four, tm_tally_four(adder, row + 4));
    four = tm_tally_four(adder, row + 8);
    return tm_tally_carry(&adder->eights, eight,
                          tm_tally_carry(&adder->fours, four, tm_tally_four(adder, row + 12)));
}

TM_INLINE void tm_tally_weigh(uint32_t *count, __m512i bits, int weight) {
    for (int i = 0; i < 8; i++) {
        const uint64_t set = _mm512_test_epi8_mask(bits, _mm512_set1_epi8((char)(1 << i)));
        count[i] += (uint32_t)(__builtin_popcountll(set) * weight);
    }
}

TM_NOINLINE void tm_tally_window(uint32_t *count, const uint8_t *bytes, size_t rows, int first) {
    const __m512i zero = _mm512_setzero_si512();
    const __m512i low_table =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, 2, 4, 8, 16, 32, 64, -128, 0, 0, 0, 0, 0, 0, 0, 0));
    const __m512i high_table = _mm512_bslli_epi128(low_table, 8);
    tm_tally_adder low = {zero, zero, zero, zero}, high = low;
    __m512i low_row[TM_TALLY_ROUND], high_row[TM_TALLY_ROUND];
    const __m512i start = _mm512_set1_epi8((char)first), past = _mm512_set1_epi8(0x70);
    for (size_t r = 0; r < rows; r += TM_TALLY_ROUND, bytes += TM_TALLY_ROUND * TM_TALLY_ROW) {
        for (int i = 0; i < TM_TALLY_ROUND; i++) {
            const __m512i value = _mm512_loadu_si512(bytes + i * TM_TALLY_ROW);
            /* 16 or more from the window's start: the upper bit is set, and the look-up gives 0. */
            const __m512i place = _mm512_adds_epu8(_mm512_sub_epi8(value, start), past);
            low_row[i] = _mm512_shuffle_epi8(low_table, place);
            high_row[i] = _mm512_shuffle_epi8(high_table, place);
        }
        tm_tally_weigh(count, tm_tally_sixteen(&low, low_row), 16);
        tm_tally_weigh(count + 8, tm_tally_sixteen(&high, high_row), 16);
    }
    tm_tally_weigh(count, low.eights, 8);
    tm_tally_weigh(count, low.fours, 4);
    tm_tally_weigh(count, low.twos, 2);
    tm_tally_weigh(count, low.ones, 1);
    tm_tally_weigh(count + 8, high.eights, 8);
    tm_tally_weigh(count + 8, high.fours, 4);
    tm_tally_weigh(count + 8, high.twos, 2);
    tm_tally_weigh(count + 8, high.ones, 1);
}

TM_INLINE void tm_tally_values(int64_t *bin, const uint8_t *bytes, size_t rows, int first, int last) {
    for (; first <= last; first += 16) {
        uint32_t count[16] = {0};
        tm_tally_window(count, bytes, rows, first);
        for (int i = 0; i < 16 && first + i <= last; i++) {
            bin[first + i] += count[i];
        }
    }
}
#else
#    define TM_TALLY_ROUND 1
#    define TM_TALLY_FEW 32

TM_INLINE void tm_tally_values(int64_t *bin, const uint8_t *bytes, size_t rows, int first, int last) {
    for (int value = first; value <= last; value++) {
        bin[value] += tm_tally_equal(bytes, rows, (uint8_t)value);
    }
}
#endif

/* Tables of counters take the same time for any bytes: they are for groups of more than TM_TALLY_FEW values.
 */
TM_NOINLINE void tm_tally_many(int64_t *bin, const uint8_t *bytes, size_t n, int first, int last) {
    tm_byte_counts tables;
    uint32_t count[256];
    memset(&tables, 0, sizeof tables);
    tm_bytes_count(&tables, bytes, n);
    tm_bytes_merge(&tables, count);
    for (int value = first; value <= last; value++) {
        bin[value] += count[value];
    }
}

/* Adds the bytes of a group to bin[256]. 0 < n <= TM_TALLY_GROUP; what lies behind `n` in the group is
 * overwritten. Prefetches from behind `next`, where the next group lies. */
TM_INLINE void tm_tally_group(int64_t *bin, uint8_t *bytes, size_t n, const void *next) {
    const size_t round = TM_TALLY_ROUND * TM_TALLY_ROW;
    const size_t whole = (n + round - 1) / round * round, rows = whole / TM_TALLY_ROW;
    memset(bytes + n, 0, whole - n);
    const tm_tally_range range = tm_tally_find_range(bytes, rows, (const char *)next + TM_PREFETCH_FAR);
    bin[0] += range.has_lowest ? tm_tally_equal(bytes, rows, 0) - (int64_t)(whole - n) : 0;
    bin[255] += range.has_highest ? tm_tally_equal(bytes, rows, 255) : 0;
    if (range.last - range.first < TM_TALLY_FEW) {
        tm_tally_values(bin, bytes, rows, range.first, range.last);
    } else {
        tm_tally_many(bin, bytes, n, range.first, range.last);
    }
}

#endif
