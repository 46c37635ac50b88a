/* Late gradients: the gradient of a final state adds to gradients that were made without it.
 *
 * Was S = sum of phi(k) v' and z = sum of phi(k), over all tokens of a head: an op without a decay. Then
 *
 *     dv += dS' phi(k),   dk += phi'(k) (dS v + dz)
 *
 * A rank that shares a row with others has made all gradients of its tokens before dS and dz arrive
 * (linattn/distributed/_later.py). */
#ifndef LINATTN_LATE_H
#define LINATTN_LATE_H

#include "linattn.h"

typedef struct {
    /* what the caller says; the arrays have memory of one device, and the shapes and dtypes of a call
     * with an initial and a final state: [B,T,H,K], [B,T,HV,V], [B,HV,K,V], [B,HV,K] */
    la_map map;
    double map_eps;
    int ordinal;
    void *stream;
    const la_array *k, *v, *dk, *dv, *dS, *dz;

    bool is_done; /* false: no kernel takes such arrays, and nothing has been changed */
    char message[LA_MESSAGE];
} la_late;

#endif
