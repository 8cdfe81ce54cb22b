/* expert_metrics: what the counts of a step say about each layer, and what the layer remembers. Definitions
 * are in docs/kernels/moe.md. */
#include "tm_moe.h"

#include "tm_memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT_LIMIT 9007199254740992.0 /* 2^53: below, sums of whole counts are exact */
#define DEAD_SHARE 1e-3                /* of the mean */
#define HOT_FACTOR 2.0
#define COLD_SHARE 0.25

/* Rounding may carry a number past the end of its range by an ulp or two. */
static double within(double value, double low, double high) {
    return value < low ? low : value > high ? high : value;
}

/* ---- sorting ---- */

#define RADIX 256
#define INSERTION_LIMIT 32

static void sort_few(uint64_t *keys, int64_t n) {
    for (int64_t i = 1; i < n; i++) {
        uint64_t key = keys[i];
        int64_t at = i;
        for (; at > 0 && keys[at - 1] > key; at--) {
            keys[at] = keys[at - 1];
        }
        keys[at] = key;
    }
}

/* Least digit first, leaving out the bytes that all keys share: 4 passes for counts below 2^16. */
static void sort_many(uint64_t *keys, uint64_t *spare, int64_t n, uint64_t varying) {
    uint64_t *from = keys, *to = spare;
    for (int shift = 0; shift < 64; shift += 8) {
        int64_t start[RADIX] = {0}, at = 0;
        if ((varying >> shift & 0xff) == 0) {
            continue;
        }
        for (int64_t i = 0; i < n; i++) {
            start[from[i] >> shift & 0xff]++;
        }
        for (int digit = 0; digit < RADIX; digit++) {
            int64_t count = start[digit];
            start[digit] = at;
            at += count;
        }
        for (int64_t i = 0; i < n; i++) {
            to[start[from[i] >> shift & 0xff]++] = from[i];
        }
        uint64_t *swap = from;
        from = to;
        to = swap;
    }
    if (from != keys) {
        memcpy(keys, from, (size_t)n * sizeof *keys);
    }
}

/* Ascending copy of `counts`; numbers without a sign bit are ordered as their bits are. */
static void sort_counts(double *sorted, const double *counts, int64_t n, uint64_t *keys, uint64_t *spare) {
    uint64_t varying = 0;
    memcpy(keys, counts, (size_t)n * sizeof *keys);
    for (int64_t i = 0; i < n; i++) {
        keys[i] &= INT64_MAX; /* -0.0 is 0 */
        varying |= keys[i] ^ keys[0];
    }
    if (n <= INSERTION_LIMIT) {
        sort_few(keys, n);
    } else {
        sort_many(keys, spare, n, varying);
    }
    memcpy(sorted, keys, (size_t)n * sizeof *sorted);
}

/* ---- one layer ---- */

typedef struct layer_counts {
    const tm_expert_options *options;
    int64_t index, experts;
    const double *counts;
    double total;   /* C > 0 */
    double *metric; /* the layer's column; rows are `stride` apart */
} layer_counts;

static void put(const layer_counts *layer, int metric, double value) {
    layer->metric[metric * layer->options->layers] = value;
}

static double sum_of(const double *values, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += values[i];
    }
    return sum;
}

/* max/mean - 1; one expert or equal counts give 0, one loaded expert n - 1, without rounding. */
static double max_vio_of(const double *values, int64_t n, double total) {
    double max = 0;
    for (int64_t i = 0; i < n; i++) {
        max = values[i] > max ? values[i] : max;
    }
    return within(max * (double)n / total - 1, 0, (double)(n - 1));
}

static void spread_metrics(const layer_counts *layer, const double *sorted) {
    /* no square of a count may vanish; all that follows are ratios */
    double scale = layer->total < 0x1p-400 ? 0x1p600 : 1;
    double n = (double)layer->experts, total = layer->total * scale, mean = total / n;
    double entropy = 0, squares = 0, deviations = 0, ranks = 0, term = 0;
    for (int64_t i = 0; i < layer->experts; i++) {
        double c = sorted[i] * scale;
        if (c > 0 && (i == 0 || sorted[i] != sorted[i - 1])) { /* equal counts are neighbours */
            double p = c / total;
            term = p * log(p);
        }
        entropy -= c > 0 ? term : 0;
        squares += c * c;
        deviations += (c - mean) * (c - mean);
        ranks += (double)(2 * i + 1 - layer->experts) * c; /* 2 rank - E - 1 */
    }
    entropy = within(entropy, 0, log(n));
    put(layer, TM_EXPERT_max_vio, within(sorted[layer->experts - 1] * n / layer->total - 1, 0, n - 1));
    put(layer, TM_EXPERT_min_vio, within(1 - sorted[0] * n / layer->total, 0, 1));
    put(layer, TM_EXPERT_load_entropy, entropy);
    put(layer, TM_EXPERT_load_entropy_norm, layer->experts == 1 ? 1 : entropy / log(n));
    put(layer, TM_EXPERT_experts_effective, within(exp(entropy), 1, n));
    put(layer, TM_EXPERT_load_cv, sqrt(deviations / n) / mean);
    put(layer, TM_EXPERT_load_jain, within(total * total / (n * squares), 1 / n, 1));
    put(layer, TM_EXPERT_load_gini, within(ranks / (n * total), 0, 1 - 1 / n));
}

