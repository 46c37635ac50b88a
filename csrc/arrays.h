/* Arrays of any kind (NumPy, the exchange table or capsules of DLPack, __cuda_array_interface__)
 * as la_arrays, and outputs back in the kind of q: arrays.c, with views.c and memory.c behind it.
 *
 * Functions that can fail return -1 (or NULL) with an exception set that names the argument. */
#ifndef LINATTN_ARRAYS_H
#define LINATTN_ARRAYS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL la_numpy
#ifndef LA_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "linattn.h"

/* How arrays of q's kind are made. */
typedef enum {
    LA_NUMPY,
    LA_EXCHANGE, /* through the type's exchange table (PyTorch) */
    LA_CUPY,
    LA_EXPORTED, /* our own memory, handed to its library (JAX, Numba) */
} la_library;

/* Where an array lies: what the user gave, also where the core reads a copy. */
typedef struct {
    char *low, *high;
} la_span;

/* One call: the problem, and the references it rests on. All zero at first. */
typedef struct {
    la_problem p;
    PyObject *object[LA_ARRAYS]; /* what keeps p.array's memory (the array, a copy, a capsule) */
    PyObject *given[LA_ARRAYS];  /* as NumPy sees what the user gave; NULL: not asked yet */
    la_span span[LA_ARRAYS];     /* of inputs and of arrays written in place */
    bool ran_python;             /* some array may have run Python when it was read */
    bool lent[LA_ARRAYS];        /* the core works on the owner's memory, and object is the owner */
    const struct dl_exchange *lender[LA_ARRAYS]; /* whose table says where it lies; NULL: NumPy */
    PyObject *like;                              /* q; the user's call owns it */
    PyObject *out;                               /* out as given; likewise */
    la_library library;
    const struct dl_exchange *table; /* of q's type, if library is LA_EXCHANGE */
    int gradients;                   /* 1: PyTorch records them; -1: it does not; 0: not asked */
    bool stream_unknown;             /* CUDA: some owner's stream is not known */
    int others;                      /* CUDA: streams of inputs that are not q's */
    void *other[LA_ARRAYS];
    bool bound; /* a step that will be run again: nothing in it may grow stale */
} la_call;

int la_arrays_init(void);
void la_call_release(la_call *c); /* the references, once and for all */
int la_raise(const la_call *c, la_status status);

/* Inputs, q first: it says where every array lies. None is skipped. */
int la_take(la_call *c, la_name name, PyObject *object);
/* An array that will be written where it lies. */
int la_take_in_place(la_call *c, la_name name, PyObject *object);
/* A state: S, or the pair (S, z) of an op that is normalised. */
int la_take_state(la_call *c, la_name S, la_name z, PyObject *object, bool in_place);

/* After la_check: a new array for an output, in the user's dimensions. */
int la_allocate(la_call *c, la_name name, la_dtype dtype);
/* After la_check: what is written may lie in no input. */
int la_refuse_overlaps(la_call *c);
/* Have the arrays that were read stayed where they were, writable where they are written? Ask after the
 * last Python that a call runs, and before the core looks at any of them. */
int la_still_there(const la_call *c);
/* 1 if two arrays share memory, 0 if not. */
int la_shares_memory(PyObject *x, PyObject *y);

/* CUDA, after the kernels are enqueued: nobody may change their arrays before they ran. */
int la_settle_streams(la_call *c);
/* CUDA: the caller's current stream, as of now. For calls that are bound. */
int la_current_stream(la_call *c);
/* What a call gives back: an array of q's kind, None where there is none; for states a pair. */
PyObject *la_result(la_call *c, la_name name);
PyObject *la_state_result(la_call *c, la_name S, la_name z);

/* Why no call can run on CUDA; NULL if one can. */
const char *la_why_no_cuda(void);

#endif
