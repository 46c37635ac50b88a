/* Rows of values and states in the registers of a warp of recompute.cuh: as operands, without the
 * tokens that a NaN spoils, and on their way to memory. */
#ifndef LINATTN_CUDA_RECOMPUTE_ROWS_CUH
#define LINATTN_CUDA_RECOMPUTE_ROWS_CUH

#include "gradient_range.cuh"
#include "recompute_fetch.cuh"

/* For each of the two columns of this thread: one past the last token with a NaN or an infinity. */
__device__ __forceinline__ void spoiled_up_to(const left (&x)[4], int (&end)[2])
{
    constexpr uint32_t EXPONENT = NARROW ? 0x7c00 : 0x7f80; /* of an element */
    end[0] = end[1] = 0;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int t = m * 16 + e / 2 * 8 + threadIdx.x % 4 * 2;
            if ((x[m].x[e] & EXPONENT) == EXPONENT) end[e % 2] = max(end[e % 2], t + 1);
            if ((x[m].x[e] & EXPONENT << 16) == EXPONENT << 16) end[e % 2] = max(end[e % 2], t + 2);
        }
#pragma unroll
    for (int w = 0; w < 2; w++) {
        end[w] = max(end[w], __shfl_xor_sync(~0u, end[w], 1));
        end[w] = max(end[w], __shfl_xor_sync(~0u, end[w], 2));
    }
}

/* Set the tokens before `end` to zero. */
__device__ __forceinline__ void clear_before(left (&x)[4], const int (&end)[2])
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int t = m * 16 + e / 2 * 8 + threadIdx.x % 4 * 2;
            if (t < end[e % 2]) x[m].x[e] &= t + 1 < end[e % 2] ? 0 : 0xffff0000;
        }
}

__device__ __forceinline__ void spoil_before(float (&x)[8][4], const int (&end)[2])
{
#pragma unroll
    for (int m = 0; m < 8; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (m * 8 + threadIdx.x % 4 * 2 + e % 2 < end[e / 2]) x[m][e] = nanf("");
}

/* x [16 columns][64 tokens] as operands over the tokens, each token times its numbers in `by` and
 * `also` (NULL: one). */
__device__ __forceinline__ void as_operands(left (&to)[4], const float (&x)[8][4], const float *by,
                                            float factor, const float *also = NULL)
{
#pragma unroll
    for (int m = 0; m < 8; m++) {
        float2 a = by ? *(const float2 *)(by + m * 8 + threadIdx.x % 4 * 2) : make_float2(1, 1);
        if (also) {
            const float2 b = *(const float2 *)(also + m * 8 + threadIdx.x % 4 * 2);
            a = make_float2(a.x * b.x, a.y * b.y);
        }
        to[m / 2].x[m % 2 * 2] = pack(factor * a.x * x[m][0], factor * a.y * x[m][1]);
        to[m / 2].x[m % 2 * 2 + 1] = pack(factor * a.x * x[m][2], factor * a.y * x[m][3]);
    }
}

/* The same for operands. */
__device__ __forceinline__ void scale_operands(left (&x)[4], const float *by, float factor)
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 a = by ? *(const float2 *)(by + m * 16 + e / 2 * 8 + threadIdx.x % 4 * 2)
                                : make_float2(1, 1);
            const float2 y = unpack(x[m].x[e]);
            x[m].x[e] = pack(factor * a.x * y.x, factor * a.y * y.y);
        }
}

/* Store x' of the 16 columns of a warp, by way of its 16 columns of a panel at `slice`. */
__device__ __forceinline__ void put_columns(uint32_t slice, const float (&x)[8][4])
{
#pragma unroll
    for (int m = 0; m < 8; m += 2) {
        const uint32_t y[4] = {pack(x[m][0], x[m][1]), pack(x[m][2], x[m][3]),
                               pack(x[m + 1][0], x[m + 1][1]), pack(x[m + 1][2], x[m + 1][3])};
        store_matrices_transposed(slice + m * 8 * 128, y);
    }
    __syncwarp();
}

/* The rows of a warp in a panel. */
enum { BYTES_OF_ROWS = 16 * PANEL * 2 };

#if HAS_WARP_GROUPS
/* Store S', which already is operands, as 16 rows of a tile whose rows are value columns; `row` is
 * the first. They leave by way of `staged`, which is the warp's own. */
template <int KP>
__device__ __forceinline__ void send_state(char *tile, int row, uint32_t staged,
                                           const left (&s)[KP / 16])
{
    const int lane = threadIdx.x % 32;
    if (lane == 0) engine_has_read<0>(); /* the state that lay here has left */
    __syncwarp();
    const uint32_t to = lane_with_columns(staged);
#pragma unroll
    for (int j = 0; j < KP / 16; j++)
        store_matrices((to ^ (j % 4 << 5)) + j / 4 * BYTES_OF_ROWS, s[j].x);
    stores_before_copies();
    __syncwarp();
    if (lane == 0)
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++)
            engine_copy_back(tile + j * PANEL_BYTES + row * 128, staged + j * BYTES_OF_ROWS,
                             BYTES_OF_ROWS);
}
#endif

/* Store S', which already is operands, as a tile whose rows are value columns. `row` is the first
 * row of this warp. */
template <int KP>
__device__ __forceinline__ void put_state(char *tile, int row, const left (&s)[KP / 16])
{
    const int lane = threadIdx.x % 32;
    /* the first piece of the row */
    char *const own = tile + element_at(row + lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < KP / 8; i++) {
        char *to = (char *)((uintptr_t)own ^ (i % 8 << 4)) + i / 8 * PANEL_BYTES;
        *(uint32_t *)to = s[i / 2].x[i % 2 * 2];
        *(uint32_t *)(to + 8 * 128) = s[i / 2].x[i % 2 * 2 + 1];
    }
}

#endif
