/* Loads and stores of elements in the user's dtypes, with elements.h for feature maps, gates and
 * divisors. It is the CPU's load.h, one element at a time. */
#ifndef LINATTN_CUDA_LOAD_CUH
#define LINATTN_CUDA_LOAD_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <initializer_list>
#include <stdint.h>
#include <type_traits>

#include "call.cuh"
#include "power.cuh"

/* x / y within an ulp, for y from 1 to 2^127: the hardware's reciprocal, and one step more. A division
 * that is rounded right takes 14 instructions, and a branch for numbers that these never are. */
__host__ __device__ inline float over(float x, float y)
{
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(y));
    const float q = x * r;
    return fmaf(fmaf(-q, y, x), r, q);
#else
    return x / y;
#endif
}
__host__ __device__ inline double over(double x, double y) { return x / y; }

/* A lane is a number of any real type. A slope is one number for all tokens, so the error of its
 * decay grows with T: this decay is computed in float64. */
#define LA_ELEMENT template <typename real> __host__ __device__ inline
#define LA_PLAIN __host__ __device__ inline
#define lane real
#define LANE_ZERO 0
#define LANE_PICK(mask, x, y) ((mask) ? (x) : (y))
#define LANE_EXP exp
#define LANE_OVER over
#define LANE_DECAY(log, gate, rest) \
    ((gate) == LA_SLOPE ? (real)exp((double)(log)) : decay_of_log(log))
#define LA_SQRT sqrt
typedef call la_options;
#include "../elements.h"
#undef lane
#undef LANE_ZERO /* recurrence.h has its own */

/* Have q and k no feature map? */
__host__ __device__ inline bool has_no_map(const call &c)
{
    return c.map[0] == LA_IDENTITY && c.map[1] == LA_IDENTITY;
}

/* Are rows of q and k used as the caller gave them? */
__host__ __device__ inline bool rows_are_as_given(const call &c)
{
    return !c.qk_l2norm && has_no_map(c);
}

/* Where element (i0, i1, i2, i3) of an array is. */
__device__ inline char *at(const view &x, int64_t i0, int64_t i1 = 0, int64_t i2 = 0,
                           int64_t i3 = 0)
{
    const int64_t i = i0 * x.stride[0] + i1 * x.stride[1] + i2 * x.stride[2] + i3 * x.stride[3];
    return x.data + i * la_size_of(x.dtype);
}

template <typename real> __device__ inline real load(const char *from, la_dtype dtype)
{
    switch (dtype) {
    case LA_F64: return (real) * (const double *)from;
    case LA_F32: return (real) * (const float *)from;
    case LA_F16: return (real)__half2float(*(const __half *)from);
    default: return (real)__bfloat162float(*(const __nv_bfloat16 *)from);
    }
}

/* Calls work(T *), where T is the type of an array's numbers. OF is the dtype in the array's line
 * of arrays.def: not every array may have each of the four types. One branch serves all that `work`
 * loads. Kernels that asked for the dtype of each number, and found each address from four strides,
 * spent a third to a half of their code on it (docs/decisions/0071). */
template <la_dtypes OF, typename real, typename F>
__device__ __forceinline__ void with_type(la_dtype dtype, F work)
{
    constexpr bool wide = sizeof(real) == 8;
    if constexpr (OF != LA_DTYPE_FLOAT && wide)
        work((double *)NULL);
    else if (OF == LA_DTYPE_FLOAT && dtype == LA_F64)
        work((double *)NULL);
    else if (dtype == LA_F32)
        work((float *)NULL);
    else if (OF != LA_DTYPE_STORED && dtype == LA_F16)
        work((__half *)NULL);
    else
        work((__nv_bfloat16 *)NULL);
}

/* A number that is loaded a chunk before it is used: its 4 bytes as they are, or 2. */
__device__ __forceinline__ uint32_t load_early(const char *from, la_dtype dtype)
{
    if (dtype == LA_F64) return __float_as_uint((float)*(const double *)from);
    return dtype == LA_F32 ? *(const uint32_t *)from : *(const uint16_t *)from;
}

