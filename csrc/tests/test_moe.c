/* Expert ids against a scalar count: every tier, dtype and table shape, tails, layouts, threads, allocations
 * that fail; metrics of a step against their definitions; overlaps of assignments. */
#include "digest.h"
#include "runner.h"

#include "../core/tm_memory.h"
#include "../core/tm_moe.h"
#include "../core/tm_table.h"
#include "../kernels/tm_moe_kernels.h"

#include <math.h>
#include <stdlib.h>

enum { N = 3 * 65536 + 77, VIEWS = 3 };

static const tm_dtype dtypes[] = {TM_I8, TM_I16, TM_I32, TM_I64, TM_U8, TM_U16, TM_U32, TM_U64};
static const int64_t experts_of[] = {
    1, 8, 256, TM_MOE_STRIDE_8 - 1, TM_MOE_STRIDE_8, 1024, TM_MOE_STRIDE_4 - 1, TM_MOE_STRIDE_4, 70000};

/* The place of an id: itself or -1, from its bytes (this machine is little-endian, as the library's are). */
static int64_t reference_id(const void *data, int64_t index, tm_dtype dtype, int64_t experts) {
    size_t size = tm_dtype_size(dtype);
    uint64_t bits = 0;
    memcpy(&bits, (const char *)data + (size_t)index * size, size);
    int is_negative = dtype <= TM_I64 && (bits >> (8 * size - 1) & 1) != 0;
    return is_negative || bits >= (uint64_t)experts ? -1 : (int64_t)bits;
}

static void reference_count(const tm_view *view, int64_t stride, int64_t experts, int64_t *counts) {
    for (int64_t i = 0; i < view->n; i++) {
        int64_t id = reference_id(view->data, i * stride, view->dtype, experts);
        counts[id < 0 ? experts : id]++;
    }
}

/* Random ids of which most are experts. */
static void fill_ids(void *data, int64_t n, tm_dtype dtype, int64_t experts) {
    size_t size = tm_dtype_size(dtype);
    for (int64_t i = 0; i < n; i++) {
        uint64_t random = next_random(), id = random % 16 == 0 ? random : (random >> 20) % (uint64_t)experts;
        memcpy((char *)data + (size_t)i * size, &id, size);
    }
}

static int allocations_left;

/* All but the first `allocations_left` fail; or only the next after those. */
static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

static void *failing_once(size_t bytes) {
    return allocations_left-- != 0 ? malloc(bytes) : NULL;
}

typedef struct test_lists {
    int64_t *expected, *counts; /* [VIEWS][experts + 1], the invalid ones last; [VIEWS][experts] */
    char *data;
} test_lists;

static void check_counts(const tm_view *views, const int64_t *strides, int64_t experts, int threads,
                         const test_lists *lists, const char *what) {
    int64_t width = experts + 1, invalid[VIEWS];
    tm_error error = {""};
    memset(lists->expected, 0, (size_t)(VIEWS * width) * sizeof *lists->expected);
    for (int v = 0; v < VIEWS; v++) {
        reference_count(&views[v], strides[v], experts, lists->expected + v * width);
    }
    for (int each = 1; each >= 0; each--) {
        CHECK(tm_expert_load(views, VIEWS, experts, each, threads, lists->counts, invalid, &error) == TM_OK,
              "%s", error.text);
        for (int v = 0; v < (each ? VIEWS : 1); v++) {
            int same = 1;
            for (int64_t e = 0; e < width; e++) {
                int64_t got = e == experts ? invalid[v] : lists->counts[v * experts + e];
                same = same && got == lists->expected[v * width + e];
            }
            CHECK(same, "%s: %s, %lld experts, %d threads, view %d", what, tm_dtype_name(views[v].dtype),
                  (long long)experts, threads, v);
        }
        for (int64_t e = 0; each && e < width; e++) { /* the second round expects the sum */
            lists->expected[e] += lists->expected[width + e] + lists->expected[2 * width + e];
        }
    }
}

