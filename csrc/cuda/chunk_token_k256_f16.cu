/* float16 arrays, 128 < K <= 256 */
#define LA_TILES_OF_F16
#include "chunk.cuh"
#include "chunk_backward.cuh"

const chunk_launcher chunk_token_k256_f16[2] = {chunks_k256<LA_TOKEN, LA_ADDITIVE>,
                                                chunks_k256<LA_TOKEN, LA_DELTA>};

const backward_launcher chunk_backward_token_k256_f16[2] = {
    chunk_backward_k256<LA_TOKEN, LA_ADDITIVE>, chunk_backward_k256<LA_TOKEN, LA_DELTA>};
