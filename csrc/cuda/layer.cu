/* The stages around the step of an op in a layer's step (../layer.h). A token has few numbers, so a
 * launch takes about as long as it takes to start. One launch has all stages before the op, and one
 * has the norm of its output. */
#include "layer.cuh"

#include "convolution.cuh"

#define lane real
#include "../activation.h"
#undef lane

enum { THREADS = 128, LANES_OF_WARP = 32, WARPS = THREADS / LANES_OF_WARP };

/* The threads of a row of a norm: each has few numbers, whose loads follow one another. */
enum { SHORT_ROW = 128, LONG_ROW = 1024, THREADS_OF_ROW = 256, THREADS_OF_LONG_ROW = 1024 };

/* ---- before the op: convolutions and gates ---- */

enum { GATES = 3, INPUTS = LA_LAYER_CONVOLUTIONS + GATES };

/* A gate of [rows][heads][keys], which is dense in `to`. */
struct gate_of_token {
    view x, A_log, dt_bias;
    char *to;
    la_dtype dtype; /* of `to` */
    la_curve curve;
    double factor;
    int64_t count;
    int heads, keys;
};

/* A block belongs to one stage: those of stage i begin at first[i]. */
struct layer_inputs {
    convolution_call convolution[LA_LAYER_CONVOLUTIONS];
    gate_of_token gate[GATES];
    int first[INPUTS + 1];
};
static_assert(sizeof(layer_inputs) <= 4096, "a kernel has room for so many parameters");

template <typename real>
__device__ __forceinline__ void make_gate(const gate_of_token &c, int64_t i)
{
    if (i >= c.count) return;
    const int key = (int)(i % c.keys), head = (int)(i / c.keys % c.heads);
    const int64_t row = i / c.keys / c.heads;
    real u = load<real>(at(c.x, row, head, key), c.x.dtype), rate = 1;
    if (c.dt_bias.data) u += load<real>(at(c.dt_bias, head, key), c.dt_bias.dtype);
    if (c.A_log.data) rate = exp(load<real>(at(c.A_log, head), c.A_log.dtype));
    store(c.to + i * la_size_of(c.dtype), c.dtype, curve_of(u, rate, c.curve, (real)c.factor));
}

template <typename real>
static __global__
__launch_bounds__(THREADS) void make_inputs(const __grid_constant__ layer_inputs c)
{
    int stage = 0;
    while ((int)blockIdx.x >= c.first[stage + 1]) stage++;
    const int64_t i = (int64_t)((int)blockIdx.x - c.first[stage]) * THREADS + threadIdx.x;
    if (stage >= LA_LAYER_CONVOLUTIONS) {
        make_gate<real>(c.gate[stage - LA_LAYER_CONVOLUTIONS], i);
    } else {
        const convolution_call &own = c.convolution[stage];
        if (i / own.room.D < own.room.S)
            convolve_token<real>(own, (int)(i / own.room.D), (int)(i % own.room.D));
    }
}

static gate_of_token gate_call_of(const la_gating &j)
{
    gate_of_token c = {};
    c.x = view_of(j.x);
    c.A_log = view_of(j.A_log);
    c.dt_bias = view_of(j.dt_bias);
    c.to = j.to;
    c.dtype = j.real;
    c.curve = j.curve;
    c.factor = j.factor;
    c.heads = (int)j.x->shape[1];
    c.keys = (int)j.x->shape[2];
    c.count = j.x->shape[0] * c.heads * c.keys;
    return c;
}

cudaError_t run_layer_inputs(const la_layer &j, cudaStream_t stream)
{
    const la_gating *const gates[GATES] = {j.g, j.beta, j.weight};
    layer_inputs c = {};
    bool wide = false;
    int64_t blocks = 0;
    for (int i = 0; i < INPUTS; i++) {
        int64_t numbers = 0;
        if (i >= LA_LAYER_CONVOLUTIONS) {
            const la_gating *const gate = gates[i - LA_LAYER_CONVOLUTIONS];
            if (gate) {
                c.gate[i - LA_LAYER_CONVOLUTIONS] = gate_call_of(*gate);
                numbers = c.gate[i - LA_LAYER_CONVOLUTIONS].count;
                wide |= gate->real == LA_F64;
            }
        } else if (j.convolution[i]) {
            c.convolution[i] = convolution_call_of(j.convolution[i]->room);
            numbers = j.convolution[i]->S * j.convolution[i]->D;
            wide |= j.p->real == LA_F64;
        }
        c.first[i] = (int)blocks;
        blocks += div_up(numbers, THREADS);
        if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
    }
    c.first[INPUTS] = (int)blocks;
    return launch(wide ? make_inputs<double> : make_inputs<float>, blocks, THREADS, 0, stream, c);
}

