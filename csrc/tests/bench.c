/* GB/s of every dtype and tier beside the plain read of the same bytes in the same round: best of many
 * interleaved rounds, one thread.
 *   bench [megabytes] [rounds] [dtype [tier]]   default: 256 MB, 8 rounds, the four float dtypes of 2 bytes
 * or more 0 megabytes: the cache sizes only, 16 KiB and 64 KiB. */
#define _POSIX_C_SOURCE 200809L

#include "../core/tm_dispatch.h"
#include "../core/tm_reduce.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { READ, STATS, NORM_2, NORM_1, NORM_INF, SCAN, COUNT };
static const char *const names[COUNT] = {"read", "stats", "norm 2", "norm 1", "norm inf", "scan"};
static volatile uint64_t sink;

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void must(tm_status status, const tm_error *error) {
    if (status != TM_OK) {
        fprintf(stderr, "%s\n", error->text);
        exit(1);
    }
}

static void call(int what, const tm_view *views, size_t count, tm_stats *stats) {
    tm_error error;
    tm_nonfinite found;
    double total;
    switch (what) {
    case READ:
        sink = tm_plain_read_views(views, count);
        break;
    case STATS:
        must(tm_tensor_stats(views, count, 1, stats, &error), &error);
        break;
    case SCAN:
        must(tm_scan_nonfinite(views, count, 1, &found, &error), &error);
        break;
    default:
        must(tm_multi_norm(views, count, (tm_norm_order)(what - NORM_2), 1, &total, NULL, &error), &error);
        break;
    }
}

/* `repeat` calls are timed as one where a single one is too short for the clock. */
static void measure(const char *label, const tm_view *views, size_t count, size_t bytes, int rounds,
                    int repeat) {
    double best[COUNT];
    tm_stats *stats = malloc(count * sizeof *stats);
    if (stats == NULL) {
        exit(1);
    }
    for (int what = 0; what < COUNT; what++) {
        best[what] = 1e9;
    }
    for (int round = 0; round < rounds; round++) {
        for (int what = 0; what < COUNT; what++) {
            double start = now();
            for (int i = 0; i < repeat; i++) {
                call(what, views, count, stats);
            }
            double seconds = (now() - start) / repeat;
            best[what] = seconds < best[what] ? seconds : best[what];
        }
    }
    printf("%-34s read %6.1f", label, (double)bytes / best[READ] / 1e9);
    for (int what = STATS; what < COUNT; what++) {
        printf(" | %s %5.1f %4.2f", names[what], (double)bytes / best[what] / 1e9, best[READ] / best[what]);
    }
    printf("\n");
    fflush(stdout);
    free(stats);
}

/* Every dtype's ordinary values: small magnitudes, some zeros. */
static void fill(unsigned char *data, size_t bytes, tm_dtype dtype) {
    size_t size = tm_dtype_size(dtype);
    for (size_t i = 0; i * size < bytes; i++) {
        uint32_t hash = (uint32_t)i * 2654435761U;
        double value = (double)(hash >> 8) / (1 << 24) - 0.5;
        float single = (float)value;
        uint32_t bits;
        memcpy(&bits, &single, sizeof bits);
        uint16_t half = (uint16_t)(dtype == TM_BF16 ? bits >> 16 : (hash >> 16 & 0xbbff));
        uint8_t byte = (uint8_t)(hash >> 24 & 0x6f);
        memcpy(data + i * size,
               dtype == TM_F64   ? (void *)&value
               : dtype == TM_F32 ? (void *)&single
               : size == 2       ? (void *)&half
               : size == 1       ? (void *)&byte
                                 : (void *)&value,
               size);
    }
}

static void bench_dtype(tm_dtype dtype, const char *only, unsigned char *data, size_t megabytes, int rounds) {
    const size_t caches[] = {16384, 65536};
    char label[80];
    fill(data, megabytes > 0 ? megabytes << 20 : 65536, dtype);
    for (int tier = 0; tier <= (int)tm_dispatch_describe()->machine; tier++) {
        if (only != NULL && strcmp(only, tm_tier_name((tm_tier)tier)) != 0) {
            continue;
        }
        tm_dispatch_init(tm_tier_name((tm_tier)tier));
        for (int i = 0; i < 2; i++) {
            tm_view view = {
                .data = data, .n = (int64_t)(caches[i] / tm_dtype_size(dtype)), .ndim = 1, .dtype = dtype};
            snprintf(label, sizeof label, "%s %s %zu KiB", tm_tier_name((tm_tier)tier), tm_dtype_name(dtype),
                     caches[i] >> 10);
            measure(label, &view, 1, caches[i], 40, 200);
        }
        if (megabytes == 0) {
            continue;
        }
        tm_view view = {.data = data,
                        .n = (int64_t)((megabytes << 20) / tm_dtype_size(dtype)),
                        .ndim = 1,
                        .dtype = dtype};
        snprintf(label, sizeof label, "%s %s %zu MB", tm_tier_name((tm_tier)tier), tm_dtype_name(dtype),
                 megabytes);
        measure(label, &view, 1, megabytes << 20, rounds, 1);
    }
}

/* 2,000 float32 tensors of 4,096 elements each, allocated one by one. */
static void bench_small(void) {
    enum { TENSORS = 2000, ELEMENTS = 4096 };
    static tm_view views[TENSORS];
    for (int i = 0; i < TENSORS; i++) {
        unsigned char *data = malloc(ELEMENTS * sizeof(float));
        if (data == NULL) {
            exit(1);
        }
        fill(data, ELEMENTS * sizeof(float), TM_F32);
        views[i] = (tm_view){.data = data, .n = ELEMENTS, .ndim = 1, .dtype = TM_F32};
    }
    for (int tier = 0; tier <= (int)tm_dispatch_describe()->machine; tier++) {
        char label[80];
        tm_dispatch_init(tm_tier_name((tm_tier)tier));
        snprintf(label, sizeof label, "%s 2000 x 4096 float32", tm_tier_name((tm_tier)tier));
        measure(label, views, TENSORS, (size_t)TENSORS * ELEMENTS * sizeof(float), 60, 1);
    }
    for (int i = 0; i < TENSORS; i++) {
        free((void *)(uintptr_t)views[i].data);
    }
}

int main(int argc, char **argv) {
    size_t megabytes = argc > 1 ? (size_t)atol(argv[1]) : 256;
    int rounds = argc > 2 ? atoi(argv[2]) : 8;
    tm_dtype only = argc > 3 ? tm_dtype_from_name(argv[3]) : TM_DTYPE_COUNT;
    unsigned char *data = aligned_alloc(64, megabytes > 0 ? megabytes << 20 : 65536);
    if (data == NULL) {
        return 1;
    }
    tm_dispatch_init(NULL);
    for (int dtype = only < TM_DTYPE_COUNT ? (int)only : 0; dtype < TM_DTYPE_COUNT; dtype++) {
        if (only == TM_DTYPE_COUNT ? dtype <= TM_BF16 : dtype == (int)only) {
            bench_dtype((tm_dtype)dtype, argc > 4 ? argv[4] : NULL, data, megabytes, rounds);
        }
    }
    if (only == TM_DTYPE_COUNT) {
        bench_small();
    }
    free(data);
    return 0;
}
