/* Calls of rooms (room.h) from Python: keywords in, arrays and exceptions out. */
#include "rooms.h"

#include "run.h"

#include <stdio.h>
#include <string.h>

#define COUNT(table) (int)(sizeof(table) / sizeof *(table))

static const char *const pass_names[] = {
    [LA_FORWARD] = "forward", [LA_STEP] = "step", [LA_BACKWARD] = "backward"};

/* One call, and the names of its arrays. */
typedef struct {
    la_call c;
    la_room_job *j;
    const char *labels[LA_ARRAYS];
} room_call;

/* ---- keywords ---- */

static int word_of(PyObject *word, const char *const *names, int count)
{
    for (int i = 0; PyUnicode_Check(word) && i < count; i++)
        if (!PyUnicode_CompareWithASCIIString(word, names[i])) return i;
    return -1;
}

static int read_form(const la_room *room, PyObject *word)
{
    for (int i = 0; PyUnicode_Check(word) && i < room->forms; i++)
        if (!PyUnicode_CompareWithASCIIString(word, room->form[i].name)) return i;
    return -1;
}

static int refuse_word(const la_room_option *option, PyObject *object)
{
    char list[128] = "None";
    for (const char *const *word = option->words; *word; word++) {
        const size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, word[1] ? ", '%s'" : " or '%s'", *word);
    }
    if (PyUnicode_Check(object))
        PyErr_Format(PyExc_ValueError, "%s: expected %s, got %R", option->label, list, object);
    else
        PyErr_Format(PyExc_TypeError, "%s: expected %s, got %R", option->label, list,
                     (PyObject *)Py_TYPE(object));
    return -1;
}

static int take_word(la_room_job *j, const la_room_option *option, PyObject *object)
{
    int count = 0;
    while (option->words[count]) count++;
    const int i = object == Py_None ? 0 : 1 + word_of(object, option->words, count);
    *(int *)((char *)j + option->offset) = i;
    return i || object == Py_None ? 0 : refuse_word(option, object);
}

static int take_option(la_room_job *j, const la_room_option *option, PyObject *object)
{
    if (option->words) return take_word(j, option, object);
    return la_as_flag(object, option->label, (bool *)((char *)j + option->offset));
}

/* Arrays in the order of the table, the first of which says where the call runs. */
static int take_all(room_call *r, PyObject *const *values, PyObject *names)
{
    la_room_job *const j = r->j;
    const la_room *room = j->room;
    PyObject *found[LA_ROOM_LINES] = {NULL};
    const Py_ssize_t count = names ? PyTuple_Size(names) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *const name = PyTuple_GetItem(names, i);
        bool known = false;
        for (int k = 0; k < room->options && !known; k++) {
            const la_room_option *option = &room->option[k];
            if (!(option->passes >> j->p->pass & 1)) continue;
            known = !PyUnicode_CompareWithASCIIString(name, option->label);
            if (known && take_option(j, option, values[i])) return -1;
        }
        for (int k = 0; k < room->lines && !known; k++) {
            if (!la_room_is_given(j, k)) continue;
            const char *label = r->labels[la_room_given_slot(j, k)];
            known = label && !PyUnicode_CompareWithASCIIString(name, label);
            if (known) found[k] = values[i];
        }
        if (known) continue;
        PyErr_Format(PyExc_TypeError, "%s: no argument of this pass is called %R", room->name,
                     name);
        return -1;
    }
    for (int k = 0; k < room->lines; k++)
        if (found[k] && la_take(&r->c, la_room_given_slot(j, k), found[k])) return -1;
    if (r->c.out && (j->states_only || j->want_map)) {
        PyErr_SetString(PyExc_ValueError,
                        "out: expected None, for a call of states alone has no y");
        return -1;
    }
    return la_raise(la_room_check(j), r->c.p.message);
}

/* ---- outputs ---- */

static bool is_made(const room_call *r, int line)
{
    const la_room_job *j = r->j;
    const la_name slot = j->room->line[line].slot;
    const bool output = la_room_is_output(j->room, line);
    if (!la_room_has(j, line) || output == (j->p->pass == LA_BACKWARD)) return false;
    if (!output) return j->states_only ? slot == LA_S0 : j->array[line] != NULL;
    if (slot == LA_O) return !r->c.out && !j->states_only;
    return slot == LA_MT ? j->want_map : j->want_final || j->states_only;
}

