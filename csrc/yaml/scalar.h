/* What a plain YAML 1.1 scalar means, by the rules of PyYAML's SafeLoader. Knows no Python.
 *
 * Differences, all on purpose: timestamps are text, `=` is text, `0x_` and `0b_` (no digit) are text. */
#ifndef TM_YAML_SCALAR_H
#define TM_YAML_SCALAR_H

#include <stddef.h>

typedef enum tm_scalar_kind {
    TM_SCALAR_TEXT,
    TM_SCALAR_NULL,
    TM_SCALAR_TRUE,
    TM_SCALAR_FALSE,
    TM_SCALAR_INT2, /* 0b1010_0111 */
    TM_SCALAR_INT8, /* 0755 */
    TM_SCALAR_INT10,
    TM_SCALAR_INT16,   /* 0xFF */
    TM_SCALAR_INT60,   /* 1:30 is 90 */
    TM_SCALAR_FLOAT10, /* needs a point, and a sign in the exponent: 1.5, .5, 1.0e+3; 1e-5 is text */
    TM_SCALAR_FLOAT60, /* 1:30.5 is 90.5 */
    TM_SCALAR_INF,
    TM_SCALAR_NEGATIVE_INF,
    TM_SCALAR_NAN
} tm_scalar_kind;

/* `text` need not be terminated. */
tm_scalar_kind tm_scalar_resolve(const char *text, size_t length);

/* True if the text is a number to a reader who forgives YAML 1.1 its exponents: also 1e-5, 5e4, 1e+5, -.5. */
int tm_scalar_is_number(const char *text, size_t length);

#endif
