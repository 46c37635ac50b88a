/* States of the additive rule that nothing is read from: the final state of a call, or the gradient
 * of its initial state. Both are sums over the tokens, so that blocks take parts of a
 * sequence side by side:
 *
 *     forward    S_T = diag(all) S_0 + sum_i (after_i k_i)' v_i
 *     backward   dS_0 = diag(all) dS_T + scale sum_i (before_i q_i)' dO_i
 *
 * after_i is the decay from after token i to the end, before_i that from the start through token i
 * (with a bonus through token i - 1), and `all` that of all tokens. `sum_part` goes through the
 * chunks of a part, forwards or backwards, with the sum in registers. Before each chunk the sum is
 * multiplied by the decay of the chunk. `join_parts` adds up the parts. The parts are fixed by the
 * shape of the call, so the bits are the same in every run. */
#ifndef LINATTN_CUDA_SEGMENT_SUMS_CUH
#define LINATTN_CUDA_SEGMENT_SUMS_CUH

#include "forward_launch.cuh"
#include "key_decays.cuh"

enum {
    PART_THREADS = 256,
    PANELS_OF_PART = PART_THREADS / 128, /* four warps for each panel of value columns */
    PART_STAGES = 3,
    PARTS_OF_PROCESSOR = 2,
    LEAST_CHUNKS_OF_PART = 4,
    JOIN_THREADS = 256
};

/* The sums of a sequence. */
struct parts_of_sequence {
    float *sums;   /* [N HV][panels][parts][KP][PANEL] */
    float *decays; /* [N HV][parts][KP]: of all tokens of a part. TOKEN: only the first */
    int count;     /* parts */
};

/* The sum is of the products of rows of `keys` and rows of `values`. */
struct summed {
    la_name keys;
    bool as_given; /* rows of the keys can be copied in pieces of 16 bytes, and are not mapped */
    view values;
    float scale;
    view first, last;  /* the state that is decayed by all tokens, and the result */
    bool before_token; /* backward: the decays before a token's own (a bonus) */
};

template <int KP, la_decay DECAY> struct part_room {
    struct {
        alignas(1024) char keys[tile_bytes(KP)];
        char values[PANELS_OF_PART][PANEL_BYTES];
    } stage[PART_STAGES];
    /* TOKEN: of each token, for each warp alone. KEY: of blocks of tokens */
    float decays[DECAY == LA_TOKEN ? PART_THREADS / 32 * C : BLOCKS_OF_TOKENS * KP];
    float of_chunk[KP]; /* KEY */
};

/* The decays of the 64 tokens of a chunk, as factors of their rows, go to `to`. A lane has tokens
 * `lane` and 32 + lane, and their decays a. Returns the decay of the chunk. */
template <bool BACKWARD>
__device__ __forceinline__ float decays_of_tokens(float2 a, bool before_token, float *to)
{
    const int lane = threadIdx.x % 32;
    float2 x = a; /* products from one end of 32 tokens through the own one */
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const float2 y =
            BACKWARD ? make_float2(__shfl_up_sync(~0u, x.x, by), __shfl_up_sync(~0u, x.y, by))
                     : make_float2(__shfl_down_sync(~0u, x.x, by), __shfl_down_sync(~0u, x.y, by));
        if (BACKWARD ? lane >= by : lane < 32 - by) x = make_float2(x.x * y.x, x.y * y.y);
    }
    const float first = __shfl_sync(~0u, x.x, BACKWARD ? 31 : 0),
                second = __shfl_sync(~0u, x.y, BACKWARD ? 31 : 0);
    if (!BACKWARD || before_token) { /* without the own one */
        const float2 y =
            BACKWARD ? make_float2(__shfl_up_sync(~0u, x.x, 1), __shfl_up_sync(~0u, x.y, 1))
                     : make_float2(__shfl_down_sync(~0u, x.x, 1), __shfl_down_sync(~0u, x.y, 1));
        const bool none = lane == (BACKWARD ? 0 : 31);
        x = none ? make_float2(1, 1) : y;
    }
    to[lane] = BACKWARD ? x.x : x.x * second;
    to[32 + lane] = BACKWARD ? x.y * first : x.y;
    return first * second;
}

