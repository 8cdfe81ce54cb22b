/* Rows as text. CSV as Python's csv module writes it (RFC 4180, lines end with "\n"): null is an empty cell,
 * the rest nan, inf, -inf, True, False. JSON as json.dumps(row, ensure_ascii=False) writes it: null, and
 * "NaN", "Infinity",
 * "-Infinity" as strings. */
#include "tm_rows_text.h"

#include "tm_decimal.h"
#include "tm_layout.h"
#include "tm_memory.h"
#include "tm_table.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_ROOM 4096
#define NUMBER_ROOM 32 /* a number or a word, a separator, the end of the row */

/* ---- the growing text ---- */

static int reserve(tm_rows_text *out, size_t more) {
    if (out->room - out->length >= more) {
        return 1;
    }
    const size_t room = out->length + more > 2 * out->room ? out->length + more : 2 * out->room;
    char *data = room > out->length ? tm_allocate(room, 1) : NULL;
    if (data == NULL) {
        return 0;
    }
    if (out->length > 0) {
        memcpy(data, out->data, out->length);
    }
    free(out->data);
    out->data = data;
    out->room = room;
    return 1;
}

static char *word(char *at, const char *literal) {
    const size_t length = strlen(literal);
    memcpy(at, literal, length);
    return at + length;
}

/* ---- texts ---- */

static char *hex_escape(char *at, unsigned code) {
    static const char hex[] = "0123456789abcdef";
    at = word(at, "\\u");
    for (int shift = 12; shift >= 0; shift -= 4) {
        *at++ = hex[code >> shift & 15];
    }
    return at;
}

/* The code of a surrogate that stands alone, which no UTF-8 may hold: it is written as \udXXX. Else 0. */
static unsigned lone_surrogate(const char *data, size_t left) {
    const unsigned char *byte = (const unsigned char *)data;
    if (left < 3 || byte[0] != 0xed || byte[1] < 0xa0) {
        return 0;
    }
    return 0xd000u | (byte[1] & 0x3fu) << 6 | (byte[2] & 0x3fu);
}

static char *json_character(char *at, char c) {
    switch (c) {
    case '"':
        return word(at, "\\\"");
    case '\\':
        return word(at, "\\\\");
    case '\n':
        return word(at, "\\n");
    case '\r':
        return word(at, "\\r");
    case '\t':
        return word(at, "\\t");
    case '\f':
        return word(at, "\\f");
    case '\b':
        return word(at, "\\b");
    default:
        if ((unsigned char)c < 0x20) {
            return hex_escape(at, (unsigned char)c);
        }
        *at++ = c;
        return at;
    }
}

static int is_quoted(tm_text text) {
    for (size_t i = 0; i < text.length; i++) {
        const char c = text.data[i];
        if (c == ',' || c == '"' || c == '\n' || c == '\r') {
            return 1;
        }
    }
    return 0;
}

/* Text becomes at most six times as long, plus quotes. */
static int put_text(tm_rows_text *out, tm_rows_format format, tm_text text) {
    if (text.length > (SIZE_MAX - NUMBER_ROOM) / 6 || !reserve(out, 6 * text.length + NUMBER_ROOM)) {
        return 0;
    }
    const int json = format == TM_ROWS_JSON, quoted = json || is_quoted(text);
    char *at = out->data + out->length;
    if (quoted) {
        *at++ = '"';
    }
    for (size_t i = 0; i < text.length; i++) {
        const unsigned surrogate = lone_surrogate(text.data + i, text.length - i);
        if (surrogate != 0) {
            at = hex_escape(at, surrogate);
            i += 2;
        } else if (json) {
            at = json_character(at, text.data[i]);
        } else {
            *at = text.data[i];
            at += 1;
            if (text.data[i] == '"') {
                *at++ = '"';
            }
        }
    }
    if (quoted) {
        *at++ = '"';
    }
    out->length = (size_t)(at - out->data);
    return 1;
}

/* ---- numbers ---- */

