/* exponent_histogram and underflow_shares: blocks to counts in the kernels, counts to rows here. Counts are
 * integers, and so no tree is needed. */
#include "tm_histogram.h"

#include "tm_layout.h"
#include "tm_threads.h"
#include "tm_work.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define MAX_CODES (TM_CAST_WIDTH(TM_MAX_FORMATS))
#define MAX_WIDTH (TM_HISTOGRAM_WIDTH > MAX_CODES ? TM_HISTOGRAM_WIDTH : MAX_CODES)

/* What a cast asks of one dtype of two bytes or more: how many elements lie from each code on. Codes of one
 * format follow one another: neither zero nor flushed, normal, overflowing. */
enum { CODE_NONZERO, CODE_NONFINITE, CODE_FIRST };
enum { CODE_KEPT, CODE_NORMAL, CODE_OVERFLOW, CODES_A_FORMAT };

typedef struct cast_limits {
    double scale;
    size_t format_count, code_count;
    tm_format_limits formats[TM_MAX_FORMATS];
    /* Both are set for the dtypes that are in the list: codes of the wide ones; of the one-byte ones what
     * becomes of each code, 2 bits a format: 1 + TM_CAST_..., or 0. */
    uint64_t codes[TM_DTYPE_COUNT][MAX_CODES];
    uint32_t fates[TM_DTYPE_COUNT][256];
} cast_limits;

typedef union count_row {
    tm_exponent_counts exponents;
    int64_t words[MAX_WIDTH];
} count_row;

_Static_assert(sizeof(tm_exponent_counts) == TM_HISTOGRAM_WIDTH * sizeof(int64_t), "a row is this struct");

typedef struct count_call {
    const tm_table *table;
    const tm_view *views;
    size_t count, width;
    int per_tensor, workers;
    const cast_limits *cast; /* NULL: exponents */
    int64_t *counts;
    const tm_plan *plan;
    atomic_size_t next;
} count_call;

/* ---- exponents ---- */

/* Dtypes without a kernel of their own for exponents: they have neither subnormals nor infinities. */
static void add_byte_exponents(tm_exponent_counts *to, tm_dtype dtype, const int64_t *times) {
    const double *values = tm_byte_values(dtype);
    for (int code = 0; code < 256; code++) {
        const double value = fabs(values[code]);
        if (isnan(value)) {
            to->nan += times[code];
        } else if (value == 0) {
            to->zero += times[code];
        } else {
            to->bin[ilogb(value) + 127] += times[code];
        }
    }
}

/* ---- casts ---- */

static void set_codes(cast_limits *cast, tm_dtype dtype) {
    uint64_t *codes = cast->codes[dtype];
    codes[CODE_NONZERO] = 1;
    codes[CODE_NONFINITE] = tm_format_nonfinite_code(dtype);
    for (size_t f = 0; f < cast->format_count; f++) {
        const tm_format_limits *limits = &cast->formats[f];
        uint64_t *own = codes + CODE_FIRST + CODES_A_FORMAT * f;
        own[CODE_KEPT] = tm_format_first_code(dtype, cast->scale, limits->flush, 0);
        own[CODE_NORMAL] = tm_format_first_code(dtype, cast->scale, limits->min_normal, 1);
        own[CODE_OVERFLOW] =
            tm_format_first_code(dtype, cast->scale, limits->overflow, limits->tie_overflows);
    }
}

static uint32_t fate_of(double value, double scale, const tm_format_limits *limits) {
    if (value == 0) {
        return 0;
    }
    if (!tm_format_is_beyond(value, scale, limits->flush, 0)) {
        return 1 + TM_CAST_UNDERFLOW;
    }
    if (!tm_format_is_beyond(value, scale, limits->min_normal, 1)) {
        return 1 + TM_CAST_SUBNORMAL;
    }
    return tm_format_is_beyond(value, scale, limits->overflow, limits->tie_overflows) ? 1 + TM_CAST_OVERFLOW
                                                                                      : 0;
}

