/* CAUSAL CONVOLUTIONS on a GPU (../convolution.h).
 *
 * Where channels are neighbours and there are at most four taps, a thread has four channels and goes
 * down some tokens, with the last inputs in registers. Other calls go number by number. */
#include "convolution.cuh"
#include "kernels.cuh"

#include <cuda_pipeline_primitives.h>

enum {
    THREADS = 128,
    MOST_TAPS = 4, /* of the kernels whose inputs are in registers */
    RING = 8,      /* tokens that a thread has on their way */
    BATCH = 4,     /* the same on the way back */
    MOST_RUN = 64, /* tokens of a thread: fewer of them read more tokens before their first */
    LEAST_THREADS = 1 << 17,
    /* Of the tokens of a backward pass, each with sums of its own: they are 10 KiB for a channel. */
    MOST_PARTS = 256,
    LEAST_PART = 32, /* tokens */
    SETTLE = 32,     /* tokens whose sums are reals; their sum is double */
};

/* ---- one number ---- */

/* Was y = silu(z), or z. */
template <typename real>
__device__ __forceinline__ real gradient_of_sum(const convolution_call &c, const sequence &s, int t,
                                                int d)
{
    const view &dy = c.d[LA_CONVOLUTION_Y];
    const real x = load<real>(at(dy, s.b, t, d), dy.dtype);
    return c.silu ? x * silu_slope(sum_at<real>(c, s, t, d)) : x;
}

/* The part of input p's gradient that comes from the final state's. */
template <typename real>
__device__ __forceinline__ real final_gradient(const convolution_call &c, const sequence &s, int n,
                                               int p, int d)
{
    const view &dS = c.d[LA_CONVOLUTION_ST];
    const int m = p - (s.end - (c.W - 1));
    return dS.data && m >= 0 ? load<real>(at(dS, n, d, m), dS.dtype) : 0;
}

/* Was z[t] = bias + sum of tap i times x[t - i]: the gradient of input p. */
template <typename real>
__device__ __forceinline__ real input_gradient(const convolution_call &c, const sequence &s, int n,
                                               int p, int d)
{
    real sum = 0;
    for (int i = 0; i < c.W; i++)
        if (p + i >= s.begin && p + i < s.end)
            sum += tap_at<real>(c, i, d) * gradient_of_sum<real>(c, s, p + i, d);
    return sum + final_gradient<real>(c, s, n, p, d);
}

/* The thread's token and channel: neighbouring threads have neighbours in memory. */
struct number_place {
    int b, t, d;
    bool is;
};

__device__ __forceinline__ number_place number_of_thread(const convolution_call &c)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int64_t row = (int64_t)c.room.T * c.room.D, rest = i % row;
    number_place p;
    p.is = i < c.room.B * row;
    p.b = (int)(i / row);
    p.t = (int)(c.along ? rest % c.room.T : rest / c.room.D);
    p.d = (int)(c.along ? rest / c.room.T : rest % c.room.D);
    return p;
}

template <typename real>
static __global__
__launch_bounds__(THREADS) void convolve_numbers(const __grid_constant__ convolution_call c)
{
    const number_place p = number_of_thread(c);
    if (!p.is) return;
    const sequence s = sequence_of(c.room, sequence_at(c.room, p.b, p.t));
    const real z = sum_at<real>(c, s, p.t, p.d);
    store(at(c.x[LA_CONVOLUTION_Y], s.b, p.t, p.d), c.x[LA_CONVOLUTION_Y].dtype, activated(c, z));
}

template <typename real>
static __global__
__launch_bounds__(THREADS) void gradients_of_numbers(const __grid_constant__ convolution_call c)
{
    const number_place p = number_of_thread(c);
    if (!p.is) return;
    const int n = sequence_at(c.room, p.b, p.t);
    const sequence s = sequence_of(c.room, n);
    const view &dx = c.d[LA_CONVOLUTION_X];
    store(at(dx, s.b, p.t, p.d), dx.dtype, input_gradient<real>(c, s, n, p.t, p.d));
}

