/* The step: one token, and the state is changed in place. The time is that of reading and writing
 * the state once, in whole cache lines.
 *
 * A block has COLUMNS value columns of the state of one head. In the layout [K][V] eight threads go
 * along a row, with four columns each, and 32 such groups share the rows. In [V][K] a warp goes
 * along the keys of four columns. In both layouts a thread has ROWS keys of four columns, which it
 * moves 16 bytes at a time. Every warp computes q, k and the gates for itself: with one batch row a
 * step is all latency, and this way no warp waits for another. Included by one file per layout,
 * which defines V_FIRST. */
#include "kernels.cuh"
#include "token.cuh"

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL _Pragma("unroll")
#define JOIN(x, y, W) join(x, y)
typedef float real, lane, lane_of_state;
enum { MAX_STRIP = 4, COLUMNS = 32, THREADS = 256, WARPS = THREADS / 32 };

struct step_room { /* [K][V] only: the sums of each warp, for eight times four columns */
    float4 sums[2][WARPS][8];
};
extern __shared__ __align__(16) char step_shared[];

/* The sums over all threads that have these columns. Called once per launch, so the shared memory
 * is not used again. */
LA_FN void join(float *x, float *y)
{
    const int lane = threadIdx.x % 32;
    for (int step = V_FIRST ? 1 : 8; step < 32; step *= 2)
#pragma unroll
        for (int w = 0; w < 4; w++) {
            x[w] += __shfl_xor_sync(~0u, x[w], step);
            if (y) y[w] += __shfl_xor_sync(~0u, y[w], step);
        }
    if (V_FIRST) return;
    step_room *s = (step_room *)step_shared;
    if (lane < 8) {
        s->sums[0][threadIdx.x / 32][lane] = make_float4(x[0], x[1], x[2], x[3]);
        if (y) s->sums[1][threadIdx.x / 32][lane] = make_float4(y[0], y[1], y[2], y[3]);
    }
    __syncthreads();
#pragma unroll
    for (int which = 0; which < 2; which++) {
        float *to = which ? y : x;
        if (!to) continue;
        to[0] = to[1] = to[2] = to[3] = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) {
            const float4 z = s->sums[which][i][lane % 8];
            to[0] += z.x;
            to[1] += z.y;
            to[2] += z.z;
            to[3] += z.w;
        }
    }
}

#include "../recurrence.h"

/* Division of a number from 0 to 2^31 by a multiplication: n factor / 2^(31 + l) with by <= 2^l
 * (Granlund and Montgomery 1994). Three divisions in a row would take a tenth of a microsecond. */
struct divisor {
    uint32_t factor;
    int shift, by;
    explicit divisor(int by) : by(by)
    {
        int l = 0;
        while ((1LL << l) < by) l++;
        shift = 31 + l;
        factor = (uint32_t)((1ULL << shift) / (uint64_t)by + 1);
    }
};

/* Returns the quotient, and leaves the remainder in n. */
__device__ __forceinline__ int divide(int &n, const divisor &d)
{
    const int quotient = (int)((uint64_t)(uint32_t)n * d.factor >> d.shift);
    n -= quotient * d.by;
    return quotient;
}

