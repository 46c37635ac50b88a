/* Every kind of array but NumPy's, asked where it lies: through DLPack's exchange table (PyTorch),
 * __cuda_array_interface__ (CuPy, Numba) or a capsule of __dlpack__ (all others). */
#include "views.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

static PyObject *word_requires_grad, *word_is_neg;

int la_views_init(void)
{
    word_requires_grad = PyUnicode_InternFromString("requires_grad");
    word_is_neg = PyUnicode_InternFromString("is_neg");
    return word_requires_grad && word_is_neg ? 0 : -1;
}

/* ---- references ---- */

/* Let go of what kept an array's memory. A capsule here is one that was taken over: its tensor is
 * ended by us, once. */
void la_release_owner(PyObject *object)
{
    if (object && PyCapsule_CheckExact(object)) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback); /* a deleter may run Python */
        dl_versioned *versioned = PyCapsule_GetPointer(object, "used_dltensor_versioned");
        if (versioned) {
            if (versioned->deleter) versioned->deleter(versioned);
        } else {
            PyErr_Clear();
            dl_managed *managed = PyCapsule_GetPointer(object, "used_dltensor");
            if (managed && managed->deleter) managed->deleter(managed);
        }
        Py_DECREF(object);
        PyErr_Restore(type, value, traceback);
        return;
    }
    Py_XDECREF(object);
}

/* ---- where an array lies ---- */

la_device la_device_of(dl_device device)
{
    return device.type == DL_CPU || device.type == DL_CUDA_HOST ? LA_CPU : LA_CUDA;
}

/* q says where a call runs; the others must lie there too. */
static int settle_device(la_call *c, la_name name, dl_device at)
{
    const char *label = la_array_name(&c->p, name);
    const la_device device = la_device_of(at);
    const int ordinal = device == LA_CPU ? 0 : at.id;
    if (at.type != DL_CPU && at.type != DL_CUDA_HOST && at.type != DL_CUDA &&
        at.type != DL_CUDA_MANAGED) {
        PyErr_Format(PyExc_ValueError,
                     "%s: expected an array on the CPU or on a CUDA device, got one on a device of "
                     "DLPack's type %d",
                     label, (int)at.type);
        return -1;
    }
    if (name == LA_Q) {
        const char *reason = device == LA_CUDA ? la_why_no_cuda() : NULL;
        if (reason) {
            PyErr_Format(PyExc_RuntimeError, "%s: got an array on cuda:%d, where no op can run: %s",
                         label, ordinal, reason);
            return -1;
        }
        c->p.device = device;
        c->p.ordinal = ordinal;
        return 0;
    }
    if (device == c->p.device && ordinal == c->p.ordinal) return 0;
    if (device == LA_CPU && la_may_lie_on_host(&c->p, name)) return 0;
    return la_refuse_device(c, name, device, ordinal);
}

/* 0 for a layout that fits; strides: as its owner gives them, NULL where they are dense. */
static int refuse_layout(const char *label, la_layout_fault fault, const la_layout *x,
                         const int64_t *strides)
{
    if (fault == LA_LAYOUT_FITS) return 0;
    PyObject *shape = la_tuple_of(x->ndim, x->shape), *got = NULL;
    if (shape && strides) got = la_tuple_of(x->ndim, strides);
    if (shape && fault == LA_LAYOUT_BELOW_NONE)
        PyErr_Format(PyExc_ValueError, "%s: expected 0 to %d dimensions, got less than 0", label,
                     LA_MAX_DIMS);
    else if (shape && fault == LA_LAYOUT_DIMENSIONS)
        PyErr_Format(PyExc_ValueError, "%s: expected up to %d dimensions, got more than %d", label,
                     LA_MAX_DIMS, LA_LAYOUT_DIMS);
    else if (shape && fault == LA_LAYOUT_NO_SHAPE)
        PyErr_Format(PyExc_TypeError, "%s: expected an array with a shape, got one without", label);
    else if (shape && fault == LA_LAYOUT_BELOW_ZERO)
        PyErr_Format(PyExc_ValueError, "%s: expected sizes >= 0, got shape %R", label, shape);
    else if (shape && fault == LA_LAYOUT_NOT_WHOLE && got)
        PyErr_Format(PyExc_ValueError, "%s: expected strides of whole elements, got strides %R",
                     label, got);
    else if (shape && (got || !strides))
        PyErr_Format(PyExc_ValueError,
                     "%s: expected an array within 2^61 bytes, got shape %R and strides %R", label,
                     shape, got ? got : Py_None);
    Py_XDECREF(shape);
    Py_XDECREF(got);
    return -1;
}

