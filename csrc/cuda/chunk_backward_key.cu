#include "chunk_backward.cuh"

const backward_launcher chunk_backward_key[2] = {chunk_backward_any<LA_KEY, LA_ADDITIVE>,
                                               chunk_backward_any<LA_KEY, LA_DELTA>};