/* Multiply the rows of a tile by the decays of their keys. A warp has a block of tokens and a panel
 * of keys, whose decays the lanes have. to: the decays of blocks. Returns those of the chunk, of the
 * keys of this lane. */
template <int KP, bool BACKWARD>
__device__ __forceinline__ float2 decay_keys(const call &c, lane_decays &x, bool before_token,
                                             char *tile, float *to)
{
    float2 product = make_float2(1, 1);
    if (x.key < KP) {
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
            x.a[i] = as_decays(c, x.a[i]);
            product = product * x.a[i];
        }
        *(float2 *)(to + x.block * KP + x.key) = product;
    }
    __syncthreads();
    if (x.key >= KP) return product;
    float2 total = make_float2(1, 1), p = make_float2(1, 1); /* p: from one end to this block */
#pragma unroll
    for (int block = 0; block < BLOCKS_OF_TOKENS; block++) {
        const float2 y = *(const float2 *)(to + block * KP + x.key);
        if (BACKWARD ? block < x.block : block > x.block) p = p * y;
        total = total * y;
    }
#pragma unroll
    for (int j = 0; j < TOKENS_OF_BLOCK; j++) {
        const int i = BACKWARD ? j : TOKENS_OF_BLOCK - 1 - j;
        uint32_t *const row = (uint32_t *)(tile + x.at(i));
        const float2 y = unpack(*row);
        if (BACKWARD && !before_token) p = p * x.a[i];
        *row = pack(p.x * y.x, p.y * y.y);
        if (!BACKWARD || before_token) p = p * x.a[i];
    }
    return total;
}

/* A block has a part of the chunks of a sequence, and two panels of value columns. Each panel has
 * four warps. Warp w of them has keys 16 w to 16 w + 15 of every 64. */
