/* Gates from projections (gates.h) from Python: arrays in, arrays and exceptions out. */
#include "gate_calls.h"

#include "arrays.h"
#include "keywords.h"
#include "run.h"

#include <string.h>

#define COUNT(table) (int)(sizeof(table) / sizeof *(table))

static const struct {
    const char *name;
    la_curve curve;
    const char *gradient;
} functions[] = {
#define LA_GATE_FUNCTION(name, curve, gradient) {#name, LA_##curve, gradient},
#include "gates.def"
};

static int function_of(PyObject *name)
{
    for (int i = 0; PyUnicode_Check(name) && i < COUNT(functions); i++)
        if (!PyUnicode_CompareWithASCIIString(name, functions[i].name)) return i;
    return -1;
}

bool la_find_curve(PyObject *name, la_curve *curve)
{
    const int i = function_of(name);
    if (i >= 0) *curve = functions[i].curve;
    return i >= 0;
}

/* x is read as a q is, and says where the call runs. Its parameters take the places of k and v. */
#define LA_GATE_X LA_Q
#define LA_GATE_A_LOG LA_K
#define LA_GATE_DT_BIAS LA_V
#define LA_GATE_D LA_DO

static int refuse_gating(const la_call *c, const la_gating *j, la_gating_fault fault,
                         const la_array *which)
{
    const la_name name = (la_name)(which - c->p.array);
    const char *const label = la_array_name(&c->p, name);
    PyObject *x_shape = la_tuple_of(j->x->ndim, j->x->shape);
    PyObject *shape = la_tuple_of(which->ndim, which->shape);
    if (!x_shape || !shape)
        ;
    else if (fault == LA_GATING_DTYPE)
        la_refuse_dtype(label, name, la_dl_dtypes[which->dtype]);
    else if (fault == LA_GATING_GRADIENT)
        PyErr_Format(PyExc_ValueError, "%s: expected the shape of x, %R, got %R", label, x_shape,
                     shape);
    else if (fault == LA_GATING_AXES)
        PyErr_Format(PyExc_ValueError,
                     "%s: expected numbers along the last two axes of x alone, %R, got %R", label,
                     x_shape, shape);
    else
        PyErr_Format(PyExc_ValueError,
                     "%s: expected a shape that broadcasts to that of x, %R (for a decay per key "
                     "A_log is [HV,1] and dt_bias [HV,K]), got %R",
                     label, x_shape, shape);
    Py_XDECREF(x_shape);
    Py_XDECREF(shape);
    return -1;
}

static const la_array *given(const la_call *c, la_name name)
{
    return c->p.array[name].given ? &c->p.array[name] : NULL;
}

static int check_gating(la_call *c, la_gating *j)
{
    const la_array *which;
    j->x = given(c, LA_GATE_X);
    j->A_log = given(c, LA_GATE_A_LOG);
    j->dt_bias = given(c, LA_GATE_DT_BIAS);
    j->d = given(c, LA_GATE_D);
    j->device = c->p.device;
    j->ordinal = c->p.ordinal;
    j->stream = c->p.stream;
    if (!j->x) {
        PyErr_SetString(PyExc_TypeError, "x: expected an array, got None");
        return -1;
    }
    const la_gating_fault fault = la_gates_check(j, &which);
    return fault == LA_GATING_FITS ? 0 : refuse_gating(c, j, fault, which);
}

static int allocate_gating(la_call *c, la_gating *j)
{
    const la_name first = j->d ? LA_DQ : LA_O;
    if (la_allocate_like(c, first, j->d ? j->x->dtype : j->real, j->x)) return -1;
    j->to = c->p.array[first].data;
    if (!j->d) return 0;
    if (j->A_log && la_allocate_like(c, LA_DK, j->A_log->dtype, j->A_log)) return -1;
    if (j->dt_bias && la_allocate_like(c, LA_DV, j->dt_bias->dtype, j->dt_bias)) return -1;
    j->rate.gradient = c->p.array[LA_DK].data;
    j->bias.gradient = c->p.array[LA_DV].data;
    return 0;
}

static PyObject *gating_result(la_call *c, const la_gating *j)
{
    if (!j->d) return la_result(c, LA_O);
    PyObject *dx = la_result(c, LA_DQ), *d_rate = la_result(c, LA_DK),
             *d_bias = la_result(c, LA_DV);
    PyObject *all = dx && d_rate && d_bias ? PyTuple_Pack(3, dx, d_rate, d_bias) : NULL;
    Py_XDECREF(dx);
    Py_XDECREF(d_rate);
    Py_XDECREF(d_bias);
    return all;
}

PyObject *la_gate_call(PyObject *const *args, Py_ssize_t nargs)
{
    enum { NAME, FACTOR, X, D = X + 3 };
    const la_name places[] = {LA_GATE_X, LA_GATE_A_LOG, LA_GATE_DT_BIAS, LA_GATE_D};
    if (nargs != D && nargs != D + 1) {
        PyErr_Format(PyExc_TypeError, "gate: expected 5 or 6 arguments, got %zd", nargs);
        return NULL;
    }
    const int i = function_of(args[NAME]);
    if (i < 0) {
        PyErr_Format(PyExc_ValueError, "gate: expected the name of a gate, got %R", args[NAME]);
        return NULL;
    }
    la_gating j = {.curve = functions[i].curve};
    if (la_as_number(args[FACTOR], "factor", &j.factor)) return NULL;

    const bool backward = nargs > D;
    const char *labels[LA_ARRAYS] = {[LA_GATE_X] = "x",
                                     [LA_GATE_A_LOG] = "A_log",
                                     [LA_GATE_DT_BIAS] = "dt_bias",
                                     [LA_GATE_D] = functions[i].gradient,
                                     [LA_O] = "g",
                                     [LA_DQ] = "dx",
                                     [LA_DK] = "dA_log",
                                     [LA_DV] = "ddt_bias"};
    la_call c;
    memset(&c, 0, sizeof c);
    la_problem_init(&c.p, (la_op)0, backward ? LA_BACKWARD : LA_FORWARD);
    c.p.labels = labels;
    c.gradients = -1;
    PyObject *answer = NULL;
    int failed = 0;
    for (int k = X; k < nargs && !failed; k++) failed = la_take(&c, places[k - X], args[k]);
    if (!failed && !check_gating(&c, &j) && !allocate_gating(&c, &j) && !la_run_gating(&c, &j))
        answer = gating_result(&c, &j);
    la_call_release(&c);
    return answer;
}
