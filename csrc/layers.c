/* Layer steps from Python: tuples of arrays in, exceptions out. */
#include "layers.h"

#include "arrays.h"
#include "gate_calls.h"
#include "keywords.h"
#include "run.h"

#include <string.h>

#define COUNT(table) (int)(sizeof(table) / sizeof *(table))

/* A stage's arrays, taken as those of a call of its own. */
typedef struct {
    la_call c;
    const char *labels[LA_ARRAYS];
} stage_call;

/* The places of arrays that only stages have, in a call of their own. */
#define LA_LAYER_A_LOG LA_K
#define LA_LAYER_DT_BIAS LA_V
#define LA_LAYER_WEIGHT LA_G
#define LA_LAYER_GATE LA_BETA

struct la_layer_call {
    la_layer layer;
    stage_call of_convolution[LA_LAYER_CONVOLUTIONS];
    la_convolution convolution[LA_LAYER_CONVOLUTIONS];
    stage_call rest;
    la_array raw_g, raw_beta;
    la_gating g, beta, weight;
    la_group_norm norm;
    bool weighs;
    int silu;
    PyObject *stages, *state[LA_LAYER_CONVOLUTIONS], *memory; /* the user's call owns them */
};

la_layer_call *la_layer_new(void)
{
    la_layer_call *l = PyMem_Calloc(1, sizeof *l);
    return l ? l : (la_layer_call *)PyErr_NoMemory();
}

void la_layer_free(la_layer_call *l)
{
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS; i++) la_call_release(&l->of_convolution[i].c);
    la_call_release(&l->rest.c);
    PyMem_Free(l);
}

static const char *const words[LA_ACTIVATIONS] = {NULL, "silu", "sigmoid"};

static int take_activation(PyObject *word, const char *label, int most, int *to)
{
    for (*to = 0; *to <= most; ++*to)
        if (*to ? PyUnicode_Check(word) && !PyUnicode_CompareWithASCIIString(word, words[*to])
                : word == Py_None)
            return 0;
    PyErr_Format(PyUnicode_Check(word) ? PyExc_ValueError : PyExc_TypeError,
                 most == LA_SILU ? "%s: expected None or 'silu', got %R"
                                 : "%s: expected None, 'silu' or 'sigmoid', got %R",
                 label, word);
    return -1;
}

static void begin(stage_call *s, const la_call *step, PyObject *q)
{
    la_problem_init(&s->c.p, (la_op)0, LA_STEP);
    s->c.p.labels = s->labels;
    s->c.p.any_strides = true;
    s->c.gradients = step->gradients;
    s->c.like = q;
}

static int refuse_shape(const char *label, const la_array *a, const char *letters)
{
    PyObject *shape = la_tuple_of(a->ndim, a->shape);
    if (shape) PyErr_Format(PyExc_ValueError, "%s: expected [%s], got %R", label, letters, shape);
    Py_XDECREF(shape);
    return -1;
}

/* ---- projections by heads ---- */

static int refuse_projection(const la_array *a, const char *label, const char *letters,
                             int64_t heads, int64_t size)
{
    PyObject *shape = la_tuple_of(a->ndim, a->shape);
    if (shape)
        PyErr_Format(PyExc_ValueError, "%s: expected [N,%s] with %lld heads of %lld, got %R", label,
                     letters, (long long)heads, (long long)size, shape);
    Py_XDECREF(shape);
    return -1;
}

/* [N,heads * size] as [N,heads,size]. An array that is missing is la_check's affair. */
static int by_heads(la_call *c, la_name name, const char *letters, int64_t heads, int64_t size)
{
    la_array *a = &c->p.array[name];
    if (!a->given) return 0;
    if (a->ndim != 2 || a->shape[1] != heads * size)
        return refuse_projection(a, la_array_name(&c->p, name), letters, heads, size);
    const int64_t one = a->stride[1];
    a->ndim = 3;
    a->shape[1] = heads, a->shape[2] = size;
    a->stride[1] = size * one, a->stride[2] = one;
    return 0;
}

