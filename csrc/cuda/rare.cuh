/* The kinds that scan.cuh and the plain adjoint have no instance of, token by token: the rare ones
 * of kinds.def, and the delta rules whose x is given. The forward pass and the step are here, the
 * gradients in adjoint.cuh.
 *
 * A block has one sequence of one value head and COLUMNS of its value columns, whose state is in
 * registers. PARTS neighbouring threads share a column. Tokens come through shared memory, BATCH at
 * a time. Included by one file per real type, which defines what adjoint.cuh wants. */
#include "adjoint.cuh"

/* Where the call has gates: x <- x k and v <- w v. A thread changes the numbers that it wrote in
 * load_batch, so it waits for no other. */
template <int ROWS>
__device__ __forceinline__ void gate_batch(const call &c, const unit &u, int t, int n, int v0,
                                           batch<ROWS, true> &s)
{
    const int lane = threadIdx.x % 32;
    const view &gates = c.x[LA_W];
    if (!c.x_is_factor && !gates.data) return;
    for (int i = threadIdx.x / 32; i < n; i += blockDim.x / 32) {
        if (c.x_is_factor)
#pragma unroll
            for (int j = lane; j < ROWS * PARTS; j += 32) s.x[i].at(j) *= s.k[i].at(j);
        if (gates.data && lane < COLUMNS && v0 + lane < c.V)
            s.v[i][lane] *= load<real>(at(gates, u.b, t + i, u.hv, v0 + lane), gates.dtype);
    }
}

template <la_decay DECAY, la_rule RULE, int ROWS>
static __global__ void __launch_bounds__(ADJOINT_THREADS) rare(const __grid_constant__ call c)
{
    extern __shared__ char shared[];
    batch<ROWS, true> &s = *(batch<ROWS, true> *)shared;
    constexpr bool PAIR = DECAY == LA_PAIR;
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS, tile = blockIdx.x % tiles;
    const int64_t head = blockIdx.x / tiles;
    const int part = threadIdx.x % PARTS, own = threadIdx.x / PARTS, v0 = tile * COLUMNS;
    const int column = v0 + own;
    const bool mine = column < c.V;
    unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    u.n = state_index_of(c, u.n);
    if (u.n < 0) { /* a row of a step without a state */
        if (part == 0 && mine) store(at(c.x[LA_O], u.b, 0, u.hv, column), c.x[LA_O].dtype, (real)0);
        return;
    }
    real S[ROWS], Y[PAIR ? ROWS : 1], M0[PAIR ? ROWS : 1];
    load_part(c, c.x[LA_S0], u, part, column, S);
    if constexpr (PAIR) load_part(c, c.x[LA_Y0], u, part, column, Y);
    for (int t = u.begin; t < u.end; t += BATCH) {
        const int n = min((int)BATCH, u.end - t);
        __syncthreads(); /* all threads are done with the batch before */
        load_batch<DECAY, RULE, ROWS>(c, u, t, n, v0, s);
        if (la_is_gated(DECAY, RULE)) gate_batch(c, u, t, n, v0, s);
        __syncthreads();
        for (int i = 0; i < n; i++) {
            la_operands x = operands_of<DECAY, RULE>(s, i, part, own);
            x.before = c.predicts_before;
            if (PAIR && c.batch > 1) {
                if ((t + i - u.begin) % c.batch == 0)
#pragma unroll
                    for (int j = 0; j < (PAIR ? ROWS : 0); j++) M0[j] = S[j];
                x.batched = true;
                x.M0 = la_strip_of(M0, 1);
            }
            real o;
            la_token(la_strip_of(S, 1), la_strip_of(Y, 1), 1, ROWS, &x, &o, DECAY, RULE);
            if (part == 0 && mine)
                store(at(c.x[LA_O], u.b, t + i, u.hv, column), c.x[LA_O].dtype,
                      finish(c, o, (real)0));
        }
    }
    store_part(c, c.x[LA_ST], u, part, column, S);
    if constexpr (PAIR) store_part(c, c.x[LA_YT], u, part, column, Y);
}

template <la_decay DECAY, la_rule RULE, int ROWS>
static cudaError_t launch_rare(const call &c, cudaStream_t stream)
{
    const int64_t blocks = (int64_t)c.N * c.HV * ((c.V + COLUMNS - 1) / COLUMNS);
    return launch(rare<DECAY, RULE, ROWS>, blocks, ADJOINT_THREADS, sizeof(batch<ROWS, true>),
                  stream, c);
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t rare_any(const call &c, cudaStream_t stream)
{
    if constexpr (sizeof(real) == 4)
        if (c.K <= 128) return launch_rare<DECAY, RULE, 16>(c, stream);
    return launch_rare<DECAY, RULE, MOST_ROWS>(c, stream);
}

/* By kind; NULL for those that no call with these kernels has. */
template <la_decay DECAY, la_rule RULE> constexpr launcher rare_of()
{
    if constexpr (RULE == LA_ADDITIVE)
        return NULL;
    else
        return rare_any<DECAY, RULE>;
}

template <la_decay DECAY, la_rule RULE> constexpr backward_launcher rare_adjoint_of()
{
    if constexpr (RULE == LA_ADDITIVE)
        return NULL;
    else
        return adjoint_any<DECAY, RULE, true>;
}
