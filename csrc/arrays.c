/* Whose memory is it? Arrays in, of any kind, and outputs of q's kind; what shapes are right is
 * check.c's business.
 *
 * NumPy's arrays come first and directly: a step is called for every token. Every other array is
 * asked where it lies (a view) and becomes an la_array from there. On the host NumPy does the rare
 * work on all of them (copies, exact overlaps) through an array over the same memory. */
#define LA_IMPORTS_NUMPY
#include "arrays.h"

#include "dlpack.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

const char *la_why_no_cuda(void)
{
#ifdef LA_WITH_CUDA
    return la_cuda_why_not();
#else
    return "this build of linattn has no CUDA part";
#endif
}

/* ---- references and errors ---- */

static PyObject *word_requires_grad, *word_is_neg;
static PyTypeObject *memory_type;

/* Let go of what kept an array's memory. A capsule here is one that was taken over: its tensor is
 * ended by us, once. */
static void let_go(PyObject *object)
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

void la_call_release(la_call *c)
{
    for (int i = 0; i < LA_ARRAYS; i++) {
        if (c->object[i]) let_go(c->object[i]);
        Py_XDECREF(c->given[i]);
    }
}

int la_raise(const la_call *c, la_status status)
{
    if (status == LA_OK) return 0;
    PyErr_SetString(status == LA_TYPE_ERROR      ? PyExc_TypeError
                    : status == LA_VALUE_ERROR   ? PyExc_ValueError
                    : status == LA_MEMORY_ERROR  ? PyExc_MemoryError
                    : status == LA_RUNTIME_ERROR ? PyExc_RuntimeError
                                                 : PyExc_NotImplementedError,
                    c->p.message);
    return -1;
}

/* What an array's owner raised, as "label: ..." and with the original as its cause. */
static int name_error(const char *label)
{
    PyObject *kinds[] = {PyExc_TypeError,     PyExc_ValueError,          PyExc_BufferError,
                         PyExc_MemoryError,   PyExc_NotImplementedError, PyExc_RuntimeError,
                         PyExc_AttributeError};
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the array cannot be exported");
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1; /* an interrupt stays one */
    PyObject *as = PyExc_RuntimeError;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (PyErr_ExceptionMatches(kinds[i])) {
            as = kinds[i] == PyExc_AttributeError || kinds[i] == PyExc_BufferError ? PyExc_TypeError
                                                                                   : kinds[i];
            break;
        }
    PyObject *type, *value, *traceback, *cause = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyErr_Format(as, "%s: %S", label, value);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    cause = value;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value)
        PyException_SetCause(value, cause); /* steals cause */
    else
        Py_XDECREF(cause);
    PyErr_Restore(type, value, traceback);
    return -1;
}

/* ---- dtypes ---- */

static const size_t dtype_size[LA_DTYPES] = {
    [LA_F64] = 8, [LA_F32] = 4, [LA_F16] = 2, [LA_BF16] = 2, [LA_I64] = 8, [LA_I32] = 4,
};

static const dl_dtype dl_dtypes[LA_DTYPES] = {
    [LA_F64] = {DL_FLOAT, 64, 1},   [LA_F32] = {DL_FLOAT, 32, 1}, [LA_F16] = {DL_FLOAT, 16, 1},
    [LA_BF16] = {DL_BFLOAT, 16, 1}, [LA_I64] = {DL_INT, 64, 1},   [LA_I32] = {DL_INT, 32, 1},
};

/* NumPy knows bfloat16 only as ml_dtypes' own type, whose number is given at run time. An array
 * of it can only exist once ml_dtypes is imported, so nothing is imported here. */
static int bfloat16_number(void)
{
    static int number = -1; /* written once, always with the same value */
    if (number >= 0) return number;
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed */
    PyObject *ml_dtypes = modules ? PyDict_GetItemString(modules, "ml_dtypes") : NULL;
    if (!ml_dtypes) return -1;
    PyObject *type = PyObject_GetAttrString(ml_dtypes, "bfloat16");
    PyArray_Descr *descr = NULL;
    if (type && PyArray_DescrConverter(type, &descr)) {
        number = descr->type_num;
        Py_DECREF((PyObject *)descr);
    }
    Py_XDECREF(type);
    PyErr_Clear();
    return number;
}

/* The core's dtype of an array, or LA_DTYPES if it has none. */
static la_dtype dtype_of(PyArrayObject *x)
{
    int number = PyArray_TYPE(x);
    switch (number) {
    case NPY_DOUBLE: return LA_F64;
    case NPY_FLOAT: return LA_F32;
    case NPY_HALF: return LA_F16;
    case NPY_INT: return LA_I32;
    case NPY_LONG: return sizeof(long) == 8 ? LA_I64 : LA_I32;
    case NPY_LONGLONG: return LA_I64;
    }
    if (number >= NPY_USERDEF && number == bfloat16_number()) return LA_BF16;
    return LA_DTYPES;
}

/* NumPy's number of a dtype; -1 for a bfloat16 that nobody has imported. */
static int number_of(la_dtype dtype)
{
    static const int numbers[LA_DTYPES] = {
        [LA_F64] = NPY_DOUBLE, [LA_F32] = NPY_FLOAT, [LA_F16] = NPY_HALF,
        [LA_BF16] = -1,        [LA_I64] = NPY_INT64, [LA_I32] = NPY_INT32,
    };
    return dtype == LA_BF16 ? bfloat16_number() : numbers[dtype];
}

static const char *expected_dtypes(la_name name)
{
    return name == LA_CU ? "int32 or int64" : "float64, float32, float16 or bfloat16";
}

/* ---- what all kinds share ---- */

/* The kernels walk these rows with unit stride; the rest may lie anywhere. */
static bool has_rows(const la_problem *p, la_name name)
{
    if (name == LA_G || name == LA_DG) return p->decay == LA_KEY;
    return name != LA_BETA && name != LA_DBETA && name != LA_CU;
}

