/* Powers of two by the hardware, and the error that they may have. */
#ifndef LINATTN_CUDA_POWER_CUH
#define LINATTN_CUDA_POWER_CUH

#include <math.h>

static constexpr double LOG2_E = 1.44269504088896340736;

/* 2^x to within 2 ulp. Results below 2^-126 are zero, unless they may be SMALL: that takes two more
 * instructions. */
template <bool SMALL = false> __device__ __forceinline__ float hardware_power(float x)
{
    float power;
    if (SMALL)
        asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x));
    else
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

/* 2^(x y). The hardware's power has an error of -0.26 ulp on the average. An error of one sign
 * grows with each token, so the decays of long memories may have none. BIAS makes up for it: the
 * exponent is rounded after the sum, so it counts on the average. */
template <bool SMALL = false> __device__ __forceinline__ float power_of_two(float x, float y)
{
    const float BIAS =
        2.9e-8f; /* 0.26 ulp of a number below 1, over log(2) and its value of about 0.8 */
    return hardware_power<SMALL>(fmaf(x, y, BIAS));
}

/* 2^(x y), where a product near 0 is one of magnitude below NEAREST. There the power is a polynomial,
 * 1 + p q(p): its one rounding that counts is the last. q is the series of (2^p - 1)/p with p^3 as
 * 3/4 NEAREST^2 p, within 1e-7 of itself. */
static constexpr float NEAREST = 1.f / 32;

template <bool SMALL = false> __device__ __forceinline__ float power_of_two_near(float x, float y)
{
    const float p = x * y;
    float power = fmaf(p, fmaf(p, fmaf(p, .0555041f, .24023356f), .6931472f), 1.f);
    if (!(fabsf(p) < NEAREST)) power = power_of_two<SMALL>(x, y);
    return power;
}
__device__ __forceinline__ double power_of_two(double x, double y) { return exp2(x * y); }
__device__ __forceinline__ double power_of_two_near(double x, double y) { return exp2(x * y); }

/* exp(x) of a log decay, down to the smallest number of float32. CUDA's expf has an error of +0.1 to
 * +0.26 ulp on the average. Here log2(e) is 1.3e-8 too small, so a product of decays exp(-s) is
 * 1.3e-8 s too large: that does not grow with the number of tokens. */
__host__ __device__ inline float decay_of_log(float x)
{
#ifdef __CUDA_ARCH__
    return power_of_two_near<true>(x, (float)LOG2_E);
#else
    return expf(x);
#endif
}
__host__ __device__ inline double decay_of_log(double x) { return exp(x); }

#endif
