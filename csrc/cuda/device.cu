/* The device without its kernels: errors, the current device, shared memory, memory pools, streams.
 * Memory is taken and given back in stream order, so that a CUDA graph can capture a call. */
#include "cuda.h"
#include "device.cuh"
#include "launch.cuh"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- errors, devices ---- */

la_status status_of(int ordinal, char message[LA_MESSAGE], cudaError_t error, const char *first)
{
    if (error == cudaSuccess) return LA_OK;
    cudaGetLastError(); /* so that the next call does not see it */
    if (error == cudaErrorMemoryAllocation) {
        snprintf(message, LA_MESSAGE, "not enough memory on cuda:%d for the call's scratch",
                 ordinal);
        return LA_MEMORY_ERROR;
    }
    if (error == cudaErrorInvalidConfiguration) {
        snprintf(
            message, LA_MESSAGE,
            "%s: expected fewer than 2^31 blocks of tokens, heads and columns on CUDA, got more",
            first);
        return LA_VALUE_ERROR;
    }
    snprintf(message, LA_MESSAGE, "CUDA: %s", cudaGetErrorString(error));
    return LA_RUNTIME_ERROR;
}

la_status status_of(la_problem *p, cudaError_t error)
{
    if (error == cudaErrorNotSupported) { /* of gradients token by token */
        snprintf(p->message, LA_MESSAGE,
                 "q: expected a dtype and K whose gradients fit the shared memory of a block on "
                 "cuda:%d, got %s with K = %lld",
                 p->ordinal, la_dtype_names[p->array[LA_Q].dtype], (long long)p->K);
        return LA_VALUE_ERROR;
    }
    return status_of(p->ordinal, p->message, error);
}

int la_cuda_device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
}

const char *la_cuda_why_not(void)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess) return count ? NULL : "there is no CUDA device";
    cudaGetLastError();
    if (error == cudaErrorInsufficientDriver)
        return "there is no NVIDIA driver, or one older than this build needs";
    return cudaGetErrorString(error);
}

int la_cuda_ordinal_of(const void *data)
{
    cudaPointerAttributes is;
    if (cudaPointerGetAttributes(&is, data) != cudaSuccess) {
        cudaGetLastError();
        return -1;
    }
    return is.type == cudaMemoryTypeDevice || is.type == cudaMemoryTypeManaged ? is.device : -1;
}

/* Has this process a context on a device? If not, a switch back to the device would make one, which
 * takes hundreds of megabytes there. */
static bool is_active(int ordinal)
{
    typedef int (*get_state)(int device, unsigned *flags, int *active);
    void *found = NULL;
    cudaDriverEntryPointQueryResult how;
    unsigned flags;
    int active = 0;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found,
                                                               12000, cudaEnableDefault, &how);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &found, cudaEnableDefault, &how);
#endif
    if (error != cudaSuccess || !found) return true; /* assume that it has one */
    return ((get_state)found)(ordinal, &flags, &active) != 0 || active;
}

on_device::on_device(int ordinal) : now(ordinal)
{
    error = cudaGetDevice(&before);
    if (error == cudaSuccess && before != ordinal) error = cudaSetDevice(ordinal);
    if (error == cudaSuccess) error = cudaThreadExchangeStreamCaptureMode(&mode);
}

on_device::~on_device()
{
    if (before >= 0 && before != now && is_active(before)) cudaSetDevice(before);
    if (error == cudaSuccess) cudaThreadExchangeStreamCaptureMode(&mode);
}

/* ---- shared memory ---- */

/* LINATTN_SHARED_LIMIT in bytes. 0: not set; -1: not such a number. Every kernel may have
 * SHARED_ANYWAY. */
static int shared_limit()
{
    const char *text = getenv("LINATTN_SHARED_LIMIT");
    if (!text || !*text) return 0;
    char *end;
    const long n = strtol(text, &end, 10);
    return *end || n < SHARED_ANYWAY || n > INT_MAX ? -1 : (int)n;
}

const char *la_cuda_limit_unreadable(void)
{
    return shared_limit() < 0 ? getenv("LINATTN_SHARED_LIMIT") : NULL;
}

