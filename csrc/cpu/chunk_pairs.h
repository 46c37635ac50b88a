/* The chunk form in products of pairs (pairs.h), for q, k and v in bfloat16. The stages are those of
 * chunk.h, with sums and the state in float; what is multiplied is rounded to bfloat16: k and q (as
 * they are exact, normed, mapped or decayed they are not), P, L, the written U, and a copy of S. The
 * state itself is never rounded, so no error stays in it that a chunk did not bring. A token's first
 * ROWS neighbours are solved for in float (docs/decisions/0020).
 *
 *     solve   U = beta (V - e k S - L U)     k S, and L U off the diagonal, in pairs
 *     read    O = e q S + P U                both in pairs
 *     carry   S <- diag(e) S + k' (r U)      in pairs; each tile also leaves its part of the copy
 *
 * Only pairs up to a row's own token may touch the row: one of a later token would carry its NaN there,
 * through a zero. Where a pair is cut in two, by the diagonal, its second number is zero in both
 * factors. */

#if defined(LA_BF16_PRODUCTS)
enum { BLOCK = 16 }; /* tokens */

typedef struct pair_scratch {
    int64_t kw, cw; /* words in a row of K numbers, of C */
    int64_t kr;     /* pairs of keys */
    word *k, *q;    /* [2C][kw]: k, then (from row n) q; KEY: k^ and q^ */
    word *tilde;    /* KEY [C][kw]: k~ */
    word *across;   /* [kw][cp]: pairs of k (KEY: k~), transposed */
    word *kt;       /* [2 kr][cw]: k (KEY: k~), transposed, in pairs of tokens */
    word *P, *L;    /* [C][cw]: P and -L */
    word *U, *rU;   /* one panel's [C/2][width]: pairs of tokens; rU for TOKEN, else U */
    word *V, *O;    /* [C][width/2]: rows that are no whole lanes */
    real *kS, *qS;  /* one panel's [C][width]; one matrix, as k and q (from row n) are */
    real *before;   /* [BLOCK][width]: what a block of tokens has from the blocks before it */
    word *S;        /* [heads][panels][kr][width]: pairs of keys */
    int64_t panel;  /* words of S in a panel */
} pair_scratch;

LA_FN void pairs_take(pair_scratch *x, arena *m, const la_problem *p, int64_t C, int64_t heads,
                      int64_t panels, int64_t width, const la_decay decay)
{
    x->kr = (p->K + 1) / 2;
    x->kw = padded(x->kr);
    x->cw = padded((C + 1) / 2);
    x->panel = x->kr * width;
    x->k = take_words(m, 2 * C * x->kw);
    x->tilde = take_words(m, decay == LA_KEY ? C * x->kw : 0);
    x->across = take_words(m, x->kw * padded(C));
    x->kt = take_words(m, 2 * x->kr * x->cw);
    x->P = take_words(m, C * x->cw);
    x->L = take_words(m, C * x->cw);
    x->U = take_words(m, (C + 1) / 2 * width);
    x->rU = decay == LA_TOKEN ? take_words(m, (C + 1) / 2 * width) : x->U;
    x->V = take_words(m, C * width / 2);
    x->O = take_words(m, C * width / 2);
    x->kS = take(m, 2 * C * width);
    x->before = take(m, BLOCK * width);
    x->S = take_words(m, heads * panels * x->panel);
}

LA_FN word *pairs_of_state(const pair_scratch *x, const panel *s)
{
    return x->S + s->which * x->panel;
}

/* The copy of a state that has just been loaded. */
LA_COLD void pairs_load_state(pair_scratch *x, const la_problem *p, const panel *s)
{
    const lane zero = {0};
    word *to = pairs_of_state(x, s);
    for (int64_t i = 0; i < p->K; i += 2)
        for (int64_t w = 0; w < s->width; w += LANES) {
            const real *from = s->S + i * s->width + w;
            words_of(to + i / 2 * s->width + w)[0] =
                zip(lanes_in(from)[0], i + 1 < p->K ? lanes_in(from + s->width)[0] : zero);
        }
}

/* k and q go into the products as the user gave them, and nothing else asks for them. */
LA_FN bool keys_as_given(const la_problem *p, const la_decay decay, const la_rule rule)
{
    return decay != LA_KEY && !p->qk_l2norm && p->map[0] == LA_IDENTITY &&
           p->map[1] == LA_IDENTITY && !is_normalised(p, decay, rule);
}

