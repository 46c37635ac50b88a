/* The chunk form. C tokens at a time, four stages:
 *
 *     scores  what tokens of the chunk see of each other          P, L   (shared by all columns)
 *     solve   what each token writes                              U = beta (V - e k S - L U)
 *     read    what each token reads                               O = e q S + P U
 *     carry   the state the chunk leaves                          S <- diag(e) S + (r k)' U
 *
 *     e_i: the decays from the chunk's start up to token i
 *     r_j: the decays after token j up to the chunk's end
 *     P_ij = q_i . k_j Gamma_ij (j <= i)   Gamma_ij: the decays after j up to i
 *     L_ij = k_i . k_j Gamma_ij (j < i)
 *
 * e, r and Gamma are products of the decays a in [0, 1], so no gate can overflow, a = 0 needs no
 * clamp, and a kept decay beside a huge one loses no digits: no logarithm is summed and nothing is
 * divided (docs/decisions/0005). One decay per token: e and r are numbers, and scale the rows of
 * k S, q S and U; their products are made in twice the digits. One per key: they are rows, and
 * scale those of k and q (`hat`: k^_i = e_i k_i, q^_i = e_i q_i; `tilde`: k~_j = r_j k_j, which are
 * carried down the chunk, multiplied by a_i at each token). */

/* Are this instance's large products those of bfloat16 numbers (state_products_bf16.h)? */
#ifdef LA_PLANES
enum { BF16_PRODUCTS = true };
#else
enum { BF16_PRODUCTS = false };
#endif

typedef struct chunk {
    int64_t C;      /* room, in tokens */
    int64_t kp, cp; /* K and C, padded */
    int64_t n;      /* tokens in it now */
    real *k, *q;    /* [2C][kp], l2-normed and mapped: k, then (from row n) q; one matrix */
    real *a;        /* TOKEN [C], KEY [C][kp] */
    real *beta;     /* [C] */
    real *e;        /* TOKEN [C], KEY [C][kp]; forward: KEY's in the place of a */
    real *gamma;    /* TOKEN [C][cp]: Gamma, its lower triangle; r is its last row */
    real2 *product; /* TOKEN [cp]: a row of Gamma on its way; KEY [kp]: of decays given as such */
    real *rest;     /* TOKEN [cp]: what a lacks of the decay */
    real *log;      /* KEY [kp]: the sum of the logarithms */
    real *owed;     /* KEY [kp]: what the chunk's decays so far were rounded by */
    real *decay;    /* the chunk's decay: TOKEN [1], KEY [kp] */
    real *hat;      /* KEY [2C][kp]: k^, then (from row n) q^; forward: in the place of k and q */
    real *tilde;    /* KEY [C][kp]: k~ */
    lane *part;     /* KEY [2][cp]: a row of P and L before the sum over a lane */
    real *kt;       /* [kp][cp]: k (KEY: k~) transposed */
    real *kk, *qk;  /* [2C][cp]: the bare products k_i . k_j, then (from row n) q_i . k_j */
    real *P, *L;    /* [C][cp], their lower triangles; the bare products where nothing decays */
    real *den;      /* [C]: the normaliser's denominators */
    real2 decayed;  /* TOKEN: the product of its decays */
    /* [n], TOKEN and bf16 products: what rows of k S, q S and U are scaled by, e, e and r */
    const real *scale_kS, *scale_qS, *scale_U;
} chunk;

/* for_adjoint: k, q and a stay as they are. The forward pass scales them in place: it does not need a
 * row of theirs afterwards, and a second copy would have to come from the L2 cache. */
