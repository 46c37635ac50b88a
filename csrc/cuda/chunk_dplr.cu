#include "chunk.cuh"
#include "chunk_backward.cuh"

const chunk_launcher chunk_dplr = launch_chunks<DPLR_KEYS, LA_KEY, LA_DPLR>;

const backward_launcher chunk_backward_dplr = launch_chunk_backward<DPLR_KEYS, LA_KEY, LA_DPLR>;