/* Numbers that a device call takes from the host too: one per head, or one alone. */
static bool may_lie_on_host(const la_problem *p, la_name name)
{
    return p->decay == LA_HEAD && name == LA_G;
}

/* ValueError: label: expected ..., got strides ... (in bytes, as NumPy gives them). */
static int refuse_strides(const char *label, const char *expected, int ndim, const int64_t *stride,
                          int64_t size)
{
    PyObject *got = PyTuple_New(ndim);
    for (int i = 0; got && i < ndim; i++) {
        PyObject *one = PyLong_FromLongLong(stride[i] * size);
        if (!one || PyTuple_SetItem(got, i, one)) Py_CLEAR(got);
    }
    if (got)
        PyErr_Format(PyExc_ValueError, "%s: expected %s, got strides %R", label, expected, got);
    Py_XDECREF(got);
    return -1;
}

#define IN_PLACE \
    "an aligned array in native byte order whose innermost axis is contiguous (it is written in " \
    "place)"
#define NO_COPIES \
    "an aligned array in native byte order whose innermost axis is contiguous (a step makes no " \
    "hidden copies)"

static int refuse_dims(la_call *c, la_name name, int ndim, const int64_t *shape)
{
    return la_raise(c, la_refuse_dims(&c->p, name, ndim, shape));
}

static int refuse_read_only(const char *label)
{
    PyErr_Format(PyExc_ValueError, "%s: expected a writable array, got a read-only one", label);
    return -1;
}

static int64_t distance(int64_t stride) { return stride < 0 ? -stride : stride; }

/* Do two elements lie in one place? Sorted by stride, each axis must step over all that the smaller
 * ones reach. */
static bool overlaps_itself(const la_array *x)
{
    int64_t reach = 1, last = 0;
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] == 0) return false;
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] > 1 && x->stride[i] == 0) return true;
    for (int i = 0; i < x->ndim; i++) /* two axes of one stride */
        for (int j = 0; j < i; j++)
            if (x->shape[i] > 1 && x->shape[j] > 1 &&
                distance(x->stride[i]) == distance(x->stride[j]))
                return true;
    for (int done = 0; done < x->ndim; done++) {
        int next = -1;
        for (int i = 0; i < x->ndim; i++)
            if (x->shape[i] > 1 && distance(x->stride[i]) > last &&
                (next < 0 || distance(x->stride[i]) < distance(x->stride[next])))
                next = i;
        if (next < 0) break;
        last = distance(x->stride[next]);
        if (last < reach) return true;
        reach += last * (x->shape[next] - 1);
    }
    return false;
}

static la_span span_of(const la_array *x)
{
    const int64_t size = (int64_t)dtype_size[x->dtype];
    la_span span = {x->data, x->data + size};
    for (int i = 0; i < x->ndim; i++) {
        const int64_t reach = (x->shape[i] - 1) * x->stride[i] * size;
        if (x->shape[i] == 0) return (la_span){x->data, x->data};
        if (reach < 0)
            span.low += reach;
        else
            span.high += reach;
    }
    return span;
}

/* ---- NumPy ---- */

/* Fill p.array[name] from an array that strides_fit. Takes over the reference. */
static void describe(la_call *c, la_name name, PyObject *object)
{
    PyArrayObject *x = (PyArrayObject *)object;
    la_array *a = &c->p.array[name];
    const npy_intp size = PyArray_ITEMSIZE(x);
    a->given = true;
    a->data = PyArray_BYTES(x);
    a->dtype = dtype_of(x);
    a->ndim = PyArray_NDIM(x);
    for (int i = 0; i < a->ndim; i++) {
        a->shape[i] = PyArray_DIM(x, i);
        a->stride[i] = PyArray_STRIDE(x, i) / size;
    }
    c->object[name] = object;
}

static bool strides_fit(PyArrayObject *x, bool rows)
{
    const int ndim = PyArray_NDIM(x);
    const npy_intp size = PyArray_ITEMSIZE(x);
    if (!PyArray_ISALIGNED(x) || PyArray_ISBYTESWAPPED(x)) return false;
    if (PyArray_SIZE(x) == 0) return true; /* strides of nothing mean nothing */
    for (int i = 0; i < ndim; i++)
        if (PyArray_DIM(x, i) > 1 && PyArray_STRIDE(x, i) % size) return false;
    return !rows || ndim == 0 || PyArray_DIM(x, ndim - 1) <= 1 ||
           PyArray_STRIDE(x, ndim - 1) == size;
}

static la_span span_of_numpy(PyArrayObject *x)
{
    const int ndim = PyArray_NDIM(x);
    la_span span = {PyArray_BYTES(x), PyArray_BYTES(x) + PyArray_ITEMSIZE(x)};
    for (int i = 0; i < ndim; i++) {
        const npy_intp reach = (PyArray_DIM(x, i) - 1) * PyArray_STRIDE(x, i);
        if (PyArray_DIM(x, i) == 0) return (la_span){PyArray_BYTES(x), PyArray_BYTES(x)};
        if (reach < 0)
            span.low += reach;
        else
            span.high += reach;
    }
    return span;
}

/* A gate or beta of one head and one token is a number. */
static bool may_be_number(const la_problem *p, la_name name, PyObject *object)
{
    return p->face == LA_STEP && (name == LA_G || name == LA_BETA) &&
           (PyFloat_Check(object) || PyArray_CheckScalar(object) ||
            (PyLong_Check(object) && !PyBool_Check(object)));
}

/* Subclasses (memmap, matrix) are fine; a masked array's mask would be ignored. */
static bool is_masked(PyObject *object)
{
    return !PyArray_CheckExact(object) && PyObject_HasAttrString(object, "mask") &&
           PyObject_HasAttrString(object, "filled");
}

