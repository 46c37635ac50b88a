/* Matrix registers, a real as the sum of two bfloat16 numbers. */
#define LA_INSTANCE la_cpu_amx
#define LA_ISA "amx"
#define LA_PLANES 2
#include "amx.h"
