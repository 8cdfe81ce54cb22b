/* Preloaded: makes one malloc, calloc or realloc fail that is called from a given range of addresses.
 *
 * A tail call through a function pointer returns into the caller's caller, which lies in the same library. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);

static uintptr_t first, last;
static long seen, wanted = -1;

/* The call with this number fails; -1: none. Returns how many there were since the last time. */
long fail_allocation(uintptr_t from, uintptr_t to, long number) {
    long before = seen;
    first = from, last = to, seen = 0, wanted = number;
    return before;
}

static int fails(void *caller) {
    uintptr_t at = (uintptr_t)caller;
    return at >= first && at < last && seen++ == wanted;
}

void *malloc(size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes) {
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, bytes);
}
