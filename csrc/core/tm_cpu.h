/* Which instruction-set tier runs, and why. Detection reads CPUID and XCR0; it knows nothing of kernels. */
#ifndef TM_CPU_H
#define TM_CPU_H

#include <stdint.h>

typedef enum tm_tier { TM_TIER_BASELINE, TM_TIER_AVX2, TM_TIER_AVX512, TM_TIER_COUNT } tm_tier;

/* The registers that decide, gathered apart from the decision so that tests can fake them. */
typedef struct tm_cpu_registers {
    uint32_t leaf1_ecx, leaf7_ebx, leaf7_ecx, max_leaf;
    uint32_t leaf8000001a_eax; /* 0 where there is no such leaf */
    uint64_t xcr0;             /* 0 when OSXSAVE is off */
} tm_cpu_registers;

void tm_cpu_read(tm_cpu_registers *registers);

/* avx2: AVX2+FMA+F16C with XMM and YMM state enabled; avx512: also F+VL+BW+DQ with opmask and both ZMM
 * states. */
tm_tier tm_cpu_best_tier(const tm_cpu_registers *registers);

/* 1 where a 512-bit operation runs as two halves on units of 256 bits (Zen 4). */
int tm_cpu_has_halves(const tm_cpu_registers *registers);

const char *tm_tier_name(tm_tier tier); /* "baseline", "avx2", "avx512" */

/* The tier to run: `requested` (the value of TRAINMON_CPU, NULL or "" for none) if this machine and this
 * build have it, else the best there is. `reason` gets one clause for `trainmon info`; *warn is 1 when the
 * request could not be met, so that the caller can say so. */
tm_tier tm_cpu_choose(const char *requested, tm_tier best, char *reason, int reason_size, int *warn);

#endif
