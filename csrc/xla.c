/* Calls from XLA: buffers and attributes in, a status out. JAX knows the handlers as FFI targets
 * (linattn/jax). check.c says what is right, as for calls from Python.
 *
 * XLA gives buffers without names, so the attributes `arguments` and `results` have the labels of
 * arrays.def, in the order of the buffers and with a space between two. The two states of a pair have one
 * label. XLA calls from threads of its own. No Python here. */
#include "xla.h"

#include "options.h"
#include "room.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef LA_WITH_CUDA
#include "cuda/cuda.h"
#endif

typedef struct {
    la_problem p;
    const xla_frame *frame;
    la_set seen;    /* arrays that a buffer of the list at hand is */
    int64_t *slots; /* a copy of state_indices */
    la_room_job *j; /* of a room's call */
    const char *labels[LA_ARRAYS];
} xla_call;

/* ---- errors ---- */

static xla_error *refuse(const xla_frame *frame, la_status status, const char *message)
{
    if (status == LA_OK) return NULL;
    xla_error_create error = {
        .struct_size = sizeof error,
        .message = message,
        .code = status == LA_TYPE_ERROR || status == LA_VALUE_ERROR ? XLA_INVALID_ARGUMENT
                : status == LA_MEMORY_ERROR                         ? XLA_RESOURCE_EXHAUSTED
                                                                    : XLA_INTERNAL,
    };
    return frame->api->error_create(&error);
}

static la_status fail(xla_call *c, la_status status, const char *label, const char *expected)
{
    snprintf(c->p.message, LA_MESSAGE, "%s: expected %s", label, expected);
    return status;
}

/* ---- attributes ---- */

static bool says(xla_text text, const char *word)
{
    return text.size == strlen(word) && !memcmp(text.data, word, text.size);
}

/* The value of an attribute, and its type; NULL if there is none. */
static const void *attribute(const xla_frame *frame, const char *name, int *type)
{
    const xla_attributes *all = &frame->attributes;
    for (int64_t i = 0; i < all->size; i++)
        if (says(*all->names[i], name)) {
            *type = all->types[i];
            return all->values[i];
        }
    return NULL;
}

static xla_text word_of(const xla_frame *frame, const char *name)
{
    int type;
    const xla_text *text = attribute(frame, name, &type);
    return text && type == XLA_STRING ? *text : (xla_text){"", 0};
}

static la_status read_mode(xla_call *c, const la_option *option)
{
    const xla_text word = word_of(c->frame, option->name);
    for (int i = 0; i < LA_MODES; i++)
        if (says(word, la_mode_names[i])) {
            c->p.mode = (la_mode)i;
            return LA_OK;
        }
    return fail(c, LA_VALUE_ERROR, option->name, "'chunk', 'recurrent' or 'parallel'");
}

static la_status read_features(xla_call *c, const la_option *option, const xla_array *array)
{
    if (array->dtype == XLA_F64 && array->size == LA_FEATURES &&
        la_set_features(&c->p, array->data))
        return LA_OK;
    return fail(c, LA_VALUE_ERROR, option->name, "seven floats, maps and a normaliser by number");
}

static la_status read_scalar(xla_call *c, const la_option *option, const xla_scalar *scalar)
{
    static const struct {
        int dtype;
        size_t size;
    } of[] = {
        [LA_OPTION_FLAG] = {XLA_PRED, sizeof(bool)},
        [LA_OPTION_DEFAULT] = {XLA_PRED, sizeof(bool)},
        [LA_OPTION_NUMBER] = {XLA_F64, sizeof(double)},
        [LA_OPTION_COUNT] = {XLA_S64, sizeof(int64_t)},
        [LA_OPTION_MAYBE] = {XLA_S64, sizeof(int64_t)},
    };
    if (scalar->dtype != of[option->kind].dtype)
        return fail(c, LA_TYPE_ERROR, option->name, "a bool, an int64 or a float64");
    memcpy((char *)&c->p + option->offset, scalar->value, of[option->kind].size);
    c->p.has_scale = c->p.has_scale || option->kind == LA_OPTION_NUMBER;
    c->p.has_chunk = c->p.has_chunk || option->kind == LA_OPTION_MAYBE;
    return LA_OK;
}

