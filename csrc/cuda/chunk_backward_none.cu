#include "chunk_backward.cuh"

const backward_launcher chunk_backward_none[2] = {chunk_backward_any<LA_NONE, LA_ADDITIVE>,
                                                chunk_backward_any<LA_NONE, LA_DELTA>};