static void check_dtype(tm_dtype dtype, int64_t experts, const test_lists *lists) {
    size_t size = tm_dtype_size(dtype);
    int64_t shape[1] = {N / 3}, stride[1] = {3 * (int64_t)size};
    fill_ids(lists->data, N, dtype, experts);
    tm_view strided = {
        .data = lists->data, .shape = shape, .strides = stride, .n = shape[0], .ndim = 1, .dtype = dtype};
    for (int64_t n = 0; n < 70; n += n < 40 ? 1 : 13) {
        tm_view views[VIEWS] = {flat(lists->data, n, dtype), flat(lists->data, 0, dtype), strided};
        views[2].n = shape[0] = n / 3;
        check_counts(views, (int64_t[]){1, 1, 3}, experts, 1, lists, "lengths");
    }
    shape[0] = N / 3;
    tm_view views[VIEWS] = {flat(lists->data, N, dtype), strided, flat(lists->data, 65536, dtype)};
    for (int threads = 1; threads <= 5; threads += 2) {
        check_counts(views, (int64_t[]){1, 3, 1}, experts, threads, lists, "threads");
    }
}

static void check_allocations(const test_lists *lists) {
    tm_error error = {""};
    int64_t invalid[VIEWS];
    for (int round = 0; round < 20; round++) {
        int left = round / 4, once = round & 1, large = round & 2;
        int64_t experts = large ? 70000 : 256;
        fill_ids(lists->data, N, TM_I32, experts);
        tm_view view = flat(lists->data, N, TM_I32);
        tm_view views[VIEWS] = {view, view, view};
        allocations_left = left; /* the units, then the tables of many experts */
        tm_memory_set_allocator(once ? failing_once : failing);
        tm_status status = tm_expert_load(views, VIEWS, experts, 0, 4, lists->counts, invalid, &error);
        tm_memory_set_allocator(NULL);
        tm_status wanted = large && !once && left < 2 ? TM_ERR_MEMORY : TM_OK;
        CHECK(status == wanted, "round %d: %d %s", round, (int)status, error.text);
        int64_t seen = invalid[0];
        for (int64_t e = 0; status == TM_OK && e < experts; e++) {
            seen += lists->counts[e];
        }
        CHECK(status != TM_OK || seen == VIEWS * (int64_t)N, "round %d: %lld", round, (long long)seen);
    }
    tm_view rows = flat(lists->data, 64, TM_I32);
    int64_t common = 0;
    allocations_left = 0;
    tm_memory_set_allocator(failing);
    CHECK(tm_common_assignments(&rows, &rows, 8, 256, &common, &error) == TM_ERR_MEMORY, "no memory");
    tm_memory_set_allocator(NULL);
}

static void check_refusals(void) {
    float weights[2] = {0, 1};
    int64_t ids[4] = {0, 1, 2, 3}, counts[4], invalid = 0, common = 0;
    tm_view view = flat(ids, 4, TM_I64), short_view = flat(ids, 3, TM_I64), wrong = flat(weights, 2, TM_F32);
    tm_error error = {""};
    CHECK(tm_expert_load(&wrong, 1, 4, 0, 1, counts, &invalid, &error) == TM_ERR_DTYPE, "floats");
    CHECK(tm_expert_load(&view, 1, 0, 0, 1, counts, &invalid, &error) == TM_ERR_VALUE, "no experts");
    CHECK(tm_expert_load(&view, 1, TM_MAX_EXPERTS + 1, 0, 1, counts, &invalid, &error) == TM_ERR_VALUE,
          "many");
    CHECK(tm_expert_load(&view, 1, 4, 0, 0, counts, &invalid, &error) == TM_ERR_VALUE, "no threads");
    CHECK(tm_common_assignments(&view, &short_view, 1, 4, &common, &error) == TM_ERR_VALUE, "rows");
    CHECK(tm_common_assignments(&view, &view, 3, 4, &common, &error) == TM_ERR_VALUE, "rows of 3");
    CHECK(tm_common_assignments(&view, &view, 0, 4, &common, &error) == TM_ERR_VALUE, "rows of 0");
    CHECK(tm_common_assignments(&wrong, &wrong, 1, 4, &common, &error) == TM_ERR_DTYPE, "floats");
}

