#include "chunk_backward.cuh"

const backward_launcher chunk_backward_token[2] = {chunk_backward_any<LA_TOKEN, LA_ADDITIVE>,
                                                chunk_backward_any<LA_TOKEN, LA_DELTA>};
