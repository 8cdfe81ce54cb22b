/* Rules over the mean and spread of the last values, whatever they were.
 *
 * The moments slide with the window and are made anew from its values once a turn, and whenever the value
 * that leaves was so large that the rest has lost its digits: a value of 1e30 is forgotten with the step it
 * leaves. */
#include "tm_detectors.h"

#include <math.h>

/* The first words of these rules; the ring follows the rule's own words. */
enum { SEEN, MEAN, SQUARES };

#define LOST_DIGITS 0x1p-20

static void moments_anew(tm_word *words, const tm_word *ring, int64_t size) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < size; i++)
        sum += ring[i].f;
    const double mean = sum / (double)size;
    for (int64_t i = 0; i < size; i++)
        squares += (ring[i].f - mean) * (ring[i].f - mean);
    words[MEAN].f = mean;
    words[SQUARES].f = squares;
}

/* Takes x for the value `window` steps before. */
static void window_take(tm_word *words, tm_word *ring, int64_t window, double x) {
    const int64_t seen = words[SEEN].i++, at = seen % window;
    const double mean = words[MEAN].f, old = ring[at].f;
    ring[at].f = x;
    if (seen < window) {
        words[MEAN].f = mean + (x - mean) / (double)(seen + 1);
        words[SQUARES].f += (x - mean) * (x - words[MEAN].f);
        return;
    }
    const double moved = mean + (x - old) / (double)window;
    const double squares = words[SQUARES].f + (x - old) * ((x - moved) + (old - mean));
    words[MEAN].f = moved;
    words[SQUARES].f = squares;
    const int kept = isfinite(squares) && isfinite(moved) &&
                     squares >= LOST_DIGITS * ((old - mean) * (old - mean)) &&
                     fabs(moved) >= LOST_DIGITS * fabs(mean);
    if (at == 0 || !kept)
        moments_anew(words, ring, window);
}

/* words: seen, mean, squares, outliers in a row, cap, values above the cap, then the ring */
tm_verdict tm_rule_kill_loss_spike(const double *p, tm_word *words, double x, tm_finding *finding) {
    const int64_t window = (int64_t)p[2];
    tm_word *ring = words + 6;
    tm_verdict verdict = TM_VERDICT_NONE;
    if (words[SEEN].i >= window && words[MEAN].f > 0) {
        const double limit = p[0] * words[MEAN].f;
        if (x >= limit)
            verdict =
                tm_found(finding, (double)++words[3].i > p[1] ? TM_VERDICT_STOP : TM_VERDICT_FLAG, x, limit);
        else
            words[3].i = 0;
    }
    const double old = ring[words[SEEN].i % window].f;
    window_take(words, ring, window, x);
    if (words[SEEN].i == window) {
        double largest = ring[0].f;
        for (int64_t i = 1; i < window; i++)
            largest = fmax(largest, ring[i].f);
        words[4].f = fmin(largest, p[3]);
        for (int64_t i = 0; i < window; i++)
            words[5].i += ring[i].f > words[4].f;
    } else if (words[SEEN].i > window) {
        words[5].i += (x > words[4].f) - (old > words[4].f);
    }
    if (words[SEEN].i >= 2 * window && 2 * words[5].i >= window && verdict != TM_VERDICT_STOP)
        verdict = tm_found(finding, TM_VERDICT_HIGH, (double)words[5].i / (double)window, 0.5);
    return verdict;
}

/* Standard deviations above the mean of the ring's values, -inf at or below it; inf above equal values. */
static double sigmas(const tm_word *words, double divisor, double x) {
    const double distance = x - words[MEAN].f;
    const double deviation = sqrt(fmax(words[SQUARES].f, 0) / divisor);
    return distance > 0 ? distance / deviation : -INFINITY;
}

/* words: seen, mean, squares, then the ring */
tm_verdict tm_rule_skip_step_sigma(const double *p, tm_word *words, double x, tm_finding *finding) {
    const int64_t window = (int64_t)p[1], filled = words[SEEN].i < window ? words[SEEN].i : window;
    tm_verdict verdict = TM_VERDICT_NONE;
    if ((double)words[SEEN].i >= p[2]) {
        const double score = sigmas(words, (double)(filled - 1), x);
        if (score > p[0])
            verdict = tm_found(finding, TM_VERDICT_FLAG, score, p[0]);
    }
    window_take(words, words + 3, window, x);
    return verdict;
}

/* words: seen, mean, squares, flags among the last `span` steps, the ring, then those flags as bits */
tm_verdict tm_rule_stability_score(const double *p, tm_word *words, double x, tm_finding *finding) {
    const int64_t window = (int64_t)p[1], span = (int64_t)p[2], at = words[SEEN].i % span;
    tm_word *flags = words + 4 + window + at / 64;
    const uint64_t bit = (uint64_t)1 << (at % 64);
    const double score = words[SEEN].i >= window ? sigmas(words, (double)window, x) : -INFINITY;
    const int flagged = score > p[0];
    words[3].i += flagged - ((flags->u & bit) != 0);
    flags->u = flagged ? flags->u | bit : flags->u & ~bit;
    window_take(words, words + 4, window, x);
    return flagged ? tm_found(finding, TM_VERDICT_FLAG, score, p[0]) : TM_VERDICT_NONE;
}

/* words: seen, mean, squares, then the ring */
tm_verdict tm_rule_spike_rtol(const double *p, tm_word *words, double x, tm_finding *finding) {
    const int64_t window = (int64_t)p[2], seen = words[SEEN].i;
    tm_word *ring = words + 3;
    tm_verdict verdict = TM_VERDICT_NONE;
    if (seen >= window && words[MEAN].f > 0 && x > ring[(seen - 1) % window].f) {
        const double distance = fabs(x - words[MEAN].f), relative = p[0] * words[MEAN].f;
        if (distance >= relative)
            verdict = tm_found(finding, TM_VERDICT_FLAG, distance, relative);
        else if (distance >= p[1])
            verdict = tm_found(finding, TM_VERDICT_FLAG, distance, p[1]);
    }
    window_take(words, ring, window, x);
    return verdict;
}
