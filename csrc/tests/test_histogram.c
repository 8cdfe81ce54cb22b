/* Exponents and losses of casts against scalar definitions: every tier and dtype, tails, alignments, layouts,
 * threads, allocations that fail; limits of formats; the digest of the counts. */
#include "digest.h"
#include "runner.h"

#include "../core/tm_histogram.h"
#include "../core/tm_memory.h"

#include <math.h>
#include <stdlib.h>

enum { N = 3 * 65536 + 77, VIEWS = 3, FORMATS = TM_FORMAT_COUNT, WIDTH = TM_CAST_WIDTH(TM_FORMAT_COUNT) };

/* The formats once more, from their definitions: bits of the mantissa, least normal exponent, largest. */
static const struct {
    int bits, least;
    double largest;
} definitions[FORMATS] = {{23, -126, 0x1.fffffep127},
                          {10, -14, 65504},
                          {7, -126, 0x1.fep127},
                          {3, -6, 448},
                          {3, -7, 240},
                          {3, -10, 30},
                          {2, -14, 57344},
                          {2, -15, 57344},
                          {3, -6, 240},
                          {4, -2, 15.5},
                          {3, 0, 7.5},
                          {2, -2, 28},
                          {1, 0, 6}};

static int bits_of(uint64_t magnitude) {
    int bits = 0;
    for (; magnitude != 0; magnitude >>= 1) {
        bits++;
    }
    return bits;
}

/* Column of an element in a row of the histogram, -1 for none; *subnormal is set. 64-bit integers are counted
 * as they are, since doubles round them. */
static int reference_bin(const void *data, int64_t index, tm_dtype dtype, int *subnormal) {
    static const double least[] = {0x1p-1022, 0x1p-126, 0x1p-14, 0x1p-126, 0x1p-6, 0x1p-7,
                                   0x1p-10,   0x1p-14,  0x1p-15, 0x1p-6,   0x1p-2};
    double value = fabs(reference_value(data, index, dtype));
    *subnormal = 0;
    if (isnan(value)) {
        return TM_HISTOGRAM_NAN;
    }
    if (isinf(value)) {
        return TM_HISTOGRAM_INF;
    }
    if (value == 0) {
        return TM_HISTOGRAM_ZERO;
    }
    int exponent;
    if (dtype == TM_I64 || dtype == TM_U64) {
        uint64_t magnitude;
        memcpy(&magnitude, (const char *)data + 8 * (size_t)index, 8);
        magnitude = dtype == TM_I64 && magnitude >> 63 ? 0 - magnitude : magnitude;
        exponent = bits_of(magnitude);
    } else {
        frexp(value, &exponent);
        *subnormal = dtype < TM_F8E8M0FNU && value < least[dtype];
    }
    exponent += 126;
    return exponent < 0 ? 0 : exponent > 255 ? 255 : exponent;
}

static void reference_histogram(const tm_view *view, int64_t stride, int64_t *row) {
    for (int64_t i = 0; i < view->n; i++) {
        int subnormal;
        row[reference_bin(view->data, i * stride, view->dtype, &subnormal)]++;
        row[TM_HISTOGRAM_SUBNORMAL] += subnormal;
    }
}

/* What rounding to the format does, as if it had no largest number; scale is a power of two. */
static void reference_losses(const tm_view *view, int64_t stride, double scale, int64_t *row) {
    for (int64_t i = 0; i < view->n; i++) {
        double y = fabs(reference_value(view->data, i * stride, view->dtype)) * scale;
        row[TM_CAST_FINITE] += isfinite(y) != 0;
        row[TM_CAST_NONZERO] += isfinite(y) && y > 0;
        for (int f = 0; f < FORMATS && isfinite(y) && y > 0; f++) {
            int exponent = ilogb(y) > definitions[f].least ? ilogb(y) : definitions[f].least;
            double places = rint(ldexp(y, definitions[f].bits - exponent));
            int64_t *losses = row + TM_CAST_FIRST + TM_CAST_LOSSES * f;
            losses[TM_CAST_UNDERFLOW] += places == 0;
            losses[TM_CAST_SUBNORMAL] += places > 0 && y < ldexp(1, definitions[f].least);
            losses[TM_CAST_OVERFLOW] +=
                places > ldexp(definitions[f].largest, definitions[f].bits - exponent);
        }
    }
}