LA_FN void chunk_take(chunk *c, arena *m, const la_problem *p, int64_t C, const bool for_adjoint,
                      const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K), cp = padded(C);
    const bool key = decay == LA_KEY, token = decay == LA_TOKEN, delta = rule == LA_DELTA;
    *c = (chunk){.C = C, .kp = kp, .cp = cp};
    c->k = arena_take(m, 2 * C, kp);
    c->a = arena_take(m, key ? C : token, key ? kp : cp);
    c->e = key && !for_adjoint ? c->a : arena_take(m, C, key ? kp : token);
    c->beta = arena_take(m, 1, C);
    c->gamma = arena_take(m, token ? C : 0, cp);
    c->product = (real2 *)arena_take(m, token ? cp : key ? kp : 0, sizeof(real2) / sizeof(real));
    c->rest = arena_take(m, 1, token ? cp : 0);
    c->log = arena_take(m, 1, key ? kp : 0);
    c->owed = arena_take(m, 1, key ? kp : 0);
    c->decay = arena_take(m, 1, key ? kp : 1);
    c->hat = key && !for_adjoint ? c->k : arena_take(m, key ? 2 * C : 0, kp);
    c->tilde = arena_take(m, key ? C : 0, kp);
    c->part = (lane *)arena_take(m, key ? 2 * cp : 0, LANES);
    c->kt = arena_take(m, kp, cp);
    c->kk = arena_take(m, key ? 0 : 2 * C, cp);
    c->P = arena_take(m, decay == LA_NONE ? 0 : C, cp);
    c->L = arena_take(m, decay == LA_NONE || !delta ? 0 : C, cp);
    c->den = arena_take(m, 1, C);
}

/* The rows of tokens t..t+n of a unit in the named arrays, as far as there are any. A product of the
 * state's size will prefetch them, and so will the blocks of so many products with the state. */
LA_FN prefetch prefetch_of(const la_problem *p, const la_unit *u, int64_t t, int64_t n,
                           const la_name *names, int count, int products)
{
    prefetch next = {.rows = t + n < u->end ? n : u->end - t};
    if (t < u->begin || next.rows <= 0) return (prefetch){.arrays = 0};
    for (int i = 0; i < count; i++) {
        const la_array *x = &p->array[names[i]];
        const bool keys =
            names[i] == LA_Q || names[i] == LA_K || names[i] == LA_DQ || names[i] == LA_DK;
        const bool gate = names[i] == LA_G || names[i] == LA_DG;
        const int64_t first = keys || gate ? 0 : u->v0, last = keys || gate ? p->K : u->v1;
        if (gate && p->decay != LA_KEY) continue;
        next.array[next.arrays].at = at_column(x, u->b, t, keys ? u->h : u->hv, first);
        next.array[next.arrays].stride = x->stride[1] * dtype_size(x->dtype);
        next.array[next.arrays].bytes = (last - first) * dtype_size(x->dtype);
        next.arrays++;
    }
    const int64_t lanes = padded(u->v1 - u->v0) / LANES, wide = lanes / WIDE;
    const int64_t narrow = (lanes - wide * WIDE + 1) / 2, strips = (lanes + STRIP - 1) / STRIP;
    next.tiles =
        wide * (p->K / TALL) + narrow * (p->K / (TILE / 2)) + products * strips * (n / ROWS);
    if (next.tiles < 1) next.tiles = 1;
    return next;
}

/* Token i's decays, and what the whole chunk's come to by then: of logarithms the sum, which is exact
 * enough where a state lives long; of decays given as such the product, in twice the digits. Each
 * decay pays back what the chunk's earlier ones were rounded by: rows of k^, q^ and k~ are products
 * of up to C decays, and equal ones would all be rounded to the same side. */
LA_FN void load_key_decays(chunk *c, const la_problem *p, const la_unit *u, int64_t t, int64_t i)
{
    const la_array *g = &p->array[LA_G];
    const int64_t kp = c->kp;
    real *a = c->a + i * kp;
    load_row(a, p->K, at(g, u->b, t + i, u->hv), g->dtype);
    if (p->gate == LA_DECAY) {
        for (int64_t x = 0; x < kp; x++) c->product[x] = i ? c->product[x] * a[x] : a[x];
        return;
    }
    for (int64_t x = 0; x < kp; x += LANES) {
        const lane g = lanes_in(a + x)[0], log = log_decay(g, p->gate);
        lane rest;
        const lane decay = decay_in_two(g, p->gate, &rest);
        if (!i) lanes_of(c->owed + x)[0] = (lane){0};
        lanes_of(c->log + x)[0] = i ? lanes_in(c->log + x)[0] + log : log;
        lanes_of(a + x)[0] = lane_paid_back(decay, rest, lanes_of(c->owed + x));
    }
    for (int64_t x = p->K; x < kp; x++) a[x] = 0;
}

