/* THE CAUSAL CONVOLUTION of each channel with its own few taps, in front of a mixer:
 *
 *     z[t] = bias + sum over i of weight[W - 1 - i] x[t - i],   y[t] = z[t], or silu(z[t])
 *
 * The last tap belongs to the token itself. The state of a sequence is its last W - 1 inputs, the
 * oldest first: x[-1] is the last number of an initial state. Without one, inputs before the first
 * token are zeros. The state of a step may hold older inputs, too: they move on with the others.
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

/* A layer's step (layer.h) takes the two parts of a step apart: y, and the state that moves on. */
typedef enum { LA_WHOLE_STEP, LA_CONVOLVE_TOKEN, LA_MOVE_STATE } la_convolution_part;

typedef struct la_convolution {
    la_room_job room;
    int silu;                 /* 0: no activation */
    la_convolution_part part; /* of a step, on a CPU */
    int64_t B, T, D, W, S;
    int64_t older; /* inputs in the state of a step before the last W - 1 */
} la_convolution;

/* The CPU's pass. Only memory can fail, and it fails before an output is written. LA_MOVE_STATE takes
 * none. */
la_status la_convolution_run(la_convolution *j);

#endif
