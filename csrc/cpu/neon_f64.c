/* NEON (AArch64's Advanced SIMD, part of every such processor's base); sums in double. */
#if defined(__aarch64__)
#define LA_INSTANCE la_cpu_neon_f64
#define LA_ISA "neon"
#define LA_LANE_BYTES 16
#define LA_REGISTERS 32
#define LA_REAL double
#define LA_REAL_BITS 64
#include "instance.h"
#endif
