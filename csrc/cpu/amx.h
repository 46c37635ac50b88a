/* AVX-512 with AMX: chunks of bfloat16 arrays by products of matrices. The other instances of
 * AVX-512 serve everything else. A file that includes this one defines LA_INSTANCE, LA_ISA and
 * LA_PLANES. */
#if defined(__x86_64__)
#include <immintrin.h> /* before the target is set: its functions carry their own */
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target( \
        "amx-tile,amx-bf16,avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,bmi2"))), \
    apply_to = function)
#else
#pragma GCC target( \
    "amx-tile,amx-bf16,avx512bf16,avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c,bmi2")
#endif
#define LA_AVX512 1
#define LA_BF16_PRODUCTS 1
#define LA_AMX 1
#define LA_PANEL 128
#include "instance_bf16.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
