/* compare: two lists read side by side, panel by panel: a block of both, widened, in the first cache. */
#include "tm_compare.h"

#include "tm_pair.h"
#include "tm_rescue.h"
#include "tm_wide.h"
#include "tm_work.h"

#include <math.h>
#include <string.h>

_Static_assert(TM_COMPARE_ROOM * 8 == TM_PAIR_BYTES, "a block of any dtype fits into its scratch");

/* ---- records ---- */

static void merge_compare(tm_record *left, const tm_record *right) {
    tm_compare_record *a = &left->compare;
    const tm_compare_record *b = &right->compare;
    a->sum_abs += b->sum_abs;
    a->error_sq = tm_scaled_add(a->error_sq, b->error_sq);
    a->a_sq = tm_scaled_add(a->a_sq, b->a_sq);
    a->b_sq = tm_scaled_add(a->b_sq, b->b_sq);
    a->dot = tm_scaled_add(a->dot, b->dot);
    if (b->max_abs > a->max_abs) {
        a->max_abs = b->max_abs;
        a->max_abs_index = b->max_abs_index;
    }
    if (b->max_rel > a->max_rel) {
        a->max_rel = b->max_rel;
        a->max_rel_index = b->max_rel_index;
    }
    a->max_ulp = b->max_ulp > a->max_ulp ? b->max_ulp : a->max_ulp;
    a->first_difference = a->first_difference >= 0 ? a->first_difference : b->first_difference;
}

static const tm_compare_record nothing = {.max_abs_index = -1, .max_rel_index = -1, .first_difference = -1};

/* dot / sqrt(a_sq * b_sq) in any range; exactly 1 where the three are equal. */
static double cosine(tm_scaled dot, tm_scaled a_sq, tm_scaled b_sq) {
    int dot_power, a_power, b_power;
    double fraction = frexp(dot.value, &dot_power), a = frexp(a_sq.value, &a_power);
    double b = frexp(b_sq.value, &b_power);
    if (!(a > 0 && b > 0)) {
        return NAN;
    }
    int64_t powers = a_power + b_power + 2 * (a_sq.exponent + b_sq.exponent);
    int odd = (int)(powers & 1);
    int64_t power = dot_power + 2 * dot.exponent - (powers - odd) / 2;
    double value = ldexp(fraction / sqrt(ldexp(a * b, odd)), (int)(power < -5000 ? -5000 : power));
    return value > 1 ? 1 : value < -1 ? -1 : value;
}

static double rms(tm_scaled sumsq, int64_t n) {
    return ldexp(sqrt(sumsq.value / (double)n), (int)sumsq.exponent);
}

/* Everything that follows from the counts and the sums. */
static void derive(tm_comparison *c) {
    c->n_finite = c->n - c->n_nan_both - c->n_nan_a - c->n_nan_b - c->n_inf_same - c->n_inf_opposite -
                  c->n_inf_a - c->n_inf_b;
    double n = (double)c->n_finite;
    c->max_abs = c->n_finite > 0 ? c->max_abs : (double)NAN;
    c->max_rel = c->n_finite > c->n_zero_reference ? c->max_rel : (double)NAN;
    c->mean_abs = c->sum_abs / n;
    c->rms_error = rms(c->error_sq, c->n_finite);
    c->rms_a = rms(c->a_sq, c->n_finite);
    c->rms_b = rms(c->b_sq, c->n_finite);
    c->norm_error = tm_scaled_root(c->error_sq);
    c->norm_a = tm_scaled_root(c->a_sq);
    c->norm_b = tm_scaled_root(c->b_sq);
    c->cosine = cosine(c->dot, c->a_sq, c->b_sq);
}

static const tm_comparison_place nowhere = {-1, -1, NAN, NAN};

static void take_sums(tm_comparison *c, const tm_compare_record *record) {
    c->max_ulp = record->max_ulp;
    c->max_abs = record->max_abs;
    c->max_rel = record->max_rel;
    c->sum_abs = record->sum_abs;
    c->error_sq = record->error_sq;
    c->a_sq = record->a_sq;
    c->b_sq = record->b_sq;
    c->dot = record->dot;
}

