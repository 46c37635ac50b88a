/* Loads and stores of S' [16 columns][8 N], the state of a warp that goes through chunks. A thread
 * has columns lane / 4 and + 8, and rows 8 i + pair and + 1, where pair = lane % 4 * 2. A row is a
 * key. PAIR has rows of two states (chunk_slots.cuh). */
#ifndef LINATTN_CUDA_STATES_IN_CHUNKS_CUH
#define LINATTN_CUDA_STATES_IN_CHUNKS_CUH

#include "chunk_slots.cuh"
#include "states.cuh"

/* Where the numbers of a thread lie in an array of states, from a key and a column on. */
struct numbers_of_state {
    char *first;             /* of column lane / 4 and key `pair` */
    int64_t key, to_columns; /* bytes from a key to the next one, and over eight columns */
    int keys, columns;       /* how many there are from the first one on */

    __device__ __forceinline__ numbers_of_state(const call &c, const view &x, int n, int hv,
                                                int first_key, int first_column,
                                                int columns_of_warp)
    {
        const int column = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
        first = at(x, n, hv, first_key + pair, first_column + column);
        key = x.stride[2] * la_size_of(x.dtype);
        to_columns = 8 * x.stride[3] * la_size_of(x.dtype);
        keys = c.K - first_key - pair;
        columns = x.data ? columns_of_warp - column : 0;
    }
    __device__ __forceinline__ bool has(int i, int e) const
    {
        return e / 2 * 8 < columns && i * 8 + e % 2 < keys;
    }
    template <typename T> __device__ __forceinline__ T &number(int i, int e) const
    {
        return *(T *)(first + (i * 8 + e % 2) * key + e / 2 * to_columns);
    }
    /* Calls work(i, e, at) for the numbers that exist, of N times eight rows. Each address is the
     * one before and a constant, which halves the code. (The walks of roles.cuh do not use this. The
     * compiler moves so many registers there that a call of the delta rule takes 1.13 of its
     * time.) */
    template <int N, typename F> __device__ __forceinline__ void each(F work) const
    {
        char *row = first;
        const int64_t step = 8 * key;
#pragma unroll
        for (int i = 0; i < N; i++, row += step)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (has(i, e)) work(i, e, row + e % 2 * key + e / 2 * to_columns);
    }
};

/* How many groups of eight rows, one after another, are keys of one state. */
template <la_decay DECAY, int N> constexpr int run_of_keys = DECAY == LA_PAIR ? PANEL / 8 : N;

/* Zeros where the call has no such state. Y: the second state of PAIR. n, hv: the place of the
 * state in the array. */
template <la_decay DECAY, int N>
__device__ __forceinline__ void load_state(float (&S)[N][4], const call &c, const view &from,
                                           const view &Y, int n, int hv, int first_row,
                                           int first_column, int columns)
{
    constexpr int COUNT = run_of_keys<DECAY, N>;
#pragma unroll
    for (int i = 0; i < N * 4; i++) S[i / 4][i % 4] = 0;
#pragma unroll
    for (int run = 0; run < N; run += COUNT) {
        const int row = first_row + run * 8;
        const view &of = state_of_row<DECAY>(from, Y, row);
        const numbers_of_state x(c, of, n, hv, key_of_row<DECAY>(row), first_column, columns);
        with_type<LA_DTYPE_STORED, float>(of.dtype, [&](auto *type) {
            typedef std::remove_pointer_t<decltype(type)> T;
            x.template each<COUNT>(
                [&](int i, int e, char *at) { S[run + i][e] = (float)*(T *)at; });
        });
    }
}

/* Final states and gradients of states are float32 (arrays.def: REAL). */
template <la_decay DECAY, int N, typename F>
__device__ __forceinline__ void store_state(const float (&S)[N][4], const call &c, const view &to,
                                            const view &Y, int n, int hv, int first_row,
                                            int first_column, int columns, F result)
{
    constexpr int COUNT = run_of_keys<DECAY, N>;
#pragma unroll
    for (int run = 0; run < N; run += COUNT) {
        const int row = first_row + run * 8;
        const numbers_of_state x(c, state_of_row<DECAY>(to, Y, row), n, hv, key_of_row<DECAY>(row),
                                 first_column, columns);
        x.template each<COUNT>(
            [&](int i, int e, char *at) { *(float *)at = result(S[run + i][e]); });
    }
}

#endif