/* The chunk's decay, for a state that is owed what the ones before it were rounded by. */
LA_FN void settle_chunk_decay(chunk *c, const la_problem *p, real *owed, const la_decay decay)
{
    if (decay == LA_TOKEN) {
        c->decay[0] = paid_back(c->decayed, owed);
    } else if (decay == LA_KEY && p->gate == LA_DECAY) {
        for (int64_t x = 0; x < c->kp; x++) c->decay[x] = paid_back(c->product[x], owed + x);
    } else if (decay == LA_KEY) {
        for (int64_t x = 0; x < c->kp; x += LANES) {
            lane rest;
            const lane rounded = decay_in_two(lanes_in(c->log + x)[0], LA_LOG, &rest);
            lanes_of(c->decay + x)[0] = lane_paid_back(rounded, rest, lanes_of(owed + x));
        }
    }
}

LA_FN void load_gates(chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                      const la_decay decay, const la_rule rule)
{
    if (decay == LA_TOKEN) load_decays(p, u, t, c->n, c->a, c->rest);
    for (int64_t i = 0; i < c->n; i++) {
        if (decay == LA_KEY) load_key_decays(c, p, u, t, i);
        if (rule == LA_DELTA) c->beta[i] = load_beta(p, u, t + i);
    }
}

/* Tokens t..t+n of the unit's sequence; without q, and so without P, if they are not to be read. */
LA_FN void chunk_load(chunk *c, const la_problem *p, const la_unit *u, int64_t t, int64_t n,
                      const bool reads, const la_decay decay, const la_rule rule)
{
    c->n = n;
    c->q = c->k + n * c->kp;
    load_keys(p, LA_K, u->b, t, n, u->h, c->k);
    if (reads) load_keys(p, LA_Q, u->b, t, n, u->h, c->q);
    load_gates(c, p, u, t, decay, rule);
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

/* ---- scores ---- */

/* Gamma and e, each rounded once: a decay that is the same for every token would round the same way
 * every time, and the error would grow with the memory's reach. Row i is a_i times row i-1, and a
 * new 1; what lies right of the diagonal is never read. */
LA_FN void decay_products(chunk *c, const la_problem *p)
{
    real2 e = 1;
    for (int64_t j = 0; j < c->cp; j++) c->product[j] = 0;
    for (int64_t i = 0; i < c->n && !stopped_after(p, i); i++) {
        const real2 a = (real2)c->a[i] + (real2)c->rest[i];
        real *G = c->gamma + i * c->cp;
        e *= a;
        c->e[i] = (real)e;
        for (int64_t j = 0; j < c->cp; j++) {
            /* the 1 written apart would lie in the way of the next row's whole vectors */
            c->product[j] = j == i ? 1 : a * c->product[j];
            G[j] = (real)c->product[j];
        }
    }
    c->decayed = e;
}

/* Gamma over the bare products, if there is one. */
LA_FN void decayed_scores(chunk *c, const la_problem *p, const bool reads, const la_decay decay,
                          const la_rule rule)
{
    if (decay == LA_NONE) {
        c->P = c->qk;
        c->L = c->kk;
        return;
    }
    decay_products(c, p);
    c->scale_kS = c->scale_qS = c->e;
    c->scale_U = c->gamma + (c->n - 1) * c->cp;
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end) {
        const int64_t at = i * c->cp, size = (end - i) * c->cp;
        if (reads) multiply_row(size, c->P + at, c->gamma + at, c->qk + at);
        if (rule == LA_DELTA) multiply_row(size, c->L + at, c->gamma + at, c->kk + at);
    }
}

