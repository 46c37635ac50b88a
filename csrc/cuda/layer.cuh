/* The stages of a layer's step (../layer.h) around the step of its op. */
#ifndef LINATTN_CUDA_LAYER_CUH
#define LINATTN_CUDA_LAYER_CUH

#include <cuda_runtime.h>

extern "C" {
#include "../layer.h"
}

/* The stages before the op, in one launch. */
cudaError_t run_layer_inputs(const la_layer &j, cudaStream_t stream);
/* The stage after it. */
cudaError_t run_group_norm(const la_group_norm &j, cudaStream_t stream);

#endif
