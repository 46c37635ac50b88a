/* The recurrence in float. */
typedef float real;
#include "scan.cuh"

const launcher scan_f32[4][2] = {
    {scan_any<LA_NONE, LA_ADDITIVE>, scan_any<LA_NONE, LA_DELTA>},
    {NULL, NULL}, /* HEAD is TOKEN */
    {scan_any<LA_TOKEN, LA_ADDITIVE>, scan_any<LA_TOKEN, LA_DELTA>},
    {scan_any<LA_KEY, LA_ADDITIVE>, scan_any<LA_KEY, LA_DELTA>},
};
