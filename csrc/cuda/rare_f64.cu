/* The rare kinds in double, K <= 256. A block takes 128 KiB of shared memory at most. */
typedef double real;
enum { COLUMNS = 8, PARTS = 32, MOST_ROWS = 8, BATCH = 2, TURNS = 1 };
#include "rare.cuh"

const launcher rare_f64[LA_KINDS] = {
#define LA_KIND(decay, rule) rare_of<LA_##decay, LA_##rule>(),
#include "../kinds.def"
};

const backward_launcher rare_adjoint_f64[LA_KINDS] = {
#define LA_KIND(decay, rule) rare_adjoint_of<LA_##decay, LA_##rule>(),
#include "../kinds.def"
};
