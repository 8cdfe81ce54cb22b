/* Float64 sums of squares that leave double's range. */
#include "runner.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static int close_to(double a, double b) {
    return fabs(a - b) <= 1e-13 * fabs(b);
}

static void check_uniform(double *data, int64_t n, double value) {
    for (int64_t i = 0; i < n; i++) {
        data[i] = i % 2 ? value : -value;
    }
    tm_stats stats = stats_of(flat(data, n, TM_F64), 1);
    double norm = norm_of(flat(data, n, TM_F64), TM_NORM_2, 1), expect = value * sqrt((double)n);
    CHECK(close_to(norm, expect) || (isinf(expect) && isinf(norm)), "%g x %lld: norm %.17g, not %.17g", value,
          (long long)n, norm, expect);
    double from_stats = ldexp(sqrt(stats.sumsq_scaled), (int)stats.scale_exponent);
    CHECK(same_double(norm, from_stats), "%g: the record gives %.17g, not %.17g", value, from_stats, norm);
    CHECK(same_double(stats.sumsq, ldexp(stats.sumsq_scaled, (int)(2 * stats.scale_exponent))), "%g", value);
}

/* Chunks of different ranges: each is rescued by itself, the merge brings the exponents together. */
static void check_mixed(double *data) {
    const double values[] = {1e-300, 1e200, 3, 0, 1e-170, 5e-324, DBL_MAX / 1e4};
    int64_t n = 3 * 65536;
    for (size_t a = 0; a < 7; a++) {
        for (size_t b = 0; b < 7; b++) {
            for (size_t c = 0; c < 7; c++) {
                if (!sampled()) {
                    continue;
                }
                double largest = fmax(values[a], fmax(values[b], values[c]));
                memset(data, 0, (size_t)n * sizeof *data);
                data[5] = values[a];
                data[65536 + 7] = values[b];
                data[2 * 65536 + 9] = -values[c];
                double x = values[a] / largest, y = values[b] / largest, z = values[c] / largest;
                double expect = largest > 0 ? largest * sqrt(x * x + y * y + z * z) : 0;
                double norm = norm_of(flat(data, n, TM_F64), TM_NORM_2, 1);
                int is_close = close_to(norm, expect) || fabs(norm - expect) <= 5e-324;
                CHECK(is_close, "%g, %g, %g: norm %.17g, not %.17g", values[a], values[b], values[c], norm,
                      expect);
                tm_stats stats = stats_of(flat(data, n, TM_F64), 1);
                CHECK(same_double(norm, ldexp(sqrt(stats.sumsq_scaled), (int)stats.scale_exponent)),
                      "%g, %g, %g", values[a], values[b], values[c]);
            }
        }
    }
}

static void check_nonfinite(double *data) {
    for (int kind = 0; kind < 3; kind++) {
        for (int64_t i = 0; i < 100; i++) {
            data[i] = 1e300;
        }
        put_nonfinite(data, 50, TM_F64, kind);
        double norm = norm_of(flat(data, 100, TM_F64), TM_NORM_2, 1);
        CHECK(kind == 0 ? isnan(norm) : norm == INFINITY, "kind %d beside an overflow", kind);
        tm_stats stats = stats_of(flat(data, 100, TM_F64), 1);
        double finite = ldexp(sqrt(stats.sumsq_scaled), (int)stats.scale_exponent);
        CHECK(close_to(finite, 1e300 * sqrt(99.0)), "the finite elements' norm is %.17g", finite);
    }
    data[0] = 3;
    data[1] = INFINITY;
    data[2] = NAN;
    CHECK(isnan(norm_of(flat(data, 3, TM_F64), TM_NORM_INF, 1)), "NaN wins over an infinity");
    CHECK(isnan(norm_of(flat(data, 3, TM_F64), TM_NORM_1, 1)), "NaN wins over an infinity");
    CHECK(norm_of(flat(data, 2, TM_F64), TM_NORM_1, 1) == INFINITY, "an infinity wins over the rest");
}

void test_rescue(void) {
    static const double values[] = {1e-300, 5e-324, 1e-160, 1e-145, 1e150, 1e155, 1e300, DBL_MAX, DBL_MIN};
    int64_t room = 3 * 65536;
    double *data = malloc((size_t)room * sizeof *data);
    for (int tier = 0; data != NULL && use_tier(tier) != NULL; tier++) {
        for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
            check_uniform(data, 1, values[i]);
            check_uniform(data, 45, values[i]);
            check_uniform(data, 2 * 65536 + 3, values[i]);
        }
        check_mixed(data);
        check_nonfinite(data);
    }
    free(data);
    tm_dispatch_init(NULL);
}
