/* THE RECURRENCE and its adjoint, for both devices. One head, one token, a strip of value columns.
 *
 *     decay    S <- diag(a) S           a = 1 | one scalar | one per key
 *     predict  p  = S' k                delta rule only
 *     write    S <- S + k u'            u = v  |  beta (v - p)
 *     read     o  = S' q  (unscaled)    after the write: a token sees itself
 *
 * The columns of S never mix. So a `lane` is the type that holds columns cheaply: a SIMD vector on
 * a CPU, one number in a CUDA thread. W lanes are computed together, and a strip of S is [K][W]
 * lanes. A CUDA thread may hold only some rows of a column. K is then the number of its rows, and
 * k, q and a are the elements for these rows. JOIN(x, y, W) adds up the x of all threads that share
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

/* p = S' diag(a) k, which the decayed state predicts for k. Unless q is NULL, o = S' diag(a) q. */
LA_FN void la_predict(const la_strip S, const int W, int K, const real *k, const real *q,
                      const real *a, lane *p, lane *o, const la_decay decay)
{
    if (q) la_clear(W, o);
    la_clear(W, p);
    UNROLL for (int first = 0; first < K; first += LA_ROWS)
    {
        const int last = la_last_row(first, K);
        lane of_k[MAX_STRIP], of_q[MAX_STRIP];
        la_clear(W, of_k);
        la_clear(W, of_q);
        UNROLL for (int i = first; i < last; i++)
        {
            const real ai = la_row_decay(a, i, decay), ki = ai * k[i], qi = q ? ai * q[i] : 0;
            const lane_of_state *row = la_row(S, i);
            PREFETCH(row + W, S.next);
            for (int w = 0; w < W; w++) {
                const lane s = LANE_LOADED(row[w]);
                of_k[w] += ki * s;
                if (q) of_q[w] += qi * s;
            }
        }
        for (int w = 0; w < W; w++) p[w] += of_k[w];
        for (int w = 0; w < W && q; w++) o[w] += of_q[w];
    }
    JOIN(p, q ? o : NULL, W);
}

/* S <- diag(a) S + k u', from the last row up, because la_predict saw the last rows last. The
 * factors of a row are read once, before the row is written: the compiler must assume that they lie
 * in it. */
LA_FN void la_write(const la_strip S, const int W, int K, const real *k, const lane *u,
                    const real *a, const la_decay decay)
{
    UNROLL for (int i = K - 1; i >= 0; i--)
    {
        const real ai = la_row_decay(a, i, decay), ki = k[i];
        lane_of_state *row = la_row(S, i);
        for (int w = 0; w < W; w++) {
            lane s = row[w];
            if (decay != LA_NONE) s *= ai;
            row[w] = s + ki * u[w];
        }
    }
}

/* qk is q . k. The delta rule needs it, because it reads before it writes: then it goes through the
 * state once for both products, and once to write. */
LA_FN void la_token(const la_strip S, const int W, int K, const real *q, const real *k,
                    const lane *v, const real *a, real beta, real qk, lane *o, const la_decay decay,
                    const la_rule rule)
{
    lane p[MAX_STRIP], u[MAX_STRIP];

    if (rule == LA_DELTA) {
        la_predict(S, W, K, k, q, a, p, o, decay);
        for (int w = 0; w < W; w++) u[w] = beta * (v[w] - p[w]);
        for (int w = 0; w < W; w++) o[w] += qk * u[w];
        la_write(S, W, K, k, u, a, decay);
        return;
    }
    for (int w = 0; w < W; w++) u[w] = v[w];
    la_clear(W, o);
    UNROLL for (int first = 0; first < K; first += LA_ROWS)
    {
        const int last = la_last_row(first, K);
        lane sum[MAX_STRIP];
        la_clear(W, sum);
        UNROLL for (int i = first; i < last; i++)
        {
            const real ai = la_row_decay(a, i, decay), ki = k[i], qi = q[i];
            lane_of_state *row = la_row(S, i);
            for (int w = 0; w < W; w++) {
                lane s = row[w];
                if (decay != LA_NONE) s *= ai;
                s += ki * u[w];
                sum[w] += qi * s;
                row[w] = s;
            }
        }
        for (int w = 0; w < W; w++) o[w] += sum[w];
    }
    JOIN(o, NULL, W);
}

