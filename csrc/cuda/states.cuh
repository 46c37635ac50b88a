/* Loads and stores of states: the numbers that a thread has in registers. Those of a warp that goes
 * through chunks are in states_in_chunks.cuh. */
#ifndef LINATTN_CUDA_STATES_CUH
#define LINATTN_CUDA_STATES_CUH

#include "load.cuh"

/* A state of a value head. */
struct state_of_head {
    char *first;         /* NULL: the call has none */
    int64_t key, column; /* bytes from one to the next */
    int keys, columns;

    __device__ __forceinline__ state_of_head(const call &c, const view &x, int n, int hv)
        : first(x.data ? at(x, n, hv) : NULL), key(x.stride[2] * la_size_of(x.dtype)),
          column(x.stride[3] * la_size_of(x.dtype)), keys(c.K), columns(c.V)
    {
    }
    /* NULL: there is no such number. */
    __device__ __forceinline__ char *place(int k, int v) const
    {
        return first && k < keys && v < columns ? first + k * key + v * column : NULL;
    }
};

/* The numbers of a thread that are on their way at once. */
enum { NUMBERS_AT_ONCE = 8 };

/* x[i] = the number at place(i), or 0 where that is NULL. The loop is not unrolled, which keeps the
 * code short, so the numbers go by way of local memory. */
template <typename real, int N, typename F>
__device__ __forceinline__ void load_numbers(real (&x)[N], la_dtype dtype, F place)
{
    constexpr int AT_ONCE = N < NUMBERS_AT_ONCE ? N : NUMBERS_AT_ONCE;
    static_assert(N % AT_ONCE == 0, "whole groups");
    real all[N];
#pragma unroll 1
    for (int i = 0; i < N; i += AT_ONCE) {
        const char *from[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) from[j] = place(i + j);
        with_type<LA_DTYPE_STORED, real>(dtype, [&](auto *type) {
            typedef decltype(type) pointer;
            typedef std::conditional_t<sizeof(*type) == 8, double, float> number;
            real loaded[AT_ONCE] = {};
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++)
                if (from[j]) loaded[j] = (real)(number) * (pointer)from[j];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) all[i + j] = loaded[j];
        });
    }
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = all[i];
}

/* The number at place(i) = x[i], where there is such a place. */
template <typename real, int N, typename F>
__device__ __forceinline__ void store_numbers(const real (&x)[N], la_dtype dtype, F place)
{
    constexpr int AT_ONCE = N < NUMBERS_AT_ONCE ? N : NUMBERS_AT_ONCE;
    static_assert(N % AT_ONCE == 0, "whole groups");
    real all[N];
#pragma unroll
    for (int i = 0; i < N; i++) all[i] = x[i];
#pragma unroll 1
    for (int i = 0; i < N; i += AT_ONCE)
        with_type<LA_DTYPE_STORED, real>(dtype, [&](auto *type) {
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                char *const to = place(i + j);
                if (to) *(decltype(type))to = (std::remove_pointer_t<decltype(type)>)all[i + j];
            }
        });
}

#endif
