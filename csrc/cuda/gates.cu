/* Gates from projections: one pass over x, and one over x and the gradient of the result.
 *
 * A thread has four neighbouring columns, which are numbers of a token, and goes down some rows:
 * so it makes exp(A_log) once. A block has a chunk of rows. It adds up its own part of a
 * parameter's gradient, and a second kernel adds the parts up. Chunks depend on the sizes alone,
 * so the bits do too. */
#include "kernels.cuh"
#include "load.cuh"

enum {
    THREADS = 256,
    GROUP = 4,     /* columns of a thread: 8 bytes of bfloat16, 16 of float32 */
    BATCH = 4,     /* rows that it loads before it computes */
    PAIR = 2,      /* the same in a backward pass: sums take registers too */
    MOST_ROWS = 8, /* of a thread without sums: its parameters cost as much as a row */
    /* Without sums about eight blocks for each processor of a Hopper. With sums three, which run at
     * once; a block leaves 16 KiB of sums at most, 6 MiB in all. */
    MANY_BLOCKS = 1024,
    BLOCKS_WITH_SUMS = 384
};

struct gate_call {
    la_gate_numbers x, d;
    char *to;
    const char *A_log, *dt_bias; /* NULL: none */
    la_dtype A_dtype, bias_dtype;
    int64_t A_stride[2], bias_stride[2];
    int64_t lead[3], rows, Q, columns;
    int64_t rows_of_block;
    int lanes; /* threads side by side; the others of a block have the rows below */
    int column_blocks;
    double factor;
    double *d_rate, *d_bias; /* [chunks][columns]; NULL: not asked for */
};

/* ---- groups of four numbers ---- */

template <typename T> struct __align__(sizeof(T) * GROUP > 16 ? 16 : sizeof(T) * GROUP) group {
    T x[GROUP];
};

template <typename real> __device__ __forceinline__ real real_of(double x) { return (real)x; }
template <typename real> __device__ __forceinline__ real real_of(float x) { return (real)x; }
template <typename real> __device__ __forceinline__ real real_of(__half x)
{
    return (real)__half2float(x);
}
template <typename real> __device__ __forceinline__ real real_of(__nv_bfloat16 x)
{
    return (real)__bfloat162float(x);
}

__device__ __forceinline__ void set(double &to, double x) { to = x; }
__device__ __forceinline__ void set(float &to, float x) { to = x; }
__device__ __forceinline__ void set(__half &to, float x) { to = __float2half_rn(x); }
__device__ __forceinline__ void set(__nv_bfloat16 &to, float x) { to = __float2bfloat16_rn(x); }

/* Where row r begins, in elements. */
__device__ __forceinline__ int64_t row_at(const gate_call &c, const la_gate_numbers &x, int64_t r)
{
    if (c.lead[0] * c.lead[1] == 1) return r * x.lead[2];
    const int64_t outer = r / c.lead[2];
    return r % c.lead[2] * x.lead[2] + outer % c.lead[1] * x.lead[1] +
           outer / c.lead[1] * x.lead[0];
}

/* The thread's columns and rows. */
struct gate_place {
    int64_t column, first, last, chunk;
    int left, step; /* columns that there are, up to GROUP, or none; rows of a block side by side */
};

__device__ __forceinline__ gate_place place_in(const gate_call &c)
{
    gate_place at;
    const int lane = (int)threadIdx.x % c.lanes, row = (int)threadIdx.x / c.lanes;
    at.chunk = blockIdx.x / c.column_blocks;
    at.column = ((int64_t)(blockIdx.x % c.column_blocks) * c.lanes + lane) * GROUP;
    at.left = (int)max((int64_t)0, min((int64_t)GROUP, c.columns - at.column));
    at.step = THREADS / c.lanes;
    at.first = at.chunk * c.rows_of_block + row;
    at.last = at.left ? min(c.rows, (at.chunk + 1) * c.rows_of_block) : at.first;
    return at;
}

/* Where the group's numbers lie in a row. WHOLE: side by side, aligned, and all there. */
template <bool WHOLE>
__device__ __forceinline__ void columns_at(const gate_call &c, const la_gate_numbers &x,
                                           const gate_place &at, int64_t (&place)[GROUP])
{
#pragma unroll
    for (int e = 0; e < (WHOLE ? 1 : GROUP); e++)
        place[e] = (at.column + e) / c.Q * x.head + (at.column + e) % c.Q;
}

