/* A checked problem as the kernels take it: one plain struct, passed by value.
 *
 * Letters as in linattn.h. A view is an array in its canonical letters, strides in elements, stride
 * 0 for a letter the user left out. */
#ifndef LINATTN_CUDA_CALL_CUH
#define LINATTN_CUDA_CALL_CUH

#include <cuda_runtime.h>

extern "C" {
#include "../linattn.h"
}

struct view {
    char *data; /* NULL: not given */
    int64_t stride[LA_MAX_DIMS];
    la_dtype dtype;
};

struct call {
    view q, k, v, g, beta, o; /* B T H K, B T HV V, B T HV K, B T HV */
    view s0, z0, st, zt;      /* N HV K V, N HV K */
    view cu;                  /* N+1; NULL: sequence n is batch row n */
    view slot;                /* B: which of P states is a step's row's; NULL: row n has state n */
    int B, T, H, HV, K, V, N, P;
    la_gate gate;
    la_map map[2];
    double map_eps[2];
    la_normaliser normaliser;
    double scale, eps;
    bool qk_l2norm, causal;
};

/* What a backward has besides. Gradients in have the shapes of o, st, zt; gradients out, of the inputs
 * they are named after. */
struct gradients {
    view d_o, dst, dzt;
    view dq, dk, dv, dg, dbeta, ds0, dz0;
    la_gate gate;  /* as the caller gave it: carried over from the host, slopes are decays by now */
    bool per_head; /* g is one number for all tokens: [HV] */
};

/* One sequence of one value head. */
struct unit {
    int n, b, h, hv;
    int begin, end; /* its tokens in batch row b */
};

/* cu_seqlens has not been seen by the host, so whatever it says is kept within the T tokens there are. */
__device__ inline int edge_of(const call &c, int n)
{
    const int64_t at = n * c.cu.stride[0];
    const int64_t x = c.cu.dtype == LA_I64 ? ((const int64_t *)c.cu.data)[at]
                                           : ((const int32_t *)c.cu.data)[at];
    return (int)min(max(x, (int64_t)0), (int64_t)c.T);
}

/* Where sequence n lies. */
__device__ inline unit unit_of(const call &c, int n, int hv)
{
    unit u = {n, n, hv / (c.HV / c.H), hv, 0, c.T};
    if (!c.cu.data) return u;
    u.b = 0;
    u.begin = edge_of(c, n);
    u.end = max(u.begin, edge_of(c, n + 1));
    return u;
}

/* What is kept of every M tokens of a sequence lies in slots: how many there are, and where sequence n's
 * begin, which must be known without the lengths of those before it. So each may leave one slot unused:
 * floor(end / M) - floor(start / M) + 1 >= ceil((end - start) / M). */
static inline int64_t slots_of(const call &c, int M)
{
    return c.cu.data ? c.T / M + c.N : (int64_t)c.N * (((int64_t)c.T + M - 1) / M);
}

__device__ inline int64_t first_slot(const call &c, int n, int M)
{
    return c.cu.data ? edge_of(c, n) / M + n : (int64_t)n * ((c.T + M - 1) / M);
}

/* Where row n's state is; -1: nowhere. state_indices has not been seen by the host, so whatever lies
 * outside the pool is nowhere too. */
__device__ __forceinline__ int slot_of(const call &c, int n)
{
    if (!c.slot.data) return n;
    const int64_t i = n * c.slot.stride[0];
    const int64_t slot = c.slot.dtype == LA_I64 ? ((const int64_t *)c.slot.data)[i]
                                                : ((const int32_t *)c.slot.data)[i];
    return slot >= 0 && slot < c.P ? (int)slot : -1;
}

#endif