static void set_fates(cast_limits *cast, tm_dtype dtype) {
    for (int code = 0; code < 256; code++) {
        const double value = fabs(tm_byte_values(dtype)[code]);
        uint32_t fates = 0;
        for (size_t f = 0; f < cast->format_count && isfinite(value); f++) {
            fates |= fate_of(value, cast->scale, &cast->formats[f]) << 2 * f;
        }
        cast->fates[dtype][code] = fates;
    }
}

static void set_limits(cast_limits *cast, const count_call *call, const tm_format *formats) {
    int seen[TM_DTYPE_COUNT] = {0};
    for (size_t f = 0; f < cast->format_count; f++) {
        cast->formats[f] = tm_format_limits_of(formats[f]);
    }
    for (size_t i = 0; i < call->count; i++) {
        const tm_dtype dtype = call->views[i].dtype;
        if (!seen[dtype] && tm_dtype_is_byte(dtype)) {
            set_fates(cast, dtype);
        } else if (!seen[dtype]) {
            set_codes(cast, dtype);
        }
        seen[dtype] = 1;
    }
}

static void add_losses(int64_t *row, const cast_limits *cast, const int64_t *from, int64_t n) {
    row[TM_CAST_FINITE] += n - from[CODE_NONFINITE];
    row[TM_CAST_NONZERO] += from[CODE_NONZERO] - from[CODE_NONFINITE];
    for (size_t f = 0; f < cast->format_count; f++) {
        const int64_t *own = from + CODE_FIRST + CODES_A_FORMAT * f;
        int64_t *losses = row + TM_CAST_FIRST + TM_CAST_LOSSES * f;
        losses[TM_CAST_UNDERFLOW] += from[CODE_NONZERO] - own[CODE_KEPT];
        losses[TM_CAST_SUBNORMAL] += own[CODE_KEPT] - own[CODE_NORMAL];
        losses[TM_CAST_OVERFLOW] += own[CODE_OVERFLOW] - from[CODE_NONFINITE];
    }
}

static void add_byte_losses(int64_t *row, const cast_limits *cast, tm_dtype dtype, const int64_t *times) {
    const double *values = tm_byte_values(dtype);
    for (int code = 0; code < 256; code++) {
        if (times[code] == 0 || !isfinite(values[code])) {
            continue;
        }
        row[TM_CAST_FINITE] += times[code];
        row[TM_CAST_NONZERO] += values[code] != 0 ? times[code] : 0;
        for (size_t f = 0; f < cast->format_count; f++) {
            const uint32_t fate = cast->fates[dtype][code] >> 2 * f & 3;
            if (fate != 0) {
                row[TM_CAST_FIRST + TM_CAST_LOSSES * f + fate - 1] += times[code];
            }
        }
    }
}

/* ---- both ---- */

/* Elements [start, start + count) of a view added to a row. */
static void count_range(const count_call *call, const tm_view *view, int64_t start, int64_t count,
                        count_row *row) {
    enum { PIECE = 1 << 30 }; /* the kernels count some things in 32 bits */
    _Alignas(64) char scratch[TM_SCRATCH_BYTES];
    const tm_histogram_kernels *kernels = call->table->histogram;
    const tm_dtype dtype = view->dtype;
    const int by_code = call->cast != NULL ? tm_dtype_is_byte(dtype) : kernels->exponents[dtype] == NULL;
    int64_t from[MAX_CODES > 256 ? MAX_CODES : 256] = {0}, step;
    tm_layout layout;

    tm_layout_init(&layout, view);
    for (int64_t done = 0; done < count; done += step) {
        const int64_t most = count - done < PIECE ? count - done : PIECE;
        const void *block = tm_layout_block(&layout, start + done, most, scratch, &step);
        if (by_code) {
            kernels->bytes(from, block, (size_t)step);
        } else if (call->cast != NULL) {
            kernels->at_least[dtype](from, call->cast->codes[dtype], call->cast->code_count, block,
                                     (size_t)step);
        } else {
            kernels->exponents[dtype](&row->exponents, block, (size_t)step);
        }
    }
    if (by_code && call->cast != NULL) {
        add_byte_losses(row->words, call->cast, dtype, from);
    } else if (by_code) {
        add_byte_exponents(&row->exponents, dtype, from);
    } else if (call->cast != NULL) {
        add_losses(row->words, call->cast, from, count);
    }
}