template <bool WHOLE, typename T>
__device__ __forceinline__ void load_group(group<T> &to, const char *data, int64_t row,
                                           const int64_t (&place)[GROUP], int left)
{
    const T *from = (const T *)data + row;
    if (WHOLE) {
        to = *(const group<T> *)(from + place[0]);
    } else {
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            if (e < left)
                to.x[e] = from[place[e]];
            else
                to.x[e] = T(0.f);
    }
}

/* One or two stores, by their intrinsic: from an assignment nvcc 13.0 makes four. */
__device__ __forceinline__ void store_words(double *to, const group<double> &g)
{
    __stwb((double2 *)to + 0, make_double2(g.x[0], g.x[1]));
    __stwb((double2 *)to + 1, make_double2(g.x[2], g.x[3]));
}
__device__ __forceinline__ void store_words(float *to, const group<float> &g)
{
    __stwb((float4 *)to, make_float4(g.x[0], g.x[1], g.x[2], g.x[3]));
}
__device__ __forceinline__ uint32_t both(unsigned short low, unsigned short high)
{
    return (uint32_t)high << 16 | low;
}
__device__ __forceinline__ void store_words(__half *to, const group<__half> &g)
{
    __stwb((uint2 *)to, make_uint2(both(__half_as_ushort(g.x[0]), __half_as_ushort(g.x[1])),
                                   both(__half_as_ushort(g.x[2]), __half_as_ushort(g.x[3]))));
}
__device__ __forceinline__ void store_words(__nv_bfloat16 *to, const group<__nv_bfloat16> &g)
{
    __stwb((uint2 *)to,
           make_uint2(both(__bfloat16_as_ushort(g.x[0]), __bfloat16_as_ushort(g.x[1])),
                      both(__bfloat16_as_ushort(g.x[2]), __bfloat16_as_ushort(g.x[3]))));
}

template <bool WHOLE, typename T, typename real>
__device__ __forceinline__ void store_group(char *to, int64_t number, const real (&x)[GROUP],
                                            int left)
{
    group<T> all;
#pragma unroll
    for (int e = 0; e < GROUP; e++) set(all.x[e], x[e]);
    if (WHOLE) {
        store_words((T *)to + number, all);
    } else {
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            if (e < left) ((T *)to)[number + e] = all.x[e];
    }
}

/* ---- the parameters of the thread's columns ---- */

template <bool WHOLE, typename real>
__device__ __forceinline__ void load_parameters(const gate_call &c, const gate_place &at,
                                                real (&rate)[GROUP], real (&bias)[GROUP])
{
    const int64_t first = at.column / c.Q, behind = at.column % c.Q;
#pragma unroll
    for (int e = 0; e < GROUP; e++) {
        const int64_t p = WHOLE ? first : (at.column + e) / c.Q;
        const int64_t q = WHOLE ? behind + e : (at.column + e) % c.Q;
        rate[e] = 1;
        bias[e] = 0;
        if (e >= at.left) continue;
        if (c.A_log)
            rate[e] = exp(load<real>(c.A_log + (p * c.A_stride[0] + q * c.A_stride[1]) *
                                                   la_size_of(c.A_dtype),
                                     c.A_dtype));
        if (c.dt_bias)
            bias[e] = load<real>(c.dt_bias + (p * c.bias_stride[0] + q * c.bias_stride[1]) *
                                                 la_size_of(c.bias_dtype),
                                 c.bias_dtype);
    }
}

/* ---- forward ---- */

