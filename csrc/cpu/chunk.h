/* The chunk form: C tokens at a time, in four stages.
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
 * e, r and Gamma are products of the decays a in [0, 1]. Nothing is divided, and no logarithm is
 * summed (docs/decisions/0005). So no gate can overflow, a = 0 needs no clamp, and a decay near 1
 * beside one near 0 loses no digits.
 *
 * One decay per token: e and r are numbers. They scale the rows of k S, q S and U, and their
 * products are made with more digits (real2). One decay per key: e and r are rows. They scale the
 * rows of k and q. `hat` has k^_i = e_i k_i and q^_i = e_i q_i. `tilde` has k~_j = r_j k_j: each of
 * its rows is carried down the chunk, and multiplied by a_i at each token.
 *
 * This file has a chunk's tokens, decays and scores. The other stages are in chunk_forward.h. */

typedef struct chunk {
    int64_t C;      /* the tokens that it has room for */
    int64_t kp, cp; /* K and C, padded */
    int64_t n;      /* the tokens that are in it */
    real *k, *q;    /* [2C][kp], l2-normed and mapped: k, then (from row n) q; one matrix */
    real *a;        /* TOKEN [C], KEY [C][kp] */
    real *beta;     /* [C] */
    real *e;        /* TOKEN [C], KEY [C][kp]; forward: KEY's in the place of a */
    real *gamma;    /* TOKEN [C][cp]: Gamma, its lower triangle; r is its last row */
    real2 *product; /* TOKEN [cp]: a row of Gamma; KEY [kp]: the product of decays given as such */
    real *rest;     /* TOKEN [cp]: the decay minus a, which is the rounded decay */
    real *log;      /* KEY [kp]: the sum of the logarithms */
    real *owed;     /* KEY [kp]: the roundings of the chunk's decays so far */
    real *decay;    /* the chunk's decay: TOKEN [1], KEY [kp] */
    real *hat;      /* KEY [2C][kp]: k^, then (from row n) q^; forward: in the place of k and q */
    real *tilde;    /* KEY [C][kp]: k~ */
    lane *part;     /* KEY [2][cp]: a row of P and L before the sum over a lane */
    real *kt;       /* [kp][cp]: k (KEY: k~) transposed */
    real *kk, *qk;  /* [2C][cp]: the bare products k_i . k_j, then (from row n) q_i . k_j */
    real *P, *L;    /* [C][cp], their lower triangles; the bare products if nothing decays */
    real *den;      /* [C]: the normaliser's denominators */
    real2 decayed;  /* TOKEN: the product of its decays */
    /* [n], TOKEN and bf16 products: the factors of the rows of k S, q S and U: e, e and r */
    const real *scale_kS, *scale_qS, *scale_U;
} chunk;

/* for_adjoint: keep k, q and a unscaled. The forward pass scales them in place, because a second
 * copy would not fit in L1. */
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

/* The rows of tokens t..t+n of a unit in the named arrays, as far as there are any. They are
 * prefetched by a product of the state's size and by the blocks of `products` products with the
 * state. */
LA_COLD prefetch prefetch_of(const la_problem *p, const la_unit *u, int64_t t, int64_t n,
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
        next.array[next.arrays].stride = x->stride[1] * la_size_of(x->dtype);
        next.array[next.arrays].bytes = (last - first) * la_size_of(x->dtype);
        next.arrays++;
    }
    const int64_t lanes = padded(u->v1 - u->v0) / LANES, wide = lanes / WIDE;
    const int64_t narrow = (lanes - wide * WIDE + 1) / 2, strips = (lanes + STRIP - 1) / STRIP;
    next.tiles =
        wide * (p->K / TALL) + narrow * (p->K / (TILE / 2)) + products * strips * (n / ROWS);
    if (next.tiles < 1) next.tiles = 1;
    return next;
}

/* The decays of R tokens from i on, and the decay from the chunk's start up to the last of them.
 * For logarithms that is their sum, which is exact enough where a state lives long. For decays
 * given as such it is their product, with more digits.
 *
 * Each decay pays back what the chunk's earlier ones were rounded by. The rows of k^, q^ and k~
 * are products of up to C decays, and the roundings of equal decays would all go to the same
 * side. */
LA_FN void load_key_decays(chunk *c, const la_problem *p, const la_unit *u, int64_t t, int64_t i,
                           const int R)
{
    const la_array *g = &p->array[LA_G];
    const int64_t kp = c->kp;
    real *a = c->a + i * kp;
    for (int r = 0; r < R; r++) load_row(a + r * kp, p->K, at(g, u->b, t + i + r, u->hv), g->dtype);
    if (p->gate == LA_DECAY) {
        for (int r = 0; r < R; r++)
            for (int64_t x = 0; x < kp; x++)
                c->product[x] = i + r ? c->product[x] * a[r * kp + x] : a[r * kp + x];
        return;
    }
    for (int64_t x = 0; x < kp; x += LANES) {
        const lane zero = {0};
        lane sum = i ? lanes_in(c->log + x)[0] : zero, owed = i ? lanes_in(c->owed + x)[0] : zero;
        for (int r = 0; r < R; r++) {
            lane *const to = lanes_of(a + r * kp + x), log = *to;
            lane rest;
            const lane decay = decay_in_two(log, LA_LOG, &rest);
            sum += log;
            *to = lane_paid_back(decay, rest, &owed);
        }
        lanes_of(c->log + x)[0] = sum;
        lanes_of(c->owed + x)[0] = owed;
    }
    for (int r = 0; r < R; r++)
        for (int64_t x = p->K; x < kp; x++) a[r * kp + x] = 0;
}

