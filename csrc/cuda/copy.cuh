/* Copies between global and shared memory that go on in the background, and the barriers that count
 * them. No attention here. */
#ifndef LINATTN_CUDA_COPY_CUH
#define LINATTN_CUDA_COPY_CUH

#include <stdint.h>

__device__ __forceinline__ uint32_t address_of(const void *shared)
{
    return (uint32_t)__cvta_generic_to_shared(shared);
}

/* ---- copies in the background ---- */

/* Copy 16 bytes, or write zeros. */
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copies_end_group()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int LEFT> __device__ __forceinline__ void copies_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* ---- the copy engine, since Hopper: one thread asks it, a barrier counts the bytes ---- */

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define HAS_COPY_ENGINE 1

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* The warp arrives at the barrier: all its lanes have done their work so far. One lane arrives for
 * all, which the race checker does not follow. Built with LA_EVERY_LANE_ARRIVES, each lane arrives
 * for itself. */
#ifdef LA_EVERY_LANE_ARRIVES
enum { ARRIVALS_OF_WARP = 32 };
#else
enum { ARRIVALS_OF_WARP = 1 };
#endif
__device__ __forceinline__ void warp_arrives(uint32_t barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 < ARRIVALS_OF_WARP) barrier_arrive(barrier);
}

/* Make the initialized barriers visible to the copy engine. */
__device__ __forceinline__ void barriers_ready()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The stores of this thread to shared memory come before the copies that the engine is asked for
 * later. */
__device__ __forceinline__ void stores_before_copies()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The copies that the engine is asked for later read global memory as this thread would: with the
 * stores of other threads that it has waited for. */
__device__ __forceinline__ void memory_before_copies()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(phase)
                 : "memory");
}

/* Has the phase ended? Without a wait. */
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, int phase)
{
    int passed;
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                 "selp.s32 %0, 1, 0, done;\n"
                 "}"
                 : "=r"(passed)
                 : "r"(barrier), "r"(phase)
                 : "memory");
    return passed;
}

__device__ __forceinline__ void engine_copy(uint32_t to, const void *from, int bytes,
                                            uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

/* The copy from shared to global memory; and the wait until the engine has read all but the last
 * LEFT copies of this thread from shared memory. */
__device__ __forceinline__ void engine_copy_back(void *to, uint32_t from, int bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* A box of a tensor, back to it. Numbers past its ends are not stored. */
__device__ __forceinline__ void engine_store_box(const void *map, uint32_t from, int i0, int i1,
                                                 int i2, int i3)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
                 "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(i0), "r"(i1), "r"(i2), "r"(i3)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

template <int LEFT> __device__ __forceinline__ void engine_has_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

/* Wait until all copies of this thread from shared memory are in global memory. */
__device__ __forceinline__ void engine_has_stored()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* A box of a tensor: columns i0.., head i1, tokens i2.., batch row i3. */
__device__ __forceinline__ void engine_copy_box(uint32_t to, const void *map, int i0, int i1,
                                                int i2, int i3, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(i0), "r"(i1), "r"(i2), "r"(i3)
                 : "memory");
}
#else
#define HAS_COPY_ENGINE 0
#endif

/* The first `warps` warps of the block wait for one another. */
__device__ __forceinline__ void some_warps_wait(int warps)
{
    asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory");
}

#endif
