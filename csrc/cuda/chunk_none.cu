#include "chunk.cuh"

cudaError_t chunk_none_additive(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_NONE, LA_ADDITIVE>(c, pool, stream);
}

cudaError_t chunk_none_delta(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return chunks_any<LA_NONE, LA_DELTA>(c, pool, stream);
}
