/* The part of the gradients that goes through the normaliser: den = z'q, where z is the sum of the
 * keys so far. z is a vector of its own: a lane has every 32nd key, a warp the K keys of one value
 * head.
 *
 * The segments of a sequence are worked on side by side. First each segment sums its keys. Then a
 * pass along the sequence finds the sum before each segment. Then each segment takes its tokens one
 * after the other. The gradients do the same in reverse. A segment belongs to one warp, so that a
 * sum over keys waits for no other warp, and the rows of the next token are loaded meanwhile. */
#ifndef LINATTN_CUDA_NORMALISER_CUH
#define LINATTN_CUDA_NORMALISER_CUH

#include <type_traits>

#include "kernels.cuh"
#include "load.cuh"

enum { SEGMENT = 64, SEGMENTS_OF_BLOCK = 4 };

/* The rows of q or k of one head, as a lane reads them. */
template <typename real, int N> struct key_rows {
    const char *first; /* the first element of this lane, of token 0 */
    int64_t step, far; /* bytes to the next token; to the next element of this lane */
    int there;         /* number of elements of this lane */
    la_dtype dtype;

    __device__ key_rows(const call &c, const view &from, const unit &u)
    {
        const int lane = threadIdx.x % 32, size = la_size_of(from.dtype);
        first = at(from, u.b, 0, u.h, lane);
        step = from.stride[1] * size;
        far = from.stride[3] * size * 32;
        there = lane < c.K ? (c.K - lane + 31) / 32 : 0;
        dtype = from.dtype;
    }

    /* The bits as they lie in memory, so that nothing waits for them yet; then their numbers. */
    typedef typename std::conditional<sizeof(real) == 8, uint64_t, uint32_t>::type bits;
    __device__ __forceinline__ void prefetch(bits (&x)[N], int t) const
    {
        const char *row = first + t * step;
        if (la_size_of(dtype) == 2 && far == 64) {
#pragma unroll
            for (int j = 0; j < N; j++) x[j] = j < there ? *(const uint16_t *)(row + j * 64) : 0;
        } else {
#pragma unroll
            for (int j = 0; j < N; j++) x[j] = j < there ? (bits)bits_of(row + j * far, dtype) : 0;
        }
    }
    __device__ __forceinline__ void read(real (&x)[N], const bits (&from)[N]) const
    {
#pragma unroll
        for (int j = 0; j < N; j++)
            if constexpr (sizeof(real) == 8)
                x[j] = dtype == LA_F64 ? __longlong_as_double((long long)from[j])
                                       : number(from[j], dtype);
            else
                x[j] = number(from[j], dtype);
    }
};

/* A sequence of a value head. */
template <typename real> struct sequence_of_keys {
    unit u;
    int count;  /* number of its segments */
    double *z;  /* z of its first segment */
    int64_t kp; /* distance of two of them */
    int64_t row0;
    real *den;

    __device__ sequence_of_keys(const call &c, const through_z<real> &f, int64_t index)
    {
        const int head = (int)(index % f.heads);
        u = unit_of(c, (int)(index / f.heads), f.first + head);
        count = (u.end - u.begin + SEGMENT - 1) / SEGMENT;
        kp = f.kp;
        z = f.z + (head * f.segments + first_chunk_slot(c, u.n, SEGMENT)) * kp;
        row0 = (int64_t)u.b * c.T;
        den = f.den + head * f.tokens + row0;
    }
};

/* The segments of each warp, one after another: do_segment(sequence, z of the segment, first,
 * end). */
template <typename real, typename function>
__device__ __forceinline__ void each_segment(const call &c, const through_z<real> &f,
                                             function do_segment)
{
    const int64_t warp = (int64_t)blockIdx.x * SEGMENTS_OF_BLOCK + threadIdx.x / 32;
    if (is_needless(f.range) || warp >= (int64_t)c.N * f.heads * f.parts) return;
    const sequence_of_keys<real> x(c, f, warp / f.parts);
    for (int s = (int)(warp % f.parts); s < x.count; s += f.parts) {
        const int first = x.u.begin + s * SEGMENT;
        do_segment(x, x.z + s * x.kp, first, min(first + SEGMENT, x.u.end));
    }
}