static char *put_f32(char *at, tm_rows_format format, float value) {
    const int json = format == TM_ROWS_JSON;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits << 1) < UINT32_C(0xff000000)) {
        return tm_decimal_f32(at, value);
    }
    if ((bits << 1) > UINT32_C(0xff000000)) {
        return word(at, json ? "\"NaN\"" : "nan");
    }
    return word(at, bits >> 31 ? (json ? "\"-Infinity\"" : "-inf") : (json ? "\"Infinity\"" : "inf"));
}

static char *put_f64(char *at, tm_rows_format format, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits << 1) < UINT64_C(0xffe0000000000000)) {
        return tm_decimal_f64(at, value);
    }
    return put_f32(at, format, (float)value);
}

static char *put_number(char *at, tm_rows_format format, const tm_table *table, tm_dtype dtype,
                        const char *element) {
#define TM_INTEGER_CELL(enum_name, type, write)                                                              \
    case enum_name: {                                                                                        \
        type integer;                                                                                        \
        memcpy(&integer, element, sizeof integer);                                                           \
        return write(at, integer);                                                                           \
    }
    switch (dtype) {
    case TM_F64: {
        double value;
        memcpy(&value, element, sizeof value);
        return put_f64(at, format, value);
    }
    case TM_F32: {
        float value;
        memcpy(&value, element, sizeof value);
        return put_f32(at, format, value);
    }
        TM_INTEGER_CELL(TM_I8, int8_t, tm_decimal_i64)
        TM_INTEGER_CELL(TM_I16, int16_t, tm_decimal_i64)
        TM_INTEGER_CELL(TM_I32, int32_t, tm_decimal_i64)
        TM_INTEGER_CELL(TM_I64, int64_t, tm_decimal_i64)
        TM_INTEGER_CELL(TM_U8, uint8_t, tm_decimal_u64)
        TM_INTEGER_CELL(TM_U16, uint16_t, tm_decimal_u64)
        TM_INTEGER_CELL(TM_U32, uint32_t, tm_decimal_u64)
        TM_INTEGER_CELL(TM_U64, uint64_t, tm_decimal_u64)
#undef TM_INTEGER_CELL
    case TM_BOOL:
        if (format == TM_ROWS_JSON) {
            return word(at, *element != 0 ? "true" : "false");
        }
        return word(at, *element != 0 ? "True" : "False");
    default: { /* narrow floats */
        uint16_t code;
        float value;
        memcpy(&code, element, tm_dtype_size(dtype));
        table->widen->to_f32[dtype](&value, &code, 1, tm_byte_values(dtype));
        return put_f32(at, format, value);
    }
    }
}

/* ---- rows ---- */

static const char *element_at(const tm_view *view, int64_t row) {
    const int64_t stride =
        view->strides != NULL && view->ndim > 0 ? view->strides[0] : (int64_t)tm_dtype_size(view->dtype);
    return (const char *)view->data + row * stride;
}

static int put_cell(tm_rows_text *out, tm_rows_format format, const tm_table *table, const tm_column *column,
                    int64_t row, int alone) {
    const int known = (column->valid == NULL || *element_at(column->valid, row) != 0) &&
                      (column->texts == NULL || column->texts[row].data != NULL);
    const int empty = !known || (column->texts != NULL && column->texts[row].length == 0);
    if (format == TM_ROWS_CSV && empty) {
        /* A row of one empty cell is quoted: readers pass over empty lines. */
        out->length = (size_t)(word(out->data + out->length, alone ? "\"\"" : "") - out->data);
        return 1;
    }
    if (known && column->texts != NULL) {
        return put_text(out, format, column->texts[row]);
    }
    char *at = out->data + out->length;
    at = known ? put_number(at, format, table, column->view.dtype, element_at(&column->view, row))
               : word(at, "null");
    out->length = (size_t)(at - out->data);
    return 1;
}

static void put_byte(tm_rows_text *out, char c) {
    out->data[out->length++] = c;
}

