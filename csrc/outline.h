/* Calls whose arrays have no memory yet, such as those that a tracer of another library makes. */
#ifndef LINATTN_OUTLINE_H
#define LINATTN_OUTLINE_H

#include "errors.h"

/* Anything with a shape and a dtype as an array of the call. */
int la_take_outline(la_call *c, la_name name, PyObject *object);

/* After la_check: (given, made), a row (label, letters, shape, dtype) for each array that the call has
 * and for each that it makes, in the order of arrays.def. A number is an array of the shape that it
 * stands for, of the dtype of sums. */
PyObject *la_outline(const la_problem *p);

#endif
