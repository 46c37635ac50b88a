/* Illegal problems: a legal one with something corrupted, through la_check only. */
#include "sample.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void corrupt_array(la_problem *p, draw *d)
{
    const int name = (int)draw_int(d, LA_Q, LA_ARRAYS - 1);
    const bool is_read = name == LA_CU || name == LA_SLOT;
    la_array *a = &p->array[name];
    const int axis = a->ndim ? (int)draw_int(d, 0, a->ndim - 1) : 0;
    switch (draw_int(d, 0, 4)) {
    case 0: a->given = !a->given && !is_read; break;
    case 1:
        /* an array that is read and claimed to be longer than it is would be the caller's lie */
        if (!is_read) a->dtype = (la_dtype)draw_int(d, 0, LA_DTYPES - 1);
        break;
    case 2: a->ndim = (int)draw_int(d, 0, is_read ? 0 : LA_MAX_DIMS); break;
    case 3: a->shape[axis] = draw_int(d, 0, a->shape[axis]); break;
    default:
        if (!is_read) a->shape[axis] += draw_int(d, 1, 3);
    }
}

static void corrupt_option(la_problem *p, draw *d)
{
    static const double odd[] = {NAN, INFINITY, -INFINITY, -1, 0, 1e300};
    const double x = odd[draw_int(d, 0, 5)];
    switch (draw_int(d, 0, 7)) {
    case 0: p->has_chunk = true, p->chunk = draw_int(d, -2, 1); break;
    case 1: p->has_scale = true, p->scale = x; break;
    case 2: p->eps = x; break;
    case 3: p->normaliser = (la_normaliser)draw_int(d, LA_UNNORMALISED, LA_ADD); break;
    case 4: p->causal = !p->causal; break;
    case 5: p->batch = draw_int(d, -2, 3); break;
    case 6: p->state_v_first = !p->state_v_first; break;
    default: la_problem_init(p, (la_op)draw_int(d, 0, LA_OPS - 1), p->pass);
    }
}

/* Sequences that fall, start late or end early: this array is read, so it is corrupted in place. */
static void corrupt_sequences(const la_problem *p, draw *d)
{
    const la_array *cu = &p->array[LA_CU];
    if (!cu->given || !array_size(cu)) return;
    char *x = array_element(cu, draw_int(d, 0, array_size(cu) - 1));
    const int64_t value = draw_chance(d, 3) ? INT64_MIN : draw_int(d, -3, p->T + 3);
    memcpy(x, &value, la_size_of(cu->dtype));
}

/* A state outside the pool, and one that two rows have: likewise. */
static bool corrupt_slots(const la_problem *p, draw *d)
{
    const la_array *slot = &p->array[LA_SLOT];
    if (!slot->given || !array_size(slot)) return false;
    char *const x = array_element(slot, draw_int(d, 0, array_size(slot) - 1));
    static const int64_t far[] = {INT32_MIN, -2, INT32_MAX};
    const int64_t value = draw_chance(d, 3) ? p->P : far[draw_int(d, 0, 2)];
    if (array_size(slot) > 1 && draw_chance(d, 2)) {
        const int64_t zero = 0; /* of the pool's states the first, twice */
        memcpy(array_element(slot, 0), &zero, la_size_of(slot->dtype));
        memcpy(array_element(slot, array_size(slot) - 1), &zero, la_size_of(slot->dtype));
    } else {
        memcpy(x, &value, la_size_of(slot->dtype));
    }
    return true;
}

bool check_corrupted(const sample *s, draw *d)
{
    la_problem p = s->p;
    memset(p.message, 0x55, sizeof p.message); /* unterminated, so that la_check must end it */
    for (int64_t times = draw_int(d, 1, 3); times > 0; times--)
        if (draw_chance(d, 2))
            corrupt_array(&p, d);
        else if (draw_chance(d, 6))
            corrupt_sequences(&p, d);
        else
            corrupt_option(&p, d);
    la_status status = la_check(&p);
    for (int name = LA_O; name < LA_ARRAYS && !status; name++)
        if (p.array[name].given && la_has(&p, (la_name)name))
            status = la_check_output(&p, (la_name)name);
    if (!status && p.array[LA_SLOT].given && p.B <= s->p.B) {
        int64_t room[8]; /* B is at most 3 */
        const bool corrupted = corrupt_slots(&p, d);
        status = la_check_slots(&p, room);
        if (corrupted && !status) {
            fprintf(stderr, "state_indices that are wrong were taken\n");
            return false;
        }
    }
    const bool said = p.message[0] && memchr(p.message, 0, sizeof p.message);
    if (status == LA_OK || (said && status <= LA_MEMORY_ERROR)) return true;
    fprintf(stderr, "status %d without a message\n", status);
    return false;
}