static int make_outputs(room_call *r)
{
    la_room_job *const j = r->j;
    const bool gradient = j->p->pass == LA_BACKWARD;
    for (int i = 0; i < j->room->lines; i++) {
        const la_name slot = la_room_slot(j, i, gradient);
        la_array like;
        if (is_made(r, i)) {
            la_room_shape(j, i, &like);
            if (la_allocate_like(&r->c, slot, la_dtype_of(j->p, slot), &like)) return -1;
        } else if (!(slot == LA_O && r->c.out)) {
            continue;
        }
        if (la_raise(la_room_settle(j, i, gradient), r->c.p.message)) return -1;
    }
    return r->c.out || j->p->pass == LA_STEP ? la_refuse_overlaps(&r->c) : 0;
}

/* The results of the pass: y of a step; (y, final state) of a forward pass, and M if it is asked
 * for; or a gradient for each input. */
static PyObject *results(room_call *r)
{
    la_room_job *const j = r->j;
    const bool gradients = j->p->pass == LA_BACKWARD;
    if (j->p->pass == LA_STEP) return la_result(&r->c, LA_O);
    PyObject *tuple = NULL, *found[LA_ROOM_LINES];
    int n = 0;
    for (int i = 0; i < j->room->lines; i++) {
        if (!la_room_has(j, i) || la_room_is_output(j->room, i) == gradients) continue;
        const la_name slot = j->room->line[i].slot;
        if (la_array_rows[slot].dtype == LA_DTYPE_INTEGER) continue;
        if (slot == LA_MT && !j->want_map) continue;
        if (!(found[n] = la_result(&r->c, la_room_slot(j, i, gradients)))) break;
        n++;
    }
    if (!PyErr_Occurred()) tuple = PyTuple_New(n);
    for (int i = 0; i < n; i++)
        if (tuple)
            PyTuple_SetItem(tuple, i, found[i]); /* takes the reference over */
        else
            Py_DECREF(found[i]);
    return tuple;
}

/* ---- an outline ---- */

/* (label, letters, shape, dtype) of the array in a slot, or of its gradient. */
static PyObject *row_of_slot(const room_call *r, int line, la_name slot, bool made)
{
    const la_problem *p = r->j->p;
    const la_room_line *x = &r->j->room->line[line];
    char letters[LA_MAX_DIMS + 1];
    la_array like = p->array[slot];
    const bool index = la_array_rows[slot].dtype == LA_DTYPE_INTEGER;
    la_room_letters(r->j, line, letters);
    if (!index) la_room_shape(r->j, line, &like);
    PyObject *sizes = la_tuple_of(like.ndim, like.shape);
    if (!sizes) return NULL;
    const la_dtype dtype = made ? la_dtype_of(p, slot) : p->array[slot].dtype;
    return Py_BuildValue("(ssNs)", r->labels[slot],
                         !index             ? letters
                         : x->slot == LA_CU ? "O" /* S + 1 */
                                            : "B",
                         sizes, la_dtype_names[dtype]);
}

static int add_row(PyObject *rows, PyObject *row)
{
    const int failed = !row || PyList_Append(rows, row);
    Py_XDECREF(row);
    return failed;
}

static PyObject *outline(const room_call *r)
{
    const la_room_job *j = r->j;
    const bool gradient = j->p->pass == LA_BACKWARD;
    PyObject *given = PyList_New(0), *made = PyList_New(0);
    int failed = !given || !made;
    for (int i = 0; i < j->room->lines && !failed; i++) {
        const la_name slot = la_room_given_slot(j, i);
        const bool state = j->p->pass == LA_STEP && slot == LA_S0;
        if (la_room_is_given(j, i) && j->p->array[slot].given)
            failed = add_row(given, row_of_slot(r, i, slot, false)) ||
                     (state && add_row(made, row_of_slot(r, i, slot, false)));
        if (!failed && is_made(r, i))
            failed = add_row(made, row_of_slot(r, i, la_room_slot(j, i, gradient), true));
    }
    PyObject *both = failed ? NULL : PyTuple_Pack(2, given, made);
    Py_XDECREF(given);
    Py_XDECREF(made);
    return both;
}

