/* Attention logits: the row pass against libm, whole calls against sums over all scores, every allocation
 * failed once, a digest of results for all tiers and machines. */
#include "../core/tm_attention.h"
#include "../core/tm_memory.h"
#include "../core/tm_table.h"
#include "digest.h"
#include "runner.h"

#include <math.h>
#include <stdlib.h>

static const tm_attention_kernels *kernels(void) {
    return tm_table_get()->attention;
}

static float uniform(double low, double high) {
    return (float)(low + (high - low) * (double)(next_random() >> 11) * 0x1p-53);
}

static int near(double value, double expected, double relative) {
    return same_double(value, expected) || fabs(value - expected) <= relative * fabs(expected);
}

/* ---- the pass ---- */

static void check_exponential(void) {
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        const float x = i % 2 ? uniform(-20, 0) : -expf(uniform(-60, 4));
        tm_attention_row row = {.max = 0, .sum = 0};
        kernels()->row(&row, &x, 1);
        const double error = fabs(row.sum / exp((double)x) - 1) / (2e-7 + fabs((double)x) * 0x1p-23);
        worst = error > worst ? error : worst;
    }
    CHECK(worst < 1, "error %g of its bound", worst);
    static const float special[][2] = {{0, 1}, {-0.0f, 1}, {-90, 0}, {-3e38f, 0}, {-INFINITY, 0}};
    for (size_t i = 0; i < sizeof special / sizeof special[0]; i++) {
        tm_attention_row row = {.max = 0, .sum = 0};
        kernels()->row(&row, &special[i][0], 1);
        CHECK(row.sum + 1.0 == (double)special[i][1] + 1.0, "exp(%g) is %g", (double)special[i][0], row.sum);
    }
}

static void check_row(const float *scores, size_t n, size_t first, const char *what) {
    tm_attention_row row = {.max = -INFINITY};
    double max = -INFINITY, sum = 0;
    int nan = 0;
    for (size_t i = 0; i < n; i++) {
        nan |= isnan(scores[i]) != 0;
        max = (double)scores[i] > max ? (double)scores[i] : max;
    }
    for (size_t i = 0; i < n; i++) {
        sum += max > -INFINITY ? exp((double)scores[i] - max) : 0.0;
    }
    kernels()->row(&row, scores, first);
    kernels()->row(&row, scores + first, n - first);
    CHECK(row.nan == nan, "%s, n %d, first %d: nan %d", what, (int)n, (int)first, row.nan);
    CHECK(nan || (double)row.max == max, "%s, n %d, first %d: max %g", what, (int)n, (int)first,
          (double)row.max);
    if (!nan && max < INFINITY) {
        CHECK(near(row.sum, sum, 1e-6), "%s, n %d, first %d: %.9g, not %.9g", what, (int)n, (int)first,
              row.sum, sum);
        CHECK(max == -INFINITY || (row.sum >= 1 && row.sum <= (double)n), "%s, n %d: %g", what, (int)n,
              row.sum);
    }
}

static void check_rows(void) {
    static float scores[1 + 2100];
    static const size_t lengths[] = {511, 512, 513, 1000, 2048, 2100};
    for (int kind = 0; kind < 4; kind++) {
        for (size_t i = 0; i < sizeof scores / sizeof *scores; i++) {
            scores[i] = kind == 0   ? uniform(-5, 5)
                        : kind == 1 ? uniform(-300, 300)
                        : kind == 2 ? (float)i * 0.25f
                                    : (i % 7 == 0 ? -INFINITY : uniform(-2000, -1990));
        }
        for (size_t n = 0; n < 100; n++) {
            check_row(scores + n % 2, n, n / 3, "short");
        }
        for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            check_row(scores + 1, lengths[i], i * 37, "long");
        }
    }
    static const float special[3] = {NAN, INFINITY, -INFINITY};
    for (size_t place = 0; place < 130; place++) {
        for (int kind = 0; kind < 4; kind++) {
            for (size_t i = 0; i < 130; i++) {
                scores[i] = kind == 3 ? -INFINITY : uniform(-5, 5);
            }
            scores[place] = special[kind % 3];
            check_row(scores, 130, place / 2, "special");
            if (kind == 1) {
                scores[129 - place] = NAN;
                check_row(scores, 130, 70, "infinity and NaN");
            }
        }
    }
    /* a NaN whose payload could turn into a number when an exponent is added */
    const uint32_t payload = UINT32_C(0x7fc00001);
    memcpy(&scores[3], &payload, sizeof payload);
    check_row(scores, 130, 0, "payload");
}

