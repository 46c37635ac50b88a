/* The chunk form's adjoint, in the solve form: the triangular system is solved once more with the
 * transposed matrix, and no inverse is formed.
 *
 * A unit goes through its chunks backwards with dS, the gradient of the state that each chunk
 * leaves. The values of the forward pass are recomputed. One pass keeps a state for every segment
 * of chunks. Then each segment is recomputed: for each of its chunks the state at its start and its
 * writes are kept, and its chunks are gone through backwards. With M chunks in a segment and n in
 * all, M + n/M states are kept instead of n. Up to 32 chunks are one segment, which spares the
 * first pass. Beyond that M = max(16, sqrt n): 16 states of 128 x 128 floats are 1 MiB, as large as
 * an L2.
 *
 * The contributions of every unit to dq, dk, da and dbeta are sums over its own columns. They go to
 * its own place in la_partials, and `reduce` adds these partial sums. A unit that is alone writes
 * its sums out itself. */

enum { ONE_SEGMENT = 32 };

LA_FN int64_t segment_length(int64_t chunks)
{
    int64_t m = 16;
    if (chunks <= ONE_SEGMENT) return chunks < 1 ? 1 : chunks;
    while (m * m < chunks) m++;
    return m;
}

/* The states that are kept at once, for so many chunks or fewer. */
LA_FN int64_t segment_room(int64_t chunks)
{
    const int64_t m = segment_length(chunks);
    return chunks > ONE_SEGMENT && m < ONE_SEGMENT ? ONE_SEGMENT : m;
}

/* A column of lanes of the rows that scores_key_adjoint reads and changes again and again. In the
 * rows these lanes lie kp reals apart: they share a few sets of the L1 cache, and displace one
 * another. Side by side they stay in it. */
typedef struct key_column {
    lane *q, *x, *a, *dq, *dx, *da; /* [n] */
    lane *row[2];                   /* [n]: k's row as it decays, DPLR: and y's */
    lane dbonus;
} key_column;

enum { COLUMNS = 8 }; /* the arrays of a key_column */

typedef struct backward_scratch {
    chunk c;
    real *S, *dS;         /* [K][width]; PAIR [2K][width] */
    real *kept;           /* [M]: of a segment's chunks: state and z at their start, U, E */
    real *checkpoints;    /* [segments]: state and z */
    real *z, *dz, *kahan; /* [kp] */
    real *owed, *d_owed;  /* [kp]: to S, to dS */
    real *U, *E;    /* [C][width], in `kept`: the chunk's writes, and the errors that they correct;
                  * DPLR: U is [2C][width], and has no E */
    real *rU;       /* TOKEN [C][width]: r U */
    real *dO;       /* [2C][width]: -dE (DPLR: -dW), then (from row n) dO; one matrix for dS */
    real *edO;      /* TOKEN [2C][width]: e times that */
    real *dU;       /* as U: dU, then dV */
    real *Ut, *dOt; /* [width][cp] (DPLR: two of them), [width][2C, padded]: U and dO transposed */
    real *across;   /* [K][2C, padded]: d_tilde and d_hat, transposed */
    real *dP, *dL;  /* as P and L */
    real *d_hat;    /* [2C][sp]: dx^, then (from row n) dq^ */
    real *d_tilde;  /* [C][sp]; DPLR [2C][kp] */
    real *dq, *dk;  /* [C][kp] */
    real *dx, *dy;  /* [C][kp]; dx is dk where x is not given */
    real *dbonus;   /* [kp]: of the chunk */
    real *all_bonus, *lost_bonus; /* [kp]: the sum of dbonus, and what it rounded off */
    real *da, *dbeta, *deta;      /* as a, beta and eta */
    real *xqt;     /* [sp][2C, padded]: x, then (from column n) q (or x^, q^), transposed */
    real *de;      /* TOKEN [1], KEY [kp]: of the chunk's decay; PAIR [3]: of e, f and m */
    real *rows;    /* KEY: a key_column; TOKEN: [C][cp], dGamma; PAIR: dG, dN */
    real *carried; /* [kp] */
    real *d_den;   /* [C] */
} backward_scratch;

/* The rows of a token that are kept: U and E, or V and W. */
LA_FN int64_t rows_kept(const la_rule rule) { return la_predicts(rule) ? 2 : 1; }

LA_FN void backward_take(backward_scratch *f, arena *m, const la_problem *p, int64_t C,
                         int64_t length, int64_t columns, const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K), cp = padded(C), width = padded(columns);
    const int64_t chunks = (length + C - 1) / C, M = segment_length(chunks);
    const int64_t written = rows_written(rule) * C;
    const int64_t K = state_rows(p), sp = padded(K);
    const size_t start = la_plus(la_times(K, width), kp);
    chunk_take(&f->c, m, p, C, true, decay, rule);
    f->S = arena_take(m, K, width);
    f->dS = arena_take(m, K, width);
    f->kept =
        arena_take(m, segment_room(chunks), la_plus(start, la_times(rows_kept(rule) * C, width)));
    f->checkpoints = arena_take(m, (chunks + M - 1) / M, start);
    f->z = arena_take(m, 1, kp);
    f->dz = arena_take(m, 1, kp);
    f->kahan = arena_take(m, 1, kp);
    f->owed = arena_take(m, 1, kp);
    f->d_owed = arena_take(m, 1, kp);
    f->rU = arena_take(m, decay == LA_TOKEN ? C : 0, width);
    f->dO = arena_take(m, 2 * C, width);
    f->edO = arena_take(m, decay == LA_TOKEN ? 2 * C : 0, width);
    f->dU = arena_take(m, written, width);
    f->Ut = arena_take(m, rows_written(rule) * width, cp);
    f->dOt = arena_take(m, width, padded(2 * C));
    f->across = arena_take(m, K, padded(2 * C));
    f->dP = arena_take(m, written, cp);
    f->dL = arena_take(m, written, cp);
    f->d_hat = arena_take(m, 2 * C, sp);
    f->d_tilde = arena_take(m, written, sp);
    f->dq = arena_take(m, C, kp);
    f->dk = arena_take(m, C, kp);
    f->dx = p->array[LA_X].given ? arena_take(m, C, kp) : f->dk;
    f->dy = arena_take(m, rule == LA_DPLR ? C : 0, kp);
    f->dbonus = arena_take(m, rule == LA_BONUS, kp);
    f->all_bonus = arena_take(m, rule == LA_BONUS, kp);
    f->lost_bonus = arena_take(m, rule == LA_BONUS, kp);
    f->da = arena_take(m, C, decay == LA_KEY ? kp : 1);
    f->xqt = arena_take(m, sp, padded(2 * C));
    f->deta = arena_take(m, decay == LA_PAIR, C);
    f->dbeta = arena_take(m, 1, C);
    f->de = arena_take(m, 1, kp);
    f->rows = arena_take(m,
                         decay == LA_KEY    ? COLUMNS * C
                         : decay == LA_PAIR ? 2 * C
                                            : C,
                         decay == LA_KEY ? LANES : cp);
    f->carried = arena_take(m, 1, kp);
    f->d_den = arena_take(m, 1, C);
}

