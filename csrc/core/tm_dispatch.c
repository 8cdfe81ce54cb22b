/* The one file that owns the dispatch table. */
#include "tm_gf.h"
#include "tm_table.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static tm_table table;
static int ready;

static double byte_values[TM_DTYPE_COUNT][256];

/* A float8 format: sign (unless unsigned), exponent, mantissa; what its top exponent and the code 0x80 mean.
 */
typedef struct float8_format {
    tm_dtype dtype;
    int mantissa_bits, bias;
    enum { NO_INFINITY, IEEE, FNUZ } kind;
} float8_format;

static const float8_format float8_formats[] = {
    {TM_F8E4M3FN, 3, 7, NO_INFINITY}, {TM_F8E4M3FNUZ, 3, 8, FNUZ},  {TM_F8E4M3B11FNUZ, 3, 11, FNUZ},
    {TM_F8E5M2, 2, 15, IEEE},         {TM_F8E5M2FNUZ, 2, 16, FNUZ}, {TM_F8E4M3, 3, 7, IEEE},
    {TM_F8E3M4, 4, 3, IEEE},
};

static double float8_value(const float8_format *format, int code) {
    int magnitude = code & 0x7f;
    int exponent = magnitude >> format->mantissa_bits;
    int mantissa = magnitude & ((1 << format->mantissa_bits) - 1);
    int top = 0x7f >> format->mantissa_bits;

    if (format->kind == FNUZ && code == 0x80) {
        return NAN;
    }
    if (format->kind == NO_INFINITY && magnitude == 0x7f) {
        return NAN;
    }
    double value;
    if (format->kind == IEEE && exponent == top) {
        if (mantissa != 0) {
            return NAN;
        }
        value = INFINITY;
    } else if (exponent == 0) {
        value = ldexp(mantissa, 1 - format->bias - format->mantissa_bits);
    } else {
        value =
            ldexp(mantissa + (1 << format->mantissa_bits), exponent - format->bias - format->mantissa_bits);
    }
    return code & 0x80 ? -value : value;
}

static void fill_byte_values(void) {
    for (size_t i = 0; i < sizeof float8_formats / sizeof *float8_formats; i++) {
        for (int code = 0; code < 256; code++) {
            byte_values[float8_formats[i].dtype][code] = float8_value(&float8_formats[i], code);
        }
    }
    for (int code = 0; code < 256; code++) {
        byte_values[TM_F8E8M0FNU][code] = code == 0xff ? (double)NAN : ldexp(1.0, code - 127);
        byte_values[TM_I8][code] = code < 128 ? code : code - 256;
        byte_values[TM_U8][code] = code;
        byte_values[TM_BOOL][code] = code != 0; /* a bool byte other than 0 and 1 counts as true */
    }
}

/* Baseline first; each tier that machine and build have overrides the families it has. */
static void use_tier(tm_tier tier) {
#define TM_USE_BASELINE(enum_name, name) table.name = &tm_##name##_kernels_baseline;
    TM_FAMILIES(TM_USE_BASELINE)
#undef TM_USE_BASELINE
#if defined(TM_HAVE_X86_TIERS)
    if (tier == TM_TIER_AVX2) {
#    define TM_USE_AVX2(enum_name, name) table.name = &tm_##name##_kernels_avx2;
        TM_FAMILIES(TM_USE_AVX2)
#    undef TM_USE_AVX2
    }
    if (tier == TM_TIER_AVX512) {
#    define TM_USE_AVX512(enum_name, name) table.name = &tm_##name##_kernels_avx512;
        TM_FAMILIES(TM_USE_AVX512)
#    undef TM_USE_AVX512
        if (table.info.halves) {
            table.stats = &tm_stats_kernels_avx512_halves;
            table.norm = &tm_norm_kernels_avx512_halves;
            table.histogram = &tm_histogram_kernels_avx512_halves;
        }
    }
#endif
    for (int family = 0; family < TM_FAMILY_COUNT; family++) {
        table.info.family[family] = tier;
    }
}

tm_tier tm_dispatch_init(const char *requested) {
    tm_dispatch_info *info = &table.info;
    tm_cpu_registers registers;

    tm_cpu_read(&registers);
#if defined(TM_HAVE_X86_TIERS)
    info->machine = tm_cpu_best_tier(&registers);
#else
    info->machine = TM_TIER_BASELINE;
#endif
    info->tier = tm_cpu_choose(requested, info->machine, info->reason, (int)sizeof info->reason, &info->warn);
    info->halves = tm_cpu_has_halves(&registers);
    use_tier(info->tier);
    if (table.worker_bytes == 0) {
        table.worker_bytes = (size_t)16 << 20;
    }
    fill_byte_values();
    for (int width = 0; width < TM_FINGERPRINT_WIDTHS; width++) {
        tm_gf_fill_powers(width, table.gf_power[width]);
    }
    ready = 1;
    return info->tier;
}

const tm_dispatch_info *tm_dispatch_describe(void) {
    return ready ? &table.info : NULL;
}

const char *tm_family_name(tm_family family) {
    static const char *const names[TM_FAMILY_COUNT] = {
#define TM_FAMILY_TEXT(enum_name, name) #name,
        TM_FAMILIES(TM_FAMILY_TEXT)
#undef TM_FAMILY_TEXT
    };
    return (unsigned)family < TM_FAMILY_COUNT ? names[family] : "unknown";
}

const double *tm_byte_values(tm_dtype dtype) {
    return ready && tm_dtype_is_byte(dtype) ? byte_values[dtype] : NULL;
}

void tm_dispatch_set_worker_bytes(size_t bytes) {
    table.worker_bytes = bytes;
}

void tm_dispatch_set_halves(int halves) {
    table.info.halves = halves;
    use_tier(table.info.tier);
}

const tm_table *tm_table_get(void) {
    return ready ? &table : NULL;
}

tm_status tm_table_require(const tm_table **result, tm_error *error) {
    *result = tm_table_get();
    return *result != NULL ? TM_OK : tm_fail(error, TM_ERR_VALUE, "tm_dispatch_init has not been called");
}
