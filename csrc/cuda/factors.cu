/* Gradients of the factors of values: a weight of each token's write, or a gate of each value that
 * is written; and of a skip, by which a read has its own token's value. Was
 *
 *     u = weight v, or gate v        S <- a S + k u'        o = scale (S' q + skip v)
 *
 * The backward pass of the rule takes u for v, and leaves du in the place of dv. Then
 *
 *     dv = weight du + scale skip do,  or gate du    dweight = du . v    dgate = du v
 *     dskip = scale times the sum over tokens of do . v
 *
 * `make_written` comes before it, and `undo_factors` after it: each reads its arrays once. */
#include "kernels.cuh"
#include "load.cuh"

enum {
    ROW_LANES = 8, /* of a row of values */
    FACTOR_THREADS = 256,
    ROWS_AT_ONCE = FACTOR_THREADS / ROW_LANES,
    LEAST_ROWS = 4 * ROWS_AT_ONCE, /* of a block, if the sequence has them */
    SKIP_HEADS = 32,               /* of a block of sum_skips, which has 8 threads for each */
    SKIP_THREADS = 256,
    MOST_SKIP_PARTS = 64
};

/* An array [B,T,HV,V] or [B,T,HV] with strides in bytes. The product with the size of a number, for
 * each row, would be most of a kernel's instructions. */
struct byte_view {
    char *data; /* NULL: the array is not given */
    int64_t row, token, head, column;
    la_dtype dtype;
};

static byte_view in_bytes(const view &x)
{
    const int64_t size = la_size_of(x.dtype);
    return {x.data, x.stride[0] * size, x.stride[1] * size, x.stride[2] * size,
            x.stride[3] * size, x.dtype};
}

struct factor_views {
    byte_view v, weight, gate, written;    /* written: u */
    byte_view d_o, dv, dweight, dgate;     /* dv: du before */
    view skip, dskip;
    double *of_rows, *of_parts; /* of dskip: [B T][HV]; [parts][HV] */
    double scale;               /* of reads */
    int64_t of_tokens;          /* B T */
    int T, HV, V, parts;
    int tokens;     /* of a block */
    unsigned by_HV; /* i / HV is the upper half of i by_HV, for the rows of a block; or 0 */
};

/* The rows of a block: all heads of some tokens. */
struct block_of_rows {
    int b, first, rows, HV; /* first: token */
    unsigned by_HV;

    __device__ block_of_rows(const factor_views &f) : HV(f.HV), by_HV(f.by_HV)
    {
        const int blocks = (f.T + f.tokens - 1) / f.tokens;
        b = blockIdx.x / blocks;
        first = blockIdx.x % blocks * f.tokens;
        rows = min(f.tokens, f.T - first) * HV;
    }
    __device__ __forceinline__ int token_of(int i) const
    {
        return by_HV ? (int)__umulhi((unsigned)i, by_HV) : i / HV;
    }
    /* Element (token, head, column) of row i. */
    __device__ __forceinline__ char *at_row(const byte_view &x, int i, int column = 0) const
    {
        const int t = token_of(i);
        return x.data + (b * x.row + first * x.token) + t * x.token + (i - t * HV) * x.head +
               column * x.column;
    }
};

template <typename T> struct piece_of {
    enum { SIZE = 16 / sizeof(T) };
    T x[SIZE];
};

/* PIECES: rows can be read in pieces of 16 bytes. */
template <bool PIECES, typename T>
__device__ __forceinline__ piece_of<T> load_piece(const byte_view &x, const char *from, int there)
{
    union {
        uint4 bits;
        piece_of<T> of;
    } y;
    if (PIECES) {
        y.bits = *(const uint4 *)from;
        return y.of;
    }
    y.bits = make_uint4(0, 0, 0, 0);
    for (int j = 0; j < piece_of<T>::SIZE && j < there; j++)
        y.of.x[j] = *(const T *)(from + j * x.column);
    return y.of;
}

