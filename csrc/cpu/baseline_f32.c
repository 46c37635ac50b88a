/* The portable baseline: vectors of 16 bytes for the compiler's default target; sums in float. */
#define LA_INSTANCE la_cpu_baseline_f32
#define LA_ISA "baseline"
#define LA_LANE_BYTES 16
#define LA_REGISTERS 16
#define LA_REAL float
#define LA_REAL_BITS 32
#include "instance.h"
