/* Noncausal linear attention: every token reads the state of the whole sequence. One pass sums the
 * state and a second one reads it, so the order of the keys matters only to rounding. The tokens that
 * write (of k and v) and those that read (of q) may be of different numbers.
 *
 *     S = S0 + K' V,   z = z0 + K' 1,   O = scale Q S / divisor(scale Q z) */

typedef struct noncausal_scratch {
    real *S, *dS, *T; /* [K][width], T transposed [width][kp] */
    real *z, *dz, *kahan;
    real *q, *k; /* [C][kp] */
    real *V, *O; /* [C][width] */
    real *d;     /* [C][kp] */
} noncausal_scratch;

LA_FN void noncausal_take(noncausal_scratch *f, arena *m, const la_problem *p, int64_t C,
                          int64_t columns)
{
    const int64_t kp = padded(p->K), width = padded(columns);
    f->S = arena_take(m, p->K, width);
    f->dS = arena_take(m, p->K, width);
    f->T = arena_take(m, width, kp);
    f->z = arena_take(m, 1, kp);
    f->dz = arena_take(m, 1, kp);
    f->kahan = arena_take(m, 1, kp);
    f->q = arena_take(m, C, kp);
    f->k = arena_take(m, C, kp);
    f->V = arena_take(m, C, width);
    f->O = arena_take(m, C, width);
    f->d = arena_take(m, C, kp);
}

LA_FN void load_rows(const la_problem *p, la_name name, const la_unit *u, int64_t t, int64_t n,
                     real *to, int64_t width)
{
    const la_array *from = &p->array[name];
    for (int64_t i = 0; i < n; i++)
        load_row(to + i * width, u->v1 - u->v0, at_column(from, u->b, t + i, u->hv, u->v0),
                 from->dtype);
}

/* S and z of the whole sequence. */
LA_FN void noncausal_sum(noncausal_scratch *f, const la_problem *p, const la_unit *u, int64_t C)
{
    const int64_t kp = padded(p->K), width = padded(u->v1 - u->v0);
    load_state(p, LA_S0, u, u->v0, u->v1, f->S, width);
    load_z(p, LA_Z0, u, f->z);
    fill(kp, f->kahan, 0);
    for (int64_t t = u->begin; t < u->keys_end; t += C) {
        const int64_t n = t + C < u->keys_end ? C : u->keys_end - t;
        if (la_stopped(p)) return;
        for (int64_t i = 0; i < n; i++) load_key(p, LA_K, u->b, t + i, u->h, f->k + i * kp);
        add_keys(n, kp, f->k, f->z, f->kahan);
        load_rows(p, LA_V, u, t, n, f->V, width);
        product(p->K, width, n, f->k, 1, kp, f->V, width, f->S, width, &one, 0);
    }
}

LA_FN void noncausal_forward(const la_problem *p, const la_unit *u, int64_t C, arena *m)
{
    const bool normalised = p->normaliser != LA_UNNORMALISED;
    const int64_t kp = padded(p->K), width = padded(u->v1 - u->v0);
    const la_array *to = &p->array[LA_O];
    noncausal_scratch f;
    noncausal_take(&f, m, p, C, u->v1 - u->v0);
    noncausal_sum(&f, p, u, C);
    for (int64_t t = u->begin; t < u->end; t += C) {
        const int64_t n = t + C < u->end ? C : u->end - t;
        if (la_stopped(p)) return;
        for (int64_t i = 0; i < n; i++) load_key(p, LA_Q, u->b, t + i, u->h, f.q + i * kp);
        product(n, width, p->K, f.q, kp, 1, f.S, width, f.O, width, NULL, 0);
        for (int64_t i = 0; i < n; i++) {
            real *row = f.O + i * width;
            finish_row(p, row, width, normalised, normalised ? dot(kp, f.q + i * kp, f.z) : 0);
            store_row(at_column(to, u->b, t + i, u->hv, u->v0), to->dtype, row, u->v1 - u->v0);
        }
    }
    store_state(p, LA_ST, u, u->v0, u->v1, f.S, width);
    if (normalised && u->v0 == 0) store_z(p, LA_ZT, u, f.z);
}

LA_FN void noncausal_backward(const la_problem *p, const la_unit *u, const la_partials *sums,
                              int64_t C, arena *m)
{
    const bool normalised = p->normaliser != LA_UNNORMALISED;
    const int64_t kp = padded(p->K), width = padded(u->v1 - u->v0);
    noncausal_scratch f;
    noncausal_take(&f, m, p, C, u->v1 - u->v0);
    noncausal_sum(&f, p, u, C);
    load_state(p, LA_DST, u, u->v0, u->v1, f.dS, width);
    if (normalised && u->panel == 0)
        load_z(p, LA_DZT, u, f.dz);
    else
        fill(kp, f.dz, 0);

    fill(kp, f.kahan, 0);
    transpose(p->K, width, f.S, width, f.T, kp);
    for (int64_t t = u->begin; t < u->end; t += C) { /* was o = scale q S / divisor(scale q z) */
        const int64_t n = t + C < u->end ? C : u->end - t;
        if (la_stopped(p)) return;
        for (int64_t i = 0; i < n; i++) load_key(p, LA_Q, u->b, t + i, u->h, f.q + i * kp);
        load_rows(p, LA_DO, u, t, n, f.O, width);
        for (int64_t i = 0; i < n; i++)
            finish_row(p, f.O + i * width, width, normalised,
                       normalised ? dot(kp, f.q + i * kp, f.z) : 0);
        product(n, kp, width, f.O, width, 1, f.T, kp, f.d, kp, NULL, 0);
        product(p->K, width, n, f.q, 1, kp, f.O, width, f.dS, width, &one, 0);
        for (int64_t i = 0; normalised && i < n; i++) {
            const real den = dot(kp, f.q + i * kp, f.z);
            const real d_den =
                d_denominator(p, den * (real)p->scale, dot(kp, f.q + i * kp, f.d + i * kp));
            add_scaled(kp, f.d + i * kp, d_den, f.z);
            scale_row(kp, f.q + i * kp, f.q + i * kp, d_den);
        }
        if (normalised) add_keys(n, kp, f.q, f.dz, f.kahan); /* was den = scale q z: q is d_den q */
        copy_row(n * kp, partial_at(sums, sums->dq, u, t, kp), f.d);
    }
    transpose(p->K, width, f.dS, width, f.T, kp);
    for (int64_t t = u->begin; t < u->keys_end; t += C) { /* was S += k v', z += k */
        const int64_t n = t + C < u->keys_end ? C : u->keys_end - t;
        if (la_stopped(p)) return;
        const la_array *dv = &p->array[LA_DV];
        for (int64_t i = 0; i < n; i++) load_key(p, LA_K, u->b, t + i, u->h, f.k + i * kp);
        load_rows(p, LA_V, u, t, n, f.V, width);
        product(n, width, p->K, f.k, kp, 1, f.dS, width, f.O, width, NULL, 0);
        for (int64_t i = 0; i < n; i++) {
            copy_row(kp, f.d + i * kp, f.dz);
            store_row(at_column(dv, u->b, t + i, u->hv, u->v0), dv->dtype, f.O + i * width,
                      u->v1 - u->v0);
        }
        product(n, kp, width, f.V, width, 1, f.T, kp, f.d, kp, &one, 0);
        copy_row(n * kp, partial_at(sums, sums->dk, u, t, kp), f.d);
    }
    store_state(p, LA_DS0, u, u->v0, u->v1, f.dS, width);
    if (normalised) copy_row(kp, partial_z_at(p, sums, u), f.dz);
}
