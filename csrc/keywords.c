/* Arguments by keyword: the tables (arrays.def, options.def) say which a pass has, and no order is
 * kept anywhere. */
#include "keywords.h"

#include "arrays.h"
#include "room.h"

#include <string.h>

/* ---- options ---- */

int la_as_number(PyObject *object, const char *label, double *number)
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

static int take_mode(PyObject *object, la_mode *mode)
{
    if (PyUnicode_Check(object))
        for (int i = 0; i < LA_MODES; i++)
            if (!PyUnicode_CompareWithASCIIString(object, la_mode_names[i])) {
                *mode = (la_mode)i;
                return 0;
            }
    PyErr_Format(PyUnicode_Check(object) ? PyExc_ValueError : PyExc_TypeError,
                 "mode: expected 'chunk', 'recurrent' or 'parallel', got %R", object);
    return -1;
}

int la_as_count(PyObject *object, const char *label, const char *kind, int64_t *to)
{
    PyObject *index = PyBool_Check(object) ? NULL : PyNumber_Index(object);
    if (!index) {
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got %R", label, kind,
                     (PyObject *)Py_TYPE(object));
        return -1;
    }
    *to = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (*to == -1 && PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%s: expected 1 to 2^63-1, got %R", label, object);
        return -1;
    }
    return 0;
}

static int take_features(la_call *c, PyObject *object)
{
    double x[LA_FEATURES];
    if (object == Py_None) return 0;
    const bool tuple = PyTuple_Check(object), list = PyList_Check(object);
    const Py_ssize_t count = tuple ? PyTuple_Size(object) : list ? PyList_Size(object) : -1;
    if (count != LA_FEATURES) {
        PyErr_Format(PyExc_TypeError, "features: expected seven floats, got %R", object);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        x[i] = PyFloat_AsDouble(tuple ? PyTuple_GetItem(object, i) : PyList_GetItem(object, i));
        if (x[i] == -1 && PyErr_Occurred()) return -1;
    }
    if (la_set_features(&c->p, x)) return 0;
    PyErr_Format(PyExc_ValueError, "features: expected maps and a normaliser by number, got %R",
                 object);
    return -1;
}

/* An option of options.def. */
static int take_option(la_call *c, const la_option *option, PyObject *object)
{
    void *const field = (char *)&c->p + option->offset;
    const bool none = object == Py_None;
    switch (option->kind) {
    case LA_OPTION_FLAG: return la_as_flag(object, option->name, field);
    case LA_OPTION_DEFAULT: return none ? 0 : la_as_flag(object, option->name, field);
    case LA_OPTION_NUMBER:
        c->p.has_scale = !none;
        return none ? 0 : la_as_number(object, option->name, field);
    case LA_OPTION_COUNT: return la_as_count(object, option->name, "an int", field);
    case LA_OPTION_MAYBE:
        c->p.has_chunk = !none;
        return none ? 0 : la_as_count(object, option->name, "an int or None", field);
    case LA_OPTION_MODE: return take_mode(object, field);
    case LA_OPTION_FEATURES: return take_features(c, object);
    }
    return 0;
}

/* ---- keywords ---- */

/* warn=False: not of a gate that grows. */
static int take_warn(la_call *c, PyObject *object)
{
    bool warn;
    if (la_as_flag(object, "warn", &warn)) return -1;
    c->quiet = !warn;
    return 0;
}

/* unrecorded=True: linattn/autograd.py has asked whether PyTorch records any of the arrays, and it
 * records none. Without it each array is asked here. */
static int take_unrecorded(la_call *c, PyObject *object)
{
    bool unrecorded;
    if (la_as_flag(object, "unrecorded", &unrecorded)) return -1;
    if (unrecorded) c->gradients = -1;
    return 0;
}

/* Keywords that Python alone has. */
static const struct {
    const char *name;
    int (*take)(la_call *c, PyObject *object);
    int passes;
} remarks[LA_REMARKS] = {
    {"warn", take_warn, LA_IN_FSB},
    {"unrecorded", take_unrecorded, LA_IN_F},
};

typedef struct {
    PyObject *name; /* interned */
    int place;
} keyword;

/* The keywords of each pass, in the order of arrays.def, and how many there are. */
static keyword keywords[3][LA_PLACES];
static int keyword_count[3];
static PyObject *op_names[LA_OPS];

static int add_keyword(int pass, const char *name, int place)
{
    PyObject *const interned = PyUnicode_InternFromString(name);
    keywords[pass][keyword_count[pass]++] = (keyword){interned, place};
    return interned ? 0 : -1;
}

int la_keywords_init(void)
{
    for (int i = 0; i < LA_OPS; i++)
        if (!(op_names[i] = PyUnicode_InternFromString(la_variants[i].name))) return -1;
    for (int pass = 0; pass < 3; pass++) {
        const la_problem p = {.pass = (la_pass)pass};
        la_set arrays = la_given_arrays((la_pass)pass);
        keyword_count[pass] = 0;
        for (la_name name; la_next(&arrays, &name);) {
            if (la_is_second(name)) continue;
            for (int i = 0; name == LA_G && i < LA_GATE_KEYWORDS; i++)
                if (add_keyword(pass, la_gate_keywords[i].name, LA_FIRST_GATE + i)) return -1;
            if (name != LA_G && add_keyword(pass, la_array_name(&p, name), name)) return -1;
        }
        for (int i = 0; i < LA_OPTIONS; i++)
            if (la_options[i].passes >> pass & 1 &&
                add_keyword(pass, la_options[i].name, LA_FIRST_OPTION + i))
                return -1;
        for (int i = 0; i < LA_REMARKS; i++)
            if (remarks[i].passes >> pass & 1 &&
                add_keyword(pass, remarks[i].name, LA_FIRST_REMARK + i))
                return -1;
    }
    return 0;
}