static void drop_metrics(const layer_counts *layer, const double *sorted) {
    double n = (double)layer->experts, factor = layer->options->capacity_factor;
    double capacity = ceil(factor * layer->total / n), fair = factor / n, over = 0, over_share = 0;
    if (isnan(factor)) {
        return;
    }
    for (int64_t i = 0; i < layer->experts; i++) {
        double share = sorted[i] / layer->total;
        over += sorted[i] > capacity ? sorted[i] - capacity : 0;
        over_share += share > fair ? share - fair : 0;
    }
    put(layer, TM_EXPERT_drop_forecast, within(over / layer->total, 0, 1));
    put(layer, TM_EXPERT_drop_forecast_mf, within(over_share, 0, 1));
}

/* Replicas share their expert's load equally. */
static void rank_metrics(const layer_counts *layer, double *rank_load) {
    const tm_expert_options *options = layer->options;
    int64_t experts = layer->experts, ranks = options->ranks, replicas = options->replicas;
    if (ranks == 0) {
        return;
    }
    memset(rank_load, 0, (size_t)ranks * sizeof *rank_load);
    if (options->placement == NULL) {
        for (int64_t e = 0; e < experts; e++) {
            rank_load[e / (experts / ranks)] += layer->counts[e];
        }
    } else {
        const int64_t *place = options->placement;
        place += options->placement_layers == 1 ? 0 : layer->index * experts * replicas;
        for (int64_t e = 0; e < experts; e++, place += replicas) {
            int64_t holders = 0;
            for (int64_t r = 0; r < replicas; r++) {
                holders += place[r] >= 0;
            }
            for (int64_t r = 0; r < replicas; r++) {
                if (place[r] >= 0) {
                    rank_load[place[r]] += layer->counts[e] / (double)holders;
                }
            }
        }
    }
    put(layer, TM_EXPERT_ep_load_vio, max_vio_of(rank_load, ranks, sum_of(rank_load, ranks)));
}

static void advance_pools(const layer_counts *layer, const tm_expert_state *state) {
    int64_t experts = layer->experts, window = layer->options->window, first = layer->index * experts;
    double *total = state->total + first, *pooled = state->pooled + first;
    double *row = state->ring + first * window + state->steps[layer->index] % window * experts;
    for (int64_t e = 0; e < experts; e++) {
        double count = fabs(layer->counts[e]); /* -0.0 is 0 */
        pooled[e] = pooled[e] - row[e] + count;
        row[e] = count;
        total[e] += count;
    }
    put(layer, TM_EXPERT_max_vio_window, max_vio_of(pooled, experts, sum_of(pooled, experts)));
    put(layer, TM_EXPERT_max_vio_global, max_vio_of(total, experts, sum_of(total, experts)));
}

static void advance_churn(const layer_counts *layer, const tm_expert_state *state) {
    double *share = state->share + layer->index * layer->experts, moved = 0;
    for (int64_t e = 0; e < layer->experts; e++) {
        double now = layer->counts[e] / layer->total;
        moved += fabs(now - share[e]);
        share[e] = now;
    }
    put(layer, TM_EXPERT_churn, state->steps[layer->index] > 0 ? within(moved / 2, 0, 1) : (double)NAN);
}

/* Steps in a row in which an expert was dead, hot or cold, and how many experts were so for long enough. */
static void advance_ages(const layer_counts *layer, const tm_expert_state *state,
                         const tm_expert_results *results) {
    int64_t experts = layer->experts, first = layer->index * experts;
    int64_t *dead = state->dead + first, *hot = state->hot + first, *cold = state->cold + first;
    int64_t n_dead = 0, n_hot = 0, n_cold = 0;
    double mean = layer->total / (double)experts;
    for (int64_t e = 0; e < experts; e++) {
        double count = layer->counts[e];
        dead[e] = count <= DEAD_SHARE * mean ? dead[e] + 1 : 0;
        hot[e] = count > HOT_FACTOR * mean ? hot[e] + 1 : 0;
        cold[e] = count < COLD_SHARE * mean ? cold[e] + 1 : 0;
        n_dead += dead[e] >= layer->options->window;
        n_hot += hot[e] >= layer->options->hold;
        n_cold += cold[e] >= layer->options->hold;
        results->dead_age[first + e] = (double)dead[e];
        results->hot_age[first + e] = (double)hot[e];
        results->cold_age[first + e] = (double)cold[e];
    }
    put(layer, TM_EXPERT_dead, (double)n_dead);
    put(layer, TM_EXPERT_hot, (double)n_hot);
    put(layer, TM_EXPERT_cold, (double)n_cold);
}

