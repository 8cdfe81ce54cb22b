#include "tm_dtype.h"

#include <string.h>

static const struct {
    const char *name;
    size_t size;
} dtypes[TM_DTYPE_COUNT] = {
#define TM_DTYPE_ROW(enum_name, text, bytes) [TM_##enum_name] = {text, bytes},
    TM_DTYPES(TM_DTYPE_ROW)
#undef TM_DTYPE_ROW
};

static const struct {
    const char *name;
    tm_dtype dtype;
} aliases[] = {
    {"f64", TM_F64},   {"fp64", TM_F64}, {"double", TM_F64}, {"f32", TM_F32},    {"fp32", TM_F32},
    {"float", TM_F32}, {"f16", TM_F16},  {"fp16", TM_F16},   {"half", TM_F16},   {"bf16", TM_BF16},
    {"i8", TM_I8},     {"i16", TM_I16},  {"i32", TM_I32},    {"i64", TM_I64},    {"u8", TM_U8},
    {"u16", TM_U16},   {"u32", TM_U32},  {"u64", TM_U64},    {"bool_", TM_BOOL},
};

size_t tm_dtype_size(tm_dtype dtype) {
    return (unsigned)dtype < TM_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *tm_dtype_name(tm_dtype dtype) {
    return (unsigned)dtype < TM_DTYPE_COUNT ? dtypes[dtype].name : "unknown";
}

/* A float8 name may drop "float8_" ("e4m3fn") or shorten it to "f8" or "fp8", with or without the underscore.
 */
static const char *float8_suffix(const char *name) {
    static const char *const prefixes[] = {"float8_", "fp8_", "f8_", "fp8", "f8"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        size_t length = strlen(prefixes[i]);
        if (strncmp(name, prefixes[i], length) == 0) {
            return name + length;
        }
    }
    return name;
}

tm_dtype tm_dtype_from_name(const char *name) {
    for (int i = 0; i < TM_DTYPE_COUNT; i++) {
        if (strcmp(name, dtypes[i].name) == 0) {
            return (tm_dtype)i;
        }
    }
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        if (strcmp(name, aliases[i].name) == 0) {
            return aliases[i].dtype;
        }
    }
    const char *suffix = float8_suffix(name);
    for (int i = TM_F8E4M3FN; i <= TM_F8E8M0FNU; i++) {
        if (strcmp(suffix, dtypes[i].name + strlen("float8_")) == 0) {
            return (tm_dtype)i;
        }
    }
    return TM_DTYPE_COUNT;
}
