#include "tm_detectors.h"

#include <math.h>
#include <string.h>

/* Series ahead whose state is fetched; a row may be far from the one before. */
#define AHEAD 8

static const struct {
    const char *name, *parameters;
    tm_rule rule;
} table[TM_DETECTOR_KINDS] = {
#define TM_DETECTOR_ROW(rule, count, names) {#rule, names, tm_rule_##rule},
    TM_DETECTORS(TM_DETECTOR_ROW)
#undef TM_DETECTOR_ROW
};

const char *tm_detector_name(int kind) {
    return kind >= 0 && kind < TM_DETECTOR_KINDS ? table[kind].name : NULL;
}

const char *tm_detector_parameters(int kind) {
    return kind >= 0 && kind < TM_DETECTOR_KINDS ? table[kind].parameters : NULL;
}

static int is_count(double value, double low, double high) {
    return value >= low && value <= high && value == floor(value);
}

static int is_window(double value) {
    return is_count(value, 2, TM_DETECTOR_MAX_WINDOW);
}

static int is_many(double value) {
    return is_count(value, 1, 0x1p52);
}

static int is_share(double value) {
    return value >= 0 && value <= 1;
}

static int is_positive(double value) {
    return value > 0 && value <= 0x1p1000;
}

/* What mad and cusum share. */
static int are_sorted(double window, double warmup, double shift, double log) {
    return is_window(window) && is_count(warmup, 2, window) && is_count(shift, 1, TM_DETECTOR_MAX_WINDOW) &&
           is_count(log, 0, 1);
}

tm_status tm_detector_words(tm_detector_kind kind, const double *p, int64_t *words, tm_error *error) {
    int good = 0;
    *words = 1;
    switch (kind) {
    case TM_DETECT_nonfinite:
        good = 1;
        break;
    case TM_DETECT_threshold:
        good = (p[0] == p[0] || p[1] == p[1]) && is_many(p[2]);
        break;
    case TM_DETECT_global_norm_spike:
        good = is_positive(p[0]) && is_many(p[1]);
        break;
    case TM_DETECT_kill_loss_spike:
        good = is_positive(p[0]) && is_count(p[1], 0, 0x1p52) && is_window(p[2]) && p[3] == p[3];
        *words = good ? (int64_t)p[2] + 6 : 0;
        break;
    case TM_DETECT_skip_step_sigma:
        good = is_positive(p[0]) && is_window(p[1]) && is_count(p[2], 2, p[1]);
        *words = good ? (int64_t)p[1] + 3 : 0;
        break;
    case TM_DETECT_stability_score:
        good = is_positive(p[0]) && is_window(p[1]) && is_window(p[2]);
        *words = good ? (int64_t)p[1] + 4 + ((int64_t)p[2] + 63) / 64 : 0;
        break;
    case TM_DETECT_spike_rtol:
        good = is_positive(p[0]) && (p[1] != p[1] || is_positive(p[1])) && is_window(p[2]);
        *words = good ? (int64_t)p[2] + 3 : 0;
        break;
    case TM_DETECT_megatron_max:
        good = is_positive(p[0]) && is_many(p[1]);
        *words = 2;
        break;
    case TM_DETECT_zclip:
        good = is_positive(p[0]) && is_count(p[1], 2, 0x1p52) && is_share(p[2]);
        *words = 3;
        break;
    case TM_DETECT_adagc:
        good = is_positive(p[0]) && is_many(p[1]) && is_share(p[2]);
        *words = 2;
        break;
    case TM_DETECT_turbulence:
        good = is_positive(p[0]) && is_share(p[1]);
        break;
    case TM_DETECT_mad:
        good = is_positive(p[0]) && are_sorted(p[1], p[2], p[3], p[4]);
        *words = good ? 2 + 2 * (int64_t)p[1] + (int64_t)p[3] : 0;
        break;
    case TM_DETECT_cusum:
        good = p[0] >= 0 && is_positive(p[1]) && are_sorted(p[2], p[3], p[4], p[7]) && is_positive(p[5]) &&
               is_count(p[6], 0, 1);
        *words = good ? 3 + 2 * (int64_t)p[2] + (int64_t)p[4] : 0;
        break;
    case TM_DETECT_ewma:
        good = is_positive(p[0]) && is_share(p[1]) && is_count(p[2], 2, 0x1p52) && is_many(p[3]) &&
               is_count(p[4], 0, 1);
        *words = 4;
        break;
    case TM_DETECT_dead_expert:
        good = is_many(p[0]) && p[1] >= 0;
        break;
    case TM_DETECT_straggler:
        good = p[0] == p[0] && is_count(p[2], 1, 63) && is_count(p[1], 1, p[2]);
        break;
    case TM_DETECT_linearity:
        good = p[0] == p[0] && is_window(p[1]);
        *words = good ? 1 + 2 * (int64_t)p[1] : 0;
        break;
    case TM_DETECTOR_KINDS:
    default:
        return tm_fail(error, TM_ERR_VALUE, "there is no detector with the id %d", (int)kind);
    }
    if (!good)
        return tm_fail(error, TM_ERR_VALUE, "%s: a parameter (%s) is out of its range", table[kind].name,
                       table[kind].parameters);
    return TM_OK;
}

