#include "tm_deviation.h"

#include "tm_wide.h"

#include <math.h>

/* Where sumsq - N * mean^2 is below this share of sumsq, fewer than 8 of its digits are right. */
#define CANCELLATION 1e-8

#define LANES 8
#define PART 1024 /* elements widened at a time; a multiple of LANES */

static int64_t finite_count(const tm_stats *stats) {
    return stats->n - stats->n_nan - stats->n_posinf - stats->n_neginf;
}

/* Second pass: sum of d^2 - (sum of d)^2 / N with d = (x - mean) * scale; the second term takes away what the
 * rounding of the mean brought in. Elements i, i + LANES, ... share a lane, whatever the dtype and the tier.
 */
static double read_again(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start,
                         const tm_stats *stats, double mean, double scale) {
    double part[PART], sum[LANES] = {0}, sumsq[LANES] = {0};
    for (int64_t done = 0; done < stats->n; done += PART) {
        int64_t rest = stats->n - done, width = rest < PART ? rest : PART;
        tm_wide_f64(table, layout, dtype, start + done, width, part);
        for (int64_t i = 0; i < width; i++) {
            double d = isfinite(part[i]) ? (part[i] - mean) * scale : 0.0;
            sum[i % LANES] += d;
            sumsq[i % LANES] += d * d;
        }
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int l = 0; l < half; l++) {
            sum[l] += sum[l + half];
            sumsq[l] += sumsq[l + half];
        }
    }
    double m2 = sumsq[0] - sum[0] * sum[0] / (double)finite_count(stats);
    return m2 > 0 ? m2 : 0.0;
}

double tm_chunk_deviation(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start,
                          const tm_stats *stats) {
    if (!(stats->min < stats->max)) { /* nothing finite, or one value */
        return 0.0;
    }
    double count = (double)finite_count(stats), mean = stats->sum / count;
    double scale = ldexp(1.0, (int)-stats->scale_exponent), scaled = mean * scale;
    double m2 = stats->sumsq_scaled - scaled * scaled * count;
    if (m2 < CANCELLATION * stats->sumsq_scaled) {
        m2 = read_again(table, layout, dtype, start, stats, mean, scale);
    }
    return m2;
}

/* Chan, Golub and LeVeque (1979): all terms are positive, nothing cancels. */
double tm_merged_deviation(const tm_stats *a, const tm_stats *b, int64_t exponent) {
    double left = ldexp(a->m2_scaled, (int)(2 * (a->scale_exponent - exponent)));
    double right = ldexp(b->m2_scaled, (int)(2 * (b->scale_exponent - exponent)));
    double n = (double)finite_count(a), m = (double)finite_count(b);
    int one_value =
        a->min == a->max && a->min == b->min && b->min == b->max; /* whatever its means round to */
    if (n == 0 || m == 0 || one_value) {
        return left + right;
    }
    double apart = ldexp(b->sum / m - a->sum / n, (int)-exponent);
    return left + right + apart * apart * (n / (n + m) * m);
}
