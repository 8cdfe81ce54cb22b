/* A bank of detectors: rules over series of scalars, one value a series and step, state in 8-byte words. */
#ifndef TM_DETECT_H
#define TM_DETECT_H

#include "tm_status.h"

#include <stddef.h>
#include <stdint.h>

/* X(rule, number of parameters, "their names"): the order is that of the ids. A flag is a number, 0 is off.
 */
#define TM_DETECTORS(X)                                                                                      \
    X(nonfinite, 0, "")                                                                                      \
    X(threshold, 3, "above below patience")                                                                  \
    X(global_norm_spike, 2, "threshold count")                                                               \
    X(kill_loss_spike, 4, "factor patience window cap")                                                      \
    X(skip_step_sigma, 3, "k window warmup")                                                                 \
    X(stability_score, 3, "k window span")                                                                   \
    X(spike_rtol, 3, "rtol atol window")                                                                     \
    X(megatron_max, 2, "factor samples")                                                                     \
    X(zclip, 3, "z warmup alpha")                                                                            \
    X(adagc, 3, "factor warmup beta")                                                                        \
    X(turbulence, 2, "theta beta")                                                                           \
    X(mad, 5, "k window warmup shift log")                                                                   \
    X(cusum, 8, "k h window warmup shift outlier down log")                                                  \
    X(ewma, 5, "k alpha warmup shift log")                                                                   \
    X(dead_expert, 2, "age share")                                                                           \
    X(straggler, 3, "below hits reports")                                                                    \
    X(linearity, 2, "below window")

typedef enum tm_detector_kind {
#define TM_DETECTOR_ENUM(rule, parameters, names) TM_DETECT_##rule,
    TM_DETECTORS(TM_DETECTOR_ENUM)
#undef TM_DETECTOR_ENUM
        TM_DETECTOR_KINDS
} tm_detector_kind;

#define TM_DETECTOR_PARAMETERS 8
#define TM_DETECTOR_MAX_WINDOW (1 << 20)

/* What a rule says of one value. */
typedef enum tm_verdict {
    TM_VERDICT_NONE,
    TM_VERDICT_FLAG,  /* the value breaks the rule */
    TM_VERDICT_STOP,  /* and has done so as often in a row as the rule allows */
    TM_VERDICT_HIGH,  /* kill_loss_spike: half of the window lies above the cap */
    TM_VERDICT_SHIFT, /* mad, cusum, ewma: flagged so often in a row that this is the new level */
    TM_VERDICTS
} tm_verdict;

typedef union tm_word {
    double f;
    int64_t i;
    uint64_t u;
} tm_word;

typedef struct tm_event {
    int64_t step;               /* of this call, from 0 */
    int64_t series, detector;   /* positions */
    int64_t verdict;            /* tm_verdict */
    double value, score, limit; /* score: what the rule compares with the limit */
} tm_event;

/* One rule on some of the series. Its state is `count` rows of tm_detector_words words, row j for series
 * members[j]; all borrowed. */
typedef struct tm_detector {
    tm_detector_kind kind;
    double p[TM_DETECTOR_PARAMETERS]; /* in the order of TM_DETECTORS; NaN where a rule may have none */
    const int64_t *members;
    int64_t count;
    tm_word *words;
} tm_detector;

/* The rule's name, and its parameters' names separated by blanks; NULL for other numbers. */
const char *tm_detector_name(int kind);
const char *tm_detector_parameters(int kind);

/* Checks the parameters' ranges; *words: state words a series. */
TM_NODISCARD tm_status tm_detector_words(tm_detector_kind kind, const double *p, int64_t *words,
                                         tm_error *error);

/* Refuses words that no run of the rule can have left: the rules trust their counts and their order. */
TM_NODISCARD tm_status tm_detector_check_state(const tm_detector *detector, tm_error *error);

/* The state before the first value. */
void tm_detector_reset(const tm_detector *detector);

typedef struct tm_detect_call {
    const tm_detector *detectors;
    size_t count;
    const double *values; /* [steps][series] */
    const uint8_t *valid; /* the same shape, 0: null, the rules don't see it; NULL: all are valid */
    int64_t steps, series;
    tm_event *events; /* room for `room`: at least one for each member of each detector */
    int64_t room;
} tm_detect_call;

/* Shows the values to the rules, step by step; within a step detector by detector, member by member. A value
 * that is not finite goes to `nonfinite` only. Ends early when another step might not find room for its
 * events: *done is the number of steps taken, *found of events written. Parameters and members are checked
 * first, and after an error no state has changed. No memory is allocated. */
TM_NODISCARD tm_status tm_detect_run(const tm_detect_call *call, int64_t *done, int64_t *found,
                                     tm_error *error);

#endif
