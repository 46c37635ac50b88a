/* States of the additive rule that nothing is read from: the final state of a call, and the
 * gradient of its initial state. Between the segments of a sequence there are such states and
 * gradients too, and the segments are then walked side by side (additive.cuh, recompute.cuh). They
 * are sums over the tokens, so that blocks take parts of a sequence side by side:
 *
 *     forward    S_T = diag(all) S_0 + sum_i (after_i k_i)' v_i
 *     backward   dS_0 = diag(all) dS_T + scale sum_i (before_i q_i)' dO_i
 *
 * after_i is the decay from after token i to the end, before_i that from the start through token i
 * (with a bonus through token i - 1), and `all` that of all tokens. `sum_part` goes through the
 * chunks of a part with the sum in registers. It goes against the direction of the decays: forward
 * from the last chunk, backward from the first one. So the decay from a chunk to that end of the
 * part is the product of the decays of the chunks already taken. It goes into the factors of the
 * rows, and the sum itself is never multiplied. `join_parts` adds up the parts. The parts are fixed
 * by the shape of the call, so the bits are the same in every run. */
#ifndef LINATTN_CUDA_SEGMENT_SUMS_CUH
#define LINATTN_CUDA_SEGMENT_SUMS_CUH

#include "forward_launch.cuh"
#include "key_decays.cuh"
#include "mapped_tiles.cuh"
#include "segments.cuh"

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
    float *sums;   /* [N HV][panels][made][KP][PANEL] */
    /* [N HV][made][KP]: of all tokens of a part. TOKEN: only the first. MAPPED, which has no decay:
     * the sum of the keys of a part */
    float *decays;
    int count;     /* parts */
    int made;      /* how many parts have sums: the first ones; backward the last ones */
    /* [N HV][count / of_segment][K][V]: the state before each segment; backward the gradient of the
     * state after it. NULL: only x.last is wanted. */
    float *between;
    int of_segment;   /* parts of a segment */
    float *z_between; /* MAPPED: [N HV][count / of_segment][K], as `between` */
};

/* The sum is of the products of rows of `keys` and rows of `values`. */
struct summed {
    la_name keys;
    /* not on Hopper: rows of the keys can be copied in pieces of 16 bytes, and are not mapped */
    bool as_given;
    view values;
    float scale;
    view first, last;  /* the state that is decayed by all tokens, and the result */
    bool before_token; /* backward: the decays before a token's own (a bonus) */
    bool maps;         /* sum_part maps the keys, and sums them, too (maps_keys) */
};

struct sum_maps { /* on Hopper */
    CUtensorMap keys, values;
};

template <int KP, la_decay DECAY> struct part_room {
    struct {
        alignas(1024) char keys[tile_bytes(KP)];
        char values[PANELS_OF_PART][PANEL_BYTES];
    } stage[PART_STAGES];
    /* TOKEN: of each token, for each warp alone. KEY: of blocks of tokens */
    float decays[DECAY == LA_TOKEN ? PART_THREADS / 32 * C : BLOCKS_OF_TOKENS * KP];
    uint64_t full[PART_STAGES]; /* on Hopper */
};

/* The factors of the rows of a chunk go to `to`: their decays to an end of the chunk, times `by`. A
 * lane has tokens `lane` and 32 + lane, and their decays a. Returns the decay of the chunk. */
template <bool BACKWARD>
__device__ __forceinline__ float decays_of_tokens(float2 a, float2 by, bool before_token, float *to)
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
    to[lane] = by.x * (BACKWARD ? x.x : x.x * second);
    to[32 + lane] = by.y * (BACKWARD ? x.y * first : x.y);
    return first * second;
}

/* Multiply the rows of a tile by the decays of their keys to an end of the chunk, and by p. A warp
 * has a block of tokens and a panel of keys, whose decays the lanes have. to: the decays of blocks.
 * Returns those of the chunk, of the keys of this lane. */