static int view_tensor(la_view *x, const dl_tensor *t, const char *label)
{
    x->data = (char *)t->data + t->byte_offset;
    x->device = t->device;
    x->dtype = t->dtype;
    return refuse_layout(label, la_read_tensor(&x->layout, t), &x->layout, t->strides);
}

/* A type with an exchange table. */
typedef struct {
    const dl_exchange *table; /* NULL: the type has none */
    PyObject *is_neg;         /* the method, None if it has none; borrowed */
} exchanger;

/* Types are few and live long: the first ones are remembered (and kept alive, so that an address
 * says which type it is), the others looked up every time. */
static exchanger exchange_of(PyObject *object)
{
    enum { REMEMBERED = 8 };
    static struct {
        _Atomic(PyTypeObject *) type;
        exchanger has;
    } known[REMEMBERED];
    static atomic_int claimed;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < REMEMBERED; i++) {
        PyTypeObject *one = atomic_load_explicit(&known[i].type, memory_order_acquire);
        if (one == type) return known[i].has;
        if (!one) break;
    }
    exchanger has = {NULL, NULL};
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    if (capsule) has.table = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_XDECREF(capsule);
    PyErr_Clear();
    while (has.table && has.table->version.major != 1) has.table = has.table->older;
    if (!has.table || !has.table->borrow) return (exchanger){NULL, NULL};
    has.is_neg = PyObject_GetAttr((PyObject *)type, word_is_neg);
    if (!has.is_neg) {
        PyErr_Clear();
        has.is_neg = Py_None;
        Py_INCREF(Py_None);
    }
    int slot = atomic_load(&claimed) < REMEMBERED ? atomic_fetch_add(&claimed, 1) : REMEMBERED;
    if (slot < REMEMBERED) {
        Py_INCREF((PyObject *)type);
        known[slot].has = has;
        atomic_store_explicit(&known[slot].type, type, memory_order_release);
    } else {
        Py_DECREF(has.is_neg); /* the type's own, and the object keeps the type */
    }
    return has;
}

static int as_bool(PyObject *value)
{
    if (!value) return -1;
    int yes = value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return yes;
}

/* Does PyTorch record gradients? Asked once a call, and not where the caller has asked each array.
 * Another library's arrays have no say in it. */
static int records_gradients(la_call *c)
{
    static _Atomic(PyObject *) known; /* torch.is_grad_enabled; the first that is written stays */
    if (c->gradients) return c->gradients > 0;
    PyObject *enabled = atomic_load(&known);
    if (!enabled) {
        PyObject *torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch"); /* borrowed */
        if (torch) enabled = PyObject_GetAttrString(torch, "is_grad_enabled");
        if (torch && !enabled) return -1;
        PyObject *first = NULL;
        if (enabled && !atomic_compare_exchange_strong(&known, &first, enabled)) {
            Py_DECREF(enabled);
            enabled = first;
        }
    }
    int yes = enabled ? as_bool(PyObject_CallNoArgs(enabled)) : 0;
    if (yes >= 0) c->gradients = yes ? 1 : -1;
    return yes;
}

