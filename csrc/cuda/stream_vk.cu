/* The step of many states that lie [V][K]. */
enum { V_FIRST = 1 };
#include "stream.cuh"

const launcher stream_vk[4][2] = {
    {stream_any<LA_NONE, LA_ADDITIVE>, stream_any<LA_NONE, LA_DELTA>},
    {NULL, NULL}, /* HEAD is TOKEN */
    {stream_any<LA_TOKEN, LA_ADDITIVE>, stream_any<LA_TOKEN, LA_DELTA>},
    {stream_any<LA_KEY, LA_ADDITIVE>, stream_any<LA_KEY, LA_DELTA>},
};