/* Tokens [first,last) of a part, of all rows one after another. */
__device__ __forceinline__ int64_t first_of_part(const convolution_call &c, int part)
{
    return (int64_t)c.room.B * c.room.T * part / c.parts;
}

/* The tokens [first,last) of one sequence, from token `from` of a part on: one at least, where cu_seqlens
 * falls too. */
struct stretch {
    int n, first, last;
    sequence s;
};

__device__ __forceinline__ stretch stretch_of(const convolution_call &c, int64_t from, int64_t end)
{
    stretch r;
    const int b = (int)(from / c.room.T);
    r.first = (int)(from % c.room.T);
    r.n = sequence_at(c.room, b, r.first);
    r.s = sequence_of(c.room, r.n);
    r.last = (int)min(end - (int64_t)b * c.room.T, (int64_t)max(r.s.end, r.first + 1));
    return r;
}

/* A thread has a tap or the bias of a channel, and the tokens of a part. */
template <typename real>
static __global__
__launch_bounds__(THREADS) void sums_of_numbers(const __grid_constant__ convolution_call c)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int d = (int)(i % c.room.D), k = (int)(i / c.room.D % (c.W + 1));
    const int part = (int)(i / c.room.D / (c.W + 1));
    if (part >= c.parts) return;
    const int64_t end = first_of_part(c, part + 1);
    double all = 0;
    for (int64_t from = first_of_part(c, part); from < end;) {
        const stretch r = stretch_of(c, from, end);
        real sum = 0;
        for (int t = r.first; t < r.last; t++) {
            const real dz = gradient_of_sum<real>(c, r.s, t, d);
            sum += k < c.W ? dz * input_at<real>(c, r.s, t - k, d) : dz;
            if ((t - r.first) % SETTLE != SETTLE - 1) continue;
            all += (double)sum;
            sum = 0;
        }
        all += (double)sum;
        from += r.last - r.first;
    }
    c.sums[i] = all;
}

/* ---- four channels, with the last inputs in registers ---- */

template <typename real, int W> struct taps {
    real tap[W][FOUR], bias[FOUR];

    __device__ __forceinline__ void load_all(const convolution_call &c, int d)
    {
#pragma unroll
        for (int e = 0; e < FOUR; e++) {
            bias[e] = bias_at<real>(c, d + e);
#pragma unroll
            for (int i = 0; i < W; i++) tap[i][e] = tap_at<real>(c, i, d + e);
        }
    }
    /* z of the newest input, x[W - 1]. */
    __device__ __forceinline__ void sum(const real (*x)[FOUR], real (&z)[FOUR]) const
    {
#pragma unroll
        for (int e = 0; e < FOUR; e++) {
            z[e] = bias[e];
#pragma unroll
            for (int i = 0; i < W; i++) z[e] += tap[i][e] * x[W - 1 - i][e];
        }
    }
};

/* The W - 1 inputs before token t. */
template <typename real, int W>
__device__ __forceinline__ void inputs_before(const convolution_call &c, const sequence &s, int t,
                                              int d, real (*x)[FOUR])
{
#pragma unroll
    for (int i = 0; i < W - 1; i++)
#pragma unroll
        for (int e = 0; e < FOUR; e++) x[i][e] = input_at<real>(c, s, t - (W - 1) + i, d + e);
}

/* A thread has four channels of a run of tokens. The dtype of x and y is a constant, because branches on it
 * took more instructions than the work (docs/decisions/0039). */