/* Workers share the rows; sums of integers don't depend on who comes first. */
static void add_row(const count_call *call, size_t tensor, count_row *row) {
    int64_t *to = call->counts + (call->per_tensor ? tensor * call->width : 0);
    for (size_t i = 0; i < call->width; i++) {
        if (row->words[i] == 0) {
            continue; /* adding 0 without a lock would undo what another worker adds meanwhile */
        }
        if (call->workers > 1) {
            __atomic_fetch_add(&to[i], row->words[i], __ATOMIC_RELAXED);
        } else {
            to[i] += row->words[i];
        }
    }
    memset(row->words, 0, call->width * sizeof *row->words);
}

static void count_units(void *context) {
    count_call *call = context;
    count_row row = {.words = {0}};
    size_t last = 0; /* the tensor whose counts are in the row */
    for (;;) {
        const size_t i = atomic_fetch_add_explicit(&call->next, 1, memory_order_relaxed);
        if (i >= (call->workers > 1 ? call->plan->count : call->count)) {
            break;
        }
        const size_t tensor = call->workers > 1 ? call->plan->units[i].tensor : i;
        const tm_view *view = &call->views[tensor];
        int64_t start = 0, most = view->n;
        if (call->workers > 1) {
            start = call->plan->units[i].first * TM_CHUNK;
            most = call->plan->units[i].chunks * TM_CHUNK;
        }
        if (call->per_tensor && tensor != last) {
            add_row(call, last, &row);
        }
        last = tensor;
        count_range(call, view, start, view->n - start < most ? view->n - start : most, &row);
    }
    if (call->count > 0) {
        add_row(call, last, &row);
    }
}

/* Clears the counts and fills them; `call` lacks table, plan and workers. */
static tm_status run(count_call *call, cast_limits *cast, const tm_format *formats, int threads,
                     tm_error *error) {
    tm_plan plan;
    tm_status status = tm_table_require(&call->table, error);
    if (status != TM_OK) {
        return status;
    }
    status = tm_plan_make(&plan, call->table, call->views, call->count, threads, error);
    if (status != TM_OK) {
        return status;
    }
    if (cast != NULL) {
        set_limits(cast, call, formats);
        call->cast = cast;
    }
    call->plan = &plan;
    call->workers = plan.workers;
    memset(call->counts, 0, (call->per_tensor ? call->count : 1) * call->width * sizeof *call->counts);
    tm_threads_run(plan.workers, count_units, call);
    tm_plan_release(&plan);
    return TM_OK;
}

tm_status tm_exponent_histogram(const tm_view *views, size_t count, int per_tensor, int threads,
                                int64_t *counts, tm_error *error) {
    count_call call = {.views = views,
                       .count = count,
                       .width = TM_HISTOGRAM_WIDTH,
                       .per_tensor = per_tensor,
                       .counts = counts};
    return run(&call, NULL, NULL, threads, error);
}

tm_status tm_cast_losses(const tm_view *views, size_t count, const tm_format *formats, size_t format_count,
                         double scale, int per_tensor, int threads, int64_t *counts, tm_error *error) {
    cast_limits cast = {.scale = scale, .format_count = format_count};
    count_call call = {.views = views,
                       .count = count,
                       .width = TM_CAST_WIDTH(format_count),
                       .per_tensor = per_tensor,
                       .counts = counts};
    cast.code_count = CODE_FIRST + CODES_A_FORMAT * format_count;
    if (format_count > TM_MAX_FORMATS) {
        return tm_fail(error, TM_ERR_VALUE, "%zu formats, at most %d at once", format_count, TM_MAX_FORMATS);
    }
    for (size_t f = 0; f < format_count; f++) {
        if ((unsigned)formats[f] >= TM_FORMAT_COUNT) {
            return tm_fail(error, TM_ERR_VALUE, "format %zu: %d is unknown", f, (int)formats[f]);
        }
    }
    if (!(isfinite(scale) && scale > 0)) {
        return tm_fail(error, TM_ERR_VALUE, "the scale must be a finite number above 0");
    }
    return run(&call, &cast, formats, threads, error);
}