static void check_cap(void) {
    static float scores[1000], before[1000];
    for (int turn = 0; turn < 60; turn++) {
        const float cap = turn % 3 == 0 ? 30.0f : turn % 3 == 1 ? 0.01f : 1e6f;
        const size_t n = (size_t)(turn < 40 ? turn : 1000);
        double sum = 0, magnitudes = 0;
        for (size_t i = 0; i < n; i++) {
            before[i] = scores[i] = cap * (i % 2 ? expf(uniform(-30, 4)) : -expf(uniform(-3, 1)));
        }
        const double total = kernels()->cap(scores, n, cap);
        for (size_t i = 0; i < n; i++) {
            const double expected = (double)cap * tanh((double)before[i] / (double)cap);
            CHECK(near((double)scores[i], expected, 5e-7), "cap %g: %g becomes %g, not %g", (double)cap,
                  (double)before[i], (double)scores[i], expected);
            sum += (double)scores[i];
            magnitudes += fabs((double)scores[i]);
        }
        CHECK(fabs(total - sum) <= 1e-13 * magnitudes, "sum %g, not %g", total, sum);
    }
    float special[3] = {INFINITY, -INFINITY, NAN};
    kernels()->cap(special, 3, 2.0f);
    CHECK(special[0] == 2.0f && special[1] == -2.0f && isnan(special[2]), "%g %g %g", (double)special[0],
          (double)special[1], (double)special[2]);
}

/* ---- whole calls ---- */

#define MOST_ROWS 700
#define MOST_KEYS 1300
#define HEADS 6
#define KEY_HEADS 2
#define BATCHES 2
#define DEPTH 5

typedef struct problem {
    float q[BATCHES * HEADS * MOST_ROWS * DEPTH], k[BATCHES * KEY_HEADS * MOST_KEYS * DEPTH];
    int64_t bounds[BATCHES * MOST_ROWS * 2], kept[BATCHES * MOST_KEYS], starts[BATCHES + 1], rows[MOST_ROWS];
    int64_t q_shape[4], k_shape[4];
    double sinks[HEADS];
    unsigned char heads[HEADS];
    tm_attention input;
} problem;

static void make_problem(problem *p, int64_t queries, int64_t keys, int kept, int sampled_rows) {
    for (size_t i = 0; i < sizeof p->q / sizeof *p->q; i++) {
        p->q[i] = uniform(-3, 3);
    }
    for (size_t i = 0; i < sizeof p->k / sizeof *p->k; i++) {
        p->k[i] = uniform(-2, 3);
    }
    const int64_t q_shape[4] = {BATCHES, HEADS, queries, DEPTH},
                  k_shape[4] = {BATCHES, KEY_HEADS, keys, DEPTH};
    memcpy(p->q_shape, q_shape, sizeof q_shape);
    memcpy(p->k_shape, k_shape, sizeof k_shape);
    p->input = (tm_attention){.q = {.data = p->q,
                                    .shape = p->q_shape,
                                    .n = BATCHES * HEADS * queries * DEPTH,
                                    .ndim = 4,
                                    .dtype = TM_F32},
                              .k = {.data = p->k,
                                    .shape = p->k_shape,
                                    .n = BATCHES * KEY_HEADS * keys * DEPTH,
                                    .ndim = 4,
                                    .dtype = TM_F32},
                              .row_count = queries,
                              .mask_batches = BATCHES,
                              .bounds = p->bounds,
                              .scale = 0.7,
                              .scores = 1,
                              .threads = 1};
    if (sampled_rows) {
        p->input.row_count = 0;
        for (int64_t i = 0; i < queries; i += 3) {
            p->rows[p->input.row_count++] = i;
        }
        p->input.rows = p->rows;
    }
    for (int64_t b = 0; b < BATCHES; b++) {
        int64_t count = 0;
        for (int64_t j = 0; kept && j < keys; j++) {
            if (next_random() % 3 > 0) {
                p->kept[p->starts[b] + count++] = j;
            }
        }
        p->starts[b + 1] = p->starts[b] + count;
        count = kept ? count : keys;
        for (int64_t i = 0; i < p->input.row_count; i++) {
            int64_t *bounds = &p->bounds[2 * (b * p->input.row_count + i)];
            const int64_t end = count * (i + 1) / p->input.row_count;
            bounds[0] = b == 0 || i % 5 == 4 ? 0 : end / 2;
            bounds[1] = i % 11 == 10 ? bounds[0] : end;
        }
    }
    p->input.kept = kept ? p->kept : NULL;
    p->input.kept_starts = kept ? p->starts : NULL;
    for (int h = 0; h < HEADS; h++) {
        p->sinks[h] = (double)uniform(-2, 2);
        p->heads[h] = h != 1;
    }
}

