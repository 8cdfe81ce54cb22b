/* Fingerprints of tensors and of their pieces: byte_p * z^(8p) summed over the byte positions p of the
 * little-endian tensor in C order, modulo a polynomial (kernels/tm_fingerprint_kernels.h). */
#ifndef TM_FINGERPRINT_H
#define TM_FINGERPRINT_H

#include "tm_status.h"
#include "tm_view.h"

/* Where a view lies in a larger tensor. */
typedef struct tm_piece {
    const int64_t
        *whole; /* shape of the larger tensor, [ndim of the view], borrowed; NULL: the view is all */
    const int64_t *start; /* [ndim] index of the view's first element in it, borrowed */
} tm_piece;

/* pieces: [count], or NULL when every view is a whole tensor; a view with a place needs its shape, also when
 * its strides are NULL. bits: 64 or 128. out: [count], low word first. The fingerprint of a piece counts its
 * bytes at their positions in the whole, so that those of a partition add up by XOR. */
TM_NODISCARD tm_status tm_fingerprint(const tm_view *views, const tm_piece *pieces, size_t count, int bits,
                                      int threads, uint64_t (*out)[2], tm_error *error);

#endif
