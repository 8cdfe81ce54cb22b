/* Includes TM_TEMPLATE once per integer dtype of two bytes or more. Parameters: TM_NAME, TM_STORE, TM_SIGNED
 * (1 or 0), TM_UNSIGNED and TM_COUNT (unsigned and signed integer of its size), TM_ADD_SQUARE. Elements are
 * converted to double (64-bit ones rounded to nearest, as a cast does). */

#define TM_NAME i16
#define TM_SIGNED 1
#define TM_STORE int16_t
#define TM_UNSIGNED uint16_t
#define TM_COUNT int16_t
#define TM_ADD_SQUARE TM_ADD_EXACT_SQUARE
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_STORE
#undef TM_SIGNED

#define TM_NAME u16
#define TM_SIGNED 0
#define TM_STORE uint16_t
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_STORE
#undef TM_SIGNED
#undef TM_UNSIGNED
#undef TM_COUNT
#undef TM_ADD_SQUARE

#define TM_ADD_SQUARE TM_ADD_ROUNDED_SQUARE
#define TM_UNSIGNED uint32_t
#define TM_COUNT int32_t

#define TM_NAME i32
#define TM_SIGNED 1
#define TM_STORE int32_t
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_STORE
#undef TM_SIGNED

#define TM_NAME u32
#define TM_SIGNED 0
#define TM_STORE uint32_t
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_STORE
#undef TM_SIGNED
#undef TM_UNSIGNED
#undef TM_COUNT

#define TM_UNSIGNED uint64_t
#define TM_COUNT int64_t

#define TM_NAME i64
#define TM_SIGNED 1
#define TM_STORE int64_t
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_STORE
#undef TM_SIGNED

#define TM_NAME u64
#define TM_SIGNED 0
#define TM_STORE uint64_t
#include TM_TEMPLATE
#undef TM_NAME
#undef TM_STORE
#undef TM_SIGNED
#undef TM_UNSIGNED
#undef TM_COUNT
#undef TM_ADD_SQUARE
