/* One read of a matrix: Y = W V and Z = W'Y for a block of vectors.
 *
 * Rows are read in tiles: Y for a tile, then Z += W'Y while the tile is cached. Rows that can't be read where
 * they lie are copied or widened once, for both. Z is summed up in the type of the products over panels of
 * 256 rows and then added to doubles; before a panel's products Y is divided by a power of two near its
 * largest element, because Z has the square of the matrix' scale. Panels are grouped in at most 16 spans of
 * rows whose sums are added in their order: threads take whole spans, so that their number changes no bit. */
#include "tm_memory.h"
#include "tm_spectral_parts.h"
#include "tm_threads.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define B TM_SPECTRAL_BLOCK
#define PANEL_ROWS 256
#define SPANS 16
#define TILE_BYTES (256 * 1024)     /* of floats: this tile and the next share an L2 with v and z */
#define COPY_BYTES (128 * 1024)     /* the same for tiles that are copied, because copies are written to it */
#define LANES TM_SPECTRAL_LANES_F32 /* vectors are padded to this, in both types */
#define CACHE_LINE 64
#define EXPONENT_SLACK 20 /* Y may outgrow the panel's power of two by this before Z is folded */

#define SHIFT_FREE_LOW (-60)
#define SHIFT_FREE_HIGH 90

int tm_spectral_shift(double absmax, int wide) {
    int exponent, low = wide ? -900 : -100, high = wide ? 900 : 64;
    frexp(absmax, &exponent);
    if (exponent >= SHIFT_FREE_LOW && exponent <= SHIFT_FREE_HIGH) {
        return 0;
    }
    return exponent < low ? low : exponent > high ? high : exponent;
}

typedef union block_real { /* a buffer of either type */
    float *f32;
    double *f64;
} block_real;

typedef struct pass_call {
    const tm_rows *rows;
    block_real v;                   /* a block of vectors as the kernels take it, as are the panels */
    int64_t padded, lanes, stretch; /* columns: with padding, of a group, that are taken at a time */
    int64_t tile_height, span_rows;
    int64_t copy_stride; /* elements from copy to copy: rows a power of two apart share the cache's sets */
    int spans, shift, first, in_place; /* in_place: rows are read where they lie */
    double *parts;                     /* [spans or 1][B][padded] */
    tm_pass_sums *sums;                /* [spans] */
    block_real *panel;                 /* [workers] */
    block_real *copies;                /* [workers], each [tile_height][copy_stride], unless in_place */
    atomic_int next_span, next_worker;
} pass_call;

/* What a worker keeps of a tile. */
typedef struct tile_rows {
    const char *start[TM_SPECTRAL_TILE]; /* of the rows in the type of the products */
    double y[TM_SPECTRAL_TILE][B];
    double squares[TM_SPECTRAL_TILE]; /* sums; first pass only */
    union {
        float f32[TM_SPECTRAL_TILE][B];
        double f64[TM_SPECTRAL_TILE][B];
    } factor;
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
} tile_rows;

/* Where a span's products go: a panel that is folded into a part, or at once into the total if it is the only
 * one: 0 + x = x, so that both ways have the same bits. */
typedef struct span_sum {
    block_real panel;
    block_real copies;
    double *part, *total; /* [B][padded]; no total: the parts are added later */
    int exponent;         /* of the panel: its values are too small by 2^exponent */
    int folds;            /* into the part so far */
} span_sum;

#define NO_EXPONENT (INT_MIN / 2)

/* Copies `have` rows' columns from `first` on to where the tile expects them. */
static void copy_rows(const tm_rows *rows, tile_rows *tile, int64_t row, int64_t r, int64_t have,
                      int64_t first, int64_t count) {
    const int native = rows->dtype == TM_F64 || rows->dtype == TM_F32;
    const size_t size = rows->wide ? sizeof(double) : sizeof(float);
    for (int64_t i = r; i < r + have; i++) {
        char *out = (char *)(uintptr_t)tile->start[i] + (size_t)first * size;
        const void *piece =
            tm_rows_piece(rows, row + i, first, count, native ? (void *)out : (void *)tile->scratch);
        if (!native) {
            rows->table->widen->to_f32[rows->dtype]((float *)(void *)out, piece, (size_t)count,
                                                    tm_byte_values(rows->dtype));
        } else if (piece != out) {
            memcpy(out, piece, (size_t)count * size);
        }
    }
}

