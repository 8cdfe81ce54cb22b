/* Includes TM_TEMPLATE once per float dtype of two bytes or more. Parameters:
 *   TM_NAME    suffix of the functions          TM_STORE   type of an element in memory
 *   TM_WIDE    float or double: rows are widened to it exactly (tm_row_<name>)
 *   TM_INT     signed integer of TM_WIDE's size, for bit tests and counters
 *   TM_ABS, TM_INF       masks of TM_WIDE's magnitude and of infinity as TM_INT
 *   TM_SINT, TM_SABS, TM_SINF   the same three of the stored type
 *   TM_HALF              1 if the stored type has 16 bits
 * Magnitudes compare as signed integers: finite < infinity < every NaN. */

#define TM_NAME f64
#define TM_STORE double
#define TM_WIDE double
#define TM_INT tm_int64
#define TM_ABS INT64_MAX
#define TM_INF INT64_C(0x7ff0000000000000)
#define TM_SINT tm_int64
#define TM_SABS TM_ABS
#define TM_SINF TM_INF
#define TM_HALF 0
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_STORE
#undef TM_WIDE
#undef TM_INT
#undef TM_ABS
#undef TM_INF
#undef TM_SINT
#undef TM_SABS
#undef TM_SINF
#undef TM_HALF

#define TM_WIDE float
#define TM_INT tm_int32
#define TM_ABS INT32_MAX
#define TM_INF INT32_C(0x7f800000)

#define TM_NAME f32
#define TM_HALF 0
#define TM_STORE float
#define TM_SINT tm_int32
#define TM_SABS TM_ABS
#define TM_SINF TM_INF
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_HALF
#undef TM_STORE
#undef TM_SINT
#undef TM_SABS
#undef TM_SINF

#define TM_HALF 1
#define TM_STORE uint16_t
#define TM_SINT int16_t
#define TM_SABS INT16_MAX

#define TM_NAME f16
#define TM_SINF 0x7c00
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_SINF

#define TM_NAME bf16
#define TM_SINF 0x7f80
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_SINF

#undef TM_STORE
#undef TM_SINT
#undef TM_SABS
#undef TM_WIDE
#undef TM_INT
#undef TM_ABS
#undef TM_INF
#undef TM_HALF
