/* Rules over the median of a window that is kept twice: in order of time and in order of size. */
#include "tm_detectors.h"

#include <math.h>
#include <string.h>

/* Words of one series; `pending` holds the flagged values in a row, the window to be if there are enough. */
typedef struct sorted_window {
    int64_t *taken, *flags; /* values taken so far, flags in a row */
    tm_word *ring, *sorted, *pending;
    int64_t window;
} sorted_window;

static int64_t filled(const sorted_window *at) {
    return *at->taken < at->window ? *at->taken : at->window;
}

/* The first position whose value is not below x. */
static int64_t lower_bound(const tm_word *sorted, int64_t count, double x) {
    int64_t low = 0;
    while (count > 0) {
        const int64_t half = count / 2;
        const int below = sorted[low + half].f < x;
        low = below ? low + half + 1 : low;
        count = below ? count - half - 1 : half;
    }
    return low;
}

static void take(const sorted_window *at, double x) {
    const int64_t count = filled(at), slot = *at->taken % at->window;
    tm_word *sorted = at->sorted;
    int64_t in = lower_bound(sorted, count, x);
    if (count < at->window) {
        memmove(sorted + in + 1, sorted + in, (size_t)(count - in) * sizeof *sorted);
    } else {
        const int64_t out = lower_bound(sorted, count, at->ring[slot].f);
        if (in > out) { /* x belongs behind the value that goes: those between move down */
            in--;
            memmove(sorted + out, sorted + out + 1, (size_t)(in - out) * sizeof *sorted);
        } else {
            memmove(sorted + in + 1, sorted + in, (size_t)(out - in) * sizeof *sorted);
        }
    }
    sorted[in].f = x;
    at->ring[slot].f = x;
    ++*at->taken;
}

static double median_of(const tm_word *sorted, int64_t count) {
    const double low = sorted[(count - 1) / 2].f, high = sorted[count / 2].f;
    return low == high ? low : 0.5 * low + 0.5 * high;
}

/* The distances from `middle` form two ascending sequences, to the left and to the right of `split`. */
static double distance_left(const tm_word *sorted, int64_t split, double middle, int64_t i) {
    return middle - sorted[split - 1 - i].f;
}

static double distance_right(const tm_word *sorted, int64_t split, double middle, int64_t i) {
    return sorted[split + i].f - middle;
}

/* Median of the distances from the median: how many of the lower half come from the left is found by
 * bisection. */
static double median_distance(const tm_word *sorted, int64_t count, double middle) {
    const int64_t split = lower_bound(sorted, count, middle), right = count - split;
    const int64_t want = count / 2 + 1; /* that many smallest distances, the largest of them is needed */
    int64_t low = want > right ? want - right : 0, high = want < split ? want : split;
    while (low < high) { /* the smallest number from the left whose next is not below the right's last */
        const int64_t left = low + (high - low) / 2;
        if (distance_left(sorted, split, middle, left) <
            distance_right(sorted, split, middle, want - left - 1))
            low = left + 1;
        else
            high = left;
    }
    const int64_t others = want - low;
    double largest = -INFINITY, second = -INFINITY; /* of the `want` smallest */
    for (int64_t i = low - 1; i >= 0 && i >= low - 2; i--) {
        const double distance = distance_left(sorted, split, middle, i);
        second = fmax(second, fmin(largest, distance));
        largest = fmax(largest, distance);
    }
    for (int64_t i = others - 1; i >= 0 && i >= others - 2; i--) {
        const double distance = distance_right(sorted, split, middle, i);
        second = fmax(second, fmin(largest, distance));
        largest = fmax(largest, distance);
    }
    return count % 2 == 1 || largest == second ? largest : 0.5 * largest + 0.5 * second;
}

/* The window becomes the flagged values, oldest first. */
static void shift(const sorted_window *at, int64_t count) {
    *at->taken = 0;
    *at->flags = 0;
    for (int64_t i = count > at->window ? count - at->window : 0; i < count; i++)
        take(at, at->pending[i].f);
}

/* Judges x by `outlier` and takes it, or puts it aside. *middle, *spread: from before x, with the floor.
 * Returns -1: too little history, 0: taken, 1: an outlier, 2: the outlier that made a new window. */
