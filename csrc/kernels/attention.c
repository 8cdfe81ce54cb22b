/* The pass over attention scores (contract: tm_attention_kernels.h). Plain products and sums only: fusing
 * would give every tier its own bits. Vectors are spelled out: gcc 12 keeps lanes of a long loop body on the
 * stack. */
#include "tm_widen.h"

#include <math.h>

#if defined(__AVX512F__)
#    define TM_VECTOR_BYTES 64
#elif defined(__AVX2__)
#    define TM_VECTOR_BYTES 32
#else
#    define TM_VECTOR_BYTES 16
#endif
#define TM_WIDTH (TM_VECTOR_BYTES / sizeof(float))
#define TM_PARTS (TM_LANES / (TM_VECTOR_BYTES / sizeof(float)))

typedef float tm_floats __attribute__((vector_size(TM_VECTOR_BYTES), aligned(sizeof(float)), may_alias));
typedef int32_t tm_words __attribute__((vector_size(TM_VECTOR_BYTES), may_alias));

/* a where it is larger, else b: b where one of them is NaN. One instruction, which gcc 12 does not find. */
TM_INLINE tm_floats larger(tm_floats a, tm_floats b) {
#if defined(__AVX512F__)
    return (tm_floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (tm_floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const tm_words mask = a > b;
    return (tm_floats)((mask & (tm_words)a) | (~mask & (tm_words)b));
#endif
}

/* e^x for x <= 0 as 2^n * 2^f, n the integer nearest to x * log2(e) and f in [-1/2, 1/2]. Adding TM_SHIFT
 * rounds to n and leaves n + 127, the exponent field of 2^n, in the low bits. The polynomial (least maximum
 * of the relative error, 9e-8) is 1 at 0, and so e^0 = 1 exactly. Below -126 the result is 2^-126, also for
 * -inf: nothing beside the 1 that every sum of a row has. NaN stays NaN. */
#define TM_SHIFT (0x1.8p23f + 127.0f)
TM_INLINE tm_floats exponential(tm_floats x) {
    const tm_floats least = (tm_floats){0} - 126.0f;
    const tm_floats t = larger(least, x * 0x1.715476p0f);
    const tm_floats shifted = t + TM_SHIFT;
    const tm_floats f = t - (shifted - TM_SHIFT);
    const tm_floats power = (tm_floats)((tm_words)shifted << 23);
    tm_floats sum = 0.00132647273f * f + 0.00967151299f;
    sum = sum * f + 0.0555073358f;
    sum = sum * f + 0.240222424f;
    sum = sum * f + 0.693147004f;
    return (sum * f + 1.0f) * power;
}

TM_INLINE float lane_max(const float *lane) {
    float max = lane[0];
    for (int l = 1; l < TM_LANES; l++) {
        max = lane[l] > max ? lane[l] : max;
    }
    return max;
}

/* l and l + 16, then l and l + 8, ... as tm_lane_total, in float. */
TM_INLINE float lane_sum(float *lane) {
    for (int half = TM_LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            lane[l] += lane[l + half];
        }
    }
    return lane[0];
}

/* The largest of `whole` scores (a multiple of TM_LANES) and one padded tail; NaN is passed over. */
TM_NOINLINE float largest(const float *scores, size_t whole, const float *tail) {
    tm_floats max[TM_PARTS];
    float lane[TM_LANES];
    memcpy(max, tail, sizeof max);
    for (size_t i = 0; i < whole; i += TM_LANES) {
#pragma GCC unroll 8
        for (size_t p = 0; p < TM_PARTS; p++) {
            max[p] = larger(*(const tm_floats *)(scores + i + p * TM_WIDTH), max[p]);
        }
    }
    memcpy(lane, max, sizeof lane);
    return lane_max(lane);
}

TM_NOINLINE float exponentials(const float *scores, size_t whole, const float *tail, float max) {
    tm_floats sum[TM_PARTS];
    float lane[TM_LANES];
#pragma GCC unroll 8
    for (size_t p = 0; p < TM_PARTS; p++) {
        sum[p] = exponential(*(const tm_floats *)(tail + p * TM_WIDTH) - max);
    }
    for (size_t i = 0; i < whole; i += TM_LANES) {
#pragma GCC unroll 8
        for (size_t p = 0; p < TM_PARTS; p++) {
            sum[p] += exponential(*(const tm_floats *)(scores + i + p * TM_WIDTH) - max);
        }
    }
    memcpy(lane, sum, sizeof lane);
    return lane_sum(lane);
}

static int has_nan(const float *scores, size_t n) {
    const tm_bits32 *bits = (const tm_bits32 *)scores;
    int found = 0;
    for (size_t i = 0; i < n; i++) {
        found |= (bits[i] & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000);
    }
    return found;
}

/* e^x for x <= 0 in double, for the few times that a row's maximum moves: reduced by ln 2 in two parts, a
 * Taylor polynomial of degree 12 on [-0.35, 0.35] (1e-16), an exponent put together from bits. */
static double exponential_f64(double x) {
    static const double inverse[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                     1.0 / 40320,     1.0 / 5040,     1.0 / 720,     1.0 / 120,
                                     1.0 / 24,        1.0 / 6,        1.0 / 2,       1.0};
    if (x < -700.0) {
        return 0.0;
    }
    const int64_t n = (int64_t)(x * 0x1.71547652b82fep0 - 0.5);
    const double r = (x - (double)n * 0x1.62e42feep-1) - (double)n * 0x1.a39ef35793c76p-33;
    double sum = inverse[0];
    for (size_t i = 1; i < sizeof inverse / sizeof inverse[0]; i++) {
        sum = sum * r + inverse[i];
    }
    const int64_t bits = (n + 1023) * (INT64_C(1) << 52);
    double power;
    memcpy(&power, &bits, sizeof power);
    return (sum * r + 1.0) * power;
}

static void attention_row(tm_attention_row *row, const float *scores, size_t n) {
    const size_t whole = n - n % TM_LANES;
    float tail[TM_LANES];
    for (size_t l = 0; l < TM_LANES; l++) {
        tail[l] = -INFINITY;
    }
    memcpy(tail, scores + whole, (n - whole) * sizeof *tail);
    const float here = largest(scores, whole, tail), before = row->max;
    const float max = here > before ? here : before;
    row->max = max;
    if (here == -INFINITY || max == INFINITY) { /* no score to sum, or no sum at all; a NaN still counts */
        row->nan |= has_nan(scores, n);
        return;
    }
    const double sum = (double)exponentials(scores, whole, tail, max);
    row->nan |= sum != sum;
    if (max > before) {
        row->sum *= before > -INFINITY ? exponential_f64((double)before - (double)max) : 0.0;
    }
    row->sum += sum;
}

/* cap * tanh(x / cap). With y = |x| / cap: y + y^3 P(y^2) up to 5/8 (relative error 1e-7 of the result),
 * above (1 - e) / (1 + e), e = exp(-2y). */
TM_INLINE float capped(float x, float cap, float e) {
    const float y = x / cap, square = y * y;
    float p = 0.0206505843f - 0.00571704237f * square;
    p = p * square - 0.0537434965f;
    p = p * square + 0.133314908f;
    p = p * square - 0.333332837f;
    const float small = y + y * square * p, large = (1.0f - e) / (1.0f + e);
    const float result = square < 0.390625f ? small : y < 0.0f ? -large : large;
    return cap * result;
}

TM_NOINLINE void cap_lanes(float *scores, float cap) {
    float magnitude[TM_LANES], e[TM_LANES];
    for (int l = 0; l < TM_LANES; l++) {
        magnitude[l] = -2.0f * __builtin_fabsf(scores[l] / cap);
    }
    for (size_t p = 0; p < TM_PARTS; p++) {
        tm_floats *out = (tm_floats *)(e + p * TM_WIDTH);
        *out = exponential(*(const tm_floats *)(magnitude + p * TM_WIDTH));
    }
    for (int l = 0; l < TM_LANES; l++) {
        scores[l] = capped(scores[l], cap, e[l]);
    }
}

static double attention_cap(float *scores, size_t n, float cap) {
    const size_t whole = n - n % TM_LANES;
    float tail[TM_LANES] = {0};
    double lane[TM_LANES] = {0};
    memcpy(tail, scores + whole, (n - whole) * sizeof *tail);
    cap_lanes(tail, cap);
    memcpy(scores + whole, tail, (n - whole) * sizeof *tail);
    for (int l = 0; l < TM_LANES; l++) {
        lane[l] = (double)tail[l];
    }
    for (size_t i = 0; i < whole; i += TM_LANES) {
        cap_lanes(scores + i, cap);
        for (int l = 0; l < TM_LANES; l++) {
            lane[l] += (double)scores[i + (size_t)l];
        }
    }
    return tm_lane_total(lane);
}

const tm_attention_kernels TM_TIERED(tm_attention_kernels_) = {
    .row = attention_row,
    .cap = attention_cap,
};
