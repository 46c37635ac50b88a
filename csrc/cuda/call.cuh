/* A checked problem as the kernels take it: a plain struct, passed by value. A backward pass has a
 * second one for its gradients, so that the other passes hand over no views that they do not use. A
 * view has 48 bytes; all parameters of a kernel may have 4 KiB.
 *
 * The letters are those of linattn.h. A view is an array in its canonical letters, with strides in
 * elements. The stride is 0 for a letter that the user left out. arrays.def names the arrays and
 * their letters. */
#ifndef LINATTN_CUDA_CALL_CUH
#define LINATTN_CUDA_CALL_CUH

#include <cuda_runtime.h>

extern "C" {
#include "../linattn.h"
}

struct view {
    char *data; /* NULL: the array is not given */
    int64_t stride[LA_MAX_DIMS];
    la_dtype dtype;
};

/* The arrays of arrays.def without their gradients, which follow them in la_name. */
#define LA_ARRAY(...) +1
#define LA_INDEX(...) +1
#define LA_RESULT(...) +1
static constexpr int ARRAYS = 0
#include "../arrays.def"
    ;
static_assert(ARRAYS == (int)LA_DQ, "the gradients follow the arrays");

/* c.x[LA_Q] is the view of q. An operator [] would cost chunks_forward 5 to 12 % more code:
 * behind it nvcc 13.0 loads the strides of a state again for each element. The new states of a
 * step lie over its initial ones. Without cu_seqlens sequence n is batch row n. Without
 * state_indices row n of a step has state n; with them it has one of P states. */
struct call {
    view x[ARRAYS];
    int B, T, H, HV, K, V, N, P;
    int batch;         /* PAIR: tokens that predict from one memory */
    int queries, keys; /* tokens of q, of k and v: both T, unless a noncausal call has others */
    la_gate gate;
    la_map map[2];
    double map_eps[2];
    la_normaliser normaliser;
    double scale, eps;
    bool qk_l2norm, causal, predicts_before, x_is_factor;
    bool states_only; /* no o, and of the gradients those of first states alone */
};

enum { OF_DO, OF_STATES, AS_GIVEN, NUMBERS_OF_RANGE };

/* The range of float16 gradients in chunks, on the device (gradient_range.cuh). */
struct gradient_range {
    /* Bits of the largest numbers of a turn: of do over the divisors of a normaliser, of the
     * gradients of states, and of do as the caller gave it. */
    int most[NUMBERS_OF_RANGE];
    float up, down; /* powers of two: factors of incoming gradients, and of results */
    /* some result is no finite number, do is too small beside the others, or divisors are too far
     * apart */
    int broken;
};

/* Has the call been made in chunks, and was it in range? */
__device__ __forceinline__ bool is_needless(const gradient_range *range)
{
    return range && !range->broken;
}

/* The gradients of a backward pass: d[LA_DQ] is the view of dq. The code of no kernel grows by this
 * operator. */
struct gradients {
    view x[LA_ARRAYS - ARRAYS];
    gradient_range *range; /* NULL: none. Token by token: work only if it is broken */
    la_gate gate;  /* how the caller gave the gate: an uploaded slope is a decay in call.gate */
    bool per_head; /* the gate is one number for all tokens: [HV] */

    __host__ __device__ view &operator[](la_name name) { return x[name - ARRAYS]; }
    __host__ __device__ const view &operator[](la_name name) const { return x[name - ARRAYS]; }
};

/* One sequence of one value head. */
struct unit {
    int n, b, h, hv;
    int begin, end; /* its tokens in batch row b */
};

/* The host has not seen cu_seqlens, so the kernels keep its values within 0 and T. */
__device__ inline int edge_of(const call &c, int n)
{
    const view &cu = c.x[LA_CU];
    const int64_t x = la_integer_at(cu.data, cu.dtype, n * cu.stride[0]);
    return (int)min(max(x, (int64_t)0), (int64_t)c.T);
}

/* Where sequence n lies, and its heads. */
__device__ inline unit unit_of(const call &c, int n, int hv)
{
    unit u = {n, n, hv / (c.HV / c.H), hv, 0, c.T};
    if (!c.x[LA_CU].data) return u;
    u.b = 0;
    u.begin = edge_of(c, n);
    u.end = max(u.begin, edge_of(c, n + 1));
    return u;
}

/* Some kernels keep a tile, a state or a sum for every M tokens of a sequence, in a chunk slot. The
 * first slot of sequence n must be known without the lengths of the sequences before it. So each of
 * these may leave one slot unused: floor(end / M) - floor(start / M) + 1 >= ceil((end - start) /
 * M). */
static inline int64_t chunk_slots_of(const call &c, int M)
{
    return c.x[LA_CU].data ? c.T / M + c.N : (int64_t)c.N * (((int64_t)c.T + M - 1) / M);
}

__device__ inline int64_t first_chunk_slot(const call &c, int n, int M)
{
    return c.x[LA_CU].data ? edge_of(c, n) / M + n : (int64_t)n * ((c.T + M - 1) / M);
}

/* The index of the state of row n, or -1 for no state. The host has not seen state_indices, so an
 * index outside the pool means no state too. */
__device__ __forceinline__ int state_index_of(const call &c, int n)
{
    const view &slot = c.x[LA_SLOT];
    if (!slot.data) return n;
    const int64_t index = la_integer_at(slot.data, slot.dtype, n * slot.stride[0]);
    return index >= 0 && index < c.P ? (int)index : -1;
}

#endif
