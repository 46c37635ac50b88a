/* Rows of q, k and x in tiles: by the copy engine's maps, by copies of pieces, or normed and mapped
 * on the way. */
#ifndef LINATTN_CUDA_TILE_LOADS_CUH
#define LINATTN_CUDA_TILE_LOADS_CUH

#include "chunk_slots.cuh"
#include <cuda.h>
#include <cudaTypedefs.h>

struct tensor_maps {
    CUtensorMap q, k, x, v, w;
};

/* The function of the driver, found at run time, so that nothing is linked against the driver. */
static PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder()
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult how;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &how);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &how);
#endif
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess ? (PFN_cuTensorMapEncodeTiled_v12000)found : NULL;
}

static constexpr CUtensorMapDataType ENGINE_DTYPE = PLANES == 2 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                    : NARROW    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
/* Columns of a box, whose rows have 128 bytes. */
enum { BOX = 128 / sizeof(element), BOX_BYTES = C * 128, PIECE = 16 / sizeof(element) };

/* Can rows of x [B,T,heads,columns] be copied in pieces of 16 bytes? If so, describe x to the copy
 * engine of Hopper, in boxes of C tokens and BOX columns; with a map of NULL only answer. */
static bool map_of(const call &c, const view &x, int heads, int columns, CUtensorMap *map)
{
    const int64_t sizes[] = {c.B, c.T, heads};
    cuuint64_t size[4] = {(cuuint64_t)columns, (cuuint64_t)heads, (cuuint64_t)c.T, (cuuint64_t)c.B};
    cuuint64_t stride[3]; /* in bytes, of heads, tokens, batch rows */
    const cuuint32_t boxes[4] = {BOX, 1, C, 1}, step[4] = {1, 1, 1, 1};
    if ((uintptr_t)x.data % 16 || columns % PIECE) return false;
    for (int i = 0; i < 3; i++) {
        if (sizes[i] > 1 && (x.stride[i] <= 0 || x.stride[i] % PIECE)) return false;
        stride[2 - i] = (cuuint64_t)(sizes[i] > 1 ? x.stride[i] : columns) * sizeof(element);
    }
    if (!map) return true;
    static const auto encode = tensor_map_encoder();
    return encode && encode(map, ENGINE_DTYPE, 4, x.data, size, stride, boxes, step,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Tokens t..t+n of head h, by THREADS threads, which are numbered: usually all of the block. Rows and
 * columns past the end are zeros. The caller waits for the copies. The elements have two bytes: in
 * planes, q and k are never used as given. */
template <int COLUMNS, int THREADS>
__device__ __forceinline__ void copy_tile(const view &x, int columns, int b, int t, int n, int h,
                                          uint32_t tile, int first_column = 0,
                                          int thread = threadIdx.x)
{
    constexpr int SPAN = COLUMNS < THREADS ? COLUMNS : THREADS, PIECES = SPAN / 8,
                  STEP = THREADS / PIECES;
    static_assert(STEP % 8 == 0, "a thread's pieces are at the same place of their rows");
    const int row = thread / PIECES;
    const int64_t step = x.stride[1] * 2;
    const char *from = at(x, b, t, h, first_column);
#pragma unroll
    for (int j = 0; j < COLUMNS; j += SPAN) {
        const int piece = j / 8 + thread % PIECES;
        const uint32_t to = tile + piece_at(row, piece);
#pragma unroll
        for (int i = 0; i < C; i += STEP) {
            const bool there = row + i < n && first_column + piece * 8 < columns;
            copy_async(to + i * 128, from + (there ? (row + i) * step + piece * 16 : 0), there);
        }
    }
}

#if !HAS_WARP_GROUPS
/* Tokens t..t+n of head h, from a column on, by any number of warps. Rows and columns past the end
 * are zeros. A thread has one piece of every n-th row, so that its addresses are sums. */
template <int COLUMNS>
__device__ void copy_rows(const view &x, int columns, int b, int t, int n, int h, uint32_t tile,
                          int first_column = 0)
{
    constexpr int PIECES = COLUMNS / 8;
    static_assert(32 % PIECES == 0, "a warp has whole rows");
    const int piece = threadIdx.x % PIECES, apart = blockDim.x / PIECES;
    const char *const start = at(x, b, t, h, first_column);
    const int64_t of_row = x.stride[1] * 2, step = apart * of_row;
    const int rows = first_column + piece * 8 < columns ? n : 0; /* that exist */
    const char *from = start + threadIdx.x / PIECES * of_row + piece * 16;
#pragma unroll 2 /* 256 threads have two rows each, of 64 columns */
    for (int row = threadIdx.x / PIECES; row < C; row += apart, from += step)
        copy_async(tile + piece_at(row, piece), row < rows ? from : start, row < rows);
}

__device__ inline void copy_bytes(uint32_t to, const char *from, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
        copy_async(to + i, from + i, true);
}
#endif

/* The same rows as the recurrence sees them: q and k are normed and mapped. A warp takes one row
 * after another, and loads four at once so that their loads overlap. The tile gets KEYS of them,
 * from `first_key` on; the norm is that of all. */
template <int KP, int THREADS, int KEYS = KP>
__device__ void load_keys(const call &c, la_name name, int b, int t, int n, int h, char *tile,
                          int first_key = 0, int thread = threadIdx.x)
{
    enum { AT_ONCE = 4 };
    const int lane = threadIdx.x % 32;
    const view &from = c.x[name];
    const bool is_key = name == LA_Q || name == LA_K; /* x and y have no norm and no map */
    const bool norm = c.qk_l2norm && is_key;
    const la_map map = is_key ? c.map[name == LA_K] : LA_IDENTITY;
    const float map_eps = (float)c.map_eps[name == LA_K];
    const char *start = at(from, b, t, h);
    const int64_t step = from.stride[1], apart = from.stride[3];
    const bool pairs =
        apart == 1 && ((step | c.K) & 1) == 0 && (uintptr_t)start % sizeof(given_pair) == 0;
    for (int first = thread / 32; first < C; first += AT_ONCE * THREADS / 32) {
        given_pair two[AT_ONCE][KP / 64];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
#pragma unroll
            for (int j = 0; j < KP / 64; j++) {
                const int row = first + r * (THREADS / 32), key = j * 64 + lane * 2;
                const element *x = (const element *)start + row * step + key * apart;
                const int there = row < n ? c.K - key : 0;
                two[r][j] = given(element_of(0), element_of(0));
                if (pairs) {
                    if (there > 0) two[r][j] = *(const given_pair *)x;
                } else {
                    if (there > 0) two[r][j].x = x[0];
                    if (there > 1) two[r][j].y = x[apart];
                }
            }
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            const int row = first + r * (THREADS / 32);
            float x[KP / 32], squares = 0;
#pragma unroll
            for (int j = 0; j < KP / 32; j += 2) {
                const float2 y = numbers_of(two[r][j / 2]);
                x[j] = y.x;
                x[j + 1] = y.y;
                squares += y.x * y.x + y.y * y.y;
            }
            const float factor = norm ? l2norm_factor(warp_sum(squares)) : 1;
#pragma unroll
            for (int j = 0; j < KP / 32; j++) x[j] *= factor;
            apply_map_to_all(x, map, map_eps);
#pragma unroll
            for (int j = 0; j < KP / 32; j++) /* a map of zero may be 1 */
                if (row >= n || j / 2 * 64 + lane * 2 + j % 2 >= c.K) x[j] = 0;
#pragma unroll
            for (int j = 0; j < KP / 32; j += 2)
                if (KEYS == KP || j * 32 / KEYS * KEYS == first_key)
                    put_pair(tile + element_at(row, j * 32 % KEYS + lane * 2), x[j], x[j + 1]);
        }
    }
}

/* The rows of these arrays are used as the caller gave them, and can be copied. */
struct as_given {
    bool q, k, x, y;
};

/* Begins to load the rows of an array. They are ready after copies_wait and the next
 * __syncthreads. */
template <int KP, int THREADS>
__device__ __forceinline__ void begin_to_load(const call &c, la_name name, int b, int t, int n,
                                              int h, char *to, bool as_given)
{
    if (as_given)
        copy_tile<KP, THREADS>(c.x[name], c.K, b, t, n, h, address_of(to));
    else
        load_keys<KP, THREADS>(c, name, b, t, n, h, to);
}

/* q and k of a chunk, and x if it has a place: KEYS keys from `first_key` on. They are ready after
 * the next __syncthreads. */
template <int KP, int THREADS, int KEYS = KP>
__device__ void load_all(const call &c, int b, int t, int n, int h, char *q, char *k, char *x,
                         const as_given &given, int first_key = 0)
{
    const struct {
        la_name name;
        char *to;
        bool as_given;
    } rows[] = {{LA_Q, q, given.q}, {LA_K, k, given.k}, {LA_X, x, given.x}};
#pragma unroll
    for (const auto &one : rows) {
        if (one.to && one.as_given)
            copy_tile<KEYS, THREADS>(c.x[one.name], c.K, b, t, n, h, address_of(one.to), first_key);
        else if (one.to)
            load_keys<KP, THREADS, KEYS>(c, one.name, b, t, n, h, one.to, first_key);
    }
    copies_end_group();
    copies_wait<0>();
}

/* x <- x y, number by number. A function of its own: in prepare_key it would change the code of calls
 * without it, which then take 1.06 of their time. */
template <int KP, int THREADS> __device__ __noinline__ void multiply_tile(char *x, const char *y)
{
    if constexpr (PLANES == 1) {
        const int first = threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < tile_bytes(KP); i += THREADS * 16)
            *(uint4 *)(x + first + i) =
                times(*(const uint4 *)(x + first + i), *(const uint4 *)(y + first + i));
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < C * KP / 2; i += THREADS) {
            const int here = element_at(i / (KP / 2), i % (KP / 2) * 2);
            const float2 of_x = get_pair(x + here), of_y = get_pair(y + here);
            put_pair(x + here, of_x.x * of_y.x, of_x.y * of_y.y);
        }
    }
}

