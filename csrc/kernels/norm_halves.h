/* Sums of squares and of magnitudes for processors that run 512-bit operations as two halves (tm_halves.h):
 * the loops of norm_float.h with the same arithmetic on the same lanes. */

TM_INLINE void halves_add_2(tm_parts *lanes, const float *row) {
    for (int i = 0; i < TM_PARTS; i++) {
        const __m256d x = tm_part_of_row(row, i);
        lanes->part[i] = _mm256_fmadd_pd(x, x, lanes->part[i]);
    }
}

/* |x| * 1 + sum is sum + |x|, on the units that multiply: the others convert. */
TM_INLINE void halves_add_1(tm_parts *lanes, const float *row) {
    const __m256d one = _mm256_set1_pd(1), sign = _mm256_set1_pd(-0.0);
    for (int i = 0; i < TM_PARTS; i++) {
        const __m256d magnitude = _mm256_andnot_pd(sign, tm_part_of_row(row, i));
        lanes->part[i] = _mm256_fmadd_pd(magnitude, one, lanes->part[i]);
    }
}

#define TM_HALVES_ADD_2(row, p) halves_add_2(&lanes, row)
#define TM_HALVES_ADD_1(row, p) halves_add_1(&lanes, row)

#define TM_HALVES_ROWS(order)                                                                                \
    TM_NOINLINE void norm_halves_##order##_rows_f32(tm_norm_state *state, const float *p, size_t rows) {     \
        tm_parts lanes;                                                                                      \
        tm_parts_load(&lanes, state->lane, 0);                                                               \
        for (; rows > 0; rows--, p += TM_LANES) {                                                            \
            halves_add_##order(&lanes, p);                                                                   \
        }                                                                                                    \
        tm_parts_store(state->lane, &lanes, 0);                                                              \
    }                                                                                                        \
    TM_HALVES_RING_ROWS(order, f16)                                                                          \
    TM_HALVES_RING_ROWS(order, bf16)

#define TM_HALVES_RING_ROWS(order, name)                                                                     \
    TM_NOINLINE void norm_halves_##order##_rows_##name(tm_norm_state *state, const uint16_t *p,              \
                                                       size_t rows) {                                        \
        tm_parts lanes;                                                                                      \
        tm_parts_load(&lanes, state->lane, TM_EVEN_ODD_##name);                                              \
        TM_RING_LOOP(name, p, rows, TM_HALVES_ADD_##order);                                                  \
        tm_parts_store(state->lane, &lanes, TM_EVEN_ODD_##name);                                             \
    }

TM_HALVES_ROWS(2)
TM_HALVES_ROWS(1)

#define TM_HALVES_ROWS_F64(order, row_function)                                                              \
    TM_NOINLINE void norm_halves_##order##_rows_f64(tm_norm_state *state, const double *p, size_t rows) {    \
        double lanes[TM_LANES];                                                                              \
        memcpy(lanes, state->lane, sizeof lanes);                                                            \
        for (; rows > 0; rows--, p += TM_LANES) {                                                            \
            row_function(lanes, p);                                                                          \
        }                                                                                                    \
        memcpy(state->lane, lanes, sizeof lanes);                                                            \
    }
TM_HALVES_ROWS_F64(2, tm_squares_row_double)
TM_HALVES_ROWS_F64(1, tm_magnitudes_row_double)

TM_NORM_BLOCK(halves_2, f64, double)
TM_NORM_BLOCK(halves_2, f32, float)
TM_NORM_BLOCK(halves_2, f16, uint16_t)
TM_NORM_BLOCK(halves_2, bf16, uint16_t)
TM_NORM_BLOCK(halves_1, f64, double)
TM_NORM_BLOCK(halves_1, f32, float)
TM_NORM_BLOCK(halves_1, f16, uint16_t)
TM_NORM_BLOCK(halves_1, bf16, uint16_t)
