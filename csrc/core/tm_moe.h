/* Mixture of experts: counts of expert ids, metrics of the counts, tokens that changed experts. */
#ifndef TM_MOE_H
#define TM_MOE_H

#include "tm_status.h"
#include "tm_view.h"

#define TM_MAX_EXPERTS (1 << 24) /* counts of one layer take 128 MiB then */

/* Counts the ids of [0, experts) in integer views of any layout; ids outside are counted in `invalid`, never
 * used. per_tensor: counts is [count][experts] and invalid [count], else [experts] and one number over all
 * views. 1 <= experts <= TM_MAX_EXPERTS. Counts are exact, hence the same for every tier, thread count and
 * split. Memory is allocated only from 2,064 experts on (4 bytes an expert and worker) and for threads > 1;
 * with too little of it the call goes on with fewer workers, and answers TM_ERR_MEMORY if there is not enough
 * for one. */
TM_NODISCARD tm_status tm_expert_load(const tm_view *views, size_t count, int64_t experts, int per_tensor,
                                      int threads, int64_t *counts, int64_t *invalid, tm_error *error);

/* Rows of `k` ids, before and after: over all rows, the number of ids that a row has on both sides, pairing
 * equal ids one to one. Ids outside [0, experts) have no pair. Both views hold a multiple of k ids. */
TM_NODISCARD tm_status tm_common_assignments(const tm_view *before, const tm_view *after, int64_t k,
                                             int64_t experts, int64_t *common, tm_error *error);

/* X(name): the numbers of one layer, in the order of their rows in the result. */
#define TM_EXPERT_METRICS(X)                                                                                 \
    X(max_vio)                                                                                               \
    X(max_vio_window)                                                                                        \
    X(max_vio_global)                                                                                        \
    X(min_vio)                                                                                               \
    X(load_entropy)                                                                                          \
    X(load_entropy_norm)                                                                                     \
    X(experts_effective)                                                                                     \
    X(load_cv)                                                                                               \
    X(load_jain)                                                                                             \
    X(load_gini)                                                                                             \
    X(drop_rate)                                                                                             \
    X(drop_forecast)                                                                                         \
    X(drop_forecast_mf)                                                                                      \
    X(dead)                                                                                                  \
    X(hot)                                                                                                   \
    X(cold)                                                                                                  \
    X(ep_load_vio)                                                                                           \
    X(churn)

enum {
#define TM_EXPERT_METRIC_ENUM(name) TM_EXPERT_##name,
    TM_EXPERT_METRICS(TM_EXPERT_METRIC_ENUM)
#undef TM_EXPERT_METRIC_ENUM
        TM_EXPERT_METRIC_COUNT
};

/* What a layer remembers of its steps; borrowed, advanced in place. Everything is zero before the first. */
typedef struct tm_expert_state {
    int64_t *steps;         /* [layers] steps with any assignment */
    double *total, *pooled; /* [layers][experts] counts since the start, and of the last `window` steps */
    double *ring;  /* [layers][window][experts] the counts of those steps, step s in row s % window */
    double *share; /* [layers][experts] p of the last step */
    double *dead, *hot, *cold; /* [layers][experts] steps in a row so far */
} tm_expert_state;

typedef struct tm_expert_options {
    int64_t layers, experts;
    int64_t window;         /* steps of the pool, and steps until an expert is dead; >= 1 */
    int64_t hold;           /* steps until an expert is hot or cold; >= 1 */
    double capacity_factor; /* NaN: no drop forecast */
    /* [layers][groups][experts], groups >= 1: the counts of which `counts` are the sums, where each group has
     * a capacity of its own. NULL: one group. */
    const double *group_counts;
    int64_t groups;
    const double *dropped; /* [layers] assignments that found no room, of those in `counts`; or NULL */
    int64_t ranks;         /* of expert parallelism; 0: none */
    /* [placement_layers][experts][replicas]: the ranks that hold an expert, -1 for none; placement_layers is
     * 1 (the same for all layers) or layers. NULL: `experts / ranks` experts a rank, in order. */
    const int64_t *placement;
    int64_t placement_layers, replicas;
} tm_expert_options;

/* Where results go; ages are in steps. NaN: null. */
typedef struct tm_expert_results {
    double *metric;                        /* [TM_EXPERT_METRIC_COUNT][layers] */
    double *dead_age, *hot_age, *cold_age; /* [layers][experts] */
    double *rank_load;                     /* [layers][ranks]; not written if ranks is 0 */
} tm_expert_results;

/* The metrics of one step's counts [layers][experts], and one step of the state. A layer whose counts are all
 * zero is null in every number and keeps its state. Counts are from 0 up to but not 2^53, whole or not; the
 * pool is exact for whole ones. Bad counts, placements and states are refused before anything is written.
 * Symmetric sums run over the sorted counts: the order of the experts changes no bit of them. */
TM_NODISCARD tm_status tm_expert_metrics(const double *counts, const tm_expert_options *options,
                                         const tm_expert_state *state, const tm_expert_results *results,
                                         tm_error *error);

#endif
