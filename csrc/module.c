/* The module: keywords in, arrays and exceptions out. keywords.c reads the arguments, arrays.c takes the
 * arrays, check.c says what is right, run.c runs the call. */
#include "bound.h"
#include "gate_calls.h"
#include "late_calls.h"
#include "keywords.h"
#include "layers.h"
#include "outline.h"
#include "rooms.h"
#include "run.h"
#include "xla.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif
#ifndef LA_CUDA_ARCHS
#define LA_CUDA_ARCHS "" /* setup.py says which devices have machine code */
#endif

#define COUNT(table) (int)(sizeof(table) / sizeof *(table))

/* ---- outputs ---- */

/* Is this array to be made? A caller may give out. */
static bool is_wanted(const la_call *c, la_name name)
{
    return la_is_wanted(&c->p, name) && !(name == LA_O && c->out);
}

static int allocate_outputs(la_call *c)
{
    la_set outputs = la_outputs(&c->p) & ~la_read[c->p.pass];
    if (c->out && la_raise(la_check_output(&c->p, LA_O), c->p.message)) return -1;
    for (la_name name; la_next(&outputs, &name);)
        if (is_wanted(c, name) && la_allocate(c, name)) return -1;
    return c->out || c->p.pass == LA_STEP ? la_refuse_overlaps(c) : 0;
}

/* A tuple of what the pass writes, None for what it does not. */
static PyObject *results(la_call *c)
{
    la_set outputs = la_outputs(&c->p);
    PyObject *found[LA_ARRAYS];
    int n = 0;
    for (la_name name; la_next(&outputs, &name);) {
        if (la_is_second(name)) continue;
        const bool state = la_array_rows[name].letters[0] == 'N' && !la_in(la_results, name);
        if (!(found[n] = state ? la_state_result(c, name) : la_result(c, name))) break;
        n++;
    }
    PyObject *tuple = PyErr_Occurred() ? NULL : PyTuple_New(n);
    for (int i = 0; i < n; i++)
        if (tuple)
            PyTuple_SetItem(tuple, i, found[i]); /* takes the reference over */
        else
            Py_DECREF(found[i]);
    return tuple;
}

/* ---- the three passes ---- */

static PyObject *run_pass(la_pass pass, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    la_call c;
    PyObject *values[LA_PLACES], *answer = NULL;
    if (la_read_keywords(&c, pass, args, nargs, names, values)) return NULL;
    if (!la_take_all(&c, values) && !allocate_outputs(&c) && !la_run_pass(&c)) answer = results(&c);
    la_call_release(&c);
    return answer;
}

/* forward(op, q, k, v, ...) -> (o, final_state), and M with segment_map */
static PyObject *py_forward(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *names)
{
    (void)self;
    return run_pass(LA_FORWARD, args, nargs, names);
}

/* backward(op, q, k, v, do=..., ...) -> a gradient for each differentiable input of arrays.def */
static PyObject *py_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *names)
{
    (void)self;
    return run_pass(LA_BACKWARD, args, nargs, names);
}

/* step(op, q, k, v, ..., state=...) -> o */
static PyObject *py_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    (void)self;
    la_call c;
    PyObject *values[LA_PLACES], *answer = NULL;
    if (la_read_keywords(&c, LA_STEP, args, nargs, names, values)) return NULL;
    if (!la_take_all(&c, values) && !allocate_outputs(&c) && !la_run_step(&c))
        answer = la_result(&c, LA_O);
    la_call_release(&c);
    return answer;
}

/* layer_step(stages, op, q, k, v, ..., state=...) -> y. stages: see la_layer_take */
static PyObject *py_layer_step(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                               PyObject *names)
{
    (void)self;
    la_call c;
    PyObject *values[LA_PLACES], *answer = NULL;
    if (!nargs) {
        PyErr_SetString(PyExc_TypeError, "layer_step: expected the stages, the op, q, k and v");
        return NULL;
    }
    if (la_read_keywords(&c, LA_STEP, args + 1, nargs - 1, names, values)) return NULL;
    la_layer_call *l = la_layer_new();
    if (l && !la_layer_read(l, args[0]) && !la_take_given(&c, values) &&
        !la_layer_take(l, &c, values) && !la_raise(la_check(&c.p), c.p.message) &&
        !la_layer_settle(l, &c) && !la_layer_call_run(l, &c))
        answer = la_result(&c, LA_O);
    if (l) la_layer_free(l);
    la_call_release(&c);
    return answer;
}

