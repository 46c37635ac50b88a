/* Matrix registers, a real rounded to one bfloat16 number. */
#define LA_INSTANCE la_cpu_amx_bf16
#define LA_ISA "amxbf16"
#define LA_PLANES 1
#include "amx.h"
