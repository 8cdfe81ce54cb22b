/* Fingerprints against bit-by-bit polynomial division, in every tier: lengths, pieces, threads, failing
 * allocations. */
#include "../core/tm_fingerprint.h"
#include "../core/tm_gf.h"
#include "../core/tm_memory.h"
#include "digest.h"
#include "runner.h"

#include <stdlib.h>

typedef struct digest {
    uint64_t low, high;
} digest;

/* acc * z + bit, by the definition of the two polynomials. */
static digest push_bit(digest acc, unsigned bit, int bits) {
    if (bits == 64) {
        uint64_t over = acc.low >> 63;
        return (digest){(acc.low << 1 | bit) ^ (over ? UINT64_C(0x1b) : 0), 0};
    }
    uint64_t over = acc.high >> 63;
    return (digest){(acc.low << 1 | bit) ^ (over ? UINT64_C(0x87) : 0), acc.high << 1 | acc.low >> 63};
}

/* `bytes` bytes with `behind` zero bytes before them in the string: its highest power comes first. */
static digest reference(const unsigned char *p, size_t bytes, size_t before, int bits) {
    digest acc = {0, 0};
    for (size_t i = bytes; i-- > 0;) {
        for (int bit = 7; bit >= 0; bit--) {
            acc = push_bit(acc, p[i] >> bit & 1, bits);
        }
    }
    for (size_t i = 0; i < 8 * before; i++) {
        acc = push_bit(acc, 0, bits);
    }
    return acc;
}

static digest of(const tm_view *view, const tm_piece *piece, int bits, int threads) {
    tm_error error = {""};
    uint64_t out[1][2] = {{1, 1}};
    CHECK(tm_fingerprint(view, piece, 1, bits, threads, out, &error) == TM_OK, "%s", error.text);
    return (digest){out[0][0], out[0][1]};
}

static int same(digest a, digest b) {
    return a.low == b.low && a.high == b.high;
}

static void check_lengths(const unsigned char *data, int bits) {
    static const int around[] = {64, 128, 512, 1024, 4096, 8192, 8256, 16384, 12345, 3 * 8192};
    for (int64_t n = 0; n < 150; n++) {
        tm_view view = flat(data + 1, n, TM_U8);
        CHECK(same(of(&view, NULL, bits, 1), reference(data + 1, (size_t)n, 0, bits)), "%d bits, %d bytes",
              bits, (int)n);
    }
    for (size_t i = 0; i < sizeof around / sizeof *around; i++) {
        for (int64_t n = around[i] - 2; n <= around[i] + 2; n++) {
            tm_view view = flat(data, n, TM_U8);
            CHECK(same(of(&view, NULL, bits, 1), reference(data, (size_t)n, 0, bits)), "%d bits, %d bytes",
                  bits, (int)n);
        }
    }
}

/* One bit in a string of zeros: its position alone decides. */
static void check_positions(int bits) {
    enum { N = 20000 };
    unsigned char *zeros = calloc(N, 1);
    if (zeros == NULL) {
        CHECK(0, "no memory for the test");
        return;
    }
    tm_view view = flat(zeros, N, TM_U8);
    CHECK(same(of(&view, NULL, bits, 1), (digest){0, 0}), "zeros");
    for (size_t at = 0; at < N; at += 997) {
        zeros[at] = 0x40;
        CHECK(same(of(&view, NULL, bits, 1), reference(zeros + at, 1, at, bits)), "%d bits, byte %d", bits,
              (int)at);
        zeros[at] = 0;
    }
    free(zeros);
}

/* A [rows, columns] tensor cut into column shards, strided and packed ones, and into rows. */
static void check_pieces(const unsigned char *data, int bits, int64_t rows, int64_t columns, tm_dtype dtype) {
    int64_t item = (int64_t)tm_dtype_size(dtype), whole[2] = {rows, columns};
    tm_view all = flat(data, rows * columns, dtype);
    digest expected = of(&all, NULL, bits, 1);
    unsigned char *packed = malloc((size_t)(rows * columns * item));
    digest sum = {0, 0};
    int64_t width;
    if (packed == NULL) {
        CHECK(0, "no memory for the test");
        return;
    }
    for (int64_t column = 0; column < columns; column += width) {
        width = columns / 3 + 1 < columns - column ? columns / 3 + 1 : columns - column;
        for (int64_t half = 0; half < 2; half++) {
            int64_t first = half * (rows / 2), count = half ? rows - rows / 2 : rows / 2;
            int64_t shape[2] = {count, width}, strides[2] = {columns * item, item},
                    start[2] = {first, column};
            const unsigned char *from = data + (first * columns + column) * item;
            tm_piece piece = {.whole = whole, .start = start};
            tm_view strided = {.data = from,
                               .shape = shape,
                               .strides = strides,
                               .n = count * width,
                               .ndim = 2,
                               .dtype = dtype};
            digest print = of(&strided, &piece, bits, 1);
            for (int64_t r = 0; r < count; r++) {
                memcpy(packed + r * width * item, from + r * columns * item, (size_t)(width * item));
            }
            tm_view dense = {.data = packed, .shape = shape, .n = count * width, .ndim = 2, .dtype = dtype};
            CHECK(same(print, of(&dense, &piece, bits, 1)), "packed piece");
            CHECK(same(print, of(&dense, &piece, bits, 3)), "threads on a piece");
            sum = (digest){sum.low ^ print.low, sum.high ^ print.high};
        }
    }
    CHECK(same(sum, expected), "%d bits: the pieces of [%d, %d] add up", bits, (int)rows, (int)columns);
    free(packed);
}