template <int KP, la_decay DECAY, bool BACKWARD, typename = element>
__global__ void __launch_bounds__(PART_THREADS, PARTS_OF_PROCESSOR)
    sum_part(const __grid_constant__ call c, const __grid_constant__ summed x,
             const parts_of_sequence to)
{
    constexpr int SETS = KP / PANEL;
    extern __shared__ __align__(1024) char shared[];
    part_room<KP, DECAY> &s = *(part_room<KP, DECAY> *)shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_key = warp % 4 * 16;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const int tiles = (panels + PANELS_OF_PART - 1) / PANELS_OF_PART;
    const int tile = blockIdx.x / to.count % tiles, panel = tile * PANELS_OF_PART + warp / 4;
    const int part = blockIdx.x % to.count, head = blockIdx.x / to.count / tiles;
    const unit u = unit_of(c, head / c.HV, head % c.HV);
    const int count = (u.end - u.begin + C - 1) / C;
    const int first = first_of_segment(count, part, to.count),
              end = first_of_segment(count, part + 1, to.count);
    const auto chunk_at = [&](int step) { return BACKWARD ? end - 1 - step : first + step; };
    const auto fetch = [&](int step) { /* a group of copies, of none behind the last chunk */
        if (step >= end - first) {
            copies_end_group();
            return;
        }
        auto &stage = s.stage[step % PART_STAGES];
        const int t = u.begin + chunk_at(step) * C, n = min(C, u.end - t);
        begin_to_load<KP, PART_THREADS>(c, x.keys, u.b, t, n, u.h, stage.keys, x.as_given);
        for (int j = 0; j < PANELS_OF_PART; j++)
            copy_tile<PANEL, PART_THREADS>(x.values, c.V, u.b, t, n, u.hv,
                                           address_of(stage.values[j]),
                                           (tile * PANELS_OF_PART + j) * PANEL);
        copies_end_group();
    };
    const view &gate = c.x[LA_G], &weights = c.x[LA_WEIGHT];
    const auto number = [&](const view &of, int t) {
        return t < u.end ? load<float>(at(of, u.b, t, u.hv), of.dtype) : 1;
    };
    float S[SETS][8][4] = {};
    float2 all = make_float2(1, 1); /* of this part: KEY of the two keys of this lane */
    for (int step = 0; step < PART_STAGES - 1; step++) fetch(step);
    for (int step = 0; step < end - first; step++) {
        auto &stage = s.stage[step % PART_STAGES];
        const int t = u.begin + chunk_at(step) * C, n = min(C, u.end - t);
        float2 a = make_float2(1, 1), w = make_float2(1, 1);
        if (DECAY == LA_TOKEN) {
            a = make_float2(number(gate, t + lane), number(gate, t + 32 + lane));
            if (!BACKWARD && weights.data)
                w = make_float2(number(weights, t + lane), number(weights, t + 32 + lane));
        }
        copies_wait<PART_STAGES - 2>();
#if HAS_WARP_GROUPS
        stores_before_copies();
#endif
        __syncthreads(); /* and every warp is done with the chunk before */
        fetch(step + PART_STAGES - 1);
        float *const decays = s.decays + (DECAY == LA_TOKEN ? warp * C : 0);
        float total = 1;
        if (DECAY == LA_TOKEN) {
            a.x = lane < n ? decay_of(a.x, c.gate) : 1;
            a.y = 32 + lane < n ? decay_of(a.y, c.gate) : 1;
            total = decays_of_tokens<BACKWARD>(a, x.before_token, decays);
            decays[lane] *= w.x;
            decays[32 + lane] *= w.y;
            all.x *= total;
            __syncwarp();
        }
        if (DECAY == LA_KEY) {
            lane_decays of_keys = load_decays(c, u, t, n, warp / 4);
            const float2 product =
                decay_keys<KP, BACKWARD>(c, of_keys, x.before_token, stage.keys, decays);
            all = all * product;
            if (of_keys.block == 0 && of_keys.key < KP)
                *(float2 *)(s.of_chunk + of_keys.key) = product;
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < SETS; j++) {
            left rows[4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                rows[m] =
                    load_left_transposed(address_of(stage.keys), m * 16, j * PANEL + first_key);
#pragma unroll
                for (int e = 0; e < 4 && DECAY == LA_TOKEN; e++) {
                    const float2 by = *(const float2 *)(decays + m * 16 + e / 2 * 8 + lane % 4 * 2);
                    const float2 y = unpack(rows[m].x[e]);
                    rows[m].x[e] = pack(by.x * y.x, by.y * y.y);
                }
            }
            const int key = j * PANEL + first_key + lane / 4;
            const float top = DECAY == LA_KEY ? s.of_chunk[key] : total,
                        low = DECAY == LA_KEY ? s.of_chunk[key + 8] : total;
#pragma unroll
            for (int m = 0; m < 8 && DECAY != LA_NONE; m++) {
                S[j][m][0] *= top;
                S[j][m][1] *= top;
                S[j][m][2] *= low;
                S[j][m][3] *= low;
            }
            products_begin();
#pragma unroll
            for (int m = 0; m < 4; m++)
                multiply_columns(S[j], rows[m], address_of(stage.values[warp / 4]), m * 16);
            products_commit();
            products_wait<0>(); /* one after the other, for the rows' registers */
            products_in(S[j]);
        }
    }
    if (DECAY == LA_TOKEN && tile == 0 && threadIdx.x == 0)
        to.decays[((int64_t)head * to.count + part) * KP] = all.x;
    if (DECAY == LA_KEY && tile == 0 && warp % 4 == 0 && warp / 4 * PANEL < KP)
        *(float2 *)(to.decays + ((int64_t)head * to.count + part) * KP + warp / 4 * PANEL +
                    lane * 2) = all;
    if (panel >= panels) return;
    float *const own =
        to.sums + (((int64_t)head * panels + panel) * to.count + part) * KP * PANEL;
#pragma unroll
    for (int j = 0; j < SETS; j++)
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = j * PANEL + first_key + lane / 4 + half * 8;
                *(float2 *)(own + key * PANEL + m * 8 + lane % 4 * 2) =
                    make_float2(S[j][m][2 * half], S[j][m][2 * half + 1]);
            }
}

