/* The experts of one layer as float64 (contract: tm_moe_kernels.h). Expert e goes to lane e % 8, what is left
 * behind the last eight to a sum of its own, and the lanes are merged by one tree: the same bits in every
 * tier. Conditions are masks, as the compiler makes no branch-free code of `c > border ? age + 1 : 0`. */
#ifndef TM_MOE_LAYER_H
#define TM_MOE_LAYER_H

#include "tm_lanes.h"

#define TM_MOE_ADD(a, b) ((a) + (b))
#define TM_MOE_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Runs `body` for e from 0 on and merges its `term` over all e into `result`, from 0 on. */
#define TM_MOE_REDUCE(result, n, merge, body, term)                                                          \
    {                                                                                                        \
        double lane[8] = {0}, rest = 0;                                                                      \
        size_t first = 0;                                                                                    \
        for (; (n) - first >= 8; first += 8) {                                                               \
            for (size_t l = 0; l < 8; l++) {                                                                 \
                const size_t e = first + l;                                                                  \
                body lane[l] = merge(lane[l], term);                                                         \
            }                                                                                                \
        }                                                                                                    \
        for (size_t e = first; e < (n); e++) {                                                               \
            body rest = merge(rest, term);                                                                   \
        }                                                                                                    \
        for (int l = 0; l < 4; l++) {                                                                        \
            lane[l] = merge(lane[l], lane[l + 4]);                                                           \
        }                                                                                                    \
        lane[0] = merge(lane[0], lane[2]);                                                                   \
        lane[1] = merge(lane[1], lane[3]);                                                                   \
        lane[0] = merge(lane[0], lane[1]);                                                                   \
        (result) = merge(lane[0], rest);                                                                     \
    }
#define TM_MOE_NOTHING

TM_INLINE double masked(double value, int keep) {
    return tm_moe_value(tm_moe_bits(value) & (0 - (uint64_t)keep));
}

TM_NOINLINE double layer_sum(const double *values, size_t n) {
    double sum;
    TM_MOE_REDUCE(sum, n, TM_MOE_ADD, TM_MOE_NOTHING, values[e])
    return sum;
}

TM_NOINLINE double layer_max(const double *values, size_t n) {
    double max;
    TM_MOE_REDUCE(max, n, TM_MOE_MAX, TM_MOE_NOTHING, values[e])
    return max;
}

TM_NOINLINE double layer_sum_above(const double *values, size_t n, double border) {
    double sum;
    TM_MOE_REDUCE(sum, n, TM_MOE_ADD, const double over = values[e] - border;, TM_MOE_MAX(over, 0.0))
    return sum;
}

TM_NOINLINE double layer_bad(const double *values, size_t n, double limit) {
    double bad;
    TM_MOE_REDUCE(bad, n, TM_MOE_ADD, TM_MOE_NOTHING,
                  1.0 - masked(1.0, values[e] >= 0) * masked(1.0, values[e] < limit))
    return bad;
}

TM_NOINLINE double layer_runs_sum(const tm_moe_runs *of, size_t runs) {
    const double *value = of->value, *times = of->times;
    double sum;
    TM_MOE_REDUCE(sum, runs, TM_MOE_ADD, TM_MOE_NOTHING, times[e] * value[e])
    return sum;
}

TM_NOINLINE double layer_runs_above(const tm_moe_runs *of, size_t runs, double border, double divisor) {
    const double *value = of->value, *times = of->times;
    double sum;
    TM_MOE_REDUCE(sum, runs, TM_MOE_ADD, const double over = value[e] / divisor - border;
                  , times[e] * TM_MOE_MAX(over, 0.0))
    return sum;
}

TM_NOINLINE double layer_entropy(const tm_moe_runs *of, size_t runs, double total) {
    const double *value = of->value, *times = of->times;
    double sum;
    TM_MOE_REDUCE(sum, runs, TM_MOE_ADD, const double p = value[e] / total;, times[e] * (p * tm_moe_log(p)))
    return 0 - sum;
}

TM_NOINLINE void layer_spread(tm_moe_spread *out, const tm_moe_runs *of, size_t runs, size_t experts,
                              double mean, double scale) {
    const double *value = of->value, *times = of->times, *before = of->before, n = (double)experts;
    TM_MOE_REDUCE(out->squares, runs, TM_MOE_ADD, const double c = value[e] * scale;, times[e] * (c * c))
    TM_MOE_REDUCE(out->deviations, runs, TM_MOE_ADD, const double d = value[e] * scale - mean;
                  , times[e] * (d * d))
    /* the ranks of a run, from `before` + 1 on, have the mean before + (times + 1) / 2 */
    TM_MOE_REDUCE(out->ranks, runs, TM_MOE_ADD, const double rank = 2 * before[e] + times[e] - n;
                  , times[e] * rank * (value[e] * scale))
}

TM_NOINLINE void layer_pool(tm_moe_pools *out, double *restrict total, double *restrict pooled,
                            double *restrict row, const double *restrict counts, size_t n) {
    TM_MOE_REDUCE(out->pooled, n, TM_MOE_ADD, const double count = counts[e] + 0.0; /* -0.0 is 0 */
                  const double pool = pooled[e] - row[e] + count; pooled[e] = pool; row[e] = count;, pool)
    TM_MOE_REDUCE(out->total, n, TM_MOE_ADD, const double sum = total[e] + counts[e]; total[e] = sum;, sum)
}

TM_NOINLINE double layer_churn(double *restrict share, const double *restrict counts, size_t n,
                               double total) {
    double moved;
    TM_MOE_REDUCE(moved, n, TM_MOE_ADD, const double now = counts[e] / total;
                  const double by = now - share[e]; share[e] = now;, TM_MOE_MAX(by, -by))
    return moved;
}

/* C compares with a constant only here: three functions of one form. */
#define TM_MOE_AGE(name, compare)                                                                            \
    TM_NOINLINE double layer_##name(double *restrict age, double *restrict copy,                             \
                                    const double *restrict counts, size_t n, double border, double enough) { \
        double held;                                                                                         \
        TM_MOE_REDUCE(held, n, TM_MOE_ADD, const double now = masked(age[e] + 1, counts[e] compare border);  \
                      age[e] = now; copy[e] = now;, masked(1.0, now >= enough))                              \
        return held;                                                                                         \
    }
TM_MOE_AGE(at_most, <=)
TM_MOE_AGE(above, >)
TM_MOE_AGE(below, <)

#endif
