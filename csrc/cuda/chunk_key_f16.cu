/* float16 arrays, K up to 128 */
#define LA_TILES_OF_F16
#include "chunk.cuh"
#include "chunk_backward.cuh"

const chunk_launcher chunk_key_f16[2] = {chunks_any<LA_KEY, LA_ADDITIVE>,
                                         chunks_any<LA_KEY, LA_DELTA>};

const backward_launcher chunk_backward_key_f16[2] = {chunk_backward_any<LA_KEY, LA_ADDITIVE>,
                                                     chunk_backward_any<LA_KEY, LA_DELTA>};
