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
 *     L_ij = x_i . k_j Gamma_ij (j < i)    x: k where the caller gives none; where it is a
 *                                                                  factor, times k
 *
 * So a chunk has rows that look at the state, x and q, and rows that are written, k. The rule DPLR
 * writes y's rows too: it has P and L of both, and the writes U are v's rows, which are given, then
 * W = -(x^ S + L U), which are solved. A rule that looks before the decay (recurrence.h) takes the
 * decays up to token i - 1 in the place of those up to i. With a bonus P_ii is q_i . (bonus * k_i).
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
 * The decay PAIR: a write j counts G_ij in the memory M_i and N_ij in the momentum Y_i. The states
 * before the chunk count e_i and f_i in M_i, and the momentum counts m_i in Y_i (docs/math.md):
 *
 *     N_ij = eta_i N_{i-1,j}     G_ij = a_i G_{i-1,j} + N_ij     N_jj = G_jj = 1
 *     m_i  = eta_i m_{i-1}       f_i  = a_i f_{i-1} + m_i        e_i  = a_i e_{i-1}
 *
 * A panel holds M's rows and then Y's, S = [M; Y]. So the rows that look at it are twice as long,
 * x^_i = [e_{i-1} k_i, f_{i-1} k_i] and q^_i = [e_i q_i, f_i q_i], and so are those that are
 * carried, k~_j = [G_nj k_j, N_nj k_j]. P is G qk, and row i of L is row i-1 of G times kk. All are
 * sums and products of numbers >= 0. In batches (recurrence.h) x^ and L take the last token before
 * token i's batch in the place of i-1. A chunk has whole batches.
 *
 * This file has a chunk's tokens, decays and scores. The other stages are in chunk_forward.h. */

typedef struct chunk {
    int64_t C;      /* the tokens that it has room for */
    int64_t kp, cp; /* K and C, padded */
    int64_t n;      /* the tokens that are in it */
    int64_t K;      /* the rows of a state: K; PAIR 2 K */
    int64_t sp;     /* K, padded: the rows of hat and tilde, and of the factors of a state */
    real *x, *q;    /* [2C][kp]: x (k where not given), then (from row n) q; one matrix */
    real *k;     /* [C][kp], x's rows where x is not given; DPLR [2C][kp]: k, then (from row n) y */
    real *bonus; /* BONUS [kp] */
    real *a;     /* TOKEN, PAIR [C], KEY [C][kp] */
    real *beta;  /* [C]; with weights of writes they are here */
    real skip;   /* the factor of v in a read */
    real *eta;   /* PAIR [C] */
    real *e;     /* TOKEN, PAIR [C], KEY [C][kp]; forward: KEY's in the place of a */
    real *look;  /* TOKEN [C]: e of the token before, for x that looks before the decay */
    real *f, *m; /* PAIR [C] */
    real *gamma; /* TOKEN [C][cp]: Gamma, its lower triangle; r is its last row. PAIR: G */
    real *N;     /* PAIR [C][cp] */
    /* TOKEN [cp]: a row of Gamma; PAIR [2][cp]: of G and of N; KEY [kp]: the product of decays given
     * as such */
    real2 *product;
    real *rest;  /* TOKEN, PAIR [cp]: the decay minus a, which is the rounded decay */
    real *log;   /* KEY [kp]: the sum of the logarithms */
    real *owed;  /* KEY [kp]: the roundings of the chunk's decays so far */
    real *decay; /* the chunk's decay: TOKEN, PAIR [1], KEY [kp] */
    /* KEY, PAIR [2C][sp]: x^, then (from row n) q^; forward: KEY's in the place of x and q */
    real *hat;
    real *tilde;   /* KEY, PAIR [C][sp]: k~; DPLR [2C][kp]: then (from row n) y~ */
    lane *part;    /* KEY [2][cp], DPLR [4][cp]: a row of P and L before the sum over a lane */
    real *kt;      /* [sp][cp]: k (KEY, PAIR: k~) transposed; DPLR: and y~ behind it */
    real *kk, *qk; /* [2C][cp]: the bare products x_i . k_j, then (from row n) q_i . k_j */
    /* [C][cp], their lower triangles; the bare products if nothing decays. DPLR [2C][cp]: of k, then
     * (from row C) of y */
    real *P, *L;
    real *den;     /* [C]: the normaliser's denominators */
    real2 decayed; /* TOKEN, PAIR: the product of its decays */
    /* [n], TOKEN and bf16 products: the factors of the rows of k S, q S and U: e, e and r */
    const real *scale_kS, *scale_qS, *scale_U;
} chunk;

