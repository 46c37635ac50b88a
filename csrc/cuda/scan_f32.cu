/* The recurrence in float. */
#include "scan.cuh"

const launcher scan_f32[4][2] = {
    {scan_any<float, LA_NONE, LA_ADDITIVE>, scan_any<float, LA_NONE, LA_DELTA>},
    {NULL, NULL}, /* HEAD is TOKEN */
    {scan_any<float, LA_TOKEN, LA_ADDITIVE>, scan_any<float, LA_TOKEN, LA_DELTA>},
    {scan_any<float, LA_KEY, LA_ADDITIVE>, scan_any<float, LA_KEY, LA_DELTA>},
};