/* PyTorch lends its memory whatever it means: gradients asked for, signs not yet turned. */
static int refuse_lazy(la_call *c, const char *label, PyObject *object, exchanger has)
{
    int yes = records_gradients(c);
    if (yes > 0) {
        PyObject *value = PyObject_GetAttr(object, word_requires_grad);
        if (!value && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        if (!value) PyErr_Clear();
        yes = value ? as_bool(value) : 0;
    }
    if (yes > 0) {
        static const char *const why[] = {
            [LA_FORWARD] = "recorded only if q is a tensor of PyTorch's and there is no out",
            [LA_BACKWARD] = "not recorded of gradients",
            [LA_STEP] = "not recorded of a step, which changes its state in place",
        };
        PyErr_Format(PyExc_ValueError,
                     "%s: requires gradients, which are %s; pass %s.detach(), or call it under "
                     "torch.no_grad()",
                     label, why[c->p.pass], label);
        return -1;
    }
    if (yes == 0 && has.is_neg != Py_None)
        yes = as_bool(PyObject_CallFunctionObjArgs(has.is_neg, object, NULL));
    if (yes > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected the numbers themselves, got a view of their negatives; pass "
                     "%s.resolve_neg()",
                     label, label);
        return -1;
    }
    return yes;
}

/* A tensor may be given other memory (PyTorch's .data, set_). A call looks again before it runs; what
 * is bound holds another tensor over the same memory, which only its owner can resize. */
static PyObject *owner_of(const la_call *c, PyObject *object)
{
    if (c->bound && PyObject_HasAttrString(object, "detach"))
        return PyObject_CallMethod(object, "detach", NULL);
    Py_INCREF(object);
    return object;
}

static int view_exchange(la_call *c, la_name name, PyObject *object, exchanger has, la_view *x)
{
    const char *label = la_array_name(&c->p, name);
    dl_tensor tensor;
    if (refuse_lazy(c, label, object, has)) return -1;
    x->owner = owner_of(c, object);
    if (!x->owner || has.table->borrow(x->owner, &tensor)) return la_name_error(label);
    if (view_tensor(x, &tensor, label) || settle_device(c, name, x->device)) return -1;
    x->library = LA_EXCHANGE;
    x->table = has.table;
    if (la_device_of(x->device) == LA_CUDA) {
        x->has_stream = true;
        if (has.table == c->table)
            x->stream = c->p.stream; /* q's library, and its device: the stream is known */
        else if (has.table->current_stream(x->device.type, x->device.id, &x->stream))
            return la_name_error(label);
    }
    return 0;
}

/* __dlpack_device__(), which every exporter has. */
static int ask_device(PyObject *object, dl_device *device)
{
    PyObject *pair = PyObject_CallMethod(object, "__dlpack_device__", NULL);
    long part[2] = {0, 0};
    for (int i = 0; pair && i < 2; i++) {
        PyObject *item = PySequence_GetItem(pair, i);
        part[i] = item ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) Py_CLEAR(pair);
    }
    if (pair && (part[0] != (int32_t)part[0] || part[1] != (int32_t)part[1])) {
        PyErr_Format(PyExc_ValueError, "__dlpack_device__: expected two int32, got %R", pair);
        Py_CLEAR(pair);
    }
    if (!pair) return -1;
    Py_DECREF(pair);
    *device = (dl_device){(int32_t)part[0], (int32_t)part[1]};
    return 0;
}

