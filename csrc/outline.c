/* Calls whose arrays have no memory: their dtypes and shapes are read and checked, and the shapes of
 * what the call would make are the answer. */
#include "outline.h"

#include "options.h"

#include <string.h>

/* ---- in ---- */

/* A dtype by its name, which libraries agree on. */
static int read_dtype(const char *label, la_name name, PyObject *object, la_dtype *dtype)
{
    PyObject *of = PyObject_GetAttrString(object, "dtype");
    PyObject *word = of ? PyObject_GetAttrString(of, "name") : NULL;
    Py_XDECREF(of);
    if (!word || !PyUnicode_Check(word)) {
        Py_XDECREF(word);
        PyErr_Clear();
        return la_refuse_object(label, object);
    }
    int i = 0;
    while (i < LA_DTYPES && PyUnicode_CompareWithASCIIString(word, la_dtype_names[i])) i++;
    if (i == LA_DTYPES)
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got %U", label, la_expected_dtypes(name),
                     word);
    Py_DECREF(word);
    *dtype = (la_dtype)i;
    return i == LA_DTYPES ? -1 : 0;
}

int la_take_outline(la_call *c, la_name name, PyObject *object)
{
    const char *label = la_array_name(&c->p, name);
    la_array *x = &c->p.array[name];
    int64_t shape[LA_LAYOUT_DIMS];
    PyObject *sizes = PyObject_GetAttrString(object, "shape");
    const Py_ssize_t ndim = sizes && PyTuple_Check(sizes) ? PyTuple_Size(sizes) : -1;
    for (Py_ssize_t i = 0; i < ndim && i < LA_LAYOUT_DIMS && !PyErr_Occurred(); i++)
        shape[i] = PyLong_AsLongLong(PyTuple_GetItem(sizes, i));
    Py_XDECREF(sizes);
    if (ndim < 0 || PyErr_Occurred()) {
        PyErr_Clear();
        return la_refuse_object(label, object);
    }
    if (read_dtype(label, name, object, &x->dtype)) return -1;
    if (ndim > LA_MAX_DIMS) {
        const int most = ndim < LA_LAYOUT_DIMS ? (int)ndim : LA_LAYOUT_DIMS;
        return la_raise(la_refuse_dims(&c->p, name, most, shape), c->p.message);
    }
    x->given = true;
    x->ndim = (int)ndim;
    memcpy(x->shape, shape, sizeof *shape * (size_t)ndim);
    return 0;
}

/* ---- out ---- */

/* (label, letters, shape, dtype). la_shape_of says the letters where each size is set to its letter. */
static PyObject *row_of(const la_problem *p, la_name name)
{
    la_problem letters = *p;
    int64_t shape[LA_MAX_DIMS], letter[LA_MAX_DIMS];
    char text[LA_MAX_DIMS];
    const bool input = la_in(la_read[p->pass], name);
    la_name_sizes(&letters);
    const int ndim = la_shape_of(p, name, shape);
    la_shape_of(&letters, name, letter);
    for (int i = 0; i < ndim; i++) text[i] = (char)letter[i];
    PyObject *sizes = la_tuple_of(ndim, shape);
    if (!sizes) return NULL;
    const la_dtype dtype = input && !p->array[name].number ? p->array[name].dtype
                           : p->array[name].number         ? p->real
                                                           : la_dtype_of(p, name);
    return Py_BuildValue("(ss#Ns)", la_array_rows[name].label[0], text, (Py_ssize_t)ndim, sizes,
                         la_dtype_names[dtype]);
}

static PyObject *rows_of(const la_problem *p, la_set arrays)
{
    PyObject *rows = PyList_New(0);
    for (la_name name; rows && la_next(&arrays, &name);) {
        const bool input = la_in(la_read[p->pass], name);
        if (input ? !p->array[name].given : !la_is_wanted(p, name)) continue;
        PyObject *row = row_of(p, name);
        if (!row || PyList_Append(rows, row)) Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    PyObject *table = rows ? PyList_AsTuple(rows) : NULL;
    Py_XDECREF(rows);
    return table;
}

PyObject *la_outline(const la_problem *p)
{
    PyObject *given = rows_of(p, la_read[p->pass]);
    PyObject *made = given ? rows_of(p, la_written[p->pass]) : NULL;
    PyObject *both = made ? PyTuple_Pack(2, given, made) : NULL;
    Py_XDECREF(given);
    Py_XDECREF(made);
    return both;
}
