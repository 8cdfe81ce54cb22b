#include "tm_rescue.h"

#include <math.h>
#include <string.h>

int tm_rescue_exponent(double absmax) {
    int exponent;
    frexp(absmax, &exponent);
    exponent--; /* absmax = m * 2^exponent, 1 <= m < 2 */
    return exponent > 1000 ? 1000 : exponent < -1000 ? -1000 : exponent;
}

/* Elements are multiplied by 2^-e, e the exponent of absmax held within +-1000 so that the factor is a normal
 * number: the scaled absmax then lies in [2^-74, 2^24) and no sum of its squares can overflow; a product that
 * underflows is 2^-900 times smaller than the largest. The factor is exact, so the sum has the same relative
 * error as a plain one. */
tm_scaled tm_rescue_f64(const tm_table *table, const tm_layout *layout, int64_t start, int64_t count,
                        double absmax) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    tm_norm_state state;
    int exponent = tm_rescue_exponent(absmax);
    int64_t step;

    memset(&state, 0, offsetof(tm_norm_state, bytes));
    for (int64_t done = 0; done < count; done += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        table->norm->scaled_f64(&state, block, (size_t)step, ldexp(1.0, -exponent));
    }
    table->norm->finish[TM_KERNEL_NORM_2][TM_F64](&state, NULL);
    return (tm_scaled){state.total, exponent};
}

/* The absolute maximum tells an overflow from an infinite element, and a tiny chunk from one of zeros. */
tm_scaled tm_rescued_f64(const tm_table *table, const tm_layout *layout, int64_t start, int64_t count,
                         double plain) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    tm_norm_state state;
    int64_t step;

    if (!tm_needs_rescue(plain)) {
        return (tm_scaled){plain, 0};
    }
    memset(&state, 0, offsetof(tm_norm_state, bytes));
    for (int64_t done = 0; done < count; done += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        table->norm->block[TM_KERNEL_NORM_INF][TM_F64](&state, block, (size_t)step);
    }
    table->norm->finish[TM_KERNEL_NORM_INF][TM_F64](&state, NULL);
    return state.total > 0 && isfinite(state.total) ? tm_rescue_f64(table, layout, start, count, state.total)
                                                    : (tm_scaled){plain, 0};
}

double tm_scaled_root(tm_scaled sumsq) {
    return ldexp(sqrt(sumsq.value), (int)sumsq.exponent);
}

double tm_scaled_value(tm_scaled scaled) {
    if (scaled.exponent == 0) {
        return scaled.value;
    }
    int64_t power = 2 * scaled.exponent;
    power = power > 5000 ? 5000 : power < -5000 ? -5000 : power;
    return ldexp(scaled.value, (int)power);
}
