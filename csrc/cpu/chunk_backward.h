/* The chunk form's adjoint, in the solve form: the triangular system is solved once more with the
 * transposed matrix, and no inverse is formed.
 *
 * A unit walks its chunks backwards with dS, the gradient of the state each chunk leaves. The
 * states the chunks started from are computed again: one walk forward keeps a state for every
 * segment of chunks, then each segment is walked again before its chunks are. With M chunks in a
 * segment and n in all that is M + n/M states instead of n; M = max(16, sqrt n) keeps 16 states of
 * 128 x 128 floats in a 1 MiB L2 for as long as that also bounds the memory.
 *
 * Every unit's contribution to dq, dk, da and dbeta is a sum over its own columns. It goes to its
 * own slot of la_partials; gather adds the slots. */

LA_FN int64_t segment_length(int64_t chunks)
{
    int64_t m = 16;
    while (m * m < chunks) m++;
    return m;
}

typedef struct backward_scratch {
    chunk c;
    real *S, *dS, *T;    /* [K][width]; T: a state transposed, [width][kp] */
    real *states;        /* [M][K*width + kp]: chunk starts of a segment (state, then z) */
    real *checkpoints;   /* [segments][K*width + kp] */
    real *z, *dz, *lost; /* [kp] */
    real *U, *E, *X;     /* [C][width]: what was written, what was wrong, k^ S */
    real *dO;            /* [2C][width]: -dE, then (from row n) dO; one matrix for dS */
    real *dU;            /* [C][width]: dU, then dV */
    real *Ut;            /* [width][cp] */
    real *dP, *dL;       /* [C][cp] */
    real *d_hat;         /* [2C][kp]: dk^, then (from row n) dq^ */
    real *d_tilde;       /* [C][kp] */
    real *dq, *dk;       /* [C][kp] */
    real *da, *dbeta;    /* as a, beta */
    real *de;            /* TOKEN [1], KEY [kp]: of the chunk's whole decay */
    real *rows;          /* KEY: [C][kp], one key's decayed rows; TOKEN: [C][cp], dGamma */
    real *carried;       /* [kp] */
    real *d_den;         /* [C] */
} backward_scratch;

LA_FN void backward_take(backward_scratch *f, arena *m, const la_problem *p, int64_t C,
                         int64_t length, int64_t columns, const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K), cp = padded(C), width = padded(columns);
    const int64_t chunks = (length + C - 1) / C, M = segment_length(chunks);
    const int64_t kept = p->K * width + kp;
    chunk_take(&f->c, m, p, C, decay, rule);
    f->S = take(m, p->K * width);
    f->dS = take(m, p->K * width);
    f->T = take(m, width * kp);
    f->states = take(m, (M < chunks ? M : chunks) * kept);
    f->checkpoints = take(m, (chunks + M - 1) / M * kept);
    f->z = take(m, kp);
    f->dz = take(m, kp);
    f->lost = take(m, kp);
    f->U = take(m, C * width);
    f->E = take(m, C * width);
    f->X = take(m, C * width);
    f->dO = take(m, 2 * C * width);
    f->dU = take(m, C * width);
    f->Ut = take(m, width * cp);
    f->dP = take(m, 2 * C * cp); /* dL follows dP: one product fills both */
    f->dL = f->dP ? f->dP + C * cp : NULL;
    f->d_hat = take(m, 2 * C * kp);
    f->d_tilde = take(m, C * kp);
    f->da = take(m, decay == LA_TOKEN ? C : 0);
    f->dbeta = take(m, C);
    f->de = take(m, kp);
    f->rows = take(m, decay == LA_KEY ? C * kp : C * cp);
    f->carried = take(m, kp);
    f->d_den = take(m, C);
}

/* The chunk's writes again: U (and E) from V and the state it started from. */
LA_FN void solve_again(backward_scratch *f, const la_problem *p, const la_unit *u, int64_t t,
                       const real *S, int64_t width, const la_rule rule)
{
    chunk *c = &f->c;
    load_values(c, p, LA_V, u, t, u->v0, u->v1, f->U, width);
    if (rule == LA_ADDITIVE) return;
    panel s = {.width = width, .U = f->U, .X = f->X};
    product(c->n, width, p->K, c->hat, c->kp, 1, S, width, f->X, width, NULL, 0);
    panel_solve(c, &s, f->E);
}

