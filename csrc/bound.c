/* A bound step: a checked call that is kept, and run as often as it is called. It keeps the memory of its
 * arrays; the caller changes their contents in between. */
#include "bound.h"

#include "run.h"

static PyTypeObject *bound_type;

typedef struct {
    PyObject ob_base; /* PyObject_HEAD */
    la_call call;     /* never changed by a call: each runs a copy of its own */
    PyObject *out;    /* what a call gives back; NULL: cleared by the garbage collector */
} bound;

PyObject *la_bound_new(const la_call *c)
{
    allocfunc make = (allocfunc)PyType_GetSlot(bound_type, Py_tp_alloc);
    bound *b = (bound *)make(bound_type, 0); /* all zero */
    if (!b) return NULL;
    b->call = *c;
    b->call.like = b->call.out = NULL; /* the caller's own references */
    Py_INCREF(c->out);
    b->out = c->out;
    return (PyObject *)b;
}

static int bound_traverse(PyObject *self, visitproc visit, void *arg)
{
    bound *b = (bound *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(b->out);
    for (int i = 0; i < LA_ARRAYS; i++) {
        Py_VISIT(b->call.object[i]);
        Py_VISIT(b->call.given[i]);
    }
    return 0;
}

static int bound_clear(PyObject *self)
{
    bound *b = (bound *)self;
    Py_CLEAR(b->out);
    la_call_release(&b->call);
    return 0;
}

static void bound_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    PyObject_GC_UnTrack(self);
    bound_clear(self);
    release(self);
    Py_DECREF((PyObject *)type);
}

static PyObject *bound_call(PyObject *self, PyObject *args, PyObject *keywords)
{
    const bound *b = (const bound *)self;
    if (PyTuple_Size(args) || (keywords && PyDict_Size(keywords))) {
        PyErr_SetString(PyExc_TypeError,
                        "a bound step takes no arguments: change what its arrays hold");
        return NULL;
    }
    PyObject *out = b->out;
    if (!out) {
        PyErr_SetString(PyExc_RuntimeError, "the arrays of this bound step are gone");
        return NULL;
    }
    la_call c = b->call;
    if (la_current_stream(&c) || la_run_step(&c)) return NULL;
    Py_INCREF(out);
    return out;
}

/* <linattn.BoundStep of gla_step: float32, B = 2, H = 4, HV = 4, K = 64, V = 64> */
static PyObject *bound_repr(PyObject *self)
{
    const la_problem *p = &((const bound *)self)->call.p;
    return PyUnicode_FromFormat(
        "<linattn.BoundStep of %s_step: %s, B = %lld, H = %lld, HV = %lld, K = %lld, V = %lld>",
        la_variants[p->op].name, la_dtype_names[p->array[LA_Q].dtype], (long long)p->B,
        (long long)p->H, (long long)p->HV, (long long)p->K, (long long)p->V);
}

PyDoc_STRVAR(bound_doc,
             "A step whose arguments have been checked and kept: see :func:`linattn.bind`.\n\n"
             "Calling it, without arguments, is one token over the same arrays, with what they "
             "hold now.\n\n"
             "Examples\n--------\n"
             ">>> import numpy as np, linattn\n"
             ">>> x, state = np.ones((1, 2, 4), np.float32), linattn.zeros_state(1, 2, 4, 4)\n"
             ">>> step = linattn.bind(linattn.delta_rule_step, x, x, x, 0.5, state=state)\n"
             ">>> step\n"
             "<linattn.BoundStep of delta_rule_step: float32, B = 1, H = 2, HV = 2, K = 4, V = 4>\n"
             ">>> step().shape, bool(state.any())\n"
             "((1, 2, 4), True)\n");

static PyType_Slot bound_slots[] = {
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_traverse, bound_traverse},
    {Py_tp_clear, bound_clear},
    {Py_tp_call, bound_call},
    {Py_tp_repr, bound_repr},
    {Py_tp_doc, (void *)bound_doc},
    {0, NULL},
};

static PyType_Spec bound_spec = {
    .name = "linattn.BoundStep",
    .basicsize = sizeof(bound),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = bound_slots,
};

int la_bound_init(PyObject *module)
{
    if (!bound_type) bound_type = (PyTypeObject *)PyType_FromSpec(&bound_spec);
    return bound_type ? PyModule_AddObjectRef(module, "BoundStep", (PyObject *)bound_type) : -1;
}
