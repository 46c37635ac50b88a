/* The chunk form. C tokens at a time, four stages:
 *
 *     scores  what tokens of the chunk see of each other          P, L   (shared by all columns)
 *     solve   what each token writes                              U = beta (V - k^ S - L U)
 *     read    what each token reads                               O = q^ S + P U
 *     carry   the state the chunk leaves                          S <- diag(e) S + k~' U
 *
 *     q^_i = q_i e_i,  k^_i = k_i e_i      e_i: the decays from the chunk's start up to token i
 *     k~_j = k_j r_j                       r_j: the decays after token j up to the chunk's end
 *     P_ij = q_i . k_j Gamma_ij (j <= i)   Gamma_ij: the decays after j up to i
 *     L_ij = k_i . k_j Gamma_ij (j < i)
 *
 * e, r and Gamma are products of the decays a in [0, 1], so no gate can overflow, a = 0 needs no
 * clamp, and a kept decay beside a huge one loses no digits: no logarithm is summed and nothing is
 * divided (docs/decisions/0005). One decay per token: products of d tokens are made of two halves,
 * in twice the digits. One per key: the row k_j Gamma_ij is carried down the chunk, multiplied by
 * a_i at each token. */

typedef struct chunk {
    int64_t C;      /* room, in tokens */
    int64_t kp, cp; /* K and C, padded */
    int64_t n;      /* tokens in it now */
    real *q, *k;    /* [C][kp] l2-normed and mapped */
    real *a;        /* TOKEN [C], KEY [C][kp] */
    real *beta;     /* [C] */
    real *e;        /* TOKEN [C], KEY [C][kp] */
    real *gamma;    /* TOKEN [C][cp]: Gamma */
    wide
        *products; /* TOKEN [C][cp]: row d-1 holds the products of d decays, by their first token */
    real *hat;     /* [2C][kp]: k^, then (from row n) q^; additive ops: q^ only */
    real *tilde;   /* [C][kp]: k~ */
    real *kt;      /* [kp][cp]: k transposed */
    real *qk, *kk; /* [C][cp]: the bare products q_i . k_j and k_i . k_j (not for KEY) */
    real *P, *L;   /* [C][cp] */
    real *den;     /* [C]: the normaliser's denominators */
} chunk;

LA_FN void chunk_take(chunk *c, arena *m, const la_problem *p, int64_t C, const la_decay decay,
                      const la_rule rule)
{
    const int64_t kp = padded(p->K), cp = padded(C);
    const int64_t gate = decay == LA_KEY ? C * kp : decay == LA_NONE ? 0 : C;
    *c = (chunk){.C = C, .kp = kp, .cp = cp};
    c->q = take(m, C * kp);
    c->k = take(m, C * kp);
    c->a = take(m, gate);
    c->e = take(m, gate);
    c->beta = take(m, C);
    c->gamma = take(m, decay == LA_TOKEN ? C * cp : 0);
    c->products =
        (wide *)take(m, decay == LA_TOKEN ? C * cp * (int64_t)(sizeof(wide) / sizeof(real)) : 0);
    c->hat = take(m, 2 * C * kp);
    c->tilde = take(m, C * kp);
    c->kt = take(m, decay == LA_KEY ? 0 : kp * cp);
    c->qk = take(m, decay == LA_KEY ? 0 : C * cp);
    c->kk = take(m, decay == LA_KEY || rule == LA_ADDITIVE ? 0 : C * cp);
    c->P = take(m, C * cp);
    c->L = take(m, rule == LA_DELTA ? C * cp : 0);
    c->den = take(m, C);
}

/* Ask for the rows of tokens t..t+n ahead of time: a head's rows lie far apart, too far for the
 * hardware to guess the next one, and a chunk's worth of work hides their way from memory. */