/* One decay per token (or none): the products of the chunk's rows once, then Gamma over them. */
LA_FN void scores_token(chunk *c, const la_problem *p, const bool reads, const la_decay decay,
                        const la_rule rule)
{
    const int64_t n = c->n, kp = c->kp, cp = c->cp;
    c->qk = c->kk + n * cp;

    transpose(n, p->K, c->k, kp, c->kt, cp);
    if (rule == LA_DELTA)
        long_narrow_product(p, reads ? 2 * n : n, padded(n), p->K, c->k, kp, c->kt, cp, c->kk, cp);
    else if (reads)
        long_narrow_product(p, n, padded(n), p->K, c->q, kp, c->kt, cp, c->qk, cp);
    decayed_scores(c, p, reads, decay, rule);
}

/* Token i and R keys before it, from j on: k~_j <- a_i k~_j, and the lanes whose sums are P_ij and
 * L_ij. */
LA_FN void scores_of_keys(const chunk *c, const int R, int64_t i, int64_t j, const bool reads,
                          const la_rule rule)
{
    const int64_t kp = c->kp;
    const real *a = c->a + i * kp, *q = c->q + i * kp, *k = c->k + i * kp;
    real *rows = c->tilde + j * kp;
    lane P[ROWS] = {{0}}, L[ROWS] = {{0}};
    for (int64_t x = 0; x < kp; x += LANES) {
        /* read once: for all the compiler knows, writing a row changes them */
        const lane ax = lanes_in(a + x)[0], qx = lanes_in(q + x)[0], kx = lanes_in(k + x)[0];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            lane row = ax * lanes_in(rows + r * kp + x)[0];
            lanes_of(rows + r * kp + x)[0] = row;
            if (reads) P[r] += qx * row;
            if (rule == LA_DELTA) L[r] += kx * row;
        }
    }
    for (int r = 0; r < R; r++) c->part[j + r] = P[r];
    for (int r = 0; r < R && rule == LA_DELTA; r++) c->part[c->cp + j + r] = L[r];
}

