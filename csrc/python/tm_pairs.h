/* Two lists of views that a call reads in pairs. */
#ifndef TM_PAIRS_H
#define TM_PAIRS_H

#include "tm_views.h"

/* 0 if both lists are equally long and partners have one shape (and, with same_dtype, one dtype), else -1
 * with an error that names the first pair that differs. Both must be open with TM_VIEWS_SHAPES. items,
 * partner: what the errors call the elements of `a` ("tensors") and the partner of an element of `b` ("its
 * tensor"). */
int tm_pairs_agree(const tm_views *a, tm_views *b, const char *items, const char *partner, int same_dtype);

#endif
