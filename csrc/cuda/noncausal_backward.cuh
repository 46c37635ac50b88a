/* Gradients of the noncausal form on tensor cores: no decay, the additive rule, bf16 arrays. Every
 * token reads the sum that all tokens have written, so there are two sums, and then three products
 * for each token:
 *
 *     was S = S_0 + K' V,  O = scale Q S
 *     dS = dS_T + scale Q' dO,  dQ = scale dO S',  dK = V dS',  dV = K dS
 *
 * `sum_tokens` adds up S and dS over parts of a sequence, which blocks take side by side.
 * `join_sums` adds up the parts. `read_sums` has the products. The operands are bf16, S and dS too,
 * as in the causal form. The parts are fixed by the shape of the call, so the bits are the same in
 * every run.
 *
 * With a normaliser, normaliser.cuh has the denominators and their gradients, as in calls of more
 * than 128 keys, and dO is here the gradient of the numerators (`divide`). */
#ifndef LINATTN_CUDA_NONCAUSAL_BACKWARD_CUH
#define LINATTN_CUDA_NONCAUSAL_BACKWARD_CUH

#include "adjoint_rows.cuh"

/* With 64 keys the stages of sum_tokens have 64 KiB, so three blocks share a multiprocessor of
 * Hopper. A sequence is cut into so many parts that there are as many blocks. */
enum { NONCAUSAL_THREADS = 128, SUMS_STAGES = 2, BLOCKS_OF_PROCESSOR = 3 };

/* Sums of a sequence, for a panel of value columns. */
struct sums_of_tokens {
    float *parts;    /* [N HV][panels][parts][S, dS][KP][PANEL] */
    char *joined;    /* [N HV][panels][S, dS] tiles of PANEL keys and PANEL value columns */
    int of_sequence; /* parts */
};

/* Copied tiles are read by the tensor cores. All threads call this. */
__device__ __forceinline__ void copies_are_there()
{
    copies_wait<0>();
#if HAS_WARP_GROUPS
    stores_before_copies();
#endif
    __syncthreads();
}

template <int KP> struct sums_stage {
    alignas(1024) char q[tile_bytes(KP)], k[tile_bytes(KP)], v[PANEL_BYTES], d_o[PANEL_BYTES];
};

/* A block has a part of the chunks of a sequence, and a panel of value columns. Warp w has keys
 * 16 w to 16 w + 15 of every 64. */