template <int KP, bool BACKWARD>
__device__ __forceinline__ float2 decay_keys(const call &c, lane_decays &x, float2 p,
                                             bool before_token, char *tile, float *to)
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
    float2 total = make_float2(1, 1);
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

/* Prefetch the gates of a chunk into the L2 cache. A thread loads them late, when it has registers
 * for them. Without the prefetch they would come from memory, and the block would wait. A thread
 * has a quarter of a row. */
template <int KP>
__device__ __forceinline__ void bring_gates_near(const call &c, const unit &u, int t, int n)
{
    static_assert(PART_THREADS == 4 * C, "");
    const int token = threadIdx.x / 4, key = threadIdx.x % 4 * (KP / 4);
    if (token < n && key < c.K)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at(c.x[LA_G], u.b, t + token, u.hv, key)));
}

/* Zeros in the rows from n on: a box may reach into the next sequence, whose NaN must not come
 * along. */
template <int KP> __device__ __forceinline__ void clear_rows_from(int n, char *keys, char *values)
{
    constexpr int PIECES = KP / 8 + PANELS_OF_PART * PANEL / 8; /* of a row */
    for (int i = threadIdx.x; i < (C - n) * PIECES; i += PART_THREADS) {
        const int row = n + i / PIECES, piece = i % PIECES, of_value = piece - KP / 8;
        *(uint4 *)(of_value < 0 ? keys + piece_at(row, piece) : values + piece_at(row, of_value)) =
            make_uint4(0, 0, 0, 0);
    }
}

/* Map the keys of an operand: rows are two keys of this lane, columns its tokens from t on. Those
 * of the tokens before n are added to `sums`, as they are before they are rounded. */
__device__ __forceinline__ void map_keys(const call &c, left &rows, int t, int n, float (&sums)[2])
{
    rough y[8];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 two = unpack(rows.x[e]);
        y[2 * e] = two.x, y[2 * e + 1] = two.y;
    }
    apply_map_to_all(y, c.map[1], rough((float)c.map_eps[1]));
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int token = t + e / 2 * 8 + threadIdx.x % 4 * 2;
        rows.x[e] = pack(y[2 * e].x, y[2 * e + 1].x);
        sums[e % 2] += (token < n ? y[2 * e].x : 0) + (token + 1 < n ? y[2 * e + 1].x : 0);
    }
}

/* A block has a part of the chunks of a sequence, and two panels of value columns. Each panel has
 * four warps. Warp w of them has keys 16 w to 16 w + 15 of every 64. */
