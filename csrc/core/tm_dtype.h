/* The element types that the kernels read. The order is the order of every per-dtype table. */
#ifndef TM_DTYPE_H
#define TM_DTYPE_H

#include <stddef.h>

/* X(ENUM, name, bytes): one line a dtype; the tables and the kernels' template are made from this list. */
#define TM_DTYPES(X)                                                                                         \
    X(F64, "float64", 8)                                                                                     \
    X(F32, "float32", 4)                                                                                     \
    X(F16, "float16", 2)                                                                                     \
    X(BF16, "bfloat16", 2)                                                                                   \
    X(F8E4M3FN, "float8_e4m3fn", 1)                                                                          \
    X(F8E4M3FNUZ, "float8_e4m3fnuz", 1)                                                                      \
    X(F8E4M3B11FNUZ, "float8_e4m3b11fnuz", 1)                                                                \
    X(F8E5M2, "float8_e5m2", 1)                                                                              \
    X(F8E5M2FNUZ, "float8_e5m2fnuz", 1)                                                                      \
    X(F8E4M3, "float8_e4m3", 1)                                                                              \
    X(F8E3M4, "float8_e3m4", 1)                                                                              \
    X(F8E8M0FNU, "float8_e8m0fnu", 1)                                                                        \
    X(I8, "int8", 1)                                                                                         \
    X(I16, "int16", 2)                                                                                       \
    X(I32, "int32", 4)                                                                                       \
    X(I64, "int64", 8)                                                                                       \
    X(U8, "uint8", 1)                                                                                        \
    X(U16, "uint16", 2)                                                                                      \
    X(U32, "uint32", 4)                                                                                      \
    X(U64, "uint64", 8)                                                                                      \
    X(BOOL, "bool", 1)

typedef enum tm_dtype {
#define TM_DTYPE_ENUM(enum_name, text, bytes) TM_##enum_name,
    TM_DTYPES(TM_DTYPE_ENUM)
#undef TM_DTYPE_ENUM
        TM_DTYPE_COUNT
} tm_dtype;

size_t tm_dtype_size(tm_dtype dtype);
const char *tm_dtype_name(tm_dtype dtype);

/* The dtype of this name, or TM_DTYPE_COUNT; "bf16", "f32", "e4m3fn" and the like are accepted too. */
tm_dtype tm_dtype_from_name(const char *name);

#endif