/* The chunk's writes, recomputed: f->U (and f->E, unless it is NULL) from V and the state at the
 * chunk's start. */
LA_FN panel recompute_writes(backward_scratch *f, const la_problem *p, const la_unit *u, int64_t t,
                             real *S, int64_t width, const la_decay decay, const la_rule rule)
{
    panel s = {.v0 = u->v0, .v1 = u->v1, .width = width, .S = S};
    s.U = f->U;
    s.rU = f->rU;
    if (rule != LA_DELTA) {
        panel_write(&f->c, p, u, t, &s, decay);
        if (rule == LA_DPLR) panel_solve_two(&f->c, p, &s, NULL);
        return s;
    }
    const rows V = rows_of(p, LA_V, u, t, &s, s.U);
    if (V.at == s.U) load_values(&f->c, p, LA_V, u, t, s.v0, s.v1, s.U, width);
    panel_solve(&f->c, p, &s, V, f->E, NULL, decay);
    return s;
}

/* One chunk forward, without reading. S: the state at its start; `to`: the one at its end (NULL: it
 * is not wanted). f->z moves on to the chunk's end. */
LA_FN void recompute_chunk(backward_scratch *f, const la_problem *p, const la_unit *u, int64_t t,
                           int64_t n, real *S, real *to, int64_t width, const la_decay decay,
                           const la_rule rule)
{
    chunk *c = &f->c;
    static const la_name touched[] = {LA_V, LA_G, LA_K, LA_X, LA_Y};
    prefetch next = prefetch_of(p, u, t + n, n, touched, sizeof touched / sizeof *touched, 0);
    chunk_begin(c, p, u, t, n, false, decay, rule);
    settle_chunk_decay(c, p, f->owed, decay);
    panel s = recompute_writes(f, p, u, t, S, width, decay, rule);
    if (to) state_carry(c, NULL, p, &s, to, &next, decay);
    if (p->normaliser != LA_UNNORMALISED) add_keys(n, c->kp, c->k, f->z, f->kahan);
}

/* The last R rows before the last `done`, W lanes from column w. */
LA_FN void unsolve_block(const int R, const int W, int64_t done, int64_t w, backward_scratch *f,
                         int64_t width, const la_rule rule)
{
    const chunk *c = &f->c;
    const int64_t cp = c->cp, after = c->n - done, i = after - R;
    const real *L = c->L + (rule == LA_DPLR ? c->C * cp : 0);
    real *dU = f->dU + (rule == LA_DPLR ? c->n * width : 0);
    lane sum[TILE], minus[STRIP]; /* was E_i -= L_ij U_j; -dE_i is in dO's rows */

    tile_sum(R, W, (int)done, L + after * cp + i, 1, cp, f->dO + after * width + w, width, sum);
#pragma GCC unroll 8
    for (int y = R - 1; y >= 0; y--) {
        const int64_t at = (i + y) * width + w;
#pragma GCC unroll 8
        for (int x = 0; x < W; x++) {
            lane du = lanes_in(dU + at)[x] + sum[y * W + x];
            minus[x] = rule == LA_DPLR ? -du : -(c->beta[i + y] * du);
            lanes_of(dU + at)[x] = du;
            lanes_of(f->dO + at)[x] = minus[x];
        }
#pragma GCC unroll 8
        for (int z = 0; z < y; z++)
#pragma GCC unroll 8
            for (int x = 0; x < W; x++) sum[z * W + x] += L[(i + y) * cp + i + z] * minus[x];
    }
}

/* dV_j += sum_{i>j} L_ij (-dW_i), for R rows from j and W lanes from column w. */
LA_FN void unlook_block(const int R, const int W, int64_t j, int64_t w, const backward_scratch *f,
                        int64_t width)
{
    const chunk *c = &f->c;
    const int64_t cp = c->cp, after = j + R;
    const real *minus = f->dO + w;
    lane sum[TILE];

    tile_sum(R, W, (int)(c->n - after), c->L + after * cp + j, 1, cp, minus + after * width, width,
             sum);
#pragma GCC unroll 8
    for (int y = R - 1; y >= 0; y--)
#pragma GCC unroll 8
        for (int z = 0; z < y; z++)
#pragma GCC unroll 8
            for (int x = 0; x < W; x++)
                sum[z * W + x] += c->L[(j + y) * cp + j + z] * lanes_in(minus + (j + y) * width)[x];
#pragma GCC unroll 8
    for (int y = 0; y < R; y++)
#pragma GCC unroll 8
        for (int x = 0; x < W; x++) lanes_of(f->dU + (j + y) * width + w)[x] += sum[y * W + x];
}