/* The state says how long a head is. */
static int split_projections(la_call *c)
{
    const la_array *S = &c->p.array[LA_S0], *q = &c->p.array[LA_Q];
    if (!S->given) {
        PyErr_SetString(PyExc_TypeError, "state: expected an array, got None");
        return -1;
    }
    if (S->ndim != 4) return refuse_shape("state", S, "N,HV,K,V");
    const bool v_first = c->p.state_v_first;
    const int64_t HV = S->shape[1], K = S->shape[v_first ? 3 : 2], V = S->shape[v_first ? 2 : 3];
    const int64_t H = q->given && q->ndim == 2 && K ? q->shape[1] / K : HV;
    if (q->given && q->ndim == 2 && K && q->shape[1] % K) {
        PyErr_Format(PyExc_ValueError, "q: expected [N,H*K] with K = %lld, got %lld columns",
                     (long long)K, (long long)q->shape[1]);
        return -1;
    }
    const bool by_key = la_variants[c->p.op].decay == LA_KEY;
    return by_heads(c, LA_Q, "H*K", H, K) || by_heads(c, LA_K, "H*K", H, K) ||
           by_heads(c, LA_V, "HV*V", HV, V) || (by_key && by_heads(c, LA_G, "HV*K", HV, K));
}

/* ---- convolutions ---- */

static const char *const convolution_labels[LA_LAYER_CONVOLUTIONS][4] = {
    {"q", "q_conv[0]", "q_conv[1]", "q_conv[2]"},
    {"k", "k_conv[0]", "k_conv[1]", "k_conv[2]"},
    {"v", "v_conv[0]", "v_conv[1]", "v_conv[2]"}};

static int refuse_tuple(const char *label, PyObject *object)
{
    PyErr_Format(PyExc_TypeError, "%.6s: expected (weight, bias or None, state), got %R", label,
                 (PyObject *)Py_TYPE(object));
    return -1;
}

/* A weight [D,1,W], as Conv1d of PyTorch has it, is [D,W]. */
static void drop_middle(la_array *weight)
{
    if (weight->ndim != 3 || weight->shape[1] != 1) return;
    weight->ndim = 2;
    weight->shape[1] = weight->shape[2];
    weight->stride[1] = weight->stride[2];
}

static int take_convolution(la_layer_call *l, int i, la_call *step, PyObject *arrays,
                            PyObject *const *values)
{
    static const la_name places[] = {LA_G, LA_BETA, LA_S0};
    stage_call *const s = &l->of_convolution[i];
    la_convolution *const j = &l->convolution[i];
    const char *const *labels = convolution_labels[i];
    la_array *const x = &step->p.array[la_convolved[i]];
    if (!PyTuple_Check(arrays) || PyTuple_Size(arrays) != 3) return refuse_tuple(labels[1], arrays);
    begin(s, step, values[LA_Q]);
    s->labels[LA_Q] = labels[0];
    for (int k = 0; k < 3; k++) s->labels[places[k]] = labels[k + 1];
    s->labels[LA_SLOT] = "state_indices";
    s->labels[LA_O] = "out";
    if (la_take(&s->c, LA_Q, values[la_convolved[i]])) return -1;
    for (int k = 0; k < 3; k++)
        if (la_take(&s->c, places[k], PyTuple_GetItem(arrays, k))) return -1;
    drop_middle(&s->c.p.array[LA_G]);
    if (values[LA_SLOT] && la_take(&s->c, LA_SLOT, values[LA_SLOT])) return -1;
    *j = (la_convolution){.room = {.room = &la_convolution_room, .p = &s->c.p}, .silu = l->silu};
    if (la_raise(la_room_check(&j->room), s->c.p.message) || la_refuse_overlaps(&s->c)) return -1;
    const int64_t shape[] = {j->B, j->D};
    la_layer_reserve(&s->c.p, LA_O, s->c.p.array[LA_Q].dtype, 2, shape);
    if (la_raise(la_room_settle(&j->room, LA_CONVOLUTION_Y, false), s->c.p.message)) return -1;
    l->layer.convolution[i] = j;
    l->state[i] = PyTuple_GetItem(arrays, 2);
    la_layer_reserve(&step->p, la_convolved[i], x->dtype, x->ndim, x->shape);
    return 0;
}

/* ---- gates ---- */

static int refuse_numbers(const la_call *c, la_name name)
{
    return la_refuse_dtype(la_array_name(&c->p, name), name, la_dl_dtypes[c->p.array[name].dtype]);
}

