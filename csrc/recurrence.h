/* THE RECURRENCE and its adjoint, for both devices. One head, one token, a strip of value columns.
 *
 *     decay    S <- diag(a) S           a = 1 | one scalar | one per key
 *     predict  p  = S' x                x = k where the caller gives none
 *     write    S <- S + k u' - y p'     u = v  |  beta (v - p)
 *     read     o  = S' q  (unscaled)    after the write: a token sees itself
 *
 * The rules differ in three facts. A product `before` the decay takes the state that the token
 * found; the others take the decayed state.
 *
 *     rule      predicts        reads          u              also writes
 *     ADDITIVE  -               after          v
 *     DELTA     after           after          beta (v - p)
 *     DPLR      before          after          v              - y p'
 *     BONUS     -               before         v              its own read is (q.(bonus*k)) v
 *
 * With a decay per token DELTA may predict before too (Comba), and ADDITIVE may have a weight for
 * each write (Mamba-2's time step): u = beta v.
 *
 * The decay PAIR has two states, a memory S and its momentum Y, and the rule DELTA:
 *
 *     Y <- eta Y + k u',   S <- a S + Y      predicts before
 *
 * Its tokens may come in batches, which predict from the memory M0 that their first token found.
 *
 * The columns of S never mix. So a `lane` is the type that holds columns cheaply: a SIMD vector on
 * a CPU, one number in a CUDA thread. W lanes are computed together, and a strip of S is [K][W]
 * lanes. A CUDA thread may hold only some rows of a column. K is then the number of its rows, and
 * k, q, x, y, bonus and a are the elements for these rows. JOIN(x, y, W) adds up the x of all threads that share
 * a column, and the y too unless it is NULL.
 * `decay` and `rule` are compile-time constants wherever this text is used.
 *
 * Needs:
 *     LA_FN                     before a function
 *     real, lane                a number; a lane
 *     lane_of_state             a lane that may lie at any address of a state
 *     LANE_ZERO                 a lane of zeros
 *     LANE_SUM(x)               the sum over a lane's columns
 *     JOIN(x, y, W)             as above; nothing where a thread has all rows
 *     UNROLL                    before a loop whose S is in registers
 *     MAX_STRIP                 at least W
 * Can use:
 *     KEY_BEFORE                true: x may look before its decay under a decay per key, too
 *     LANE_LOADED(x)            a lane from memory, loaded once for all its uses
 *     UNROLL_LANES              before a loop that clears lanes
 *     PREFETCH(address, bytes)
 */
#ifndef LANE_LOADED
#define LANE_LOADED(x) (x)
#endif
#ifndef UNROLL_LANES
#define UNROLL_LANES
#endif
#ifndef PREFETCH
#define PREFETCH(address, bytes)
#endif
#ifndef KEY_BEFORE
#define KEY_BEFORE false
#endif

/* A strip of a state. Its rows are `ld` lanes apart. The `next` bytes behind each row are needed
 * after this token, and la_predict prefetches them. */
typedef struct la_strip {
    lane_of_state *at;
    int64_t ld, next;
} la_strip;

LA_FN la_strip la_strip_of(lane_of_state *at, int64_t ld)
{
    const la_strip S = {at, ld, 0};
    return S;
}

LA_FN lane_of_state *la_row(const la_strip S, int i) { return S.at + i * S.ld; }

/* The products of so many rows are summed before the sum joins the total. One chain of K terms
 * would lose a bit or two more. */
enum { LA_ROWS = 16 };

/* gcc turns a loop that clears a few lanes into a call, or into an instruction that is as slow. */
LA_FN void la_clear(const int W, lane *x)
{
    UNROLL_LANES for (int w = 0; w < W; w++) x[w] = LANE_ZERO;
}

LA_FN int la_last_row(int first, int K) { return K < first + LA_ROWS ? K : first + LA_ROWS; }

LA_FN real la_row_decay(const real *a, int i, const la_decay decay)
{
    return decay == LA_NONE ? 1 : a[decay == LA_KEY ? i : 0];
}

/* A token as the recurrence sees it. Only what the decay and the rule have is read. */
typedef struct la_operands {
    const real *q, *k, *a;
    const real *x;     /* what predicts: k where the caller gave none */
    const real *y;     /* DPLR */
    const real *bonus; /* BONUS */
    const lane *v;
    real beta, eta; /* beta: of DELTA; where la_weighs, the weight of the write or 1 */
    bool before;    /* DELTA and TOKEN (KEY too, if KEY_BEFORE): x looks before the decay */
    bool batched;   /* PAIR: M0 predicts in the place of S */
    la_strip M0;
    real own; /* q . k, with a bonus q . (bonus * k): a token's weight in its own read */
    real qy;  /* DPLR: q . y */
} la_operands;

