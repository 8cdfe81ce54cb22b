/* expert_metrics: what the counts of a step say about each layer, and what the layer remembers. Definitions
 * are in docs/kernels/moe.md. */
#include "tm_moe.h"

#include "tm_memory.h"
#include "tm_table.h"

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

/* ---- one layer ---- */

/* Room for one layer at a time, `experts` numbers each. */
typedef struct layer_memory {
    tm_moe_runs runs;
    uint64_t *keys, *spare;
} layer_memory;

typedef struct layer_counts {
    const tm_moe_kernels *kernels;
    const tm_expert_options *options;
    const layer_memory *memory;
    int64_t index;
    size_t experts, runs;
    const double *counts;
    double total;   /* C > 0 */
    double *metric; /* the layer's column; rows are `layers` apart */
} layer_counts;

/* max/mean - 1; one expert or equal counts give 0, one loaded expert n - 1, without rounding. */
static double max_vio_of(const layer_counts *layer, const double *values, size_t n, double sum) {
    return within(layer->kernels->max(values, n) * (double)n / sum - 1, 0, (double)n - 1);
}

static void put(const layer_counts *layer, int metric, double value) {
    layer->metric[metric * layer->options->layers] = value;
}

static void spread_metrics(const layer_counts *layer) {
    /* no square of a count may vanish; all that follow are ratios */
    const double scale = layer->total < 0x1p-400 ? 0x1p600 : 1;
    const size_t experts = layer->experts;
    const double n = (double)experts, total = layer->total * scale, mean = total / n, most = tm_moe_log(n);
    const tm_moe_runs *of = &layer->memory->runs;
    const double least = of->value[0], largest = of->value[layer->runs - 1];
    tm_moe_spread spread;
    layer->kernels->spread(&spread, of, layer->runs, experts, mean, scale);
    const double entropy = within(layer->kernels->entropy(of, layer->runs, layer->total), 0, most);
    put(layer, TM_EXPERT_max_vio, within(largest * n / layer->total - 1, 0, n - 1));
    put(layer, TM_EXPERT_min_vio, within(1 - least * n / layer->total, 0, 1));
    put(layer, TM_EXPERT_load_entropy, entropy);
    put(layer, TM_EXPERT_load_entropy_norm, experts == 1 ? 1 : entropy / most);
    put(layer, TM_EXPERT_experts_effective, within(exp(entropy), 1, n));
    put(layer, TM_EXPERT_load_cv, sqrt(spread.deviations / n) / mean);
    put(layer, TM_EXPERT_load_jain, within(total * total / (n * spread.squares), 1 / n, 1));
    put(layer, TM_EXPERT_load_gini, within(spread.ranks / (n * total), 0, 1 - 1 / n));
}

/* What the capacity of each group cuts off; the layer's counts are one group unless there are others. */
static void drop_metrics(const layer_counts *layer) {
    const tm_expert_options *options = layer->options;
    const tm_moe_kernels *kernels = layer->kernels;
    const tm_moe_runs *of = &layer->memory->runs;
    const size_t experts = layer->experts;
    const double n = (double)experts, factor = options->capacity_factor;
    double over = 0;
    if (options->dropped != NULL) {
        put(layer, TM_EXPERT_drop_rate, within(options->dropped[layer->index] / layer->total, 0, 1));
    }
    if (isnan(factor)) {
        return;
    }
    if (options->group_counts == NULL) {
        over = kernels->runs_above(of, layer->runs, ceil(factor * layer->total / n), 1);
    } else {
        const double *group = options->group_counts + layer->index * options->groups * (int64_t)experts;
        for (int64_t g = 0; g < options->groups; g++, group += experts) {
            over += kernels->sum_above(group, experts, ceil(factor * kernels->sum(group, experts) / n));
        }
    }
    put(layer, TM_EXPERT_drop_forecast, within(over / layer->total, 0, 1));
    put(layer, TM_EXPERT_drop_forecast_mf,
        within(kernels->runs_above(of, layer->runs, factor / n, layer->total), 0, 1));
}

