/* A sequence in segments: from their ends to their starts. chunk_carry.cuh has the passes. */
#ifndef LINATTN_CUDA_SEGMENTS_CUH
#define LINATTN_CUDA_SEGMENTS_CUH

#include "chunk_carry.cuh"

/* The states before each segment, one segment after another, in float32; or, without a place for
 * them (g.starts), the final states alone. A block has JOINED value columns of a head. `rows`: rows
 * of `ends` per segment. */
enum { JOINED = 8, PREFETCHED = 32, MAP_THREADS = 256 };

/* A sequence is cut into this many segments at most, and a segment has this many chunks at least:
 * one of fewer takes as long as its launches. */
enum { MOST_SEGMENTS = 32, LEAST_CHUNKS = 8 };

/* The slices of 16 rows of a state that has KP. */
template <int KP, la_decay DECAY> __host__ __device__ int key_slices_of(const call &c)
{
    return DECAY == LA_PAIR ? KP / 16 : (c.K + 15) / 16;
}

/* Store a number of the state after a sequence. */
template <la_decay DECAY>
__device__ __forceinline__ void store_final_state(const call &c, const unit &u, int key, int column,
                                                  float x)
{
    const view &to = state_of_row<DECAY>(c.x[LA_ST], c.x[LA_YT], key);
    const int of_state = key_of_row<DECAY>(key);
    if (column < c.V && of_state < c.K)
        store(at(to, u.n, u.hv, of_state, column), to.dtype, x);
}

/* A number of the state before a sequence. */
template <la_decay DECAY>
__device__ __forceinline__ float initial_state_of(const call &c, const unit &u, int key, int column)
{
    const view &from = state_of_row<DECAY>(c.x[LA_S0], c.x[LA_Y0], key);
    const int of_state = key_of_row<DECAY>(key);
    return from.data && column < c.V && of_state < c.K
               ? load<float>(at(from, u.n, u.hv, of_state, column), from.dtype)
               : 0;
}

/* The additive rule: S' <- a S' + X'. A thread has a key. */
template <int KP, la_decay DECAY, typename = element>
__global__ void __launch_bounds__(KP)
    join_decays(const __grid_constant__ call c, const __grid_constant__ chunks w, const segments g,
                int rows)
{
    threads_below<KP>();
    const int slices = (c.V + 15) / 16, groups = slices * 16 / JOINED;
    const int first_column = blockIdx.x % groups * JOINED, key = threadIdx.x;
    const int64_t head = blockIdx.x / groups;
    const unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    const int all_chunks = (u.end - u.begin + C - 1) / C, chunk_slot0 = first_chunk_slot(c, u.n);
    float own[JOINED];
#pragma unroll
    for (int j = 0; j < JOINED; j++) own[j] = initial_state_of<DECAY>(c, u, key, first_column + j);
    for (int segment = 0; segment < g.count; segment++) {
        const int64_t here = head * g.count + segment;
        float *start = g.starts + (here * slices * 16 + first_column) * KP + key;
#pragma unroll
        for (int j = 0; j < JOINED && g.starts; j++) start[j * KP] = own[j];
        if (segment == g.count - 1 && g.starts) return;
        const float *end = g.ends + (here * rows + first_column) * KP + key;
        const int first = first_of_segment(all_chunks, segment, g.count);
        const int last = first_of_segment(all_chunks, segment + 1, g.count);
        float a = 1;
        if (DECAY != LA_NONE)
            for (int i = first; i < last; i += PREFETCHED) {
                float x[PREFETCHED];
#pragma unroll
                for (int j = 0; j < PREFETCHED; j++) {
                    const int64_t place = (int64_t)(chunk_slot0 + i + j) * c.HV + u.hv;
                    x[j] = i + j >= last     ? 1
                           : DECAY == LA_KEY ? w.total[place * KP + key]
                                             : w.in[place * C + C - 1];
                }
#pragma unroll
                for (int j = 0; j < PREFETCHED; j++) a *= x[j];
            }
#pragma unroll
        for (int j = 0; j < JOINED; j++) own[j] = a * own[j] + end[j * KP];
    }
#pragma unroll
    for (int j = 0; j < JOINED; j++)
        store_final_state<DECAY>(c, u, key, first_column + j, own[j]);
}

/* The columns of a state that join_maps takes: those of v, and behind them those of the identity if
 * the map of the whole sequence is wanted. */
static __host__ __device__ __forceinline__ int joined_columns(const call &c)
{
    return rows_of_ends(c.V) + (c.x[LA_MT].data ? rows_of_ends(c.K) : 0);
}

/* The delta rule: S' <- S' M' + X'. For columns of the identity X' is zero. A thread has four keys,
 * and a part of the rows of M'. So a number of S' from shared memory serves for four products, and a
 * load brings four numbers. The next rows of M' are on their way while these are multiplied. */