/* The adjoint of panel_solve, from the last row up. dU holds the gradient of U from everything but
 * the chunk's own solve. dE_i = beta_i dU_i goes to V and, negated, to k S. */
LA_COLD void solve_adjoint(backward_scratch *f, const la_problem *p, int64_t width,
                           const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n;
    if (rule == LA_DPLR) { /* was W = -(x^ S + L U), where U is V and then W */
        for (int64_t i = 0, end; (end = stretch_end(p, i, n)) > i; i = end)
            FOR_EACH_BLOCK(i, end, width, unsolve_block, f, width, LA_DPLR);
        for (int64_t i = 0, end; (end = stretch_end(p, i, n)) > i; i = end)
            FOR_EACH_BLOCK(i, end, width, unlook_block, f, width);
        return;
    }
    for (int64_t i = 0, end; (end = stretch_end(p, i, n)) > i; i = end)
        FOR_EACH_BLOCK(i, end, width, unsolve_block, f, width, LA_DELTA);
    for (int64_t i = 0; i < n; i++) {
        real *du = f->dU + i * width;
        f->dbeta[i] = dot(width, du, f->E + i * width); /* was U = beta E */
        scale_row(width, du, du, c->beta[i]);           /* dE = dV */
    }
}

/* dU_j = r_j (k dS)_j + sum_{i>=j} P_ij dO_i, for R rows from j and W lanes from column w. */
LA_FN void unread_block(const int R, const int W, int64_t j, int64_t w, const chunk *c,
                        const real *P, const real *dO, real *dU, int64_t width,
                        const la_decay decay)
{
    const int64_t cp = c->cp, after = j + R;
    const real *r = c->gamma + (c->n - 1) * cp;
    lane sum[TILE];

    tile_sum(R, W, (int)(c->n - after), P + after * cp + j, 1, cp, dO + after * width + w, width,
             sum);
#pragma GCC unroll 8
    for (int y = R - 1; y >= 0; y--)
#pragma GCC unroll 8
        for (int z = 0; z <= y; z++)
#pragma GCC unroll 8
            for (int x = 0; x < W; x++)
                sum[z * W + x] += P[(j + y) * cp + j + z] * lanes_in(dO + (j + y) * width + w)[x];
#pragma GCC unroll 8
    for (int y = 0; y < R; y++) {
        const real end = decay == LA_TOKEN ? r[j + y] : 1;
        lane *du = lanes_of(dU + (j + y) * width + w);
#pragma GCC unroll 8
        for (int x = 0; x < W; x++) du[x] = end * du[x] + sum[y * W + x];
    }
}

/* Was O = P U, and S' = .. + (r k)' U: dU holds k dS, and becomes the gradient of U. P, dU: those of
 * one of a token's rows. */
LA_COLD void read_adjoint(const chunk *c, const la_problem *p, const real *P, const real *dO,
                          real *dU, int64_t width, const la_decay decay)
{
    for (int64_t j = 0, end; (end = stretch_end(p, j, c->n)) > j; j = end)
        FOR_EACH_BLOCK(j, end, width, unread_block, c, P, dO, dU, width, decay);
}

/* The adjoint of read, solve and carry over this unit's columns: from dO and dS to dV, dP, dL, dq^,
 * dx^, dk~ (and dy~), the new dS, and de, the gradient of the chunk's decay. S: the state at the chunk's
 * start. */
LA_FN void columns_adjoint(backward_scratch *f, const la_problem *p, const real *S, int64_t width,
                           prefetch *before, const la_decay decay, const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, sp = c->sp, cp = c->cp, V = width, half = p->K * width;
    const bool predicts = la_predicts(rule);
    real *dO = f->dO + (predicts ? n * width : 0);

    /* Was S' = diag(e) S + (r k)' U and O = e q S + P U. */
    product(rows_written(rule) * n, width, c->K, rows_carry(decay) ? c->tilde : c->k, sp, 1, f->dS,
            width, f->dU, width, NULL, 0);
    for (int64_t w = 0; w < rows_written(rule); w++) {
        const int64_t of_P = w * c->C * cp, of_U = w * n * width;
        real *const Ut = f->Ut + w * width * cp;
        read_adjoint(c, p, c->P + of_P, dO, f->dU + of_U, width, decay);
        transpose(n, V, f->U + of_U, width, Ut, cp);
        long_narrow_product(p, n, padded(n), V, dO, width, Ut, cp, f->dP + of_P, cp);
        if (stopped_between(p, n)) return;
        narrow_product(c->K, padded(n), V, f->dS, width, Ut, cp, f->across, cp);
        transpose(c->K, n, f->across, cp, f->d_tilde + w * n * sp, sp);
    }
    if (decay == LA_TOKEN) f->de[0] = (real)long_dot(half, S, f->dS);
    if (decay == LA_PAIR) long_dots_of_pair(half, S, f->dS, f->de); /* M' = e M + f Y, Y' = m Y */
    for (int64_t i = 0; decay == LA_KEY && i < p->K; i++)
        f->de[i] = dot(width, S + i * width, f->dS + i * width);

    if (predicts) {
        solve_adjoint(f, p, width, rule);
        /* Was E = V - x^ S - L U: dL = -strict(dE U'). */
        for (int64_t w = 0; w < rows_written(rule); w++)
            long_narrow_product(p, n, padded(n), V, f->dO, width, f->Ut + w * width * cp, cp,
                                f->dL + w * c->C * cp, cp);
    }
    if (stopped_between(p, n)) return;
    /* Was [x; q] S, its rows scaled by e: d_hat is of the scaled rows. */
    const int64_t rows = rows_looking(rule) * n, ldt = padded(rows);
    transpose(rows, V, f->dO, width, f->dOt, ldt);
    if (ldt == LANES)
        narrow_product(c->K, ldt, V, S, width, f->dOt, ldt, f->across, ldt);
    else
        product(c->K, ldt, V, S, width, 1, f->dOt, ldt, f->across, ldt, NULL, 0);
    transpose(c->K, rows, f->across, ldt, f->d_hat, sp);
    if (stopped_between(p, n)) return;
    for (int64_t i = 0; decay == LA_TOKEN && i < rows; i++)
        scale_row(width, f->edO + i * width, f->dO + i * width,
                  i < rows - n ? c->scale_kS[i] : c->scale_qS[i - (rows - n)]);
    transpose(rows, c->K, (rows_carry(decay) ? c->hat : c->x) + (2 * n - rows) * sp, sp, f->xqt,
              ldt);
    if (decay == LA_PAIR) {
        carry_pair_adjoint(c, rows, f->xqt, ldt, f->dO, f->dS, width, before);
        return;
    }
    product_and_prefetch(c->K, width, rows, f->xqt, ldt, 1, decay == LA_TOKEN ? f->edO : f->dO,
                         width, f->dS, width, f->dS, chunk_decay(c, decay), decay == LA_KEY,
                         before);
}

