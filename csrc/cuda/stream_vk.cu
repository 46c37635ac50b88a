/* The step of many states that lie [V][K]. */
enum { V_FIRST = 1 };
#include "stream.cuh"

const launcher stream_vk[LA_KINDS] = {
#define LA_KIND(decay, rule) stream_any<LA_##decay, LA_##rule>,
#include "../kinds.def"
};