/* The rows that follow the tile, for the same place in the next one. */
static void look_ahead(const pass_call *pass, int64_t row, int64_t first, tm_spectral_ahead *ahead) {
    const tm_rows *rows = pass->rows;
    ahead->step = (size_t)pass->lanes * rows->layout.item;
    for (int64_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
        const int64_t next = row + r < rows->rows ? row + r : rows->rows - 1;
        ahead->row[r] = rows->direct && row < rows->rows ? tm_rows_piece(rows, next, first, 0, NULL) : NULL;
    }
}

static void forward(const pass_call *pass, const void **w, int64_t first, int64_t count, double (*y)[B],
                    const tm_spectral_ahead *ahead) {
    const tm_spectral_kernels *kernels = pass->rows->table->spectral;
    if (pass->rows->wide) {
        kernels->forward_f64((const double *const *)w, (size_t)count, pass->v.f64 + first * B, y, ahead);
    } else {
        kernels->forward_f32((const float *const *)w, (size_t)count, pass->v.f32 + first * B, y, ahead);
    }
}

static void backward(const pass_call *pass, const void **w, int64_t rows, int64_t first, int64_t count,
                     const tile_rows *tile, int64_t from, block_real panel) {
    const tm_spectral_kernels *kernels = pass->rows->table->spectral;
    if (pass->rows->wide) {
        kernels->backward_f64((const double *const *)w, (size_t)rows, (size_t)count, tile->factor.f64 + from,
                              panel.f64 + first * B);
    } else {
        kernels->backward_f32((const float *const *)w, (size_t)rows, (size_t)count, tile->factor.f32 + from,
                              panel.f32 + first * B);
    }
}

/* Sum of squares and largest magnitude by the norms' kernels, one stretch of columns being a chunk. Squares
 * are summed row by row, so that the height of a tile is not in their order. */
static void add_norms(const pass_call *pass, const void *w, int64_t count, double *squares,
                      tm_pass_sums *sums) {
    const tm_norm_kernels *norm = pass->rows->table->norm;
    const tm_dtype dtype = pass->rows->wide ? TM_F64 : TM_F32;
    tm_norm_state state;
    memset(&state, 0, offsetof(tm_norm_state, bytes));
    if (pass->rows->wide && pass->shift != 0) {
        norm->scaled_f64(&state, w, (size_t)count, ldexp(1.0, -pass->shift));
    } else {
        norm->block[TM_KERNEL_NORM_2][dtype](&state, w, (size_t)count);
    }
    norm->finish[TM_KERNEL_NORM_2][dtype](&state, NULL);
    *squares += state.total;
    memset(&state, 0, offsetof(tm_norm_state, bytes));
    norm->block[TM_KERNEL_NORM_INF][dtype](&state, w, (size_t)count);
    norm->finish[TM_KERNEL_NORM_INF][dtype](&state, NULL);
    if (!(state.total <= sums->absmax)) { /* NaN comes in and stays */
        sums->absmax = isnan(sums->absmax) ? sums->absmax : state.total;
    }
}

/* Empties the panel; `last`: nothing else comes into this span. */
static void fold(const pass_call *pass, span_sum *sum, int last) {
    const tm_spectral_kernels *kernels = pass->rows->table->spectral;
    const int alone = last && sum->folds == 0 && sum->total != NULL;
    const size_t columns = (size_t)pass->padded;
    double *out = alone ? sum->total : sum->part;
    if (!alone && sum->folds++ == 0) {
        memset(out, 0, B * columns * sizeof *out);
    }
    if (sum->exponent > NO_EXPONENT && pass->rows->wide) {
        kernels->fold_f64(sum->panel.f64, columns, ldexp(1.0, sum->exponent), out);
    } else if (sum->exponent > NO_EXPONENT) {
        kernels->fold_f32(sum->panel.f32, columns, ldexp(1.0, sum->exponent), out);
    }
    for (size_t i = 0; last && !alone && sum->total != NULL && i < B * columns; i++) {
        sum->total[i] += out[i];
    }
}

