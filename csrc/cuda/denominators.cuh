/* The normaliser of the chunk form: den_i = q_i z + the row sum of P, where z is the sum of the
 * keys before the chunk. prepare leaves the row sums and the sum of keys of every chunk. A pass
 * along each sequence turns the sums of keys into those before each chunk. Then all chunks compute
 * the divisors of o side by side. None of this depends on the value columns, so segments of a
 * sequence need nothing of one another (docs/decisions/0009). */
#ifndef LINATTN_CUDA_DENOMINATORS_CUH
#define LINATTN_CUDA_DENOMINATORS_CUH

#include "prepare.cuh"

/* A block has a sequence of a value head. Noncausal: all tokens see the whole sum. */
template <int KP, typename = element>
__global__ void __launch_bounds__(SUM_THREADS)
    sum_keys(const __grid_constant__ call c, const __grid_constant__ chunks w)
{
    __shared__ float of_all[KP];
    const unit u = unit_of(c, blockIdx.x / c.HV, blockIdx.x % c.HV);
    const int key = threadIdx.x % KP, count = (u.end - u.begin + C - 1) / C;
    const int64_t step = (int64_t)c.HV * KP;
    float *const z = w.z + ((int64_t)first_chunk_slot(c, u.n) * c.HV + u.hv) * KP;
    running sum = z_of_key<float>(c.x[LA_Z0], c, u, key);
    if (running_sums_of_block<KP, false>(z, count, step, sum)) {
        of_all[key] = (float)sum.total();
        if (c.x[LA_ZT].data && key < c.K)
            store(at(c.x[LA_ZT], u.n, u.hv, key), c.x[LA_ZT].dtype, of_all[key]);
    }
    if (c.causal) return;
    __syncthreads();
    for (int i = threadIdx.x / KP; i < count; i += SUM_THREADS / KP)
        z[i * step + key] = of_all[key];
}

/* The divisors of o, in the place of the row sums; or the denominators times the scale, as
 * [HV][B T], if these are asked for. A block has a chunk of a value head. A row of q consists of
 * pieces of 16 bytes, one per lane. It lies in its tile, or in the array of the caller if prepare
 * could use that. */
template <int KP, typename = element>
__global__ void __launch_bounds__(128)
    divisors(const __grid_constant__ call c, const __grid_constant__ chunks w, float *denominators)
{
    constexpr int PIECES = KP / 8, STEP = 128 / PIECES, ROWS_OF_LANE = C / STEP;
    const int chunk_slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int64_t place = (int64_t)chunk_slot * c.HV + hv;
    const int first = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
    const char *tile = w.q ? w.q + ((int64_t)chunk_slot * w.heads + u.h) * tile_bytes(KP) : NULL;
    const char *rows = at(c.x[LA_Q], u.b, t, u.h) + piece * 16;
    uint4 q[ROWS_OF_LANE][PLANES];
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; i++)
#pragma unroll
        for (int j = 0; j < PLANES; j++) {
            const int row = first + i * STEP;
            q[i][j] = make_uint4(0, 0, 0, 0);
            if (tile)
                q[i][j] = *(const uint4 *)(tile + j * PLANE_BYTES + piece_at(row, piece));
            else if (row < n && piece * 8 < c.K)
                q[i][j] = *(const uint4 *)(rows + row * c.x[LA_Q].stride[1] * 2);
        }
    const float4 low = *(const float4 *)(w.z + place * KP + piece * 8);
    const float4 high = *(const float4 *)(w.z + place * KP + piece * 8 + 4);
#pragma unroll
    for (int i = 0; i < ROWS_OF_LANE; i++) {
        const int row = first + i * STEP;
        float den = 0;
#pragma unroll
        for (int j = PLANES - 1; j >= 0; j--) {
            const float2 x0 = unpack(q[i][j].x), x1 = unpack(q[i][j].y);
            const float2 x2 = unpack(q[i][j].z), x3 = unpack(q[i][j].w);
            den += x0.x * low.x + x0.y * low.y + x1.x * low.z + x1.y * low.w;
            den += x2.x * high.x + x2.y * high.y + x3.x * high.z + x3.y * high.w;
        }
#pragma unroll
        for (int step = 1; step < PIECES; step *= 2) den += __shfl_xor_sync(~0u, den, step);
        if (piece) continue;
        float *to = w.den + place * C + row;
        den *= (float)c.scale;
        if (c.causal) den += *to;
        if (!denominators)
            *to = row < n ? divisor_of(&c, den) : 1;
        else if (row < n)
            denominators[((int64_t)hv * c.B + u.b) * c.T + t + row] = den;
    }
}

template <int KP>
static cudaError_t launch_divisors(const call &c, const chunks &w, cudaStream_t stream,
                                   float *denominators = NULL)
{
    const int64_t heads = (int64_t)c.N * c.HV;
    const cudaError_t error = launch(sum_keys<KP>, heads, SUM_THREADS, 0, stream, c, w);
    if (error != cudaSuccess) return error;
    return launch(divisors<KP>, (int64_t)w.chunk_slots * c.HV, 128, 0, stream, c, w,
                  denominators);
}

#endif
