/* The module: arrays in (arrays.c), options in, a status out as an exception; what shapes are right
 * is check.c's business. Beside arrays.c, views.c, memory.c and bound.c the only file with Python.h.
 *
 * Arguments are positional (METH_FASTCALL): the keywords live in linattn/ops.py. */
#include "arrays.h"
#include "bound.h"
#include "watch.h"

#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

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

static int take_scale(la_call *c, PyObject *object)
{
    c->p.has_scale = object != Py_None;
    return c->p.has_scale ? as_number(object, "scale", &c->p.scale) : 0;
}

static int take_mode(la_call *c, PyObject *object)
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

static int take_chunk_size(la_call *c, PyObject *object)
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
static int take_features(la_call *c, PyObject *object)
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
static int take_gate(la_call *c, PyObject *g, PyObject *alpha)
{
    if (g != Py_None && alpha != Py_None) {
        PyErr_SetString(PyExc_ValueError,
                        "g, alpha: expected one of the two (log decay or decay), got both");
        return -1;
    }
    c->p.gate = alpha != Py_None ? LA_DECAY : c->p.decay == LA_HEAD ? LA_SLOPE : LA_LOG;
    return la_take(c, LA_G, alpha != Py_None ? alpha : g);
}

static int call_begin(la_call *c, la_face face, PyObject *op)
{
    long number = PyLong_AsLong(op);
    if (number < 0 || number >= LA_OPS) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "op: no number %ld", number);
        return -1;
    }
    la_problem_init(&c->p, (la_op)number, face);
    char *rest = (char *)(&c->p + 1); /* after the problem, which would be cleared twice */
    memset(rest, 0, (size_t)((char *)(c + 1) - rest));
    return 0;
}

/* The call site is the frame `level` above: an op's Python function is one of its own. */
enum { ABOVE_THE_OP = 2 };

static int expect_arguments(const char *function, Py_ssize_t got, Py_ssize_t want)
{
    if (got == want) return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected %zd arguments, got %zd", function, want, got);
    return -1;
}

/* As many as `want`, or one more: the level of the call site. 0 is nobody's, who is not warned. */
static int take_level(const char *function, PyObject *const *args, Py_ssize_t got, Py_ssize_t want,
                      int *level)
{
    *level = ABOVE_THE_OP;
    if (got != want + 1) return expect_arguments(function, got, want);
    const long given = PyLong_AsLong(args[want]);
    if (given == -1 && PyErr_Occurred()) return -1;
    if (given < 0 || given > INT_MAX) {
        PyErr_Format(PyExc_ValueError, "level: expected 0 or more, got %ld", given);
        return -1;
    }
    *level = (int)given;
    return 0;
}

static la_dtype dtype_of(const la_call *c, la_name name) { return c->p.array[name].dtype; }

/* ---- running ---- */

/* Is some decay above one? Other threads of Python run meanwhile, unless the look is shorter than to
 * let them. */
static bool grows(const la_problem *p)
{
    enum { FEW = 4096 }; /* numbers: half a microsecond */
    if (p->tokens * p->HV * (p->decay == LA_KEY ? p->K : 1) <= FEW) return la_gate_above_one(p);
    bool found;
    Py_BEGIN_ALLOW_THREADS
    found = la_gate_above_one(p);
    Py_END_ALLOW_THREADS
    return found;
}

/* Once per call site, by the warning filters' own rule. */
static int warn_of_growth(const la_call *c, int level)
{
    if (!level || !grows(&c->p)) return 0;
    const char *name = la_array_name(&c->p, LA_G);
    const char *text = c->p.gate == LA_DECAY   ? "expected decays in [0, 1], got values outside"
                       : c->p.gate == LA_SLOPE ? "expected slopes >= 0, got values outside"
                                               : "expected the log decay, g <= 0, got values "
                                                 "outside (alpha= takes the decay itself)";
    const int failed = PyErr_WarnFormat(PyExc_RuntimeWarning, level,
                                        "%s: %s; the state may grow without bound", name, text);
    return failed || la_still_there(c) ? -1 : 0; /* a filter may be Python too */
}

