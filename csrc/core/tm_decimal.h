/* Numbers as text: the shortest decimal that reads back to the same bits, in the form that Python prints. */
#ifndef TM_DECIMAL_H
#define TM_DECIMAL_H

#include <stdint.h>

#define TM_DECIMAL_MOST 24 /* characters of the longest number: -2.2250738585072014e-308 */

/* Each writes without a terminating zero and returns the end. Floats must be finite: repr(float), and for
 * float the digits of str(numpy.float32) in the same notation. */
char *tm_decimal_f64(char *out, double value);
char *tm_decimal_f32(char *out, float value);
char *tm_decimal_i64(char *out, int64_t value);
char *tm_decimal_u64(char *out, uint64_t value);

#endif