static void reference(const problem *p, tm_attention_sums *out) {
    const tm_attention *in = &p->input;
    const int64_t queries = p->q_shape[2], keys = p->k_shape[2];
    for (int64_t h = 0; h < HEADS; h++) {
        out[h] = (tm_attention_sums){.max = -INFINITY};
        for (int64_t row = 0; row < BATCHES * in->row_count; row++) {
            if (in->heads != NULL && !in->heads[h]) {
                break;
            }
            const int64_t b = row / in->row_count, i = row % in->row_count;
            const int64_t query = in->rows != NULL ? in->rows[i] : i;
            const float *q = p->q + ((b * HEADS + h) * queries + query) * DEPTH;
            double z[MOST_KEYS + 1], max = -INFINITY, l = 0, sum = 0;
            int64_t n = 0;
            for (int64_t j = in->bounds[2 * row]; j < in->bounds[2 * row + 1]; j++, n++) {
                const int64_t key = in->kept != NULL ? in->kept[p->starts[b] + j] : j;
                const float *k = p->k + ((b * KEY_HEADS + h / (HEADS / KEY_HEADS)) * keys + key) * DEPTH;
                double dot = 0;
                for (int c = 0; c < DEPTH; c++) {
                    dot += (double)q[c] * (double)k[c];
                }
                z[n] = in->scale * dot;
                z[n] = in->cap > 0 ? in->cap * tanh(z[n] / in->cap) : z[n];
            }
            if (n == 0) {
                out[h].empty_rows++;
                continue;
            }
            if (in->sinks != NULL) {
                z[n++] = in->sinks[h];
            }
            for (int64_t j = 0; j < n; j++) {
                max = z[j] > max ? z[j] : max;
                sum += z[j];
            }
            for (int64_t j = 0; j < n; j++) {
                l += exp(z[j] - max);
            }
            out[h].max = max > out[h].max ? max : out[h].max;
            out[h].rows++;
            out[h].sum_l += l;
            out[h].sum_l2 += l * l;
            out[h].sum_m += max;
            out[h].sum_inv_l += 1 / l;
            out[h].sum_norm += n > 1 ? (l - 1) / (double)(n - 1) : 0;
            out[h].norm_rows += n > 1;
            out[h].sum_z += sum;
            out[h].keys += (double)n;
        }
    }
}

static void run_problem(const problem *p, tm_attention_sums *out) {
    tm_error error = {""};
    const tm_status status = tm_attention_logits(&p->input, NULL, out, &error);
    CHECK(status == TM_OK, "%s", error.text);
}