/* The largest |y|; inf if one is not finite. */
static double largest(double (*y)[B], int64_t count) {
    double high = 0;
    for (int64_t r = 0; r < count; r++) {
        for (int j = 0; j < B; j++) {
            double magnitude = fabs(y[r][j]);
            high = magnitude > high ? magnitude : high;
            if (!(magnitude <= DBL_MAX)) {
                return INFINITY;
            }
        }
    }
    return high;
}

/* Y of a tile, from memory. */
static void read_rows(const pass_call *pass, tile_rows *tile, int64_t row, int64_t count, span_sum *sum,
                      tm_pass_sums *sums) {
    const tm_rows *rows = pass->rows;
    const int64_t n = rows->columns;
    const size_t size = rows->wide ? sizeof(double) : sizeof(float);
    const void *w[TM_SPECTRAL_ROWS];
    tm_spectral_ahead ahead;
    memset(tile->y, 0, sizeof tile->y);
    memset(tile->squares, 0, sizeof tile->squares);
    for (int64_t r = 0; r < count; r++) {
        tile->start[r] = pass->in_place ? tm_rows_piece(rows, row + r, 0, 0, NULL)
                         : rows->wide   ? (const char *)(sum->copies.f64 + r * pass->copy_stride)
                                        : (const char *)(sum->copies.f32 + r * pass->copy_stride);
    }
    for (int64_t c = 0; c < n; c += pass->stretch) {
        int64_t width = n - c < pass->stretch ? n - c : pass->stretch;
        for (int64_t r = 0; r < count; r += TM_SPECTRAL_ROWS) {
            const int64_t have = count - r < TM_SPECTRAL_ROWS ? count - r : TM_SPECTRAL_ROWS;
            for (int64_t i = 0; i < TM_SPECTRAL_ROWS; i++) { /* what is missing repeats the last one */
                w[i] = tile->start[r + (i < have ? i : have - 1)] + (size_t)c * size;
            }
            if (!pass->in_place) {
                copy_rows(rows, tile, row, r, have, c, width);
            }
            look_ahead(pass, row + count + r, c, &ahead);
            forward(pass, w, c, width, tile->y + r, &ahead);
            for (int64_t i = 0; pass->first && i < have; i++) {
                add_norms(pass, w[i], width, &tile->squares[r + i], sums);
            }
        }
    }
    for (int64_t r = 0; r < count; r++) {
        sums->sumsq += tile->squares[r];
    }
}

/* Z += W'Y for rows [from, to) of the tile, from the cache. */
static void multiply(const pass_call *pass, const tile_rows *tile, int64_t from, int64_t to, span_sum *sum) {
    const int64_t n = pass->rows->columns;
    const size_t size = pass->rows->wide ? sizeof(double) : sizeof(float);
    const void *w[TM_SPECTRAL_TILE];
    for (int64_t c = 0; from < to && c < n; c += pass->stretch) {
        int64_t width = n - c < pass->stretch ? n - c : pass->stretch;
        for (int64_t r = from; r < to; r++) {
            w[r - from] = tile->start[r] + (size_t)c * size;
        }
        backward(pass, w, to - from, c, width, tile, from, sum->panel);
    }
}

/* The power of two goes row by row, so that the height of a tile is not in the sums. */
static void read_tile(const pass_call *pass, tile_rows *tile, int64_t row, int64_t count, span_sum *sum,
                      tm_pass_sums *sums) {
    const tm_spectral_kernels *kernels = pass->rows->table->spectral;
    const double shift = ldexp(1.0, -pass->shift);
    double scale = sum->exponent > NO_EXPONENT ? ldexp(1.0, -sum->exponent) : 0;
    int64_t from = 0;
    read_rows(pass, tile, row, count, sum, sums);
    if (!(largest(tile->y, count) <= DBL_MAX)) { /* a first pass that will be made again or given up */
        return;
    }
    kernels->gram((const double (*)[B])tile->y, (size_t)count, sums->gram);
    for (int64_t r = 0; r < count; r++) {
        const double high = largest(tile->y + r, 1);
        int needed;
        frexp(high, &needed);
        if (high > 0 && needed > sum->exponent + EXPONENT_SLACK) {
            if (sum->exponent > NO_EXPONENT) {
                multiply(pass, tile, from, r, sum);
                fold(pass, sum, 0);
            }
            from = r; /* before the first exponent there were zeros only */
            sum->exponent = needed;
            scale = ldexp(1.0, -needed);
        }
        for (int j = 0; j < B; j++) { /* in two steps: one power of two for both may be out of range */
            if (pass->rows->wide) {
                tile->factor.f64[r][j] = tile->y[r][j] * scale * shift;
            } else {
                tile->factor.f32[r][j] = (float)(tile->y[r][j] * scale * shift);
            }
        }
    }
    if (sum->exponent > NO_EXPONENT) {
        multiply(pass, tile, from, count, sum);
    }
}

