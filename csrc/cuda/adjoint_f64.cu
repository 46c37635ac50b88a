/* The recurrence's adjoint in double. */
typedef double real;
#include "adjoint.cuh"

const backward_launcher adjoint_f64[4][2] = {
    {adjoint_any<LA_NONE, LA_ADDITIVE>, adjoint_any<LA_NONE, LA_DELTA>},
    {NULL, NULL}, /* HEAD is TOKEN */
    {adjoint_any<LA_TOKEN, LA_ADDITIVE>, adjoint_any<LA_TOKEN, LA_DELTA>},
    {adjoint_any<LA_KEY, LA_ADDITIVE>, adjoint_any<LA_KEY, LA_DELTA>},
};