/* [n] rows of pairs of keys, to [K] rows of pairs of tokens; on the way x->across, pairs of keys a
 * column per token. */
LA_FN void pairs_across(pair_scratch *x, int64_t n, int64_t cp, const word *rows)
{
    const words zero = {0};
    transpose(n, x->kw, (const real *)rows, x->kw, (real *)x->across, cp);
    for (int64_t i = 0; i < x->kr; i++)
        for (int64_t j = 0; j < padded(n); j += 2 * LANES) {
            const words *from = words_in(x->across + i * cp + j);
            const words a = from[0], b = j + LANES < padded(n) ? from[1] : zero;
            words_of(x->kt + 2 * i * x->cw + j / 2)[0] = firsts(a, b);
            words_of(x->kt + (2 * i + 1) * x->cw + j / 2)[0] = seconds(a, b);
        }
}

/* P and -L in pairs. A row's own token may be the first of its pair: the second is none of its. */
LA_FN void pack_scores(pair_scratch *x, const chunk *c, const la_rule rule)
{
    const lane zero = {0};
    for (int64_t i = 0; i < c->n; i++) {
        pack_row(x->P + i * x->cw, c->P + i * c->cp, padded(i + 1));
        if (i % 2 == 0) x->P[i * x->cw + i / 2] &= 0xffff;
        if (rule != LA_DELTA) continue;
        for (int64_t j = 0; j < i; j += 2 * LANES) {
            const lane *L = lanes_in(c->L + i * c->cp + j);
            words_of(x->L + i * x->cw + j / 2)[0] = join(-L[0], j + LANES < i ? -L[1] : zero);
        }
    }
}

LA_FN void pairs_scores(chunk *c, pair_scratch *x, const la_problem *p, const la_unit *u, int64_t t,
                        int64_t n, const la_decay decay, const la_rule rule)
{
    const int64_t kp = c->kp, cp = c->cp;
    const bool delta = rule == LA_DELTA;
    x->q = x->k + n * x->kw;
    if (keys_as_given(p, decay, rule)) {
        c->n = n;
        load_gates(c, p, u, t, decay, rule);
        for (int64_t i = 0; i < n; i++) {
            copy_numbers(x->k + i * x->kw, x->kw, at(&p->array[LA_K], u->b, t + i, u->h), p->K);
            copy_numbers(x->q + i * x->kw, x->kw, at(&p->array[LA_Q], u->b, t + i, u->h), p->K);
        }
    } else {
        chunk_load(c, p, u, t, n, true, decay, rule);
        if (decay == LA_KEY) scores_key(c, true, rule);
        const real *from = decay == LA_KEY ? c->hat : c->k;
        for (int64_t i = delta || decay != LA_KEY ? 0 : n; i < 2 * n; i++)
            pack_row(x->k + i * x->kw, from + i * kp, kp);
    }
    if (decay == LA_KEY) {
        for (int64_t i = 0; i < n; i++) pack_row(x->tilde + i * x->kw, c->tilde + i * kp, kp);
        pairs_across(x, n, cp, x->tilde);
    } else {
        const int64_t first = delta ? 0 : n;
        pairs_across(x, n, cp, x->k);
        c->qk = c->kk + n * cp;
        pair_product(2 * n - first, padded(n), x->kr, x->k + first * x->kw, x->kw, x->across, cp,
                     c->kk + first * cp, cp, NULL, NULL, 0, NULL, NULL);
        decayed_scores(c, true, decay, rule);
    }
    pack_scores(x, c, rule);
}

/* ---- solve, read, carry: one panel of columns ---- */

/* Rows of bfloat16 numbers where they lie: in scratch, or in a user's array. */
typedef struct half_rows {
    char *at;
    int64_t ld; /* in bytes */
} half_rows;

LA_FN half_rows half_rows_of(const la_problem *p, la_name name, const la_unit *u, int64_t t,
                             const panel *s, word *room)
{
    const la_array *x = &p->array[name];
    if ((s->v1 - s->v0) % LANES) return (half_rows){(char *)room, 2 * s->width};
    return (half_rows){at_column(x, u->b, t, u->hv, s->v0), 2 * x->stride[1]};
}

