/* One unit of scores: some query rows of a bundle of heads against all their keys, tile by tile. */
#include "tm_attention_parts.h"

#include "tm_blas.h"

#include <math.h>

typedef struct unit {
    const tm_attention_call *call;
    const tm_bundle *bundle;
    tm_attention_mask mask;
    int64_t batch, first, count; /* query rows [first, first + count) of those to read */
    float *queries;              /* [count][bundle->count][depth] */
    float *keys;                 /* [TM_TILE_KEYS][depth] */
    float *scores;               /* [TM_TILE_ROWS][TM_TILE_KEYS] */
    tm_attention_row rows[TM_TILE_ROWS];
    double z[TM_TILE_ROWS]; /* sums of capped scores */
} unit;

size_t tm_attention_unit_floats(int64_t depth) {
    return (size_t)depth * (TM_TILE_ROWS + TM_TILE_KEYS) + (size_t)TM_TILE_ROWS * TM_TILE_KEYS;
}

static int64_t begin_of(const unit *u, int64_t i) {
    return u->mask.bounds[2 * (u->first + i)];
}

static int64_t end_of(const unit *u, int64_t i) {
    return u->mask.bounds[2 * (u->first + i) + 1];
}

static int64_t query_of(const unit *u, int64_t i) {
    const int64_t *rows = u->call->input->rows;
    return rows != NULL ? rows[u->first + i] : u->first + i;
}

/* Rows of heads that share keys stand side by side, so that one product serves them all, and a range of
 * query rows is a range of lines. */
static void take_queries(unit *u) {
    const tm_attention_call *call = u->call;
    const int64_t depth = call->depth, heads = u->bundle->count;
    for (int64_t g = 0; g < heads; g++) {
        tm_vectors vectors;
        tm_vectors_init(&vectors, call->table, &call->input->q, u->batch, u->bundle->head[g], NULL);
        for (int64_t i = 0; i < u->count; i++) {
            tm_vectors_copy(&vectors, query_of(u, i), 1, u->queries + (i * heads + g) * depth);
        }
    }
    for (int64_t r = 0; r < u->count * heads; r++) {
        u->rows[r] = (tm_attention_row){.max = -INFINITY};
        u->z[r] = 0;
    }
}

/* Keys [first, last) for query rows [from, to) of the unit. */
static void take_tile(unit *u, const tm_vectors *vectors, int64_t first, int64_t last) {
    const tm_attention_call *call = u->call;
    const int64_t heads = u->bundle->count, width = last - first;
    const float cap = (float)call->input->cap;
    int64_t from = 0, to = u->count, stride;
    while (from < to && (end_of(u, from) <= first || begin_of(u, from) >= last)) {
        from++;
    }
    while (to > from && (end_of(u, to - 1) <= first || begin_of(u, to - 1) >= last)) {
        to--;
    }
    if (from == to) {
        return;
    }
    const float *keys = tm_vectors_read(vectors, first, width, u->keys, &stride);
    tm_blas_sgemm(0, 1, (int)((to - from) * heads), (int)width, (int)call->depth, (float)call->input->scale,
                  u->queries + from * heads * call->depth, (int)call->depth, keys, (int)stride, 0.0f,
                  u->scores, TM_TILE_KEYS);
    for (int64_t i = from; i < to; i++) {
        const int64_t begin = begin_of(u, i) > first ? begin_of(u, i) - first : 0;
        const int64_t end = end_of(u, i) < last ? end_of(u, i) - first : width;
        for (int64_t r = i * heads; begin < end && r < (i + 1) * heads; r++) {
            float *scores = u->scores + (r - from * heads) * TM_TILE_KEYS + begin;
            if (cap > 0) {
                u->z[r] += call->table->attention->cap(scores, (size_t)(end - begin), cap);
            }
            call->table->attention->row(&u->rows[r], scores, (size_t)(end - begin));
        }
    }
}

/* One more score of a row. */
static void take_sink(unit *u, int64_t r, double sink) {
    const float score = (float)sink;
    u->call->table->attention->row(&u->rows[r], &score, 1);
    u->z[r] += (double)score;
}

