/* Which arrays a gate takes, and where their numbers lie. No Python here. */
#include "gates.h"

#include <string.h>

/* ---- shapes and dtypes ---- */

static bool spreads(const la_array *a, const la_array *x)
{
    const int before = x->ndim - a->ndim;
    if (before < 0) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != 1 && a->shape[i] != x->shape[before + i]) return false;
    return true;
}

static bool varies_in_rows_alone(const la_array *a)
{
    for (int i = 0; i < a->ndim - 2; i++)
        if (a->shape[i] != 1) return false;
    return true;
}

static bool is_shape_of(const la_array *a, const la_array *x)
{
    return a->ndim == x->ndim && !memcmp(a->shape, x->shape, sizeof *a->shape * (size_t)a->ndim);
}

static la_gating_fault fault_of_parameter(const la_array *a, const la_array *x)
{
    if (!a) return LA_GATING_FITS;
    if (a->dtype > LA_BF16) return LA_GATING_DTYPE;
    if (!spreads(a, x)) return LA_GATING_SPREAD;
    return varies_in_rows_alone(a) ? LA_GATING_FITS : LA_GATING_AXES;
}

/* ---- where the numbers lie ---- */

/* The size of x's axis that is `back` axes before the last, and an array's stride there. */
static int64_t size_at(const la_array *x, int back)
{
    return back < x->ndim ? x->shape[x->ndim - 1 - back] : 1;
}

static int64_t stride_at(const la_array *a, int back)
{
    return size_at(a, back) == 1 ? 0 : a->stride[a->ndim - 1 - back];
}

static la_gate_parameter parameter(const la_array *a)
{
    la_gate_parameter p = {.given = a};
    if (!a) return p;
    const int64_t P = size_at(a, 1), Q = size_at(a, 0);
    p.stride[0] = stride_at(a, 1);
    p.stride[1] = stride_at(a, 0);
    p.dense[0] = P == 1 ? 0 : Q;
    p.dense[1] = Q == 1 ? 0 : 1;
    p.count = P * Q;
    return p;
}

static bool varies_along_P(const la_gate_parameter *p) { return p->given && p->dense[0]; }

/* The axes of rows, from the first, with those that follow each other in both arrays as one. */
static int merge(const la_gating *j, int before, int64_t size[3], int64_t x[3], int64_t d[3])
{
    const la_array *second = j->d ? j->d : j->x;
    int n = 0;
    for (int i = 0; i < before; i++) {
        const int64_t here = j->x->shape[i], of_x = j->x->stride[i], of_d = second->stride[i];
        if (here == 1) continue;
        const bool follows = n && x[n - 1] == of_x * here && d[n - 1] == of_d * here;
        if (!follows) size[n++] = 1;
        size[n - 1] *= here;
        x[n - 1] = of_x;
        d[n - 1] = of_d;
    }
    return n;
}

static void settle(la_gating *j)
{
    const la_array *x = j->x, *d = j->d;
    int64_t size[3], of_x[3], of_d[3];
    j->rate = parameter(j->A_log);
    j->bias = parameter(j->dt_bias);
    const bool by_head = varies_along_P(&j->rate) || varies_along_P(&j->bias);
    const int of_row = by_head ? 2 : 1, before = x->ndim > of_row ? x->ndim - of_row : 0;
    j->P = by_head ? size_at(x, 1) : 1;
    j->Q = size_at(x, 0);
    j->from = (la_gate_numbers){.data = x->data, .dtype = x->dtype};
    j->from.head = by_head ? stride_at(x, 1) : 0;
    if (d) {
        j->df = (la_gate_numbers){.data = d->data, .dtype = d->dtype};
        j->df.head = by_head ? stride_at(d, 1) : 0;
    }
    const int n = merge(j, before, size, of_x, of_d);
    j->rows = 1;
    for (int i = 0; i < 3; i++) {
        const int at = i - (3 - n);
        j->lead[i] = at < 0 ? 1 : size[at];
        j->from.lead[i] = at < 0 ? 0 : of_x[at];
        j->df.lead[i] = at < 0 ? 0 : of_d[at];
        j->rows *= j->lead[i];
    }
    j->count = j->rows * j->P * j->Q;
    const int64_t row = j->P * j->Q;
    const bool whole = j->P == 1 || (j->from.head == j->Q && (!d || j->df.head == j->Q));
    j->dense = whole && (n == 0 || (n == 1 && of_x[0] == row && of_d[0] == row));
    if (!j->dense || j->rate.given || j->bias.given) return;
    /* All numbers are alike: a row of any length will do. */
    j->lead[0] = j->lead[1] = j->P = j->Q = 1;
    j->lead[2] = j->rows = j->count;
    j->from.lead[2] = j->df.lead[2] = 1;
}

la_gating_fault la_gates_check(la_gating *j, const la_array **which)
{
    const la_array *const parameters[] = {j->A_log, j->dt_bias};
    *which = j->x;
    if (j->x->dtype > LA_BF16) return LA_GATING_DTYPE;
    for (int i = 0; i < 2; i++) {
        const la_gating_fault fault = fault_of_parameter(parameters[i], j->x);
        *which = parameters[i];
        if (fault != LA_GATING_FITS) return fault;
    }
    *which = j->d;
    if (j->d && j->d->dtype > LA_BF16) return LA_GATING_DTYPE;
    if (j->d && !is_shape_of(j->d, j->x)) return LA_GATING_GRADIENT;
    j->real = j->x->dtype == LA_F64 ? LA_F64 : LA_F32;
    settle(j);
    return LA_GATING_FITS;
}
