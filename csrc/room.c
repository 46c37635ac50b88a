/* The lines of the rooms' tables: the checks of a call's arrays, and the shapes of its outputs. */
#include "room.h"

#include "text.h"

#include <stdio.h>
#include <string.h>

/* ---- messages ---- */

void la_room_letters(const la_room_job *j, int line, char letters[LA_MAX_DIMS + 1])
{
    int n = 0;
    for (const char *c = j->room->line[line].letters; *c; c++)
        if (!strchr(j->left_out, *c))
            letters[n++] = *c == 'S' && j->p->array[LA_SLOT].given ? 'P' : *c;
    letters[n] = 0;
}

static bool is_small(char letter) { return letter >= 'a' && letter <= 'z'; }
static char capital(char letter) { return (char)(is_small(letter) ? letter - 'a' + 'A' : letter); }

/* The number of a letter; below 0: no array has said it yet. */
static int64_t size_of(const la_room_job *j, char letter)
{
    return j->size[(int)capital(letter)] - is_small(letter);
}

/* Sizes as the user counts them. */
static long long shown(const la_room_job *j, char letter, int64_t size)
{
    return (long long)(letter == 'N' && j->pairs ? size / 2 : size);
}

static la_status refuse_shape(la_room_job *j, int line, const la_array *x, const char *label)
{
    char letters[LA_MAX_DIMS + 1];
    la_text w = la_text_of(j->p->message);
    la_room_letters(j, line, letters);
    const int ndim = (int)strlen(letters);
    la_append(&w, "%s: expected [", label);
    for (int i = 0; i < ndim; i++)
        la_append(&w, "%s%c%s", i ? "," : "", capital(letters[i]),
                  is_small(letters[i]) ? "-1" : "");
    la_append(&w, "]");
    bool known = true;
    for (int i = 0; i < ndim; i++) known = known && size_of(j, letters[i]) >= 0;
    if (known) {
        la_append(&w, " = (");
        for (int i = 0; i < ndim; i++)
            la_append(&w, i ? ", %lld" : "%lld", shown(j, letters[i], size_of(j, letters[i])));
        la_append(&w, ndim == 1 ? ",)" : ")");
    }
    la_append(&w, ", got (");
    for (int i = 0; i < x->ndim; i++)
        la_append(&w, i ? ", %lld" : "%lld",
                  shown(j, x->ndim == ndim ? letters[i] : ' ', x->shape[i]));
    la_append(&w, x->ndim == 1 ? ",)" : ")");
    return LA_VALUE_ERROR;
}

/* ---- one array ---- */

static la_name gradient_of(la_name slot)
{
    la_name name = (la_name)(slot + 1);
    while (la_array_rows[name].of != slot) name++;
    return name;
}

la_name la_room_slot(const la_room_job *j, int line, bool gradient)
{
    const la_room_line *x = &j->room->line[line];
    return gradient && x->gradient ? gradient_of(x->slot) : x->slot;
}

bool la_room_has(const la_room_job *j, int line)
{
    const la_room_line *x = &j->room->line[line];
    return x->passes >> j->p->pass & 1 && x->forms >> j->form & 1;
}

bool la_room_is_output(const la_room *room, int line)
{
    return la_array_rows[room->line[line].slot].role == LA_OUTPUT;
}

bool la_room_is_given(const la_room_job *j, int line)
{
    const la_name slot = j->room->line[line].slot;
    return la_room_has(j, line) &&
           (!la_room_is_output(j->room, line) || j->p->pass == LA_BACKWARD || slot == LA_O);
}

la_name la_room_given_slot(const la_room_job *j, int line)
{
    return la_room_slot(j, line, la_room_is_output(j->room, line) && j->p->pass == LA_BACKWARD);
}