/* The normaliser's share. It must come before the results of columns_adjoint are used. dO is the
 * gradient of num by now, so sum_v dO_v num_v = q_i . dq_i + sum_j P_ij dP_ij. */
LA_FN void denominators_adjoint(backward_scratch *f, const la_problem *p)
{
    chunk *c = &f->c;
    const int64_t kp = c->kp, cp = c->cp;
    for (int64_t i = 0; i < c->n && !stopped_after(p, i); i++) {
        real sum = dot(kp, c->q + i * kp, f->d_hat + i * kp);
        for (int64_t j = 0; j <= i; j++) sum += c->P[i * cp + j] * f->dP[i * cp + j];
        f->d_den[i] = d_denominator(p, c->den[i] * (real)p->scale, sum);
    }
    /* Was den_i = q_i z + sum_{j<=i} P_ij, and z' = z + sum_j k_j. */
    for (int64_t j = 0; j < c->n; j++) copy_row(kp, f->dk + j * kp, f->dz);
    for (int64_t i = 0; i < c->n && !stopped_after(p, i); i++) {
        add_scaled(kp, f->d_hat + i * kp, f->d_den[i], f->z);
        for (int64_t j = 0; j <= i; j++) f->dP[i * cp + j] += f->d_den[i];
    }
    for (int64_t x = 0; x < kp; x += LANES) {
        lane sum;
        tile_sum(1, 1, (int)c->n, f->d_den, 0, 1, c->q + x, kp, &sum);
        lanes_of(f->dz + x)[0] += sum;
    }
}

/* The adjoint of scores_token. dq is written. dk is written too, or added to if there is a
 * normaliser. dx is written, but added to if it is dk. */