template <int KP, la_decay DECAY, bool BACKWARD, bool MAPPED>
__device__ __forceinline__ void sum_part_of(const call &c, const summed &x, const sum_maps &maps,
                                            const parts_of_sequence &to)
{
    constexpr int SETS = KP / PANEL;
    extern __shared__ __align__(1024) char shared[];
    part_room<KP, DECAY> &s = *(part_room<KP, DECAY> *)shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_key = warp % 4 * 16;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const int tiles = (panels + PANELS_OF_PART - 1) / PANELS_OF_PART;
    const int tile = blockIdx.x / to.made % tiles, panel = tile * PANELS_OF_PART + warp / 4;
    const int own = blockIdx.x % to.made, head = blockIdx.x / to.made / tiles;
    const int part = own + (BACKWARD ? to.count - to.made : 0);
    const unit u = unit_of(c, head / c.HV, head % c.HV);
    const int count = (u.end - u.begin + C - 1) / C;
    const int first = first_of_segment(count, part, to.count),
              end = first_of_segment(count, part + 1, to.count);
    const auto chunk_at = [&](int step) { return BACKWARD ? first + step : end - 1 - step; };
    const auto fetch = [&](int step) {
        auto &stage = s.stage[step % PART_STAGES];
        const int t = u.begin + chunk_at(step) * C, n = min(C, u.end - t);
        const bool is_there = step < end - first;
        if (DECAY == LA_KEY && is_there) bring_gates_near<KP>(c, u, t, n);
#if HAS_WARP_GROUPS
        if (!is_there || threadIdx.x > 0) return;
        const uint32_t barrier = address_of(s.full + step % PART_STAGES);
        barrier_expect(barrier, tile_bytes(KP) + PANELS_OF_PART * PANEL_BYTES);
        for (int j = 0; j < SETS; j++)
            engine_copy_box(address_of(stage.keys) + j * PANEL_BYTES, &maps.keys, j * PANEL, u.h, t,
                            u.b, barrier);
        for (int j = 0; j < PANELS_OF_PART; j++) /* zeros, where there are no columns */
            engine_copy_box(address_of(stage.values[j]), &maps.values,
                            (tile * PANELS_OF_PART + j) * PANEL, u.hv, t, u.b, barrier);
#else
        if (is_there)
            begin_to_load<KP, PART_THREADS>(c, x.keys, u.b, t, n, u.h, stage.keys, x.as_given);
        for (int j = 0; j < PANELS_OF_PART && is_there; j++)
            copy_tile<PANEL, PART_THREADS>(x.values, c.V, u.b, t, n, u.hv,
                                           address_of(stage.values[j]),
                                           (tile * PANELS_OF_PART + j) * PANEL);
        copies_end_group(); /* of none behind the last chunk */
#endif
    };
    const view &gate = c.x[LA_G], &weights = c.x[LA_WEIGHT];
    const auto number = [&](const view &of, int t) {
        return t < u.end ? load<float>(at(of, u.b, t, u.hv), of.dtype) : 1;
    };
    float S[SETS][8][4] = {};
    compensated<float> z[SETS][2] = {}; /* MAPPED: sums of the keys of this lane */
    float2 all = make_float2(1, 1); /* decays of the chunks so far. KEY: of two keys of this lane */
    float2 next_a = make_float2(1, 1), next_w = make_float2(1, 1);
    const auto load_numbers = [&](int step) { /* TOKEN: a chunk ahead */
        if (DECAY != LA_TOKEN || step >= end - first) return;
        const int t = u.begin + chunk_at(step) * C;
        next_a = make_float2(number(gate, t + lane), number(gate, t + 32 + lane));
        if (!BACKWARD && weights.data)
            next_w = make_float2(number(weights, t + lane), number(weights, t + 32 + lane));
    };
#if HAS_WARP_GROUPS
    if (threadIdx.x == 0) {
        for (uint64_t &barrier : s.full) barrier_init(address_of(&barrier), 1);
        barriers_ready();
    }
    __syncthreads();
#endif
    for (int step = 0; step < PART_STAGES - 1; step++) fetch(step);
    load_numbers(0);
    for (int step = 0; step < end - first; step++) {
        auto &stage = s.stage[step % PART_STAGES];
        const int t = u.begin + chunk_at(step) * C, n = min(C, u.end - t);
        float2 a = next_a;
        const float2 w = next_w;
        load_numbers(step + 1);
#if HAS_WARP_GROUPS
        barrier_wait(address_of(s.full + step % PART_STAGES), step / PART_STAGES % 2);
        if (n < C) clear_rows_from<KP>(n, stage.keys, stage.values[0]);
        stores_before_copies();
#else
        copies_wait<PART_STAGES - 2>();
#endif
        __syncthreads(); /* and every warp is done with the chunk before */
        fetch(step + PART_STAGES - 1);
        float *const decays = s.decays + (DECAY == LA_TOKEN ? warp * C : 0);
        if (DECAY == LA_TOKEN) {
            a.x = lane < n ? decay_of(a.x, c.gate) : 1;
            a.y = 32 + lane < n ? decay_of(a.y, c.gate) : 1;
            const float2 by = make_float2(all.x * w.x, all.x * w.y);
            all.x *= decays_of_tokens<BACKWARD>(a, by, x.before_token, decays);
            __syncwarp();
        }
        if (DECAY == LA_KEY) {
            lane_decays of_keys = load_decays(c, u, t, n, warp / 4);
            all = all * decay_keys<KP, BACKWARD>(c, of_keys, all, x.before_token, stage.keys,
                                                 decays);
#if HAS_WARP_GROUPS
            stores_before_copies();
#endif
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < SETS; j++) {
            left rows[4];
            float of_chunk[2] = {};
#pragma unroll
            for (int m = 0; m < 4; m++) {
                rows[m] =
                    load_left_transposed(address_of(stage.keys), m * 16, j * PANEL + first_key);
                if constexpr (MAPPED) map_keys(c, rows[m], m * 16, n, of_chunk);
#pragma unroll
                for (int e = 0; e < 4 && DECAY == LA_TOKEN; e++) {
                    const float2 by = *(const float2 *)(decays + m * 16 + e / 2 * 8 + lane % 4 * 2);
                    const float2 y = unpack(rows[m].x[e]);
                    rows[m].x[e] = pack(by.x * y.x, by.y * y.y);
                }
            }
            products_begin();
#pragma unroll
            for (int m = 0; m < 4; m++)
                multiply_columns(S[j], rows[m], address_of(stage.values[warp / 4]), m * 16);
            products_commit();
            for (int half = 0; half < 2 && MAPPED; half++) z[j][half].add(of_chunk[half]);
            products_wait<0>(); /* one after the other, for the rows' registers */
            products_in(S[j]);
        }
    }
    if constexpr (MAPPED)
#pragma unroll
        for (int i = 0; i < 2 * SETS; i++) {
            const float sum = quad_sum(z[i / 2][i % 2].total());
            const int key = i / 2 * PANEL + first_key + lane / 4 + i % 2 * 8;
            if (tile == 0 && warp < 4 && lane % 4 == 0)
                to.decays[((int64_t)head * to.made + own) * KP + key] = sum;
        }
    if (DECAY == LA_TOKEN && tile == 0 && threadIdx.x == 0)
        to.decays[((int64_t)head * to.made + own) * KP] = all.x;
    if (DECAY == LA_KEY && tile == 0 && warp % 4 == 0 && warp / 4 * PANEL < KP)
        *(float2 *)(to.decays + ((int64_t)head * to.made + own) * KP + warp / 4 * PANEL +
                    lane * 2) = all;
    if (panel >= panels) return;
    float *const sums =
        to.sums + (((int64_t)head * panels + panel) * to.made + own) * KP * PANEL;
#pragma unroll
    for (int j = 0; j < SETS; j++)
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int key = j * PANEL + first_key + lane / 4 + half * 8;
                *(float2 *)(sums + key * PANEL + m * 8 + lane % 4 * 2) =
                    make_float2(S[j][m][2 * half], S[j][m][2 * half + 1]);
            }
}

