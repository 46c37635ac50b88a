/* How a kernel is launched. The size of its grid is checked, and its shared memory is allowed
 * once. A kernel tells the compiler how many threads it is launched with. */
#ifndef LINATTN_CUDA_LAUNCH_CUH
#define LINATTN_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include <limits.h>
#include <stdint.h>

/* The shared memory that a block of a device may have, in bytes. LINATTN_SHARED_LIMIT makes it less:
 * a large device then takes the plans of a small one. */
cudaError_t most_shared_memory(int device, int *bytes);

/* Allow a kernel all the dynamic shared memory that it can have on the current device, once per
 * kernel and device. The limit belongs to the kernel: if each launch set it to its own need, two
 * threads would lower it for one another. */
cudaError_t allow_shared_memory(const void *kernel);

/* x / y, rounded up. */
static inline int64_t div_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

/* Shared memory that needs no permission. */
enum { SHARED_ANYWAY = 48 << 10 };

/* A launch of no blocks does nothing. */
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

/* The same, with all blocks on the device at once, so that they may wait for one another. */
template <typename... Parameters, typename... Arguments>
static cudaError_t launch_together(void (*kernel)(Parameters...), int blocks, int threads,
                                   int64_t bytes, cudaStream_t stream, const Arguments &...arguments)
{
    const cudaError_t error = allow_shared_memory((const void *)kernel);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute together = {};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = dim3((unsigned)blocks);
    how.blockDim = dim3((unsigned)threads);
    how.dynamicSmemBytes = (size_t)bytes;
    how.stream = stream;
    how.attrs = &together;
    how.numAttrs = 1;
    return cudaLaunchKernelEx(&how, kernel, arguments...);
}

/* A kernel begins with this: its blocks have at most so many threads, as its launch bounds say. The
 * compiler does not learn it from these. It then knows some quotients of a thread's number, and which
 * numbers are not negative (docs/decisions/0072). */
template <int THREADS> __device__ __forceinline__ void threads_below()
{
    __builtin_assume(threadIdx.x < THREADS);
}

#endif
