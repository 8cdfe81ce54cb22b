/* Signs of two lists of tensors, side by side. Counts have no order: lanes and tiers cannot show. */
#ifndef TM_SIGN_KERNELS_H
#define TM_SIGN_KERNELS_H

#include "../core/tm_dtype.h"

#include <stddef.h>
#include <stdint.h>

#define TM_SIGN_ROOM 1024 /* elements of a block, at most */

/* Codes of signs. Zeros and NaN have none. */
enum { TM_SIGN_NONE, TM_SIGN_PLUS, TM_SIGN_MINUS };

typedef struct tm_sign_counts {
    int64_t same, opposite; /* pairs of elements that both have a sign */
} tm_sign_counts;

typedef struct tm_sign_kernels {
    /* The code of each element of a block. byte_signs: of each code of a one-byte dtype; others ignore it. */
    void (*of[TM_DTYPE_COUNT])(uint8_t *signs, const void *data, size_t n, const uint8_t *byte_signs);
    /* Adds the pairs of two blocks of codes. */
    void (*count)(tm_sign_counts *counts, const uint8_t *a, const uint8_t *b, size_t n);
} tm_sign_kernels;

#endif
