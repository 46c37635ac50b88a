/* The step: one token, the state changed where it lies. All that counts is to read and write the
 * state once, in whole lines.
 *
 * A block has COLUMNS value columns of one head's state. In the layout [K][V] eight threads go along
 * a row, four columns each, and 32 groups of them share the rows; in [V][K] a warp goes along the
 * keys of four columns. Either way a thread holds ROWS keys of four columns, moved 16 bytes at a
 * time. Included by one file per layout, which defines V_FIRST. */
#include "kernels.cuh"
#include "token.cuh"

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL _Pragma("unroll")
#define JOIN(x, y, W) join(x, y)
typedef float real, lane, lane_of_state;
enum { MAX_STRIP = 4, COLUMNS = 32, THREADS = 256, WARPS = THREADS / 32 };

struct step_room {
    float q[256], k[256], a[256], qk, den;
    float4 sums[2][WARPS][8]; /* [K][V]: each warp's, of its eight times four columns */
};
extern __shared__ __align__(16) char step_shared[];

/* The sums over all threads that have these columns. Called once per launch: the room is not used
 * again. */
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

/* WHOLE: a state of float32 whose rows come in pieces of 16 bytes. */
template <la_decay DECAY, la_rule RULE, int ROWS, bool WHOLE>
__global__ void __launch_bounds__(THREADS, WHOLE && ROWS == 4 ? 4 : 2)
    step(const __grid_constant__ call c, const bool vector)
{
    step_room &s = *(step_room *)step_shared;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS, tile = blockIdx.x % tiles;
    const int n = blockIdx.x / tiles / c.HV, hv = blockIdx.x / tiles % c.HV, h = hv / (c.HV / c.H);
    const int slot = slot_of(c, n);
    const int column = tile * COLUMNS + (V_FIRST ? warp : threadIdx.x % 8) * 4;
    /* this thread's key i */
    const auto key_of = [&](int i) {
        return V_FIRST ? i / 4 * 128 + lane * 4 + i % 4 : threadIdx.x / 8 * ROWS + i;
    };
    float S[ROWS][4] = {}, q[ROWS], k[ROWS], a[DECAY == LA_KEY ? ROWS : 1], v[4], o[4];

    if (slot < 0) { /* a padded row */
        if (V_FIRST ? lane == 0 : threadIdx.x < 8)
            for (int w = 0; w < 4 && column + w < c.V; w++)
                store(at(c.o, n, 0, hv, column + w), c.o.dtype, 0.0f);
        return;
    }

    char *state = at(c.s0, slot, hv);
    const int size = dtype_size(c.s0.dtype);
    const int64_t apart = c.s0.stride[V_FIRST ? 3 : 2];
    float *of_thread = (float *)state + (V_FIRST ? column * apart + lane * 4
                                                 : threadIdx.x / 8 * ROWS * apart + column);
    float4 x[WHOLE ? ROWS : 1];
    if constexpr (WHOLE) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            /* [V][K]: column i % 4, its four keys i / 4; [K][V]: key i */
            const bool there = V_FIRST ? column + i % 4 < c.V && key_of(i / 4 * 4) < c.K
                                       : column < c.V && key_of(i) < c.K;
            const float *from = of_thread + (V_FIRST ? i % 4 * apart + i / 4 * 128 : i * apart);
            x[i] = there ? *(const float4 *)from : make_float4(0, 0, 0, 0);
        }
    } else if (V_FIRST) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 4)
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float x[4] = {};
                if (column + w < c.V && key_of(i) < c.K)
                    load_four(x, state + (key_of(i) + (column + w) * c.s0.stride[3]) * size,
                              c.s0.dtype, c.K - key_of(i), vector);
#pragma unroll
                for (int e = 0; e < 4; e++) S[i + e][w] = x[e];
            }
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (key_of(i) < c.K && column < c.V)
                load_four(S[i], state + (key_of(i) * c.s0.stride[2] + column) * size, c.s0.dtype,
                          c.V - column, vector);
    }

    /* Ask for everything before waiting for anything. */
    enum { KEYS = ROWS }; /* of a lane of 32: 128 or 256 in all */
    uint64_t q_bits[KEYS], k_bits[KEYS], v_bits[4], g_bits = 0, beta_bits = 0;
    const int v_size = dtype_size(c.v.dtype), key = threadIdx.x;
    const char *of_v = at(c.v, n, 0, hv, column);
    if (warp == 0) {
        load_bits(c, c.q, n, h, q_bits);
        load_bits(c, c.k, n, h, k_bits);
    }
    if (DECAY == LA_KEY && key < c.K) g_bits = bits_of(at(c.g, n, 0, hv, key), c.g.dtype);
    if (DECAY == LA_TOKEN) g_bits = bits_of(at(c.g, n, 0, hv), c.g.dtype);
    if (RULE == LA_DELTA) beta_bits = bits_of(at(c.beta, n, 0, hv), c.beta.dtype);
