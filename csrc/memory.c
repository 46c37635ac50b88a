/* Memory of our own as an array, for libraries that only import (JAX, Numba): they make no arrays that
 * another library may write, and take ours over. */
#include "sizes.h"
#include "views.h"

#include <stdlib.h>
#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

static PyTypeObject *memory_type;

typedef struct {
    PyObject ob_base; /* PyObject_HEAD */
    void *data;
    la_device device;
    int ordinal;
    void *stream; /* in whose order it was taken and will be given back */
    la_dtype dtype;
    int ndim;
    int64_t shape[LA_MAX_DIMS];
} memory;

static void memory_dealloc(PyObject *self)
{
    memory *m = (memory *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    if (m->device == LA_CPU) free(m->data);
#ifdef LA_WITH_CUDA
    else if (m->data)
        la_cuda_release(m->ordinal, m->stream, m->data);
#endif
    release(self);
    Py_DECREF((PyObject *)type);
}

static size_t bytes_of(const memory *m)
{
    size_t bytes = la_size_of(m->dtype);
    for (int i = 0; i < m->ndim; i++) bytes = la_times(bytes, m->shape[i]);
    return bytes;
}

PyObject *la_memory_new(la_call *c, la_dtype dtype, int ndim, const int64_t *shape, char **data)
{
    allocfunc make = (allocfunc)PyType_GetSlot(memory_type, Py_tp_alloc);
    memory *m = (memory *)make(memory_type, 0); /* all zero */
    if (!m) return NULL;
    m->device = c->p.device;
    m->ordinal = c->p.ordinal;
    m->stream = c->p.stream;
    m->dtype = dtype;
    m->ndim = ndim;
    memcpy(m->shape, shape, sizeof *shape * (size_t)ndim);
    int failed = 0;
    if (m->device == LA_CPU) { /* a cache line, which JAX wants to take memory as it is */
        m->data = aligned_alloc(64, la_whole(la_plus(bytes_of(m), 1), 64));
        if (!m->data) failed = PyErr_NoMemory() == NULL;
    } else {
#ifdef LA_WITH_CUDA
        failed = la_raise(la_cuda_allocate(&c->p, bytes_of(m), &m->data), c->p.message);
#endif
    }
    if (failed) {
        Py_DECREF((PyObject *)m);
        return NULL;
    }
    *data = m->data;
    return (PyObject *)m;
}

static PyObject *memory_device(PyObject *self, PyObject *unused)
{
    (void)unused;
    const memory *m = (memory *)self;
    return Py_BuildValue("(ii)", m->device == LA_CPU ? DL_CPU : DL_CUDA, m->ordinal);
}

/* One export: the tensor with or without a version, and the reference that it holds. */
typedef struct {
    union {
        dl_managed plain;
        dl_versioned versioned;
    } as;
    PyObject *memory;
    int64_t shape[LA_MAX_DIMS], strides[LA_MAX_DIMS];
} export;

/* A deleter may come from any thread, also one that Python has never seen. */
static void end_export(export *e)
{
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(e->memory);
    PyGILState_Release(state);
    free(e);
}

static void end_plain(dl_managed *managed) { end_export(managed->context); }
static void end_versioned(dl_versioned *versioned) { end_export(versioned->context); }

static void end_capsule(PyObject *capsule)
{
    const char *name = PyCapsule_GetName(capsule);
    const bool plain = name && !strcmp(name, "dltensor");
    const bool versioned = name && !strcmp(name, "dltensor_versioned");
    if (plain) end_plain(PyCapsule_GetPointer(capsule, name));
    if (versioned) end_versioned(PyCapsule_GetPointer(capsule, name));
}

/* __dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None) */
static PyObject *memory_dlpack(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    memory *m = (memory *)self;
    PyObject *stream = Py_None, *version = Py_None, *device = Py_None, *copy = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOOO", names, &stream, &version, &device,
                                     &copy))
        return NULL;
    if (copy == Py_True) {
        PyErr_SetString(PyExc_BufferError, "copy: expected None or False, got True");
        return NULL;
    }
    if (device != Py_None) {
        PyObject *own = memory_device(self, NULL);
        int same = own ? PyObject_RichCompareBool(own, device, Py_EQ) : -1;
        Py_XDECREF(own);
        if (same == 0)
            PyErr_Format(PyExc_BufferError, "dl_device: expected the array's own, got %R", device);
        if (same != 1) return NULL;
    }
    bool versioned = false;
    if (version != Py_None) {
        PyObject *major = PySequence_GetItem(version, 0);
        versioned = major && PyLong_AsLong(major) >= 1;
        Py_XDECREF(major);
        if (PyErr_Occurred()) return NULL;
    }
