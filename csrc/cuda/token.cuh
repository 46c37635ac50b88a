/* What the kernels of one token load and store: pieces of a state, rows of q and k. */
#ifndef LINATTN_CUDA_TOKEN_CUH
#define LINATTN_CUDA_TOKEN_CUH

#include "load.cuh"

/* Four numbers in a row, of which the first `there` exist. */
__device__ __forceinline__ void load_four(float (&x)[4], const char *from, la_dtype dtype, int there,
                                          bool vector)
{
    if (vector && there >= 4) {
        if (dtype == LA_F32) {
            const float4 y = *(const float4 *)from;
            x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
        } else {
            const uint2 y = *(const uint2 *)from;
            x[0] = __uint_as_float(y.x << 16), x[1] = __uint_as_float(y.x & 0xffff0000);
            x[2] = __uint_as_float(y.y << 16), x[3] = __uint_as_float(y.y & 0xffff0000);
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        x[e] = e < there ? load<float>(from + e * dtype_size(dtype), dtype) : 0;
}

__device__ __forceinline__ void store_four(char *to, const float (&x)[4], la_dtype dtype, int there,
                                           bool vector)
{
    if (vector && there >= 4) {
        if (dtype == LA_F32) {
            *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            const __nv_bfloat162 low = __floats2bfloat162_rn(x[0], x[1]);
            const __nv_bfloat162 high = __floats2bfloat162_rn(x[2], x[3]);
            *(uint2 *)to = make_uint2(*(const uint32_t *)&low, *(const uint32_t *)&high);
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (e < there) store(to + e * dtype_size(dtype), dtype, x[e]);
}

/* One warp: a row of q or k as the recurrence sees it, [KEYS * 32]. */
template <int KEYS>
__device__ __forceinline__ void load_bits(const call &c, const view &from, int n, int h,
                                          uint64_t (&x)[KEYS])
{
    const int lane = threadIdx.x % 32, size = dtype_size(from.dtype);
    const char *row = at(from, n, 0, h);
#pragma unroll
    for (int j = 0; j < KEYS; j++)
        x[j] = lane + 32 * j < c.K ? bits_of(row + (lane + 32 * j) * size, from.dtype) : 0;
}

/* Asked once per row: dtype and map, of which the usual ones need no branch per element. */
template <int KEYS>
__device__ __forceinline__ void make_key(const call &c, const uint64_t (&bits)[KEYS], la_dtype dtype,
                                         la_map map, double map_eps, float (&x)[KEYS])
{
    const int lane = threadIdx.x % 32;
    if (dtype == LA_BF16) {
#pragma unroll
        for (int j = 0; j < KEYS; j++) x[j] = number(bits[j], LA_BF16);
    } else {
#pragma unroll
        for (int j = 0; j < KEYS; j++) x[j] = number(bits[j], dtype);
    }
    if (c.qk_l2norm) {
        float squares = 0;
#pragma unroll
        for (int j = 0; j < KEYS; j++) squares += x[j] * x[j];
        const float factor = l2norm_factor(warp_sum(squares));
#pragma unroll
        for (int j = 0; j < KEYS; j++) x[j] *= factor;
    }
    if (map != LA_IDENTITY)
#pragma unroll
        for (int j = 0; j < KEYS; j++)
            x[j] = lane + 32 * j < c.K ? apply_map(x[j], map, (float)map_eps) : 0;
}

#endif
