/* Token-weighted losses in exact arithmetic.
 *
 * The plain path adds mantissa * weight into bins by exponent, a few nanoseconds for any order of magnitudes,
 * and empties the bins into the digits before they can overflow. Weights wider than 16 bits are taken 16 bits
 * at a time. Sums of single buckets go straight into the digits of each. */
#include "tm_loss.h"

#include "tm_memory.h"
#include "tm_wide.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 2048 /* losses at a time: with weights and bins they stay in L1 */
#define BINS 256
#define LIMB_BITS 16
#define BIN_ROOM (INT64_C(1) << 30) /* sum of weights that a bin of 32-bit factors holds */
#define SINGLE_POSITION 925         /* float's lowest bit, 2^-149, counted from 2^-1074 */

struct tm_loss_pair {
    int64_t digits[TM_EXACT_DIGITS];
    tm_u128 tokens;
    int64_t masked, nan, posinf, neginf;
};

/* ---- blocks of losses and weights ---- */

typedef struct source {
    const tm_table *table;
    tm_layout losses, weights, ids;
    tm_dtype losses_dtype, weights_dtype, ids_dtype;
    int has_weights;
    float singles[BLOCK];
    double doubles[BLOCK];
    int64_t weight_block[BLOCK], id_block[BLOCK];
} source;

static const float *singles_at(source *from, int64_t start, int64_t count) {
    if (from->losses.straight && from->losses_dtype == TM_F32) {
        return (const float *)(const void *)from->losses.data + start;
    }
    tm_wide_f32(from->table, &from->losses, from->losses_dtype, start, count, from->singles);
    return from->singles;
}

static const double *doubles_at(source *from, int64_t start, int64_t count) {
    if (from->losses.straight && from->losses_dtype == TM_F64) {
        return (const double *)(const void *)from->losses.data + start;
    }
    tm_wide_f64(from->table, &from->losses, from->losses_dtype, start, count, from->doubles);
    return from->doubles;
}

static const int64_t *integers_at(const tm_layout *layout, tm_dtype dtype, int64_t start, int64_t count,
                                  int64_t *block) {
    if (layout->straight && tm_dtype_size(dtype) == 8) {
        return (const int64_t *)(const void *)layout->data + start;
    }
    tm_wide_i64(layout, dtype, start, count, block);
    return block;
}

/* ---- weights of a block ---- */

typedef struct weighing {
    uint64_t any; /* all bits that occur; the sign bit: a negative weight, or one beyond int64 */
    int64_t zeros;
    tm_u128 total;
} weighing;

static weighing weigh(const int64_t *weights, int64_t count) {
    uint64_t any = 0, low = 0, high = 0;
    int64_t zeros = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t weight = (uint64_t)weights[i];
        any |= weight;
        zeros += weight == 0;
        low += weight & 0xffffffff;
        high += weight >> 32;
    }
    return (weighing){.any = any, .zeros = zeros, .total = low + ((tm_u128)high << 32)};
}

static tm_status refuse_weight(const source *from, const int64_t *weights, int64_t start, tm_error *error) {
    int64_t i = 0;
    while (weights[i] >= 0) {
        i++;
    }
    if (from->weights_dtype == TM_U64) {
        return tm_fail(error, TM_ERR_VALUE, "weights: element %lld is %llu, weights end at 2^63 - 1",
                       (long long)(start + i), (unsigned long long)weights[i]);
    }
    return tm_fail(error, TM_ERR_VALUE,
                   "weights: element %lld is %lld, weights are counts and never negative",
                   (long long)(start + i), (long long)weights[i]);
}

/* ---- bins ---- */

/* Sums of factor * weight. Float: the factor is the mantissa, one bin an exponent. Double: the mantissa moved
 * up to 7 places, one bin for eight exponents, its lower 32 bits in `low` and the others in `high`. */
typedef struct bins {
    int64_t low[BINS], high[BINS];
    int64_t room; /* weights that still fit */
    int is_double;
} bins;