/* Is the prediction made from the decayed state? */
LA_FN bool la_looks_after(const la_operands *t, const la_decay decay, const la_rule rule)
{
    const bool may_look_before = decay == LA_TOKEN || (KEY_BEFORE && decay == LA_KEY);
    return la_predicts_after(decay, rule) && !(may_look_before && t->before);
}

/* p, what the state predicts for x. Unless `reads` is false, o = S' q of the same state, decayed;
 * of a pair it is the read of a S + eta Y. */
LA_FN void la_predict(const la_strip S, const la_strip Y, const int W, int K, const la_operands *t,
                      lane *p, lane *o, const bool reads, const la_decay decay, const la_rule rule)
{
    if (reads) la_clear(W, o);
    la_clear(W, p);
    UNROLL for (int first = 0; first < K; first += LA_ROWS)
    {
        const int last = la_last_row(first, K);
        lane of_x[MAX_STRIP], of_q[MAX_STRIP];
        la_clear(W, of_x);
        la_clear(W, of_q);
        UNROLL for (int i = first; i < last; i++)
        {
            const real ai = la_row_decay(t->a, i, decay), qi = reads ? ai * t->q[i] : 0;
            const real xi = la_looks_after(t, decay, rule) ? ai * t->x[i] : t->x[i];
            const lane_of_state *row = la_row(S, i);
            PREFETCH(row + W, S.next);
            for (int w = 0; w < W; w++) {
                const lane s = LANE_LOADED(row[w]);
                of_x[w] += xi * s;
                if (reads) of_q[w] += qi * s;
            }
            if (decay != LA_PAIR || !reads) continue;
            const real from_Y = t->eta * t->q[i];
            const lane_of_state *momentum = la_row(Y, i);
            for (int w = 0; w < W; w++) of_q[w] += from_Y * momentum[w];
        }
        for (int w = 0; w < W; w++) p[w] += of_x[w];
        for (int w = 0; w < W && reads; w++) o[w] += of_q[w];
    }
    JOIN(p, reads ? o : NULL, W);
}

/* o = S' q, of a call without decays in which every token reads what all have written. */
LA_FN void la_read_all(const la_strip S, const int W, int K, const la_operands *t, lane *o)
{
    la_operands reads = *t;
    reads.x = t->q;
    la_predict(S, la_strip_of(NULL, 0), W, K, &reads, o, NULL, false, LA_NONE, LA_DELTA);
}

/* S <- diag(a) S + k u' - y p', from the last row up, because la_predict saw the last rows last.
 * The factors of a row are read once, before the row is written: the compiler must assume that they
 * lie in it. */
LA_FN void la_write(const la_strip S, const la_strip Y, const int W, int K, const la_operands *t,
                    const lane *u, const lane *p, const la_decay decay, const la_rule rule)
{
    UNROLL for (int i = K - 1; i >= 0; i--)
    {
        const real ai = la_row_decay(t->a, i, decay), ki = t->k[i];
        const real yi = rule == LA_DPLR ? t->y[i] : 0;
        lane_of_state *row = la_row(S, i);
        if (decay == LA_PAIR) {
            lane_of_state *momentum = la_row(Y, i);
            for (int w = 0; w < W; w++) {
                const lane y = t->eta * momentum[w] + ki * u[w];
                momentum[w] = y;
                row[w] = ai * row[w] + y;
            }
            continue;
        }
        for (int w = 0; w < W; w++) {
            lane s = row[w];
            if (decay != LA_NONE) s *= ai;
            if (rule == LA_DPLR) s -= yi * p[w];
            row[w] = s + ki * u[w];
        }
    }
}

/* A rule that predicts reads before it writes, and adds what the token itself is worth: it goes
 * through the state once for both products, and once to write. Y: the momentum of a pair. */