/* Without a branch: it is needed for every chunk. */
__device__ __forceinline__ float loaded(uint32_t bits, la_dtype dtype)
{
    const float half = __half2float(__ushort_as_half((unsigned short)bits));
    const float wide = __uint_as_float(dtype == LA_BF16 ? bits << 16 : bits);
    return dtype == LA_F16 ? half : wide;
}

/* Elements first, first + step, ... of a row of `count`, and zeros past its end. One branch on the
 * dtype serves all N loads, so they all start before the first must have arrived. */
template <la_dtypes OF, typename real, int N>
__device__ __forceinline__ void load_row(real (&x)[N], const char *from, la_dtype dtype, int first,
                                         int step, int count)
{
    with_type<OF, real>(dtype, [&](auto *type) {
        typedef decltype(type) pointer;
        typedef std::remove_pointer_t<pointer> T;
        typedef std::conditional_t<sizeof(T) == 8, double, float> number;
        T y[N];
#pragma unroll
        for (int j = 0; j < N; j++)
            if (first + step * j < count) y[j] = ((pointer)from)[first + step * j];
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = first + step * j < count ? (real)(number)y[j] : 0;
    });
}

/* Store x as these elements of a row. */
template <la_dtypes OF, typename real, int N>
__device__ __forceinline__ void store_row(const real (&x)[N], char *to, la_dtype dtype, int first,
                                          int step, int count)
{
    with_type<OF, real>(dtype, [&](auto *type) {
        typedef decltype(type) pointer;
        typedef std::remove_pointer_t<pointer> T;
        typedef std::conditional_t<sizeof(T) == 8, double, float> number;
#pragma unroll
        for (int j = 0; j < N; j++)
            if (first + step * j < count) ((pointer)to)[first + step * j] = (T)(number)x[j];
    });
}

/* The same in two steps, for numbers that are not needed yet: first the bits, then the number. */
__device__ __forceinline__ uint64_t bits_of(const char *from, la_dtype dtype)
{
    if (dtype == LA_F64) return *(const uint64_t *)from;
    return dtype == LA_F32 ? *(const uint32_t *)from : *(const uint16_t *)from;
}

__device__ __forceinline__ float number(uint64_t bits, la_dtype dtype)
{
    if (dtype == LA_F64) return (float)__longlong_as_double((long long)bits);
    if (dtype == LA_F32) return __uint_as_float((uint32_t)bits);
    if (dtype == LA_BF16) return __uint_as_float((uint32_t)bits << 16);
    return __half2float(__ushort_as_half((unsigned short)bits));
}

template <typename real> __device__ inline void store(char *to, la_dtype dtype, real x)
{
    switch (dtype) {
    case LA_F64: *(double *)to = (double)x; break;
    case LA_F32: *(float *)to = (float)x; break;
    case LA_F16: *(__half *)to = __float2half_rn((float)x); break;
    default: *(__nv_bfloat16 *)to = __float2bfloat16_rn((float)x); break;
    }
}

/* With one branch on the map for all numbers. */
template <typename real, int N>
__device__ __forceinline__ void apply_map_to_all(real (&x)[N], la_map map, real eps)
{
    const auto all = [&](la_map which) {
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = apply_map(x[j], which, eps);
    };
    switch (map) {
#define CASE(map) \
    case map: all(map); break;
        LA_EACH_MAP(CASE)
#undef CASE
    default: break;
    }
}

/* The read's end: o = scale num, or scale num / divisor(scale den). */
template <typename real> __device__ inline real finish(const call &c, real num, real den)
{
    const real o = num * (real)c.scale;
    return c.normaliser == LA_UNNORMALISED ? o : o / divisor_of(&c, den * (real)c.scale);
}

/* num + skip v, where the call has a skip. */
template <typename real> __device__ inline real with_skip(const call &c, int hv, real num, real v)
{
    const view &skip = c.x[LA_SKIP];
    return skip.data ? num + load<real>(at(skip, hv), skip.dtype) * v : num;
}

