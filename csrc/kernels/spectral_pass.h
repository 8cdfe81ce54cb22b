/* Template: the spectral pass in one type. Parameters: TM_REAL, TM_REAL_BYTES, TM_NAME, TM_SPECTRAL_LANES. */

#define TM_WIDTH (TM_VECTOR_BYTES / TM_REAL_BYTES)
#define TM_PARTS (TM_SPECTRAL_LANES / TM_WIDTH)
#define TM_DOTS (TM_SPECTRAL_ROWS * TM_TILE_VECTORS)
#define TM_VECTOR TM_PASTE(tm_vector_, TM_NAME)
#define TM_LOOSE TM_PASTE(tm_loose_vector_, TM_NAME)
#define TM_DOTS_ROW TM_PASTE(tm_dots_row_, TM_NAME)
#define TM_SUMS_ROW TM_PASTE(tm_sums_row_, TM_NAME)
#define TM_LANE_SUMS TM_PASTE(spectral_lane_sums_, TM_NAME)
#define TM_TILE TM_PASTE(spectral_tile_, TM_NAME)
#define TM_GROUPS TM_PASTE(spectral_groups_, TM_NAME)
#define TM_UPDATE TM_PASTE(spectral_update_, TM_NAME)

typedef TM_REAL TM_VECTOR __attribute__((vector_size(TM_VECTOR_BYTES), may_alias));
typedef TM_REAL TM_LOOSE __attribute__((vector_size(TM_VECTOR_BYTES), aligned(TM_REAL_BYTES), may_alias));
typedef TM_REAL TM_DOTS_ROW
    __attribute__((vector_size(TM_TILE_VECTORS * TM_REAL_BYTES), aligned(TM_REAL_BYTES), may_alias));
typedef double TM_SUMS_ROW __attribute__((vector_size(TM_TILE_VECTORS * 8), aligned(8), may_alias));

/* Adds the lanes of each accumulator: l and l + lanes / 2, then l and l + lanes / 4, ... As many accumulators
 * as a vector has elements fold into one vector. They enter in the order in which their sums leave the tree:
 * of `groups` groups of 16 bytes, element e of group g is accumulator g * (width / groups) + e. */
TM_INLINE void TM_LANE_SUMS(TM_VECTOR (*sum)[TM_DOTS], TM_REAL *out) {
#pragma GCC unroll 8
    for (size_t parts = TM_PARTS / 2; parts > 0; parts /= 2) {
#pragma GCC unroll 8
        for (size_t p = 0; p < parts; p++) {
#pragma GCC unroll 16
            for (size_t i = 0; i < TM_DOTS; i++) {
                sum[p][i] += sum[p + parts][i];
            }
        }
    }
#pragma GCC unroll 8
    for (size_t done = 0; done < TM_DOTS; done += TM_WIDTH) {
        const size_t groups = TM_VECTOR_BYTES / 16, each = TM_WIDTH / groups;
        TM_VECTOR u[TM_WIDTH];
#pragma GCC unroll 16
        for (size_t i = 0; i < TM_WIDTH; i++) {
            u[i] = sum[0][done + i % groups * each + i / groups];
        }
        size_t count = TM_WIDTH;
#if TM_WIDTH == 16
        TM_FOLD(TM_HALVES_16, 8)
        TM_FOLD(TM_QUARTERS_16, 4)
        TM_FOLD(TM_PAIRS_16, 2)
        TM_FOLD(TM_FLOATS_16, 1)
#elif TM_WIDTH == 8 && TM_REAL_BYTES == 4
        TM_FOLD(TM_HALVES_8, 4)
        TM_FOLD(TM_PAIRS_8, 2)
        TM_FOLD(TM_FLOATS_8, 1)
#elif TM_WIDTH == 8
        TM_FOLD(TM_HALVES_8, 4)
        TM_FOLD(TM_QUARTERS_8, 2)
        TM_FOLD(TM_DOUBLES_8, 1)
#elif TM_WIDTH == 4 && TM_REAL_BYTES == 4
        TM_FOLD(TM_PAIRS_4, 2)
        TM_FOLD(TM_FLOATS_4, 1)
#elif TM_WIDTH == 4
        TM_FOLD(TM_HALVES_4, 2)
        TM_FOLD(TM_DOUBLES_4, 1)
#else
        TM_FOLD(TM_DOUBLES_2, 1)
#endif
        memcpy(out + done, u, sizeof *u);
    }
}

/* Dot products of TM_SPECTRAL_ROWS rows and TM_TILE_VECTORS vectors of the block. A vector that is narrower
 * than a group of lanes takes its part of all groups before the next part. */
