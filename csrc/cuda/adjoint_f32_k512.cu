/* The adjoint of the recurrence in float, 256 < K <= 512. A block takes 91 KiB of shared memory.
 * With batches of 16 tokens, or with two turns, it would take more than there is. */
typedef float real;
enum { COLUMNS = 8, PARTS = 32, MOST_ROWS = 16, BATCH = 4, TURNS = 1 };
#include "adjoint.cuh"

static_assert(sizeof(adjoint_room<MOST_ROWS, false>) <= 99 << 10, "as sm_86, sm_89, sm_120");

const backward_launcher adjoint_f32_k512[LA_KINDS] = {
#define LA_KIND(decay, rule) adjoint_any<LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};
