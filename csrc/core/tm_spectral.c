/* Lists of matrices: who takes which way, and threads over matrices or within one. */
#include "tm_spectral.h"

#include "tm_spectral_parts.h"
#include "tm_threads.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

void tm_spectral_null(tm_spectral *out, tm_spectral_stop stop, int64_t passes) {
    const double nan = (double)NAN;
    *out = (tm_spectral){.stable_rank = nan,
                         .low = nan,
                         .high = nan,
                         .sigma = nan,
                         .norm = nan,
                         .passes = passes,
                         .stopped_by = stop};
}

typedef struct matrix_list {
    const tm_table *table;
    const tm_matrix *matrices;
    size_t count;
    const tm_spectral_options *options;
    tm_spectral *out;
    int threads; /* within a matrix */
    atomic_size_t next;
    atomic_int failed; /* 1 once `status` and `error` are taken */
    tm_status status;
    tm_error error;
} matrix_list;

static void clear_warm(const tm_matrix *matrix) {
    if (matrix->warm_after != NULL) {
        memset(matrix->warm_after, 0, TM_SPECTRAL_WARM * (size_t)matrix->columns * sizeof(float));
    }
}

static tm_status one(const matrix_list *list, size_t index, tm_error *error) {
    const tm_matrix *matrix = &list->matrices[index];
    tm_spectral *out = &list->out[index];
    int64_t side = matrix->rows < matrix->columns ? matrix->rows : matrix->columns;
    tm_rows rows;
    clear_warm(matrix);
    if (side == 0) {
        tm_spectral_null(out, TM_STOP_ZERO, 0);
        return TM_OK;
    }
    tm_rows_init(&rows, list->table, matrix);
    if (side <= list->options->exact_side) {
        return tm_spectral_exact(&rows, out, error);
    }
    return tm_spectral_iterate(&rows, matrix, (uint32_t)index, list->options, list->threads, out, error);
}

static void take_matrices(void *context) {
    matrix_list *list = context;
    for (;;) {
        size_t index = atomic_fetch_add_explicit(&list->next, 1, memory_order_relaxed);
        tm_error error;
        if (index >= list->count || atomic_load(&list->failed)) {
            return;
        }
        tm_status status = one(list, index, &error);
        if (status != TM_OK && !atomic_exchange(&list->failed, 1)) {
            list->status = status;
            list->error = error;
        }
    }
}

static tm_status check(const tm_matrix *matrices, size_t count, const tm_spectral_options *options,
                       tm_error *error) {
    if (!(options->tolerance > 0) || !isfinite(options->tolerance)) {
        return tm_fail(error, TM_ERR_VALUE, "tolerance must be above 0 and finite, not %g",
                       options->tolerance);
    }
    if (!(options->epsilon > 0 && options->epsilon <= 0.5)) {
        return tm_fail(error, TM_ERR_VALUE, "epsilon must be above 0 and at most 0.5, not %g",
                       options->epsilon);
    }
    if (options->threads < 1) {
        return tm_fail(error, TM_ERR_VALUE, "threads must be 1 or more, not %d", options->threads);
    }
    for (size_t i = 0; i < count; i++) {
        const tm_matrix *matrix = &matrices[i];
        if (matrix->dtype > TM_F8E8M0FNU) {
            return tm_fail(error, TM_ERR_DTYPE,
                           "matrix %zu: %s has no stable rank here: pass floating-point elements", i,
                           tm_dtype_name(matrix->dtype));
        }
        if (matrix->columns > INT32_MAX / 2) {
            return tm_fail(error, TM_ERR_VALUE, "matrix %zu: rows of %lld elements are too long", i,
                           (long long)matrix->columns);
        }
    }
    return TM_OK;
}

/* Several matrices: a worker takes whole ones. One, or fewer than threads: the rest reads within a matrix. */
tm_status tm_stable_rank(const tm_matrix *matrices, size_t count, const tm_spectral_options *options,
                         tm_spectral *out, tm_error *error) {
    matrix_list list = {.matrices = matrices, .count = count, .options = options, .out = out};
    tm_status status = tm_table_require(&list.table, error);
    if (status == TM_OK) {
        status = check(matrices, count, options, error);
    }
    if (status != TM_OK || count == 0) {
        return status;
    }
    int workers = (size_t)options->threads < count ? options->threads : (int)count;
    workers = workers < TM_MAX_WORKERS ? workers : TM_MAX_WORKERS;
    list.threads = options->threads / workers;
    tm_threads_run(workers, take_matrices, &list);
    if (list.status != TM_OK) {
        *error = list.error;
    }
    return list.status;
}