TM_INLINE void TM_TILE(const TM_REAL *const *w, size_t columns, const TM_REAL *v, const char *const *ahead,
                       size_t step, TM_REAL *dots) {
    TM_VECTOR sum[TM_PARTS][TM_DOTS];
    for (size_t p = 0; p < TM_PARTS; p++) {
        TM_VECTOR lane[TM_DOTS];
        size_t fetched = 0;
        memset(lane, 0, sizeof lane);
        for (size_t c = p * TM_WIDTH; c < columns; c += TM_SPECTRAL_LANES) {
            const TM_REAL *block = v + (c - p * TM_WIDTH) * TM_SPECTRAL_BLOCK + p * TM_WIDTH;
            TM_VECTOR x[TM_SPECTRAL_ROWS];
#pragma GCC unroll 8
            for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
                x[r] = *(const TM_LOOSE *)(w[r] + c);
            }
#pragma GCC unroll 8
            for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
                const TM_VECTOR vector = *(const TM_VECTOR *)(block + j * TM_SPECTRAL_LANES);
#pragma GCC unroll 8
                for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
                    lane[r * TM_TILE_VECTORS + j] += x[r] * vector;
                }
            }
            if (p == 0 && ahead != NULL) {
#pragma GCC unroll 8
                for (size_t r = 0; r < TM_SPECTRAL_ROWS * TM_TILE_VECTORS / TM_SPECTRAL_BLOCK; r++) {
                    __builtin_prefetch(ahead[r] + fetched, 0, 2);
                }
                fetched += step;
            }
        }
        memcpy(sum[p], lane, sizeof lane);
    }
    TM_LANE_SUMS(sum, dots);
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
    for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j += TM_TILE_VECTORS) {
        const TM_REAL *vectors = v + j * TM_SPECTRAL_LANES;
        const char *const *rows = ahead->row + j * TM_SPECTRAL_ROWS / TM_SPECTRAL_BLOCK;
        TM_REAL dots[TM_DOTS], last[TM_DOTS] = {0};
        TM_TILE(w, whole, vectors, ahead->row[0] != NULL ? rows : NULL, ahead->step, dots);
        if (rest > 0) {
            TM_TILE(tails, TM_SPECTRAL_LANES, vectors + whole * TM_SPECTRAL_BLOCK, NULL, 0, last);
        }
        for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
            const TM_DOTS_ROW *dot = (const TM_DOTS_ROW *)dots + r, *end = (const TM_DOTS_ROW *)last + r;
            *(TM_SUMS_ROW *)&y[r][j] +=
                __builtin_convertvector(*dot, TM_SUMS_ROW) + __builtin_convertvector(*end, TM_SUMS_ROW);
        }
    }
}

#if TM_STRIP_VECTORS > 0
/* z[..] += the rows' elements times the rows' coefficients for `strip` vectors of adjacent columns, whose
 * sums stay in registers for all rows. Where several share a coefficient, each takes it from memory by
 * itself, through a pointer that hides that it is the same: as an operand a broadcast is free, into a
 * register it costs half a product (Zen 4). */
TM_INLINE void TM_UPDATE(const TM_REAL *const *w, size_t rows, size_t column,
                         const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z, size_t strip) {
    TM_VECTOR sum[TM_STRIP_VECTORS][TM_SPECTRAL_BLOCK];
#    pragma GCC unroll 8
    for (size_t p = 0; p < strip; p++) {
#    pragma GCC unroll 8
        for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j++) {
            sum[p][j] = ((const TM_VECTOR *)z)[p * TM_SPECTRAL_BLOCK + j];
        }
    }
    for (size_t r = 0; r < rows; r++) {
        const TM_REAL *factor = y[r];
#    pragma GCC unroll 8
        for (size_t p = 0; p < strip; p++) {
            const TM_VECTOR x = *(const TM_LOOSE *)(w[r] + column + p * TM_WIDTH);
            __asm__("" : "+r"(factor));
#    pragma GCC unroll 8
            for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j++) {
                sum[p][j] += x * factor[j];
            }
        }
    }
#    pragma GCC unroll 8
    for (size_t p = 0; p < strip; p++) {
#    pragma GCC unroll 8
        for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j++) {
            ((TM_VECTOR *)z)[p * TM_SPECTRAL_BLOCK + j] = sum[p][j];
        }
    }
}

