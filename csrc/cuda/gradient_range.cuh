/* The range of float16 gradients in chunks. The operands of products are float16 there: the incoming
 * gradients, those of states, and all that follows from them. A gradient of a loss may be far
 * smaller than float16's normal numbers. All results are linear in the incoming gradients, so these
 * are multiplied by a power of two first, `up`, and the results by `down` as they leave.
 *
 * A number of a chunk may still be too large. It is an infinity then, and each product with it is an
 * infinity or a NaN, so some result is no finite number. That is noticed as it leaves (`broken`),
 * and the call is repeated token by token (dispatch.cu). A NaN of the caller leads there too.
 *
 * With a normaliser the incoming gradient of a token is divided by its divisor first. The divisors
 * grow along a sequence. If those of a turn are too far apart, some tokens would lose digits, and the
 * call is repeated.
 *
 * The gradients of states stay float32. If they are far larger than do, do loses digits beside
 * them, and the call is repeated too.
 *
 * bf16 has the range of float32, and no code of this. */
#ifndef LINATTN_CUDA_GRADIENT_RANGE_CUH
#define LINATTN_CUDA_GRADIENT_RANGE_CUH

#include "rows.cuh"

/* The factor of a result on its way out. */
struct result_range {
    float down;
    int *broken;

    __device__ __forceinline__ explicit result_range(const gradients &d) : down(1), broken(NULL)
    {
        if (!NARROW) return;
        down = d.range->down;
        broken = &d.range->broken;
    }
    __device__ __forceinline__ float operator()(float x) const
    {
        if (!NARROW) return x;
        x *= down;
        if (__builtin_expect(!(fabsf(x) < __builtin_inff()), 0)) *broken = 1;
        return x;
    }
    template <int N> __device__ __forceinline__ void finish(float (&x)[N][4]) const
    {
        if (NARROW)
#pragma unroll
            for (int i = 0; i < N * 4; i++) x[i / 4][i % 4] = (*this)(x[i / 4][i % 4]);
    }
};

/* The factor of an incoming gradient of a state. */
__device__ __forceinline__ float up_of(const gradients &d) { return NARROW ? d.range->up : 1; }

enum { RANGE_THREADS = 256, NUMBERS_OF_THREAD = 8 };

/* Eight neighbouring numbers of do, the i-th of a dense copy, and the divisor of their token. den:
 * [HV][B T], or NULL without a normaliser. */
struct eight_of_do {
    uint32_t pair[NUMBERS_OF_THREAD / 2];
    bool divides;
    float by;

    __device__ __forceinline__ eight_of_do(const call &c, const gradients &d, const float *den,
                                           int64_t i)
    {
        const int groups = c.V / NUMBERS_OF_THREAD, column = (int)(i % groups) * NUMBERS_OF_THREAD;
        const int hv = (int)(i / groups % c.HV);
        const int64_t token = i / groups / c.HV, tokens = (int64_t)c.B * c.T;
        const int b = (int)(token / c.T), t = (int)(token % c.T);
        const uint4 x = *(const uint4 *)at(d[LA_DO], b, t, hv, column);
        pair[0] = x.x, pair[1] = x.y, pair[2] = x.z, pair[3] = x.w;
        divides = den;
        by = den ? divisor_of(&c, den[hv * tokens + token] * (float)c.scale) : 1;
    }
    __device__ __forceinline__ float2 given(int j) const { return unpack(pair[j]); }
    __device__ __forceinline__ float2 operator[](int j) const
    {
        const float2 x = given(j);
        return divides ? make_float2(x.x / by, x.y / by) : x;
    }
};

/* The larger magnitude, passing over NaN and infinities. */
__device__ __forceinline__ float larger(float most, float x)
{
    x = fabsf(x);
    return x < __builtin_inff() ? fmaxf(most, x) : most;
}

