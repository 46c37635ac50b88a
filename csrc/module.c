/* The only file with Python.h: NumPy arrays in, a status out as an exception. It holds references,
 * reads options, allocates outputs; what shapes are right is check.c's business.
 *
 * Arguments are positional (METH_FASTCALL): the keywords live in linattn/ops.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_1_25_API_VERSION
#include <numpy/arrayobject.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "linattn.h"

/* ---- one call: the problem, and the references it rests on ---- */

typedef struct {
    la_problem p;
    PyObject *object[LA_ARRAYS]; /* the array (or our copy of it) behind p.array; owned */
    PyObject *given[LA_ARRAYS];  /* the array as the user gave it; owned by the user's call */
} call;

static void call_release(call *c)
{
    for (int i = 0; i < LA_ARRAYS; i++) Py_CLEAR(c->object[i]);
}

static PyObject *exception_of(la_status status)
{
    return status == LA_TYPE_ERROR    ? PyExc_TypeError
           : status == LA_VALUE_ERROR ? PyExc_ValueError
                                      : PyExc_MemoryError;
}

static int raise_status(const call *c, la_status status)
{
    if (status == LA_OK) return 0;
    PyErr_SetString(exception_of(status), c->p.message);
    return -1;
}

/* ---- dtypes ---- */

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

/* ---- arrays in ---- */

/* The kernels walk these rows with unit stride; the rest may lie anywhere. */
static bool has_rows(const la_problem *p, la_name name)
{
    if (name == LA_G || name == LA_DG) return p->decay == LA_KEY;
    return name != LA_BETA && name != LA_DBETA && name != LA_CU;
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

/* Fill p.array[name] from an array that strides_fit. Takes over the reference. */
static void describe(call *c, la_name name, PyObject *object)
{
    PyArrayObject *x = (PyArrayObject *)object;
    la_array *a = &c->p.array[name];
    a->given = true;
    a->data = PyArray_BYTES(x);
    a->dtype = dtype_of(x);
    a->ndim = PyArray_NDIM(x);
    for (int i = 0; i < a->ndim; i++) {
        a->shape[i] = PyArray_DIM(x, i);
        a->stride[i] = PyArray_STRIDE(x, i) / PyArray_ITEMSIZE(x);
    }
    Py_XDECREF(c->object[name]);
    c->object[name] = object;
}

/* A gate or beta of one head and one token is a number. */
static bool may_be_number(const la_problem *p, la_name name, PyObject *object)
{
    return p->face == LA_STEP && (name == LA_G || name == LA_BETA) &&
           (PyFloat_Check(object) || PyArray_CheckScalar(object) ||
            (PyLong_Check(object) && !PyBool_Check(object)));
}

/* ValueError: label: expected ..., got strides ... (in bytes, as NumPy gives them). */
static void refuse_strides(const char *label, const char *expected, PyObject *x)
{
    PyObject *got = PyObject_GetAttrString(x, "strides");
    if (got)
        PyErr_Format(PyExc_ValueError, "%s: expected %s, got strides %R", label, expected, got);
    Py_XDECREF(got);
}

/* Subclasses (memmap, matrix) are fine; a masked array's mask would be ignored. */
static bool is_masked(PyObject *object)
{
    return !PyArray_CheckExact(object) && PyObject_HasAttrString(object, "mask") &&
           PyObject_HasAttrString(object, "filled");
}

static int take(call *c, la_name name, PyObject *object)
{
    const char *label = la_array_name(&c->p, name);
    if (object == Py_None) return 0;
    if (!PyArray_Check(object) || is_masked(object)) {
        if (!may_be_number(&c->p, name, object)) {
            PyErr_Format(PyExc_TypeError, "%s: expected a NumPy array, got %R", label,
                         (PyObject *)Py_TYPE(object));
            return -1;
        }
        object = PyArray_FromAny(object, NULL, 0, 0, 0, NULL);
        if (!object) return -1;
    } else {
        Py_INCREF(object);
    }
    PyArrayObject *x = (PyArrayObject *)object;
    if (dtype_of(x) == LA_DTYPES) {
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got %S", label,
                     name == LA_CU ? "int32 or int64" : "float64, float32, float16 or bfloat16",
                     (PyObject *)PyArray_DESCR(x));
        Py_DECREF(object);
        return -1;
    }
    if (PyArray_NDIM(x) > LA_MAX_DIMS) {
        int64_t shape[64]; /* NumPy's own limit */
        for (int i = 0; i < PyArray_NDIM(x); i++) shape[i] = PyArray_DIM(x, i);
        raise_status(c, la_refuse_dims(&c->p, name, PyArray_NDIM(x), shape));
        Py_DECREF(object);
        return -1;
    }
    bool copy_it = name == LA_CU; /* read again without the GIL: nobody may change it meanwhile */
    if (!strides_fit(x, has_rows(&c->p, name))) {
        if (c->p.face == LA_STEP) {
            refuse_strides(
                label,
                "an aligned array in native byte order whose innermost axis is contiguous (a "
                "step makes no hidden copies)",
                object);
            Py_DECREF(object);
            return -1;
        }
        copy_it = true;
    }
    c->given[name] = object;
    if (copy_it) {
        PyArray_Descr *native = PyArray_DescrNewByteorder(PyArray_DESCR(x), NPY_NATIVE);
        PyObject *copy =
            native ? PyArray_FromArray(x, native, NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY) : NULL;
        Py_DECREF(object);
        if (!copy) return -1;
        object = copy;
    }
    describe(c, name, object);
    return 0;
}

