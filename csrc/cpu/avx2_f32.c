/* AVX2 with FMA; sums in float. */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define LA_INSTANCE la_cpu_avx2_f32
#define LA_ISA "avx2"
#define LA_LANE_BYTES 32
#define LA_REGISTERS 16
#define LA_REAL float
#define LA_REAL_BITS 32
#include "instance.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