/* One chunk forward without reading: f->S and f->z move on to the chunk's end. */
LA_FN void walk_chunk(backward_scratch *f, const la_problem *p, const la_unit *u, int64_t t,
                      int64_t n, int64_t width, const la_decay decay, const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t next = t + n, ahead = next + n < u->end ? n : u->end - next;
    chunk_load(c, p, u, t, n, decay, rule);
    prefetch_keys(p, u, next, ahead, decay);
    prefetch_rows(p, LA_V, u->b, next, ahead, u->hv, u->v0, u->v1 - u->v0);
    chunk_scores(c, p, decay, rule);
    solve_again(f, p, u, t, f->S, width, rule);
    panel s = {.width = width, .U = f->U, .X = f->X, .S = f->S};
    panel_carry(c, p, &s, decay);
    if (p->normaliser != LA_UNNORMALISED) add_keys(n, c->kp, c->k, f->z, f->lost);
}

/* The adjoint of panel_solve, from the last row up. dU holds the gradient of U from what read it
 * outside the chunk's own solve. dE_i = beta_i dU_i goes to V and, negated, to k^ S. */
LA_FN void solve_adjoint(backward_scratch *f, int64_t width)
{
    chunk *c = &f->c;
    const int64_t n = c->n;
#define UNSOLVE(NV, w) \
    for (int64_t j = n - 1; j >= 0; j--) { \
        lane sum[STRIP]; /* was E_i -= L_ij U_j; -dE_i is in dO's rows */ \
        weighted_sum(NV, n - 1 - j, c->L + (j + 1) * c->cp + j, c->cp, \
                     f->dO + (j + 1) * width + w, width, sum); \
        for (int x = 0; x < NV; x++) { \
            lane du = lanes_in(f->dU + j * width + w)[x] + sum[x]; \
            lanes_of(f->dU + j * width + w)[x] = du; \
            lanes_of(f->dO + j * width + w)[x] = -(c->beta[j] * du); \
        } \
    }
    FOR_EACH_STRIP(width, UNSOLVE);
#undef UNSOLVE
    for (int64_t i = 0; i < n; i++) {
        real *du = f->dU + i * width;
        f->dbeta[i] = dot(width, du, f->E + i * width); /* was U = beta E */
        scale_row(width, du, du, c->beta[i]);           /* dE = dV */
    }
}

/* The adjoint of read, solve and carry over this unit's columns: from dO and dS to dV, dP, dL,
 * dq^, dk^, dk~, the whole decay's de and the new dS. S: the state the chunk started from. */
LA_FN void columns_adjoint(backward_scratch *f, const la_problem *p, const real *S, int64_t width,
                           const la_decay decay, const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp, cp = c->cp, V = width;
    const bool delta = rule == LA_DELTA;
    real *dO = f->dO + (delta ? n * width : 0);

    /* Was S' = diag(e) S + k~' U and O = q^ S + P U. */
    product(n, width, p->K, c->tilde, kp, 1, f->dS, width, f->dU, width, NULL, 0);
#define UNREAD(NV, w) \
    for (int64_t j = 0; j < n; j++) { \
        lane sum[STRIP]; \
        weighted_sum(NV, n - j, c->P + j * cp + j, cp, dO + j * width + w, width, sum); \
        for (int x = 0; x < NV; x++) lanes_of(f->dU + j * width + w)[x] += sum[x]; \
    }
    FOR_EACH_STRIP(width, UNREAD);
#undef UNREAD
    transpose(n, V, f->U, width, f->Ut, cp);
    product(n, padded(n), V, dO, width, 1, f->Ut, cp, f->dP, cp, NULL, 0);
    transpose(p->K, V, f->dS, width, f->T, kp);
    product(n, kp, V, f->U, width, 1, f->T, kp, f->d_tilde, kp, NULL, 0);
    if (decay == LA_TOKEN) {
        wide sum = 0; /* K width terms in one number */
        for (int64_t i = 0; i < p->K; i++) sum += dot(width, S + i * width, f->dS + i * width);
        f->de[0] = (real)sum;
    }
    for (int64_t i = 0; decay == LA_KEY && i < p->K; i++)
        f->de[i] = dot(width, S + i * width, f->dS + i * width);

    if (delta) {
        solve_adjoint(f, width);
        /* Was E = V - k^ S - L U: dL = -strict(dE U'). */
        product(n, padded(n), V, f->dO, width, 1, f->Ut, cp, f->dL, cp, NULL, 0);
    }
    /* Was X = [k^; q^] S. */
    transpose(p->K, V, S, width, f->T, kp);
    product(delta ? 2 * n : n, kp, V, f->dO, width, 1, f->T, kp, f->d_hat, kp, NULL, 0);
    product(p->K, width, delta ? 2 * n : n, c->hat, 1, kp, f->dO, width, f->dS, width,
            whole_decay(c, decay), decay == LA_KEY);
}