template <typename real, int W, la_dtype DTYPE> struct way_down {
    enum { BYTES = FOUR * (DTYPE == LA_F64 ? 8 : DTYPE == LA_F32 ? 4 : 2) };
    struct __align__(BYTES < 16 ? BYTES : 16) four_numbers {
        char bytes[BYTES];
    };
    const convolution_call &c;
    four_numbers (*ring)[THREADS]; /* tokens on their way, each thread's own */
    const char *from;
    char *to;
    int64_t step_in, step_out;
    int fetched, last; /* tokens */
    taps<real, W> own;
    real x[W][FOUR]; /* the last W - 1 inputs, and the token's own behind them */
    __device__ __forceinline__ way_down(const convolution_call &call,
                                        four_numbers (*shared)[THREADS], int b, int t, int end,
                                        int d)
        : c(call), ring(shared), fetched(t), last(end)
    {
        from = at(c.x[LA_CONVOLUTION_X], b, t, d);
        to = at(c.x[LA_CONVOLUTION_Y], b, t, d);
        step_in = c.x[LA_CONVOLUTION_X].stride[1] * la_size_of(DTYPE);
        step_out = c.x[LA_CONVOLUTION_Y].stride[1] * la_size_of(DTYPE);
#pragma unroll
        for (int slot = 0; slot < RING; slot++) fetch(slot);
        own.load_all(c, d);
    }
    /* Begin to fetch the next token. */
    __device__ __forceinline__ void fetch(int slot)
    {
        if (fetched++ < last)
#pragma unroll
            for (int i = 0; i < BYTES; i += 16)
                __pipeline_memcpy_async(ring[slot][threadIdx.x].bytes + i, from + i,
                                        BYTES < 16 ? BYTES : 16);
        __pipeline_commit();
        from += step_in;
    }
    __device__ __forceinline__ void token(int slot)
    {
        bits4<real> bits;
        real z[FOUR];
        __pipeline_wait_prior(RING - 1);
        load_bits(bits, ring[slot][threadIdx.x].bytes, DTYPE, 1, FOUR, true);
        fetch(slot);
        numbers_of(bits, DTYPE, x[W - 1]);
        own.sum(x, z);
        if (c.silu)
#pragma unroll
            for (int e = 0; e < FOUR; e++) z[e] = silu_for(DTYPE, z[e]);
#pragma unroll
        for (int i = 0; i < W - 1; i++)
#pragma unroll
            for (int e = 0; e < FOUR; e++) x[i][e] = x[i + 1][e];
        store_four(to, DTYPE, 1, FOUR, true, z);
        to += step_out;
    }
};

template <typename real, int W, la_dtype DTYPE>
static __global__ __launch_bounds__(THREADS, sizeof(real) == 8 ? 1 : 5) void convolve_fours(
    const __grid_constant__ convolution_call c)
{
    typedef way_down<real, W, DTYPE> way_of_call;
    __shared__ typename way_of_call::four_numbers ring[RING][THREADS];
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int fours = c.room.D / FOUR, runs = (c.room.T + c.run - 1) / c.run;
    const int d = (int)(i % fours) * FOUR, run = (int)(i / fours % runs);
    const int b = (int)(i / fours / runs), last = min(c.room.T, (run + 1) * c.run);
    if (b >= c.room.B) return;
    int t = run * c.run, slot = 0;
    way_of_call way(c, ring, b, t, last, d);
    for (int n = sequence_at(c.room, b, t); t < last && n < c.room.S; n++) {
        const sequence s = sequence_of(c.room, n);
        const int end = min(last, s.end);
        if (t < end) inputs_before<real, W>(c, s, t, d, way.x);
        for (; slot == 0 && t + RING <= end; t += RING)
#pragma unroll
            for (int k = 0; k < RING; k++) way.token(k);
        for (; t < end; t++) {
            way.token(slot);
            slot = (slot + 1) % RING;
        }
    }
}

/* The gradients of inputs come W - 1 tokens later than those of sums: `open` has the ones that are not
 * whole, the oldest first. */
