/* Gates from projections (gates.h) from Python. */
#ifndef LINATTN_GATE_CALLS_H
#define LINATTN_GATE_CALLS_H

#include "call.h"

#include "gates.h"

/* gate(name, factor, x, A_log, dt_bias) -> the gate; gate(..., d) -> (dx, dA_log, ddt_bias),
 * where d is the gradient of the gate. None for a parameter that is not there. The caller has
 * seen that PyTorch records none of the arrays. */
PyObject *la_gate_call(PyObject *const *args, Py_ssize_t nargs);

/* The curve of a gate of gates.def; false if there is none of this name. */
bool la_find_curve(PyObject *name, la_curve *curve);

#endif
