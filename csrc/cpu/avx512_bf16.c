/* AVX-512 with BF16: chunks by products of bfloat16 numbers, sums in float. The other instances of
 * AVX-512 serve everything else. */
#if defined(__x86_64__)
#include <immintrin.h> /* before the target is set: its functions carry their own */
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target("avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,bmi2")
#endif
#define LA_AVX512 1
#define LA_INSTANCE la_cpu_avx512_bf16
#define LA_ISA "avx512bf16"
#define LA_BF16_PRODUCTS 1
#define LA_PLANES 1
#include "instance_bf16.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