LA_FN void sum_parts(int64_t count, const lane *part, real *to)
{
    for (int64_t j = 0; j < count; j += LANES) {
        lane x[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = part[j + i];
        lanes_of(to + j)[0] = sum_each(x);
    }
}

/* One decay per token and key: each key's row is carried down the chunk. */
LA_FN void scores_key(chunk *c, const la_problem *p, const bool reads, const la_rule rule)
{
    const int64_t n = c->n, kp = c->kp, cp = c->cp;
    real *k_hat = c->hat, *q_hat = c->hat + n * kp;

    for (int64_t j = 0; j < 2 * cp; j++) c->part[j] = (lane){0};
    for (int64_t i = 0; i < n && !stopped_after_keys(p, i, n); i++) {
        const real *q = c->q + i * kp, *k = c->k + i * kp;
        real *e = c->e + i * kp, *tilde = c->tilde + i * kp;
        int64_t j = 0;
        for (; j + ROWS <= i; j += ROWS) scores_of_keys(c, ROWS, i, j, reads, rule);
        for (; j < i; j++) scores_of_keys(c, 1, i, j, reads, rule);
        lane self = {0};
        for (int64_t x = 0; x < kp; x += LANES) {
            const lane kx = lanes_in(k + x)[0], qx = lanes_in(q + x)[0];
            lane ex = lanes_in(c->a + i * kp + x)[0];
            if (i) ex *= lanes_in(e - kp + x)[0];
            lanes_of(e + x)[0] = ex;
            if (rule == LA_DELTA) lanes_of(k_hat + i * kp + x)[0] = ex * kx;
            lanes_of(tilde + x)[0] = kx;
            if (!reads) continue;
            lanes_of(q_hat + i * kp + x)[0] = ex * qx;
            self += qx * kx;
        }
        c->part[i] = self;
        if (reads) sum_parts(i + 1, c->part, c->P + i * cp);
        if (rule == LA_DELTA) sum_parts(i, c->part + cp, c->L + i * cp);
    }
}

LA_FN void chunk_scores(chunk *c, const la_problem *p, const bool reads, const la_decay decay,
                        const la_rule rule)
{
    if (decay != LA_KEY) {
        scores_token(c, p, reads, decay, rule);
        return;
    }
    scores_key(c, p, reads, rule);
    transpose(c->n, p->K, c->tilde, c->kp, c->kt, c->cp);
}

/* ---- solve, read, carry: one panel of columns ---- */

typedef struct panel {
    int64_t v0, v1, width; /* columns of V; width is padded */
    real *S;               /* [K][width] */
    real *U;               /* [C][width]: what is written */
    real *rU; /* TOKEN and bf16 products [C][width]: r U, as the chunk's end sees it (else U) */
    real *O;  /* [C][width]: what is read, if it must be converted */
    const real *kS, *qS; /* bf16 products [C][width]: the products with the state, not scaled */
} panel;

/* Rows of reals where they lie: in scratch, or in a user's array that needs no conversion. */
typedef struct rows {
    real *at;
    int64_t ld;
} rows;

LA_FN lane_of_state *row_of(rows x, int64_t i, int64_t column)
{
    return (lane_of_state *)(x.at + i * x.ld + column);
}

/* The panel's columns of tokens t.. of an array, if they are whole lanes of reals; else `room`. */
LA_FN rows rows_of(const la_problem *p, la_name name, const la_unit *u, int64_t t, const panel *s,
                   real *room)
{
    const la_array *x = &p->array[name];
    if (x->dtype != REAL_DTYPE || (s->v1 - s->v0) % LANES) return (rows){room, s->width};
    return (rows){(real *)at_column(x, u->b, t, u->hv, s->v0), x->stride[1]};
}

LA_FN void load_values(const chunk *c, const la_problem *p, la_name name, const la_unit *u,
                       int64_t t, int64_t v0, int64_t v1, real *to, int64_t width)
{
    const la_array *from = &p->array[name];
    for (int64_t i = 0; i < c->n; i++)
        load_row(to + i * width, v1 - v0, at_column(from, u->b, t + i, u->hv, v0), from->dtype);
}

LA_FN void store_values(const chunk *c, const la_problem *p, la_name name, const la_unit *u,
                        int64_t t, int64_t v0, int64_t v1, const real *from, int64_t width)
{
    const la_array *to = &p->array[name];
    for (int64_t i = 0; i < c->n; i++)
        store_row(at_column(to, u->b, t + i, u->hv, v0), to->dtype, from + i * width, v1 - v0);
}

/* The additive rule writes V as it is. */
LA_FN void panel_write(const chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                       const panel *s, const la_decay decay)
{
    load_values(c, p, LA_V, u, t, s->v0, s->v1, s->U, s->width);
    for (int64_t i = 0; (decay == LA_TOKEN || BF16_PRODUCTS) && i < c->n; i++)
        scale_row(s->width, s->rU + i * s->width, s->U + i * s->width, c->scale_U[i]);
}

/* R rows from i, W lanes from column w of a product with the state: made here, or copied if it was
 * made beforehand. */
LA_FN void state_product(const int R, const int W, int64_t i, int64_t w, const chunk *c, int K,
                         const real *rows, const panel *s, const real *precomputed, lane *to)
{
    if (!BF16_PRODUCTS) {
        tile_sum(R, W, K, rows + i * c->kp, c->kp, 1, s->S + w, s->width, to);
        return;
    }
#pragma GCC unroll 8
    for (int y = 0; y < R; y++)
#pragma GCC unroll 4
        for (int x = 0; x < W; x++)
            to[y * W + x] = lanes_in(precomputed + (i + y) * s->width + w)[x];
}

/* What a row of k S or q S is scaled by, where it is. What the blocks below do must be known to the
 * compiler: a branch between a product and its sum, and the two are one rounding in one lane and two in
 * another. */
LA_FN real start_of(const real *scale, int64_t i, const bool scaled)
{
    return scaled ? scale[i] : 1;
}

/* R rows from i, W lanes from column w of panel_solve. */
LA_FN void solve_block(const int R, const int W, int64_t i, int64_t w, const chunk *c, int K,
                       const real *k, const panel *s, rows V, real *E, prefetch *next,
                       const bool scaled)
{
    if (next) prefetch_some(next);
    const int64_t cp = c->cp, width = s->width;
    const real *L = c->L + i * cp;
    lane kS[TILE], sum[TILE], u[STRIP];

    state_product(R, W, i, w, c, K, k, s, s->kS, kS);
    tile_sum(R, W, (int)i, L, cp, 1, s->U + w, width, sum);
#pragma GCC unroll 8
    for (int y = 0; y < R; y++) {
        const real start = start_of(c->scale_kS, i + y, scaled), beta = c->beta[i + y];
        const int64_t at = (i + y) * width + w;
#pragma GCC unroll 8
        for (int x = 0; x < W; x++) {
            lane e = row_of(V, i + y, w)[x] - start * kS[y * W + x] - sum[y * W + x];
            u[x] = beta * e;
            lanes_of(E + at)[x] = e;
            lanes_of(s->U + at)[x] = u[x];
            if (scaled) lanes_of(s->rU + at)[x] = c->scale_U[i + y] * u[x];
        }
#pragma GCC unroll 8
        for (int z = y + 1; z < R; z++)
#pragma GCC unroll 8
            for (int x = 0; x < W; x++) sum[z * W + x] += L[z * cp + i + y] * u[x];
    }
}

/* The delta rule, from the first row down: E_i = V_i - e_i (k S)_i - sum_{j<i} L_ij U_j, what the
 * memory got wrong about token i, and U_i = beta_i E_i. E NULL: only U is wanted. */
LA_COLD void panel_solve(const chunk *c, const la_problem *p, const panel *s, rows V, real *E,
                         prefetch *next, const la_decay decay)
{
    const real *k = decay == LA_KEY ? c->hat : c->k;
    const int K = (int)p->K;
    if (!E) E = s->U; /* where U_i is written next */
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end)
        if (decay == LA_TOKEN || BF16_PRODUCTS)
            FOR_EACH_BLOCK(i, end, s->width, solve_block, c, K, k, s, V, E, next, true);
        else
            FOR_EACH_BLOCK(i, end, s->width, solve_block, c, K, k, s, V, E, next, false);
}

