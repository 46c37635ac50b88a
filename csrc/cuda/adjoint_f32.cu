/* The adjoint of the recurrence in float, K <= 256. */
typedef float real;
enum { COLUMNS = 32, PARTS = 8, MOST_ROWS = 32, BATCH = 16, TURNS = 2 };
#include "adjoint.cuh"

const backward_launcher adjoint_f32[LA_KINDS] = {
#define LA_KIND(decay, rule) adjoint_any<LA_##decay, LA_##rule>,
#define LA_RARE_KIND(decay, rule) NULL,
#include "../kinds.def"
};

cudaError_t reduce_gates(const call &c, const gradients &d, float *da, cudaStream_t stream)
{
    adjoint_scratch f = {};
    gradients always = d;
    always.range = NULL; /* this is the end of a call in chunks */
    f.heads = c.HV;
    f.tiles = 1;
    f.tokens = (int64_t)c.B * c.T;
    f.da = da;
    return launch(reduce_gate_of_head, c.HV, REDUCE_THREADS, 0, stream, c, always, f);
}

int64_t segments_of_keys(const call &c) { return chunk_slots_of(c, SEGMENT); }

cudaError_t find_denominators(const call &c, through_z<float> f, cudaStream_t stream)
{
    return launch_denominators(c, f, stream);
}

cudaError_t undo_denominators(const call &c, const gradients &d, through_z<float> f,
                              cudaStream_t stream)
{
    return launch_denominators_adjoint(c, d, f, stream);
}