static const tm_format *all_formats(void) {
    static tm_format formats[FORMATS];
    for (int f = 0; f < FORMATS; f++) {
        formats[f] = (tm_format)f;
    }
    return formats;
}

typedef struct test_rows {
    int64_t expected[VIEWS * TM_HISTOGRAM_WIDTH], counts[VIEWS * TM_HISTOGRAM_WIDTH];
} test_rows;

/* A row a view, then one over all. */
static void check_rows(const tm_view *views, const int64_t *strides, int is_cast, int threads,
                       test_rows *rows, const char *what) {
    const double scale = 0.25;
    const size_t width = is_cast ? WIDTH : TM_HISTOGRAM_WIDTH;
    tm_error error = {""};
    memset(rows->expected, 0, sizeof rows->expected);
    for (size_t v = 0; v < VIEWS; v++) {
        if (is_cast) {
            reference_losses(&views[v], strides[v], scale, rows->expected + v * width);
        } else {
            reference_histogram(&views[v], strides[v], rows->expected + v * width);
        }
    }
    for (int each = 1; each >= 0; each--) {
        memset(rows->counts, 0xff, sizeof rows->counts);
        tm_status status = is_cast ? tm_cast_losses(views, VIEWS, all_formats(), FORMATS, scale, each,
                                                    threads, rows->counts, &error)
                                   : tm_exponent_histogram(views, VIEWS, each, threads, rows->counts, &error);
        CHECK(status == TM_OK, "%s", error.text);
        for (size_t i = 0; i < (each ? VIEWS * width : width); i++) {
            CHECK(rows->counts[i] == rows->expected[i],
                  "%s %s cast %d each %d: column %zu of view %zu: %lld, "
                  "not %lld",
                  what, tm_dtype_name(views[0].dtype), is_cast, each, i % width, i / width,
                  (long long)rows->counts[i], (long long)rows->expected[i]);
        }
        for (size_t i = 0; each && i < width; i++) { /* the second round expects the sum */
            rows->expected[i] += rows->expected[width + i] + rows->expected[2 * width + i];
        }
    }
}

/* Elements of all kinds: any bits, ordinary ones, one exponent only, zeros. */
static void fill_kind(char *data, int64_t n, tm_dtype dtype, int kind) {
    size_t size = tm_dtype_size(dtype);
    if (kind == 0) {
        fill_random(data, (size_t)n * size);
    } else if (kind == 1) {
        fill_finite(data, n, dtype);
    } else {
        for (int64_t i = 0; i < n; i++) {
            memset(data + (size_t)i * size, kind == 2 ? 0x3c : i % 7 == 0 ? 0x80 : 0, size);
        }
    }
}

static void check_dtype(tm_dtype dtype, char *data, test_rows *rows) {
    size_t size = tm_dtype_size(dtype);
    int64_t shape[1] = {N / 3}, stride[1] = {3 * (int64_t)size};
    tm_view strided = {
        .data = data, .shape = shape, .strides = stride, .n = shape[0], .ndim = 1, .dtype = dtype};
    for (int64_t n = 0; n < 200; n += n < 68 ? 1 : 13) {
        if (!sampled()) {
            continue;
        }
        fill_kind(data, n + 8, dtype, (int)(n % 4));
        tm_view views[VIEWS] = {flat(data + n % 9, n, dtype), flat(data, 0, dtype), strided};
        views[2].n = shape[0] = n / 3;
        check_rows(views, (int64_t[]){1, 1, 3}, 0, 1, rows, "short");
        check_rows(views, (int64_t[]){1, 1, 3}, 1, 1, rows, "short");
    }
    shape[0] = N / 3;
    for (int kind = 0; kind < 4; kind++) {
        fill_kind(data, N, dtype, kind);
        tm_view views[VIEWS] = {flat(data, N, dtype), strided, flat(data, 4096, dtype)};
        views[1].n = shape[0] = kind == 0 ? N / 3 : 5000;
        check_rows(views, (int64_t[]){1, 3, 1}, 0, 1 + 3 * (kind & 1), rows, "long");
        views[0].n = 20000 + kind;
        check_rows(views, (int64_t[]){1, 3, 1}, 1, 1 + 3 * (kind & 1), rows, "long");
    }
}

