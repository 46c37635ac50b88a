/* Layer steps (layer.h) from Python: the stages around the step of an op. */
#ifndef LINATTN_LAYERS_H
#define LINATTN_LAYERS_H

#include "call.h"

#include "layer.h"

typedef struct la_layer_call la_layer_call;

la_layer_call *la_layer_new(void); /* NULL with an exception */
void la_layer_free(la_layer_call *l);

/* The stages, as linattn/layers.py names them, around a step whose arrays have been taken and not
 * yet checked. values: the caller's objects by the names of the step's arrays. -1 with an
 * exception. */
int la_layer_take(la_layer_call *l, la_call *step, PyObject *stages, PyObject *const *values);

/* After la_check of the step: the shapes of the stages, and y, a result of the step's call. */
int la_layer_settle(la_layer_call *l, la_call *step);

/* The step and its stages. */
int la_layer_call_run(la_layer_call *l, la_call *step);

#endif