template <typename real, int W> struct way_back {
    taps<real, W> own;
    real x[W][FOUR], open[W][FOUR];
    real of_tap[W + 1][FOUR]; /* sums of a run, the bias last */
    double sums[W + 1][FOUR];

    __device__ __forceinline__ void begin()
    {
#pragma unroll
        for (int i = 0; i < W * FOUR; i++) open[i / FOUR][i % FOUR] = 0;
    }
    /* `counts`: the token belongs to this part's sums. */
    __device__ __forceinline__ void add(const convolution_call &c, const real (&dy)[FOUR],
                                        bool counts)
    {
        real dz[FOUR];
        own.sum(x, dz);
#pragma unroll
        for (int e = 0; e < FOUR; e++) {
            dz[e] = c.silu ? dy[e] * silu_slope(dz[e]) : dy[e];
#pragma unroll
            for (int i = 0; i < W; i++) {
                open[W - 1 - i][e] += own.tap[i][e] * dz[e];
                if (counts) of_tap[i][e] += dz[e] * x[W - 1 - i][e];
            }
            if (counts) of_tap[W][e] += dz[e];
        }
    }
    __device__ __forceinline__ void shift()
    {
#pragma unroll
        for (int e = 0; e < FOUR; e++) {
#pragma unroll
            for (int i = 0; i < W - 1; i++) {
                x[i][e] = x[i + 1][e];
                open[i][e] = open[i + 1][e];
            }
            open[W - 1][e] = 0;
        }
    }
    __device__ __forceinline__ void settle()
    {
#pragma unroll
        for (int i = 0; i <= W; i++)
#pragma unroll
            for (int e = 0; e < FOUR; e++) {
                sums[i][e] += (double)of_tap[i][e];
                of_tap[i][e] = 0;
            }
    }
};

/* The gradient of input p, which is whole but for that of the final state. */
template <typename real>
__device__ __forceinline__ void store_input_gradient(const convolution_call &c, const sequence &s,
                                                     int n, int p, int d, real (&x)[FOUR])
{
    const view &dx = c.d[LA_CONVOLUTION_X];
    if (c.d[LA_CONVOLUTION_ST].data && p > s.end - c.W)
#pragma unroll
        for (int e = 0; e < FOUR; e++) x[e] += final_gradient<real>(c, s, n, p, d + e);
    store_four(at(dx, s.b, p, d), dx.dtype, 1, FOUR, true, x);
}

/* A thread has the tokens of a part. It goes on past its end, for the gradients of its last inputs. */
template <typename real, int W>
static __global__ __launch_bounds__(THREADS, sizeof(real) == 8 ? 1 : 4) void gradients_of_fours(
    const __grid_constant__ convolution_call c)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    const int fours = c.room.D / FOUR, d = (int)(i % fours) * FOUR, part = (int)(i / fours);
    const view &in = c.x[LA_CONVOLUTION_X], &dys = c.d[LA_CONVOLUTION_Y];
    if (part >= c.parts) return;
    way_back<real, W> way;
    way.own.load_all(c, d);
#pragma unroll
    for (int k = 0; k <= W; k++)
#pragma unroll
        for (int e = 0; e < FOUR; e++) way.of_tap[k][e] = 0, way.sums[k][e] = 0;
    const int64_t end = first_of_part(c, part + 1);
    for (int64_t from = first_of_part(c, part); from < end;) {
        const stretch r = stretch_of(c, from, end);
        const sequence &s = r.s;
        const int n = r.n, b = s.b, first = r.first, last = r.last, stop = min(last + W - 1, s.end);
        from += last - first;
        way.begin();
        inputs_before<real, W>(c, s, first, d, way.x);
        for (int t = first; t < stop; t += BATCH) {
            bits4<real> x[BATCH], dy[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                const int left = t + k < stop ? FOUR : 0;
                load_bits(x[k], at(in, b, t + k, d), in.dtype, 1, left, true);
                load_bits(dy[k], at(dys, b, t + k, d), dys.dtype, 1, left, true);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                real gradient[FOUR];
                if (t + k >= stop) break;
                numbers_of(x[k], in.dtype, way.x[W - 1]);
                numbers_of(dy[k], dys.dtype, gradient);
                way.add(c, gradient, t + k < last);
                const int p = t + k - (W - 1);
                if (p >= first) store_input_gradient(c, s, n, p, d, way.open[0]);
                way.shift();
            }
            if ((t - first) % SETTLE == SETTLE - BATCH) way.settle();
        }
        way.settle();
        /* The sequence ended before these were whole: there is no more to add to them. */
#pragma unroll
        for (int k = 0; k < W - 1; k++) {
            const int p = stop - (W - 1) + k;
            if (p >= first && p < last) store_input_gradient(c, s, n, p, d, way.open[k]);
        }
    }