static int refuse_numpy_strides(const char *label, const char *expected, PyArrayObject *x)
{
    int64_t stride[64]; /* NumPy's own limit of dimensions */
    for (int i = 0; i < PyArray_NDIM(x); i++) stride[i] = PyArray_STRIDE(x, i);
    return refuse_strides(label, expected, PyArray_NDIM(x), stride, 1);
}

static int refuse_device(const la_call *c, la_name name, la_device device, int ordinal)
{
    char want[32] = "the CPU", got[32] = "the CPU";
    if (c->p.device == LA_CUDA) snprintf(want, sizeof want, "cuda:%d", c->p.ordinal);
    if (device == LA_CUDA) snprintf(got, sizeof got, "cuda:%d", ordinal);
    PyErr_Format(PyExc_ValueError, "%s: expected an array on %s like q, got one on %s",
                 la_array_name(&c->p, name), want, got);
    return -1;
}

/* Takes over the reference. */
static int take_numpy(la_call *c, la_name name, PyObject *object, bool in_place)
{
    PyArrayObject *x = (PyArrayObject *)object;
    const bool fits = strides_fit(x, in_place || has_rows(&c->p, name));
    const char *label = NULL;
    bool copy_it = name == LA_CU; /* read again without the GIL: nobody may change it meanwhile */
    if (name == LA_Q) c->like = object;
    c->given[name] = object;

    if (in_place && !PyArray_ISWRITEABLE(x)) return refuse_read_only(la_array_name(&c->p, name));
    if (dtype_of(x) == LA_DTYPES) {
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got %S", la_array_name(&c->p, name),
                     expected_dtypes(name), (PyObject *)PyArray_DESCR(x));
        return -1;
    }
    if (PyArray_NDIM(x) > LA_MAX_DIMS) {
        int64_t shape[64];
        for (int i = 0; i < PyArray_NDIM(x); i++) shape[i] = PyArray_DIM(x, i);
        return refuse_dims(c, name, PyArray_NDIM(x), shape);
    }
    if (!fits) {
        label = la_array_name(&c->p, name);
        if (in_place) return refuse_numpy_strides(label, IN_PLACE, x);
        if (c->p.face == LA_STEP) return refuse_numpy_strides(label, NO_COPIES, x);
        copy_it = true;
    }
    if (c->p.device == LA_CUDA) {
        if (!may_lie_on_host(&c->p, name)) return refuse_device(c, name, LA_CPU, 0);
        c->p.array[name].on_host = true;
    } else {
        c->span[name] = span_of_numpy(x);
    }
    if (copy_it) {
        PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(x), NPY_NATIVE);
        object =
            native ? PyArray_FromArray(x, native, NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY) : NULL;
        if (!object) return -1;
    } else {
        Py_INCREF(object);
    }
    describe(c, name, object);
    if (in_place && overlaps_itself(&c->p.array[name]))
        return refuse_numpy_strides(la_array_name(&c->p, name),
                                    "every element in a place of its own", x);
    return 0;
}

/* NumPy's view of host memory. Of a bfloat16 that nobody has imported it sees the bits. */
static PyObject *numpy_over(const la_array *x)
{
    const int number = number_of(x->dtype);
    const npy_intp size = (npy_intp)dtype_size[x->dtype];
    npy_intp dims[LA_MAX_DIMS], strides[LA_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++) {
        dims[i] = (npy_intp)x->shape[i];
        strides[i] = (npy_intp)x->stride[i] * size;
    }
    PyArray_Descr *descr = PyArray_DescrFromType(number < 0 ? NPY_USHORT : number);
    return PyArray_NewFromDescr(&PyArray_Type, descr, x->ndim, dims, strides, x->data, 0, NULL);
}

/* ---- every other kind: a view ---- */

#define VIEW_DIMS 64 /* what is more is nobody's array */

/* An array as its owner describes it. */
typedef struct {
    char *data;
    dl_device device;
    dl_dtype dtype;
    int ndim;
    int64_t shape[VIEW_DIMS], stride[VIEW_DIMS]; /* in elements */
    bool read_only, copied;
    bool has_stream; /* the owner says on which stream its work is */
    void *stream;
    la_kind kind;
    const dl_exchange *table;
    PyObject *owner; /* what keeps the memory; owned */
} view;

static la_device device_of(dl_device device)
{
    return device.type == DL_CPU || device.type == DL_CUDA_HOST ? LA_CPU : LA_CUDA;
}

/* q says where a call runs; the others must lie there too. */
static int settle_device(la_call *c, la_name name, dl_device at)
{
    const char *label = la_array_name(&c->p, name);
    const la_device device = device_of(at);
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
    if (device == LA_CPU && may_lie_on_host(&c->p, name)) return 0;
    return refuse_device(c, name, device, ordinal);
}

static int view_tensor(view *x, const dl_tensor *t, const char *label)
{
    if (t->ndim < 0 || t->ndim > VIEW_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: expected up to %d dimensions, got %d", label,
                     LA_MAX_DIMS, (int)t->ndim);
        return -1;
    }
    x->data = (char *)t->data + t->byte_offset;
    x->device = t->device;
    x->dtype = t->dtype;
    x->ndim = t->ndim;
    int64_t dense = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        x->shape[i] = t->shape[i];
        x->stride[i] = t->strides ? t->strides[i] : dense;
        dense *= t->shape[i];
    }
    return 0;
}

/* The exchange table of an object's type, or NULL. Types are few and live long: the first ones are
 * remembered (and kept alive, so that an address says which type it is). */