template <int KP, la_decay DECAY, typename = element>
__global__ void __launch_bounds__(MAP_THREADS)
    join_maps(const __grid_constant__ call c, const segments g, int rows)
{
    threads_below<MAP_THREADS>();
    constexpr int LANES = KP / 4, PARTS = MAP_THREADS / LANES;
    constexpr int AT_ONCE = KP / PARTS < 16 ? KP / PARTS : 16; /* rows, as registers allow */
    __shared__ float4 S[JOINED][LANES], sums[PARTS][JOINED][LANES];
    const int slices = (c.V + 15) / 16, groups = joined_columns(c) / JOINED;
    const int first_column = blockIdx.x % groups * JOINED;
    const bool of_identity = first_column >= slices * 16;
    const int64_t head = blockIdx.x / groups;
    const unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    const int all_chunks = (u.end - u.begin + C - 1) / C;
    const int lane = threadIdx.x % LANES, part = threadIdx.x / LANES;
    /* M has rows for whole slices; a part has a multiple of four */
    const int of_map = key_slices_of<KP, DECAY>(c) * 16;
    const int of_part = (of_map / PARTS + 3) / 4 * 4, first_row = part * of_part;
    for (int i = threadIdx.x; i < JOINED * KP; i += MAP_THREADS)
        ((float *)S)[i] = of_identity
                              ? i % KP == first_column + i / KP - slices * 16
                              : initial_state_of<DECAY>(c, u, i % KP, first_column + i / KP);
    /* A state with a NaN times an M of zeros is still a NaN. */
    const auto load_rows = [&](int segment, int first, float4(&to)[AT_ONCE]) {
        const bool stored =
            segment < g.count - (g.starts != NULL) &&
            !(g.vanished && g.vanished[head * g.count + segment]);
        const int64_t row = (head * g.count + segment) * rows + slices * 16 + first_row + first;
        const float4 *const M = (const float4 *)(g.ends + row * KP) + lane;
#pragma unroll
        for (int e = 0; e < AT_ONCE; e++)
            to[e] = stored && first + e < of_part && first_row + first + e < of_map
                        ? M[e * LANES]
                        : make_float4(0, 0, 0, 0);
    };
    float4 m[AT_ONCE];
    load_rows(g.from_start, 0, m);
    __syncthreads();
    for (int segment = 0; segment < g.count; segment++) {
        const int64_t here = head * g.count + segment;
        float4 *const start = (float4 *)(g.starts + (here * slices * 16 + first_column) * KP);
        const float4 *const end = (const float4 *)(g.ends + (here * rows + first_column) * KP);
        for (int i = threadIdx.x; i < JOINED * LANES && g.starts; i += MAP_THREADS)
            start[i] = S[i / LANES][i % LANES];
        if (segment == g.count - 1 && g.starts) return;
        if (first_of_segment(all_chunks, segment, g.count) ==
            first_of_segment(all_chunks, segment + 1, g.count)) {
            /* No token, so the state stays. Its product with the identity would not be the state: an
             * infinity times zero is a NaN. */
            load_rows(segment + 1, 0, m);
            continue;
        }
        const bool has_m = segment > 0 || !g.from_start;
        float4 own[JOINED] = {};
        for (int first = 0; first < of_part && has_m; first += AT_ONCE) {
            float4 next[AT_ONCE];
            const bool done = first + AT_ONCE >= of_part;
            load_rows(segment + done, done ? 0 : first + AT_ONCE, next);
#pragma unroll
            for (int e = 0; e < AT_ONCE; e += 4)
#pragma unroll
                for (int j = 0; j < JOINED; j++) {
                    const float4 x = S[j][min((first_row + first + e) / 4, LANES - 1)];
                    const float by[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        own[j].x += by[r] * m[e + r].x;
                        own[j].y += by[r] * m[e + r].y;
                        own[j].z += by[r] * m[e + r].z;
                        own[j].w += by[r] * m[e + r].w;
                    }
                }
#pragma unroll
            for (int e = 0; e < AT_ONCE; e++) m[e] = next[e];
        }
#pragma unroll
        for (int j = 0; j < JOINED; j++) sums[part][j][lane] = own[j];
        __syncthreads();
        for (int i = threadIdx.x; i < JOINED * LANES; i += MAP_THREADS) {
            float4 sum = of_identity ? make_float4(0, 0, 0, 0) : end[i];
#pragma unroll
            for (int p = 0; p < PARTS; p++) {
                const float4 x = sums[p][i / LANES][i % LANES];
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            S[i / LANES][i % LANES] = sum;
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < JOINED * KP; i += MAP_THREADS) {
        const int key = i % KP, column = first_column + i / KP, of_key = column - slices * 16;
        if (!of_identity)
            store_final_state<DECAY>(c, u, key, column, ((float *)S)[i]);
        else if (key < c.K && of_key < c.K)
            store(at(c.x[LA_MT], u.n, u.hv, key, of_key), c.x[LA_MT].dtype, ((float *)S)[i]);
    }
}

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_join(const call &c, const chunks &w, const segments &g, int rows,
                               cudaStream_t stream)
{
    const int64_t heads = (int64_t)c.N * c.HV, blocks = heads * rows_of_ends(c.V) / JOINED;
    if constexpr (la_predicts(RULE))
        return launch(join_maps<KP, DECAY>, heads * joined_columns(c) / JOINED, MAP_THREADS, 0,
                      stream, c, g, rows);
    else
        return launch(join_decays<KP, DECAY>, blocks, KP, 0, stream, c, w, g, rows);
}

#endif