static void check_problem(problem *p, const char *what) {
    tm_attention_sums found[HEADS], expected[HEADS], threaded[HEADS];
    run_problem(p, found);
    reference(p, expected);
    for (int h = 0; h < HEADS; h++) {
#define SAME(name)                                                                                           \
    CHECK(near(found[h].name, expected[h].name, 2e-5) ||                                                     \
              fabs(found[h].name - expected[h].name) < 2e-6 * found[h].keys,                                 \
          "%s, head %d: " #name " %.9g, not %.9g", what, h, found[h].name, expected[h].name);
        TM_ATTENTION_FIELDS(SAME)
#undef SAME
    }
    p->input.threads = 3;
    run_problem(p, threaded);
    p->input.threads = 1;
    CHECK(memcmp(found, threaded, sizeof found) == 0, "%s: threads", what);
    if (p->input.cap == 0) {
        p->input.scores = 0;
        run_problem(p, found);
        p->input.scores = 1;
        for (int h = 0; h < HEADS; h++) {
            CHECK(near(found[h].sum_z, expected[h].sum_z, 1e-9) && found[h].keys == expected[h].keys,
                  "%s, head %d: %.17g over %g", what, h, found[h].sum_z, found[h].keys);
        }
    }
}

static void make_options(problem *p, int64_t queries, int64_t keys, int options) {
    make_problem(p, queries, keys, options & 1, options & 2);
    p->input.cap = options & 4 ? 3.0 : 0.0;
    p->input.sinks = options & 8 ? p->sinks : NULL;
    p->input.heads = options & 8 ? p->heads : NULL;
}

static void check_calls(problem *p) {
    static const int64_t sizes[][2] = {{1, 1}, {7, 30}, {40, 0}, {300, 600}, {700, 1300}};
    for (int size = 0; size < 5; size++) {
        for (int options = 0; options < 16; options += (size < 3 ? 1 : 5) * (sampled() > 1 ? 3 : 1)) {
            char what[80];
            make_options(p, sizes[size][0], sizes[size][1], options);
            snprintf(what, sizeof what, "%d rows, %d keys, options %d", (int)sizes[size][0],
                     (int)sizes[size][1], options);
            check_problem(p, what);
        }
    }
}

static void check_bits(problem *p) {
    static float scores[1000];
    uint64_t calls = DIGEST_START, rows = DIGEST_START;
    const uint64_t before = seed_random(1);
    for (int options = 0; options < 16; options++) {
        tm_attention_sums out[HEADS];
        make_options(p, 60, 700, options);
        run_problem(p, out);
        for (int h = 0; h < HEADS; h++) {
#define DIGEST(name) digest_doubles(&calls, &out[h].name, 1);
            TM_ATTENTION_FIELDS(DIGEST)
#undef DIGEST
        }
    }
    for (int turn = 0; turn < 200; turn++) {
        tm_attention_row row = {.max = -INFINITY};
        for (int i = 0; i < 1000; i++) {
            scores[i] = uniform(-turn, turn);
        }
        kernels()->row(&row, scores, 700);
        kernels()->row(&row, scores + 700, 300);
        const double found[] = {row.sum, (double)row.max, kernels()->cap(scores, 1000, 7.0f)};
        digest_doubles(&rows, found, 3);
        digest_floats(&rows, scores, 1000);
    }
    seed_random(before);
    check_digest("attention_logits", calls, UINT64_C(0x420a1b741345286b));
    check_digest("attention rows", rows, UINT64_C(0x7360787857f2bdc7));
}

/* ---- errors and memory ---- */

static int allowed;

static void *failing(size_t bytes) {
    return allowed-- > 0 ? malloc(bytes) : NULL;
}

static void check_memory(problem *p) {
    tm_attention_sums out[HEADS];
    make_problem(p, 300, 600, 1, 0);
    for (int calls = 0;; calls++) { /* bundles, status, sums, means, two scratch areas */
        tm_error error = {""};
        allowed = calls;
        tm_memory_set_allocator(failing);
        const tm_status status = tm_attention_logits(&p->input, NULL, out, &error);
        tm_memory_set_allocator(NULL);
        if (status == TM_OK) {
            CHECK(calls == 6, "%d allocations", calls);
            break;
        }
        CHECK(status == TM_ERR_MEMORY && error.text[0] != '\0', "%d allocations: %d", calls, (int)status);
    }
}

static void check_errors(problem *p) {
    static const tm_dtype no_floats[] = {TM_I8, TM_I64, TM_BOOL};
    tm_attention_sums out[HEADS];
    tm_error error = {""};
#define REFUSED(status, change)                                                                              \
    make_problem(p, 30, 60, 1, 0);                                                                           \
    change;                                                                                                  \
    error.text[0] = '\0';                                                                                    \
    CHECK(tm_attention_logits(&p->input, NULL, out, &error) == status && error.text[0] != '\0', #change);
    for (int i = 0; i < 3; i++) {
        REFUSED(TM_ERR_DTYPE, p->input.q.dtype = no_floats[i])
        REFUSED(TM_ERR_DTYPE, p->input.k.dtype = no_floats[i])
    }
    REFUSED(TM_ERR_VALUE, p->input.q.ndim = 2)
    REFUSED(TM_ERR_VALUE, p->input.k.ndim = 3)
    REFUSED(TM_ERR_VALUE, p->q_shape[0]++)
    REFUSED(TM_ERR_VALUE, p->q_shape[1]++)
    REFUSED(TM_ERR_VALUE, p->k_shape[3]++)
    REFUSED(TM_ERR_VALUE, p->k_shape[1] = 0)
    REFUSED(TM_ERR_VALUE, p->q_shape[3] = p->k_shape[3] = 0)
    REFUSED(TM_ERR_VALUE, p->input.mask_batches = 3)
    REFUSED(TM_ERR_VALUE, p->input.row_count--)
    REFUSED(TM_ERR_VALUE, p->bounds[7] = 61)
    REFUSED(TM_ERR_VALUE, p->bounds[4] = -1)
    REFUSED(TM_ERR_VALUE, p->bounds[6] = p->bounds[7] + 1)
    REFUSED(TM_ERR_VALUE, p->kept[3] = p->kept[2])
    REFUSED(TM_ERR_VALUE, p->kept[0] = -1)
    REFUSED(TM_ERR_VALUE, p->kept[p->starts[1] - 1] = 60)
    REFUSED(TM_ERR_VALUE, p->starts[1] = -1)
    REFUSED(TM_ERR_VALUE, p->input.scale = (double)NAN)
    REFUSED(TM_ERR_VALUE, p->input.scale = 1e-60)
    REFUSED(TM_ERR_VALUE, p->input.cap = -1)
#undef REFUSED
}

void test_attention(void) {
    static problem p;
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        check_exponential();
        check_rows();
        check_cap();
        check_calls(&p);
        check_bits(&p);
        check_memory(&p);
        check_errors(&p);
    }
}
