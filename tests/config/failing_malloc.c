/* Preloaded by test_safety.py: makes one chosen allocation of the process fail. Needs glibc. */
#include <stddef.h>

extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *block, size_t size);

static _Thread_local long left; /* allocations until one fails; 0: none will */

/* The n-th allocation from now on fails (0: none). Returns how many were left of the last order: 0 if it
 * failed. */
long fail_at(long n) {
    long before = left;
    left = n;
    return before;
}

static int fails(void) {
    return left > 0 && --left == 0;
}

void *malloc(size_t size) {
    return fails() ? NULL : __libc_malloc(size);
}

void *calloc(size_t count, size_t size) {
    return fails() ? NULL : __libc_calloc(count, size);
}

void *realloc(void *block, size_t size) {
    return fails() ? NULL : __libc_realloc(block, size);
}
