/* Staging in every tier: what arrives, gaps, both ways of writing, threads, failing allocations, refusals. */
#include "../core/tm_fingerprint.h"
#include "../core/tm_memory.h"
#include "../core/tm_stage.h"
#include "digest.h"
#include "runner.h"

#include <stdlib.h>

enum { COUNT = 6, GUARD = 64 };
/* elements; the sum makes streaming worth its while only for the wide dtypes, so both ways are run */
static const int64_t lengths[COUNT] = {65536 * 5 + 3, 0, 1, 70000, 33, 65536 * 2};

static int allocations_left;

static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

typedef struct outcome {
    tm_stats stats[COUNT];
    uint64_t prints[COUNT][2];
} outcome;

static int all_are(const unsigned char *p, size_t n, unsigned char value) {
    for (size_t i = 0; i < n; i++) {
        if (p[i] != value) {
            return 0;
        }
    }
    return 1;
}

static void check_list(const char *data, char *memory, tm_dtype dtype, int bits, size_t skip, int threads,
                       int allocations) {
    size_t item = tm_dtype_size(dtype);
    int64_t offsets[COUNT], bytes = 0;
    tm_view views[COUNT];
    outcome expected, got;
    tm_error error = {""};
    char *arena = memory + GUARD + skip;
    for (int i = 0; i < COUNT; i++) {
        views[i] = flat(data + (size_t)i * item, lengths[i], dtype);
    }
    int64_t shape[1] = {lengths[3]}, strides[1] = {2 * (int64_t)item};
    views[3].shape = shape;
    views[3].strides = strides;
    CHECK(tm_tensor_stats(views, COUNT, 1, expected.stats, &error) == TM_OK, "%s", error.text);
    CHECK(tm_fingerprint(views, NULL, COUNT, bits, 1, expected.prints, &error) == TM_OK, "%s", error.text);
    CHECK(tm_stage_place(views, COUNT, offsets, &bytes, &error) == TM_OK, "%s", error.text);
    memset(memory, 0xee, GUARD + skip + (size_t)bytes + GUARD);
    allocations_left = allocations;
    tm_memory_set_allocator(failing);
    CHECK(tm_stage(views, COUNT, arena, (size_t)bytes, bits, threads, got.stats, got.prints, offsets,
                   &error) == TM_OK,
          "%s", error.text);
    tm_memory_set_allocator(NULL);
    CHECK(memcmp(expected.prints, got.prints, sizeof got.prints) == 0, "%s: fingerprints",
          tm_dtype_name(dtype));
    for (int i = 0; i < COUNT; i++) {
        CHECK(same_stats(&expected.stats[i], &got.stats[i]), "%s: statistics of %d", tm_dtype_name(dtype), i);
        size_t size = (size_t)lengths[i] * item;
        int64_t next = i + 1 < COUNT ? offsets[i + 1] : bytes;
        CHECK(offsets[i] % TM_STAGE_ALIGN == 0 && next - offsets[i] - (int64_t)size < TM_STAGE_ALIGN,
              "offset %d", i);
        CHECK(all_are((unsigned char *)arena + offsets[i] + size, (size_t)(next - offsets[i]) - size, 0),
              "gap %d", i);
        if (i != 3) {
            CHECK(memcmp(arena + offsets[i], views[i].data, size) == 0, "%s: bytes of %d",
                  tm_dtype_name(dtype), i);
        }
        for (size_t k = 0; i == 3 && k < (size_t)lengths[3]; k++) {
            CHECK(memcmp(arena + offsets[i] + k * item, (const char *)views[i].data + 2 * k * item, item) ==
                      0,
                  "%s: element %zu", tm_dtype_name(dtype), k);
        }
    }
    CHECK(all_are((unsigned char *)memory, GUARD + skip, 0xee), "before the arena");
    CHECK(all_are((unsigned char *)arena + bytes, GUARD, 0xee), "behind the arena");
}