/* Do two elements of x lie in one place? Sorted by stride, each axis must step over all that the
 * smaller ones reach. */
static bool overlaps_itself(PyArrayObject *x)
{
    npy_intp reach = PyArray_ITEMSIZE(x), last = 0;
    if (PyArray_SIZE(x) < 2) return false;
    for (int done = 0; done < PyArray_NDIM(x); done++) {
        int next = -1;
        npy_intp step = 0;
        for (int i = 0; i < PyArray_NDIM(x); i++) {
            npy_intp stride =
                PyArray_STRIDE(x, i) < 0 ? -PyArray_STRIDE(x, i) : PyArray_STRIDE(x, i);
            if (PyArray_DIM(x, i) > 1 && stride > last && (next < 0 || stride < step)) {
                next = i;
                step = stride;
            }
            /* two axes of one stride, or an axis that does not move */
            if (done == 0 && PyArray_DIM(x, i) > 1) {
                if (stride == 0) return true;
                for (int j = 0; j < i; j++)
                    if (PyArray_DIM(x, j) > 1 &&
                        (PyArray_STRIDE(x, j) == stride || PyArray_STRIDE(x, j) == -stride))
                        return true;
            }
        }
        if (next < 0) break;
        if (step < reach) return true;
        reach += step * (PyArray_DIM(x, next) - 1);
        last = step;
    }
    return false;
}

/* An array that will be written where it lies. */
static int take_in_place(call *c, la_name name, PyObject *object)
{
    const char *label = la_array_name(&c->p, name);
    if (PyArray_Check(object)) {
        if (!PyArray_ISWRITEABLE((PyArrayObject *)object)) {
            PyErr_Format(PyExc_ValueError, "%s: expected a writable array, got a read-only one",
                         label);
            return -1;
        }
        if (dtype_of((PyArrayObject *)object) != LA_DTYPES &&
            !strides_fit((PyArrayObject *)object, true)) {
            refuse_strides(
                label,
                "an aligned array in native byte order whose innermost axis is contiguous (it "
                "is written in place)",
                object);
            return -1;
        }
        if (overlaps_itself((PyArrayObject *)object)) {
            refuse_strides(label, "every element in a place of its own", object);
            return -1;
        }
    }
    return take(c, name, object);
}

