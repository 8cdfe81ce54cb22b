/* A fingerprint while its bytes come by: shared by fingerprint and stage, private to csrc/core. */
#ifndef TM_PRINT_H
#define TM_PRINT_H

#include "tm_gf.h"

typedef struct tm_print {
    const tm_table *table; /* borrowed */
    int width;
    size_t item; /* bytes of an element */
    size_t tail; /* bytes behind the last whole row */
    unsigned char tail_bytes[TM_PRINT_ROW];
    tm_print_window window;
} tm_print;

/* TM_FINGERPRINT_64 or _128 in *width. */
TM_NODISCARD tm_status tm_print_width(int bits, int *width, tm_error *error);

void tm_print_begin(tm_print *print, const tm_table *table, int width, size_t item);

/* The next elements in C order. All calls but the last bring whole rows of TM_PRINT_ROW bytes. */
void tm_print_add(tm_print *print, const void *elements, size_t bytes);

/* The same for elements in the first cache, which go to `copy` too, aligned to TM_PRINT_ROW, past the caches;
 * tm_print_fence then ends a thread's work. ahead: as many bytes to ask memory for meanwhile, or NULL. */
void tm_print_copy(tm_print *print, const void *elements, size_t bytes, void *copy, const void *ahead);
void tm_print_fence(const tm_print *print);

/* The fingerprint of what came, its first byte being at `position` (below 2^60). */
tm_gf tm_print_end(const tm_print *print, uint64_t position);

/* The same for few elements at once, up to TM_PRINT_SMALL bytes, its first byte at 0. */
tm_gf tm_print_small(const tm_table *table, int width, const void *elements, size_t bytes, size_t item);

#endif