static int allocations_left;

static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

static void check_allocations(char *data, test_rows *rows) {
    tm_error error = {""};
    fill_finite(data, N, TM_F32);
    tm_view view = flat(data, N, TM_F32), views[VIEWS] = {view, view, view};
    for (int left = 0; left < 3; left++) {
        for (int is_cast = 0; is_cast < 2; is_cast++) {
            allocations_left = left;
            tm_memory_set_allocator(failing);
            tm_status status =
                is_cast ? tm_cast_losses(views, VIEWS, all_formats(), 1, 1, 0, 4, rows->counts, &error)
                        : tm_exponent_histogram(views, VIEWS, 0, 4, rows->counts, &error);
            tm_memory_set_allocator(NULL);
            int64_t n = rows->counts[TM_HISTOGRAM_ZERO];
            for (int bin = 0; bin < 256; bin++) {
                n += rows->counts[bin];
            }
            n = is_cast ? rows->counts[TM_CAST_FINITE] : n;
            CHECK(status == TM_OK && n == VIEWS * (int64_t)N, "%d left: %lld", left, (long long)n);
        }
    }
}

static void check_refusals(void) {
    float data[2] = {0, 1};
    int64_t counts[TM_HISTOGRAM_WIDTH];
    const tm_view view = flat(data, 2, TM_F32), nowhere = flat(NULL, 2, TM_F32);
    const tm_format unknown = TM_FORMAT_COUNT, *formats = all_formats();
    const double scales[] = {0, -1, INFINITY, NAN};
    tm_error error = {""};
    CHECK(tm_exponent_histogram(&view, 1, 0, 0, counts, &error) == TM_ERR_VALUE, "no threads");
    CHECK(tm_exponent_histogram(&nowhere, 1, 0, 1, counts, &error) == TM_ERR_VALUE, "no data");
    CHECK(tm_cast_losses(&view, 1, &unknown, 1, 1, 0, 1, counts, &error) == TM_ERR_VALUE, "no format");
    CHECK(tm_cast_losses(&view, 1, formats, TM_MAX_FORMATS + 1, 1, 0, 1, counts, &error) == TM_ERR_VALUE,
          "too many formats");
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        CHECK(tm_cast_losses(&view, 1, formats, 1, scales[i], 0, 1, counts, &error) == TM_ERR_VALUE,
              "scale %g", scales[i]);
    }
}

/* The table of the formula. */
static void check_limits(void) {
    static const struct {
        const char *name;
        tm_format_limits limits;
    } table[] = {{"fp16", {0x1p-25, 0x1p-14, 65520, 1}},
                 {"bf16", {0x1p-134, 0x1p-126, (2 - 0x1p-8) * 0x1p127, 1}},
                 {"e4m3fn", {0x1p-10, 0x1p-6, 464, 0}},
                 {"e5m2", {0x1p-17, 0x1p-14, 61440, 1}},
                 {"fp32", {0x1p-150, 0x1p-126, (2 - 0x1p-24) * 0x1p127, 1}},
                 {"fp4_e2m1fn", {0.25, 1, 7, 1}},
                 {"float6_e3m2fn", {0x1p-5, 0.25, 30, 1}},
                 {"e2m3fn", {0x1p-4, 1, 7.75, 1}},
                 {"float8_e4m3fnuz", {0x1p-11, 0x1p-7, 248, 1}}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const tm_format format = tm_format_from_name(table[i].name);
        CHECK(format < TM_FORMAT_COUNT, "%s", table[i].name);
        const tm_format_limits limits = tm_format_limits_of(format), *wanted = &table[i].limits;
        CHECK(limits.flush == wanted->flush && limits.min_normal == wanted->min_normal &&
                  limits.overflow == wanted->overflow && limits.tie_overflows == wanted->tie_overflows,
              "%s: %a %a %a %d", table[i].name, limits.flush, limits.min_normal, limits.overflow,
              limits.tie_overflows);
        CHECK(tm_format_from_name(tm_format_name(format)) == format, "%s", table[i].name);
    }
    CHECK(tm_format_from_name("float64") == TM_FORMAT_COUNT, "float64 is no target");
    CHECK(tm_format_from_name("fp") == TM_FORMAT_COUNT, "fp");
    CHECK(strcmp(tm_format_name(TM_FORMAT_COUNT), "unknown") == 0, "no format");
}