static void check_common(void) {
    int64_t before[] = {0, 1, 2, 3, 3, 3, 9, -1}, common = -1;
    int16_t after[] = {1, 7, 3, 2, 3, 0, 9, -1};
    tm_view old = flat(before, 8, TM_I64), new = flat(after, 8, TM_I16);
    tm_error error = {""};
    CHECK(tm_common_assignments(&old, &new, 2, 9, &common, &error) == TM_OK && common == 4, "%lld common",
          (long long)common);
}

/* ---- metrics ---- */

enum { LAYERS = 3, EXPERTS = 40, WINDOW = 4, RANKS = 5 };

typedef struct layer_memory {
    int64_t steps[LAYERS];
    double dead[LAYERS * EXPERTS], hot[LAYERS * EXPERTS], cold[LAYERS * EXPERTS];
    double total[LAYERS * EXPERTS], pooled[LAYERS * EXPERTS], share[LAYERS * EXPERTS];
    double ring[LAYERS * WINDOW * EXPERTS];
} layer_memory;

typedef struct step_numbers {
    double metric[TM_EXPERT_METRIC_COUNT][LAYERS];
    double dead_age[LAYERS * EXPERTS], hot_age[LAYERS * EXPERTS], cold_age[LAYERS * EXPERTS];
    double rank_load[LAYERS * RANKS];
} step_numbers;

static const double groups_of_last[LAYERS * 2 * EXPERTS] = {
    [0] = 7, [1] = 1, [EXPERTS] = 0, [EXPERTS + 1] = 5};

/* dropped, groups: NULL for none */
static tm_status step(layer_memory *memory, const double *counts, const double *dropped, const double *groups,
                      step_numbers *out, tm_error *error) {
    tm_expert_options options = {.layers = LAYERS,
                                 .experts = EXPERTS,
                                 .window = WINDOW,
                                 .hold = 2,
                                 .capacity_factor = 1.25,
                                 .ranks = RANKS,
                                 .dropped = dropped,
                                 .group_counts = groups,
                                 .groups = groups != NULL ? 2 : 0};
    tm_expert_state state = {memory->steps, memory->total, memory->pooled, memory->ring,
                             memory->share, memory->dead,  memory->hot,    memory->cold};
    tm_expert_results results = {out->metric[0], out->dead_age, out->hot_age, out->cold_age, out->rank_load};
    return tm_expert_metrics(counts, &options, &state, &results, error);
}

static double max_vio(const double *counts) {
    double max = 0, total = 0;
    for (int e = 0; e < EXPERTS; e++) {
        max = counts[e] > max ? counts[e] : max;
        total += counts[e];
    }
    return max / (total / EXPERTS) - 1;
}

/* All but the exponential of the C library: the same bits on every machine. */
static void digest_numbers(uint64_t *digest, const step_numbers *numbers) {
    for (int m = 0; m < TM_EXPERT_METRIC_COUNT; m++) {
        if (m != TM_EXPERT_experts_effective) {
            digest_doubles(digest, numbers->metric[m], LAYERS);
        }
    }
    digest_doubles(digest, numbers->dead_age, LAYERS * EXPERTS);
    digest_doubles(digest, numbers->rank_load, LAYERS * RANKS);
}