/* object.__dlpack__(), on our stream where it lies on a device: versioned if it can be. */
static PyObject *ask_capsule(const la_call *c, PyObject *object, bool on_device)
{
    PyObject *method = PyObject_GetAttrString(object, "__dlpack__");
    PyObject *none = PyTuple_New(0), *capsule = NULL;
    /* DLPack's 1 is the legacy default stream, as CUDA's own handle for it */
    const unsigned long long stream = c->p.stream ? (unsigned long long)(uintptr_t)c->p.stream : 1;
    PyObject *keywords = on_device
                             ? Py_BuildValue("{s:(ii),s:K}", "max_version", 1, 0, "stream", stream)
                             : Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
    if (method && none && keywords) {
        capsule = PyObject_Call(method, none, keywords);
        if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) { /* from before versions */
            PyErr_Clear();
            if (!PyDict_DelItemString(keywords, "max_version"))
                capsule = PyObject_Call(method, none, keywords);
        }
    }
    Py_XDECREF(method);
    Py_XDECREF(none);
    Py_XDECREF(keywords);
    return capsule;
}

/* JAX's arrays never change, and not every version of it says so when it exports them. */
static bool is_of(PyObject *object, const char *library)
{
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    PyObject *text = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8String(module) : NULL;
    const char *bytes = text ? PyBytes_AsString(text) : NULL;
    const bool yes = bytes && !strncmp(bytes, library, strlen(library));
    Py_XDECREF(module);
    Py_XDECREF(text);
    PyErr_Clear();
    return yes;
}

static int view_dlpack(la_call *c, la_name name, PyObject *object, la_view *x)
{
    const char *label = la_array_name(&c->p, name);
    dl_device device;
    if (ask_device(object, &device)) return la_name_error(label);
    if (settle_device(c, name, device)) return -1;
    PyObject *capsule = ask_capsule(c, object, la_device_of(device) == LA_CUDA);
    if (!capsule) return la_name_error(label);
    const dl_tensor *tensor = NULL;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        dl_versioned *versioned = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        PyCapsule_SetName(capsule, "used_dltensor_versioned");
        x->owner = capsule;
        if (versioned->version.major != 1) {
            PyErr_Format(PyExc_TypeError, "%s: expected DLPack version 1, got version %u.%u", label,
                         versioned->version.major, versioned->version.minor);
            return -1;
        }
        x->read_only = versioned->flags & DL_READ_ONLY;
        x->copied = versioned->flags & DL_IS_COPY;
        tensor = &versioned->tensor;
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        dl_managed *managed = PyCapsule_GetPointer(capsule, "dltensor");
        PyCapsule_SetName(capsule, "used_dltensor");
        x->owner = capsule;
        tensor = &managed->tensor;
    } else {
        PyErr_Format(PyExc_TypeError, "%s: expected __dlpack__ to give a DLPack capsule, got %R",
                     label, capsule);
        Py_DECREF(capsule);
        return -1;
    }
    x->read_only = x->read_only || is_of(object, "jax");
    x->library = LA_EXPORTED;
    if (view_tensor(x, tensor, label)) return -1;
    if (la_device_of(x->device) != la_device_of(device) ||
        (la_device_of(device) == LA_CUDA && x->device.id != device.id)) {
        PyErr_Format(PyExc_TypeError, "%s: __dlpack_device__ and __dlpack__ name two devices",
                     label);
        return -1;
    }
    return 0;
}

/* Numbers that a device call takes from the host too: one per head, or one alone. */
bool la_may_lie_on_host(const la_problem *p, la_name name)
{
    return p->decay == LA_HEAD && name == LA_G;
}

/* ---- __cuda_array_interface__ ---- */

/* CUDA's other name of the legacy default stream, which NULL is as well. */
#define LEGACY ((void *)1)

static bool is_bfloat16(PyObject *object)
{
    PyObject *dtype = PyObject_GetAttrString(object, "dtype");
    PyObject *text = dtype ? PyObject_Str(dtype) : NULL;
    const bool yes = text && PyUnicode_CompareWithASCIIString(text, "bfloat16") == 0;
    Py_XDECREF(dtype);
    Py_XDECREF(text);
    PyErr_Clear();
    return yes;
}