/* A state: S, or the pair (S, z) of an op that is normalised. */
static int take_state(call *c, la_name S, la_name z, PyObject *object, bool in_place)
{
    int (*take_one)(call *, la_name, PyObject *) = in_place ? take_in_place : take;
    if (object == Py_None || c->p.normaliser == LA_UNNORMALISED) return take_one(c, S, object);
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: expected the pair (S, z) of a normalised op, got %R",
                     c->p.face == LA_STEP ? "state"
                     : S == LA_S0         ? "initial_state"
                                          : "d_final_state",
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    if (PySequence_Size(object) != 2) {
        PyErr_Format(PyExc_ValueError, "%s: expected the pair (S, z), got %zd items",
                     c->p.face == LA_STEP ? "state"
                     : S == LA_S0         ? "initial_state"
                                          : "d_final_state",
                     PySequence_Size(object));
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        PyObject *part = PySequence_GetItem(object, i);
        if (!part) return -1;
        int failed = part == Py_None
                         ? (PyErr_Format(PyExc_TypeError, "%s: expected a NumPy array, got None",
                                         la_array_name(&c->p, i ? z : S)),
                            -1)
                         : take_one(c, i ? z : S, part);
        Py_DECREF(part);
        if (failed) return -1;
    }
    return 0;
}

/* ---- options ---- */

static int as_flag(PyObject *object, const char *label, bool *flag)
{
    if (!PyBool_Check(object) && !PyArray_IsScalar(object, Bool)) {
        PyErr_Format(PyExc_TypeError, "%s: expected True or False, got %R", label,
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    int value = PyObject_IsTrue(object);
    *flag = value > 0;
    return value < 0 ? -1 : 0;
}

static int as_number(PyObject *object, const char *label, double *number)
{
    const bool flag = PyBool_Check(object) || PyArray_IsScalar(object, Bool);
    *number = flag ? -1 : PyFloat_AsDouble(object);
    if (!flag && !(*number == -1 && PyErr_Occurred())) return 0;
    if (!flag && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Format(PyExc_ValueError, "%s: expected a finite number, got %R", label, object);
        return -1;
    }
    PyErr_Format(PyExc_TypeError, "%s: expected a number, got %R", label,
                 (PyObject *)Py_TYPE(object));
    return -1;
}

static int take_scale(call *c, PyObject *object)
{
    c->p.has_scale = object != Py_None;
    return c->p.has_scale ? as_number(object, "scale", &c->p.scale) : 0;
}

static int take_mode(call *c, PyObject *object)
{
    static const char *const names[] = {"chunk", "recurrent", "parallel"};
    if (PyUnicode_Check(object))
        for (int i = 0; i < 3; i++)
            if (!PyUnicode_CompareWithASCIIString(object, names[i])) {
                c->p.mode = (la_mode)i;
                return 0;
            }
    PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                 "mode: expected 'chunk', 'recurrent' or 'parallel', got %R", object);
    return -1;
}

static int take_chunk_size(call *c, PyObject *object)
{
    if (object == Py_None) return 0;
    PyObject *index = PyBool_Check(object) ? NULL : PyNumber_Index(object);
    if (!index) {
        PyErr_Format(PyExc_TypeError, "chunk_size: expected an int or None, got %R",
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    c->p.has_chunk = true;
    c->p.chunk = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (c->p.chunk == -1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "chunk_size: expected 1 to 2^63-1, got %R", object);
        return -1;
    }
    return 0;
}

/* (map_q, eps_q, map_k, eps_k, normaliser, eps, causal), made by linattn/ops.py. */
static int take_features(call *c, PyObject *object)
{
    int map_q, map_k, normaliser, causal;
    if (object == Py_None) return 0;
    if (!PyArg_ParseTuple(object, "idididp", &map_q, &c->p.map_eps[0], &map_k, &c->p.map_eps[1],
                          &normaliser, &c->p.eps, &causal))
        return -1;
    c->p.map[0] = (la_map)map_q;
    c->p.map[1] = (la_map)map_k;
    c->p.normaliser = (la_normaliser)normaliser;
    c->p.causal = causal;
    return 0;
}

/* g or alpha, never both: one array of the problem. A gate per head is a decay (gamma, which comes
 * as alpha) or a slope. */
static int take_gate(call *c, PyObject *g, PyObject *alpha)
{
    if (g != Py_None && alpha != Py_None) {
        PyErr_SetString(PyExc_ValueError,
                        "g, alpha: expected one of the two (log decay or decay), got both");
        return -1;
    }
    c->p.gate = alpha != Py_None ? LA_DECAY : c->p.decay == LA_HEAD ? LA_SLOPE : LA_LOG;
    return take(c, LA_G, alpha != Py_None ? alpha : g);
}

static int call_begin(call *c, la_face face, PyObject *op)
{
    memset(c, 0, sizeof *c);
    long number = PyLong_AsLong(op);
    if (number < 0 || number >= LA_OPS) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "op: no number %ld", number);
        return -1;
    }
    la_problem_init(&c->p, (la_op)number, face);
    return 0;
}

