/* Stores that go to memory without reading the line first and without pushing anything out of the caches.
 * Intrinsics, because gcc offers no other way to ask for them. */
#ifndef TM_STREAMING_H
#define TM_STREAMING_H

#include "tm_lanes.h"

#if defined(__SSE2__)
#    include <immintrin.h>
#endif

/* Lines of 64 bytes from the first cache; `to` is aligned to 64. A plain copy on machines without such
 * stores. */
TM_NOINLINE void tm_stream_lines(char *to, const void *from, size_t lines) {
#if defined(__AVX512F__)
    const __m512i *p = from;
    __m512i *out = (__m512i *)(void *)to;
    for (size_t i = 0; i < lines; i++) {
        _mm512_stream_si512(out + i, _mm512_loadu_si512(p + i));
    }
#elif defined(__AVX__)
    const __m256i *p = from;
    __m256i *out = (__m256i *)(void *)to;
    for (size_t i = 0; i < 2 * lines; i++) {
        _mm256_stream_si256(out + i, _mm256_loadu_si256(p + i));
    }
#elif defined(__SSE2__)
    const __m128i *p = from;
    __m128i *out = (__m128i *)(void *)to;
    for (size_t i = 0; i < 4 * lines; i++) {
        _mm_stream_si128(out + i, _mm_loadu_si128(p + i));
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
