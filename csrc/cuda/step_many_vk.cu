/* The step of many states that lie [V][K]. */
enum { V_FIRST = 1 };
#include "step_many.cuh"

const launcher step_many_vk[LA_KINDS] = {
#define LA_KIND(decay, rule) step_many_any<LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};