template <typename real, int N>
static __global__ void __launch_bounds__(SEGMENTS_OF_BLOCK * 32)
    sum_segments(const __grid_constant__ call c, const __grid_constant__ through_z<real> f)
{
    const int lane = threadIdx.x % 32;
    each_segment(c, f, [&](const auto &x, double *z, int first, int end) {
        running sum[N] = {};
        const key_rows<real, N> keys(c, c.x[LA_K], x.u);
        typename key_rows<real, N>::bits next[N];
        end = min(end, c.keys);
        if (first < end) keys.prefetch(next, first);
        for (int t = first; t < end; t++) {
            real k[N];
            keys.read(k, next);
            if (t + 1 < end) keys.prefetch(next, t + 1);
            norm_and_map(c, 1, k, every_32nd());
#pragma unroll
            for (int j = 0; j < N; j++) sum[j].add(k[j]);
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            if (lane + 32 * j < f.kp) z[lane + 32 * j] = sum[j].total();
    });
}

/* The z of each segment becomes the sum before it; noncausal: the sum that all tokens see. A thread
 * has a key. */
template <typename real>
static __global__ void sum_before(const __grid_constant__ call c,
                                  const __grid_constant__ through_z<real> f)
{
    if (is_needless(f.range)) return;
    const sequence_of_keys<real> x(c, f, blockIdx.x);
    double *const of_key = x.z + threadIdx.x;
    running z = z_of_key<real>(c.x[LA_Z0], c, x.u, threadIdx.x);
    running_sums<false>(of_key, x.count, x.kp, z);
    for (int s = 0; s < x.count && !c.causal; s++) of_key[s * x.kp] = z.total();
}

template <typename real, int N>
static __global__ void __launch_bounds__(SEGMENTS_OF_BLOCK * 32)
    denominators(const __grid_constant__ call c, const __grid_constant__ through_z<real> f)
{
    const int lane = threadIdx.x % 32;
    each_segment(c, f, [&](const auto &x, double *of_segment, int first, int end) {
        running z[N] = {};
#pragma unroll
        for (int j = 0; j < N; j++)
            if (lane + 32 * j < f.kp) z[j].sum = of_segment[lane + 32 * j];
        const key_rows<real, N> keys(c, c.x[LA_K], x.u), queries(c, c.x[LA_Q], x.u);
        typename key_rows<real, N>::bits next_k[N] = {}, next_q[N];
        const auto prefetch = [&](int t) {
            if (c.causal) keys.prefetch(next_k, t);
            queries.prefetch(next_q, t);
        };
        end = min(end, c.queries);
        if (first < end) prefetch(first);
        for (int t = first; t < end; t++) {
            real k[N], q[N];
            keys.read(k, next_k);
            queries.read(q, next_q);
            if (t + 1 < end) prefetch(t + 1);
            norm_and_map(c, 1, k, every_32nd());
            norm_and_map(c, 0, q, every_32nd());
            double den = 0;
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (c.causal) z[j].add(k[j]);
                den += z[j].total() * q[j];
            }
            den = warp_sum(den);
            if (lane == 0) x.den[t] = (real)den;
        }
    });
}

/* The gradient of den takes the place of den, dq gets the part that comes through it, and the share
 * of dz of a segment takes the place of z. */
