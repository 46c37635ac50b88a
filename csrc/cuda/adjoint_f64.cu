/* The adjoint of the recurrence in double, K <= 256. A block takes 80 KiB of shared memory. With
 * batches of 16 tokens and two turns it would take 212 KiB, which only Hopper has. */
typedef double real;
enum { COLUMNS = 32, PARTS = 8, MOST_ROWS = 32, BATCH = 4, TURNS = 1 };
#include "adjoint.cuh"

static_assert(sizeof(adjoint_room<MOST_ROWS, false>) <= 99 << 10, "as sm_86, sm_89, sm_120");

const backward_launcher adjoint_f64[LA_KINDS] = {
#define LA_KIND(decay, rule) adjoint_any<LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};