static int expect_arguments(const char *function, Py_ssize_t got, Py_ssize_t want)
{
    if (got == want) return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", function, want, got);
    return -1;
}

/* ---- outputs ---- */

/* A new array for an output, in the user's dimensions. */
static int allocate(call *c, la_name name, PyArray_Descr *descr)
{
    int64_t shape[LA_MAX_DIMS];
    npy_intp dims[LA_MAX_DIMS];
    int ndim = la_shape_of(&c->p, name, shape);
    for (int i = 0; i < ndim; i++) dims[i] = (npy_intp)shape[i];
    Py_INCREF((PyObject *)descr); /* the new array's own */
    PyObject *x = PyArray_NewFromDescr(&PyArray_Type, descr, ndim, dims, NULL, NULL, 0, NULL);
    if (!x) return -1;
    describe(c, name, x);
    return raise_status(c, la_check_output(&c->p, name));
}

static int allocate_like(call *c, la_name name, la_name like)
{
    return allocate(c, name, PyArray_DESCR((PyArrayObject *)c->object[like]));
}

static int allocate_real(call *c, la_name name)
{
    PyArray_Descr *descr = PyArray_DescrFromType(c->p.real == LA_F64 ? NPY_DOUBLE : NPY_FLOAT);
    int failed = allocate(c, name, descr);
    Py_DECREF((PyObject *)descr);
    return failed;
}

/* The array a call gives back; None where there is none. */
static PyObject *result(const call *c, la_name name)
{
    PyObject *x = c->object[name] ? c->object[name] : Py_None;
    Py_INCREF(x);
    return x;
}

static PyObject *state_result(const call *c, la_name S, la_name z)
{
    if (!c->object[z]) return result(c, S);
    return PyTuple_Pack(2, c->object[S], c->object[z]);
}

/* ---- what may not share memory ---- */

static void extent(PyArrayObject *x, char **low, char **high)
{
    const int ndim = PyArray_NDIM(x);
    const npy_intp *shape = PyArray_DIMS(x), *stride = PyArray_STRIDES(x);
    *low = PyArray_BYTES(x);
    *high = *low + PyArray_ITEMSIZE(x);
    for (int i = 0; i < ndim; i++) {
        npy_intp reach = (shape[i] - 1) * stride[i];
        if (reach < 0)
            *low += reach;
        else
            *high += reach;
    }
    for (int i = 0; i < ndim; i++)
        if (!shape[i]) *low = *high = PyArray_BYTES(x);
}