template <typename real, int N>
static __global__ void __launch_bounds__(SEGMENTS_OF_BLOCK * 32)
    denominators_adjoint(const __grid_constant__ call c, const __grid_constant__ through_z<real> f)
{
    const int lane = threadIdx.x % 32;
    const int64_t apart = f.tokens * f.kp;
    each_segment(c, f, [&](const auto &x, double *of_segment, int first, int end) {
        real *const dq =
            f.dq + (int64_t)(x.u.hv - f.first) * f.tiles * apart + x.row0 * f.kp + lane;
        running z[N] = {}, dz[N] = {};
#pragma unroll
        for (int j = 0; j < N; j++)
            if (lane + 32 * j < f.kp) z[j].sum = of_segment[lane + 32 * j];
        const key_rows<real, N> keys(c, c.x[LA_K], x.u), queries(c, c.x[LA_Q], x.u);
        typename key_rows<real, N>::bits next_k[N] = {}, next_q[N];
        real next_dq[N], next_den;
        const auto prefetch = [&](int t) {
            if (c.causal) keys.prefetch(next_k, t);
            queries.prefetch(next_q, t);
            next_den = x.den[t];
#pragma unroll
            for (int j = 0; j < N; j++)
                next_dq[j] = lane + 32 * j < f.kp ? dq[(int64_t)t * f.kp + 32 * j] : 0;
        };
        end = min(end, c.queries);
        if (first < end) prefetch(first);
        for (int t = first; t < end; t++) {
            real k[N], q[N], sum[N], own[N];
            keys.read(k, next_k);
            queries.read(q, next_q);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] = own[j] = next_dq[j];
            const double scaled = next_den * c.scale;
            if (t + 1 < end) prefetch(t + 1);
            for (int i = 1; i < f.tiles; i++)
#pragma unroll
                for (int j = 0; j < N; j++)
                    if (lane + 32 * j < f.kp) sum[j] += dq[i * apart + (int64_t)t * f.kp + 32 * j];
            norm_and_map(c, 1, k, every_32nd());
            norm_and_map(c, 0, q, every_32nd());
            double with_num = 0; /* num . dnum = q . dq */
#pragma unroll
            for (int j = 0; j < N; j++) with_num += (double)q[j] * sum[j];
            with_num = warp_sum(with_num);
            const double d_den = d_denominator(&c, scaled, with_num);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (c.causal) z[j].add(k[j]);
                if (lane + 32 * j < f.kp)
                    dq[(int64_t)t * f.kp + 32 * j] = own[j] + (real)(d_den * z[j].total());
                dz[j].add(d_den * q[j]);
            }
            __syncwarp(); /* all lanes have read it */
            if (lane == 0) x.den[t] = (real)d_den;
        }
#pragma unroll
        for (int j = 0; j < N; j++)
            if (lane + 32 * j < f.kp) of_segment[lane + 32 * j] = dz[j].total();
    });
}

template <typename real>
static __global__ void sum_after(const __grid_constant__ call c,
                                 const __grid_constant__ gradients d,
                                 const __grid_constant__ through_z<real> f)
{
    if (is_needless(f.range)) return;
    const sequence_of_keys<real> x(c, f, blockIdx.x);
    double *const of_key = x.z + threadIdx.x;
    running dz = z_of_key<real>(d[LA_DZT], c, x.u, threadIdx.x);
    running_sums<true>(of_key, x.count, x.kp, dz);
    for (int s = 0; s < x.count && !c.causal; s++) of_key[s * x.kp] = dz.total();
    if (d[LA_DZ0].data && threadIdx.x < c.K)
        store(at(d[LA_DZ0], x.u.n, x.u.hv, threadIdx.x), d[LA_DZ0].dtype, (real)dz.total());
}