template <int KP, la_decay DECAY, bool BACKWARD, bool MAPPED, typename = element>
__global__ void __launch_bounds__(PART_THREADS, PARTS_OF_PROCESSOR)
    sum_part(const __grid_constant__ call c, const __grid_constant__ summed x,
             const __grid_constant__ sum_maps maps, const parts_of_sequence to)
{
    threads_below<PART_THREADS>();
    if constexpr (!MAPPED || HAS_WARP_GROUPS)
        sum_part_of<KP, DECAY, BACKWARD, MAPPED>(c, x, maps, to);
}

/* The sums of keys before the segments, or after the sequence. A block has a head, and a thread has
 * a key. */
template <int KP, typename = element>
__global__ void __launch_bounds__(KP)
    join_keys(const __grid_constant__ call c, const parts_of_sequence from)
{
    threads_below<KP>();
    const int head = blockIdx.x, n = head / c.HV, hv = head % c.HV, key = threadIdx.x;
    const int segments = from.count / from.of_segment;
    if (key >= c.K) return;
    const float *const sums = from.decays + (int64_t)head * from.made * KP + key;
    float *const to =
        from.z_between ? from.z_between + (int64_t)head * segments * c.K + key : NULL;
    running z = z_of_key<float>(c.x[LA_Z0], c, {n, n, 0, hv, 0, 0}, key);
#pragma unroll 4
    for (int j = 0; j < from.made; j++) {
        if (to && j % from.of_segment == 0)
            to[j / from.of_segment * c.K] = (float)z.total();
        z.add(sums[j * KP]);
    }
    if (to)
        to[(segments - 1) * c.K] = (float)z.total();
    else if (c.x[LA_ZT].data)
        store(at(c.x[LA_ZT], n, hv, key), c.x[LA_ZT].dtype, (float)z.total());
}

