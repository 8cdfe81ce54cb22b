#include "tm_status.h"

#include <stdarg.h>
#include <stdio.h>

tm_status tm_fail(tm_error *error, tm_status status, const char *format, ...) {
    if (error != NULL) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return status;
}
