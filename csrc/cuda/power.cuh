/* Powers of two by the hardware, and the error that they may have. */
#ifndef LINATTN_CUDA_POWER_CUH
#define LINATTN_CUDA_POWER_CUH

static constexpr double LOG2_E = 1.44269504088896340736;

/* 2^x to within 2 ulp. Results below 2^-126 are zero. */
__device__ __forceinline__ float hardware_power(float x)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

/* 2^(x y). The hardware's power has an error of -0.26 ulp on the average. An error of one sign
 * grows with each token, so the decays of long memories may have none. BIAS makes up for it: the
 * exponent is rounded after the sum, so it counts on the average. */
__device__ __forceinline__ float power_of_two(float x, float y)
{
    const float BIAS =
        2.9e-8f; /* 0.26 ulp of a number below 1, over log(2) and its value of about 0.8 */
    return hardware_power(fmaf(x, y, BIAS));
}

#endif
