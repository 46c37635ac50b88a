#include "chunk.cuh"

cudaError_t chunk_key_additive(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_KEY, LA_ADDITIVE>(c, pool, stream);
}

cudaError_t chunk_key_delta(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_KEY, LA_DELTA>(c, pool, stream);
}