#ifdef LA_WITH_CUDA
static int run_on_device(la_call *c)
{
    static la_status (*const entries[])(la_problem *) = {
        [LA_FORWARD] = la_cuda_forward, [LA_STEP] = la_cuda_step, [LA_BACKWARD] = la_cuda_backward};
    la_status status;
    Py_BEGIN_ALLOW_THREADS
    status = entries[c->p.face](&c->p);
    Py_END_ALLOW_THREADS
    return la_raise(c, status) || la_settle_streams(c) ? -1 : 0;
}
#endif

/* Signals, in the middle of a call: Python's handlers run, and may raise. Only the main thread has any,
 * and none is asked about a second time where it is not. */
static bool interrupted(void *state)
{
    PyThreadState **python = state;
#if defined(__linux__)
    if (syscall(SYS_gettid) != getpid()) return false;
#endif
    PyEval_RestoreThread(*python);
    const bool raised = PyErr_CheckSignals();
    *python = PyEval_SaveThread();
    return raised;
}

/* The last Python that runs before the core looks at an array. */
static int settle(la_call *c, int level)
{
    if ((c->bound || c->ran_python) && la_still_there(c)) return -1;
    return c->p.device == LA_CPU ? warn_of_growth(c, level) : 0;
}

/* On the CPU, a pass over a sequence. */
static int run_long(la_call *c, la_status (*entry)(la_problem *))
{
    la_watch watch;
    PyThreadState *python = PyEval_SaveThread();
    la_watch_begin(&watch, interrupted, &python);
    c->p.watch = &watch;
    const la_status status = entry(&c->p);
    PyEval_RestoreThread(python);
    return status == LA_INTERRUPTED ? -1 : la_raise(c, status); /* the exception is there */
}

static int run(la_call *c, la_status (*entry)(la_problem *), int level)
{
    if (settle(c, level)) return -1;
#ifdef LA_WITH_CUDA
    if (c->p.device == LA_CUDA) return run_on_device(c);
#endif
    return run_long(c, entry);
}

/* A step is never cut short: its state is the old one or the new one. */
static int run_brief(la_call *c)
{
    la_status status;
    Py_BEGIN_ALLOW_THREADS
    status = la_step(&c->p);
    Py_END_ALLOW_THREADS
    return la_raise(c, status);
}

/* state_indices are read again without the GIL, so they are taken over first. */
int la_run_step(la_call *c, int level)
{
    enum { FEW = 64 };
    int64_t few[FEW], *more = NULL;
    const size_t B = (size_t)c->p.B;
    if (settle(c, level)) return -1;
#ifdef LA_WITH_CUDA
    if (c->p.device == LA_CUDA) return run_on_device(c);
#endif
    if (!c->p.array[LA_SLOT].given) return run_brief(c);
    if (B > FEW && !(more = PyMem_Malloc(B * sizeof *more))) {
        PyErr_NoMemory();
        return -1;
    }
    const int failed = la_raise(c, la_check_slots(&c->p, more ? more : few)) || run_brief(c);
    PyMem_Free(more);
    return failed ? -1 : 0;
}

/* ---- the three faces ---- */

/* forward(op, q, k, v, g, alpha, beta, initial_state, cu_seqlens, out, output_final_state, scale,
 * mode, chunk_size, qk_l2norm, state_v_first, allow_tf32, features[, level]) -> (o, final_state) */