template <bool PIECES, typename T>
__device__ __forceinline__ void store_piece(const byte_view &x, char *to, int there,
                                            const piece_of<T> &of)
{
    if (PIECES) {
        union {
            piece_of<T> of;
            uint4 bits;
        } y;
        y.of = of;
        *(uint4 *)to = y.bits;
    } else
        for (int j = 0; j < piece_of<T>::SIZE && j < there; j++)
            *(T *)(to + j * x.column) = of.x[j];
}

template <typename T, typename real> __device__ __forceinline__ real wide(T x)
{
    if constexpr (sizeof(T) == 8)
        return x;
    else
        return (real)(float)x;
}

template <typename real>
__device__ __forceinline__ real weight_of_row(const factor_views &f, const block_of_rows &r, int i)
{
    return f.weight.data ? load<real>(r.at_row(f.weight, i), f.weight.dtype) : 1;
}

template <bool PIECES, typename T, typename real>
static __global__ void __launch_bounds__(FACTOR_THREADS)
    make_written(const __grid_constant__ factor_views f)
{
    enum { SIZE = piece_of<T>::SIZE };
    const block_of_rows r(f);
    const int first_column = threadIdx.x % ROW_LANES * SIZE;
#pragma unroll(PIECES ? 2 : 1)
    for (int i = threadIdx.x / ROW_LANES; i < r.rows; i += ROWS_AT_ONCE) {
        const real weight = weight_of_row<real>(f, r, i);
        for (int column = first_column; column < f.V; column += ROW_LANES * SIZE) {
            const int there = f.V - column;
            piece_of<T> x = load_piece<PIECES, T>(f.v, r.at_row(f.v, i, column), there);
            if (f.gate.data) {
                const piece_of<T> by =
                    load_piece<PIECES, T>(f.gate, r.at_row(f.gate, i, column), there);
#pragma unroll
                for (int j = 0; j < SIZE; j++)
                    x.x[j] = (T)(wide<T, real>(by.x[j]) * wide<T, real>(x.x[j]));
            } else {
#pragma unroll
                for (int j = 0; j < SIZE; j++) x.x[j] = (T)(weight * wide<T, real>(x.x[j]));
            }
            store_piece<PIECES, T>(f.written, r.at_row(f.written, i, column), there, x);
        }
    }
}

template <bool PIECES, typename T, typename real>
static __global__ void __launch_bounds__(FACTOR_THREADS, 3)
    undo_factors(const __grid_constant__ factor_views f)
{
    enum { SIZE = piece_of<T>::SIZE };
    const block_of_rows r(f);
    const int first_column = threadIdx.x % ROW_LANES * SIZE;
    /* all lanes of a warp go through the loop as often, for the sums over lanes */
#pragma unroll(PIECES ? 2 : 1)
    for (int first = 0; first < r.rows; first += ROWS_AT_ONCE) {
        const int own = first + (int)threadIdx.x / ROW_LANES, i = min(own, r.rows - 1);
        const real weight = weight_of_row<real>(f, r, i);
        real of_weight = 0, of_skip = 0, skip = 0;
        if (f.skip.data)
            skip = (real)f.scale *
                   load<real>(at(f.skip, i - r.token_of(i) * f.HV), f.skip.dtype);
        for (int column = first_column; column < f.V; column += ROW_LANES * SIZE) {
            const int there = own < r.rows ? f.V - column : 0;
            char *const to = r.at_row(f.dv, i, column);
            const piece_of<T> du = load_piece<PIECES, T>(f.dv, to, f.V - column);
            const piece_of<T> v =
                load_piece<PIECES, T>(f.v, r.at_row(f.v, i, column), f.V - column);
            real x[SIZE];
            if (f.gate.data) {
                const piece_of<T> by =
                    load_piece<PIECES, T>(f.gate, r.at_row(f.gate, i, column), f.V - column);
                piece_of<T> of_gate;
#pragma unroll
                for (int j = 0; j < SIZE; j++) {
                    x[j] = wide<T, real>(by.x[j]) * wide<T, real>(du.x[j]);
                    of_gate.x[j] = (T)(wide<T, real>(du.x[j]) * wide<T, real>(v.x[j]));
                }
                if (there > 0)
                    store_piece<PIECES, T>(f.dgate, r.at_row(f.dgate, i, column), there, of_gate);
            } else {
#pragma unroll
                for (int j = 0; j < SIZE; j++) {
                    x[j] = weight * wide<T, real>(du.x[j]);
                    of_weight += wide<T, real>(du.x[j]) * wide<T, real>(v.x[j]);
                }
            }
            if (f.skip.data) {
                const piece_of<T> d_o =
                    load_piece<PIECES, T>(f.d_o, r.at_row(f.d_o, i, column), f.V - column);
#pragma unroll
                for (int j = 0; j < SIZE; j++) {
                    x[j] += skip * wide<T, real>(d_o.x[j]);
                    of_skip += wide<T, real>(d_o.x[j]) * wide<T, real>(v.x[j]);
                }
            }
            piece_of<T> dv;
#pragma unroll
            for (int j = 0; j < SIZE; j++) dv.x[j] = (T)x[j];
            if (there > 0) store_piece<PIECES, T>(f.dv, to, there, dv);
        }
#pragma unroll
        for (int step = 1; step < ROW_LANES; step *= 2) {
            of_weight += __shfl_xor_sync(~0u, of_weight, step);
            of_skip += __shfl_xor_sync(~0u, of_skip, step);
        }
        if (own >= r.rows || first_column) continue;
        if (f.dweight.data) store(r.at_row(f.dweight, i), f.dweight.dtype, of_weight);
        if (f.of_rows) f.of_rows[((int64_t)r.b * f.T + r.first) * f.HV + i] = of_skip;
    }
}

