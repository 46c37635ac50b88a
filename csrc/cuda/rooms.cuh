/* Calls of rooms (../room.h) as kernels take them: their arrays as views, the places of sequences, and
 * loads and stores of a few neighbouring channels. */
#ifndef LINATTN_CUDA_ROOMS_CUH
#define LINATTN_CUDA_ROOMS_CUH

#include "launch.cuh"
#include "load.cuh"
#include "power.cuh"

extern "C" {
#include "../room.h"
}

/* All rooms have these. A step has one token, S sequences, and a pool of P states, if state_indices
 * pick them. */
struct room_call {
    view cu, slot;
    int B, T, D, S, P;
    bool step;
};

static inline view view_of(const la_array *a)
{
    view x = {};
    if (!a || !a->given) return x;
    x.data = a->data;
    x.dtype = a->dtype;
    for (int i = 0; i < LA_MAX_DIMS; i++) x.stride[i] = a->stride[i];
    return x;
}

/* The arrays of a call by line, and their gradients. */
template <int LINES>
static inline void take_views(const la_room_job &j, view (&x)[LINES], view (&d)[LINES])
{
    static_assert(LINES <= LA_ROOM_LINES, "a job has room for so many lines");
    for (int i = 0; i < LINES; i++) {
        x[i] = view_of(j.array[i]);
        d[i] = view_of(j.gradient[i]);
    }
}

/* Are tokens neighbours in memory, and channels not? */
static inline bool lies_along_tokens(const view &x) { return x.stride[1] == 1 && x.stride[2] != 1; }

static inline room_call room_of(const la_room_job &j, int64_t B, int64_t T, int64_t D, int64_t S)
{
    room_call c = {};
    c.cu = view_of(&j.p->array[LA_CU]);
    c.slot = view_of(&j.p->array[LA_SLOT]);
    c.B = (int)B;
    c.T = S ? (int)T : 0; /* without sequences there are no tokens */
    c.D = (int)D;
    c.S = (int)S;
    c.P = (int)j.p->P;
    c.step = j.p->pass == LA_STEP;
    return c;
}

/* Tokens [begin,end) of row b, and which state. A state below zero is none. */
struct sequence {
    int b, begin, end, state;
};

/* Where sequence n begins. The host has not seen cu_seqlens: its values are kept within 0 and T, and the
 * sequences from the first to the last have all tokens, whatever it says. */
__device__ inline int edge_of(const room_call &c, int n)
{
    if (n <= 0 || n >= c.S) return n <= 0 ? 0 : c.T;
    const int64_t x = la_integer_at(c.cu.data, c.cu.dtype, n * c.cu.stride[0]);
    return (int)min(max(x, (int64_t)0), (int64_t)c.T);
}

__device__ inline sequence sequence_of(const room_call &c, int n)
{
    sequence s = {n, 0, c.T, n};
    if (c.slot.data) {
        const int64_t i = la_integer_at(c.slot.data, c.slot.dtype, n * c.slot.stride[0]);
        s.state = i >= 0 && i < c.P ? (int)i : -1;
    }
    if (!c.cu.data) return s;
    s.b = 0;
    s.begin = edge_of(c, n);
    s.end = max(s.begin, edge_of(c, n + 1));
    return s;
}

