/* The chunk form's forward pass: solve and read for a panel of columns, then a whole sequence of
 * chunks. state_products.h or state_products_bf16.h has the products with the state, and with them
 * the carry. */

/* ---- solve and read: one panel of columns ---- */

/* Rows of reals where they lie: in scratch, or in a user's array that needs no conversion. */
typedef struct rows {
    real *at;
    int64_t ld;
} rows;

LA_FN lane_of_state *row_of(rows x, int64_t i, int64_t column)
{
    return (lane_of_state *)(x.at + i * x.ld + column);
}

/* The panel's columns of tokens t.. of an array, in place if they are whole lanes of reals; else
 * `room`. */
LA_FN rows rows_of(const la_problem *p, la_name name, const la_unit *u, int64_t t, const panel *s,
                   real *room)
{
    const la_array *x = &p->array[name];
    if (x->dtype != REAL_DTYPE || (s->v1 - s->v0) % LANES) return (rows){room, s->width};
    return (rows){(real *)at_column(x, u->b, t, u->hv, s->v0), x->stride[1]};
}

LA_COLD void load_values(const chunk *c, const la_problem *p, la_name name, const la_unit *u,
                         int64_t t, int64_t v0, int64_t v1, real *to, int64_t width)
{
    const la_array *from = &p->array[name];
    for (int64_t i = 0; i < c->n; i++)
        load_row(to + i * width, v1 - v0, at_column(from, u->b, t + i, u->hv, v0), from->dtype);
}

LA_COLD void store_values(const chunk *c, const la_problem *p, la_name name, const la_unit *u,
                          int64_t t, int64_t v0, int64_t v1, const real *from, int64_t width)
{
    const la_array *to = &p->array[name];
    for (int64_t i = 0; i < c->n; i++)
        store_row(at_column(to, u->b, t + i, u->hv, v0), to->dtype, from + i * width, v1 - v0);
}

/* w V, into U. Where rows must be converted, the place of the reads has them. It is a function of
 * its own so that no product is fused with what follows it, and all columns have the same bits. */
LA_COLD void load_gated_values(const chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                               const panel *s)
{
    const rows V = rows_of(p, LA_V, u, t, s, s->O), gate = rows_of(p, LA_W, u, t, s, s->U);
    if (V.at == s->O) load_values(c, p, LA_V, u, t, s->v0, s->v1, s->O, s->width);
    if (gate.at == s->U) load_values(c, p, LA_W, u, t, s->v0, s->v1, s->U, s->width);
    for (int64_t i = 0; i < c->n; i++)
        for (int64_t w = 0; w < s->width; w += LANES)
            lanes_of(s->U + i * s->width + w)[0] = row_of(gate, i, w)[0] * row_of(V, i, w)[0];
}

/* The writes that are given are V as it is. */
LA_FN void panel_write(const chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                       const panel *s, const la_decay decay)
{
    load_values(c, p, LA_V, u, t, s->v0, s->v1, s->U, s->width);
    for (int64_t i = 0; rows_are_scaled(decay) && i < c->n; i++)
        scale_row(s->width, s->rU + i * s->width, s->U + i * s->width, c->scale_U[i]);
}

/* The factor of row i of k S or q S. `scaled` must be a compile-time constant: a run-time branch
 * between the product and the sum stops the compiler from fusing them in some lanes, and the bits
 * would differ between lanes. */
LA_FN real start_of(const real *scale, int64_t i, const bool scaled)
{
    return scaled ? scale[i] : 1;
}

/* R rows from i, W lanes from column w of panel_solve. */
LA_FN void solve_block(const int R, const int W, int64_t i, int64_t w, const chunk *c, int K,
                       const real *x, const panel *s, rows V, real *E, prefetch *next,
                       const bool scaled, const la_rule rule)
{
    if (next) prefetch_some(next);
    const int64_t cp = c->cp, width = s->width;
    const real *L = c->L + i * cp, *Lk = L; /* DPLR: of y, and of k */
    real *U = s->U;
    lane kS[TILE], sum[TILE], of_V[TILE], u[STRIP];

    state_product(R, W, i, w, c, K, x, s, s->kS, kS);
    if (rule == LA_DPLR) {
        L += c->C * cp;
        U += c->n * width;
        tile_sum(R, W, (int)i, Lk, cp, 1, s->U + w, width, of_V);
    }
    tile_sum(R, W, (int)i, L, cp, 1, U + w, width, sum);
#pragma GCC unroll 8
    for (int y = 0; y < R; y++) {
        const real start = start_of(c->scale_kS, i + y, scaled), beta = c->beta[i + y];
        const int64_t at = (i + y) * width + w;
        const lane_of_state *v = row_of(V, i + y, w);
#pragma GCC unroll 8
        for (int x = 0; x < W && rule == LA_DPLR; x++) {
            u[x] = -(kS[y * W + x] + of_V[y * W + x] + sum[y * W + x]);
            lanes_of(U + at)[x] = u[x];
        }
#pragma GCC unroll 8
        for (int x = 0; x < W && rule == LA_DELTA; x++) {
            lane e = v[x] - start * kS[y * W + x] - sum[y * W + x];
            u[x] = beta * e;
            lanes_of(E + at)[x] = e;
            lanes_of(s->U + at)[x] = u[x];
            if (scaled) lanes_of(s->rU + at)[x] = c->scale_U[i + y] * u[x];
        }
#pragma GCC unroll 8
        for (int z = y + 1; z < R; z++)
#pragma GCC unroll 8
            for (int x = 0; x < W; x++) {
                sum[z * W + x] += L[z * cp + i + y] * u[x];
                if (rule == LA_DPLR) of_V[z * W + x] += Lk[z * cp + i + y] * v[x];
            }
    }
}

