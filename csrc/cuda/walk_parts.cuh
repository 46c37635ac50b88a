/* Shared by the walks of several kernels. In a chunk they look for NaN, leave tokens out, and
 * exchange sums with the warp that has the other half of the keys. */
#ifndef LINATTN_CUDA_WALK_PARTS_CUH
#define LINATTN_CUDA_WALK_PARTS_CUH

#include "chunk_tokens.cuh"

/* A piece of 8 columns of a row of o, of which `there` exist. */
static __device__ __noinline__ void store_piece(char *to, uint4 x, int there)
{
    const uint32_t of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < there) *(uint16_t *)(to + i * 2) = (uint16_t)(of[i / 2] >> i % 2 * 16);
}

/* Has this thread a NaN or an infinity among its numbers of [16 columns][16 N]? Zero times such a
 * number is not zero. */
template <int N> __device__ __forceinline__ bool has_nonfinite(const operand (&x)[N])
{
    const element_pair zero = pair_of(0, 0);
    element_pair sum[4] = {zero, zero, zero, zero};
#pragma unroll
    for (int m = 0; m < N; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[e] = __hfma2(*(const element_pair *)&x[m].of[0].x[e], zero, sum[e]);
    const element_pair all = __hadd2(__hadd2(sum[0], sum[1]), __hadd2(sum[2], sum[3]));
    return (*(const uint32_t *)&all & 0x7fff7fff) != 0;
}

/* The first of n tokens that has one in the columns of v of this warp, or in their products with
 * gates; C if there is none. */
static __device__ __noinline__ int first_nonfinite(const call &c, const unit &u, int t, int n,
                                                   int v0, int columns)
{
    int first = C;
    for (int j = threadIdx.x % 32; j < n * columns && first == C; j += 32) {
        const int token = t + j / columns, column = v0 + j % columns;
        float x = load<float>(at(c.x[LA_V], u.b, token, u.hv, column), ELEMENT_DTYPE);
        if (c.x[LA_W].data)
            x *= load<float>(at(c.x[LA_W], u.b, token, u.hv, column), ELEMENT_DTYPE);
        if (!isfinite(numbers(in_planes(x, 0)).x)) first = j / columns;
    }
    return (int)__reduce_min_sync(~0u, (unsigned)first);
}

/* Is x true in this warp, or in the warp with the other half of the keys? x is the same in all
 * lanes. */
template <int HALVES> __device__ __forceinline__ bool in_either_half(bool x, int line)
{
    if (HALVES == 1) return x;
    int any;
    asm volatile("{\n"
                 ".reg .pred mine, all;\n"
                 "setp.ne.s32 mine, %1, 0;\n"
                 "bar.red.or.pred all, %2, 64, mine;\n"
                 "selp.s32 %0, 1, 0, all;\n"
                 "}"
                 : "=r"(any)
                 : "r"((int)x), "r"(4 + line)
                 : "memory");
    return any;
}

/* Clear the tokens from `end` on in four left operands of 16 tokens each. pair: the two tokens of
 * every eight of this lane. */
__device__ __forceinline__ void keep_before(operand (&x)[4], int pair, int end)
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int t = m * 16 + e / 2 * 8 + pair;
#pragma unroll
            for (int i = 0; i < PLANES; i++)
                x[m].of[i].x[e] &= t + 1 < end ? ~0u : t < end ? 0xffffu : 0;
        }
}

/* A number of v where the copy engine has put it, in boxes of BOX columns. PLANES == 2. */
__device__ __forceinline__ float value_in_box(const char *v, int row, int column)
{
    const int piece = column % BOX / PIECE;
    return *(const float *)(v + column / BOX * BOX_BYTES + row * 128 + ((piece ^ row % 8) << 4) +
                            column % PIECE * 4);
}

/* Two warps with the same columns and half of the keys each exchange x, lane by lane. A warp writes
 * to the room that it read last time (`turn`), so that it overwrites only numbers that have been
 * read. */
struct partner {
    float4 *room; /* the part of this lane, of two rooms */
    int line, width, turn;

    template <int N> __device__ __forceinline__ void exchange(float (&x)[N][4])
    {
        const int lanes = width * 32;
        static_assert(N <= 8, "a room has 32 numbers a lane");
#pragma unroll
        for (int i = 0; i < N; i++)
            room[(turn * 8 + i) * lanes] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
        asm volatile("bar.sync %0, 64;" ::"r"(4 + line) : "memory");
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float4 y = room[(turn * 8 + i) * lanes];
            x[i][0] = y.x;
            x[i][1] = y.y;
            x[i][2] = y.z;
            x[i][3] = y.w;
        }
    }
    __device__ __forceinline__ float largest(float x)
    {
        float other[1][4] = {{x}};
        exchange(other);
        return fmaxf(x, other[0][0]);
    }
};

#endif