/* Its adjoint, line for line in reverse. S is the state before the token. dS arrives as the
 * gradient of the state after the token and leaves as the gradient of the state before it. dq, dk,
 * da and dbeta are added to, because several strips share them; dv is written. Where a thread has
 * only some of the rows, its scalar da is the sum over these rows; dv and dbeta are complete in
 * each thread of a column. */
LA_FN void la_token_adjoint(const lane *S, lane *dS, const int W, int K, const real *q,
                            const real *k, const lane *v, const real *a, real beta, const lane *d_o,
                            real *dq, real *dk, lane *dv, real *da, real *dbeta,
                            const la_decay decay, const la_rule rule)
{
    lane p[MAX_STRIP], u[MAX_STRIP], du[MAX_STRIP], dp[MAX_STRIP];
    real db = 0;
    la_clear(W, du);

    for (int w = 0; w < W; w++) u[w] = v[w]; /* p and u of the forward pass, recomputed */
    if (rule == LA_DELTA) {
        la_predict(la_strip_of((lane_of_state *)S, W), W, K, k, NULL, a, p, NULL, decay);
        for (int w = 0; w < W; w++) u[w] = beta * (v[w] - p[w]);
    }
    UNROLL for (int first = 0; first < K; first += LA_ROWS)
    {
        const int last = la_last_row(first, K);
        lane sum[MAX_STRIP];
        la_clear(W, sum);
        UNROLL for (int i = first; i < last; i++)
        {
            const real ai = la_row_decay(a, i, decay), ki = k[i], qi = q[i];
            lane gq = {0}, gk = {0};
            for (int w = 0; w < W; w++) {
                lane s = S[i * W + w];
                if (decay != LA_NONE) s *= ai;
                gq += (s + ki * u[w]) * d_o[w]; /* was o = S' q, S the state written */
                dS[i * W + w] += qi * d_o[w];
                gk += dS[i * W + w] * u[w]; /* was S <- S + k u' */
                sum[w] += ki * dS[i * W + w];
            }
            dq[i] += LANE_SUM(gq);
            dk[i] += LANE_SUM(gk);
        }
        for (int w = 0; w < W; w++) du[w] += sum[w];
    }
    JOIN(du, NULL, W);
    for (int w = 0; w < W; w++) { /* was u = beta (v - p) */
        dv[w] = du[w];
        if (rule == LA_DELTA) {
            db += LANE_SUM((v[w] - p[w]) * du[w]);
            dv[w] = beta * du[w];
        }
        dp[w] = -dv[w];
    }
    if (rule == LA_DELTA) *dbeta += db;
    if (rule == LA_ADDITIVE && decay == LA_NONE) return;
    lane all = {0}, ga = {0}; /* of a scalar decay: LA_ROWS rows are summed at a time */
    UNROLL for (int i = 0; i < K; i++)
    {
        const real ai = la_row_decay(a, i, decay), ki = k[i];
        lane gk = {0};
        if (decay == LA_KEY) ga = LANE_ZERO;
        for (int w = 0; w < W; w++) {
            if (rule == LA_DELTA) { /* was p = S' k, S the decayed state */
                gk += (ai * S[i * W + w]) * dp[w];
                dS[i * W + w] += ki * dp[w];
            }
            if (decay != LA_NONE) { /* was S <- diag(a) S */
                ga += S[i * W + w] * dS[i * W + w];
                dS[i * W + w] *= ai;
            }
        }
        if (rule == LA_DELTA) dk[i] += LANE_SUM(gk);
        if (decay == LA_KEY) da[i] += LANE_SUM(ga);
        if (decay == LA_TOKEN && (i + 1) % LA_ROWS == 0) {
            all += ga;
            ga = LANE_ZERO;
        }
    }
    if (decay == LA_TOKEN) da[0] += LANE_SUM(all + ga);
}