/* The sum over four neighbouring threads, and the sum over a warp. */
template <typename real> __device__ inline real quad_sum(real x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

template <typename real> __device__ inline real warp_sum(real x)
{
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

/* A compensated sum over tokens: the keys are positive, and there may be many of them. */
template <typename real> struct compensated {
    real sum, lost;
    __device__ void add(real x)
    {
        const real next = sum + x, back = next - sum;
        lost += (sum - (next - back)) + (x - back);
        sum = next;
    }
    /* an infinity has lost nothing */
    __device__ real total() const { return isinf(sum) ? sum : sum + lost; }
};
typedef compensated<double> running;

/* The sum of keys before a sequence, or its gradient after it, of one key. */
template <typename real>
__device__ inline running z_of_key(const view &from, const call &c, const unit &u, int key)
{
    running z = {};
    if (from.data && key < c.K) z.sum = load<real>(at(from, u.n, u.hv, key), from.dtype);
    return z;
}

/* Each of `count` pieces of a sequence has its own sum; afterwards it has, in place, the sum before
 * it, in the order of the sequence or against it. `sum` ends as the sum of all. */
template <bool REVERSE, typename number>
__device__ inline void running_sums(number *x, int count, int64_t apart, running &sum)
{
    enum { AT_ONCE = 16 }; /* loads that start before the first is added */
    for (int i = 0; i < count; i += AT_ONCE) {
        number of_piece[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
            of_piece[j] = i + j < count ? x[(REVERSE ? count - 1 - i - j : i + j) * apart] : 0;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (i + j < count)
                x[(REVERSE ? count - 1 - i - j : i + j) * apart] = (number)sum.total();
            sum.add(of_piece[j]);
        }
    }
}

/* The same with KEYS keys, of which x has one after another. A block has SUM_THREADS: so many
 * threads of a key share its pieces, and their loads overlap. First each sums its own ones. All
 * threads call this. Those that end with all pieces return true. (1,024 threads have 64 registers
 * each, and would spill 56 bytes.) */
enum { SUM_THREADS = 512 };
template <int KEYS, bool REVERSE>
__device__ inline bool running_sums_of_block(float *x, int count, int64_t apart, running &sum)
{
    constexpr int SHARES = SUM_THREADS / KEYS;
    __shared__ running of_share[SHARES][KEYS];
    const int key = threadIdx.x % KEYS, share = threadIdx.x / KEYS;
    const int of_one = (count + SHARES - 1) / SHARES, first = min(share * of_one, count),
              own = min(of_one, count - first);
    float *const from = x + key + (REVERSE ? count - first - own : first) * apart;
    running alone = {};
    if (share < SHARES - 1)
        for (int i = 0; i < own; i += 16) {
            float of_piece[16];
#pragma unroll
            for (int j = 0; j < 16; j++) of_piece[j] = i + j < own ? from[(i + j) * apart] : 0;
#pragma unroll
            for (int j = 0; j < 16; j++) alone.add(of_piece[j]);
        }
    of_share[share][key] = alone;
    __syncthreads();
    for (int i = 0; i < share; i++) {
        sum.add(of_share[i][key].sum);
        sum.lost += of_share[i][key].lost;
    }
    running_sums<REVERSE>(from, own, apart, sum);
    return share == SHARES - 1;
}

/* Sums over the two lanes that are STEP apart. Each lane keeps N of the 2 N sums: the lower lane
 * the first N, the upper lane the last. */
template <int N, int STEP, typename real>
__device__ __forceinline__ void halve(const real (&x)[2 * N], real (&to)[N])
{
    const bool upper = threadIdx.x & STEP;
#pragma unroll
    for (int i = 0; i < N; i++)
        to[i] = (upper ? x[N + i] : x[i]) + __shfl_xor_sync(~0u, upper ? x[i] : x[N + i], STEP);
}

/* The elements of a row that a lane has, where a warp has the row. */
struct every_32nd {
    __device__ int operator()(int j) const { return (int)threadIdx.x % 32 + 32 * j; }
};

/* q or k (map 0 or 1) as the recurrence sees it: normed, mapped, and zeros past its end. A warp has
 * the row, and a lane has its elements key(0), key(1), ... The usual map needs no branch per
 * element. */
template <typename real, int N, typename places>
__device__ __forceinline__ void norm_and_map(const call &c, int map, real (&x)[N], places key)
{
    if (c.qk_l2norm) {
        real squares = 0;
#pragma unroll
        for (int j = 0; j < N; j++) squares += x[j] * x[j];
        const real factor = l2norm_factor(warp_sum(squares));
#pragma unroll
        for (int j = 0; j < N; j++) x[j] *= factor;
    }
    if (c.map[map] != LA_IDENTITY)
#pragma unroll
        for (int j = 0; j < N; j++)
            x[j] = key(j) < c.K ? apply_map(x[j], c.map[map], (real)c.map_eps[map]) : 0;
}

/* dx is the gradient of q or k (map 0 or 1) as the recurrence sees it. It becomes the gradient of
 * the row x that the caller gave, with zeros past its end. A warp has the row. */
template <typename real, int N>
__device__ __forceinline__ void key_gradient(const call &c, int map, real (&x)[N], real (&dx)[N])
{
    real factor = 1;
    if (c.qk_l2norm) {
        real squares = 0;
#pragma unroll
        for (int j = 0; j < N; j++) squares += x[j] * x[j];
        factor = l2norm_factor(warp_sum(squares));
#pragma unroll
        for (int j = 0; j < N; j++) x[j] *= factor;
    }
#pragma unroll
    for (int j = 0; j < N; j++) dx[j] *= map_slope(x[j], c.map[map]);
    if (!c.qk_l2norm) return;
    real along = 0;
#pragma unroll
    for (int j = 0; j < N; j++) along += x[j] * dx[j];
    along = warp_sum(along);
#pragma unroll
    for (int j = 0; j < N; j++) dx[j] = l2norm_gradient(dx[j], x[j], along, factor);
}

/* ---- some of the heads at a time, where scratch for all heads would be too large ---- */

/* The views, from element i of an axis on. */
static inline void move_along(int axis, int64_t i, std::initializer_list<view *> views)
{
    for (view *x : views)
        if (x->data) x->data += i * x->stride[axis] * la_size_of(x->dtype);
}

/* The same problem for `n` q/k heads from `h` on, and the value heads that read them. */
static inline void narrow(call *c, int h, int n)
{
    const int group = c->HV / c->H, hv = h * group;
    move_along(2, h, {&c->x[LA_Q], &c->x[LA_K], &c->x[LA_X], &c->x[LA_Y]});
    move_along(2, hv,
               {&c->x[LA_V], &c->x[LA_W], &c->x[LA_G], &c->x[LA_BETA], &c->x[LA_ETA],
                &c->x[LA_WEIGHT], &c->x[LA_O]});
    move_along(0, hv, {&c->x[LA_SKIP]});
    move_along(0, h, {&c->x[LA_U]});
    move_along(
        1, hv,
        {&c->x[LA_S0], &c->x[LA_Z0], &c->x[LA_Y0], &c->x[LA_ST], &c->x[LA_ZT], &c->x[LA_YT],
         &c->x[LA_MT]});
    c->H = n;
    c->HV = n * group;
}

/* The bytes of scratch that a launch may take. If it needs more, it computes some heads at a time,
 * or some tokens (token_turns.cuh). This holds gradients of 96 heads of 16384 tokens, or of 4 heads
 * of 2^18 tokens. */
static const int64_t MOST_SCRATCH = (int64_t)4 << 30;

/* The number of q/k heads in a turn, if each head takes so many bytes: at least one head, and about
 * the same number in all turns. */
static inline int heads_at_once(const call &c, int64_t each)
{
    const int64_t fit = each > 0 ? MOST_SCRATCH / each : c.H;
    const int most = (int)(fit < 1 ? 1 : fit < c.H ? fit : c.H), turns = (c.H + most - 1) / most;
    return (c.H + turns - 1) / turns;
}

#endif