/* Is the state multiplied by rows that carry the decays, x^, q^ and k~? */
LA_FN bool rows_carry(const la_decay decay) { return decay == LA_KEY || decay == LA_PAIR; }

/* The rows of a state: those of both states of a pair. */
LA_FN int64_t state_rows(const la_problem *p) { return p->decay == LA_PAIR ? 2 * p->K : p->K; }

/* The rows that a token writes, and the rows that look at the state. */
LA_FN int64_t rows_written(const la_rule rule) { return rule == LA_DPLR ? 2 : 1; }
LA_FN int64_t rows_looking(const la_rule rule) { return la_predicts(rule) ? 2 : 1; }

/* for_adjoint: keep x, q and a unscaled. The forward pass scales them in place, because a second
 * copy would not fit in L1. */
LA_FN void chunk_take(chunk *c, arena *m, const la_problem *p, int64_t C, const bool for_adjoint,
                      const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K), cp = padded(C);
    const bool key = decay == LA_KEY, pair = decay == LA_PAIR, predicts = la_predicts(rule);
    const bool token = decay == LA_TOKEN || pair, carries = rows_carry(decay);
    const int64_t written = rows_written(rule) * C;
    *c = (chunk){.C = C, .kp = kp, .cp = cp};
    c->K = state_rows(p);
    c->sp = padded(c->K);
    c->x = arena_take(m, 2 * C, kp);
    c->k = p->array[LA_X].given ? arena_take(m, written, kp) : c->x;
    c->bonus = arena_take(m, rule == LA_BONUS, kp);
    c->a = arena_take(m, key ? C : token, key ? kp : cp);
    c->e = key && !for_adjoint ? c->a : arena_take(m, C, key ? kp : token);
    c->look = arena_take(m, p->predicts_before, C);
    c->beta = arena_take(m, 1, C);
    c->eta = arena_take(m, pair, cp);
    c->f = arena_take(m, pair, C);
    c->m = arena_take(m, pair, C);
    c->N = arena_take(m, pair ? C : 0, cp);
    c->gamma = arena_take(m, token ? C : 0, cp);
    c->product = (real2 *)arena_take(m,
                                     pair    ? 2 * cp
                                     : token ? cp
                                     : key   ? kp
                                             : 0,
                                     sizeof(real2) / sizeof(real));
    c->rest = arena_take(m, 1, token ? cp : 0);
    c->log = arena_take(m, 1, key ? kp : 0);
    c->owed = arena_take(m, 1, key ? kp : 0);
    c->decay = arena_take(m, 1, key ? kp : 1);
    c->hat = key && !for_adjoint ? c->x : arena_take(m, carries ? 2 * C : 0, c->sp);
    c->tilde = arena_take(m, carries ? written : 0, c->sp);
    c->part = (lane *)arena_take(m, key ? 2 * rows_written(rule) * cp : 0, LANES);
    c->kt = arena_take(m, rows_written(rule) * c->sp, cp);
    c->kk = arena_take(m, key ? 0 : 2 * C, cp);
    c->P = arena_take(m, decay == LA_NONE ? 0 : written, cp);
    c->L = arena_take(m, decay == LA_NONE || !predicts ? 0 : written, cp);
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
        const char *letters = la_array_rows[names[i]].letters;
        const bool keys = letters[2] == 'H'; /* and not of a value head */
        const bool gate = names[i] == LA_G || names[i] == LA_DG;
        const int64_t first = keys || gate ? 0 : u->v0, last = keys || gate ? p->K : u->v1;
        if (!x->given || (gate && p->decay != LA_KEY)) continue;
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
            sum += log;
            *to = lane_decay_paid_back(log, &owed);
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
    if (decay == LA_TOKEN || decay == LA_PAIR) {
        c->decay[0] = paid_back(c->decayed, owed);
    } else if (decay == LA_KEY && p->gate == LA_DECAY) {
        for (int64_t x = 0; x < c->kp; x++) c->decay[x] = paid_back(c->product[x], owed + x);
    } else if (decay == LA_KEY) {
        for (int64_t x = 0; x < c->kp; x += LANES)
            lanes_of(c->decay + x)[0] =
                lane_decay_paid_back(lanes_in(c->log + x)[0], lanes_of(owed + x));
    }
}

