/* Arrays of any library come in. check.c says which shapes are right.
 *
 * NumPy's arrays come first and directly: a step is called for every token. Every other array is
 * asked where it lies (a view) and becomes an la_array from there. On the host NumPy does the rare
 * work on all of them (copies, exact overlaps) through an array over the same memory. */
#define LA_IMPORTS_NUMPY
#include "outline.h"
#include "views.h"

#include <stdatomic.h>
#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

/* ---- references ---- */

void la_call_release(la_call *c)
{
    for (int i = 0; i < LA_ARRAYS; i++) {
        PyObject *const object = c->object[i];
        c->object[i] = NULL;
        if (object) la_release_owner(object);
        Py_CLEAR(c->given[i]);
        Py_CLEAR(c->storage[i]);
    }
}

/* ---- dtypes ---- */

/* NumPy knows bfloat16 only as ml_dtypes' own type, whose number is given at run time. An array
 * of it can only exist once ml_dtypes is imported, so nothing is imported here. */
static int bfloat16_number(void)
{
    static atomic_int known = -1; /* every thread would write the same value */
    int number = atomic_load_explicit(&known, memory_order_relaxed);
    if (number >= 0) return number;
    PyObject *modules = PyImport_GetModuleDict(); /* borrowed */
    PyObject *ml_dtypes = modules ? PyDict_GetItemString(modules, "ml_dtypes") : NULL;
    if (!ml_dtypes) return -1;
    PyObject *type = PyObject_GetAttrString(ml_dtypes, "bfloat16");
    PyArray_Descr *descr = NULL;
    if (type && PyArray_DescrConverter(type, &descr)) {
        number = descr->type_num;
        atomic_store_explicit(&known, number, memory_order_relaxed);
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

int la_number_in_numpy(la_dtype dtype)
{
    static const int numbers[LA_DTYPES] = {
        [LA_F64] = NPY_DOUBLE, [LA_F32] = NPY_FLOAT, [LA_F16] = NPY_HALF,
        [LA_BF16] = -1,        [LA_I64] = NPY_INT64, [LA_I32] = NPY_INT32,
    };
    return dtype == LA_BF16 ? bfloat16_number() : numbers[dtype];
}

/* ---- what all kinds share ---- */

/* Must the innermost axis of an array be contiguous? */
static bool needs_rows(const la_call *c, la_name name, bool in_place)
{
    return (in_place && !c->p.any_strides) || la_has_rows(&c->p, name);
}

/* The memory that was expected where no copy may be made. */
static const char *expected_memory(const la_call *c, bool in_place)
{
#define MEMORY "an aligned array in native byte order"
#define IN_PLACE " (it is written in place)"
#define NO_COPIES " (a step makes no hidden copies)"
#define ROWS " whose innermost axis is contiguous"
    if (c->p.any_strides) return in_place ? MEMORY IN_PLACE : MEMORY NO_COPIES;
    return in_place ? MEMORY ROWS IN_PLACE : MEMORY ROWS NO_COPIES;
#undef MEMORY
#undef IN_PLACE
#undef NO_COPIES
#undef ROWS
}

static int refuse_dims(la_call *c, la_name name, int ndim, const int64_t *shape)
{
    return la_raise(la_refuse_dims(&c->p, name, ndim, shape), c->p.message);
}

int la_refuse_read_only(const char *label)
{
    PyErr_Format(PyExc_ValueError, "%s: expected a writable array, got a read-only one", label);
    return -1;
}

static bool is_empty(const la_array *x)
{
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] == 0) return true;
    return false;
}

/* Do two elements lie in one place? Sorted by stride, each axis must step over all that the smaller
 * ones reach. */
static bool overlaps_itself(const la_array *x)
{
    int64_t reach = 1, last = 0;
    if (is_empty(x)) return false;
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] > 1 && x->stride[i] == 0) return true;
    for (int i = 0; i < x->ndim; i++) /* two axes of one stride */
        for (int j = 0; j < i; j++)
            if (x->shape[i] > 1 && x->shape[j] > 1 &&
                la_distance(x->stride[i]) == la_distance(x->stride[j]))
                return true;
    for (int done = 0; done < x->ndim; done++) {
        int next = -1;
        for (int i = 0; i < x->ndim; i++)
            if (x->shape[i] > 1 && la_distance(x->stride[i]) > last &&
                (next < 0 || la_distance(x->stride[i]) < la_distance(x->stride[next])))
                next = i;
        if (next < 0) break;
        last = la_distance(x->stride[next]);
        if (last < reach) return true;
        reach += last * (x->shape[next] - 1);
    }
    return false;
}

