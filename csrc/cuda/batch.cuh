/* Token by token, the part of the threads. PARTS neighbouring threads share a value column, each
 * with ROWS of its K rows. Tokens come through shared memory, BATCH at a time. Included once per
 * file, which defines `real`, COLUMNS, PARTS and BATCH before it. */
#ifndef LINATTN_CUDA_BATCH_CUH
#define LINATTN_CUDA_BATCH_CUH

#include "kernels.cuh"
#include "load.cuh"
#include "states.cuh"

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL _Pragma("unroll")
#define JOIN(x, y, W) join_parts(x, y, W)
typedef real lane;
typedef real lane_of_state;
enum { MAX_STRIP = 1 };

__device__ __forceinline__ real parts_sum(real x)
{
#pragma unroll
    for (int step = 1; step < PARTS; step *= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* The sums over the threads of a column. */
LA_FN void join_parts(real *x, real *y, int W)
{
    for (int w = 0; w < W; w++) x[w] = parts_sum(x[w]);
    for (int w = 0; w < W && y; w++) y[w] = parts_sum(y[w]);
}

#include "../recurrence.h"

enum { WARPS = COLUMNS * PARTS / 32 };

/* A row of K elements in shared memory. The parts are 16 bytes further apart than they are long, so
 * that threads that read their parts at the same time use different banks. */
template <int ROWS> struct key_row {
    static constexpr int APART = ROWS + 16 / (int)sizeof(real);
    real x[PARTS * APART];
    __device__ real *part(int i) { return x + i * APART; }
    __device__ real &at(int i) { return x[i / ROWS * APART + i % ROWS]; }
};

/* The further arrays of the rare kinds. */
template <int ROWS, bool RARE> struct rare_rows {};
template <int ROWS> struct rare_rows<ROWS, true> {
    key_row<ROWS> x[BATCH], y[BATCH], bonus;
    real eta[BATCH], qy[BATCH];
};

/* RARE: a rare kind (kinds.def), or a delta rule whose x is given. */
template <int ROWS, bool RARE> struct batch : rare_rows<ROWS, RARE> {
    /* a: of a decay per key; a scalar decay is in scalar_a */
    key_row<ROWS> q[BATCH], k[BATCH], a[BATCH];
    real scalar_a[BATCH], beta[BATCH], qk[BATCH];
    real v[BATCH][COLUMNS], o[BATCH][COLUMNS + 1]; /* the last element of o is the denominator */
};

/* The part of a state that a thread has: ROWS keys of one column. */
template <int ROWS>
__device__ __forceinline__ void load_part(const call &c, const view &from, const unit &u, int part,
                                          int column, real (&x)[ROWS])
{
    const state_of_head state(c, from, u.n, u.hv);
    load_numbers(x, from.dtype, [&](int i) { return state.place(part * ROWS + i, column); });
}

template <int ROWS>
__device__ __forceinline__ void store_part(const call &c, const view &to, const unit &u, int part,
                                           int column, const real (&x)[ROWS])
{
    const state_of_head state(c, to, u.n, u.hv);
    store_numbers(x, to.dtype, [&](int i) { return state.place(part * ROWS + i, column); });
}

/* Such calls may be noncausal, and q may then end before k and v, or after them. */
template <la_decay DECAY, la_rule RULE>
constexpr bool is_plain = DECAY == LA_NONE && RULE == LA_ADDITIVE;

/* The share of one warp of K elements of q or k, as the recurrence sees them. K is 0 for a token
 * that is not there. */
template <int ROWS>
__device__ void load_keys(const call &c, const view &from, int map, const unit &u, int t, int K,
                          real (&x)[ROWS * PARTS / 32])
{
    load_row<LA_DTYPE_OF_Q>(x, at(from, u.b, t, u.h), from.dtype, (int)threadIdx.x % 32, 32, K);
    norm_and_map(c, map, x, every_32nd());
}

/* Are x and y given as rows of their own? */
template <la_decay DECAY, la_rule RULE, bool RARE>
constexpr bool has_x = RARE && la_predicts_after(DECAY, RULE) || RULE == LA_DPLR;

/* A row of x, y or the bonus, as the caller gave it. */
template <la_dtypes OF, int ROWS>
__device__ void load_plain_row(const call &c, const view &from, const char *row,
                               real (&x)[ROWS * PARTS / 32], key_row<ROWS> &to)
{
    const int lane = threadIdx.x % 32;
    load_row<OF>(x, row, from.dtype, lane, 32, c.K);
#pragma unroll
    for (int j = 0; j < ROWS * PARTS / 32; j++) to.at(lane + 32 * j) = x[j];
}

/* The rest of token t, which is the batch's i-th, and its q . k (with a bonus) and q . y. */
template <la_decay DECAY, la_rule RULE, int ROWS>
__device__ void load_rare(const call &c, const unit &u, int t, int i,
                          const real (&q)[ROWS * PARTS / 32], const real (&k)[ROWS * PARTS / 32],
                          batch<ROWS, true> &to)
{
    const view &of_x = c.x[LA_X], &of_y = c.x[LA_Y], &of_bonus = c.x[LA_U], &eta = c.x[LA_ETA];
    real x[ROWS * PARTS / 32], qk = 0, qy = 0;
    if (has_x<DECAY, RULE, true>)
        load_plain_row<LA_DTYPE_OF_Q, ROWS>(c, of_x, at(of_x, u.b, t, u.h), x, to.x[i]);
    if (RULE == LA_DPLR)
        load_plain_row<LA_DTYPE_OF_Q, ROWS>(c, of_y, at(of_y, u.b, t, u.h), x, to.y[i]);
#pragma unroll
    for (int j = 0; j < ROWS * PARTS / 32 && RULE == LA_DPLR; j++) qy += q[j] * x[j];
    if (RULE == LA_BONUS)
        load_plain_row<LA_DTYPE_FLOAT, ROWS>(c, of_bonus, at(of_bonus, u.h), x, to.bonus);
#pragma unroll
    for (int j = 0; j < ROWS * PARTS / 32; j++) qk += q[j] * (RULE == LA_BONUS ? x[j] : 1) * k[j];
    qk = warp_sum(qk);
    qy = warp_sum(qy);
    if (threadIdx.x % 32) return;
    to.qk[i] = qk;
    to.qy[i] = qy;
    if (DECAY == LA_PAIR) to.eta[i] = eta.data ? load<real>(at(eta, u.b, t, u.hv), eta.dtype) : 0;
}

/* Tokens t..t+n. A warp loads one token after another. */
template <la_decay DECAY, la_rule RULE, int ROWS, bool RARE>
__device__ void load_batch(const call &c, const unit &u, int t, int n, int v0,
                           batch<ROWS, RARE> &to)
{
    constexpr bool PLAIN = is_plain<DECAY, RULE>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < n; i += blockDim.x / 32) {
        real q[ROWS * PARTS / 32], k[ROWS * PARTS / 32], qk = 0;
        const bool reads = !PLAIN || t + i < c.queries, writes = !PLAIN || t + i < c.keys;
        load_keys<ROWS>(c, c.x[LA_Q], 0, u, t + i, reads ? c.K : 0, q);
        load_keys<ROWS>(c, c.x[LA_K], 1, u, t + i, writes ? c.K : 0, k);
#pragma unroll
        for (int j = 0; j < ROWS * PARTS / 32; j++) {
            to.q[i].at(lane + 32 * j) = q[j];
            to.k[i].at(lane + 32 * j) = k[j];
            qk += q[j] * k[j];
        }
        if (DECAY == LA_KEY) {
            real g[ROWS * PARTS / 32];
            load_row<LA_DTYPE_FLOAT>(g, at(c.x[LA_G], u.b, t + i, u.hv), c.x[LA_G].dtype, lane, 32,
                                     c.K);
#pragma unroll
            for (int j = 0; j < ROWS * PARTS / 32; j++)
                to.a[i].at(lane + 32 * j) = lane + 32 * j < c.K ? decay_of(g[j], c.gate) : 0;
        }
        if constexpr (RARE) load_rare<DECAY, RULE, ROWS>(c, u, t + i, i, q, k, to);
        if (RULE == LA_DELTA) {
            if (!RARE) qk = warp_sum(qk);
            if (lane == 0) {
                if (!RARE) to.qk[i] = qk;
                to.beta[i] = load<real>(at(c.x[LA_BETA], u.b, t + i, u.hv), c.x[LA_BETA].dtype);
            }
        }
        if ((DECAY == LA_TOKEN || DECAY == LA_PAIR) && lane == 0)
            to.scalar_a[i] =
                decay_of(load<real>(at(c.x[LA_G], u.b, t + i, u.hv), c.x[LA_G].dtype), c.gate);
        if (lane < COLUMNS)
            to.v[i][lane] =
                v0 + lane < c.V && writes
                    ? load<real>(at(c.x[LA_V], u.b, t + i, u.hv, v0 + lane), c.x[LA_V].dtype)
                    : 0;
    }
}

/* The same as a function that is called. Three inlined copies in a kernel cost registers, and half
 * of the compile time. */
template <la_decay DECAY, la_rule RULE, int ROWS, bool RARE>
__device__ __noinline__ void call_load_batch(const call &c, const unit &u, int t, int n, int v0,
                                             batch<ROWS, RARE> &to)
{
    load_batch<DECAY, RULE, ROWS>(c, u, t, n, v0, to);
}

/* The i-th token of the batch, for a thread with some rows of one column. */
template <la_decay DECAY, la_rule RULE, int ROWS, bool RARE>
__device__ __forceinline__ la_operands operands_of(batch<ROWS, RARE> &s, int i, int part,
                                                   int column)
{
    la_operands x = {};
    x.q = s.q[i].part(part);
    x.k = x.x = s.k[i].part(part);
    x.a = DECAY == LA_KEY ? s.a[i].part(part) : s.scalar_a + i;
    x.v = &s.v[i][column];
    if (RULE == LA_DELTA) x.beta = s.beta[i], x.own = s.qk[i];
    if (la_weighs(DECAY, RULE)) x.beta = 1; /* gradients have no weights of writes */
    if constexpr (RARE) {
        x.own = s.qk[i];
        if (has_x<DECAY, RULE, true>) x.x = s.x[i].part(part);
        if (RULE == LA_DPLR) x.y = s.y[i].part(part), x.qy = s.qy[i];
        if (RULE == LA_BONUS) x.bonus = s.bonus.part(part);
        if (DECAY == LA_PAIR) x.eta = s.eta[i];
    }
    return x;
}

#endif