/* The delta rule, from the first row down: E_i = V_i - e_i (x S)_i - sum_{j<i} L_ij U_j is the
 * memory's error about token i, and U_i = beta_i E_i. E NULL: only U is wanted. */
LA_COLD void panel_solve(const chunk *c, const la_problem *p, const panel *s, rows V, real *E,
                         prefetch *next, const la_decay decay)
{
    const real *x = rows_carry(decay) ? c->hat : c->x;
    const int K = (int)c->K;
    if (!E) E = s->U; /* U_i is written there next */
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end)
        if (rows_are_scaled(decay))
            FOR_EACH_BLOCK(i, end, s->width, solve_block, c, K, x, s, V, E, next, true, LA_DELTA);
        else
            FOR_EACH_BLOCK(i, end, s->width, solve_block, c, K, x, s, V, E, next, false, LA_DELTA);
}

/* DPLR: V is in U's first rows, and W_i = -((x^ S)_i + sum_{j<i} L_ij U_j). It is a function of its
 * own, as panel_read_two is: beside them gcc makes the other rules' loops a tenth slower. */
LA_COLD void panel_solve_two(const chunk *c, const la_problem *p, const panel *s, prefetch *next)
{
    const rows V = {s->U, s->width};
    const int K = (int)c->K;
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end)
        FOR_EACH_BLOCK(i, end, s->width, solve_block, c, K, c->hat, s, V, NULL, next, false,
                       LA_DPLR);
}

LA_FN void read_block(const int R, const int W, int64_t i, int64_t w, const chunk *c,
                      const la_problem *p, const real *q, const panel *s, rows O, prefetch *next,
                      const bool scaled, const bool normalised, const bool two_rows)
{
    if (next) prefetch_some(next);
    const int64_t cp = c->cp, width = s->width;
    const real *P = c->P + i * cp, *Py = P + c->C * cp;
    const real *solved = s->U + c->n * width; /* DPLR: W */
    const real scale = (real)p->scale;
    lane qS[TILE], sum[TILE], of_W[TILE];

    state_product(R, W, i, w, c, (int)c->K, q, s, s->qS, qS);
    tile_sum(R, W, (int)i, P, cp, 1, s->U + w, width, sum);
    if (two_rows) {
        tile_sum(R, W, (int)i, Py, cp, 1, solved + w, width, of_W);
#pragma GCC unroll 32
        for (int x = 0; x < R * W; x++) sum[x] += of_W[x];
    }
#pragma GCC unroll 8
    for (int y = 0; y < R; y++) {
        const real start = start_of(c->scale_qS, i + y, scaled);
        const real by = normalised ? divisor_of_read(p, c->den[i + y]) : 1;
        const int64_t at = (i + y) * width + w;
#pragma GCC unroll 8
        for (int z = y; z < R; z++)
#pragma GCC unroll 8
            for (int x = 0; x < W; x++) {
                sum[z * W + x] += P[z * cp + i + y] * lanes_in(s->U + at)[x];
                if (two_rows) sum[z * W + x] += Py[z * cp + i + y] * lanes_in(solved + at)[x];
            }
#pragma GCC unroll 8
        for (int x = 0; x < W; x++) {
            lane o = scale * (start * qS[y * W + x] + sum[y * W + x]);
            row_of(O, i + y, w)[x] = normalised ? o / by : o;
        }
    }
}

/* O_i = scale (e_i (q S)_i + sum_{j<=i} P_ij U_j), divided by the divisor if there is one. Row i
 * takes only the rows up to i: a NaN that is written later must not reach it. */
