/* The functions of the module, one line each: METH_FASTCALL with positional arguments only. Keywords,
 * defaults and documentation are trainmon.ops' part. */
#ifndef TM_FUNCTIONS_H
#define TM_FUNCTIONS_H

#include "tm_state.h"

/* X(name, "(positional arguments, /)"): PyObject *tm_py_<name>(...) is trainmon._core.<name>. */
#define TM_FUNCTIONS(X)                                                                                      \
    X(tensor_stats, "(tensors, names, threads, /)")                                                          \
    X(merge_stats, "(records, offsets, /)")                                                                  \
    X(multi_norm, "(tensors, order_code, per_tensor, threads, /)")                                           \
    X(scan_nonfinite, "(tensors, names, threads, /)")                                                        \
    X(exponent_histogram, "(tensors, per_tensor, threads, /)")                                               \
    X(cast_losses, "(tensors, formats, scale, per_tensor, threads, /)")                                      \
    X(expert_load, "(indices, num_experts, per_tensor, threads, /)")                                         \
    X(expert_metrics, "(counts, options, placement, groups, dropped, state, /)")                             \
    X(common_assignments, "(before, after, k, num_experts, /)")                                              \
    X(compare, "(a, b, threads, /)")                                                                         \
    X(merge_comparisons, "(records, /)")                                                                     \
    X(diff_norm, "(tensors, previous, update, per_tensor, threads, /)")                                      \
    X(sign_agreement, "(a, b, threads, /)")                                                                  \
    X(fingerprint, "(tensors, pieces, bits, threads, /)")                                                    \
    X(stage, "(tensors, names, arena, bits, threads, /)")                                                    \
    X(stage_size, "(tensors, /)")                                                                            \
    X(stable_rank, "(matrices, carried, tolerance, epsilon, seed, step, exact_side, threads, /)")            \
    X(attention_logits,                                                                                      \
      "(q, k, bounds, kept, kept_starts, rows, heads, scale, cap, sinks, scores, per_row, threads, /)")      \
    X(plain_read, "(tensors, /)")                                                                            \
    X(loss_add, "(state, losses, weights, buckets, /)")                                                      \
    X(loss_add_value, "(state, value, is_mean, tokens, /)")                                                  \
    X(loss_add_state, "(state, other, /)")                                                                   \
    X(loss_means, "(state, row, /)")                                                                         \
    X(loss_layout, "()")                                                                                     \
    X(detector_rules, "()")                                                                                  \
    X(detector_words, "(kinds, parameters, /)")                                                              \
    X(detector_reset, "(plan, state, /)")                                                                    \
    X(detector_check, "(plan, state, /)")                                                                    \
    X(detect, "(plan, state, values, valid, events, /)")                                                     \
    X(write_rows, "(plan, numbers, names, masks, json, header, /)")                                          \
    X(cpu_info, "()")                                                                                        \
    X(build_info, "()")

#define TM_DECLARE_FUNCTION(name, arguments)                                                                 \
    PyObject *tm_py_##name(PyObject *module, PyObject *const *args, Py_ssize_t count);
TM_FUNCTIONS(TM_DECLARE_FUNCTION)
#undef TM_DECLARE_FUNCTION

#endif