LA_FN void la_token(const la_strip S, const la_strip Y, const int W, int K, const la_operands *t,
                    lane *o, const la_decay decay, const la_rule rule)
{
    lane p[MAX_STRIP], u[MAX_STRIP];

    if (la_predicts(rule)) {
        la_predict(S, Y, W, K, t, p, o, true, decay, rule);
        if (decay == LA_PAIR && t->batched)
            la_predict(t->M0, la_strip_of(NULL, 0), W, K, t, p, NULL, false, decay, rule);
        for (int w = 0; w < W; w++) u[w] = rule == LA_DELTA ? t->beta * (t->v[w] - p[w]) : t->v[w];
        for (int w = 0; w < W; w++) o[w] += t->own * u[w];
        for (int w = 0; w < W && rule == LA_DPLR; w++) o[w] -= t->qy * p[w];
        la_write(S, Y, W, K, t, u, p, decay, rule);
        return;
    }
    for (int w = 0; w < W; w++) u[w] = la_weighs(decay, rule) ? t->beta * t->v[w] : t->v[w];
    la_clear(W, o);
    UNROLL for (int first = 0; first < K; first += LA_ROWS)
    {
        const int last = la_last_row(first, K);
        lane sum[MAX_STRIP];
        la_clear(W, sum);
        UNROLL for (int i = first; i < last; i++)
        {
            const real ai = la_row_decay(t->a, i, decay), ki = t->k[i], qi = t->q[i];
            lane_of_state *row = la_row(S, i);
            for (int w = 0; w < W; w++) {
                lane s = row[w];
                if (!la_reads_after(rule)) sum[w] += qi * s;
                if (decay != LA_NONE) s *= ai;
                s += ki * u[w];
                if (la_reads_after(rule)) sum[w] += qi * s;
                row[w] = s;
            }
        }
        for (int w = 0; w < W; w++) o[w] += sum[w];
    }
    JOIN(o, NULL, W);
    for (int w = 0; w < W && rule == LA_BONUS; w++) o[w] += t->own * u[w];
}

/* Where the gradients of a token go. Several strips share them, so they are added to, but for dv,
 * which is written. dx is dk where the caller gave no x. Where a thread has only some of the rows,
 * its da of a scalar and its deta are sums over these rows; dv and dbeta are complete in each
 * thread of a column. */
typedef struct la_token_gradients {
    real *dq, *dk, *dx, *dy, *dbonus, *da, *dbeta, *deta;
    lane *dv;
    la_strip dM0; /* of batches: added to, and due where the batch begins */
} la_token_gradients;

/* Its adjoint, line for line in reverse. S and Y are the states before the token. dS and dY arrive
 * as the gradients of the states after the token and leave as those of the states before it. */
