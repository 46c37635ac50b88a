/* The text of amx.c on AVX2, as avx2_bf16.c is that of avx512_bf16.c: only for tests. */
#if defined(__x86_64__) && defined(LA_EMULATE_BF16)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define LA_INSTANCE la_cpu_avx2_amx
#define LA_ISA "avx2amx"
#define LA_BF16_PRODUCTS 2
#define LA_AMX 2
#define LA_PLANES 2
#define LA_PANEL 128
#include "instance_bf16.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