#pragma unroll
    for (int k = 0; k <= W; k++)
#pragma unroll
        for (int e = 0; e < FOUR; e++)
            c.sums[((int64_t)part * (W + 1) + k) * c.room.D + d + e] = way.sums[k][e];
}

/* ---- states: a thread has a channel, or one number of a state ---- */

/* Number m of channel d of sequence n. */
struct state_number {
    int64_t n;
    int d, m;
};

__device__ __forceinline__ state_number state_number_of_thread(const convolution_call &c)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x, reach = c.W - 1;
    return {i / reach / c.room.D, (int)(i / reach % c.room.D), (int)(i % reach)};
}

template <typename real>
static __global__
__launch_bounds__(THREADS) void final_states(const __grid_constant__ convolution_call c)
{
    const state_number p = state_number_of_thread(c);
    if (p.n >= c.room.S) return;
    const sequence s = sequence_of(c.room, (int)p.n);
    const view &to = c.x[LA_CONVOLUTION_ST];
    store(at(to, p.n, p.d, p.m), to.dtype, input_at<real>(c, s, s.end - (c.W - 1) + p.m, p.d));
}

template <typename real>
static __global__
__launch_bounds__(THREADS) void initial_gradients(const __grid_constant__ convolution_call c)
{
    const state_number p = state_number_of_thread(c);
    if (p.n >= c.room.S) return;
    const sequence s = sequence_of(c.room, (int)p.n);
    const view &to = c.d[LA_CONVOLUTION_S0];
    store(at(to, p.n, p.d, p.m), to.dtype,
          input_gradient<real>(c, s, (int)p.n, s.begin - (c.W - 1) + p.m, p.d));
}

/* One token of each row. */
template <typename real>
static __global__
__launch_bounds__(THREADS) void convolve_step(const __grid_constant__ convolution_call c)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i / c.room.D < c.room.S) convolve_token<real>(c, (int)(i / c.room.D), (int)(i % c.room.D));
}

/* ---- launches ---- */

static int64_t blocks_for(int64_t threads) { return div_up(threads, THREADS); }

template <typename real, la_dtype DTYPE> static auto kernel_of_taps(int W)
{
    return W == 2   ? convolve_fours<real, 2, DTYPE>
           : W == 3 ? convolve_fours<real, 3, DTYPE>
                    : convolve_fours<real, 4, DTYPE>;
}

template <typename real> static auto kernel_of_fours(const convolution_call &c)
{
    const la_dtype dtype = c.x[LA_CONVOLUTION_X].dtype; /* y's too */
    if constexpr (sizeof(real) == 8)
        return kernel_of_taps<real, LA_F64>(c.W);
    else
        return dtype == LA_F32   ? kernel_of_taps<real, LA_F32>(c.W)
               : dtype == LA_F16 ? kernel_of_taps<real, LA_F16>(c.W)
                                 : kernel_of_taps<real, LA_BF16>(c.W);
}