static la_span span_of(const la_array *x)
{
    int64_t low, high;
    la_extent(x->ndim, x->shape, x->stride, la_size_of(x->dtype), &low, &high);
    return (la_span){x->data + low, x->data + high};
}

/* ---- NumPy ---- */

void la_describe(la_call *c, la_name name, PyObject *object)
{
    PyArrayObject *x = (PyArrayObject *)object;
    la_array *a = &c->p.array[name];
    a->given = true;
    a->data = PyArray_BYTES(x);
    a->dtype = dtype_of(x);
    a->ndim = PyArray_NDIM(x);
    /* no division: three an array would be a tenth of a step's call */
    const int shift = __builtin_ctz((unsigned)la_size_of(a->dtype));
    for (int i = 0; i < a->ndim; i++) {
        a->shape[i] = PyArray_DIM(x, i);
        a->stride[i] = PyArray_STRIDE(x, i) >> shift;
    }
    c->object[name] = object;
}

/* Of a dtype that the core has: 2, 4 or 8 bytes. Strides of nothing mean nothing. */
static bool strides_fit(PyArrayObject *x, bool rows)
{
    const int last = PyArray_NDIM(x) - 1;
    const npy_intp size = PyArray_ITEMSIZE(x);
    if (!PyArray_ISALIGNED(x) || PyArray_ISBYTESWAPPED(x)) return false;
    for (int i = 0; i <= last; i++) {
        if (PyArray_DIM(x, i) <= 1) continue;
        const npy_intp stride = PyArray_STRIDE(x, i);
        if (stride & (size - 1) || (rows && i == last && stride != size))
            return PyArray_SIZE(x) == 0;
    }
    return true;
}

la_span la_span_of_numpy(PyArrayObject *x)
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

/* A gate or beta of an op may be a number, which then holds for all tokens, heads and keys. */
static bool may_be_number(const la_call *c, la_name name, PyObject *object)
{
    return !c->p.labels && la_array_rows[name].dtype == LA_DTYPE_FLOAT &&
           (PyFloat_Check(object) || PyArray_CheckScalar(object) ||
            (PyLong_Check(object) && !PyBool_Check(object)));
}

/* Of a subclass: memmap and matrix are fine; a masked array's mask would be ignored. */
static bool is_masked(PyObject *object)
{
    return PyObject_HasAttrString(object, "mask") && PyObject_HasAttrString(object, "filled");
}

static int refuse_numpy_strides(const char *label, const char *expected, PyArrayObject *x)
{
    int64_t stride[64]; /* NumPy's own limit of dimensions */
    for (int i = 0; i < PyArray_NDIM(x); i++) stride[i] = PyArray_STRIDE(x, i);
    return la_refuse_strides(label, expected, PyArray_NDIM(x), stride, 1);
}

static int refuse_numpy_dtype(const la_call *c, la_name name, PyArrayObject *x)
{
    PyErr_Format(PyExc_TypeError, "%s: expected %s, got %S", la_array_name(&c->p, name),
                 la_expected_dtypes(name), (PyObject *)PyArray_DESCR(x));
    return -1;
}

/* Takes over the reference. */
static int take_numpy(la_call *c, la_name name, PyObject *object, bool in_place)
{
    PyArrayObject *x = (PyArrayObject *)object;
    const char *label = NULL;
    /* Read again without the GIL, or by a device: it must be as it was checked. */
    bool copy_it = name == LA_CU || (c->p.device == LA_CUDA && !c->bound);
    if (name == LA_Q) c->like = object;
    c->given[name] = object;

    if (in_place && !PyArray_ISWRITEABLE(x)) return la_refuse_read_only(la_array_name(&c->p, name));
    if (dtype_of(x) == LA_DTYPES) return refuse_numpy_dtype(c, name, x);
    if (PyArray_NDIM(x) > LA_MAX_DIMS) {
        int64_t shape[64];
        for (int i = 0; i < PyArray_NDIM(x); i++) shape[i] = PyArray_DIM(x, i);
        return refuse_dims(c, name, PyArray_NDIM(x), shape);
    }
    if (!strides_fit(x, needs_rows(c, name, in_place))) {
        label = la_array_name(&c->p, name);
        if (in_place || c->p.pass == LA_STEP)
            return refuse_numpy_strides(label, expected_memory(c, in_place), x);
        copy_it = true;
    }
    if (c->p.device == LA_CUDA) {
        if (!la_may_lie_on_host(&c->p, name)) return la_refuse_device(c, name, LA_CPU, 0);
        c->p.array[name].on_host = true;
    } else {
        c->span[name] = la_span_of_numpy(x);
    }
    if (copy_it) {
        PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(x), NPY_NATIVE);
        object =
            native ? PyArray_FromArray(x, native, NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY) : NULL;
        if (!object) return -1;
    } else {
        Py_INCREF(object);
    }
    la_describe(c, name, object);
    c->lent[name] = !copy_it && c->p.device == LA_CPU;
    if (in_place && !PyArray_IS_C_CONTIGUOUS(x) && overlaps_itself(&c->p.array[name]))
        return refuse_numpy_strides(la_array_name(&c->p, name),
                                    "every element in a place of its own", x);
    return 0;
}

