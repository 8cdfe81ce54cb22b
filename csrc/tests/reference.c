/* What the results must be, bit for bit: decoders written from the formats' definitions, 32 lanes, one tree.
 */
#include "runner.h"

#include <math.h>
#include <stdlib.h>

/* A float with `e` exponent and `m` mantissa bits and a sign; ieee: top exponent is inf and NaN. */
static double decode(unsigned bits, int e, int m, int bias, int ieee) {
    unsigned mantissa = bits & ((1U << m) - 1), exponent = bits >> m & ((1U << e) - 1);
    double sign = bits >> (e + m) & 1 ? -1.0 : 1.0;
    if (ieee && exponent == (1U << e) - 1) {
        return mantissa != 0 ? (double)NAN : sign * INFINITY;
    }
    double fraction = mantissa / (double)(1U << m);
    return exponent == 0 ? sign * fraction * pow(2, 1 - bias)
                         : sign * (1 + fraction) * pow(2, (int)exponent - bias);
}

double reference_byte(unsigned char value, tm_dtype dtype) {
    switch (dtype) {
    case TM_F8E4M3FN:
        return (value & 0x7f) == 0x7f ? (double)NAN : decode(value, 4, 3, 7, 0);
    case TM_F8E4M3FNUZ:
        return value == 0x80 ? (double)NAN : decode(value, 4, 3, 8, 0);
    case TM_F8E4M3B11FNUZ:
        return value == 0x80 ? (double)NAN : decode(value, 4, 3, 11, 0);
    case TM_F8E5M2:
        return decode(value, 5, 2, 15, 1);
    case TM_F8E5M2FNUZ:
        return value == 0x80 ? (double)NAN : decode(value, 5, 2, 16, 0);
    case TM_F8E4M3:
        return decode(value, 4, 3, 7, 1);
    case TM_F8E3M4:
        return decode(value, 3, 4, 3, 1);
    case TM_F8E8M0FNU:
        return value == 0xff ? (double)NAN : pow(2, value - 127);
    case TM_I8:
        return (int8_t)value;
    case TM_BOOL:
        return value != 0;
    default:
        return value;
    }
}

double reference_value(const void *data, int64_t index, tm_dtype dtype) {
#define LOAD(type)                                                                                           \
    type value;                                                                                              \
    memcpy(&value, (const char *)data + (size_t)index * sizeof value, sizeof value)
    if (tm_dtype_size(dtype) == 1) {
        LOAD(unsigned char);
        return reference_byte(value, dtype);
    }
    switch (dtype) {
    case TM_F64: {
        LOAD(double);
        return value;
    }
    case TM_F32: {
        LOAD(float);
        return value;
    }
    case TM_F16: {
        LOAD(uint16_t);
        return decode(value, 5, 10, 15, 1);
    }
    case TM_BF16: {
        LOAD(uint16_t);
        return decode(value, 8, 7, 127, 1);
    }
    case TM_I16: {
        LOAD(int16_t);
        return value;
    }
    case TM_U16: {
        LOAD(uint16_t);
        return value;
    }
    case TM_I32: {
        LOAD(int32_t);
        return value;
    }
    case TM_U32: {
        LOAD(uint32_t);
        return value;
    }
    case TM_I64: {
        LOAD(int64_t);
        return (double)value;
    }
    default: {
        LOAD(uint64_t);
        return (double)value;
    }
    }
}

static double total(double *lane) {
    for (int width = 16; width > 0; width /= 2) {
        for (int l = 0; l < width; l++) {
            lane[l] += lane[l + width];
        }
    }
    return lane[0];
}

/* Adds `times` occurrences of f(x) to a lane: 2 squares, 1 magnitudes, 0 values. */
static double term(double value, int power, double times) {
    return times * (power == 2 ? value * value : power == 1 ? fabs(value) : value);
}

/* Sum over a chunk in the order of the lanes; one-byte dtypes go by code. `factor` scales the values. */
static double chunk_sum(const void *data, int64_t start, int64_t count, tm_dtype dtype, int power,
                        int skip_bad, double factor) {
    double lane[32] = {0};
    if (tm_dtype_size(dtype) == 1) {
        int64_t occurs[256] = {0};
        for (int64_t i = start; i < start + count; i++) {
            occurs[((const unsigned char *)data)[i]]++;
        }
        for (int code = 0; code < 256; code++) {
            double value = reference_byte((unsigned char)code, dtype);
            if (occurs[code] > 0 && !(skip_bad && !isfinite(value))) {
                lane[code % 32] += term(value, power, (double)occurs[code]);
            }
        }
        return total(lane);
    }
    for (int64_t i = 0; i < count; i++) {
        double value = reference_value(data, start + i, dtype);
        if (!(skip_bad && !isfinite(value))) {
            lane[i % 32] += term(value * factor, power, 1.0);
        }
    }
    return total(lane);
}

static double tree_sum(const void *data, int64_t n, int64_t first, int64_t chunks, tm_dtype dtype, int power,
                       int skip_bad) {
    if (chunks <= 1) {
        int64_t start = first * TM_CHUNK, rest = n - start;
        return chunks == 0
                   ? 0.0
                   : chunk_sum(data, start, rest < TM_CHUNK ? rest : TM_CHUNK, dtype, power, skip_bad, 1.0);
    }
    int64_t left = 1;
    while (left * 2 < chunks) {
        left *= 2;
    }
    double a = tree_sum(data, n, first, left, dtype, power, skip_bad);
    return a + tree_sum(data, n, first + left, chunks - left, dtype, power, skip_bad);
}

