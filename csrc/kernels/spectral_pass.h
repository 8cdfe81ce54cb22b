/* Template: the spectral pass in one type. Parameters: TM_REAL, TM_NAME, TM_SPECTRAL_LANES. */

#define TM_VECTOR TM_PASTE(tm_vector_, TM_NAME)
#define TM_WIDTH (TM_VECTOR_BYTES / sizeof(TM_REAL))
#define TM_PARTS (TM_SPECTRAL_LANES / (TM_VECTOR_BYTES / sizeof(TM_REAL)))
#define TM_TILE TM_PASTE(spectral_tile_, TM_NAME)
#define TM_UPDATE TM_PASTE(spectral_update_, TM_NAME)
#define TM_LANE_SUMS TM_PASTE(spectral_lane_sums_, TM_NAME)

typedef TM_REAL TM_VECTOR __attribute__((vector_size(TM_VECTOR_BYTES), aligned(sizeof(TM_REAL)), may_alias));

/* Adds the lanes of `count` accumulators: l and l + 8, then l and l + 4, ... */
TM_INLINE void TM_LANE_SUMS(TM_REAL (*lane)[TM_SPECTRAL_LANES], size_t count) {
    for (size_t half = TM_SPECTRAL_LANES / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < count; i++) {
            for (size_t l = 0; l < half; l++) {
                lane[i][l] += lane[i][l + half];
            }
        }
    }
}

/* Dot products of TM_TILE_ROWS rows and TM_TILE_VECTORS vectors. */
TM_INLINE void TM_TILE(const TM_REAL *const *w, size_t columns, const TM_REAL *v, size_t stride, int ahead,
                       double (*y)[TM_SPECTRAL_BLOCK]) {
    TM_VECTOR sum[TM_TILE_ROWS][TM_TILE_VECTORS][TM_PARTS];
    TM_REAL lane[TM_TILE_ROWS * TM_TILE_VECTORS][TM_SPECTRAL_LANES];
    memset(sum, 0, sizeof sum);
    for (size_t c = 0; c < columns; c += TM_SPECTRAL_LANES) {
#pragma GCC unroll 8
        for (size_t p = 0; p < TM_PARTS; p++) {
            TM_VECTOR x[TM_TILE_ROWS];
#pragma GCC unroll 8
            for (size_t r = 0; r < TM_TILE_ROWS; r++) {
                x[r] = *(const TM_VECTOR *)(w[r] + c + p * TM_WIDTH);
            }
#pragma GCC unroll 8
            for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
                const TM_VECTOR vector = *(const TM_VECTOR *)(v + j * stride + c + p * TM_WIDTH);
#pragma GCC unroll 8
                for (size_t r = 0; r < TM_TILE_ROWS; r++) {
                    sum[r][j][p] += x[r] * vector;
                }
            }
        }
        if (ahead) {
#pragma GCC unroll 8
            for (size_t r = 0; r < TM_TILE_ROWS; r++) {
                __builtin_prefetch((const char *)(w[r] + c) + TM_SPECTRAL_SPAN * sizeof(TM_REAL), 0, 2);
            }
        }
    }
    memcpy(lane, sum, sizeof lane);
    TM_LANE_SUMS(lane, TM_TILE_ROWS * TM_TILE_VECTORS);
    for (size_t r = 0; r < TM_TILE_ROWS; r++) {
        for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
            y[r][j] += (double)lane[r * TM_TILE_VECTORS + j][0];
        }
    }
}

static void TM_PASTE(spectral_forward_, TM_NAME)(const TM_REAL *const *w, size_t columns, const TM_REAL *v,
                                                 size_t stride, double (*y)[TM_SPECTRAL_BLOCK]) {
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
            TM_TILE(w + r, whole, v + j * stride, stride, j == 0, part);
            if (rest > 0) {
                TM_TILE(tails + r, TM_SPECTRAL_LANES, v + j * stride + whole, stride, 0, part);
            }
            for (size_t i = 0; i < TM_TILE_ROWS; i++) {
                for (size_t k = 0; k < TM_TILE_VECTORS; k++) {
                    y[r + i][j + k] += part[i][k];
                }
            }
        }
    }
}

/* z[0..1] += the rows' elements times the rows' coefficients, in the order of the rows. */
TM_INLINE void TM_UPDATE(const TM_REAL *const *w, size_t rows, size_t columns,
                         const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z, size_t stride) {
    TM_VECTOR factor[TM_SPECTRAL_ROWS][TM_TILE_VECTORS];
#pragma GCC unroll 8
    for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
#pragma GCC unroll 8
        for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
            factor[r][j] = (TM_VECTOR){0} + (r < rows ? y[r][j] : (TM_REAL)0);
        }
    }
    for (size_t c = 0; c < columns; c += TM_WIDTH) {
        TM_VECTOR x[TM_SPECTRAL_ROWS];
#pragma GCC unroll 8
        for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
            x[r] = *(const TM_VECTOR *)(w[r] + c);
        }
#pragma GCC unroll 8
        for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
            TM_VECTOR *out = (TM_VECTOR *)(z + j * stride + c);
            TM_VECTOR sum = *out;
#pragma GCC unroll 8
            for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
                sum += x[r] * factor[r][j];
            }
            *out = sum;
        }
    }
}

static void TM_PASTE(spectral_backward_, TM_NAME)(const TM_REAL *const *w, size_t rows, size_t columns,
                                                  const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z,
                                                  size_t stride) {
    const size_t whole = columns - columns % TM_SPECTRAL_LANES, rest = columns - whole;
    TM_REAL tail[TM_SPECTRAL_ROWS][TM_SPECTRAL_LANES] = {{0}};
    const TM_REAL *tails[TM_SPECTRAL_ROWS];
    for (size_t r = 0; rest > 0 && r < TM_SPECTRAL_ROWS; r++) {
        memcpy(tail[r], w[r] + whole, rest * sizeof *tail[r]);
        tails[r] = tail[r];
    }
    for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j += TM_TILE_VECTORS) {
        const TM_REAL(*factors)[TM_SPECTRAL_BLOCK] = (const TM_REAL(*)[TM_SPECTRAL_BLOCK])(&y[0][j]);
        TM_UPDATE(w, rows, whole, factors, z + j * stride, stride);
        if (rest > 0) {
            TM_UPDATE(tails, rows, TM_SPECTRAL_LANES, factors, z + j * stride + whole, stride);
        }
    }
}

#undef TM_VECTOR
#undef TM_WIDTH
#undef TM_PARTS
#undef TM_TILE
#undef TM_UPDATE
#undef TM_LANE_SUMS
#undef TM_REAL
#undef TM_NAME
#undef TM_SPECTRAL_LANES
