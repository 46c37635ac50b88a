/* A gate or a beta from a projection x in one pass, and its gradients in one (linattn/gates.py).
 * A caller describes the pass in an la_gating, la_gates_check settles where numbers lie, and
 * la_gates or la_cuda_gates does the work. The result is dense, in the order of x. */
#ifndef LINATTN_GATES_H
#define LINATTN_GATES_H

#include "linattn.h"

/* Where the numbers of x, or of the gradient dg, lie. */
typedef struct {
    const char *data;
    la_dtype dtype;
    int64_t lead[3]; /* strides of the axes of rows */
    int64_t head;    /* stride of a row's first axis, P; that of its second, Q, is 1 */
} la_gate_numbers;

/* A parameter, and its gradient. */
typedef struct {
    const la_array *given; /* NULL: none */
    char *gradient;        /* NULL: not asked for */
    int64_t stride[2];     /* along P and Q; 0 where one number serves all */
    int64_t dense[2];      /* the same for its gradient */
    int64_t count;         /* its numbers */
} la_gate_parameter;

typedef struct la_gating {
    /* what the caller says */
    la_curve curve;
    double factor;
    la_device device;
    int ordinal;
    void *stream;
    const la_array *x, *A_log, *dt_bias; /* A_log, dt_bias: NULL where there is none */
    const la_array *d;                   /* the gradient of the result; NULL in a forward pass */

    /* what la_gates_check settles: x is [lead 0][lead 1][lead 2][P][Q] */
    la_dtype real; /* of the result and of all arithmetic */
    int64_t lead[3], rows, P, Q, count;
    bool dense; /* x and d lie without gaps: number i is at i */
    la_gate_numbers from, df;
    la_gate_parameter rate, bias; /* A_log, dt_bias */

    /* what the caller adds then */
    char *to; /* the result; in a backward pass dx, in the dtype of x */

    char message[LA_MESSAGE];
} la_gating;

/* The fault of an array, and which it is. */
typedef enum {
    LA_GATING_FITS,
    LA_GATING_DTYPE,    /* no floating numbers */
    LA_GATING_SPREAD,   /* its shape does not broadcast to that of x */
    LA_GATING_AXES,     /* it has other numbers along an axis before the last two */
    LA_GATING_GRADIENT, /* its shape is not that of x */
} la_gating_fault;

la_gating_fault la_gates_check(la_gating *j, const la_array **which);

/* The CPU's pass. Only memory can fail, and it fails before an output is written. */
la_status la_gates(la_gating *j);

#endif