/* Two groups of 8 and 5 assignments, with room for ceil(1.25 * 8 / 40) = 1 and 1 an expert. */
static void check_groups(layer_memory *memory) {
    static step_numbers numbers;
    double counts[LAYERS * EXPERTS] = {7, 6};
    tm_error error = {""};
    CHECK(step(memory, counts, NULL, groups_of_last, &numbers, &error) == TM_OK, "%s", error.text);
    const double forecast = numbers.metric[TM_EXPERT_drop_forecast][0];
    CHECK(fabs(forecast - (6 + 0 + 4) / 13.0) < 1e-15, "%g", forecast);
    CHECK(isnan(numbers.metric[TM_EXPERT_drop_rate][0]), "nothing was measured");
    CHECK(isnan(numbers.metric[TM_EXPERT_drop_forecast][1]), "an empty layer");
}

/* Whole and broken counts, near each other and far apart, around the border of the two sorts. */
static void check_runs(void) {
    enum { MOST = 300 };
    static double counts[MOST], value[MOST + 1], times[MOST + 1], before[MOST + 1];
    static uint64_t keys[MOST], spare[MOST];
    const tm_moe_runs out = {value, times, before};
    const tm_moe_kernels *kernels = tm_table_get()->moe;
    for (int n = 1; n <= MOST; n += n < 40 ? 1 : 37) {
        for (int kind = 0; kind < 6; kind++) {
            for (int i = 0; i < n; i++) {
                const double random = (double)(next_random() >> 12); /* below 2^52 */
                counts[i] = kind == 0   ? fmod(random, 100)
                            : kind == 1 ? random
                            : kind == 2 ? random * 0x1p-40
                            : kind == 3 ? 9007199254740991.0 - fmod(random, 5)
                            : kind == 4 ? 0.0 * (i % 2 == 0 ? 1 : -1)
                                        : 1000 + fmod(random, 257);
            }
            const size_t runs = kernels->runs(&out, counts, (size_t)n, keys, spare);
            size_t seen = 0;
            for (size_t r = 0; r < runs; r++) {
                int same = 0, below = 0;
                for (int j = 0; j < n; j++) {
                    same += counts[j] == value[r];
                    below += counts[j] < value[r];
                }
                CHECK(same > 0 && same == times[r] && below == before[r] && !signbit(value[r]),
                      "kind %d, n %d, %g: %g times after %g", kind, n, value[r], times[r], before[r]);
                seen += (size_t)same;
            }
            CHECK(seen == (size_t)n && runs > 0, "kind %d: %zu of %d", kind, seen, n);
        }
    }
}

/* The logarithm against the C library's. */
static void check_log(void) {
    for (int i = 0; i < 3000; i++) {
        const double x = ldexp(1 + (double)(next_random() >> 12) * 0x1p-52, i % 500 - 400);
        CHECK(fabs(tm_moe_log(x) - log(x)) <= 4e-16 * fabs(log(x)) + 2e-16, "%a: %a", x, tm_moe_log(x));
    }
    CHECK(tm_moe_log(1) == 0 && 0 * tm_moe_log(0) == 0 && fabs(1e-310 * tm_moe_log(1e-310)) < 1e-300, "ends");
}

