/* Where the arrays of a call lie: have they stayed there since they were read, and does what is
 * written share memory with what is read? */
#include "views.h"

#include <string.h>

static PyObject *word_untyped_storage;

int la_places_init(void)
{
    word_untyped_storage = PyUnicode_InternFromString("untyped_storage");
    return word_untyped_storage ? 0 : -1;
}

/* ---- have the arrays stayed where they were? ---- */

/* To read an argument may run Python, and Python may resize an array that was read before. NumPy and
 * the exchange table say without Python where an array lies by now. */
static int place_now(const la_call *c, la_name name, la_span *now, bool *read_only)
{
    PyObject *const object = c->object[name];
    *read_only = false;
    if (!c->lender[name]) {
        *now = la_span_of_numpy((PyArrayObject *)object);
        *read_only = !PyArray_ISWRITEABLE((PyArrayObject *)object);
        return 0;
    }
    dl_tensor tensor;
    la_layout layout;
    int64_t low, high;
    if (c->lender[name]->borrow(object, &tensor)) return la_name_error(la_array_name(&c->p, name));
    if (la_read_tensor(&layout, &tensor) != LA_LAYOUT_FITS) {
        *now = (la_span){NULL, NULL};
        return 0;
    }
    char *const data = (char *)tensor.data + tensor.byte_offset;
    la_extent(layout.ndim, layout.shape, layout.stride, la_element_bytes(tensor.dtype), &low,
              &high);
    *now = (la_span){data + low, data + high};
    return 0;
}

int la_still_there(const la_call *c)
{
    la_set given = la_read[c->p.pass] | la_written[c->p.pass];
    for (la_name name; la_next(&given, &name);) {
        la_span now;
        bool read_only;
        if (!c->lent[name]) continue;
        if (place_now(c, name, &now, &read_only)) return -1;
        if (now.low != c->span[name].low || now.high != c->span[name].high) {
            PyErr_Format(PyExc_ValueError,
                         "%s: expected its memory to stay where it is, got an array whose memory "
                         "was exchanged or resized since it was read",
                         la_array_name(&c->p, name));
            return -1;
        }
        if (read_only && la_in(la_written[c->p.pass], name))
            return la_refuse_read_only(la_array_name(&c->p, name));
    }
    return 0;
}

/* PyTorch's .data and set_ give a tensor other memory, and free the old, unless its storage is held. Call
 * this before other threads may run, and before the last look at where arrays lie. */
int la_hold(la_call *c)
{
    la_set given = la_read[c->p.pass] | la_written[c->p.pass];
    for (la_name name; la_next(&given, &name);) {
        if (!c->lent[name] || !c->lender[name]) continue;
        c->storage[name] = PyObject_CallMethodObjArgs(c->object[name], word_untyped_storage, NULL);
        if (c->storage[name]) continue;
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) /* not PyTorch's */
            return la_name_error(la_array_name(&c->p, name));
        PyErr_Clear();
    }
    return 0;
}

/* ---- what may not share memory ---- */

/* An array as runs of bytes at multiples of steps: axes that follow each other without a gap are
 * one run. Returns the greatest common divisor of the steps that are left, 0 if there is none. */
static int64_t runs_of(const la_array *x, int64_t *run)
{
    const int64_t size = la_size_of(x->dtype);
    bool used[LA_MAX_DIMS] = {false};
    int64_t common = 0;
    *run = size;
    for (bool grown = true; grown;) {
        grown = false;
        for (int i = 0; i < x->ndim; i++)
            if (!used[i] && la_distance(x->stride[i]) * size == *run) {
                used[i] = grown = true;
                *run *= x->shape[i];
            }
    }
    for (int i = 0; i < x->ndim; i++) {
        if (used[i] || x->shape[i] <= 1) continue;
        for (int64_t a = la_distance(x->stride[i]) * size; a;) { /* Euclid */
            const int64_t rest = common % a;
            common = a;
            a = rest;
        }
    }
    return common;
}

/* On a device the general question is not solved. Runs at multiples of one common step lie apart if they
 * do within one step, so neighbours along one axis of a buffer are told apart. Other arrays whose extents
 * meet count as shared. */
