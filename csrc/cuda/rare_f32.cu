/* The rare kinds in float, K <= 256. A block takes 95 KiB of shared memory at most. */
typedef float real;
enum { COLUMNS = 32, PARTS = 8, MOST_ROWS = 32, BATCH = 8, TURNS = 1 };
#include "rare.cuh"

const launcher rare_f32[LA_KINDS] = {
#define LA_KIND(decay, rule) rare_of<LA_##decay, LA_##rule>(),
#include "../kinds.def"
};

const backward_launcher rare_adjoint_f32[LA_KINDS] = {
#define LA_KIND(decay, rule) rare_adjoint_of<LA_##decay, LA_##rule>(),
#include "../kinds.def"
};
