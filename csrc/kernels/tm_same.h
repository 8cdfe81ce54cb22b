/* How many elements of two blocks have equal bits; each kernel file makes the types that it needs. */
#ifndef TM_SAME_H
#define TM_SAME_H

#include "tm_widen.h"

/* By size; a lane's counter must hold the block's rows: TM_BLOCK_ROWS of them from two bytes on. */
#define TM_SAME(type)                                                                                        \
    TM_NOINLINE int64_t tm_same_##type(const void *now, const void *before, size_t n) {                      \
        typedef type __attribute__((may_alias)) element;                                                     \
        const element *a = now, *b = before;                                                                 \
        type lane[TM_LANES] = {0};                                                                           \
        int64_t total = 0;                                                                                   \
        size_t i = 0;                                                                                        \
        for (; n - i >= TM_LANES; i += TM_LANES) {                                                           \
            for (int l = 0; l < TM_LANES; l++) {                                                             \
                lane[l] = (type)(lane[l] + (a[i + (size_t)l] == b[i + (size_t)l]));                          \
            }                                                                                                \
        }                                                                                                    \
        for (int l = 0; l < TM_LANES; l++) {                                                                 \
            total += lane[l];                                                                                \
        }                                                                                                    \
        for (; i < n; i++) {                                                                                 \
            total += a[i] == b[i];                                                                           \
        }                                                                                                    \
        return total;                                                                                        \
    }

#endif
