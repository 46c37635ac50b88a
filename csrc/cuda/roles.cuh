/* Shared by the roles of kernels that walk and score at once (additive.cuh, delta.cuh): where a
 * thread is, which tile comes next, and the states and O of a walk. Hopper alone. */
#ifndef LINATTN_CUDA_ROLES_CUH
#define LINATTN_CUDA_ROLES_CUH

#include "chunk_carry.cuh"

enum {
    SLOTS = 2,      /* chunks with scores that are not yet walked */
    MOST_WALKS = 2, /* groups of a block that walk */
    GROUP = 128,
    BLOCK = 16
};

#if HAS_WARP_GROUPS
/* Where a role is in a ring of `count` places. */
struct ring {
    int count, at, round;

    __device__ __forceinline__ void next()
    {
        if (++at == count) at = 0, round ^= 1;
    }
};

/* A sequence of a value head, or one of its segments, and a tile of its value columns. A block has
 * every gridDim.x-th. */
struct tile_of_head {
    unit u; /* it begins and ends where the segment does */
    int tile, segment;
};

__device__ __forceinline__ tile_of_head tile_at(const call &c, int tiles, int index,
                                                int segments = 1)
{
    const int head = index / tiles / segments;
    tile_of_head x = {unit_of(c, head / c.HV, head % c.HV), index % tiles, 0};
    if (segments == 1) return x;
    const int begin = x.u.begin, chunks = (x.u.end - begin + C - 1) / C;
    x.segment = index / tiles % segments;
    x.u.begin += first_of_segment(chunks, x.segment, segments) * C;
    x.u.end = min(x.u.end, begin + first_of_segment(chunks, x.segment + 1, segments) * C);
    return x;
}

/* Where a thread of a group is. Asked for anew in each part of a chunk: addresses that follow from
 * it would otherwise be kept from part to part and from chunk to chunk. */
struct seat {
    int thread, warp, lane;
    int row, pair; /* of sums: rows `row` and + 8 of the 16 of this warp, columns `pair`, + 1 */
    int token;     /* of the 16 of this warp, twice */
};

__device__ __forceinline__ seat own_seat()
{
    unsigned thread = threadIdx.x % GROUP;
    asm volatile("" : "+r"(thread));
    __builtin_assume(thread < GROUP);
    const int warp = thread / 32, lane = thread % 32;
    return {(int)thread, warp, lane, lane / 4, lane % 4 * 2, warp * BLOCK + lane % BLOCK};
}

/* Where a lane of a walk reads 8 x 8 blocks of v, transposed, and writes those of o. */
__device__ __forceinline__ int transposed_at(const seat &at)
{
    return piece_at(at.lane / 16 * 8 + at.lane % 8, at.warp * 2 + at.lane / 8 % 2);
}

/* Load and store the state of a walk. Its decays are none or scalar. */
template <int N>
__device__ __forceinline__ void load_state(const call &c, const unit &u, int first_column,
                                           int columns, float (&S)[N][4])
{
    const view &from = c.x[LA_S0];
    const numbers_of_state x(c, from, u.n, u.hv, 0, first_column, columns);
    with_type<LA_DTYPE_STORED, float>(from.dtype, [&](auto *type) {
        typedef std::remove_pointer_t<decltype(type)> T;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[i][e] = x.has(i, e) ? (float)x.template number<const T>(i, e) : 0;
    });
}

template <int N>
__device__ __forceinline__ void store_state(const call &c, const unit &u, int first_column,
                                            int columns, const float (&S)[N][4])
{
    const numbers_of_state x(c, c.x[LA_ST], u.n, u.hv, 0, first_column, columns);
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (x.has(i, e)) x.number<float>(i, e) = S[i][e];
}

template <int N> __device__ __forceinline__ void scale_state(float (&S)[N][4], float a)
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) S[j][e] *= a;
}

/* O times the scale and, BY_TOKEN, times the number of each token, which is at `in`. */
template <bool BY_TOKEN>
__device__ __forceinline__ void scale_o(float (&O)[8][4], const float *in, float scale)
{
#pragma unroll
    for (int m = 0; m < 8; m++) {
        const float2 a = BY_TOKEN ? *(const float2 *)(in + m * 8) : make_float2(1, 1);
        O[m][0] *= a.x * scale;
        O[m][1] *= a.y * scale;
        O[m][2] *= a.x * scale;
        O[m][3] *= a.y * scale;
    }
}

/* The order of a state in chunk_by_tokens, and back. */
template <int N>
__device__ __forceinline__ void state_for_tokens(const float (&S)[N][4], float (&to)[N * 4])
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) to[(j * 2 + e % 2) * 2 + e / 2] = S[j][e];
}

template <int N>
__device__ __forceinline__ void state_from_tokens(const float (&from)[N * 4], float (&S)[N][4])
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) S[j][e] = from[(j * 2 + e % 2) * 2 + e / 2];
}

/* Token `first` of a chunk and those after it, one by one: their O, and the state `after` them. */
template <int KP, la_decay DECAY, la_rule RULE>
__device__ __forceinline__ void rest_by_tokens(const call &c, const unit &u, int t, int n,
                                               int first, int column, int columns,
                                               float (&after)[KP / 2], float (&O)[8][4])
{
    float numbers_of_o[32];
#pragma unroll
    for (int m = 0; m < 32; m++) numbers_of_o[m] = O[m / 4][m % 4];
    chunk_by_tokens<KP, DECAY, RULE>(c, u, t, n, first, column, columns, after, numbers_of_o, 0, C);
#pragma unroll
    for (int m = 0; m < 32; m++) O[m / 4][m % 4] = numbers_of_o[m];
}

__device__ __forceinline__ void pack_o(const float (&O)[8][4], uint32_t (&o)[4][4])
{
#pragma unroll
    for (int m = 0; m < 4; m++) {
        o[m][0] = pack(O[2 * m][0], O[2 * m][1]);
        o[m][1] = pack(O[2 * m][2], O[2 * m][3]);
        o[m][2] = pack(O[2 * m + 1][0], O[2 * m + 1][1]);
        o[m][3] = pack(O[2 * m + 1][2], O[2 * m + 1][3]);
    }
}

/* O of a warp, to its columns of a panel; and n tokens of it from there to memory, from to_o on. */
__device__ __forceinline__ void put_o(char *panel, const uint32_t (&o)[4][4])
{
    const seat at = own_seat();
#pragma unroll
    for (int m = 0; m < 4; m++)
        store_matrices_transposed(address_of(panel) + transposed_at(at) + m * 16 * 128, o[m]);
    __syncwarp();
}

__device__ __forceinline__ void store_o(const call &c, bool o_pieces, const char *panel, char *to_o,
                                        int columns, int n)
{
    if (columns <= 0) return;
    const int64_t step = c.x[LA_O].stride[1] * 32;
    const seat at = own_seat();
    const char *const from = panel + piece_at(at.lane / 2, at.warp * 2 + at.lane % 2);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const uint4 x = *(const uint4 *)(from + j * 16 * 128);
        if (at.lane / 2 + j * 16 >= n) continue;
        if (o_pieces && columns == 16)
            *(uint4 *)(to_o + j * step) = x;
        else
            store_piece(to_o + j * step, x, columns - at.lane % 2 * 8);
    }
    __syncwarp();
}
#endif

#endif