/* Extents first; only where they meet is NumPy asked for the exact answer. */
static int refuse_overlap(const call *c, la_name written, la_name other)
{
    PyObject *x = c->given[written], *y = c->given[other];
    char *low, *high, *other_low, *other_high;
    if (!x || !y) return 0;
    extent((PyArrayObject *)x, &low, &high);
    extent((PyArrayObject *)y, &other_low, &other_high);
    if (high <= other_low || other_high <= low) return 0;
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *shared = numpy ? PyObject_CallMethod(numpy, "shares_memory", "OO", x, y) : NULL;
    Py_XDECREF(numpy);
    if (!shared) return -1;
    int overlap = PyObject_IsTrue(shared);
    Py_DECREF(shared);
    if (overlap > 0)
        PyErr_Format(PyExc_ValueError, "%s: expected memory of its own, got memory shared with %s",
                     la_array_name(&c->p, written), la_array_name(&c->p, other));
    return overlap ? -1 : 0;
}

static int refuse_overlaps(const call *c)
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

/* Once per call site, by the warning filters' own rule: the frame above the op's Python function. */
static int warn_of_growth(const call *c)
{
    if (!la_gate_above_one(&c->p)) return 0;
    const char *name = la_array_name(&c->p, LA_G);
    const char *text = c->p.gate == LA_DECAY   ? "expected decays in [0, 1]"
                       : c->p.gate == LA_SLOPE ? "expected slopes >= 0"
                                               : "expected the log decay, g <= 0";
    return PyErr_WarnFormat(PyExc_RuntimeWarning, 2,
                            "%s: %s, got values outside; the state may grow without bound", name,
                            text);
}

static int run(call *c, la_status (*entry)(la_problem *))
{
    la_status status;
    if (warn_of_growth(c)) return -1;
    Py_BEGIN_ALLOW_THREADS
    status = entry(&c->p);
    Py_END_ALLOW_THREADS
    return raise_status(c, status);
}

/* ---- the three faces ---- */

/* forward(op, q, k, v, g, alpha, beta, initial_state, cu_seqlens, out, output_final_state, scale,
 * mode, chunk_size, qk_l2norm, state_v_first, features) -> (o, final_state) */
static PyObject *py_forward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    PyObject *answer = NULL;
    if (expect_arguments("forward", nargs, 17) || call_begin(&c, LA_FORWARD, args[0])) return NULL;
    if (take_features(&c, args[16]) || take(&c, LA_Q, args[1]) || take(&c, LA_K, args[2]) ||
        take(&c, LA_V, args[3]) || take_gate(&c, args[4], args[5]) || take(&c, LA_BETA, args[6]) ||
        take_state(&c, LA_S0, LA_Z0, args[7], false) || take(&c, LA_CU, args[8]) ||
        take_in_place(&c, LA_O, args[9]) ||
        as_flag(args[10], "output_final_state", &c.p.want_final) || take_scale(&c, args[11]) ||
        take_mode(&c, args[12]) || take_chunk_size(&c, args[13]) ||
        as_flag(args[14], "qk_l2norm", &c.p.qk_l2norm) ||
        as_flag(args[15], "state_v_first", &c.p.state_v_first) || raise_status(&c, la_check(&c.p)))
        goto done;
    if (c.object[LA_O]) {
        if (raise_status(&c, la_check_output(&c.p, LA_O)) || refuse_overlaps(&c)) goto done;
    } else if (allocate_like(&c, LA_O, LA_V)) {
        goto done;
    }
    if (c.p.want_final &&
        (allocate_real(&c, LA_ST) || (la_has(&c.p, LA_ZT) && allocate_real(&c, LA_ZT))))
        goto done;
    if (run(&c, la_forward)) goto done;
    PyObject *o = result(&c, LA_O), *state = state_result(&c, LA_ST, LA_ZT);
    if (state) answer = PyTuple_Pack(2, o, state);
    Py_DECREF(o);
    Py_XDECREF(state);
done:
    call_release(&c);
    return answer;
}