/* The additive rule writes V as it is. */
LA_FN void pairs_write(const chunk *c, const pair_scratch *x, const panel *s, half_rows V,
                       const la_decay decay)
{
    const lane zero = {0};
    const real *r = c->gamma + (c->n - 1) * c->cp;
    for (int64_t i = 0; i < c->n; i += 2)
        for (int64_t w = 0; w < s->width; w += LANES) {
            const char *from = V.at + i * V.ld + 2 * w;
            const bool both = i + 1 < c->n;
            const lane a = widen(from), b = both ? widen(from + V.ld) : zero;
            const int64_t to = i / 2 * s->width + w;
            words_of(x->U + to)[0] = (words)a >> 16 | (words)b;
            if (decay == LA_TOKEN)
                words_of(x->rU + to)[0] = zip(r[i] * a, both ? r[i + 1] * b : zero);
        }
}

/* R rows from i (even), NV lanes from column w; what tokens before `first` wrote is summed up already. */
LA_FN void solve_pairs(const int R, const int NV, int64_t i, int64_t w, int64_t first,
                       const chunk *c, const pair_scratch *x, const panel *s, half_rows V,
                       const la_decay decay)
{
    const int64_t cp = c->cp, width = s->width;
    const real *L = c->L + i * cp + i, *r = c->gamma + (c->n - 1) * cp + i;
    lane E[TILE], u[2][STRIP];

#pragma GCC unroll 8
    for (int y = 0; y < R; y++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            const lane kS = lanes_in(x->kS + (i + y) * width + w)[v];
            E[y * NV + v] = widen(V.at + (i + y) * V.ld + 2 * (w + v * LANES)) -
                            from_start(c, i + y, decay == LA_TOKEN) * kS;
            if (first) E[y * NV + v] += lanes_in(x->before + (i + y - first) * width + w)[v];
        }
    add_pairs(R, NV, (int)((i - first) / 2), x->L + i * x->cw + first / 2, x->cw,
              x->U + first / 2 * width + w, width, E);
#pragma GCC unroll 8
    for (int y = 0; y < R; y++) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) u[y % 2][v] = c->beta[i + y] * E[y * NV + v];
#pragma GCC unroll 8
        for (int z = y + 1; z < R; z++)
#pragma GCC unroll 8
            for (int v = 0; v < NV; v++) E[z * NV + v] -= L[z * cp + y] * u[y % 2][v];
        if (y % 2 == 0 && y + 1 < R) continue;
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            const int64_t to = (i + y) / 2 * width + w;
            const lane a = u[0][v], b = y % 2 ? u[1][v] : (lane){0};
            words_of(x->U + to)[v] = zip(a, b);
            if (decay == LA_TOKEN)
                words_of(x->rU + to)[v] = y % 2 ? zip(r[y - 1] * a, r[y] * b) : zip(r[y] * a, b);
        }
    }
}

/* before = the rows of `scores` from token `first` on, times U up to there. */
LA_FN void sum_before(const pair_scratch *x, const panel *s, const word *scores, int64_t first,
                      int64_t end)
{
    if (first)
        pair_product(end - first, s->width, first / 2, scores + first * x->cw, x->cw, x->U,
                     s->width, x->before, s->width, NULL, NULL, 0, NULL, NULL);
}

LA_COLD void pairs_solve(const chunk *c, const pair_scratch *x, const panel *s, half_rows V,
                         const la_decay decay)
{
    for (int64_t first = 0; first < c->n; first += BLOCK) {
        const int64_t end = first + BLOCK < c->n ? first + BLOCK : c->n;
        sum_before(x, s, x->L, first, end);
        FOR_EACH_EVEN_BLOCK(first, end, s->width, solve_pairs, first, c, x, s, V, decay);
    }
}

LA_FN void read_pairs(const int R, const int NV, int64_t i, int64_t w, int64_t first,
                      const chunk *c, const pair_scratch *x, const la_problem *p, const panel *s,
                      half_rows to, const la_decay decay, bool normalised)
{
    const int64_t width = s->width;
    const word *P = x->P + i * x->cw, *own = P + i / 2, *U = x->U + i / 2 * width + w;
    const real scale = (real)p->scale;
    lane O[TILE];

#pragma GCC unroll 8
    for (int y = 0; y < R; y++)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            const lane qS = lanes_in(x->qS + (i + y) * width + w)[v];
            O[y * NV + v] = decay == LA_TOKEN ? c->e[i + y] * qS : qS;
            if (first) O[y * NV + v] += lanes_in(x->before + (i + y - first) * width + w)[v];
        }
    add_pairs(R, NV, (int)((i - first) / 2), P + first / 2, x->cw, x->U + first / 2 * width + w,
              width, O);