void tm_merge_comparisons(const tm_comparison *records, size_t count, tm_comparison *total) {
    tm_tree tree;
    tm_tree_init(&tree, merge_compare);
    memset(total, 0, sizeof *total);
    total->first_difference = total->max_abs_at = total->max_rel_at = nowhere;
    for (size_t i = 0; i < count; i++) {
        const tm_comparison *r = &records[i];
        /* in the total an index is that of the record that has the place */
        tm_record record = {.compare = {.sum_abs = r->sum_abs,
                                        .error_sq = r->error_sq,
                                        .a_sq = r->a_sq,
                                        .b_sq = r->b_sq,
                                        .dot = r->dot,
                                        .max_abs = r->max_abs,
                                        .max_rel = r->max_rel,
                                        .max_abs_index = (int64_t)i,
                                        .max_rel_index = (int64_t)i,
                                        .first_difference = r->first_difference.index < 0 ? -1 : (int64_t)i,
                                        .max_ulp = r->max_ulp}};
        if (isnan(r->max_abs)) {
            record.compare.max_abs = 0;
        }
        if (isnan(r->max_rel)) {
            record.compare.max_rel = 0;
        }
        tm_tree_push(&tree, &record, (int64_t)i, 1);
        total->n += r->n;
        total->n_identical += r->n_identical;
        total->n_zero_sign += r->n_zero_sign;
        total->n_zero_reference += r->n_zero_reference;
        total->n_nan_both += r->n_nan_both;
        total->n_nan_a += r->n_nan_a;
        total->n_nan_b += r->n_nan_b;
        total->n_inf_same += r->n_inf_same;
        total->n_inf_opposite += r->n_inf_opposite;
        total->n_inf_a += r->n_inf_a;
        total->n_inf_b += r->n_inf_b;
        for (int bin = 0; bin < TM_ULP_BINS; bin++) {
            total->ulp[bin] += r->ulp[bin];
        }
    }
    const tm_record *sum = tm_tree_finish(&tree);
    if (sum != NULL) {
        const tm_compare_record *record = &sum->compare;
        take_sums(total, record);
        if (record->first_difference >= 0) {
            total->first_difference = records[record->first_difference].first_difference;
            total->first_difference.tensor = record->first_difference;
        }
        if (record->max_abs > 0) {
            total->max_abs_at = records[record->max_abs_index].max_abs_at;
            total->max_abs_at.tensor = record->max_abs_index;
        }
        if (record->max_rel > 0) {
            total->max_rel_at = records[record->max_rel_index].max_rel_at;
            total->max_rel_at.tensor = record->max_rel_index;
        }
    }
    derive(total);
}

/* ---- panels ---- */

/* A tensor and its reference. */
typedef struct compare_job {
    const tm_table *table;
    tm_dtype a_dtype, b_dtype;
    int exact; /* no product of two elements is rounded */
    int has_grid;
    tm_ulp_grid grid; /* of mixed dtypes, one of which is a float */
    tm_pair pair;
} compare_job;

/* What a worker finds in its part of a tensor, apart from the sums of chunks. */
typedef struct findings {
    tm_compare_worst worst;
    tm_comparison counts; /* n_identical, n_zero_sign and the pairs that are not finite */
    int64_t first_difference;
} findings;

/* A block of both and its elements as doubles. */
typedef struct panel {
    tm_pair_block block;
    const double *x, *y; /* the block itself, or the arrays below */
    _Alignas(64) double wide_x[TM_COMPARE_ROOM], wide_y[TM_COMPARE_ROOM];
} panel;

/* n elements as doubles and zeros to the end of the last row. */
static const double *widen(const tm_table *table, tm_dtype dtype, const void *data, int64_t n,
                           double *buffer) {
    if (dtype == TM_F64 && n % TM_LANES == 0) {
        return data;
    }
    table->widen->to_f64[dtype](buffer, data, (size_t)n, tm_byte_values(dtype));
    for (int64_t i = n; i % TM_LANES != 0; i++) {
        buffer[i] = 0;
    }
    return buffer;
}