/* ---- all layers ---- */

static tm_status check_counts(const double *counts, const tm_expert_options *options, tm_error *error) {
    for (int64_t i = 0; i < options->layers * options->experts; i++) {
        if (!(counts[i] >= 0 && counts[i] < COUNT_LIMIT)) { /* NaN too */
            return tm_fail(error, TM_ERR_VALUE,
                           "counts[%lld, %lld] is %g: a count must be from 0 to below 2^53",
                           (long long)(i / options->experts), (long long)(i % options->experts), counts[i]);
        }
    }
    return TM_OK;
}

static tm_status check_placement(const tm_expert_options *options, tm_error *error) {
    int64_t experts = options->experts, ranks = options->ranks, replicas = options->replicas;
    if (ranks == 0) {
        return TM_OK;
    }
    if (options->placement == NULL) {
        if (ranks < 0 || experts % ranks != 0) {
            return tm_fail(error, TM_ERR_VALUE,
                           "ep_size %lld does not divide %lld experts: say where they are with placement",
                           (long long)ranks, (long long)experts);
        }
        return TM_OK;
    }
    for (int64_t i = 0; i < options->placement_layers * experts; i++) {
        int64_t holders = 0;
        for (int64_t r = 0; r < replicas; r++) {
            int64_t rank = options->placement[i * replicas + r];
            if (rank < -1 || rank >= ranks) {
                return tm_fail(error, TM_ERR_VALUE,
                               "placement of expert %lld in layer %lld: rank %lld is not one of %lld",
                               (long long)(i % experts), (long long)(i / experts), (long long)rank,
                               (long long)ranks);
            }
            holders += rank >= 0;
        }
        if (holders == 0) {
            return tm_fail(error, TM_ERR_VALUE, "placement of expert %lld in layer %lld: no rank has it",
                           (long long)(i % experts), (long long)(i / experts));
        }
    }
    return TM_OK;
}

static tm_status check_options(const tm_expert_options *options, tm_error *error) {
    if (options->layers < 0 || options->experts < 1 || options->window < 1 || options->hold < 1) {
        return tm_fail(error, TM_ERR_VALUE, "experts, window and hold must be 1 or more");
    }
    if (options->capacity_factor <= 0 || isinf(options->capacity_factor)) {
        return tm_fail(error, TM_ERR_VALUE, "capacity_factor must be positive and finite, not %g",
                       options->capacity_factor);
    }
    return check_placement(options, error);
}

static void fill_nan(double *values, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        values[i] = NAN;
    }
}

tm_status tm_expert_metrics(const double *counts, const tm_expert_options *options,
                            const tm_expert_state *state, const tm_expert_results *results, tm_error *error) {
    int64_t layers = options->layers, experts = options->experts;
    tm_status status = check_options(options, error);
    if (status != TM_OK || (status = check_counts(counts, options, error)) != TM_OK) {
        return status;
    }
    uint64_t *memory = tm_allocate((size_t)experts * 3, sizeof *memory);
    if (memory == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory to sort %lld counts", (long long)experts);
    }
    double *sorted = (double *)(memory + 2 * experts);
    fill_nan(results->metric, TM_EXPERT_METRIC_COUNT * layers);
    for (int64_t l = 0; l < layers; l++) {
        layer_counts layer = {.options = options,
                              .index = l,
                              .experts = experts,
                              .counts = counts + l * experts,
                              .metric = results->metric + l};
        double *rank_load = results->rank_load != NULL ? results->rank_load + l * options->ranks : NULL;
        sort_counts(sorted, layer.counts, experts, memory, memory + experts);
        layer.total = sum_of(sorted, experts);
        if (layer.total == 0) {
            fill_nan(results->dead_age + l * experts, experts);
            fill_nan(results->hot_age + l * experts, experts);
            fill_nan(results->cold_age + l * experts, experts);
            if (rank_load != NULL) {
                fill_nan(rank_load, options->ranks);
            }
            continue;
        }
        spread_metrics(&layer, sorted);
        drop_metrics(&layer, sorted);
        rank_metrics(&layer, rank_load);
        advance_pools(&layer, state);
        advance_churn(&layer, state);
        advance_ages(&layer, state, results);
        state->steps[l]++;
    }
    free(memory);
    return TM_OK;
}