LA_FN void prefetch_rows(const la_problem *p, la_name name, int64_t b, int64_t t, int64_t n,
                         int64_t h, int64_t column, int64_t columns)
{
    const la_array *x = &p->array[name];
    for (int64_t i = 0; i < n; i++) {
        const char *row = at(x, b, t + i, h) + column * dtype_size(x->dtype);
        for (int64_t byte = 0; byte < columns * dtype_size(x->dtype); byte += 64)
            __builtin_prefetch(row + byte, 0, 2);
    }
}

LA_FN void prefetch_keys(const la_problem *p, const la_unit *u, int64_t t, int64_t n,
                         const la_decay decay)
{
    prefetch_rows(p, LA_Q, u->b, t, n, u->h, 0, p->K);
    prefetch_rows(p, LA_K, u->b, t, n, u->h, 0, p->K);
    if (decay == LA_KEY) prefetch_rows(p, LA_G, u->b, t, n, u->hv, 0, p->K);
}

/* Tokens t..t+n of the unit's sequence. */
LA_FN void chunk_load(chunk *c, const la_problem *p, const la_unit *u, int64_t t, int64_t n,
                      const la_decay decay, const la_rule rule)
{
    c->n = n;
    for (int64_t i = 0; i < n; i++) {
        load_key(p, LA_Q, u->b, t + i, u->h, c->q + i * c->kp);
        load_key(p, LA_K, u->b, t + i, u->h, c->k + i * c->kp);
        load_decay(p, u, t + i, c->a + i * (decay == LA_KEY ? c->kp : 1), decay);
        if (rule == LA_DELTA) c->beta[i] = load_beta(p, u, t + i);
    }
}

LA_FN void multiply_row(int64_t n, real *to, const real *x, const real *y)
{
    for (int64_t i = 0; i < n; i += LANES)
        lanes_of(to + i)[0] = lanes_in(x + i)[0] * lanes_in(y + i)[0];
}

LA_FN void scale_row(int64_t n, real *to, const real *x, real a)
{
    for (int64_t i = 0; i < n; i += LANES) lanes_of(to + i)[0] = a * lanes_in(x + i)[0];
}

LA_FN void copy_row(int64_t n, real *to, const real *x)
{
    for (int64_t i = 0; i < n; i += LANES) lanes_of(to + i)[0] = lanes_in(x + i)[0];
}

/* Where q^ starts: k^ and q^ are one matrix of 2n rows for the delta rule. */
LA_FN real *q_hat(const chunk *c, const la_rule rule)
{
    return c->hat + (rule == LA_DELTA ? c->n * c->kp : 0);
}

/* ---- scores ---- */

/* Gamma's lower triangle and e, each rounded once: a decay that is the same for every token would
 * round the same way every time, and the error would grow with the memory's reach. */
LA_FN void decay_products(chunk *c)
{
    const int64_t n = c->n, cp = c->cp;
    for (int64_t i = 0; i < n; i++) c->products[i] = c->a[i];
    for (int64_t d = 2; d <= n; d++) {
        const wide *first = c->products + (d / 2 - 1) * cp;
        const wide *second = c->products + (d - d / 2 - 1) * cp + d / 2;
        wide *both = c->products + (d - 1) * cp;
        for (int64_t i = 0; i + d <= n; i++) both[i] = first[i] * second[i];
    }
    for (int64_t i = 0; i < n; i++) {
        real *G = c->gamma + i * cp;
        for (int64_t j = 0; j < i; j++) G[j] = (real)c->products[(i - j - 1) * cp + j + 1];
        G[i] = 1;
        c->e[i] = (real)c->products[i * cp];
    }
}