LA_FN void la_token_adjoint(const lane *S, lane *dS, const lane *Y, lane *dY, const int W, int K,
                            const la_operands *t, const lane *d_o, const la_token_gradients *g,
                            const la_decay decay, const la_rule rule)
{
    lane p[MAX_STRIP], u[MAX_STRIP], du[MAX_STRIP], dp[MAX_STRIP], own = {0};
    real db = 0;
    la_clear(W, du);
    la_clear(W, dp);

    for (int w = 0; w < W; w++) u[w] = t->v[w]; /* p and u of the forward pass, recomputed */
    if (la_predicts(rule)) {
        const la_strip none = la_strip_of(NULL, 0);
        if (decay == LA_PAIR && t->batched)
            la_predict(t->M0, none, W, K, t, p, NULL, false, decay, rule);
        else
            la_predict(la_strip_of((lane_of_state *)S, W), none, W, K, t, p, NULL, false, decay,
                       rule);
        for (int w = 0; w < W && rule == LA_DELTA; w++) u[w] = t->beta * (t->v[w] - p[w]);
    }
    UNROLL for (int first = 0; first < K; first += LA_ROWS)
    {
        const int last = la_last_row(first, K);
        lane sum[MAX_STRIP], sum_p[MAX_STRIP];
        la_clear(W, sum);
        la_clear(W, sum_p);
        UNROLL for (int i = first; i < last; i++)
        {
            const real ai = la_row_decay(t->a, i, decay), ki = t->k[i], qi = t->q[i];
            const real yi = rule == LA_DPLR ? t->y[i] : 0;
            lane gq = {0}, gk = {0}, gy = {0};
            for (int w = 0; w < W; w++) {
                lane *d = &dS[i * W + w];
                lane s = S[i * W + w];
                if (!la_reads_after(rule)) gq += s * d_o[w]; /* was o = S' q, S the old state */
                if (decay != LA_NONE) s *= ai;
                if (rule == LA_DPLR) s -= yi * p[w];
                if (decay == LA_PAIR) s += t->eta * Y[i * W + w];
                if (la_reads_after(rule)) { /* was o = S' q, S the state written */
                    gq += (s + ki * u[w]) * d_o[w];
                    *d += qi * d_o[w];
                }
                if (decay == LA_PAIR) { /* was S <- a S + Y */
                    dY[i * W + w] += *d;
                    d = &dY[i * W + w];
                }
                gk += *d * u[w]; /* was S <- S + k u' - y p' */
                sum[w] += ki * *d;
                if (rule != LA_DPLR) continue;
                gy -= *d * p[w];
                sum_p[w] -= yi * *d;
            }
            g->dq[i] += LANE_SUM(gq);
            g->dk[i] += LANE_SUM(gk);
            if (rule == LA_DPLR) g->dy[i] += LANE_SUM(gy);
        }
        for (int w = 0; w < W; w++) du[w] += sum[w];
        for (int w = 0; w < W && rule == LA_DPLR; w++) dp[w] += sum_p[w];
    }
    JOIN(du, rule == LA_DPLR ? dp : NULL, W);
    if (rule == LA_BONUS) { /* was o += (q.(bonus*k)) v */
        for (int w = 0; w < W; w++) {
            own += u[w] * d_o[w];
            du[w] += t->own * d_o[w];
        }
        const real weight = LANE_SUM(own);
        UNROLL for (int i = 0; i < K; i++)
        {
            const real bonus = t->bonus[i], qi = t->q[i], ki = t->k[i];
            g->dq[i] += weight * bonus * ki;
            g->dk[i] += weight * bonus * qi;
            g->dbonus[i] += weight * qi * ki;
        }
    }
    for (int w = 0; w < W; w++) { /* was u = beta (v - p) */
        g->dv[w] = du[w];
        if (rule == LA_DELTA) {
            db += LANE_SUM((t->v[w] - p[w]) * du[w]);
            g->dv[w] = t->beta * du[w];
        }
        if (rule != LA_DPLR) dp[w] = -g->dv[w];
    }
    if (rule == LA_DELTA) *g->dbeta += db;
    if (rule == LA_ADDITIVE && decay == LA_NONE) return;
    lane all = {0}, ga = {0}; /* of a scalar decay: LA_ROWS rows are summed at a time */
    lane all_eta = {0}, geta = {0};
    UNROLL for (int i = 0; i < K; i++)
    {
        const real ai = la_row_decay(t->a, i, decay);
        const real xi = la_predicts(rule) ? t->x[i] : 0, qi = t->q[i];
        lane gx = {0};
        if (decay == LA_KEY) ga = LANE_ZERO;
        for (int w = 0; w < W; w++) {
            lane *d = &dS[i * W + w];
            if (la_looks_after(t, decay, rule)) { /* was p = S' x, S the decayed state */
                gx += (ai * S[i * W + w]) * dp[w];
                *d += xi * dp[w];
            }
            if (decay != LA_NONE) { /* was S <- diag(a) S */
                ga += S[i * W + w] * *d;
                *d *= ai;
            }
            if (decay == LA_PAIR && t->batched) { /* was p = M0' x */
                gx += la_row(t->M0, i)[w] * dp[w];
                la_row(g->dM0, i)[w] += xi * dp[w];
            } else if (la_predicts(rule) && !la_looks_after(t, decay, rule)) { /* was p = S' x */
                gx += S[i * W + w] * dp[w];
                *d += xi * dp[w];
            }
            if (!la_reads_after(rule)) *d += qi * d_o[w];
            if (decay == LA_PAIR) { /* was Y <- eta Y + .. */
                geta += Y[i * W + w] * dY[i * W + w];
                dY[i * W + w] *= t->eta;
            }
        }
        if (la_predicts(rule)) g->dx[i] += LANE_SUM(gx);
        if (decay == LA_KEY) g->da[i] += LANE_SUM(ga);
        if ((decay == LA_TOKEN || decay == LA_PAIR) && (i + 1) % LA_ROWS == 0) {
            all += ga;
            ga = LANE_ZERO;
            all_eta += geta;
            geta = LANE_ZERO;
        }
    }
    if (decay == LA_TOKEN || decay == LA_PAIR) g->da[0] += LANE_SUM(all + ga);
    if (decay == LA_PAIR) *g->deta += LANE_SUM(all_eta + geta);
}