/* An attribute that is not there leaves the default. */
static la_status read_options(xla_call *c)
{
    la_status status = LA_OK;
    for (int i = 0; i < LA_OPTIONS && !status; i++) {
        const la_option *option = &la_options[i];
        const int want = option->kind == LA_OPTION_MODE       ? XLA_STRING
                         : option->kind == LA_OPTION_FEATURES ? XLA_ARRAY
                                                              : XLA_SCALAR;
        int type;
        const void *value = attribute(c->frame, option->name, &type);
        if (!value || !(option->passes >> c->p.pass & 1)) continue;
        status = type != want ? fail(c, LA_TYPE_ERROR, option->name, "an attribute of its own type")
                 : type == XLA_STRING ? read_mode(c, option)
                 : type == XLA_ARRAY  ? read_features(c, option, value)
                                      : read_scalar(c, option, value);
    }
    return status;
}

/* ---- buffers ---- */

static bool read_dtype(int dtype, la_dtype *to)
{
    static const int known[LA_DTYPES] = {
        [LA_F64] = XLA_F64,   [LA_F32] = XLA_F32, [LA_F16] = XLA_F16,
        [LA_BF16] = XLA_BF16, [LA_I64] = XLA_S64, [LA_I32] = XLA_S32};
    for (int i = 0; i < LA_DTYPES; i++)
        if (known[i] == dtype) {
            *to = (la_dtype)i;
            return true;
        }
    return false;
}

/* Dimensions as the user has them; check.c does the rest. */
static la_status describe(xla_call *c, la_name name, const xla_buffer *buffer)
{
    la_array *x = &c->p.array[name];
    int64_t dense = 1;
    if (!read_dtype(buffer->dtype, &x->dtype))
        return fail(c, LA_TYPE_ERROR, la_array_name(&c->p, name), "a dtype that the core has");
    if (buffer->rank > LA_MAX_DIMS)
        return la_refuse_dims(&c->p, name, (int)buffer->rank, buffer->dims);
    x->given = true;
    x->data = buffer->data;
    x->ndim = (int)buffer->rank;
    for (int i = x->ndim - 1; i >= 0; i--) {
        x->shape[i] = buffer->dims[i];
        x->stride[i] = dense;
        dense *= buffer->dims[i];
    }
    return LA_OK;
}

/* Is it both an argument and a result? A step's states are. */
static bool is_changed(const xla_call *c, la_name name)
{
    return la_in(la_read[c->p.pass] & la_written[c->p.pass], name);
}

/* The first array of this label that the call has and that no buffer before it is. How the decay is
 * called says how it is given. */
static la_name array_of(xla_call *c, la_set arrays, xla_text label)
{
    arrays &= ~c->seen;
    for (int i = 0; i < LA_GATE_KEYWORDS; i++)
        if (says(label, la_gate_keywords[i].name) && la_in(arrays, LA_G)) {
            c->p.gate = la_gate_keywords[i].how;
            return LA_G;
        }
    for (la_name name; la_next(&arrays, &name);)
        if (says(label, la_array_rows[name].label[0]) && la_has(&c->p, name)) return name;
    return LA_ARRAYS;
}

/* The same in a call of a room, of an argument or of a result. */
static la_name slot_of(const xla_call *c, xla_text label, bool result)
{
    const la_room_job *j = c->j;
    const bool backward = c->p.pass == LA_BACKWARD;
    for (int i = 0; i < j->room->lines; i++) {
        const la_name slot = j->room->line[i].slot;
        const bool made = la_room_is_output(j->room, i) != backward;
        if (!la_room_has(j, i)) continue;
        if (result ? !made && !is_changed(c, slot) : made && !backward) continue;
        if (result && backward && !j->room->line[i].gradient) continue;
        const la_name at = result ? la_room_slot(j, i, backward) : la_room_given_slot(j, i);
        if (says(label, c->labels[at]) && !la_in(c->seen, at)) return at;
    }
    return LA_ARRAYS;
}