/* "<f4" and the like; what has no place here keeps its text in the message. */
static int read_typestr(const char *label, la_name name, PyObject *object, PyObject *typestr,
                        dl_dtype *dtype)
{
    PyObject *text = PyUnicode_Check(typestr) ? PyUnicode_AsUTF8String(typestr) : NULL;
    PyErr_Clear(); /* text that is no UTF-8 is no typestr */
    const bool known = text && la_read_typestr(PyBytes_AsString(text), dtype);
    if (known && dtype->code == DL_OPAQUE && dtype->bits == 16 && is_bfloat16(object))
        dtype->code = DL_BFLOAT;
    if (!known)
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got typestr %R", label,
                     la_expected_dtypes(name), typestr);
    Py_XDECREF(text);
    return known ? 0 : -1;
}

/* Integers of a tuple; -1 if it is none, or too long. */
static int read_tuple(PyObject *tuple, int64_t *numbers)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) > LA_LAYOUT_DIMS) return -1;
    const int n = (int)PyTuple_Size(tuple);
    for (int i = 0; i < n; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred()) return -1;
    }
    return n;
}

/* PyDict_GetItemString swallows errors, which a plain dict does not make. */
static int read_interface(la_name name, const char *label, PyObject *object, PyObject *interface,
                          la_view *x)
{
    PyObject *shape = PyDict_GetItemString(interface, "shape");
    PyObject *typestr = PyDict_GetItemString(interface, "typestr");
    PyObject *data = PyDict_GetItemString(interface, "data");
    PyObject *strides = PyDict_GetItemString(interface, "strides");
    PyObject *stream = PyDict_GetItemString(interface, "stream");
    PyObject *mask = PyDict_GetItemString(interface, "mask");
    int ndim;
    if (!shape || !typestr || !data || !PyTuple_Check(data) || PyTuple_Size(data) != 2 ||
        (ndim = read_tuple(shape, x->layout.shape)) < 0) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "%s: expected shape, typestr and data in __cuda_array_interface__, got %R",
                     label, interface);
        return -1;
    }
    if (mask && mask != Py_None) {
        PyErr_Format(PyExc_TypeError, "%s: expected an array without a mask, got one", label);
        return -1;
    }
    if (read_typestr(label, name, object, typestr, &x->dtype)) return -1;
    x->layout.ndim = ndim;
    x->data = PyLong_AsVoidPtr(PyTuple_GetItem(data, 0));
    if (PyErr_Occurred()) return la_name_error(label);
    x->read_only = PyObject_IsTrue(PyTuple_GetItem(data, 1)) != 0;
    int64_t bytes[LA_LAYOUT_DIMS];
    const bool dense = !strides || strides == Py_None;
    if (!dense && read_tuple(strides, bytes) != ndim) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: expected a stride for every axis, got %R", label,
                     strides);
        return -1;
    }
    const la_layout_fault fault =
        la_read_strides(&x->layout, dense ? NULL : bytes, la_element_bytes(x->dtype));
    if (refuse_layout(label, fault, &x->layout, dense ? NULL : bytes)) return -1;
    if (stream && stream != Py_None) {
        x->stream = PyLong_AsVoidPtr(stream); /* 1 and 2 are CUDA's own handles */
        if (PyErr_Occurred()) return la_name_error(label);
        if (!x->stream) {
            PyErr_Format(PyExc_ValueError,
                         "%s: expected a stream that is not 0 in __cuda_array_interface__, got 0",
                         label);
            return -1;
        }
        if (x->stream == LEGACY) x->stream = NULL;
        x->has_stream = true;
    }
    return 0;
}

