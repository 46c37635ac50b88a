/* Token by token, the part of the threads. PARTS neighbouring threads share a value column, each
 * with ROWS of its K rows. Tokens come through shared memory, BATCH at a time. Included once per
 * file, which defines `real`, COLUMNS, PARTS and BATCH before it. */
#ifndef LINATTN_CUDA_BATCH_CUH
#define LINATTN_CUDA_BATCH_CUH

#include "kernels.cuh"
#include "load.cuh"

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

template <int ROWS> struct batch {
    /* a: of a decay per key; a scalar decay is in scalar_a */
    key_row<ROWS> q[BATCH], k[BATCH], a[BATCH];
    real scalar_a[BATCH], beta[BATCH], qk[BATCH];
    real v[BATCH][COLUMNS], o[BATCH][COLUMNS + 1]; /* the last element of o is the denominator */
};

/* Such calls may be noncausal, and q may then end before k and v, or after them. */
template <la_decay DECAY, la_rule RULE>
constexpr bool is_plain = DECAY == LA_NONE && RULE == LA_ADDITIVE;

/* The share of one warp of K elements of q or k, as the recurrence sees them. K is 0 for a token
 * that is not there. */
template <int ROWS>
__device__ void load_keys(const call &c, const view &from, int map, const unit &u, int t, int K,
                          real (&x)[ROWS * PARTS / 32])
{
    load_row(x, at(from, u.b, t, u.h), from.dtype, (int)threadIdx.x % 32, 32, K);
    norm_and_map(c, map, x, every_32nd());
}

/* Tokens t..t+n. A warp loads one token after another. */
template <la_decay DECAY, la_rule RULE, int ROWS>
__device__ void load_batch(const call &c, const unit &u, int t, int n, int v0, batch<ROWS> &to)
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
            load_row(g, at(c.x[LA_G], u.b, t + i, u.hv), c.x[LA_G].dtype, lane, 32, c.K);
#pragma unroll
            for (int j = 0; j < ROWS * PARTS / 32; j++)
                to.a[i].at(lane + 32 * j) = lane + 32 * j < c.K ? decay_of(g[j], c.gate) : 0;
        }
        if (RULE == LA_DELTA) {
            qk = warp_sum(qk);
            if (lane == 0) {
                to.qk[i] = qk;
                to.beta[i] = load<real>(at(c.x[LA_BETA], u.b, t + i, u.hv), c.x[LA_BETA].dtype);
            }
        }
        if (DECAY == LA_TOKEN && lane == 0)
            to.scalar_a[i] =
                decay_of(load<real>(at(c.x[LA_G], u.b, t + i, u.hv), c.x[LA_G].dtype), c.gate);
        if (lane < COLUMNS)
            to.v[i][lane] = v0 + lane < c.V && writes
                                ? load<real>(at(c.x[LA_V], u.b, t + i, u.hv, v0 + lane),
                                             c.x[LA_V].dtype)
                                : 0;
    }
}

/* The same as a function that is called. With so many keys per lane, three inlined copies in a
 * kernel would cost registers and half of the compile time. */
template <la_decay DECAY, la_rule RULE, int ROWS>
__device__ __noinline__ void load_batch_of_many(const call &c, const unit &u, int t, int n, int v0,
                                                batch<ROWS> &to)
{
    load_batch<DECAY, RULE, ROWS>(c, u, t, n, v0, to);
}

#endif