/* Calls `take` for each buffer of the list, by the labels in an attribute. */
static la_status take_buffers(xla_call *c, const xla_buffers *buffers, const char *list,
                              la_set arrays,
                              la_status (*take)(xla_call *, la_name, const xla_buffer *))
{
    const xla_text labels = word_of(c->frame, list);
    const char *at = labels.data, *const end = at + labels.size;
    c->seen = 0;
    for (int64_t i = 0; i < buffers->size; i++) {
        const char *space = at < end ? memchr(at, ' ', (size_t)(end - at)) : NULL;
        const xla_text label = {at, (size_t)((space ? space : end) - at)};
        const la_name name =
            c->j ? slot_of(c, label, buffers == &c->frame->results) : array_of(c, arrays, label);
        if (name == LA_ARRAYS || buffers->types[i] != XLA_BUFFER)
            return fail(c, LA_TYPE_ERROR, list, "a label of arrays.def for each buffer");
        const la_status status = take(c, name, buffers->buffers[i]);
        if (status) return status;
        c->seen |= (la_set)1 << name;
        at = space ? space + 1 : end;
    }
    return LA_OK;
}

/* ---- outputs ---- */

static size_t bytes_of(const xla_buffer *buffer, la_dtype dtype)
{
    size_t bytes = (size_t)la_size_of(dtype);
    for (int64_t i = 0; i < buffer->rank; i++) bytes *= (size_t)buffer->dims[i];
    return bytes;
}

static la_status copy(xla_call *c, void *to, const void *from, size_t bytes)
{
#ifdef LA_WITH_CUDA
    if (c->p.device == LA_CUDA) return la_cuda_copy(&c->p, to, from, bytes);
#endif
    (void)c;
    memcpy(to, from, bytes);
    return LA_OK;
}

/* Before la_check. A step changes its state where it lies. XLA may have given the result the state's
 * memory; else the state goes there first. */
static la_status take_state(xla_call *c, la_name name, const xla_buffer *buffer)
{
    la_array *x = &c->p.array[name];
    la_dtype dtype;
    if (!is_changed(c, name)) return LA_OK;
    bool same = x->given && read_dtype(buffer->dtype, &dtype) && dtype == x->dtype &&
                buffer->rank == x->ndim;
    for (int i = 0; same && i < x->ndim; i++) same = buffer->dims[i] == x->shape[i];
    if (!same)
        return fail(c, LA_VALUE_ERROR, la_array_name(&c->p, name),
                    "a result of the state's dtype and shape");
    const char *const from = x->data;
    x->data = buffer->data;
    return from == x->data ? LA_OK : copy(c, x->data, from, bytes_of(buffer, dtype));
}

/* After la_check. */
static la_status take_output(xla_call *c, la_name name, const xla_buffer *buffer)
{
    if (is_changed(c, name)) return LA_OK;
    la_status status = describe(c, name, buffer);
    if (!c->j) return status ? status : la_check_output(&c->p, name);
    const bool gradient = c->p.pass == LA_BACKWARD;
    for (int i = 0; i < c->j->room->lines && !status; i++)
        if (la_room_has(c->j, i) && c->j->room->line[i].gradient &&
            la_room_slot(c->j, i, gradient) == name)
            return la_room_settle(c->j, i, gradient);
    return status;
}

static la_status check_results(xla_call *c)
{
    la_set outputs = la_written[c->p.pass] & ~la_read[c->p.pass];
    for (la_name name; la_next(&outputs, &name);)
        if (la_is_wanted(&c->p, name) && !la_in(c->seen, name))
            return fail(c, LA_TYPE_ERROR, la_array_name(&c->p, name), "a result, got none");
    return LA_OK;
}

static la_status check_room_results(xla_call *c)
{
    const la_room_job *j = c->j;
    const bool gradient = c->p.pass == LA_BACKWARD;
    for (int i = 0; i < j->room->lines; i++) {
        const la_room_line *line = &j->room->line[i];
        const bool output = la_room_is_output(j->room, i);
        if (!la_room_has(j, i) || !line->gradient || output == gradient) continue;
        const bool wanted = gradient ? j->array[i] != NULL : line->slot == LA_O || j->want_final;
        const la_name at = la_room_slot(j, i, gradient);
        if (wanted && !la_in(c->seen, at))
            return fail(c, LA_TYPE_ERROR, c->labels[at], "a result, got none");
    }
    return LA_OK;
}