template <typename real, typename T, la_curve CURVE, bool WHOLE>
static __global__ __launch_bounds__(THREADS) void gate_values(const __grid_constant__ gate_call c)
{
    const gate_place at = place_in(c);
    real rate[GROUP], bias[GROUP];
    int64_t place[GROUP];
    load_parameters<WHOLE>(c, at, rate, bias);
    columns_at<WHOLE>(c, c.x, at, place);
    for (int64_t r = at.first; r < at.last; r += BATCH * at.step) {
        group<T> x[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (r + b * at.step < at.last)
                load_group<WHOLE>(x[b], c.x.data, row_at(c, c.x, r + b * at.step), place, at.left);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            real g[GROUP];
            if (r + b * at.step >= at.last) break;
#pragma unroll
            for (int e = 0; e < GROUP; e++)
                g[e] = curve_of(real_of<real>(x[b].x[e]) + bias[e], rate[e], CURVE, (real)c.factor);
            store_group<WHOLE, real>(c.to, (r + b * at.step) * c.columns + at.column, g, at.left);
        }
    }
}

/* ---- backward ---- */

/* The sums of a block's threads that have the same columns: the first row of threads has them
 * then. */
__device__ __forceinline__ void add_up_rows(const gate_call &c, double (&sums)[2 * GROUP])
{
    __shared__ double part[2 * GROUP][THREADS];
    const int t = (int)threadIdx.x, row = t / c.lanes;
#pragma unroll
    for (int k = 0; k < 2 * GROUP; k++) part[k][t] = sums[k];
    for (int half = THREADS / c.lanes / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half)
#pragma unroll
            for (int k = 0; k < 2 * GROUP; k++) part[k][t] += part[k][t + half * c.lanes];
    }
#pragma unroll
    for (int k = 0; k < 2 * GROUP; k++) sums[k] = part[k][t];
}

template <typename real, typename T, la_curve CURVE, bool WHOLE>
static __global__
__launch_bounds__(THREADS, sizeof(real) == 8 ? 1
                           : WHOLE           ? 3
                                   : 2) void gate_gradients(const __grid_constant__ gate_call c)
{
    const gate_place at = place_in(c);
    real rate[GROUP], bias[GROUP];
    int64_t place_x[GROUP], place_d[GROUP];
    double sums[2 * GROUP] = {};
    load_parameters<WHOLE>(c, at, rate, bias);
    columns_at<WHOLE>(c, c.x, at, place_x);
    columns_at<WHOLE>(c, c.d, at, place_d);
    for (int64_t r = at.first; r < at.last; r += PAIR * at.step) {
        group<T> x[PAIR];
        group<real> d[PAIR];
#pragma unroll
        for (int b = 0; b < PAIR; b++) {
            const int64_t row = r + b * at.step;
            if (row >= at.last) break;
            load_group<WHOLE>(x[b], c.x.data, row_at(c, c.x, row), place_x, at.left);
            const int64_t of_d = row_at(c, c.d, row);
            if (WHOLE) {
                load_group<true>(d[b], c.d.data, of_d, place_d, at.left);
            } else {
#pragma unroll
                for (int e = 0; e < GROUP; e++)
                    d[b].x[e] =
                        e < at.left
                            ? load<real>(c.d.data + (of_d + place_d[e]) * la_size_of(c.d.dtype),
                                         c.d.dtype)
                            : 0;
            }
        }
#pragma unroll
        for (int b = 0; b < PAIR; b++) {
            const int64_t row = r + b * at.step;
            real du[GROUP];
            if (row >= at.last) break;
#pragma unroll
            for (int e = 0; e < GROUP; e++) {
                real along;
                du[e] = curve_gradient(d[b].x[e], real_of<real>(x[b].x[e]) + bias[e], rate[e],
                                       CURVE, (real)c.factor, &along);
                sums[e] += (double)along;
                sums[GROUP + e] += (double)du[e];
            }
            store_group<WHOLE, T>(c.to, row * c.columns + at.column, du, at.left);
        }
    }
    if (!c.d_rate && !c.d_bias) return;
    add_up_rows(c, sums);
    if ((int)threadIdx.x >= c.lanes) return;
#pragma unroll
    for (int e = 0; e < GROUP; e++) {
        const int64_t to = at.chunk * c.columns + at.column + e;
        if (e < at.left && c.d_rate) c.d_rate[to] = sums[e];
        if (e < at.left && c.d_bias) c.d_bias[to] = sums[GROUP + e];
    }
}

/* The gradient of a parameter with [own_P][own_Q] numbers, each P, or Q, or 1: the sum over
 * chunks, and over the columns that one number serves. `across` numbers of it have a block. */