LA_FN void scores_token_adjoint(backward_scratch *f, const la_problem *p, bool normalised,
                                const la_decay decay, const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp, cp = c->cp;
    const bool delta = rule == LA_DELTA;
    const int64_t back = p->predicts_before; /* L's row i has Gamma's row i, or i-1 */
    real *dG = f->rows, *dq_hat = f->d_hat + (delta ? n * kp : 0);

    for (int64_t i = 0; i < n && !stopped_after(p, i); i++) {
        real *dP = f->dP + i * cp, *dL = f->dL + i * cp, *dGi = dG + i * cp;
        const real *G = c->gamma + i * cp, *qk = c->qk + i * cp, *kk = c->kk + i * cp;
        for (int64_t j = i + 1; j < padded(n); j++) dP[j] = 0;
        for (int64_t j = i; delta && j < padded(n); j++) dL[j] = 0;
        if (decay == LA_NONE) continue;
        for (int64_t j = 0; j < i; j++) { /* was P = Gamma qk and L = Gamma kk */
            real d = dP[j] * qk[j];
            if (delta && !back) d += dL[j] * kk[j];
            if (back && j < i - 1) dGi[j - cp] += dL[j] * kk[j];
            dGi[j] = d;
            dP[j] *= G[j];
            if (delta) dL[j] *= G[j - back * cp];
        }
    }
    /* dP and dL are now the gradients of the bare products q_i . k_j and x_i . k_j. */
    long_product(p, n, kp, n, f->dP, cp, 1, c->k, kp, f->dq, kp, NULL);
    long_product(p, n, kp, n, f->dP, 1, cp, c->q, kp, f->dk, kp, normalised ? &one : NULL);
    if (delta) {
        const real *keep = f->dx == f->dk ? &one : NULL;
        long_product(p, n, kp, n, f->dL, cp, 1, c->k, kp, f->dx, kp, keep);
        long_product(p, n, kp, n, f->dL, 1, cp, c->x, kp, f->dk, kp, &one);
    }
    if (decay == LA_NONE) {
        for (int64_t i = 0; i < n; i++) {
            add_scaled(kp, f->dq + i * kp, 1, dq_hat + i * kp);
            if (delta) add_scaled(kp, f->dx + i * kp, 1, f->d_hat + i * kp);
            add_scaled(kp, f->dk + i * kp, 1, f->d_tilde + i * kp);
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) { /* was k~_j = r_j k_j, r the last row of Gamma */
        real r = c->gamma[(n - 1) * cp + i];
        if (i < n - 1) dG[(n - 1) * cp + i] += dot(kp, c->k + i * kp, f->d_tilde + i * kp);
        add_scaled(kp, f->dk + i * kp, r, f->d_tilde + i * kp);
    }
    real2 de = f->de[0]; /* a running sum over all that the chunk's decays scale */
    /* was q^_i = e_i q_i, x^_i = e_i x_i, row i = a_i row i-1 */
    for (int64_t i = n - 1; i >= 0 && !stopped_after(p, n - 1 - i); i--) {
        real2 d = 0;
        de += dot(kp, c->q + i * kp, dq_hat + i * kp);
        add_scaled(kp, f->dq + i * kp, c->e[i], dq_hat + i * kp);
        if (delta) {
            if (!back) de += dot(kp, c->x + i * kp, f->d_hat + i * kp);
            add_scaled(kp, f->dx + i * kp, c->scale_kS[i], f->d_hat + i * kp);
        }
        for (int64_t j = 0; j < i; j++) {
            d += dG[i * cp + j] * c->gamma[(i - 1) * cp + j];
            if (j < i - 1) dG[(i - 1) * cp + j] += c->a[i] * dG[i * cp + j];
        }
        f->da[i] = (real)(d + de * (i ? c->e[i - 1] : 1));
        de *= c->a[i];
        if (back && i) de += dot(kp, c->x + i * kp, f->d_hat + i * kp);
    }
}

LA_FN key_column key_column_at(const backward_scratch *f)
{
    lane *at = (lane *)f->rows;
    const int64_t C = f->c.C;
    return (key_column){.q = at,
                        .x = at + C,
                        .a = at + 2 * C,
                        .dq = at + 3 * C,
                        .dx = at + 4 * C,
                        .da = at + 5 * C,
                        .row = {at + 6 * C, at + 7 * C}};
}

/* Was q^_i = e_i q_i and x^_i = e_i x_i, with e_{i-1} for a rule that looks before the decay, and
 * e_i = a_i e_{i-1}. f->de: the gradient of the last e. dq, dx and da are written. */
LA_FN void hats_adjoint(const backward_scratch *f, key_column *col, int64_t at, const la_rule rule)
{
    const chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp;
    const bool predicts = la_predicts(rule), delta = rule == LA_DELTA;
    const real *dx_hat = f->d_hat, *dq_hat = f->d_hat + (predicts ? n * kp : 0);
    const lane zero = {0};
    lane de = lanes_in(f->de + at)[0];
    for (int64_t i = n - 1; i >= 0; i--) {
        const int64_t x = i * kp + at;
        const lane e = lanes_in(c->e + x)[0], before = i ? lanes_in(c->e + x - kp)[0] : 1 + zero;
        const lane dqh = lanes_in(dq_hat + x)[0], q = lanes_in(c->q + x)[0];
        const lane dxh = predicts ? lanes_in(dx_hat + x)[0] : zero, of_x = lanes_in(c->x + x)[0];
        const lane a = lanes_in(c->a + x)[0];
        if (la_reads_after(rule)) de += q * dqh;
        if (delta) de += of_x * dxh;
        col->da[i] = i ? de * before : de;
        de *= a;
        if (!la_reads_after(rule)) de += q * dqh;
        if (predicts && !delta) de += of_x * dxh;
        col->dq[i] = (la_reads_after(rule) ? e : before) * dqh;
        if (predicts) col->dx[i] = (delta ? e : before) * dxh;
        col->q[i] = q;
        col->x[i] = of_x;
        col->a[i] = a;
    }
}

/* P_jj = q_j . (bonus * k_j), whose gradient is d: to dq, dk and dbonus. */
LA_FN void own_read_adjoint(const chunk *c, key_column *col, int64_t j, int64_t at, real d, lane k,
                            lane *dk)
{
    const lane q = col->q[j], bonus = lanes_in(c->bonus + at)[0];
    col->dq[j] += d * (bonus * k);
    *dk += d * (bonus * q);
    col->dbonus += d * (q * k);
}

/* A row on its way back up the chunk, in a column of lanes. */
typedef struct row_adjoint {
    lane d, after;       /* the gradient of the row at token i, and the row there */
    lane *row;           /* the row at every token */
    const real *dP, *dL; /* [n], cp apart: the gradients of its scores */
} row_adjoint;

/* From token i to the one before, R rows at once. Was row_i = a_i row_{i-1}; P_ij = q_i row_i;
 * L_ij = x_i row_i. A rule that looks before the decay takes row_{i-1}. */
LA_FN void rows_back(const int R, key_column *col, row_adjoint *rows, int64_t i, int64_t cp,
                     const la_rule rule)
{
    const bool predicts = la_predicts(rule), delta = rule == LA_DELTA;
    const lane q = col->q[i], x = col->x[i], a = col->a[i];
    lane dq = col->dq[i], dx = col->dx[i], da = col->da[i];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        const real dp = rows[r].dP[i * cp], dl = predicts ? rows[r].dL[i * cp] : 0;
        const lane before = rows[r].row[i - 1], after = rows[r].after;
        lane d = rows[r].d;
        if (delta) d += dp * q + dl * x; /* the sum first: d waits for one addition */
        if (!delta && la_reads_after(rule)) d += dp * q;
        da += d * before;
        d *= a;
        if (!la_reads_after(rule)) d += dp * q;
        if (predicts && !delta) d += dl * x;
        dq += dp * (la_reads_after(rule) ? after : before);
        if (predicts) dx += dl * (delta ? after : before);
        rows[r].d = d;
        rows[r].after = before;
    }
    col->dq[i] = dq;
    if (predicts) col->dx[i] = dx;
    col->da[i] = da;
}

/* T tokens from j on, in a column of lanes. Was row_j = k_j, and k~_j the last row; the same for y.
 * Two rows go together, of two tokens or of one: a row alone would wait for its own sums. The sums
 * of each of a token's two rows would also cancel in dq and dx. */