static void read_span(const pass_call *pass, int span, span_sum *sum, tile_rows *tile) {
    tm_pass_sums *sums = &pass->sums[span];
    int64_t row = span * pass->span_rows, end = row + pass->span_rows;
    end = end < pass->rows->rows ? end : pass->rows->rows;
    memset(sums, 0, sizeof *sums);
    sum->folds = 0;
    while (row < end) {
        int64_t stop = row + PANEL_ROWS < end ? row + PANEL_ROWS : end;
        sum->exponent = NO_EXPONENT;
        for (; row < stop; row += pass->tile_height) {
            int64_t count = stop - row < pass->tile_height ? stop - row : pass->tile_height;
            read_tile(pass, tile, row, count, sum, sums);
        }
        row = stop;
        fold(pass, sum, row == end);
    }
}

static void take_spans(void *context) {
    pass_call *pass = context;
    tile_rows tile;
    const int worker = atomic_fetch_add_explicit(&pass->next_worker, 1, memory_order_relaxed);
    span_sum sum = {.panel = pass->panel[worker], .copies = pass->copies[worker]};
    for (;;) {
        int span = atomic_fetch_add_explicit(&pass->next_span, 1, memory_order_relaxed);
        if (span >= pass->spans) {
            return;
        }
        sum.part = pass->parts + span * B * pass->padded;
        read_span(pass, span, &sum, &tile);
    }
}

/* v in the type of the products, scaled; padding and unused vectors stay zero. */
static void convert(const pass_call *pass, const double *v, int used) {
    const int64_t n = pass->rows->columns, lanes = pass->lanes;
    const double factor = ldexp(1.0, -pass->shift);
    for (int64_t c = 0; c < n; c += lanes) { /* the block is zero so far */
        const int64_t width = n - c < lanes ? n - c : lanes;
        for (int j = 0; j < used; j++) {
            const double *from = v + j * n + c;
            const int64_t place = c * B + j * lanes;
            for (int64_t i = 0; i < width && pass->rows->wide; i++) {
                pass->v.f64[place + i] = from[i] * factor;
            }
            for (int64_t i = 0; i < width && !pass->rows->wide; i++) {
                pass->v.f32[place + i] = (float)(from[i] * factor);
            }
        }
    }
}

static void add_sums(tm_pass_sums *total, const tm_pass_sums *sums) {
    for (int i = 0; i < B; i++) {
        for (int j = 0; j < B; j++) {
            total->gram[i][j] += sums->gram[i][j];
        }
    }
    total->sumsq += sums->sumsq;
    if (!(sums->absmax <= total->absmax)) {
        total->absmax = isnan(total->absmax) ? total->absmax : sums->absmax;
    }
}

/* Float sums of squares are taken unscaled, which their range in double allows. */
static void finish_sums(const pass_call *pass, tm_pass_sums *total) {
    memset(total, 0, sizeof *total);
    for (int span = 0; span < pass->spans; span++) {
        add_sums(total, &pass->sums[span]);
    }
    if (!pass->rows->wide) {
        total->sumsq = ldexp(total->sumsq, -2 * pass->shift);
    }
}

static int workers_for(const tm_rows *rows, int threads, int spans) {
    double worth = (double)rows->rows * (double)rows->columns * (double)rows->layout.item /
                   (double)rows->table->worker_bytes;
    int workers = threads < spans ? threads : spans;
    workers = worth < workers ? (int)worth : workers;
    return workers > 1 ? workers : 1;
}

