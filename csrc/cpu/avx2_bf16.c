/* The text of avx512_bf16.c on AVX2, with lanes of the same width and its instructions in plain C.
 * It tests that text where the processor lacks them, and has no other use (LINATTN_EMULATE_BF16 in
 * setup.py). */
#if defined(__x86_64__) && defined(LA_EMULATE_BF16)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
#define LA_INSTANCE la_cpu_avx2_bf16
#define LA_ISA "avx2bf16"
#define LA_BF16_PRODUCTS 2
#define LA_PLANES 1
#include "instance_bf16.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