static void start_bins(bins *bin, int is_double) {
    memset(bin, 0, sizeof *bin);
    bin->is_double = is_double;
    bin->room = BIN_ROOM;
}

static void empty_bins(bins *bin, int shift, int64_t *digits) {
    for (int i = 0; i < BINS; i++) {
        const int position = shift + (bin->is_double ? 8 * i : SINGLE_POSITION + i - (i != 0));
        const int64_t low = bin->low[i], high = bin->high[i];
        if (low != 0) {
            tm_exact_put(digits, low < 0, (uint64_t)(low < 0 ? -low : low), 1, position);
        }
        if (high != 0) {
            tm_exact_put(digits, high < 0, (uint64_t)(high < 0 ? -high : high), 1, position + 32);
        }
    }
    tm_exact_normalise(digits, TM_EXACT_DIGITS);
    start_bins(bin, bin->is_double);
}

/* The weight's limb that this pass takes, with the loss's sign. */
#define SIGNED_WEIGHT(sign)                                                                                  \
    ((weights == NULL ? 1 : (int64_t)((uint64_t)weights[i] >> shift & (((uint64_t)1 << LIMB_BITS) - 1))) ^   \
     (sign)) -                                                                                               \
        (sign)

/* Both return whether a loss is not finite; such a loss adds 0. */
static inline int fill_singles(bins *bin, const float *losses, const int64_t *weights, int shift,
                               int64_t count) {
    uint32_t seen = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, losses + i, sizeof bits);
        const uint32_t exponent = bits >> 23 & 0xff;
        const uint32_t mantissa = (bits & 0x7fffff) | (uint32_t)(exponent != 0) << 23;
        const int64_t sign = -(int64_t)(bits >> 31);
        seen |= exponent + 1;
        bin->low[exponent] += (exponent == 0xff ? 0 : (int64_t)mantissa) * (SIGNED_WEIGHT(sign));
    }
    return (int)(seen >> 8);
}

static inline int fill_doubles(bins *bin, const double *losses, const int64_t *weights, int shift,
                               int64_t count) {
    uint32_t seen = 0;
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, losses + i, sizeof bits);
        const tm_exact_parts parts = tm_exact_split(bits);
        const int finite = parts.position <= TM_EXACT_TOP_POSITION;
        const uint64_t factor = (finite ? parts.mantissa : 0) << (parts.position & 7);
        const int64_t sign = -(int64_t)(bits >> 63), weight = SIGNED_WEIGHT(sign);
        seen |= (uint32_t)!finite;
        bin->low[parts.position >> 3] += (int64_t)(factor & 0xffffffff) * weight;
        bin->high[parts.position >> 3] += (int64_t)(factor >> 32) * weight;
    }
    return (int)seen;
}

static int fill(bins *bin, const void *losses, const int64_t *weights, int shift, int64_t count) {
    if (bin->is_double) {
        return weights == NULL ? fill_doubles(bin, losses, NULL, 0, count)
                               : fill_doubles(bin, losses, weights, shift, count);
    }
    return weights == NULL ? fill_singles(bin, losses, NULL, 0, count)
                           : fill_singles(bin, losses, weights, shift, count);
}

/* One block into the bins and, when these are full or the weights are wide, on into the digits. */
static int add_block(bins *bin, const void *losses, const int64_t *weights, uint64_t any, int64_t count,
                     int64_t *digits) {
    const int wide = any >> LIMB_BITS != 0;
    const int64_t most = wide ? BIN_ROOM : count * (int64_t)any;
    if (bin->room < most) {
        empty_bins(bin, 0, digits);
    }
    bin->room -= most;
    int bad = fill(bin, losses, weights, 0, count);
    for (int shift = LIMB_BITS; shift < 64 && any >> shift != 0; shift += LIMB_BITS) {
        empty_bins(bin, shift - LIMB_BITS, digits);
        bad |= fill(bin, losses, weights, shift, count);
        if (shift + LIMB_BITS >= 64 || any >> (shift + LIMB_BITS) == 0) {
            empty_bins(bin, shift, digits);
        }
    }
    return bad;
}

