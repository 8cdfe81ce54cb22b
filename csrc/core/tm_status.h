/* Status codes and error text of the core.
 *
 * The core never prints and never knows Python: a function that can fail returns a tm_status and writes one
 * sentence into the caller's tm_error. Ignoring the status is a compiler warning, hence an error. */
#ifndef TM_STATUS_H
#define TM_STATUS_H

typedef enum tm_status {
    TM_OK = 0,
    TM_ERR_MEMORY, /* an allocation failed */
    TM_ERR_VALUE,  /* an argument is outside its range */
    TM_ERR_DTYPE,  /* the dtype has no kernel here */
    TM_ERR_THREAD  /* a worker could not be started */
} tm_status;

/* Caller-owned; always a terminated string after a failing call, untouched on success. */
typedef struct tm_error {
    char text[256];
} tm_error;

#if defined(__GNUC__) || defined(__clang__)
#    define TM_NODISCARD __attribute__((warn_unused_result))
#    define TM_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#else
#    define TM_NODISCARD
#    define TM_PRINTF(fmt, first)
#endif

/* Writes the text (truncated to the buffer) and returns `status`, so that a failure is one statement. */
tm_status tm_fail(tm_error *error, tm_status status, const char *format, ...) TM_PRINTF(3, 4);

#endif
