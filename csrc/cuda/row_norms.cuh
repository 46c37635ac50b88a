/* The factors of the l2 norm of rows of q and k, for kernels that use the rows as the caller gave
 * them. */
#ifndef LINATTN_CUDA_ROW_NORMS_CUH
#define LINATTN_CUDA_ROW_NORMS_CUH

#include "prepare.cuh"

enum {
    NORM_THREADS = 256,
    LANES_OF_ROW = 16,
    ROWS_AT_ONCE = 4, /* of the 16 lanes, so that loads overlap */
    ROWS_OF_BLOCK = NORM_THREADS / LANES_OF_ROW * ROWS_AT_ONCE
};

/* [2][B T H], those of q first. Rows begin at multiples of 16 bytes, and have up to 128 elements: a
 * lane has 8. Block (i, 0) has rows of q, block (i, 1) the same of k. With `flat` rows follow each
 * other at the distance of heads. */
template <typename = element>
__global__ void __launch_bounds__(NORM_THREADS)
    find_norms(const __grid_constant__ call c, bool flat, float *to)
{
    const view &x = c.x[blockIdx.y ? LA_K : LA_Q];
    const int rows = c.B * c.T * c.H, column = threadIdx.x % LANES_OF_ROW * 8;
    const int first = (int)blockIdx.x * ROWS_OF_BLOCK + (int)threadIdx.x / LANES_OF_ROW;
    constexpr int step = NORM_THREADS / LANES_OF_ROW;
    uint4 of[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int row = first + i * step, t = row / c.H;
        const char *const from =
            flat ? at(x, 0, 0, row, column) : at(x, t / c.T, t % c.T, row % c.H, column);
        of[i] = row < rows && column < c.K ? *(const uint4 *)from : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int row = first + i * step;
        const uint32_t pairs[] = {of[i].x, of[i].y, of[i].z, of[i].w};
        float squares = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) { /* a copy of rows has no zeros behind their ends */
            const float2 y = unpack(pairs[e]);
            if (column + 2 * e < c.K) squares += y.x * y.x;
            if (column + 2 * e + 1 < c.K) squares += y.y * y.y;
        }
#pragma unroll
        for (int lanes = LANES_OF_ROW / 2; lanes; lanes /= 2)
            squares += __shfl_xor_sync(~0u, squares, lanes);
        if (threadIdx.x % LANES_OF_ROW == 0 && row < rows)
            to[blockIdx.y * (int64_t)rows + row] = l2norm_factor(squares);
    }
}

static cudaError_t launch_norms(const call &c, float *to, cudaStream_t stream)
{
    const int64_t rows = (int64_t)c.B * c.T * c.H;
    const auto is_flat = [&](const view &x) {
        return (c.T == 1 || x.stride[1] == c.H * x.stride[2]) &&
               (c.B == 1 || x.stride[0] == (int64_t)c.T * c.H * x.stride[2]);
    };
    const bool flat = is_flat(c.x[LA_Q]) && is_flat(c.x[LA_K]);
    const dim3 blocks((unsigned)div_up(rows, ROWS_OF_BLOCK), 2);
    if (rows == 0) return cudaSuccess;
    find_norms<><<<blocks, NORM_THREADS, 0, stream>>>(c, flat, to);
    return cudaGetLastError();
}

#endif
