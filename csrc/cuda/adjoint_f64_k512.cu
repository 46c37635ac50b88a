/* The adjoint of the recurrence in double, 256 < K <= 512. A block takes 136 KiB of shared memory.
 * With batches of 16 tokens, or with two turns, it would take more than there is. */
typedef double real;
enum { COLUMNS = 8, PARTS = 32, MOST_ROWS = 16, BATCH = 2, TURNS = 1 };
#include "adjoint.cuh"

const backward_launcher adjoint_f64_k512[LA_KINDS] = {
#define LA_KIND(decay, rule) adjoint_any<LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};
