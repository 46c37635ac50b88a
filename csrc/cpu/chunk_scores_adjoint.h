/* The adjoint of a chunk's scores (chunk_backward.h), for each kind of decay: from their gradients to
 * those of q, k, x, the decays and the normaliser. */

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