/* A bound step gives its out back each time, so it is an array of q's library like any that is given. */
static int settle_out(la_call *c, PyObject **made)
{
    if (c->out) return 0;
    if (c->library == LA_EXPORTED) {
        PyErr_Format(
            PyExc_ValueError,
            "out: expected an array, got None: a bound step writes it again and again, and "
            "no array of %R can be made here",
            (PyObject *)Py_TYPE(c->like));
        return -1;
    }
    *made = c->object[LA_O];
    c->object[LA_O] = NULL;
    return la_take(c, LA_O, *made) || la_raise(la_check_output(&c->p, LA_O), c->p.message) ? -1 : 0;
}

/* bind(...) as step(...) -> BoundStep */
static PyObject *py_bind(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    (void)self;
    la_call c;
    PyObject *values[LA_PLACES], *answer = NULL, *made = NULL;
    if (la_read_keywords(&c, LA_STEP, args, nargs, names, values)) return NULL;
    c.bound = true;
    if (!la_take_all(&c, values) && !allocate_outputs(&c) && !settle_out(&c, &made))
        answer = la_bound_new(&c);
    if (!answer) la_call_release(&c);
    Py_XDECREF(made);
    return answer;
}

static bool is_there(PyObject *value) { return value && value != Py_None; }

/* The letters of an array in the order of the call, and its dtype in the words of arrays.def (REAL
 * for STORED). Each size is set to its letter, so the shape consists of the letters. */
static PyObject *shape_row(la_problem *p, la_name name)
{
    int64_t shape[LA_MAX_DIMS];
    char letters[LA_MAX_DIMS];
    const la_dtypes dtype = la_array_rows[name].dtype;
    la_name_sizes(p);
    const int ndim = la_shape_of(p, name, shape);
    for (int i = 0; i < ndim; i++) letters[i] = (char)shape[i];
    return Py_BuildValue("(s#s)", letters, (Py_ssize_t)ndim,
                         dtype == LA_DTYPE_OF_Q    ? "OF_Q"
                         : dtype == LA_DTYPE_FLOAT ? "FLOAT"
                                                   : "REAL");
}