/* [N,HV] as [N,HV,1]: numbers of heads may lie anywhere, those of keys side by side. */
static int by_keys(la_array *x)
{
    if (x->ndim == 2) {
        x->ndim = 3;
        x->shape[2] = x->stride[2] = 1;
    }
    return x->ndim == 3;
}

/* The parameters of a gate, in the dimensions of x [N,HV,K]. */
static int fit_parameters(la_layer_call *l, const la_array *x, bool keyed)
{
    la_array *A = &l->rest.c.p.array[LA_LAYER_A_LOG], *b = &l->rest.c.p.array[LA_LAYER_DT_BIAS];
    const int64_t HV = x->shape[1], K = x->shape[2];
    if (A->given && (A->ndim != 1 || A->shape[0] != HV)) return refuse_shape("A_log", A, "HV");
    if (b->given && (b->ndim != 1 || b->shape[0] != HV * K))
        return refuse_shape("dt_bias", b, keyed ? "HV*K" : "HV");
    A->ndim = b->ndim = 2;
    A->shape[1] = A->stride[1] = 1;
    b->shape[0] = HV, b->shape[1] = K;
    b->stride[1] = b->stride[0], b->stride[0] *= K;
    return 0;
}

/* A stage that makes the step's array `name` of numbers raw, which have the shape of a gate. */
static int settle_gate(la_call *step, la_name name, const la_array *raw, bool keyed, la_gating *j)
{
    const la_array *which;
    j->x = raw;
    j->device = step->p.device;
    j->ordinal = step->p.ordinal;
    j->stream = step->p.stream;
    const la_gating_fault fault = la_gates_check(j, &which);
    if (fault == LA_GATING_DTYPE) return refuse_numbers(step, name);
    if (fault != LA_GATING_FITS)
        return refuse_shape(la_array_name(&step->p, name), raw, keyed ? "N,HV*K" : "N,HV");
    la_layer_reserve(&step->p, name, j->real, keyed ? 3 : 2, raw->shape);
    return 0;
}

/* The projection of a gate: its array in the step becomes the gate. */
static int take_gate(la_layer_call *l, la_call *step, la_name name, la_array *raw, la_gating *j)
{
    const la_array *x = &step->p.array[name];
    const char *const label = la_array_name(&step->p, name);
    const bool keyed = x->ndim == 3;
    if (!x->given) {
        PyErr_Format(PyExc_TypeError, "%s: expected an array, got None", label);
        return -1;
    }
    *raw = *x;
    if (raw->on_host || raw->number || (keyed && la_variants[step->p.op].decay != LA_KEY) ||
        !by_keys(raw))
        return refuse_shape(label, x, "N,HV");
    if (name == LA_G && fit_parameters(l, raw, keyed)) return -1;
    return settle_gate(step, name, raw, keyed, j);
}

/* softplus(g + dt_bias) becomes the step's weight of v. */
static int take_weight(la_layer_call *l, la_call *step)
{
    const la_variant *op = &la_variants[step->p.op];
    if (!la_weighs(op->decay, op->rule)) {
        PyErr_Format(PyExc_ValueError,
                     "weigh: expected False, since the writes of %s have no weights", op->name);
        return -1;
    }
    if (l->g.curve != LA_SOFTPLUS) {
        PyErr_SetString(PyExc_ValueError, "weigh: expected decay='softplus' beside it");
        return -1;
    }
    if (step->p.array[LA_WEIGHT].given) {
        PyErr_SetString(PyExc_ValueError, "weigh: expected False beside weight");
        return -1;
    }
    l->weight.curve = LA_SOFTPLUS;
    l->weight.factor = 1;
    l->weight.dt_bias = l->g.dt_bias;
    l->layer.weight = &l->weight;
    return settle_gate(step, LA_WEIGHT, &l->raw_g, false, &l->weight);
}

