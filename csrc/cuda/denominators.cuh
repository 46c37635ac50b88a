/* The chunk form's normaliser: den_i = q_i z + the row sum of P, z the sum of the keys before the chunk.
 * prepare leaves every chunk's row sums and its sum of keys; here these become what is there before each
 * chunk, along a sequence, and then the divisors of o, all chunks side by side. With no part of the value
 * columns' work in them, segments of a sequence need nothing of each other (docs/decisions/0009). */
#ifndef LINATTN_CUDA_DENOMINATORS_CUH
#define LINATTN_CUDA_DENOMINATORS_CUH

#include "prepare.cuh"

/* A block has a value head's sequence, a thread a key. Not causal: all tokens see the whole sum. */
template <int KP, typename = element>
__global__ void __launch_bounds__(KP)
    sum_keys(const __grid_constant__ call c, const __grid_constant__ chunks w)
{
    enum { AT_ONCE = 16 }; /* sums asked for before the first is added */
    const unit u = unit_of(c, blockIdx.x / c.HV, blockIdx.x % c.HV);
    const int key = threadIdx.x, count = (u.end - u.begin + C - 1) / C;
    const int64_t step = (int64_t)c.HV * KP;
    float *z = w.z + ((int64_t)first_slot(c, u.n) * c.HV + u.hv) * KP + key;
    running sum = {};
    if (c.z0.data && key < c.K) sum.sum = load<float>(at(c.z0, u.n, u.hv, key), c.z0.dtype);
    for (int i = 0; i < count; i += AT_ONCE) {
        float x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) x[j] = i + j < count ? z[(i + j) * step] : 0;
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            if (i + j < count) z[(i + j) * step] = (float)sum.total();
            sum.add(x[j]);
        }
    }
    for (int i = 0; i < count && !c.causal; i++) z[i * step] = (float)sum.total();
    if (c.zt.data && key < c.K)
        store(at(c.zt, u.n, u.hv, key), c.zt.dtype, (float)sum.total());
}

/* A block has a chunk of a value head, a warp one token after another. */
template <int KP, typename = element>
__global__ void __launch_bounds__(128)
    divisors(const __grid_constant__ call c, const __grid_constant__ chunks w)
{
    const int slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV, lane = threadIdx.x % 32;
    const unit u = unit_of(c, sequence_of(c, slot), hv);
    const int t = u.begin + (slot - first_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int64_t place = (int64_t)slot * c.HV + hv;
    const char *q_tile = w.q ? w.q + ((int64_t)slot * w.heads + u.h) * tile_bytes(KP) : NULL;
    float2 z[KP / 64];
#pragma unroll
    for (int j = 0; j < KP / 64; j++) z[j] = *(const float2 *)(w.z + place * KP + j * 64 + lane * 2);
#pragma unroll 4
    for (int row = threadIdx.x / 32; row < C; row += 4) {
        float den = 0;
#pragma unroll
        for (int j = 0; j < KP / 64; j++) {
            const int key = j * 64 + lane * 2;
            float2 q = make_float2(0, 0);
            if (q_tile)
                q = unpack(*(const uint32_t *)(q_tile + element_at(row, key)));
            else if (row < n) {
                if (key < c.K) q.x = load<float>(at(c.q, u.b, t + row, u.h, key), ELEMENT_DTYPE);
                if (key + 1 < c.K) q.y = load<float>(at(c.q, u.b, t + row, u.h, key + 1), ELEMENT_DTYPE);
            }
            den += q.x * z[j].x + q.y * z[j].y;
        }
        den = warp_sum(den) * (float)c.scale;
        if (lane) continue;
        float *to = w.den + place * C + row;
        *to = row < n ? clamped(c, c.causal ? den + *to : den) : 1;
    }
}

template <int KP> static cudaError_t launch_divisors(const call &c, const chunks &w, cudaStream_t stream)
{
    sum_keys<KP><<<(unsigned)(c.N * c.HV), KP, 0, stream>>>(c, w);
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess && w.slots) {
        divisors<KP><<<(unsigned)(w.slots * c.HV), 128, 0, stream>>>(c, w);
        error = cudaGetLastError();
    }
    return error;
}

#endif