static const dl_exchange *exchange_of(PyObject *object)
{
    enum { REMEMBERED = 8 };
    static struct {
        _Atomic(PyTypeObject *) type;
        const dl_exchange *table;
    } known[REMEMBERED];
    static atomic_int claimed;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; i < REMEMBERED; i++) {
        PyTypeObject *one = atomic_load_explicit(&known[i].type, memory_order_acquire);
        if (one == type) return known[i].table;
        if (!one) break;
    }
    PyObject *capsule = PyObject_GetAttrString((PyObject *)type, "__dlpack_c_exchange_api__");
    const dl_exchange *table =
        capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule);
    PyErr_Clear();
    while (table && table->version.major != 1) table = table->older;
    if (!table || !table->borrow) return NULL;
    int slot = atomic_load(&claimed) < REMEMBERED ? atomic_fetch_add(&claimed, 1) : REMEMBERED;
    if (slot < REMEMBERED) {
        Py_INCREF((PyObject *)type);
        known[slot].table = table;
        atomic_store_explicit(&known[slot].type, type, memory_order_release);
    }
    return table;
}

static int is_true(PyObject *object, PyObject *word, bool call_it)
{
    PyObject *value = PyObject_GetAttr(object, word);
    if (!value) {
        PyErr_Clear(); /* a library that has no such thing */
        return 0;
    }
    if (call_it) {
        PyObject *answer = PyObject_CallNoArgs(value);
        Py_DECREF(value);
        if (!answer) return -1;
        value = answer;
    }
    int yes = value == Py_True ? 1 : value == Py_False ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return yes;
}

/* PyTorch lends its memory whatever it means: gradients asked for, signs not yet turned. */
static int refuse_lazy(const char *label, PyObject *object)
{
    int yes = is_true(object, word_requires_grad, false);
    if (yes > 0) {
        PyObject *torch = PyImport_ImportModule("torch");
        PyObject *enabled = torch ? PyObject_CallMethod(torch, "is_grad_enabled", NULL) : NULL;
        Py_XDECREF(torch);
        if (!enabled) return -1;
        yes = PyObject_IsTrue(enabled);
        Py_DECREF(enabled);
        if (yes > 0) {
            PyErr_Format(PyExc_TypeError,
                         "%s: requires gradients, which linattn's functions do not record yet; "
                         "pass %s.detach() and use <op>_backward",
                         label, label);
            return -1;
        }
    }
    if (yes == 0) yes = is_true(object, word_is_neg, true);
    if (yes > 0) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected the numbers themselves, got a view of their negatives; pass "
                     "%s.resolve_neg()",
                     label, label);
        return -1;
    }
    return yes;
}

static int view_exchange(la_call *c, la_name name, PyObject *object, const dl_exchange *table,
                         view *x)
{
    const char *label = la_array_name(&c->p, name);
    dl_tensor tensor;
    if (refuse_lazy(label, object)) return -1;
    if (table->borrow(object, &tensor)) return name_error(label);
    if (view_tensor(x, &tensor, label) || settle_device(c, name, x->device)) return -1;
    x->kind = LA_EXCHANGE;
    x->table = table;
    if (device_of(x->device) == LA_CUDA) {
        if (table->current_stream(x->device.type, x->device.id, &x->stream))
            return name_error(label);
        x->has_stream = true;
    }
    Py_INCREF(object);
    x->owner = object;
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

static int view_dlpack(la_call *c, la_name name, PyObject *object, view *x)
{
    const char *label = la_array_name(&c->p, name);
    dl_device device;
    if (ask_device(object, &device)) return name_error(label);
    if (settle_device(c, name, device)) return -1;
    PyObject *capsule = ask_capsule(c, object, device_of(device) == LA_CUDA);
    if (!capsule) return name_error(label);
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
    x->kind = LA_EXPORTED;
    if (view_tensor(x, tensor, label)) return -1;
    if (device_of(x->device) != device_of(device) ||
        (device_of(device) == LA_CUDA && x->device.id != device.id)) {
        PyErr_Format(PyExc_TypeError, "%s: __dlpack_device__ and __dlpack__ name two devices",
                     label);
        return -1;
    }
    return 0;
}

/* ---- __cuda_array_interface__ ---- */

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
    const char *bytes = text ? PyBytes_AsString(text) : "";
    dtype->lanes = 1;
    dtype->bits = (uint8_t)(strlen(bytes) > 2 ? 8 * atoi(bytes + 2) : 0);
    const char order = bytes[0], letter = order ? bytes[1] : 0;
    bool known = order == '<' || order == '=' || order == '|';
    if (letter == 'f')
        dtype->code = DL_FLOAT;
    else if (letter == 'i')
        dtype->code = DL_INT;
    else if (letter == 'V' && dtype->bits == 16 && is_bfloat16(object))
        dtype->code = DL_BFLOAT;
    else
        known = false;
    if (!known)
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got typestr %R", label,
                     expected_dtypes(name), typestr);
    Py_XDECREF(text);
    return known ? 0 : -1;
}

/* Integers of a tuple; -1 if it is none, or too long. */
static int read_tuple(PyObject *tuple, int64_t *numbers)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) > VIEW_DIMS) return -1;
    const int n = (int)PyTuple_Size(tuple);
    for (int i = 0; i < n; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
        if (PyErr_Occurred()) return -1;
    }
    return n;
}