/* An int that a helper in linattn/arrays.py returns. */
int la_ask_helper(const char *helper, PyObject *object, int ordinal, void **pointer)
{
    PyObject *module = PyImport_ImportModule("linattn.arrays");
    PyObject *answer = module ? PyObject_CallMethod(module, helper, "Oi", object, ordinal) : NULL;
    Py_XDECREF(module);
    if (!answer) return -1;
    *pointer = PyLong_AsVoidPtr(answer);
    Py_DECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

/* 1, 0, or -1 with an exception: only an AttributeError says that there is none. */
static int has_attribute(PyObject *object, const char *name)
{
    PyObject *value = PyObject_GetAttrString(object, name);
    if (!value && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
    PyErr_Clear();
    const int there = value != NULL;
    Py_XDECREF(value);
    return there;
}

static int view_interface(la_call *c, la_name name, PyObject *object, PyObject *interface,
                          la_view *x)
{
    const char *label = la_array_name(&c->p, name);
    if (read_interface(name, label, object, interface, x)) return -1;
    x->device = (dl_device){DL_CUDA, 0};
    const int says = has_attribute(object, "__dlpack_device__");
    if (says < 0) return la_name_error(label);
    if (says) {
        if (ask_device(object, &x->device)) return la_name_error(label);
#ifdef LA_WITH_CUDA
    } else if (x->data) {
        x->device.id = la_cuda_ordinal_of(x->data);
        if (x->device.id < 0) {
            PyErr_Format(PyExc_ValueError, "%s: its address belongs to no CUDA device", label);
            return -1;
        }
    } else if (name != LA_Q && c->p.device == LA_CUDA) {
        x->device.id = c->p.ordinal; /* an empty array lies anywhere */
#endif
    }
    if (settle_device(c, name, x->device)) return -1;
    x->library = is_of(object, "cupy") ? LA_CUPY : LA_EXPORTED;
    if (x->library == LA_CUPY) { /* where its arrays are used next, whatever stream made this one */
        void *current;
        if (la_ask_helper("_cupy_stream", object, x->device.id, &current))
            return la_name_error(label);
        if (name == LA_Q) c->p.stream = current;
        if (!x->has_stream) x->stream = current;
        x->has_stream = true;
    }
    Py_INCREF(object);
    x->owner = object;
    return 0;
}

/* By __cuda_array_interface__. 0: by DLPack rather, since version 3 is the first that names a stream. */
static int view_by_interface(la_call *c, la_name name, PyObject *object, bool dlpack, la_view *x)
{
    PyObject *interface = PyObject_GetAttrString(object, "__cuda_array_interface__");
    if (!interface) return la_name_error(la_array_name(&c->p, name));
    PyObject *version = PyDict_Check(interface) ? PyDict_GetItemString(interface, "version") : NULL;
    const long number = version ? PyLong_AsLong(version) : 0;
    int found = 0;
    if (PyErr_Occurred())
        found = la_name_error(la_array_name(&c->p, name));
    else if (version && (number >= 3 || !dlpack))
        found = view_interface(c, name, object, interface, x) ? -1 : 1;
    Py_DECREF(interface);
    return found;
}

/* 1: filled; 0: not an array of any kind; -1: an exception. x->owner is to be let go of by all. */
int la_view_of(la_call *c, la_name name, PyObject *object, la_view *x)
{
    memset(x, 0, offsetof(la_view, layout));
    memset(&x->read_only, 0, sizeof *x - offsetof(la_view, read_only));
    const exchanger has = exchange_of(object);
    c->ran_python = true; /* attributes and methods, of tensors too: modes of PyTorch look on */
    if (has.table) return view_exchange(c, name, object, has, x) ? -1 : 1;
    if (PyType_Check(object)) return 0;
    const int capsule = has_attribute(object, "__dlpack__");
    const int place = capsule > 0 ? has_attribute(object, "__dlpack_device__") : capsule;
    const int interface =
        place < 0 || is_of(object, "jax") ? 0 : has_attribute(object, "__cuda_array_interface__");
    if (place < 0 || interface < 0) return la_name_error(la_array_name(&c->p, name));
    if (interface) {
        const int found = view_by_interface(c, name, object, place > 0, x);
        if (found) return found;
    }
    if (!place) return 0;
    return view_dlpack(c, name, object, x) ? -1 : 1;
}