LA_FN void tokens_adjoint(const int T, backward_scratch *f, key_column *col, int64_t j, int64_t at,
                          const la_rule rule)
{
    const chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp, cp = c->cp;
    const int W = (int)rows_written(rule), R = T * W;
    real *const dk[] = {f->dk, f->dy};
    row_adjoint rows[2];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
        const int64_t first = j + r / W, w = r % W, x = (w * n + first) * kp + at;
        rows[r].row = col->row[r];
        rows[r].after = lanes_in(c->k + x)[0];
        rows[r].d = lanes_in(f->d_tilde + x)[0];
        rows[r].dP = f->dP + w * c->C * cp + first;
        rows[r].dL = f->dL + w * c->C * cp + first;
        rows[r].row[first] = rows[r].after;
    }
    if (T == 2) rows[0].row[j + 1] = rows[0].after = rows[0].after * col->a[j + 1];
    for (int64_t i = j + T; i < n; i++)
#pragma GCC unroll 2
        for (int r = 0; r < R; r++) rows[r].row[i] = rows[r].after = rows[r].after * col->a[i];

    for (int64_t i = n - 1; i >= j + T; i--) rows_back(R, col, rows, i, cp, rule);
#pragma GCC unroll 2
    for (int r = R - 1; r >= 0; r--) {
        const int64_t i = j + r / W;
        const real dp = rows[r].dP[i * cp];
        lane *const to = lanes_of(dk[r % W] + i * kp + at);
        *to = rows[r].d;
        if (rule == LA_BONUS) {
            own_read_adjoint(c, col, i, at, dp, rows[r].after, to);
        } else {
            *to += dp * col->q[i];
            col->dq[i] += dp * rows[r].after;
        }
        if (T == 2 && r == 1) rows_back(1, col, rows, i, cp, rule);
    }
}

/* The adjoint of scores_key: dq, dk, dx, dy and da are written. Each row that was written is
 * carried back up the chunk, a column of lanes at a time. */
LA_FN void scores_key_adjoint(backward_scratch *f, const la_problem *p, const la_rule rule)
{
    const int64_t n = f->c.n, kp = f->c.kp;
    const bool own_x = f->dx != f->dk;
    const int T = rows_written(rule) == 1 ? 2 : 1; /* the tokens that are gone through at once */
    key_column col = key_column_at(f);

    for (int64_t at = 0; at < kp && !stopped_between(p, n); at += LANES) {
        hats_adjoint(f, &col, at, rule);
        col.dbonus = (lane){0};
        int64_t j = 0;
        for (; T == 2 && j + 2 <= n && !stopped_after_keys(p, j + 1, n); j += 2)
            tokens_adjoint(2, f, &col, j, at, rule);
        for (; j < n && !stopped_after_keys(p, j, n); j++) tokens_adjoint(1, f, &col, j, at, rule);
        for (int64_t i = 0; i < n; i++) {
            lanes_of(f->dq + i * kp + at)[0] = col.dq[i];
            lanes_of(f->da + i * kp + at)[0] = col.da[i];
            if (own_x) lanes_of(f->dx + i * kp + at)[0] = col.dx[i];
            if (la_predicts(rule) && !own_x) lanes_of(f->dk + i * kp + at)[0] += col.dx[i];
        }
        if (rule == LA_BONUS) lanes_of(f->dbonus + at)[0] = col.dbonus;
    }
    if (rule == LA_BONUS) add_keys(1, kp, f->dbonus, f->all_bonus, f->lost_bonus);
}

/* x . y, for rows that may not be whole lanes. */
LA_FN real dot_of_half(int64_t K, const real *x, const real *y)
{
    real sum = 0;
    if (K % LANES == 0) return dot(K, x, y);
    for (int64_t i = 0; i < K; i++) sum += x[i] * y[i];
    return sum;
}

/* to += a [x_0 .. x_K) + b [x_K .. x_2K) */
LA_FN void add_halves(int64_t K, real *to, const real *x, real a, real b)
{
    for (int64_t i = 0; i < K; i++) to[i] += a * x[i] + b * x[K + i];
}