static la_status read_room_options(xla_call *c)
{
    const la_room *room = c->j->room;
    for (int i = 0; i < room->options; i++) {
        const la_room_option *option = &room->option[i];
        void *const field = (char *)c->j + option->offset;
        int type;
        const void *value = attribute(c->frame, option->label, &type);
        if (!value || !(option->passes >> c->p.pass & 1)) continue;
        if (!option->words) {
            const xla_scalar *scalar = value;
            if (type != XLA_SCALAR || scalar->dtype != XLA_PRED)
                return fail(c, LA_TYPE_ERROR, option->label, "a bool");
            memcpy(field, scalar->value, sizeof(bool));
            continue;
        }
        const xla_text word = word_of(c->frame, option->label);
        int k = 0;
        while (option->words[k] && !says(word, option->words[k])) k++;
        if (!option->words[k]) return fail(c, LA_VALUE_ERROR, option->label, "one of its words");
        *(int *)field = k + 1;
    }
    return LA_OK;
}

static la_status take_all(xla_call *c)
{
    const la_pass pass = c->p.pass;
    const xla_frame *frame = c->frame;
    la_status status = c->j ? read_room_options(c) : read_options(c);
    if (!status)
        status = take_buffers(c, &frame->arguments, "arguments", la_given_arrays(pass), describe);
    if (!status && pass == LA_STEP)
        status = take_buffers(c, &frame->results, "results", la_written[pass], take_state);
    if (!status) status = c->j ? la_room_check(c->j) : la_check(&c->p);
    if (!status)
        status = take_buffers(c, &frame->results, "results", la_written[pass], take_output);
    return status ? status : c->j ? check_room_results(c) : check_results(c);
}

/* ---- a call ---- */

/* Where the arrays lie, and XLA's stream. An array without elements may lie nowhere. */
static la_status find_device(xla_call *c, xla_error **error)
{
#ifdef LA_WITH_CUDA
    const xla_buffers *const arrays = &c->frame->arguments;
    xla_stream_get get = {.struct_size = sizeof get, .context = c->frame->context};
    *error = c->frame->api->stream_get(&get);
    c->p.stream = get.stream;
    for (int64_t i = 0; i < arrays->size; i++) {
        const void *const data = ((const xla_buffer *)arrays->buffers[i])->data;
        if (!data) continue;
        c->p.ordinal = la_cuda_ordinal_of(data);
        if (c->p.ordinal >= 0) return LA_OK;
        return fail(c, LA_RUNTIME_ERROR, "arguments", "addresses of a CUDA device");
    }
#else
    (void)c, (void)error;
#endif
    return LA_OK;
}

static la_status run_on_host(xla_call *c)
{
    static la_status (*const entries[])(la_problem *) = {
        [LA_FORWARD] = la_forward, [LA_STEP] = la_step, [LA_BACKWARD] = la_backward};
    if (c->p.array[LA_SLOT].given) {
        c->slots = malloc((size_t)(c->p.B + 1) * sizeof *c->slots);
        if (!c->slots) return fail(c, LA_MEMORY_ERROR, "state_indices", "memory for a copy");
        const la_status status = la_check_slots(&c->p, c->slots);
        if (status) return status;
    }
    return c->j ? c->j->room->run(c->j) : entries[c->p.pass](&c->p);
}

static la_status run(xla_call *c)
{
#ifdef LA_WITH_CUDA
    static la_status (*const entries[])(la_problem *) = {
        [LA_FORWARD] = la_cuda_forward, [LA_STEP] = la_cuda_step, [LA_BACKWARD] = la_cuda_backward};
    if (c->p.device == LA_CUDA) return c->j ? c->j->room->enqueue(c->j) : entries[c->p.pass](&c->p);
#endif
    return run_on_host(c);
}

