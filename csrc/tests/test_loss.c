/* Exact sums of losses: every digit against counting single bits, in every tier, and each allocation failed.
 */
#include "../core/tm_loss.h"
#include "../core/tm_memory.h"
#include "digest.h"
#include "runner.h"

#include <math.h>
#include <stdlib.h>

#define N 5000
#define BUCKETS 3
#define ROWS (1 + BUCKETS)

typedef struct row_reference {
    int64_t bits[32 * TM_EXACT_DIGITS]; /* how often 2^(i - 1074) was added */
    int64_t nan, posinf, neginf, masked, invalid;
    tm_u128 tokens;
} row_reference;

/* loss * weight, one bit of the loss times one bit of the weight at a time */
static void count_bits(row_reference *row, double loss, int64_t weight) {
    row->tokens += (uint64_t)weight;
    row->masked += weight == 0;
    if (weight == 0 || !isfinite(loss)) {
        row->nan += weight != 0 && isnan(loss);
        row->posinf += weight != 0 && loss > 0;
        row->neginf += weight != 0 && loss < 0;
        return;
    }
    int exponent;
    double mantissa = frexp(fabs(loss), &exponent); /* 0, or [0.5, 1) */
    for (int position = exponent - 1 + 1074; mantissa != 0; position--) {
        mantissa *= 2;
        if (mantissa >= 1) {
            mantissa -= 1;
            for (int i = 0; i < 63; i++) {
                row->bits[position + i] += (weight >> i & 1) * (loss < 0 ? -1 : 1);
            }
        }
    }
}

static int same_integer(const int64_t *field, int digits, tm_u128 value) {
    int same = 1;
    for (int i = 0; i < digits; i++, value >>= 32) {
        same &= field[i] == (int64_t)(uint32_t)value;
    }
    return same;
}

static void check_row(const int64_t *row, row_reference *reference, const char *what) {
    int64_t carry = 0;
    for (int i = 0; i < TM_EXACT_DIGITS; i++) {
        int64_t digit = 0;
        for (int b = 0; b < 32; b++) {
            const int64_t sum = reference->bits[32 * i + b] + carry;
            digit |= (sum & 1) << b;
            carry = sum >> 1;
        }
        digit += i == TM_EXACT_DIGITS - 1 ? carry * (INT64_C(1) << 32) : 0;
        CHECK(row[TM_LOSS_SUM + i] == digit, "%s: digit %d is %llx, not %llx", what, i,
              (unsigned long long)row[TM_LOSS_SUM + i], (unsigned long long)digit);
    }
    CHECK(same_integer(row + TM_LOSS_TOKENS, 4, reference->tokens), "%s: tokens", what);
    CHECK(same_integer(row + TM_LOSS_PAIRS, 2, reference->tokens > 0), "%s: pairs", what);
    CHECK(same_integer(row + TM_LOSS_MASKED, 2, (tm_u128)reference->masked), "%s: masked", what);
    CHECK(same_integer(row + TM_LOSS_NAN, 2, (tm_u128)reference->nan), "%s: NaN", what);
    CHECK(same_integer(row + TM_LOSS_POSINF, 2, (tm_u128)reference->posinf), "%s: +inf", what);
    CHECK(same_integer(row + TM_LOSS_NEGINF, 2, (tm_u128)reference->neginf), "%s: -inf", what);
    CHECK(same_integer(row + TM_LOSS_INVALID, 2, (tm_u128)reference->invalid), "%s: invalid", what);
}

static uint64_t digest;

static uint64_t seed;

/* A generator of its own: the digest must not depend on the tests before. */
static uint64_t next_bits(void) {
    seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (seed ^ seed >> 31) * UINT64_C(0x9e3779b97f4a7c15);
}

typedef struct inputs {
    uint64_t losses[N];
    int64_t weights[N];
    int16_t ids[N];
} inputs;

