#include "tm_memory.h"

#include <stdint.h>
#include <stdlib.h>

static tm_allocator current = malloc;

void *tm_allocate(size_t count, size_t size) {
    if (size != 0 && count > SIZE_MAX / size) {
        return NULL;
    }
    return current(count * size);
}

void tm_memory_set_allocator(tm_allocator allocator) {
    current = allocator != NULL ? allocator : malloc;
}