/* First codes at both ends of what a product can be. */
static void check_codes(void) {
    CHECK(tm_format_first_code(TM_F32, 1, 65520, 1) == 0x477ff000, "float32");
    CHECK(tm_format_first_code(TM_F32, 1, 65520, 0) == 0x477ff001, "float32, behind the tie");
    CHECK(tm_format_first_code(TM_BF16, 1, 464, 0) == 0x43e9, "bfloat16");
    CHECK(tm_format_first_code(TM_F16, 1, 0x1p-134, 0) == 1, "float16: all are above");
    CHECK(tm_format_first_code(TM_F16, 1, 0x1p127, 1) == 0x7c00, "float16: infinity is the first");
    CHECK(tm_format_first_code(TM_F64, 0x1p-1074, 0x1p-51, 1) == UINT64_C(0x7fe0000000000000), "tiny scale");
    CHECK(tm_format_first_code(TM_F64, 0x1.8p1023, 1, 1) == UINT64_C(0x5555555555556), "huge scale");
    CHECK(tm_format_first_code(TM_I64, 1, 65520, 1) == 65520, "int64");
    CHECK(tm_format_first_code(TM_I64, 0x1p-62, 1, 0) == (UINT64_C(1) << 62) + 1, "int64 beyond doubles");
    CHECK(tm_format_first_code(TM_U16, 1, 65536, 1) == 0, "uint16: none");
}

static void check_bits(char *data) {
    int64_t row[TM_HISTOGRAM_WIDTH], losses[WIDTH];
    tm_error error = {""};
    for (int tier = 0; use_tier(tier) != NULL; tier++) {
        uint64_t digest = DIGEST_START, before = seed_random(77);
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            for (int kind = 0; kind < 4; kind++) {
                fill_kind(data, 20000, (tm_dtype)dtype, kind);
                tm_view view = flat(data, 20000 - kind, (tm_dtype)dtype);
                CHECK(tm_exponent_histogram(&view, 1, 0, 1, row, &error) == TM_OK, "%s", error.text);
                CHECK(tm_cast_losses(&view, 1, all_formats(), FORMATS, 0.3, 0, 1, losses, &error) == TM_OK,
                      "%s", error.text);
                digest_integers(&digest, row, TM_HISTOGRAM_WIDTH);
                digest_integers(&digest, losses, WIDTH);
            }
        }
        check_digest("histogram", digest, UINT64_C(0x41472ce301af4e63));
        seed_random(before);
    }
}

void test_histogram(void) {
    char *data = malloc((N + 8) * 8 + 16);
    test_rows *rows = malloc(sizeof *rows);
    CHECK(data != NULL && rows != NULL, "no memory for the test");
    if (data != NULL && rows != NULL) {
        tm_dispatch_set_worker_bytes(1000);
        for (int tier = 0; use_tier(tier) != NULL; tier++) {
            for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
                check_dtype((tm_dtype)dtype, data, rows);
            }
        }
        check_allocations(data, rows);
        tm_dispatch_set_worker_bytes((size_t)16 << 20);
        check_refusals();
        check_limits();
        check_codes();
        check_bits(data);
    }
    free(rows);
    free(data);
    tm_dispatch_init(NULL);
}