/* Replicas share their expert's load equally. */
static void rank_metrics(const layer_counts *layer, double *rank_load) {
    const tm_expert_options *options = layer->options;
    int64_t experts = (int64_t)layer->experts, ranks = options->ranks, replicas = options->replicas;
    if (ranks == 0) {
        return;
    }
    if (options->placement == NULL) {
        const int64_t each = experts / ranks;
        for (int64_t r = 0; r < ranks; r++) {
            rank_load[r] = layer->kernels->sum(layer->counts + r * each, (size_t)each);
        }
    } else {
        const int64_t *place = options->placement;
        place += options->placement_layers == 1 ? 0 : layer->index * experts * replicas;
        memset(rank_load, 0, (size_t)ranks * sizeof *rank_load);
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
    put(layer, TM_EXPERT_ep_load_vio,
        max_vio_of(layer, rank_load, (size_t)ranks, layer->kernels->sum(rank_load, (size_t)ranks)));
}

/* The row of the ring that a layer's next step takes. */
static double *ring_row(const layer_counts *layer, const tm_expert_state *state) {
    const size_t window = (size_t)layer->options->window;
    const size_t row = (size_t)state->steps[layer->index] % window;
    return state->ring + ((size_t)layer->index * window + row) * layer->experts;
}

/* One step of what the layer remembers. */
static void advance(const layer_counts *layer, const tm_expert_state *state,
                    const tm_expert_results *results) {
    const tm_moe_kernels *kernels = layer->kernels;
    const size_t experts = layer->experts, first = (size_t)layer->index * experts;
    const double window = (double)layer->options->window;
    const double *counts = layer->counts, mean = layer->total / (double)experts;
    const double enough = (double)layer->options->hold;
    double *total = state->total + first, *pooled = state->pooled + first;
    tm_moe_pools sums;
    kernels->pool(&sums, total, pooled, ring_row(layer, state), counts, experts);
    put(layer, TM_EXPERT_max_vio_window, max_vio_of(layer, pooled, experts, sums.pooled));
    put(layer, TM_EXPERT_max_vio_global, max_vio_of(layer, total, experts, sums.total));
    const double moved = kernels->churn(state->share + first, counts, experts, layer->total);
    put(layer, TM_EXPERT_churn, state->steps[layer->index] > 0 ? within(moved / 2, 0, 1) : (double)NAN);
    put(layer, TM_EXPERT_dead,
        kernels->at_most(state->dead + first, results->dead_age + first, counts, experts, DEAD_SHARE * mean,
                         window));
    put(layer, TM_EXPERT_hot,
        kernels->above(state->hot + first, results->hot_age + first, counts, experts, HOT_FACTOR * mean,
                       enough));
    put(layer, TM_EXPERT_cold,
        kernels->below(state->cold + first, results->cold_age + first, counts, experts, COLD_SHARE * mean,
                       enough));
    state->steps[layer->index]++;
}

/* ---- all layers ---- */

/* values: [layers][rows][experts]; rows is 0 where the name has no such index. */
static tm_status check_counts(const tm_moe_kernels *kernels, const double *values, int64_t layers,
                              int64_t rows, int64_t experts, tm_error *error) {
    const int64_t n = layers * (rows > 0 ? rows : 1) * experts;
    if (kernels->bad(values, (size_t)n, COUNT_LIMIT) == 0) {
        return TM_OK;
    }
    int64_t i = 0;
    while (values[i] >= 0 && values[i] < COUNT_LIMIT) { /* ends at NaN too */
        i++;
    }
    const long long expert = (long long)(i % experts), row = (long long)(i / experts);
    if (rows > 0) {
        return tm_fail(error, TM_ERR_VALUE,
                       "counts[%lld, %lld, %lld] is %g: a count must be from 0 to below 2^53",
                       row / (long long)rows, row % (long long)rows, expert, values[i]);
    }
    return tm_fail(error, TM_ERR_VALUE, "counts[%lld, %lld] is %g: a count must be from 0 to below 2^53", row,
                   expert, values[i]);
}

static tm_status check_dropped(const tm_moe_kernels *kernels, const double *counts,
                               const tm_expert_options *options, tm_error *error) {
    for (int64_t l = 0; options->dropped != NULL && l < options->layers; l++) {
        const double dropped = options->dropped[l];
        const double total = kernels->sum(counts + l * options->experts, (size_t)options->experts);
        if (!(dropped >= 0 && dropped <= total)) {
            return tm_fail(error, TM_ERR_VALUE,
                           "dropped[%lld] is %g: it must be from 0 to the layer's %g assignments",
                           (long long)l, dropped, total);
        }
    }
    return TM_OK;
}

/* A row of the ring is found by the number of steps. */
static tm_status check_state(const tm_expert_state *state, int64_t layers, tm_error *error) {
    for (int64_t l = 0; l < layers; l++) {
        if (state->steps[l] < 0 || state->steps[l] >= INT64_C(1) << 53) {
            return tm_fail(error, TM_ERR_VALUE, "state.steps[%lld] is %lld: no number of steps", (long long)l,
                           (long long)state->steps[l]);
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
    if (options->layers < 0 || options->window < 1 || options->hold < 1) {
        return tm_fail(error, TM_ERR_VALUE, "window and hold must be 1 or more");
    }
    if (options->experts < 1 || options->experts > TM_MAX_EXPERTS) {
        return tm_fail(error, TM_ERR_VALUE, "the number of experts must be from 1 to %d, not %lld",
                       TM_MAX_EXPERTS, (long long)options->experts);
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

/* A layer without assignments: its metrics are NaN already. */
static void null_layer(const layer_counts *layer, const tm_expert_results *results) {
    const int64_t experts = (int64_t)layer->experts, first = layer->index * experts;
    const int64_t ranks = layer->options->ranks;
    fill_nan(results->dead_age + first, experts);
    fill_nan(results->hot_age + first, experts);
    fill_nan(results->cold_age + first, experts);
    if (ranks > 0) {
        fill_nan(results->rank_load + layer->index * ranks, ranks);
    }
}

/* Rows of the ring lie far apart and were written a window ago: asked for while the layer before is at work.
 */
static void prefetch_row(layer_counts layer, const tm_expert_state *state) {
    if (++layer.index < layer.options->layers) {
        const char *row = (const char *)ring_row(&layer, state);
        for (size_t offset = 0; offset < layer.experts * sizeof(double); offset += 64) {
            __builtin_prefetch(row + offset, 1);
        }
    }
}

static void one_layer(layer_counts *layer, const tm_expert_state *state, const tm_expert_results *results) {
    const layer_memory *memory = layer->memory;
    prefetch_row(*layer, state);
    layer->runs =
        layer->kernels->runs(&memory->runs, layer->counts, layer->experts, memory->keys, memory->spare);
    layer->total = layer->kernels->runs_sum(&memory->runs, layer->runs);
    if (layer->total == 0) {
        null_layer(layer, results);
        return;
    }
    spread_metrics(layer);
    drop_metrics(layer);
    rank_metrics(layer, results->rank_load + layer->index * layer->options->ranks);
    advance(layer, state, results);
}

tm_status tm_expert_metrics(const double *counts, const tm_expert_options *options,
                            const tm_expert_state *state, const tm_expert_results *results, tm_error *error) {
    const int64_t layers = options->layers, experts = options->experts;
    const tm_table *table;
    tm_status status = tm_table_require(&table, error);
    if (status != TM_OK || (status = check_options(options, error)) != TM_OK) {
        return status;
    }
    const tm_moe_kernels *kernels = table->moe;
    if (options->group_counts != NULL) {
        status = check_counts(kernels, options->group_counts, layers, options->groups, experts, error);
    }
    if (status != TM_OK || (status = check_counts(kernels, counts, layers, 0, experts, error)) != TM_OK ||
        (status = check_dropped(kernels, counts, options, error)) != TM_OK ||
        (status = check_state(state, layers, error)) != TM_OK) {
        return status;
    }
    /* lines of the cache: the widest vectors cross none */
    const size_t each = ((size_t)experts + 8) / 8 * 8;
    char *memory_block = tm_allocate(each * 5 + 8, sizeof(double));
    if (memory_block == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory to sort %lld counts", (long long)experts);
    }
    double *room = (double *)(memory_block + (0 - (uintptr_t)memory_block) % 64);
    const layer_memory memory = {.runs = {room, room + each, room + 2 * each},
                                 .keys = (uint64_t *)(room + 3 * each),
                                 .spare = (uint64_t *)(room + 4 * each)};
    fill_nan(results->metric, TM_EXPERT_METRIC_COUNT * layers);
    for (int64_t l = 0; l < layers; l++) {
        layer_counts layer = {.kernels = kernels,
                              .options = options,
                              .memory = &memory,
                              .index = l,
                              .experts = (size_t)experts,
                              .counts = counts + l * experts,
                              .metric = results->metric + l};
        one_layer(&layer, state, results);
    }
    free(memory_block);
    return TM_OK;
}
