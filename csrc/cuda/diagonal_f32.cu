/* Diagonal scans whose sums are float32, and the call of all scans. */
#include "kernels.cuh"

#include "diagonal_launch.cuh"

/* Have states, B and C their numbers in fours? */
static bool steps_in_fours(const scan_call &c)
{
    const view &S = c.x[LA_SCAN_S0];
    return c.N <= 32 * FOUR && S.dtype == LA_F32 && lies_in_fours(S, 2, c.N) && c.row_fours;
}

template <la_dtype DTYPE> static cudaError_t one_token(const scan_call &c, cudaStream_t stream)
{
    const auto start = [&](auto kernel, int lanes, int rows) {
        const int64_t panels = div_up(c.room.D, SCAN_THREADS / lanes);
        return launch(kernel, panels * div_up(c.room.S, rows), SCAN_THREADS, 0, stream, c);
    };
    if (c.N <= 16) return start(scan_step<4, DTYPE>, 4, step_pass<4, DTYPE>::ROWS);
    if (c.N <= 64) return start(scan_step<16, DTYPE>, 16, step_pass<16, DTYPE>::ROWS);
    return start(scan_step<32, DTYPE>, 32, step_pass<32, DTYPE>::ROWS);
}

cudaError_t run_scan(const la_room_job &job, cudaMemPool_t pool, cudaStream_t stream)
{
    const la_diagonal &j = (const la_diagonal &)job;
    const la_scan_form form = (la_scan_form)job.form;
    const bool backwards = job.p->pass == LA_BACKWARD;
    scan_call c = {};
    c.room = room_of(job, j.B, j.T, j.D, j.S);
    c.N = (int)j.N;
    c.G = (int)j.G;
    c.cuts = 1;
    if (job.states_only) c.alone = backwards ? GRADIENT_ALONE : STATE_ALONE;
    c.softplus = j.softplus;
    c.write = j.write;
    take_views(job, c.x, c.d);
    const view &u = c.x[LA_SCAN_U];
    c.along = lies_along_tokens(u);
    c.fours = true;
    for (la_scan_line line : {LA_SCAN_U, LA_SCAN_DELTA, LA_SCAN_Z, LA_SCAN_Y})
        c.fours = c.fours && lies_in_fours(c.x[line], 2, j.D / j.G) &&
                  lies_in_fours(c.d[line], 2, j.D / j.G);
    c.row_fours = lies_in_fours(c.x[LA_SCAN_B], 3, j.N) && lies_in_fours(c.x[LA_SCAN_C], 3, j.N);
    const bool wide = job.p->real == LA_F64;
    if (c.room.step && form == LA_SELECTIVE && !job.pairs && !wide && steps_in_fours(c))
        return u.dtype == LA_F32   ? one_token<LA_F32>(c, stream)
               : u.dtype == LA_F16 ? one_token<LA_F16>(c, stream)
                                   : one_token<LA_BF16>(c, stream);
    const scan_memory memory = {pool, stream, NULL};
    return wide ? run_scan_f64(c, form, job.pairs, backwards, memory)
                : by_form<float>(c, form, job.pairs, backwards, memory);
}