/* Splits `memory` into v and the workers' panels and copies. */
static void place(pass_call *pass, char *memory, int workers, size_t block, size_t tile) {
    char *next = memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE);
    memset(next, 0, block * ((size_t)workers + 1));
    for (int i = -1; i < 2 * workers; i++) {
        block_real *room = i < 0 ? &pass->v : i < workers ? &pass->panel[i] : &pass->copies[i - workers];
        if (pass->rows->wide) {
            room->f64 = (void *)next;
        } else {
            room->f32 = (void *)next;
        }
        next += i < workers ? block : tile;
    }
}

tm_status tm_spectral_pass(const tm_rows *rows, const double *v, int used, int shift, int first, int threads,
                           double *z, tm_pass_sums *sums, tm_error *error) {
    const int64_t n = rows->columns;
    const size_t size = rows->wide ? sizeof(double) : sizeof(float);
    tm_pass_sums span_sums[SPANS];
    block_real panels[SPANS], copies[SPANS];
    pass_call pass = {.rows = rows,
                      .shift = shift,
                      .first = first,
                      .in_place = rows->direct && (rows->wide || rows->dtype == TM_F32),
                      .sums = span_sums,
                      .panel = panels,
                      .copies = copies};
    int64_t panel_count = (rows->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    pass.span_rows = (panel_count + SPANS - 1) / SPANS * PANEL_ROWS;
    pass.spans = (int)((rows->rows + pass.span_rows - 1) / pass.span_rows);
    pass.padded = (n + LANES - 1) / LANES * LANES;
    pass.lanes = rows->wide ? TM_SPECTRAL_LANES_F64 : TM_SPECTRAL_LANES_F32;
    pass.stretch = TM_SPECTRAL_SPAN_BYTES / (int64_t)size;
    pass.tile_height = (pass.in_place ? TILE_BYTES : COPY_BYTES) / (n * (int64_t)sizeof(float)) /
                       TM_SPECTRAL_ROWS * TM_SPECTRAL_ROWS;
    pass.tile_height = pass.tile_height < TM_SPECTRAL_ROWS ? TM_SPECTRAL_ROWS : pass.tile_height;
    pass.tile_height = pass.tile_height < TM_SPECTRAL_TILE ? pass.tile_height : TM_SPECTRAL_TILE;

    int workers = workers_for(rows, threads, pass.spans);
    const size_t columns = B * (size_t)pass.padded, block = columns * size; /* bytes */
    pass.copy_stride = pass.padded + LANES;
    const size_t tile = pass.in_place ? 0 : (size_t)(pass.tile_height * pass.copy_stride) * size;
    char *memory = NULL;
    double *parts = NULL;
    if (workers > 1) { /* every span's part apart; without memory for that, one worker */
        memory = tm_allocate(block * ((size_t)workers + 1) + tile * (size_t)workers + CACHE_LINE, 1);
        parts = memory != NULL ? tm_allocate(((size_t)pass.spans + 1) * columns, sizeof *parts) : NULL;
    }
    if (parts == NULL) {
        workers = 1;
        free(memory);
        memory = tm_allocate(block * 2 + tile + CACHE_LINE, 1);
        parts = memory != NULL ? tm_allocate(2 * columns, sizeof *parts) : NULL;
        if (parts == NULL) {
            free(memory);
            return tm_fail(error, TM_ERR_MEMORY, "no memory for vectors of %lld elements", (long long)n);
        }
    }
    double *total = parts;
    place(&pass, memory, workers, block, tile);
    convert(&pass, v, used);
    memset(total, 0, columns * sizeof *total);
    pass.parts = parts + columns;
    if (workers > 1) {
        tm_threads_run(workers, take_spans, &pass);
    }
    tile_rows buffer;
    span_sum sum = {.panel = panels[0], .copies = copies[0], .part = pass.parts, .total = total};
    for (int span = 0; span < pass.spans; span++) {
        if (workers == 1) {
            read_span(&pass, span, &sum, &buffer);
        } else {
            for (size_t i = 0; i < columns; i++) {
                total[i] += pass.parts[(size_t)span * columns + i];
            }
        }
    }
    for (int j = 0; j < used; j++) {
        memcpy(z + j * n, total + j * pass.padded, (size_t)n * sizeof *z);
    }
    finish_sums(&pass, sums);
    free(parts);
    free(memory);
    return TM_OK;
}