static int one_dtype(const compare_job *job) {
    return job->a_dtype == job->b_dtype;
}

/* Whether the bits of a pair are equal; of mixed dtypes the value and the sign of zero, or both are NaN. */
static int identical(const compare_job *job, const panel *p, size_t i) {
    size_t size = job->pair.a.item;
    if (one_dtype(job)) {
        return memcmp((const char *)p->block.a + i * size, (const char *)p->block.b + i * size, size) == 0;
    }
    return isnan(p->x[i]) ? isnan(p->y[i]) : p->x[i] == p->y[i] && !signbit(p->x[i]) == !signbit(p->y[i]);
}

static void count_nonfinite(tm_comparison *counts, double x, double y) {
    if (isnan(x) || isnan(y)) {
        counts->n_nan_both += isnan(x) && isnan(y);
        counts->n_nan_a += isnan(x) && !isnan(y);
        counts->n_nan_b += isnan(y) && !isnan(x);
    } else if (isinf(x) && isinf(y)) {
        counts->n_inf_same += x == y;
        counts->n_inf_opposite += x != y;
    } else {
        counts->n_inf_a += isinf(x) != 0;
        counts->n_inf_b += isinf(y) != 0;
    }
}

/* Takes the pairs that are not finite out of a panel: counted, then zeros in copies. Returns their number;
 * those that are identical are counted in n_identical. */
static int64_t take_out_nonfinite(const compare_job *job, panel *p, tm_comparison *counts) {
    tm_pair_block *block = &p->block;
    size_t n = (size_t)block->n, a_size = job->pair.a.item, b_size = job->pair.b.item;
    int64_t taken = 0;
    memmove(block->a_scratch, block->a, n * a_size);
    memmove(block->b_scratch, block->b, n * b_size);
    memmove(p->wide_x, p->x, n * sizeof(double));
    memmove(p->wide_y, p->y, n * sizeof(double));
    block->a = block->a_scratch;
    block->b = block->b_scratch;
    p->x = p->wide_x;
    p->y = p->wide_y;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(p->x[i]) || !isfinite(p->y[i])) {
            count_nonfinite(counts, p->x[i], p->y[i]);
            counts->n_identical += identical(job, p, i);
            p->wide_x[i] = p->wide_y[i] = 0;
            memset(block->a_scratch + i * a_size, 0, a_size);
            memset(block->b_scratch + i * b_size, 0, b_size);
            taken++;
        }
    }
    return taken;
}

static void take_panel(const compare_job *job, int64_t start, int64_t rest, panel *p) {
    tm_pair_take(&job->pair, start, rest, TM_COMPARE_ROOM, &p->block);
}

static void widen_panel(const compare_job *job, panel *p) {
    p->x = widen(job->table, job->a_dtype, p->block.a, p->block.n, p->wide_x);
    p->y = widen(job->table, job->b_dtype, p->block.b, p->block.n, p->wide_y);
}

/* 1 if all bits are equal and all elements finite: nothing but the squares is left to do. */
static int add_identical(const compare_job *job, panel *p, tm_compare_sums *sums, findings *found) {
    size_t n = (size_t)p->block.n;
    if (!one_dtype(job) || memcmp(p->block.a, p->block.b, n * job->pair.a.item) != 0) {
        return 0;
    }
    p->x = widen(job->table, job->a_dtype, p->block.a, p->block.n, p->wide_x);
    if (!job->table->compare->add_same(sums, p->x, n, job->exact)) {
        return 0;
    }
    found->counts.n_identical += p->block.n;
    found->worst.ulp[0] += p->block.n;
    return 1;
}