/* A thread has a number of a state. A block has JOIN_THREADS of a panel, in the order of the sums. */
template <int KP, la_decay DECAY, bool BACKWARD, typename = element>
__global__ void __launch_bounds__(JOIN_THREADS)
    join_parts(const __grid_constant__ call c, const __grid_constant__ summed x,
               const parts_of_sequence from)
{
    threads_below<JOIN_THREADS>();
    constexpr int BLOCKS = KP * PANEL / JOIN_THREADS; /* of a panel */
    const int panels = (c.V + PANEL - 1) / PANEL, panel = blockIdx.x / BLOCKS % panels,
              head = blockIdx.x / BLOCKS / panels, n = head / c.HV, hv = head % c.HV;
    const int i = blockIdx.x % BLOCKS * JOIN_THREADS + threadIdx.x;
    const int key = i / PANEL, v = panel * PANEL + i % PANEL;
    if (key >= c.K || v >= c.V) return;
    const float *const sums =
                           from.sums + (int64_t)(blockIdx.x / BLOCKS) * from.made * KP * PANEL + i,
                       *const decays = from.decays + (int64_t)head * from.made * KP +
                                       (DECAY == LA_KEY ? key : 0);
    const int segments = from.count / from.of_segment;
    const int64_t step = (int64_t)c.K * c.V;
    float *to = NULL;
    if (from.between)
        to = from.between + ((int64_t)head * segments + (BACKWARD ? segments - 1 : 0)) * step +
             key * c.V + v;
    float S = x.first.data ? load<float>(at(x.first, n, hv, key, v), x.first.dtype) : 0;
#pragma unroll 4
    for (int j = 0; j < from.made; j++) {
        const int part = BACKWARD ? from.made - 1 - j : j;
        const float a = DECAY == LA_NONE ? 1 : decays[part * KP];
        if (to && j % from.of_segment == 0) {
            *to = S;
            to += BACKWARD ? -step : step;
        }
        S = a * S + x.scale * sums[(int64_t)part * KP * PANEL];
    }
    if (to)
        *to = S;
    else
        store(at(x.last, n, hv, key, v), x.last.dtype, S);
}

/* The blocks of sum_part for one part of all sequences. */
static int64_t blocks_of_part(const call &c)
{
    return (int64_t)c.N * c.HV * div_up(c.V, PANELS_OF_PART * PANEL);
}

/* The parts of a segment. `of` segments have sums, out of `all`. All blocks then fit on the device
 * at once: a few blocks in a second round would leave most processors without work. */
static int parts_of_segment(const call &c, const device_traits &on, int64_t chunks, int of, int all)
{
    const int64_t blocks = max(blocks_of_part(c) * of, (int64_t)1),
                  fit = on.processors * PARTS_OF_PROCESSOR / blocks;
    return (int)max((int64_t)1, min(fit, chunks / all / LEAST_CHUNKS_OF_PART));
}

/* Does sum_part map the keys of a call? It takes numbers one by one, so it finds no norm. In
 * float16 a mapped number may be too large. */
