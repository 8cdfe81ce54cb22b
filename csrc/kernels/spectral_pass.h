/* Template: the spectral pass in one type. Parameters: TM_REAL, TM_REAL_BYTES, TM_NAME, TM_SPECTRAL_LANES. */

#define TM_WIDTH (TM_VECTOR_BYTES / TM_REAL_BYTES)
#define TM_PARTS (TM_SPECTRAL_LANES / TM_WIDTH)
#define TM_DOTS (TM_TILE_ROWS * TM_TILE_VECTORS)
#define TM_VECTOR TM_PASTE(tm_vector_, TM_NAME)
#define TM_LOOSE TM_PASTE(tm_loose_vector_, TM_NAME)
#define TM_LANE_SUMS TM_PASTE(spectral_lane_sums_, TM_NAME)
#define TM_TILE TM_PASTE(spectral_tile_, TM_NAME)
#define TM_UPDATE TM_PASTE(spectral_update_, TM_NAME)

typedef TM_REAL TM_VECTOR __attribute__((vector_size(TM_VECTOR_BYTES), may_alias));
typedef TM_REAL TM_LOOSE __attribute__((vector_size(TM_VECTOR_BYTES), aligned(TM_REAL_BYTES), may_alias));

/* Adds the lanes of each accumulator: l and l + lanes / 2, then l and l + lanes / 4, ... Two accumulators at
 * a time fold into one vector, so that a tile of 16 takes 15 additions and not 240. */
TM_INLINE void TM_LANE_SUMS(TM_VECTOR (*sum)[TM_PARTS], TM_REAL *out) {
    TM_VECTOR u[TM_DOTS];
#pragma GCC unroll 16
    for (size_t i = 0; i < TM_DOTS; i++) {
#pragma GCC unroll 8
        for (size_t parts = TM_PARTS / 2; parts > 0; parts /= 2) {
#pragma GCC unroll 8
            for (size_t p = 0; p < parts; p++) {
                sum[i][p] += sum[i][p + parts];
            }
        }
        u[i] = sum[i][0];
    }
    size_t count = TM_DOTS;
#if TM_WIDTH == 16
    TM_FOLD(TM_HALVES_16_8, 8)
    TM_FOLD(TM_HALVES_16_4, 4)
    TM_FOLD(TM_HALVES_16_2, 2)
    TM_FOLD(TM_HALVES_16_1, 1)
#elif TM_WIDTH == 8
    TM_FOLD(TM_HALVES_8_4, 4)
    TM_FOLD(TM_HALVES_8_2, 2)
    TM_FOLD(TM_HALVES_8_1, 1)
#elif TM_WIDTH == 4
    TM_FOLD(TM_HALVES_4_2, 2)
    TM_FOLD(TM_HALVES_4_1, 1)
#else
    TM_FOLD(TM_HALVES_2_1, 1)
#endif
    memcpy(out, u, TM_DOTS * sizeof *out);
}

/* Dot products of TM_TILE_ROWS rows and TM_TILE_VECTORS vectors of the block. */
TM_INLINE void TM_TILE(const TM_REAL *const *w, size_t columns, const TM_REAL *v, const char *ahead,
                       size_t step, double (*y)[TM_SPECTRAL_BLOCK]) {
    TM_VECTOR sum[TM_DOTS][TM_PARTS];
    TM_REAL dots[TM_DOTS];
    memset(sum, 0, sizeof sum);
    for (size_t c = 0; c < columns; c += TM_SPECTRAL_LANES) {
        const TM_REAL *block = v + c * TM_SPECTRAL_BLOCK;
#pragma GCC unroll 8
        for (size_t p = 0; p < TM_PARTS; p++) {
            TM_VECTOR x[TM_TILE_ROWS];
#pragma GCC unroll 8
            for (size_t r = 0; r < TM_TILE_ROWS; r++) {
                x[r] = *(const TM_LOOSE *)(w[r] + c + p * TM_WIDTH);
            }
#pragma GCC unroll 8
            for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
                const TM_VECTOR vector = *(const TM_VECTOR *)(block + j * TM_SPECTRAL_LANES + p * TM_WIDTH);
#pragma GCC unroll 8
                for (size_t r = 0; r < TM_TILE_ROWS; r++) {
                    sum[r * TM_TILE_VECTORS + j][p] += x[r] * vector;
                }
            }
        }
        if (ahead != NULL) {
            __builtin_prefetch(ahead, 0, 2);
            ahead += step;
        }
    }
    TM_LANE_SUMS(sum, dots);
    for (size_t r = 0; r < TM_TILE_ROWS; r++) {
        for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
            y[r][j] += (double)dots[r * TM_TILE_VECTORS + j];
        }
    }
}

