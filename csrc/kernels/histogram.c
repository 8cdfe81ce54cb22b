/* Exponents counted on float32's axis, and magnitudes counted against thresholds (contract:
 * tm_histogram_kernels.h). Counts have no order: the tier cannot change them.
 *
 * A group of elements becomes one byte an element, its bin, in L1; tm_tally.h counts the bytes. */
#include "tm_tally.h"
#include "tm_widen.h"

#define TM_AT_LEAST_GROUP 2048 /* elements that stay in L1 while they are compared with the thresholds */

/* float64's exponent on float32's axis, from the upper half of its bits: infinity, NaN and all from 2^128 on
 * are 255; zero, subnormals and all below 2^-126 are 0. */
TM_INLINE uint8_t tm_bin_of_upper(int32_t upper) {
    const int32_t bin = (upper >> 20 & 0x7ff) - (1023 - 127);
    const int32_t raised = bin < 0 ? 0 : bin;
    return (uint8_t)(raised < 255 ? raised : 255);
}

TM_INLINE uint8_t tm_bin_of_double(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return tm_bin_of_upper((int32_t)(bits >> 32));
}

TM_INLINE uint8_t tm_bin_of_float(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint8_t)(bits >> 23);
}

TM_INLINE uint8_t tm_bin_of_bfloat16(uint16_t bits) {
    return (uint8_t)(bits >> 7);
}

#define TM_BINS_ROWS(name, store, bin_of)                                                                    \
    TM_NOINLINE void bins_##name(uint8_t *bins, const store *p, size_t n) {                                  \
        size_t i = 0;                                                                                        \
        for (; n - i >= TM_TALLY_ROW; i += TM_TALLY_ROW) {                                                   \
            tm_prefetch_row(p + i, TM_TALLY_ROW * sizeof *p);                                                \
            for (size_t l = i; l < i + TM_TALLY_ROW; l++) {                                                  \
                bins[l] = bin_of(p[l]);                                                                      \
            }                                                                                                \
        }                                                                                                    \
        for (; i < n; i++) {                                                                                 \
            bins[i] = bin_of(p[i]);                                                                          \
        }                                                                                                    \
    }
TM_BINS_ROWS(f64, double, tm_bin_of_double)
TM_BINS_ROWS(f32, float, tm_bin_of_float)
TM_BINS_ROWS(bf16, uint16_t, tm_bin_of_bfloat16)

/* 32 bins of float16 elements, by way of float32, where their subnormals are normal numbers. Intrinsics,
 * because gcc 12 narrows through the stack (4,096 elements on Zen 4: 293 and 206 ns). */
TM_INLINE void tm_bins_row_f16(uint8_t *bins, const uint16_t *p) {
#if defined(__AVX512F__)
    for (int l = 0; l < TM_LANES; l += 16) {
        const __m256i half = _mm256_loadu_si256((const __m256i *)(const void *)(p + l));
        const __m512i bits = _mm512_castps_si512(_mm512_cvtph_ps(half));
        _mm_storeu_si128((__m128i *)(void *)(bins + l), _mm512_cvtepi32_epi8(_mm512_srli_epi32(bits, 23)));
    }
#else
    float wide[TM_LANES];
    tm_row_f16(p, wide);
    for (int l = 0; l < TM_LANES; l++) {
        bins[l] = tm_bin_of_float(wide[l]);
    }
#endif
}

TM_NOINLINE void bins_f16(uint8_t *bins, const uint16_t *p, size_t n) {
    for (; n >= TM_LANES; n -= TM_LANES, p += TM_LANES, bins += TM_LANES) {
        tm_prefetch_row(p, TM_LANES * sizeof *p);
        tm_bins_row_f16(bins, p);
    }
    uint16_t padded[TM_LANES] = {0};
    uint8_t row[TM_LANES];
    memcpy(padded, p, n * sizeof *p);
    tm_bins_row_f16(row, padded);
    memcpy(bins, row, n);
}

#define TM_TEMPLATE "histogram_float.h"
#include "each_float.h"
#undef TM_TEMPLATE
#define TM_TEMPLATE "histogram_integer.h"
#include "each_integer.h"
#undef TM_TEMPLATE

/* Bins 103 to 112 hold 2^-24 to 2^-14: of float16 elements the subnormals and nothing else. */
static int64_t float16_subnormals(const tm_exponent_counts *counts) {
    int64_t total = 0;
    for (int bin = 103; bin < 113; bin++) {
        total += counts->bin[bin];
    }
    return total;
}

static void exponents_half(tm_exponent_counts *counts, const void *data, size_t n) {
    const int64_t before = float16_subnormals(counts), subnormal = counts->subnormal;
    exponents_f16(counts, data, n);
    counts->subnormal = subnormal + float16_subnormals(counts) - before;
}

/* X(ENUM, name, bits of the mantissa, bias, code of infinity (0: none), and TM_FLOAT8S' offset, mask, first):
 * the float8 formats with a sign. */
#define TM_FLOAT8_EXPONENTS(X)                                                                               \
    X(F8E4M3FN, f8e4m3fn, 3, 7, 0, 0, 0x7f, 0x7f)                                                            \
    X(F8E4M3FNUZ, f8e4m3fnuz, 3, 8, 0, 0x7f, 0xff, 0xff)                                                     \
    X(F8E4M3B11FNUZ, f8e4m3b11fnuz, 3, 11, 0, 0x7f, 0xff, 0xff)                                              \
    X(F8E5M2, f8e5m2, 2, 15, 0x7c, 0, 0x7f, 0x7c)                                                            \
    X(F8E5M2FNUZ, f8e5m2fnuz, 2, 16, 0, 0x7f, 0xff, 0xff)                                                    \
    X(F8E4M3, f8e4m3, 3, 7, 0x78, 0, 0x7f, 0x78)                                                             \
    X(F8E3M4, f8e3m4, 4, 3, 0x70, 0, 0x7f, 0x70)