/* ---- one call's pairs ---- */

static int count_if_bad(tm_loss_pair *pair, double loss) {
    if (isfinite(loss)) {
        return 0;
    }
    pair->nan += isnan(loss) != 0;
    pair->posinf += loss > 0;
    pair->neginf += loss < 0;
    return 1;
}

static void count_bad(tm_loss_pair *pair, const void *losses, int is_double, const int64_t *weights,
                      int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        if (weights == NULL || weights[i] != 0) {
            count_if_bad(pair, is_double ? ((const double *)losses)[i] : (double)((const float *)losses)[i]);
        }
    }
}

static tm_status collect_plain(source *from, tm_loss_pair *pair, tm_error *error) {
    bins bin;
    start_bins(&bin, !tm_wide_has_f32(from->table, from->losses_dtype));
    int64_t count;
    for (int64_t start = 0; start < from->losses.n; start += count) {
        count = from->losses.n - start < BLOCK ? from->losses.n - start : BLOCK;
        const int64_t *weights = NULL;
        weighing weighed = {.any = 1, .total = (tm_u128)count};
        if (from->has_weights) {
            weights = integers_at(&from->weights, from->weights_dtype, start, count, from->weight_block);
            weighed = weigh(weights, count);
            if (weighed.any >> 63 != 0) {
                return refuse_weight(from, weights, start, error);
            }
        }
        pair->tokens += weighed.total;
        pair->masked += weighed.zeros;
        const void *losses = bin.is_double ? (const void *)doubles_at(from, start, count)
                                           : (const void *)singles_at(from, start, count);
        if (add_block(&bin, losses, weights, weighed.any, count, pair->digits)) {
            count_bad(pair, losses, bin.is_double, weights, count);
        }
    }
    empty_bins(&bin, 0, pair->digits);
    return TM_OK;
}

static void add_loss(tm_loss_pair *pair, double loss, int64_t weight) {
    if (weight == 0) {
        pair->masked++;
        return;
    }
    pair->tokens += (uint64_t)weight;
    if (!count_if_bad(pair, loss)) {
        uint64_t bits;
        memcpy(&bits, &loss, sizeof bits);
        const tm_exact_parts parts = tm_exact_split(bits);
        tm_exact_put(pair->digits, parts.negative, parts.mantissa, (uint64_t)weight, parts.position);
    }
}

static void normalise_pairs(tm_loss_batch *batch) {
    for (int64_t b = 0; b <= batch->buckets; b++) {
        tm_exact_normalise(batch->pairs[b].digits, TM_EXACT_DIGITS);
    }
}

static tm_status collect_buckets(source *from, tm_loss_batch *batch, tm_error *error) {
    int64_t count;
    for (int64_t start = 0, since = 0; start < from->losses.n; start += count) {
        count = from->losses.n - start < BLOCK ? from->losses.n - start : BLOCK;
        const double *losses = doubles_at(from, start, count);
        const int64_t *ids = integers_at(&from->ids, from->ids_dtype, start, count, from->id_block);
        const int64_t *weights = NULL;
        if (from->has_weights) {
            weights = integers_at(&from->weights, from->weights_dtype, start, count, from->weight_block);
            if (weigh(weights, count).any >> 63 != 0) {
                return refuse_weight(from, weights, start, error);
            }
        }
        for (int64_t i = 0; i < count; i++) {
            const int64_t weight = weights == NULL ? 1 : weights[i];
            const int valid = (uint64_t)ids[i] < (uint64_t)batch->buckets;
            batch->invalid += !valid && weight != 0;
            add_loss(&batch->pairs[valid ? ids[i] : batch->buckets], losses[i], weight);
        }
        since += count;
        if (since >= INT64_C(1) << 28) { /* a digit moves by at most 2^33 a loss */
            normalise_pairs(batch);
            since = 0;
        }
    }
    normalise_pairs(batch);
    return TM_OK;
}