/* A number comes from the host, wherever the call runs, and its array is ours: one element, or a
 * row where it has a number per key, of the dtype of sums. q has been taken before. */
static int take_number(la_call *c, la_name name, PyObject *object)
{
    const la_array *q = &c->p.array[LA_Q];
    const bool keys = name == LA_U || (name == LA_G && c->p.decay == LA_KEY);
    const bool row = keys && q->given && q->ndim > 0;
    const npy_intp count = row ? (npy_intp)q->shape[q->ndim - 1] : 1;
    PyObject *number = PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
    if (!number) return -1;
    const bool fits = dtype_of((PyArrayObject *)number) < LA_DTYPES;
    if (!fits) refuse_numpy_dtype(c, name, (PyArrayObject *)number);
    Py_DECREF(number);
    const double value = fits ? PyFloat_AsDouble(object) : 0;
    if (!fits || (value == -1 && PyErr_Occurred())) return -1;

    const bool wide = q->dtype == LA_F64;
    PyArray_Descr *descr = PyArray_DescrFromType(wide ? NPY_DOUBLE : NPY_FLOAT);
    PyObject *all = PyArray_NewFromDescr(&PyArray_Type, descr, 1, &count, NULL, NULL, 0, NULL);
    if (!all) return -1;
    char *const data = PyArray_BYTES((PyArrayObject *)all);
    for (npy_intp i = 0; i < count; i++)
        if (wide)
            ((double *)data)[i] = value;
        else
            ((float *)data)[i] = (float)value;
    la_describe(c, name, all);
    c->p.array[name].number = true;
    c->p.array[name].on_host = c->p.device == LA_CUDA;
    return 0;
}

PyObject *la_numpy_over(const la_array *x)
{
    const int number = la_number_in_numpy(x->dtype);
    const npy_intp size = la_size_of(x->dtype);
    npy_intp dims[LA_MAX_DIMS], strides[LA_MAX_DIMS];
    for (int i = 0; i < x->ndim; i++) {
        dims[i] = (npy_intp)x->shape[i];
        strides[i] = (npy_intp)x->stride[i] * size;
    }
    PyArray_Descr *descr = PyArray_DescrFromType(number < 0 ? NPY_USHORT : number);
    return PyArray_NewFromDescr(&PyArray_Type, descr, x->ndim, dims, strides, x->data, 0, NULL);
}

/* ---- from a view to an la_array ---- */

/* A bound step asks q's library for the current stream, each time, and no other library. */
static int refuse_other_streams(const la_call *c, la_name name, const la_view *x, PyObject *object)
{
    if (x->library == c->library && x->table == c->table && x->library != LA_EXPORTED) return 0;
    PyErr_Format(PyExc_ValueError,
                 "%s: expected an array of %s, got %R: a bound step cannot know on which stream it "
                 "is",
                 la_array_name(&c->p, name), name == LA_Q ? "PyTorch or CuPy" : "q's library",
                 (PyObject *)Py_TYPE(object));
    return -1;
}

#ifdef LA_WITH_CUDA
static int wait_stream(la_call *c, void *stream, void *other)
{
    return la_raise(la_cuda_wait_stream(c->p.ordinal, stream, other, c->p.message), c->p.message);
}
#endif

