/* The products with the state, and the scores before them, in reals. An instance includes this file
 * or state_products_bf16.h, between chunk.h and chunk_forward.h. Both files define:
 *
 *     state_scratch      memory for these products besides the chunk; state_scratch_take
 *     rows_are_scaled    are the rows of k S, q S and U scaled, by scale_kS, scale_qS and scale_U?
 *     load_and_score     a chunk's tokens and their scores
 *     state_products     k S and q S of a panel, if all rows are made at once
 *     state_product      a block of k S or q S, not scaled: R rows from i, W lanes from column w
 *     state_carry        S' = diag(e) S + (r k)' U, e the chunk's decay; of a pair carry_pair */

typedef struct state_scratch {
    char none;
} state_scratch;

LA_FN void state_scratch_take(state_scratch *x, arena *m, const la_problem *p, int64_t C,
                              int64_t width)
{
    (void)x, (void)m, (void)p, (void)C, (void)width;
}

LA_FN bool rows_are_scaled(const la_decay decay) { return decay == LA_TOKEN; }

LA_FN void load_and_score(chunk *c, state_scratch *x, const la_problem *p, const la_unit *u,
                          int64_t t, int64_t n, const bool reads, const la_decay decay,
                          const la_rule rule)
{
    (void)x;
    chunk_begin(c, p, u, t, n, reads, decay, rule);
}

LA_FN void state_products(const chunk *c, const state_scratch *x, const la_problem *p, panel *s,
                          const bool reads, const la_rule rule)
{
    (void)c, (void)x, (void)p, (void)s, (void)reads, (void)rule;
}

/* keys: rows of k or q, [n][kp]. made: not used here. */
LA_FN void state_product(const int R, const int W, int64_t i, int64_t w, const chunk *c, int K,
                         const real *keys, const panel *s, const real *made, lane *to)
{
    (void)made;
    tile_sum(R, W, K, keys + i * c->sp, c->sp, 1, s->S + w, s->width, to);
}

LA_FN void state_carry(const chunk *c, const state_scratch *x, const la_problem *p, const panel *s,
                       real *to, prefetch *next, const la_decay decay)
{
    const real *from = s->S, *U = decay == LA_TOKEN ? s->rU : s->U, *keep = chunk_decay(c, decay);
    bool by_row = decay == LA_KEY;
    (void)x;
    if (decay == LA_PAIR) {
        carry_pair(c, U, s->S, to, s->width, next);
        return;
    }
    if (p->rule == LA_DPLR) { /* a sum by itself: beside the writes it would cancel */
        product_and_prefetch(c->K, s->width, c->n, c->kt + c->kp * c->cp, c->cp, 1,
                             U + c->n * s->width, s->width, to, s->width, from, keep, by_row, NULL);
        from = to, keep = &one, by_row = false;
    }
    product_and_prefetch(c->K, s->width, c->n, c->kt, c->cp, 1, U, s->width, to, s->width, from,
                         keep, by_row, next);
}
