/* A checked call runs: the warning before, the GIL aside, signals in between, a status as an exception
 * after. */
#include "run.h"

#include "watch.h"

#include <stdatomic.h>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

/* Is some decay above one? Other threads of Python run meanwhile, unless the look is shorter than to
 * let them. */
static bool grows(const la_problem *p)
{
    enum { FEW = 4096 }; /* numbers: half a microsecond */
    const int64_t rows = p->decay == LA_HEAD ? 1 : p->tokens;
    if (rows * p->HV * (p->decay == LA_KEY ? p->K : 1) <= FEW) return la_gate_above_one(p);
    bool found;
    Py_BEGIN_ALLOW_THREADS
    found = la_gate_above_one(p);
    Py_END_ALLOW_THREADS
    return found;
}

/* A warning is Python's business: a function of linattn/ops gives it, and says whose line it names.
 * Takes over the tuple of arguments. */
static int tell(const char *function, PyObject *arguments)
{
    PyObject *module = arguments ? PyImport_ImportModule("linattn.ops._core") : NULL;
    PyObject *method = module ? PyObject_GetAttrString(module, function) : NULL;
    PyObject *done = method ? PyObject_CallObject(method, arguments) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(method);
    Py_XDECREF(done);
    Py_XDECREF(arguments);
    return done ? 0 : -1;
}

static int warn_of_growth(const la_call *c)
{
    if (c->quiet || !grows(&c->p)) return 0;
    const char *expected = c->p.gate == LA_DECAY   ? "decays in [0, 1], got values outside"
                           : c->p.gate == LA_SLOPE ? "slopes >= 0, got values outside"
                                                   : "the log decay, g <= 0, got values outside "
                                                     "(alpha= takes the decay itself)";
    PyObject *arguments = Py_BuildValue("(ss)", la_array_name(&c->p, LA_G), expected);
    /* A filter may be Python too. */
    return tell("warn_of_growth", arguments) || la_still_there(c) ? -1 : 0;
}

/* Only a kernel knows the denominators. So this warning comes after the call, whose results are
 * there. A device is not waited for, and tells nothing. */
static int warn_of_clamp(bool clamped)
{
    return clamped ? tell("warn_of_clamp", PyTuple_New(0)) : 0;
}

/* Is the caller to hear of a denominator that is clamped? */
static bool *heard(const la_call *c, bool *clamped)
{
    const bool reads = c->p.pass != LA_BACKWARD && c->p.normaliser == LA_CLAMP;
    return reads && !c->quiet ? clamped : NULL;
}

