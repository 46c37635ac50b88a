/* The normaliser's share of gradients: den = z'q, z the sum of the keys so far, and what comes back
 * through both. z is a vector of its own: a thread has a key, a block the K of one value head.
 *
 * Sequences go by segments, side by side: each segment's sum of keys, along the sequence what is before
 * each, and then its tokens one after the other; and the same in reverse. Loads of eight tokens at once, and
 * their sums over keys together, made it slower (an H200, 96 heads of 8192 tokens: 5.6 ms for 4.2). */
#ifndef LINATTN_CUDA_NORMALISER_CUH
#define LINATTN_CUDA_NORMALISER_CUH

#include "kernels.cuh"
#include "load.cuh"

enum { MOST_KEYS = 256, SEGMENT = 64 };

__device__ inline double block_sum(double x)
{
    __shared__ double of_warps[MOST_KEYS / 32];
    x = warp_sum(x);
    __syncthreads(); /* the sum before has been read */
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0;
    for (int i = 0; i < blockDim.x / 32; i++) sum += of_warps[i];
    return sum;
}

/* This thread's element of q or k at token t; zero past K. By whole blocks. */
template <typename real>
__device__ inline real key_of_thread(const call &c, const view &from, int map, const unit &u, int t)
{
    const bool there = threadIdx.x < c.K;
    real x = there ? load<real>(at(from, u.b, t, u.h, threadIdx.x), from.dtype) : 0;
    if (c.qk_l2norm) x *= l2norm_factor((real)block_sum((double)(x * x)));
    return there ? apply_map(x, c.map[map], (real)c.map_eps[map]) : 0;
}

template <typename real>
__device__ inline running z_of_thread(const view &from, const call &c, const unit &u)
{
    running z = {};
    if (from.data && threadIdx.x < c.K) z.sum = load<real>(at(from, u.n, u.hv, threadIdx.x), from.dtype);
    return z;
}

/* How many segments of M tokens there are, and where sequence n's begin, as slots of chunks do:
 * prepare.cuh. */
static int64_t segments_of(const call &c, int M)
{
    return c.cu.data ? c.T / M + c.N : (int64_t)c.N * (((int64_t)c.T + M - 1) / M);
}

__device__ inline int64_t first_segment(const call &c, int n, int M)
{
    if (!c.cu.data) return (int64_t)n * ((c.T + M - 1) / M);
    return unit_of(c, n, 0).begin / M + n;
}

/* A value head's sequence, as a block sees it. */
template <typename real> struct sequence_of_keys {
    unit u;
    int count;  /* of its segments */
    double *z;  /* this thread's element of the first of them; past K there is none */
    int64_t kp; /* from one to the next */
    int64_t row0;
    real *den;

    __device__ sequence_of_keys(const call &c, const through_z<real> &f, int block)
    {
        const int head = block % f.heads;
        u = unit_of(c, block / f.heads, f.first + head);
        count = (u.end - u.begin + SEGMENT - 1) / SEGMENT;
        kp = f.kp;
        z = f.z + (head * f.segments + first_segment(c, u.n, SEGMENT)) * kp + threadIdx.x;
        row0 = (int64_t)u.b * c.T;
        den = f.den + head * f.tokens + row0;
    }
};

template <typename real>
static __global__ void sum_segments(const __grid_constant__ call c,
                                    const __grid_constant__ through_z<real> f)
{
    const sequence_of_keys<real> x(c, f, blockIdx.x / f.parts);
    for (int s = blockIdx.x % f.parts; s < x.count; s += f.parts) {
        const int first = x.u.begin + s * SEGMENT, end = min(first + SEGMENT, x.u.end);
        running sum = {};
        for (int t = first; t < end; t++) sum.add(key_of_thread<real>(c, c.k, 1, x.u, t));
        x.z[s * x.kp] = sum.total();
    }
}

/* Each segment's z becomes what is there before it; or, not causal, what all tokens see. */
template <typename real>
static __global__ void sum_before(const __grid_constant__ call c,
                                  const __grid_constant__ through_z<real> f)
{
    const sequence_of_keys<real> x(c, f, blockIdx.x);
    running z = z_of_thread<real>(c.z0, c, x.u);
    for (int s = 0; s < x.count; s++) {
        const double of_segment = x.z[s * x.kp];
        x.z[s * x.kp] = z.total();
        z.add(of_segment);
    }
    for (int s = 0; s < x.count && !c.causal; s++) x.z[s * x.kp] = z.total();
}

template <typename real>
static __global__ void denominators(const __grid_constant__ call c,
                                    const __grid_constant__ through_z<real> f)
{
    const sequence_of_keys<real> x(c, f, blockIdx.x / f.parts);
    for (int s = blockIdx.x % f.parts; s < x.count; s += f.parts) {
        const int first = x.u.begin + s * SEGMENT, end = min(first + SEGMENT, x.u.end);
        running z = {x.z[s * x.kp]};
        for (int t = first; t < end; t++) {
            if (c.causal) z.add(key_of_thread<real>(c, c.k, 1, x.u, t));
            const double den = block_sum(z.total() * key_of_thread<real>(c, c.q, 0, x.u, t));
            if (threadIdx.x == 0) x.den[t] = (real)den;
        }
    }
}