/* The largest finite number of each kind, as its bits, which are ordered as the numbers are. */
template <typename = element>
static __global__ void __launch_bounds__(RANGE_THREADS)
    find_most(const __grid_constant__ call c, const __grid_constant__ gradients d,
              const float *den)
{
    const int64_t first = (int64_t)blockIdx.x * RANGE_THREADS + threadIdx.x,
                  step = (int64_t)gridDim.x * RANGE_THREADS;
    const int64_t pieces = (int64_t)c.B * c.T * c.HV * (c.V / NUMBERS_OF_THREAD),
                  numbers = d[LA_DST].data ? (int64_t)c.N * c.HV * c.K * c.V : 0;
    float most[NUMBERS_OF_RANGE] = {};
    for (int64_t i = first; i < pieces; i += step) {
        const eight_of_do x(c, d, den, i);
#pragma unroll
        for (int j = 0; j < NUMBERS_OF_THREAD / 2; j++) {
            most[OF_DO] = larger(larger(most[OF_DO], x[j].x), x[j].y);
            most[AS_GIVEN] = larger(larger(most[AS_GIVEN], x.given(j).x), x.given(j).y);
        }
    }
    for (int64_t i = first; i < numbers; i += step) {
        const int column = (int)(i % c.V), key = (int)(i / c.V % c.K);
        const int64_t state = i / c.V / c.K;
        const char *const at_number = at(d[LA_DST], state / c.HV, state % c.HV, key, column);
        most[OF_STATES] = larger(most[OF_STATES], load<float>(at_number, d[LA_DST].dtype));
    }
    for (int kind = 0; kind < NUMBERS_OF_RANGE; kind++) {
        for (int apart = 16; apart; apart /= 2)
            most[kind] = fmaxf(most[kind], __shfl_xor_sync(~0u, most[kind], apart));
        if (threadIdx.x % 32 == 0 && most[kind] > 0)
            atomicMax(&d.range->most[kind], __float_as_int(most[kind]));
    }
}

/* The least that the largest number of do may be in range. Numbers 2^8 times smaller are still normal
 * numbers of float16 then. */
static constexpr float LEAST_DO = 0x1p-6f;

/* The least that the largest do of a turn may be in range over the divisor of any token. Numbers four
 * times smaller are still normal numbers of float16 then. */
static constexpr float LEAST_QUOTIENT = 0x1p-12f;

/* do over the divisors, times `up`, dense. The largest number becomes one from 4 to 8. Sums over 64
 * tokens and 128 keys then have three decimal digits of room above them, and as many below before
 * numbers lose bits. With 256 keys the room above is one bit less. */
template <typename = element>
static __global__ void __launch_bounds__(RANGE_THREADS)
    scale_do(const __grid_constant__ call c, const __grid_constant__ gradients d, const float *den,
             char *to)
{
    const int64_t i = (int64_t)blockIdx.x * RANGE_THREADS + threadIdx.x;
    const float of_do = __int_as_float(d.range->most[OF_DO]);
    const float most = fmaxf(of_do, __int_as_float(d.range->most[OF_STATES]));
    const int power = most > 0 ? min(2 - ilogbf(most), 100) : 0;
    const float up = scalbnf(1, power);
    if (i == 0) {
        d.range->up = up;
        d.range->down = scalbnf(1, -power);
        if (of_do > 0 && of_do * up < LEAST_DO) d.range->broken = 1;
    }
    if (i >= (int64_t)c.B * c.T * c.HV * (c.V / NUMBERS_OF_THREAD)) return;
    const eight_of_do x(c, d, den, i);
    uint32_t pair[NUMBERS_OF_THREAD / 2];
#pragma unroll
    for (int j = 0; j < NUMBERS_OF_THREAD / 2; j++) pair[j] = pack(x[j].x * up, x[j].y * up);
    const bool is_zero = !((x.pair[0] | x.pair[1] | x.pair[2] | x.pair[3]) & 0x7fff7fff);
    const float as_given = __int_as_float(d.range->most[AS_GIVEN]);
    if (x.divides && !is_zero && !(as_given / fabsf(x.by) * up >= LEAST_QUOTIENT))
        d.range->broken = 1;
    *(uint4 *)(to + i * 16) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
}

/* Find the range of a turn, and put do in it: `to` has room for it, [B T][HV][V]. */
static cudaError_t find_range(const call &c, const gradients &d, const float *den, char *to,
                              int processors, cudaStream_t stream)
{
    const int64_t pieces = (int64_t)c.B * c.T * c.HV * (c.V / NUMBERS_OF_THREAD);
    cudaError_t error = cudaMemsetAsync(d.range->most, 0, sizeof d.range->most, stream);
    if (error == cudaSuccess)
        error = launch(find_most<>, 4 * processors, RANGE_THREADS, 0, stream, c, d, den);
    if (error == cudaSuccess)
        error = launch(scale_do<>, div_up(pieces, RANGE_THREADS) + 1, RANGE_THREADS, 0, stream, c,
                       d, den, to);
    return error;
}

#endif
