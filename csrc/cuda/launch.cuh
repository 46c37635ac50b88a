/* How a kernel is launched: its grid is checked, and the shared memory that it may have is asked for
 * once. */
#ifndef LINATTN_CUDA_LAUNCH_CUH
#define LINATTN_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include <limits.h>
#include <stdint.h>

/* All the dynamic shared memory that a kernel can have on the current device, once per kernel and device.
 * The limit belongs to the kernel: two threads that set it to what each of their launches takes would
 * take it from one another. */
cudaError_t allow_shared_memory(const void *kernel);

/* Shared memory that needs no permission. */
enum { SHARED_ANYWAY = 48 << 10 };

/* A launch of no blocks is none. */
template <typename... Parameters, typename... Arguments>
static cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int64_t threads,
                          int64_t bytes, cudaStream_t stream, const Arguments &...arguments)
{
    if (blocks == 0) return cudaSuccess;
    if (blocks < 0 || blocks > INT_MAX) return cudaErrorInvalidConfiguration;
    if (bytes > SHARED_ANYWAY) {
        const cudaError_t error = allow_shared_memory((const void *)kernel);
        if (error != cudaSuccess) return error;
    }
    kernel<<<(unsigned)blocks, (unsigned)threads, (size_t)bytes, stream>>>(arguments...);
    return cudaGetLastError();
}

#endif