/* ---- a call ---- */

static int refuse_words(const la_room *room, Py_ssize_t nargs)
{
    PyErr_Format(PyExc_TypeError, "%s: expected a form and a pass, then keywords, got %zd words",
                 room->name, nargs);
    return -1;
}

PyObject *la_room_call(const la_room *room, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *names, bool outlined)
{
    enum { FORM, PASS, WORDS };
    const int form = nargs == WORDS ? read_form(room, args[FORM]) : -1;
    const int pass = nargs == WORDS ? word_of(args[PASS], pass_names, COUNT(pass_names)) : -1;
    if (form < 0 || pass < 0) {
        refuse_words(room, nargs);
        return NULL;
    }
    room_call r;
    memset(&r, 0, sizeof r);
    PyObject *answer = NULL;
    la_problem_init(&r.c.p, (la_op)0, (la_pass)pass);
    r.c.p.labels = r.labels;
    r.c.p.any_strides = true;
    r.c.gradients = -1; /* the caller has seen that PyTorch records none of the arrays */
    if (!(r.j = PyMem_Calloc(1, room->job_bytes))) return PyErr_NoMemory();
    r.j->room = room;
    r.j->form = form;
    r.j->p = &r.c.p;
    la_room_name_arrays(r.j, r.labels);
    r.c.outline = outlined;
    if (!take_all(&r, args + WORDS, names)) {
        if (outlined)
            answer = outline(&r);
        else if (!make_outputs(&r) && !la_run_room(&r.c, r.j))
            answer = results(&r);
    }
    la_call_release(&r.c);
    PyMem_Free(r.j);
    return answer;
}

/* ---- the table, for Python ---- */

/* ("FSB"): the passes of a line, as the tables write them. */
static void write_passes(int passes, char to[4])
{
    for (int pass = 0; pass < 3; pass++)
        if (passes >> pass & 1) *to++ = "FSB"[pass];
    *to = 0;
}

static PyObject *forms_of(const la_room *room, const la_room_line *line)
{
    PyObject *names = PyList_New(0);
    for (int i = 0; names && i < room->forms; i++) {
        if (!(line->forms >> i & 1)) continue;
        PyObject *name = PyUnicode_FromString(room->form[i].name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    PyObject *tuple = names ? PyList_AsTuple(names) : NULL;
    Py_XDECREF(names);
    return tuple;
}

static PyObject *row_of_line(const la_room *room, int i)
{
    const la_room_line *line = &room->line[i];
    const la_array_row *slot = &la_array_rows[line->slot];
    const char *role = slot->role == LA_OUTPUT  ? "OUTPUT"
                       : slot->role == LA_STATE ? "STATE"
                                                : "INPUT";
    char passes[4];
    write_passes(line->passes, passes);
    return Py_BuildValue("(ssssOzN)", line->label, line->letters, passes, role,
                         line->need == LA_REQUIRED ? Py_True : Py_False, line->gradient,
                         forms_of(room, line));
}

static PyObject *row_of_option(const la_room *room, int i)
{
    const la_room_option *option = &room->option[i];
    char passes[4];
    write_passes(option->passes, passes);
    return Py_BuildValue("(ssO)", option->label, passes, option->words ? Py_True : Py_False);
}

static PyObject *row_of_form(const la_room *room, int i)
{
    return Py_BuildValue("(ss)", room->form[i].name, room->form[i].left_out);
}

static PyObject *table_of(const la_room *room, int count, PyObject *(*row)(const la_room *, int))
{
    PyObject *table = PyTuple_New(count);
    for (int i = 0; table && i < count; i++) {
        PyObject *one = row(room, i);
        if (!one || PyTuple_SetItem(table, i, one)) Py_CLEAR(table);
    }
    return table;
}

PyObject *la_room_table(const la_room *room)
{
    return Py_BuildValue("(sNNN)", room->name, table_of(room, room->forms, row_of_form),
                         table_of(room, room->lines, row_of_line),
                         table_of(room, room->options, row_of_option));
}
