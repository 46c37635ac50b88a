/* 128 < K <= 256, on Hopper alone (setup.py): elsewhere they go token by token. */
#include "chunk.cuh"

const chunk_launcher chunk_key_wide[2] = {chunks_wide<LA_KEY, LA_ADDITIVE>,
                                          chunks_wide<LA_KEY, LA_DELTA>};