/* The normaliser's share, before columns_adjoint's results are used. dO is the gradient of num by
 * now, so sum_v dO_v num_v = q_i . dq_i + sum_j P_ij dP_ij. */
LA_FN void denominators_adjoint(backward_scratch *f, const la_problem *p)
{
    chunk *c = &f->c;
    const int64_t kp = c->kp, cp = c->cp;
    for (int64_t i = 0; i < c->n; i++) {
        real sum = dot(kp, c->q + i * kp, f->d_hat + i * kp);
        for (int64_t j = 0; j <= i; j++) sum += c->P[i * cp + j] * f->dP[i * cp + j];
        f->d_den[i] = d_denominator(p, c->den[i], sum);
    }
    /* Was den_i = q_i z + sum_{j<=i} P_ij, and z' = z + sum_j k_j. */
    for (int64_t j = 0; j < c->n; j++) copy_row(kp, f->dk + j * kp, f->dz);
    for (int64_t i = 0; i < c->n; i++) {
        add_scaled(kp, f->d_hat + i * kp, f->d_den[i], f->z);
        for (int64_t j = 0; j <= i; j++) f->dP[i * cp + j] += f->d_den[i];
    }
    for (int64_t x = 0; x < kp; x += LANES) {
        lane sum;
        weighted_sum(1, c->n, f->d_den, 1, c->q + x, kp, &sum);
        lanes_of(f->dz + x)[0] += sum;
    }
}

