#include "tm_print.h"

#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#    define TM_BIG_ENDIAN 1
#else
#    define TM_BIG_ENDIAN 0
#endif
#define TM_TURNED_BYTES 4096

tm_status tm_print_width(int bits, int *width, tm_error *error) {
    if (bits != 64 && bits != 128) {
        return tm_fail(error, TM_ERR_VALUE, "bits must be 64 or 128, not %d", bits);
    }
    *width = bits == 64 ? TM_FINGERPRINT_64 : TM_FINGERPRINT_128;
    return TM_OK;
}

/* Elements with their bytes the other way round; positions count little-endian bytes on every machine. */
static void turn(unsigned char *out, const unsigned char *elements, size_t bytes, size_t item) {
    for (size_t i = 0; i < bytes; i++) {
        out[i ^ (item - 1)] = elements[i];
    }
}

void tm_print_begin(tm_print *print, const tm_table *table, int width, size_t item) {
    print->table = table;
    print->width = width;
    print->item = item;
    print->tail = 0;
    memset(&print->window, 0, sizeof print->window);
}

/* The bytes behind the last whole row. */
static void keep_tail(tm_print *print, const char *data, size_t bytes) {
    print->tail = bytes % TM_PRINT_ROW;
    memcpy(print->tail_bytes, data + (bytes - print->tail), print->tail);
}

static void add_little(tm_print *print, const void *data, size_t bytes) {
    print->table->fingerprint->rows[print->width](&print->window, data, bytes / TM_PRINT_ROW);
    keep_tail(print, data, bytes);
}

void tm_print_add(tm_print *print, const void *elements, size_t bytes) {
    if (!TM_BIG_ENDIAN || print->item == 1) {
        add_little(print, elements, bytes);
        return;
    }
    const unsigned char *p = elements;
    for (size_t part; bytes > 0; bytes -= part, p += part) {
        unsigned char turned[TM_TURNED_BYTES];
        part = bytes < sizeof turned ? bytes : sizeof turned;
        turn(turned, p, part, print->item);
        add_little(print, turned, part);
    }
}

void tm_print_copy(tm_print *print, const void *elements, size_t bytes, void *copy, const void *ahead) {
    if (TM_BIG_ENDIAN && print->item > 1) {
        memcpy(copy, elements, bytes);
        tm_print_add(print, elements, bytes);
        return;
    }
    print->table->fingerprint->rows_copying[print->width](&print->window, elements, bytes / TM_PRINT_ROW,
                                                          copy, ahead);
    keep_tail(print, elements, bytes);
    memcpy((char *)copy + (bytes - print->tail), print->tail_bytes, print->tail);
}

void tm_print_fence(const tm_print *print) {
    print->table->fingerprint->fence();
}

tm_gf tm_print_end(const tm_print *print, uint64_t position) {
    const uint64_t span = print->width == TM_FINGERPRINT_64 ? 64 : 128, rows = (uint64_t)print->window.rows;
    tm_gf residue =
        print->table->fingerprint->close[print->width](&print->window, print->tail_bytes, print->tail);
    position += rows > span ? (rows - span) * TM_PRINT_ROW : 0;
    if (position == 0) {
        return residue;
    }
    return tm_gf_multiply(print->width, residue, tm_gf_power(print->table, print->width, 8 * position));
}

tm_gf tm_print_small(const tm_table *table, int width, const void *elements, size_t bytes, size_t item) {
    unsigned char turned[TM_PRINT_SMALL];
    if (TM_BIG_ENDIAN && item > 1) {
        turn(turned, elements, bytes, item);
        elements = turned;
    }
    return table->fingerprint->small[width](elements, bytes);
}