static int allocations_left;

static void *failing(size_t bytes) {
    return allocations_left-- > 0 ? malloc(bytes) : NULL;
}

/* Lists, threads, failing allocations (the call then goes on with one worker), and the bits promised to
 * every architecture. */
static void check_list(const unsigned char *data, int bits) {
    static const int64_t lengths[] = {0, 65536 * 5 + 3, 1, 65536, 70000};
    enum { COUNT = sizeof lengths / sizeof *lengths };
    tm_view views[COUNT];
    uint64_t one[COUNT][2], many[COUNT][2];
    tm_error error = {""};
    for (int i = 0; i < COUNT; i++) {
        views[i] = flat(data, lengths[i], TM_I16);
    }
    CHECK(tm_fingerprint(views, NULL, COUNT, bits, 1, one, &error) == TM_OK, "%s", error.text);
    for (int i = 0; i < COUNT; i++) {
        CHECK(same((digest){one[i][0], one[i][1]}, reference(data, (size_t)lengths[i] * 2, 0, bits)),
              "%d bits, tensor %d", bits, i);
    }
    for (int threads = 2; threads < 5; threads++) {
        for (int left = 0; left < 4; left++) {
            allocations_left = left < 3 ? left : 1000;
            tm_memory_set_allocator(failing);
            CHECK(tm_fingerprint(views, NULL, COUNT, bits, threads, many, &error) == TM_OK, "%s", error.text);
            tm_memory_set_allocator(NULL);
            CHECK(memcmp(one, many, sizeof one) == 0, "%d threads, %d allocations", threads, left);
        }
    }
}

static void check_arguments(void) {
    float values[6] = {0};
    int64_t shape[2] = {2, 3}, whole[2] = {4, 3}, start[2] = {2, 0}, outside[2] = {3, 0},
            negative[2] = {0, -1};
    int64_t huge[2] = {INT64_C(1) << 40, INT64_C(1) << 40};
    tm_view view = {.data = values, .shape = shape, .n = 6, .ndim = 2, .dtype = TM_F32};
    tm_piece piece = {.whole = whole, .start = start};
    uint64_t out[1][2];
    tm_error error = {""};
    CHECK(tm_fingerprint(&view, &piece, 1, 128, 1, out, &error) == TM_OK, "%s", error.text);
    CHECK(tm_fingerprint(&view, &piece, 1, 96, 1, out, &error) == TM_ERR_VALUE, "96 bits");
    CHECK(tm_fingerprint(&view, &piece, 1, 128, 0, out, &error) == TM_ERR_VALUE, "no threads");
    piece.start = outside;
    CHECK(tm_fingerprint(&view, &piece, 1, 128, 1, out, &error) == TM_ERR_VALUE, "beyond the whole");
    piece.start = negative;
    CHECK(tm_fingerprint(&view, &piece, 1, 128, 1, out, &error) == TM_ERR_VALUE, "before the whole");
    piece = (tm_piece){.whole = huge, .start = start};
    CHECK(tm_fingerprint(&view, &piece, 1, 128, 1, out, &error) == TM_ERR_VALUE, "a whole beyond 2^60");
}

/* The same on every machine. */
static void check_bits(void) {
    unsigned char data[20000];
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (unsigned char)(i * i % 251);
    }
    tm_view view = flat(data, sizeof data, TM_U8);
    digest wide = of(&view, NULL, 128, 1), narrow = of(&view, NULL, 64, 1);
    check_digest("fingerprint 128 high", wide.high, UINT64_C(0xe4599b313e1e7ad6));
    check_digest("fingerprint 128 low", wide.low, UINT64_C(0x57efc18d8bba0ad6));
    check_digest("fingerprint 64", narrow.low, UINT64_C(0x2763a915c44b9ed6));
    CHECK(narrow.high == 0, "64 bits");
}

void test_fingerprint(void) {
    size_t bytes = (size_t)2 * (65536 * 5 + 3);
    unsigned char *data = malloc(bytes);
    if (data == NULL) {
        CHECK(0, "no memory for the test");
        return;
    }
    fill_random(data, bytes);
    tm_dispatch_set_worker_bytes(1000);
    for (int tier = 0; tier_name(tier) != NULL; tier++) {
        tm_dispatch_init(tier_name(tier));
        for (int bits = 64; bits <= 128; bits += 64) {
            check_lengths(data, bits);
            check_positions(bits);
            check_pieces(data, bits, 9, 11, TM_U8);
            check_pieces(data, bits, 40, 1001, TM_F64);
            check_pieces(data, bits, 600, 130, TM_F32);
            check_pieces(data, bits, 2, 70000, TM_BF16);
            check_list(data, bits);
        }
        check_bits();
    }
    check_arguments();
    tm_dispatch_init(NULL);
    tm_dispatch_set_worker_bytes((size_t)16 << 20);
    free(data);
}