struct gate_sum {
    const double *from; /* [chunks][P][Q] */
    char *to;
    la_dtype dtype;
    int64_t chunks, P, Q, own_P, own_Q;
    int across;
};

static __global__ __launch_bounds__(THREADS) void sum_of_chunks(const __grid_constant__ gate_sum c)
{
    __shared__ running part[THREADS];
    const int t = (int)threadIdx.x, row = t / c.across, rows = THREADS / c.across;
    const int64_t i = (int64_t)blockIdx.x * c.across + t % c.across;
    const bool there = i < c.own_P * c.own_Q;
    const int64_t of_P = c.own_P == 1 ? c.P : 1, of_Q = c.own_Q == 1 ? c.Q : 1;
    running sum = {};
    for (int64_t k = row; there && k < c.chunks * of_P * of_Q; k += rows) {
        const int64_t rest = k % (of_P * of_Q);
        const int64_t p = c.own_P == 1 ? rest / of_Q : i / c.own_Q;
        const int64_t q = c.own_Q == 1 ? rest % of_Q : i % c.own_Q;
        sum.add(c.from[(k / (of_P * of_Q) * c.P + p) * c.Q + q]);
    }
    part[t] = sum;
    for (int half = rows / 2; half > 0; half /= 2) {
        __syncthreads();
        if (row < half) {
            part[t].add(part[t + half * c.across].sum);
            part[t].lost += part[t + half * c.across].lost;
        }
    }
    if (there && row == 0) store(c.to + i * la_size_of(c.dtype), c.dtype, part[t].total());
}

/* ---- launches ---- */

static bool is_aligned(const void *data, int64_t size)
{
    return (uintptr_t)data % (uintptr_t)(size * GROUP > 16 ? 16 : size * GROUP) == 0;
}

/* Do groups lie side by side and aligned? */
static bool lies_in_groups(const gate_call &c, const la_gate_numbers &x)
{
    if (!is_aligned(x.data, la_size_of(x.dtype)) || c.Q % GROUP) return false;
    if (c.columns > c.Q && x.head % GROUP) return false;
    for (int i = 0; i < 3; i++)
        if (c.lead[i] > 1 && x.lead[i] % GROUP) return false;
    return true;
}

/* Without parameters all numbers are alike: rows of a power of two, so that groups are whole. */
static void cut_into_rows(gate_call *c)
{
    int64_t Q = 1;
    while (Q < THREADS * GROUP && c->rows % (2 * Q) == 0) Q *= 2;
    if (Q < GROUP) Q = c->rows;
    c->lead[2] = c->rows = c->rows / Q;
    c->Q = c->columns = c->x.lead[2] = c->d.lead[2] = Q;
}

/* Returns the number of chunks. */
static int64_t share_out(gate_call *c, bool sums)
{
    const int64_t groups = div_up(c->columns, GROUP);
    for (c->lanes = 1; c->lanes < groups && c->lanes < THREADS;) c->lanes *= 2;
    const int64_t column_blocks = div_up(groups, c->lanes), step = THREADS / c->lanes;
    const int64_t wanted = (sums ? BLOCKS_WITH_SUMS : MANY_BLOCKS) / column_blocks;
    int64_t each = div_up(div_up(c->rows, step), wanted > 0 ? wanted : 1);
    if (!sums && each > MOST_ROWS) each = MOST_ROWS;
    if (sums && each < 2 * PAIR) each = 2 * PAIR;
    c->rows_of_block = each * step;
    c->column_blocks = (int)column_blocks;
    return div_up(c->rows, c->rows_of_block);
}

template <typename real, typename T, la_curve CURVE>
static cudaError_t start(const gate_call &c, bool backward, int64_t chunks, cudaStream_t stream)
{
    bool whole = lies_in_groups(c, c.x) && is_aligned(c.to, backward ? sizeof(T) : sizeof(real));
    if (backward) whole = whole && lies_in_groups(c, c.d) && la_size_of(c.d.dtype) == sizeof(real);
    const auto kernel =
        backward
            ? (whole ? gate_gradients<real, T, CURVE, true> : gate_gradients<real, T, CURVE, false>)
            : (whole ? gate_values<real, T, CURVE, true> : gate_values<real, T, CURVE, false>);
    return launch(kernel, chunks * c.column_blocks, THREADS, 0, stream, c);
}

