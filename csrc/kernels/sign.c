/* Signs of a block as bytes, and the pairs of bytes that agree (contract: tm_sign_kernels.h). Elements of any
 * dtype become bytes in the first cache, so that one loop counts them whatever the two dtypes are. */
#include "tm_bytes.h"

/* A NaN compares as neither above nor below zero. */
#define TM_SIGN_OF(name, store, above, below)                                                                \
    TM_NOINLINE void sign_of_##name(uint8_t *signs, const void *data, size_t n, const uint8_t *byte_signs) { \
        const store *x = data;                                                                               \
        (void)byte_signs;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                     \
            signs[i] = (uint8_t)((above) | (below) << 1);                                                    \
        }                                                                                                    \
    }
#define TM_SIGN_OF_NUMBER(name, store) TM_SIGN_OF(name, store, x[i] > 0, x[i] < 0)
TM_SIGN_OF_NUMBER(f64, double)
TM_SIGN_OF_NUMBER(f32, float)
TM_SIGN_OF_NUMBER(i16, int16_t)
TM_SIGN_OF_NUMBER(i32, int32_t)
TM_SIGN_OF_NUMBER(i64, int64_t)
TM_SIGN_OF(u16, uint16_t, x[i] != 0, 0)
TM_SIGN_OF(u32, uint32_t, x[i] != 0, 0)
TM_SIGN_OF(u64, uint64_t, x[i] != 0, 0)

/* By their bits: above zero they are integers from 1 to infinity's, below it those with the sign turned. */
#define TM_SIGN_TURNED(bits) ((int16_t)((bits) ^ INT16_MIN))
#define TM_SIGN_OF_HALF(name, infinity)                                                                      \
    TM_SIGN_OF(name, int16_t, (x[i] > 0) & (x[i] <= (infinity)),                                             \
               (TM_SIGN_TURNED(x[i]) > 0) & (TM_SIGN_TURNED(x[i]) <= (infinity)))
TM_SIGN_OF_HALF(f16, 0x7c00)
TM_SIGN_OF_HALF(bf16, 0x7f80)

static void sign_of_byte(uint8_t *signs, const void *data, size_t n, const uint8_t *byte_signs) {
    const uint8_t *x = data;
    for (size_t i = 0; i < n; i++) {
        signs[i] = byte_signs[x[i]];
    }
}

/* Codes of equal signs have a bit in common, those of opposite signs have both bits between them. A lane's
 * counts stay below 256: a block has TM_SIGN_ROOM elements. */
enum { SIGN_LANES = 64 };
_Static_assert(TM_SIGN_ROOM / SIGN_LANES < 256, "a lane counts in a byte");

TM_NOINLINE void sign_count(tm_sign_counts *counts, const uint8_t *a, const uint8_t *b, size_t n) {
    uint8_t same[SIGN_LANES] = {0}, opposite[SIGN_LANES] = {0};
    size_t whole = n - n % SIGN_LANES;
    uint32_t n_same = 0, n_opposite = 0;
    for (size_t i = 0; i < whole; i += SIGN_LANES) {
        for (size_t l = 0; l < SIGN_LANES; l++) {
            same[l] = (uint8_t)(same[l] + ((a[i + l] & b[i + l]) != 0));
            opposite[l] = (uint8_t)(opposite[l] + ((a[i + l] | b[i + l]) == 3));
        }
    }
    for (size_t i = whole; i < n; i++) {
        n_same += (a[i] & b[i]) != 0;
        n_opposite += (a[i] | b[i]) == 3;
    }
    for (size_t l = 0; l < SIGN_LANES; l++) {
        n_same += same[l];
        n_opposite += opposite[l];
    }
    counts->same += n_same;
    counts->opposite += n_opposite;
}

const tm_sign_kernels TM_TIERED(tm_sign_kernels_) = {
    .of = {[TM_F64] = sign_of_f64,
           [TM_F32] = sign_of_f32,
           [TM_F16] = sign_of_f16,
           [TM_BF16] = sign_of_bf16,
           [TM_I16] = sign_of_i16,
           [TM_I32] = sign_of_i32,
           [TM_I64] = sign_of_i64,
           [TM_U16] = sign_of_u16,
           [TM_U32] = sign_of_u32,
           [TM_U64] = sign_of_u64,
           TM_BYTE_ROWS(sign_of_byte)},
    .count = sign_count,
};
