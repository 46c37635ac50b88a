/* Run a call that has been checked and has its outputs. -1 with an exception set, or 0. */
#ifndef LINATTN_RUN_H
#define LINATTN_RUN_H

#include "arrays.h"
#include "layer.h"

/* A forward or a backward pass. */
int la_run_pass(la_call *c);
/* A step: its state is the old one or the new one, whatever happens. */
int la_run_step(la_call *c);
/* A gate from a projection: c has its arrays. */
int la_run_gating(la_call *c, la_gating *j);
/* A call of a room. A step is never cut short. */
int la_run_room(la_call *c, la_room_job *j);

/* A step and the stages around it, whose arrays are those of `stages`. */
int la_run_layer(la_call *step, la_call *const *stages, int count, la_layer *j);

/* The kernel that took this thread's last call. */
const la_taken *la_last_taken(void);

#endif
