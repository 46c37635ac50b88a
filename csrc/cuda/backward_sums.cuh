/* Gradients in chunks: sums over what several blocks of the intra-chunk adjoints have left. There
 * are four: over the value heads of a q/k head, over the chunks behind a chunk, and over parts of
 * the gradients of a bonus and of gates. Each is always taken in the same order. */
#ifndef LINATTN_CUDA_BACKWARD_SUMS_CUH
#define LINATTN_CUDA_BACKWARD_SUMS_CUH

#include "adjoint_rows.cuh"

/* Add up dq, dk, dx and dy of the value heads of one q/k head, and apply the adjoint of loading to
 * dq and dk. The call has q and k as the caller gave them. A block has eight tokens of a chunk of a
 * q/k head, a warp has a token, and a lane four of every 128 keys. */
enum { BLOCKS_OF_CHUNK = C / 8 };
template <int KP>
static __global__ void __launch_bounds__(256)
    reduce_heads(const __grid_constant__ call c, const __grid_constant__ gradients d,
                 const intra_flags from)
{
    constexpr int FOURS = (KP + 127) / 128;
    const int64_t tokens = (int64_t)c.B * c.T;
    const int index = blockIdx.x / BLOCKS_OF_CHUNK, chunk_slot = index / c.H, h = index % c.H;
    const int group = c.HV / c.H, first = threadIdx.x % 32 * 4;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), h * group);
    const int b = u.b, t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C +
                           (int)(blockIdx.x % BLOCKS_OF_CHUNK) * 8 + (int)threadIdx.x / 32;
    if (t >= u.end) return;
    const bool plain = rows_are_as_given(c);
    const int64_t token = (int64_t)b * c.T + t;
#pragma unroll
    for (int which = 0; which < 4; which++) {
        const bool of_x = which >= 2; /* of x or y, which have no norm and no map */
        if ((of_x && !c.x[which == 2 ? LA_X : LA_Y].data) ||
            (which == 0 ? from.direct_q : from.direct_k))
            continue;
        const view &x = which ? c.x[LA_K] : c.x[LA_Q];
        const view &to = which == 3 ? d[LA_DY] : of_x ? d[LA_DX] : which ? d[LA_DK] : d[LA_DQ];
        const float *partials = which == 3 ? from.dy : of_x ? from.dx : which ? from.dk : from.dq;
        partials += (h * group * tokens + token) * from.kp;
        const float *const later =
            which == 1 && from.dz ? from.dz + ((int64_t)chunk_slot * c.HV + h * group) * KP + first
                                  : NULL;
        float dx[4 * FOURS] = {}, y[4 * FOURS] = {};
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            const int key = first + f * 128;
            const float *partial = partials + key;
            for (int j = 0; j < group && key < from.kp; j++, partial += tokens * from.kp) {
                const float4 one = *(const float4 *)partial;
                dx[4 * f] += one.x, dx[4 * f + 1] += one.y;
                dx[4 * f + 2] += one.z, dx[4 * f + 3] += one.w;
                if (!later) continue;
                const float4 z = *(const float4 *)(later + j * KP + f * 128);
                dx[4 * f] += z.x, dx[4 * f + 1] += z.y;
                dx[4 * f + 2] += z.z, dx[4 * f + 3] += z.w;
            }
            float four[4];
            if (!plain && !of_x)
                load_row<LA_DTYPE_OF_Q>(four, at(x, b, t, h, key), x.dtype, 0, 1, c.K - key);
#pragma unroll
            for (int e = 0; e < 4 && !plain && !of_x; e++) y[4 * f + e] = four[e];
        }
        if (!plain && !of_x) key_gradient(c, which, y, dx);
