/* Outputs of a call: new arrays of q's library, and the results that the caller gets. */
#include "views.h"

#include <string.h>

/* ---- new arrays ---- */

static void describe_dense(la_call *c, la_name name, char *data, la_dtype dtype, int ndim,
                           const int64_t *shape, PyObject *object)
{
    la_array *a = &c->p.array[name];
    int64_t dense = 1;
    a->given = true;
    a->data = data;
    a->dtype = dtype;
    a->ndim = ndim;
    for (int i = ndim - 1; i >= 0; i--) {
        a->shape[i] = shape[i];
        a->stride[i] = dense;
        dense *= shape[i];
    }
    c->object[name] = object;
}

static int allocate_numpy(la_call *c, la_name name, la_dtype dtype, int ndim, const int64_t *shape)
{
    npy_intp dims[LA_MAX_DIMS];
    int number = la_number_in_numpy(dtype);
    if (number < 0) { /* a bfloat16 from elsewhere, and NumPy has none */
        PyObject *ml_dtypes = PyImport_ImportModule("ml_dtypes");
        Py_XDECREF(ml_dtypes);
        if (!ml_dtypes) return la_name_error(la_array_name(&c->p, name));
        number = la_number_in_numpy(dtype);
    }
    PyArray_Descr *descr = PyArray_DescrFromType(number);
    if (!descr) return -1;
    for (int i = 0; i < ndim; i++) dims[i] = (npy_intp)shape[i];
    PyObject *x = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, dims, NULL, NULL, 0, NULL);
    if (!x) return -1;
    la_describe(c, name, x);
    return 0;
}

static void exchange_failed(void *context, const char *kind, const char *message)
{
    (void)context;
    PyErr_Format(kind && !strcmp(kind, "MemoryError") ? PyExc_MemoryError : PyExc_RuntimeError,
                 "%s", message ? message : "the array's library could not allocate");
}

static int allocate_exchange(la_call *c, la_name name, la_dtype dtype, int ndim, int64_t *shape)
{
    const char *label = la_array_name(&c->p, name);
    dl_tensor prototype = {
        .device = {c->p.device == LA_CPU ? DL_CPU : DL_CUDA, c->p.ordinal},
        .ndim = ndim,
        .dtype = la_dl_dtypes[dtype],
        .shape = shape,
    };
    dl_versioned *made = NULL;
    void *object = NULL;
    if (c->table->allocate(&prototype, &made, NULL, exchange_failed)) return la_name_error(label);
    char *data = (char *)made->tensor.data + made->tensor.byte_offset;
    if (c->table->object_from_managed(made, &object)) return la_name_error(label);
    describe_dense(c, name, data, dtype, ndim, shape, object);
    return 0;
}

static int allocate_cupy(la_call *c, la_name name, la_dtype dtype, int ndim, const int64_t *shape)
{
    const char *label = la_array_name(&c->p, name);
    PyObject *module = PyImport_ImportModule("linattn.arrays");
    PyObject *dims = PyTuple_New(ndim);
    for (int i = 0; dims && i < ndim; i++) {
        PyObject *one = PyLong_FromLongLong(shape[i]);
        if (!one || PyTuple_SetItem(dims, i, one)) Py_CLEAR(dims);
    }
    PyObject *made = module && dims ? PyObject_CallMethod(module, "_cupy_empty", "Osi", dims,
                                                          la_dtype_names[dtype], c->p.ordinal)
                                    : NULL;
    Py_XDECREF(module);
    Py_XDECREF(dims);
    PyObject *pair = made ? PyObject_CallMethod(made, "__getitem__", "i", 1) : NULL;
    PyObject *x = made ? PyObject_CallMethod(made, "__getitem__", "i", 0) : NULL;
    Py_XDECREF(made);
    void *data = pair ? PyLong_AsVoidPtr(pair) : NULL;
    Py_XDECREF(pair);
    if (!x || PyErr_Occurred()) {
        Py_XDECREF(x);
        return la_name_error(label);
    }
    describe_dense(c, name, data, dtype, ndim, shape, x);
    return 0;
}