/* Finite elements, their sum and their squared deviations from the mean, in units of 4^exponent. */
typedef struct moments {
    double n, sum, m2, low, high;
} moments;

static moments chunk_moments(const void *data, int64_t start, int64_t count, tm_dtype dtype, double factor) {
    moments chunk = {0, chunk_sum(data, start, count, dtype, 0, 1, 1.0), 0, INFINITY, -INFINITY};
    double sumsq = chunk_sum(data, start, count, dtype, 2, 1, factor);
    for (int64_t i = 0; i < count; i++) {
        double value = reference_value(data, start + i, dtype);
        if (isfinite(value)) {
            chunk.n++;
            chunk.low = value < chunk.low ? value : chunk.low;
            chunk.high = value > chunk.high ? value : chunk.high;
        }
    }
    double mean = chunk.sum / chunk.n, scaled = mean * factor;
    if (!(chunk.low < chunk.high)) {
        return chunk;
    }
    chunk.m2 = sumsq - scaled * scaled * chunk.n;
    if (!(chunk.m2 < 1e-8 * sumsq)) {
        return chunk;
    }
    double d[8] = {0}, dd[8] = {0};
    for (int64_t i = 0; i < count; i++) {
        double value = reference_value(data, start + i, dtype);
        double deviation = isfinite(value) ? (value - mean) * factor : 0.0;
        d[i % 8] += deviation;
        dd[i % 8] += deviation * deviation;
    }
    double sum = ((d[0] + d[4]) + (d[2] + d[6])) + ((d[1] + d[5]) + (d[3] + d[7]));
    double squares = ((dd[0] + dd[4]) + (dd[2] + dd[6])) + ((dd[1] + dd[5]) + (dd[3] + dd[7]));
    chunk.m2 = fmax(squares - sum * sum / chunk.n, 0.0);
    return chunk;
}

static moments tree_moments(const void *data, int64_t n, int64_t first, int64_t chunks, tm_dtype dtype,
                            double factor) {
    if (chunks <= 1) {
        int64_t start = first * TM_CHUNK, rest = n - start;
        return chunk_moments(data, start, rest < TM_CHUNK ? rest : TM_CHUNK, dtype, factor);
    }
    int64_t left = 1;
    while (left * 2 < chunks) {
        left *= 2;
    }
    moments a = tree_moments(data, n, first, left, dtype, factor);
    moments b = tree_moments(data, n, first + left, chunks - left, dtype, factor);
    if (a.n > 0 && b.n > 0 && !(a.low == a.high && a.low == b.low && b.low == b.high)) {
        double apart = (b.sum / b.n - a.sum / a.n) * factor;
        a.m2 = a.m2 + b.m2 + apart * apart * (a.n / (a.n + b.n) * b.n);
    } else {
        a.m2 += b.m2;
    }
    a.n += b.n;
    a.sum += b.sum;
    a.low = b.low < a.low ? b.low : a.low;
    a.high = b.high > a.high ? b.high : a.high;
    return a;
}

tm_stats reference_stats(const void *data, int64_t n, tm_dtype dtype) {
    tm_stats s = {.n = n, .min = NAN, .max = NAN, .absmax = NAN, .first_bad = -1};
    int64_t chunks = (n + TM_CHUNK - 1) / TM_CHUNK;
    for (int64_t i = 0; i < n; i++) {
        double value = reference_value(data, i, dtype);
        s.n_zero += value == 0;
        if (isfinite(value)) {
            s.min = isnan(s.min) || value < s.min ? value : s.min;
            s.max = isnan(s.max) || value > s.max ? value : s.max;
            s.absmax = isnan(s.absmax) || fabs(value) > s.absmax ? fabs(value) : s.absmax;
            continue;
        }
        s.n_nan += isnan(value);
        s.n_posinf += value > 0;
        s.n_neginf += value < 0;
        s.first_bad = s.first_bad < 0 ? i : s.first_bad;
    }
    s.min = s.min == 0 ? 0.0 : s.min;
    s.max = s.max == 0 ? 0.0 : s.max;
    s.sum = tree_sum(data, n, 0, chunks, dtype, 0, 1);
    s.sumsq = s.sumsq_scaled = tree_sum(data, n, 0, chunks, dtype, 2, 1);
    if (chunks == 1 && dtype == TM_F64 && s.absmax > 0 && (isinf(s.sumsq) || s.sumsq < 1e-290)) {
        int e = ilogb(s.absmax);
        e = e > 1000 ? 1000 : e < -1000 ? -1000 : e;
        s.sumsq_scaled = chunk_sum(data, 0, n, dtype, 2, 1, pow(2, -e));
        s.scale_exponent = e;
        s.sumsq = ldexp(s.sumsq_scaled, 2 * e);
    }
    if (chunks > 0) {
        s.m2_scaled = tree_moments(data, n, 0, chunks, dtype, pow(2, -(double)s.scale_exponent)).m2;
    }
    return s;
}

double reference_norm(const void *data, int64_t n, tm_dtype dtype, tm_norm_order order) {
    tm_stats s = reference_stats(data, n, dtype);
    if (s.n_nan > 0) {
        return NAN;
    }
    if (s.n_posinf + s.n_neginf > 0) {
        return INFINITY;
    }
    if (order == TM_NORM_INF) {
        return n > 0 ? s.absmax : 0.0;
    }
    if (order == TM_NORM_1) {
        return tree_sum(data, n, 0, (n + TM_CHUNK - 1) / TM_CHUNK, dtype, 1, 0);
    }
    return ldexp(sqrt(s.sumsq_scaled), (int)s.scale_exponent);
}
