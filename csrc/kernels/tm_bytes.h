/* One-byte dtypes: 256 possible values, so a block is counted and the arithmetic happens once per chunk. The
 * order of elements cannot matter. */
#ifndef TM_BYTES_H
#define TM_BYTES_H

#include "tm_lanes.h"

/* X(ENUM, name, offset, mask, first): a code is non-finite if ((code + offset) & mask) >= first. The *fnuz
 * types have one NaN, 0x80, no infinity and no -0; e4m3fn has no infinity; e8m0fnu has no sign and one NaN.
 */
#define TM_FLOAT8S(X)                                                                                        \
    X(F8E4M3FN, f8e4m3fn, 0, 0x7f, 0x7f)                                                                     \
    X(F8E4M3FNUZ, f8e4m3fnuz, 0x7f, 0xff, 0xff)                                                              \
    X(F8E4M3B11FNUZ, f8e4m3b11fnuz, 0x7f, 0xff, 0xff)                                                        \
    X(F8E5M2, f8e5m2, 0, 0x7f, 0x7c)                                                                         \
    X(F8E5M2FNUZ, f8e5m2fnuz, 0x7f, 0xff, 0xff)                                                              \
    X(F8E4M3, f8e4m3, 0, 0x7f, 0x78)                                                                         \
    X(F8E3M4, f8e3m4, 0, 0x7f, 0x70)                                                                         \
    X(F8E8M0FNU, f8e8m0fnu, 0, 0xff, 0xff)

/* The rows of a per-dtype table for all one-byte dtypes. */
#define TM_BYTE_ROWS(function)                                                                               \
    [TM_F8E4M3FN] = (function), [TM_F8E4M3FNUZ] = (function), [TM_F8E4M3B11FNUZ] = (function),               \
    [TM_F8E5M2] = (function), [TM_F8E5M2FNUZ] = (function), [TM_F8E4M3] = (function),                        \
    [TM_F8E3M4] = (function), [TM_F8E8M0FNU] = (function), [TM_I8] = (function), [TM_U8] = (function),       \
    [TM_BOOL] = (function)

/* Index of the first non-finite code of a float8 dtype, n if none: whole blocks by one comparison a code. */
TM_INLINE size_t tm_bytes_find(const uint8_t *p, size_t n, uint8_t offset, uint8_t mask, uint8_t first) {
    size_t i = 0;
    for (; n - i >= 1024; i += 1024) {
        uint8_t any = 0;
        tm_prefetch_row(p + i, 1024);
        for (size_t k = 0; k < 1024; k++) {
            any |= (uint8_t)((uint8_t)((p[i + k] + offset) & mask) >= first);
        }
        if (any) {
            break;
        }
    }
    while (i < n && (uint8_t)((p[i] + offset) & mask) < first) {
        i++;
    }
    return i;
}

TM_INLINE void tm_bytes_count(tm_byte_counts *counts, const uint8_t *p, size_t n) {
    size_t i = 0;
    for (; n - i >= 8; i += 8) {
        uint64_t word;
        memcpy(&word, p + i, 8);
        for (int k = 0; k < 8; k++) {
            counts->code[k % TM_SUBTABLES][word >> 8 * k & 0xff]++;
        }
        if (i % 64 == 0) {
            __builtin_prefetch(p + i + TM_PREFETCH_NEAR, 0, 3);
        }
    }
    for (; i < n; i++) {
        counts->code[0][p[i]]++;
    }
}

/* Adds the sub-tables; a chunk has fewer than 2^32 elements. */
TM_INLINE void tm_bytes_merge(const tm_byte_counts *counts, uint32_t *total) {
    for (int c = 0; c < 256; c++) {
        uint32_t sum = 0;
        for (int k = 0; k < TM_SUBTABLES; k++) {
            sum += counts->code[k][c];
        }
        total[c] = sum;
    }
}

#endif