static PyObject *py_forward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    la_call c;
    int level;
    PyObject *answer = NULL;
    if (take_level("forward", args, nargs, 18, &level) || call_begin(&c, LA_FORWARD, args[0]))
        return NULL;
    /* Options first: a number of the user's own class may run Python, which moves arrays. */
    if (take_features(&c, args[17]) || as_flag(args[10], "output_final_state", &c.p.want_final) ||
        take_scale(&c, args[11]) || take_mode(&c, args[12]) || take_chunk_size(&c, args[13]) ||
        as_flag(args[14], "qk_l2norm", &c.p.qk_l2norm) ||
        as_flag(args[15], "state_v_first", &c.p.state_v_first) ||
        (args[16] != Py_None && as_flag(args[16], "allow_tf32", &c.p.allow_tf32)) ||
        la_take(&c, LA_Q, args[1]) || la_take(&c, LA_K, args[2]) || la_take(&c, LA_V, args[3]) ||
        take_gate(&c, args[4], args[5]) || la_take(&c, LA_BETA, args[6]) ||
        la_take_state(&c, LA_S0, LA_Z0, args[7], false) || la_take(&c, LA_CU, args[8]) ||
        la_take_in_place(&c, LA_O, args[9]) || la_raise(&c, la_check(&c.p)))
        goto done;
    if (c.out) {
        if (la_raise(&c, la_check_output(&c.p, LA_O)) || la_refuse_overlaps(&c)) goto done;
    } else if (la_allocate(&c, LA_O, dtype_of(&c, LA_V))) {
        goto done;
    }
    if (c.p.want_final && (la_allocate(&c, LA_ST, c.p.real) ||
                           (la_has(&c.p, LA_ZT) && la_allocate(&c, LA_ZT, c.p.real))))
        goto done;
    if (run(&c, la_forward, level)) goto done;
    PyObject *o = la_result(&c, LA_O), *state = la_state_result(&c, LA_ST, LA_ZT);
    if (o && state) answer = PyTuple_Pack(2, o, state);
    Py_XDECREF(o);
    Py_XDECREF(state);
done:
    la_call_release(&c);
    return answer;
}

enum { STEP_ARGUMENTS = 14 };

/* What a step is told: all of it checked, but nothing run. */
static int take_step(la_call *c, PyObject *const *args)
{
    return take_features(c, args[13]) || take_scale(c, args[10]) ||
                   as_flag(args[11], "qk_l2norm", &c->p.qk_l2norm) ||
                   as_flag(args[12], "state_v_first", &c->p.state_v_first) ||
                   la_take(c, LA_Q, args[1]) || la_take(c, LA_K, args[2]) ||
                   la_take(c, LA_V, args[3]) || take_gate(c, args[4], args[5]) ||
                   la_take(c, LA_BETA, args[6]) || la_take(c, LA_SLOT, args[8]) ||
                   la_take_state(c, LA_S0, LA_Z0, args[7], true) ||
                   la_take_in_place(c, LA_O, args[9]) || la_raise(c, la_check(&c->p)) ||
                   (c->out ? la_raise(c, la_check_output(&c->p, LA_O))
                           : la_allocate(c, LA_O, dtype_of(c, LA_V))) ||
                   la_refuse_overlaps(c)
               ? -1
               : 0;
}

/* step(op, q, k, v, g, alpha, beta, state, state_indices, out, scale, qk_l2norm, state_v_first,
 * features) -> o */
static PyObject *py_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    la_call c;
    PyObject *answer = NULL;
    if (expect_arguments("step", nargs, STEP_ARGUMENTS) || call_begin(&c, LA_STEP, args[0]))
        return NULL;
    if (!take_step(&c, args) && !la_run_step(&c, ABOVE_THE_OP)) answer = la_result(&c, LA_O);
    la_call_release(&c);
    return answer;
}

/* A bound step gives its out back each time, so it is an array of q's kind like any that is given. */
static int settle_out(la_call *c, PyObject **made)
{
    if (c->out) return 0;
    if (c->library == LA_EXPORTED) {
        PyErr_Format(
            PyExc_ValueError,
            "out: expected an array, got None: a bound step writes it again and again, and "
            "nobody knows how to make such an array of %R",
            (PyObject *)Py_TYPE(c->like));
        return -1;
    }
    *made = c->object[LA_O];
    c->object[LA_O] = NULL;
    return la_take_in_place(c, LA_O, *made) || la_raise(c, la_check_output(&c->p, LA_O)) ? -1 : 0;
}

