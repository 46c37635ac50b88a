/* A sequence in segments: from their ends to their starts. chunk_carry.cuh has the passes. */
#ifndef LINATTN_CUDA_SEGMENTS_CUH
#define LINATTN_CUDA_SEGMENTS_CUH

#include "chunk_carry.cuh"

/* The states before each segment: S' <- S' M' + X', one segment after another, in float32. A block
 * has JOINED value columns of a head. A thread has a key; with the delta rule it has half of the
 * keys that its sums are over. `rows`: rows of `ends` per segment. */
enum { JOINED = 8, PREFETCHED = 32 };
template <la_rule RULE> constexpr int join_parts = la_predicts(RULE) ? 2 : 1;

/* The slices of 16 rows of a state that has KP. */
template <int KP, la_decay DECAY> __host__ __device__ int key_slices_of(const call &c)
{
    return DECAY == LA_PAIR ? KP / 16 : (c.K + 15) / 16;
}

template <int KP, la_decay DECAY, la_rule RULE, typename = element>
__global__ void __launch_bounds__(KP *join_parts<RULE>)
    join_segments(const __grid_constant__ call c, const __grid_constant__ chunks w,
                  const segments g, int rows)
{
    __shared__ float S[JOINED][KP], sums[JOINED][KP];
    const int slices = (c.V + 15) / 16, groups = slices * 16 / JOINED;
    const int first_column = blockIdx.x % groups * JOINED;
    const int key = threadIdx.x % KP, half = threadIdx.x / KP;
    const int64_t head = blockIdx.x / groups;
    const unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    const int all_chunks = (u.end - u.begin + C - 1) / C, chunk_slot0 = first_chunk_slot(c, u.n);
    float own[JOINED];
#pragma unroll
    for (int j = 0; j < JOINED; j++) {
        const int column = first_column + j;
        const view &from = state_of_row<DECAY>(c.x[LA_S0], c.x[LA_Y0], key);
        const int of_state = key_of_row<DECAY>(key);
        own[j] = from.data && column < c.V && of_state < c.K
                     ? load<float>(at(from, u.n, u.hv, of_state, column), from.dtype)
                     : 0;
    }
    for (int segment = 0; segment < g.count; segment++) {
        const int64_t here = head * g.count + segment;
        float *start = g.starts + (here * slices * 16 + first_column) * KP + key;
        if (half == 0)
#pragma unroll
            for (int j = 0; j < JOINED; j++) start[j * KP] = own[j];
        if (segment == g.count - 1) return;

        const float *end = g.ends + (here * rows + first_column) * KP + key;
        if constexpr (RULE == LA_ADDITIVE) {
            const int first = (int)((int64_t)all_chunks * segment / g.count);
            const int last = (int)((int64_t)all_chunks * (segment + 1) / g.count);
            float a = 1;
            if (DECAY != LA_NONE)
                for (int i = first; i < last; i += PREFETCHED) {
                    float x[PREFETCHED];
#pragma unroll
                    for (int j = 0; j < PREFETCHED; j++) {
                        const int64_t place = (int64_t)(chunk_slot0 + i + j) * c.HV + u.hv;
                        x[j] = i + j >= last     ? 1
                               : DECAY == LA_KEY ? w.total[place * KP + key]
                                                 : w.in[place * C + C - 1];
                    }
#pragma unroll
                    for (int j = 0; j < PREFETCHED; j++) a *= x[j];
                }
#pragma unroll
            for (int j = 0; j < JOINED; j++) own[j] = a * own[j] + end[j * KP];
        } else {
            /* of a half; M has rows for whole slices */
            const int keys = key_slices_of<KP, DECAY>(c) * 8;
            const float *M = g.ends + (here * rows + slices * 16 + half * keys) * KP + key;
            if (half == 0)
#pragma unroll
                for (int j = 0; j < JOINED; j++) {
                    S[j][key] = own[j];
                    own[j] = end[j * KP];
                }
            else
#pragma unroll
                for (int j = 0; j < JOINED; j++) own[j] = 0;
            __syncthreads();
            for (int i = 0; i < keys; i += 8) {
                float m[8];
#pragma unroll
                for (int e = 0; e < 8; e++) m[e] = M[(i + e) * KP];
#pragma unroll
                for (int j = 0; j < JOINED; j++) {
                    const float4 x = *(const float4 *)&S[j][half * keys + i];
                    const float4 y = *(const float4 *)&S[j][half * keys + i + 4];
                    own[j] += x.x * m[0] + x.y * m[1] + x.z * m[2] + x.w * m[3];
                    own[j] += y.x * m[4] + y.y * m[5] + y.z * m[6] + y.w * m[7];
                }
            }
            if (half == 1)
#pragma unroll
                for (int j = 0; j < JOINED; j++) sums[j][key] = own[j];
            __syncthreads();
            if (half == 0)
#pragma unroll
                for (int j = 0; j < JOINED; j++) own[j] += sums[j][key];
        }
    }
}

#endif
