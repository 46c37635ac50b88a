/* The recurrence's adjoint in double. */
typedef double real;
#include "adjoint.cuh"

const backward_launcher adjoint_f64[LA_KINDS] = {
#define LA_KIND(decay, rule) adjoint_any<LA_##decay, LA_##rule>,
#include "../kinds.def"
};