void la_room_name_arrays(const la_room_job *j, const char *labels[LA_ARRAYS])
{
    for (int i = 0; i < j->room->lines; i++) {
        const la_room_line *x = &j->room->line[i];
        if (!la_room_has(j, i)) continue;
        const bool state = x->slot == LA_S0 && j->p->pass == LA_STEP;
        labels[x->slot] = state ? "state" : x->label;
        if (x->gradient) labels[la_room_slot(j, i, true)] = x->gradient;
    }
}

/* Strides by the letters of the table. The caller has compared the shape. */
static void spread(const la_room_job *j, int line, la_array *x)
{
    const char *letters = j->room->line[line].letters;
    int64_t stride[LA_MAX_DIMS] = {0};
    int given = 0;
    for (int i = 0; letters[i]; i++)
        if (!strchr(j->left_out, letters[i])) stride[i] = x->stride[given++];
    memcpy(x->stride, stride, sizeof stride);
}

/* A step's state of inputs may hold older ones too. */
static bool may_hold_more(const la_room_job *j, la_name slot)
{
    return j->room->plain_states && j->p->pass == LA_STEP && la_array_rows[slot].role == LA_STATE;
}

static la_status check_shape(la_room_job *j, int line, la_name slot)
{
    la_array *x = &j->p->array[slot];
    char letters[LA_MAX_DIMS + 1];
    const char *label = la_array_name(j->p, slot);
    la_room_letters(j, line, letters);
    if (x->ndim != (int)strlen(letters)) return refuse_shape(j, line, x, label);
    for (int i = 0; i < x->ndim; i++) {
        int64_t *const size = &j->size[(int)letters[i]];
        if (!is_small(letters[i]) && *size < 0) *size = x->shape[i];
        const bool more =
            is_small(letters[i]) && may_hold_more(j, slot) && size_of(j, letters[i]) < x->shape[i];
        if (size_of(j, letters[i]) != x->shape[i] && !more) return refuse_shape(j, line, x, label);
    }
    spread(j, line, x);
    return LA_OK;
}

static la_status check_dtype(la_room_job *j, la_name slot)
{
    const la_dtype first = j->p->array[LA_Q].dtype;
    const bool state = la_array_rows[slot].role == LA_STATE;
    if (state && j->room->plain_states && j->p->array[slot].dtype == first) return LA_OK;
    return la_check_dtype(j->p, slot);
}

static la_status check_array(la_room_job *j, int line, la_name slot)
{
    const la_status status = check_dtype(j, slot);
    return status ? status : check_shape(j, line, slot);
}

static la_status refuse_missing(la_room_job *j, la_name slot)
{
    snprintf(j->p->message, LA_MESSAGE, "%s: expected an array, got None",
             la_array_name(j->p, slot));
    return LA_TYPE_ERROR;
}

/* ---- a call ---- */

/* The first array has B and T, which sequences are compared with. */
static la_status settle_sequences(la_room_job *j)
{
    la_problem *const p = j->p;
    p->B = j->size['B'];
    p->T = p->pass == LA_STEP ? 1 : j->size['T'];
    p->N = p->B;
    p->tokens = p->B * p->T;
    const la_status status = la_settle_sequences(p);
    j->size['S'] = p->N;
    return status;
}

/* A step that picks its states: from a pool of as many as there are. */
static la_status settle_pool(la_room_job *j)
{
    la_problem *const p = j->p;
    const la_array *pool = &p->array[LA_S0], *slot = &p->array[LA_SLOT];
    if (!slot->given) return LA_OK;
    const la_status status = la_check_dtype(p, LA_SLOT);
    if (status) return status;
    if (slot->ndim != 1 || slot->shape[0] != p->B) {
        snprintf(p->message, LA_MESSAGE, "%s: expected [B] = (%lld,), got %lld numbers",
                 la_array_name(p, LA_SLOT), (long long)p->B,
                 (long long)(slot->ndim == 1 ? slot->shape[0] : 0));
        return LA_VALUE_ERROR;
    }
    p->P = j->size['P'] = pool->given && pool->ndim ? pool->shape[0] : 0;
    return LA_OK;
}

