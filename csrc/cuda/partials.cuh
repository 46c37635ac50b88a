/* Gradients, token by token: what the blocks of `adjoint` leave, and its reduction.
 *
 * Sums over value columns (dq, dk, da, dbeta) end as partials, one per value head and block of
 * columns. `reduce_partials` adds them up in their order, and applies the adjoint of loading to q,
 * k and the gate. Included by adjoint.cuh, once per file. */
#ifndef LINATTN_CUDA_PARTIALS_CUH
#define LINATTN_CUDA_PARTIALS_CUH

#include "batch.cuh"
#include "normaliser.cuh"

__device__ __forceinline__ bool is_needless(const gradients &d) { return is_needless(d.range); }

enum { REDUCE_THREADS = 256 };

/* The rows that are summed over value columns, and the numbers: da of a scalar decay, .. */
enum row_of_sums { OF_Q, OF_K, OF_A, OF_X, OF_Y, ROWS_OF_SUMS };
enum number_of_sums { OF_SCALAR, OF_BETA, OF_ETA, NUMBERS_OF_SUMS };
template <la_decay DECAY, la_rule RULE, bool RARE>
__host__ __device__ constexpr bool is_summed(row_of_sums row)
{
    return row == OF_Q || row == OF_K || (row == OF_A && DECAY == LA_KEY) ||
           (row == OF_X && has_x<DECAY, RULE, RARE>) || (row == OF_Y && RULE == LA_DPLR);
}
template <la_decay DECAY, la_rule RULE>
__host__ __device__ constexpr bool is_summed(number_of_sums number)
{
    return (number == OF_SCALAR && (DECAY == LA_TOKEN || DECAY == LA_PAIR)) ||
           (number == OF_BETA && RULE == LA_DELTA) || (number == OF_ETA && DECAY == LA_PAIR);
}

/* Scratch for the value heads first..first + heads of a turn. Partials are [heads][tiles]. */
struct adjoint_scratch {
    /* segments: of all sequences, with up to N of them unused; kept: states of a segment that are
     * kept, and with batches one more for the gradient of M0 */
    int first, heads, tiles, M, segments, kept;
    int kp;         /* K, padded */
    int64_t tokens; /* B T */
    /* [partials][tokens][kp], but da of a scalar decay: [partials][tokens] */
    real *dq, *dk, *da, *dx, *dy;
    real *dbeta, *deta; /* [partials][tokens] */
    double *dbonus;     /* [N][partials][kp]: the sum over a sequence's tokens */
    real *den;          /* normalised: [heads][tokens], the denominators */
    double *z;          /* normalised: the sums of keys by segment */
    /* [partials][segments + N kept][ROWS][ADJOINT_THREADS]; a pair: twice the rows */
    real *states;
};

/* dx, the gradient of q or k as the recurrence sees it, becomes that of the array of the user. A
 * warp has a row. */
template <int KEYS>
__device__ void store_key_gradient(const call &c, const view &from, const view &to, int map, int b,
                                   int t, int h, real (&dx)[KEYS])
{
    const int lane = threadIdx.x % 32;
    real x[KEYS];
    load_row<LA_DTYPE_OF_Q>(x, at(from, b, t, h), from.dtype, lane, 32, c.K);
    key_gradient(c, map, x, dx);
    store_row<LA_DTYPE_OF_Q>(dx, at(to, b, t, h), to.dtype, lane, 32, c.K);
}