/* A thread has a number of a state. A block has JOIN_THREADS of a panel, in the order of the sums. */
template <int KP, la_decay DECAY, bool BACKWARD, typename = element>
__global__ void __launch_bounds__(JOIN_THREADS)
    join_parts(const __grid_constant__ call c, const __grid_constant__ summed x,
               const parts_of_sequence from)
{
    constexpr int BLOCKS = KP * PANEL / JOIN_THREADS; /* of a panel */
    const int panels = (c.V + PANEL - 1) / PANEL, panel = blockIdx.x / BLOCKS % panels,
              head = blockIdx.x / BLOCKS / panels, n = head / c.HV, hv = head % c.HV;
    const int i = blockIdx.x % BLOCKS * JOIN_THREADS + threadIdx.x;
    const int key = i / PANEL, v = panel * PANEL + i % PANEL;
    if (key >= c.K || v >= c.V) return;
    const float *const sums =
                           from.sums + (int64_t)(blockIdx.x / BLOCKS) * from.count * KP * PANEL + i,
                       *const decays = from.decays + (int64_t)head * from.count * KP +
                                       (DECAY == LA_KEY ? key : 0);
    float S = x.first.data ? load<float>(at(x.first, n, hv, key, v), x.first.dtype) : 0;
#pragma unroll 4
    for (int j = 0; j < from.count; j++) {
        const int part = BACKWARD ? from.count - 1 - j : j;
        const float a = DECAY == LA_NONE ? 1 : decays[part * KP];
        S = a * S + x.scale * sums[(int64_t)part * KP * PANEL];
    }
    store(at(x.last, n, hv, key, v), x.last.dtype, S);
}

/* cudaErrorNotSupported, with nothing done, where rows cannot be copied in pieces. */
template <int KP, la_decay DECAY, bool BACKWARD>
static cudaError_t launch_sums(const call &c, summed x, const device_traits &on, cudaMemPool_t pool,
                               cudaStream_t stream)
{
    constexpr int bytes = sizeof(part_room<KP, DECAY>), joins = KP * PANEL / JOIN_THREADS;
    const int64_t heads = (int64_t)c.N * c.HV, panels = heads * div_up(c.V, PANEL),
                  tiles = heads * div_up(c.V, PANELS_OF_PART * PANEL);
    const int64_t chunks = div_up(c.x[LA_CU].data ? div_up(c.T, max(c.N, 1)) : c.T, C);
    if (bytes > on.room || !map_of(c, x.values, c.HV, c.V, NULL)) return cudaErrorNotSupported;
    x.as_given = rows_are_as_given(c) && map_of(c, c.x[x.keys], c.H, c.K, NULL);
    const int64_t enough = div_up(on.processors * PARTS_OF_PROCESSOR, max(tiles, (int64_t)1));
    parts_of_sequence to = {};
    to.count = (int)max((int64_t)1, min(enough, chunks / LEAST_CHUNKS_OF_PART));
    if (max(tiles * to.count, panels * joins) > INT32_MAX) return cudaErrorNotSupported;
    const int64_t numbers = panels * to.count * KP * PANEL, decays = heads * to.count * KP;
    cudaError_t error =
        cudaMallocFromPoolAsync((void **)&to.sums, (numbers + decays) * 4, pool, stream);
    if (error != cudaSuccess) return error;
    to.decays = to.sums + numbers;
    error = launch(sum_part<KP, DECAY, BACKWARD>, tiles * to.count, PART_THREADS, bytes, stream, c,
                   x, to);
    if (error == cudaSuccess)
        error = launch(join_parts<KP, DECAY, BACKWARD>, panels * joins, JOIN_THREADS, 0, stream, c,
                       x, to);
    const cudaError_t freed = cudaFreeAsync(to.sums, stream);
    return error == cudaSuccess ? freed : error;
}

#endif
