/* Gradients of the factors of values: a weight of each token's write, or a gate of each value that
 * is written; and of a skip, by which a read has its own token's value. Was
 *
 *     u = weight v, or gate v        S <- a S + k u'        o = scale (S' q + skip v)
 *
 * The backward pass of the rule takes u for v, and leaves du in the place of dv. Then
 *
 *     dv = weight du + scale skip do,  or gate du    dweight = du . v    dgate = du v
 *     dskip = scale times the sum over tokens of do . v */
#include "factors.h"
#include "kernels.h"
#include "pool.h"
#include "scratch.h"
#include "../sizes.h"

#include <string.h>

enum { TOKENS_OF_UNIT = 8 };

static void each_row(const la_factors *j, int64_t unit,
                     void (*act)(const la_factors *, const la_factor_row *))
{
    const la_problem *p = j->p;
    const int64_t first = unit * TOKENS_OF_UNIT,
                  last = first + TOKENS_OF_UNIT < p->tokens ? first + TOKENS_OF_UNIT : p->tokens;
    for (int64_t token = first; token < last; token++)
        for (int64_t hv = 0; hv < p->HV; hv++) {
            const la_factor_row r = {token / p->L, token % p->L, hv};
            act(j, &r);
        }
}

static void make_unit(void *context, int64_t unit, int thread)
{
    const la_factors *j = context;
    (void)thread;
    each_row(j, unit, la_cpu_kernels(j->p->real)->make_written);
}

static void undo_unit(void *context, int64_t unit, int thread)
{
    const la_factors *j = context;
    (void)thread;
    each_row(j, unit, la_cpu_kernels(j->p->real)->undo_factors);
}

static void skip_unit(void *context, int64_t hv, int thread)
{
    const la_factors *j = context;
    const la_array *to = &j->p->array[LA_DSKIP];
    double sum = 0;
    (void)thread;
    for (int64_t token = 0; token < j->p->tokens; token++)
        sum += j->p->scale * j->of_skip[token * j->p->HV + hv];
    la_cpu_kernels(j->p->real)
        ->store_numbers(to->data + hv * to->stride[0] * la_size_of(to->dtype), to->dtype, &sum, 1);
}

bool la_has_factors(const la_problem *p)
{
    return p->array[LA_WEIGHT].given || p->array[LA_W].given || p->array[LA_SKIP].given;
}

la_status la_backward_with_factors(la_problem *p, la_status (*backward)(la_problem *))
{
    static const la_name names[] = {LA_WEIGHT, LA_W, LA_SKIP, LA_DWEIGHT, LA_DW, LA_DSKIP};
    la_problem rule = *p; /* as the rule has it */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) rule.array[names[i]].given = false;
    if (p->states_only) { /* they depend on no value */
        const la_status status = backward(&rule);
        if (status) memcpy(p->message, rule.message, sizeof rule.message);
        return status;
    }

    la_factors j = {.p = p};
    const bool multiplies = p->array[LA_WEIGHT].given || p->array[LA_W].given;
    const size_t rows = la_times(p->tokens, p->HV), size = la_size_of(p->array[LA_V].dtype);
    const size_t of_skip = p->array[LA_SKIP].given ? la_times(rows, sizeof(double)) : 0;
    const size_t of_v = multiplies ? la_times(rows, la_times(p->V, size)) : 0;
    char *const block = la_scratch_beside(la_plus(of_skip, of_v));
    if (!block) return la_out_of_scratch(p->message);
    j.of_skip = (double *)block;
    const int64_t units = (p->tokens + TOKENS_OF_UNIT - 1) / TOKENS_OF_UNIT;
    /* From memory and back, about .1 ns for 4 bytes, in four arrays. */
    const int threads = la_pool_threads(units, .5 * (double)rows * (double)p->V);
    if (multiplies) {
        la_array *const v = &rule.array[LA_V];
        v->data = block + of_skip;
        v->stride[3] = 1;
        v->stride[2] = p->V;
        v->stride[1] = p->HV * p->V;
        v->stride[0] = p->L * v->stride[1];
        j.written = *v;
        la_pool_run(threads, units, make_unit, &j, p);
    }
    la_status status = backward(&rule);
    if (status) memcpy(p->message, rule.message, sizeof rule.message);
    if (!status) {
        la_pool_run(threads, units, undo_unit, &j, p);
        if (p->array[LA_SKIP].given) la_pool_run(threads, p->HV, skip_unit, &j, p);
        if (la_stopped(p)) status = LA_INTERRUPTED;
    }
    la_scratch_end_beside(block);
    return status;
}
