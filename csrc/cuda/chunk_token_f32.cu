/* float32 arrays where tf32 is allowed. */
#define LA_TILES_OF_F32
#include "chunk.cuh"

const chunk_launcher chunk_token_f32[2] = {chunks_any<LA_TOKEN, LA_ADDITIVE>,
                                           chunks_any<LA_TOKEN, LA_DELTA>};