static int judge(const sorted_window *at, double outlier, int64_t warmup, int64_t flags_to_shift, double x,
                 double *middle, double *spread) {
    const int64_t count = filled(at);
    int verdict = -1;
    if (count >= warmup) {
        *middle = median_of(at->sorted, count);
        *spread = tm_spread_floor(median_distance(at->sorted, count, *middle), *middle);
        verdict = 0.6745 * (x - *middle) / *spread > outlier;
    }
    if (verdict != 1) {
        *at->flags = 0;
        take(at, x);
        return verdict;
    }
    at->pending[(*at->flags)++].f = x;
    if (*at->flags < flags_to_shift)
        return 1;
    shift(at, flags_to_shift);
    return 2;
}

static sorted_window lay_out(tm_word *words, int64_t window) {
    return (sorted_window){.taken = &words[0].i,
                           .flags = &words[1].i,
                           .ring = words + 2,
                           .sorted = words + 2 + window,
                           .pending = words + 2 + 2 * window,
                           .window = window};
}

static sorted_window lay_out_linearity(tm_word *words, int64_t window, int64_t *flags) {
    return (sorted_window){.taken = &words[0].i,
                           .flags = flags,
                           .ring = words + 1,
                           .sorted = words + 1 + window,
                           .window = window};
}

int tm_sorted_state_holds(const double *p, tm_word *words, tm_detector_kind kind) {
    int64_t none = 0, shift = 1;
    sorted_window at;
    if (kind == TM_DETECT_linearity) {
        at = lay_out_linearity(words, (int64_t)p[1], &none);
    } else {
        at = lay_out(words, (int64_t)p[kind == TM_DETECT_mad ? 1 : 2]);
        shift = (int64_t)p[kind == TM_DETECT_mad ? 3 : 4];
    }
    if (*at.taken < 0 || *at.flags < 0 || *at.flags >= shift)
        return 0;
    const int64_t count = filled(&at);
    for (int64_t i = 0; i < count; i++) {
        const int64_t found = lower_bound(at.sorted, count, at.ring[i].f);
        if (!isfinite(at.sorted[i].f) || (i > 0 && at.sorted[i - 1].f > at.sorted[i].f) || found == count ||
            at.sorted[found].f != at.ring[i].f)
            return 0;
    }
    return 1;
}

tm_verdict tm_rule_mad(const double *p, tm_word *words, double x, tm_finding *finding) {
    const sorted_window at = lay_out(words, (int64_t)p[1]);
    double middle = 0, spread = 1;
    if (p[4] != 0) {
        if (!(x > 0))
            return TM_VERDICT_NONE;
        x = log(x);
    }
    const int outlier = judge(&at, p[0], (int64_t)p[2], (int64_t)p[3], x, &middle, &spread);
    if (outlier <= 0)
        return TM_VERDICT_NONE;
    return tm_found(finding, outlier == 2 ? TM_VERDICT_SHIFT : TM_VERDICT_FLAG,
                    0.6745 * (x - middle) / spread, p[0]);
}

/* The sum stands behind mad's words. */
tm_verdict tm_rule_cusum(const double *p, tm_word *words, double x, tm_finding *finding) {
    const int64_t window = (int64_t)p[2], flags_to_shift = (int64_t)p[4];
    const sorted_window at = lay_out(words, window);
    double *sum = &words[2 + 2 * window + flags_to_shift].f, middle = 0, spread = 1;
    if (p[7] != 0) {
        if (!(x > 0))
            return TM_VERDICT_NONE;
        x = log(x);
    }
    if (p[6] != 0)
        x = -x;
    const int outlier = judge(&at, p[5], (int64_t)p[3], flags_to_shift, x, &middle, &spread);
    if (outlier < 0)
        return TM_VERDICT_NONE;
    const double score = fmax(0, *sum + (x - middle) / (1.4826 * spread) - p[0]);
    *sum = score > p[1] || outlier == 2 ? 0 : score;
    if (outlier == 2)
        return tm_found(finding, TM_VERDICT_SHIFT, score, p[1]);
    return score > p[1] ? tm_found(finding, TM_VERDICT_FLAG, score, p[1]) : TM_VERDICT_NONE;
}

/* words: values taken, the ring, the same values by size */
tm_verdict tm_rule_linearity(const double *p, tm_word *words, double x, tm_finding *finding) {
    int64_t none = 0;
    const int64_t window = (int64_t)p[1];
    const sorted_window at = lay_out_linearity(words, window, &none);
    take(&at, x);
    if (*at.taken < window)
        return TM_VERDICT_NONE;
    const double middle = median_of(at.sorted, window);
    return middle < p[0] ? tm_found(finding, TM_VERDICT_FLAG, middle, p[0]) : TM_VERDICT_NONE;
}