/* ---- after it: the norm, its weight and the gate ---- */

struct group_norm_call {
    view weight, gate;
    const char *o;
    char *y;
    la_dtype dtype;
    la_activation activation;
    bool gate_first, shared; /* shared: rows of a token have the same weights */
    int64_t rows;
    int groups, size;
    double eps;
};

/* Number i of a row as it is normed: o, times the gate if that comes first. */
template <typename real>
__device__ __forceinline__ real normed(const group_norm_call &c, int64_t row, int i, real gate)
{
    const real o = load<real>(c.o + (row * c.size + i) * la_size_of(c.dtype), c.dtype);
    return c.gate_first ? o * gate : o;
}

template <typename real>
__device__ __forceinline__ real gate_at(const group_norm_call &c, int64_t row, int i)
{
    if (!c.gate.data) return 1;
    const char *const gate = at(c.gate, row / c.groups, row % c.groups * c.size + i);
    return activated(load<real>(gate, c.gate.dtype), c.activation);
}

/* The sum over the threads of a row: those of a warp, or of a block. */
template <int OF_ROW, typename real> __device__ __forceinline__ real sum_of_row(real x)
{
    constexpr int warps = OF_ROW / LANES_OF_WARP, lanes = LANES_OF_WARP;
    x = warp_sum(x);
    if constexpr (warps > 1) {
        __shared__ real of_warp[warps];
        const int lane = threadIdx.x % lanes;
        if (lane == 0) of_warp[threadIdx.x / lanes] = x;
        __syncthreads();
        x = warp_sum(lane < warps ? of_warp[lane] : (real)0);
    }
    return x;
}

template <typename real, int OF_ROW>
static __global__ __launch_bounds__(OF_ROW > THREADS ? OF_ROW : THREADS) void group_norm(
    const __grid_constant__ group_norm_call c)
{
    constexpr int rows = OF_ROW > THREADS ? 1 : THREADS / OF_ROW; /* of a block */
    const int64_t row = (int64_t)blockIdx.x * rows + threadIdx.x / OF_ROW;
    const int first = threadIdx.x % OF_ROW;
    if (row >= c.rows) return;
    real factor = 1;
    if (c.weight.data) {
        real sum = 0;
        for (int i = first; i < c.size; i += OF_ROW) {
            const real x = normed(c, row, i, c.gate_first ? gate_at<real>(c, row, i) : 1);
            sum += x * x;
        }
        factor = 1 / sqrt(sum_of_row<OF_ROW>(sum) / c.size + (real)c.eps);
    }
    const int column = c.shared ? 0 : (int)(row % c.groups) * c.size;
    for (int i = first; i < c.size; i += OF_ROW) {
        const real gate = gate_at<real>(c, row, i);
        real y = normed(c, row, i, gate) * factor;
        if (c.weight.data) y *= load<real>(at(c.weight, column + i), c.weight.dtype);
        if (!c.gate_first) y *= gate;
        store(c.y + (row * c.size + i) * la_size_of(c.dtype), c.dtype, y);
    }
}

template <typename real>
static cudaError_t launch_group_norm(const group_norm_call &c, cudaStream_t stream)
{
    if (c.size <= SHORT_ROW)
        return launch(group_norm<real, LANES_OF_WARP>, div_up(c.rows, WARPS), THREADS, 0, stream,
                      c);
    if (c.size <= LONG_ROW)
        return launch(group_norm<real, THREADS_OF_ROW>, c.rows, THREADS_OF_ROW, 0, stream, c);
    return launch(group_norm<real, THREADS_OF_LONG_ROW>, c.rows, THREADS_OF_LONG_ROW, 0, stream, c);
}

cudaError_t run_group_norm(const la_group_norm &j, cudaStream_t stream)
{
    group_norm_call c = {};
    c.weight = view_of(j.weight);
    c.gate = view_of(j.gate);
    c.o = j.o;
    c.y = j.y;
    c.dtype = j.dtype;
    c.activation = j.activation;
    c.gate_first = j.gate_first;
    c.shared = j.weight && j.weight->shape[0] == j.size;
    c.rows = j.rows;
    c.groups = (int)j.groups;
    c.size = (int)j.size;
    c.eps = j.eps;
    return j.real == LA_F64 ? launch_group_norm<double>(c, stream)
                            : launch_group_norm<float>(c, stream);
}