/* stage: (name, factor, A_log, dt_bias, weigh) */
static int take_decay(la_layer_call *l, la_call *step, PyObject *stage)
{
    la_call *const rest = &l->rest.c;
    if (step->p.gate != LA_LOG) {
        PyErr_Format(PyExc_ValueError, "%s: expected g in its place, which decay= is for",
                     la_array_name(&step->p, LA_G));
        return -1;
    }
    if (la_take(rest, LA_LAYER_A_LOG, PyTuple_GetItem(stage, 2)) ||
        la_take(rest, LA_LAYER_DT_BIAS, PyTuple_GetItem(stage, 3)))
        return -1;
    for (la_name name = LA_LAYER_A_LOG; name <= LA_LAYER_DT_BIAS; name++)
        if (rest->p.array[name].given && rest->p.array[name].dtype > LA_BF16)
            return refuse_numbers(rest, name);
    if (rest->p.array[LA_LAYER_A_LOG].given) l->g.A_log = &rest->p.array[LA_LAYER_A_LOG];
    if (rest->p.array[LA_LAYER_DT_BIAS].given) l->g.dt_bias = &rest->p.array[LA_LAYER_DT_BIAS];
    if (take_gate(l, step, LA_G, &l->raw_g, &l->g)) return -1;
    l->layer.g = &l->g;
    step->quiet = true; /* no gate of these grows */
    return l->weighs ? take_weight(l, step) : 0;
}

/* ---- the norm ---- */

/* stage: (weight, eps, gate, activation, does the gate come first, groups or None) */
static int take_norm(la_layer_call *l, PyObject *stage)
{
    la_call *const rest = &l->rest.c;
    if (la_take(rest, LA_LAYER_WEIGHT, PyTuple_GetItem(stage, 0)) ||
        la_take(rest, LA_LAYER_GATE, PyTuple_GetItem(stage, 2)))
        return -1;
    const la_name both[] = {LA_LAYER_WEIGHT, LA_LAYER_GATE};
    for (int i = 0; i < COUNT(both); i++)
        if (rest->p.array[both[i]].given && rest->p.array[both[i]].dtype > LA_BF16)
            return refuse_numbers(rest, both[i]);
    const la_array *weight = &rest->p.array[LA_LAYER_WEIGHT];
    const la_array *gate = &rest->p.array[LA_LAYER_GATE];
    if (weight->given) l->norm.weight = weight;
    if (gate->given) l->norm.gate = gate;
    if (weight->given || gate->given) l->layer.norm = &l->norm;
    return 0;
}

static int settle_norm(la_layer_call *l, const la_problem *p)
{
    la_group_norm *const norm = &l->norm;
    const la_array *weight = norm->weight, *gate = norm->gate;
    const int64_t numbers = p->HV * p->V;
    if (!l->layer.norm) return 0;
    if (!norm->groups) norm->groups = p->HV;
    if (numbers % norm->groups) {
        PyErr_Format(PyExc_ValueError, "norm_groups: expected a divisor of HV*V = %lld, got %lld",
                     (long long)numbers, (long long)norm->groups);
        return -1;
    }
    const bool by_head = norm->groups == p->HV;
    if (weight && (weight->ndim != 1 ||
                   !(weight->shape[0] == numbers || (by_head && weight->shape[0] == p->V))))
        return refuse_shape("norm_weight", weight, by_head ? "V] or [HV*V" : "HV*V");
    if (gate && (gate->ndim != 2 || gate->shape[0] != p->B || gate->shape[1] != numbers))
        return refuse_projection(gate, "output_gate", "HV*V", p->HV, p->V);
    return 0;
}

/* ---- a call ---- */

/* stages: (q_conv, k_conv, v_conv, activation, decay, factor of beta, norm), None for each that is
 * missing */
enum { ACTIVATION = LA_LAYER_CONVOLUTIONS, DECAY, BETA, NORM, STAGES };

static bool is_tuple_of(PyObject *object, Py_ssize_t size)
{
    return PyTuple_Check(object) && PyTuple_Size(object) == size;
}

static int take_rest(la_layer_call *l, la_call *step, PyObject *decay, PyObject *norm,
                     PyObject *const *values)
{
    if (decay == Py_None && norm == Py_None) return 0;
    begin(&l->rest, step, values[LA_Q]);
    l->rest.labels[LA_Q] = "q";
    l->rest.labels[LA_LAYER_A_LOG] = "A_log";
    l->rest.labels[LA_LAYER_DT_BIAS] = "dt_bias";
    l->rest.labels[LA_LAYER_WEIGHT] = "norm_weight";
    l->rest.labels[LA_LAYER_GATE] = "output_gate";
    if (la_take(&l->rest.c, LA_Q, values[LA_Q])) return -1;
    if (decay != Py_None && take_decay(l, step, decay)) return -1;
    return norm != Py_None && take_norm(l, norm) ? -1 : 0;
}

