/* Rows of values before and after a backward pass that knows no weight, gate or skip of them. See
 * factors.c. */

enum { FACTOR_PIECE = 16 * LANES };

/* n numbers of a row of values from column v on. */
LA_FN void load_values_at(const la_array *x, const la_factor_row *r, int64_t v, int64_t n, real *to)
{
    const char *const from = at(x, r->b, r->t, r->hv) + v * x->stride[3] * la_size_of(x->dtype);
    load_apart(to, n, from, x->stride[3], x->dtype);
}

LA_FN void store_values_at(const la_array *x, const la_factor_row *r, int64_t v, int64_t n,
                           const real *from)
{
    char *const to = at(x, r->b, r->t, r->hv) + v * x->stride[3] * la_size_of(x->dtype);
    if (x->stride[3] == 1)
        store_row(to, x->dtype, from, n);
    else
        scatter(to, x->stride[3], x->dtype, from, n);
}

/* The weight of the row. A call has a gate in its place, or neither. */
LA_FN real weight_of_row(const la_factors *j, const la_factor_row *r)
{
    const la_array *x = &j->p->array[LA_WEIGHT];
    return x->given ? load_element(at(x, r->b, r->t, r->hv), x->dtype) : 1;
}

/* u = weight v, or gate v */
static void make_written(const la_factors *j, const la_factor_row *r)
{
    real x[FACTOR_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    real by[FACTOR_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const la_problem *p = j->p;
    const bool gated = p->array[LA_W].given;
    const real weight = weight_of_row(j, r);
    for (int64_t v = 0; v < p->V; v += FACTOR_PIECE) {
        const int64_t n = v + FACTOR_PIECE < p->V ? FACTOR_PIECE : p->V - v;
        load_values_at(&p->array[LA_V], r, v, n, x);
        if (gated) load_values_at(&p->array[LA_W], r, v, n, by);
        for (int64_t i = 0; i < n; i += LANES)
            lanes_of(x + i)[0] *= gated ? lanes_of(by + i)[0] : weight - LANE_ZERO;
        store_values_at(&j->written, r, v, n, x);
    }
}

/* The gradients of what made it. du lies in the place of dv. */
static void undo_factors(const la_factors *j, const la_factor_row *r)
{
    real x[FACTOR_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    real of_v[FACTOR_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    real by[FACTOR_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const la_problem *p = j->p;
    const bool gated = p->array[LA_W].given, skips = p->array[LA_SKIP].given;
    const la_array *const skip = &p->array[LA_SKIP], *const dweight = &p->array[LA_DWEIGHT];
    const real weight = weight_of_row(j, r),
               passed =
                   skips ? (real)p->scale * load_element(at(skip, r->hv, 0, 0), skip->dtype) : 0;
    lane of_weight = LANE_ZERO, of_skip = LANE_ZERO;
    for (int64_t v = 0; v < p->V; v += FACTOR_PIECE) {
        const int64_t n = v + FACTOR_PIECE < p->V ? FACTOR_PIECE : p->V - v;
        load_values_at(&p->array[LA_DV], r, v, n, x);
        load_values_at(&p->array[LA_V], r, v, n, of_v);
        if (gated) {
            load_values_at(&p->array[LA_W], r, v, n, by);
            for (int64_t i = 0; i < n; i += LANES) {
                const lane du = lanes_of(x + i)[0];
                lanes_of(x + i)[0] = du * lanes_of(by + i)[0];
                lanes_of(by + i)[0] = du * lanes_of(of_v + i)[0];
            }
            store_values_at(&p->array[LA_DW], r, v, n, by);
        } else
            for (int64_t i = 0; i < n; i += LANES) {
                const lane du = lanes_of(x + i)[0];
                of_weight += du * lanes_of(of_v + i)[0];
                lanes_of(x + i)[0] = du * weight;
            }
        if (skips) {
            load_values_at(&p->array[LA_DO], r, v, n, by);
            for (int64_t i = 0; i < n; i += LANES) {
                const lane of_o = lanes_of(by + i)[0];
                of_skip += of_o * lanes_of(of_v + i)[0];
                lanes_of(x + i)[0] += passed * of_o;
            }
        }
        store_values_at(&p->array[LA_DV], r, v, n, x);
    }
    if (dweight->given)
        store_element(at(dweight, r->b, r->t, r->hv), dweight->dtype, lane_sum(of_weight));
    if (skips) j->of_skip[(r->b * p->L + r->t) * p->HV + r->hv] = (double)lane_sum(of_skip);
}
