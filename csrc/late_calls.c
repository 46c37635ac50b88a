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
    const char *label, *letters;
} arrays[] = {
    {LA_Q, "k", "BTHK"},   {LA_V, "v", "BTHV"},    {LA_DQ, "dk", "BTHK"},
    {LA_DV, "dv", "BTHV"}, {LA_DST, "dS", "BHKV"}, {LA_DZT, "dz", "BHK"},
};
enum { ARRAYS = sizeof arrays / sizeof *arrays };

/* The sizes of letters agree between all arrays. */
static int compare_shapes(const la_call *c)
{
    int64_t size[128];
    for (int i = 0; i < 128; i++) size[i] = -1;
    for (int i = 0; i < ARRAYS; i++) {
        const la_array *x = &c->p.array[arrays[i].slot];
        const char *letters = arrays[i].letters;
        bool fits = x->given && x->ndim == (int)strlen(letters);
        for (int k = 0; fits && letters[k]; k++) {
            int64_t *const own = &size[(int)letters[k]];
            if (*own < 0) *own = x->shape[k];
            fits = *own == x->shape[k];
        }
        if (fits) continue;
        PyErr_Format(PyExc_ValueError, "%s: expected [%s], with the sizes of the arrays before",
                     arrays[i].label, letters);
        return -1;
    }
    return 0;
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
    if (!failed && !(failed = compare_shapes(&c))) {
        const la_array **const places[ARRAYS] = {&j.k, &j.v, &j.dk, &j.dv, &j.dS, &j.dz};
        for (int i = 0; i < ARRAYS; i++) *places[i] = &c.p.array[arrays[i].slot];
        j.ordinal = c.p.ordinal;
        j.stream = c.p.stream;
        failed = run_late(&c, &j);
    }
    la_call_release(&c);
    return failed ? NULL : PyBool_FromLong(j.is_done);
}