static int read_norm(la_layer_call *l, PyObject *stage)
{
    int activation;
    if (la_as_number(PyTuple_GetItem(stage, 1), "norm_eps", &l->norm.eps) ||
        take_activation(PyTuple_GetItem(stage, 3), "output_activation", LA_SIGMOID_GATE,
                        &activation))
        return -1;
    l->norm.activation = (la_activation)activation;
    PyObject *const groups = PyTuple_GetItem(stage, 5);
    if (la_as_flag(PyTuple_GetItem(stage, 4), "gate_first", &l->norm.gate_first) ||
        (groups != Py_None &&
         la_as_count(groups, "norm_groups", "an int or None", &l->norm.groups)))
        return -1;
    if (groups != Py_None && l->norm.groups < 1) {
        PyErr_Format(PyExc_ValueError, "norm_groups: expected at least 1, got %R", groups);
        return -1;
    }
    if (l->norm.eps >= 0 && l->norm.eps < Py_HUGE_VAL) return 0;
    PyErr_Format(PyExc_ValueError, "norm_eps: expected a finite number >= 0, got %R",
                 PyTuple_GetItem(stage, 1));
    return -1;
}

int la_layer_read(la_layer_call *l, PyObject *stages)
{
    const bool fits = is_tuple_of(stages, STAGES);
    PyObject *const decay = fits ? PyTuple_GetItem(stages, DECAY) : NULL;
    PyObject *const norm = fits ? PyTuple_GetItem(stages, NORM) : NULL;
    if (!fits || !(decay == Py_None || is_tuple_of(decay, 5)) ||
        !(norm == Py_None || is_tuple_of(norm, 6))) {
        PyErr_Format(PyExc_TypeError, "stages: expected a tuple of seven, got %R",
                     (PyObject *)Py_TYPE(stages));
        return -1;
    }
    l->stages = stages;
    PyObject *const factor = PyTuple_GetItem(stages, BETA);
    if (take_activation(PyTuple_GetItem(stages, ACTIVATION), "conv_activation", LA_SILU,
                        &l->silu) ||
        (factor != Py_None && la_as_number(factor, "beta", &l->beta.factor)) ||
        (norm != Py_None && read_norm(l, norm)))
        return -1;
    if (decay == Py_None) return 0;
    if (la_as_flag(PyTuple_GetItem(decay, 4), "weigh", &l->weighs)) return -1;
    if (la_find_curve(PyTuple_GetItem(decay, 0), &l->g.curve))
        return la_as_number(PyTuple_GetItem(decay, 1), "lower_bound", &l->g.factor);
    PyErr_Format(PyExc_ValueError, "decay: expected the name of a gate, got %R",
                 PyTuple_GetItem(decay, 0));
    return -1;
}

int la_layer_take(la_layer_call *l, la_call *step, PyObject *const *values)
{
    PyObject *const stages = l->stages;
    if (step->out) {
        PyErr_SetString(PyExc_TypeError, "out: expected None, since a layer's step makes its own");
        return -1;
    }
    l->layer.p = &step->p;
    l->memory = values[LA_S0];
    if (la_refuse_overlaps(step) || split_projections(step)) return -1;
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS; i++) {
        PyObject *const arrays = PyTuple_GetItem(stages, i);
        if (arrays != Py_None && take_convolution(l, i, step, arrays, values)) return -1;
    }
    if (take_rest(l, step, PyTuple_GetItem(stages, DECAY), PyTuple_GetItem(stages, NORM), values))
        return -1;
    if (PyTuple_GetItem(stages, BETA) == Py_None) return 0;
    l->beta.curve = LA_SIGMOID;
    l->layer.beta = &l->beta;
    return take_gate(l, step, LA_BETA, &l->raw_beta, &l->beta);
}

static int refuse_shared(int i, const char *label)
{
    PyErr_Format(PyExc_ValueError, "%s: expected memory of its own, got some of %s",
                 convolution_labels[i][3], label);
    return -1;
}

/* Two stages may not write one state. Parts of one array may lie between one another. */
static int refuse_shared_state(const la_layer_call *l, int i, la_span span, PyObject *object,
                               const char *label)
{
    if (!la_meet(l->of_convolution[i].c.span[LA_S0], span)) return 0;
    const int shared = la_shares_memory(l->state[i], object);
    return shared > 0 ? refuse_shared(i, label) : shared;
}