#ifdef LA_WITH_CUDA
static int run_on_device(la_call *c)
{
    static la_status (*const entries[])(la_problem *) = {
        [LA_FORWARD] = la_cuda_forward, [LA_STEP] = la_cuda_step, [LA_BACKWARD] = la_cuda_backward};
    la_status status;
    Py_BEGIN_ALLOW_THREADS
    status = entries[c->p.pass](&c->p);
    Py_END_ALLOW_THREADS
    return la_raise(status, c->p.message) || la_settle_streams(c) ? -1 : 0;
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

/* More heads than tokens is right for a short prompt, and the sign of an array [B,H,T,K]. The
 * process hears of it once. */
static int hint_at_layout(la_call *c)
{
    static atomic_bool told;
    const la_problem *p = &c->p;
    const bool odd = p->pass == LA_FORWARD && p->T >= 2 && p->T < p->H;
    if (!odd || c->quiet || atomic_exchange(&told, true)) return 0;
    c->ran_python = true; /* a filter may be Python */
    return tell("hint_at_layout", Py_BuildValue("(LL)", (long long)p->T, (long long)p->H));
}

/* The last Python that runs before the core looks at an array. */
static int settle(la_call *c)
{
    const bool on_host = c->p.device == LA_CPU;
    if (on_host && c->p.pass != LA_STEP && la_hold(c)) return -1;
    if ((c->bound || c->ran_python) && la_still_there(c)) return -1;
    return on_host && !la_writes_nothing(&c->p) ? warn_of_growth(c) : 0;
}

/* The kernel that took this thread's last call. */
static _Thread_local la_taken last_taken = {"none", "", "", 0, 0};

const la_taken *la_last_taken(void) { return &last_taken; }

static void begin_taken(la_call *c)
{
    last_taken = (la_taken){"none", "", "no output has an element", 0, 0};
    c->p.taken = &last_taken;
}

/* On the CPU, a pass over a sequence. */
static int run_long(la_call *c, la_status (*entry)(la_problem *))
{
    la_watch watch;
    bool clamped = false;
    PyThreadState *python = PyEval_SaveThread();
    la_watch_begin(&watch, interrupted, &python);
    c->p.watch = &watch;
    c->p.clamped = heard(c, &clamped);
    const la_status status = entry(&c->p);
    PyEval_RestoreThread(python);
    if (status == LA_INTERRUPTED) return -1; /* the exception is there */
    return la_raise(status, c->p.message) || warn_of_clamp(clamped) ? -1 : 0;
}

int la_run_pass(la_call *c)
{
    begin_taken(c);
    if (hint_at_layout(c) || settle(c)) return -1;
#ifdef LA_WITH_CUDA
    if (c->p.device == LA_CUDA) return run_on_device(c);
#endif
    return run_long(c, c->p.pass == LA_FORWARD ? la_forward : la_backward);
}

/* A step is never cut short: its state is the old one or the new one. */
static int run_brief(la_call *c)
{
    la_status status;
    bool clamped = false;
    c->p.clamped = heard(c, &clamped);
    Py_BEGIN_ALLOW_THREADS
    status = la_step(&c->p);
    Py_END_ALLOW_THREADS
    return la_raise(status, c->p.message) || warn_of_clamp(clamped) ? -1 : 0;
}

enum { FEW_SLOTS = 64 };

/* state_indices are read again without the GIL, so they are taken over first: into `few`, or into
 * *more, which the caller gives back. */
static int take_slots(la_call *c, int64_t few[FEW_SLOTS], int64_t **more)
{
    const size_t B = (size_t)c->p.B;
    *more = NULL;
    if (!c->p.array[LA_SLOT].given) return 0;
    if (B > FEW_SLOTS && !(*more = PyMem_Malloc(B * sizeof **more))) {
        PyErr_NoMemory();
        return -1;
    }
    return la_raise(la_check_slots(&c->p, *more ? *more : few), c->p.message);
}

int la_run_step(la_call *c)
{
    int64_t few[FEW_SLOTS], *more;
    begin_taken(c);
    if (settle(c)) return -1;
#ifdef LA_WITH_CUDA
    if (c->p.device == LA_CUDA) return run_on_device(c);
#endif
    const int failed = take_slots(c, few, &more) || run_brief(c);
    PyMem_Free(more);
    return failed ? -1 : 0;
}

int la_run_gating(la_call *c, la_gating *j)
{
    la_status status;
    const bool on_host = j->device == LA_CPU;
    if (on_host && la_hold(c)) return -1;
    if (c->ran_python && la_still_there(c)) return -1;
    Py_BEGIN_ALLOW_THREADS
#ifdef LA_WITH_CUDA
    status = on_host ? la_gates(j) : la_cuda_gates(j);
#else
    status = la_gates(j);
#endif
    Py_END_ALLOW_THREADS
    if (la_raise(status, j->message)) return -1;
    return on_host ? 0 : la_settle_streams(c);
}

static int enqueue_room(la_call *c, la_room_job *j)
{
    la_status status;
    Py_BEGIN_ALLOW_THREADS
    status = j->room->enqueue(j);
    Py_END_ALLOW_THREADS
    return la_raise(status, c->p.message) || la_settle_streams(c) ? -1 : 0;
}

int la_run_room(la_call *c, la_room_job *j)
{
    la_watch watch;
    int64_t few[FEW_SLOTS], *more;
    const bool step = c->p.pass == LA_STEP, on_host = c->p.device == LA_CPU;
    begin_taken(c);
    if (on_host && !step && la_hold(c)) return -1;
    if (c->ran_python && la_still_there(c)) return -1;
    if (!on_host) return enqueue_room(c, j);
    if (take_slots(c, few, &more)) {
        PyMem_Free(more);
        return -1;
    }
    PyThreadState *python = PyEval_SaveThread();
    la_watch_begin(&watch, interrupted, &python);
    if (!step) c->p.watch = &watch;
    const la_status status = j->room->run(j);
    PyEval_RestoreThread(python);
    PyMem_Free(more);
    if (status == LA_INTERRUPTED) return -1; /* the exception is there */
    return la_raise(status, c->p.message);
}

/* As a step: each state is the old one or the new one. */
int la_run_layer(la_call *step, la_call *const *stages, int count, la_layer *j)
{
    int64_t few[FEW_SLOTS], *more;
    la_status status;
    bool moved = step->ran_python;
    begin_taken(step);
    for (int i = 0; i < count; i++) moved |= stages[i]->ran_python;
    step->ran_python = moved;
    if (settle(step)) return -1;
    moved |= !step->quiet; /* the warning of a gate that grows is Python too */
    for (int i = 0; i < count && moved; i++)
        if (la_still_there(stages[i])) return -1;
    const bool on_host = step->p.device == LA_CPU;
    if (on_host && take_slots(step, few, &more)) {
        PyMem_Free(more);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = la_layer_run(j);
    Py_END_ALLOW_THREADS
    if (on_host) PyMem_Free(more);
    if (la_raise(status, step->p.message)) return -1;
    for (int i = 0; i < count && !on_host; i++)
        if (la_settle_streams(stages[i])) return -1;
    return !on_host && la_settle_streams(step) ? -1 : 0;
}
