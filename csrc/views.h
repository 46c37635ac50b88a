/* Shared by arrays.c, places.c, outputs.c, views.c and memory.c. */
#ifndef LINATTN_VIEWS_H
#define LINATTN_VIEWS_H

#include "arrays.h"

/* An array as its owner describes it. */
typedef struct {
    char *data;
    dl_device device;
    dl_dtype dtype;
    la_layout layout;
    bool read_only, copied;
    bool has_stream; /* the owner says on which stream its work is */
    void *stream;
    la_library library;
    const dl_exchange *table;
    PyObject *owner; /* what keeps the memory; owned */
} la_view;

/* NumPy's number of a dtype; -1 for bfloat16 before ml_dtypes is imported. */
int la_number_in_numpy(la_dtype dtype);
/* Fill p.array[name] from an array of NumPy whose strides fit. Takes over the reference. */
void la_describe(la_call *c, la_name name, PyObject *object);
la_span la_span_of_numpy(PyArrayObject *x);
/* NumPy's view of host memory. Before ml_dtypes is imported, it sees the bits of a bfloat16. */
PyObject *la_numpy_over(const la_array *x);
int la_refuse_read_only(const char *label);
/* A stride without its sign. */
static inline int64_t la_distance(int64_t stride) { return stride < 0 ? -stride : stride; }

int la_places_init(void);
int la_views_init(void);
/* 1: filled; 0: not an array of any kind; -1: an exception. x->owner is the caller's in each case. */
int la_view_of(la_call *c, la_name name, PyObject *object, la_view *x);
/* Let go of what kept an array's memory: an object, or a capsule that was taken over. */
void la_release_owner(PyObject *object);
la_device la_device_of(dl_device device);
/* Numbers that a device call takes from the host too: one per head. */
bool la_may_lie_on_host(const la_problem *p, la_name name);
/* An int that a helper in linattn/arrays.py returns. */
int la_ask_helper(const char *helper, PyObject *object, int ordinal, void **pointer);

/* Memory of our own. */
int la_memory_init(void);
bool la_is_memory(PyObject *object);
/* A new one for an output of the call, and where it lies. */
PyObject *la_memory_new(la_call *c, la_dtype dtype, int ndim, const int64_t *shape, char **data);

#endif