/* The adjoint of scores_token. dq, dk are added to. */
LA_FN void scores_token_adjoint(backward_scratch *f, const la_decay decay, const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp, cp = c->cp;
    const bool delta = rule == LA_DELTA;
    real *dG = f->rows, *dq_hat = f->d_hat + (delta ? n * kp : 0);

    for (int64_t i = 0; i < n; i++) {
        real *dP = f->dP + i * cp, *dL = f->dL + i * cp, *dGi = dG + i * cp;
        const real *G = c->gamma + i * cp, *qk = c->qk + i * cp, *kk = c->kk + i * cp;
        for (int64_t j = i + 1; j < padded(n); j++) dP[j] = 0;
        for (int64_t j = i; delta && j < padded(n); j++) dL[j] = 0;
        if (decay == LA_NONE) continue;
        for (int64_t j = 0; j < i; j++) { /* was P = Gamma qk and L = Gamma kk */
            real d = dP[j] * qk[j];
            if (delta) d += dL[j] * kk[j];
            dGi[j] = d;
            dP[j] *= G[j];
            if (delta) dL[j] *= G[j];
        }
    }
    /* dP and dL are now the gradients of the bare products q_i . k_j and k_i . k_j. */
    product(n, kp, n, f->dP, cp, 1, c->k, kp, f->dq, kp, &one, 0);
    product(n, kp, n, f->dP, 1, cp, c->q, kp, f->dk, kp, &one, 0);
    if (delta) {
        product(n, kp, n, f->dL, cp, 1, c->k, kp, f->dk, kp, &one, 0);
        product(n, kp, n, f->dL, 1, cp, c->k, kp, f->dk, kp, &one, 0);
    }
    if (decay == LA_NONE) {
        for (int64_t i = 0; i < n; i++) {
            add_scaled(kp, f->dq + i * kp, 1, dq_hat + i * kp);
            if (delta) add_scaled(kp, f->dk + i * kp, 1, f->d_hat + i * kp);
            add_scaled(kp, f->dk + i * kp, 1, f->d_tilde + i * kp);
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) { /* was k~_j = r_j k_j, r the last row of Gamma */
        real r = c->gamma[(n - 1) * cp + i];
        if (i < n - 1) dG[(n - 1) * cp + i] += dot(kp, c->k + i * kp, f->d_tilde + i * kp);
        add_scaled(kp, f->dk + i * kp, r, f->d_tilde + i * kp);
    }
    wide de = f->de[0]; /* a running sum of all that the chunk's decays touch */
    /* was q^_i = e_i q_i, k^_i = e_i k_i, row i = a_i row i-1 */
    for (int64_t i = n - 1; i >= 0; i--) {
        wide d = 0;
        de += dot(kp, c->q + i * kp, dq_hat + i * kp);
        add_scaled(kp, f->dq + i * kp, c->e[i], dq_hat + i * kp);
        if (delta) {
            de += dot(kp, c->k + i * kp, f->d_hat + i * kp);
            add_scaled(kp, f->dk + i * kp, c->e[i], f->d_hat + i * kp);
        }
        for (int64_t j = 0; j < i; j++) {
            d += dG[i * cp + j] * c->gamma[(i - 1) * cp + j];
            if (j < i - 1) dG[(i - 1) * cp + j] += c->a[i] * dG[i * cp + j];
        }
        f->da[i] = (real)(d + de * (i ? c->e[i - 1] : 1));
        de *= c->a[i];
    }
}

/* The adjoint of scores_key: each key's row back up the chunk. */
LA_FN void scores_key_adjoint(backward_scratch *f, const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, kp = c->kp, cp = c->cp;
    const bool delta = rule == LA_DELTA;
    real *dq_hat = f->d_hat + (delta ? n * kp : 0), *row = f->rows, *carried = f->carried;

    /* Was q^_i = e_i q_i, k^_i = e_i k_i, e_i = a_i e_{i-1}; de: the gradient of e_i. */
    for (int64_t i = n - 1; i >= 0; i--)
        for (int64_t x = 0; x < kp; x += LANES) {
            lane e = lanes_in(c->e + i * kp + x)[0], a = lanes_in(c->a + i * kp + x)[0];
            lane dqh = lanes_in(dq_hat + i * kp + x)[0], de = lanes_in(f->de + x)[0];
            de += lanes_in(c->q + i * kp + x)[0] * dqh;
            lanes_of(f->dq + i * kp + x)[0] += e * dqh;
            if (delta) {
                lane dkh = lanes_in(f->d_hat + i * kp + x)[0];
                de += lanes_in(c->k + i * kp + x)[0] * dkh;
                lanes_of(f->dk + i * kp + x)[0] += e * dkh;
            }
            lanes_of(f->da + i * kp + x)[0] = i ? de * lanes_in(c->e + (i - 1) * kp + x)[0] : de;
            lanes_of(f->de + x)[0] = de * a;
        }
    /* Was row_j = k_j; row_i = a_i row_{i-1}; P_ij = q_i row_i; L_ij = k_i row_i; k~_j the last
     * row. */
    for (int64_t j = 0; j < n; j++) {
        copy_row(kp, row + j * kp, c->k + j * kp);
        for (int64_t i = j + 1; i < n; i++)
            multiply_row(kp, row + i * kp, row + (i - 1) * kp, c->a + i * kp);
        copy_row(kp, carried, f->d_tilde + j * kp);
        for (int64_t i = n - 1; i > j; i--) {
            const real dp = f->dP[i * cp + j], dl = delta ? f->dL[i * cp + j] : 0;
            for (int64_t x = 0; x < kp; x += LANES) {
                lane r = lanes_in(row + i * kp + x)[0], d = lanes_in(carried + x)[0];
                d += dp * lanes_in(c->q + i * kp + x)[0];
                lanes_of(f->dq + i * kp + x)[0] += dp * r;
                if (delta) {
                    d += dl * lanes_in(c->k + i * kp + x)[0];
                    lanes_of(f->dk + i * kp + x)[0] += dl * r;
                }
                lanes_of(f->da + i * kp + x)[0] += d * lanes_in(row + (i - 1) * kp + x)[0];
                lanes_of(carried + x)[0] = d * lanes_in(c->a + i * kp + x)[0];
            }
        }
        add_scaled(kp, carried, f->dP[j * cp + j], c->q + j * kp);
        add_scaled(kp, f->dq + j * kp, f->dP[j * cp + j], c->k + j * kp);
        add_scaled(kp, f->dk + j * kp, 1, carried);
    }
}

/* The slot of la_partials that belongs to this unit, at token t. */
LA_FN real *slot(const la_problem *p, const la_partials *sums, void *base, const la_unit *u,
                 int64_t t, int64_t row)
{
    int64_t which = u->hv * sums->panels + u->panel;
    return (real *)base + (which * sums->tokens + u->b * p->T + t) * row;
}

LA_FN real *z_slot(const la_problem *p, const la_partials *sums, const la_unit *u)
{
    return (real *)sums->dz0 + ((u->hv * sums->panels + u->panel) * p->N + u->n) * sums->kp;
}

LA_FN void chunk_backward(const la_problem *p, const la_unit *u, const la_partials *sums, int64_t C,
                          arena *m, const la_decay decay, const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    const int64_t length = u->end - u->begin, chunks = (length + C - 1) / C;
    const int64_t M = segment_length(chunks), width = padded(u->v1 - u->v0);
    backward_scratch f;
    backward_take(&f, m, p, C, length, u->v1 - u->v0, decay, rule);
    chunk *c = &f.c;
    const int64_t kp = c->kp, size = p->K * width, kept = size + kp;

    load_state(p, LA_S0, u, u->v0, u->v1, f.S, width);
    load_state(p, LA_DST, u, u->v0, u->v1, f.dS, width);
    load_z(p, LA_Z0, u, f.z);
    fill(kp, f.lost, 0);
    if (normalised && u->panel == 0)
        load_z(p, LA_DZT, u, f.dz);
    else
        fill(kp, f.dz, 0);

    for (int64_t i = 0; i < chunks; i++) {
        if (i % M == 0) {
            copy_row(size, f.checkpoints + i / M * kept, f.S);
            copy_row(kp, f.checkpoints + i / M * kept + size, f.z);
            if (i + M >= chunks) break; /* the last segment is walked below */
        }
        walk_chunk(&f, p, u, u->begin + i * C, C, width, decay, rule);
    }
    for (int64_t first = (chunks - 1) / M * M; first >= 0 && chunks; first -= M) {
        const int64_t last = first + M < chunks ? first + M : chunks;
        copy_row(size, f.S, f.checkpoints + first / M * kept);
        copy_row(kp, f.z, f.checkpoints + first / M * kept + size);
        fill(kp, f.lost, 0);
        for (int64_t i = first; i < last; i++) {
            copy_row(size, f.states + (i - first) * kept, f.S);
            copy_row(kp, f.states + (i - first) * kept + size, f.z);
            if (i + 1 < last) walk_chunk(&f, p, u, u->begin + i * C, C, width, decay, rule);
        }
        for (int64_t i = last - 1; i >= first; i--) {
            const int64_t t = u->begin + i * C, n = t + C < u->end ? C : u->end - t;
            const real *S = f.states + (i - first) * kept;
            chunk_load(c, p, u, t, n, decay, rule);
            if (i > 0) {
                prefetch_keys(p, u, t - C, C, decay);
                prefetch_rows(p, LA_V, u->b, t - C, C, u->hv, u->v0, u->v1 - u->v0);
                prefetch_rows(p, LA_DO, u->b, t - C, C, u->hv, u->v0, u->v1 - u->v0);
            }
            chunk_scores(c, p, decay, rule);
            solve_again(&f, p, u, t, S, width, rule);
            real *dO = f.dO + (rule == LA_DELTA ? n * width : 0);
            load_values(c, p, LA_DO, u, t, u->v0, u->v1, dO, width);
            if (normalised) {
                copy_row(kp, f.z, S + size);
                copy_row(kp, f.carried, f.z);
                fill(kp, f.lost, 0);
                chunk_denominators(c, f.carried, f.lost);
            }
            for (int64_t r = 0; r < n; r++) /* dO becomes the gradient of num: the same factor */
                finish_row(p, dO + r * width, width, normalised, c->den[r]);
            f.dq = slot(p, sums, sums->dq, u, t, kp);
            f.dk = slot(p, sums, sums->dk, u, t, kp);
            if (decay == LA_KEY) f.da = slot(p, sums, sums->da, u, t, kp);
            fill(n * kp, f.dq, 0);
            fill(n * kp, f.dk, 0);
            columns_adjoint(&f, p, S, width, decay, rule);
            if (normalised) denominators_adjoint(&f, p);
            if (decay == LA_KEY)
                scores_key_adjoint(&f, rule);
            else
                scores_token_adjoint(&f, decay, rule);

            for (int64_t r = 0; r < n; r++) {
                const la_array *dv = &p->array[LA_DV];
                if (decay == LA_TOKEN) slot(p, sums, sums->da, u, t, 1)[r] = f.da[r];
                if (rule == LA_DELTA) slot(p, sums, sums->dbeta, u, t, 1)[r] = f.dbeta[r];
                store_row(at_column(dv, u->b, t + r, u->hv, u->v0), dv->dtype, f.dU + r * width,
                          u->v1 - u->v0);
            }
        }
    }
    store_state(p, LA_DS0, u, u->v0, u->v1, f.dS, width);
    if (normalised) copy_row(kp, z_slot(p, sums, u), f.dz);
}
