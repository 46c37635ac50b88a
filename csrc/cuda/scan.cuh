/* Token by token: the recurrent mode, and every dtype the tensor cores would round.
 *
 * Included by one file per real type, which defines `real`.
 *
 * A block walks one sequence of one value head and COLUMNS of its value columns. PARTS neighbouring
 * threads share a column, each with ROWS of its K rows in registers (128 floats in one thread
 * would spill), and add up what they have by shuffles. Tokens come in batches through shared
 * memory. A normalised op has a column of ones: a warp of its own, whose state is z and whose read
 * is the denominator. */
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

/* The sums over the PARTS = 4 threads of a column. */
LA_FN void join_parts(real *x, real *y, int W)
{
    for (int w = 0; w < W; w++) x[w] = quad_sum(x[w]);
    for (int w = 0; w < W && y; w++) y[w] = quad_sum(y[w]);
}

#include "../recurrence.h"

enum { COLUMNS = 32, PARTS = 4, BATCH = 16, WARPS = COLUMNS * PARTS / 32 };

/* A row of K elements in shared memory: the four parts 16 bytes further apart than they are long,
 * so that four threads that read theirs at once meet four different banks. */
template <int ROWS> struct key_row {
    static constexpr int APART = ROWS + 16 / (int)sizeof(real);
    real x[PARTS * APART];
    __device__ real *part(int i) { return x + i * APART; }
    __device__ real &at(int i) { return x[i / ROWS * APART + i % ROWS]; }
};

template <int ROWS> struct batch {
    key_row<ROWS> q[BATCH], k[BATCH], a[BATCH]; /* a: per key; else one number each, in scalar_a */
    real scalar_a[BATCH], beta[BATCH], qk[BATCH];
    real v[BATCH][COLUMNS], o[BATCH][COLUMNS + 1]; /* o's last: the denominator */
};

/* One warp's share of K elements of q or k, as the recurrence sees them. */
template <int ROWS>
__device__ void load_keys(const call &c, const view &from, la_map map, double map_eps,
                          const unit &u, int t, real (&x)[ROWS * PARTS / 32])
{
    const int lane = threadIdx.x % 32;
    load_row(x, at(from, u.b, t, u.h), from.dtype, lane, 32, c.K);
    if (c.qk_l2norm) {
        real squares = 0;
#pragma unroll
        for (int j = 0; j < ROWS * PARTS / 32; j++) squares += x[j] * x[j];
        const real factor = l2norm_factor(warp_sum(squares));
#pragma unroll
        for (int j = 0; j < ROWS * PARTS / 32; j++) x[j] *= factor;
    }
    if (map == LA_IDENTITY) return;
#pragma unroll
    for (int j = 0; j < ROWS * PARTS / 32; j++)
        x[j] = lane + 32 * j < c.K ? apply_map(x[j], map, (real)map_eps) : 0;
}

/* Tokens t..t+n: a warp takes one token after another. */
template <la_decay DECAY, la_rule RULE, int ROWS>
__device__ void load_batch(const call &c, const unit &u, int t, int n, int v0, batch<ROWS> &to)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = warp; i < n; i += blockDim.x / 32) {
        real q[ROWS * PARTS / 32], k[ROWS * PARTS / 32], qk = 0;
        load_keys<ROWS>(c, c.q, c.map[0], c.map_eps[0], u, t + i, q);
        load_keys<ROWS>(c, c.k, c.map[1], c.map_eps[1], u, t + i, k);
#pragma unroll
        for (int j = 0; j < ROWS * PARTS / 32; j++) {
            to.q[i].at(lane + 32 * j) = q[j];
            to.k[i].at(lane + 32 * j) = k[j];
            qk += q[j] * k[j];
        }
        if (DECAY == LA_KEY) {
            real g[ROWS * PARTS / 32];
            load_row(g, at(c.g, u.b, t + i, u.hv), c.g.dtype, lane, 32, c.K);
#pragma unroll
            for (int j = 0; j < ROWS * PARTS / 32; j++)
                to.a[i].at(lane + 32 * j) = lane + 32 * j < c.K ? decay_of(g[j], c.gate) : 0;
        }
        if (RULE == LA_DELTA) {
            qk = warp_sum(qk);
            if (lane == 0) {
                to.qk[i] = qk;
                to.beta[i] = load<real>(at(c.beta, u.b, t + i, u.hv), c.beta.dtype);
            }
        }
        if (DECAY == LA_TOKEN && lane == 0)
            to.scalar_a[i] =
                decay_of(load<real>(at(c.g, u.b, t + i, u.hv), c.g.dtype), c.gate);
        to.v[i][lane] =
            v0 + lane < c.V ? load<real>(at(c.v, u.b, t + i, u.hv, v0 + lane), c.v.dtype) : 0;
    }
}