LA_FN void read_block(const int R, const int W, int64_t i, int64_t w, const chunk *c,
                      const la_problem *p, const real *q, const panel *s, rows O, prefetch *next,
                      const bool scaled, const bool normalised)
{
    if (next) prefetch_some(next);
    const int64_t cp = c->cp, width = s->width;
    const real *P = c->P + i * cp;
    const real scale = (real)p->scale;
    lane qS[TILE], sum[TILE];

    state_product(R, W, i, w, c, (int)p->K, q, s, s->qS, qS);
    tile_sum(R, W, (int)i, P, cp, 1, s->U + w, width, sum);
#pragma GCC unroll 8
    for (int y = 0; y < R; y++) {
        const real start = start_of(c->scale_qS, i + y, scaled);
        const real by = normalised ? divisor_of(p, c->den[i + y] * (real)p->scale) : 1;
        const int64_t at = (i + y) * width + w;
#pragma GCC unroll 8
        for (int z = y; z < R; z++)
#pragma GCC unroll 8
            for (int x = 0; x < W; x++)
                sum[z * W + x] += P[z * cp + i + y] * lanes_in(s->U + at)[x];
#pragma GCC unroll 8
        for (int x = 0; x < W; x++) {
            lane o = scale * (start * qS[y * W + x] + sum[y * W + x]);
            row_of(O, i + y, w)[x] = normalised ? o / by : o;
        }
    }
}