#pragma unroll
        for (int f = 0; f < FOURS; f++) {
            const int key = first + f * 128;
            const float *const own_dx = dx + 4 * f;
            char *const own = at(to, b, t, h, key);
            if (c.K % 4 == 0) {
                if (key < c.K)
                    *(uint2 *)own =
                        make_uint2(pack(own_dx[0], own_dx[1]), pack(own_dx[2], own_dx[3]));
            } else {
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (key + e < c.K) store(own + e * 2, to.dtype, own_dx[e]);
            }
        }
    }
}

/* Was z the sum of the keys so far. The sum of d_den q of each chunk becomes that of the later
 * chunks. A block has a sequence of a value head. */
template <int KP>
static __global__ void __launch_bounds__(SUM_THREADS)
    sum_later(const __grid_constant__ call c, const __grid_constant__ gradients d, float *dz)
{
    const unit u = unit_of(c, blockIdx.x / c.HV, blockIdx.x % c.HV);
    const int key = threadIdx.x % KP, count = (u.end - u.begin + C - 1) / C;
    float *const own = dz + ((int64_t)first_chunk_slot(c, u.n) * c.HV + u.hv) * KP;
    running sum = z_of_key<float>(d[LA_DZT], c, u, key);
    if (running_sums_of_block<KP, true>(own, count, (int64_t)c.HV * KP, sum) && d[LA_DZ0].data &&
        key < c.K)
        store(at(d[LA_DZ0], u.n, u.hv, key), d[LA_DZ0].dtype, (float)sum.total());
}

/* dbonus of the keys of a q/k head: the sum of its parts, or zeros if there are none. A block has
 * 32 keys. Each of its 8 warps adds up every eighth part. */
static __global__ void __launch_bounds__(256)
    join_bonus(const __grid_constant__ call c, const __grid_constant__ gradients d,
               const float *parts, int kp, int chunk_slots)
{
    enum { WARPS = 8, AT_ONCE = 8 };
    __shared__ double sums[WARPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = c.HV / c.H;
    const int h = blockIdx.x % c.H, key = blockIdx.x / c.H * 32 + lane, count = chunk_slots * group;
    double sum = 0;
    for (int first = warp; first < count; first += WARPS * AT_ONCE) {
        float x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = first + j * WARPS; /* of [chunk slots][heads of the group] */
            const int64_t place = (int64_t)(i / group) * c.HV + h * group + i % group;
            x[j] = i < count ? parts[place * kp + key] : 0;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) sum += x[j];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || key >= c.K) return;
    for (int i = 1; i < WARPS; i++) sum += sums[i][lane];
    store(at(d[LA_DU], h, key), d[LA_DU].dtype, result_range(d)((float)sum));
}

/* Add up the parts of da, which belong to parts of the keys. The sum goes to the array of the gate;
 * with a gate per head it becomes the first part. A pair has two gates: behind those parts are the
 * parts of deta. */
static __global__ void __launch_bounds__(256)
    join_gates(const __grid_constant__ call c, const __grid_constant__ gradients d, float *da,
               int parts, int gates)
{
    const int64_t tokens = (int64_t)c.B * c.T, count = tokens * c.HV;
    const int64_t index = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (index >= gates * count) return;
    const bool of_eta = index >= count;
    const int64_t i = of_eta ? index - count : index;
    const int hv = (int)(i / tokens), b = (int)(i % tokens / c.T), t = (int)(i % tokens % c.T);
    if (of_eta) da += parts * count;
    float sum = da[i];
    for (int j = 1; j < parts; j++) sum += da[j * count + i];
    if (of_eta) {
        if (d[LA_DETA].data) store(at(d[LA_DETA], b, t, hv), d[LA_DETA].dtype, sum);
        return;
    }
    if (d.per_head) {
        da[i] = sum;
        return;
    }
    if (!d[LA_DG].data) return;
    const float a = decay_of(load<float>(at(c.x[LA_G], b, t, hv), c.x[LA_G].dtype), c.gate);
    store(at(d[LA_DG], b, t, hv), d[LA_DG].dtype, gate_gradient(sum, a, d.gate));
}

#endif
