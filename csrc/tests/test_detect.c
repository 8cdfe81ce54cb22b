/* The detector bank: events and state of every rule over a fixed history, refusals, room for events. */
#include "digest.h"
#include "runner.h"

#include "../core/tm_detect.h"

#include <math.h>
#include <stdlib.h>

enum { SERIES = 5, STEPS = 400, MOST_WORDS = 64 };

static const struct {
    double p[TM_DETECTOR_PARAMETERS];
    int64_t words;
} rules[TM_DETECTOR_KINDS] = {
    [TM_DETECT_nonfinite] = {{0}, 1},
    [TM_DETECT_threshold] = {{3.5, -1, 2}, 1},
    [TM_DETECT_global_norm_spike] = {{3.5, 3}, 1},
    [TM_DETECT_kill_loss_spike] = {{1.5, 1, 6, 3}, 12},
    [TM_DETECT_skip_step_sigma] = {{2, 9, 4}, 12},
    [TM_DETECT_stability_score] = {{2, 8, 70}, 14},
    [TM_DETECT_spike_rtol] = {{0.5, NAN, 5}, 8},
    [TM_DETECT_megatron_max] = {{1.1, 12}, 2},
    [TM_DETECT_zclip] = {{1.5, 6, 0.9}, 3},
    [TM_DETECT_adagc] = {{1.05, 8, 0.9}, 2},
    [TM_DETECT_turbulence] = {{0.5, 0.9}, 1},
    [TM_DETECT_mad] = {{3, 9, 5, 4, 0}, 24},
    [TM_DETECT_cusum] = {{0.5, 3, 8, 5, 3, 3, 0, 0}, 22},
    [TM_DETECT_ewma] = {{2, 0.1, 5, 3, 0}, 4},
    [TM_DETECT_dead_expert] = {{3, 1.2}, 1},
    [TM_DETECT_straggler] = {{1.5, 2, 4}, 1},
    [TM_DETECT_linearity] = {{1.9, 7}, 15},
};

typedef struct history {
    double values[STEPS * SERIES];
    tm_word words[TM_DETECTOR_KINDS][SERIES * MOST_WORDS];
    tm_detector detectors[TM_DETECTOR_KINDS];
    tm_event events[TM_DETECTOR_KINDS * SERIES * 3];
} history;

static const int64_t members[SERIES] = {0, 1, 2, 3, 4};
enum { ROOM = TM_DETECTOR_KINDS * SERIES * 3 };

/* Multiples of 1/64 from 1 to 3, now and then three times as much. */
static void fill(history *all) {
    const uint64_t before = seed_random(1);
    for (int i = 0; i < STEPS * SERIES; i++) {
        const uint64_t random = next_random();
        all->values[i] = 1 + (double)(random >> 57) / 64;
        if ((random >> 40) % 23 == 0)
            all->values[i] *= 3;
    }
    seed_random(before);
    all->values[100 * SERIES + 2] = NAN;
    all->values[101 * SERIES + 3] = -INFINITY;
    for (int step = 200; step < 220; step++)
        all->values[step * SERIES] += 5;
}

static void begin(history *all) {
    for (int kind = 0; kind < TM_DETECTOR_KINDS; kind++) {
        tm_detector *detector = &all->detectors[kind];
        tm_error error;
        int64_t words = 0;
        *detector = (tm_detector){
            .kind = (tm_detector_kind)kind, .members = members, .count = SERIES, .words = all->words[kind]};
        memcpy(detector->p, rules[kind].p, sizeof detector->p);
        CHECK(tm_detector_words(detector->kind, detector->p, &words, &error) == TM_OK &&
                  words == rules[kind].words,
              "%s: %lld words", tm_detector_name(kind), (long long)words);
        memset(all->words[kind], 0xff, sizeof all->words[kind]);
        tm_detector_reset(detector);
    }
}

/* Which rules fire where, and how: no rounded number goes into the digest. */
static uint64_t run(history *all, int64_t at_once, int counts[TM_DETECTOR_KINDS]) {
    uint64_t digest = DIGEST_START;
    tm_error error = {""};
    begin(all);
    for (int64_t first = 0; first < STEPS;) {
        const int64_t left = STEPS - first;
        const tm_detect_call call = {.detectors = all->detectors,
                                     .count = TM_DETECTOR_KINDS,
                                     .values = all->values + first * SERIES,
                                     .steps = left < at_once ? left : at_once,
                                     .series = SERIES,
                                     .events = all->events,
                                     .room = ROOM};
        int64_t done = 0, found = 0;
        CHECK(tm_detect_run(&call, &done, &found, &error) == TM_OK, "%s", error.text);
        CHECK(done > 0 && found <= ROOM, "%lld steps, %lld events", (long long)done, (long long)found);
        if (done <= 0)
            break;
        for (int64_t i = 0; i < found; i++) {
            const tm_event *event = &all->events[i];
            const int64_t words[] = {first + event->step, event->series, event->detector, event->verdict};
            digest_integers(&digest, words, 4);
            counts[event->detector]++;
        }
        first += done;
    }
    return digest;
}

