/* The inverse of I + L of a chunk, with L strictly lower triangular [C][C], in place.
 *
 * Blocks of 16 are inverted by substitution in float32. Then two blocks at a time are joined:
 * [A 0; B D]^-1 has -D^-1 B A^-1 below the diagonal. These products keep the 11 bits of tf32.
 * float16 has as many, bf16 three fewer, and two planes of bf16 have five more. The first four
 * warps work; room is [4][32][12]. Above the diagonal, blocks (0, 1) and (2, 3) of 16 are read, and
 * `clear_pairs` has made them zeros. */
#ifndef LINATTN_CUDA_INVERSE_CUH
#define LINATTN_CUDA_INVERSE_CUH

#include "chunk_slots.cuh"

__device__ inline void invert(float *L, float *room)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool works = warp < 4;
    float *own = room + warp * 32 * 12; /* [32][8], with rows 12 apart */
    if (works) {
        float *block = L + warp * 16 * (LD + 1), x[16];
        const int column = lane % 16;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = i == column;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 y = *(const float4 *)(block + i * LD + j);
                sum -= y.x * x[j];
                if (j + 1 < i) sum -= y.y * x[j + 1];
                if (j + 2 < i) sum -= y.z * x[j + 2];
                if (j + 3 < i) sum -= y.w * x[j + 3];
            }
            x[i] = i < column ? 0 : sum;
        }
        __syncwarp();
        if (lane < 16)
#pragma unroll
            for (int i = 0; i < 16; i++) block[i * LD + column] = x[i];
    }
    __syncthreads();
    { /* 16 -> 32: two warps per pair of blocks, 8 columns each */
        float *A = L + warp / 2 % 2 * 32 * (LD + 1), *B = A + 16 * LD, *D = B + 16;
        const int column = warp % 2 * 8;
        float c[4] = {}, e[4] = {};
        if (works) {
            multiply_tf32<2>(c, B, LD, A + column, LD);
            put(own, 12, c, 1);
        }
        __syncthreads(); /* both warps have read B */
        if (works) {
            multiply_tf32<2>(e, D, LD, own, 12);
            put(B + column, LD, e, -1);
        }
    }
    __syncthreads();
    { /* 32 -> 64: 8 columns per warp */
        float *A = L, *B = A + 32 * LD, *D = B + 32;
        const int column = warp * 8;
        float c[2][4] = {}, e[2][4] = {};
        for (int i = 0; i < 2 && works; i++) {
            multiply_tf32<4>(c[i], B + i * 16 * LD, LD, A + column, LD);
            put(own + i * 16 * 12, 12, c[i], 1);
        }
        __syncthreads();
        for (int i = 0; i < 2 && works; i++) {
            multiply_tf32<4>(e[i], D + i * 16 * LD, LD, own, 12);
            put(B + i * 16 * LD + column, LD, e[i], -1);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void clear_pairs(float *L)
{
    if (threadIdx.x >= 128) return;
    const int block = threadIdx.x / 64 * 32, row = threadIdx.x % 64 / 4,
              column = threadIdx.x % 4 * 4;
    *(float4 *)(L + (block + row) * LD + block + 16 + column) = make_float4(0, 0, 0, 0);
}

/* A = L diag(beta) as a tile: the ten blocks on and below the diagonal. */
template <int THREADS>
__device__ __forceinline__ void put_inverse(const float *L, const float *beta, char *tile)
{
    const int row = threadIdx.x % 128 / 8, column = threadIdx.x % 8 * 2;
#pragma unroll
    for (int i = 0; i < 10; i += THREADS / 128) {
        const int block = i + threadIdx.x / 128, I = (block > 0) + (block > 2) + (block > 5);
        const int J = block - I * (I + 1) / 2;
        const float2 x = *(const float2 *)(L + (I * 16 + row) * LD + J * 16 + column);
        const float2 b = *(const float2 *)(beta + J * 16 + column);
        put_pair(tile + element_at(I * 16 + row, J * 16 + column), x.x * b.x, x.y * b.y);
    }
}

/* A tile of - L becomes - M = - L T, where T = (I + diag(beta) L)^-1 is in float32. The first four
 * warps work, each on its 16 rows. Block j of M takes the place of block j of L, which the blocks
 * after it do not need. */
__device__ inline void multiply_with_inverse(char *tile, const float *T)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp >= 4) return;
#pragma unroll 1
    for (int j = 0; j <= warp; j++) {
        float M[2][4] = {};
#pragma unroll 1
        for (int k = j; k <= warp; k++) {
            const left L = load_left(address_of(tile), warp * 16, k * 16);
            /* two rows of a column */
            const float *const own = T + (k * 16 + lane % 4 * 2) * LD + j * 16 + lane / 4;
            uint32_t x[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float *const at = own + e % 2 * 8 * LD + e / 2 * 8;
                x[e] = pack(at[0], at[LD]);
            }
            multiply(M[0], L, x[0], x[1]);
            multiply(M[1], L, x[2], x[3]);
        }
        __syncwarp();
        store_left(tile, warp * 16, j * 16, as_left(M[0], M[1]));
    }
}

/* x is sums of products [16][8] of a block on the diagonal, from its column `first` on. Returns the
 * first row whose number on the diagonal itself is not finite, or C. The product of q and k of a
 * token shows a NaN or an infinity in either; that of x and k shows one in x, or a sum that is too
 * large for float32. */
__device__ __forceinline__ int nonfinite_on_diagonal(const float (&x)[4], int first)
{
    const int lane = threadIdx.x % 32, row = lane / 4, column = first + lane % 4 * 2;
    int nonfinite = C;
#pragma unroll
    for (int e = 3; e >= 0; e--)
        if (row + e / 2 * 8 == column + e % 2 && !isfinite(x[e])) nonfinite = row + e / 2 * 8;
    return nonfinite;
}

/* Is there no element for this score? It belongs to a token before the first nonfinite one. It is
 * too large, or it is a NaN because a number on the way to it was too large. This token and those
 * after it go token by token. */
__device__ __forceinline__ bool no_element(float x)
{
    return NARROW && !(fabsf(x) <= MOST_OF_ELEMENT);
}

/* The same for q and k times decays above one. */
__device__ __forceinline__ bool too_large(float x) { return isfinite(x) && no_element(x); }

#endif
