/* The adjoint of the recurrence in double, K <= 256. */
typedef double real;
enum { COLUMNS = 32, PARTS = 8, MOST_ROWS = 32, BATCH = 16, TURNS = 2 };
#include "adjoint.cuh"

const backward_launcher adjoint_f64[LA_KINDS] = {
#define LA_KIND(decay, rule) adjoint_any<LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};
