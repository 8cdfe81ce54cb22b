/* Number formats as targets of a cast: from which magnitudes on a value survives it, stays normal, overflows.
 * Round to nearest, ties to even. */
#ifndef TM_FORMAT_H
#define TM_FORMAT_H

#include "tm_dtype.h"

#include <stdint.h>

/* X(ENUM, name, bits of the mantissa, exponent of the least normal number, largest number) */
#define TM_FORMATS(X)                                                                                        \
    X(FLOAT32, "float32", 23, -126, 0x1.fffffep127)                                                          \
    X(FLOAT16, "float16", 10, -14, 65504)                                                                    \
    X(BFLOAT16, "bfloat16", 7, -126, 0x1.fep127)                                                             \
    X(E4M3FN, "float8_e4m3fn", 3, -6, 448)                                                                   \
    X(E4M3FNUZ, "float8_e4m3fnuz", 3, -7, 240)                                                               \
    X(E4M3B11FNUZ, "float8_e4m3b11fnuz", 3, -10, 30)                                                         \
    X(E5M2, "float8_e5m2", 2, -14, 57344)                                                                    \
    X(E5M2FNUZ, "float8_e5m2fnuz", 2, -15, 57344)                                                            \
    X(E4M3, "float8_e4m3", 3, -6, 240)                                                                       \
    X(E3M4, "float8_e3m4", 4, -2, 15.5)                                                                      \
    X(E2M3FN, "float6_e2m3fn", 3, 0, 7.5)                                                                    \
    X(E3M2FN, "float6_e3m2fn", 2, -2, 28)                                                                    \
    X(E2M1FN, "float4_e2m1fn", 1, 0, 6)

typedef enum tm_format {
#define TM_FORMAT_ENUM(enum_name, text, mantissa, exponent, largest) TM_FORMAT_##enum_name,
    TM_FORMATS(TM_FORMAT_ENUM)
#undef TM_FORMAT_ENUM
        TM_FORMAT_COUNT
} tm_format;

const char *tm_format_name(tm_format format);

/* The format of this name or short name ("bf16", "fp16", "e4m3fn", "fp4_e2m1fn"), or TM_FORMAT_COUNT. */
tm_format tm_format_from_name(const char *name);

/* What becomes of a magnitude y > 0 in the cast. */
typedef struct tm_format_limits {
    double flush;      /* y <= flush becomes 0: half of the least subnormal number */
    double min_normal; /* flush < y < min_normal becomes a subnormal number, or the least normal one */
    double overflow;   /* beyond the largest number by half of its last place, or more: */
    int tie_overflows; /* y > overflow overflows, and y == overflow too if this is set */
} tm_format_limits;

tm_format_limits tm_format_limits_of(tm_format format);

/* The lowest magnitude code of `dtype` (two bytes or more; kernels/tm_histogram_kernels.h) whose value times
 * `scale` is above `limit`, or at it too if `inclusive`; tm_format_nonfinite_code if no finite element is.
 * The product is not rounded. limit > 0 and finite, scale > 0 and finite. */
uint64_t tm_format_first_code(tm_dtype dtype, double scale, double limit, int inclusive);

/* The code of infinity, above all finite ones; 0, which stands for no element, for integers. */
uint64_t tm_format_nonfinite_code(tm_dtype dtype);

/* The same question for one value >= 0. */
int tm_format_is_beyond(double value, double scale, double limit, int inclusive);

#endif
