/* float32 arrays where tf32 is allowed, on Hopper only (setup.py). Elsewhere they go token by
 * token. */
#define LA_TILES_OF_F32
#include "chunk.cuh"

const chunk_launcher chunk_key_f32[2] = {chunks_any<LA_KEY, LA_ADDITIVE>,
                                         chunks_any<LA_KEY, LA_DELTA>};
