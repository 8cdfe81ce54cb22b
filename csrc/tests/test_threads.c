/* Worker threads and a failing allocator change no bit; lists behave as one vector. */
#include "runner.h"

#include "../core/tm_memory.h"

#include <math.h>
#include <stdlib.h>

enum { TENSORS = 9 };
static const int64_t lengths[TENSORS] = {0, 5, 65536 * 9 + 4, 1, 65536, 70000, 0, 65536 * 4, 333};

typedef struct outcome {
    tm_stats stats[TENSORS];
    double total[3], per_tensor[3][TENSORS];
    tm_nonfinite found;
} outcome;

static void run(const tm_view *views, int threads, outcome *out) {
    tm_error error = {""};
    CHECK(tm_tensor_stats(views, TENSORS, threads, out->stats, &error) == TM_OK, "%s", error.text);
    for (int order = 0; order < 3; order++) {
        CHECK(tm_multi_norm(views, TENSORS, (tm_norm_order)order, threads, &out->total[order],
                            out->per_tensor[order], &error) == TM_OK,
              "%s", error.text);
    }
    CHECK(tm_scan_nonfinite(views, TENSORS, threads, &out->found, &error) == TM_OK, "%s", error.text);
}

static void compare(const outcome *a, const outcome *b, const char *what, int threads, tm_dtype dtype) {
    for (int i = 0; i < TENSORS; i++) {
        CHECK(same_stats(&a->stats[i], &b->stats[i]), "%s %d, %s: tensor %d", what, threads,
              tm_dtype_name(dtype), i);
        for (int order = 0; order < 3; order++) {
            CHECK(same_double(a->per_tensor[order][i], b->per_tensor[order][i]), "%s %d, %s: tensor %d", what,
                  threads, tm_dtype_name(dtype), i);
        }
    }
    for (int order = 0; order < 3; order++) {
        CHECK(same_double(a->total[order], b->total[order]), "%s %d, %s", what, threads,
              tm_dtype_name(dtype));
    }
    CHECK(a->found.tensor == b->found.tensor && a->found.index == b->found.index, "%s %d, %s", what, threads,
          tm_dtype_name(dtype));
}

static int allocations_left;

static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

static void check_list(tm_dtype dtype, char *const *data, int bad) {
    tm_view views[TENSORS];
    outcome one, many;
    for (int i = 0; i < TENSORS; i++) {
        fill_finite(data[i], lengths[i], dtype);
        views[i] = flat(data[i], lengths[i], dtype);
    }
    if (bad) {
        put_nonfinite(data[7], 65536 + 3, dtype, 0);
        put_nonfinite(data[5], 66000, dtype, 0);
        put_nonfinite(data[5], 66005, dtype, 0);
    }
    run(views, 1, &one);
    for (int threads = 2; threads <= 7; threads += threads < 4 ? 1 : 3) {
        run(views, threads, &many);
        compare(&one, &many, "threads", threads, dtype);
    }
    for (int left = 0; left < 4; left++) { /* each of the allocations fails in turn */
        allocations_left = left;
        tm_memory_set_allocator(failing);
        run(views, 3, &many);
        tm_memory_set_allocator(NULL);
        compare(&one, &many, "allocations", left, dtype);
    }
}

static void check_arguments(void) {
    float values[] = {3, 4};
    tm_view views[] = {flat(&values[0], 1, TM_F32), flat(NULL, 0, TM_F32), flat(&values[1], 1, TM_F32)};
    tm_error error = {""};
    double total = -1, each[3];
    CHECK(tm_multi_norm(views, 3, TM_NORM_2, 0, &total, NULL, &error) == TM_ERR_VALUE, "no threads");
    CHECK(tm_multi_norm(views, 3, (tm_norm_order)7, 1, &total, NULL, &error) == TM_ERR_VALUE,
          "unknown order");
    const double expect[] = {5, 7, 4};
    for (int order = 0; order < 3; order++) {
        CHECK(tm_multi_norm(views, 3, (tm_norm_order)order, 1, &total, each, &error) == TM_OK, "%s",
              error.text);
        CHECK(total == expect[order] && each[0] == 3 && each[1] == 0 && each[2] == 4, "order %d: %g", order,
              total);
        CHECK(tm_multi_norm(NULL, 0, (tm_norm_order)order, 1, &total, NULL, &error) == TM_OK && total == 0,
              "none");
        CHECK(tm_multi_norm(&views[1], 1, (tm_norm_order)order, 1, &total, NULL, &error) == TM_OK &&
                  total == 0,
              "empty");
    }
}

void test_threads(void) {
    char *data[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        data[i] = malloc((size_t)lengths[i] * 8 + 8);
        if (data[i] == NULL) {
            CHECK(0, "no memory for the test");
            return;
        }
    }
    check_arguments();
    tm_dispatch_set_worker_bytes(1000);
    for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
        for (int bad = 0; bad < 2; bad++) {
            if (sampled()) {
                check_list((tm_dtype)dtype, data, bad);
            }
        }
    }
    tm_dispatch_set_worker_bytes((size_t)16 << 20);
    for (int i = 0; i < TENSORS; i++) {
        free(data[i]);
    }
}
