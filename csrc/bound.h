/* A step that is checked once and run many times: the type is bound.c's, the running module.c's. */
#ifndef LINATTN_BOUND_H
#define LINATTN_BOUND_H

#include "arrays.h"

int la_bound_init(PyObject *module);

/* A BoundStep over a call that is checked and has its out. It takes over the call's references. */
PyObject *la_bound_new(const la_call *c);

/* Run a step that has been checked. A warning names the frame `level` above. */
int la_run_step(la_call *c, int level);

#endif
