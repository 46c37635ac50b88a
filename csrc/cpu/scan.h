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

/* Tokens between two checks whether the call is to end: they take some microseconds. A step has
 * fewer. */
enum { TOKENS_A_CHECK = 64 };

/* A lane from memory that is used more than once. Left to itself, gcc makes the memory an operand
 * of every multiply-add, and a product with the state waits for its loads: Zen 4 does one of 64
 * bytes a cycle. */
LA_FN lane lane_loaded(lane x)
{
#if defined(__x86_64__) && LA_REGISTERS == 32
    __asm__("" : "+v"(x));
#elif defined(__x86_64__)
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

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

LA_FN void token_of(const la_strip S, int64_t W, int64_t K, const real *q, const real *k,
                    const lane *v, const real *a, real beta, real qk, lane *o, const la_decay decay,
                    const la_rule rule)
{
    switch (W) {
    case 1: la_token(S, 1, (int)K, q, k, v, a, beta, qk, o, decay, rule); break;
    case 2: la_token(S, 2, (int)K, q, k, v, a, beta, qk, o, decay, rule); break;
    case 3: la_token(S, 3, (int)K, q, k, v, a, beta, qk, o, decay, rule); break;
    case 4: la_token(S, 4, (int)K, q, k, v, a, beta, qk, o, decay, rule); break;
    default: la_token(S, MAX_STRIP, (int)K, q, k, v, a, beta, qk, o, decay, rule); break;
    }
}

/* clang-format off */
#define LA_KIND(decay, rule) \
    LA_COLD void token_##decay##_##rule(const la_strip S, int64_t W, int64_t K, const real *q, \
                                        const real *k, const lane *v, const real *a, real beta, \
                                        real qk, lane *o) \
    { \
        token_of(S, W, K, q, k, v, a, beta, qk, o, LA_##decay, LA_##rule); \
    }
/* clang-format on */
#include "../kinds.def"

/* Each kind has one function for the recurrent mode and its adjoint, as chunk_begin has. A step has
 * a copy of its own: it calls this once a head, and the call's own time showed with AVX2. */
LA_FN void token_any(const la_strip S, int64_t W, int64_t K, const real *q, const real *k,
                     const lane *v, const real *a, real beta, real qk, lane *o,
                     const la_decay decay, const la_rule rule)
{
#define LA_KIND(D, R) \
    if (decay == LA_##D && rule == LA_##R) token_##D##_##R(S, W, K, q, k, v, a, beta, qk, o);
#include "../kinds.def"
}

typedef struct scan_scratch {
    real *S;         /* [K][strip] */
    real *q, *k, *a; /* [kp] */
    real *v, *o;     /* [strip] */
    real *z, *kahan; /* [kp] */
    real *owed;      /* [kp] */
} scan_scratch;

LA_FN void scan_take(scan_scratch *f, arena *m, const la_problem *p)
{
    const int64_t kp = padded(p->K), strip = PANEL_STRIP * LANES;
    f->S = arena_take(m, p->K, strip);
    f->q = arena_take(m, 1, kp);
    f->k = arena_take(m, 1, kp);
    f->a = arena_take(m, 1, kp);
    f->v = arena_take(m, MAX_STRIP, LANES);
    f->o = arena_take(m, MAX_STRIP, LANES);
    f->z = arena_take(m, 1, kp);
    f->kahan = arena_take(m, 1, kp);
    f->owed = arena_take(m, 1, kp);
}

/* A run of tokens over the unit's columns, strip by strip. A step is a run of one token, and its
 * state goes back where it came from. */
LA_FN void scan_forward(const la_problem *p, const la_unit *u, la_name state, la_name z_state,
                        arena *m, const la_decay decay, const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    const la_array *v = &p->array[LA_V], *o = &p->array[LA_O];
    const int64_t kp = padded(p->K), strip = PANEL_STRIP * LANES;
    scan_scratch f;
    scan_take(&f, m, p);
    for (int64_t v0 = u->v0; v0 < u->v1; v0 += strip) {
        const int64_t v1 = v0 + strip < u->v1 ? v0 + strip : u->v1, width = padded(v1 - v0);
        load_state(p, LA_S0, u, v0, v1, f.S, width);
        if (normalised) load_z(p, LA_Z0, u, f.z);
        fill(kp, f.kahan, 0);
        fill(kp, f.owed, 0);
        for (int64_t t = u->begin; t < u->end; t++) {
            if ((t - u->begin) % TOKENS_A_CHECK == TOKENS_A_CHECK - 1 && la_stopped(p)) return;
            real beta = rule == LA_DELTA ? load_beta(p, u, t) : 1;
            load_key(p, LA_Q, u->b, t, u->h, f.q);
            load_key(p, LA_K, u->b, t, u->h, f.k);
            load_decay_paid_back(p, u, t, f.a, f.owed, decay);
            load_row(f.v, v1 - v0, at_column(v, u->b, t, u->hv, v0), v->dtype);
            const real qk = rule == LA_DELTA ? dot(kp, f.q, f.k) : 0;
            token_any(la_strip_of((lane_of_state *)f.S, width / LANES), width / LANES, p->K, f.q,
                      f.k, lanes_in(f.v), f.a, beta, qk, lanes_of(f.o), decay, rule);
            if (normalised) add_keys(1, kp, f.k, f.z, f.kahan);
            finish_row(p, f.o, width, normalised, normalised ? dot(kp, f.q, f.z) : 0);
            store_row(at_column(o, u->b, t, u->hv, v0), o->dtype, f.o, v1 - v0);
        }
        store_state(p, state, u, v0, v1, f.S, width);
    }
    if (normalised && u->v0 == 0) store_z(p, z_state, u, f.z);
}

/* Can the kernels work on the user's state in place? Only if its rows are whole lanes. */
LA_FN bool state_in_place(const la_problem *p)
{
    const la_array *S = &p->array[LA_S0];
    return S->dtype == p->real && S->stride[3] == 1 && p->V % LANES == 0 &&
           S->stride[2] % LANES == 0 && S->stride[2] >= p->V;
}

/* One token, with the state in place. */
LA_FN void step_in_place(const la_problem *p, const la_unit *u, arena *m, const la_decay decay,
                         const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    const la_array *v = &p->array[LA_V], *o = &p->array[LA_O], *state = &p->array[LA_S0];
    const int64_t kp = padded(p->K), t = u->begin;
    scan_scratch f;
    scan_take(&f, m, p);
    const real beta = rule == LA_DELTA ? load_beta(p, u, t) : 1;
    load_key(p, LA_Q, u->b, t, u->h, f.q);
    load_key(p, LA_K, u->b, t, u->h, f.k);
    load_decay(p, u, t, f.a, decay);
    const real qk = rule == LA_DELTA ? dot(kp, f.q, f.k) : 0;
    if (normalised) {
        load_z(p, LA_Z0, u, f.z);
        add_scaled(kp, f.z, 1, f.k);
        store_z(p, LA_Z0, u, f.z);
    }
    for (int64_t v0 = u->v0, W; v0 < u->v1; v0 += W * LANES) {
        const int64_t left = (u->v1 - v0) / LANES, ld = state->stride[2] / LANES;
        W = left >= MAX_STRIP ? MAX_STRIP : left < 4 ? left : 4;
        const la_strip S = {(lane_of_state *)at_column(state, u->n, u->hv, 0, v0), ld,
                            v0 == u->v0 ? (left - W) * (int64_t)sizeof(lane) : 0};
        load_row(f.v, W * LANES, at_column(v, u->b, t, u->hv, v0), v->dtype);
        token_of(S, W, p->K, f.q, f.k, lanes_in(f.v), f.a, beta, qk, lanes_of(f.o), decay, rule);
        finish_row(p, f.o, W * LANES, normalised, normalised ? dot(kp, f.q, f.z) : 0);
        store_row(at_column(o, u->b, t, u->hv, v0), o->dtype, f.o, W * LANES);
    }
}

/* ---- the adjoint ----
 *
 * As in chunks_backward, a state is kept for every segment, then for every token of one segment. */

typedef struct scan_backward_scratch {
    real *S, *dS;      /* [K][strip] */
    real *states;      /* [M][K*strip + kp]: before each token of a segment (state, z) */
    real *checkpoints; /* [segments][K*strip + kp] */
    real *q, *k, *a, *z, *dz, *kahan; /* [kp] */
    real *owed, *d_owed;              /* [kp]: to S, to dS */
    real *v, *o, *d_o, *dv;           /* [strip] */
    real *dq, *dk, *da;               /* [kp] */
} scan_backward_scratch;

LA_FN void scan_backward_take(scan_backward_scratch *f, arena *m, const la_problem *p,
                              int64_t length)
{
    const int64_t kp = padded(p->K), strip = PANEL_STRIP * LANES, M = segment_length(length);
    const int64_t kept = p->K * strip + kp;
    f->S = arena_take(m, p->K, strip);
    f->dS = arena_take(m, p->K, strip);
    f->states = arena_take(m, segment_room(length), kept);
    f->checkpoints = arena_take(m, (length + M - 1) / M, kept);
    real **rows[] = {&f->q,    &f->k,      &f->a,  &f->z,  &f->dz, &f->kahan,
                     &f->owed, &f->d_owed, &f->dq, &f->dk, &f->da};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) *rows[i] = arena_take(m, 1, kp);
    real **strips[] = {&f->v, &f->o, &f->d_o, &f->dv};
    for (size_t i = 0; i < sizeof strips / sizeof *strips; i++)
        *strips[i] = arena_take(m, 1, strip);
}

LA_FN void token_adjoint_any(const lane *S, lane *dS, int64_t W, int64_t K,
                             const scan_backward_scratch *f, real beta, real *dbeta,
                             const la_decay decay, const la_rule rule)
{
    const lane *v = lanes_in(f->v), *d_o = lanes_in(f->d_o);
    lane *dv = lanes_of(f->dv);
    switch (W) {
    case 1:
        la_token_adjoint(S, dS, 1, (int)K, f->q, f->k, v, f->a, beta, d_o, f->dq, f->dk, dv, f->da,
                         dbeta, decay, rule);
        break;
    case 2:
        la_token_adjoint(S, dS, 2, (int)K, f->q, f->k, v, f->a, beta, d_o, f->dq, f->dk, dv, f->da,
                         dbeta, decay, rule);
        break;
    case 3:
        la_token_adjoint(S, dS, 3, (int)K, f->q, f->k, v, f->a, beta, d_o, f->dq, f->dk, dv, f->da,
                         dbeta, decay, rule);
        break;
    default:
        la_token_adjoint(S, dS, 4, (int)K, f->q, f->k, v, f->a, beta, d_o, f->dq, f->dk, dv, f->da,
                         dbeta, decay, rule);
        break;
    }
}

LA_FN real scan_load(scan_backward_scratch *f, const la_problem *p, const la_unit *u, int64_t t,
                     int64_t v0, int64_t v1, real *owed, const la_decay decay, const la_rule rule)
{
    const la_array *v = &p->array[LA_V];
    load_key(p, LA_Q, u->b, t, u->h, f->q);
    load_key(p, LA_K, u->b, t, u->h, f->k);
    load_decay_paid_back(p, u, t, f->a, owed, decay);
    load_row(f->v, v1 - v0, at_column(v, u->b, t, u->hv, v0), v->dtype);
    return rule == LA_DELTA ? load_beta(p, u, t) : 1;
}

LA_FN void scan_backward(const la_problem *p, const la_unit *u, const la_partials *sums, arena *m,
                         const la_decay decay, const la_rule rule)
{
    const bool normalised = is_normalised(p, decay, rule);
    const la_array *d_o = &p->array[LA_DO], *dv = &p->array[LA_DV];
    const int64_t kp = padded(p->K), strip = PANEL_STRIP * LANES;
    const int64_t length = u->end - u->begin, M = segment_length(length);
    scan_backward_scratch f;
    scan_backward_take(&f, m, p, length);

    for (int64_t v0 = u->v0; v0 < u->v1; v0 += strip) {
        const int64_t v1 = v0 + strip < u->v1 ? v0 + strip : u->v1, width = padded(v1 - v0);
        const int64_t W = width / LANES, size = p->K * width, kept = size + kp;
        const bool first_strip = v0 == u->v0;
        load_state(p, LA_S0, u, v0, v1, f.S, width);
        load_state(p, LA_DST, u, v0, v1, f.dS, width);
        load_z(p, LA_Z0, u, f.z);
        fill(kp, f.kahan, 0);
        if (normalised && first_strip && u->panel == 0) /* once: the strips' gradients are added */
            load_z(p, LA_DZT, u, f.dz);
        else
            fill(kp, f.dz, 0);
        fill(kp, f.owed, 0);
        fill(kp, f.d_owed, 0);
        for (int64_t i = 0; i < length; i++) {
            if (i % TOKENS_A_CHECK == TOKENS_A_CHECK - 1 && la_stopped(p)) return;
            if (i % M == 0) {
                copy_row(size, f.checkpoints + i / M * kept, f.S);
                copy_row(kp, f.checkpoints + i / M * kept + size, f.z);
                if (i + M >= length) break;
            }
            real beta = scan_load(&f, p, u, u->begin + i, v0, v1, f.owed, decay, rule);
            token_any(la_strip_of((lane_of_state *)f.S, W), W, p->K, f.q, f.k, lanes_in(f.v), f.a,
                      beta, 0, lanes_of(f.o), decay, rule);
            if (normalised) add_keys(1, kp, f.k, f.z, f.kahan);
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
                real beta = scan_load(&f, p, u, u->begin + i, v0, v1, f.owed, decay, rule);
                token_any(la_strip_of((lane_of_state *)f.S, W), W, p->K, f.q, f.k, lanes_in(f.v),
                          f.a, beta, 0, lanes_of(f.o), decay, rule);
                if (normalised) add_keys(1, kp, f.k, f.z, f.kahan);
            }
            for (int64_t i = last - 1; i >= first; i--) {
                const int64_t t = u->begin + i;
                const real *S = f.states + (i - first) * kept;
                real *dq = partial_at(sums, sums->dq, u, t, kp),
                     *dk = partial_at(sums, sums->dk, u, t, kp);
                real *da = decay == LA_KEY     ? partial_at(sums, sums->da, u, t, kp)
                           : decay == LA_TOKEN ? partial_at(sums, sums->da, u, t, 1)
                                               : NULL;
                real *db = rule == LA_DELTA ? partial_at(sums, sums->dbeta, u, t, 1) : NULL,
                     dbeta = 0;
                real den = 0;
                real beta = scan_load(&f, p, u, t, v0, v1, f.d_owed, decay, rule);
                load_row(f.d_o, v1 - v0, at_column(d_o, u->b, t, u->hv, v0), d_o->dtype);
                fill(kp, f.dq, 0);
                fill(kp, f.dk, 0);
                fill(kp, f.da, 0);
                if (normalised) { /* z after the write */
                    copy_row(kp, f.z, S + size);
                    add_scaled(kp, f.z, 1, f.k);
                    den = dot(kp, f.q, f.z);
                }
                finish_row(p, f.d_o, width, normalised, den); /* the gradient of num */
                token_adjoint_any(lanes_in(S), lanes_of(f.dS), W, p->K, &f, beta, &dbeta, decay,
                                  rule);
                if (normalised) {
                    real d_den = d_denominator(p, den * (real)p->scale, dot(kp, f.q, f.dq));
                    add_scaled(kp, f.dq, d_den, f.z);
                    add_scaled(kp, f.dz, d_den, f.q);
                    add_scaled(kp, f.dk, 1, f.dz); /* was z <- z + k */
                }
                store_row(at_column(dv, u->b, t, u->hv, v0), dv->dtype, f.dv, v1 - v0);
                if (first_strip) {
                    copy_row(kp, dq, f.dq);
                    copy_row(kp, dk, f.dk);
                    if (decay == LA_KEY) copy_row(kp, da, f.da);
                    if (decay == LA_TOKEN) *da = f.da[0];
                    if (db) *db = dbeta;
                } else {
                    add_scaled(kp, dq, 1, f.dq);
                    add_scaled(kp, dk, 1, f.dk);
                    if (decay == LA_KEY) add_scaled(kp, da, 1, f.da);
                    if (decay == LA_TOKEN) *da += f.da[0];
                    if (db) *db += dbeta;
                }
            }
        }
        store_state(p, LA_DS0, u, v0, v1, f.dS, width);
        if (normalised) {
            if (first_strip)
                copy_row(kp, partial_z_at(p, sums, u), f.dz);
            else
                add_scaled(kp, partial_z_at(p, sums, u), 1, f.dz);
        }
    }
}