static int put_header(tm_rows_text *out, const tm_column *columns, size_t count) {
    for (size_t c = 0; c < count; c++) {
        if (c > 0) {
            put_byte(out, ',');
        }
        if (count == 1 && columns[c].name.length == 0) {
            put_byte(out, '"');
            put_byte(out, '"');
        } else if (!put_text(out, TM_ROWS_CSV, columns[c].name)) {
            return 0;
        }
        if (!reserve(out, NUMBER_ROOM)) {
            return 0;
        }
    }
    put_byte(out, '\n');
    return 1;
}

/* "name": of each column behind the other; ends[c] is where the c-th ends. */
static int make_keys(tm_rows_text *keys, size_t *ends, const tm_column *columns, size_t count) {
    for (size_t c = 0; c < count; c++) {
        if (!reserve(keys, NUMBER_ROOM)) {
            return 0;
        }
        const char *before = c == 0 ? "{" : ", ";
        keys->length = (size_t)(word(keys->data + keys->length, before) - keys->data);
        if (!put_text(keys, TM_ROWS_JSON, columns[c].name) || !reserve(keys, NUMBER_ROOM)) {
            return 0;
        }
        keys->length = (size_t)(word(keys->data + keys->length, ": ") - keys->data);
        ends[c] = keys->length;
    }
    return 1;
}

static int put_rows(tm_rows_text *out, tm_rows_format format, const tm_table *table, const tm_column *columns,
                    size_t count, int64_t rows, const tm_rows_text *keys, const size_t *ends) {
    const int json = format == TM_ROWS_JSON;
    for (int64_t row = 0; row < rows; row++) {
        for (size_t c = 0; c < count; c++) {
            const size_t from = c == 0 || !json ? 0 : ends[c - 1], length = json ? ends[c] - from : 1;
            if (!reserve(out, length + NUMBER_ROOM)) {
                return 0;
            }
            if (json) {
                memcpy(out->data + out->length, keys->data + from, length);
                out->length += length;
            } else if (c > 0) {
                put_byte(out, ',');
            }
            if (!put_cell(out, format, table, &columns[c], row, count == 1)) {
                return 0;
            }
        }
        if (!reserve(out, NUMBER_ROOM)) {
            return 0;
        }
        if (json) {
            put_byte(out, '}');
        }
        put_byte(out, '\n');
    }
    return 1;
}

static tm_status check_view(const tm_view *view, size_t index, int64_t rows, tm_error *error) {
    tm_status status = tm_layout_check(view, index, error);
    if (status == TM_OK && view->n != rows) {
        status = tm_fail(error, TM_ERR_VALUE, "column %zu has %lld elements, not %lld", index,
                         (long long)view->n, (long long)rows);
    }
    if (status == TM_OK && view->strides != NULL && view->ndim > 1) {
        status = tm_fail(error, TM_ERR_VALUE, "column %zu has %d axes, not one", index, (int)view->ndim);
    }
    return status;
}

tm_status tm_rows_write(tm_rows_format format, const tm_column *columns, size_t count, int64_t rows,
                        int header, tm_rows_text *out, tm_error *error) {
    const tm_table *table;
    tm_rows_text keys = {0};
    size_t *ends = NULL;
    int done = 1;
    *out = (tm_rows_text){0};
    tm_status status = tm_table_require(&table, error);
    for (size_t c = 0; c < count && status == TM_OK; c++) {
        if (columns[c].texts == NULL) {
            status = check_view(&columns[c].view, c, rows, error);
        }
        if (status == TM_OK && columns[c].valid != NULL) {
            status = check_view(columns[c].valid, c, rows, error);
        }
    }
    if (status != TM_OK || count == 0) {
        return status;
    }
    done = reserve(out, FIRST_ROOM);
    if (done && format == TM_ROWS_JSON) {
        ends = tm_allocate(count, sizeof *ends);
        done = ends != NULL && make_keys(&keys, ends, columns, count);
    } else if (done && header) {
        done = put_header(out, columns, count);
    }
    done = done && put_rows(out, format, table, columns, count, rows, &keys, ends);
    free(keys.data);
    free(ends);
    return done ? TM_OK
                : tm_fail(error, TM_ERR_MEMORY, "no memory for the text of %lld rows", (long long)rows);
}