/* ---- the calls ---- */

static tm_status start_batch(tm_loss_batch *batch, int64_t buckets, tm_error *error) {
    *batch = (tm_loss_batch){.buckets = buckets};
    batch->pairs = tm_allocate((size_t)buckets + 1, sizeof *batch->pairs);
    if (batch->pairs == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory for %lld buckets of losses", (long long)buckets);
    }
    memset(batch->pairs, 0, ((size_t)buckets + 1) * sizeof *batch->pairs);
    return TM_OK;
}

void tm_loss_release(tm_loss_batch *batch) {
    free(batch->pairs);
    batch->pairs = NULL;
}

static tm_status open_view(const char *name, const tm_view *view, int64_t n, int wants_float,
                           tm_layout *layout, tm_error *error) {
    tm_error inner;
    const tm_status status = tm_layout_check(view, 0, &inner);
    if (status != TM_OK) {
        return tm_fail(error, status, "%s: %s", name, inner.text);
    }
    if ((view->dtype < TM_I8) != wants_float) {
        return tm_fail(error, TM_ERR_DTYPE, "%s must be %s, not %s", name,
                       wants_float ? "floats" : "integers or bool", tm_dtype_name(view->dtype));
    }
    if (view->n != n) {
        return tm_fail(error, TM_ERR_VALUE, "%s has %lld elements for %lld losses", name, (long long)view->n,
                       (long long)n);
    }
    tm_layout_init(layout, view);
    return TM_OK;
}

tm_status tm_loss_collect(tm_loss_batch *batch, int64_t buckets, const tm_view *losses,
                          const tm_view *weights, const tm_view *ids, tm_error *error) {
    source *from = NULL;
    tm_status status = start_batch(batch, buckets, error);
    if (status != TM_OK) {
        return status;
    }
    from = tm_allocate(1, sizeof *from);
    if (from == NULL) {
        return tm_fail(error, TM_ERR_MEMORY, "no memory for a block of losses");
    }
    from->has_weights = weights != NULL;
    from->losses_dtype = losses->dtype;
    status = tm_table_require(&from->table, error);
    if (status == TM_OK) {
        status = open_view("losses", losses, losses->n, 1, &from->losses, error);
    }
    if (status == TM_OK && weights != NULL) {
        from->weights_dtype = weights->dtype;
        status = open_view("weights", weights, losses->n, 0, &from->weights, error);
    }
    if (status == TM_OK && ids != NULL) {
        from->ids_dtype = ids->dtype;
        status = open_view("buckets", ids, losses->n, 0, &from->ids, error);
    }
    if (status == TM_OK) {
        status =
            ids == NULL ? collect_plain(from, &batch->pairs[0], error) : collect_buckets(from, batch, error);
    }
    free(from);
    return status;
}

tm_status tm_loss_collect_value(tm_loss_batch *batch, double value, int is_mean, int64_t tokens,
                                tm_error *error) {
    const tm_status status = start_batch(batch, 0, error);
    if (status == TM_OK) {
        add_loss(&batch->pairs[0], value, is_mean ? tokens : 1);
        batch->pairs[0].tokens = (tm_u128)tokens;
        normalise_pairs(batch);
    }
    return status;
}

/* ---- states ---- */

static void put_integer(int64_t *field, int digits, tm_u128 value) {
    for (int i = 0; i < digits; i++, value >>= 32) {
        field[i] += (int64_t)(uint32_t)value;
    }
}

static void normalise_row(int64_t *row) {
#define NORMALISE(name, digits) tm_exact_normalise(row + TM_LOSS_##name, digits);
    TM_LOSS_FIELDS(NORMALISE)
#undef NORMALISE
}