/* step(op, q, k, v, g, alpha, beta, state, out, scale, qk_l2norm, state_v_first, features) -> o */
static PyObject *py_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    PyObject *answer = NULL;
    if (expect_arguments("step", nargs, 13) || call_begin(&c, LA_STEP, args[0])) return NULL;
    if (take_features(&c, args[12]) || take(&c, LA_Q, args[1]) || take(&c, LA_K, args[2]) ||
        take(&c, LA_V, args[3]) || take_gate(&c, args[4], args[5]) || take(&c, LA_BETA, args[6]) ||
        take_state(&c, LA_S0, LA_Z0, args[7], true) || take_in_place(&c, LA_O, args[8]) ||
        take_scale(&c, args[9]) || as_flag(args[10], "qk_l2norm", &c.p.qk_l2norm) ||
        as_flag(args[11], "state_v_first", &c.p.state_v_first) || raise_status(&c, la_check(&c.p)))
        goto done;
    if (c.object[LA_O]) {
        if (raise_status(&c, la_check_output(&c.p, LA_O))) goto done;
    } else if (allocate_like(&c, LA_O, LA_V)) {
        goto done;
    }
    if (refuse_overlaps(&c) || run(&c, la_step)) goto done;
    answer = result(&c, LA_O);
done:
    call_release(&c);
    return answer;
}

/* backward(op, do, q, k, v, g, alpha, beta, initial_state, d_final_state, cu_seqlens, scale, mode,
 * chunk_size, qk_l2norm, state_v_first, features) -> (dq, dk, dv, dg, dbeta, d_initial_state) */
static PyObject *py_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    call c;
    PyObject *answer = NULL;
    if (expect_arguments("backward", nargs, 17) || call_begin(&c, LA_BACKWARD, args[0]))
        return NULL;
    if (take_features(&c, args[16]) || take(&c, LA_DO, args[1]) || take(&c, LA_Q, args[2]) ||
        take(&c, LA_K, args[3]) || take(&c, LA_V, args[4]) || take_gate(&c, args[5], args[6]) ||
        take(&c, LA_BETA, args[7]) || take_state(&c, LA_S0, LA_Z0, args[8], false) ||
        take_state(&c, LA_DST, LA_DZT, args[9], false) || take(&c, LA_CU, args[10]) ||
        take_scale(&c, args[11]) || take_mode(&c, args[12]) || take_chunk_size(&c, args[13]) ||
        as_flag(args[14], "qk_l2norm", &c.p.qk_l2norm) ||
        as_flag(args[15], "state_v_first", &c.p.state_v_first) || raise_status(&c, la_check(&c.p)))
        goto done;
    if (allocate_like(&c, LA_DQ, LA_Q) || allocate_like(&c, LA_DK, LA_K) ||
        allocate_like(&c, LA_DV, LA_V) || (la_has(&c.p, LA_DG) && allocate_like(&c, LA_DG, LA_G)) ||
        (la_has(&c.p, LA_DBETA) && allocate_like(&c, LA_DBETA, LA_BETA)) ||
        (c.object[LA_S0] && allocate_real(&c, LA_DS0)) ||
        (c.object[LA_Z0] && allocate_real(&c, LA_DZ0)))
        goto done;
    if (run(&c, la_backward)) goto done;
    PyObject *state = state_result(&c, LA_DS0, LA_DZ0);
    PyObject *dg = result(&c, LA_DG), *dbeta = result(&c, LA_DBETA);
    if (state)
        answer =
            PyTuple_Pack(6, c.object[LA_DQ], c.object[LA_DK], c.object[LA_DV], dg, dbeta, state);
    Py_DECREF(dg);
    Py_DECREF(dbeta);
    Py_XDECREF(state);
done:
    call_release(&c);
    return answer;
}

/* ---- threads, instruction sets, the build ---- */

static PyObject *py_set_num_threads(PyObject *self, PyObject *object)
{
    (void)self;
    PyObject *index = PyBool_Check(object) ? NULL : PyNumber_Index(object);
    if (!index) {
        PyErr_Format(PyExc_TypeError, "n: expected an int, got %R", (PyObject *)Py_TYPE(object));
        return NULL;
    }
    long n = PyLong_AsLong(index);
    Py_DECREF(index);
    if (PyErr_Occurred() || n < 1 || n > 256) {
        PyErr_Format(PyExc_ValueError, "n: expected 1 to 256 threads, got %R", object);
        return NULL;
    }
    la_set_num_threads((int)n);
    Py_RETURN_NONE;
}

