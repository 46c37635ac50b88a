/* THE STEP OF A LAYER: the step of an op, and what stands around it in a model.
 *
 *     q, k, v   short convolutions (convolution.h) of projections
 *     g, beta   gates (gates.def) of projections
 *     weight    softplus(raw g + dt_bias), the time step of Mamba-2
 *     o         the step of the op
 *     y         o / rms(o) weight activation(gate), for each group of a token's numbers
 *
 * The op's step is the problem, with arrays of its own for what the stages before it make and for
 * the o that the stage after it reads. Each of these stages may be missing. Then the op has the
 * caller's array in that place. No Python here. */
#ifndef LINATTN_LAYER_H
#define LINATTN_LAYER_H

#include "convolution.h"
#include "gates.h"

typedef enum { LA_NO_ACTIVATION, LA_SILU, LA_SIGMOID_GATE, LA_ACTIVATIONS } la_activation;

/* y [rows][size] = x / sqrt(mean of x^2 + eps) * weight, where x is o, or o activation(gate) if the
 * gate comes first. Otherwise activation(gate) is a factor of y. A row is a group of the numbers of a
 * token. */
typedef struct la_group_norm {
    /* what the caller says */
    double eps;
    la_activation activation;
    const la_array *weight; /* [V], or [HV*V]; NULL: no norm and no weight */
    const la_array *gate;   /* [N,HV*V]; NULL: none */
    bool gate_first;
    int64_t groups; /* of the HV*V numbers of a token, a divisor */

    /* what la_layer_run settles; o and y are dense, in the same dtype */
    int64_t rows, size;
    la_dtype dtype, real;
    const char *o;
    char *y;
} la_group_norm;

/* The arrays that convolutions make: q, k and v. */
enum { LA_LAYER_CONVOLUTIONS = 3 };
extern const la_name la_convolved[LA_LAYER_CONVOLUTIONS];

typedef struct la_layer {
    la_problem *p;                                      /* the step of the op, after la_check */
    la_convolution *convolution[LA_LAYER_CONVOLUTIONS]; /* after la_room_check; NULL: none */
    la_gating *g, *beta, *weight;                       /* after la_gates_check; NULL: none */
    la_group_norm *norm;                                /* NULL: y is o */
    char *y;                                            /* dense, in the dtype of o */
} la_layer;

/* Make the op's array `name` one that a stage leaves: dense, without memory yet. Before
 * la_check. */
void la_layer_reserve(la_problem *p, la_name name, la_dtype dtype, int ndim, const int64_t *shape);

/* The whole step. On a CPU only memory can fail, and it fails before a state is written. */
la_status la_layer_run(la_layer *j);

/* The last stage on a CPU. */
void la_group_norm_run(const la_group_norm *j);

#endif
