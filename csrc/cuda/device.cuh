/* The device without its kernels, for the entry points: errors as statuses, the current device, the
 * memory pools. */
#ifndef LINATTN_CUDA_DEVICE_CUH
#define LINATTN_CUDA_DEVICE_CUH

#include <cuda_runtime.h>

extern "C" {
#include "../linattn.h"
}

/* An error of CUDA as a status, with its message. first: the first array of the call. */
la_status status_of(int ordinal, char message[LA_MESSAGE], cudaError_t error,
                    const char *first = "q");
la_status status_of(la_problem *p, cudaError_t error);

/* Makes the device of the caller the current one, until the end of the scope. The first call on a
 * device makes a pool and loads kernels. Both may happen while the caller captures a graph. */
struct on_device {
    int before = -1, now;
    cudaError_t error;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    explicit on_device(int ordinal);
    ~on_device();
};

/* A pool of the library for each device. It keeps freed memory for the next call. The default pool
 * of CUDA would return it to the system whenever the host waits. */
cudaError_t pool_of(int ordinal, cudaMemPool_t *pool);

#endif