/* Two tokens take turns in the steps of the exponential; the last one may be alone. Both are
 * functions: four kinds call them. */
LA_COLD void load_two_key_decays(chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                                 int64_t i)
{
    load_key_decays(c, p, u, t, i, 2);
}

LA_COLD void load_last_key_decays(chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                                  int64_t i)
{
    load_key_decays(c, p, u, t, i, 1);
}

LA_FN void load_gates(chunk *c, const la_problem *p, const la_unit *u, int64_t t,
                      const la_decay decay, const la_rule rule)
{
    if (decay == LA_TOKEN || decay == LA_PAIR) load_decays(p, u, t, c->n, c->a, c->rest);
    for (int64_t i = 0; decay == LA_PAIR && i < c->n; i++)
        c->eta[i] = load_scalar(p, LA_ETA, u, t + i);
    int64_t first = 0;
    for (; decay == LA_KEY && first + 2 <= c->n; first += 2) load_two_key_decays(c, p, u, t, first);
    if (decay == LA_KEY && first < c->n) load_last_key_decays(c, p, u, t, first);
    for (int64_t i = 0; rule == LA_DELTA && i < c->n; i++)
        c->beta[i] = load_scalar(p, LA_BETA, u, t + i);
    const bool weights = la_weighs(decay, rule) && p->array[LA_WEIGHT].given;
    for (int64_t i = 0; weights && i < c->n; i++) c->beta[i] = load_weight(p, u, t + i);
    c->skip = la_weighs(decay, rule) && p->array[LA_SKIP].given ? load_skip(p, u) : 0;
}

LA_FN void multiply_row(int64_t n, real *to, const real *x, const real *y)
{
    for (int64_t i = 0; i < n; i += LANES)
        lanes_of(to + i)[0] = lanes_in(x + i)[0] * lanes_in(y + i)[0];
}

