/* A causal convolution as kernels take it, and one number of it: for the room's kernels, and for the
 * step of a layer (layer.cu). */
#ifndef LINATTN_CUDA_CONVOLUTION_CUH
#define LINATTN_CUDA_CONVOLUTION_CUH

#include "rooms.cuh"

extern "C" {
#include "../convolution.h"
}

struct convolution_call {
    room_call room;
    view x[LA_CONVOLUTION_ARRAYS],
        d[LA_CONVOLUTION_ARRAYS]; /* d: gradients, those of outputs included */
    int W, older; /* older: inputs in the state of a step before the last W - 1 */
    bool silu, fours, along;
    int run;      /* tokens of a thread */
    int parts;    /* of all tokens */
    double *sums; /* [parts][W + 1][D]: of the taps, from the token's own on, and of the bias */
};

/* ---- one number ---- */

/* Input p of the sequence's row, counted as tokens are; those before the first one are the state's. */
template <typename real>
__device__ __forceinline__ real input_at(const convolution_call &c, const sequence &s, int p, int d)
{
    const view &x = c.x[LA_CONVOLUTION_X], &S = c.x[LA_CONVOLUTION_S0];
    if (p >= s.begin) return load<real>(at(x, s.b, p, d), x.dtype);
    return S.data ? load<real>(at(S, s.state, d, p - s.begin + c.W - 1 + c.older), S.dtype) : 0;
}

/* Tap i belongs to the input i tokens ago. */
template <typename real>
__device__ __forceinline__ real tap_at(const convolution_call &c, int i, int d)
{
    const view &weight = c.x[LA_CONVOLUTION_WEIGHT];
    return load<real>(at(weight, d, c.W - 1 - i), weight.dtype);
}

template <typename real> __device__ __forceinline__ real bias_at(const convolution_call &c, int d)
{
    const view &bias = c.x[LA_CONVOLUTION_BIAS];
    return bias.data ? load<real>(at(bias, d), bias.dtype) : 0;
}

template <typename real>
__device__ __forceinline__ real sum_at(const convolution_call &c, const sequence &s, int t, int d)
{
    real z = bias_at<real>(c, d);
    for (int i = 0; i < c.W; i++) z += tap_at<real>(c, i, d) * input_at<real>(c, s, t - i, d);
    return z;
}

/* y = silu(z), or z. */
template <typename real>
__device__ __forceinline__ real activated(const convolution_call &c, real z)
{
    return c.silu ? silu_for(c.x[LA_CONVOLUTION_Y].dtype, z) : z;
}

/* One token of channel d of a row, whose state moves on. */
template <typename real>
__device__ __forceinline__ void convolve_token(const convolution_call &c, int n, int d)
{
    const sequence s = sequence_of(c.room, n);
    const view &S = c.x[LA_CONVOLUTION_S0], &y = c.x[LA_CONVOLUTION_Y];
    real z = 0;
    if (s.state >= 0) {
        z = sum_at<real>(c, s, 0, d);
        for (int m = -c.older; m < c.W - 1; m++) /* each place is written after it was read */
            store(at(S, s.state, d, m + c.older), S.dtype, input_at<real>(c, s, m + 2 - c.W, d));
        z = activated(c, z);
    }
    store(at(y, s.b, 0, d), y.dtype, z);
}

/* A call without what its kernels settle. */
static inline convolution_call convolution_call_of(const la_room_job &job)
{
    const la_convolution &j = (const la_convolution &)job;
    convolution_call c = {};
    c.room = room_of(job, j.B, j.T, j.D, j.S);
    c.W = (int)j.W;
    c.older = (int)j.older;
    c.silu = j.silu;
    take_views(job, c.x, c.d);
    return c;
}

#endif