template <int KP>
static __global__ void __launch_bounds__(NONCAUSAL_THREADS)
    sum_tokens(const __grid_constant__ call c, const __grid_constant__ gradients d,
               const as_given given, const sums_of_tokens to)
{
    threads_below<NONCAUSAL_THREADS>();
    constexpr int SETS = KP / PANEL, THREADS = NONCAUSAL_THREADS;
    extern __shared__ __align__(1024) char shared[];
    sums_stage<KP> *const stages = (sums_stage<KP> *)shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int panels = (c.V + PANEL - 1) / PANEL, panel = blockIdx.x / to.of_sequence % panels;
    const int part = blockIdx.x % to.of_sequence, head = blockIdx.x / to.of_sequence / panels;
    const unit u = unit_of(c, head / c.HV, head % c.HV);
    const int64_t count = (u.end - u.begin + C - 1) / C;
    const int first = (int)(count * part / to.of_sequence),
              end = (int)(count * (part + 1) / to.of_sequence);
    const auto fetch = [&](int i) {
        sums_stage<KP> &s = stages[i % SUMS_STAGES];
        const int t = u.begin + i * C, n = min(C, u.end - t);
        begin_to_load<KP, THREADS>(c, LA_K, u.b, t, n, u.h, s.k, given.k);
        begin_to_load<KP, THREADS>(c, LA_Q, u.b, t, n, u.h, s.q, given.q);
        copy_tile<PANEL, THREADS>(c.x[LA_V], c.V, u.b, t, n, u.hv, address_of(s.v), panel * PANEL);
        copy_tile<PANEL, THREADS>(d[LA_DO], c.V, u.b, t, n, u.hv, address_of(s.d_o), panel * PANEL);
        copies_end_group();
    };
    float S[SETS][8][4] = {}, dS[SETS][8][4] = {};
    if (first < end) fetch(first);
    for (int i = first; i < end; i++) {
        copies_are_there(); /* and every warp is done with the chunk before */
        if (i + 1 < end) fetch(i + 1);
        const sums_stage<KP> &s = stages[i % SUMS_STAGES];
        left k[SETS][4], q[SETS][4];
#pragma unroll
        for (int x = 0; x < SETS * 4; x++) {
            const int row = x % 4 * 16, column = x / 4 * PANEL + warp * 16;
            k[x / 4][x % 4] = load_left_transposed(address_of(s.k), row, column);
            q[x / 4][x % 4] = load_left_transposed(address_of(s.q), row, column);
        }
        products_begin();
#pragma unroll
        for (int x = 0; x < SETS * 4; x++) {
            multiply_columns(S[x / 4], k[x / 4][x % 4], address_of(s.v), x % 4 * 16);
            multiply_columns(dS[x / 4], q[x / 4][x % 4], address_of(s.d_o), x % 4 * 16);
        }
        products_commit();
        products_wait<0>();
#pragma unroll
        for (int x = 0; x < SETS; x++) {
            products_in(S[x]);
            products_in(dS[x]);
        }
    }
    float *const own = to.parts + (int64_t)blockIdx.x * 2 * KP * PANEL;
#pragma unroll
    for (int x = 0; x < SETS; x++)
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = x * PANEL + warp * 16 + lane / 4 + half * 8;
                float *const at = own + key * PANEL + m * 8 + lane % 4 * 2;
                *(float2 *)at = make_float2(S[x][m][2 * half], S[x][m][2 * half + 1]);
                *(float2 *)(at + KP * PANEL) =
                    make_float2(dS[x][m][2 * half], dS[x][m][2 * half + 1]);
            }
}

/* A block has S or dS of a sequence, for a panel of value columns. A thread has four columns of a
 * key at a time. */
template <int KP>
static __global__ void __launch_bounds__(256)
    join_sums(const __grid_constant__ call c, const __grid_constant__ gradients d,
              const sums_of_tokens to)
{
    threads_below<256>();
    const bool of_dS = blockIdx.x % 2;
    const int panels = (c.V + PANEL - 1) / PANEL, panel = blockIdx.x / 2 % panels,
              head = blockIdx.x / 2 / panels, n = head / c.HV, hv = head % c.HV;
    const float by = of_dS ? (float)c.scale : 1;
    const view &first = of_dS ? d[LA_DST] : c.x[LA_S0];
    const float *const parts =
        to.parts + ((int64_t)(blockIdx.x / 2) * to.of_sequence * 2 + of_dS) * KP * PANEL;
    char *const tile = to.joined + (int64_t)blockIdx.x * tile_bytes(KP);
    for (int i = threadIdx.x * 4; i < KP * PANEL; i += 256 * 4) {
        const int key = i / PANEL, column = i % PANEL, v = panel * PANEL + column;
        float x[4] = {};
        for (int part = 0; part < to.of_sequence; part++) {
            const float4 one = *(const float4 *)(parts + (int64_t)part * 2 * KP * PANEL + i);
            x[0] += one.x, x[1] += one.y, x[2] += one.z, x[3] += one.w;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            x[e] *= by;
            if (key >= c.K || v + e >= c.V) continue;
            if (first.data) x[e] += load<float>(at(first, n, hv, key, v + e), first.dtype);
            if (of_dS && d[LA_DS0].data)
                store(at(d[LA_DS0], n, hv, key, v + e), d[LA_DS0].dtype, x[e]);
        }
        *(uint2 *)(tile + key / PANEL * PANEL_BYTES + element_at(key % PANEL, column)) =
            make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
    }
}

template <int KP> struct read_room {
    alignas(1024) char k[tile_bytes(KP)], v[PANEL_BYTES], d_o[PANEL_BYTES];
    alignas(1024) char sums[2][tile_bytes(KP)]; /* S, dS */
};