la_status la_room_check(la_room_job *j)
{
    la_problem *const p = j->p;
    la_status status = LA_OK;
    const la_room_form *form = &j->room->form[j->form];
    for (int i = 0; i < 128; i++) j->size[i] = -1;
    j->states_only |= j->want_map;
    j->left_out = p->pass == LA_STEP ? form->left_out_in_step : form->left_out;
    for (int i = 0; i < j->room->lines && !status; i++) {
        const la_room_line *x = &j->room->line[i];
        const bool output = la_array_rows[x->slot].role == LA_OUTPUT;
        if (!la_room_has(j, i) || la_array_rows[x->slot].dtype == LA_DTYPE_INTEGER) continue;
        if (output && p->pass != LA_BACKWARD) continue; /* la_room_settle */
        const la_name slot = output ? gradient_of(x->slot) : x->slot;
        if (!p->array[slot].given) {
            const bool needed =
                x->need == LA_REQUIRED || (x->need == LA_IN_STEP && p->pass == LA_STEP);
            if (needed) status = refuse_missing(j, slot);
            continue;
        }
        if (i == 0 && p->array[slot].dtype > LA_BF16) {
            snprintf(p->message, LA_MESSAGE,
                     "%s: expected float64, float32, float16 or bfloat16, got %s", x->label,
                     la_dtype_names[p->array[slot].dtype]);
            return LA_TYPE_ERROR;
        }
        if (i == 0) p->real = p->array[slot].dtype == LA_F64 ? LA_F64 : LA_F32;
        status = check_array(j, i, slot);
        if (!status && i == 0 && !(status = settle_sequences(j))) status = settle_pool(j);
        *(output ? &j->gradient[i] : &j->array[i]) = &p->array[slot];
    }
    return status ? status : j->room->check(j);
}

void la_room_shape(const la_room_job *j, int line, la_array *like)
{
    char letters[LA_MAX_DIMS + 1];
    la_room_letters(j, line, letters);
    for (like->ndim = 0; letters[like->ndim]; like->ndim++)
        like->shape[like->ndim] = size_of(j, letters[like->ndim]);
}

la_status la_room_settle(la_room_job *j, int line, bool gradient)
{
    const la_name slot = la_room_slot(j, line, gradient);
    *(gradient ? &j->gradient[line] : &j->array[line]) = &j->p->array[slot];
    return check_array(j, line, slot);
}

static bool has_numbers(const la_array *x)
{
    for (int i = 0; x && i < x->ndim; i++)
        if (!x->shape[i]) return false;
    return x;
}

void la_room_tell(const la_room_job *j, const char *unit, int bits)
{
    const bool backward = j->p->pass == LA_BACKWARD, step = j->p->pass == LA_STEP;
    bool writes = false;
    for (int i = 0; i < j->room->lines; i++) {
        const bool output = la_array_rows[j->room->line[i].slot].role == LA_OUTPUT;
        if (backward && !output) writes |= has_numbers(j->gradient[i]);
        if (!backward && output) writes |= has_numbers(j->array[i]);
    }
    if (!j->p->taken || !writes) return;
    *j->p->taken = (la_taken){
        .kernel = step ? "one token" : j->room->kernel, .unit = unit, .why = "", .bits = bits};
}

int64_t la_room_start(const la_room_job *j, int64_t n)
{
    const la_array *cu = &j->p->array[LA_CU];
    return cu->given ? la_integer_at(cu->data, cu->dtype, n * cu->stride[0]) : 0;
}

void la_room_clear(const la_array *y, int64_t b, int64_t d0, int64_t d1)
{
    const int64_t size = la_size_of(y->dtype);
    for (int64_t d = d0; d < d1; d++) /* zero has no bit set in any dtype */
        memset(y->data + (b * y->stride[0] + d * y->stride[2]) * size, 0, (size_t)size);
}