/* The state of the step, or its pair. */
static int refuse_shared_memory(const la_layer_call *l, int i, const la_call *step)
{
    PyObject *const memory = l->memory;
    const bool pair = PyTuple_Check(memory) || PyList_Check(memory);
    if (!pair) return refuse_shared_state(l, i, step->span[LA_S0], memory, "state");
    for (int k = 0; k < 2; k++) {
        PyObject *part = PySequence_GetItem(memory, k);
        const la_name name = k ? la_second_of(&step->p, LA_S0) : LA_S0;
        const int failed = !part || refuse_shared_state(l, i, step->span[name], part, "state");
        Py_XDECREF(part);
        if (failed) return -1;
    }
    return 0;
}

/* A state that moves may lie in no array that another stage reads. */
static int refuse_read_by(const la_layer_call *l, int i, const la_call *reader)
{
    la_set read = la_read[LA_STEP] & ~la_written[LA_STEP];
    for (la_name name; la_next(&read, &name);)
        if (reader->p.array[name].given && reader != &l->of_convolution[i].c &&
            la_meet(l->of_convolution[i].c.span[LA_S0], reader->span[name]))
            return refuse_shared(i, la_array_name(&reader->p, name));
    return 0;
}

static int refuse_shared_states(const la_layer_call *l, const la_call *step)
{
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS; i++) {
        if (!l->layer.convolution[i]) continue;
        if (refuse_shared_memory(l, i, step) || refuse_read_by(l, i, step) ||
            (l->rest.c.like && refuse_read_by(l, i, &l->rest.c)))
            return -1;
        for (int k = 0; k < LA_LAYER_CONVOLUTIONS; k++) {
            const la_call *other = &l->of_convolution[k].c;
            if (!l->layer.convolution[k]) continue;
            if (refuse_read_by(l, i, other)) return -1;
            if (k < i && refuse_shared_state(l, i, other->span[LA_S0], l->state[k],
                                             convolution_labels[k][3]))
                return -1;
        }
    }
    return 0;
}

/* An op ignores what it has no use for. Here a decay or a beta would be lost without a word. */
static int refuse_unused(const la_problem *p)
{
    la_set given = la_read[LA_STEP];
    for (la_name name; la_next(&given, &name);)
        if (p->array[name].given && name != LA_SLOT && !la_has(p, name)) {
            PyErr_Format(PyExc_TypeError, "%s: no argument of its step is called '%s'",
                         la_variants[p->op].name, la_array_name(p, name));
            return -1;
        }
    return 0;
}

/* state_indices are checked against the pool of the step, so the others have as many states. */
static int refuse_pools(const la_layer_call *l, const la_problem *p)
{
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS; i++) {
        const la_problem *own = &l->of_convolution[i].c.p;
        if (!l->layer.convolution[i] || !p->array[LA_SLOT].given || own->P == p->P) continue;
        PyErr_Format(PyExc_ValueError, "%s: expected P = %lld states, as state has, got %lld",
                     convolution_labels[i][3], (long long)p->P, (long long)own->P);
        return -1;
    }
    return 0;
}

int la_layer_settle(la_layer_call *l, la_call *step)
{
    la_problem *const p = &step->p;
    const la_dtype dtype = la_dtype_of(p, LA_O);
    const int64_t o[] = {p->B, p->HV, p->V};
    const la_array y = {.ndim = 2, .shape = {p->B, p->HV * p->V}};
    if (refuse_unused(p) || settle_norm(l, p) || refuse_pools(l, p) ||
        refuse_shared_states(l, step) || la_allocate_like(step, LA_O, dtype, &y))
        return -1;
    l->layer.y = p->array[LA_O].data;
    la_layer_reserve(p, LA_O, dtype, 3, o);
    la_settle_output(p, LA_O);
    return 0;
}

int la_layer_call_run(la_layer_call *l, la_call *step)
{
    la_call *stages[LA_LAYER_CONVOLUTIONS + 1];
    int count = 0;
    for (int i = 0; i < LA_LAYER_CONVOLUTIONS; i++)
        if (l->layer.convolution[i]) stages[count++] = &l->of_convolution[i].c;
    if (l->layer.g || l->layer.norm) stages[count++] = &l->rest.c;
    return la_run_layer(step, stages, count, &l->layer);
}
