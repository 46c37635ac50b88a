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
        for (int64_t i = 0, end; !p->states_only && (end = stretch_end(p, i, n)) > i; i = end)
            FOR_EACH_BLOCK(i, end, width, unlook_block, f, width);
        return;
    }
    for (int64_t i = 0, end; (end = stretch_end(p, i, n)) > i; i = end)
        FOR_EACH_BLOCK(i, end, width, unsolve_block, f, width, LA_DELTA);
    for (int64_t i = 0; i < n && !p->states_only; i++) {
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

/* Was S' = diag(e) S + (r k)' U and O = e q S + P U: from dO and dS to dU, the gradient of U from
 * everything but the chunk's own solve. */
LA_FN void writes_adjoint(backward_scratch *f, const la_problem *p, const real *dO, int64_t width,
                          const la_decay decay, const la_rule rule)
{
    const chunk *c = &f->c;
    const int64_t n = c->n;
    product(rows_written(rule) * n, width, c->K, rows_carry(decay) ? c->tilde : c->k, c->sp, 1,
            f->dS, width, f->dU, width, NULL, 0);
    for (int64_t w = 0; w < rows_written(rule); w++)
        read_adjoint(c, p, c->P + w * c->C * c->cp, dO, f->dU + w * n * width, width, decay);
}

/* From dO, dU and S to dP, dk~ (and dy~), and de, the gradient of the chunk's decay. */
LA_FN void scores_from_columns(backward_scratch *f, const la_problem *p, const real *S,
                               const real *dO, int64_t width, const la_decay decay,
                               const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, sp = c->sp, cp = c->cp, V = width, half = p->K * width;
    for (int64_t w = 0; w < rows_written(rule); w++) {
        real *const Ut = f->Ut + w * width * cp;
        transpose(n, V, f->U + w * n * width, width, Ut, cp);
        long_narrow_product(p, n, padded(n), V, dO, width, Ut, cp, f->dP + w * c->C * cp, cp);
        if (stopped_between(p, n)) return;
        narrow_product(c->K, padded(n), V, f->dS, width, Ut, cp, f->across, cp);
        transpose(c->K, n, f->across, cp, f->d_tilde + w * n * sp, sp);
    }
    if (decay == LA_TOKEN) f->de[0] = (real)long_dot(half, S, f->dS);
    if (decay == LA_PAIR) long_dots_of_pair(half, S, f->dS, f->de); /* M' = e M + f Y, Y' = m Y */
    for (int64_t i = 0; decay == LA_KEY && i < p->K; i++)
        f->de[i] = dot(width, S + i * width, f->dS + i * width);
}

/* Was [x; q] S, its rows scaled by e: from dE and dO, and S, to dx^ and dq^, of the scaled rows. */
LA_FN void looks_from_columns(backward_scratch *f, const real *S, int64_t width, const la_rule rule)
{
    const chunk *c = &f->c;
    const int64_t rows = rows_looking(rule) * c->n, ldt = padded(rows), V = width;
    transpose(rows, V, f->dO, width, f->dOt, ldt);
    if (ldt == LANES)
        narrow_product(c->K, ldt, V, S, width, f->dOt, ldt, f->across, ldt);
    else
        product(c->K, ldt, V, S, width, 1, f->dOt, ldt, f->across, ldt, NULL, 0);
    transpose(c->K, rows, f->across, ldt, f->d_hat, c->sp);
}

/* dS of the state after the chunk becomes that of the state before it. */
LA_FN void carry_adjoint(backward_scratch *f, int64_t width, prefetch *before, const la_decay decay,
                         const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, sp = c->sp, rows = rows_looking(rule) * n, ldt = padded(rows);
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

/* The adjoint of read, solve and carry over this unit's columns: from dO and dS to dV, dP, dL, dq^,
 * dx^, dk~ (and dy~), the new dS, and de. S: the state at the chunk's start. */
LA_FN void columns_adjoint(backward_scratch *f, const la_problem *p, const real *S, int64_t width,
                           prefetch *before, const la_decay decay, const la_rule rule)
{
    chunk *c = &f->c;
    const int64_t n = c->n, cp = c->cp;
    const real *dO = f->dO + (la_predicts(rule) ? n * width : 0);

    writes_adjoint(f, p, dO, width, decay, rule);
    scores_from_columns(f, p, S, dO, width, decay, rule);
    if (stopped_between(p, n)) return;
    if (la_predicts(rule)) {
        solve_adjoint(f, p, width, rule);
        /* Was E = V - x^ S - L U: dL = -strict(dE U'). */
        for (int64_t w = 0; w < rows_written(rule); w++)
            long_narrow_product(p, n, padded(n), width, f->dO, width, f->Ut + w * width * cp, cp,
                                f->dL + w * c->C * cp, cp);
    }
    if (stopped_between(p, n)) return;
    looks_from_columns(f, S, width, rule);
    if (stopped_between(p, n)) return;
    carry_adjoint(f, width, before, decay, rule);
}

/* The same where dS is all that is wanted. The adjoint of a linear map does not depend on the state
 * it is taken at, so there is no S. The additive rule solves nothing: dS takes no part of dU. */
LA_FN void states_adjoint(backward_scratch *f, const la_problem *p, int64_t width, prefetch *before,
                          const la_decay decay, const la_rule rule)
{
    if (la_predicts(rule)) {
        writes_adjoint(f, p, f->dO + f->c.n * width, width, decay, rule);
        solve_adjoint(f, p, width, rule);
    }
    if (stopped_between(p, f->c.n)) return;
    carry_adjoint(f, width, before, decay, rule);
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

/* The chunk of tokens t.. backwards. S: the state at its start, and z behind it. */
LA_FN void chunk_adjoint(backward_scratch *f, const la_problem *p, const la_unit *u,
                         const la_partials *sums, int64_t t, int64_t C, const real *S,
                         int64_t width, const la_decay decay, const la_rule rule)
{
    static const la_name touched[] = {LA_DV, LA_DO, LA_V,  LA_G,  LA_Q,  LA_K, LA_X,
                                      LA_Y,  LA_DQ, LA_DK, LA_DX, LA_DY, LA_DG};
    enum { TOUCHED = sizeof touched / sizeof *touched, SHARED = 5 }; /* the last only if alone */
    const bool normalised = is_normalised(p, decay, rule);
    chunk *c = &f->c;
    const int64_t n = t + C < u->end ? C : u->end - t, kp = c->kp;
    real *dO = f->dO + (la_predicts(rule) ? n * width : 0);
    prefetch before =
        prefetch_of(p, u, t - C, C, touched, sums->alone ? TOUCHED : TOUCHED - SHARED, 0);
    chunk_begin(c, p, u, t, n, true, decay, rule);
    settle_chunk_decay(c, p, f->d_owed, decay);
    load_values(c, p, LA_DO, u, t, u->v0, u->v1, dO, width);
    if (normalised) {
        copy_row(kp, f->z, S + c->K * width);
        copy_row(kp, f->carried, f->z);
        fill(kp, f->kahan, 0);
        chunk_denominators(c, p, f->carried, f->kahan);
    }
    for (int64_t r = 0; r < n; r++) /* dO becomes the gradient of num: the same factor */
        finish_row(p, dO + r * width, width, normalised, c->den[r]);
    if (p->states_only) {
        states_adjoint(f, p, width, &before, decay, rule);
        return;
    }
    columns_adjoint(f, p, S, width, &before, decay, rule);
    if (stopped_between(p, n)) return;
    if (normalised) denominators_adjoint(f, p);
    if (decay == LA_PAIR)
        scores_pair_adjoint(f, p);
    else if (decay == LA_KEY)
        scores_key_adjoint(f, p, rule);
    else
        scores_token_adjoint(f, p, normalised, decay, rule);
    store_gradients(f, p, u, sums, t, width, decay, rule);
}

/* The first pass: the state and z at the start of each segment of M chunks. */
LA_FN void keep_starts(backward_scratch *f, const la_problem *p, const la_unit *u, int64_t C,
                       int64_t M, int64_t width, const la_decay decay, const la_rule rule)
{
    const int64_t chunks = (u->end - u->begin + C - 1) / C, kp = f->c.kp, size = f->c.K * width;
    f->U = f->kept; /* this pass does not keep it */
    f->E = NULL;
    for (int64_t i = 0; i < chunks; i++) {
        if (la_stopped(p)) return;
        if (i % M == 0) {
            copy_row(size, f->checkpoints + i / M * (size + kp), f->S);
            copy_row(kp, f->checkpoints + i / M * (size + kp) + size, f->z);
            if (i + M >= chunks) break; /* the last segment comes later */
        }
        recompute_chunk(f, p, u, u->begin + i * C, C, f->S, f->S, width, decay, rule);
    }
}

/* The numbers of a chunk in `kept`: the state and z at its start, U and E. */
LA_FN int64_t numbers_kept(const backward_scratch *f, int64_t C, int64_t width, const la_rule rule)
{
    return f->c.K * width + f->c.kp + rows_kept(rule) * C * width;
}

/* U and E of a chunk whose state at its start is S, in `kept`. */
LA_FN void place_rows(backward_scratch *f, real *S, int64_t C, int64_t width)
{
    f->U = S + f->c.K * width + f->c.kp;
    f->E = f->U + C * width;
}

/* Recompute the chunks `first` to `last` - 1, which are a segment. */
LA_FN void keep_segment(backward_scratch *f, const la_problem *p, const la_unit *u, int64_t C,
                        int64_t M, int64_t first, int64_t last, int64_t width, const la_decay decay,
                        const la_rule rule)
{
    const int64_t kp = f->c.kp, size = f->c.K * width, each = numbers_kept(f, C, width, rule);
    const real *start = f->checkpoints + first / M * (size + kp);
    copy_row(size, f->kept, start);
    copy_row(kp, f->z, start + size);
    fill(kp, f->kahan, 0);
    fill(kp, f->owed, 0);
    for (int64_t i = first; i < last; i++) {
        if (la_stopped(p)) return;
        const int64_t t = u->begin + i * C, n = t + C < u->end ? C : u->end - t;
        real *S = f->kept + (i - first) * each;
        place_rows(f, S, C, width);
        copy_row(kp, S + size, f->z);
        recompute_chunk(f, p, u, t, n, S, i + 1 < last ? S + each : NULL, width, decay, rule);
    }
}

LA_FN void chunks_backward(const la_problem *p, const la_unit *u, const la_partials *sums,
                           int64_t C, arena *m, const la_decay decay, const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule), bonus = rule == LA_BONUS;
    const bool only = p->states_only; /* needs no state, so all chunks are one segment */
    const int64_t length = u->end - u->begin, chunks = (length + C - 1) / C;
    const int64_t M = only && chunks ? chunks : segment_length(chunks);
    const int64_t width = padded(u->v1 - u->v0), one_state = p->K * width;
    backward_scratch f;
    backward_take(&f, m, p, C, length, u->v1 - u->v0, decay, rule);
    const int64_t kp = f.c.kp;

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

    if (bonus) fill(kp, f.all_bonus, 0);
    if (bonus) fill(kp, f.lost_bonus, 0);
    fill(kp, f.owed, 0);
    fill(kp, f.d_owed, 0);
    if (!only) keep_starts(&f, p, u, C, M, width, decay, rule);
    for (int64_t first = (chunks - 1) / M * M; first >= 0 && chunks; first -= M) {
        const int64_t last = first + M < chunks ? first + M : chunks;
        if (!only) keep_segment(&f, p, u, C, M, first, last, width, decay, rule);
        for (int64_t i = last - 1; i >= first; i--) {
            if (la_stopped(p)) return;
            real *S = only ? NULL : f.kept + (i - first) * numbers_kept(&f, C, width, rule);
            if (!only) place_rows(&f, S, C, width);
            chunk_adjoint(&f, p, u, sums, u->begin + i * C, C, S, width, decay, rule);
        }
    }
    store_state(p, LA_DS0, u, u->v0, u->v1, f.dS, width);
    if (decay == LA_PAIR) store_state(p, LA_DY0, u, u->v0, u->v1, f.dS + one_state, width);
    if (normalised) copy_row(kp, partial_z_at(p, sums, u), f.dz);
    if (bonus && !only) copy_row(kp, partial_bonus_at(p, sums, u), f.all_bonus);
}