/* The call's stream, and those of others: q's library says where the call runs. */
static int settle_stream(la_call *c, la_name name, const la_view *x, PyObject *object)
{
    if (la_device_of(x->device) != LA_CUDA) return 0;
    if (c->bound && refuse_other_streams(c, name, x, object)) return -1;
    if (name == LA_Q && x->library != LA_CUPY) c->p.stream = x->stream;
    if (!x->has_stream) c->stream_unknown = true;
    if (!x->has_stream || x->stream == c->p.stream) return 0;
    for (int i = 0; i < c->others; i++)
        if (c->other[i] == x->stream) return 0;
    c->other[c->others++] = x->stream;
#ifdef LA_WITH_CUDA
    return wait_stream(c, c->p.stream, x->stream);
#else
    return 0;
#endif
}

static bool view_fits(const la_array *x, bool rows)
{
    if ((uintptr_t)x->data % (unsigned)la_size_of(x->dtype)) return false;
    return is_empty(x) || !rows || x->ndim == 0 || x->shape[x->ndim - 1] <= 1 ||
           x->stride[x->ndim - 1] == 1;
}

static int take_foreign(la_call *c, la_name name, PyObject *object, bool in_place);

/* A contiguous array of its own library in a device array's place. */
static int take_contiguous(la_call *c, la_name name, PyObject *object)
{
    PyObject *module = PyImport_ImportModule("linattn.arrays");
    PyObject *copy = module ? PyObject_CallMethod(module, "_contiguous", "O", object) : NULL;
    Py_XDECREF(module);
    if (!copy) return la_name_error(la_array_name(&c->p, name));
    if (copy == Py_None || copy == object) {
        const la_array *x = &c->p.array[name];
        Py_DECREF(copy);
        return la_refuse_strides(la_array_name(&c->p, name),
                                 "an aligned array whose innermost axis is contiguous", x->ndim,
                                 x->stride, la_size_of(x->dtype));
    }
    PyObject *const like = c->like;
    const la_span span = c->span[name];
    int failed = take_foreign(c, name, copy, false); /* holds a reference of its own */
    Py_DECREF(copy);
    c->like = like;
    c->span[name] = span;
    c->lent[name] = false; /* the copy is ours */
    return failed;
}

static int take_view(la_call *c, la_name name, PyObject *object, la_view *x, bool in_place)
{
    const char *label = la_array_name(&c->p, name);
    la_array *a = &c->p.array[name];
    const la_device device = la_device_of(x->device);
    if (name == LA_Q) {
        c->like = object;
        c->library = x->library;
        c->table = x->table;
        if (x->library == LA_EXPORTED &&
            device == LA_CPU) { /* NumPy's, if its library takes none */
            void *imports;
            if (la_ask_helper("_imports", object, 0, &imports)) return la_name_error(label);
            if (!imports) c->library = LA_NUMPY;
        }
    }
    if (settle_stream(c, name, x, object)) return -1;
    if (in_place && x->read_only) return la_refuse_read_only(label);
    if ((in_place || c->bound) && x->copied) {
        PyErr_Format(PyExc_ValueError, "%s: expected the array's own memory, got a copy of it",
                     label);
        return -1;
    }
    if (la_dtype_in(x->dtype) == LA_DTYPES) return la_refuse_dtype(label, name, x->dtype);
    if (x->layout.ndim > LA_MAX_DIMS) return refuse_dims(c, name, x->layout.ndim, x->layout.shape);
    a->given = true;
    a->on_host = device == LA_CPU && c->p.device == LA_CUDA;
    a->data = x->data;
    a->dtype = la_dtype_in(x->dtype);
    a->ndim = x->layout.ndim;
    memcpy(a->shape, x->layout.shape, sizeof *a->shape * (size_t)a->ndim);
    memcpy(a->stride, x->layout.stride, sizeof *a->stride * (size_t)a->ndim);
    c->object[name] = x->owner;
    x->owner = NULL;
    c->span[name] = a->on_host ? (la_span){NULL, NULL} : span_of(a);
    c->lent[name] = x->table && !a->on_host;
    c->lender[name] = x->table;

    const int64_t size = la_size_of(a->dtype);
    if (!a->data && !is_empty(a)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: expected an array with memory of its own, got %R without", label,
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    const bool fits = view_fits(a, needs_rows(c, name, in_place));
    if (in_place && !fits)
        return la_refuse_strides(label, expected_memory(c, true), a->ndim, a->stride, size);
    if (in_place && overlaps_itself(a))
        return la_refuse_strides(label, "every element in a place of its own", a->ndim, a->stride,
                                 size);
    if (!fits && c->p.pass == LA_STEP)
        return la_refuse_strides(label, expected_memory(c, false), a->ndim, a->stride, size);
    const bool copy_it = device == LA_CPU && (name == LA_CU || (a->on_host && !c->bound));
    if (fits && !copy_it) return 0;
    c->lent[name] = false;
    if (device == LA_CUDA) {
        la_release_owner(c->object[name]);
        c->object[name] = NULL;
        return take_contiguous(c, name, object);
    }
    PyObject *seen = la_numpy_over(a);
    c->given[name] = seen;
    PyObject *copy = seen ? PyArray_FromArray((PyArrayObject *)seen, NULL,
                                              NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY)
                          : NULL;
    if (!copy) return -1;
    const la_dtype dtype = a->dtype; /* NumPy may have seen the bits only */
    la_release_owner(c->object[name]);
    la_describe(c, name, copy);
    a->dtype = dtype;
    return 0;
}

static int take_foreign(la_call *c, la_name name, PyObject *object, bool in_place)
{
    la_view x;
    int found = la_view_of(c, name, object, &x);
    if (found == 0) return la_refuse_object(la_array_name(&c->p, name), object);
    int failed = found < 0 || take_view(c, name, object, &x, in_place);
    la_release_owner(x.owner);
    return failed ? -1 : 0;
}

static int take(la_call *c, la_name name, PyObject *object, bool in_place)
{
    if (object == Py_None) return 0;
    if (PyArray_Check(object) && !PyArray_CheckExact(object)) c->ran_python = true;
    if (!c->outline &&
        (PyArray_CheckExact(object) || (PyArray_Check(object) && !is_masked(object)))) {
        Py_INCREF(object);
        return take_numpy(c, name, object, in_place);
    }
    if (may_be_number(c, name, object)) return take_number(c, name, object);
    if (c->outline) return la_take_outline(c, name, object);
    if (PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected an array without a mask, got %R",
                     la_array_name(&c->p, name), (PyObject *)Py_TYPE(object));
        return -1;
    }
    return take_foreign(c, name, object, in_place);
}