cudaError_t most_shared_memory(int device, int *bytes)
{
    static const int limit = shared_limit();
    const cudaError_t error =
        cudaDeviceGetAttribute(bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    if (limit > 0) *bytes = min(*bytes, limit);
    return error;
}

/* The kernels that have been allowed all their shared memory, and the devices. A kernel is found by
 * its address. There are some 200. */
cudaError_t allow_shared_memory(const void *kernel)
{
    enum { PLACES = 1024, DEVICES = 64 };
    static struct {
        const void *kernel;
        uint64_t devices; /* a bit per device */
    } allowed[PLACES];
    int device, most;
    cudaFuncAttributes code;
    uint64_t *seen = NULL;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    for (size_t n = 0, i = (uintptr_t)kernel / 16 % PLACES; n < PLACES; n++, i = (i + 1) % PLACES) {
        const void *there = NULL;
        if (__atomic_compare_exchange_n(&allowed[i].kernel, &there, kernel, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE) ||
            there == kernel) {
            seen = &allowed[i].devices;
            break;
        }
    }
    const uint64_t bit = device < DEVICES ? (uint64_t)1 << device : 0;
    if (seen && __atomic_load_n(seen, __ATOMIC_ACQUIRE) & bit) return cudaSuccess;
    error = most_shared_memory(device, &most);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, kernel);
    if (error == cudaSuccess)
        error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     most - (int)code.sharedSizeBytes);
    if (error == cudaSuccess && seen) __atomic_fetch_or(seen, bit, __ATOMIC_ACQ_REL);
    return error;
}

/* ---- memory in stream order ---- */

enum { MOST_DEVICES = 64 };

static cudaMemPool_t pools[MOST_DEVICES];

cudaError_t pool_of(int ordinal, cudaMemPool_t *pool)
{
    if (ordinal < 0 || ordinal >= MOST_DEVICES) return cudaErrorInvalidDevice;
    cudaMemPool_t found = __atomic_load_n(&pools[ordinal], __ATOMIC_ACQUIRE);
    if (!found) {
        cudaMemPoolProps props = {};
        props.allocType = cudaMemAllocationTypePinned;
        props.location.type = cudaMemLocationTypeDevice;
        props.location.id = ordinal;
        cudaError_t error = cudaMemPoolCreate(&found, &props);
        if (error != cudaSuccess) return error;
        uint64_t keep = UINT64_MAX;
        error = cudaMemPoolSetAttribute(found, cudaMemPoolAttrReleaseThreshold, &keep);
        cudaMemPool_t none = NULL;
        if (error != cudaSuccess ||
            !__atomic_compare_exchange_n(&pools[ordinal], &none, found, false, __ATOMIC_ACQ_REL,
                                         __ATOMIC_ACQUIRE)) {
            /* another thread was faster, or the attribute could not be set */
            cudaMemPoolDestroy(found);
            if (error != cudaSuccess) return error;
            found = none;
        }
    }
    *pool = found;
    return cudaSuccess;
}

la_status la_cuda_allocate(la_problem *p, size_t bytes, void **data)
{
    on_device here(p->ordinal);
    cudaMemPool_t pool;
    cudaError_t error = here.error;
    if (error == cudaSuccess) error = pool_of(p->ordinal, &pool);
    if (error == cudaSuccess)
        error = cudaMallocFromPoolAsync(data, bytes ? bytes : 1, pool, (cudaStream_t)p->stream);
    return status_of(p, error);
}

la_status la_cuda_release(int ordinal, void *stream, void *data)
{
    on_device here(ordinal);
    cudaError_t error = here.error;
    if (error == cudaSuccess) error = cudaFreeAsync(data, (cudaStream_t)stream);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess ? LA_OK : LA_RUNTIME_ERROR;
}

la_status la_cuda_copy(la_problem *p, void *to, const void *from, size_t bytes)
{
    on_device here(p->ordinal);
    cudaError_t error = here.error;
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, (cudaStream_t)p->stream);
    return status_of(p, error);
}

const char *la_cuda_trim(void)
{
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < MOST_DEVICES && error == cudaSuccess; i++) {
        const cudaMemPool_t pool = __atomic_load_n(&pools[i], __ATOMIC_ACQUIRE);
        if (pool) error = cudaMemPoolTrimTo(pool, 0);
    }
    if (error == cudaSuccess) return NULL;
    cudaGetLastError();
    return cudaGetErrorString(error);
}

la_status la_cuda_wait_stream(int ordinal, void *stream, void *other, char message[LA_MESSAGE])
{
    on_device here(ordinal);
    cudaEvent_t event;
    cudaError_t error = here.error;
    if (error == cudaSuccess) error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (error != cudaSuccess) return status_of(ordinal, message, error);
    error = cudaEventRecord(event, (cudaStream_t)other);
    if (error == cudaSuccess) error = cudaStreamWaitEvent((cudaStream_t)stream, event, 0);
    cudaEventDestroy(event); /* CUDA frees it when the wait is over */
    return status_of(ordinal, message, error);
}

la_status la_cuda_synchronize(la_problem *p)
{
    on_device here(p->ordinal);
    return status_of(p, here.error != cudaSuccess ? here.error
                                                  : cudaStreamSynchronize((cudaStream_t)p->stream));
}
