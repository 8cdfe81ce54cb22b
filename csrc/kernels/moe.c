/* Expert ids to counts (contract: tm_moe_kernels.h). Every id is first made a slot that exists, 32 at a time
 * without a branch; the increments behind it are scalar in every tier, one a cycle at best. */
#include "tm_lanes.h"

/* X(ENUM, name, stored type, unsigned type of the comparison): a negative id becomes a large one. */
#define TM_MOE_IDS(X)                                                                                        \
    X(I8, i8, int8_t, uint32_t)                                                                              \
    X(I16, i16, int16_t, uint32_t)                                                                           \
    X(I32, i32, int32_t, uint32_t)                                                                           \
    X(I64, i64, int64_t, uint64_t)                                                                           \
    X(U8, u8, uint8_t, uint32_t)                                                                             \
    X(U16, u16, uint16_t, uint32_t)                                                                          \
    X(U32, u32, uint32_t, uint32_t)                                                                          \
    X(U64, u64, uint64_t, uint64_t)

#define TM_MOE_TALLY(name, l, table_count, stride)                                                           \
    tables[(l) % (table_count) * (stride) + slot_##name(ids[i + (l)], experts)]++;
#define TM_MOE_TALLY_8(name, table_count, stride)                                                            \
    TM_MOE_TALLY(name, 0, table_count, stride)                                                               \
    TM_MOE_TALLY(name, 1, table_count, stride)                                                               \
    TM_MOE_TALLY(name, 2, table_count, stride)                                                               \
    TM_MOE_TALLY(name, 3, table_count, stride)                                                               \
    TM_MOE_TALLY(name, 4, table_count, stride)                                                               \
    TM_MOE_TALLY(name, 5, table_count, stride)                                                               \
    TM_MOE_TALLY(name, 6, table_count, stride)                                                               \
    TM_MOE_TALLY(name, 7, table_count, stride)

#define TM_MOE_SLOTS(enum_name, name, stored, wide)                                                          \
    TM_INLINE uint32_t slot_##name(stored id, uint32_t experts) {                                            \
        wide code = (wide)id;                                                                                \
        return code < experts ? (uint32_t)code : experts;                                                    \
    }                                                                                                        \
                                                                                                             \
    TM_NOINLINE void slots_##name(uint32_t *out, const void *data, size_t n, uint32_t experts) {             \
        const stored *ids = data;                                                                            \
        for (size_t i = 0; i < n; i++) {                                                                     \
            out[i] = slot_##name(ids[i], experts);                                                           \
        }                                                                                                    \
    }

#define TM_MOE_COUNT(name, stored, shape, table_count, stride)                                               \
    TM_NOINLINE void count_##shape##_##name(uint32_t *tables, const void *data, size_t n,                    \
                                            uint32_t experts) {                                              \
        const stored *ids = data;                                                                            \
        size_t i = 0;                                                                                        \
        for (; n - i >= 8; i += 8) {                                                                         \
            tm_prefetch_row(ids + i, 8 * (int)sizeof *ids);                                                  \
            TM_MOE_TALLY_8(name, table_count, stride)                                                        \
        }                                                                                                    \
        for (; i < n; i++) {                                                                                 \
            tables[slot_##name(ids[i], experts)]++;                                                          \
        }                                                                                                    \
    }

#define TM_MOE_DEFINE(enum_name, name, stored, wide)                                                         \
    TM_MOE_SLOTS(enum_name, name, stored, wide)                                                              \
    TM_MOE_COUNT(name, stored, 8, 8, TM_MOE_STRIDE_8)                                                        \
    TM_MOE_COUNT(name, stored, 4, 4, TM_MOE_STRIDE_4)                                                        \
    TM_MOE_COUNT(name, stored, 1, 1, 0)
TM_MOE_IDS(TM_MOE_DEFINE)

#define TM_MOE_ROW_8(enum_name, name, stored, wide) [TM_##enum_name] = count_8_##name,
#define TM_MOE_ROW_4(enum_name, name, stored, wide) [TM_##enum_name] = count_4_##name,
#define TM_MOE_ROW_1(enum_name, name, stored, wide) [TM_##enum_name] = count_1_##name,
#define TM_MOE_ROW_SLOTS(enum_name, name, stored, wide) [TM_##enum_name] = slots_##name,

const tm_moe_kernels TM_TIERED(tm_moe_kernels_) = {
    .count = {[TM_MOE_8] = {TM_MOE_IDS(TM_MOE_ROW_8)},
              [TM_MOE_4] = {TM_MOE_IDS(TM_MOE_ROW_4)},
              [TM_MOE_1] = {TM_MOE_IDS(TM_MOE_ROW_1)}},
    .slots = {TM_MOE_IDS(TM_MOE_ROW_SLOTS)},
};
