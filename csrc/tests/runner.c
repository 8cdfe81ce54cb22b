#include "runner.h"
#include "digest.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

long checks_made, checks_failed;

int same_double(double a, double b) {
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

int same_stats(const tm_stats *a, const tm_stats *b) {
    return a->n == b->n && same_double(a->sum, b->sum) && same_double(a->sumsq, b->sumsq) &&
           same_double(a->min, b->min) && same_double(a->max, b->max) && same_double(a->absmax, b->absmax) &&
           a->n_nan == b->n_nan && a->n_posinf == b->n_posinf && a->n_neginf == b->n_neginf &&
           a->n_zero == b->n_zero && a->first_bad == b->first_bad &&
           same_double(a->sumsq_scaled, b->sumsq_scaled) && a->scale_exponent == b->scale_exponent &&
           same_double(a->m2_scaled, b->m2_scaled);
}

const char *tier_name(int index) {
    return index <= (int)tm_dispatch_describe()->machine ? tm_tier_name((tm_tier)index) : NULL;
}

const char *use_tier(int index) {
    const tm_dispatch_info *info = tm_dispatch_describe();
    if (tier_name(index) != NULL) {
        tm_dispatch_init(tier_name(index));
        return tier_name(index);
    }
    if (index > TM_TIER_AVX512 + 1 || info->machine != TM_TIER_AVX512) {
        return NULL;
    }
    tm_dispatch_init(tier_name(TM_TIER_AVX512));
    tm_dispatch_set_halves(!info->halves);
    return info->halves ? "avx512 in halves" : "avx512 in whole";
}

static void must(tm_status status, const tm_error *error) {
    if (status != TM_OK) {
        fprintf(stderr, "a call failed: %s\n", error->text);
        exit(2);
    }
}

tm_stats stats_of(tm_view view, int threads) {
    tm_error error;
    tm_stats stats;
    must(tm_tensor_stats(&view, 1, threads, &stats, &error), &error);
    return stats;
}

double norm_of(tm_view view, tm_norm_order order, int threads) {
    tm_error error;
    double total;
    must(tm_multi_norm(&view, 1, order, threads, &total, NULL, &error), &error);
    return total;
}

tm_nonfinite scan_of(tm_view view, int threads) {
    tm_error error;
    tm_nonfinite found;
    must(tm_scan_nonfinite(&view, 1, threads, &found, &error), &error);
    return found;
}

static uint64_t random_state = 1;

uint64_t seed_random(uint64_t state) {
    uint64_t before = random_state;
    random_state = state;
    return before;
}

uint64_t next_random(void) { /* splitmix64 */
    uint64_t z = random_state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

void fill_random(void *data, size_t bytes) {
    unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) {
        p[i] = (unsigned char)(next_random() >> 56);
    }
}

void fill_finite(void *data, int64_t n, tm_dtype dtype) {
    size_t size = tm_dtype_size(dtype);
    fill_random(data, (size_t)n * size);
    for (int64_t i = 0; i < n; i++) {
        char *element = (char *)data + (size_t)i * size;
        uint64_t random = next_random();
        if (random % 8 == 0) { /* +0 and, in formats that have one, -0 */
            memset(element, 0, size);
            if (random & 64 && (dtype == TM_F64 || dtype == TM_F32 || dtype == TM_F16 || dtype == TM_BF16)) {
                element[size - 1] = (char)0x80;
            }
        } else if (dtype == TM_F64) {
            double value = ldexp((double)(int64_t)next_random(), (int)(random >> 8 & 31) - 80);
            memcpy(element, &value, size);
        } else if (dtype == TM_F32) {
            float value = (float)ldexp((double)(int64_t)next_random(), (int)(random >> 8 & 127) - 127);
            memcpy(element, &value, size);
        } else if (!isfinite(reference_value(element, 0, dtype))) {
            memset(element, 1, size);
        }
    }
}

int put_nonfinite(void *data, int64_t index, tm_dtype dtype, int kind) {
    static const uint64_t f64[] = {UINT64_C(0x7ff0000000000001), UINT64_C(0x7ff) << 52,
                                   UINT64_C(0xfff) << 52};
    static const uint32_t f32[] = {0xff800001, 0x7f800000, 0xff800000};
    static const uint16_t f16[] = {0xfc01, 0x7c00, 0xfc00}, bf16[] = {0x7f81, 0x7f80, 0xff80};
    size_t size = tm_dtype_size(dtype);
    char *element = (char *)data + (size_t)index * size;
    switch (dtype) {
    case TM_F64:
        memcpy(element, &f64[kind], size);
        return 1;
    case TM_F32:
        memcpy(element, &f32[kind], size);
        return 1;
    case TM_F16:
        memcpy(element, &f16[kind], size);
        return 1;
    case TM_BF16:
        memcpy(element, &bf16[kind], size);
        return 1;
    default:
        for (int code = 0; size == 1 && code < 256; code++) {
            unsigned char byte = (unsigned char)code;
            double value = reference_byte(byte, dtype);
            if (kind == 0 ? isnan(value) : value == (kind == 1 ? INFINITY : -INFINITY)) {
                memcpy(element, &byte, 1);
                return 1;
            }
        }
        return 0;
    }
}

int sampled(void) {
    static unsigned step, calls;
    if (step == 0) {
        const char *text = getenv("TM_TEST_SAMPLE");
        int number = text != NULL ? atoi(text) : 1;
        step = number > 1 ? (unsigned)number : 1;
    }
    return calls++ % step == 0;
}

static double seconds(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int is_wanted(const char *name, int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return 1;
        }
    }
    return argc < 2;
}

/* runner [test...]: all tests or the named ones. */
int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {
#define TM_LIST_TEST(name) {#name, test_##name},
        TM_TESTS(TM_LIST_TEST)
#undef TM_LIST_TEST
    };
    int run = 0;
    tm_dispatch_init(NULL);
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (!is_wanted(tests[i].name, argc, argv)) {
            continue;
        }
        long made = checks_made, failed = checks_failed;
        double start = seconds();
        tests[i].run();
        run++;
        printf("%-12s %9ld checks, %ld failed %6.1f s\n", tests[i].name, checks_made - made,
               checks_failed - failed, seconds() - start);
        fflush(stdout);
    }
    printf("tiers:");
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        printf(" %s", tier_name(tier));
    }
    printf("\n");
    return checks_failed != 0 || run == 0;
}
