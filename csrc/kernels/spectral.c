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

/* What fits the registers, 32 or 16: forward sums TM_SPECTRAL_ROWS rows times TM_TILE_VECTORS vectors;
 * backward TM_STRIP_VECTORS vectors of columns times the whole block, or, where that does not fit (0),
 * TM_TILE_VECTORS at a time for TM_SPECTRAL_ROWS rows. */
#if defined(__AVX512F__)
#    define TM_TILE_VECTORS 4
#    define TM_STRIP_VECTORS 2
#else
#    define TM_TILE_VECTORS 2
#    define TM_STRIP_VECTORS 0
#endif

/* Which elements of two vectors of so many make the next vector: halves of the vectors, quarters, and within
 * each 16 bytes pairs of floats, single floats, single doubles; from element o on, each second of its kind.
 */
#define TM_FOUR(o) (o), (o) + 1, (o) + 2, (o) + 3
#define TM_HALVES_4(o) (o), (o) + 1, (o) + 4, (o) + 5
#define TM_HALVES_8(o) TM_FOUR(o), TM_FOUR((o) + 8)
#define TM_HALVES_16(o) TM_FOUR(o), TM_FOUR((o) + 4), TM_FOUR((o) + 16), TM_FOUR((o) + 20)
#define TM_QUARTERS_8(o) TM_HALVES_4(o), TM_HALVES_4((o) + 8)
#define TM_QUARTERS_16(o) TM_HALVES_8(o), TM_HALVES_8((o) + 16)
#define TM_PAIRS_OF(o, w) (o), (o) + 1, (o) + (w), (o) + (w) + 1
#define TM_PAIRS_4(o) TM_PAIRS_OF(o, 4)
#define TM_PAIRS_8(o) TM_PAIRS_OF(o, 8), TM_PAIRS_OF((o) + 4, 8)
#define TM_PAIRS_16(o)                                                                                       \
    TM_PAIRS_OF(o, 16), TM_PAIRS_OF((o) + 4, 16), TM_PAIRS_OF((o) + 8, 16), TM_PAIRS_OF((o) + 12, 16)
#define TM_FLOATS_OF(o, w) (o), (o) + 2, (o) + (w), (o) + (w) + 2
#define TM_FLOATS_4(o) TM_FLOATS_OF(o, 4)
#define TM_FLOATS_8(o) TM_FLOATS_OF(o, 8), TM_FLOATS_OF((o) + 4, 8)
#define TM_FLOATS_16(o)                                                                                      \
    TM_FLOATS_OF(o, 16), TM_FLOATS_OF((o) + 4, 16), TM_FLOATS_OF((o) + 8, 16), TM_FLOATS_OF((o) + 12, 16)
#define TM_DOUBLES_OF(o, w) (o), (o) + (w)
#define TM_DOUBLES_2(o) TM_DOUBLES_OF(o, 2)
#define TM_DOUBLES_4(o) TM_DOUBLES_OF(o, 4), TM_DOUBLES_OF((o) + 2, 4)
#define TM_DOUBLES_8(o)                                                                                      \
    TM_DOUBLES_OF(o, 8), TM_DOUBLES_OF((o) + 2, 8), TM_DOUBLES_OF((o) + 4, 8), TM_DOUBLES_OF((o) + 6, 8)

/* A level of the lanes' tree over u[0 .. count): vectors 2i and 2i + 1 become one. Permutations that stay
 * within 16 bytes or move 16 bytes whole take half a cycle, free ones across the vector two (Zen 4). */
#define TM_FOLD(kind, distance)                                                                              \
    for (size_t i = 0; 2 * i < count; i++) {                                                                 \
        u[i] = __builtin_shufflevector(u[2 * i], u[2 * i + 1], kind(0)) +                                    \
               __builtin_shufflevector(u[2 * i], u[2 * i + 1], kind(distance));                              \
    }                                                                                                        \
    count /= 2;

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
    .fold_f32 = spectral_fold_f32,
    .forward_f64 = spectral_forward_f64,
    .backward_f64 = spectral_backward_f64,
    .fold_f64 = spectral_fold_f64,
    .gram = spectral_gram,
};
