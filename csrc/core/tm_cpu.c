/* CPU detection. CPUID says what the chip can execute, XCR0 what state the operating system (or hypervisor)
 * saves; a tier needs both, otherwise its first instruction is a SIGILL. */
#include "tm_cpu.h"

#include <stdio.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#    include <cpuid.h>
#endif

enum {
    LEAF1_ECX_FMA = 1 << 12,
    LEAF1_ECX_OSXSAVE = 1 << 27,
    LEAF1_ECX_AVX = 1 << 28,
    LEAF1_ECX_F16C = 1 << 29,
    LEAF7_EBX_AVX2 = 1 << 5,
    LEAF7_EBX_AVX512F = 1 << 16,
    LEAF7_EBX_AVX512DQ = 1 << 17,
    LEAF7_EBX_AVX512BW = 1 << 30,
    LEAF8000001A_EAX_FP256 = 1 << 2, /* AMD: the width of the floating-point units */
    LEAF8000001A_EAX_FP512 = 1 << 3,
};
#define LEAF7_EBX_AVX512VL (UINT32_C(1) << 31)
#define XCR0_YMM UINT64_C(0x06) /* XMM and YMM state */
#define XCR0_ZMM UINT64_C(0xe6) /* those, opmask, upper halves of ZMM0-15, ZMM16-31 */

static int has_all(uint32_t value, uint32_t mask) {
    return (value & mask) == mask;
}

void tm_cpu_read(tm_cpu_registers *registers) {
    memset(registers, 0, sizeof *registers);
#if defined(__x86_64__) || defined(__i386__)
    uint32_t eax, ebx, ecx, edx;
    registers->max_leaf = __get_cpuid_max(0, NULL);
    if (registers->max_leaf < 1) {
        return;
    }
    __cpuid(1, eax, ebx, ecx, edx);
    registers->leaf1_ecx = ecx;
    if (registers->max_leaf >= 7) {
        __cpuid_count(7, 0, eax, ebx, ecx, edx);
        registers->leaf7_ebx = ebx;
        registers->leaf7_ecx = ecx;
    }
    if (has_all(registers->leaf1_ecx, LEAF1_ECX_OSXSAVE)) {
        uint32_t low, high;
        __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); /* -mxsave is not needed this way */
        registers->xcr0 = (uint64_t)high << 32 | low;
    }
    if (__get_cpuid_max(UINT32_C(0x80000000), NULL) >= UINT32_C(0x8000001a)) {
        __cpuid(UINT32_C(0x8000001a), eax, ebx, ecx, edx);
        registers->leaf8000001a_eax = eax;
    }
#endif
}

tm_tier tm_cpu_best_tier(const tm_cpu_registers *registers) {
    uint32_t avx = LEAF1_ECX_FMA | LEAF1_ECX_OSXSAVE | LEAF1_ECX_AVX | LEAF1_ECX_F16C;
    uint32_t avx512 = LEAF7_EBX_AVX512F | LEAF7_EBX_AVX512DQ | LEAF7_EBX_AVX512BW | LEAF7_EBX_AVX512VL;

    if (registers->max_leaf < 7 || !has_all(registers->leaf1_ecx, avx) ||
        !has_all(registers->leaf7_ebx, LEAF7_EBX_AVX2) || (registers->xcr0 & XCR0_YMM) != XCR0_YMM) {
        return TM_TIER_BASELINE;
    }
    if (!has_all(registers->leaf7_ebx, avx512) || (registers->xcr0 & XCR0_ZMM) != XCR0_ZMM) {
        return TM_TIER_AVX2;
    }
    return TM_TIER_AVX512;
}

int tm_cpu_has_halves(const tm_cpu_registers *registers) {
    return (registers->leaf8000001a_eax & (LEAF8000001A_EAX_FP256 | LEAF8000001A_EAX_FP512)) ==
           LEAF8000001A_EAX_FP256;
}

static const char *const tier_names[TM_TIER_COUNT] = {"baseline", "avx2", "avx512"};

const char *tm_tier_name(tm_tier tier) {
    return (unsigned)tier < TM_TIER_COUNT ? tier_names[tier] : "unknown";
}

tm_tier tm_cpu_choose(const char *requested, tm_tier best, char *reason, int reason_size, int *warn) {
    size_t size = (size_t)reason_size;
    *warn = 0;
    if (requested == NULL || requested[0] == '\0') {
        snprintf(reason, size, "best tier of this machine and build");
        return best;
    }
    for (int i = 0; i < TM_TIER_COUNT; i++) {
        if (strcmp(requested, tier_names[i]) != 0) {
            continue;
        }
        if (i <= (int)best) {
            snprintf(reason, size, "TRAINMON_CPU=%s", requested);
            return (tm_tier)i;
        }
        *warn = 1;
        snprintf(reason, size, "TRAINMON_CPU=%s is beyond this machine or build, %s is the best there is",
                 requested, tier_names[best]);
        return best;
    }
    *warn = 1;
    snprintf(reason, size, "TRAINMON_CPU=%.32s is not one of baseline, avx2, avx512; using %s", requested,
             tier_names[best]);
    return best;
}