template <typename real, typename T>
static cudaError_t start(la_curve curve, const gate_call &c, bool backward, int64_t chunks,
                         cudaStream_t stream)
{
    return curve == LA_SOFTPLUS ? start<real, T, LA_SOFTPLUS>(c, backward, chunks, stream)
                                : start<real, T, LA_SIGMOID>(c, backward, chunks, stream);
}

static cudaError_t start_any(const la_gating &j, const gate_call &c, int64_t chunks,
                             cudaStream_t stream)
{
    const bool backward = j.d != NULL;
    switch (c.x.dtype) {
    case LA_F64: return start<double, double>(j.curve, c, backward, chunks, stream);
    case LA_F32: return start<float, float>(j.curve, c, backward, chunks, stream);
    case LA_F16: return start<float, __half>(j.curve, c, backward, chunks, stream);
    default: return start<float, __nv_bfloat16>(j.curve, c, backward, chunks, stream);
    }
}

static cudaError_t add_up(const la_gating &j, const la_gate_parameter &a, const double *sums,
                          int64_t chunks, cudaStream_t stream)
{
    enum { MANY = 1024, ACROSS = 32 };
    if (!a.gradient) return cudaSuccess;
    int across = ACROSS;
    if (a.count < MANY) across = 1; /* all threads for one sum */
    const gate_sum c = {sums, a.gradient,           a.given->dtype,       chunks, j.P,
                        j.Q,  a.dense[0] ? j.P : 1, a.dense[1] ? j.Q : 1, across};
    return launch(sum_of_chunks, div_up(a.count, across), THREADS, 0, stream, c);
}

/* The gradients of parameters of which no number is read: sums of nothing. */
static cudaError_t of_nothing(const la_gating &j, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    for (const la_gate_parameter *a : {&j.rate, &j.bias})
        if (a->gradient && a->count && error == cudaSuccess)
            error = cudaMemsetAsync(a->gradient, 0, (size_t)a->count * la_size_of(a->given->dtype),
                                    stream);
    return error;
}

static gate_call call_of(const la_gating &j)
{
    gate_call c = {};
    c.x = j.from;
    c.d = j.df;
    c.to = j.to;
    c.factor = j.factor;
    c.rows = j.rows;
    c.Q = j.Q;
    c.columns = j.P * j.Q;
    for (int i = 0; i < 3; i++) c.lead[i] = j.lead[i];
    if (j.A_log) {
        c.A_log = j.A_log->data;
        c.A_dtype = j.A_log->dtype;
    }
    if (j.dt_bias) {
        c.dt_bias = j.dt_bias->data;
        c.bias_dtype = j.dt_bias->dtype;
    }
    for (int i = 0; i < 2; i++) {
        c.A_stride[i] = j.rate.stride[i];
        c.bias_stride[i] = j.bias.stride[i];
    }
    return c;
}

cudaError_t run_gating(const la_gating &j, cudaMemPool_t pool, cudaStream_t stream)
{
    if (!j.count) return of_nothing(j, stream);
    gate_call c = call_of(j);
    if (j.dense && !j.A_log && !j.dt_bias) cut_into_rows(&c);
    const bool rate = j.rate.gradient != NULL, bias = j.bias.gradient != NULL;
    const int64_t chunks = share_out(&c, rate || bias), numbers = chunks * c.columns;
    void *held = NULL;
    cudaError_t error = cudaSuccess;
    if (rate || bias)
        error = cudaMallocFromPoolAsync(&held, (size_t)(numbers * (rate + bias)) * sizeof(double),
                                        pool, stream);
    if (error != cudaSuccess) return error;
    if (rate) c.d_rate = (double *)held;
    if (bias) c.d_bias = (double *)held + (rate ? numbers : 0);
    error = start_any(j, c, chunks, stream);
    if (error == cudaSuccess) error = add_up(j, j.rate, c.d_rate, chunks, stream);
    if (error == cudaSuccess) error = add_up(j, j.bias, c.d_bias, chunks, stream);
    const cudaError_t freed = held ? cudaFreeAsync(held, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}