/* The adjoint of pair_scores and of the bare products. dq and dk are written. */
LA_FN void scores_pair_adjoint(backward_scratch *f, const la_problem *p)
{
    chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp, cp = c->cp, sp = c->sp, K = p->K, last = n - 1;
    real *dG = f->rows, *dN = f->rows + c->C * cp;
    const real *dx_hat = f->d_hat, *dq_hat = f->d_hat + n * sp;

    fill(n * cp, dG, 0);
    fill(n * cp, dN, 0);
    for (int64_t i = 0; i < n && !stopped_after(p, i); i++) {
        real *dP = f->dP + i * cp, *dL = f->dL + i * cp, *dGi = dG + i * cp;
        const int64_t seen = batch_begin(p, i);
        const real *G = c->gamma + i * cp, *before = c->gamma + (seen - 1) * cp;
        const real *qk = c->qk + i * cp, *kk = c->kk + i * cp;
        for (int64_t j = i + 1; j < padded(n); j++) dP[j] = 0;
        for (int64_t j = seen; j < padded(n); j++) dL[j] = 0;
        for (int64_t j = 0; j < i; j++) { /* was P = G qk; G_jj is 1 */
            dGi[j] += dP[j] * qk[j];
            dP[j] *= G[j];
        }
        for (int64_t j = 0; j < seen; j++) { /* was L_i = G_{seen - 1} kk */
            if (j < seen - 1) dG[(seen - 1) * cp + j] += dL[j] * kk[j];
            dL[j] *= before[j];
            f->dL[j * cp + i] = dL[j]; /* kk_ij is kk_ji */
        }
    }
    long_product(p, n, kp, n, f->dP, cp, 1, c->k, kp, f->dq, kp, NULL);
    long_product(p, n, kp, n, f->dP, 1, cp, c->q, kp, f->dk, kp, NULL);
    long_product(p, n, kp, n, f->dL, cp, 1, c->k, kp, f->dk, kp, &one);
    for (int64_t i = 0; i < n;
         i++) { /* was k~_i = [G_ni k_i, N_ni k_i], of which the last is k, k */
        const real *k = c->k + i * kp, *dkt = f->d_tilde + i * sp;
        const real G = c->gamma[last * cp + i], N = c->N[last * cp + i];
        if (i < last) dG[last * cp + i] += dot_of_half(K, k, dkt);
        if (i < last) dN[last * cp + i] += dot_of_half(K, k, dkt + K);
        add_halves(K, f->dk + i * kp, dkt, G, N);
    }
    real2 de = f->de[0], df = f->de[1], dm = f->de[2]; /* of e_i, f_i and m_i */
    real2 de_seen = 0, df_seen = 0;                    /* of those that i's batch has seen */
    for (int64_t i = last; i >= 0 && !stopped_after(p, last - i); i--) {
        const real *q = c->q + i * kp, *k = c->k + i * kp;
        const real *dqh = dq_hat + i * sp, *dxh = dx_hat + i * sp;
        const real e = i ? c->e[i - 1] : 1, of_Y = i ? c->f[i - 1] : 0, m = i ? c->m[i - 1] : 1;
        real2 da = 0, deta = 0;
        de += dot_of_half(K, q, dqh); /* was q^_i = [e_i q_i, f_i q_i] */
        df += dot_of_half(K, q, dqh + K);
        add_halves(K, f->dq + i * kp, dqh, c->e[i], c->f[i]);
        dm += df; /* was f_i = a_i f_{i-1} + m_i, and G_ij = a_i G_{i-1,j} + N_ij */
        for (int64_t j = 0; j < i; j++) {
            const int64_t ij = i * cp + j, before = ij - cp;
            dN[ij] += dG[ij];
            da += dG[ij] * c->gamma[before];
            deta += dN[ij] * c->N[before];
            if (j == i - 1) continue; /* G_jj and N_jj are 1 */
            dG[before] += c->a[i] * dG[ij];
            dN[before] += c->eta[i] * dN[ij];
        }
        f->da[i] = (real)(da + de * e + df * of_Y);
        f->deta[i] = (real)(deta + dm * m);
        de *= c->a[i];
        df *= c->a[i];
        dm *= c->eta[i];
        const int64_t seen = batch_begin(p, i); /* was x^_i = [e_{seen-1} k_i, f_{seen-1} k_i] */
        add_halves(K, f->dk + i * kp, dxh, seen ? c->e[seen - 1] : 1, seen ? c->f[seen - 1] : 0);
        if (seen) de_seen += dot_of_half(K, k, dxh);
        if (seen) df_seen += dot_of_half(K, k, dxh + K);
        if (i > seen) continue;
        de += de_seen;
        df += df_seen;
        de_seen = df_seen = 0;
    }
}

/* This unit's partial sums in one of the arrays of la_partials, at token t. */
LA_FN real *partial_at(const la_partials *sums, void *base, const la_unit *u, int64_t t,
                       int64_t row)
{
    int64_t which = u->hv * sums->panels + u->panel;
    return (real *)base + (which * sums->tokens + u->b * sums->row + t) * row;
}

LA_FN real *partial_bonus_at(const la_problem *p, const la_partials *sums, const la_unit *u)
{
    return (real *)sums->dbonus + ((u->hv * sums->panels + u->panel) * p->N + u->n) * sums->kp;
}

LA_FN real *partial_z_at(const la_problem *p, const la_partials *sums, const la_unit *u)
{
    return (real *)sums->dz0 + ((u->hv * sums->panels + u->panel) * p->N + u->n) * sums->kp;
}

/* The gradients that columns_adjoint and the scores' adjoint left, to the user's arrays or to the
 * unit's partial sums. */
LA_FN void store_gradients(backward_scratch *f, const la_problem *p, const la_unit *u,
                           const la_partials *sums, int64_t t, int64_t width, const la_decay decay,
                           const la_rule rule)
{
    const chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp, gate = decay == LA_KEY ? kp : 1;
    const la_array *dbeta = &p->array[LA_DBETA], *deta = &p->array[LA_DETA];

    const bool own_x = f->dx != f->dk;
    store_values(c, p, LA_DV, u, t, u->v0, u->v1, f->dU, width);
    if (!sums->alone) {
        copy_row(n * kp, partial_at(sums, sums->dq, u, t, kp), f->dq);
        copy_row(n * kp, partial_at(sums, sums->dk, u, t, kp), f->dk);
        if (own_x) copy_row(n * kp, partial_at(sums, sums->dx, u, t, kp), f->dx);
        if (rule == LA_DPLR) copy_row(n * kp, partial_at(sums, sums->dy, u, t, kp), f->dy);
    }
    for (int64_t i = 0; i < n; i++) {
        real *da = f->da + i * gate;
        if (sums->alone) {
            store_key_gradient(p, LA_Q, u->b, t + i, u->h, f->dq + i * kp, f->carried);
            store_key_gradient(p, LA_K, u->b, t + i, u->h, f->dk + i * kp, f->carried);
            if (own_x) store_plain_row(p, LA_DX, u->b, t + i, u->h, f->dx + i * kp);
            if (rule == LA_DPLR) store_plain_row(p, LA_DY, u->b, t + i, u->h, f->dy + i * kp);
            if (rule == LA_DELTA)
                store_element(at(dbeta, u->b, t + i, u->hv), dbeta->dtype, f->dbeta[i]);
            if (deta->given) store_element(at(deta, u->b, t + i, u->hv), deta->dtype, f->deta[i]);
        } else if (rule == LA_DELTA) {
            partial_at(sums, sums->dbeta, u, t, 1)[i] = f->dbeta[i];
            if (decay == LA_PAIR) partial_at(sums, sums->deta, u, t, 1)[i] = f->deta[i];
        }
        if (decay != LA_NONE && sums->alone && p->decay != LA_HEAD)
            store_gate_gradient(p, u, t + i, da, f->carried, decay);
        else if (decay != LA_NONE)
            for (int64_t x = 0; x < gate; x++)
                partial_at(sums, sums->da, u, t + i, gate)[x] = da[x];
    }
}