int la_take(la_call *c, la_name name, PyObject *object)
{
    const bool in_place = la_in(la_written[c->p.pass], name);
    if (name == LA_O && object != Py_None) c->out = object;
    return take(c, name, object, in_place);
}

int la_take_state(la_call *c, la_name S, PyObject *object)
{
    if (object == Py_None || !la_has_pair(&c->p)) return la_take(c, S, object);
    const char *pair = c->p.decay == LA_PAIR ? "(M, Y)" : "(S, z) of a normalised op";
    const la_array_row *row = &la_array_rows[S];
    const char *label = c->p.pass == LA_STEP && row->role == LA_STATE ? "state" : row->label[0];
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected the pair %s, got %R", label, pair,
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    c->ran_python = c->ran_python || !(PyTuple_CheckExact(object) || PyList_CheckExact(object));
    if (PySequence_Size(object) != 2) {
        PyErr_Format(PyExc_ValueError, "%s: expected the pair %.6s, got %zd items", label, pair,
                     PySequence_Size(object));
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        const la_name name = i ? la_second_of(&c->p, S) : S;
        PyObject *part = PySequence_GetItem(object, i);
        if (!part) return -1;
        if (part == Py_None)
            PyErr_Format(PyExc_TypeError, "%s: expected an array, got None",
                         la_array_name(&c->p, name));
        int failed = part == Py_None || la_take(c, name, part);
        Py_DECREF(part);
        if (failed) return -1;
    }
    return 0;
}

/* ---- streams ---- */

int la_current_stream(la_call *c)
{
    if (c->p.device == LA_CPU) return 0;
    const int failed =
        c->library == LA_CUPY
            ? la_ask_helper("_cupy_stream", c->object[LA_Q], c->p.ordinal, &c->p.stream)
            : c->table->current_stream(DL_CUDA, c->p.ordinal, &c->p.stream);
    return failed ? la_name_error("q") : 0;
}

int la_settle_streams(la_call *c)
{
#ifdef LA_WITH_CUDA
    for (int i = 0; i < c->others; i++)
        if (wait_stream(c, c->other[i], c->p.stream)) return -1;
    if (c->stream_unknown) return la_raise(la_cuda_synchronize(&c->p), c->p.message);
#else
    (void)c;
#endif
    return 0;
}

int la_arrays_init(void)
{
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    return la_places_init() || la_views_init() || la_memory_init() ? -1 : 0;
}
