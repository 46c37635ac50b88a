/* Token by token: the recurrent mode, the step, and the adjoint of the recurrent mode. */

/* Lanes of columns that are worked on together, at most. With 32 registers, 8 and their 8 sums fill
 * half of them; with AVX-512 they are a whole row of 128 floats. With 16 registers, 4 and 4. A
 * panel that goes token by token takes PANEL_STRIP lanes, to stay in the L1 cache. */
#if LA_REGISTERS == 32
enum { MAX_STRIP = 8 };
#else
enum { MAX_STRIP = 4 };
#endif
enum { PANEL_STRIP = 4 };

/* The lanes of the next strip, a power of two: a kernel for 3 lanes would be as much code again as
 * those for 2 and 1 that do the same. */
LA_FN int64_t strip_lanes(int64_t left, int64_t most)
{
    return left >= most ? most : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* Where the strip of a panel ends that begins at v0. */
LA_FN int64_t strip_end(const la_unit *u, int64_t v0)
{
    const int64_t end = v0 + strip_lanes(padded(u->v1 - v0) / LANES, PANEL_STRIP) * LANES;
    return end < u->v1 ? end : u->v1;
}

/* Tokens between two checks whether the call is to end: they take some microseconds. A step has
 * fewer. */
enum { TOKENS_A_CHECK = 64 };

/* A lane from memory that is used more than once. Left to itself, gcc makes the memory an operand
 * of every multiply-add, and a product with the state waits for its loads: Zen 4 does one of 64
 * bytes a cycle. */
LA_FN lane lane_loaded(lane x) { return lane_as_it_is(x); }

LA_FN void prefetch_bytes(const void *from, int64_t bytes)
{
    for (int64_t x = 0; x < bytes; x += CACHE_LINE)
        __builtin_prefetch((const char *)from + x, 0, 2);
}

#define LANE_LOADED lane_loaded
#define PREFETCH prefetch_bytes
#define UNROLL_LANES _Pragma("GCC unroll 8")
#define JOIN(x, y, W) /* a lane has all rows of its columns */
#define UNROLL
#include "../recurrence.h"

LA_FN void token_of(const la_strip S, const la_strip Y, int64_t W, int64_t K, const la_operands *t,
                    lane *o, const la_decay decay, const la_rule rule)
{
    switch (W) {
    case 1: la_token(S, Y, 1, (int)K, t, o, decay, rule); break;
    case 2: la_token(S, Y, 2, (int)K, t, o, decay, rule); break;
    case 4: la_token(S, Y, 4, (int)K, t, o, decay, rule); break;
    default: la_token(S, Y, MAX_STRIP, (int)K, t, o, decay, rule); break;
    }
}

/* clang-format off */
#define LA_KIND(decay, rule) \
    LA_COLD void token_##decay##_##rule(const la_strip S, const la_strip Y, int64_t W, int64_t K, \
                                        const la_operands *t, lane *o) \
    { \
        token_of(S, Y, W, K, t, o, LA_##decay, LA_##rule); \
    }
/* clang-format on */
#include "../kinds.def"

/* Each kind has one function for the recurrent mode and its adjoint, as chunk_begin has. A step has
 * a copy of its own: it calls this once a head, and the call's own time showed with AVX2. */
LA_FN void token_any(real *states, int64_t W, int64_t K, const la_operands *t, lane *o,
                     const la_decay decay, const la_rule rule)
{
    const la_strip S = la_strip_of((lane_of_state *)states, W);
    const la_strip Y = la_strip_of((lane_of_state *)(states + K * W * LANES), W); /* of a pair */
#define LA_KIND(D, R) \
    if (decay == LA_##D && rule == LA_##R) token_##D##_##R(S, Y, W, K, t, o);
#include "../kinds.def"
}

/* A token's rows, and the panel's part of its value. */
typedef struct token_rows {
    real *q, *k, *a, *x, *y, *bonus; /* [kp] */
    real *v, *w;                     /* [strip] */
} token_rows;

LA_FN void rows_take(token_rows *f, arena *m, const la_problem *p)
{
    real **rows[] = {&f->q, &f->k, &f->a, &f->x, &f->y, &f->bonus};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = arena_take(m, 1, padded(p->K));
    f->v = arena_take(m, MAX_STRIP, LANES);
    f->w = arena_take(m, p->array[LA_W].given ? MAX_STRIP : 0, LANES);
    if (!p->array[LA_X].given) f->x = f->k;
}

/* Token t as the recurrence sees it, but for v. */
LA_FN la_operands load_token(token_rows *f, const la_problem *p, const la_unit *u, int64_t t,
                             real *owed, const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K);
    const bool predicts = la_predicts(rule), bonus = rule == LA_BONUS;
    load_key(p, LA_Q, u->b, t, u->h, f->q);
    load_key(p, LA_K, u->b, t, u->h, f->k);
    if (predicts && p->array[LA_X].given) load_plain_rows(p, LA_X, u, t, 1, f->x);
    if (la_is_gated(decay, rule) && p->x_is_factor) multiply_row(kp, f->x, f->x, f->k);
    if (rule == LA_DPLR) load_plain_rows(p, LA_Y, u, t, 1, f->y);
    if (bonus) load_bonus(p, u->h, f->bonus);
    load_decay_paid_back(p, u, t, f->a, owed, decay);
    la_operands x = {.q = f->q, .k = f->k, .a = f->a, .x = f->x, .y = f->y, .bonus = f->bonus};
    x.v = lanes_in(f->v);
    x.before = p->predicts_before;
    x.beta = rule == LA_DELTA         ? load_scalar(p, LA_BETA, u, t)
             : la_weighs(decay, rule) ? load_weight(p, u, t)
                                      : 1;
    x.eta = decay == LA_PAIR ? load_scalar(p, LA_ETA, u, t) : 0;
    if (bonus) multiply_row(kp, f->y, f->bonus, f->k); /* y is not in use */
    x.own = predicts ? dot(kp, f->q, f->k) : bonus ? dot(kp, f->q, f->y) : 0;
    x.qy = rule == LA_DPLR ? dot(kp, f->q, f->y) : 0;
    return x;
}

/* v <- w v for columns v0..v1 of token t. It is a function of its own so that the product is not
 * fused with what follows it, and a strip has the same bits whatever its width. */
LA_COLD void gate_v(const token_rows *f, const la_problem *p, const la_unit *u, int64_t t,
                    int64_t v0, int64_t v1)
{
    const la_array *gate = &p->array[LA_W];
    load_row(f->w, v1 - v0, at_column(gate, u->b, t, u->hv, v0), gate->dtype);
    multiply_row(padded(v1 - v0), f->v, f->w, f->v);
}

typedef struct scan_scratch {
    real *S;  /* [K][strip]; of a pair [2 K] */
    real *M0; /* of batches [K][strip]: the memory that predicts */
    token_rows rows;
    real *o;         /* [strip] */
    real *z, *kahan; /* [kp] */
    real *owed;      /* [kp] */
} scan_scratch;

LA_FN void scan_take(scan_scratch *f, arena *m, const la_problem *p)
{
    const int64_t kp = padded(p->K), strip = PANEL_STRIP * LANES;
    f->S = arena_take(m, la_times(p->K, p->decay == LA_PAIR ? 2 : 1), strip);
    f->M0 = arena_take(m, p->batch > 1 ? p->K : 0, strip);
    rows_take(&f->rows, m, p);
    f->o = arena_take(m, MAX_STRIP, LANES);
    f->z = arena_take(m, 1, kp);
    f->kahan = arena_take(m, 1, kp);
    f->owed = arena_take(m, 1, kp);
}

/* A token predicts from M0, the memory at the start of its batch. */
LA_FN void predict_from(la_operands *t, const la_problem *p, const real *M0, int64_t W)
{
    t->batched = p->batch > 1;
    t->M0 = la_strip_of((lane_of_state *)M0, W);
}

/* The same for token i of a run; its first token's memory S is copied to M0. */
LA_FN void begin_batch(la_operands *t, const la_problem *p, int64_t i, const real *S, real *M0,
                       int64_t W)
{
    if (p->batch == 1) return;
    if (i % p->batch == 0) copy_row(p->K * W * LANES, M0, S);
    predict_from(t, p, M0, W);
}

/* Where a run's states go: S, the momentum Y of a pair, z. */
typedef struct la_states {
    la_name S, Y, z;
} la_states;

/* A run of tokens over the unit's columns, strip by strip. A step is a run of one token, and its
 * state goes back where it came from. */
LA_FN void scan_forward(const la_problem *p, const la_unit *u, const la_states *to, arena *m,
                        const la_decay decay, const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    const bool gated = la_is_gated(decay, rule) && p->array[LA_W].given;
    const la_array *v = &p->array[LA_V], *o = &p->array[LA_O];
    const int64_t kp = padded(p->K);
    scan_scratch f;
    scan_take(&f, m, p);
    for (int64_t v0 = u->v0, v1; v0 < u->v1; v0 = v1) {
        v1 = strip_end(u, v0);
        const int64_t width = padded(v1 - v0);
        load_state(p, LA_S0, u, v0, v1, f.S, width);
        if (decay == LA_PAIR) load_state(p, LA_Y0, u, v0, v1, f.S + p->K * width, width);
        if (normalised) load_z(p, LA_Z0, u, f.z);
        fill(kp, f.kahan, 0);
        fill(kp, f.owed, 0);
        for (int64_t t = u->begin; t < u->end; t++) {
            if ((t - u->begin) % TOKENS_A_CHECK == TOKENS_A_CHECK - 1 && la_stopped(p)) return;
            la_operands x = load_token(&f.rows, p, u, t, f.owed, decay, rule);
            if (decay == LA_PAIR) begin_batch(&x, p, t - u->begin, f.S, f.M0, width / LANES);
            load_row(f.rows.v, v1 - v0, at_column(v, u->b, t, u->hv, v0), v->dtype);
            if (gated) gate_v(&f.rows, p, u, t, v0, v1);
            token_any(f.S, width / LANES, p->K, &x, lanes_of(f.o), decay, rule);
            if (normalised) add_keys(1, kp, f.rows.k, f.z, f.kahan);
            if (t < u->read) continue;
            if (la_weighs(decay, rule)) skip_row(p, u, f.o, f.rows.v, width);
            finish_row(p, f.o, width, normalised, normalised ? dot(kp, f.rows.q, f.z) : 0);
            store_row(at_column(o, u->b, t, u->hv, v0), o->dtype, f.o, v1 - v0);
        }
        store_state(p, to->S, u, v0, v1, f.S, width);
        if (decay == LA_PAIR) store_state(p, to->Y, u, v0, v1, f.S + p->K * width, width);
    }
    if (normalised && u->v0 == 0) store_z(p, to->z, u, f.z);
}

LA_FN bool rows_are_lanes(const la_problem *p, const la_array *S)
{
    return S->dtype == p->real && S->stride[3] == 1 && p->V % LANES == 0 &&
           S->stride[2] % LANES == 0 && S->stride[2] >= p->V;
}

/* Can the kernels work on the user's state in place? Only if its rows are whole lanes. */
LA_FN bool state_in_place(const la_problem *p)
{
    return rows_are_lanes(p, &p->array[LA_S0]) &&
           (p->decay != LA_PAIR || rows_are_lanes(p, &p->array[LA_Y0]));
}

/* Columns v0.. of a state, in place. The `next` bytes behind each row are prefetched. */
LA_FN la_strip strip_of_state(const la_problem *p, la_name name, const la_unit *u, int64_t v0,
                              int64_t next)
{
    const la_array *state = &p->array[name];
    lane_of_state *const columns = (lane_of_state *)at_column(state, u->n, u->hv, 0, v0);
    return (la_strip){columns, state->stride[2] / LANES, next};
}

/* One token, with the state in place. */
LA_FN void step_in_place(const la_problem *p, const la_unit *u, arena *m, const la_decay decay,
                         const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    const bool gated = la_is_gated(decay, rule) && p->array[LA_W].given;
    const la_array *v = &p->array[LA_V], *o = &p->array[LA_O];
    const int64_t kp = padded(p->K), t = u->begin;
    scan_scratch f;
    scan_take(&f, m, p);
    const la_operands x = load_token(&f.rows, p, u, t, f.owed, decay, rule);
    if (normalised) {
        load_z(p, LA_Z0, u, f.z);
        add_scaled(kp, f.z, 1, f.rows.k);
        store_z(p, LA_Z0, u, f.z);
    }
    for (int64_t v0 = u->v0, W; v0 < u->v1; v0 += W * LANES) {
        const int64_t left = (u->v1 - v0) / LANES;
        W = strip_lanes(left, MAX_STRIP);
        const int64_t next = v0 == u->v0 ? (left - W) * (int64_t)sizeof(lane) : 0;
        const la_strip S = strip_of_state(p, LA_S0, u, v0, next), none = {NULL, 0, 0};
        const la_strip Y = decay == LA_PAIR ? strip_of_state(p, LA_Y0, u, v0, 0) : none;
        load_row(f.rows.v, W * LANES, at_column(v, u->b, t, u->hv, v0), v->dtype);
        if (gated) gate_v(&f.rows, p, u, t, v0, v0 + W * LANES);
        token_of(S, Y, W, p->K, &x, lanes_of(f.o), decay, rule);
        if (la_weighs(decay, rule)) skip_row(p, u, f.o, f.rows.v, W * LANES);
        finish_row(p, f.o, W * LANES, normalised, normalised ? dot(kp, f.rows.q, f.z) : 0);
        store_row(at_column(o, u->b, t, u->hv, v0), o->dtype, f.o, W * LANES);
    }
}

/* ---- the adjoint ----
 *
 * As in chunks_backward, a state is kept for every segment, then for every token of one segment. */

typedef struct scan_backward_scratch {
    real *S, *dS;      /* [K][strip]; of a pair [2 K] */
    real *M0, *dM0;    /* of batches [K][strip] */
    real *states;      /* [M][K*strip + kp]: before each token of a segment (state, z) */
    real *checkpoints; /* [segments][K*strip + kp] */
    token_rows rows;
    real *z, *dz, *kahan;                  /* [kp] */
    real *owed, *d_owed;                   /* [kp]: to S, to dS */
    real *o, *d_o, *dv;                    /* [strip] */
    real *dq, *dk, *da, *dx, *dy, *dbonus; /* [kp] */
    real *all_bonus, *lost_bonus;          /* [kp]: the sum of dbonus, and what it rounded off */
} scan_backward_scratch;

/* The tokens of a segment, for so many of them: whole batches. */
LA_FN int64_t whole_batches(const la_problem *p, int64_t tokens, int64_t length)
{
    return round_up(tokens, p->batch < length ? p->batch : length < 1 ? 1 : length);
}

LA_FN void scan_backward_take(scan_backward_scratch *f, arena *m, const la_problem *p,
                              int64_t length)
{
    const int64_t kp = padded(p->K), strip = PANEL_STRIP * LANES;
    const int64_t M = whole_batches(p, segment_length(length), length);
    const size_t rows_of_state = la_times(p->K, p->decay == LA_PAIR ? 2 : 1);
    const size_t kept = la_plus(la_times(rows_of_state, strip), kp);
    f->S = arena_take(m, rows_of_state, strip);
    f->dS = arena_take(m, rows_of_state, strip);
    f->M0 = arena_take(m, p->batch > 1 ? p->K : 0, strip);
    f->dM0 = arena_take(m, p->batch > 1 ? p->K : 0, strip);
    f->states = arena_take(m, whole_batches(p, segment_room(length), length), kept);
    f->checkpoints = arena_take(m, (length + M - 1) / M, kept);
    rows_take(&f->rows, m, p);
    real **rows[] = {&f->z,  &f->dz, &f->kahan, &f->owed,   &f->d_owed,    &f->dq,        &f->dk,
                     &f->da, &f->dx, &f->dy,    &f->dbonus, &f->all_bonus, &f->lost_bonus};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = arena_take(m, 1, kp);
    if (!p->array[LA_X].given) f->dx = f->dk;
    real **strips[] = {&f->o, &f->d_o, &f->dv};
    for (size_t i = 0; i < sizeof strips / sizeof *strips; i++)
        *strips[i] = arena_take(m, 1, strip);
}

LA_FN void token_adjoint_any(const real *S, real *dS, int64_t W, int64_t K, const la_operands *t,
                             const lane *d_o, const la_token_gradients *g, const la_decay decay,
                             const la_rule rule)
{
    const lane *state = lanes_in(S), *Y = lanes_in(S + K * W * LANES);
    lane *d = lanes_of(dS), *dY = lanes_of(dS + K * W * LANES);
    switch (W) {
    case 1: la_token_adjoint(state, d, Y, dY, 1, (int)K, t, d_o, g, decay, rule); break;
    case 2: la_token_adjoint(state, d, Y, dY, 2, (int)K, t, d_o, g, decay, rule); break;
    default: la_token_adjoint(state, d, Y, dY, 4, (int)K, t, d_o, g, decay, rule); break;
    }
}

/* Token t for one strip of columns. */
LA_FN la_operands scan_load(scan_backward_scratch *f, const la_problem *p, const la_unit *u,
                            int64_t t, int64_t v0, int64_t v1, real *owed, const la_decay decay,
                            const la_rule rule)
{
    const la_array *v = &p->array[LA_V];
    const la_operands x = load_token(&f->rows, p, u, t, owed, decay, rule);
    load_row(f->rows.v, v1 - v0, at_column(v, u->b, t, u->hv, v0), v->dtype);
    return x;
}

/* A strip's share of a row of partial sums: the first strip writes it. */
LA_FN void add_share(int64_t n, real *to, const real *x, bool first_strip)
{
    for (int64_t i = 0; i < n; i++) to[i] = first_strip ? x[i] : to[i] + x[i];
}

/* The gradients of token t, which are sums over columns, join the unit's partial sums. */
LA_FN void add_shares(const scan_backward_scratch *f, const la_problem *p, const la_unit *u,
                      const la_partials *sums, int64_t t, bool first, real dbeta, real deta,
                      const la_decay decay, const la_rule rule)
{
    const int64_t kp = padded(p->K);
    add_share(kp, partial_at(sums, sums->dq, u, t, kp), f->dq, first);
    add_share(kp, partial_at(sums, sums->dk, u, t, kp), f->dk, first);
    if (p->array[LA_X].given) add_share(kp, partial_at(sums, sums->dx, u, t, kp), f->dx, first);
    if (rule == LA_DPLR) add_share(kp, partial_at(sums, sums->dy, u, t, kp), f->dy, first);
    if (decay == LA_KEY)
        add_share(kp, partial_at(sums, sums->da, u, t, kp), f->da, first);
    else if (decay != LA_NONE)
        add_share(1, partial_at(sums, sums->da, u, t, 1), f->da, first);
    if (rule == LA_DELTA) add_share(1, partial_at(sums, sums->dbeta, u, t, 1), &dbeta, first);
    if (decay == LA_PAIR) add_share(1, partial_at(sums, sums->deta, u, t, 1), &deta, first);
}

LA_FN void scan_backward(const la_problem *p, const la_unit *u, const la_partials *sums, arena *m,
                         const la_decay decay, const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule), pair = decay == LA_PAIR;
    const la_array *d_o = &p->array[LA_DO], *dv = &p->array[LA_DV];
    const int64_t kp = padded(p->K);
    const int64_t length = u->end - u->begin;
    const int64_t M = whole_batches(p, segment_length(length), length);
    scan_backward_scratch f;
    scan_backward_take(&f, m, p, length);
    fill(kp, f.all_bonus, 0);
    fill(kp, f.lost_bonus, 0);

    for (int64_t v0 = u->v0, v1; v0 < u->v1; v0 = v1) {
        v1 = strip_end(u, v0);
        const int64_t width = padded(v1 - v0);
        const int64_t W = width / LANES, one = p->K * width, size = pair ? 2 * one : one;
        const int64_t kept = size + kp;
        const bool first_strip = v0 == u->v0;
        load_state(p, LA_S0, u, v0, v1, f.S, width);
        load_state(p, LA_DST, u, v0, v1, f.dS, width);
        if (pair) load_state(p, LA_Y0, u, v0, v1, f.S + one, width);
        if (pair) load_state(p, LA_DYT, u, v0, v1, f.dS + one, width);
        load_z(p, LA_Z0, u, f.z);
        fill(kp, f.kahan, 0);
        if (normalised && first_strip && u->panel == 0) /* once: the strips' gradients are added */
            load_z(p, LA_DZT, u, f.dz);
        else
            fill(kp, f.dz, 0);
        if (pair && p->batch > 1) fill(one, f.dM0, 0);
        fill(kp, f.owed, 0);
        fill(kp, f.d_owed, 0);
        for (int64_t i = 0; i < length; i++) {
            if (i % TOKENS_A_CHECK == TOKENS_A_CHECK - 1 && la_stopped(p)) return;
            if (i % M == 0) {
                copy_row(size, f.checkpoints + i / M * kept, f.S);
                copy_row(kp, f.checkpoints + i / M * kept + size, f.z);
                if (i + M >= length) break;
            }
            la_operands x = scan_load(&f, p, u, u->begin + i, v0, v1, f.owed, decay, rule);
            if (pair) begin_batch(&x, p, i, f.S, f.M0, W);
            token_any(f.S, W, p->K, &x, lanes_of(f.o), decay, rule);
            if (normalised) add_keys(1, kp, f.rows.k, f.z, f.kahan);
        }
        for (int64_t first = (length - 1) / M * M; first >= 0 && length; first -= M) {
            if (la_stopped(p)) return;
            const int64_t last = first + M < length ? first + M : length;
            copy_row(size, f.S, f.checkpoints + first / M * kept);
            copy_row(kp, f.z, f.checkpoints + first / M * kept + size);
            fill(kp, f.kahan, 0);
            fill(kp, f.owed, 0);
            for (int64_t i = first; i < last; i++) {
                copy_row(size, f.states + (i - first) * kept, f.S);
                copy_row(kp, f.states + (i - first) * kept + size, f.z);
                la_operands x = scan_load(&f, p, u, u->begin + i, v0, v1, f.owed, decay, rule);
                if (pair) begin_batch(&x, p, i, f.S, f.M0, W);
                token_any(f.S, W, p->K, &x, lanes_of(f.o), decay, rule);
                if (normalised) add_keys(1, kp, f.rows.k, f.z, f.kahan);
            }
            for (int64_t i = last - 1; i >= first; i--) {
                const int64_t t = u->begin + i;
                const real *S = f.states + (i - first) * kept;
                real den = 0, dbeta = 0, deta = 0;
                la_operands x = scan_load(&f, p, u, t, v0, v1, f.d_owed, decay, rule);
                if (pair) predict_from(&x, p, S - i % p->batch * kept, W);
                const la_token_gradients g = {.dq = f.dq,
                                              .dk = f.dk,
                                              .dx = f.dx,
                                              .dy = f.dy,
                                              .dbonus = f.dbonus,
                                              .da = f.da,
                                              .dbeta = &dbeta,
                                              .deta = &deta,
                                              .dv = lanes_of(f.dv),
                                              .dM0 = la_strip_of((lane_of_state *)f.dM0, W)};
                load_row(f.d_o, v1 - v0, at_column(d_o, u->b, t, u->hv, v0), d_o->dtype);
                fill(kp, f.dq, 0);
                fill(kp, f.dk, 0);
                fill(kp, f.da, 0);
                fill(kp, f.dx, 0);
                fill(kp, f.dy, 0);
                fill(kp, f.dbonus, 0);
                if (normalised) { /* z after the write */
                    copy_row(kp, f.z, S + size);
                    add_scaled(kp, f.z, 1, f.rows.k);
                    den = dot(kp, f.rows.q, f.z);
                }
                finish_row(p, f.d_o, width, normalised, den); /* the gradient of num */
                token_adjoint_any(S, f.dS, W, p->K, &x, lanes_in(f.d_o), &g, decay, rule);
                if (pair && p->batch > 1 && i % p->batch == 0) { /* was M0 = S */
                    add_scaled(one, f.dS, 1, f.dM0);
                    fill(one, f.dM0, 0);
                }
                if (normalised) {
                    real d_den = d_denominator(p, den * (real)p->scale, dot(kp, f.rows.q, f.dq));
                    add_scaled(kp, f.dq, d_den, f.z);
                    add_scaled(kp, f.dz, d_den, f.rows.q);
                    add_scaled(kp, f.dk, 1, f.dz); /* was z <- z + k */
                }
                store_row(at_column(dv, u->b, t, u->hv, v0), dv->dtype, f.dv, v1 - v0);
                add_shares(&f, p, u, sums, t, first_strip, dbeta, deta, decay, rule);
                if (rule == LA_BONUS) add_keys(1, kp, f.dbonus, f.all_bonus, f.lost_bonus);
            }
        }
        store_state(p, LA_DS0, u, v0, v1, f.dS, width);
        if (pair) store_state(p, LA_DY0, u, v0, v1, f.dS + one, width);
        if (normalised) {
            if (first_strip)
                copy_row(kp, partial_z_at(p, sums, u), f.dz);
            else
                add_scaled(kp, partial_z_at(p, sums, u), 1, f.dz);
        }
    }
    if (rule == LA_BONUS) copy_row(kp, partial_bonus_at(p, sums, u), f.all_bonus);
}
