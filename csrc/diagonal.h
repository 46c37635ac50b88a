/* DIAGONAL SCANS: recurrences whose decay belongs to a channel d and a number n of its state at
 * once.
 *
 *     h[d,n] <- a[d,n] h[d,n] + b[d,n],   y[d] = sum over n of C[n] h[d,n] + D u[d]
 *
 *     SELECTIVE  a = exp(delta[d] A[d,n]), b = delta[d] u[d] B[n]. B and C belong to a token and a
 *                group of channels. y is times silu(z) (Mamba)
 *     FIXED      a = A[d,n], b = u[d] B[d,n], C[d,n]: the same for all tokens (S4D)
 *     GATED      a = exp(g[d]), b = u[d], y = h: one number in a state. With a `write` b is
 *                (1 - a) u (HGRN) or sqrt(1 - a^2) u (RG-LRU)
 *
 * No chunk of such a recurrence is a product of matrices, so it is no line of variants.def. A, B, C
 * and h may be complex; then N counts reals, two for each number, and y is twice the real part of
 * the sum: the other half of the conjugate pairs.
 *
 * Here is what a call of the room (room.h) says. diagonal_token.h has one token and its adjoint. */
#ifndef LINATTN_DIAGONAL_H
#define LINATTN_DIAGONAL_H

#include "room.h"

typedef enum { LA_SELECTIVE, LA_FIXED, LA_GATED_SCAN } la_scan_form;
typedef enum { LA_WRITE_U, LA_WRITE_SHARE, LA_WRITE_ROOT } la_scan_written;

/* The lines of diagonal.def. */
typedef enum {
#define LA_SCAN_ARRAY(name, ...) LA_SCAN_##name,
#define LA_SCAN_INDEX(name, ...) LA_SCAN_##name,
#define LA_SCAN_RESULT(name, ...) LA_SCAN_##name,
#include "diagonal.def"
    LA_SCAN_ARRAYS
} la_scan_line;

typedef struct la_diagonal {
    la_room_job room;
    bool softplus; /* delta <- softplus(delta + delta_bias) */
    int write;     /* of GATED: an la_scan_written */
    int64_t B, T, D, N, G, S;
} la_diagonal;

/* The CPU's pass. Only memory can fail, and it fails before an output is written. */
la_status la_diagonal_run(la_diagonal *j);

#endif
