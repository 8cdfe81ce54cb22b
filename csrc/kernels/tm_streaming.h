/* Stores that go to memory without reading the line first and without pushing anything out of the caches.
 * Intrinsics, because gcc offers no other way to ask for them. */
#ifndef TM_STREAMING_H
#define TM_STREAMING_H

#include "tm_lanes.h"

#if defined(__SSE2__)
#    include <immintrin.h>
#endif

/* Lines of 64 bytes from the first cache, the last one first; `to` is aligned to 64. Backward, because a load
 * waits for an earlier store whose address ends in the same 12 bits, and a copy that lies a little behind its
 * source in the page meets one at every line. A plain copy on machines without such stores. */
TM_NOINLINE void tm_stream_lines(char *to, const void *from, size_t lines) {
#if defined(__AVX512F__)
    const __m512i *p = from;
    __m512i *out = (__m512i *)(void *)to;
    for (size_t i = lines; i-- > 0;) {
        _mm512_stream_si512(out + i, _mm512_loadu_si512(p + i));
    }
#elif defined(__AVX__)
    const __m256i *p = from;
    __m256i *out = (__m256i *)(void *)to;
    for (size_t i = 2 * lines; i > 0; i -= 2) {
        _mm256_stream_si256(out + i - 2, _mm256_loadu_si256(p + i - 2));
        _mm256_stream_si256(out + i - 1, _mm256_loadu_si256(p + i - 1));
    }
#elif defined(__SSE2__)
    const __m128i *p = from;
    __m128i *out = (__m128i *)(void *)to;
    for (size_t i = 4 * lines; i > 0; i -= 4) {
        for (size_t k = i - 4; k < i; k++) {
            _mm_stream_si128(out + k, _mm_loadu_si128(p + k));
        }
    }
#else
    memcpy(to, from, 64 * lines);
#endif
}

/* To be called before lines are stored: once a page, asks for the page that comes two later. A store past the
 * caches waits for its page's address translation, and the stores behind it wait too; one line that is read
 * in vain is cheaper (staging float64, 4 KiB pages, one Zen 4 core: 12.8 and 16.4 GB/s). Only asking to write
 * helps. */
#define TM_STREAM_PAGE 4096
/* Whether stores to `to` hinder loads that come up to 1 KiB later from where `from` is read. */
TM_INLINE int tm_stream_hinders(const void *to, const void *from) {
    uintptr_t behind = ((uintptr_t)to - (uintptr_t)from) & (TM_STREAM_PAGE - 1);
    return behind > 0 && behind < 1024;
}

TM_INLINE void tm_stream_ahead(const char *to, size_t lines) {
    if ((-(uintptr_t)to & (TM_STREAM_PAGE - 1)) < 64 * lines) {
        __builtin_prefetch(to + 2 * TM_STREAM_PAGE, 1);
    }
}

static void tm_stream_fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

#endif
