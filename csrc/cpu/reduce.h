/* The end of a backward pass: add up la_partials in a fixed order, apply the adjoint of what
 * loading did to q, k and the gate, and write the gradients in the user's dtypes and strides. */

typedef struct reduce_scratch {
    real *sum, *row; /* [kp] */
} reduce_scratch;

LA_FN void reduce_take(reduce_scratch *f, arena *m, const la_problem *p)
{
    f->sum = arena_take(m, 1, padded(p->K));
    f->row = arena_take(m, 1, padded(p->K));
}

/* sum[row] = the sum of `count` partial sums from `first` on, each `row` reals a token, at token
 * `token`. */
LA_FN void add_partials(const la_partials *sums, const void *base, int64_t first, int64_t count,
                        int64_t token, int64_t row, real *sum)
{
    for (int64_t s = 0; s < count; s++) {
        const real *x = (const real *)base + ((first + s) * sums->tokens + token) * row;
        for (int64_t i = 0; i < row; i++) sum[i] = s ? sum[i] + x[i] : x[i];
    }
}

static void reduce(const la_problem *p, const la_rows *r, const la_partials *sums, void *scratch)
{
    arena m = {scratch, 0};
    reduce_scratch f;
    reduce_take(&f, &m, p);
    const int64_t group = p->HV / p->H, panels = sums->panels, kp = sums->kp;
    const la_array *db = &p->array[LA_DBETA], *deta = &p->array[LA_DETA];

    for (int64_t t = r->begin; t < r->end; t++) {
        const int64_t token = r->b * sums->row + t;
        if (t < p->T) {
            add_partials(sums, sums->dq, r->h * group * panels, group * panels, token, kp, f.sum);
            store_key_gradient(p, LA_Q, r->b, t, r->h, f.sum, f.row);
        }
        if (t < p->L) {
            add_partials(sums, sums->dk, r->h * group * panels, group * panels, token, kp, f.sum);
            store_key_gradient(p, LA_K, r->b, t, r->h, f.sum, f.row);
        }
        if (p->array[LA_DX].given) {
            add_partials(sums, sums->dx, r->h * group * panels, group * panels, token, kp, f.sum);
            store_plain_row(p, LA_DX, r->b, t, r->h, f.sum);
        }
        if (p->array[LA_DY].given) {
            add_partials(sums, sums->dy, r->h * group * panels, group * panels, token, kp, f.sum);
            store_plain_row(p, LA_DY, r->b, t, r->h, f.sum);
        }

        for (int64_t hv = r->h * group; hv < (r->h + 1) * group; hv++) {
            const la_unit u = {.b = r->b, .hv = hv};
            if (p->decay == LA_KEY) {
                add_partials(sums, sums->da, hv * panels, panels, token, kp, f.sum);
                store_gate_gradient(p, &u, t, f.sum, f.row, LA_KEY);
            } else if (p->decay == LA_TOKEN || p->decay == LA_PAIR) {
                add_partials(sums, sums->da, hv * panels, panels, token, 1, f.sum);
                store_gate_gradient(p, &u, t, f.sum, f.row, LA_TOKEN);
            }
            if (p->rule == LA_DELTA) {
                add_partials(sums, sums->dbeta, hv * panels, panels, token, 1, f.sum);
                store_element(at(db, r->b, t, hv), db->dtype, f.sum[0]);
            }
            if (deta->given) {
                add_partials(sums, sums->deta, hv * panels, panels, token, 1, f.sum);
                store_element(at(deta, r->b, t, hv), deta->dtype, f.sum[0]);
            }
        }
    }
}

/* The gradient of the bonus of one query/key head: the sums of its value heads, panels and
 * sequences. */
LA_FN void reduce_bonus(const la_problem *p, int64_t h, const la_partials *sums)
{
    const int64_t group = p->HV / p->H, each = sums->panels * p->N, count = group * each;
    const la_array *to = &p->array[LA_DU];
    for (int64_t i = 0; i < p->K; i++) {
        real2 total = 0;
        for (int64_t s = 0; sums->tokens && s < count; s++)
            total += ((const real *)sums->dbonus)[(h * count + s) * sums->kp + i];
        store_element(at_column(to, h, 0, 0, i), to->dtype, (real)total);
    }
}

static void reduce_head(const la_problem *p, int64_t hv, const la_partials *sums)
{
    if (p->decay == LA_HEAD) { /* every token's decay was this one: its gradients add up */
        const la_unit u = {.hv = hv};
        real a[LANES] __attribute__((aligned(LA_LANE_BYTES)));
        real2 total = 0; /* B T terms */
        for (int64_t s = 0; sums->tokens && s < sums->panels; s++)
            for (int64_t t = 0; t < sums->tokens; t++)
                total += ((const real *)sums->da)[(hv * sums->panels + s) * sums->tokens + t];
        real da = (real)total;
        load_decay(p, &u, 0, a, LA_TOKEN);
        store_element(at(&p->array[LA_DG], 0, 0, hv), p->array[LA_DG].dtype,
                      gate_gradient(da, a[0], p->gate));
    }
    const int64_t group = p->HV / p->H;
    if (p->rule == LA_BONUS && hv % group == 0) reduce_bonus(p, hv / group, sums);
    if (p->normaliser != LA_UNNORMALISED && p->array[LA_DZ0].given)
        for (int64_t n = 0; n < p->N; n++) {
            const la_unit u = {.n = n, .hv = hv};
            real *first = (real *)sums->dz0 + (hv * sums->panels * p->N + n) * sums->kp;
            for (int64_t s = 1; s < sums->panels; s++)
                add_scaled(sums->kp, first, 1, first + s * p->N * sums->kp);
            store_z(p, LA_DZ0, &u, first);
        }
}
