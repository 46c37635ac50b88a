/* The step of states that lie [K][V]. */
enum { V_FIRST = 0 };
#include "step.cuh"

const launcher step_kv[4][2] = {
    {step_any<LA_NONE, LA_ADDITIVE>, step_any<LA_NONE, LA_DELTA>},
    {NULL, NULL}, /* HEAD is TOKEN */
    {step_any<LA_TOKEN, LA_ADDITIVE>, step_any<LA_TOKEN, LA_DELTA>},
    {step_any<LA_KEY, LA_ADDITIVE>, step_any<LA_KEY, LA_DELTA>},
};