#pragma unroll
    for (int w = 0; w < 4; w++)
        v_bits[w] = column + w < c.V ? bits_of(of_v + w * v_size, c.v.dtype) : 0;

    if (warp == 0) {
        float of_q[KEYS], of_k[KEYS], qk = 0;
        make_key(c, q_bits, c.q.dtype, c.map[0], c.map_eps[0], of_q);
        make_key(c, k_bits, c.k.dtype, c.map[1], c.map_eps[1], of_k);
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            s.q[lane + 32 * j] = of_q[j];
            s.k[lane + 32 * j] = of_k[j];
            qk += of_q[j] * of_k[j];
        }
        qk = warp_sum(qk);
        if (lane == 0) s.qk = qk;
        if (c.normaliser != LA_UNNORMALISED) { /* z as it was; advance_z comes after */
            float z[KEYS], den = 0;
            load_row(z, at(c.z0, slot, hv), c.z0.dtype, lane, 32, c.K);
#pragma unroll
            for (int j = 0; j < KEYS; j++) den += (z[j] + of_k[j]) * of_q[j];
            den = warp_sum(den);
            if (lane == 0) s.den = den;
        }
    }
    if (DECAY == LA_KEY && key < c.K) s.a[key] = decay_of(number(g_bits, c.g.dtype), c.gate);
    if (DECAY == LA_TOKEN) a[0] = decay_of(number(g_bits, c.g.dtype), c.gate);
    const float beta = RULE == LA_DELTA ? number(beta_bits, c.beta.dtype) : 0;
#pragma unroll
    for (int w = 0; w < 4; w++) v[w] = number(v_bits[w], c.v.dtype);
    if constexpr (WHOLE)
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float y[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
            for (int e = 0; e < 4; e++) (V_FIRST ? S[i / 4 * 4 + e][i % 4] : S[i][e]) = y[e];
        }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        q[i] = s.q[key_of(i)];
        k[i] = s.k[key_of(i)];
        if (DECAY == LA_KEY) a[i] = key_of(i) < c.K ? s.a[key_of(i)] : 0;
    }

    la_token(&S[0][0], 4, 4, ROWS, q, k, v, a, beta, s.qk, o, DECAY, RULE);

    if (V_FIRST ? lane == 0 : threadIdx.x < 8) {
#pragma unroll
        for (int w = 0; w < 4; w++)
            if (column + w < c.V)
                store(at(c.o, n, 0, hv, column + w), c.o.dtype, finish(c, o[w], s.den));
    }

    if constexpr (WHOLE) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const bool there = V_FIRST ? column + i % 4 < c.V && key_of(i / 4 * 4) < c.K
                                       : column < c.V && key_of(i) < c.K;
            float *to = of_thread + (V_FIRST ? i % 4 * apart + i / 4 * 128 : i * apart), y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) y[e] = V_FIRST ? S[i / 4 * 4 + e][i % 4] : S[i][e];
            if (there) *(float4 *)to = make_float4(y[0], y[1], y[2], y[3]);
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
                    store_four(state + (key_of(i) + (column + w) * c.s0.stride[3]) * size, x,
                               c.s0.dtype, c.K - key_of(i), vector);
            }
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (key_of(i) < c.K && column < c.V)
                store_four(state + (key_of(i) * c.s0.stride[2] + column) * size, S[i], c.s0.dtype,
                           c.V - column, vector);
    }
}

/* z <- z + k, once every block has read z: a warp per head. */
static __global__ void __launch_bounds__(32) advance_z(const __grid_constant__ call c)
{
    const int n = blockIdx.x / c.HV, hv = blockIdx.x % c.HV, h = hv / (c.HV / c.H);
    const int slot = slot_of(c, n);
    uint64_t bits[8];
    float k[8];
    if (slot < 0) return;
    load_bits(c, c.k, n, h, bits);
    make_key(c, bits, c.k.dtype, c.map[1], c.map_eps[1], k);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const int i = threadIdx.x + 32 * j;
        if (i >= c.K) continue;
        char *z = at(c.z0, slot, hv, i);
        store(z, c.z0.dtype, load<float>(z, c.z0.dtype) + k[j]);
    }
}

/* Do four numbers in a row of the state come in one piece? */
static bool state_vectors(const call &c)
{
    const int size = c.s0.dtype == LA_F32 ? 4 : 2, along = V_FIRST ? 3 : 2;
    const int64_t strides = c.s0.stride[0] | c.s0.stride[1] | c.s0.stride[along];
    return (uintptr_t)c.s0.data % (4 * size) == 0 && strides % 4 == 0;
}

template <la_decay DECAY, la_rule RULE, int ROWS>
static void launch_step(const call &c, cudaStream_t stream)
{
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS;
    const unsigned blocks = (unsigned)((int64_t)c.N * c.HV * tiles);
    const bool vector = state_vectors(c);
    const bool whole = vector && c.s0.dtype == LA_F32 && (V_FIRST ? c.K : c.V) % 4 == 0;
    const auto kernel = whole ? step<DECAY, RULE, ROWS, true> : step<DECAY, RULE, ROWS, false>;
    kernel<<<blocks, THREADS, sizeof(step_room), stream>>>(c, vector);
    if (c.normaliser != LA_UNNORMALISED)
        advance_z<<<(unsigned)(c.N * c.HV), 32, 0, stream>>>(c);
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t step_any(const call &c, cudaStream_t stream)
{
    if (c.K <= 128)
        launch_step<DECAY, RULE, 4>(c, stream);
    else
        launch_step<DECAY, RULE, 8>(c, stream);
    return cudaGetLastError();
}
