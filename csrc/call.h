/* One call from Python: the problem, and the references it rests on. */
#ifndef LINATTN_CALL_H
#define LINATTN_CALL_H

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

/* Do two arrays reach into one another's part of memory? */
static inline bool la_meet(la_span x, la_span y) { return x.low < y.high && y.low < x.high; }

/* One call: the problem, and the references it rests on. All zero at first. */
typedef struct {
    la_problem p;
    PyObject *object[LA_ARRAYS];  /* what keeps p.array's memory (the array, a copy, a capsule) */
    PyObject *given[LA_ARRAYS];   /* as NumPy sees what the user gave; NULL: not asked yet */
    PyObject *storage[LA_ARRAYS]; /* of PyTorch's tensors, while other threads run */
    la_span span[LA_ARRAYS];      /* of inputs and of arrays written in place */
    bool ran_python;              /* some array may have run Python when it was read */
    bool lent[LA_ARRAYS]; /* the core works on the owner's memory, and object is the owner */
    const struct dl_exchange *lender[LA_ARRAYS]; /* whose table says where it lies; NULL: NumPy */
    PyObject *like;                              /* q; the user's call owns it */
    PyObject *out;                               /* out as given; likewise */
    la_library library;
    const struct dl_exchange *table; /* of q's type, if library is LA_EXCHANGE */
    int gradients;                   /* 1: PyTorch may record them; -1: it does not; 0: not asked */
    bool stream_unknown;             /* CUDA: some owner's stream is not known */
    int others;                      /* CUDA: streams of inputs that are not q's */
    void *other[LA_ARRAYS];
    bool bound;   /* a step that will be run again: nothing in it may grow stale */
    bool quiet;   /* a gate that grows is no news to the caller */
    bool outline; /* the arrays have no memory, and nothing is run (outline.h) */
} la_call;

void la_call_release(la_call *c); /* the references, once and for all */

#endif
