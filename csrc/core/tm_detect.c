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

#define MANY 0x1p52 /* counts below are exact in a double */

static int is_count(double value, double low, double high) {
    return value >= low && value <= high && value == floor(value);
}

static int is_positive(double value) {
    return value > 0 && value <= 0x1p1000;
}

/* The first parameter out of its range, and what it must be. */
typedef struct complaint {
    int parameter; /* -1: none */
    const char *wanted;
} complaint;

static void require(complaint *bad, int holds, int parameter, const char *wanted) {
    if (!holds && bad->parameter < 0) {
        bad->parameter = parameter;
        bad->wanted = wanted;
    }
}

static void require_positive(complaint *bad, const double *p, int i) {
    require(bad, is_positive(p[i]), i, "above 0");
}

static void require_number(complaint *bad, const double *p, int i) {
    require(bad, p[i] == p[i], i, "a number");
}

static void require_count(complaint *bad, const double *p, int i, double low) {
    require(bad, is_count(p[i], low, MANY), i,
            low < 1   ? "a whole number from 0"
            : low < 2 ? "a whole number from 1"
                      : "a whole number from 2");
}

static void require_window(complaint *bad, const double *p, int i) {
    require(bad, is_count(p[i], 2, TM_DETECTOR_MAX_WINDOW), i, "a whole number from 2 to 1048576");
}

static void require_warmup(complaint *bad, const double *p, int i, int window) {
    require(bad, is_count(p[i], 2, p[window]), i, "a whole number from 2 to the window");
}

static void require_weight(complaint *bad, const double *p, int i) {
    require(bad, p[i] >= 0 && p[i] <= 1, i, "from 0 to 1");
}

static void require_flag(complaint *bad, const double *p, int i) {
    require(bad, is_count(p[i], 0, 1), i, "0 or 1");
}

/* Window, warmup and shift, as mad and cusum have them one after the other. */
static void require_sorted(complaint *bad, const double *p, int window) {
    require_window(bad, p, window);
    require_warmup(bad, p, window + 1, window);
    require(bad, is_count(p[window + 2], 1, TM_DETECTOR_MAX_WINDOW), window + 2,
            "a whole number from 1 to 1048576");
}

static void check_parameters(tm_detector_kind kind, const double *p, complaint *bad) {
    switch (kind) {
    case TM_DETECT_nonfinite:
    case TM_DETECTOR_KINDS:
        break;
    case TM_DETECT_threshold:
        require(bad, p[0] == p[0] || p[1] == p[1], 0, "a number, or below must be one");
        require_count(bad, p, 2, 1);
        break;
    case TM_DETECT_global_norm_spike:
        require_positive(bad, p, 0);
        require_count(bad, p, 1, 1);
        break;
    case TM_DETECT_kill_loss_spike:
        require_positive(bad, p, 0);
        require_count(bad, p, 1, 0);
        require_window(bad, p, 2);
        require_number(bad, p, 3);
        break;
    case TM_DETECT_skip_step_sigma:
        require_positive(bad, p, 0);
        require_window(bad, p, 1);
        require_warmup(bad, p, 2, 1);
        break;
    case TM_DETECT_stability_score:
        require_positive(bad, p, 0);
        require_window(bad, p, 1);
        require_window(bad, p, 2);
        break;
    case TM_DETECT_spike_rtol:
        require_positive(bad, p, 0);
        require(bad, p[1] != p[1] || is_positive(p[1]), 1, "above 0, or None");
        require_window(bad, p, 2);
        break;
    case TM_DETECT_megatron_max:
        require_positive(bad, p, 0);
        require_count(bad, p, 1, 1);
        break;
    case TM_DETECT_zclip:
        require_positive(bad, p, 0);
        require_count(bad, p, 1, 2);
        require_weight(bad, p, 2);
        break;
    case TM_DETECT_adagc:
        require_positive(bad, p, 0);
        require_count(bad, p, 1, 1);
        require_weight(bad, p, 2);
        break;
    case TM_DETECT_turbulence:
        require_positive(bad, p, 0);
        require_weight(bad, p, 1);
        break;
    case TM_DETECT_mad:
        require_positive(bad, p, 0);
        require_sorted(bad, p, 1);
        require_flag(bad, p, 4);
        break;
    case TM_DETECT_cusum:
        require(bad, p[0] >= 0 && p[0] <= 0x1p1000, 0, "0 or more");
        require_positive(bad, p, 1);
        require_sorted(bad, p, 2);
        require_positive(bad, p, 5);
        require_flag(bad, p, 6);
        require_flag(bad, p, 7);
        break;
    case TM_DETECT_ewma:
        require_positive(bad, p, 0);
        require_weight(bad, p, 1);
        require_count(bad, p, 2, 2);
        require_count(bad, p, 3, 1);
        require_flag(bad, p, 4);
        break;
    case TM_DETECT_dead_expert:
        require_count(bad, p, 0, 1);
        require(bad, p[1] >= 0, 1, "0 or more");
        break;
    case TM_DETECT_straggler:
        require_number(bad, p, 0);
        require(bad, is_count(p[2], 1, 63), 2, "a whole number from 1 to 63");
        require(bad, is_count(p[1], 1, p[2]), 1, "a whole number from 1 to reports");
        break;
    case TM_DETECT_linearity:
        require_number(bad, p, 0);
        require_window(bad, p, 1);
        break;
    }
}