/* Callers mostly name arguments in our order, so each search begins where the last one ended. */
static int place_of(la_pass pass, PyObject *name, int *at)
{
    const keyword *all = keywords[pass];
    const int count = keyword_count[pass];
    for (int tried = 0; tried < count; tried++) {
        const int i = *at;
        *at = i + 1 < count ? i + 1 : 0;
        if (all[i].name == name) return all[i].place;
    }
    for (int i = 0; i < count; i++) /* a name that is not interned */
        if (PyUnicode_Compare(all[i].name, name) == 0) return all[i].place;
    return -1;
}

static la_op op_of(PyObject *name)
{
    for (int i = 0; i < LA_OPS; i++)
        if (op_names[i] == name) return (la_op)i;
    for (int i = 0; PyUnicode_Check(name) && i < LA_OPS; i++)
        if (PyUnicode_Compare(op_names[i], name) == 0) return (la_op)i;
    return LA_OPS;
}

/* (op, q, k, v, ...): the values by their places, NULL for what is not there. q, k and v may come by
 * position, in the order of every op: with more than 14 keywords Python would make a dict of them. */
int la_read_keywords(la_call *c, la_pass pass, PyObject *const *args, Py_ssize_t nargs,
                     PyObject *names, PyObject *values[LA_PLACES])
{
    enum { QKV = 3 };
    const la_op op = nargs ? op_of(args[0]) : LA_OPS;
    if (op == LA_OPS || (nargs != 1 && nargs != 1 + QKV)) {
        PyErr_Format(
            PyExc_TypeError,
            "expected the name of an op, q, k and v, then keywords, got %zd arguments, the "
            "first %R",
            nargs, nargs ? args[0] : Py_None);
        return -1;
    }
    la_problem_init(&c->p, op, pass);
    char *rest = (char *)(&c->p + 1); /* after the problem, which would be cleared twice */
    memset(rest, 0, (size_t)((char *)(c + 1) - rest));
    memset(values, 0, sizeof *values * LA_PLACES);
    for (int i = 1; i < nargs; i++) values[LA_Q + i - 1] = args[i];
    const Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    int at = nargs > 1 ? QKV : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *const name = PyTuple_GetItem(names, i);
        const int place = place_of(pass, name, &at);
        if (place < 0) {
            PyErr_Format(PyExc_TypeError, "%s: no argument of this pass is called %R",
                         la_variants[op].name, name);
            return -1;
        }
        values[place] = args[nargs + i];
    }
    return 0;
}

/* One of the gate's keywords at most has an array. The first that is named says what a missing gate is
 * called. */
static int take_gate(la_call *c, PyObject *const *values)
{
    PyObject *gate = NULL;
    for (int i = 0; i < LA_GATE_KEYWORDS; i++) {
        PyObject *const value = values[LA_FIRST_GATE + i];
        if (!value || (gate && value == Py_None)) continue;
        if (gate && gate != Py_None) {
            PyErr_SetString(PyExc_ValueError,
                            "g, alpha: expected one of the two (log decay or decay), got both");
            return -1;
        }
        gate = value;
        c->p.gate = la_gate_keywords[i].how;
    }
    return gate ? la_take(c, LA_G, gate) : 0;
}

int la_take_options(la_call *c, PyObject *const *values)
{
    for (int i = 0; i < LA_OPTIONS; i++) {
        PyObject *const value = values[LA_FIRST_OPTION + i];
        if (value && take_option(c, &la_options[i], value)) return -1;
    }
    for (int i = 0; i < LA_REMARKS; i++) {
        PyObject *const value = values[LA_FIRST_REMARK + i];
        if (value && remarks[i].take(c, value)) return -1;
    }
    return 0;
}

/* Options first: a number of the user's own class may run Python, which moves arrays. */
int la_take_given(la_call *c, PyObject *const *values)
{
    if (la_take_options(c, values)) return -1;
    la_set arrays = la_given_arrays(c->p.pass);
    for (la_name name; la_next(&arrays, &name);) {
        PyObject *const value = values[name];
        if (name == LA_G                            ? take_gate(c, values)
            : !value                                ? 0
            : la_array_rows[name].letters[0] == 'N' ? la_take_state(c, name, value)
                                                    : la_take(c, name, value))
            return -1;
    }
    return 0;
}

int la_take_all(la_call *c, PyObject *const *values)
{
    if (la_take_given(c, values) || la_raise(la_check(&c->p), c->p.message)) return -1;
    if (!c->out || !c->p.states_only) return 0;
    PyErr_SetString(PyExc_ValueError, "out: expected None, as the call makes no o");
    return -1;
}
