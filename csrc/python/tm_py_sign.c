/* sign_agreement: two lists of views that must agree in shape, one call of the core. */
#include "tm_functions.h"

#include "../core/tm_sign.h"
#include "tm_arguments.h"
#include "tm_pairs.h"

PyObject *tm_py_sign_agreement(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    tm_state *state = tm_state_of(module);
    PyObject *result = NULL;
    tm_views a, b;
    tm_sign_counts counts;
    tm_error error;
    int64_t n;
    int threads;
    if (tm_arguments_count("sign_agreement", count, 3) < 0 || tm_arguments_threads(args[2], &threads) < 0)
        return NULL;
    if (tm_views_open_as(&a, state, args[0], Py_None, "a", TM_VIEWS_SHAPES) < 0) {
        tm_views_close(&a);
        return NULL;
    }
    if (tm_views_open_as(&b, state, args[1], Py_None, "b", TM_VIEWS_SHAPES) < 0)
        goto done;
    if (tm_pairs_agree(&a, &b, "in a", "its partner in a", 0) < 0)
        goto done;
    PyThreadState *thread = tm_drop_gil(a.bytes + b.bytes);
    const tm_status status = tm_sign_agreement(a.views, b.views, a.count, threads, &n, &counts, &error);
    tm_take_gil(thread);
    if (status != TM_OK)
        tm_raise_status(status, &error);
    else
        result = Py_BuildValue("(LLL)", (long long)counts.same, (long long)counts.opposite, (long long)n);
done:
    tm_views_close(&b);
    tm_views_close(&a);
    return result;
}
