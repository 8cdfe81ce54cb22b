/* The core's allocator: malloc, unless a test puts a failing one in its place. */
#ifndef TM_MEMORY_H
#define TM_MEMORY_H

#include <stddef.h>

typedef void *(*tm_allocator)(size_t bytes);

/* `count` records of `size` bytes, NULL if there is no memory or the product overflows. Release with free. */
void *tm_allocate(size_t count, size_t size);

/* For tests: NULL restores malloc. Not while a reduction runs. */
void tm_memory_set_allocator(tm_allocator allocator);

#endif