/* A row's numbers into the head's sums. */
static int count_row(const tm_attention_row *row, int64_t keys, tm_attention_sums *sums) {
    const double max = row->nan ? (double)NAN : (double)row->max, l = row->sum;
    if (row->nan || row->max == INFINITY) {
        sums->max = sums->max != sums->max || max <= sums->max ? sums->max : max;
        sums->nonfinite_rows++;
        return TM_ROW_NONFINITE;
    }
    if (row->max == -INFINITY) {
        sums->empty_rows++;
        return TM_ROW_EMPTY;
    }
    sums->max = max > sums->max ? max : sums->max;
    sums->rows++;
    sums->sum_l += l;
    sums->sum_l2 += l * l;
    sums->sum_m += max;
    sums->sum_inv_l += 1.0 / l;
    if (keys > 1) {
        sums->sum_norm += (l - 1.0) / (double)(keys - 1);
        sums->norm_rows++;
    }
    return TM_ROW_COUNTED;
}

static void finish(unit *u, tm_attention_sums *sums) {
    const tm_attention_call *call = u->call;
    const tm_attention *input = call->input;
    const int64_t heads = u->bundle->count;
    for (int64_t g = 0; g < heads; g++) {
        const int64_t head = u->bundle->head[g];
        const int64_t place = (u->batch * call->heads + head) * input->row_count + u->first;
        sums[g] = (tm_attention_sums){.max = -INFINITY};
        for (int64_t i = 0; i < u->count; i++) {
            const int64_t r = i * heads + g;
            int64_t keys = end_of(u, i) - begin_of(u, i);
            if (keys > 0 && input->sinks != NULL) {
                take_sink(u, r, input->sinks[head]);
                keys++;
            }
            const int status = count_row(&u->rows[r], keys, &sums[g]);
            call->status[place + i] = (unsigned char)status;
            if (status == TM_ROW_COUNTED) {
                sums[g].keys += (double)keys;
                sums[g].sum_z += input->cap > 0 ? u->z[r] : 0.0; /* else tm_attention_mean's part */
            }
            if (call->each->max != NULL) {
                const double undefined = status == TM_ROW_EMPTY ? 0.0 : (double)NAN;
                call->each->max[place + i] = u->rows[r].nan ? (double)NAN : (double)u->rows[r].max;
                call->each->sum[place + i] = status == TM_ROW_COUNTED ? u->rows[r].sum : undefined;
                call->each->z[place + i] = status == TM_ROW_COUNTED ? u->z[r] : undefined;
                call->each->keys[place + i] = keys;
            }
        }
    }
}

void tm_attention_unit(const tm_attention_call *call, int64_t number, float *scratch) {
    unit u = {.call = call};
    const int64_t block = number % call->blocks, bundle = number / call->blocks % call->bundle_count;
    u.batch = number / call->blocks / call->bundle_count;
    u.bundle = &call->bundles[bundle];
    u.mask = tm_attention_mask_of(call, u.batch);
    u.first = block * call->block_rows;
    u.count = call->input->row_count - u.first < call->block_rows ? call->input->row_count - u.first
                                                                  : call->block_rows;
    u.queries = scratch;
    u.keys = u.queries + TM_TILE_ROWS * call->depth;
    u.scores = u.keys + TM_TILE_KEYS * call->depth;
    take_queries(&u);

    /* keys that some row sees: [least, most); that all rows with keys see: [begin, end) */
    int64_t least = u.mask.keys, most = 0, begin = 0, end = u.mask.keys;
    for (int64_t i = 0; i < u.count; i++) {
        const int64_t low = begin_of(&u, i), high = end_of(&u, i);
        if (low < high) {
            least = low < least ? low : least;
            most = high > most ? high : most;
            begin = low > begin ? low : begin;
            end = high < end ? high : end;
        }
    }
    tm_vectors keys;
    tm_vectors_init(&keys, call->table, &call->input->k, u.batch, u.bundle->key_head, u.mask.kept);
    for (int64_t first = least, last; first < most; first = last) {
        const int inside = first >= begin && first < end;
        const int64_t border = inside ? end : first < begin && begin < end ? begin : most;
        last = first + (inside ? TM_TILE_KEYS : TM_EDGE_KEYS);
        last = last < border ? last : border;
        take_tile(&u, &keys, first, last);
    }
    finish(&u, call->sums + number * TM_BUNDLE_HEADS);
}
