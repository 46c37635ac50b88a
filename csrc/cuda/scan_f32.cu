/* The recurrence in float. */
#include "scan.cuh"

const launcher scan_f32[LA_KINDS] = {
#define LA_KIND(decay, rule) scan_any<float, LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};
