/* What the files of the attention family share; private to them. */
#ifndef TM_ATTENTION_PARTS_H
#define TM_ATTENTION_PARTS_H

#include "tm_attention.h"
#include "tm_layout.h"
#include "tm_table.h"

/* A tile is TM_TILE_ROWS query rows (of several heads, if they share keys) by TM_TILE_KEYS keys: its scores
 * stay in L2. Where not every row sees every key, keys come TM_EDGE_KEYS at a time. */
#define TM_TILE_ROWS 256
#define TM_TILE_KEYS 512
#define TM_EDGE_KEYS 128
#define TM_BUNDLE_HEADS 16
#define TM_MEAN_KEYS 64 /* keys that are read at a time for their sum */

/* Heads that are read together because they share their keys. */
typedef struct tm_bundle {
    int64_t key_head;
    int count;
    int64_t head[TM_BUNDLE_HEADS];
} tm_bundle;

enum { TM_ROW_EMPTY, TM_ROW_COUNTED, TM_ROW_NONFINITE };

typedef struct tm_attention_call {
    const tm_attention *input;
    const tm_attention_each *each;
    const tm_table *table;
    int64_t batches, heads, key_heads, queries, keys, depth;
    tm_bundle *bundles; /* owned */
    int64_t bundle_count;
    int64_t block_rows, blocks; /* query rows of a unit, units of a bundle */
    unsigned char *status;      /* owned [batches][heads][row_count] */
    tm_attention_sums *sums;    /* owned [units][TM_BUNDLE_HEADS] */
    tm_attention_sums *means;   /* owned [batches][bundle_count][TM_BUNDLE_HEADS] */
} tm_attention_call;

/* The mask of one batch. */
typedef struct tm_attention_mask {
    const int64_t *bounds; /* [row_count][2] */
    const int64_t *kept;   /* or NULL */
    int64_t keys;          /* keys that are kept */
} tm_attention_mask;
tm_attention_mask tm_attention_mask_of(const tm_attention_call *call, int64_t batch);

/* Rows of one head of q or k as floats. */
typedef struct tm_vectors {
    const tm_table *table;
    tm_layout layout;
    tm_dtype dtype;
    int64_t depth;
    const int64_t *kept; /* row i is row kept[i] of the tensor; NULL: row i */
    const float *direct; /* float rows that can be read in place, `stride` apart; or NULL */
    int64_t stride;
} tm_vectors;
void tm_vectors_init(tm_vectors *vectors, const tm_table *table, const tm_view *view, int64_t batch,
                     int64_t head, const int64_t *kept);

/* Row i of the tensor. */
void tm_vectors_copy(const tm_vectors *vectors, int64_t row, int64_t count, float *out);

/* Rows [first, first + count) among the kept ones: in place, or copied to `scratch` ([count][depth]). */
const float *tm_vectors_read(const tm_vectors *vectors, int64_t first, int64_t count, float *scratch,
                             int64_t *stride);

/* Floats that a unit needs. */
size_t tm_attention_unit_floats(int64_t depth);
/* Scores of one unit: status, `each` and the unit's sums but sum_z (unless capped). */
void tm_attention_unit(const tm_attention_call *call, int64_t unit, float *scratch);

/* sum_z and keys of the counted rows of one bundle and batch, in time that is linear in keys and rows. */
size_t tm_attention_mean_floats(int64_t depth); /* scratch, doubles included */
void tm_attention_mean(const tm_attention_call *call, int64_t item, float *scratch);

#endif