template <la_decay DECAY, la_rule RULE, int ROWS>
__global__ void __launch_bounds__((WARPS + 1) * 32) scan(const __grid_constant__ call c)
{
    extern __shared__ char shared[];
    batch<ROWS> &s = *(batch<ROWS> *)shared;
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS, tile = blockIdx.x % tiles;
    const int64_t head = blockIdx.x / tiles;
    unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    u.n = slot_of(c, u.n);
    const int v0 = tile * COLUMNS, part = threadIdx.x % PARTS;
    const bool ones = threadIdx.x / 32 == WARPS; /* the column of ones, eight times over */
    const int local = ones ? COLUMNS : threadIdx.x / PARTS, column = v0 + local;
    const bool mine = !ones && column < c.V;
    real S[ROWS];

    if (u.n < 0) { /* a step's row without a state */
        if (mine && part == 0) store(at(c.o, u.b, 0, u.hv, column), c.o.dtype, (real)0);
        return;
    }

    const view &from = ones ? c.z0 : c.s0, &to = ones ? c.zt : c.st;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = part * ROWS + i;
        S[i] = 0;
        if (from.data && row < c.K && (ones || mine))
            S[i] = load<real>(at(from, u.n, u.hv, row, ones ? 0 : column), from.dtype);
    }

    /* The non-causal form goes through the tokens twice: to write all, then to read. */
    for (int pass = c.causal ? 1 : 0; pass < 2; pass++)
        for (int t = u.begin; t < u.end; t += BATCH) {
            const int n = min(BATCH, u.end - t);
            __syncthreads(); /* the batch before has been stored */
            load_batch<DECAY, RULE, ROWS>(c, u, t, n, v0, s);
            __syncthreads();
            for (int i = 0; i < n; i++) {
                const real v = ones ? 1 : s.v[i][local];
                const real *a = DECAY == LA_KEY ? s.a[i].part(part) : s.scalar_a + i;
                real o;
                if (c.causal || pass == 0)
                    la_token(S, 1, 1, ROWS, s.q[i].part(part), s.k[i].part(part), &v, a,
                             RULE == LA_DELTA ? s.beta[i] : 0, RULE == LA_DELTA ? s.qk[i] : 0, &o,
                             DECAY, RULE);
                else
                    la_predict(S, 1, 1, ROWS, s.q[i].part(part), NULL, a, &o, NULL, DECAY);
                if (part == 0) s.o[i][local] = o;
            }
            if (pass == 0) continue;
            __syncthreads();
            const int lane = threadIdx.x % 32;
            for (int i = threadIdx.x / 32; i < n; i += blockDim.x / 32)
                if (v0 + lane < c.V)
                    store(at(c.o, u.b, t + i, u.hv, v0 + lane), c.o.dtype,
                          finish(c, s.o[i][lane], s.o[i][COLUMNS]));
        }

    if (!to.data || !(mine || (ones && tile == 0))) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = part * ROWS + i;
        if (row < c.K) store(at(to, u.n, u.hv, row, ones ? 0 : column), to.dtype, S[i]);
    }
}

/* A step's z is where every tile of columns reads it, so it moves on once they are done. */
template <int ROWS> static __global__ void __launch_bounds__(32) advance_z(const __grid_constant__ call c)
{
    unit u = unit_of(c, blockIdx.x / c.HV, blockIdx.x % c.HV);
    u.n = slot_of(c, u.n);
    real k[ROWS * PARTS / 32];
    if (u.n < 0) return;
    load_keys<ROWS>(c, c.k, c.map[1], c.map_eps[1], u, 0, k);
#pragma unroll
    for (int j = 0; j < ROWS * PARTS / 32; j++) {
        const int i = threadIdx.x + 32 * j;
        if (i >= c.K) continue;
        char *z = at(c.z0, u.n, u.hv, i);
        store(z, c.z0.dtype, load<real>(z, c.z0.dtype) + k[j]);
    }
}

template <la_decay DECAY, la_rule RULE, int ROWS>
static cudaError_t launch_scan(const call &c, cudaStream_t stream)
{
    const auto kernel = scan<DECAY, RULE, ROWS>;
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS, bytes = sizeof(batch<ROWS>);
    const int64_t blocks = (int64_t)c.N * c.HV * tiles;
    const int warps = WARPS + (c.normaliser != LA_UNNORMALISED);
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    call d = c;
    const bool in_place = c.zt.data && c.zt.data == c.z0.data;
    if (in_place) d.zt.data = NULL;
    kernel<<<(unsigned)blocks, warps * 32, bytes, stream>>>(d);
    if (in_place) advance_z<ROWS><<<(unsigned)(c.N * c.HV), 32, 0, stream>>>(c);
    return cudaGetLastError();
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t scan_any(const call &c, cudaStream_t stream)
{
    if (c.K <= 64) return launch_scan<DECAY, RULE, 16>(c, stream);
    if (c.K <= 128) return launch_scan<DECAY, RULE, 32>(c, stream);
    return launch_scan<DECAY, RULE, 64>(c, stream);
}