/* PyDict_GetItemString swallows errors, which a plain dict does not make. */
static int read_interface(la_name name, const char *label, PyObject *object, PyObject *interface,
                          view *x)
{
    PyObject *shape = PyDict_GetItemString(interface, "shape");
    PyObject *typestr = PyDict_GetItemString(interface, "typestr");
    PyObject *data = PyDict_GetItemString(interface, "data");
    PyObject *strides = PyDict_GetItemString(interface, "strides");
    PyObject *stream = PyDict_GetItemString(interface, "stream");
    PyObject *mask = PyDict_GetItemString(interface, "mask");
    if (!shape || !typestr || !data || !PyTuple_Check(data) || PyTuple_Size(data) != 2 ||
        (x->ndim = read_tuple(shape, x->shape)) < 0) {
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
    x->data = PyLong_AsVoidPtr(PyTuple_GetItem(data, 0));
    if (PyErr_Occurred()) return name_error(label);
    x->read_only = PyObject_IsTrue(PyTuple_GetItem(data, 1)) != 0;
    const int64_t size = x->dtype.bits / 8;
    if (strides && strides != Py_None) {
        if (read_tuple(strides, x->stride) != x->ndim) {
            PyErr_Format(PyExc_TypeError, "%s: expected a stride for every axis, got %R", label,
                         strides);
            return -1;
        }
        for (int i = 0; i < x->ndim; i++) {
            if (x->shape[i] > 1 && x->stride[i] % size)
                return refuse_strides(label, "strides of whole elements", x->ndim, x->stride, 1);
            x->stride[i] /= size;
        }
    } else {
        int64_t dense = 1;
        for (int i = x->ndim - 1; i >= 0; i--) {
            x->stride[i] = dense;
            dense *= x->shape[i];
        }
    }
    if (stream && stream != Py_None) {
        x->stream = PyLong_AsVoidPtr(stream); /* 1 and 2 are CUDA's own handles */
        if (PyErr_Occurred()) return name_error(label);
        if (!x->stream) {
            PyErr_Format(PyExc_ValueError,
                         "%s: expected a stream that is not 0 in __cuda_array_interface__, got 0",
                         label);
            return -1;
        }
        x->has_stream = true;
    }
    return 0;
}

/* An int that a helper in linattn/arrays.py returns. */
static int ask_helper(const char *helper, PyObject *object, int ordinal, void **pointer)
{
    PyObject *module = PyImport_ImportModule("linattn.arrays");
    PyObject *answer = module ? PyObject_CallMethod(module, helper, "Oi", object, ordinal) : NULL;
    Py_XDECREF(module);
    if (!answer) return -1;
    *pointer = PyLong_AsVoidPtr(answer);
    Py_DECREF(answer);
    return PyErr_Occurred() ? -1 : 0;
}

static int view_interface(la_call *c, la_name name, PyObject *object, PyObject *interface, view *x)
{
    const char *label = la_array_name(&c->p, name);
    if (read_interface(name, label, object, interface, x)) return -1;
    x->device = (dl_device){DL_CUDA, 0};
    if (PyObject_HasAttrString(object, "__dlpack_device__")) {
        if (ask_device(object, &x->device)) return name_error(label);
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
    x->kind = is_of(object, "cupy") ? LA_CUPY : LA_EXPORTED;
    if (x->kind == LA_CUPY) { /* where its arrays are used next, whatever stream made this one */
        void *current;
        if (ask_helper("_cupy_stream", object, x->device.id, &current)) return name_error(label);
        if (name == LA_Q) c->p.stream = current;
        if (!x->has_stream) x->stream = current;
        x->has_stream = true;
    }
    Py_INCREF(object);
    x->owner = object;
    return 0;
}

/* 1: filled; 0: not an array of any kind; -1: an exception. x->owner is to be let go of by all. */
static int look(la_call *c, la_name name, PyObject *object, view *x)
{
    memset(x, 0, offsetof(view, shape));
    memset(&x->read_only, 0, sizeof *x - offsetof(view, read_only));
    const dl_exchange *table = exchange_of(object);
    if (table) return view_exchange(c, name, object, table, x) ? -1 : 1;
    if (PyType_Check(object)) return 0;
    const bool dlpack = PyObject_HasAttrString(object, "__dlpack__") &&
                        PyObject_HasAttrString(object, "__dlpack_device__");
    /* Version 3 is the first that says on which stream; JAX's has none. */
    if (!is_of(object, "jax") && PyObject_HasAttrString(object, "__cuda_array_interface__")) {
        PyObject *interface = PyObject_GetAttrString(object, "__cuda_array_interface__");
        if (!interface) return name_error(la_array_name(&c->p, name));
        PyObject *version =
            PyDict_Check(interface) ? PyDict_GetItemString(interface, "version") : NULL;
        int status = 0;
        if (version && (PyLong_AsLong(version) >= 3 || !dlpack))
            status = view_interface(c, name, object, interface, x) ? -1 : 1;
        Py_DECREF(interface);
        if (status) return status;
    }
    if (!dlpack) return 0;
    return view_dlpack(c, name, object, x) ? -1 : 1;
}

/* ---- from a view to an la_array ---- */

static la_dtype dtype_in(dl_dtype dtype)
{
    for (int i = 0; i < LA_DTYPES; i++)
        if (!memcmp(&dl_dtypes[i], &dtype, sizeof dtype)) return (la_dtype)i;
    return LA_DTYPES;
}

static int refuse_dtype(const char *label, la_name name, dl_dtype dtype)
{
    static const char *const codes[DL_CODES] = {"int",    "uint",    "float", "opaque",
                                                "bfloat", "complex", "bool"};
    char got[48];
    if (dtype.code == DL_BOOL && dtype.bits == 8 && dtype.lanes == 1)
        snprintf(got, sizeof got, "bool");
    else if (dtype.code < DL_CODES && dtype.lanes == 1)
        snprintf(got, sizeof got, "%s%d", codes[dtype.code], dtype.bits);
    else
        snprintf(got, sizeof got, "DLPack's dtype (%d, %d, %d)", dtype.code, dtype.bits,
                 dtype.lanes);
    PyErr_Format(PyExc_TypeError, "%s: expected %s, got %s", label, expected_dtypes(name), got);
    return -1;
}

/* The call's stream, and those of others: q's library says where the call runs. */
static int settle_stream(la_call *c, la_name name, const view *x)
{
    if (device_of(x->device) != LA_CUDA) return 0;
    if (name == LA_Q && x->kind != LA_CUPY) c->p.stream = x->stream;
    if (!x->has_stream) c->stream_unknown = true;
    if (!x->has_stream || x->stream == c->p.stream) return 0;
    for (int i = 0; i < c->others; i++)
        if (c->other[i] == x->stream) return 0;
    c->other[c->others++] = x->stream;
#ifdef LA_WITH_CUDA
    return la_raise(c, la_cuda_wait_stream(&c->p, x->stream));
#else
    return 0;
#endif
}

static bool view_fits(const la_array *x, bool rows)
{
    if ((uintptr_t)x->data % dtype_size[x->dtype]) return false;
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] == 0) return true;
    return !rows || x->ndim == 0 || x->shape[x->ndim - 1] <= 1 || x->stride[x->ndim - 1] == 1;
}

