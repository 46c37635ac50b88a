#include "chunk.cuh"
#include "chunk_backward.cuh"

const chunk_launcher chunk_key[2] = {chunks_any<LA_KEY, LA_ADDITIVE>, chunks_any<LA_KEY, LA_DELTA>};

const backward_launcher chunk_backward_key[2] = {chunk_backward_any<LA_KEY, LA_ADDITIVE>,
                                                 chunk_backward_any<LA_KEY, LA_DELTA>};
