/* What fingerprint and stage share on the way out. */
#ifndef TM_PRINTS_H
#define TM_PRINTS_H

#include "tm_views.h"

/* New uint64 array [count, 2]: low and high word of each fingerprint. */
PyObject *tm_prints_new(size_t count, uint64_t (**prints)[2]);

/* New list of pairs (dtype name, shape), one a view; the views are shaped. */
PyObject *tm_prints_kinds(const tm_views *views);

#endif