static void check_states(history *all) {
    tm_error error;
    for (int kind = 0; kind < TM_DETECTOR_KINDS; kind++)
        CHECK(tm_detector_check_state(&all->detectors[kind], &error) == TM_OK, "%s", tm_detector_name(kind));
    tm_detector *mad = &all->detectors[TM_DETECT_mad];
    const tm_word kept = mad->words[1], sorted = mad->words[2 + 9];
    mad->words[1].i = 4;
    CHECK(tm_detector_check_state(mad, &error) == TM_ERR_VALUE, "as many flags as make a shift");
    mad->words[1] = kept;
    mad->words[2 + 9].f = 1e9;
    CHECK(tm_detector_check_state(mad, &error) == TM_ERR_VALUE, "the smallest is not the smallest");
    mad->words[2 + 9] = sorted;
    mad->words[0].i = -1;
    CHECK(tm_detector_check_state(mad, &error) == TM_ERR_VALUE, "a negative count");
}

static void check_refusals(history *all) {
    tm_error error = {""};
    int64_t done = 0, found = 0;
    begin(all);
    tm_detect_call call = {.detectors = all->detectors,
                           .count = TM_DETECTOR_KINDS,
                           .values = all->values,
                           .steps = 1,
                           .series = SERIES - 1,
                           .events = all->events,
                           .room = ROOM};
    CHECK(tm_detect_run(&call, &done, &found, &error) == TM_ERR_VALUE, "a member that isn't there");
    call.series = SERIES;
    call.room = TM_DETECTOR_KINDS * SERIES - 1;
    CHECK(tm_detect_run(&call, &done, &found, &error) == TM_ERR_VALUE, "too little room");
    call.room = ROOM;
    all->detectors[TM_DETECT_mad].p[1] = 1e300;
    CHECK(tm_detect_run(&call, &done, &found, &error) == TM_ERR_VALUE, "a window beyond all memory");
    CHECK(strstr(error.text, "mad: window must be") != NULL, "%s", error.text);
    CHECK(all->words[TM_DETECT_nonfinite][0].i == 0 && all->words[TM_DETECT_ewma][0].i == 0, "untouched");
    for (int kind = -1; kind <= TM_DETECTOR_KINDS; kind += TM_DETECTOR_KINDS + 1)
        CHECK(tm_detector_words((tm_detector_kind)kind, rules[0].p, &done, &error) == TM_ERR_VALUE &&
                  tm_detector_name(kind) == NULL && tm_detector_parameters(kind) == NULL,
              "kind %d", kind);
}

static void check_nulls(history *all) {
    static const uint8_t valid[SERIES] = {1, 0, 1, 0, 1};
    const double values[SERIES] = {NAN, NAN, 1, 1, INFINITY};
    tm_error error;
    int64_t done = 0, found = 0;
    begin(all);
    const tm_detect_call call = {.detectors = all->detectors,
                                 .count = TM_DETECTOR_KINDS,
                                 .values = values,
                                 .valid = valid,
                                 .steps = 1,
                                 .series = SERIES,
                                 .events = all->events,
                                 .room = ROOM};
    CHECK(tm_detect_run(&call, &done, &found, &error) == TM_OK && found == 2, "%lld", (long long)found);
    CHECK(all->events[0].series == 0 && all->events[1].series == 4, "the values that aren't finite");
    for (int j = 0; j < SERIES; j++)
        CHECK(all->words[TM_DETECT_ewma][4 * j].i == (j == 2), "series %d", j);
}

void test_detect(void) {
    history *all = malloc(sizeof *all);
    int counts[TM_DETECTOR_KINDS] = {0}, again[TM_DETECTOR_KINDS] = {0};
    if (all == NULL) {
        CHECK(0, "no memory for the test");
        return;
    }
    fill(all);
    const uint64_t digest = run(all, 1, counts);
    check_digest("detect", digest, UINT64_C(0x20dd88e9828f0dfd));
    for (int kind = 0; kind < TM_DETECTOR_KINDS; kind++)
        CHECK(counts[kind] > 0, "%s never fires", tm_detector_name(kind));
    CHECK(run(all, STEPS, again) == digest, "as many steps as there is room for");
    check_states(all);
    check_refusals(all);
    check_nulls(all);
    free(all);
}