/* The chunk's decay. It pays back what the decays of the chunks before it were rounded by. */
LA_COLD void settle_chunk_decay(chunk *c, const la_problem *p, real *owed, const la_decay decay)
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
    int64_t first = 0;
    for (; decay == LA_KEY && first + 2 <= c->n; first += 2) load_key_decays(c, p, u, t, first, 2);
    for (; decay == LA_KEY && first < c->n; first++) load_key_decays(c, p, u, t, first, 1);
    for (int64_t i = 0; rule == LA_DELTA && i < c->n; i++) c->beta[i] = load_scalar(p, LA_BETA, u, t + i);
}

/* Tokens t..t+n of the unit's sequence. reads: with q, and so with P. */
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

/* Gamma and e. Each number is rounded once: if it were rounded at every token, equal decays would
 * round the same way every time, and the error would grow with the reach of the memory. Row i is
 * a_i times row i-1, with a new 1 at its end. The numbers right of the diagonal are never read. */
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
            /* a separate store of the 1 would delay the next row's loads of whole vectors */
            c->product[j] = j == i ? 1 : a * c->product[j];
            G[j] = (real)c->product[j];
        }
    }
    c->decayed = e;
}

/* P and L: the bare products times Gamma, or alone if nothing decays. */
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

/* One decay per token, or none: the products of the chunk's rows are made once, then multiplied by
 * Gamma. */
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

/* Token i and R keys before it, from j on: k~_j <- a_i k~_j, and the lanes that add up to P_ij and
 * L_ij. */
LA_FN void scores_of_keys(const chunk *c, const int R, int64_t i, int64_t j, const bool reads,
                          const la_rule rule)
{
    const int64_t kp = c->kp;
    const real *a = c->a + i * kp, *q = c->q + i * kp, *k = c->k + i * kp;
    real *rows = c->tilde + j * kp;
    lane P[ROWS] = {{0}}, L[ROWS] = {{0}};
    for (int64_t x = 0; x < kp; x += LANES) {
        /* read once: the compiler cannot know that writing a row leaves them as they are */
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

LA_FN void chunk_begin_of(chunk *c, const la_problem *p, const la_unit *u, int64_t t, int64_t n,
                          const bool reads, const la_decay decay, const la_rule rule)
{
    chunk_load(c, p, u, t, n, reads, decay, rule);
    chunk_scores(c, p, reads, decay, rule);
}

/* clang-format off */
#define LA_KIND(decay, rule) \
    LA_COLD void chunk_begin_##decay##_##rule(chunk *c, const la_problem *p, const la_unit *u, \
                                              int64_t t, int64_t n, bool reads) \
    { \
        if (reads) \
            chunk_begin_of(c, p, u, t, n, true, LA_##decay, LA_##rule); \
        else \
            chunk_begin_of(c, p, u, t, n, false, LA_##decay, LA_##rule); \
    }
/* clang-format on */
#include "../kinds.def"

/* chunk_load and chunk_scores. Each kind has one function, which both passes call: a copy in each
 * of the five places would cost a tenth of the time of the build. */
LA_FN void chunk_begin(chunk *c, const la_problem *p, const la_unit *u, int64_t t, int64_t n,
                       const bool reads, const la_decay decay, const la_rule rule)
{
#define LA_KIND(D, R) \
    if (decay == LA_##D && rule == LA_##R) chunk_begin_##D##_##R(c, p, u, t, n, reads);
#include "../kinds.def"
}

/* z += sum_j k_j. Mapped keys are positive, so z grows with every token. Its roundings are all of
 * one sign where keys repeat, and would grow with it. `kahan` keeps what each addition rounded off
 * and gives it back to the next one (Kahan). It starts at zero. */
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

/* ---- a panel: the columns that are worked on together ---- */

typedef struct panel {
    int64_t v0, v1, width; /* columns of V; width is padded */
    real *S;               /* [K][width] */
    real *U;               /* [C][width]: the writes */
    real *rU;            /* TOKEN and bf16 products [C][width]: r U, U as the chunk's end sees it */
    real *O;             /* [C][width]: the reads, if they must be converted */
    const real *kS, *qS; /* bf16 products [C][width]: the products with the state, not scaled */
} panel;

/* The chunk's decay: one number, or one per key. */
LA_FN const real *chunk_decay(const chunk *c, const la_decay decay)
{
    return decay == LA_NONE ? &one : c->decay;
}