/* bind(...) as step(...) -> BoundStep */
static PyObject *py_bind(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    la_call c;
    PyObject *answer = NULL, *made = NULL;
    if (expect_arguments("bind", nargs, STEP_ARGUMENTS) || call_begin(&c, LA_STEP, args[0]))
        return NULL;
    c.bound = true;
    if (!take_step(&c, args) && !settle_out(&c, &made)) answer = la_bound_new(&c);
    if (!answer) la_call_release(&c);
    Py_XDECREF(made);
    return answer;
}

/* backward(op, do, q, k, v, g, alpha, beta, initial_state, d_final_state, cu_seqlens, scale, mode,
 * chunk_size, qk_l2norm, state_v_first, features[, level]) -> (dq, dk, dv, dg, dbeta,
 * d_initial_state) */
static PyObject *py_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    la_call c;
    int level;
    PyObject *answer = NULL;
    if (take_level("backward", args, nargs, 17, &level) || call_begin(&c, LA_BACKWARD, args[0]))
        return NULL;
    if (take_features(&c, args[16]) || take_scale(&c, args[11]) || take_mode(&c, args[12]) ||
        take_chunk_size(&c, args[13]) || as_flag(args[14], "qk_l2norm", &c.p.qk_l2norm) ||
        as_flag(args[15], "state_v_first", &c.p.state_v_first) || la_take(&c, LA_Q, args[2]) ||
        la_take(&c, LA_DO, args[1]) || la_take(&c, LA_K, args[3]) || la_take(&c, LA_V, args[4]) ||
        take_gate(&c, args[5], args[6]) || la_take(&c, LA_BETA, args[7]) ||
        la_take_state(&c, LA_S0, LA_Z0, args[8], false) ||
        la_take_state(&c, LA_DST, LA_DZT, args[9], false) || la_take(&c, LA_CU, args[10]) ||
        la_raise(&c, la_check(&c.p)))
        goto done;
    if (la_allocate(&c, LA_DQ, dtype_of(&c, LA_Q)) || la_allocate(&c, LA_DK, dtype_of(&c, LA_K)) ||
        la_allocate(&c, LA_DV, dtype_of(&c, LA_V)) ||
        (la_has(&c.p, LA_DG) && la_allocate(&c, LA_DG, dtype_of(&c, LA_G))) ||
        (la_has(&c.p, LA_DBETA) && la_allocate(&c, LA_DBETA, dtype_of(&c, LA_BETA))) ||
        (c.object[LA_S0] && la_allocate(&c, LA_DS0, c.p.real)) ||
        (c.object[LA_Z0] && la_allocate(&c, LA_DZ0, c.p.real)))
        goto done;
    if (run(&c, la_backward, level)) goto done;
    static const la_name gradients[] = {LA_DQ, LA_DK, LA_DV, LA_DG, LA_DBETA};
    answer = PyTuple_New(6);
    for (int i = 0; answer && i < 6; i++) {
        PyObject *x = i < 5 ? la_result(&c, gradients[i]) : la_state_result(&c, LA_DS0, LA_DZ0);
        if (!x || PyTuple_SetItem(answer, i, x)) Py_CLEAR(answer);
    }
done:
    la_call_release(&c);
    return answer;
}

/* shares_memory(x, y) -> bool, for arrays that a feature map of Python's keeps from the core */
static PyObject *py_shares_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (expect_arguments("shares_memory", nargs, 2)) return NULL;
    int shared = la_shares_memory(args[0], args[1]);
    return shared < 0 ? NULL : PyBool_FromLong(shared);
}

/* ---- the device ---- */

static PyObject *py_cuda_why_not(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    const char *reason = la_why_no_cuda();
    if (!reason) Py_RETURN_NONE;
    return PyUnicode_FromString(reason);
}

