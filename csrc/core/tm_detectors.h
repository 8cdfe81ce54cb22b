/* The rules of the bank: each sees one finite value and its own words. Private to the bank. */
#ifndef TM_DETECTORS_H
#define TM_DETECTORS_H

#include "tm_detect.h"

/* What was compared; set with every verdict. */
typedef struct tm_finding {
    double score, limit;
} tm_finding;

typedef tm_verdict (*tm_rule)(const double *p, tm_word *words, double x, tm_finding *finding);

#define TM_DECLARE_RULE(rule, parameters, names)                                                             \
    tm_verdict tm_rule_##rule(const double *p, tm_word *words, double x, tm_finding *finding);
TM_DETECTORS(TM_DECLARE_RULE)
#undef TM_DECLARE_RULE

/* Whether the words of a rule over a sorted window are a window's. */
int tm_sorted_state_holds(const double *p, tm_word *words, tm_detector_kind kind);

static inline tm_verdict tm_found(tm_finding *finding, tm_verdict verdict, double score, double limit) {
    *finding = (tm_finding){score, limit};
    return verdict;
}

/* Floor of a spread, below which differences are rounding: 1e-6 of the level, 1e-12 at least. */
static inline double tm_spread_floor(double spread, double level) {
    const double relative = 1e-6 * (level < 0 ? -level : level);
    const double floor = relative > 1e-12 ? relative : 1e-12;
    return spread > floor ? spread : floor;
}

#endif