static int take_foreign(la_call *c, la_name name, PyObject *object, bool in_place);

/* A contiguous array of its own library in a device array's place. */
static int take_contiguous(la_call *c, la_name name, PyObject *object)
{
    PyObject *module = PyImport_ImportModule("linattn.arrays");
    PyObject *copy = module ? PyObject_CallMethod(module, "_contiguous", "O", object) : NULL;
    Py_XDECREF(module);
    if (!copy) return name_error(la_array_name(&c->p, name));
    if (copy == Py_None || copy == object) {
        const la_array *x = &c->p.array[name];
        Py_DECREF(copy);
        return refuse_strides(la_array_name(&c->p, name),
                              "an aligned array whose innermost axis is contiguous", x->ndim,
                              x->stride, (int64_t)dtype_size[x->dtype]);
    }
    PyObject *const like = c->like;
    const la_span span = c->span[name];
    int failed = take_foreign(c, name, copy, false); /* holds a reference of its own */
    Py_DECREF(copy);
    c->like = like;
    c->span[name] = span;
    return failed;
}

static int take_view(la_call *c, la_name name, PyObject *object, view *x, bool in_place)
{
    const char *label = la_array_name(&c->p, name);
    la_array *a = &c->p.array[name];
    const la_device device = device_of(x->device);
    if (name == LA_Q) {
        c->like = object;
        c->kind = x->kind;
        c->table = x->table;
        if (x->kind == LA_EXPORTED && device == LA_CPU) { /* NumPy's, if its library takes none */
            void *imports;
            if (ask_helper("_imports", object, 0, &imports)) return name_error(label);
            if (!imports) c->kind = LA_NUMPY;
        }
    }
    if (settle_stream(c, name, x)) return -1;
    if (in_place && x->read_only) return refuse_read_only(label);
    if (in_place && x->copied) {
        PyErr_Format(PyExc_ValueError, "%s: expected the array's own memory, got a copy of it",
                     label);
        return -1;
    }
    if (dtype_in(x->dtype) == LA_DTYPES) return refuse_dtype(label, name, x->dtype);
    if (x->ndim > LA_MAX_DIMS) return refuse_dims(c, name, x->ndim, x->shape);
    a->given = true;
    a->on_host = device == LA_CPU && c->p.device == LA_CUDA;
    a->data = x->data;
    a->dtype = dtype_in(x->dtype);
    a->ndim = x->ndim;
    memcpy(a->shape, x->shape, sizeof *a->shape * (size_t)a->ndim);
    memcpy(a->stride, x->stride, sizeof *a->stride * (size_t)a->ndim);
    c->object[name] = x->owner;
    x->owner = NULL;
    if (!a->on_host) c->span[name] = span_of(a);

    const int64_t size = (int64_t)dtype_size[a->dtype];
    const bool fits = view_fits(a, in_place || has_rows(&c->p, name));
    if (in_place && !fits) return refuse_strides(label, IN_PLACE, a->ndim, a->stride, size);
    if (in_place && overlaps_itself(a))
        return refuse_strides(label, "every element in a place of its own", a->ndim, a->stride,
                              size);
    if (!fits && c->p.face == LA_STEP)
        return refuse_strides(label, NO_COPIES, a->ndim, a->stride, size);
    if (fits && !(name == LA_CU && device == LA_CPU)) return 0;
    if (device == LA_CUDA) {
        let_go(c->object[name]);
        c->object[name] = NULL;
        return take_contiguous(c, name, object);
    }
    PyObject *seen = numpy_over(a);
    c->given[name] = seen;
    PyObject *copy = seen ? PyArray_FromArray((PyArrayObject *)seen, NULL,
                                              NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY)
                          : NULL;
    if (!copy) return -1;
    const la_dtype dtype = a->dtype; /* NumPy may have seen the bits only */
    let_go(c->object[name]);
    describe(c, name, copy);
    a->dtype = dtype;
    return 0;
}

static int take_foreign(la_call *c, la_name name, PyObject *object, bool in_place)
{
    view x;
    int found = look(c, name, object, &x);
    if (found == 0) {
        PyErr_Format(PyExc_TypeError, "%s: expected an array, got %R", la_array_name(&c->p, name),
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    int failed = found < 0 || take_view(c, name, object, &x, in_place);
    let_go(x.owner);
    return failed ? -1 : 0;
}

static int take(la_call *c, la_name name, PyObject *object, bool in_place)
{
    if (object == Py_None) return 0;
    if (PyArray_Check(object) && !is_masked(object)) {
        Py_INCREF(object);
        return take_numpy(c, name, object, in_place);
    }
    if (may_be_number(&c->p, name, object)) {
        la_array *a = &c->p.array[name];
        PyObject *number = PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
        if (!number) return -1;
        const la_device device = c->p.device;
        c->p.device = LA_CPU; /* a number comes from the host, wherever the call runs */
        int failed = take_numpy(c, name, number, false);
        c->p.device = device;
        a->on_host = device == LA_CUDA;
        return failed;
    }
    if (PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected an array without a mask, got %R",
                     la_array_name(&c->p, name), (PyObject *)Py_TYPE(object));
        return -1;
    }
    return take_foreign(c, name, object, in_place);
}

int la_take(la_call *c, la_name name, PyObject *object) { return take(c, name, object, false); }

int la_take_in_place(la_call *c, la_name name, PyObject *object)
{
    if (name == LA_O && object != Py_None) c->out = object;
    return take(c, name, object, true);
}

int la_take_state(la_call *c, la_name S, la_name z, PyObject *object, bool in_place)
{
    if (object == Py_None || c->p.normaliser == LA_UNNORMALISED)
        return take(c, S, object, in_place);
    const char *what = c->p.face == LA_STEP ? "state"
                       : S == LA_S0         ? "initial_state"
                                            : "d_final_state";
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected the pair (S, z) of a normalised op, got %R",
                     what, (PyObject *)Py_TYPE(object));
        return -1;
    }
    if (PySequence_Size(object) != 2) {
        PyErr_Format(PyExc_ValueError, "%s: expected the pair (S, z), got %zd items", what,
                     PySequence_Size(object));
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        const la_name name = i ? z : S;
        PyObject *part = PySequence_GetItem(object, i);
        if (!part) return -1;
        if (part == Py_None)
            PyErr_Format(PyExc_TypeError, "%s: expected an array, got None",
                         la_array_name(&c->p, name));
        int failed = part == Py_None || take(c, name, part, in_place);
        Py_DECREF(part);
        if (failed) return -1;
    }
    return 0;
}