/* The gradients of den, in its place, what dq has by way of them, and a segment's share of dz, in the
 * place of z. */
template <typename real>
static __global__ void denominators_adjoint(const __grid_constant__ call c,
                                            const __grid_constant__ through_z<real> f)
{
    const sequence_of_keys<real> x(c, f, blockIdx.x / f.parts);
    const int key = threadIdx.x;
    const int64_t apart = f.tokens * f.kp;
    real *const dq = f.dq + (int64_t)(x.u.hv - f.first) * f.tiles * apart + x.row0 * f.kp + key;
    for (int s = blockIdx.x % f.parts; s < x.count; s += f.parts) {
        const int first = x.u.begin + s * SEGMENT, end = min(first + SEGMENT, x.u.end);
        running z = {x.z[s * x.kp]}, dz = {};
        for (int t = first; t < end; t++) {
            const real q = key_of_thread<real>(c, c.q, 0, x.u, t);
            if (c.causal) z.add(key_of_thread<real>(c, c.k, 1, x.u, t));
            real sum = 0;
            for (int i = 0; i < f.tiles; i++) sum += dq[i * apart + (int64_t)t * f.kp];
            const double with_num = block_sum((double)q * sum); /* num . dnum = q . dq */
            const double scaled = x.den[t] * c.scale;
            /* was o = scale num / divisor: a clamped divisor does not move */
            const double d_den = c.normaliser == LA_CLAMP && scaled <= c.eps
                                     ? 0
                                     : -c.scale * with_num / clamped(c, scaled);
            dq[(int64_t)t * f.kp] += (real)(d_den * z.total());
            __syncthreads();
            if (key == 0) x.den[t] = (real)d_den;
            dz.add(d_den * q);
        }
        x.z[s * x.kp] = dz.total();
    }
}

template <typename real>
static __global__ void sum_after(const __grid_constant__ call c, const __grid_constant__ gradients d,
                                 const __grid_constant__ through_z<real> f)
{
    const sequence_of_keys<real> x(c, f, blockIdx.x);
    running dz = z_of_thread<real>(d.dzt, c, x.u);
    for (int s = x.count - 1; s >= 0; s--) {
        const double of_segment = x.z[s * x.kp];
        x.z[s * x.kp] = dz.total();
        dz.add(of_segment);
    }
    for (int s = 0; s < x.count && !c.causal; s++) x.z[s * x.kp] = dz.total();
    if (d.dz0.data && threadIdx.x < c.K)
        store(at(d.dz0, x.u.n, x.u.hv, threadIdx.x), d.dz0.dtype, (real)dz.total());
}

/* Was z <- z + k, den = z'q. */
template <typename real>
static __global__ void keys_adjoint(const __grid_constant__ call c,
                                    const __grid_constant__ through_z<real> f)
{
    const sequence_of_keys<real> x(c, f, blockIdx.x / f.parts);
    const int64_t slot = (int64_t)(x.u.hv - f.first) * f.tiles;
    real *const dk = f.dk + (slot * f.tokens + x.row0) * f.kp + threadIdx.x;
    for (int s = blockIdx.x % f.parts; s < x.count; s += f.parts) {
        const int first = x.u.begin + s * SEGMENT, end = min(first + SEGMENT, x.u.end);
        running dz = {x.z[s * x.kp]};
        for (int t = end - 1; t >= first; t--) {
            if (c.causal) dz.add((double)x.den[t] * key_of_thread<real>(c, c.q, 0, x.u, t));
            dk[(int64_t)t * f.kp] += (real)dz.total();
        }
    }
}

/* ---- launches ---- */

/* Blocks of a sequence: as many as its segments, while there are few sequences. */
static int parts_of(const call &c, int heads)
{
    const int64_t usual = c.cu.data ? (int64_t)c.T / max(c.N, 1) : c.T;
    const int64_t most = max((int64_t)1, 16384 / ((int64_t)c.N * heads));
    return (int)max((int64_t)1, min(most, (usual + SEGMENT - 1) / SEGMENT));
}

template <typename real>
static cudaError_t launch_denominators(const call &c, through_z<real> f, cudaStream_t stream)
{
    const unsigned sequences = (unsigned)c.N * f.heads;
    f.parts = parts_of(c, f.heads);
    sum_segments<real><<<sequences * f.parts, f.kp, 0, stream>>>(c, f);
    sum_before<real><<<sequences, f.kp, 0, stream>>>(c, f);
    denominators<real><<<sequences * f.parts, f.kp, 0, stream>>>(c, f);
    return cudaGetLastError();
}

template <typename real>
static cudaError_t launch_denominators_adjoint(const call &c, const gradients &d, through_z<real> f,
                                               cudaStream_t stream)
{
    const unsigned sequences = (unsigned)c.N * f.heads;
    f.parts = parts_of(c, f.heads);
    denominators_adjoint<real><<<sequences * f.parts, f.kp, 0, stream>>>(c, f);
    sum_after<real><<<sequences, f.kp, 0, stream>>>(c, d, f);
    keys_adjoint<real><<<sequences * f.parts, f.kp, 0, stream>>>(c, f);
    return cudaGetLastError();
}

#endif