/* ALL_VECTORS: a state of float32 whose rows consist of pieces of 16 bytes. */
template <la_decay DECAY, la_rule RULE, int ROWS, bool ALL_VECTORS>
static __global__ void __launch_bounds__(THREADS, ALL_VECTORS &&ROWS == 4 ? 3 : 2)
    step(const __grid_constant__ call c, const bool vector, const divisor tiles,
         const divisor heads, const divisor group)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int tile = blockIdx.x;
    int hv = divide(tile, tiles);
    const int n = divide(hv, heads);
    int in_group = hv;
    const int h = divide(in_group, group), state_index = state_index_of(c, n);
    const int column = tile * COLUMNS + (V_FIRST ? warp : threadIdx.x % 8) * 4;
    /* the lane that computes the keys of this thread */
    const int keeper = V_FIRST ? lane : threadIdx.x / 8;
    const auto key_of = [&](int i) { return key_of_lane(keeper, i); };
    float S[ROWS][4] = {}, q[ROWS], k[ROWS], a[DECAY == LA_KEY ? ROWS : 1], v[4], o[4];

    if (state_index < 0) { /* a padded row: it has no state */
        if (V_FIRST ? lane == 0 : threadIdx.x < 8)
            for (int w = 0; w < 4 && column + w < c.V; w++)
                store(at(c.x[LA_O], n, 0, hv, column + w), c.x[LA_O].dtype, 0.0f);
        return;
    }

    char *state = at(c.x[LA_S0], state_index, hv);
    const int size = la_size_of(c.x[LA_S0].dtype);
    const int64_t apart = c.x[LA_S0].stride[V_FIRST ? 3 : 2];
    float *of_thread =
        (float *)state + (V_FIRST ? column * apart + lane * 4 : key_of(0) * apart + column);
    /* piece i of the thread: in [V][K] column i % 4 and four keys from key i / 4 * 4 on; in [K][V]
     * key i */
    const auto piece_of = [&](int i) {
        return of_thread + (V_FIRST ? i % 4 * apart + i / 4 * 128 : (i / 4 * 128 + i % 4) * apart);
    };
    float4 x[ALL_VECTORS ? ROWS : 1];
    if constexpr (ALL_VECTORS) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const bool there = V_FIRST ? column + i % 4 < c.V && key_of(i / 4 * 4) < c.K
                                       : column < c.V && key_of(i) < c.K;
            x[i] = there ? *(const float4 *)piece_of(i) : make_float4(0, 0, 0, 0);
        }
    } else if (V_FIRST) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float x[4] = {};
                if (column + w < c.V && key_of(i) < c.K)
                    load_four(x, state + (key_of(i) + (column + w) * c.x[LA_S0].stride[3]) * size,
                              c.x[LA_S0].dtype, c.K - key_of(i), vector);
#pragma unroll
                for (int e = 0; e < 4; e++) S[i + e][w] = x[e];
            }
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (key_of(i) < c.K && column < c.V)
                load_four(S[i], state + (key_of(i) * c.x[LA_S0].stride[2] + column) * size,
                          c.x[LA_S0].dtype, c.V - column, vector);
    }

    /* Start all loads before the first wait. */
    four_bits q_bits[ROWS / 4], k_bits[ROWS / 4];
    four_bits a_bits[ROWS / 4];
    uint64_t g_bits = 0, beta_bits = 0;
    load_key_bits<ROWS>(c, c.x[LA_Q], n, h, q_bits);
    load_key_bits<ROWS>(c, c.x[LA_K], n, h, k_bits);
    if constexpr (DECAY == LA_KEY) load_decay_bits<ROWS>(c, n, hv, a_bits);
    if (DECAY == LA_TOKEN) g_bits = bits_of(at(c.x[LA_G], n, 0, hv), c.x[LA_G].dtype);
    const view &factor = c.x[la_weighs(DECAY, RULE) ? LA_WEIGHT : LA_BETA];
    const bool has_factor = RULE == LA_DELTA || (la_weighs(DECAY, RULE) && factor.data);
    if (has_factor) beta_bits = bits_of(at(factor, n, 0, hv), factor.dtype);
    const four_bits v_bits =
        load_four_bits(at(c.x[LA_V], n, 0, hv, column), c.x[LA_V].dtype, c.V - column);

    float qk = 0, den = 0;
    make_key(c, q_bits, c.x[LA_Q].dtype, 0, q);
    make_key(c, k_bits, c.x[LA_K].dtype, 1, k);
    if constexpr (DECAY == LA_KEY) make_decay(c, a_bits, a);
    if (DECAY == LA_TOKEN) a[0] = decay_of(number(g_bits, c.x[LA_G].dtype), c.gate);
    if (RULE == LA_DELTA) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) qk += q[i] * k[i];
        qk = warp_sum(qk);
    }
    if (c.normaliser != LA_UNNORMALISED) { /* z before this token; advance_z changes it later */
        float next[ROWS];
        den = warp_sum(denominator(c, at(c.x[LA_Z0], state_index, hv), q, k, next));
    }
    const float beta = has_factor ? number(beta_bits, factor.dtype) : 1;
    numbers(v, v_bits, c.x[LA_V].dtype);