static void add_pair(int64_t *row, const tm_loss_pair *pair) {
    for (int i = 0; i < TM_EXACT_DIGITS; i++) {
        row[TM_LOSS_SUM + i] += pair->digits[i];
    }
    put_integer(row + TM_LOSS_TOKENS, 4, pair->tokens);
    put_integer(row + TM_LOSS_PAIRS, 2, pair->tokens > 0);
    put_integer(row + TM_LOSS_MASKED, 2, (tm_u128)pair->masked);
    put_integer(row + TM_LOSS_NAN, 2, (tm_u128)pair->nan);
    put_integer(row + TM_LOSS_POSINF, 2, (tm_u128)pair->posinf);
    put_integer(row + TM_LOSS_NEGINF, 2, (tm_u128)pair->neginf);
    /* A pair with a non-finite loss makes both means non-finite by its counts alone. */
    if (pair->tokens > 0 && pair->nan + pair->posinf + pair->neginf == 0) {
        tm_loss_pair mean = {0};
        add_loss(&mean, tm_exact_quotient(pair->digits, pair->tokens), 1);
        for (int i = 0; i < TM_EXACT_DIGITS; i++) {
            row[TM_LOSS_MEANS + i] += mean.digits[i];
        }
    }
    normalise_row(row);
}

static void add_counts(tm_loss_pair *sum, const tm_loss_pair *pair) {
    for (int i = 0; i < TM_EXACT_DIGITS; i++) {
        sum->digits[i] += pair->digits[i];
    }
    sum->tokens += pair->tokens;
    sum->masked += pair->masked;
    sum->nan += pair->nan;
    sum->posinf += pair->posinf;
    sum->neginf += pair->neginf;
}

void tm_loss_add_batch(int64_t *state, const tm_loss_batch *batch) {
    tm_loss_pair whole = batch->pairs[batch->buckets];
    for (int64_t b = 0; b < batch->buckets; b++) {
        add_pair(state + (1 + b) * TM_LOSS_WORDS, &batch->pairs[b]);
        add_counts(&whole, &batch->pairs[b]);
    }
    tm_exact_normalise(whole.digits, TM_EXACT_DIGITS);
    put_integer(state + TM_LOSS_INVALID, 2, (tm_u128)batch->invalid);
    add_pair(state, &whole);
}

void tm_loss_add_state(int64_t *state, const int64_t *other, int64_t rows) {
    for (int64_t r = 0; r < rows; r++, state += TM_LOSS_WORDS, other += TM_LOSS_WORDS) {
        for (int i = 0; i < TM_LOSS_WORDS; i++) {
            state[i] += other[i];
        }
        normalise_row(state);
    }
}

static tm_u128 take_integer(const int64_t *field, int digits) {
    tm_u128 value = 0;
    for (int i = digits - 1; i >= 0; i--) {
        value = value << 32 | (uint32_t)field[i];
    }
    return value;
}

int tm_loss_means(const int64_t *row, double *mean, double *mean_of_means) {
    const tm_u128 tokens = take_integer(row + TM_LOSS_TOKENS, 4);
    if (tokens == 0) {
        return 0;
    }
    const int nan = take_integer(row + TM_LOSS_NAN, 2) != 0;
    const int posinf = take_integer(row + TM_LOSS_POSINF, 2) != 0;
    const int neginf = take_integer(row + TM_LOSS_NEGINF, 2) != 0;
    if (nan || posinf || neginf) {
        const double value = nan || (posinf && neginf) ? (double)NAN
                             : posinf                  ? (double)INFINITY
                                                       : -(double)INFINITY;
        *mean = *mean_of_means = value;
        return 1;
    }
    *mean = tm_exact_quotient(row + TM_LOSS_SUM, tokens);
    *mean_of_means = tm_exact_quotient(row + TM_LOSS_MEANS, take_integer(row + TM_LOSS_PAIRS, 2));
    return 1;
}
