/* Widening: every code of the narrow types, every length around the lanes, strided views, in each tier. */
#include "../core/tm_wide.h"
#include "digest.h"
#include "runner.h"

#include <math.h>
#include <stdlib.h>

static uint64_t digest;

static void check_part(const tm_view *view, int64_t start, int64_t count, const void *flat_data) {
    const tm_table *table = tm_table_get();
    tm_layout layout;
    double wide[300];
    float narrow[300];
    tm_layout_init(&layout, view);
    tm_wide_f64(table, &layout, view->dtype, start, count, wide);
    digest_doubles(&digest, wide, (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        double expected = reference_value(flat_data, start + i, view->dtype);
        CHECK(same_double(wide[i], expected), "%s element %d", tm_dtype_name(view->dtype), (int)(start + i));
    }
    if (!tm_wide_has_f32(table, view->dtype)) {
        return;
    }
    tm_wide_f32(table, &layout, view->dtype, start, count, narrow);
    digest_floats(&digest, narrow, (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        double expected = reference_value(flat_data, start + i, view->dtype);
        CHECK(same_double((double)narrow[i], expected), "%s element %d as float", tm_dtype_name(view->dtype),
              (int)(start + i));
    }
}

static void check_dtype(tm_dtype dtype) {
    enum { N = 300 };
    uint64_t data[N], spread[2 * N];
    size_t size = tm_dtype_size(dtype);
    fill_random(data, sizeof data);
    for (size_t i = 0; i < N; i++) {
        memcpy((char *)spread + 2 * i * size, (char *)data + i * size, size);
    }
    int64_t shape[1] = {N}, strides[1] = {2 * (int64_t)size};
    tm_view whole = flat(data, N, dtype);
    tm_view strided = {.data = spread, .shape = shape, .strides = strides, .n = N, .ndim = 1, .dtype = dtype};
    for (int64_t count = 0; count < 70; count++) {
        check_part(&whole, count % 3, count, data);
        check_part(&strided, count % 5, count, data);
    }
    check_part(&whole, 0, N, data);
}

static void check_codes(tm_dtype dtype) {
    static uint16_t codes[65536];
    for (int code = 0; code < 65536; code++) {
        codes[code] = (uint16_t)code;
    }
    tm_view view = flat(codes, 65536, dtype);
    for (int64_t start = 0; start < 65536; start += 256) {
        check_part(&view, start, 256, codes);
    }
}

void test_widen(void) {
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        uint64_t before = seed_random(5);
        digest = DIGEST_START;
        tm_dispatch_init(tier_name(tier));
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            check_dtype((tm_dtype)dtype);
        }
        check_codes(TM_F16);
        check_codes(TM_BF16);
        check_digest("widen", digest, UINT64_C(0x03169204a84ba68f));
        seed_random(before);
    }
    tm_dispatch_init(NULL);
}