/* Was z <- z + k, den = z'q. */
template <typename real, int N>
static __global__ void __launch_bounds__(SEGMENTS_OF_BLOCK * 32)
    keys_adjoint(const __grid_constant__ call c, const __grid_constant__ through_z<real> f)
{
    const int lane = threadIdx.x % 32;
    each_segment(c, f, [&](const auto &x, double *of_segment, int first, int end) {
        const int64_t partial = (int64_t)(x.u.hv - f.first) * f.tiles;
        real *const dk = f.dk + (partial * f.tokens + x.row0) * f.kp + lane;
        running dz[N] = {};
#pragma unroll
        for (int j = 0; j < N; j++)
            if (lane + 32 * j < f.kp) dz[j].sum = of_segment[lane + 32 * j];
        const key_rows<real, N> queries(c, c.x[LA_Q], x.u);
        typename key_rows<real, N>::bits next_q[N] = {};
        real next_dk[N], next_den = 0;
        const auto prefetch = [&](int t) {
            if (c.causal) queries.prefetch(next_q, t);
            if (c.causal) next_den = x.den[t];
#pragma unroll
            for (int j = 0; j < N; j++)
                next_dk[j] = lane + 32 * j < f.kp ? dk[(int64_t)t * f.kp + 32 * j] : 0;
        };
        end = min(end, c.keys);
        if (first < end) prefetch(end - 1);
        for (int t = end - 1; t >= first; t--) {
            real q[N], own[N];
            queries.read(q, next_q);
#pragma unroll
            for (int j = 0; j < N; j++) own[j] = next_dk[j];
            const double d_den = next_den;
            if (t > first) prefetch(t - 1);
            norm_and_map(c, 0, q, every_32nd());
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (c.causal) dz[j].add(d_den * q[j]);
                if (lane + 32 * j < f.kp)
                    dk[(int64_t)t * f.kp + 32 * j] = own[j] + (real)dz[j].total();
            }
        }
    });
}

/* ---- launches ---- */

/* Warps of a sequence: as many as it has segments, unless there are many sequences. */
static int parts_of(const call &c, int heads)
{
    const int64_t usual = c.x[LA_CU].data ? (int64_t)c.T / max(c.N, 1) : c.T;
    const int64_t most = max((int64_t)1, 65536 / ((int64_t)c.N * heads));
    return (int)max((int64_t)1, min(most, (usual + SEGMENT - 1) / SEGMENT));
}

/* A kernel by the keys of a lane, 32 N >= kp: the largest N, or four. */
enum { LANE_KEYS = MOST_ROWS * PARTS / 32 };
#define BY_KEYS(kernel) \
    (f.kp <= 128 ? kernel < real, LANE_KEYS == 8 ? 4 : LANE_KEYS > : kernel<real, LANE_KEYS>)

template <typename real>
static cudaError_t launch_denominators(const call &c, through_z<real> f, cudaStream_t stream)
{
    const int64_t sequences = (int64_t)c.N * f.heads;
    f.parts = parts_of(c, f.heads);
    const int64_t blocks = (sequences * f.parts + SEGMENTS_OF_BLOCK - 1) / SEGMENTS_OF_BLOCK;
    const int threads = SEGMENTS_OF_BLOCK * 32;
    cudaError_t error = launch(BY_KEYS(sum_segments), blocks, threads, 0, stream, c, f);
    if (error == cudaSuccess) error = launch(sum_before<real>, sequences, f.kp, 0, stream, c, f);
    if (error == cudaSuccess)
        error = launch(BY_KEYS(denominators), blocks, threads, 0, stream, c, f);
    return error;
}

template <typename real>
static cudaError_t launch_denominators_adjoint(const call &c, const gradients &d, through_z<real> f,
                                               cudaStream_t stream)
{
    const int64_t sequences = (int64_t)c.N * f.heads;
    f.parts = parts_of(c, f.heads);
    const int64_t blocks = (sequences * f.parts + SEGMENTS_OF_BLOCK - 1) / SEGMENTS_OF_BLOCK;
    const int threads = SEGMENTS_OF_BLOCK * 32;
    cudaError_t error = launch(BY_KEYS(denominators_adjoint), blocks, threads, 0, stream, c, f);
    if (error == cudaSuccess) error = launch(sum_after<real>, sequences, f.kp, 0, stream, c, d, f);
    if (error == cudaSuccess)
        error = launch(BY_KEYS(keys_adjoint), blocks, threads, 0, stream, c, f);
    return error;
}

#undef BY_KEYS

#endif
