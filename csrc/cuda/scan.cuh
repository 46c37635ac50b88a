/* Token by token: the recurrent mode, and every dtype the tensor cores would round.
 *
 * Included by one file per real type, which defines `real`.
 *
 * A block walks one sequence of one value head and COLUMNS of its value columns. PARTS neighbouring
 * threads share a column, each with ROWS of its K rows in registers (128 floats in one thread
 * would spill), and add up what they have by shuffles. Tokens come in batches through shared
 * memory. A normalised op has a column of ones: a warp of its own, whose state is z and whose read
 * is the denominator. */
enum { COLUMNS = 32, PARTS = 4 };
#include "batch.cuh"

template <la_decay DECAY, la_rule RULE, int ROWS>
__global__ void __launch_bounds__((WARPS + 1) * 32) scan(const __grid_constant__ call c)
{
    extern __shared__ char shared[];
    batch<ROWS> &s = *(batch<ROWS> *)shared;
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS, tile = blockIdx.x % tiles;
    const int64_t head = blockIdx.x / tiles;
    unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    u.n = slot_of(c, u.n);
    const int v0 = tile * COLUMNS, part = threadIdx.x % PARTS;
    const bool ones = threadIdx.x / 32 == WARPS; /* the column of ones, eight times over */
    const int local = ones ? COLUMNS : threadIdx.x / PARTS, column = v0 + local;
    const bool mine = !ones && column < c.V;
    real S[ROWS];

    if (u.n < 0) { /* a step's row without a state */
        if (mine && part == 0) store(at(c.o, u.b, 0, u.hv, column), c.o.dtype, (real)0);
        return;
    }

    const view &from = ones ? c.z0 : c.s0, &to = ones ? c.zt : c.st;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = part * ROWS + i;
        S[i] = 0;
        if (from.data && row < c.K && (ones || mine))
            S[i] = load<real>(at(from, u.n, u.hv, row, ones ? 0 : column), from.dtype);
    }

    /* The non-causal form goes through the tokens twice: to write all, then to read. */
    for (int pass = c.causal ? 1 : 0; pass < 2; pass++)
        for (int t = u.begin; t < u.end; t += BATCH) {
            const int n = min(BATCH, u.end - t);
            __syncthreads(); /* the batch before has been stored */
            load_batch<DECAY, RULE, ROWS>(c, u, t, n, v0, s);
            __syncthreads();
            for (int i = 0; i < n; i++) {
                const real v = ones ? 1 : s.v[i][local];
                const real *a = DECAY == LA_KEY ? s.a[i].part(part) : s.scalar_a + i;
                real o;
                if (c.causal || pass == 0)
                    la_token(S, 1, 1, ROWS, s.q[i].part(part), s.k[i].part(part), &v, a,
                             RULE == LA_DELTA ? s.beta[i] : 0, RULE == LA_DELTA ? s.qk[i] : 0, &o,
                             DECAY, RULE);
                else
                    la_predict(S, 1, 1, ROWS, s.q[i].part(part), NULL, a, &o, NULL, DECAY);
                if (part == 0) s.o[i][local] = o;
            }
            if (pass == 0) continue;
            __syncthreads();
            const int lane = threadIdx.x % 32;
            for (int i = threadIdx.x / 32; i < n; i += blockDim.x / 32)
                if (v0 + lane < c.V)
                    store(at(c.o, u.b, t + i, u.hv, v0 + lane), c.o.dtype,
                          finish(c, s.o[i][lane], s.o[i][COLUMNS]));
        }

    if (!to.data || !(mine || (ones && tile == 0))) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int row = part * ROWS + i;
        if (row < c.K) store(at(to, u.n, u.hv, row, ones ? 0 : column), to.dtype, S[i]);
    }
}

/* A step's z is where every tile of columns reads it, so it moves on once they are done. */
template <int ROWS> static __global__ void __launch_bounds__(32) advance_z(const __grid_constant__ call c)
{
    unit u = unit_of(c, blockIdx.x / c.HV, blockIdx.x % c.HV);
    u.n = slot_of(c, u.n);
    real k[ROWS * PARTS / 32];
    if (u.n < 0) return;
    load_keys<ROWS>(c, c.k, c.map[1], c.map_eps[1], u, 0, k);
#pragma unroll
    for (int j = 0; j < ROWS * PARTS / 32; j++) {
        const int i = threadIdx.x + 32 * j;
        if (i >= c.K) continue;
        char *z = at(c.z0, u.n, u.hv, i);
        store(z, c.z0.dtype, load<real>(z, c.z0.dtype) + k[j]);
    }
}

template <la_decay DECAY, la_rule RULE, int ROWS>
static cudaError_t launch_scan(const call &c, cudaStream_t stream)
{
    const auto kernel = scan<DECAY, RULE, ROWS>;
    const int tiles = (c.V + COLUMNS - 1) / COLUMNS, bytes = sizeof(batch<ROWS>);
    const int64_t blocks = (int64_t)c.N * c.HV * tiles;
    const int warps = WARPS + (c.normaliser != LA_UNNORMALISED);
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    call d = c;
    const bool in_place = c.zt.data && c.zt.data == c.z0.data;
    if (in_place) d.zt.data = NULL;
    kernel<<<(unsigned)blocks, warps * 32, bytes, stream>>>(d);
    if (in_place) advance_z<ROWS><<<(unsigned)(c.N * c.HV), 32, 0, stream>>>(c);
    return cudaGetLastError();
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t scan_any(const call &c, cudaStream_t stream)
{
    if (c.K <= 64) return launch_scan<DECAY, RULE, 16>(c, stream);
    if (c.K <= 128) return launch_scan<DECAY, RULE, 32>(c, stream);
    return launch_scan<DECAY, RULE, 64>(c, stream);
}