static void check_batch(const inputs *in, tm_dtype dtype, int64_t n, int weighted, int64_t stride,
                        int buckets) {
    static row_reference reference[ROWS];
    static int64_t state[ROWS * TM_LOSS_WORDS];
    const int64_t shape[1] = {n}, loss_strides[1] = {stride * (int64_t)tm_dtype_size(dtype)};
    const int64_t weight_strides[1] = {8 * stride}, id_strides[1] = {2 * stride};
    tm_view losses = {
        .data = in->losses, .shape = shape, .strides = loss_strides, .n = n, .ndim = 1, .dtype = dtype};
    tm_view weights = losses, ids = losses;
    weights.data = in->weights, weights.strides = weight_strides, weights.dtype = TM_I64;
    ids.data = in->ids, ids.strides = id_strides, ids.dtype = TM_I16;
    tm_loss_batch batch;
    tm_error error;
    char what[80];
    snprintf(what, sizeof what, "%s, n %d, weighted %d, stride %d, buckets %d", tm_dtype_name(dtype), (int)n,
             weighted, (int)stride, buckets);
    const tm_status status = tm_loss_collect(&batch, buckets ? BUCKETS : 0, &losses,
                                             weighted ? &weights : NULL, buckets ? &ids : NULL, &error);
    memset(state, 0, sizeof state);
    memset(reference, 0, sizeof reference);
    CHECK(status == TM_OK, "%s: %s", what, error.text);
    if (status == TM_OK) {
        tm_loss_add_batch(state, &batch);
    }
    tm_loss_release(&batch);
    for (int64_t i = 0; i < n; i++) {
        const double loss = reference_value(in->losses, i * stride, dtype);
        const int64_t weight = weighted ? in->weights[i * stride] : 1;
        const int id = in->ids[i * stride];
        count_bits(&reference[0], loss, weight);
        if (buckets && id >= 0 && id < BUCKETS) {
            count_bits(&reference[1 + id], loss, weight);
        } else if (buckets) {
            reference[0].invalid += weight != 0;
        }
    }
    for (int r = 0; r < (buckets ? ROWS : 1); r++) {
        check_row(state + r * TM_LOSS_WORDS, &reference[r], what);
    }
    digest_integers(&digest, state, sizeof state / sizeof state[0]);
}

static void check_inputs(inputs *in, tm_dtype dtype, int weight_bits) {
    for (int i = 0; i < N; i++) {
        in->losses[i] = next_bits();
        in->weights[i] = i % 5 == 0 ? 0 : (int64_t)(next_bits() >> (64 - weight_bits));
        in->ids[i] = (int16_t)((int)(next_bits() % (BUCKETS + 2)) - 1);
    }
    for (int64_t n = 0; n < 4; n++) {
        check_batch(in, dtype, n, 1, 1, 0);
    }
    check_batch(in, dtype, N, 0, 1, 0);
    check_batch(in, dtype, N, 1, 1, 0);
    check_batch(in, dtype, N / 3, 1, 3, 0);
    check_batch(in, dtype, N, 1, 1, 1);
    check_batch(in, dtype, N / 3, 0, 3, 1);
}

