/* The recurrence in double. */
#include "scan.cuh"

const launcher scan_f64[LA_KINDS] = {
#define LA_KIND(decay, rule) scan_any<double, LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};
