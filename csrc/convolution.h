/* THE CAUSAL CONVOLUTION of each channel with its own few taps, in front of a mixer:
 *
 *     z[t] = bias + sum over i of weight[W - 1 - i] x[t - i],   y[t] = z[t], or silu(z[t])
 *
 * The last tap belongs to the token itself. The state of a sequence is its last W - 1 inputs, the
 * oldest first: x[-1] is the last number of an initial state. Without one, inputs before the first
 * token are zeros.
 *
 * Here is what a call of the room (room.h) says. */
#ifndef LINATTN_CONVOLUTION_H
#define LINATTN_CONVOLUTION_H

#include "room.h"

/* The lines of convolution.def. */
typedef enum {
#define LA_CONVOLUTION_ARRAY(name, ...) LA_CONVOLUTION_##name,
#define LA_CONVOLUTION_INDEX(name, ...) LA_CONVOLUTION_##name,
#include "convolution.def"
    LA_CONVOLUTION_ARRAYS
} la_convolution_line;

typedef struct la_convolution {
    la_room_job room;
    int silu; /* 0: no activation */
    int64_t B, T, D, W, S;
} la_convolution;

/* The CPU's pass. Only memory can fail, and it fails before an output is written. */
la_status la_convolution_run(la_convolution *j);

#endif