LA_COLD void panel_read(const chunk *c, const la_problem *p, const panel *s, rows O, prefetch *next,
                        const la_decay decay, bool normalised)
{
    const real *q = rows_carry(decay) ? c->hat + c->n * c->sp : c->q;
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end)
        if (rows_are_scaled(decay))
            FOR_EACH_BLOCK(i, end, s->width, read_block, c, p, q, s, O, next, true, false, false);
        else
            FOR_EACH_BLOCK(i, end, s->width, read_block, c, p, q, s, O, next, false, normalised,
                           false);
}

/* The same where a token writes two rows (DPLR): O_i = scale ((q^ S)_i + sum_{j<=i} P_ij U_j), of
 * U's rows of v and of W. */
LA_COLD void panel_read_two(const chunk *c, const la_problem *p, const panel *s, rows O,
                            prefetch *next)
{
    const real *q = c->hat + c->n * c->sp;
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end)
        FOR_EACH_BLOCK(i, end, s->width, read_block, c, p, q, s, O, next, false, false, true);
}

/* ---- a whole sequence, forward ---- */

/* Columns that are worked on together: their state, 128 x 64 floats, and the chunk fit in an L1 of
 * 48 KiB. */
#ifdef LA_PANEL
enum { PANEL = LA_PANEL };
#else
enum { PANEL = 64 };
#endif

/* The state of a unit's heads between chunks, and scratch of one panel. */
typedef struct unit_states {
    real *S;          /* [heads][panels][K][width]; PAIR: [2K] */
    real *z, *kahan;  /* [heads][kp] */
    real *owed;       /* [heads][kp]; TOKEN [heads][1] */
    real *U, *rU, *O; /* one panel's */
    state_scratch x;
} unit_states;

LA_FN void states_take(unit_states *states, arena *m, const la_problem *p, int64_t C, int64_t heads,
                       int64_t columns, const la_decay decay)
{
    int64_t width = padded(columns < PANEL ? columns : PANEL);
    int64_t panels = (columns + PANEL - 1) / PANEL;
    states->S = arena_take(m, la_times(heads * panels, state_rows(p)), width);
    states->U = arena_take(m, rows_written(p->rule) * C, width);
    states->rU = arena_take(m, rows_are_scaled(decay) ? C : 0, width);
    states->O = arena_take(m, C, width);
    states->z = arena_take(m, heads, padded(p->K));
    states->kahan = arena_take(m, heads, padded(p->K));
    states->owed = arena_take(m, heads, padded(p->K));
    state_scratch_take(&states->x, m, p, C, width);
}

LA_FN panel panel_at(const unit_states *states, const la_problem *p, const la_unit *u, int64_t head,
                     int64_t v)
{
    const int64_t all = u->v1 - u->v0, widest = padded(all < PANEL ? all : PANEL);
    const int64_t panels = (all + PANEL - 1) / PANEL, which = head * panels + (v - u->v0) / PANEL;
    panel s = {.v0 = v, .v1 = v + PANEL < u->v1 ? v + PANEL : u->v1};
    s.width = padded(s.v1 - s.v0);
    s.S = states->S + which * state_rows(p) * widest;
    s.U = states->U;
    s.rU = states->rU;
    s.O = states->O;
    return s;
}

/* Tokens t.. of one panel's columns. */
LA_FN void panel_forward(const chunk *c, state_scratch *x, const la_problem *p, const la_unit *u,
                         int64_t t, panel *s, prefetch *next, const bool reads, bool normalised,
                         const la_decay decay, const la_rule rule)
{
    state_products(c, x, p, s, reads, rule);
    if (rule == LA_DELTA) {
        const bool gated = la_is_gated(decay, rule) && p->array[LA_W].given;
        const rows room = {s->U, s->width}, V = gated ? room : rows_of(p, LA_V, u, t, s, s->U);
        if (gated)
            load_gated_values(c, p, u, t, s);
        else if (V.at == s->U)
            load_values(c, p, LA_V, u, t, s->v0, s->v1, s->U, s->width);
        panel_solve(c, p, s, V, NULL, next, decay);
    } else {
        panel_write(c, p, u, t, s, decay);
        if (rule == LA_DPLR) panel_solve_two(c, p, s, next);
    }
    if (reads) {
        const rows O = rows_of(p, LA_O, u, t, s, s->O);
        if (rule == LA_DPLR)
            panel_read_two(c, p, s, O, next);
        else
            panel_read(c, p, s, O, next, decay, normalised);
        if (O.at == s->O) store_values(c, p, LA_O, u, t, s->v0, s->v1, s->O, s->width);
    }
    state_carry(c, x, p, s, s->S, next, decay);
}