static PyObject *shape_rows(la_call *c)
{
    la_set outputs = la_written[c->p.pass] & ~la_read[c->p.pass];
    PyObject *rows = PyList_New(0);
    for (la_name name; rows && la_next(&outputs, &name);) {
        PyObject *row = is_wanted(c, name) ? shape_row(&c->p, name) : Py_None;
        if (row == Py_None) Py_INCREF(row);
        if (!row || PyList_Append(rows, row)) Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    PyObject *table = rows ? PyList_AsTuple(rows) : NULL;
    Py_XDECREF(rows);
    return table;
}

/* The pass that the first argument names; -1 with an exception. */
static int read_pass(PyObject *const *args, Py_ssize_t nargs)
{
    static const char *const passes[] = {"forward", "step", "backward"};
    for (int pass = 0; nargs && PyUnicode_Check(args[0]) && pass < COUNT(passes); pass++)
        if (!PyUnicode_CompareWithASCIIString(args[0], passes[pass])) return pass;
    PyErr_SetString(PyExc_ValueError, "pass: expected 'forward', 'step' or 'backward'");
    return -1;
}

/* outline(pass, op, q, k, v, ...) -> (given, made), the rows of la_outline. The arguments are those of
 * the pass, but of its arrays only the shapes and dtypes are read. */
static PyObject *py_outline(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                            PyObject *names)
{
    (void)self;
    la_call c;
    PyObject *values[LA_PLACES], *answer = NULL;
    const int pass = read_pass(args, nargs);
    if (pass < 0 || la_read_keywords(&c, (la_pass)pass, args + 1, nargs - 1, names, values))
        return NULL;
    c.outline = true;
    if (!la_take_all(&c, values)) answer = la_outline(&c.p);
    la_call_release(&c);
    return answer;
}

/* shapes(pass, op, q=..., ...) -> a row for each array that the pass makes, None where this call
 * makes none. q is its number of dimensions. Of other arrays it counts only whether they are
 * given. */
static PyObject *py_shapes(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    (void)self;
    la_call c;
    PyObject *values[LA_PLACES];
    const int pass = read_pass(args, nargs);
    if (pass < 0) return NULL;
    if (la_read_keywords(&c, (la_pass)pass, args + 1, nargs - 1, names, values) ||
        la_take_options(&c, values))
        return NULL;
    for (int name = 0; name < LA_ARRAYS; name++) c.p.array[name].given = is_there(values[name]);
    for (int i = 0; i < LA_GATE_KEYWORDS; i++)
        if (is_there(values[LA_FIRST_GATE + i])) c.p.array[LA_G].given = true;
    c.p.array[LA_Z0].given = c.p.array[LA_Y0].given = c.p.array[LA_S0].given;
    const long dims = values[LA_Q] ? PyLong_AsLong(values[LA_Q]) : 0;
    if (dims == -1 && PyErr_Occurred()) return NULL;
    c.p.one_head = dims < (pass == LA_STEP ? 3 : 4);
    return shape_rows(&c);
}

/* shares_memory(x, y) -> bool, for arrays that a feature map of Python's keeps from the core */
static PyObject *py_shares_memory(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    if (nargs != 2) {
        PyErr_Format(PyExc_TypeError, "shares_memory: expected 2 arguments, got %zd", nargs);
        return NULL;
    }
    int shared = la_shares_memory(args[0], args[1]);
    return shared < 0 ? NULL : PyBool_FromLong(shared);
}

/* taken() -> the kernel that took this thread's last call: (kernel, unit, why, chunk, bits) */
static PyObject *py_taken(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    const la_taken *x = la_last_taken();
    return Py_BuildValue("(sssLi)", x->kernel, x->unit, x->why, (long long)x->chunk, x->bits);
}

/* ---- gates from projections ---- */

static PyObject *py_gate(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return la_gate_call(args, nargs);
}

/* ---- rooms ---- */

/* scan(form, pass, **arrays): a diagonal scan */
static PyObject *py_scan(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    (void)self;
    return la_room_call(&la_scan_room, args, nargs, names, false);
}

/* convolve(form, pass, **arrays): a causal convolution */
static PyObject *py_convolve(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                             PyObject *names)
{
    (void)self;
    return la_room_call(&la_convolution_room, args, nargs, names, false);
}

static const la_room *const rooms[] = {&la_scan_room, &la_convolution_room};

/* outline_room(room, form, pass, **arrays) -> (given, made), as outline */
static PyObject *py_outline_room(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                                 PyObject *names)
{
    (void)self;
    for (int i = 0; nargs && PyUnicode_Check(args[0]) && i < COUNT(rooms); i++)
        if (!PyUnicode_CompareWithASCIIString(args[0], rooms[i]->name))
            return la_room_call(rooms[i], args + 1, nargs - 1, names, true);
    PyErr_SetString(PyExc_ValueError, "room: expected the name of a room");
    return NULL;
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
    if (la_as_flag(object, "allow", &allow)) return NULL;
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
    {"forward", (PyCFunction)(void (*)(void))py_forward, METH_FASTCALL | METH_KEYWORDS,
     "One forward pass."},
    {"step", (PyCFunction)(void (*)(void))py_step, METH_FASTCALL | METH_KEYWORDS,
     "One token, state in place."},
    {"bind", (PyCFunction)(void (*)(void))py_bind, METH_FASTCALL | METH_KEYWORDS,
     "A step, checked and kept."},
    {"layer_step", (PyCFunction)(void (*)(void))py_layer_step, METH_FASTCALL | METH_KEYWORDS,
     "A step of an op, and the stages around it."},
    {"backward", (PyCFunction)(void (*)(void))py_backward, METH_FASTCALL | METH_KEYWORDS,
     "One backward pass."},
    {"gate", (PyCFunction)(void (*)(void))py_gate, METH_FASTCALL,
     "A gate from a projection, or its gradients."},
    {"late", (PyCFunction)(void (*)(void))la_late_call, METH_FASTCALL,
     "Adds to gradients, as the gradient of a final state does."},
    {"scan", (PyCFunction)(void (*)(void))py_scan, METH_FASTCALL | METH_KEYWORDS,
     "A diagonal scan: one pass of one of its forms."},
    {"convolve", (PyCFunction)(void (*)(void))py_convolve, METH_FASTCALL | METH_KEYWORDS,
     "A causal convolution: one of its passes."},
    {"shapes", (PyCFunction)(void (*)(void))py_shapes, METH_FASTCALL | METH_KEYWORDS,
     "The letters of what a call would make."},
    {"outline", (PyCFunction)(void (*)(void))py_outline, METH_FASTCALL | METH_KEYWORDS,
     "The shapes of a call, checked and not run."},
    {"outline_room", (PyCFunction)(void (*)(void))py_outline_room, METH_FASTCALL | METH_KEYWORDS,
     "The shapes of a call of a room, checked and not run."},
    {"shares_memory", (PyCFunction)(void (*)(void))py_shares_memory, METH_FASTCALL,
     "Do two arrays share memory?"},
    {"taken", py_taken, METH_NOARGS, "The kernel that took this thread's last call."},
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

static const struct {
    const char *label, *letters, *passes, *role, *dtype, *part, *needed, *gradient;
} array_lines[] = {
#define LA_INDEX(name, label, letters, passes) \
    {label, letters, #passes, "INPUT", "INTEGER", "ALWAYS", "OPTIONAL", NULL},
#define LA_ARRAY(name, label, letters, passes, role, dtype, part, needed, gradient) \
    {label, letters, #passes, #role, #dtype, #part, #needed, gradient},
#include "arrays.def"
};

/* A line of arrays.def in its own words. An input that no backward pass takes has no gradient. */
static PyObject *line_of_array(int i)
{
    const bool forward_only =
        !strcmp(array_lines[i].role, "INPUT") && !strchr(array_lines[i].passes, 'B');
    return Py_BuildValue("(ssssssss)", array_lines[i].label, array_lines[i].letters,
                         array_lines[i].passes, array_lines[i].role, array_lines[i].dtype,
                         array_lines[i].part, array_lines[i].needed,
                         forward_only ? NULL : array_lines[i].gradient);
}

static const struct {
    const char *name, *kind, *passes;
} option_lines[] = {
#define LA_OPTION(name, kind, field, passes) {#name, #kind, #passes},
#include "options.def"
};

static PyObject *line_of_option(int i)
{
    return Py_BuildValue("(sss)", option_lines[i].name, option_lines[i].kind,
                         option_lines[i].passes);
}

/* (name, platform, handler) as jax.ffi.register_ffi_target takes them. */
static PyObject *row_of_target(int i)
{
    const la_xla_target *target = &la_xla_targets[i];
    union {
        xla_handler *function;
        void *pointer;
    } handler = {target->handler};
    return Py_BuildValue("(ssN)", target->name, target->platform,
                         PyCapsule_New(handler.pointer, "xla._CUSTOM_CALL_TARGET", NULL));
}

static PyObject *table_of_room(int i) { return la_room_table(rooms[i]); }

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
    if (la_arrays_init() || la_bound_init(module) || la_keywords_init()) return -1;
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
#ifdef LA_WITH_CUDA
    const char *limit = la_cuda_limit_unreadable();
    if (limit) {
        PyErr_Format(PyExc_ImportError,
                     "LINATTN_SHARED_LIMIT: expected a number of bytes from 49152 on, got %s",
                     limit);
        return -1;
    }
#endif
    const char *text, *variable = la_threads_unreadable(&text);
    if (variable) {
        PyErr_Format(PyExc_ImportError, "%s: expected 1 to 256 threads, got %s", variable, text);
        return -1;
    }
    int failed = add_table(module, "OPS", LA_OPS, name_of_op) ||
                 add_table(module, "VARIANTS", LA_OPS, row_of_op) ||
                 add_table(module, "ARRAYS", COUNT(array_lines), line_of_array) ||
                 add_table(module, "OPTIONS", COUNT(option_lines), line_of_option) ||
                 add_table(module, "ROOMS", COUNT(rooms), table_of_room) ||
                 add_table(module, "XLA_TARGETS", la_xla_target_count, row_of_target);
#if defined(__clang__)
    failed = failed || PyModule_AddStringConstant(module, "COMPILER", "clang " __clang_version__);
#else
    failed = failed || PyModule_AddStringConstant(module, "COMPILER", "gcc " __VERSION__);
#endif
    failed = failed || PyModule_AddStringConstant(module, "CUDA_ARCHS", LA_CUDA_ARCHS);
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
    .m_doc = "The C core of linattn; users call linattn/ops.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__linattn(void) { return PyModuleDef_Init(&definition); }
