/* What the kernel files offer to dispatch.cu: a function per kind (kinds.def) that launches. */
#ifndef LINATTN_CUDA_KERNELS_CUH
#define LINATTN_CUDA_KERNELS_CUH

#include "call.cuh"
#include "launch.cuh"

typedef cudaError_t (*launcher)(const call &, cudaStream_t);

extern const launcher scan_f32[LA_KINDS], scan_f64[LA_KINDS];
/* By the state's layout; float32 sums, K <= 256. */
extern const launcher step_kv[LA_KINDS], step_vk[LA_KINDS];

/* Gradients, token by token in reverse; the pool is for states and for what several heads add up. */
typedef cudaError_t (*backward_launcher)(const call &, const gradients &, cudaMemPool_t,
                                         cudaStream_t);
/* K <= 256 */
extern const backward_launcher adjoint_f32[LA_KINDS], adjoint_f64[LA_KINDS];
/* 256 < K <= 512 */
extern const backward_launcher adjoint_f32_k512[LA_KINDS], adjoint_f64_k512[LA_KINDS];

/* The chunk form's, of bf16 arrays with K <= 128 on Hopper; cudaErrorNotSupported, with nothing done,
 * elsewhere and for arrays that its copy engine cannot take. */
extern const backward_launcher chunk_backward_none[2], chunk_backward_token[2],
    chunk_backward_key[2];

/* The end of it: a gate per head's, from [HV][B T]. */
cudaError_t reduce_gates(const call &, const gradients &, float *da, cudaStream_t);

/* What the normaliser adds to gradients, of value heads first..first + heads: the denominators before
 * everything else, and, when dq has what comes by way of the numerators, the rest. */
template <typename real> struct through_z {
    /* slots are [heads][tiles]; kp: K, padded; parts: warps each */
    int first, heads, tiles, kp, parts;
    int64_t tokens, segments; /* B T; of a head, all its sequences together */
    real *dq, *dk;            /* [slots][tokens][kp] */
    real *den;                /* [heads][tokens] */
    double *z;                /* [heads][segments][kp] */
};
int64_t segments_of_keys(const call &);
cudaError_t find_denominators(const call &, through_z<float>, cudaStream_t);
cudaError_t undo_denominators(const call &, const gradients &, through_z<float>, cudaStream_t);

/* The step of many states; cudaErrorNotSupported, with nothing done, where step_* are as good. */
extern const launcher step_many_kv[LA_KINDS], step_many_vk[LA_KINDS];

/* The chunk form by [rule]: of bf16 arrays with K <= 128 and, on Hopper, of float16 ones and of float32 ones
 * that may be rounded, and of bf16 and float16 with K to 256 (wide); the pool is for what one kernel leaves the
 * next. cudaErrorNotSupported, with nothing done, where shared memory is too small for it or there is no code
 * for the device. */
typedef cudaError_t (*chunk_launcher)(const call &, cudaMemPool_t, cudaStream_t);
extern const chunk_launcher chunk_none[2], chunk_token[2], chunk_key[2];
extern const chunk_launcher chunk_none_f16[2], chunk_token_f16[2], chunk_key_f16[2];
extern const chunk_launcher chunk_none_f32[2], chunk_token_f32[2], chunk_key_f32[2];
extern const chunk_launcher chunk_none_k256[2], chunk_token_k256[2], chunk_key_k256[2];
extern const chunk_launcher chunk_none_k256_f16[2], chunk_token_k256_f16[2], chunk_key_k256_f16[2];

#endif
