/* The step of many states that lie [K][V]. */
enum { V_FIRST = 0 };
#include "stream.cuh"

const launcher stream_kv[LA_KINDS] = {
#define LA_KIND(decay, rule) stream_any<LA_##decay, LA_##rule>,
#include "../kinds.def"
};