#ifdef LA_WITH_CUDA
    const long long number = stream == Py_None ? 0 : PyLong_AsLongLong(stream); /* -1: as it is */
    if (PyErr_Occurred()) return NULL;
    void *const theirs = number == 1 ? NULL : (void *)(intptr_t)number;
    if (m->device == LA_CUDA && number != -1 && theirs != m->stream) {
        char message[LA_MESSAGE];
        if (la_raise(la_cuda_wait_stream(m->ordinal, theirs, m->stream, message), message))
            return NULL;
    }
#endif
    export *e = calloc(1, sizeof *e);
    if (!e) return PyErr_NoMemory();
    dl_tensor tensor = {m->data,  {m->device == LA_CPU ? DL_CPU : DL_CUDA, m->ordinal},
                        m->ndim,  la_dl_dtypes[m->dtype],
                        e->shape, e->strides,
                        0};
    int64_t dense = 1;
    for (int i = m->ndim - 1; i >= 0; i--) {
        e->shape[i] = m->shape[i];
        e->strides[i] = dense;
        dense *= m->shape[i];
    }
    Py_INCREF(self);
    e->memory = self;
    PyObject *capsule;
    if (versioned) {
        e->as.versioned = (dl_versioned){{1, 0}, e, end_versioned, 0, tensor};
        capsule = PyCapsule_New(&e->as.versioned, "dltensor_versioned", end_capsule);
    } else {
        e->as.plain = (dl_managed){tensor, e, end_plain};
        capsule = PyCapsule_New(&e->as.plain, "dltensor", end_capsule);
    }
    if (!capsule) end_export(e);
    return capsule;
}

/* For libraries that import nothing else (Numba). */
static PyObject *memory_interface(PyObject *self, void *unused)
{
    (void)unused;
    static const char *const typestr[LA_DTYPES] = {
        [LA_F64] = "<f8", [LA_F32] = "<f4", [LA_F16] = "<f2", [LA_I64] = "<i8", [LA_I32] = "<i4",
    };
    memory *m = (memory *)self;
    if (m->device == LA_CPU || !typestr[m->dtype]) {
        PyErr_SetString(PyExc_AttributeError, "__cuda_array_interface__");
        return NULL;
    }
    PyObject *shape = PyTuple_New(m->ndim);
    for (int i = 0; shape && i < m->ndim; i++) {
        PyObject *one = PyLong_FromLongLong(m->shape[i]);
        if (!one || PyTuple_SetItem(shape, i, one)) Py_CLEAR(shape);
    }
    if (!shape) return NULL;
    return Py_BuildValue("{s:N,s:s,s:(KO),s:O,s:K,s:i}", "shape", shape, "typestr",
                         typestr[m->dtype], "data", (unsigned long long)(uintptr_t)m->data,
                         Py_False, "strides", Py_None, "stream",
                         (unsigned long long)(m->stream ? (uintptr_t)m->stream : 1), "version", 3);
}

static PyMethodDef memory_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))memory_dlpack, METH_VARARGS | METH_KEYWORDS,
     "The array as a DLPack capsule."},
    {"__dlpack_device__", memory_device, METH_NOARGS, "(device type, ordinal)"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef memory_getset[] = {
    {"__cuda_array_interface__", memory_interface, NULL, "The array where Numba looks for it.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, memory_methods},
    {Py_tp_getset, memory_getset},
    {Py_tp_doc, "An array in linattn's own memory, for other libraries to take over."},
    {0, NULL},
};

static PyType_Spec memory_spec = {
    .name = "linattn._linattn.Memory",
    .basicsize = sizeof(memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = memory_slots,
};

int la_memory_init(void)
{
    if (!memory_type) memory_type = (PyTypeObject *)PyType_FromSpec(&memory_spec);
    return memory_type ? 0 : -1;
}

bool la_is_memory(PyObject *object) { return Py_TYPE(object) == memory_type; }
