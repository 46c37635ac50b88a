#include "chunk.cuh"

const chunk_launcher chunk_dplr = launch_chunks<DPLR_KEYS, LA_KEY, LA_DPLR>;