static int64_t words_of(const tm_detector *detector) {
    tm_error ignored;
    int64_t words = 0;
    return tm_detector_words(detector->kind, detector->p, &words, &ignored) == TM_OK ? words : 0;
}

void tm_detector_reset(const tm_detector *detector) {
    const int64_t words = words_of(detector);
    memset(detector->words, 0, (size_t)(words * detector->count) * sizeof *detector->words);
    if (detector->kind == TM_DETECT_turbulence)
        for (int64_t i = 0; i < detector->count; i++)
            detector->words[i].f = -1;
}

static tm_status check(const tm_detect_call *call, tm_error *error) {
    int64_t needed = 0;
    for (size_t d = 0; d < call->count; d++) {
        const tm_detector *detector = &call->detectors[d];
        int64_t words;
        const tm_status status = tm_detector_words(detector->kind, detector->p, &words, error);
        if (status != TM_OK)
            return status;
        for (int64_t j = 0; j < detector->count; j++)
            if (detector->members[j] < 0 || detector->members[j] >= call->series)
                return tm_fail(error, TM_ERR_VALUE, "detector %zu watches series %lld of %lld", d,
                               (long long)detector->members[j], (long long)call->series);
        needed += detector->count;
    }
    if (call->room < needed)
        return tm_fail(error, TM_ERR_VALUE, "room for %lld events, a step may have %lld",
                       (long long)call->room, (long long)needed);
    return TM_OK;
}

/* Events of one detector at one step are written from `events` on; returns their number. */
static int64_t run_detector(const tm_detector *detector, int64_t words, const double *values,
                            const uint8_t *valid, tm_event *events) {
    const tm_rule rule = table[detector->kind].rule;
    const int takes_all = detector->kind == TM_DETECT_nonfinite;
    tm_word *state = detector->words;
    int64_t found = 0;
    for (int64_t j = 0; j < detector->count; j++, state += words) {
        const int64_t series = detector->members[j];
        const double x = values[series];
        tm_finding finding;
        if (j + AHEAD < detector->count)
            __builtin_prefetch(state + AHEAD * words, 1);
        if ((valid != NULL && valid[series] == 0) || (!takes_all && !isfinite(x)))
            continue;
        const tm_verdict verdict = rule(detector->p, state, x, &finding);
        if (verdict != TM_VERDICT_NONE)
            events[found++] = (tm_event){.series = series,
                                         .verdict = (int64_t)verdict,
                                         .value = x,
                                         .score = finding.score,
                                         .limit = finding.limit};
    }
    return found;
}

tm_status tm_detect_run(const tm_detect_call *call, int64_t *done, int64_t *found, tm_error *error) {
    int64_t most = 0, used = 0, step = 0;
    const tm_status status = check(call, error);
    *done = *found = 0;
    if (status != TM_OK)
        return status;
    for (size_t d = 0; d < call->count; d++)
        most += call->detectors[d].count;
    for (; step < call->steps && call->room - used >= most; step++) {
        const double *values = call->values + step * call->series;
        const uint8_t *valid = call->valid == NULL ? NULL : call->valid + step * call->series;
        for (size_t d = 0; d < call->count; d++) {
            const int64_t more = run_detector(&call->detectors[d], words_of(&call->detectors[d]), values,
                                              valid, call->events + used);
            for (int64_t i = used; i < used + more; i++) {
                call->events[i].step = step;
                call->events[i].detector = (int64_t)d;
            }
            used += more;
        }
    }
    *done = step;
    *found = used;
    return TM_OK;
}
