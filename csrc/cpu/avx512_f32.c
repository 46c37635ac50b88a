/* AVX-512 (F, VL, BW, DQ); sums in float. */
#if defined(__x86_64__)
#include <immintrin.h> /* before the target is set: its functions carry their own */
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,bmi2")
#endif
#define LA_AVX512 1
#define LA_INSTANCE la_cpu_avx512_f32
#define LA_ISA "avx512"
#define LA_LANE_BYTES 64
#define LA_REGISTERS 32
#define LA_REAL float
#define LA_REAL_BITS 32
#include "instance.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
