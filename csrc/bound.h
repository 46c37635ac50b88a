/* A step that is checked once and run many times. */
#ifndef LINATTN_BOUND_H
#define LINATTN_BOUND_H

#include "arrays.h"

int la_bound_init(PyObject *module);

/* A BoundStep over a call that is checked and has its out. It takes over the call's references. */
PyObject *la_bound_new(const la_call *c);

#endif
