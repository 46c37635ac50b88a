/* The launchers of the kernel files, which dispatch.cu calls: a function per kind (kinds.def). */
#ifndef LINATTN_CUDA_KERNELS_CUH
#define LINATTN_CUDA_KERNELS_CUH

#include "call.cuh"
#include "launch.cuh"

extern "C" {
#include "../gates.h"
#include "../late.h"
#include "../room.h"
}

typedef cudaError_t (*launcher)(const call &, cudaStream_t);

extern const launcher scan_f32[LA_KINDS], scan_f64[LA_KINDS];
/* By the layout of the state. Sums are float32, and K <= 256. */
extern const launcher step_kv[LA_KINDS], step_vk[LA_KINDS];

/* A gate from a projection, or its gradients. The pool is for parts of the parameters' gradients. */
cudaError_t run_gating(const la_gating &, cudaMemPool_t, cudaStream_t);

/* Late gradients. cudaErrorNotSupported, with nothing done, for arrays that the kernel cannot take. */
cudaError_t run_late(const la_late &, cudaStream_t);

/* Calls of rooms. The pool is for states and for parts of sums. */
cudaError_t run_scan(const la_room_job &, cudaMemPool_t, cudaStream_t);
cudaError_t run_convolution(const la_room_job &, cudaMemPool_t, cudaStream_t);

/* Gradients, token by token in reverse. The pool is for states and for partial sums of several
 * heads. They return cudaErrorNotSupported, with nothing done, where shared memory is too small. */
typedef cudaError_t (*backward_launcher)(const call &, const gradients &, cudaMemPool_t,
                                         cudaStream_t);
/* K <= 256 */
extern const backward_launcher adjoint_f32[LA_KINDS], adjoint_f64[LA_KINDS];
/* For 256 < K <= 512, and where shared memory is too small for those. */
extern const backward_launcher adjoint_f32_k512[LA_KINDS], adjoint_f64_k512[LA_KINDS];

/* Token by token, K <= 256: the rare kinds, and the delta rules whose x is given. NULL for others. */
extern const launcher rare_f32[LA_KINDS], rare_f64[LA_KINDS];
extern const backward_launcher rare_adjoint_f32[LA_KINDS], rare_adjoint_f64[LA_KINDS];

/* Gradients in the chunk form: bf16 arrays with K <= 128. Where shared memory is too small, and for
 * rows that cannot be copied in pieces, they return cudaErrorNotSupported and have done nothing. */
extern const backward_launcher chunk_backward_none[2], chunk_backward_token[2],
    chunk_backward_key[2];
/* The same for float16 arrays. The gradients have a range. */
extern const backward_launcher chunk_backward_none_f16[2], chunk_backward_token_f16[2],
    chunk_backward_key_f16[2];
/* A pair of states: K <= 64; K <= 128. */
extern const backward_launcher chunk_backward_pair[2], chunk_backward_pair_k256[2];
/* The same for 128 < K <= 256. */
extern const backward_launcher chunk_backward_none_k256[2], chunk_backward_token_k256[2],
    chunk_backward_key_k256[2];
extern const backward_launcher chunk_backward_none_k256_f16[2], chunk_backward_token_k256_f16[2],
    chunk_backward_key_k256_f16[2];

/* Gradients of a weight, a gate or a skip of values, around a backward pass that knows none of them
 * (factors.cu). */
typedef cudaError_t (*plain_backward)(const la_problem *, const call &, gradients &,
                                      cudaMemPool_t);
bool has_factors(const call &);
cudaError_t with_factors(const call &, const gradients &, const la_problem *, plain_backward,
                         cudaMemPool_t, cudaStream_t);

/* The end of that for a gate per head: sums over the tokens of da, [HV][B T]. */
cudaError_t reduce_gates(const call &, const gradients &, float *da, cudaStream_t);

/* The part of the gradients that goes through the normaliser, for value heads first..first + heads.
 * The denominators come before everything else. The rest follows when dq has the part that goes
 * through the numerators. */
template <typename real> struct through_z {
    /* partials are [heads][tiles]; kp: K, padded; parts: the warps of a sequence */
    int first, heads, tiles, kp, parts;
    int64_t tokens, segments; /* B T; of all sequences of a head together */
    real *dq, *dk;            /* [partials][tokens][kp] */
    real *den;                /* [heads][tokens] */
    double *z;                /* [heads][segments][kp] */
    const gradient_range *range; /* as in gradients, if this is the way token by token */
};
int64_t segments_of_keys(const call &);
cudaError_t find_denominators(const call &, through_z<float>, cudaStream_t);
cudaError_t undo_denominators(const call &, const gradients &, through_z<float>, cudaStream_t);

/* The step of many states. They return cudaErrorNotSupported, with nothing done, where step_* are
 * as fast. */
extern const launcher step_many_kv[LA_KINDS], step_many_vk[LA_KINDS];

/* The chunk form by [rule]: bf16 and float16 arrays, and float32 arrays that may be rounded, with K
 * <= 128; bf16 and float16 arrays with 128 < K <= 256 (k256). The pool is for arrays that one
 * kernel leaves to the next. They return cudaErrorNotSupported, with nothing done, where shared
 * memory is too small or where the build has no code for the device. */
typedef cudaError_t (*chunk_launcher)(const call &, cudaMemPool_t, cudaStream_t);
extern const chunk_launcher chunk_none[2], chunk_token[2], chunk_key[2];
extern const chunk_launcher chunk_pair[2], chunk_pair_k256[2]; /* as their gradients */
extern const chunk_launcher chunk_none_f16[2], chunk_token_f16[2], chunk_key_f16[2];
extern const chunk_launcher chunk_none_f32[2], chunk_token_f32[2], chunk_key_f32[2];
extern const chunk_launcher chunk_none_k256[2], chunk_token_k256[2], chunk_key_k256[2];
extern const chunk_launcher chunk_none_k256_f16[2], chunk_token_k256_f16[2], chunk_key_k256_f16[2];

/* DPLR: bf16 arrays with K <= 64; gradients where a block may have 140 KiB of shared memory. */
extern const chunk_launcher chunk_dplr;
extern const backward_launcher chunk_backward_dplr;

/* DPLR by these, or by kernels of the delta rule with a decay per key, for the same dtype and K. */
cudaError_t dplr_in_chunks(const call &, chunk_launcher delta, cudaMemPool_t, cudaStream_t);
cudaError_t dplr_gradients_in_chunks(const call &, const gradients &, backward_launcher delta,
                                     chunk_launcher forward, cudaMemPool_t, cudaStream_t);

#endif
