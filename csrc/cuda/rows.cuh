/* Norms and feature maps of q and k, before the other kernels. One kernel finds a factor for each
 * row. The other one writes mapped rows. */
#ifndef LINATTN_CUDA_ROWS_CUH
#define LINATTN_CUDA_ROWS_CUH

#include "prepare.cuh"

struct bool2 {
    bool x, y;
};

enum {
    NORM_THREADS = 256,
    LANES_OF_ROW = 16,
    ROWS_AT_ONCE = 4, /* of the 16 lanes, so that loads overlap */
    ROWS_OF_BLOCK = NORM_THREADS / LANES_OF_ROW * ROWS_AT_ONCE
};

/* The sum over the lanes of a row. All lanes of the warp call this. */
__device__ __forceinline__ float sum_of_row(float x)
{
#pragma unroll
    for (int lanes = LANES_OF_ROW / 2; lanes; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

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
        squares = sum_of_row(squares);
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

/* q and k as rows of `padded` elements, normalised and mapped as the call asks: [2][B T H], those
 * of q first. `pieces`: rows of q, and of k, can be loaded in pieces of 16 bytes. A lane has 8
 * elements of up to 128. `norms` gets the factors of the l2 norm in the same order, unless it is
 * NULL. */
template <typename = element>
__global__ void __launch_bounds__(NORM_THREADS)
    map_rows(const __grid_constant__ call c, const bool2 pieces, int padded, char *to, float *norms)
{
    const int which = blockIdx.y, rows = c.B * c.T * c.H;
    const int column = threadIdx.x % LANES_OF_ROW * 8, there = c.K - column;
    const int first = (int)blockIdx.x * ROWS_OF_BLOCK + (int)threadIdx.x / LANES_OF_ROW;
    constexpr int step = NORM_THREADS / LANES_OF_ROW;
    const view &x = c.x[which ? LA_K : LA_Q];
    uint4 of[ROWS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int row = first + i * step, t = row / c.H;
        of[i] = make_uint4(0, 0, 0, 0);
        if (row >= rows || there <= 0) continue;
        const char *const from = at(x, t / c.T, t % c.T, row % c.H, column);
        if (which ? pieces.y : pieces.x) {
            of[i] = *(const uint4 *)from;
            continue;
        }
        uint16_t one[8];
#pragma unroll
        for (int e = 0; e < 8; e++)
            one[e] = e < there ? *(const uint16_t *)(from + e * x.stride[3] * 2) : 0;
        uint32_t *const pairs = &of[i].x;
#pragma unroll
        for (int e = 0; e < 4; e++) pairs[e] = one[2 * e] | (uint32_t)one[2 * e + 1] << 16;
    }
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; i++) {
        const int row = first + i * step;
        const uint32_t pairs[] = {of[i].x, of[i].y, of[i].z, of[i].w};
        float y[8], squares = 0;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 two = unpack(pairs[e]);
            y[2 * e] = two.x, y[2 * e + 1] = two.y;
            squares += two.x * two.x + two.y * two.y;
        }
        if (c.qk_l2norm) {
            const float factor = l2norm_factor(sum_of_row(squares));
#pragma unroll
            for (int e = 0; e < 8; e++) y[e] *= factor;
            if (norms && column == 0 && row < rows) norms[which * (int64_t)rows + row] = factor;
        }
        apply_map_to_all(y, c.map[which], (float)c.map_eps[which]);
#pragma unroll
        for (int e = 0; e < 8; e++) /* a map of zero may be 1 */
            if (e >= there) y[e] = 0;
        if (row < rows && column < padded)
            *(uint4 *)(to + ((which * (int64_t)rows + row) * padded + column) * 2) =
                make_uint4(pack(y[0], y[1]), pack(y[2], y[3]), pack(y[4], y[5]), pack(y[6], y[7]));
    }
}

/* The bytes of mapped rows of q and k. */
static int64_t mapped_bytes(const call &c)
{
    return 2 * (int64_t)c.B * c.T * c.H * div_up(c.K, PIECE) * PIECE * 2;
}

/* Put mapped rows of q and k at `to`. The call then has them in the place of q and k. */
static cudaError_t launch_map_rows(call &c, char *to, float *norms, cudaStream_t stream)
{
    const int padded = (int)div_up(c.K, PIECE) * PIECE;
    const int64_t rows = (int64_t)c.B * c.T * c.H, of_token = (int64_t)c.H * padded;
    const auto in_pieces = [&](const view &x) {
        return x.stride[3] == 1 && map_of(c, x, c.H, c.K, NULL);
    };
    const dim3 blocks((unsigned)div_up(rows, ROWS_OF_BLOCK), 2);
    map_rows<><<<blocks, NORM_THREADS, 0, stream>>>(c, {in_pieces(c.x[LA_Q]), in_pieces(c.x[LA_K])},
                                                    padded, to, norms);
    c.x[LA_Q] = {to, {c.T * of_token, of_token, padded, 1}, ELEMENT_DTYPE};
    c.x[LA_K] = {to + rows * padded * 2, {c.T * of_token, of_token, padded, 1}, ELEMENT_DTYPE};
    c.map[0] = c.map[1] = LA_IDENTITY;
    c.qk_l2norm = false;
    return cudaGetLastError();
}

/* run(call) with mapped rows in the place of q and k. */
template <typename F>
static cudaError_t with_mapped_rows(call c, cudaMemPool_t pool, cudaStream_t stream, F run)
{
    char *to = NULL;
    if ((int64_t)c.B * c.T * c.H == 0) return run(c);
    cudaError_t error = cudaMallocFromPoolAsync((void **)&to, mapped_bytes(c), pool, stream);
    if (error != cudaSuccess) return error;
    error = launch_map_rows(c, to, NULL, stream);
    if (error == cudaSuccess) error = run(c);
    const cudaError_t freed = cudaFreeAsync(to, stream);
    return error == cudaSuccess ? freed : error;
}

#endif
