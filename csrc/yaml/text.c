/* Checks the bytes of a configuration before parsing. Contract: text.h. Knows neither Python nor libyaml. */
#include "text.h"

#include <stdbool.h>
#include <string.h>

size_t tm_text_bom(const unsigned char *text, size_t length) {
    return length >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
}

static tm_text_flaw_kind foreign_bom(const unsigned char *text, size_t length) {
    /* UTF-32 first: its little-endian mark begins with that of UTF-16. */
    if (length >= 4 && (memcmp(text, "\xFF\xFE\0\0", 4) == 0 || memcmp(text, "\0\0\xFE\xFF", 4) == 0)) {
        return TM_TEXT_UTF32;
    }
    if (length >= 2 && (memcmp(text, "\xFF\xFE", 2) == 0 || memcmp(text, "\xFE\xFF", 2) == 0)) {
        return TM_TEXT_UTF16;
    }
    return TM_TEXT_GOOD;
}

/* Decodes one code point; returns the bytes used, 0 if they are no UTF-8 (overlong and surrogate forms are
 * none). */
static size_t decode(const unsigned char *text, size_t length, unsigned *point) {
    unsigned lead = text[0];
    size_t width = lead < 0x80 ? 1 : lead >= 0xC2 && lead < 0xE0 ? 2 : (lead & 0xF0) == 0xE0 ? 3 : 4;
    if (width == 1) {
        *point = lead;
        return 1;
    }
    if (lead < 0xC2 || lead > 0xF4 || length < width) {
        return 0;
    }
    unsigned value = lead & (0x7FU >> width);
    for (size_t i = 1; i < width; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
        value = (value << 6) | (text[i] & 0x3FU);
    }
    if ((width == 3 && (value < 0x800 || (value >= 0xD800 && value <= 0xDFFF))) ||
        (width == 4 && (value < 0x10000 || value > 0x10FFFF))) {
        return 0;
    }
    *point = value;
    return width;
}

/* The character set of YAML 1.1, as libyaml's reader has it. */
static bool allowed(unsigned point) {
    return point == 0x09 || point == 0x0A || point == 0x0D || (point >= 0x20 && point <= 0x7E) ||
           point == 0x85 || (point >= 0xA0 && point <= 0xD7FF) || (point >= 0xE000 && point <= 0xFFFD) ||
           (point >= 0x10000 && point <= 0x10FFFF);
}

static bool breaks_line(unsigned point, const unsigned char *next, size_t left) {
    if (point == '\r') {
        return left == 0 || next[0] != '\n'; /* CR LF is one break, counted at its LF */
    }
    return point == '\n' || point == 0x85 || point == 0x2028 || point == 0x2029;
}

void tm_text_check(const unsigned char *text, size_t length, tm_text_flaw *flaw) {
    *flaw = (tm_text_flaw){.kind = foreign_bom(text, length), .line = 1, .column = 1};
    if (flaw->kind != TM_TEXT_GOOD) {
        return;
    }
    size_t at = 0;
    while (at < length) {
        unsigned point = 0;
        size_t width = decode(text + at, length - at, &point);
        if (width == 0) {
            flaw->kind = TM_TEXT_NOT_UTF8;
            flaw->value = text[at];
            return;
        }
        if (!allowed(point)) {
            flaw->kind = point == 0 ? TM_TEXT_NUL : TM_TEXT_CONTROL;
            flaw->value = point;
            return;
        }
        at += width;
        if (breaks_line(point, text + at, length - at)) {
            flaw->line++;
            flaw->column = 1;
        } else {
            flaw->column++;
        }
    }
}