static void check_metrics(void) {
    static layer_memory memory, kept;
    static step_numbers numbers;
    double history[12][LAYERS * EXPERTS], pool[EXPERTS], dropped[LAYERS] = {3, 0, 1};
    uint64_t digest = DIGEST_START, random = 12345;
    tm_error error = {""};
    memset(&memory, 0, sizeof memory);
    for (int s = 0; s < 12; s++) {
        for (int i = 0; i < LAYERS * EXPERTS; i++) {
            random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            history[s][i] = i / EXPERTS == 1 && s == 5 ? 0 : (double)(random >> 60) * (double)(i % 7);
        }
        CHECK(step(&memory, history[s], dropped, NULL, &numbers, &error) == TM_OK, "%s", error.text);
        digest_numbers(&digest, &numbers);
        CHECK(fabs(numbers.metric[TM_EXPERT_max_vio][0] - max_vio(history[s])) < 1e-12, "step %d", s);
        memset(pool, 0, sizeof pool);
        for (int back = 0; back < WINDOW && back <= s; back++) {
            for (int e = 0; e < EXPERTS; e++) {
                pool[e] += history[s - back][e];
            }
        }
        CHECK(fabs(numbers.metric[TM_EXPERT_max_vio_window][0] - max_vio(pool)) < 1e-12, "step %d", s);
        CHECK(memory.dead[0] == s + 1 && memory.dead[7] == s + 1, "expert 0 has no weight");
        CHECK(isnan(numbers.metric[TM_EXPERT_churn][1]) == (s == 0 || s == 5), "step %d", s);
    }
    CHECK(memory.steps[0] == 12 && memory.steps[1] == 11, "steps");
    check_digest("expert_metrics", digest, UINT64_C(0x7c47960d3335efca));

    kept = memory;
    history[0][EXPERTS + 3] = -1;
    CHECK(step(&memory, history[0], NULL, NULL, &numbers, &error) == TM_ERR_VALUE, "a negative count");
    history[0][EXPERTS + 3] = NAN;
    CHECK(step(&memory, history[0], NULL, NULL, &numbers, &error) == TM_ERR_VALUE, "a NaN");
    CHECK(step(&memory, history[1], NULL, history[0], &numbers, &error) == TM_ERR_VALUE, "a group's NaN");
    dropped[2] = 1e9;
    CHECK(step(&memory, history[1], dropped, NULL, &numbers, &error) == TM_ERR_VALUE, "too many drops");
    memory.steps[1] = -1;
    CHECK(step(&memory, history[1], NULL, NULL, &numbers, &error) == TM_ERR_VALUE, "a negative step");
    memory.steps[1] = kept.steps[1];
    allocations_left = 0;
    tm_memory_set_allocator(failing);
    CHECK(step(&memory, history[1], NULL, NULL, &numbers, &error) == TM_ERR_MEMORY, "no memory");
    tm_memory_set_allocator(NULL);
    CHECK(memcmp(&kept, &memory, sizeof memory) == 0, "a refused step leaves the state alone");
    check_groups(&memory);
}

static void check_bits(const test_lists *lists) {
    tm_error error = {""};
    int64_t invalid = 0;
    uint64_t digest = DIGEST_START, random = 1;
    for (int64_t i = 0; i < N; i++) {
        random = random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        int16_t id = (int16_t)(random >> 52 & 0x1ff);
        memcpy(lists->data + i * 2, &id, 2);
    }
    tm_view view = flat(lists->data, N, TM_I16);
    CHECK(tm_expert_load(&view, 1, 300, 0, 1, lists->counts, &invalid, &error) == TM_OK, "%s", error.text);
    digest_integers(&digest, lists->counts, 300);
    digest_integers(&digest, &invalid, 1);
    check_digest("expert_load", digest, UINT64_C(0xa542a35809360b58));
}

void test_moe(void) {
    size_t words = VIEWS * (70000 + 1);
    test_lists lists = {malloc(words * 8), malloc(words * 8), malloc((size_t)N * 8)};
    if (lists.expected == NULL || lists.counts == NULL || lists.data == NULL) {
        CHECK(0, "no memory for the test");
        goto done;
    }
    tm_dispatch_set_worker_bytes(1000);
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
            for (size_t e = 0; e < sizeof experts_of / sizeof *experts_of; e++) {
                if (sampled()) {
                    check_dtype(dtypes[d], experts_of[e], &lists);
                }
            }
        }
        check_bits(&lists);
        check_common();
        check_metrics();
        check_runs();
        check_log();
    }
    tm_dispatch_init(NULL);
    check_allocations(&lists);
    tm_dispatch_set_worker_bytes((size_t)16 << 20);
    check_refusals();
done:
    free(lists.expected);
    free(lists.counts);
    free(lists.data);
}