static int64_t count_words(tm_detector_kind kind, const double *p) {
    switch (kind) {
    case TM_DETECT_kill_loss_spike:
        return (int64_t)p[2] + 6;
    case TM_DETECT_skip_step_sigma:
        return (int64_t)p[1] + 3;
    case TM_DETECT_stability_score:
        return (int64_t)p[1] + 4 + ((int64_t)p[2] + 63) / 64;
    case TM_DETECT_spike_rtol:
        return (int64_t)p[2] + 3;
    case TM_DETECT_mad:
        return 2 + 2 * (int64_t)p[1] + (int64_t)p[3];
    case TM_DETECT_cusum:
        return 3 + 2 * (int64_t)p[2] + (int64_t)p[4];
    case TM_DETECT_linearity:
        return 1 + 2 * (int64_t)p[1];
    case TM_DETECT_ewma:
        return 4;
    case TM_DETECT_zclip:
        return 3;
    case TM_DETECT_megatron_max:
    case TM_DETECT_adagc:
        return 2;
    case TM_DETECT_nonfinite:
    case TM_DETECT_threshold:
    case TM_DETECT_global_norm_spike:
    case TM_DETECT_turbulence:
    case TM_DETECT_dead_expert:
    case TM_DETECT_straggler:
    case TM_DETECTOR_KINDS:
        break;
    }
    return 1;
}

tm_status tm_detector_words(tm_detector_kind kind, const double *p, int64_t *words, tm_error *error) {
    complaint bad = {-1, NULL};
    if ((int)kind < 0 || kind >= TM_DETECTOR_KINDS)
        return tm_fail(error, TM_ERR_VALUE, "there is no detector with the id %d", (int)kind);
    check_parameters(kind, p, &bad);
    if (bad.parameter >= 0) {
        const char *name = table[kind].parameters;
        for (int i = 0; i < bad.parameter; i++)
            name = strchr(name, ' ') + 1;
        return tm_fail(error, TM_ERR_VALUE, "%s: %.*s must be %s, not %g", table[kind].name,
                       (int)strcspn(name, " "), name, bad.wanted, p[bad.parameter]);
    }
    *words = count_words(kind, p);
    return TM_OK;
}

tm_status tm_detector_check_state(const tm_detector *detector, tm_error *error) {
    const tm_detector_kind kind = detector->kind;
    const int is_sorted = kind == TM_DETECT_mad || kind == TM_DETECT_cusum || kind == TM_DETECT_linearity;
    const int begins_with_count = kind != TM_DETECT_turbulence && kind != TM_DETECT_straggler;
    const int64_t words = count_words(detector->kind, detector->p);
    for (int64_t j = 0; j < detector->count; j++) {
        tm_word *state = detector->words + j * words;
        if ((begins_with_count && state[0].i < 0) ||
            (is_sorted && !tm_sorted_state_holds(detector->p, state, kind)))
            return tm_fail(error, TM_ERR_VALUE, "the state of %s for series %lld is damaged",
                           table[kind].name, (long long)detector->members[j]);
    }
    return TM_OK;
}

void tm_detector_reset(const tm_detector *detector) {
    const int64_t words = count_words(detector->kind, detector->p);
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
            const int64_t more =
                run_detector(&call->detectors[d], count_words(call->detectors[d].kind, call->detectors[d].p),
                             values, valid, call->events + used);
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
