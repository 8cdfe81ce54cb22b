/* The bytes of a configuration before libyaml sees them: UTF-8, no control characters, no foreign byte order
 * mark.
 *
 * libyaml refuses the same bytes, but tells only their offset. A person needs line and column. Knows no
 * Python. */
#ifndef TM_YAML_TEXT_H
#define TM_YAML_TEXT_H

#include <stddef.h>

typedef enum tm_text_flaw_kind {
    TM_TEXT_GOOD = 0,
    TM_TEXT_UTF16,    /* begins with a UTF-16 byte order mark */
    TM_TEXT_UTF32,    /* begins with a UTF-32 byte order mark */
    TM_TEXT_NOT_UTF8, /* value: the byte where decoding stopped */
    TM_TEXT_NUL,      /* value: 0 */
    TM_TEXT_CONTROL   /* value: the code point that YAML does not allow */
} tm_text_flaw_kind;

typedef struct tm_text_flaw {
    tm_text_flaw_kind kind;
    unsigned value;
    size_t line;   /* 1-based */
    size_t column; /* 1-based, in code points */
} tm_text_flaw;

/* The length of a UTF-8 byte order mark at the start of the text: 3 or 0. */
size_t tm_text_bom(const unsigned char *text, size_t length);

/* Fills `flaw` with the first thing that makes the text no YAML stream; `flaw->kind` is TM_TEXT_GOOD if there
 * is none. `text` starts behind the byte order mark. Lines are counted as libyaml counts them (LF, CR, CR LF,
 * NEL, LS, PS). */
void tm_text_check(const unsigned char *text, size_t length, tm_text_flaw *flaw);

#endif
