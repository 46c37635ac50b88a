#include "chunk.cuh"
#include "chunk_backward.cuh"

cudaError_t chunk_token_additive(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_TOKEN, LA_ADDITIVE>(c, pool, stream);
}

cudaError_t chunk_token_delta(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_TOKEN, LA_DELTA>(c, pool, stream);
}

const backward_launcher chunk_backward_token[2] = {chunk_backward_any<LA_TOKEN, LA_ADDITIVE>,
                                                chunk_backward_any<LA_TOKEN, LA_DELTA>};
