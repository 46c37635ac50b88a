/* Loads and stores of the kernels that take one token: pieces of a state, rows of q and k. */
#ifndef LINATTN_CUDA_TOKEN_CUH
#define LINATTN_CUDA_TOKEN_CUH

#include "load.cuh"

/* Four neighbouring numbers, of which the first `there` exist. */
__device__ __forceinline__ void load_four(float (&x)[4], const char *from, la_dtype dtype,
                                          int there, bool vector)
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
        x[e] = e < there ? load<float>(from + e * la_size_of(dtype), dtype) : 0;
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
        if (e < there) store(to + e * la_size_of(dtype), dtype, x[e]);
}

/* The same for the arrays of tokens, as bits of 16 or 32 each. A kernel can so start all its loads
 * before it waits for the first. Numbers that do not exist are zeros. */
struct four_bits {
    uint32_t x[4];
};

__device__ __forceinline__ four_bits load_four_bits(const char *from, la_dtype dtype, int there)
{
    const int size = la_size_of(dtype);
    four_bits y = {};
    if (there >= 4 && (uintptr_t)from % (4 * size) == 0) {
        if (size == 4) {
            const uint4 z = *(const uint4 *)from;
            y.x[0] = z.x, y.x[1] = z.y, y.x[2] = z.z, y.x[3] = z.w;
        } else {
            const uint2 z = *(const uint2 *)from;
            y.x[0] = z.x, y.x[1] = z.y;
        }
        return y;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (e < there) {
            if (size == 4)
                y.x[e] = ((const uint32_t *)from)[e];
            else
                y.x[e / 2] |= (uint32_t)((const uint16_t *)from)[e] << e % 2 * 16;
        }
    return y;
}

/* One branch on the dtype serves all four. */
__device__ __forceinline__ void numbers(float (&x)[4], const four_bits &bits, la_dtype dtype)
{
    if (dtype == LA_F32) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = __uint_as_float(bits.x[e]);
    } else if (dtype == LA_BF16) {
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = number(bits.x[e / 2] >> e % 2 * 16 & 0xffff, LA_BF16);
    } else {
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = number(bits.x[e / 2] >> e % 2 * 16 & 0xffff, LA_F16);
    }
}

/* ---- a row of keys, by one warp: a lane has four, or four of each half ---- */

__device__ __forceinline__ int key_of_lane(int lane, int i)
{
    return i / 4 * 128 + lane * 4 + i % 4;
}

template <int KEYS>
__device__ __forceinline__ void load_key_bits(const call &c, const view &from, int n, int h,
                                              four_bits (&x)[KEYS / 4])
{
    const int lane = threadIdx.x % 32;
    const char *row = at(from, n, 0, h);
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) {
        const int key = key_of_lane(lane, i);
        x[i / 4] = load_four_bits(row + key * la_size_of(from.dtype), from.dtype, c.K - key);
    }
}

struct by_fours {
    __device__ int operator()(int j) const { return key_of_lane((int)threadIdx.x % 32, j); }
};

/* q or k (map 0 or 1) as the recurrence sees it. */
template <int KEYS>
__device__ __forceinline__ void make_key(const call &c, const four_bits (&bits)[KEYS / 4],
                                         la_dtype dtype, int map, float (&x)[KEYS])
{
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) {
        float four[4];
        numbers(four, bits[i / 4], dtype);
#pragma unroll
        for (int e = 0; e < 4; e++) x[i + e] = four[e];
    }
    norm_and_map(c, map, x, by_fours());
}

/* A gate per key: its bits (those of a float32 if the gate is float64), then its decays. */
template <int KEYS>
__device__ __forceinline__ void load_decay_bits(const call &c, int n, int hv,
                                                four_bits (&x)[KEYS / 4])
{
    const int lane = threadIdx.x % 32, size = la_size_of(c.x[LA_G].dtype);
    const char *row = at(c.x[LA_G], n, 0, hv);
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) {
        const int key = key_of_lane(lane, i);
        if (c.x[LA_G].dtype != LA_F64) {
            x[i / 4] = load_four_bits(row + key * size, c.x[LA_G].dtype, c.K - key);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++)
                x[i / 4].x[e] =
                    key + e < c.K ? __float_as_uint((float)((const double *)row)[key + e]) : 0;
        }
    }
}

/* Decays are zeros where there is no key. */
template <int KEYS>
__device__ __forceinline__ void make_decay(const call &c, const four_bits (&bits)[KEYS / 4],
                                           float (&a)[KEYS])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) {
        float four[4];
        numbers(four, bits[i / 4], c.x[LA_G].dtype == LA_F64 ? LA_F32 : c.x[LA_G].dtype);
#pragma unroll
        for (int e = 0; e < 4; e++) a[i + e] = four[e];
    }
    if (c.gate == LA_LOG)
#pragma unroll
        for (int i = 0; i < KEYS; i++) a[i] = decay_of(a[i], LA_LOG);
#pragma unroll
    for (int i = 0; i < KEYS; i++)
        if (key_of_lane(lane, i) >= c.K) a[i] = 0;
}

/* z + k, the next normaliser, times q: the part of this lane of the denominator. */
template <int KEYS>
__device__ __forceinline__ float denominator(const call &c, const char *z, const float (&q)[KEYS],
                                             const float (&k)[KEYS], float (&next)[KEYS])
{
    const int lane = threadIdx.x % 32, size = la_size_of(c.x[LA_Z0].dtype);
    float den = 0;
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        const int key = key_of_lane(lane, i);
        next[i] = (key < c.K ? load<float>(z + key * size, c.x[LA_Z0].dtype) : 0) + k[i];
        den += next[i] * q[i];
    }
    return den;
}

template <int KEYS>
__device__ __forceinline__ void store_keys(char *to, la_dtype dtype, int K, const float (&x)[KEYS])
{
    const int lane = threadIdx.x % 32, size = la_size_of(dtype);
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        const int key = key_of_lane(lane, i);
        if (key < K) store(to + key * size, dtype, x[i]);
    }
}

#endif