/* A block adds up a part of the tokens, of SKIP_HEADS heads. */
static __global__ void __launch_bounds__(SKIP_THREADS)
    sum_skips(const __grid_constant__ factor_views f)
{
    enum { SHARES = SKIP_THREADS / SKIP_HEADS };
    __shared__ double sums[SHARES][SKIP_HEADS];
    const int part = blockIdx.x % f.parts, head = threadIdx.x % SKIP_HEADS,
              share = threadIdx.x / SKIP_HEADS;
    const int hv = blockIdx.x / f.parts * SKIP_HEADS + head;
    const int64_t tokens = f.of_tokens;
    double sum = 0;
    for (int64_t i = (int64_t)part * SHARES + share; i < tokens && hv < f.HV;
         i += (int64_t)f.parts * SHARES)
        sum += f.of_rows[i * f.HV + hv];
    sums[share][head] = sum;
    __syncthreads();
    if (share || hv >= f.HV) return;
    for (int i = 1; i < SHARES; i++) sum += sums[i][head];
    f.of_parts[(int64_t)part * f.HV + hv] = sum;
}

static __global__ void join_skips(const __grid_constant__ factor_views f)
{
    const int hv = blockIdx.x * blockDim.x + threadIdx.x;
    if (hv >= f.HV) return;
    double sum = 0;
    for (int i = 0; i < f.parts; i++) sum += f.of_parts[(int64_t)i * f.HV + hv];
    store(at(f.dskip, hv), f.dskip.dtype, f.scale * sum);
}

/* A kernel by the dtype of the values. */
#define BY_DTYPE(kernel, pieces, dtype) \
    ((dtype) == LA_F64   ? kernel<pieces, double, double> \
     : (dtype) == LA_F32 ? kernel<pieces, float, float> \
     : (dtype) == LA_F16 ? kernel<pieces, __half, float> \
                         : kernel<pieces, __nv_bfloat16, float>)

bool has_factors(const call &c)
{
    return c.x[LA_WEIGHT].data || c.x[LA_W].data || c.x[LA_SKIP].data;
}

