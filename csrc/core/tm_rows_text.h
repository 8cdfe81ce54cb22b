/* Rows of CSV or JSON Lines from columns of numbers and texts. */
#ifndef TM_ROWS_TEXT_H
#define TM_ROWS_TEXT_H

#include "tm_status.h"
#include "tm_view.h"

/* UTF-8, borrowed, not terminated; surrogates that stand alone are allowed (three bytes from 0xed 0xa0 on).
 */
typedef struct tm_text {
    const char *data; /* NULL: null */
    size_t length;
} tm_text;

typedef struct tm_column {
    tm_text name;
    tm_view view;         /* numbers: at most one axis with strides */
    const tm_text *texts; /* or texts, [rows]; NULL for numbers */
    const tm_view *valid; /* bool, 0: null; NULL: all are valid */
} tm_column;

typedef enum tm_rows_format { TM_ROWS_CSV, TM_ROWS_JSON } tm_rows_format;

/* Owned; release data with free. */
typedef struct tm_rows_text {
    char *data;
    size_t length, room;
} tm_rows_text;

/* Writes `rows` rows, each ended by "\n"; header: for CSV, a row of names first. Every view holds `rows`
 * elements. *out is to be released also after an error. */
TM_NODISCARD tm_status tm_rows_write(tm_rows_format format, const tm_column *columns, size_t count,
                                     int64_t rows, int header, tm_rows_text *out, tm_error *error);

#endif
