#define _POSIX_C_SOURCE 200809L

#include "tm_threads.h"

#include <pthread.h>
#include <signal.h>

typedef struct start {
    void (*body)(void *context);
    void *context;
} start;

static void *run_body(void *argument) {
    const start *work = argument;
    work->body(work->context);
    return NULL;
}

/* Workers start with all signals blocked: a handler of the host must run where the host expects it. */
void tm_threads_run(int workers, void (*body)(void *context), void *context) {
    pthread_t threads[TM_MAX_WORKERS];
    start work = {body, context};
    sigset_t all, before;
    int started = 0;

    sigfillset(&all);
    int masked = pthread_sigmask(SIG_SETMASK, &all, &before) == 0;
    while (started < workers - 1 && started < TM_MAX_WORKERS &&
           pthread_create(&threads[started], NULL, run_body, &work) == 0) {
        started++;
    }
    if (masked) {
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    body(context);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
}