LA_FN void chunks_backward(const la_problem *p, const la_unit *u, const la_partials *sums,
                           int64_t C, arena *m, const la_decay decay, const la_rule rule)
{
    static const la_name touched[] = {LA_DV, LA_DO, LA_V,  LA_G,  LA_Q,  LA_K, LA_X,
                                      LA_Y,  LA_DQ, LA_DK, LA_DX, LA_DY, LA_DG};
    enum { TOUCHED = sizeof touched / sizeof *touched, SHARED = 5 }; /* the last only if alone */
    const bool normalised = is_normalised(p, decay, rule);
    const int64_t length = u->end - u->begin, chunks = (length + C - 1) / C;
    const int64_t M = segment_length(chunks), width = padded(u->v1 - u->v0);
    backward_scratch f;
    backward_take(&f, m, p, C, length, u->v1 - u->v0, decay, rule);
    chunk *c = &f.c;
    const int64_t kp = c->kp, one_state = p->K * width, size = c->K * width, start = size + kp;
    const int64_t written = C * width;
    const int64_t each = start + rows_kept(rule) * written;

    load_state(p, LA_S0, u, u->v0, u->v1, f.S, width);
    load_state(p, LA_DST, u, u->v0, u->v1, f.dS, width);
    if (decay == LA_PAIR) load_state(p, LA_Y0, u, u->v0, u->v1, f.S + one_state, width);
    if (decay == LA_PAIR) load_state(p, LA_DYT, u, u->v0, u->v1, f.dS + one_state, width);
    load_z(p, LA_Z0, u, f.z);
    fill(kp, f.kahan, 0);
    if (normalised && u->panel == 0)
        load_z(p, LA_DZT, u, f.dz);
    else
        fill(kp, f.dz, 0);

    if (rule == LA_BONUS) fill(kp, f.all_bonus, 0);
    if (rule == LA_BONUS) fill(kp, f.lost_bonus, 0);
    fill(kp, f.owed, 0);
    fill(kp, f.d_owed, 0);
    f.U = f.kept; /* this pass does not keep it */
    f.E = NULL;
    for (int64_t i = 0; i < chunks; i++) {
        if (la_stopped(p)) return;
        if (i % M == 0) {
            copy_row(size, f.checkpoints + i / M * start, f.S);
            copy_row(kp, f.checkpoints + i / M * start + size, f.z);
            if (i + M >= chunks) break; /* the last segment comes below */
        }
        recompute_chunk(&f, p, u, u->begin + i * C, C, f.S, f.S, width, decay, rule);
    }
    for (int64_t first = (chunks - 1) / M * M; first >= 0 && chunks; first -= M) {
        const int64_t last = first + M < chunks ? first + M : chunks;
        copy_row(size, f.kept, f.checkpoints + first / M * start);
        copy_row(kp, f.z, f.checkpoints + first / M * start + size);
        fill(kp, f.kahan, 0);
        fill(kp, f.owed, 0);
        for (int64_t i = first; i < last; i++) {
            if (la_stopped(p)) return;
            const int64_t t = u->begin + i * C, n = t + C < u->end ? C : u->end - t;
            real *S = f.kept + (i - first) * each;
            f.U = S + start;
            f.E = f.U + written;
            copy_row(kp, S + size, f.z);
            recompute_chunk(&f, p, u, t, n, S, i + 1 < last ? S + each : NULL, width, decay, rule);
        }
        for (int64_t i = last - 1; i >= first; i--) {
            if (la_stopped(p)) return;
            const int64_t t = u->begin + i * C, n = t + C < u->end ? C : u->end - t;
            const real *S = f.kept + (i - first) * each;
            f.U = f.kept + (i - first) * each + start;
            f.E = f.U + written;
            chunk_begin(c, p, u, t, n, true, decay, rule);
            prefetch before =
                prefetch_of(p, u, t - C, C, touched, sums->alone ? TOUCHED : TOUCHED - SHARED, 0);
            settle_chunk_decay(c, p, f.d_owed, decay);
            real *dO = f.dO + (la_predicts(rule) ? n * width : 0);
            load_values(c, p, LA_DO, u, t, u->v0, u->v1, dO, width);
            if (normalised) {
                copy_row(kp, f.z, S + size);
                copy_row(kp, f.carried, f.z);
                fill(kp, f.kahan, 0);
                chunk_denominators(c, p, f.carried, f.kahan);
            }
            for (int64_t r = 0; r < n; r++) /* dO becomes the gradient of num: the same factor */
                finish_row(p, dO + r * width, width, normalised, c->den[r]);
            columns_adjoint(&f, p, S, width, &before, decay, rule);
            if (stopped_between(p, n)) return;
            if (normalised) denominators_adjoint(&f, p);
            if (decay == LA_PAIR)
                scores_pair_adjoint(&f, p);
            else if (decay == LA_KEY)
                scores_key_adjoint(&f, p, rule);
            else
                scores_token_adjoint(&f, p, normalised, decay, rule);

            store_gradients(&f, p, u, sums, t, width, decay, rule);
        }
    }
    store_state(p, LA_DS0, u, u->v0, u->v1, f.dS, width);
    if (decay == LA_PAIR) store_state(p, LA_DY0, u, u->v0, u->v1, f.dS + one_state, width);
    if (normalised) copy_row(kp, partial_z_at(p, sums, u), f.dz);
    if (rule == LA_BONUS) copy_row(kp, partial_bonus_at(p, sums, u), f.all_bonus);
}
