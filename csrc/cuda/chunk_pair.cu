#include "chunk.cuh"
#include "chunk_backward.cuh"

const chunk_launcher chunk_pair[2] = {NULL, chunks_of_pairs<128>};

const backward_launcher chunk_backward_pair[2] = {NULL, chunk_backward_of_pairs<128>};