template <typename real> static cudaError_t forward(convolution_call c, cudaStream_t stream)
{
    const int64_t B = c.room.B, T = c.room.T, D = c.room.D;
    const int64_t states = (int64_t)c.room.S * D * (c.W - 1);
    cudaError_t error;
    if (c.room.step)
        return launch(convolve_step<real>, blocks_for(c.room.S * D), THREADS, 0, stream, c);
    if (c.fours) {
        c.run = MOST_RUN;
        while (c.run > RING && B * div_up(T, c.run) * (D / FOUR) < LEAST_THREADS) c.run /= 2;
        const int64_t threads = B * div_up(T, c.run) * (D / FOUR);
        error = launch(kernel_of_fours<real>(c), blocks_for(threads), THREADS, 0, stream, c);
    } else {
        error = launch(convolve_numbers<real>, blocks_for(B * T * D), THREADS, 0, stream, c);
    }
    if (error == cudaSuccess && c.x[LA_CONVOLUTION_ST].data)
        error = launch(final_states<real>, blocks_for(states), THREADS, 0, stream, c);
    return error;
}

template <typename real>
static cudaError_t backward(convolution_call c, cudaMemPool_t pool, cudaStream_t stream)
{
    const int64_t D = c.room.D, tokens = (int64_t)c.room.B * c.room.T;
    const int64_t states = (int64_t)c.room.S * D * (c.W - 1), row = (c.W + 1) * D;
    c.parts = (int)min((int64_t)MOST_PARTS, max((int64_t)1, tokens / LEAST_PART));
    cudaError_t error = cudaMallocFromPoolAsync(
        (void **)&c.sums, (size_t)max(c.parts * row, (int64_t)1) * sizeof(double), pool, stream);
    if (error != cudaSuccess) return error;
    if (c.fours) {
        const auto kernel = c.W == 2   ? gradients_of_fours<real, 2>
                            : c.W == 3 ? gradients_of_fours<real, 3>
                                       : gradients_of_fours<real, 4>;
        error = launch(kernel, blocks_for(c.parts * (D / FOUR)), THREADS, 0, stream, c);
    } else {
        error = launch(gradients_of_numbers<real>, blocks_for(tokens * D), THREADS, 0, stream, c);
        if (error == cudaSuccess)
            error = launch(sums_of_numbers<real>, blocks_for(c.parts * row), THREADS, 0, stream, c);
    }
    if (error == cudaSuccess && c.d[LA_CONVOLUTION_S0].data)
        error = launch(initial_gradients<real>, blocks_for(states), THREADS, 0, stream, c);
    /* [parts][W + 1][D]: tap i is weight W - 1 - i */
    for (int i = 0; i <= c.W && error == cudaSuccess; i++) {
        view to = c.d[i < c.W ? LA_CONVOLUTION_WEIGHT : LA_CONVOLUTION_BIAS];
        if (i < c.W) to.data += (c.W - 1 - i) * to.stride[1] * la_size_of(to.dtype);
        error = add_parts(c.sums + i * D, to, D, 1, c.parts, row, stream);
    }
    const cudaError_t freed = cudaFreeAsync(c.sums, stream);
    return error == cudaSuccess ? freed : error;
}

cudaError_t run_convolution(const la_room_job &job, cudaMemPool_t pool, cudaStream_t stream)
{
    const la_convolution &j = (const la_convolution &)job;
    const bool backwards = job.p->pass == LA_BACKWARD;
    convolution_call c = convolution_call_of(job);
    const view &x = c.x[LA_CONVOLUTION_X];
    c.along = lies_along_tokens(x);
    c.fours = j.W >= 2 && j.W <= MOST_TAPS && lies_in_fours(x, 2, j.D) &&
              lies_in_fours(c.x[LA_CONVOLUTION_Y], 2, j.D) &&
              lies_in_fours(c.d[LA_CONVOLUTION_X], 2, j.D) &&
              lies_in_fours(c.d[LA_CONVOLUTION_Y], 2, j.D);
    const bool wide = job.p->real == LA_F64;
    if (backwards)
        return wide ? backward<double>(c, pool, stream) : backward<float>(c, pool, stream);
    return wide ? forward<double>(c, stream) : forward<float>(c, stream);
}