template <la_decay DECAY> static bool maps_keys(const call &c, const device_traits &on)
{
    return DECAY == LA_NONE && !NARROW && on.producers && !c.qk_l2norm &&
           (c.map[1] != LA_IDENTITY || c.normaliser != LA_UNNORMALISED);
}

/* The sums of a forward pass. */
template <la_decay DECAY>
static summed keys_and_values(const call &c, const device_traits &on)
{
    const bool maps = maps_keys<DECAY>(c, on);
    return {LA_K, false, c.x[LA_V], 1, c.x[LA_S0], c.x[LA_ST], false, maps};
}

/* Sums of the parts that `to` tells of. cudaErrorNotSupported, with nothing done, where rows cannot
 * be copied in pieces, and on Hopper where sum_part cannot map the keys. */
template <int KP, la_decay DECAY, bool BACKWARD>
static cudaError_t launch_sums(const call &c, summed x, parts_of_sequence to,
                               const device_traits &on, cudaMemPool_t pool, cudaStream_t stream)
{
    constexpr int bytes = sizeof(part_room<KP, DECAY>), joins = KP * PANEL / JOIN_THREADS;
    const int64_t heads = (int64_t)c.N * c.HV, panels = heads * div_up(c.V, PANEL),
                  blocks = blocks_of_part(c) * to.made;
    const bool plain = !c.qk_l2norm && c.map[x.keys == LA_K] == LA_IDENTITY;
    /* of copies, too */
    const bool has_boxes = (plain || x.maps) && c.K % PIECE == 0 && c.V % PIECE == 0;
    x.as_given = plain && map_of(c, c.x[x.keys], c.H, c.K, NULL);
    if (bytes > on.room || (on.producers ? !has_boxes : !map_of(c, x.values, c.HV, c.V, NULL)))
        return cudaErrorNotSupported;
    if (max(blocks, panels * joins) > INT32_MAX) return cudaErrorNotSupported;
    const int64_t numbers = panels * to.made * KP * PANEL, decays = heads * to.made * KP;
    cudaError_t error =
        cudaMallocFromPoolAsync((void **)&to.sums, (numbers + decays) * 4, pool, stream);
    if (error != cudaSuccess) return error;
    to.decays = to.sums + numbers;
    sum_maps maps = {};
    void *held[2] = {};
    view keys = c.x[x.keys];
    if (on.producers) error = map_of_any(c, &keys, c.H, c.K, &maps.keys, held, pool, stream);
    if (error == cudaSuccess && on.producers)
        error = map_of_any(c, &x.values, c.HV, c.V, &maps.values, held + 1, pool, stream);
    auto kernel = sum_part<KP, DECAY, BACKWARD, false>;
    if constexpr (DECAY == LA_NONE && !BACKWARD && !NARROW)
        if (x.maps) kernel = sum_part<KP, DECAY, BACKWARD, true>;
    if (error == cudaSuccess)
        error = launch(kernel, blocks, PART_THREADS, bytes, stream, c, x, maps, to);
    if (error == cudaSuccess && x.maps && c.normaliser != LA_UNNORMALISED)
        error = launch(join_keys<KP>, heads, KP, 0, stream, c, to);
    if (error == cudaSuccess)
        error = launch(join_parts<KP, DECAY, BACKWARD>, panels * joins, JOIN_THREADS, 0, stream, c,
                       x, to);
    for (void *one : {(void *)to.sums, held[0], held[1]}) {
        const cudaError_t freed = one ? cudaFreeAsync(one, stream) : cudaSuccess;
        if (error == cudaSuccess) error = freed;
    }
    return error;
}

/* The state after all tokens, or the gradient of the one before them. */
template <int KP, la_decay DECAY, bool BACKWARD>
static cudaError_t launch_sum(const call &c, const summed &x, const device_traits &on,
                              cudaMemPool_t pool, cudaStream_t stream)
{
    const int parts = parts_of_segment(c, on, chunks_of_sequence(c), 1, 1);
    return launch_sums<KP, DECAY, BACKWARD>(c, x, {NULL, NULL, parts, parts, NULL, 1, NULL}, on,
                                            pool, stream);
}