static void TM_PASTE(spectral_forward_, TM_NAME)(const TM_REAL *const *w, size_t columns, const TM_REAL *v,
                                                 double (*y)[TM_SPECTRAL_BLOCK],
                                                 const tm_spectral_ahead *ahead) {
    const size_t whole = columns - columns % TM_SPECTRAL_LANES, rest = columns - whole;
    TM_REAL tail[TM_SPECTRAL_ROWS][TM_SPECTRAL_LANES] = {{0}};
    const TM_REAL *tails[TM_SPECTRAL_ROWS];
    for (size_t r = 0; rest > 0 && r < TM_SPECTRAL_ROWS; r++) {
        memcpy(tail[r], w[r] + whole, rest * sizeof *tail[r]);
        tails[r] = tail[r];
    }
    for (size_t r = 0; r < TM_SPECTRAL_ROWS; r += TM_TILE_ROWS) {
        for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j += TM_TILE_VECTORS) {
            double part[TM_TILE_ROWS][TM_SPECTRAL_BLOCK] = {{0}};
            const TM_REAL *vectors = v + j * TM_SPECTRAL_LANES;
            TM_TILE(w + r, whole, vectors,
                    r == 0 && j < 2 * TM_TILE_VECTORS ? ahead->row[j / TM_TILE_VECTORS] : NULL, ahead->step,
                    part);
            if (rest > 0) {
                TM_TILE(tails + r, TM_SPECTRAL_LANES, vectors + whole * TM_SPECTRAL_BLOCK, NULL, 0, part);
            }
            for (size_t i = 0; i < TM_TILE_ROWS; i++) {
                for (size_t k = 0; k < TM_TILE_VECTORS; k++) {
                    y[r + i][j + k] += part[i][k];
                }
            }
        }
    }
}

/* z[0..] += the rows' elements times the rows' coefficients, in the order of the rows. */
TM_INLINE void TM_UPDATE(const TM_REAL *const *w, size_t rows, size_t columns,
                         const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z, const char *ahead, size_t step) {
    TM_VECTOR factor[TM_SPECTRAL_ROWS][TM_TILE_VECTORS];
#pragma GCC unroll 8
    for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
#pragma GCC unroll 8
        for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
            factor[r][j] = (TM_VECTOR){0} + (r < rows ? y[r][j] : (TM_REAL)0);
        }
    }
    for (size_t c = 0; c < columns; c += TM_SPECTRAL_LANES) {
        TM_REAL *block = z + c * TM_SPECTRAL_BLOCK;
#pragma GCC unroll 8
        for (size_t p = 0; p < TM_PARTS; p++) {
            TM_VECTOR x[TM_SPECTRAL_ROWS];
#pragma GCC unroll 8
            for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
                x[r] = *(const TM_LOOSE *)(w[r] + c + p * TM_WIDTH);
            }
#pragma GCC unroll 8
            for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
                TM_VECTOR *out = (TM_VECTOR *)(block + j * TM_SPECTRAL_LANES + p * TM_WIDTH);
                TM_VECTOR sum = *out;
#pragma GCC unroll 8
                for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
                    sum += x[r] * factor[r][j];
                }
                *out = sum;
            }
        }
        if (ahead != NULL) {
            __builtin_prefetch(ahead, 0, 2);
            ahead += step;
        }
    }
}

static void TM_PASTE(spectral_backward_, TM_NAME)(const TM_REAL *const *w, size_t rows, size_t columns,
                                                  const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z,
                                                  const tm_spectral_ahead *ahead) {
    const size_t whole = columns - columns % TM_SPECTRAL_LANES, rest = columns - whole;
    TM_REAL tail[TM_SPECTRAL_ROWS][TM_SPECTRAL_LANES] = {{0}};
    const TM_REAL *tails[TM_SPECTRAL_ROWS];
    for (size_t r = 0; rest > 0 && r < TM_SPECTRAL_ROWS; r++) {
        memcpy(tail[r], w[r] + whole, rest * sizeof *tail[r]);
        tails[r] = tail[r];
    }
    for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j += TM_TILE_VECTORS) {
        const TM_REAL(*factors)[TM_SPECTRAL_BLOCK] = (const TM_REAL(*)[TM_SPECTRAL_BLOCK])(&y[0][j]);
        TM_REAL *out = z + j * TM_SPECTRAL_LANES;
        TM_UPDATE(w, rows, whole, factors, out,
                  j < 2 * TM_TILE_VECTORS ? ahead->row[2 + j / TM_TILE_VECTORS] : NULL, ahead->step);
        if (rest > 0) {
            TM_UPDATE(tails, rows, TM_SPECTRAL_LANES, factors, out + whole * TM_SPECTRAL_BLOCK, NULL, 0);
        }
    }
}

#undef TM_WIDTH
#undef TM_PARTS
#undef TM_DOTS
#undef TM_VECTOR
#undef TM_LOOSE
#undef TM_LANE_SUMS
#undef TM_TILE
#undef TM_UPDATE
#undef TM_REAL
#undef TM_REAL_BYTES
#undef TM_NAME
#undef TM_SPECTRAL_LANES