/* A block has a chunk of a value head. Warp w has tokens 16 w to 16 w + 15. */
template <int KP>
static __global__ void __launch_bounds__(NONCAUSAL_THREADS)
    read_sums(const __grid_constant__ call c, const __grid_constant__ gradients d,
              const sums_of_tokens from, const __grid_constant__ intra_flags to)
{
    threads_below<NONCAUSAL_THREADS>();
    constexpr int SETS = KP / PANEL, THREADS = NONCAUSAL_THREADS;
    extern __shared__ __align__(1024) char shared[];
    read_room<KP> &s = *(read_room<KP> *)shared;
    const int row0 = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
    const int chunk_slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int panels = (c.V + PANEL - 1) / PANEL;
    float dq[SETS][8][4] = {}, dk[SETS][8][4] = {};
    begin_to_load<KP, THREADS>(c, LA_K, u.b, t, n, u.h, s.k, to.given.k);
    for (int panel = 0; panel < panels; panel++) {
        const char *const sums =
            from.joined + (((int64_t)u.n * c.HV + hv) * panels + panel) * (int64_t)sizeof s.sums;
        if (panel) __syncthreads(); /* every warp is done with the panel before */
        copy_tile<PANEL, THREADS>(c.x[LA_V], c.V, u.b, t, n, hv, address_of(s.v), panel * PANEL);
        copy_tile<PANEL, THREADS>(d[LA_DO], c.V, u.b, t, n, hv, address_of(s.d_o), panel * PANEL);
        for (int i = threadIdx.x * 16; i < (int)sizeof s.sums; i += THREADS * 16)
            copy_async(address_of(s.sums) + i, sums + i, true);
        copies_end_group();
        copies_are_there();
        const uint32_t S = address_of(s.sums[0]), dS = address_of(s.sums[1]);
        float dv[8][4] = {};
        left k[KP / 16], v[4], d_o[4];
#pragma unroll
        for (int j = 0; j < KP / 16; j++) k[j] = load_left(address_of(s.k), row0, j * 16);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP / 16; j++)
            multiply_columns(dv, k[j], dS + j / 4 * PANEL_BYTES, j % 4 * 16);
        products_commit();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            v[j] = load_left(address_of(s.v), row0, j * 16);
            d_o[j] = load_left(address_of(s.d_o), row0, j * 16);
        }
        products_begin();
#pragma unroll
        for (int x = 0; x < SETS * 4; x++) {
            multiply_rows(dq[x / 4], d_o[x % 4], S + x / 4 * PANEL_BYTES, x % 4 * 16);
            multiply_rows(dk[x / 4], v[x % 4], dS + x / 4 * PANEL_BYTES, x % 4 * 16);
        }
        products_commit();
        products_wait<0>();
        products_in(dv);
#pragma unroll
        for (int x = 0; x < SETS; x++) {
            products_in(dq[x]);
            products_in(dk[x]);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row0 + lane / 4 + half * 8, column = panel * PANEL + lane % 4 * 2;
            if (row >= n) continue;
            char *const own = at(d[LA_DV], u.b, t + row, hv, column);
#pragma unroll
            for (int m = 0; m < 8; m++)
                if (column + m * 8 < c.V)
                    *(uint32_t *)(own + m * 16) = pack(dv[m][2 * half], dv[m][2 * half + 1]);
        }
    }
    const int64_t apart = (int64_t)c.B * c.T * to.kp * hv;
#pragma unroll
    for (int x = 0; x < SETS; x++) {
        scale_rows(dq[x], (float)c.scale, (float)c.scale);
        store_rows(c, u, d[LA_DQ], to.direct_q ? NULL : to.dq + apart, to.kp, t, n, row0, dq[x],
                   x * PANEL);
        store_rows(c, u, d[LA_DK], to.direct_k ? NULL : to.dk + apart, to.kp, t, n, row0, dk[x],
                   x * PANEL);
    }
}

#endif