/* Tokens t..t+n of the unit's sequence. reads: with q, and so with P. */
LA_FN void chunk_load(chunk *c, const la_problem *p, const la_unit *u, int64_t t, int64_t n,
                      const bool reads, const la_decay decay, const la_rule rule)
{
    c->n = n;
    c->q = c->x + n * c->kp;
    load_keys(p, LA_K, u->b, t, n, u->h, c->k);
    if (c->k != c->x) load_plain_rows(p, LA_X, u, t, n, c->x);
    if (la_is_gated(decay, rule) && p->x_is_factor) multiply_row(n * c->kp, c->x, c->x, c->k);
    if (rule == LA_DPLR) load_plain_rows(p, LA_Y, u, t, n, c->k + n * c->kp);
    if (rule == LA_BONUS) load_bonus(p, u->h, c->bonus);
    if (reads) load_keys(p, LA_Q, u->b, t, n, u->h, c->q);
    load_gates(c, p, u, t, decay, rule);
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

/* Gamma and e. Where writes have weights, a column of Gamma has that of its token as a factor, so
 * P and r have it too. Each number is rounded once: if it were rounded at every token, equal decays
 * would round the same way every time, and the error would grow with the reach of the memory. Row i
 * is a_i times row i-1, with a new 1, or weight, at its end. The numbers right of the diagonal are
 * never read. */
LA_FN void decay_products(chunk *c, const la_problem *p)
{
    const bool weights = p->array[LA_WEIGHT].given;
    real2 e = 1;
    for (int64_t j = 0; j < c->cp; j++) c->product[j] = 0;
    for (int64_t i = 0; i < c->n && !stopped_after(p, i); i++) {
        const real2 a = (real2)c->a[i] + (real2)c->rest[i], own = weights ? c->beta[i] : 1;
        real *G = c->gamma + i * c->cp;
        e *= a;
        c->e[i] = (real)e;
        for (int64_t j = 0; j < c->cp; j++) {
            /* a separate store of it would delay the next row's loads of whole vectors */
            c->product[j] = j == i ? own : a * c->product[j];
            G[j] = (real)c->product[j];
        }
    }
    c->decayed = e;
}

/* G, N, e, f and m of a pair, each rounded once. */
LA_FN void pair_products(chunk *c, const la_problem *p)
{
    real2 e = 1, f = 0, m = 1, *const of_N = c->product + c->cp;
    for (int64_t j = 0; j < 2 * c->cp; j++) c->product[j] = 0;
    for (int64_t i = 0; i < c->n && !stopped_after(p, i); i++) {
        const real2 a = (real2)c->a[i] + (real2)c->rest[i], eta = c->eta[i];
        real *G = c->gamma + i * c->cp, *N = c->N + i * c->cp;
        e *= a;
        m *= eta;
        f = a * f + m;
        c->e[i] = (real)e;
        c->f[i] = (real)f;
        c->m[i] = (real)m;
        for (int64_t j = 0; j < c->cp; j++) {
            of_N[j] = j == i ? 1 : eta * of_N[j];
            c->product[j] = j == i ? 1 : a * c->product[j] + of_N[j];
            N[j] = (real)of_N[j];
            G[j] = (real)c->product[j];
        }
    }
    c->decayed = e;
}

/* [to, to + K) = a x, then K numbers b x. */
LA_FN void two_scaled(int64_t K, real *to, const real *x, real a, real b)
{
    for (int64_t i = 0; i < K; i++) to[i] = a * x[i];
    for (int64_t i = 0; i < K; i++) to[K + i] = b * x[i];
}

/* How many tokens of a chunk come before token i's batch. The memory that they leave predicts for i.
 * A batch of one token begins with i itself. */
LA_FN int64_t batch_begin(const la_problem *p, int64_t i) { return i - i % p->batch; }

/* P and L of a pair, and the rows that carry its decays. */
LA_FN void pair_scores(chunk *c, const la_problem *p, const bool reads)
{
    const int64_t n = c->n, cp = c->cp, kp = c->kp, sp = c->sp, K = p->K;
    const real *G = c->gamma + (n - 1) * cp, *N = c->N + (n - 1) * cp;
    pair_products(c, p);
    for (int64_t i = 0; i < n && !stopped_after(p, i); i++) {
        real *x_hat = c->hat + i * sp, *q_hat = x_hat + n * sp, *tilde = c->tilde + i * sp;
        if (reads) multiply_row(cp, c->P + i * cp, c->gamma + i * cp, c->qk + i * cp);
        const int64_t seen = batch_begin(p, i); /* the tokens before its batch */
        if (seen) multiply_row(cp, c->L + i * cp, c->gamma + (seen - 1) * cp, c->kk + i * cp);
        for (int64_t j = seen; j < i; j++) c->L[i * cp + j] = 0;
        two_scaled(K, x_hat, c->x + i * kp, seen ? c->e[seen - 1] : 1, seen ? c->f[seen - 1] : 0);
        if (reads) two_scaled(K, q_hat, c->q + i * kp, c->e[i], c->f[i]);
        two_scaled(K, tilde, c->k + i * kp, G[i], N[i]);
        for (int64_t at = 2 * K; at < sp; at++) x_hat[at] = tilde[at] = 0;
        for (int64_t at = 2 * K; reads && at < sp; at++) q_hat[at] = 0;
    }
    transpose(n, c->K, c->tilde, sp, c->kt, c->cp);
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
    const int64_t back = p->predicts_before; /* row 0 of L is empty */
    for (int64_t i = 0; back && i < c->n; i++) c->look[i] = i ? c->e[i - 1] : 1;
    if (back) c->scale_kS = c->look;
    for (int64_t i = 0, end; (end = stretch_end(p, i, c->n)) > i; i = end) {
        const int64_t at = i * c->cp, size = (end - i) * c->cp, skip = i ? 0 : back * c->cp;
        if (reads) multiply_row(size, c->P + at, c->gamma + at, c->qk + at);
        if (rule == LA_DELTA)
            multiply_row(size - skip, c->L + at + skip, c->gamma + at + skip - back * c->cp,
                         c->kk + at + skip);
    }
    const bool skips = reads && la_weighs(decay, rule) && p->array[LA_SKIP].given;
    for (int64_t i = 0; skips && i < c->n; i++) c->P[i * c->cp + i] += c->skip;
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
        long_narrow_product(p, reads ? 2 * n : n, padded(n), p->K, c->x, kp, c->kt, cp, c->kk, cp);
    else if (reads)
        long_narrow_product(p, n, padded(n), p->K, c->q, kp, c->kt, cp, c->qk, cp);
    if (decay == LA_PAIR)
        pair_scores(c, p, reads);
    else
        decayed_scores(c, p, reads, decay, rule);
}

/* Token i and R rows that are written before it, from row j on: row <- a_i row, and the lanes that
 * add up to P_ij and L_ij. */
LA_FN void scores_of_keys(const chunk *c, const int R, int64_t i, real *rows, lane *part,
                          const bool reads, const la_rule rule)
{
    const int64_t kp = c->kp;
    const real *a = c->a + i * kp, *q = c->q + i * kp, *x = c->x + i * kp;
    lane P[ROWS] = {{0}}, L[ROWS] = {{0}};
    for (int64_t at = 0; at < kp; at += LANES) {
        /* read once: the compiler cannot know that writing a row leaves them as they are */
        const lane ai = lanes_in(a + at)[0], qi = lanes_in(q + at)[0], xi = lanes_in(x + at)[0];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const lane before = lanes_in(rows + r * kp + at)[0], row = ai * before;
            lanes_of(rows + r * kp + at)[0] = row;
            if (reads) P[r] += qi * (la_reads_after(rule) ? row : before);
            if (la_predicts(rule)) L[r] += xi * (rule == LA_DELTA ? row : before);
        }
    }
    for (int r = 0; r < R; r++) part[r] = P[r];
    for (int r = 0; r < R && la_predicts(rule); r++) part[c->cp + r] = L[r];
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

/* One decay per token and key: each row that is written is carried down the chunk. */
LA_FN void scores_key(chunk *c, const la_problem *p, const bool reads, const la_rule rule)
{
    const int64_t n = c->n, kp = c->kp, cp = c->cp, written = rows_written(rule);
    real *x_hat = c->hat, *q_hat = c->hat + n * kp;

    for (int64_t j = 0; j < 2 * written * cp; j++) c->part[j] = (lane){0};
    for (int64_t i = 0; i < n && !stopped_after_keys(p, i, n); i++) {
        const real *q = c->q + i * kp, *x = c->x + i * kp, *k = c->k + i * kp;
        real *e = c->e + i * kp, *tilde = c->tilde + i * kp;
        lane *const of_y = c->part + 2 * cp;
        for (int64_t w = 0; w < written; w++) {
            real *rows = c->tilde + w * n * kp;
            lane *part = c->part + 2 * w * cp;
            int64_t j = 0;
            for (; j + ROWS <= i; j += ROWS)
                scores_of_keys(c, ROWS, i, rows + j * kp, part + j, reads, rule);
            for (; j < i; j++) scores_of_keys(c, 1, i, rows + j * kp, part + j, reads, rule);
        }
        lane self = {0}, self_y = {0};
        for (int64_t at = 0; at < kp; at += LANES) {
            const lane zero = {0}, kx = lanes_in(k + at)[0], qx = lanes_in(q + at)[0];
            const lane before = i ? lanes_in(e - kp + at)[0] : 1 + zero;
            lane ex = lanes_in(c->a + i * kp + at)[0];
            if (i) ex *= before;
            if (la_predicts(rule)) {
                const lane looking = rule == LA_DELTA ? ex : before;
                lanes_of(x_hat + i * kp + at)[0] = looking * lanes_in(x + at)[0];
            }
            lanes_of(e + at)[0] = ex;
            lanes_of(tilde + at)[0] = kx;
            if (rule == LA_DPLR) {
                const lane yx = lanes_in(k + n * kp + at)[0];
                lanes_of(tilde + n * kp + at)[0] = yx;
                if (reads) self_y += qx * yx;
            }
            if (!reads) continue;
            lanes_of(q_hat + i * kp + at)[0] = (la_reads_after(rule) ? ex : before) * qx;
            self += qx * (rule == LA_BONUS ? lanes_in(c->bonus + at)[0] * kx : kx);
        }
        c->part[i] = self;
        if (reads) sum_parts(i + 1, c->part, c->P + i * cp);
        if (la_predicts(rule)) sum_parts(i, c->part + cp, c->L + i * cp);
        if (rule != LA_DPLR) continue;
        of_y[i] = self_y;
        if (reads) sum_parts(i + 1, of_y, c->P + (c->C + i) * cp);
        sum_parts(i, of_y + cp, c->L + (c->C + i) * cp);
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
    for (int64_t w = 0; w < rows_written(rule); w++)
        transpose(c->n, p->K, c->tilde + w * c->n * c->kp, c->kp, c->kt + w * c->kp * c->cp, c->cp);
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
    real *S;               /* [K][width]; PAIR [2K][width]: M, then Y */
    real *U;               /* [C][width]: the writes; DPLR [2C][width]: v, then (from row n) W */
    real *rU;            /* TOKEN and bf16 products [C][width]: r U, U as the chunk's end sees it */
    real *O;             /* [C][width]: the reads, if they must be converted */
    const real *kS, *qS; /* bf16 products [C][width]: the products with the state, not scaled */
} panel;

/* The chunk's decay: one number, or one per key. A pair has carry_pair. */
LA_FN const real *chunk_decay(const chunk *c, const la_decay decay)
{
    return decay == LA_NONE || decay == LA_PAIR ? &one : c->decay;
}

/* to = [e M + f Y; m Y] + k~' U at the chunk's end, from S = [M; Y]; they may be one. */
LA_FN void carry_pair(const chunk *c, const real *U, const real *S, real *to, int64_t width,
                      prefetch *next)
{
    const int64_t n = c->n, cp = c->cp, K = c->K / 2, half = K * width;
    product_of_pair(K, width, n, c->kt, cp, U, to, S, c->decay[0], half, c->f[n - 1], next);
    product_and_prefetch(K, width, n, c->kt + K * cp, cp, 1, U, width, to + half, width, S + half,
                         c->m + n - 1, 0, next);
}

/* Its adjoint, in place: dS = [e dM; f dM + m dY] + left dO, of `rows` rows of dO. left: [2K][ld].
 * The lower half comes first, because it takes dM as it was. */
LA_FN void carry_pair_adjoint(const chunk *c, int64_t rows, const real *left, int64_t ld,
                              const real *dO, real *dS, int64_t width, prefetch *before)
{
    const int64_t last = c->n - 1, K = c->K / 2, half = K * width;
    product_of_pair(K, width, rows, left + K * ld, ld, dO, dS + half, dS + half, c->m[last], -half,
                    c->f[last], before);
    product_and_prefetch(K, width, rows, left, ld, 1, dO, width, dS, width, dS, c->decay, 0,
                         before);
}
