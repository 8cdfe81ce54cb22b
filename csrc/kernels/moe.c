/* Expert ids to counts (contract: tm_moe_kernels.h). A block of ids is first looked at as vectors: whether
 * any of them is outside. Nearly always none is, and each id is an index as it stands: one load and one
 * increment, scalar in every tier, bound by one store a cycle. A block with outsiders turns its ids into
 * slots one by one. */
#include "moe_layer.h"
#include "moe_sort.h"
#include "tm_lanes.h"

#define TM_MOE_BLOCK 128 /* ids; 64 costs 3 %, 256 gains nothing */

/* Whether an id of the block is outside [0, experts), without a comparison an id. Signed and wide ids: the
 * top bit of `id` or of `limit - id` is set then, as experts are below 2^31. Narrow unsigned ids use all of
 * their bits: the largest decides. */
#define TM_MOE_BY_SIGN(name, stored, bits)                                                                   \
    TM_INLINE int outside_##name(const stored *ids, uint32_t experts) {                                      \
        const uint64_t most = UINT64_MAX >> (65 - (bits));                                                   \
        const uint##bits##_t limit = (uint##bits##_t)(experts - 1 < most ? experts - 1 : most);              \
        uint##bits##_t any = 0;                                                                              \
        for (size_t k = 0; k < TM_MOE_BLOCK; k++) {                                                          \
            const uint##bits##_t id = (uint##bits##_t)ids[k];                                                \
            any = (uint##bits##_t)(any | id | (uint##bits##_t)(limit - id));                                 \
        }                                                                                                    \
        return any >> ((bits) - 1) != 0;                                                                     \
    }
#define TM_MOE_BY_MAXIMUM(name, stored, bits)                                                                \
    TM_INLINE int outside_##name(const stored *ids, uint32_t experts) {                                      \
        stored most = 0;                                                                                     \
        for (size_t k = 0; k < TM_MOE_BLOCK; k++) {                                                          \
            most = ids[k] > most ? ids[k] : most;                                                            \
        }                                                                                                    \
        return most >= experts;                                                                              \
    }

/* X(ENUM, name, stored type, bits, unsigned type of the comparison, outside): a negative id becomes a large
 * one. */
#define TM_MOE_IDS(X)                                                                                        \
    X(I8, i8, int8_t, 8, uint32_t, TM_MOE_BY_SIGN)                                                           \
    X(I16, i16, int16_t, 16, uint32_t, TM_MOE_BY_SIGN)                                                       \
    X(I32, i32, int32_t, 32, uint32_t, TM_MOE_BY_SIGN)                                                       \
    X(I64, i64, int64_t, 64, uint64_t, TM_MOE_BY_SIGN)                                                       \
    X(U8, u8, uint8_t, 8, uint32_t, TM_MOE_BY_MAXIMUM)                                                       \
    X(U16, u16, uint16_t, 16, uint32_t, TM_MOE_BY_MAXIMUM)                                                   \
    X(U32, u32, uint32_t, 32, uint32_t, TM_MOE_BY_SIGN)                                                      \
    X(U64, u64, uint64_t, 64, uint64_t, TM_MOE_BY_SIGN)

#define TM_MOE_SLOTS(name, stored, wide)                                                                     \
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

#define TM_MOE_TALLY(indices, l, table_count, stride)                                                        \
    tables[(l) % (table_count) * (stride) + (size_t)(indices)[k + (l)]]++;
#define TM_MOE_TALLY_8(indices, table_count, stride)                                                         \
    TM_MOE_TALLY(indices, 0, table_count, stride)                                                            \
    TM_MOE_TALLY(indices, 1, table_count, stride)                                                            \
    TM_MOE_TALLY(indices, 2, table_count, stride)                                                            \
    TM_MOE_TALLY(indices, 3, table_count, stride)                                                            \
    TM_MOE_TALLY(indices, 4, table_count, stride)                                                            \
    TM_MOE_TALLY(indices, 5, table_count, stride)                                                            \
    TM_MOE_TALLY(indices, 6, table_count, stride)                                                            \
    TM_MOE_TALLY(indices, 7, table_count, stride)

#define TM_MOE_COUNT(name, stored, shape, table_count, stride)                                               \
    TM_NOINLINE void count_##shape##_##name(uint32_t *tables, const void *data, size_t n,                    \
                                            uint32_t experts) {                                              \
        const stored *ids = data;                                                                            \
        for (; n >= TM_MOE_BLOCK; n -= TM_MOE_BLOCK, ids += TM_MOE_BLOCK) {                                  \
            tm_prefetch_row(ids, TM_MOE_BLOCK * (int)sizeof *ids);                                           \
            if (outside_##name(ids, experts)) {                                                              \
                uint32_t slots[TM_MOE_BLOCK];                                                                \
                slots_##name(slots, ids, TM_MOE_BLOCK, experts);                                             \
                for (size_t k = 0; k < TM_MOE_BLOCK; k += 8) {                                               \
                    TM_MOE_TALLY_8(slots, table_count, stride)                                               \
                }                                                                                            \
                continue;                                                                                    \
            }                                                                                                \
            for (size_t k = 0; k < TM_MOE_BLOCK; k += 8) {                                                   \
                TM_MOE_TALLY_8(ids, table_count, stride)                                                     \
            }                                                                                                \
        }                                                                                                    \
        for (size_t k = 0; k < n; k++) {                                                                     \
            tables[k % (table_count) * (stride) + slot_##name(ids[k], experts)]++;                           \
        }                                                                                                    \
    }

#define TM_MOE_DEFINE(enum_name, name, stored, bits, wide, outside)                                          \
    outside(name, stored, bits) TM_MOE_SLOTS(name, stored, wide)                                             \
        TM_MOE_COUNT(name, stored, 8, 8, TM_MOE_STRIDE_8) TM_MOE_COUNT(name, stored, 4, 4, TM_MOE_STRIDE_4)  \
            TM_MOE_COUNT(name, stored, 1, 1, 0)
TM_MOE_IDS(TM_MOE_DEFINE)

#define TM_MOE_ROW_8(enum_name, name, ...) [TM_##enum_name] = count_8_##name,
#define TM_MOE_ROW_4(enum_name, name, ...) [TM_##enum_name] = count_4_##name,
#define TM_MOE_ROW_1(enum_name, name, ...) [TM_##enum_name] = count_1_##name,
#define TM_MOE_ROW_SLOTS(enum_name, name, ...) [TM_##enum_name] = slots_##name,

const tm_moe_kernels TM_TIERED(tm_moe_kernels_) = {
    .count = {[TM_MOE_8] = {TM_MOE_IDS(TM_MOE_ROW_8)},
              [TM_MOE_4] = {TM_MOE_IDS(TM_MOE_ROW_4)},
              [TM_MOE_1] = {TM_MOE_IDS(TM_MOE_ROW_1)}},
    .slots = {TM_MOE_IDS(TM_MOE_ROW_SLOTS)},
    .runs = layer_runs,
    .runs_sum = layer_runs_sum,
    .runs_above = layer_runs_above,
    .sum = layer_sum,
    .max = layer_max,
    .sum_above = layer_sum_above,
    .bad = layer_bad,
    .entropy = layer_entropy,
    .spread = layer_spread,
    .pool = layer_pool,
    .churn = layer_churn,
    .at_most = layer_at_most,
    .above = layer_above,
    .below = layer_below,
};