static void add_panel(const compare_job *job, panel *p, int64_t start, tm_compare_sums *sums,
                      findings *found) {
    const tm_compare_kernels *kernels = job->table->compare;
    size_t n = (size_t)p->block.n;
    int64_t taken = 0;

    kernels->prefetch(p->block.a, p->block.b, n * job->pair.a.item, n * job->pair.b.item);
    if (add_identical(job, p, sums, found)) {
        return;
    }
    widen_panel(job, p);
    for (size_t i = 0; i < n && found->first_difference < 0; i++) {
        if (!identical(job, p, i)) {
            found->first_difference = start + (int64_t)i;
        }
    }
    if (!kernels->add(sums, &found->worst, p->x, p->y, n, start, job->exact, 0)) {
        taken = take_out_nonfinite(job, p, &found->counts);
        kernels->add(sums, &found->worst, p->x, p->y, n, start, job->exact, 1);
    }
    tm_compare_equal equal =
        one_dtype(job)
            ? kernels->ulp[job->a_dtype](&found->worst, p->block.a, p->block.b, n)
            : kernels->ulp_between(&found->worst, p->x, p->y, n, job->has_grid ? &job->grid : NULL);
    found->worst.ulp[0] -= taken;
    found->counts.n_identical += equal.bits - taken;
    found->counts.n_zero_sign += one_dtype(job) && job->a_dtype == TM_BOOL ? 0 : equal.values - equal.bits;
}

/* ---- float64 beyond its range ---- */

typedef struct magnitudes {
    double a, b, error;
} magnitudes;

/* Squares and products of scaled elements of the chunk's finite pairs, in lanes; with factors of 0 only the
 * largest magnitudes, which come back in *largest. */
static void read_scaled(const compare_job *job, int64_t start, int64_t count, magnitudes factor,
                        double totals[4], magnitudes *largest) {
    double lane[4][TM_LANES] = {{0}};
    tm_comparison ignored = {.n = 0};
    panel p;
    for (int64_t done = 0; done < count; done += p.block.n) {
        take_panel(job, start + done, count - done, &p);
        widen_panel(job, &p);
        take_out_nonfinite(job, &p, &ignored);
        for (int64_t i = 0; i < p.block.n; i++) {
            double error = p.x[i] - p.y[i];
            double a = p.x[i] * factor.a, b = p.y[i] * factor.b, e = error * factor.error;
            double terms[4] = {e * e, a * a, b * b, a * b};
            for (int k = 0; k < 4; k++) {
                lane[k][i % TM_LANES] += terms[k];
            }
            largest->a = fmax(largest->a, fabs(p.x[i]));
            largest->b = fmax(largest->b, fabs(p.y[i]));
            largest->error = fmax(largest->error, fabs(error));
        }
    }
    for (int k = 0; k < 4; k++) {
        for (int width = TM_LANES / 2; width > 0; width /= 2) {
            for (int l = 0; l < width; l++) {
                lane[k][l] += lane[k][l + width];
            }
        }
        totals[k] = lane[k][0];
    }
}

/* The exponent that a sum of squares is to be taken with; 0: its plain sum is good, or has no better. */
static int exponent_for(double sumsq, double largest) {
    return tm_needs_rescue(sumsq) && largest > 0 && isfinite(largest) ? tm_rescue_exponent(largest) : 0;
}

static void rescue(const compare_job *job, int64_t start, int64_t count, tm_compare_record *record) {
    magnitudes largest = {0, 0, 0};
    double totals[4];
    if (!tm_needs_rescue(record->a_sq.value) && !tm_needs_rescue(record->b_sq.value) &&
        (record->sum_abs == 0 || !tm_needs_rescue(record->error_sq.value))) {
        return;
    }
    read_scaled(job, start, count, (magnitudes){0, 0, 0}, totals, &largest);
    int error = exponent_for(record->error_sq.value, largest.error);
    int a = exponent_for(record->a_sq.value, largest.a), b = exponent_for(record->b_sq.value, largest.b);
    b += (a + b) % 2 == 0 ? 0 : b > 0 ? -1 : 1; /* the product's factor is to be a power of 4 */
    if (error == 0 && a == 0 && b == 0) {
        return;
    }
    read_scaled(job, start, count, (magnitudes){ldexp(1, -a), ldexp(1, -b), ldexp(1, -error)}, totals,
                &largest);
    record->error_sq = (tm_scaled){totals[0], error};
    record->a_sq = (tm_scaled){totals[1], a};
    record->b_sq = (tm_scaled){totals[2], b};
    record->dot = (tm_scaled){totals[3], (a + b) / 2};
}

