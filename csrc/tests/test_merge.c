/* Records of pieces against the record of the whole. */
#include "runner.h"

#include <math.h>
#include <stdlib.h>

#define CHUNKS 13
#define ROOM (CHUNKS * 65536 + 1000)

static float *whole;

static tm_stats merged(const int64_t *ends, size_t pieces) {
    tm_stats records[64], out;
    int64_t offsets[64], start = 0;
    tm_error error;
    for (size_t i = 0; i < pieces; i++) {
        records[i] = stats_of(flat(whole + start, ends[i] - start, TM_F32), 1);
        offsets[i] = start;
        start = ends[i];
    }
    if (tm_merge_stats(records, offsets, pieces, &out, &error) != TM_OK) {
        CHECK(0, "%s", error.text);
    }
    return out;
}

static void check_nodes(void) {
    int64_t n = ROOM, c = 65536;
    tm_stats expect = stats_of(flat(whole, n, TM_F32), 1), got;
    int64_t singles[CHUNKS + 1], nodes[] = {4 * c, 8 * c, 12 * c, n}, tail[] = {8 * c, n},
                                 mixed[] = {4 * c, 6 * c, 7 * c, 8 * c, n};
    for (int i = 0; i < CHUNKS; i++) {
        singles[i] = (i + 1) * c;
    }
    singles[CHUNKS] = n;
    got = merged(singles, CHUNKS + 1);
    CHECK(same_stats(&got, &expect), "a record a chunk");
    got = merged(nodes, 4);
    CHECK(same_stats(&got, &expect), "shards of 4 chunks and a short last one");
    got = merged(tail, 2);
    CHECK(same_stats(&got, &expect), "8 chunks and a tail of several");
    got = merged(mixed, 5);
    CHECK(same_stats(&got, &expect), "nodes of several sizes");
}

static void check_any_split(void) {
    tm_stats expect = stats_of(flat(whole, ROOM, TM_F32), 1);
    for (int round = 0; round < 50; round++) {
        int64_t ends[8], at = 0;
        for (int i = 0; i < 7; i++) {
            at += (int64_t)(next_random() % (uint64_t)((ROOM - at) / 2 + 1)); /* empty pieces occur */
            ends[i] = at;
        }
        ends[7] = ROOM;
        tm_stats got = merged(ends, 8);
        CHECK(fabs(got.sum - expect.sum) <= 1e-9 * sqrt(expect.sumsq * ROOM), "sum, round %d", round);
        CHECK(fabs(got.sumsq - expect.sumsq) <= 1e-12 * expect.sumsq, "sumsq, round %d", round);
        got.sum = expect.sum;
        got.sumsq = expect.sumsq;
        got.sumsq_scaled = expect.sumsq_scaled;
        CHECK(fabs(got.m2_scaled - expect.m2_scaled) <= 1e-12 * expect.m2_scaled, "m2, round %d", round);
        got.m2_scaled = expect.m2_scaled;
        CHECK(same_stats(&got, &expect), "counts and extremes, round %d", round);
    }
}

static void check_records(void) {
    tm_stats records[300], out;
    tm_error error = {""};
    int64_t backwards[] = {10, 5};
    CHECK(tm_merge_stats(NULL, NULL, 0, &out, &error) == TM_OK, "%s", error.text);
    CHECK(out.n == 0 && isnan(out.min) && out.first_bad == -1, "nothing merged");
    for (int i = 0; i < 300; i++) {
        records[i] = reference_stats(whole, 2, TM_F32);
    }
    CHECK(tm_merge_stats(records, backwards, 2, &out, &error) == TM_ERR_VALUE, "offsets go back");
    int64_t gaps[300];
    for (int i = 0; i < 300; i++) { /* nodes without siblings fill the tree's stack */
        gaps[i] = (2 * (int64_t)i + 1) * 65536;
    }
    CHECK(tm_merge_stats(records, gaps, 300, &out, &error) == TM_OK && out.n == 600, "pieces with gaps");
    whole[70] = NAN;
    int64_t ends[] = {60, 200};
    CHECK(merged(ends, 2).first_bad == 70, "first_bad counts from the whole's start");
    records[0] = stats_of(flat(whole + 60, 140, TM_F32), 1);
    records[1] = records[0];
    CHECK(tm_merge_stats(records, NULL, 2, &out, &error) == TM_OK && out.first_bad == 10,
          "one after the other");
}

void test_merge(void) {
    whole = malloc(ROOM * sizeof *whole);
    if (whole != NULL) {
        fill_finite(whole, ROOM, TM_F32);
        check_nodes();
        check_any_split();
        check_records();
    }
    free(whole);
}