template <int BYTES, int THREADS>
__device__ __forceinline__ void write_tile(char *to, const char *tile)
{
    const int first = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < BYTES; i += THREADS * 16)
        *(uint4 *)(to + first + i) = *(const uint4 *)(tile + first + i);
}

/* Clear the blocks of 16 above the diagonal of a tile. No other code writes to them. */
template <int THREADS> __device__ __forceinline__ void clear_above(char *tile)
{
#pragma unroll
    for (int i = threadIdx.x; i < C * 8; i += THREADS)
        if (i % 8 / 2 > i / 8 / 16)
#pragma unroll
            for (int j = 0; j < PLANES; j++)
                *(uint4 *)(tile + j * PLANE_BYTES + piece_at(i / 8, i % 8)) =
                    make_uint4(0, 0, 0, 0);
}

/* The numbers of a row that a thread has, where four threads have the row in the layout of sums:
 * keys 8 i + pair and + 1, and zeros past the last one. */
template <typename T, int N>
__device__ __forceinline__ void load_keys_of_quad(float (&x)[N], const char *row, int64_t apart,
                                                  int keys)
{
    const int pair = threadIdx.x % 4 * 2;
    const T *const from = (const T *)row + pair * apart;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const int key = j / 2 * 8 + j % 2;
        x[j] = pair + key < keys ? (float)from[key * apart] : 0;
    }
}

#endif