/* Each library has words of its own for an array that it cannot make. */
static int refuse_memory(la_call *c, la_name name, int ndim, const int64_t *shape)
{
    const bool theirs = c->p.device == LA_CPU && PyErr_ExceptionMatches(PyExc_RuntimeError);
    if (!theirs && !PyErr_ExceptionMatches(PyExc_MemoryError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError))
        return -1;
    la_refuse_memory(&c->p, name, ndim, shape);
    return la_raise_from(PyExc_MemoryError, c->p.message, NULL);
}

static int allocate(la_call *c, la_name name, la_dtype dtype, int ndim, int64_t *shape)
{
    int failed = 0;
    c->ran_python = c->ran_python || c->library == LA_CUPY || c->library == LA_EXPORTED;
    switch (c->library) {
    case LA_NUMPY: failed = allocate_numpy(c, name, dtype, ndim, shape); break;
    case LA_EXCHANGE: failed = allocate_exchange(c, name, dtype, ndim, shape); break;
    case LA_CUPY: failed = allocate_cupy(c, name, dtype, ndim, shape); break;
    case LA_EXPORTED: {
        char *data;
        PyObject *m = la_memory_new(c, dtype, ndim, shape, &data);
        failed = m == NULL;
        if (m) describe_dense(c, name, data, dtype, ndim, shape, m);
    }
    }
    return failed ? refuse_memory(c, name, ndim, shape) : 0;
}

int la_allocate(la_call *c, la_name name)
{
    int64_t shape[LA_MAX_DIMS];
    const la_dtype dtype = la_dtype_of(&c->p, name);
    const int ndim = la_shape_of(&c->p, name, shape);
    if (allocate(c, name, dtype, ndim, shape)) return -1;
    la_settle_output(&c->p, name);
    return 0;
}

int la_allocate_like(la_call *c, la_name name, la_dtype dtype, const la_array *like)
{
    int64_t shape[LA_MAX_DIMS];
    memcpy(shape, like->shape, sizeof shape);
    return allocate(c, name, dtype, like->ndim, shape);
}

/* ---- results ---- */

/* Memory of ours in the hands of q's library; any other array as it is. */
static PyObject *to_library(const la_call *c, PyObject *object)
{
    if (!la_is_memory(object)) {
        Py_INCREF(object);
        return object;
    }
    PyObject *module = PyImport_ImportModule("linattn.arrays");
    PyObject *x =
        module ? PyObject_CallMethod(module, "_import_like", "OO", c->like, object) : NULL;
    Py_XDECREF(module);
    return x;
}

/* The gradient of a number is a number. */
static PyObject *summed(const la_call *c, PyObject *dx)
{
    PyObject *own = to_library(c, dx);
    PyObject *module = own ? PyImport_ImportModule("linattn.arrays") : NULL;
    PyObject *sum = module ? PyObject_CallMethod(module, "_sum", "O", own) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(own);
    return sum;
}

PyObject *la_result(la_call *c, la_name name)
{
    PyObject *x = name == LA_O && c->out ? c->out : c->object[name] ? c->object[name] : Py_None;
    const la_name of = la_array_rows[name].of;
    if (of != name && c->p.array[of].number && x != Py_None) return summed(c, x);
    if (c->library == LA_EXPORTED) return to_library(c, x);
    Py_INCREF(x);
    return x;
}

PyObject *la_state_result(la_call *c, la_name S)
{
    if (!la_has_pair(&c->p)) return la_result(c, S);
    const la_name second = la_second_of(&c->p, S);
    if (!c->object[second]) return la_result(c, S);
    PyObject *pair = NULL, *one = la_result(c, S), *two = la_result(c, second);
    if (one && two) pair = PyTuple_Pack(2, one, two);
    Py_XDECREF(one);
    Py_XDECREF(two);
    return pair;
}
