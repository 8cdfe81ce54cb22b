/* Fingerprints by folding (contract and technique: tm_fingerprint_kernels.h). No carry-less multiplication:
 * both polynomials have five terms, and rows of 64 bytes make each power of z in the identity a whole number
 * of rows. */
#include "tm_streaming.h"

#include <string.h>

/* Rows are folded in strips as wide as a register of the tier, of any alignment and over any element type.
 * Vector types, because gcc takes loops over the words of a row to pieces (AVX-512, in cache: 20 against 40
 * GB/s). */
#if defined(__AVX512F__)
#    define TM_STRIP_BYTES 64
#elif defined(__AVX2__)
#    define TM_STRIP_BYTES 32
#else
#    define TM_STRIP_BYTES 16
#endif
#define TM_STRIPS (TM_PRINT_ROW / TM_STRIP_BYTES)
#define TM_STRIP_ROWS 16
typedef uint64_t tm_strip __attribute__((vector_size(TM_STRIP_BYTES), may_alias, aligned(1)));

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#    define TM_LITTLE(word) __builtin_bswap64(word)
#    define TM_LITTLE_STRIP(strip)                                                                           \
        (tm_strip) {                                                                                         \
            TM_LITTLE((strip)[0]), TM_LITTLE((strip)[1])                                                     \
        }
#else
#    define TM_LITTLE(word) (word)
#    define TM_LITTLE_STRIP(strip) (strip)
#endif

/* How rows are copied past the caches: not at all, each from its register, or a few at a time from the first
 * cache. */
enum { TM_NOT, TM_REGISTERS, TM_LINES };

/* A strip that is a whole row goes past the caches from its register. */
TM_INLINE void stream_row(char *to, tm_strip row) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i *)(void *)to, (__m512i)row);
#else
    (void)to, (void)row;
#endif
}

/* Into the second cache: whoever reads the bytes first prefetches them from there. */
TM_INLINE void tm_prefetch_second(const char *ahead, int bytes) {
    for (int offset = 0; offset < bytes; offset += 64) {
        __builtin_prefetch(ahead + offset, 0, 2);
    }
}

/* The strip `tap` rows before row r, in TM_STEP of the template. */
#define TM_BACK_2(r, back_2, back_3) back_2
#define TM_BACK_3(r, back_2, back_3) back_3
#define TM_BACK_4(r, back_4) back_4
#define TM_BACK_7(r, back_4) slot[((r) - 7) * TM_STRIPS]

#define TM_BITS 128
#define TM_TAP_1 1
#define TM_TAP_2 2
#define TM_TAP_3 7
#include "fingerprint_fold.h"

#define TM_BITS 64
#define TM_TAP_1 1
#define TM_TAP_2 3
#define TM_TAP_3 4
#include "fingerprint_fold.h"

const tm_fingerprint_kernels TM_TIERED(tm_fingerprint_kernels_) = {
    .rows = {[TM_FINGERPRINT_64] = fingerprint_rows_64, [TM_FINGERPRINT_128] = fingerprint_rows_128},
    .rows_copying = {[TM_FINGERPRINT_64] = fingerprint_rows_copying_64,
                     [TM_FINGERPRINT_128] = fingerprint_rows_copying_128},
    .close = {[TM_FINGERPRINT_64] = fingerprint_close_64, [TM_FINGERPRINT_128] = fingerprint_close_128},
    .small = {[TM_FINGERPRINT_64] = fingerprint_small_64, [TM_FINGERPRINT_128] = fingerprint_small_128},
    .fence = tm_stream_fence,
};
