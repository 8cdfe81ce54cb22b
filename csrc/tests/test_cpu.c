/* The tier decision on faked registers, and what a request turns into. */
#include "runner.h"

enum { FMA = 1 << 12, OSXSAVE = 1 << 27, AVX = 1 << 28, F16C = 1 << 29 };
enum { AVX2 = 1 << 5, F = 1 << 16, DQ = 1 << 17, BW = 1 << 30 };
static const uint32_t VL = UINT32_C(1) << 31;

static tm_tier decide(uint32_t ecx, uint32_t ebx, uint64_t xcr0, uint32_t max_leaf) {
    tm_cpu_registers registers = {.leaf1_ecx = ecx, .leaf7_ebx = ebx, .xcr0 = xcr0, .max_leaf = max_leaf};
    return tm_cpu_best_tier(&registers);
}

static void test_registers(void) {
    const uint32_t ecx = FMA | OSXSAVE | AVX | F16C, ebx = AVX2 | F | DQ | BW | VL;
    const uint32_t ecx_bits[] = {FMA, OSXSAVE, AVX, F16C}, zmm_bits[] = {F, DQ, BW, VL};

    CHECK(decide(ecx, ebx, 0xe7, 13) == TM_TIER_AVX512, "everything there");
    CHECK(decide(ecx, ebx, 0x602e7, 32) == TM_TIER_AVX512, "more state than needed");
    for (int i = 0; i < 4; i++) {
        CHECK(decide(ecx & ~ecx_bits[i], ebx, 0xe7, 13) == TM_TIER_BASELINE, "leaf 1 bit %d hidden", i);
        CHECK(decide(ecx, ebx & ~zmm_bits[i], 0xe7, 13) == TM_TIER_AVX2, "AVX-512 bit %d hidden", i);
    }
    CHECK(decide(ecx, ebx & ~(uint32_t)AVX2, 0xe7, 13) == TM_TIER_BASELINE, "no AVX2");
    CHECK(decide(ecx, ebx, 0x07, 13) == TM_TIER_AVX2, "a hypervisor that hides ZMM state");
    for (int bit = 5; bit <= 7; bit++) {
        CHECK(decide(ecx, ebx, 0xe7 & ~(UINT64_C(1) << bit), 13) == TM_TIER_AVX2, "XCR0 bit %d off", bit);
    }
    CHECK(decide(ecx, ebx, 0x70, 13) == TM_TIER_BASELINE, "ZMM without YMM state");
    CHECK(decide(ecx, ebx, 0xe3, 13) == TM_TIER_BASELINE, "YMM state off");
    CHECK(decide(ecx, ebx, 0xe5, 13) == TM_TIER_BASELINE, "XMM state off");
    CHECK(decide(ecx, ebx, 0, 13) == TM_TIER_BASELINE, "no XCR0");
    CHECK(decide(ecx, ebx, 0xe7, 6) == TM_TIER_BASELINE, "leaf 7 not there");
}

static void test_halves(void) {
    enum { FP128 = 1 << 0, FP256 = 1 << 2, FP512 = 1 << 3 };
    const uint32_t zen4 = FP256 | 2, zen5 = FP512 | FP256 | 2, zen1 = FP128 | 2, others = 0;
    const uint32_t widths[] = {zen4, zen5, zen1, others};
    for (int i = 0; i < 4; i++) {
        tm_cpu_registers registers = {.leaf8000001a_eax = widths[i]};
        CHECK(tm_cpu_has_halves(&registers) == (i == 0), "%x", (unsigned)widths[i]);
    }
}

static void test_choice(void) {
    char reason[128] = "";
    int warn = -1;

    CHECK(tm_cpu_choose(NULL, TM_TIER_AVX2, reason, sizeof reason, &warn) == TM_TIER_AVX2 && warn == 0, "%s",
          reason);
    CHECK(tm_cpu_choose("", TM_TIER_AVX512, reason, sizeof reason, &warn) == TM_TIER_AVX512 && warn == 0,
          "%s", reason);
    CHECK(tm_cpu_choose("baseline", TM_TIER_AVX512, reason, sizeof reason, &warn) == TM_TIER_BASELINE &&
              warn == 0,
          "%s", reason);
    CHECK(tm_cpu_choose("avx512", TM_TIER_AVX2, reason, sizeof reason, &warn) == TM_TIER_AVX2 && warn == 1,
          "%s", reason);
    CHECK(strstr(reason, "avx512") != NULL && strstr(reason, "avx2") != NULL, "%s", reason);
    CHECK(tm_cpu_choose("AVX9", TM_TIER_AVX2, reason, sizeof reason, &warn) == TM_TIER_AVX2 && warn == 1,
          "%s", reason);
    CHECK(strstr(reason, "AVX9") != NULL, "%s", reason);
}

static void test_dispatch(void) {
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        CHECK((int)tm_dispatch_init(tier_name(tier)) == tier, "%s", tier_name(tier));
        const tm_dispatch_info *info = tm_dispatch_describe();
        CHECK(info->warn == 0 && (int)info->tier == tier, "%s", info->reason);
        for (int family = 0; family < TM_FAMILY_COUNT; family++) {
            CHECK((int)info->family[family] == tier, "%s", tm_family_name((tm_family)family));
        }
    }
    tm_dispatch_init("nonsense");
    CHECK(tm_dispatch_describe()->warn == 1, "%s", tm_dispatch_describe()->reason);
    CHECK(tm_dispatch_describe()->tier == tm_dispatch_describe()->machine, "the best there is");
    tm_dispatch_init(NULL);
}

void test_cpu(void) {
    test_registers();
    test_halves();
    test_choice();
    test_dispatch();
}