/* A code's place among the exponents of its format: 0 for zero, one for each highest bit that a subnormal
 * mantissa can have, then one for each exponent field; 255 for what tm_bytes_find calls non-finite. */
TM_INLINE uint8_t tm_float8_place(uint8_t byte, int bits, uint8_t offset, uint8_t mask, uint8_t first) {
    const uint8_t code = byte & 0x7f;
    const uint8_t place = (uint8_t)((code >> bits) + (code >= 1) + (code >= 2) + (bits > 2 && code >= 4) +
                                    (bits > 3 && code >= 8));
    return (uint8_t)((byte + offset) & mask) >= first ? 255 : place;
}

TM_INLINE void count_float8(tm_exponent_counts *counts, const uint8_t *p, size_t n, int bits, int bias,
                            int infinity, uint8_t offset, uint8_t mask, uint8_t first) {
    _Alignas(64) uint8_t places[TM_TALLY_GROUP];
    int64_t count[256] = {0}, inf = 0;
    while (n > 0) {
        const size_t group = n < TM_TALLY_GROUP ? n : TM_TALLY_GROUP;
        const int64_t nonfinite = count[255];
        size_t i = 0;
        for (; group - i >= TM_TALLY_ROW; i += TM_TALLY_ROW) {
            tm_prefetch_row(p + i, TM_TALLY_ROW);
            for (size_t l = i; l < i + TM_TALLY_ROW; l++) {
                places[l] = tm_float8_place(p[l], bits, offset, mask, first);
            }
        }
        for (; i < group; i++) {
            places[i] = tm_float8_place(p[i], bits, offset, mask, first);
        }
        tm_tally_group(count, places, group, p + group);
        if (infinity != 0 && count[255] > nonfinite) {
            for (i = 0; i < group; i++) {
                inf += (p[i] & 0x7f) == infinity;
            }
        }
        p += group;
        n -= group;
    }
    counts->zero += count[0];
    counts->inf += inf;
    counts->nan += count[255] - inf;
    for (int place = 1; place < 64; place++) {
        if (count[place] != 0) {
            counts->bin[place - bits - bias + 127] += count[place];
            counts->subnormal += place <= bits ? count[place] : 0;
        }
    }
}

#define TM_FLOAT8_COUNT(enum_name, name, bits, bias, infinity, offset, mask, first)                          \
    static void exponents_##name(tm_exponent_counts *counts, const void *data, size_t n) {                   \
        count_float8(counts, data, n, bits, bias, infinity, offset, mask, first);                            \
    }
TM_FLOAT8_EXPONENTS(TM_FLOAT8_COUNT)
#undef TM_FLOAT8_COUNT

/* Codes with their sign turned to the lowest bit: those of float8 tensors lie close together then, however
 * their signs are. */
static void count_bytes(int64_t *times, const void *data, size_t n) {
    _Alignas(64) uint8_t turned[TM_TALLY_GROUP];
    int64_t count[256] = {0};
    const uint8_t *p = data;
    while (n > 0) {
        const size_t group = n < TM_TALLY_GROUP ? n : TM_TALLY_GROUP;
        size_t i = 0;
        for (; group - i >= TM_TALLY_ROW; i += TM_TALLY_ROW) {
            tm_prefetch_row(p + i, TM_TALLY_ROW);
            for (size_t l = i; l < i + TM_TALLY_ROW; l++) {
                turned[l] = (uint8_t)(p[l] << 1 | p[l] >> 7);
            }
        }
        for (; i < group; i++) {
            turned[i] = (uint8_t)(p[i] << 1 | p[i] >> 7);
        }
        p += group;
        n -= group;
        tm_tally_group(count, turned, group, p);
    }
    for (int code = 0; code < 256; code++) {
        times[code >> 1 | (code & 1) << 7] += count[code];
    }
}

#define TM_FLOAT8_EXPONENTS_ROW(enum_name, name, bits, bias, infinity, offset, mask, first)                  \
    [TM_##enum_name] = exponents_##name,

#if !defined(TM_HISTOGRAM_KERNELS)
#    define TM_HISTOGRAM_KERNELS TM_TIERED(tm_histogram_kernels_)
#endif

const tm_histogram_kernels TM_HISTOGRAM_KERNELS = {
    .exponents = {TM_FLOAT8_EXPONENTS(TM_FLOAT8_EXPONENTS_ROW)[TM_F64] = exponents_f64,
                  [TM_F32] = exponents_f32, [TM_F16] = exponents_half, [TM_BF16] = exponents_bf16,
                  [TM_I16] = exponents_i16, [TM_I32] = exponents_i32, [TM_I64] = exponents_i64,
                  [TM_U16] = exponents_u16, [TM_U32] = exponents_u32, [TM_U64] = exponents_u64},
    .at_least = {[TM_F64] = at_least_f64,
                 [TM_F32] = at_least_f32,
                 [TM_F16] = at_least_f16,
                 [TM_BF16] = at_least_bf16,
                 [TM_I16] = at_least_i16,
                 [TM_I32] = at_least_i32,
                 [TM_I64] = at_least_i64,
                 [TM_U16] = at_least_u16,
                 [TM_U32] = at_least_u32,
                 [TM_U64] = at_least_u64},
    .bytes = count_bytes,
};