/* One decay per token (or none): the products of the chunk's rows once, then Gamma over them. */
LA_FN void scores_token(chunk *c, const la_problem *p, const la_decay decay, const la_rule rule)
{
    const int64_t n = c->n, kp = c->kp, cp = c->cp, width = padded(n);

    transpose(n, p->K, c->k, kp, c->kt, cp);
    product(n, width, p->K, c->q, kp, 1, c->kt, cp, c->qk, cp, NULL, 0);
    if (rule == LA_DELTA) product(n, width, p->K, c->k, kp, 1, c->kt, cp, c->kk, cp, NULL, 0);

    if (decay != LA_NONE) decay_products(c);
    for (int64_t i = 0; i < n; i++) {
        real *P = c->P + i * cp, *L = c->L + i * cp, *qk = c->qk + i * cp, *kk = c->kk + i * cp;
        if (decay == LA_NONE) {
            for (int64_t j = 0; j <= i; j++) P[j] = qk[j];
            if (rule == LA_DELTA)
                for (int64_t j = 0; j < i; j++) L[j] = kk[j];
        } else {
            const real *G = c->gamma + i * cp;
            for (int64_t j = 0; j <= i; j++) P[j] = G[j] * qk[j];
            if (rule == LA_DELTA)
                for (int64_t j = 0; j < i; j++) L[j] = G[j] * kk[j];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        real *q = q_hat(c, rule) + i * kp, *k = c->hat + i * kp, *kr = c->tilde + i * kp;
        real e = decay == LA_NONE ? 1 : c->e[i];
        real r = decay == LA_NONE ? 1 : c->gamma[(n - 1) * cp + i];
        scale_row(kp, q, c->q + i * kp, e);
        if (rule == LA_DELTA) scale_row(kp, k, c->k + i * kp, e);
        scale_row(kp, kr, c->k + i * kp, r);
    }
}

/* One decay per token and key: each key's row is carried down the chunk. */
LA_FN void scores_key(chunk *c, const la_rule rule)
{
    const int64_t n = c->n, kp = c->kp, cp = c->cp;

    for (int64_t i = 0; i < n; i++) {
        real *e = c->e + i * kp;
        if (i)
            multiply_row(kp, e, c->a + i * kp, e - kp);
        else
            copy_row(kp, e, c->a);
        multiply_row(kp, q_hat(c, rule) + i * kp, c->q + i * kp, e);
        if (rule == LA_DELTA) multiply_row(kp, c->hat + i * kp, c->k + i * kp, e);
    }
    for (int64_t j = 0; j < n; j++) {
        real *row = c->tilde + j * kp; /* k_j Gamma_ij, i running from j to the chunk's end */
        copy_row(kp, row, c->k + j * kp);
        c->P[j * cp + j] = dot(kp, c->q + j * kp, row);
        for (int64_t i = j + 1; i < n; i++) {
            lane sq = {0}, sk = {0};
            for (int64_t x = 0; x < kp; x += LANES) {
                lane r = lanes_in(row + x)[0] * lanes_in(c->a + i * kp + x)[0];
                lanes_of(row + x)[0] = r;
                sq += lanes_in(c->q + i * kp + x)[0] * r;
                if (rule == LA_DELTA) sk += lanes_in(c->k + i * kp + x)[0] * r;
            }
            c->P[i * cp + j] = lane_sum(sq);
            if (rule == LA_DELTA) c->L[i * cp + j] = lane_sum(sk);
        }
    }
}

LA_FN void chunk_scores(chunk *c, const la_problem *p, const la_decay decay, const la_rule rule)
{
    if (decay == LA_KEY)
        scores_key(c, rule);
    else
        scores_token(c, p, decay, rule);
}

/* ---- solve, read, carry: one panel of columns ---- */

typedef struct panel {
    int64_t v0, v1, width; /* columns of V; width is padded */
    real *S;               /* [K][width] */
    real *U;               /* [C][width]: V, then what is written */
    real *X;               /* [2C][width]: k^ S, then q^ S and O */
} panel;

LA_FN void load_values(const chunk *c, const la_problem *p, la_name name, const la_unit *u,
                       int64_t t, int64_t v0, int64_t v1, real *to, int64_t width)
{
    const la_array *from = &p->array[name];
    for (int64_t i = 0; i < c->n; i++)
        load_row(to + i * width, v1 - v0, at_column(from, u->b, t + i, u->hv, v0), from->dtype);
}

/* From the first row down: E_i = V_i - (k^ S)_i - sum_{j<i} L_ij U_j, what the memory got wrong
 * about token i, and U_i = beta_i E_i. U holds V on entry; E may be U itself where only U is
 * wanted. */
LA_FN void panel_solve(const chunk *c, const panel *s, real *E)
{
    const int64_t width = s->width;
#define SOLVE(NV, w) \
    for (int64_t i = 0; i < c->n; i++) { \
        lane sum[STRIP]; \
        weighted_sum(NV, i, c->L + i * c->cp, 1, s->U + w, width, sum); \
        for (int x = 0; x < NV; x++) { \
            const int64_t at = i * width + w + x * LANES; \
            lane e = lanes_in(s->U + at)[0] - lanes_in(s->X + at)[0] - sum[x]; \
            lanes_of(E + at)[0] = e; \
            lanes_of(s->U + at)[0] = c->beta[i] * e; \
        } \
    }
    FOR_EACH_STRIP(width, SOLVE);
#undef SOLVE
}

/* O += P U, row i from the rows up to i only: a NaN written later must not reach it. */
LA_FN void panel_read(const chunk *c, const panel *s, real *O)
{
#define READ(NV, w) \
    for (int64_t i = 0; i < c->n; i++) { \
        lane sum[STRIP]; \
        weighted_sum(NV, i + 1, c->P + i * c->cp, 1, s->U + w, s->width, sum); \
        for (int x = 0; x < NV; x++) lanes_of(O + i * s->width + w)[x] += sum[x]; \
    }
    FOR_EACH_STRIP(s->width, READ);
#undef READ
}

/* The decay of the whole chunk: one number, or one per key. */
LA_FN const real *whole_decay(const chunk *c, const la_decay decay)
{
    if (decay == LA_NONE) return &one;
    return c->e + (c->n - 1) * (decay == LA_KEY ? c->kp : 1);
}

/* S <- diag(e) S + k~' U, e the chunk's whole decay. */
LA_FN void panel_carry(const chunk *c, const la_problem *p, panel *s, const la_decay decay)
{
    product(p->K, s->width, c->n, c->tilde, 1, c->kp, s->U, s->width, s->S, s->width,
            whole_decay(c, decay), decay == LA_KEY);
}

/* z += sum_j k_j. Mapped keys are positive, so z grows with every token and its roundings, all of
 * one sign where keys repeat, would grow with it: `lost` keeps what each addition rounded off and
 * gives it back to the next (Kahan). It starts at zero. */
LA_FN void add_keys(int64_t n, int64_t kp, const real *k, real *z, real *lost)
{
    const lane zero = {0};
    for (int64_t x = 0; x < kp; x += LANES) {
        lane before = lanes_in(z + x)[0];
        lane add;
        weighted_sum(1, n, &one, 0, k + x, kp, &add);
        add -= lanes_in(lost + x)[0];
        lane after = before + add;
        lane rounded = (after - before) - add;
        lanes_of(lost + x)[0] = pick(rounded - rounded == zero, rounded, zero); /* 0 at infinity */
        lanes_of(z + x)[0] = after;
    }
}

/* den_i = q_i z + sum_{j<=i} q_i k_j, and z <- z + sum_j k_j. Only ungated additive ops have z, so
 * P holds the bare products. */
LA_FN void chunk_denominators(chunk *c, real *z, real *lost)
{
    for (int64_t i = 0; i < c->n; i++) {
        real within = 0;
        for (int64_t j = 0; j <= i; j++) within += c->P[i * c->cp + j];
        c->den[i] = dot(c->kp, c->q + i * c->kp, z) + within;
    }
    add_keys(c->n, c->kp, c->k, z, lost);
}

LA_FN void store_outputs(const chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                         const panel *s, real *O, bool normalised)
{
    const la_array *to = &p->array[LA_O];
    for (int64_t i = 0; i < c->n; i++) {
        real *row = O + i * s->width;
        finish_row(p, row, s->width, normalised, c->den[i]);
        store_row(at_column(to, u->b, t + i, u->hv, s->v0), to->dtype, row, s->v1 - s->v0);
    }
}

/* ---- a whole sequence, forward ---- */

/* Columns worked on together: their state, 128 x 64 floats, fits a 48 KiB L1 with the chunk. */
enum { PANEL = 64 };

typedef struct forward_scratch {
    chunk c;
    real *S, *U, *X, *z, *lost;
} forward_scratch;

LA_FN void forward_take(forward_scratch *f, arena *m, const la_problem *p, int64_t C,
                        int64_t columns, const la_decay decay, const la_rule rule)
{
    int64_t width = padded(columns < PANEL ? columns : PANEL);
    int64_t panels = (columns + PANEL - 1) / PANEL;
    chunk_take(&f->c, m, p, C, decay, rule);
    f->S = take(m, panels * p->K * width);
    f->U = take(m, C * width);
    f->X = take(m, 2 * C * width);
    f->z = take(m, padded(p->K));
    f->lost = take(m, padded(p->K));
}

LA_FN panel panel_at(const forward_scratch *f, const la_problem *p, const la_unit *u, int64_t v)
{
    int64_t all = u->v1 - u->v0, width = padded(all < PANEL ? all : PANEL);
    panel s = {.v0 = v, .v1 = v + PANEL < u->v1 ? v + PANEL : u->v1, .width = width};
    s.S = f->S + (v - u->v0) / PANEL * p->K * width;
    s.U = f->U;
    s.X = f->X;
    return s;
}

LA_FN void chunk_forward(const la_problem *p, const la_unit *u, int64_t C, arena *m,
                         const la_decay decay, const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    forward_scratch f;
    forward_take(&f, m, p, C, u->v1 - u->v0, decay, rule);
    chunk *c = &f.c;

    for (int64_t v = u->v0; v < u->v1; v += PANEL) {
        panel s = panel_at(&f, p, u, v);
        load_state(p, LA_S0, u, s.v0, s.v1, s.S, s.width);
    }
    if (normalised) load_z(p, LA_Z0, u, f.z);
    fill(c->kp, f.lost, 0);

    for (int64_t t = u->begin; t < u->end; t += C) {
        const int64_t next = t + C, ahead = next + C < u->end ? C : u->end - next;
        chunk_load(c, p, u, t, t + C < u->end ? C : u->end - t, decay, rule);
        prefetch_keys(p, u, next, ahead, decay);
        chunk_scores(c, p, decay, rule);
        if (normalised) chunk_denominators(c, f.z, f.lost);
        for (int64_t v = u->v0; v < u->v1; v += PANEL) {
            panel s = panel_at(&f, p, u, v);
            const int64_t rows = rule == LA_DELTA ? 2 * c->n : c->n;
            real *O = rule == LA_DELTA ? s.X + c->n * s.width : s.X;
            load_values(c, p, LA_V, u, t, s.v0, s.v1, s.U, s.width);
            prefetch_rows(p, LA_V, u->b, next, ahead, u->hv, s.v0, s.v1 - s.v0);
            prefetch_rows(p, LA_O, u->b, t, c->n, u->hv, s.v0, s.v1 - s.v0);
            product(rows, s.width, p->K, c->hat, c->kp, 1, s.S, s.width, s.X, s.width, NULL, 0);
            if (rule == LA_DELTA) panel_solve(c, &s, s.U);
            panel_read(c, &s, O);
            panel_carry(c, p, &s, decay);
            store_outputs(c, p, u, t, &s, O, normalised);
        }
    }

    for (int64_t v = u->v0; v < u->v1; v += PANEL) {
        panel s = panel_at(&f, p, u, v);
        store_state(p, LA_ST, u, s.v0, s.v1, s.S, s.width);
    }
    if (normalised && u->v0 == 0) store_z(p, LA_ZT, u, f.z);
}
