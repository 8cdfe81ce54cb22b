/* Rules that remember a few numbers. */
#include "tm_detectors.h"

#include <math.h>

tm_verdict tm_rule_nonfinite(const double *p, tm_word *words, double x, tm_finding *finding) {
    (void)p;
    if (isfinite(x)) {
        words[0].i = 0;
        return TM_VERDICT_NONE;
    }
    words[0].i++;
    return tm_found(finding, TM_VERDICT_FLAG, (double)words[0].i, 1);
}

tm_verdict tm_rule_threshold(const double *p, tm_word *words, double x, tm_finding *finding) {
    const double above = p[0], below = p[1];
    const int high = x >= above; /* a bound that is NaN is none */
    if (!high && !(x <= below)) {
        words[0].i = 0;
        return TM_VERDICT_NONE;
    }
    if ((double)++words[0].i < p[2])
        return TM_VERDICT_NONE;
    return tm_found(finding, TM_VERDICT_FLAG, x, high ? above : below);
}

tm_verdict tm_rule_global_norm_spike(const double *p, tm_word *words, double x, tm_finding *finding) {
    if (!(x >= p[0])) {
        words[0].i = 0;
        return TM_VERDICT_NONE;
    }
    return tm_found(finding, (double)++words[0].i >= p[1] ? TM_VERDICT_STOP : TM_VERDICT_FLAG, x, p[0]);
}

tm_verdict tm_rule_megatron_max(const double *p, tm_word *words, double x, tm_finding *finding) {
    const double magnitude = fabs(x), largest = words[1].f;
    if ((double)words[0].i < p[1]) {
        words[0].i++;
        words[1].f = fmax(largest, magnitude);
        return TM_VERDICT_NONE;
    }
    if (!(largest > 0) || magnitude < p[0] * largest)
        return TM_VERDICT_NONE;
    return tm_found(finding, TM_VERDICT_FLAG, magnitude, p[0] * largest);
}

/* words: values seen, mean, variance (sum of squared deviations during the warm-up) */
tm_verdict tm_rule_zclip(const double *p, tm_word *words, double x, tm_finding *finding) {
    const double limit = p[0], warmup = p[1], alpha = p[2];
    tm_verdict verdict = TM_VERDICT_NONE;
    double mean = words[1].f, variance = words[2].f, accepted = x;
    if ((double)words[0].i < warmup) {
        const double n = (double)++words[0].i, before = x - mean;
        mean += before / n;
        variance += before * (x - mean);
        words[1].f = mean;
        words[2].f = n == warmup ? variance / n : variance;
        return TM_VERDICT_NONE;
    }
    const double deviation = sqrt(variance), z = (x - mean) / (deviation + 1e-6);
    if (z > limit) {
        accepted = mean + limit * limit * deviation / z;
        verdict = tm_found(finding, TM_VERDICT_FLAG, z, limit);
    }
    mean = alpha * mean + (1 - alpha) * accepted;
    words[1].f = mean;
    words[2].f = alpha * variance + (1 - alpha) * (accepted - mean) * (accepted - mean);
    return verdict;
}

/* words: values seen, gamma. A norm that isn't above 0 says nothing of the scale, and isn't counted. */
tm_verdict tm_rule_adagc(const double *p, tm_word *words, double x, tm_finding *finding) {
    const double factor = p[0], warmup = p[1], beta = p[2], gamma = words[1].f;
    tm_verdict verdict = TM_VERDICT_NONE;
    if (!(x > 0))
        return TM_VERDICT_NONE;
    if ((double)words[0].i < warmup) {
        const double clipped = fmin(1, 1 / x) * x;
        words[1].f = words[0].i++ == 0 ? clipped : fmin(gamma, clipped);
        return TM_VERDICT_NONE;
    }
    if (x > factor * gamma)
        verdict = tm_found(finding, TM_VERDICT_FLAG, x, factor * gamma);
    words[1].f = beta * gamma + (1 - beta) * (fmin(1, factor * gamma / x) * x);
    return verdict;
}

/* words: the average; below 0 before the first value */
tm_verdict tm_rule_turbulence(const double *p, tm_word *words, double x, tm_finding *finding) {
    const double magnitude = fabs(x), average = words[0].f, limit = (1 + p[0]) * average;
    if (average < 0) {
        words[0].f = magnitude;
        return TM_VERDICT_NONE;
    }
    words[0].f = p[1] * average + (1 - p[1]) * magnitude;
    return magnitude > limit ? tm_found(finding, TM_VERDICT_FLAG, magnitude, limit) : TM_VERDICT_NONE;
}

/* words: accepted values, mean, variance, flags in a row */
tm_verdict tm_rule_ewma(const double *p, tm_word *words, double x, tm_finding *finding) {
    const double limit = p[0], warmup = p[2], shift = p[3];
    tm_verdict verdict = TM_VERDICT_NONE;
    if (p[4] != 0) {
        if (!(x > 0))
            return TM_VERDICT_NONE;
        x = log(x);
    }
    const double distance = x - words[1].f, spread = tm_spread_floor(sqrt(words[2].f), words[1].f);
    if ((double)words[0].i >= warmup && distance > limit * spread) {
        if ((double)++words[3].i < shift)
            return tm_found(finding, TM_VERDICT_FLAG, distance / spread, limit);
        verdict = tm_found(finding, TM_VERDICT_SHIFT, distance / spread, limit);
        words[0].i = 0;
    }
    words[3].i = 0;
    if (words[0].i++ == 0) {
        words[1].f = x;
        words[2].f = 0;
        return verdict;
    }
    const double weight = fmax(p[1], 1 / (double)words[0].i);
    words[1].f += weight * distance;
    words[2].f = (1 - weight) * (words[2].f + weight * distance * distance);
    return verdict;
}

/* x: counts over the layer's mean */
tm_verdict tm_rule_dead_expert(const double *p, tm_word *words, double x, tm_finding *finding) {
    words[0].i = x <= p[1] ? words[0].i + 1 : 0;
    if ((double)words[0].i < p[0])
        return TM_VERDICT_NONE;
    return tm_found(finding, TM_VERDICT_FLAG, (double)words[0].i, p[0]);
}

/* words: the last reports, the newest in bit 0 */
tm_verdict tm_rule_straggler(const double *p, tm_word *words, double x, tm_finding *finding) {
    const int slow = x < p[0];
    const uint64_t kept = ((uint64_t)1 << (int)p[2]) - 1;
    words[0].u = ((words[0].u << 1) | (uint64_t)slow) & kept;
    int hits = 0;
    for (uint64_t left = words[0].u; left != 0; left &= left - 1)
        hits++;
    if (!slow || hits < p[1])
        return TM_VERDICT_NONE;
    return tm_found(finding, TM_VERDICT_FLAG, hits, p[1]);
}