cudaError_t with_factors(const call &given, const gradients &given_d, const la_problem *p,
                         plain_backward run, cudaMemPool_t pool, cudaStream_t stream)
{
    call c = given; /* as the rule has it */
    gradients d = given_d;
    for (la_name name : {LA_WEIGHT, LA_W, LA_SKIP}) c.x[name] = {};
    for (la_name name : {LA_DWEIGHT, LA_DW, LA_DSKIP}) d[name] = {};
    if (c.states_only) return run(p, c, d, pool); /* they depend on no value */

    const la_dtype dtype = given.x[LA_V].dtype;
    const int size = (int)la_size_of(dtype);
    const int64_t tokens = (int64_t)c.B * c.T, rows = tokens * c.HV,
                  row = div_up((int64_t)c.V * size, 16) * 16 / size;
    const int64_t blocks = c.B * div_up(c.T, div_up(LEAST_ROWS, c.HV));
    const bool multiplies = given.x[LA_WEIGHT].data || given.x[LA_W].data,
               skips = given.x[LA_SKIP].data;
    factor_views f = {};
    f.v = in_bytes(given.x[LA_V]);
    f.weight = in_bytes(given.x[LA_WEIGHT]);
    f.gate = in_bytes(given.x[LA_W]);
    f.skip = given.x[LA_SKIP];
    f.d_o = in_bytes(given_d[LA_DO]);
    f.dv = in_bytes(given_d[LA_DV]);
    f.dweight = in_bytes(given_d[LA_DWEIGHT]);
    f.dgate = in_bytes(given_d[LA_DW]);
    f.dskip = given_d[LA_DSKIP];
    f.scale = c.scale;
    f.of_tokens = tokens;
    f.T = c.T, f.HV = c.HV, f.V = c.V;
    f.tokens = (int)div_up(LEAST_ROWS, c.HV);
    /* 2^32 / HV is rounded up by less than 1, and i HV is below 2^32 */
    f.by_HV = c.HV > 1 && c.HV < 1 << 15 ? (unsigned)((1ull << 32) / c.HV) + 1 : 0;
    f.parts = (int)max((int64_t)1, min(div_up(tokens, 64), (int64_t)MOST_SKIP_PARTS));
    bool pieces = (int64_t)c.V * size % 16 == 0;
    for (const byte_view *x : {&f.v, &f.gate, &f.d_o, &f.dv, &f.dgate})
        pieces &= !x->data || (x->column == size && (uintptr_t)x->data % 16 == 0 &&
                               (x->row | x->token | x->head) % 16 == 0);

    const int64_t of_rows = skips ? rows * 8 : 0,
                  of_parts = skips ? (int64_t)f.parts * c.HV * 8 : 0;
    const int64_t bytes = of_rows + of_parts + (multiplies ? rows * row * size : 0);
    char *room = NULL;
    cudaError_t error = cudaSuccess;
    if (bytes) error = cudaMallocFromPoolAsync((void **)&room, (size_t)bytes, pool, stream);
    if (error != cudaSuccess) return error;
    if (multiplies) {
        const int64_t of_token = c.HV * row;
        c.x[LA_V] = {room, {c.T * of_token, of_token, row, 1}, dtype};
        f.written = in_bytes(c.x[LA_V]);
        error = launch(pieces ? BY_DTYPE(make_written, true, dtype)
                              : BY_DTYPE(make_written, false, dtype),
                       blocks, FACTOR_THREADS, 0, stream, f);
    }
    if (skips) {
        f.of_rows = (double *)(room + bytes - of_rows - of_parts);
        f.of_parts = f.of_rows + rows;
    }
    if (error == cudaSuccess) error = run(p, c, d, pool);
    if (error == cudaSuccess)
        error = launch(pieces ? BY_DTYPE(undo_factors, true, dtype)
                              : BY_DTYPE(undo_factors, false, dtype),
                       blocks, FACTOR_THREADS, 0, stream, f);
    if (error == cudaSuccess && skips)
        error = launch(sum_skips, div_up(c.HV, SKIP_HEADS) * f.parts, SKIP_THREADS, 0, stream, f);
    if (error == cudaSuccess && skips)
        error = launch(join_skips, div_up(c.HV, 256), 256, 0, stream, f);
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}