#pragma GCC unroll 8
    for (int y = 0; y < R; y += 2)
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            const words both = words_in(U + y / 2 * width)[v];
            O[y * NV + v] =
                dot_pairs(O[y * NV + v], own[y * x->cw + y / 2] - (words){0}, both & 0xffff);
#pragma GCC unroll 8
            for (int z = y + 1; z < R; z++)
                O[z * NV + v] = dot_pairs(O[z * NV + v], own[z * x->cw + y / 2] - (words){0}, both);
        }
#pragma GCC unroll 8
    for (int y = 0; y < R; y++) {
        const real by = normalised ? divisor(p, c->den[i + y]) : 1;
        char *row = to.at + (i + y) * to.ld + 2 * w;
#pragma GCC unroll 8
        for (int v = 0; v < NV; v++) {
            O[y * NV + v] *= scale;
            if (normalised) O[y * NV + v] /= by;
        }
        if (NV == 2)
            *(words_unaligned *)row = join(O[y * NV], O[y * NV + NV - 1]);
        else
            store_halves(row, O[y]);
    }
}

LA_COLD void pairs_read(const chunk *c, const pair_scratch *x, const la_problem *p, const panel *s,
                        half_rows O, const la_decay decay, bool normalised)
{
    for (int64_t first = 0; first < c->n; first += BLOCK) {
        const int64_t end = first + BLOCK < c->n ? first + BLOCK : c->n;
        sum_before(x, s, x->P, first, end);
        FOR_EACH_EVEN_BLOCK(first, end, s->width, read_pairs, first, c, x, p, s, O, decay,
                            normalised);
    }
}

/* What k and q (the additive rule: q alone) find in the state. */
LA_FN void pairs_look(const chunk *c, pair_scratch *x, const panel *s, const la_rule rule)
{
    const int64_t first = rule == LA_DELTA ? 0 : c->n;
    x->qS = x->kS + c->n * s->width;
    pair_product(2 * c->n - first, s->width, x->kr, x->k + first * x->kw, x->kw,
                 pairs_of_state(x, s), s->width, x->kS + first * s->width, s->width, NULL, NULL, 0,
                 NULL, NULL);
}

/* Tokens t.. of one panel's columns. */
LA_FN void pairs_forward(const chunk *c, pair_scratch *x, const la_problem *p, const la_unit *u,
                         int64_t t, panel *s, ahead *next, bool normalised, const la_decay decay,
                         const la_rule rule)
{
    const half_rows V = half_rows_of(p, LA_V, u, t, s, x->V);
    const half_rows O = half_rows_of(p, LA_O, u, t, s, x->O);
    const int64_t columns = s->v1 - s->v0;
    for (int64_t i = 0; V.at == (char *)x->V && i < c->n; i++)
        copy_numbers(x->V + i * s->width / 2, s->width / 2,
                     at_column(&p->array[LA_V], u->b, t + i, u->hv, s->v0), columns);
    pairs_look(c, x, s, rule);
    if (rule == LA_DELTA)
        pairs_solve(c, x, s, V, decay);
    else
        pairs_write(c, x, s, V, decay);
    pairs_read(c, x, p, s, O, decay, normalised);
    for (int64_t i = 0; O.at == (char *)x->O && i < c->n; i++)
        memcpy(at_column(&p->array[LA_O], u->b, t + i, u->hv, s->v0), O.at + i * O.ld,
               (size_t)(2 * columns));
    pair_product(p->K, s->width, (c->n + 1) / 2, x->kt, x->cw, x->rU, s->width, s->S, s->width,
                 s->S, whole_decay(c, decay), decay == LA_KEY, pairs_of_state(x, s), next);
}
#else
/* No such products: nobody asks for a chunk in pairs. */
typedef struct pair_scratch {
    char none;
} pair_scratch;
#define pairs_take(...) ((void)0)
#define pairs_load_state(...) ((void)0)
#define pairs_scores(...) ((void)0)
#define pairs_forward(...) ((void)0)
#endif