static void check_quotient(void) {
    static const struct {
        int64_t sum, divisor;
        int position;
        double expected;
    } cases[] = {
        {5, 2, 1074, 2.5},
        {-1, 3, 1074, -1.0 / 3},
        {1, 2, 0, 0},                                          /* half of the smallest double: to even */
        {3, 4, 0, 4.9406564584124654e-324},                    /* above half: up */
        {3, 2, 0, 2 * 4.9406564584124654e-324},                /* 1.5: to even */
        {(INT64_C(1) << 54) + 2, 2, 1074, 9007199254740992.0}, /* ties to even, down */
        {(INT64_C(1) << 54) + 6, 2, 1074, 9007199254740996.0}, /* and up */
        {0, 7, 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int64_t digits[TM_EXACT_DIGITS] = {0};
        const int negative = cases[i].sum < 0;
        tm_exact_put(digits, negative, (uint64_t)(negative ? -cases[i].sum : cases[i].sum), 1,
                     cases[i].position);
        tm_exact_normalise(digits, TM_EXACT_DIGITS);
        const double value = tm_exact_quotient(digits, (tm_u128)cases[i].divisor);
        CHECK(same_double(value, cases[i].expected), "case %d: %.17g", (int)i, value);
    }
}

static void check_means(void) {
    int64_t state[TM_LOSS_WORDS] = {0}, twice[TM_LOSS_WORDS] = {0};
    double mean = 0, mean_of_means = 0;
    tm_error error;
    CHECK(tm_loss_means(state, &mean, &mean_of_means) == 0, "no tokens");
    static const double sums[2] = {6, 4};
    static const int64_t tokens[2] = {3, 1};
    for (int i = 0; i < 2; i++) {
        tm_loss_batch batch;
        CHECK(tm_loss_collect_value(&batch, sums[i], 0, tokens[i], &error) == TM_OK, "%s", error.text);
        tm_loss_add_batch(state, &batch);
        tm_loss_release(&batch);
    }
    CHECK(tm_loss_means(state, &mean, &mean_of_means) == 1 && mean == 2.5 && mean_of_means == 3, "%g %g",
          mean, mean_of_means);
    tm_loss_add_state(twice, state, 1);
    tm_loss_add_state(twice, state, 1);
    CHECK(tm_loss_means(twice, &mean, &mean_of_means) == 1 && mean == 2.5 && mean_of_means == 3, "%g %g",
          mean, mean_of_means);
}

static void check_errors(void) {
    const double losses[3] = {1, 2, 3};
    const int64_t negative[3] = {1, 2, -1};
    const uint64_t large[3] = {1, UINT64_C(1) << 63, 1};
    const tm_view view = flat(losses, 3, TM_F64), short_view = flat(negative, 2, TM_I64);
    const tm_view bad[] = {flat(negative, 3, TM_I64), flat(large, 3, TM_U64), flat(losses, 3, TM_F64),
                           short_view};
    const tm_status expected[] = {TM_ERR_VALUE, TM_ERR_VALUE, TM_ERR_DTYPE, TM_ERR_VALUE};
    for (int i = 0; i < 4; i++) {
        tm_loss_batch batch;
        tm_error error;
        CHECK(tm_loss_collect(&batch, 0, &view, &bad[i], NULL, &error) == expected[i], "case %d", i);
        tm_loss_release(&batch);
    }
}

static int allowed;

static void *failing(size_t bytes) {
    return allowed-- > 0 ? malloc(bytes) : NULL;
}

static void check_memory(void) {
    const double losses[2] = {1, 2};
    const int8_t ids[2] = {0, 1};
    const tm_view view = flat(losses, 2, TM_F64), id_view = flat(ids, 2, TM_I8);
    for (int calls = 0; calls < 3; calls++) { /* the pairs, then the block */
        tm_loss_batch batch;
        tm_error error = {""};
        allowed = calls;
        tm_memory_set_allocator(failing);
        const tm_status status = tm_loss_collect(&batch, 2, &view, NULL, &id_view, &error);
        tm_memory_set_allocator(NULL);
        CHECK(status == (calls < 2 ? TM_ERR_MEMORY : TM_OK), "%d allocations: status %d", calls, (int)status);
        CHECK((error.text[0] != '\0') == (calls < 2), "%s", error.text);
        tm_loss_release(&batch);
    }
    tm_loss_batch batch;
    tm_error error;
    allowed = 0;
    tm_memory_set_allocator(failing);
    CHECK(tm_loss_collect_value(&batch, 1, 1, 1, &error) == TM_ERR_MEMORY, "no memory for a value");
    tm_memory_set_allocator(NULL);
    tm_loss_release(&batch);
}

void test_loss(void) {
    static inputs in;
    static const tm_dtype dtypes[] = {TM_F64, TM_F32, TM_F16, TM_BF16, TM_F8E5M2, TM_F8E4M3FN};
    static const int weight_bits[] = {1, 16, 17, 40, 63};
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        seed = 1;
        digest = DIGEST_START;
        for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
            for (size_t w = 0; w < sizeof weight_bits / sizeof weight_bits[0]; w++) {
                check_inputs(&in, dtypes[d], weight_bits[w]);
            }
        }
        check_digest("loss", digest, UINT64_C(0x357b9045f506e490));
    }
    tm_dispatch_init(NULL);
    check_quotient();
    check_means();
    check_errors();
    check_memory();
}