static bool may_overlap(const la_array *x, la_span at_x, const la_array *y, la_span at_y)
{
    if (x->data < at_x.low || x->data >= at_x.high || y->data < at_y.low || y->data >= at_y.high)
        return true; /* a copy, whose original has lost its strides */
    int64_t run_x, run_y, step = runs_of(x, &run_x), a = runs_of(y, &run_y);
    while (a) {
        const int64_t rest = step % a;
        step = a;
        a = rest;
    }
    if (!step) return true;
    const int64_t apart = ((at_y.low - at_x.low) % step + step) % step;
    return run_x > apart || apart + run_y > step;
}

/* The array as NumPy sees it where it is the user's. */
static PyObject *numpy_of(la_call *c, la_name name)
{
    if (!c->given[name]) c->given[name] = la_numpy_over(&c->p.array[name]);
    return c->given[name];
}

/* NumPy's exact answer for two of its arrays: 1, 0 or -1. */
static int shares_in_numpy(PyObject *one, PyObject *two)
{
    PyObject *numpy = one && two ? PyImport_ImportModule("numpy") : NULL;
    PyObject *shared = numpy ? PyObject_CallMethod(numpy, "shares_memory", "OO", one, two) : NULL;
    Py_XDECREF(numpy);
    if (!shared) return -1;
    const int answer = PyObject_IsTrue(shared);
    Py_DECREF(shared);
    return answer;
}

/* Extents first; only where they meet is the exact answer looked for. 1, 0 or -1. */
static int overlap(la_call *c, la_name name, la_name other)
{
    const la_span x = c->span[name], y = c->span[other];
    if (!la_meet(x, y)) return 0;
    if (c->p.device == LA_CUDA) return may_overlap(&c->p.array[name], x, &c->p.array[other], y);
    c->ran_python = true; /* NumPy's function may be someone's own by now */
    return shares_in_numpy(numpy_of(c, name), numpy_of(c, other));
}

static int refuse_overlap(la_call *c, la_name written, la_name other)
{
    const int shared = overlap(c, written, other);
    if (shared > 0)
        PyErr_Format(PyExc_ValueError, "%s: expected memory of its own, got memory shared with %s",
                     la_array_name(&c->p, written), la_array_name(&c->p, other));
    return shared ? -1 : 0;
}

int la_refuse_overlaps(la_call *c)
{
    la_set written = la_written[c->p.pass], states = written & la_read[c->p.pass];
    for (la_name name; la_next(&written, &name);) {
        la_set others = la_read[c->p.pass] & ~states; /* what is read and nothing else */
        others |= la_in(states, name) ? states & written : states; /* two states are one pair */
        for (la_name other; la_next(&others, &other);)
            if (refuse_overlap(c, name, other)) return -1;
    }
    return 0;
}

/* Where an array lies that is no argument of a call. */
typedef struct {
    la_device device;
    int ordinal;
    la_array array;
    la_span span;
    PyObject *seen; /* on the host, by NumPy; owned */
} place;

static int place_of(PyObject *object, place *x)
{
    la_call reader; /* reads it as a q, and is never checked nor run */
    memset(&reader, 0, sizeof reader);
    reader.p.any_strides = true; /* no copy takes its place */
    const int failed = la_take(&reader, LA_Q, object);
    *x = (place){reader.p.device, reader.p.ordinal, reader.p.array[LA_Q], reader.span[LA_Q], NULL};
    if (!failed && x->array.given && x->device == LA_CPU) {
        x->seen = numpy_of(&reader, LA_Q);
        Py_XINCREF(x->seen);
    }
    la_call_release(&reader);
    return failed;
}

int la_shares_memory(PyObject *one, PyObject *two)
{
    place x, y = {.seen = NULL};
    int shared = place_of(one, &x) || place_of(two, &y) ? -1 : 0;
    if (!shared && x.device == y.device && x.ordinal == y.ordinal && la_meet(x.span, y.span))
        shared = x.device == LA_CUDA ? may_overlap(&x.array, x.span, &y.array, y.span)
                                     : shares_in_numpy(x.seen, y.seen);
    Py_XDECREF(x.seen);
    Py_XDECREF(y.seen);
    return shared;
}
