/* One read of a matrix: Y = W V and Z = W'Y for a block of vectors.
 *
 * Rows are read in tiles: Y for a tile, then Z += W'Y while the tile is cached. Z is summed up in the type of
 * the products over panels of 256 rows and then added to doubles; before a panel's products Y is divided by a
 * power of two near its largest element, because Z has the square of the matrix' scale. Panels are grouped in
 * at most 16 spans of rows whose sums are added in their order: threads take whole spans, so that their
 * number changes no bit. */
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
#define TILE_ROWS 64                /* at most */
#define TILE_BYTES (192 * 1024)     /* of floats: this tile and the next share an L2 with v and z */
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
    int spans, shift, first;
    double *z;          /* [spans or 1][B][columns] */
    int keep_spans;     /* z has room for every span */
    tm_pass_sums *sums; /* [spans] */
    block_real *panel;  /* [workers] */
    atomic_int next_span, next_worker;
} pass_call;

/* What a worker keeps on its stack: a few rows of one span of columns, and the tile's Y. */
typedef struct tile_rows {
    double y[TILE_ROWS][B];
    union {
        float f32[TILE_ROWS][B];
        double f64[TILE_ROWS][B];
    } factor;
    _Alignas(64) char wide[TM_SPECTRAL_ROWS][TM_SPECTRAL_SPAN_BYTES]; /* rows that are copied or widened */
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
} tile_rows;

/* Pointers to the same columns of TM_SPECTRAL_ROWS rows in the type of the products; rows that the tile does
 * not have repeat the last one. */
static void fetch(const tm_rows *rows, tile_rows *tile, int64_t row, int64_t have, int64_t first,
                  int64_t count, const void **w) {
    const int native = rows->dtype == TM_F64 || rows->dtype == TM_F32;
    for (int r = 0; r < TM_SPECTRAL_ROWS; r++) {
        if (r >= have) {
            w[r] = w[r - 1];
            continue;
        }
        if (native) {
            w[r] = tm_rows_piece(rows, row + r, first, count, tile->wide[r]);
            continue;
        }
        const void *piece = tm_rows_piece(rows, row + r, first, count, tile->scratch);
        void *out = tile->wide[r];
        rows->table->widen->to_f32[rows->dtype](out, piece, (size_t)count, tm_byte_values(rows->dtype));
        w[r] = out;
    }
}