/* O_i = scale (e_i (q S)_i + sum_{j<=i} P_ij U_j), over the divisor if there is one. Row i takes the
 * rows up to i only: a NaN written later must not reach it. */
LA_COLD void panel_read(const chunk *c, const la_problem *p, const panel *s, rows O, prefetch *next,
                        const la_decay decay, bool normalised)
{
    const real *q = decay == LA_KEY ? c->hat + c->n * c->kp : c->q;
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end)
        if (decay == LA_TOKEN || BF16_PRODUCTS)
            FOR_EACH_BLOCK(i, end, s->width, read_block, c, p, q, s, O, next, true, false);
        else if (normalised)
            FOR_EACH_BLOCK(i, end, s->width, read_block, c, p, q, s, O, next, false, true);
        else
            FOR_EACH_BLOCK(i, end, s->width, read_block, c, p, q, s, O, next, false, false);
}

/* The chunk's decay: one number, or one per key. */
LA_FN const real *chunk_decay(const chunk *c, const la_decay decay)
{
    return decay == LA_NONE ? &one : c->decay;
}

/* S' = diag(e) S + (r k)' U, e the chunk's decay. */
LA_FN void panel_carry(const chunk *c, const la_problem *p, panel *s, real *to, prefetch *next,
                       const la_decay decay)
{
    product_and_prefetch(p->K, s->width, c->n, c->kt, c->cp, 1, decay == LA_TOKEN ? s->rU : s->U,
                         s->width, to, s->width, s->S, chunk_decay(c, decay), decay == LA_KEY,
                         next);
}

/* z += sum_j k_j. Mapped keys are positive, so z grows with every token and its roundings, all of
 * one sign where keys repeat, would grow with it: `kahan` keeps what each addition rounded off and
 * gives it back to the next (Kahan). It starts at zero. */
LA_FN void add_keys(int64_t n, int64_t kp, const real *k, real *z, real *kahan)
{
    const lane zero = {0};
    for (int64_t x = 0; x < kp; x += LANES) {
        lane before = lanes_in(z + x)[0];
        lane add;
        tile_sum(1, 1, (int)n, &one, 0, 0, k + x, kp, &add);
        add -= lanes_in(kahan + x)[0];
        lane after = before + add;
        lane rounded = (after - before) - add;
        lanes_of(kahan + x)[0] = pick(rounded - rounded == zero, rounded, zero); /* 0 at infinity */
        lanes_of(z + x)[0] = after;
    }
}

/* den_i = q_i z + sum_{j<=i} q_i k_j, and z <- z + sum_j k_j. Only ungated additive ops have z, so
 * P holds the bare products. */
LA_FN void chunk_denominators(chunk *c, const la_problem *p, real *z, real *kahan)
{
    for (int64_t i = 0; i < c->n && !stopped_after(p, i); i++) {
        real within = 0;
        for (int64_t j = 0; j <= i; j++) within += c->P[i * c->cp + j];
        c->den[i] = dot(c->kp, c->q + i * c->kp, z) + within;
    }
    add_keys(c->n, c->kp, c->k, z, kahan);
}

#include "state_products_bf16.h"

/* ---- a whole sequence, forward ---- */

/* Columns worked on together: their state, 128 x 64 floats, and the chunk fit a 48 KiB L1. */
#ifdef LA_PANEL
enum { PANEL = LA_PANEL };
#else
enum { PANEL = 64 };
#endif

/* What a unit keeps from chunk to chunk. */
typedef struct unit_states {
    real *S;          /* [heads][panels][K][width] */
    real *z, *kahan;  /* [heads][kp] */
    real *owed;       /* [heads][kp]; TOKEN [heads][1] */
    real *U, *rU, *O; /* one panel's */
    bf16_scratch x;
} unit_states;