/* ---- memory of our own, for libraries that only import ----
 *
 * JAX and others make no arrays that somebody else may write; they take ours over. */

typedef struct {
    PyObject_HEAD void *data;
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
    size_t bytes = dtype_size[m->dtype];
    for (int i = 0; i < m->ndim; i++) bytes *= (size_t)m->shape[i];
    return bytes;
}

/* Memory for an output of the call; NULL with an exception. */
static memory *memory_new(la_call *c, la_dtype dtype, int ndim, const int64_t *shape)
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
        m->data = aligned_alloc(64, (bytes_of(m) + 64) & ~(size_t)63);
        if (!m->data) failed = PyErr_NoMemory() == NULL;
    } else {
#ifdef LA_WITH_CUDA
        failed = la_raise(c, la_cuda_allocate(&c->p, bytes_of(m), &m->data));
#endif
    }
    if (failed) {
        Py_DECREF((PyObject *)m);
        return NULL;
    }
    return m;
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
    const long long theirs = stream == Py_None ? 0 : PyLong_AsLongLong(stream);
    if (PyErr_Occurred()) return NULL;
    if (m->device == LA_CUDA && theirs != -1 && (void *)(intptr_t)theirs != m->stream) {
        la_call c = {.p = {.device = LA_CUDA, .ordinal = m->ordinal}};
        c.p.stream = (void *)(intptr_t)theirs;
        if (la_raise(&c, la_cuda_wait_stream(&c.p, m->stream))) return NULL;
    }
#endif
    export *e = calloc(1, sizeof *e);
    if (!e) return PyErr_NoMemory();
    dl_tensor tensor = {m->data,  {m->device == LA_CPU ? DL_CPU : DL_CUDA, m->ordinal},
                        m->ndim,  dl_dtypes[m->dtype],
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

/* ---- outputs ---- */

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
    int number = number_of(dtype);
    if (number < 0) { /* a bfloat16 from elsewhere, and NumPy has none */
        PyObject *ml_dtypes = PyImport_ImportModule("ml_dtypes");
        Py_XDECREF(ml_dtypes);
        if (!ml_dtypes) return name_error(la_array_name(&c->p, name));
        number = bfloat16_number();
    }
    PyArray_Descr *descr = PyArray_DescrFromType(number);
    if (!descr) return -1;
    for (int i = 0; i < ndim; i++) dims[i] = (npy_intp)shape[i];
    PyObject *x = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, dims, NULL, NULL, 0, NULL);
    if (!x) return -1;
    describe(c, name, x);
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
        .dtype = dl_dtypes[dtype],
        .shape = shape,
    };
    dl_versioned *made = NULL;
    void *object = NULL;
    if (c->table->allocate(&prototype, &made, NULL, exchange_failed)) return name_error(label);
    char *data = (char *)made->tensor.data + made->tensor.byte_offset;
    if (c->table->object_from_managed(made, &object)) return name_error(label);
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
        return name_error(label);
    }
    describe_dense(c, name, data, dtype, ndim, shape, x);
    return 0;
}

int la_allocate(la_call *c, la_name name, la_dtype dtype)
{
    int64_t shape[LA_MAX_DIMS];
    const int ndim = la_shape_of(&c->p, name, shape);
    int failed = 0;
    switch (c->kind) {
    case LA_NUMPY: failed = allocate_numpy(c, name, dtype, ndim, shape); break;
    case LA_EXCHANGE: failed = allocate_exchange(c, name, dtype, ndim, shape); break;
    case LA_CUPY: failed = allocate_cupy(c, name, dtype, ndim, shape); break;
    case LA_EXPORTED: {
        memory *m = memory_new(c, dtype, ndim, shape);
        if (m)
            describe_dense(c, name, m->data, dtype, ndim, shape, (PyObject *)m);
        else
            failed = -1;
    }
    }
    return failed ? -1 : la_raise(c, la_check_output(&c->p, name));
}

/* Memory of ours in the hands of q's library; any other array as it is. */
static PyObject *hand_over(const la_call *c, PyObject *object)
{
    if (Py_TYPE(object) != memory_type) {
        Py_INCREF(object);
        return object;
    }
    PyObject *module = PyImport_ImportModule("linattn.arrays");
    PyObject *x =
        module ? PyObject_CallMethod(module, "_import_like", "OO", c->like, object) : NULL;
    Py_XDECREF(module);
    return x;
}

PyObject *la_result(la_call *c, la_name name)
{
    PyObject *x = name == LA_O && c->out ? c->out : c->object[name] ? c->object[name] : Py_None;
    if (c->kind == LA_EXPORTED) return hand_over(c, x);
    Py_INCREF(x);
    return x;
}

