/* Strided, reversed, broadcast, transposed, misaligned and empty views give the bits of their contiguous
 * copies. */
#include "runner.h"

#include <stdlib.h>

#define MAX_AXES 5
#define ROOM 20000

/* The contiguous copy by the definition of strides. */
static void copy_out(const tm_view *view, char *out) {
    size_t size = tm_dtype_size(view->dtype);
    for (int64_t i = 0; i < view->n; i++) {
        const char *element = view->data;
        int64_t rest = i;
        for (int axis = view->ndim - 1; axis >= 0; axis--) {
            element += rest % view->shape[axis] * view->strides[axis];
            rest /= view->shape[axis];
        }
        memcpy(out + (size_t)i * size, element, size);
    }
}

static void check_view(tm_view view, const char *what) {
    char *copy = malloc((size_t)view.n * 8 + 8);
    if (copy == NULL) {
        CHECK(0, "no memory for the test");
        return;
    }
    copy_out(&view, copy);
    tm_view contiguous = flat(copy, view.n, view.dtype);
    tm_stats got = stats_of(view, 1), expect = stats_of(contiguous, 1);
    CHECK(same_stats(&got, &expect), "%s %s", what, tm_dtype_name(view.dtype));
    for (int order = 0; order < 3; order++) {
        double a = norm_of(view, (tm_norm_order)order, 1), b = norm_of(contiguous, (tm_norm_order)order, 1);
        CHECK(same_double(a, b), "%s %s norm %d", what, tm_dtype_name(view.dtype), order);
    }
    CHECK(scan_of(view, 1).index == scan_of(contiguous, 1).index, "%s %s", what, tm_dtype_name(view.dtype));
    CHECK(tm_plain_read_views(&view, 1) == tm_plain_read_views(&contiguous, 1) || view.n * 8 > TM_CHUNK, "%s",
          what);
    free(copy);
}

/* A random view into `data`: axes of random length and order, some reversed, repeated or of length 1. */
static void check_random(const char *data, tm_dtype dtype) {
    int64_t shape[MAX_AXES], strides[MAX_AXES], n = 1, reach = (int64_t)tm_dtype_size(dtype), back = 0;
    int32_t ndim = (int32_t)(next_random() % (MAX_AXES + 1));
    for (int32_t axis = ndim - 1; axis >= 0; axis--) {
        shape[axis] = (int64_t)(next_random() % 7) + (next_random() % 9 == 0 ? 40 : 0);
        strides[axis] = reach * (int64_t)(1 + next_random() % 2) + (int64_t)(next_random() % 3 == 0);
        if (shape[axis] <= 1) {
            strides[axis] = (int64_t)next_random(); /* means nothing */
        } else if (next_random() % 6 == 0) {
            strides[axis] = 0;
        } else {
            int64_t far = reach + strides[axis] * (shape[axis] - 1);
            if (far > ROOM) {
                shape[axis] = 1;
            } else {
                reach = far;
                if (next_random() % 3 == 0) {
                    back += strides[axis] * (shape[axis] - 1);
                    strides[axis] = -strides[axis];
                }
            }
        }
        n *= shape[axis];
    }
    if (ndim >= 2 && next_random() % 2) { /* transposed */
        int64_t length = shape[0], stride = strides[0];
        shape[0] = shape[ndim - 1];
        strides[0] = strides[ndim - 1];
        shape[ndim - 1] = length;
        strides[ndim - 1] = stride;
    }
    tm_view view = {data + back + next_random() % 3, shape, strides, n, ndim, dtype};
    check_view(view, "random view");
}

static void check_cases(void) {
    double a[3][4], base[3] = {0, 0, 0};
    unsigned char packed[4][5];
    float two = 2;
    for (int i = 0; i < 12; i++) {
        a[i / 4][i % 4] = i;
    }
    for (int i = 0; i < 4; i++) {
        float x = i == 0 ? 3 : i == 1 ? 4 : 0;
        packed[i][0] = 0xff;
        memcpy(&packed[i][1], &x, sizeof x);
    }
    int64_t shape[] = {3, 4}, reversed[] = {32, -8}, broadcast[] = {0, 0}, three_five[] = {3, 5},
            four[] = {4}, five[] = {5};
    tm_view views[] = {{&a[0][3], shape, reversed, 12, 2, TM_F64},
                       {&packed[0][1], four, five, 4, 1, TM_F32},
                       {&two, three_five, broadcast, 15, 2, TM_F32}};
    CHECK(norm_of(views[0], TM_NORM_2, 1) == 22.494443758403985, "reversed columns");
    CHECK(norm_of(views[1], TM_NORM_2, 1) == 5, "field of a packed record");
    CHECK(norm_of(views[2], TM_NORM_2, 1) == 7.745966692414834, "broadcast scalar");
    put_nonfinite(a, 2, TM_F64, 0);
    CHECK(scan_of(views[0], 1).index == 1, "index in C order of the view");

    int64_t none[] = {3, 0, 2}, wild[] = {INT64_MIN, 7, INT64_MAX};
    tm_view empty = {NULL, none, wild, 0, 3, TM_F64}, scalar = {base, NULL, wild, 1, 0, TM_F64};
    tm_stats stats = stats_of(empty, 1), expect = reference_stats(base, 0, TM_F64);
    CHECK(same_stats(&stats, &expect) && norm_of(empty, TM_NORM_INF, 1) == 0, "empty view");
    CHECK(stats_of(scalar, 1).n_zero == 1, "0-d");

    tm_error error = {""};
    tm_view wrong = {a, shape, reversed, 13, 2, TM_F64};
    CHECK(tm_tensor_stats(&wrong, 1, 1, &stats, &error) == TM_ERR_VALUE, "shape and n disagree");
}

void test_layout(void) {
    static _Alignas(64) char data[(ROOM + 64) * 2];
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        check_cases();
        for (int i = 0; i < 1500; i++) {
            fill_random(data, i % 16 == 0 ? sizeof data : 64);
            check_random(data, (tm_dtype)(next_random() % TM_DTYPE_COUNT));
        }
    }
    /* several chunks, none of them readable in place: every second element */
    int64_t n = 2 * 65536 + 4097, shape[] = {n}, strides[] = {8};
    float *wide = malloc((size_t)n * 8);
    if (wide != NULL) {
        fill_finite(wide, 2 * n, TM_F32);
        check_view((tm_view){wide, shape, strides, n, 1, TM_F32}, "two chunks and more, strided");
    }
    free(wide);
    tm_dispatch_init(NULL);
}