/* ---- the reduction ---- */

static void read_chunk(const compare_job *job, int64_t start, int64_t count, findings *found,
                       tm_compare_record *record) {
    tm_compare_sums sums;
    double totals[5];
    panel p;
    memset(&sums, 0, sizeof sums);
    for (int64_t done = 0; done < count; done += p.block.n) {
        take_panel(job, start + done, count - done, &p);
        add_panel(job, &p, start + done, &sums, found);
    }
    job->table->compare->finish(&sums, totals);
    *record = nothing;
    record->sum_abs = totals[0];
    record->error_sq.value = totals[1];
    record->a_sq.value = totals[2];
    record->b_sq.value = totals[3];
    record->dot.value = totals[4];
    if (job->a_dtype == TM_F64 || job->b_dtype == TM_F64) {
        rescue(job, start, count, record);
    }
}

/* Mantissa bits and exponent of the smallest normal number. */
static const struct {
    int mantissa, exponent;
} formats[] = {
    [TM_F64] = {52, -1022}, [TM_F32] = {23, -126},         [TM_F16] = {10, -14},
    [TM_BF16] = {7, -126},  [TM_F8E4M3FN] = {3, -6},       [TM_F8E4M3FNUZ] = {3, -7},
    [TM_F8E5M2] = {2, -14}, [TM_F8E4M3B11FNUZ] = {3, -10}, [TM_F8E5M2FNUZ] = {2, -15},
    [TM_F8E4M3] = {3, -6},  [TM_F8E3M4] = {4, -2},         [TM_F8E8M0FNU] = {0, -127},
};

static int is_float(tm_dtype dtype) {
    return dtype <= TM_F8E8M0FNU;
}

/* The coarser of two floats: fewer mantissa bits, then the higher smallest normal number. */
static tm_dtype coarser(tm_dtype a, tm_dtype b) {
    if (!is_float(a) || !is_float(b)) {
        return is_float(a) ? a : b;
    }
    if (formats[a].mantissa != formats[b].mantissa) {
        return formats[a].mantissa < formats[b].mantissa ? a : b;
    }
    return formats[a].exponent > formats[b].exponent ? a : b;
}

static int has_exact_products(tm_dtype dtype) {
    return dtype != TM_F64 && (is_float(dtype) || tm_dtype_size(dtype) <= 2);
}

static void make_grid(compare_job *job) {
    tm_dtype dtype = coarser(job->a_dtype, job->b_dtype);
    job->has_grid = !one_dtype(job) && is_float(dtype);
    if (!job->has_grid) {
        return;
    }
    int mantissa = formats[dtype].mantissa, exponent = formats[dtype].exponent;
    int64_t first = exponent + 1022; /* a double's exponent field, less the one that its leading bit adds */
    job->grid = (tm_ulp_grid){.shift = 52 - mantissa, .origin = first << mantissa};
    if (mantissa < 52) { /* float64's codes are its bits: nothing to round, no smallest normal number */
        job->grid.half = (INT64_C(1) << (51 - mantissa)) - 1;
        job->grid.even = 1;
        job->grid.smallest_normal = ldexp(1, exponent);
        job->grid.scale = ldexp(1, mantissa - exponent);
    }
}

typedef struct compare_call {
    const tm_table *table;
    const tm_view *a, *b;
    tm_comparison *each; /* borrowed, [count] */
} compare_call;

/* Counts have no order, and several workers may read one tensor. */
static void add_counts(tm_comparison *to, const findings *found) {
    const tm_comparison *c = &found->counts;
    const struct {
        int64_t *to, count;
    } counts[] = {
        {&to->n_identical, c->n_identical},
        {&to->n_zero_sign, c->n_zero_sign},
        {&to->n_zero_reference, found->worst.n_zero_reference},
        {&to->n_nan_both, c->n_nan_both},
        {&to->n_nan_a, c->n_nan_a},
        {&to->n_nan_b, c->n_nan_b},
        {&to->n_inf_same, c->n_inf_same},
        {&to->n_inf_opposite, c->n_inf_opposite},
        {&to->n_inf_a, c->n_inf_a},
        {&to->n_inf_b, c->n_inf_b},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        __atomic_fetch_add(counts[i].to, counts[i].count, __ATOMIC_RELAXED);
    }
    for (int bin = 0; bin < TM_ULP_BINS; bin++) {
        if (found->worst.ulp[bin] != 0) {
            __atomic_fetch_add(&to->ulp[bin], found->worst.ulp[bin], __ATOMIC_RELAXED);
        }
    }
}

