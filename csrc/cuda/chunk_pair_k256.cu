/* 64 < K <= 128: both states together have 256 keys. */
#include "chunk.cuh"
#include "chunk_backward.cuh"

const chunk_launcher chunk_pair_k256[2] = {NULL, chunks_of_pairs<256>};

const backward_launcher chunk_backward_pair_k256[2] = {NULL, chunk_backward_of_pairs<256>};