/* The rows that take these rows' place in the next tile. */
static void look_ahead(const pass_call *pass, int64_t row, int64_t first, tm_spectral_ahead *ahead) {
    const tm_rows *rows = pass->rows;
    ahead->step = (size_t)pass->lanes * rows->layout.item;
    for (int64_t r = 0; r < TM_SPECTRAL_ROWS; r++) {
        const int64_t next = row + r + pass->tile_height;
        ahead->row[r] = rows->direct && next < rows->rows ? tm_rows_piece(rows, next, first, 0, NULL) : NULL;
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

static void backward(const pass_call *pass, const void **w, int64_t have, int64_t first, int64_t count,
                     const tile_rows *tile, int64_t row, block_real panel, const tm_spectral_ahead *ahead) {
    const tm_spectral_kernels *kernels = pass->rows->table->spectral;
    size_t used = have < TM_SPECTRAL_ROWS ? (size_t)have : TM_SPECTRAL_ROWS;
    if (pass->rows->wide) {
        kernels->backward_f64((const double *const *)w, used, (size_t)count, tile->factor.f64 + row,
                              panel.f64 + first * B, ahead);
    } else {
        kernels->backward_f32((const float *const *)w, used, (size_t)count, tile->factor.f32 + row,
                              panel.f32 + first * B, ahead);
    }
}

/* Sum of squares and largest magnitude by the norms' kernels, one stretch of columns being a chunk. */
static void add_norms(const pass_call *pass, const void *w, int64_t count, tm_pass_sums *sums) {
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
    sums->sumsq += state.total;
    memset(&state, 0, offsetof(tm_norm_state, bytes));
    norm->block[TM_KERNEL_NORM_INF][dtype](&state, w, (size_t)count);
    norm->finish[TM_KERNEL_NORM_INF][dtype](&state, NULL);
    if (!(state.total <= sums->absmax)) { /* NaN comes in and stays */
        sums->absmax = isnan(sums->absmax) ? sums->absmax : state.total;
    }
}

/* Adds the panel, times 2^exponent, to z and clears it. */
static void fold(const pass_call *pass, block_real panel, int exponent, double *z) {
    const int64_t n = pass->rows->columns, lanes = pass->lanes;
    const double factor = ldexp(1.0, exponent);
    for (int64_t c = 0; c < n; c += lanes) {
        const int64_t width = n - c < lanes ? n - c : lanes;
        for (int j = 0; j < B; j++) {
            double *out = z + j * n + c;
            if (pass->rows->wide) {
                const double *in = panel.f64 + c * B + j * lanes;
                for (int64_t i = 0; i < width; i++) {
                    out[i] += factor * in[i];
                }
            } else {
                const float *in = panel.f32 + c * B + j * lanes;
                for (int64_t i = 0; i < width; i++) {
                    out[i] += factor * (double)in[i];
                }
            }
        }
    }
    memset(pass->rows->wide ? (void *)panel.f64 : (void *)panel.f32, 0,
           (size_t)(B * pass->padded) * (pass->rows->wide ? sizeof(double) : sizeof(float)));
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

static void read_tile(const pass_call *pass, tile_rows *tile, int64_t row, int64_t count, block_real panel,
                      int *exponent, double *z, tm_pass_sums *sums) {
    const tm_rows *rows = pass->rows;
    const int64_t n = rows->columns;
    const void *w[TM_SPECTRAL_ROWS];
    memset(tile->y, 0, sizeof tile->y);
    tm_spectral_ahead ahead;
    for (int64_t c = 0; c < n; c += pass->stretch) {
        int64_t width = n - c < pass->stretch ? n - c : pass->stretch;
        for (int64_t r = 0; r < count; r += TM_SPECTRAL_ROWS) {
            fetch(rows, tile, row + r, count - r, c, width, w);
            look_ahead(pass, row + r, c, &ahead);
            forward(pass, w, c, width, tile->y + r, &ahead);
            for (int64_t i = 0; pass->first && i < TM_SPECTRAL_ROWS && r + i < count; i++) {
                add_norms(pass, w[i], width, sums);
            }
        }
    }
    double high = largest(tile->y, count);
    if (!(high > 0) || !(high <= DBL_MAX)) { /* zeros, or a first pass that will be made again or given up */
        return;
    }
    rows->table->spectral->gram((const double (*)[B])tile->y, (size_t)count, sums->gram);
    int needed;
    frexp(high, &needed);
    if (needed > *exponent + EXPONENT_SLACK) {
        if (*exponent > INT_MIN / 2) {
            fold(pass, panel, *exponent, z);
        }
        *exponent = needed;
    }
    /* in two steps: one power of two for both may be out of range */
    const double size = ldexp(1.0, -*exponent), shift = ldexp(1.0, -pass->shift);
    for (int64_t r = 0; r < count; r++) {
        for (int j = 0; j < B; j++) {
            if (rows->wide) {
                tile->factor.f64[r][j] = tile->y[r][j] * size * shift;
            } else {
                tile->factor.f32[r][j] = (float)(tile->y[r][j] * size * shift);
            }
        }
    }
    for (int64_t c = 0; c < n; c += pass->stretch) {
        int64_t width = n - c < pass->stretch ? n - c : pass->stretch;
        for (int64_t r = 0; r < count; r += TM_SPECTRAL_ROWS) {
            fetch(rows, tile, row + r, count - r, c, width, w);
            look_ahead(pass, row + r, c, &ahead);
            backward(pass, w, count - r, c, width, tile, r, panel, &ahead);
        }
    }
}

static void read_span(const pass_call *pass, int span, block_real panel, tile_rows *tile, double *z) {
    tm_pass_sums *sums = &pass->sums[span];
    int64_t row = span * pass->span_rows, end = row + pass->span_rows;
    end = end < pass->rows->rows ? end : pass->rows->rows;
    memset(sums, 0, sizeof *sums);
    while (row < end) {
        int64_t stop = row + PANEL_ROWS < end ? row + PANEL_ROWS : end;
        int exponent = INT_MIN / 2;
        for (; row < stop; row += pass->tile_height) {
            int64_t count = stop - row < pass->tile_height ? stop - row : pass->tile_height;
            read_tile(pass, tile, row, count, panel, &exponent, z, sums);
        }
        row = stop;
        if (exponent > INT_MIN / 2) {
            fold(pass, panel, exponent, z);
        }
    }
}

static void take_spans(void *context) {
    pass_call *pass = context;
    tile_rows tile;
    block_real panel = pass->panel[atomic_fetch_add_explicit(&pass->next_worker, 1, memory_order_relaxed)];
    for (;;) {
        int span = atomic_fetch_add_explicit(&pass->next_span, 1, memory_order_relaxed);
        if (span >= pass->spans) {
            return;
        }
        read_span(pass, span, panel, &tile, pass->z + span * B * pass->rows->columns);
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

tm_status tm_spectral_pass(const tm_rows *rows, const double *v, int used, int shift, int first, int threads,
                           double *z, tm_pass_sums *sums, tm_error *error) {
    const int64_t n = rows->columns;
    const size_t size = rows->wide ? sizeof(double) : sizeof(float);
    tm_pass_sums span_sums[SPANS];
    block_real panels[SPANS];
    pass_call pass = {.rows = rows, .shift = shift, .first = first, .sums = span_sums, .panel = panels};
    int64_t panel_count = (rows->rows + PANEL_ROWS - 1) / PANEL_ROWS;
    pass.span_rows = (panel_count + SPANS - 1) / SPANS * PANEL_ROWS;
    pass.spans = (int)((rows->rows + pass.span_rows - 1) / pass.span_rows);
    pass.padded = (n + LANES - 1) / LANES * LANES;
    pass.lanes = rows->wide ? TM_SPECTRAL_LANES_F64 : TM_SPECTRAL_LANES_F32;
    pass.stretch = TM_SPECTRAL_SPAN_BYTES / (int64_t)size;
    pass.tile_height = TILE_BYTES / (n * (int64_t)sizeof(float)) / TM_SPECTRAL_ROWS * TM_SPECTRAL_ROWS;
    pass.tile_height = pass.tile_height < TM_SPECTRAL_ROWS ? TM_SPECTRAL_ROWS : pass.tile_height;
    pass.tile_height = pass.tile_height < TILE_ROWS ? pass.tile_height : TILE_ROWS;

    int workers = workers_for(rows, threads, pass.spans);
    const size_t block = (size_t)B * (size_t)pass.padded * size; /* bytes */
    char *memory = NULL;
    double *parts = NULL;
    if (workers > 1) { /* every span's z apart; without memory for that, one worker */
        memory = tm_allocate(block * ((size_t)workers + 1) + CACHE_LINE, 1);
        parts = memory != NULL ? tm_allocate((size_t)pass.spans * B * (size_t)n, sizeof *parts) : NULL;
    }
    if (parts == NULL) {
        workers = 1;
        free(memory);
        memory = tm_allocate(block * 2 + CACHE_LINE, 1);
        parts = memory != NULL ? tm_allocate((size_t)B * (size_t)n, sizeof *parts) : NULL;
        if (parts == NULL) {
            free(memory);
            return tm_fail(error, TM_ERR_MEMORY, "no memory for vectors of %lld elements", (long long)n);
        }
    }
    char *aligned = memory + (CACHE_LINE - (uintptr_t)memory % CACHE_LINE);
    memset(aligned, 0, block * ((size_t)workers + 1));
    for (int i = -1; i < workers; i++, aligned += block) {
        block_real *vectors = i < 0 ? &pass.v : &panels[i];
        if (rows->wide) {
            vectors->f64 = (void *)aligned;
        } else {
            vectors->f32 = (void *)aligned;
        }
    }
    convert(&pass, v, used);
    memset(z, 0, (size_t)used * (size_t)n * sizeof *z);
    pass.z = parts;
    if (workers > 1) {
        memset(parts, 0, (size_t)pass.spans * B * (size_t)n * sizeof *parts);
        tm_threads_run(workers, take_spans, &pass);
    }
    tile_rows tile;
    for (int span = 0; span < pass.spans; span++) {
        double *part = parts;
        if (workers > 1) {
            part += span * B * n;
        } else {
            memset(parts, 0, (size_t)B * (size_t)n * sizeof *parts);
            read_span(&pass, span, panels[0], &tile, parts);
        }
        for (int64_t i = 0; i < used * n; i++) {
            z[i] += part[i];
        }
    }
    finish_sums(&pass, sums);
    free(parts);
    free(memory);
    return TM_OK;
}
