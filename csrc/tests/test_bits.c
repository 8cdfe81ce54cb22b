/* The bits of the reductions: the same in every tier and on every architecture, for every dtype. */
#include "digest.h"
#include "runner.h"

#include <stdlib.h>

enum { N = 2 * 65536 + 1234 };

typedef struct digests {
    uint64_t stats, merged, norm, scan;
} digests;

static void digest_stats(uint64_t *digest, const tm_stats *stats) {
    const double numbers[] = {stats->sum,    stats->sumsq,        stats->min,      stats->max,
                              stats->absmax, stats->sumsq_scaled, stats->m2_scaled};
    const int64_t counts[] = {stats->n,      stats->n_nan,     stats->n_posinf,      stats->n_neginf,
                              stats->n_zero, stats->first_bad, stats->scale_exponent};
    digest_doubles(digest, numbers, sizeof numbers / sizeof *numbers);
    digest_integers(digest, counts, sizeof counts / sizeof *counts);
}

static void digest_view(digests *d, tm_view view, int threads) {
    tm_stats stats = stats_of(view, threads);
    digest_stats(&d->stats, &stats);
    for (int order = 0; order < 3; order++) {
        double norm = norm_of(view, (tm_norm_order)order, threads);
        digest_doubles(&d->norm, &norm, 1);
    }
    tm_nonfinite found = scan_of(view, threads);
    digest_integers(&d->scan, (int64_t[]){found.tensor, found.index}, 2);
    if (found.tensor >= 0) {
        digest_doubles(&d->scan, &found.value, 1);
    }
}

/* Pieces that are no nodes of the tree: sums that no other test pins. */
static void digest_pieces(digests *d, const char *data, tm_dtype dtype) {
    static const int64_t ends[] = {1, 3000, 65537, 65537, 100000, N};
    enum { PIECES = sizeof ends / sizeof *ends };
    tm_stats records[PIECES], merged;
    int64_t start = 0, offsets[PIECES];
    tm_error error = {""};
    for (int i = 0; i < PIECES; i++) {
        offsets[i] = start;
        records[i] = stats_of(flat(data + (size_t)start * tm_dtype_size(dtype), ends[i] - start, dtype), 1);
        start = ends[i];
    }
    CHECK(tm_merge_stats(records, offsets, PIECES, &merged, &error) == TM_OK, "%s", error.text);
    digest_stats(&d->merged, &merged);
}

/* Ordinary elements, whole, misaligned, reversed in two axes and short; the same with non-finite ones; any
 * bits. */
static void digest_dtype(digests *d, char *data, tm_dtype dtype, int threads) {
    int64_t size = (int64_t)tm_dtype_size(dtype);
    int64_t shape[2] = {777, 83}, strides[2] = {-83 * 2 * size, 2 * size};
    const tm_view reversed = {data + 776 * 83 * 2 * size, shape, strides, 777 * 83, 2, dtype};
    fill_finite(data, N, dtype);
    for (int round = 0; round < 3; round++) {
        digest_view(d, flat(data, N, dtype), threads);
        digest_view(d, reversed, threads);
        for (int64_t n = 0; n < 70; n += 3) {
            digest_view(d, flat(data + n * size, n, dtype), 1);
        }
        digest_pieces(d, data, dtype);
        for (int kind = 0; round == 0 && kind < 3; kind++) {
            put_nonfinite(data, 70001 + 11111 * kind, dtype, kind);
        }
        if (round == 1) {
            fill_random(data, (size_t)(N * size));
        }
    }
    memmove(data + 1, data, (size_t)(70000 * size));
    digest_view(d, flat(data + 1, 70000, dtype), threads);
}

void test_bits(void) {
    char *data = malloc((size_t)N * 8 + 8);
    uint64_t before = seed_random(0);
    tm_dispatch_set_worker_bytes(1000);
    for (int tier = 0; data != NULL && use_tier(tier) != NULL; tier++) {
        digests d = {DIGEST_START, DIGEST_START, DIGEST_START, DIGEST_START};
        seed_random(2024);
        for (int dtype = 0; dtype < TM_DTYPE_COUNT; dtype++) {
            digest_dtype(&d, data, (tm_dtype)dtype, 1 + tier);
        }
        check_digest("tensor_stats", d.stats, UINT64_C(0x562ac050509950d8));
        check_digest("merge_stats", d.merged, UINT64_C(0x829af7a3304c499a));
        check_digest("multi_norm", d.norm, UINT64_C(0xb61ff426392f9161));
        check_digest("scan_nonfinite", d.scan, UINT64_C(0x3eb99f32ca06eefb));
    }
    CHECK(data != NULL, "no memory for the test");
    free(data);
    seed_random(before);
    tm_dispatch_set_worker_bytes((size_t)16 << 20);
    tm_dispatch_init(NULL);
}
