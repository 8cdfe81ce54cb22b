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

void tm_wide_i64(const tm_layout *layout, tm_dtype dtype, int64_t start, int64_t count, int64_t *out) {
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    int64_t step;
    for (int64_t done = 0; done < count; done += step, out += step) {
        const void *block = tm_layout_block(layout, start + done, count - done, scratch, &step);
        switch (dtype) {
#define TM_WIDE_INTEGER(enum_name, type)                                                                     \
    case enum_name:                                                                                          \
        for (int64_t i = 0; i < step; i++) {                                                                 \
            out[i] = (int64_t)((const type *)block)[i];                                                      \
        }                                                                                                    \
        break;
            TM_WIDE_INTEGER(TM_I8, int8_t)
            TM_WIDE_INTEGER(TM_I16, int16_t)
            TM_WIDE_INTEGER(TM_I32, int32_t)
            TM_WIDE_INTEGER(TM_I64, int64_t)
            TM_WIDE_INTEGER(TM_U8, uint8_t)
            TM_WIDE_INTEGER(TM_U16, uint16_t)
            TM_WIDE_INTEGER(TM_U32, uint32_t)
            TM_WIDE_INTEGER(TM_U64, uint64_t)
#undef TM_WIDE_INTEGER
        default: /* bool */
            for (int64_t i = 0; i < step; i++) {
                out[i] = ((const unsigned char *)block)[i] != 0;
            }
            break;
        }
    }
}