static void read_compare(const void *context, size_t tensor, int64_t first, int64_t chunks,
                         tm_record *record) {
    const compare_call *call = context;
    const tm_view *a = &call->a[tensor], *b = &call->b[tensor];
    compare_job job = {.table = call->table, .a_dtype = a->dtype, .b_dtype = b->dtype};
    findings found = {.worst = {.max_abs_index = -1, .max_rel_index = -1}, .first_difference = -1};
    tm_tree tree;

    record->compare = nothing;
    job.exact = has_exact_products(a->dtype) && has_exact_products(b->dtype);
    make_grid(&job);
    tm_pair_init(&job.pair, a, b);
    tm_tree_init(&tree, merge_compare);
    for (int64_t chunk = first; chunk < first + chunks; chunk++) {
        int64_t start = chunk * TM_CHUNK, rest = a->n - start;
        read_chunk(&job, start, rest < TM_CHUNK ? rest : TM_CHUNK, &found, &record->compare);
        if (chunks > 1) {
            tm_tree_push(&tree, record, chunk, 1);
        }
    }
    if (chunks > 1) {
        *record = *tm_tree_finish(&tree);
    }
    record->compare.max_abs = found.worst.max_abs;
    record->compare.max_rel = found.worst.max_rel;
    record->compare.max_abs_index = found.worst.max_abs_index;
    record->compare.max_rel_index = found.worst.max_rel_index;
    record->compare.max_ulp = found.worst.max_ulp;
    record->compare.first_difference = found.first_difference;
    add_counts(&call->each[tensor], &found);
}

static tm_comparison_place place_at(const compare_call *call, size_t tensor, int64_t index) {
    tm_comparison_place place = nowhere;
    tm_pair pair;
    if (index >= 0) {
        tm_pair_init(&pair, &call->a[tensor], &call->b[tensor]);
        place.tensor = (int64_t)tensor;
        place.index = index;
        tm_wide_f64(call->table, &pair.a, call->a[tensor].dtype, index, 1, &place.a);
        tm_wide_f64(call->table, &pair.b, call->b[tensor].dtype, index, 1, &place.b);
    }
    return place;
}

static void take_compare(void *context, size_t tensor, const tm_record *record) {
    compare_call *call = context;
    tm_comparison *c = &call->each[tensor];
    c->n = call->a[tensor].n;
    take_sums(c, &record->compare);
    c->first_difference = place_at(call, tensor, record->compare.first_difference);
    c->max_abs_at = place_at(call, tensor, record->compare.max_abs_index);
    c->max_rel_at = place_at(call, tensor, record->compare.max_rel_index);
    derive(c);
}

tm_status tm_compare(const tm_view *a, const tm_view *b, size_t count, int threads, tm_comparison *each,
                     tm_comparison *total, tm_error *error) {
    static const char *const names[] = {"a", "b"};
    compare_call call = {.a = a, .b = b, .each = each};
    tm_status status = tm_table_require(&call.table, error);
    if (status == TM_OK) {
        status = tm_pairs_check(a, b, count, names, 0, error);
    }
    if (status != TM_OK) {
        return status;
    }
    if (count > 0) {
        memset(each, 0, count * sizeof *each);
    }
    tm_reduction reduction = {.table = call.table,
                              .views = a,
                              .count = count,
                              .read = read_compare,
                              .merge = merge_compare,
                              .take = take_compare,
                              .context = &call};
    status = tm_reduction_run(&reduction, threads, error);
    if (status == TM_OK) {
        tm_merge_comparisons(each, count, total);
    }
    return status;
}
