/* Sums of scores without scores: scale * q . (sum of the keys that q sees). The sum of keys follows the rows'
 * intervals: a key that comes in is added, one that goes out is subtracted. */
#include "tm_attention_parts.h"

#include <math.h>
#include <string.h>

/* A walk over keys, TM_MEAN_KEYS of them at hand. */
typedef struct walk {
    const tm_vectors *vectors;
    float *buffer;
    const float *data;
    int64_t first, count, stride;
} walk;

typedef struct sums {
    double *total;          /* [depth] of the keys [low, high) whose elements are finite */
    int64_t low, high, bad; /* bad: the other ones */
    walk in, out;
} sums;

size_t tm_attention_mean_floats(int64_t depth) {
    return (size_t)depth * (2 * TM_MEAN_KEYS + 1) + 2 * (size_t)depth;
}

static const float *key_at(walk *w, int64_t key, int64_t keys) {
    if (key < w->first || key >= w->first + w->count) {
        w->first = key;
        w->count = keys - key < TM_MEAN_KEYS ? keys - key : TM_MEAN_KEYS;
        w->data = tm_vectors_read(w->vectors, key, w->count, w->buffer, &w->stride);
    }
    return w->data + (key - w->first) * w->stride;
}

static int is_finite(const float *vector, int64_t depth) {
    uint32_t bits, found = 0;
    for (int64_t c = 0; c < depth; c++) {
        memcpy(&bits, &vector[c], sizeof bits);
        found |= (bits & UINT32_C(0x7f800000)) == UINT32_C(0x7f800000);
    }
    return !found;
}

static void add_key(sums *s, walk *w, int64_t key, int64_t keys, double sign) {
    const int64_t depth = w->vectors->depth;
    const float *vector = key_at(w, key, keys);
    if (!is_finite(vector, depth)) {
        s->bad += sign > 0 ? 1 : -1;
        return;
    }
    for (int64_t c = 0; c < depth; c++) {
        s->total[c] += sign * (double)vector[c];
    }
}

static void move_to(sums *s, int64_t low, int64_t high, int64_t keys) {
    if (low < s->low || high < s->high || low >= s->high) { /* backwards, or nothing in common: anew */
        memset(s->total, 0, (size_t)s->in.vectors->depth * sizeof *s->total);
        s->low = s->high = low;
        s->bad = 0;
    }
    while (s->high < high) {
        add_key(s, &s->in, s->high++, keys, 1.0);
    }
    while (s->low < low) {
        add_key(s, &s->out, s->low++, keys, -1.0);
    }
}

/* Eight sums, so that the order is one that vectors of any width keep. */
static double product(const double *total, const float *q, int64_t depth) {
    double lane[8] = {0}, sum = 0;
    int64_t c = 0;
    for (; c + 8 <= depth; c += 8) {
        for (int64_t l = 0; l < 8; l++) {
            lane[l] += total[c + l] * (double)q[c + l];
        }
    }
    for (; c < depth; c++) {
        sum += total[c] * (double)q[c];
    }
    return sum + (((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7])));
}

/* Without scores a row is what its vectors say: not finite if q or one of its keys is not. With them a
 * counted row with such a key has a score of -inf. */
static double row_z(const tm_attention_call *call, const sums *s, const float *q, int *status) {
    if (!call->input->scores && (s->bad > 0 || !is_finite(q, call->depth))) {
        *status = TM_ROW_NONFINITE;
    }
    if (*status == TM_ROW_NONFINITE) {
        return (double)NAN;
    }
    return s->bad > 0 ? -(double)INFINITY : call->input->scale * product(s->total, q, call->depth);
}

void tm_attention_mean(const tm_attention_call *call, int64_t item, float *scratch) {
    const tm_attention *input = call->input;
    const tm_bundle *bundle = &call->bundles[item % call->bundle_count];
    const int64_t batch = item / call->bundle_count, depth = call->depth;
    const tm_attention_mask mask = tm_attention_mask_of(call, batch);
    tm_attention_sums *out = call->means + item * TM_BUNDLE_HEADS;
    tm_vectors keys, queries[TM_BUNDLE_HEADS];
    float *q = scratch + 2 * depth, *buffer = q + depth;
    sums s = {.total = (double *)(void *)scratch,
              .in = {.vectors = &keys, .buffer = buffer},
              .out = {.vectors = &keys, .buffer = buffer + TM_MEAN_KEYS * depth}};

    tm_vectors_init(&keys, call->table, &input->k, batch, bundle->key_head, mask.kept);
    for (int g = 0; g < bundle->count; g++) {
        tm_vectors_init(&queries[g], call->table, &input->q, batch, bundle->head[g], NULL);
        out[g] = (tm_attention_sums){.max = -INFINITY};
    }
    memset(s.total, 0, (size_t)depth * sizeof *s.total);
    for (int64_t i = 0; i < input->row_count; i++) {
        const int64_t low = mask.bounds[2 * i], high = mask.bounds[2 * i + 1];
        const int64_t query = input->rows != NULL ? input->rows[i] : i;
        if (low < high) {
            move_to(&s, low, high, mask.keys);
        }
        for (int g = 0; g < bundle->count; g++) {
            const int64_t head = bundle->head[g];
            const int64_t place = (batch * call->heads + head) * input->row_count + i;
            const int sink = input->sinks != NULL && low < high;
            int status = input->scores ? call->status[place] : low < high ? TM_ROW_COUNTED : TM_ROW_EMPTY;
            /* An empty row's keys have scores of -inf, and keys elsewhere may still give the row a max. */
            double z = low < high ? -(double)INFINITY : 0;
            if (status != TM_ROW_EMPTY) {
                tm_vectors_copy(&queries[g], query, 1, q);
                z = row_z(call, &s, q, &status);
            }
            if (status == TM_ROW_COUNTED) {
                z += sink ? (double)(float)input->sinks[head] : 0.0;
                out[g].sum_z += z;
            }
            if (!input->scores) {
                out[g].rows += status == TM_ROW_COUNTED;
                out[g].nonfinite_rows += status == TM_ROW_NONFINITE;
                out[g].empty_rows += status == TM_ROW_EMPTY;
                out[g].keys += status == TM_ROW_COUNTED ? (double)(high - low + sink) : 0.0;
            } else if (call->each->z != NULL) {
                call->each->z[place] = z;
            }
        }
    }
}
