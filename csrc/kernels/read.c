/* The plain read that benchmarks compare with: adds 64-bit words, prefetching as the kernels do. 32
 * accumulators keep it waiting for memory only. */
#include "tm_widen.h"

typedef uint64_t __attribute__((may_alias, aligned(1))) word; /* any alignment, any element type */

static uint64_t plain_read(const void *data, size_t bytes) {
    const char *p = data;
    uint64_t total[TM_LANES] = {0};
    for (; bytes >= sizeof total; bytes -= sizeof total, p += sizeof total) {
        const word *row = (const word *)(const void *)p;
        tm_prefetch_row(p, sizeof total);
        for (int l = 0; l < TM_LANES; l++) {
            total[l] += row[l];
        }
    }
    for (int l = 1; l < TM_LANES; l++) {
        total[0] += total[l];
    }
    for (size_t i = 0; i < bytes; i++) {
        total[0] += (unsigned char)p[i];
    }
    return total[0];
}

const tm_read_kernels TM_TIERED(tm_read_kernels_) = {.read = plain_read};
