/* The spectral pass (contract: tm_spectral_kernels.h). Vectors of the tier's width are spelled out, because
 * gcc 12 keeps arrays of lanes for four rows and four vectors on the stack. */
#include "tm_widen.h"

#if defined(__AVX512F__)
#    define TM_VECTOR_BYTES 64
#elif defined(__AVX2__)
#    define TM_VECTOR_BYTES 32
#else
#    define TM_VECTOR_BYTES 16
#endif

/* A tile of accumulators that fits the registers: 16 of 32, 8 of 16 (a vector of lanes may take several). */
#if defined(__AVX512F__)
#    define TM_TILE_ROWS 4
#    define TM_TILE_VECTORS 4
#elif defined(__AVX2__)
#    define TM_TILE_ROWS 2
#    define TM_TILE_VECTORS 2
#else
#    define TM_TILE_ROWS 1
#    define TM_TILE_VECTORS 2
#endif

/* Which elements of two vectors of `width` hold the halves [offset, offset + half) of their groups. */
#define TM_HALVES_2_1(o) (o), (o) + 2
#define TM_HALVES_4_2(o) (o), (o) + 1, (o) + 4, (o) + 5
#define TM_HALVES_4_1(o) TM_HALVES_2_1(o), TM_HALVES_2_1((o) + 4)
#define TM_HALVES_8_4(o) (o), (o) + 1, (o) + 2, (o) + 3, (o) + 8, (o) + 9, (o) + 10, (o) + 11
#define TM_HALVES_8_2(o) TM_HALVES_4_2(o), TM_HALVES_4_2((o) + 8)
#define TM_HALVES_8_1(o) TM_HALVES_4_1(o), TM_HALVES_4_1((o) + 8)
#define TM_HALVES_16_8(o)                                                                                    \
    (o), (o) + 1, (o) + 2, (o) + 3, (o) + 4, (o) + 5, (o) + 6, (o) + 7, (o) + 16, (o) + 17, (o) + 18,        \
        (o) + 19, (o) + 20, (o) + 21, (o) + 22, (o) + 23
#define TM_HALVES_16_4(o) TM_HALVES_8_4(o), TM_HALVES_8_4((o) + 16)
#define TM_HALVES_16_2(o) TM_HALVES_8_2(o), TM_HALVES_8_2((o) + 16)
#define TM_HALVES_16_1(o) TM_HALVES_8_1(o), TM_HALVES_8_1((o) + 16)

/* A level of the lanes' tree over u[0 .. count). */
#define TM_FOLD(halves, half)                                                                                \
    for (size_t i = 0; 2 * i < count; i++) {                                                                 \
        const size_t second = 2 * i + 1 < count ? 2 * i + 1 : 2 * i;                                         \
        u[i] = __builtin_shufflevector(u[2 * i], u[second], halves(0)) +                                     \
               __builtin_shufflevector(u[2 * i], u[second], halves(half));                                   \
    }                                                                                                        \
    count = (count + 1) / 2;

#define TM_REAL float
#define TM_REAL_BYTES 4
#define TM_NAME f32
#define TM_SPECTRAL_LANES TM_SPECTRAL_LANES_F32
#include "spectral_pass.h"
#define TM_REAL double
#define TM_REAL_BYTES 8
#define TM_NAME f64
#define TM_SPECTRAL_LANES TM_SPECTRAL_LANES_F64
#include "spectral_pass.h"

static void spectral_gram(const double (*y)[TM_SPECTRAL_BLOCK], size_t rows, double (*s)[TM_SPECTRAL_BLOCK]) {
    for (size_t i = 0; i < TM_SPECTRAL_BLOCK; i++) {
        double sum[TM_SPECTRAL_BLOCK];
        memcpy(sum, s[i], sizeof sum);
        for (size_t r = 0; r < rows; r++) {
            for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j++) {
                sum[j] += y[r][i] * y[r][j];
            }
        }
        memcpy(s[i], sum, sizeof sum);
    }
}

const tm_spectral_kernels TM_TIERED(tm_spectral_kernels_) = {
    .forward_f32 = spectral_forward_f32,
    .backward_f32 = spectral_backward_f32,
    .forward_f64 = spectral_forward_f64,
    .backward_f64 = spectral_backward_f64,
    .gram = spectral_gram,
};