/* The same arena and fingerprints on every machine. */
static void check_bits(char *data, char *memory) {
    uint64_t digest = DIGEST_START, prints[2][2], before = seed_random(7);
    int64_t offsets[2], bytes = 0, shape[2] = {40, 31}, strides[2] = {8, 40 * 8};
    tm_view views[2] = {flat(data, 70001, TM_BF16), flat(data, 40 * 31, TM_F64)};
    tm_stats stats[2];
    tm_error error = {""};
    views[1].ndim = 2, views[1].shape = shape, views[1].strides = strides;
    fill_random(data, 70001 * 2);
    seed_random(before);
    CHECK(tm_stage_place(views, 2, offsets, &bytes, &error) == TM_OK, "%s", error.text);
    CHECK(tm_stage(views, 2, memory, (size_t)bytes, 128, 2, stats, prints, offsets, &error) == TM_OK, "%s",
          error.text);
    digest_bytes(&digest, memory, (size_t)bytes);
    for (int i = 0; i < 2; i++) {
        digest_word(&digest, prints[i][0]);
        digest_word(&digest, prints[i][1]);
        digest_integers(&digest, &offsets[i], 1);
        digest_doubles(&digest, &stats[i].sumsq, 1);
    }
    check_digest("stage", digest, UINT64_C(0xdba9b7709bb74878));
}

static void check_refusals(void) {
    uint64_t memory[64] = {7};
    int64_t shape[1] = {4}, back[1] = {-16}, offsets[2], bytes = 0;
    tm_view views[2] = {flat(memory, 4, TM_U64), flat(memory + 32, 4, TM_U64)};
    tm_stats stats[2];
    uint64_t prints[2][2];
    tm_error error = {""};
    CHECK(tm_stage_place(views, 2, offsets, &bytes, &error) == TM_OK && bytes == 96, "%d", (int)bytes);
    CHECK(tm_stage(views, 2, memory + 8, 95, 128, 1, stats, prints, offsets, &error) == TM_ERR_VALUE,
          "too small");
    CHECK(strstr(error.text, "95") != NULL && strstr(error.text, "96") != NULL, "%s", error.text);
    CHECK(tm_stage(views, 2, memory + 21, 96, 128, 1, stats, prints, offsets, &error) == TM_ERR_VALUE,
          "overlap");
    CHECK(tm_stage(views, 2, memory + 3, 96, 128, 1, stats, prints, offsets, &error) == TM_ERR_VALUE,
          "overlap");
    CHECK(tm_stage(views, 2, memory + 4, 96, 100, 1, stats, prints, offsets, &error) == TM_ERR_VALUE,
          "100 bits");
    views[1] =
        (tm_view){.data = memory + 26, .shape = shape, .strides = back, .n = 4, .ndim = 1, .dtype = TM_U64};
    CHECK(tm_stage(views, 2, memory + 10, 96, 128, 1, stats, prints, offsets, &error) == TM_ERR_VALUE,
          "backwards");
    CHECK(memory[0] == 7 && all_are((unsigned char *)(memory + 1), sizeof memory - 8, 0), "nothing written");
    CHECK(tm_stage(views, 2, memory + 30, 96, 128, 1, stats, prints, offsets, &error) == TM_OK, "%s",
          error.text);
}

void test_stage(void) {
    size_t bytes = (size_t)8 * (65536 * 5 + 64); /* aligned_alloc wants a multiple */
    char *data = malloc(bytes), *memory = aligned_alloc(64, bytes * 2);
    if (data != NULL && memory != NULL) {
        fill_random(data, bytes);
        tm_dispatch_set_worker_bytes(1000);
        for (int tier = 0; tier_name(tier) != NULL; tier++) {
            tm_dispatch_init(tier_name(tier));
            for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
                check_list(data, memory, (tm_dtype)dtype, 128, 0, 1, 0);
            }
            for (size_t skip = 0; skip < 80; skip += 13) {
                check_list(data, memory, TM_F64, 64, skip, 1, 0);
            }
            for (int left = 0; left < 4; left++) {
                check_list(data, memory, TM_F64, 128, 0, 3, left);
            }
            check_bits(memory + bytes, memory);
        }
        check_refusals();
    } else {
        CHECK(0, "no memory for the test");
    }
    tm_dispatch_init(NULL);
    tm_dispatch_set_worker_bytes((size_t)16 << 20);
    free(data);
    free(memory);
}