static PyObject *py_get_num_threads(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    return PyLong_FromLong(la_get_num_threads());
}

/* -> (the one in use, {name: can it run here}) */
static PyObject *py_isa(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    PyObject *all = PyDict_New();
    for (int i = 0; all && i < la_isa_count(); i++) {
        bool here;
        const char *name = la_isa_name(i, &here);
        if (PyDict_SetItemString(all, name, here ? Py_True : Py_False)) Py_CLEAR(all);
    }
    if (!all) return NULL;
    PyObject *answer = Py_BuildValue("(sO)", la_isa(), all);
    Py_DECREF(all);
    return answer;
}

static PyObject *py_set_isa(PyObject *self, PyObject *object)
{
    (void)self;
    PyObject *bytes = PyUnicode_Check(object) ? PyUnicode_AsUTF8String(object) : NULL;
    if (!bytes) {
        PyErr_Format(PyExc_TypeError, "isa: expected a str, got %R", (PyObject *)Py_TYPE(object));
        return NULL;
    }
    bool done = la_isa_choose(PyBytes_AsString(bytes));
    Py_DECREF(bytes);
    if (!done) {
        PyErr_Format(PyExc_ValueError, "isa: %R is not compiled in or cannot run here", object);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *py_fail_allocation(PyObject *self, PyObject *object)
{
    (void)self;
    long n = PyLong_AsLong(object);
    if (n == -1 && PyErr_Occurred()) return NULL;
    la_fail_allocation((int)n);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"forward", (PyCFunction)(void (*)(void))py_forward, METH_FASTCALL, "One forward pass."},
    {"step", (PyCFunction)(void (*)(void))py_step, METH_FASTCALL, "One token, state in place."},
    {"backward", (PyCFunction)(void (*)(void))py_backward, METH_FASTCALL, "One backward pass."},
    {"set_num_threads", py_set_num_threads, METH_O, "Threads that a call may use."},
    {"get_num_threads", py_get_num_threads, METH_NOARGS, "Threads that a call may use."},
    {"isa", py_isa, METH_NOARGS, "The instruction set in use, and those compiled in."},
    {"set_isa", py_set_isa, METH_O, "Use this instruction set."},
    {"_fail_allocation", py_fail_allocation, METH_O,
     "Tests: let the n-th scratch allocation from now fail."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    if (PyArray_ImportNumPyAPI() < 0) return -1;
    const char *isa = getenv("LINATTN_ISA");
    if (isa && *isa && !la_isa_choose(isa)) {
        char names[64] = "";
        for (int i = 0; i < la_isa_count(); i++) {
            bool here;
            const char *name = la_isa_name(i, &here);
            size_t used = strlen(names);
            if (here) snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", name);
        }
        PyErr_Format(PyExc_ImportError, "LINATTN_ISA: expected one that runs here (%s), got %s",
                     names, isa);
        return -1;
    }
    PyObject *names = PyTuple_New(LA_OPS);
    if (!names) return -1;
    for (int i = 0; i < LA_OPS; i++) {
        PyObject *name = PyUnicode_FromString(la_op_names[i]);
        if (!name || PyTuple_SetItem(names, i, name)) {
            Py_DECREF(names);
            return -1;
        }
    }
    int failed = PyModule_AddObjectRef(module, "OPS", names);
    Py_DECREF(names);
#if defined(__clang__)
    failed = failed || PyModule_AddStringConstant(module, "COMPILER", "clang " __clang_version__);
#else
    failed = failed || PyModule_AddStringConstant(module, "COMPILER", "gcc " __VERSION__);
#endif
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)module_exec},
#if defined(Py_GIL_DISABLED)
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "linattn._linattn",
    .m_doc = "The C core of linattn; linattn/ops.py is its face.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__linattn(void) { return PyModuleDef_Init(&definition); }
