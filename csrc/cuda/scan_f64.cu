/* The recurrence in double. */
#include "scan.cuh"

const launcher scan_f64[4][2] = {
    {scan_any<double, LA_NONE, LA_ADDITIVE>, scan_any<double, LA_NONE, LA_DELTA>},
    {NULL, NULL}, /* HEAD is TOKEN */
    {scan_any<double, LA_TOKEN, LA_ADDITIVE>, scan_any<double, LA_TOKEN, LA_DELTA>},
    {scan_any<double, LA_KEY, LA_ADDITIVE>, scan_any<double, LA_KEY, LA_DELTA>},
};