/* Whole groups of lanes. */
TM_INLINE void TM_GROUPS(const TM_REAL *const *w, size_t rows, size_t columns,
                         const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z) {
    size_t c = 0;
    for (; c + TM_STRIP_VECTORS * TM_WIDTH <= columns; c += TM_STRIP_VECTORS * TM_WIDTH) {
        TM_UPDATE(w, rows, c, y, z + c * TM_SPECTRAL_BLOCK, TM_STRIP_VECTORS);
    }
    for (; c < columns; c += TM_WIDTH) {
        TM_UPDATE(w, rows, c, y, z + c * TM_SPECTRAL_BLOCK, 1);
    }
}
#else
/* z[..] += a few rows' elements times their coefficients, which stay in registers. */
TM_INLINE void TM_UPDATE(const TM_REAL *const *w, size_t rows, size_t columns,
                         const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z) {
    TM_VECTOR factor[TM_SPECTRAL_ROWS][TM_TILE_VECTORS];
#    pragma GCC unroll 8
    for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
#    pragma GCC unroll 8
        for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
            factor[r][j] = (TM_VECTOR){0} + (r < rows ? y[r][j] : (TM_REAL)0);
        }
    }
    for (size_t c = 0; c < columns; c += TM_SPECTRAL_LANES) {
        TM_REAL *block = z + c * TM_SPECTRAL_BLOCK;
#    pragma GCC unroll 8
        for (size_t p = 0; p < TM_PARTS; p++) {
            TM_VECTOR x[TM_SPECTRAL_ROWS];
#    pragma GCC unroll 8
            for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
                x[r] = *(const TM_LOOSE *)(w[r] + c + p * TM_WIDTH);
            }
#    pragma GCC unroll 8
            for (size_t j = 0; j < TM_TILE_VECTORS; j++) {
                TM_VECTOR *out = (TM_VECTOR *)(block + j * TM_SPECTRAL_LANES + p * TM_WIDTH);
                TM_VECTOR sum = *out;
#    pragma GCC unroll 8
                for (size_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
                    sum += x[r] * factor[r][j];
                }
                *out = sum;
            }
        }
    }
}

/* Whole groups of lanes. */
TM_INLINE void TM_GROUPS(const TM_REAL *const *w, size_t rows, size_t columns,
                         const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z) {
    for (size_t r = 0; r < rows; r += TM_SPECTRAL_ROWS) {
        const TM_REAL *four[TM_SPECTRAL_ROWS]; /* the last ones may repeat a row, with coefficients 0 */
        for (size_t i = 0; i < TM_SPECTRAL_ROWS; i++) {
            four[i] = w[r + i < rows ? r + i : rows - 1];
        }
        for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j += TM_TILE_VECTORS) {
            TM_UPDATE(four, rows - r, columns, (const TM_REAL(*)[TM_SPECTRAL_BLOCK])(&y[r][j]),
                      z + j * TM_SPECTRAL_LANES);
        }
    }
}
#endif

static void TM_PASTE(spectral_backward_, TM_NAME)(const TM_REAL *const *w, size_t rows, size_t columns,
                                                  const TM_REAL (*y)[TM_SPECTRAL_BLOCK], TM_REAL *z) {
    const size_t whole = columns - columns % TM_SPECTRAL_LANES, rest = columns - whole;
    TM_GROUPS(w, rows, whole, y, z);
    if (rest > 0) {
        TM_REAL tail[TM_SPECTRAL_TILE][TM_SPECTRAL_LANES];
        const TM_REAL *tails[TM_SPECTRAL_TILE];
        for (size_t r = 0; r < rows; r++) {
            memset(tail[r], 0, sizeof tail[r]);
            memcpy(tail[r], w[r] + whole, rest * sizeof *tail[r]);
            tails[r] = tail[r];
        }
        TM_GROUPS(tails, rows, TM_SPECTRAL_LANES, y, z + whole * TM_SPECTRAL_BLOCK);
    }
}

static void TM_PASTE(spectral_fold_, TM_NAME)(TM_REAL *panel, size_t columns, double factor, double *z) {
    for (size_t c = 0; c < columns; c += TM_SPECTRAL_LANES) {
        for (size_t j = 0; j < TM_SPECTRAL_BLOCK; j++) {
            TM_REAL *from = panel + c * TM_SPECTRAL_BLOCK + j * TM_SPECTRAL_LANES;
            double *out = z + j * columns + c;
            for (size_t l = 0; l < TM_SPECTRAL_LANES; l++) {
                out[l] += factor * (double)from[l];
                from[l] = 0;
            }
        }
    }
}

#undef TM_WIDTH
#undef TM_PARTS
#undef TM_DOTS
#undef TM_VECTOR
#undef TM_LOOSE
#undef TM_DOTS_ROW
#undef TM_SUMS_ROW
#undef TM_LANE_SUMS
#undef TM_TILE
#undef TM_GROUPS
#undef TM_UPDATE
#undef TM_REAL
#undef TM_REAL_BYTES
#undef TM_NAME
#undef TM_SPECTRAL_LANES
