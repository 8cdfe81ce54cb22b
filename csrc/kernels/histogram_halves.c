/* The AVX-512 tier's kernels of histogram.c for processors that run 512-bit operations as two halves: the
 * same code without prefetching (Zen 4, float32 from memory: 17.5 and 22 GB/s). */
#define TM_NO_PREFETCH
#include "tm_lanes.h"

#if defined(__AVX512BW__)
#    define TM_HISTOGRAM_KERNELS tm_histogram_kernels_avx512_halves
#    include "histogram.c"
#endif
