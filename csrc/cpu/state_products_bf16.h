/* The products with the state, and the scores before them, of bfloat16 arrays: products of bfloat16
 * numbers (bf16_products.h). U, P and L are floats, as in chunk.h. See state_products.h for the
 * functions.
 *
 *     scores          k k', q k'
 *     state products  k S, q S
 *     carry           S <- diag(e) S + k' (r U)
 *
 * Only temporary copies of S and r U are rounded to bfloat16. The state itself stays float32, so
 * rounding errors do not accumulate. k and q are multiplied as the user gave them, and their norms
 * scale the results (docs/decisions/0026). */

typedef struct state_scratch {
    int64_t kw, cw; /* words in a left factor's row of K numbers, of C */
    word *keys;     /* [2C][kw]: k, then (from row n) q */
    word *kt;       /* [K][cw]: k transposed */
    word *strip;    /* of a right factor */
    real *kS;       /* one panel's [2C][width]: k S, then (from row n) q S */
    real *norm;     /* [2 cp]: the factors of rows of k, then (from cp) of q */
    real *scale;    /* [2C]: e times norm, of k, then (from C) q */
    real *end;      /* [C]: r times k's norm */
} state_scratch;

LA_FN void state_scratch_take(state_scratch *x, arena *m, const la_problem *p, int64_t C,
                              int64_t width)
{
    x->kw = padded_words(p->K);
    x->cw = padded_words(C);
    x->keys = arena_take_words(m, 2 * C + ROWS_READ, x->kw);
    x->kt = arena_take_words(m, round_up(p->K, ROWS_READ), x->cw);
    x->strip = arena_take_words(m, x->kw > x->cw ? x->kw : x->cw, STRIP_LANES * LANES);
    x->kS = arena_take(m, 2 * C, width);
    x->norm = arena_take(m, 2, padded(C));
    x->scale = arena_take(m, 2, C);
    x->end = arena_take(m, 1, C);
}

/* Tokens t..t+n of q or k, as rows of reals and as rows of words, and their norms. */
LA_FN void bf16_load_keys(const la_problem *p, la_name name, const la_unit *u, int64_t t, int64_t n,
                          real *rows, word *packed, int64_t kw, real *norm)
{
    const la_array *from = &p->array[name];
    const int64_t kp = padded(p->K);
    for (int64_t i = 0; i < n; i++) {
        real *row = rows + i * kp;
        load_row(row, p->K, at(from, u->b, t + i, u->h), from->dtype);
        pack_left(packed + i * kw, row, kp);
        norm[i] = p->qk_l2norm ? l2norm_factor(dot(p->K, row, row)) : 1;
    }
}

/* The rows that are multiplied, of k's rows and then q's: k's for the delta rule, q's if the chunk
 * reads. */
LA_FN int64_t first_row(int64_t n, const la_rule rule) { return rule == LA_DELTA ? 0 : n; }
LA_FN int64_t end_row(int64_t n, const bool reads) { return reads ? 2 * n : n; }

/* All rows are: by the norms of k and q, which are 1 without qk_l2norm. */
LA_FN bool rows_are_scaled(const la_decay decay)
{
    (void)decay;
    return true;
}

/* P, L, and the factors of the rows of a panel. */
LA_FN void load_and_score(chunk *c, state_scratch *x, const la_problem *p, const la_unit *u,
                          int64_t t, int64_t n, const bool reads, const la_decay decay,
                          const la_rule rule)
{
    const int64_t kp = c->kp, cp = c->cp, first = first_row(n, rule), end = end_row(n, reads);
    real *of_k = x->norm, *of_q = x->norm + cp;
    c->n = n;
    bf16_load_keys(p, LA_K, u, t, n, c->x, x->keys, x->kw, of_k);
    if (reads) bf16_load_keys(p, LA_Q, u, t, n, c->x + n * kp, x->keys + n * x->kw, x->kw, of_q);
    load_gates(c, p, u, t, decay, rule);
    transpose(n, p->K, c->k, kp, c->kt, cp);
    for (int64_t k = 0; k < p->K; k++) pack_left(x->kt + k * x->cw, c->kt + k * cp, padded(n));
    c->qk = c->kk + n * cp;
    if (first < end)
        bf16_product(end - first, padded(n), p->K, x->keys + first * x->kw, x->kw, c->kt, cp,
                     c->kk + first * cp, cp, NULL, NULL, 0, x->strip, NULL);
    for (int64_t i = first; p->qk_l2norm && i < end; i++) {
        scale_row(padded(n), c->kk + i * cp, c->kk + i * cp, i < n ? of_k[i] : of_q[i - n]);
        multiply_row(padded(n), c->kk + i * cp, c->kk + i * cp, of_k);
    }
    decayed_scores(c, p, reads, decay, rule);

    for (int64_t i = 0; i < n; i++) {
        const real e = decay == LA_TOKEN ? c->e[i] : 1, r = decay == LA_TOKEN ? c->scale_U[i] : 1;
        x->scale[i] = e * of_k[i];
        if (reads) x->scale[c->C + i] = e * of_q[i];
        x->end[i] = r * of_k[i];
    }
    c->scale_kS = x->scale;
    c->scale_qS = x->scale + c->C;
    c->scale_U = x->end;
}

/* k S and q S; for the additive rule q S alone. */
LA_FN void state_products(const chunk *c, const state_scratch *x, const la_problem *p, panel *s,
                          const bool reads, const la_rule rule)
{
    const int64_t first = first_row(c->n, rule), end = end_row(c->n, reads);
    s->kS = x->kS;
    s->qS = x->kS + c->n * s->width;
    if (first == end) return;
    bf16_product(end - first, s->width, p->K, x->keys + first * x->kw, x->kw, s->S, s->width,
                 x->kS + first * s->width, s->width, NULL, NULL, 0, x->strip, NULL);
}

/* made: kS or qS of the panel. keys: not used here. */
LA_FN void state_product(const int R, const int W, int64_t i, int64_t w, const chunk *c, int K,
                         const real *keys, const panel *s, const real *made, lane *to)
{
    (void)c, (void)K, (void)keys;
#pragma GCC unroll 8
    for (int y = 0; y < R; y++)
#pragma GCC unroll 4
        for (int x = 0; x < W; x++) to[y * W + x] = lanes_in(made + (i + y) * s->width + w)[x];
}

LA_FN void state_carry(const chunk *c, const state_scratch *x, const la_problem *p, const panel *s,
                       real *to, prefetch *next, const la_decay decay)
{
    bf16_product(p->K, s->width, c->n, x->kt, x->cw, s->rU, s->width, to, s->width, s->S,
                 chunk_decay(c, decay), 0, x->strip, next);
}
