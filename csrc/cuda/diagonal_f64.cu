/* Diagonal scans in float64. */
#include "diagonal_launch.cuh"

cudaError_t run_scan_f64(const scan_call &c, la_scan_form form, bool pairs, bool backwards,
                         scan_memory memory)
{
    return by_form<double>(c, form, pairs, backwards, memory);
}