/* The states of u, the unit's i-th head. */
LA_FN void states_load(unit_states *states, const la_problem *p, const la_unit *u, int64_t i,
                       const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K);
    for (int64_t v = u->v0; v < u->v1; v += PANEL) {
        panel s = panel_at(states, p, u, i, v);
        load_state(p, LA_S0, u, s.v0, s.v1, s.S, s.width);
        if (decay == LA_PAIR) load_state(p, LA_Y0, u, s.v0, s.v1, s.S + p->K * s.width, s.width);
    }
    if (is_normalised(p, decay, rule)) load_z(p, LA_Z0, u, states->z + i * kp);
    fill(kp, states->kahan + i * kp, 0);
    fill(kp, states->owed + i * kp, 0);
}

LA_FN void states_store(const unit_states *states, const la_problem *p, const la_unit *u, int64_t i,
                        const la_decay decay, const la_rule rule)
{
    for (int64_t v = u->v0; v < u->v1; v += PANEL) {
        panel s = panel_at(states, p, u, i, v);
        store_state(p, LA_ST, u, s.v0, s.v1, s.S, s.width);
        if (decay == LA_PAIR) store_state(p, LA_YT, u, s.v0, s.v1, s.S + p->K * s.width, s.width);
    }
    if (is_normalised(p, decay, rule) && u->v0 == 0)
        store_z(p, LA_ZT, u, states->z + i * padded(p->K));
}

typedef struct forward_scratch {
    chunk c;
    unit_states states;
} forward_scratch;

LA_FN void forward_take(forward_scratch *f, arena *m, const la_problem *p, int64_t C, int64_t heads,
                        int64_t columns, const la_decay decay, const la_rule rule)
{
    chunk_take(&f->c, m, p, C, false, decay, rule);
    states_take(&f->states, m, p, C, heads, columns, decay);
}

/* A chunk of tokens t.. of u, the unit's i-th head. reads: with its outputs. */
LA_FN void one_chunk(forward_scratch *f, const la_problem *p, const la_unit *u, int64_t i,
                     int64_t t, int64_t n, prefetch *next, const bool reads, const la_decay decay,
                     const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    chunk *c = &f->c;
    real *z = f->states.z + i * c->kp, *kahan = f->states.kahan + i * c->kp;
    load_and_score(c, &f->states.x, p, u, t, n, reads, decay, rule);
    settle_chunk_decay(c, p, f->states.owed + i * c->kp, decay);
    if (normalised && reads) chunk_denominators(c, p, z, kahan);
    if (normalised && !reads) add_keys(n, c->kp, c->k, z, kahan);
    for (int64_t v = u->v0; v < u->v1 && !la_stopped(p); v += PANEL) {
        panel s = panel_at(&f->states, p, u, i, v);
        panel_forward(c, &f->states.x, p, u, t, &s, next, reads, normalised, decay, rule);
    }
}

/* The rows that the chunk of tokens t.. will touch. */
LA_FN prefetch prefetch_of_chunk(const la_problem *p, const la_unit *u, int64_t t, int64_t C,
                                 const la_rule rule)
{
    static const la_name touched[] = {LA_V, LA_W, LA_G, LA_K, LA_X, LA_Y, LA_O, LA_Q};
    enum { TOUCHED = sizeof touched / sizeof *touched }; /* the last two only if it reads */
    const bool reads = t >= u->read;
    return prefetch_of(p, u, t, C, touched, reads ? TOUCHED : TOUCHED - 2,
                       reads + la_predicts(rule));
}

/* The unit's heads side by side, chunk by chunk: their rows are neighbours in memory. */
LA_FN void chunks_forward(const la_problem *p, const la_unit *all, int64_t C, arena *m,
                          const la_decay decay, const la_rule rule)
{
    forward_scratch f;
    forward_take(&f, m, p, C, all->heads, all->v1 - all->v0, decay, rule);

    for (int64_t i = 0; i < all->heads; i++) {
        const la_unit u = head_of(p, all, i);
        states_load(&f.states, p, &u, i, decay, rule);
    }
    for (int64_t t = all->begin; t < all->stop && !la_stopped(p); t += C)
        for (int64_t i = 0; i < all->heads; i++) {
            const la_unit u = head_of(p, all, i);
            prefetch next = prefetch_of_chunk(p, &u, t + C, C, rule);
            const int64_t n = t + C < u.stop ? C : u.stop - t;
            if (t >= u.read)
                one_chunk(&f, p, &u, i, t, n, &next, true, decay, rule);
            else
                one_chunk(&f, p, &u, i, t, n, &next, false, decay, rule);
        }
    for (int64_t i = 0; all->last && i < all->heads; i++) {
        const la_unit u = head_of(p, all, i);
        states_store(&f.states, p, &u, i, decay, rule);
    }
}