/* XLA asks once, when a handler is registered. */
static bool tell_version(const xla_frame *frame)
{
    if (!frame->extension || frame->extension->type != XLA_METADATA) return false;
    xla_metadata *const own = ((xla_metadata_extension *)frame->extension)->metadata;
    own->version.major = XLA_MAJOR;
    own->version.minor = XLA_MINOR;
    return true;
}

static xla_error *finish(xla_call *c, la_device device)
{
    xla_error *error = NULL;
    c->p.device = device;
    la_status status = device == LA_CUDA ? find_device(c, &error) : LA_OK;
    if (!status && !error) status = take_all(c);
    if (!status && !error) status = run(c);
    free(c->slots);
    free(c->j);
    return error ? error : refuse(c->frame, status, c->p.message);
}

static xla_error *handle(xla_frame *frame, la_pass pass, la_device device)
{
    if (tell_version(frame)) return NULL;
    xla_call c = {.frame = frame};
    la_op op = (la_op)0;
    const xla_text name = word_of(frame, "op");
    while (op < LA_OPS && !says(name, la_variants[op].name)) op++;
    if (op == LA_OPS) return refuse(frame, LA_TYPE_ERROR, "op: expected the name of an op");
    la_problem_init(&c.p, op, pass);
    return finish(&c, device);
}

static xla_error *handle_room(xla_frame *frame, la_pass pass, la_device device)
{
    static const la_room *const rooms[] = {&la_scan_room, &la_convolution_room};
    enum { ROOMS = sizeof rooms / sizeof *rooms };
    if (tell_version(frame)) return NULL;
    xla_call c = {.frame = frame};
    const xla_text name = word_of(frame, "room"), form = word_of(frame, "form");
    int i = 0, k = 0;
    while (i < ROOMS && !says(name, rooms[i]->name)) i++;
    while (i < ROOMS && k < rooms[i]->forms && !says(form, rooms[i]->form[k].name)) k++;
    if (i == ROOMS || k == rooms[i]->forms)
        return refuse(frame, LA_TYPE_ERROR, "room: expected the name of a room and of its form");
    la_problem_init(&c.p, (la_op)0, pass);
    c.p.labels = c.labels;
    c.p.any_strides = true;
    if (!(c.j = calloc(1, rooms[i]->job_bytes)))
        return refuse(frame, LA_MEMORY_ERROR, "room: expected memory for a call");
    c.j->room = rooms[i];
    c.j->form = k;
    c.j->p = &c.p;
    la_room_name_arrays(c.j, c.labels);
    return finish(&c, device);
}

/* ---- the targets ---- */

/* Two handlers on each device: of ops, and of rooms. */
#define HANDLERS(pass, PASS, where, DEVICE) \
    static xla_error *pass##_##where(xla_frame *frame) { return handle(frame, PASS, DEVICE); } \
    static xla_error *room_##pass##_##where(xla_frame *frame) \
    { \
        return handle_room(frame, PASS, DEVICE); \
    }
#define TARGETS(pass, platform, where) \
    {"linattn_" #pass, platform, pass##_##where}, \
    { \
        "linattn_room_" #pass, platform, room_##pass##_##where \
    }

HANDLERS(forward, LA_FORWARD, on_host, LA_CPU)
HANDLERS(step, LA_STEP, on_host, LA_CPU)
HANDLERS(backward, LA_BACKWARD, on_host, LA_CPU)
#ifdef LA_WITH_CUDA
HANDLERS(forward, LA_FORWARD, on_device, LA_CUDA)
HANDLERS(step, LA_STEP, on_device, LA_CUDA)
HANDLERS(backward, LA_BACKWARD, on_device, LA_CUDA)
#endif

const la_xla_target la_xla_targets[] = {
    TARGETS(forward, "cpu", on_host),     TARGETS(step, "cpu", on_host),
    TARGETS(backward, "cpu", on_host),
#ifdef LA_WITH_CUDA
    TARGETS(forward, "CUDA", on_device),  TARGETS(step, "CUDA", on_device),
    TARGETS(backward, "CUDA", on_device),
#endif
};
const int la_xla_target_count = sizeof la_xla_targets / sizeof *la_xla_targets;
