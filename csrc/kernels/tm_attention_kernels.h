/* The pass over attention scores: the largest score and the sum of exponentials of a row, key block by key
 * block. */
#ifndef TM_ATTENTION_KERNELS_H
#define TM_ATTENTION_KERNELS_H

#include <stddef.h>

/* A row of scores so far: max is -inf while there is none, sum = sum of exp(score - max) over the scores if
 * max is finite. Once a score was NaN, or is +inf, sum means nothing. */
typedef struct tm_attention_row {
    double sum;
    float max;
    int nan;
} tm_attention_row;

/* Results are the same bits in every tier: score i of a call goes to lane i % TM_LANES, lanes are added by
 * one tree, the exponential is a polynomial whose operations are all rounded (no tier fuses). Relative error
 * of `sum` given the scores: 1e-6. At most 2^24 scores a call (a lane counts to 2^24). */
typedef struct tm_attention_kernels {
    /* The next n scores of a row. */
    void (*row)(tm_attention_row *row, const float *scores, size_t n);
    /* scores = cap * tanh(scores / cap); returns their sum. NaN stays NaN, infinities become +-cap. */
    double (*cap)(float *scores, size_t n, float cap);
} tm_attention_kernels;

#endif
