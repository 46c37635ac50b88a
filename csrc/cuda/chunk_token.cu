#include "chunk.cuh"

cudaError_t chunk_token_additive(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_TOKEN, LA_ADDITIVE>(c, pool, stream);
}

cudaError_t chunk_token_delta(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_TOKEN, LA_DELTA>(c, pool, stream);
}
