/* Fingerprints: the byte string of a tensor, little-endian, as a polynomial over GF(2), modulo an irreducible
 * one: bit k of the string is the coefficient of z^k.
 *
 *     128 bits: z^128 + z^7 + z^2 + z + 1      64 bits: z^64 + z^4 + z^3 + z + 1
 *
 * Raised to the power 2^9 these say, with y = z^512 standing for "one row of 64 bytes further",
 *
 *     1 = y + y^2 + y^7 + y^128                1 = y + y^3 + y^4 + y^64
 *
 * so a row may be taken away and added to four later rows instead. Reading forward, row i becomes
 * x[i] = data[i] + x[i - 1] + x[i - 2] + x[i - 7] + x[i - 128]: additions of whole rows, which are XOR, and
 * nothing else. After the last row only the last 128 (64) rows stand for everything read; `close` takes those
 * to 16 (8) bytes. */
#ifndef TM_FINGERPRINT_KERNELS_H
#define TM_FINGERPRINT_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { TM_FINGERPRINT_64, TM_FINGERPRINT_128, TM_FINGERPRINT_WIDTHS };

#define TM_PRINT_ROW 64                   /* bytes */
#define TM_PRINT_WORDS (TM_PRINT_ROW / 8) /* words of a row */
#define TM_PRINT_SPAN 128                 /* rows kept; the width of 64 bits uses half of them */
#define TM_PRINT_GUARD 8                  /* copies of the last rows before the first slot */
#define TM_PRINT_SMALL (TM_PRINT_SPAN / 2 * TM_PRINT_ROW) /* bytes that `small` takes */

/* An element of GF(2^128): bit k of (low, high) is the coefficient of z^k. For 64 bits `high` is 0. */
typedef struct tm_gf {
    uint64_t low, high;
} tm_gf;

/* Rows x[rows - span] to x[rows - 1], row i in slot i % span. All zero before the first row. */
typedef struct tm_print_window {
    int64_t rows; /* read so far */
    size_t next;  /* slot of the next row, `span` when a turn is complete */
    _Alignas(TM_PRINT_ROW) uint64_t row[TM_PRINT_GUARD + TM_PRINT_SPAN][TM_PRINT_WORDS];
} tm_print_window;

typedef struct tm_fingerprint_kernels {
    /* Adds whole rows of little-endian bytes, any alignment. */
    void (*rows[TM_FINGERPRINT_WIDTHS])(tm_print_window *window, const void *data, size_t rows);
    /* The same for rows that somebody else has just read; they go to `copy`, aligned to TM_PRINT_ROW, past
     * the caches. ahead: as many bytes that memory is asked for meanwhile, or NULL. */
    void (*rows_copying[TM_FINGERPRINT_WIDTHS])(tm_print_window *window, const void *data, size_t rows,
                                                void *copy, const void *ahead);
    /* To be called once after copies, before anyone else may look at them. */
    void (*fence)(void);
    /* The residue of the rows and of `bytes` < TM_PRINT_ROW behind them, divided by y^max(0, rows - span). */
    tm_gf (*close[TM_FINGERPRINT_WIDTHS])(const tm_print_window *window, const void *tail, size_t bytes);
    /* The residue of up to TM_PRINT_SMALL bytes. */
    tm_gf (*small[TM_FINGERPRINT_WIDTHS])(const void *data, size_t bytes);
} tm_fingerprint_kernels;

#endif
