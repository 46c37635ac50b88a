/* Layer steps (layer.h) from Python: the stages around the step of an op. */
#ifndef LINATTN_LAYERS_H
#define LINATTN_LAYERS_H

#include "call.h"

#include "layer.h"

typedef struct la_layer_call la_layer_call;

la_layer_call *la_layer_new(void); /* NULL with an exception */
void la_layer_free(la_layer_call *l);

/* The numbers and words of the stages, as linattn/layers.py names them. To read a number may run Python,
 * so this comes before any array. -1 with an exception. */
int la_layer_read(la_layer_call *l, PyObject *stages);

/* The arrays of the stages around a step whose own arrays have been taken and not yet checked.
 * values: the caller's objects by the names of the step's arrays. */
int la_layer_take(la_layer_call *l, la_call *step, PyObject *const *values);

/* After la_check of the step: the shapes of the stages, and y, a result of the step's call. */
int la_layer_settle(la_layer_call *l, la_call *step);

/* The step and its stages. */
int la_layer_call_run(la_layer_call *l, la_call *step);

#endif
