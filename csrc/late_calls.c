/* Late gradients (late.h) from Python. */
#include "late_calls.h"

#include "arrays.h"
#include "keywords.h"
#include "late.h"
#include "run.h"

#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

/* The arrays in order. k says where the call runs, so it takes the place of q. */
static const struct {
    la_name slot;
    const char *label;
} arrays[] = {
    {LA_Q, "k"}, {LA_V, "v"}, {LA_DQ, "dk"}, {LA_DV, "dv"}, {LA_DST, "dS"}, {LA_DZT, "dz"},
};
enum { ARRAYS = sizeof arrays / sizeof *arrays };

/* k and v say the sizes, and arrays.def the shapes and dtypes. */
static int check_arrays(la_call *c)
{
    la_problem *const p = &c->p;
    const la_array *k = &p->array[LA_Q], *v = &p->array[LA_V];
    la_status status = LA_OK;
    if (k->ndim != 4)
        status = la_refuse_dims(p, LA_Q, k->ndim, k->shape);
    else if (v->ndim != 4)
        status = la_refuse_dims(p, LA_V, v->ndim, v->shape);
    p->real = k->dtype == LA_F64 ? LA_F64 : LA_F32;
    p->B = p->N = k->shape[0];
    p->T = p->L = k->shape[1];
    p->H = k->shape[2];
    p->K = k->shape[3];
    p->HV = v->shape[2];
    p->V = v->shape[3];
    for (int i = 0; i < ARRAYS && !status; i++) status = la_check_output(p, arrays[i].slot);
    return la_raise(status, p->message);
}

static int run_late(la_call *c, la_late *j)
{
    la_status status = LA_OK;
    if (c->p.device == LA_CPU) return 0;
    if (c->ran_python && la_still_there(c)) return -1;
    Py_BEGIN_ALLOW_THREADS
#ifdef LA_WITH_CUDA
    status = la_cuda_late(j);
#endif
    Py_END_ALLOW_THREADS
    return la_raise(status, j->message) || la_settle_streams(c) ? -1 : 0;
}

PyObject *la_late_call(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    enum { MAP, EPS, FIRST };
    if (nargs != FIRST + ARRAYS) {
        PyErr_Format(PyExc_TypeError, "late: expected %d arguments, got %zd", FIRST + ARRAYS,
                     nargs);
        return NULL;
    }
    int64_t map;
    la_late j = {0};
    if (la_as_count(args[MAP], "map", "an int", &map) || la_as_number(args[EPS], "eps", &j.map_eps))
        return NULL;
    if (map < 0 || map >= LA_MAPS) {
        PyErr_Format(PyExc_ValueError, "map: expected the number of a feature map, got %lld",
                     (long long)map);
        return NULL;
    }
    j.map = (la_map)map;
    const char *labels[LA_ARRAYS] = {NULL};
    for (int i = 0; i < ARRAYS; i++) labels[arrays[i].slot] = arrays[i].label;
    la_call c;
    memset(&c, 0, sizeof c);
    la_problem_init(&c.p, (la_op)0, LA_BACKWARD);
    c.p.labels = labels;
    c.p.any_strides = true;
    c.gradients = -1; /* the caller has seen that PyTorch records none of the arrays */
    int failed = 0;
    for (int i = 0; i < ARRAYS && !failed; i++)
        failed = la_take(&c, arrays[i].slot, args[FIRST + i]);
    if (!failed && !(failed = check_arrays(&c))) {
        const la_array **const places[ARRAYS] = {&j.k, &j.v, &j.dk, &j.dv, &j.dS, &j.dz};
        for (int i = 0; i < ARRAYS; i++) *places[i] = &c.p.array[arrays[i].slot];
        j.ordinal = c.p.ordinal;
        j.stream = c.p.stream;
        failed = run_late(&c, &j);
    }
    la_call_release(&c);
    return failed ? NULL : PyBool_FromLong(j.is_done);
}