#pragma unroll
    /* from the lanes that computed the keys to the threads that use them */
    for (int i = 0; i < ROWS; i++) {
        if (V_FIRST) continue;
        q[i] = __shfl_sync(~0u, q[i], keeper);
        k[i] = __shfl_sync(~0u, k[i], keeper);
        if (DECAY == LA_KEY) a[i] = __shfl_sync(~0u, a[i], keeper);
    }
    if constexpr (ALL_VECTORS)
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float y[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++) (V_FIRST ? S[i / 4 * 4 + e][i % 4] : S[i][e]) = y[e];
        }
    la_operands of_token = {};
    of_token.q = q, of_token.k = of_token.x = k, of_token.a = a, of_token.v = v;
    of_token.beta = beta, of_token.own = qk;
    la_token(la_strip_of(&S[0][0], 4), {}, 4, ROWS, &of_token, o, DECAY, RULE);

    if (V_FIRST ? lane == 0 : threadIdx.x < 8) {
#pragma unroll
        for (int w = 0; w < 4; w++)
            if (column + w < c.V) {
                if (la_weighs(DECAY, RULE)) o[w] = with_skip(c, hv, o[w], v[w]);
                store(at(c.x[LA_O], n, 0, hv, column + w), c.x[LA_O].dtype, finish(c, o[w], den));
            }
    }

    if constexpr (ALL_VECTORS) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const bool there = V_FIRST ? column + i % 4 < c.V && key_of(i / 4 * 4) < c.K
                                       : column < c.V && key_of(i) < c.K;
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) y[e] = V_FIRST ? S[i / 4 * 4 + e][i % 4] : S[i][e];
            if (there) *(float4 *)piece_of(i) = make_float4(y[0], y[1], y[2], y[3]);
        }
    } else if (V_FIRST) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float x[4];
#pragma unroll
                for (int e = 0; e < 4; e++) x[e] = S[i + e][w];
                if (column + w < c.V && key_of(i) < c.K)
                    store_four(state + (key_of(i) + (column + w) * c.x[LA_S0].stride[3]) * size, x,
                               c.x[LA_S0].dtype, c.K - key_of(i), vector);
            }
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (key_of(i) < c.K && column < c.V)
                store_four(state + (key_of(i) * c.x[LA_S0].stride[2] + column) * size, S[i],
                           c.x[LA_S0].dtype, c.V - column, vector);
    }
}

/* z <- z + k, after every block has read z. A warp has a head. */
template <int KEYS>
static __global__ void __launch_bounds__(32) advance_z(const __grid_constant__ call c)
{
    const int n = blockIdx.x / c.HV, hv = blockIdx.x % c.HV, h = hv / (c.HV / c.H);
    const int state_index = state_index_of(c, n);
    four_bits bits[KEYS / 4];
    float q[KEYS] = {}, k[KEYS], next[KEYS];
    if (state_index < 0) return;
    load_key_bits<KEYS>(c, c.x[LA_K], n, h, bits);
    make_key(c, bits, c.x[LA_K].dtype, 1, k);
    char *z = at(c.x[LA_Z0], state_index, hv);
    denominator(c, z, q, k, next);
    store_keys(z, c.x[LA_Z0].dtype, c.K, next);
}

/* Can the kernel move four neighbouring numbers of the state in one piece? */
static bool state_vectors(const call &c)
{
    const int size = c.x[LA_S0].dtype == LA_F32 ? 4 : 2, along = V_FIRST ? 3 : 2;
    const int64_t strides = c.x[LA_S0].stride[0] | c.x[LA_S0].stride[1] | c.x[LA_S0].stride[along];
    return (uintptr_t)c.x[LA_S0].data % (4 * size) == 0 && strides % 4 == 0;
}

template <la_decay DECAY, la_rule RULE, int ROWS>
static cudaError_t launch_step(const call &c, cudaStream_t stream)
{
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS;
    const int64_t heads = (int64_t)c.N * c.HV;
    const bool vector = state_vectors(c);
    const bool all_vectors = vector && c.x[LA_S0].dtype == LA_F32 && (V_FIRST ? c.K : c.V) % 4 == 0;
    const auto kernel =
        all_vectors ? step<DECAY, RULE, ROWS, true> : step<DECAY, RULE, ROWS, false>;
    const cudaError_t error = launch(kernel, heads * tiles, THREADS, sizeof(step_room), stream, c,
                                     vector, divisor(tiles), divisor(c.HV), divisor(c.HV / c.H));
    if (error != cudaSuccess || c.normaliser == LA_UNNORMALISED) return error;
    return launch(advance_z<ROWS>, heads, 32, 0, stream, c);
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t step_any(const call &c, cudaStream_t stream)
{
    return c.K <= 128 ? launch_step<DECAY, RULE, 4>(c, stream)
                      : launch_step<DECAY, RULE, 8>(c, stream);
}
