/* Arrays of any library (NumPy, the exchange table or capsules of DLPack, __cuda_array_interface__)
 * as la_arrays, and outputs back in the library of q: arrays.c, places.c and outputs.c, with
 * views.c and memory.c behind them.
 *
 * Functions that can fail return -1 (or NULL) with an exception set that names the argument. */
#ifndef LINATTN_ARRAYS_H
#define LINATTN_ARRAYS_H

#include "errors.h"

int la_arrays_init(void);

/* An array of the caller's, q first: it says where every array lies. None is skipped. An array that the
 * call writes (out, a step's state) is written where it lies. */
int la_take(la_call *c, la_name name, PyObject *object);
/* A state: S, or the pair (S, z) of an op that is normalised. */
int la_take_state(la_call *c, la_name S, PyObject *object);

/* After la_check: a new array for an output, in the user's dimensions. */
int la_allocate(la_call *c, la_name name);
/* In a call of no op: a new array of the shape of another one. */
int la_allocate_like(la_call *c, la_name name, la_dtype dtype, const la_array *like);
/* After la_check: what is written may lie in no input. */
int la_refuse_overlaps(la_call *c);
/* Have the arrays that were read stayed where they were, writable where they are written? Ask after the
 * last Python that a call runs, and before the core looks at any of them. */
int la_still_there(const la_call *c);
/* Keep the memory of PyTorch's tensors, for a call during which other threads run. */
int la_hold(la_call *c);
/* 1 if two arrays share memory, 0 if not. */
int la_shares_memory(PyObject *x, PyObject *y);

/* CUDA, after the kernels are enqueued: other streams may change their arrays only after they ran. */
int la_settle_streams(la_call *c);
/* CUDA: the caller's current stream, as of now. For calls that are bound. */
int la_current_stream(la_call *c);
/* The result of a call: an array of q's library, or None where there is none; for states a pair. */
PyObject *la_result(la_call *c, la_name name);
PyObject *la_state_result(la_call *c, la_name S);

#endif