/* The sequence of token t of row b: the last one that begins at t or before. */
__device__ inline int sequence_at(const room_call &c, int b, int t)
{
    int low = 0, high = c.S;
    if (!c.cu.data) return b;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (edge_of(c, middle) <= t)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* As first_chunk_slot of call.cuh: the first of the places that a sequence has for every M tokens, and
 * all of them. */
__device__ inline int64_t first_place(const room_call &c, int n, int M)
{
    return c.cu.data ? edge_of(c, n) / M + n : (int64_t)n * ((c.T + M - 1) / M);
}

static inline int64_t places_of(const room_call &c, int M)
{
    return c.cu.data ? c.T / M + c.S : (int64_t)c.S * ((c.T + M - 1) / M);
}

/* ---- FOUR neighbours along an axis: the bits of a load, which become numbers later ---- */

enum { FOUR = 4 };

/* Do `count` neighbours along `axis` lie side by side and aligned, and the next ones too? `size`: of the
 * axis, or of the parts that they may not cross. */
static inline bool lies_in(int count, const view &x, int axis, int64_t size)
{
    const int64_t bytes = count * la_size_of(x.dtype);
    if (size % count) return false;
    if (!x.data) return true;
    if (x.stride[axis] != 1) return false;
    if ((uintptr_t)x.data % (uintptr_t)(bytes > 16 ? 16 : bytes)) return false;
    for (int i = 0; i < LA_MAX_DIMS; i++)
        if (i != axis && x.stride[i] % count) return false;
    return true;
}

static inline bool lies_in_fours(const view &x, int axis, int64_t size)
{
    return lies_in(FOUR, x, axis, size);
}

/* Numbers of two bytes take the first two words. */
template <typename real> struct bits4;
template <> struct bits4<float> {
    uint32_t w[FOUR];
};
template <> struct bits4<double> {
    double w[FOUR];
};

__device__ __forceinline__ void load_bits(bits4<float> &to, const char *from, la_dtype dtype,
                                          int64_t step, int left, bool whole)
{
#pragma unroll
    for (int e = 0; e < FOUR; e++) to.w[e] = 0;
    if (left <= 0) return;
    if (whole && dtype == LA_F32) {
        const uint4 x = *(const uint4 *)from;
        to.w[0] = x.x, to.w[1] = x.y, to.w[2] = x.z, to.w[3] = x.w;
    } else if (whole) {
        const uint2 x = *(const uint2 *)from;
        to.w[0] = x.x, to.w[1] = x.y;
    } else if (dtype == LA_F32) {
#pragma unroll
        for (int e = 0; e < FOUR; e++)
            if (e < left) to.w[e] = ((const uint32_t *)from)[e * step];
    } else {
#pragma unroll
        for (int e = 0; e < FOUR; e++)
            if (e < left)
                to.w[e / 2] |= (uint32_t)((const uint16_t *)from)[e * step] << 16 * (e % 2);
    }
}

__device__ __forceinline__ void load_bits(bits4<double> &to, const char *from, la_dtype,
                                          int64_t step, int left, bool)
{
#pragma unroll
    for (int e = 0; e < FOUR; e++) to.w[e] = e < left ? ((const double *)from)[e * step] : 0;
}

__device__ __forceinline__ void numbers_of(const bits4<float> &x, la_dtype dtype, float (&to)[FOUR])
{
    if (dtype == LA_F32) {
#pragma unroll
        for (int e = 0; e < FOUR; e++) to[e] = __uint_as_float(x.w[e]);
    } else if (dtype == LA_BF16) {
#pragma unroll
        for (int e = 0; e < FOUR; e++)
            to[e] = __uint_as_float(e % 2 ? x.w[e / 2] & 0xffff0000 : x.w[e / 2] << 16);
    } else {
#pragma unroll
        for (int e = 0; e < FOUR; e++)
            to[e] = __half2float(__ushort_as_half((unsigned short)(x.w[e / 2] >> 16 * (e % 2))));
    }
}

__device__ __forceinline__ void numbers_of(const bits4<double> &x, la_dtype, double (&to)[FOUR])
{
#pragma unroll
    for (int e = 0; e < FOUR; e++) to[e] = x.w[e];
}

__device__ __forceinline__ uint32_t halves(float low, float high, la_dtype dtype)
{
    if (dtype == LA_BF16) {
        const __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
        return *(const uint32_t *)&x;
    }
    const __half2 x = __floats2half2_rn(low, high);
    return *(const uint32_t *)&x;
}

template <typename real>
__device__ __forceinline__ void store_four(char *to, la_dtype dtype, int64_t step, int left,
                                           bool whole, const real (&x)[FOUR])
{
    if (left <= 0) return;
    if (whole && dtype == LA_F32) {
        *(float4 *)to = make_float4((float)x[0], (float)x[1], (float)x[2], (float)x[3]);
    } else if (whole && dtype != LA_F64) {
        *(uint2 *)to = make_uint2(halves((float)x[0], (float)x[1], dtype),
                                  halves((float)x[2], (float)x[3], dtype));
    } else {
#pragma unroll
        for (int e = 0; e < FOUR; e++)
            if (e < left) store(to + e * step * la_size_of(dtype), dtype, x[e]);
    }
}

/* ---- silu ---- */

/* The exponent's rounding is an error of up to 1e-5 of the result, at -87; that of bfloat16 is 2e-3, that
 * of float16 2e-4. Below -87 the result is less than any of their numbers. */
__device__ __forceinline__ float short_silu(float u)
{
    const float x = u < -87.f ? -87.f : u;
    return __fdividef(x, 1.f + hardware_power(-(float)LOG2_E * x));
}

/* silu(u), for a result that is stored as `dtype`. */
template <typename real> __device__ __forceinline__ real silu_for(la_dtype dtype, real u)
{
    if constexpr (sizeof(real) == 4)
        if (la_size_of(dtype) == 2) return short_silu(u);
    return silu(u);
}

/* ---- sums of parts, in their order ---- */

/* to[i][k] <- the sum over parts of from[part][i][k], k below `inner`. `apart`: numbers from one part to
 * the next. */
struct parts_sum {
    const double *from;
    view to;
    int64_t count, inner, apart;
    int parts;
};

static __global__ __launch_bounds__(256) void sum_parts(const __grid_constant__ parts_sum c)
{
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    double sum = 0;
    if (i >= c.count) return;
    for (int part = 0; part < c.parts; part++) sum += c.from[part * c.apart + i];
    store(at(c.to, i / c.inner, i % c.inner), c.to.dtype, sum);
}

static inline cudaError_t add_parts(const double *from, const view &to, int64_t count,
                                    int64_t inner, int parts, int64_t apart, cudaStream_t stream)
{
    if (!to.data || !count) return cudaSuccess;
    const parts_sum c = {from, to, count, inner, apart, parts};
    return launch(sum_parts, div_up(count, 256), 256, 0, stream, c);
}

#endif