/* Sums of the parts of all segments but one. *state is the initial state, and becomes the states
 * before the segments. Backward it is the gradient of the final state, and becomes the gradients of
 * the states after the segments. *z becomes the sums of keys before the segments, if the call is
 * normalised (x.maps). The caller frees *held. */
template <int KP, la_decay DECAY, bool BACKWARD>
static cudaError_t states_between(const call &c, summed x, int segments, view *state, view *z,
                                  void **held, const device_traits &on, cudaMemPool_t pool,
                                  cudaStream_t stream)
{
    const int of_segment = parts_of_segment(c, on, chunks_of_sequence(c), segments - 1, segments);
    const int64_t size = (int64_t)c.K * c.V, row = c.HV * segments * size;
    const bool normalised = x.maps && c.normaliser != LA_UNNORMALISED;
    const int64_t keys = normalised ? (int64_t)c.HV * segments * c.K : 0; /* of a sequence */
    cudaError_t error = cudaMallocFromPoolAsync(held, c.N * (row + keys) * 4, pool, stream);
    if (error != cudaSuccess) return error;
    float *const of_keys = (float *)*held + c.N * row;
    const parts_of_sequence to = {NULL,           NULL,       segments * of_segment,
                                  (segments - 1) * of_segment, (float *)*held, of_segment, of_keys};
    x.first = *state;
    error = launch_sums<KP, DECAY, BACKWARD>(c, x, to, on, pool, stream);
    *state = {(char *)*held, {row, size, c.V, 1}, LA_F32};
    if (normalised) *z = {(char *)of_keys, {keys, c.K, 1, 0}, LA_F32};
    return error;
}

/* Microseconds of states_between on an H200 (docs/decisions/0063). The constants: its launches, the
 * bytes that memory moves in a microsecond, and microseconds of a chunk of a block. */
static constexpr double SUMS_LAUNCH = 15, SUMMED_BYTES = 3.4e6, SUMMED_CHUNK = 1.2;

/* A cut has to save this factor of the time: the models are not more exact. */
static constexpr double LEAST_GAIN = 1.05;

/* May a call have so many segments? There are no more of all heads than 1.5 times the processors, so
 * that the states between them, and the sums of their parts, take 50 MB at most. */
static bool may_have_segments(const call &c, int segments, const device_traits &on)
{
    return segments == 1 || (segments <= MOST_SEGMENTS &&
                             chunks_of_sequence(c) / segments >= LEAST_CHUNKS &&
                             2 * blocks_of_part(c) * segments <= 3 * (int64_t)on.processors);
}

template <int KP, la_decay DECAY>
static double time_between(const call &c, int segments, const device_traits &on)
{
    if (segments == 1) return 0;
    const int64_t chunks = chunks_of_sequence(c), heads = (int64_t)c.N * c.HV;
    const int64_t bytes = (int64_t)c.N * c.H * tile_bytes(KP) + heads * c.V * C * 2 +
                          (DECAY == LA_KEY ? heads * C * KP * la_size_of(c.x[LA_G].dtype) : 0);
    const int of_segment = parts_of_segment(c, on, chunks, segments - 1, segments);
    const double of_one = (double)chunks / segments;
    const int64_t parts = (int64_t)(segments - 1) * of_segment,
                  rounds = div_up(blocks_of_part(c) * parts, on.processors * PARTS_OF_PROCESSOR);
    /* sums and states are written, and read */
    const int64_t states = heads * KP * 4 *
                           (parts * div_up(c.V, PANEL) * PANEL + (int64_t)segments * c.V);
    return SUMS_LAUNCH + 2 * (double)states / SUMMED_BYTES +
           max(of_one * (segments - 1) * (double)bytes / SUMMED_BYTES,
               (double)rounds * of_one / of_segment * SUMMED_CHUNK);
}

#endif