PyObject *la_state_result(la_call *c, la_name S, la_name z)
{
    if (!c->object[z]) return la_result(c, S);
    PyObject *pair = NULL, *one = la_result(c, S), *two = la_result(c, z);
    if (one && two) pair = PyTuple_Pack(2, one, two);
    Py_XDECREF(one);
    Py_XDECREF(two);
    return pair;
}

/* ---- what may not share memory ---- */

/* An array as runs of bytes at multiples of steps: axes that follow each other without a gap are
 * one run. Returns the greatest common divisor of the steps that are left, 0 if there is none. */
static int64_t runs_of(const la_array *x, int64_t *run)
{
    const int64_t size = (int64_t)dtype_size[x->dtype];
    bool used[LA_MAX_DIMS] = {false};
    int64_t common = 0;
    *run = size;
    for (bool grown = true; grown;) {
        grown = false;
        for (int i = 0; i < x->ndim; i++)
            if (!used[i] && distance(x->stride[i]) * size == *run) {
                used[i] = grown = true;
                *run *= x->shape[i];
            }
    }
    for (int i = 0; i < x->ndim; i++) {
        if (used[i] || x->shape[i] <= 1) continue;
        for (int64_t a = distance(x->stride[i]) * size; a;) { /* Euclid */
            const int64_t rest = common % a;
            common = a;
            a = rest;
        }
    }
    return common;
}

/* On a device, where nobody solves the general question: runs at multiples of one common step lie
 * apart if they do within one step. So neighbours along one axis of a buffer are told apart, and
 * what is neither that nor apart altogether counts as shared. */
static bool may_meet(const la_array *x, la_span at_x, const la_array *y, la_span at_y)
{
    if (x->data < at_x.low || x->data >= at_x.high || y->data < at_y.low || y->data >= at_y.high)
        return true; /* a copy, whose original has lost its strides */
    int64_t run_x, run_y, step = runs_of(x, &run_x), a = runs_of(y, &run_y);
    while (a) {
        const int64_t rest = step % a;
        step = a;
        a = rest;
    }
    if (!step) return true;
    const int64_t apart = ((at_y.low - at_x.low) % step + step) % step;
    return run_x > apart || apart + run_y > step;
}

/* The array as NumPy sees it where it is the user's. */
static PyObject *numpy_of(la_call *c, la_name name)
{
    if (!c->given[name]) c->given[name] = numpy_over(&c->p.array[name]);
    return c->given[name];
}

/* Extents first; only where they meet is the exact answer looked for. 1, 0 or -1. */
static int meet(la_call *c, la_name name, la_call *d, la_name other)
{
    const la_span x = c->span[name], y = d->span[other];
    if (x.high <= y.low || y.high <= x.low) return 0;
    if (c->p.device == LA_CUDA) return may_meet(&c->p.array[name], x, &d->p.array[other], y);
    PyObject *one = numpy_of(c, name), *two = numpy_of(d, other);
    PyObject *numpy = one && two ? PyImport_ImportModule("numpy") : NULL;
    PyObject *shared = numpy ? PyObject_CallMethod(numpy, "shares_memory", "OO", one, two) : NULL;
    Py_XDECREF(numpy);
    if (!shared) return -1;
    int overlap = PyObject_IsTrue(shared);
    Py_DECREF(shared);
    return overlap;
}

static int refuse_overlap(la_call *c, la_name written, la_name other)
{
    int overlap = meet(c, written, c, other);
    if (overlap > 0)
        PyErr_Format(PyExc_ValueError, "%s: expected memory of its own, got memory shared with %s",
                     la_array_name(&c->p, written), la_array_name(&c->p, other));
    return overlap ? -1 : 0;
}

int la_refuse_overlaps(la_call *c)
{
    static const la_name read[] = {LA_Q, LA_K, LA_V, LA_G, LA_BETA, LA_CU};
    const bool step = c->p.face == LA_STEP;
    for (size_t i = 0; i < sizeof read / sizeof *read; i++)
        if (refuse_overlap(c, LA_O, read[i]) ||
            (step && (refuse_overlap(c, LA_S0, read[i]) || refuse_overlap(c, LA_Z0, read[i]))))
            return -1;
    return refuse_overlap(c, LA_O, LA_S0) || refuse_overlap(c, LA_O, LA_Z0) ||
                   (step && refuse_overlap(c, LA_S0, LA_Z0))
               ? -1
               : 0;
}

int la_shares_memory(PyObject *x, PyObject *y)
{
    la_call c[2];
    memset(c, 0, sizeof c);
    for (int i = 0; i < 2; i++) la_problem_init(&c[i].p, LA_OP_linear_attention, LA_FORWARD);
    int shared = la_take(&c[0], LA_Q, x) || la_take(&c[1], LA_Q, y) ? -1 : 0;
    const la_problem *p = &c[0].p, *o = &c[1].p;
    if (!shared && p->device == o->device && p->ordinal == o->ordinal)
        shared = meet(&c[0], LA_Q, &c[1], LA_Q);
    la_call_release(&c[0]);
    la_call_release(&c[1]);
    return shared;
}

/* ---- streams ---- */

int la_settle_streams(la_call *c)
{
#ifdef LA_WITH_CUDA
    la_call theirs = {.p = {.device = LA_CUDA, .ordinal = c->p.ordinal}};
    for (int i = 0; i < c->others; i++) {
        theirs.p.stream = c->other[i];
        if (la_raise(&theirs, la_cuda_wait_stream(&theirs.p, c->p.stream))) return -1;
    }
    if (c->stream_unknown) return la_raise(c, la_cuda_synchronize(&c->p));
#else
    (void)c;
#endif
    return 0;
}

int la_arrays_init(void)
{
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    word_requires_grad = PyUnicode_InternFromString("requires_grad");
    word_is_neg = PyUnicode_InternFromString("is_neg");
    if (!word_requires_grad || !word_is_neg) return -1;
    if (!memory_type) memory_type = (PyTypeObject *)PyType_FromSpec(&memory_spec);
    if (!memory_type) return -1;
    return 0;
}