LA_FN void states_take(unit_states *states, arena *m, const la_problem *p, int64_t C, int64_t heads,
                       int64_t columns, const la_decay decay)
{
    int64_t width = padded(columns < PANEL ? columns : PANEL);
    int64_t panels = (columns + PANEL - 1) / PANEL;
    states->S = arena_take(m, la_times(heads * panels, p->K), width);
    states->U = arena_take(m, C, width);
    states->rU = arena_take(m, decay == LA_TOKEN || BF16_PRODUCTS ? C : 0, width);
    states->O = arena_take(m, C, width);
    states->z = arena_take(m, heads, padded(p->K));
    states->kahan = arena_take(m, heads, padded(p->K));
    states->owed = arena_take(m, heads, padded(p->K));
    if (BF16_PRODUCTS) bf16_scratch_take(&states->x, m, p, C, width);
}

LA_FN panel panel_at(const unit_states *states, const la_problem *p, const la_unit *u, int64_t head,
                     int64_t v)
{
    const int64_t all = u->v1 - u->v0, widest = padded(all < PANEL ? all : PANEL);
    const int64_t panels = (all + PANEL - 1) / PANEL, which = head * panels + (v - u->v0) / PANEL;
    panel s = {.v0 = v, .v1 = v + PANEL < u->v1 ? v + PANEL : u->v1};
    s.width = padded(s.v1 - s.v0);
    s.S = states->S + which * p->K * widest;
    s.U = states->U;
    s.rU = states->rU;
    s.O = states->O;
    return s;
}

/* Tokens t.. of one panel's columns. */
LA_FN void panel_forward(const chunk *c, bf16_scratch *x, const la_problem *p, const la_unit *u,
                         int64_t t, panel *s, prefetch *next, const bool reads, bool normalised,
                         const la_decay decay, const la_rule rule)
{
    if (BF16_PRODUCTS) bf16_state_products(c, x, p, s, reads, rule);
    if (rule == LA_DELTA) {
        const rows V = rows_of(p, LA_V, u, t, s, s->U);
        if (V.at == s->U) load_values(c, p, LA_V, u, t, s->v0, s->v1, s->U, s->width);
        panel_solve(c, p, s, V, NULL, next, decay);
    } else {
        panel_write(c, p, u, t, s, decay);
    }
    if (reads) {
        const rows O = rows_of(p, LA_O, u, t, s, s->O);
        panel_read(c, p, s, O, next, decay, normalised);
        if (O.at == s->O) store_values(c, p, LA_O, u, t, s->v0, s->v1, s->O, s->width);
    }
    if (BF16_PRODUCTS)
        bf16_carry(c, x, p, s, next, decay);
    else
        panel_carry(c, p, s, s->S, next, decay);
}

/* The states of the unit's i-th head, u. */
LA_FN void states_load(unit_states *states, const la_problem *p, const la_unit *u, int64_t i,
                       const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K);
    for (int64_t v = u->v0; v < u->v1; v += PANEL) {
        panel s = panel_at(states, p, u, i, v);
        load_state(p, LA_S0, u, s.v0, s.v1, s.S, s.width);
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

/* A chunk of tokens t.. of the unit's i-th head, u; reads: its outputs are wanted too. */
LA_FN void one_chunk(forward_scratch *f, const la_problem *p, const la_unit *u, int64_t i,
                     int64_t t, int64_t n, prefetch *next, const bool reads, const la_decay decay,
                     const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    chunk *c = &f->c;
    real *z = f->states.z + i * c->kp, *kahan = f->states.kahan + i * c->kp;
    if (BF16_PRODUCTS) {
        bf16_scores(c, &f->states.x, p, u, t, n, reads, decay, rule);
    } else {
        chunk_load(c, p, u, t, n, reads, decay, rule);
        chunk_scores(c, p, reads, decay, rule);
    }
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
    static const la_name touched[] = {LA_V, LA_G, LA_K, LA_O, LA_Q}; /* the last two by reading */
    const bool reads = t >= u->read;
    return prefetch_of(p, u, t, C, touched, reads ? 5 : 3, reads + (rule == LA_DELTA));
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