static PyObject *py_cuda_device_count(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
#ifdef LA_WITH_CUDA
    return PyLong_FromLong(la_cuda_device_count());
#else
    return PyLong_FromLong(0);
#endif
}

static PyObject *py_cuda_trim(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
#ifdef LA_WITH_CUDA
    const char *wrong;
    Py_BEGIN_ALLOW_THREADS;
    wrong = la_cuda_trim();
    Py_END_ALLOW_THREADS;
    if (wrong) return PyErr_Format(PyExc_RuntimeError, "CUDA: %s", wrong);
#endif
    Py_RETURN_NONE;
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

static PyObject *py_set_allow_tf32(PyObject *self, PyObject *object)
{
    (void)self;
    bool allow;
    if (as_flag(object, "allow", &allow)) return NULL;
    la_set_allow_tf32(allow);
    Py_RETURN_NONE;
}

static PyObject *py_get_allow_tf32(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    return PyBool_FromLong(la_get_allow_tf32());
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
    {"bind", (PyCFunction)(void (*)(void))py_bind, METH_FASTCALL, "A step, checked and kept."},
    {"backward", (PyCFunction)(void (*)(void))py_backward, METH_FASTCALL, "One backward pass."},
    {"shares_memory", (PyCFunction)(void (*)(void))py_shares_memory, METH_FASTCALL,
     "Do two arrays share memory?"},
    {"cuda_trim", py_cuda_trim, METH_NOARGS, "Give back the device memory that calls keep."},
    {"cuda_why_not", py_cuda_why_not, METH_NOARGS, "Why no call can run on CUDA, or None."},
    {"cuda_device_count", py_cuda_device_count, METH_NOARGS, "How many CUDA devices there are."},
    {"set_num_threads", py_set_num_threads, METH_O, "Threads that a call may use."},
    {"get_num_threads", py_get_num_threads, METH_NOARGS, "Threads that a call may use."},
    {"set_allow_tf32", py_set_allow_tf32, METH_O, "May float32 products be rounded as tf32's?"},
    {"get_allow_tf32", py_get_allow_tf32, METH_NOARGS,
     "May float32 products be rounded as tf32's?"},
    {"isa", py_isa, METH_NOARGS, "The instruction set in use, and those compiled in."},
    {"set_isa", py_set_isa, METH_O, "Use this instruction set."},
    {"_fail_allocation", py_fail_allocation, METH_O,
     "Tests: let the n-th scratch allocation from now fail."},
    {NULL, NULL, 0, NULL},
};

/* ---- the tables, for Python ---- */

static PyObject *name_of_op(int op) { return PyUnicode_FromString(la_variants[op].name); }

static PyObject *row_of_op(int op)
{
    const la_variant *v = &la_variants[op];
    return Py_BuildValue("(sssO)", v->name, la_decay_names[v->decay], la_rule_names[v->rule],
                         v->normaliser ? Py_True : Py_False);
}

/* A tuple of n rows, as a constant of the module. */
static int add_table(PyObject *module, const char *name, int n, PyObject *(*row)(int))
{
    PyObject *table = PyTuple_New(n);
    for (int i = 0; table && i < n; i++) {
        PyObject *one = row(i);
        if (!one || PyTuple_SetItem(table, i, one)) Py_CLEAR(table);
    }
    const int failed = table ? PyModule_AddObjectRef(module, name, table) : -1;
    Py_XDECREF(table);
    return failed;
}

static int module_exec(PyObject *module)
{
    if (la_arrays_init() || la_bound_init(module)) return -1;
    const char *isa = getenv("LINATTN_ISA");
    if (isa && *isa && !la_isa_choose(isa)) {
        char names[128] = "";
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
    const char *text, *variable = la_threads_unreadable(&text);
    if (variable) {
        PyErr_Format(PyExc_ImportError, "%s: expected 1 to 256 threads, got %s", variable, text);
        return -1;
    }
    int failed = add_table(module, "OPS", LA_OPS, name_of_op) ||
                 add_table(module, "VARIANTS", LA_OPS, row_of_op);
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
