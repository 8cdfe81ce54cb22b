/* Threads that live for one call. */
#ifndef TM_THREADS_H
#define TM_THREADS_H

#define TM_MAX_WORKERS 256

/* Runs body(context) on the calling thread and on `workers` - 1 others, and returns when all have. The body
 * takes its work from a shared counter, so that it is complete however many threads could be started. */
void tm_threads_run(int workers, void (*body)(void *context), void *context);

#endif