/* A warp has a token of one q/k head, and of the value heads that read it. */
template <la_decay DECAY, la_rule RULE, int KEYS, bool RARE>
static __global__ void __launch_bounds__(128)
    reduce_partials(const __grid_constant__ call c, const __grid_constant__ gradients d,
                    const __grid_constant__ adjoint_scratch f)
{
    if (is_needless(d)) return;
    const int group = c.HV / c.H, heads = f.heads / group, lane = threadIdx.x % 32;
    const int64_t i = (int64_t)blockIdx.x * 4 + threadIdx.x / 32, token = i / heads;
    if (token >= f.tokens) return;
    const int own = (int)(i % heads), h = f.first / group + own;
    const int b = (int)(token / c.T), t = (int)(token % c.T);
    const auto add_run = [&](const real *from, int first, int count, real(&x)[KEYS]) {
#pragma unroll
        for (int j = 0; j < KEYS; j++) x[j] = 0;
        for (int partial = first; partial < first + count; partial++)
#pragma unroll
            for (int j = 0; j < KEYS; j++)
                if (lane + 32 * j < f.kp)
                    x[j] += from[(partial * f.tokens + token) * f.kp + lane + 32 * j];
    };
    /* Narrow blocks of columns leave many partials, so the sum has two levels
     * (docs/decisions/0011). Blocks of 32 columns leave 16 at most. */
    constexpr int RUN = COLUMNS < 32 ? 8 : 16;
    const auto add_partials = [&](const real *from, int first, int count, real(&x)[KEYS]) {
        if constexpr (COLUMNS >= 32) {
            add_run(from, first, count, x);
        } else {
            real run[KEYS];
            add_run(from, first, min(RUN, count), x);
            for (int done = RUN; done < count; done += RUN) {
                add_run(from, first + done, min(RUN, count - done), run);
#pragma unroll
                for (int j = 0; j < KEYS; j++) x[j] += run[j];
            }
        }
    };
    const auto add_numbers = [&](const real *from, int first) {
        real x = 0;
        for (int done = 0; done < f.tiles; done += RUN) {
            real run = 0;
            for (int partial = first + done; partial < first + min(done + RUN, f.tiles); partial++)
                run += from[partial * f.tokens + token];
            x += run;
        }
        return x;
    };
    constexpr bool PLAIN = is_plain<DECAY, RULE>;
    real x[KEYS];
#pragma unroll 1
    for (int map = 0; map < 2; map++) {
        if (PLAIN && t >= (map ? c.keys : c.queries)) continue;
        add_partials(map ? f.dk : f.dq, own * group * f.tiles, group * f.tiles, x);
        store_key_gradient<KEYS>(c, c.x[map ? LA_K : LA_Q], d[map ? LA_DK : LA_DQ], map, b, t, h,
                                 x);
    }
    const auto store_plain = [&](const real *from, const view &to) {
        add_partials(from, own * group * f.tiles, group * f.tiles, x);
        store_row<LA_DTYPE_OF_Q>(x, at(to, b, t, h), to.dtype, lane, 32, c.K);
    };
    if constexpr (is_summed<DECAY, RULE, RARE>(OF_X)) store_plain(f.dx, d[LA_DX]);
    if constexpr (is_summed<DECAY, RULE, RARE>(OF_Y)) store_plain(f.dy, d[LA_DY]);
    for (int hv = h * group; hv < (h + 1) * group; hv++) {
        const int first = (hv - f.first) * f.tiles;
        if constexpr (DECAY == LA_KEY) {
            real g[KEYS];
            add_partials(f.da, first, f.tiles, x);
            load_row<LA_DTYPE_FLOAT>(g, at(c.x[LA_G], b, t, hv), c.x[LA_G].dtype, lane, 32, c.K);
#pragma unroll
            for (int j = 0; j < KEYS; j++)
                x[j] = gate_gradient(x[j], decay_of(g[j], c.gate), d.gate);
            store_row<LA_DTYPE_FLOAT>(x, at(d[LA_DG], b, t, hv), d[LA_DG].dtype, lane, 32, c.K);
        }
        if (is_summed<DECAY, RULE>(OF_SCALAR) && !d.per_head && lane == 0) {
            const real a = decay_of(load<real>(at(c.x[LA_G], b, t, hv), c.x[LA_G].dtype), c.gate);
            store(at(d[LA_DG], b, t, hv), d[LA_DG].dtype,
                  gate_gradient(add_numbers(f.da, first), a, d.gate));
        }
        if (RULE == LA_DELTA && lane == 0)
            store(at(d[LA_DBETA], b, t, hv), d[LA_DBETA].dtype, add_numbers(f.dbeta, first));
        if (DECAY == LA_PAIR && lane == 0 && d[LA_DETA].data)
            store(at(d[LA_DETA], b, t, hv), d[LA_DETA].dtype, add_numbers(f.deta, first));
    }
}

/* dbonus of a q/k head: the sums of its sequences, value heads and blocks of columns. */
static __global__ void reduce_bonus(const __grid_constant__ call c,
                                    const __grid_constant__ gradients d,
                                    const __grid_constant__ adjoint_scratch f)
{
    if (is_needless(d)) return;
    const int group = c.HV / c.H, own = blockIdx.x, count = group * f.tiles;
    for (int i = threadIdx.x; i < c.K; i += blockDim.x) {
        double x = 0;
        for (int64_t n = 0; n < c.N; n++)
            for (int p = own * count; p < (own + 1) * count; p++)
                x += f.dbonus[(n * f.heads * f.tiles + p) * f.kp + i];
        store(at(d[LA_DU], f.first / group + own, i), d[LA_DU].dtype, (real)x);
    }
}

/* Only once in a kernel: a second sum would overwrite the parts of the first. */
__device__ inline double block_sum(double x)
{
    __shared__ double of_warps[REDUCE_THREADS / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < blockDim.x / 32; i++) sum += of_warps[i];
    return sum;
}

/* One decay serves all tokens, so its gradients add up. A block has a value head. */
static __global__ void __launch_bounds__(REDUCE_THREADS)
    reduce_gate_of_head(const __grid_constant__ call c, const __grid_constant__ gradients d,
                        const __grid_constant__ adjoint_scratch f)
{
    if (is_needless(d)) return;
    const int hv = f.first + blockIdx.x;
    const real *from = f.da + (int64_t)blockIdx.x * f.tiles * f.tokens;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < f.tiles * f.tokens; i += blockDim.x) sum += from[i];
    sum = block_sum(sum);
    const real a = decay_of(load<real>(at(c.x[LA_G], 0, 0, hv), c.x[LA_G].dtype), c.gate);
    if (threadIdx.x == 0)
        store(at(d[LA_DG], 0, 0, hv), d[LA_DG].dtype, gate_gradient((real)sum, a, d.gate));
}

template <la_decay DECAY, la_rule RULE, int KEYS, bool RARE>
static cudaError_t launch_reduce(const call &c, const gradients &d, const adjoint_scratch &f,
                                 cudaStream_t stream)
{
    const int64_t rows = f.tokens * (f.heads / (c.HV / c.H));
    return launch(reduce_partials<DECAY, RULE, KEYS, RARE>, (rows + 3) / 4, 128, 0, stream, c, d,
                  f);
}

#endif
