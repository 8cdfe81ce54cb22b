#include "tm_wide.h"

void tm_wide_f64(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start, int64_t count,
                 double *out) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    int64_t step;
    for (int64_t done = 0; done < count; done += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        table->widen->to_f64[dtype](out + done, block, (size_t)step, tm_byte_values(dtype));
    }
}

int tm_wide_has_f32(const tm_table *table, tm_dtype dtype) {
    return table->widen->to_f32[dtype] != NULL;
}

void tm_wide_f32(const tm_table *table, const tm_layout *layout, tm_dtype dtype, int64_t start, int64_t count,
                 float *out) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    int64_t step;
    for (int64_t done = 0; done < count; done += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        table->widen->to_f32[dtype](out + done, block, (size_t)step, tm_byte_values(dtype));
    }
}
