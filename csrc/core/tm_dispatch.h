/* Which kernels run. The table is filled once by tm_dispatch_init and read-only from then on: no lazy
 * initialisation, hence no race. */
#ifndef TM_DISPATCH_H
#define TM_DISPATCH_H

#include "../kernels/tm_families.h"
#include "tm_cpu.h"
#include "tm_dtype.h"

#include <stddef.h>

typedef enum tm_family {
#define TM_FAMILY_ENUM(enum_name, name) TM_FAMILY_##enum_name,
    TM_FAMILIES(TM_FAMILY_ENUM)
#undef TM_FAMILY_ENUM
        TM_FAMILY_COUNT
} tm_family;

/* What `trainmon info` prints. */
typedef struct tm_dispatch_info {
    tm_tier tier;                    /* the tier in use */
    tm_tier machine;                 /* the best tier of this machine that this build has */
    int halves;                      /* 1: 512-bit operations run as two halves (tm_cpu.h) */
    int warn;                        /* 1: the request could not be met, `reason` says why */
    char reason[128];                /* one clause */
    tm_tier family[TM_FAMILY_COUNT]; /* the tier whose kernels a family uses */
} tm_dispatch_info;

/* Fills the table for `requested` (the value of TRAINMON_CPU; NULL or "": the best). Call it before anything
 * else of the core, from one thread, with no reduction running: module exec does, and the C tests to switch
 * tiers. Until then the reductions answer TM_ERR_VALUE. Returns the tier in use. */
tm_tier tm_dispatch_init(const char *requested);

/* NULL before tm_dispatch_init. */
const tm_dispatch_info *tm_dispatch_describe(void);

const char *tm_family_name(tm_family family); /* as in TM_FAMILIES: "stats", "norm", ... */

/* The value of each of the 256 codes of a one-byte dtype, exact; NULL for wider dtypes. */
const double *tm_byte_values(tm_dtype dtype);

/* A worker thread is started for each `bytes` of input (default 16 MiB: starting one costs as much as reading
 * a few hundred KiB). Tests lower it; same rules as tm_dispatch_init. */
void tm_dispatch_set_worker_bytes(size_t bytes);

/* Takes the kernels for 512-bit operations that run as two halves, or those for whole ones, until the next
 * tm_dispatch_init. For tests; same rules as there. */
void tm_dispatch_set_halves(int halves);

#endif
