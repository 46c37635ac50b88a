/* How a call that goes wrong says so to Python. */
#include "errors.h"

#include <stdio.h>
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

/* ---- exceptions ---- */

int la_raise(la_status status, const char *message)
{
    if (status == LA_OK) return 0;
    PyErr_SetString(status == LA_TYPE_ERROR     ? PyExc_TypeError
                    : status == LA_VALUE_ERROR  ? PyExc_ValueError
                    : status == LA_MEMORY_ERROR ? PyExc_MemoryError
                                                : PyExc_RuntimeError,
                    message);
    return -1;
}

/* Another exception in the place of the one at hand, which becomes its cause: with `text`, or, if that is
 * NULL, as "label: ..." with the text it has. */
int la_raise_from(PyObject *as, const char *text, const char *label)
{
    PyObject *type, *value, *traceback, *cause = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (text)
        PyErr_SetString(as, text);
    else
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

/* The exception that an array's owner raised, as "label: ..." and with the original as its cause. */
int la_name_error(const char *label)
{
    PyObject *kinds[] = {PyExc_TypeError,     PyExc_ValueError,          PyExc_BufferError,
                         PyExc_MemoryError,   PyExc_NotImplementedError, PyExc_RuntimeError,
                         PyExc_AttributeError};
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the array cannot be exported");
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1; /* an interrupt stays one */
    PyObject *as =
        PyErr_ExceptionMatches(PyExc_OverflowError) ? PyExc_ValueError : PyExc_RuntimeError;
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (PyErr_ExceptionMatches(kinds[i])) {
            as = kinds[i] == PyExc_AttributeError || kinds[i] == PyExc_BufferError ? PyExc_TypeError
                                                                                   : kinds[i];
            break;
        }
    return la_raise_from(as, NULL, label);
}

PyObject *la_tuple_of(int count, const int64_t *numbers)
{
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *one = PyLong_FromLongLong(numbers[i]);
        if (!one || PyTuple_SetItem(tuple, i, one)) Py_CLEAR(tuple);
    }
    return tuple;
}

/* ValueError: label: expected ..., got strides ... (in bytes, as NumPy gives them). */
int la_refuse_strides(const char *label, const char *expected, int ndim, const int64_t *stride,
                      int64_t size)
{
    int64_t bytes[LA_LAYOUT_DIMS];
    for (int i = 0; i < ndim; i++) bytes[i] = stride[i] * size;
    PyObject *got = la_tuple_of(ndim, bytes);
    if (got)
        PyErr_Format(PyExc_ValueError, "%s: expected %s, got strides %R", label, expected, got);
    Py_XDECREF(got);
    return -1;
}

int la_refuse_device(const la_call *c, la_name name, la_device device, int ordinal)
{
    const char *const first = la_array_name(&c->p, LA_Q);
    if (name != LA_Q && !c->p.array[LA_Q].given) { /* then the device of the call is not known */
        PyErr_Format(PyExc_TypeError, "%s: expected an array, got None", first);
        return -1;
    }
    char want[32] = "the CPU", got[32] = "the CPU";
    if (c->p.device == LA_CUDA) snprintf(want, sizeof want, "cuda:%d", c->p.ordinal);
    if (device == LA_CUDA) snprintf(got, sizeof got, "cuda:%d", ordinal);
    PyErr_Format(PyExc_ValueError, "%s: expected an array on %s like %s, got one on %s",
                 la_array_name(&c->p, name), want, first, got);
    return -1;
}

/* A tracer has an abstract value in the place of memory. */
static bool is_traced_by_jax(PyObject *object)
{
    PyObject *module = PyObject_GetAttrString((PyObject *)Py_TYPE(object), "__module__");
    PyObject *text = module && PyUnicode_Check(module) ? PyUnicode_AsUTF8String(module) : NULL;
    const bool of_jax = text && !strncmp(PyBytes_AsString(text), "jax.", 4);
    Py_XDECREF(module);
    Py_XDECREF(text);
    PyErr_Clear();
    return of_jax && PyObject_HasAttrString(object, "aval");
}

/* Names the way to an array, if the object has one. */
int la_refuse_object(const char *label, PyObject *object)
{
    PyObject *const type = (PyObject *)Py_TYPE(object);
    if (PyList_Check(object) || PyTuple_Check(object))
        PyErr_Format(PyExc_TypeError,
                     "%s: expected an array, got %R (np.asarray(%s, float) makes one)", label, type,
                     label);
    else if (is_traced_by_jax(object))
        PyErr_Format(PyExc_TypeError,
                     "%s: expected an array, got one of JAX that is being traced, %R; linattn.jax "
                     "has the ops for jit, grad, vmap and scan",
                     label, type);
    else if (PyObject_HasAttrString(object, "to_numpy")) /* pandas, polars */
        PyErr_Format(PyExc_TypeError, "%s: expected an array, got %R (%s.to_numpy() makes one)",
                     label, type, label);
    else
        PyErr_Format(PyExc_TypeError, "%s: expected an array, got %R", label, type);
    return -1;
}

/* ---- dtypes ---- */

const dl_dtype la_dl_dtypes[LA_DTYPES] = {
    [LA_F64] = {DL_FLOAT, 64, 1},   [LA_F32] = {DL_FLOAT, 32, 1}, [LA_F16] = {DL_FLOAT, 16, 1},
    [LA_BF16] = {DL_BFLOAT, 16, 1}, [LA_I64] = {DL_INT, 64, 1},   [LA_I32] = {DL_INT, 32, 1},
};

const char *la_expected_dtypes(la_name name)
{
    return la_array_rows[name].dtype == LA_DTYPE_INTEGER ? "int32 or int64"
                                                         : "float64, float32, float16 or bfloat16";
}

la_dtype la_dtype_in(dl_dtype dtype)
{
    for (int i = 0; i < LA_DTYPES; i++)
        if (!memcmp(&la_dl_dtypes[i], &dtype, sizeof dtype)) return (la_dtype)i;
    return LA_DTYPES;
}

int la_refuse_dtype(const char *label, la_name name, dl_dtype dtype)
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
    PyErr_Format(PyExc_TypeError, "%s: expected %s, got %s", label, la_expected_dtypes(name), got);
    return -1;
}

int la_as_flag(PyObject *object, const char *label, bool *flag)
{
    if (!PyBool_Check(object) && !PyArray_IsScalar(object, Bool)) {
        PyErr_Format(PyExc_TypeError, "%s: expected True or False, got %R", label,
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    const int value = PyObject_IsTrue(object);
    *flag = value > 0;
    return value < 0 ? -1 : 0;
}
