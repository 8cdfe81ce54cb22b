/* The part of the DLPack 1.x ABI that this extension reads: the tensor, its two managed forms and the C
 * exchange table that a tensor type offers as `__dlpack_c_exchange_api__`. Layout only, no behaviour; the
 * names are ours, the order and the widths are DLPack's. Knows neither Python nor NumPy. */
#ifndef TM_DLPACK_H
#define TM_DLPACK_H

#include <stdint.h>

#define TM_DL_MAJOR 1 /* the ABI below; another major number means another layout */

enum { /* device types whose memory the host can address */
       TM_DL_CPU = 1,
       TM_DL_CUDA_HOST = 3,
       TM_DL_ROCM_HOST = 11
};

enum { /* type codes */
       TM_DL_INT = 0,
       TM_DL_UINT = 1,
       TM_DL_FLOAT = 2,
       TM_DL_BFLOAT = 4,
       TM_DL_COMPLEX = 5,
       TM_DL_BOOL = 6,
       TM_DL_F8_E3M4 = 7,
       TM_DL_F8_E4M3 = 8,
       TM_DL_F8_E4M3B11FNUZ = 9,
       TM_DL_F8_E4M3FN = 10,
       TM_DL_F8_E4M3FNUZ = 11,
       TM_DL_F8_E5M2 = 12,
       TM_DL_F8_E5M2FNUZ = 13,
       TM_DL_F8_E8M0FNU = 14
};

typedef struct tm_dl_version {
    uint32_t major, minor;
} tm_dl_version;

typedef struct tm_dl_device {
    int32_t type, id;
} tm_dl_device;

typedef struct tm_dl_dtype {
    uint8_t code, bits;
    uint16_t lanes;
} tm_dl_dtype;

typedef struct tm_dl_tensor {
    void *data;
    tm_dl_device device;
    int32_t ndim;
    tm_dl_dtype dtype;
    int64_t *shape;   /* [ndim] */
    int64_t *strides; /* [ndim] in elements; NULL: C order */
    uint64_t byte_offset;
} tm_dl_tensor;

/* What a capsule named "dltensor" holds. */
typedef struct tm_dl_managed {
    tm_dl_tensor tensor;
    void *context;
    void (*deleter)(struct tm_dl_managed *self);
} tm_dl_managed;

#define TM_DL_READ_ONLY UINT64_C(1) /* bit of `flags` */

/* What a capsule named "dltensor_versioned" holds. With another major version only `deleter` may be used. */
typedef struct tm_dl_managed_versioned {
    tm_dl_version version;
    void *context;
    void (*deleter)(struct tm_dl_managed_versioned *self);
    uint64_t flags;
    tm_dl_tensor tensor;
} tm_dl_managed_versioned;

/* The head of every exchange table; `previous` leads to the table of an older major version. */
typedef struct tm_dl_exchange_header {
    tm_dl_version version;
    struct tm_dl_exchange_header *previous;
} tm_dl_exchange_header;

/* Functions that aren't called here keep their place as untyped function pointers. */
typedef void (*tm_dl_unused)(void);

typedef struct tm_dl_exchange_api {
    tm_dl_exchange_header header;
    tm_dl_unused managed_allocate;
    tm_dl_unused managed_from_object;
    tm_dl_unused managed_to_object;
    int (*tensor_from_object)(void *object, tm_dl_tensor *out); /* borrows; may be NULL; -1: Python error */
    tm_dl_unused current_stream;
} tm_dl_exchange_api;

#endif
