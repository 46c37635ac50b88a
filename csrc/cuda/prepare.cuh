/* Everything that depends on one chunk of C = 64 tokens alone, for all chunks side by side: the
 * scores P, the inverse A and, where decays are per key, the scaled rows. See chunk.cuh for their
 * formulas. */
#ifndef LINATTN_CUDA_PREPARE_CUH
#define LINATTN_CUDA_PREPARE_CUH

#include "copy.cuh"
#include "kernels.cuh"
#include "load.cuh"
#include "products.cuh"

#include <cuda.h>
#include <cudaTypedefs.h>
#include <type_traits>

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL
#define JOIN(x, y, W) join_quads(x, y, W)
#define KEY_BEFORE true
typedef float real, lane, lane_of_state;
enum { MAX_STRIP = 2 };

/* The sums over the four threads that have the keys of a column in an accumulator. */
LA_FN void join_quads(float *x, float *y, int W)
{
    for (int w = 0; w < W; w++) x[w] = quad_sum(x[w]);
    for (int w = 0; w < W && y; w++) y[w] = quad_sum(y[w]);
}

#include "../recurrence.h"

enum {
    C = ROWS,
    LD = 68,       /* rows of float32 matrices: each 4 banks further, for fragments of tf32 */
    LD_PAIRS = 72, /* each 8 banks further, for pairs in the layout of accumulators */
    SCALAR_THREADS = 128,
    KEY_THREADS = 256
};

/* Decays that are part of the rows that prepare leaves, which are then those of a value head. Other
 * decays scale rows of the products instead. */
template <la_decay DECAY> constexpr bool lies_in_rows = DECAY == LA_KEY || DECAY == LA_PAIR;

/* PAIR: the rows of the state are PANEL keys of the memory, the same keys of its momentum, the next
 * PANEL keys of the memory, and so on. KP counts both. */
template <la_decay DECAY> constexpr int states_of = DECAY == LA_PAIR ? 2 : 1;
template <int KP, la_decay DECAY> constexpr int keys_of = KP / states_of<DECAY>;

/* The state that has a row, and the key of the row. */
template <la_decay DECAY>
__device__ __forceinline__ const view &state_of_row(const view &M, const view &Y, int row)
{
    return DECAY == LA_PAIR && row / PANEL % 2 ? Y : M;
}
template <la_decay DECAY> __device__ __forceinline__ int key_of_row(int row)
{
    return DECAY == LA_PAIR ? row / (2 * PANEL) * PANEL + row % PANEL : row;
}

/* ---- chunks of sequences: what prepare leaves to chunks_forward, in slots of C tokens ---- */

/* Numbers of a chunk that its state is multiplied by, where decays lie in rows. Those of PAIR are e,
 * f and m of prepare_pair.cuh, and one that is not used. */
template <int KP, la_decay DECAY>
constexpr int totals = DECAY == LA_KEY    ? KP
                       : DECAY == LA_PAIR ? 4
                                          : 0;

struct chunks {
    char *scores, *inverse; /* [chunk slots][HV] tiles of C columns: P, A */
    char *lower; /* for gradients of the delta rule: -L, where L is without beta; otherwise NULL */
    /* [chunk slots][heads] tiles of KP columns; NULL: read from the arrays of the caller */
    char *q, *k;
    char *x;         /* scalar decays: the same, where the caller gave x */
    char *kt;        /* decays in rows: [chunk slots][HV] tiles, k~ */
    float *in, *out; /* scalar decays: [chunk slots][HV][C], from the start, to the end */
    float *look;     /* the decay of the state that x sees, if that is not `in` */
    float *total;    /* decays in rows: [chunk slots][HV][totals], of the chunk */
    /* normalised: [chunk slots][HV][KP], the sum of the keys of the chunk; then the sum of the
     * other chunks that its tokens see */
    float *z;
    float *den; /* normalised: [chunk slots][HV][C], the row sums of P; then the denominators */
    /* [chunk slots][HV]: the first token with a NaN or an infinity in q, k, the gate or beta; C if
     * there is none. From it on, P and A are zeros. */
    int *nonfinite;
    int chunk_slots, heads;
};

__device__ inline int first_chunk_slot(const call &c, int n)
{
    return (int)first_chunk_slot(c, n, C);
}

/* The sequence of a chunk slot: the last one that begins at or before it. */
__device__ inline int sequence_of(const call &c, int chunk_slot)
{
    if (!c.x[LA_CU].data) return chunk_slot / ((c.T + C - 1) / C);
    int low = 0, high = c.N - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_chunk_slot(c, middle) <= chunk_slot)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The bytes of a stage behind v, where decays are scalar and the caller gave x: k, and the decays
 * that x sees. The place of k then has x. */
template <int KP, la_decay DECAY> __host__ __device__ constexpr int bytes_for_x(bool with_x)
{
    return with_x && !lies_in_rows<DECAY> ? tile_bytes(KP) + 1024 : 0;
}

/* Where a stage (`part`) has the rows that are written to the state, and the decays of the rows
 * that the state sees. The latter rows are at part::k. */
struct key_rows {
    bool has_x; /* x is apart from k */
    int bytes;  /* of the whole stage */
    int written, look;
    const char *seen; /* the rows seen, where prepare has left them; NULL: the caller's array */
};

template <typename part, int KP, la_decay DECAY, la_rule RULE>
__device__ __forceinline__ key_rows key_rows_of(const call &c, const chunks &w, int width)
{
    key_rows x;
    x.has_x = RULE == LA_DELTA && !lies_in_rows<DECAY> && c.x[LA_X].data;
    x.bytes = part::bytes(width, x.has_x);
    x.written = lies_in_rows<DECAY> ? part::kt : x.has_x ? part::bytes(width, false) : part::k;
    x.look = x.has_x && w.look ? x.written + tile_bytes(KP) : part::in;
    x.seen = x.has_x ? w.x : w.k;
    return x;
}

/* ---- prepare: loads ---- */

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

/* Tokens t..t+n of head h, by all threads. Rows and columns past the end are zeros. The caller
 * waits for the copies. The elements have two bytes: in planes, q and k are never used as given. */
template <int COLUMNS, int THREADS>
__device__ __forceinline__ void copy_tile(const view &x, int columns, int b, int t, int n, int h,
                                          uint32_t tile, int first_column = 0)
{
    constexpr int SPAN = COLUMNS < THREADS ? COLUMNS : THREADS, PIECES = SPAN / 8,
                  STEP = THREADS / PIECES;
    static_assert(STEP % 8 == 0, "a thread's pieces are at the same place of their rows");
    const int row = threadIdx.x / PIECES;
    const int64_t step = x.stride[1] * 2;
    const char *from = at(x, b, t, h, first_column);
#pragma unroll
    for (int j = 0; j < COLUMNS; j += SPAN) {
        const int piece = j / 8 + threadIdx.x % PIECES;
        const uint32_t to = tile + piece_at(row, piece);
#pragma unroll
        for (int i = 0; i < C; i += STEP) {
            const bool there = row + i < n && first_column + piece * 8 < columns;
            copy_async(to + i * 128, from + (there ? (row + i) * step + piece * 16 : 0), there);
        }
    }
}

#if !HAS_WARP_GROUPS
/* Tokens t..t+n of head h, from a column on, by any number of threads. Rows and columns past the
 * end are zeros. */
template <int COLUMNS>
__device__ void copy_rows(const view &x, int columns, int b, int t, int n, int h, uint32_t tile,
                          int first_column = 0)
{
    const char *from = at(x, b, t, h, first_column);
    for (int i = threadIdx.x; i < C * COLUMNS / 8; i += blockDim.x) {
        const int row = i / (COLUMNS / 8), piece = i % (COLUMNS / 8);
        const bool there = row < n && first_column + piece * 8 < columns;
        copy_async(tile + piece_at(row, piece),
                   from + (there ? row * x.stride[1] * 2 + piece * 16 : 0), there);
    }
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
                          int first_key = 0)
{
    enum { AT_ONCE = 4 };
    const int lane = threadIdx.x % 32;
    const view &from = c.x[name];
    const bool norm = c.qk_l2norm && name != LA_X;
    const la_map map = name == LA_X ? LA_IDENTITY : c.map[name == LA_K];
    const float map_eps = (float)c.map_eps[name == LA_K];
    const char *start = at(from, b, t, h);
    const int64_t step = from.stride[1], apart = from.stride[3];
    const bool pairs =
        apart == 1 && ((step | c.K) & 1) == 0 && (uintptr_t)start % sizeof(given_pair) == 0;
    for (int first = threadIdx.x / 32; first < C; first += AT_ONCE * THREADS / 32) {
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
    bool q, k, x;
};

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

/* ---- prepare: the inverse of I + L, with L strictly lower triangular [C][C], in place ----
 *
 * Blocks of 16 are inverted by substitution in float32. Then two blocks at a time are joined:
 * [A 0; B D]^-1 has -D^-1 B A^-1 below the diagonal. These products keep the 11 bits of tf32.
 * float16 has as many, bf16 three fewer, and two planes of bf16 have five more. The first four
 * warps work; room is [4][32][12]. Above the diagonal, blocks (0, 1) and (2, 3) of 16 are read, and
 * `clear_pairs` has made them zeros. */
__device__ inline void invert(float *L, float *room)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool works = warp < 4;
    float *own = room + warp * 32 * 12; /* [32][8], with rows 12 apart */
    if (works) {
        float *block = L + warp * 16 * (LD + 1), x[16];
        const int column = lane % 16;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = i == column;
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 y = *(const float4 *)(block + i * LD + j);
                sum -= y.x * x[j];
                if (j + 1 < i) sum -= y.y * x[j + 1];
                if (j + 2 < i) sum -= y.z * x[j + 2];
                if (j + 3 < i) sum -= y.w * x[j + 3];
            }
            x[i] = i < column ? 0 : sum;
        }
        __syncwarp();
        if (lane < 16)
#pragma unroll
            for (int i = 0; i < 16; i++) block[i * LD + column] = x[i];
    }
    __syncthreads();
    { /* 16 -> 32: two warps per pair of blocks, 8 columns each */
        float *A = L + warp / 2 % 2 * 32 * (LD + 1), *B = A + 16 * LD, *D = B + 16;
        const int column = warp % 2 * 8;
        float c[4] = {}, e[4] = {};
        if (works) {
            multiply_tf32<2>(c, B, LD, A + column, LD);
            put(own, 12, c, 1);
        }
        __syncthreads(); /* both warps have read B */
        if (works) {
            multiply_tf32<2>(e, D, LD, own, 12);
            put(B + column, LD, e, -1);
        }
    }
    __syncthreads();
    { /* 32 -> 64: 8 columns per warp */
        float *A = L, *B = A + 32 * LD, *D = B + 32;
        const int column = warp * 8;
        float c[2][4] = {}, e[2][4] = {};
        for (int i = 0; i < 2 && works; i++) {
            multiply_tf32<4>(c[i], B + i * 16 * LD, LD, A + column, LD);
            put(own + i * 16 * 12, 12, c[i], 1);
        }
        __syncthreads();
        for (int i = 0; i < 2 && works; i++) {
            multiply_tf32<4>(e[i], D + i * 16 * LD, LD, own, 12);
            put(B + i * 16 * LD + column, LD, e[i], -1);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void clear_pairs(float *L)
{
    if (threadIdx.x >= 128) return;
    const int block = threadIdx.x / 64 * 32, row = threadIdx.x % 64 / 4,
              column = threadIdx.x % 4 * 4;
    *(float4 *)(L + (block + row) * LD + block + 16 + column) = make_float4(0, 0, 0, 0);
}

/* A = L diag(beta) as a tile: the ten blocks on and below the diagonal. */
template <int THREADS>
__device__ __forceinline__ void put_inverse(const float *L, const float *beta, char *tile)
{
    const int row = threadIdx.x % 128 / 8, column = threadIdx.x % 8 * 2;
#pragma unroll
    for (int i = 0; i < 10; i += THREADS / 128) {
        const int block = i + threadIdx.x / 128, I = (block > 0) + (block > 2) + (block > 5);
        const int J = block - I * (I + 1) / 2;
        const float2 x = *(const float2 *)(L + (I * 16 + row) * LD + J * 16 + column);
        const float2 b = *(const float2 *)(beta + J * 16 + column);
        put_pair(tile + element_at(I * 16 + row, J * 16 + column), x.x * b.x, x.y * b.y);
    }
}

/* x is sums of products [16][8] of a block on the diagonal, from its column `first` on. Returns the
 * first row whose number on the diagonal itself is not finite, or C. The product of q and k of a
 * token shows a NaN or an infinity in either; that of x and k shows one in x, or a sum that is too
 * large for float32. */
__device__ __forceinline__ int nonfinite_on_diagonal(const float (&x)[4], int first)
{
    const int lane = threadIdx.x % 32, row = lane / 4, column = first + lane % 4 * 2;
    int nonfinite = C;
#pragma unroll
    for (int e = 3; e >= 0; e--)
        if (row + e / 2 * 8 == column + e % 2 && !isfinite(x[e])) nonfinite = row + e / 2 * 8;
    return nonfinite;
}

/* Is there no element for this score? It belongs to a token before the first nonfinite one. It is
 * too large, or it is a NaN because a number on the way to it was too large. This token and those
 * after it go token by token. */
__device__ __forceinline__ bool no_element(float x)
{
    return NARROW && !(fabsf(x) <= MOST_OF_ELEMENT);
}

/* The same for q and k times decays above one. */
__device__ __forceinline__ bool too_large(float x) { return isfinite(x) && no_element(x); }

/* ---- prepare: scalar decays ---- */

/* x has a place behind q, which may be past the end of this: see scalar_room_bytes. */
template <int KP, la_rule RULE> struct scalar_room {
    float a[C], beta[C];
    int nonfinite[2]; /* in q, k and x; in the gate and beta of a value head */
    union {
        struct {
            alignas(1024) char k[tile_bytes(KP)], q[tile_bytes(KP)];
        };
        struct { /* after the products are in registers */
            char tile[PANEL_BYTES];
            float G[C * LD_PAIRS], L[RULE == LA_DELTA ? C * LD : 4];
            float room[RULE == LA_DELTA ? 4 * 32 * 12 : 4];
        };
    };
};

template <int KP, la_rule RULE> constexpr int scalar_room_bytes(bool with_x)
{
    const int all = sizeof(scalar_room<KP, RULE>), three = 1024 + 3 * tile_bytes(KP);
    return with_x && three > all ? three : all;
}

/* Blocks of 16 x 16 on and below the diagonal: Q K' has ten, X K' has ten. Warp w takes those of
 * row w of Q K' and of row 3 - w of X K'. These are w + 1 and 4 - w: five for every warp. X is K
 * unless the caller gave x. */
template <int KP, la_rule RULE, typename = element>
__global__ void __launch_bounds__(SCALAR_THREADS, KP > 128 || PLANES == 2 ? 3
                                                  : RULE == LA_DELTA      ? 4
                                                                          : 5)
    prepare_scalar(const __grid_constant__ call c, const __grid_constant__ chunks w,
                   const as_given given)
{
    extern __shared__ __align__(1024) char shared[];
    scalar_room<KP, RULE> &s = *(scalar_room<KP, RULE> *)shared;
    constexpr int THREADS = SCALAR_THREADS;
    const int chunk_slot = blockIdx.x / c.H, h = blockIdx.x % c.H, group = c.HV / c.H;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (float)c.scale;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), h * group);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;

    /* loaded one head in advance */
    constexpr bool WEIGHS = RULE == LA_ADDITIVE;
    const view &weights = c.x[LA_WEIGHT];
    const bool weighs = WEIGHS && (weights.data || c.x[LA_SKIP].data);
    float a = 1, beta = 0;
    const auto load_gates = [&](int hv) {
        if (threadIdx.x >= n) return;
        if (c.x[LA_G].data)
            a = load<float>(at(c.x[LA_G], u.b, t + threadIdx.x, hv), c.x[LA_G].dtype);
        if (RULE == LA_DELTA)
            beta = load<float>(at(c.x[LA_BETA], u.b, t + threadIdx.x, hv), c.x[LA_BETA].dtype);
    };
    load_gates(h * group);
    if (threadIdx.x == 0) s.nonfinite[0] = C;
    char *const x_tile = RULE == LA_DELTA && c.x[LA_X].data ? s.q + tile_bytes(KP) : NULL;
    load_all<KP, THREADS>(c, u.b, t, n, h, s.q, s.k, x_tile, given);
    __syncthreads();
    const int64_t keys = ((int64_t)chunk_slot * w.heads + h) * tile_bytes(KP);
    if (w.q) write_tile<tile_bytes(KP), THREADS>(w.q + keys, s.q);
    if (w.k) write_tile<tile_bytes(KP), THREADS>(w.k + keys, s.k);
    if (RULE == LA_DELTA && w.x) write_tile<tile_bytes(KP), THREADS>(w.x + keys, x_tile);
    float2 all_keys = make_float2(0, 0);
    if (RULE == LA_ADDITIVE && w.z && threadIdx.x < KP / 2)
#pragma unroll 8
        for (int i = 0; i < C; i++) {
            const float2 x = get_pair(s.k + element_at(i, threadIdx.x * 2));
            all_keys = make_float2(all_keys.x + x.x, all_keys.y + x.y);
        }

    float x[5][2][4] = {};
    const uint32_t look_tile = address_of(x_tile ? x_tile : s.k), q_tile = address_of(s.q);
    const uint32_t k_rows = lane_with_rows(address_of(s.k));
    const int back = c.predicts_before; /* row i of L has row i - 1 of G */
#pragma unroll
    for (int i = 0; i < KP; i += 16) {
        const operand of_q = load_operand(q_tile, warp * 16, i);
        operand of_x;
        if (RULE == LA_DELTA) of_x = load_operand(look_tile, (3 - warp) * 16, i);
#pragma unroll
        for (int j = 0; j < 5; j++) {
            const bool scores = j <= warp;
            if (RULE == LA_ADDITIVE && !scores) continue;
            operand of = of_q;
            if (RULE == LA_DELTA && !scores) of = of_x;
            multiply_with_rows(x[j][0], x[j][1], of, k_rows, (scores ? j : 4 - j) * 16, i);
        }
    }
#pragma unroll
    for (int j = 0; j < 5; j++)
        if (j == warp || (RULE == LA_DELTA && j == warp + 1)) { /* on the diagonal */
            const int row =
                min(nonfinite_on_diagonal(x[j][0], 0), nonfinite_on_diagonal(x[j][1], 8));
            if (row < C) atomicMin(s.nonfinite, (j == warp ? warp : 3 - warp) * 16 + row);
        }
    __syncthreads();
    clear_above<THREADS>(s.tile);
    if (RULE == LA_DELTA) clear_pairs(s.L);

    for (int hv = h * group; hv < (h + 1) * group; hv++) {
        const int64_t place = (int64_t)chunk_slot * c.HV + hv;
        if (c.x[LA_G].data && threadIdx.x < n) a = decay_of(a, c.gate);
        if (weighs) /* not in advance, for which there is no register */
            beta = weights.data && threadIdx.x < n
                       ? load<float>(at(weights, u.b, t + threadIdx.x, hv), weights.dtype)
                       : 1;
        if (threadIdx.x < C) {
            s.a[threadIdx.x] = a;
            s.beta[threadIdx.x] = beta;
        }
        const bool found = threadIdx.x < n && !(isfinite(a) && isfinite(beta));
        int nonfinite = C;
        if (__syncthreads_or(found || s.nonfinite[0] < C)) {
            if (threadIdx.x == 0) s.nonfinite[1] = s.nonfinite[0];
            __syncthreads();
            if (found) atomicMin(s.nonfinite + 1, threadIdx.x);
            __syncthreads();
            nonfinite = s.nonfinite[1];
            if (threadIdx.x < C && threadIdx.x >= nonfinite) s.beta[threadIdx.x] = 0;
        }
        if (threadIdx.x == 0) w.nonfinite[place] = nonfinite;
        if (RULE == LA_ADDITIVE && w.z && threadIdx.x < KP / 2)
            *(float2 *)(w.z + place * KP + threadIdx.x * 2) = all_keys;
        if (hv + 1 < (h + 1) * group) load_gates(hv + 1);

        /* G: a thread has a column */
        if (c.x[LA_G].data && threadIdx.x < C) {
            const int j = threadIdx.x;
            float g = 1;
            s.G[j * LD_PAIRS + j] = 1;
#pragma unroll 4
            for (int i = j / 32 * 32; i < C; i += 4) {
                const float4 of = *(const float4 *)(s.a + i);
                const float four[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (i + e > j) s.G[(i + e) * LD_PAIRS + j] = g *= four[e];
            }
            if (weighs) g *= s.beta[j];
            if (w.out) w.out[place * C + j] = g;
        }
        __syncthreads();
        if (w.in && threadIdx.x < C)
            w.in[place * C + threadIdx.x] = s.a[0] * s.G[threadIdx.x * LD_PAIRS];
        if (RULE == LA_DELTA && w.look && threadIdx.x < C)
            w.look[place * C + threadIdx.x] =
                threadIdx.x ? s.a[0] * s.G[(threadIdx.x - 1) * LD_PAIRS] : 1;
        float row_sums[2] = {};
        int first_row = lane / 4, first_pair = lane % 4 * 2;
        /* keeps the compiler from holding 40 addresses for all heads */
        asm volatile("" : "+r"(first_row), "+r"(first_pair));
        if (RULE == LA_DELTA && w.lower) {
#pragma unroll
            for (int j = 0; j < 5; j++) {
                if (j <= warp) continue;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = (3 - warp) * 16 + e / 2 * 8 + first_row;
                    const int column = (4 - j) * 16 + e % 2 * 8 + first_pair;
                    const float2 g =
                        c.x[LA_G].data
                            ? *(const float2 *)(s.G + max(row - back, 0) * LD_PAIRS + column)
                            : make_float2(1, 1);
                    const float y = x[j][e % 2][e / 2 * 2], z = x[j][e % 2][e / 2 * 2 + 1];
                    put_pair(s.tile + element_at(row, column), column < row ? -y * g.x : 0,
                             column + 1 < row ? -z * g.y : 0);
                }
            }
            __syncthreads();
            write_tile<PANEL_BYTES, THREADS>(w.lower + place * PANEL_BYTES, s.tile);
            __syncthreads();
        }
        /* Two copies, so that calls without weights and skips do not pay for them. */
        const auto put_products = [&](auto with_weights) {
            constexpr bool weighted = decltype(with_weights)::value;
            const float skip = weighted ? scale * with_skip(c, hv, 0.0f, 1.0f) : 0;
#pragma unroll
            for (int j = 0; j < 5; j++) {
                const bool scores = j <= warp;
                if (RULE == LA_ADDITIVE && !scores) continue;
                const int I = scores ? warp : 3 - warp, J = scores ? j : 4 - j;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = I * 16 + e / 2 * 8 + first_row;
                    const int column = J * 16 + e % 2 * 8 + first_pair;
                    const int from = RULE == LA_DELTA && !scores ? max(row - back, 0) : row;
                    float2 g = c.x[LA_G].data ? *(const float2 *)(s.G + from * LD_PAIRS + column)
                                              : make_float2(1, 1);
                    if constexpr (weighted) {
                        /* volatile: there are no registers to hold those of all columns */
                        const volatile float *const weight = s.beta + column;
                        g = make_float2(g.x * weight[0], g.y * weight[1]);
                    }
                    const float y = x[j][e % 2][e / 2 * 2] * g.x,
                                z = x[j][e % 2][e / 2 * 2 + 1] * g.y;
                    const int last = row < nonfinite ? row : -1; /* the last column of this row */
                    if (scores) {
                        float p = column <= row ? y * scale : 0, r = column < row ? z * scale : 0;
                        if (weighted && column == row) p += skip;
                        if (weighted && column + 1 == row) r += skip;
                        const pair_in_planes both = in_planes(p, r);
                        const bool kept = row < nonfinite, large = no_element(p) || no_element(r);
                        const float2 rounded = kept && !large ? numbers(both) : make_float2(p, r);
                        /* with the rounding that they have in the product with v */
                        row_sums[e / 2] += rounded.x + rounded.y;
                        put_pair(s.tile + element_at(row, column), kept ? both : pair_in_planes());
                        if (kept && large) atomicMin(w.nonfinite + place, row);
                    } else if (RULE == LA_DELTA)
                        *(float2 *)(s.L + row * LD + column) =
                            make_float2(column < last ? s.beta[row] * y : 0,
                                        column + 1 < last ? s.beta[row] * z : 0);
                }
            }
        };
        if (weighs)
            put_products(std::bool_constant<WEIGHS>());
        else
            put_products(std::false_type());
        __syncthreads();
        if (RULE == LA_ADDITIVE && w.den)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float sum = quad_sum(row_sums[e]);
                if (lane % 4 == 0) w.den[place * C + warp * 16 + e * 8 + lane / 4] = sum;
            }
        write_tile<PANEL_BYTES, THREADS>(w.scores + place * PANEL_BYTES, s.tile);
        if constexpr (RULE == LA_DELTA) {
            invert(s.L, s.room);
            put_inverse<THREADS>(s.L, s.beta, s.tile);
            __syncthreads();
            write_tile<PANEL_BYTES, THREADS>(w.inverse + place * PANEL_BYTES, s.tile);
        }
    }
}

/* ---- prepare: decays per key ----
 *
 * The decay from after token j through token i differs from key to key, so it is part of the
 * operands, in blocks of 16 tokens. Let f_i be the decay from the start of the block of i through
 * token i, h_j the decay from after j to the end of the block of j, and t_R the decay of the whole
 * block R. Then block (I, J < I) is (x f) diag(t_(J+1) ... t_(I-1)) (k h)', where x is q, x or k.
 * Diagonal blocks are (x f) (k / f)'. That is accurate for a row if f has stayed between 1 / REACH
 * and REACH up to this row; rows after it do not matter. From the first row where f has not, the
 * decay of each pair is multiplied up in float32. The exponents of bf16 reach from 2^-126 to 2^127,
 * those of float16 from 2^-14 to 2^15. The range that REACH leaves is for k and q. */
static constexpr float REACH = NARROW ? 0x1p8f : 0x1p100f;

template <int KP> struct key_room {
    /* k becomes k / f, q becomes q f. xf has x, which becomes x f; without an x, k f. The additive
     * rule has no xf. There a bonus lies in its place, and a token's weight in its own read. */
    alignas(1024) char k[tile_bytes(KP)], q[tile_bytes(KP)];
    union {
        alignas(1024) char xf[tile_bytes(KP)];
        struct {
            float bonus[KP], own[C];
        };
    };
    alignas(1024) char kh[tile_bytes(KP)];
    union {
        float a[C * KP];
        struct {
            char tile[PANEL_BYTES];
            float room[4 * 32 * 12];
            alignas(16) char lower[PANEL_BYTES]; /* for gradients */
        };
    };
    float t[4 * KP], beta[C];
    int nonfinite,
        slow[4]; /* slow: the first row of each block whose diagonal part goes pair by pair */
};

static_assert(PLANES == 2 || sizeof(key_room<128>) <= 99 << 10, "as sm_86, sm_89, sm_120");

/* x times a number per key. The columns of the left operand are key.. + lane % 4 * 2 +
 * {0, 1, 8, 9}. */
__device__ __forceinline__ operand scaled(const operand &x, const float *by)
{
    const float *y = by + threadIdx.x % 4 * 2;
    operand z;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 of = numbers(x, e), g = *(const float2 *)(y + e / 2 * 8);
        put_pair(z, e, of.x * g.x, of.y * g.y);
    }
    return z;
}

/* The decays of a chunk, [C][KP] floats, from `first_key` on. They are ones past its end. */
template <int KP>
__device__ void load_decays(const call &c, const unit &u, int t, int n, float *a, int first_key = 0)
{
    const int keys = c.K - first_key;
    const bool rows_of_4 =
        c.x[LA_G].dtype == LA_F32 && c.K % 4 == 0 && (uintptr_t)c.x[LA_G].data % 16 == 0 &&
        (c.x[LA_G].stride[0] | c.x[LA_G].stride[1] | c.x[LA_G].stride[2]) % 4 == 0;
    if (rows_of_4) { /* all loads start before the first wait */
        constexpr int COUNT = C * KP / 4 / KEY_THREADS, STEP = KEY_THREADS / (KP / 4);
        const int first = threadIdx.x / (KP / 4), key = threadIdx.x % (KP / 4) * 4;
        const float *from = (const float *)at(c.x[LA_G], u.b, t, u.hv, first_key + key);
        float4 x[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int row = first + i * STEP;
            x[i] = row < n && key < keys ? *(const float4 *)(from + row * c.x[LA_G].stride[1])
                                         : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int row = first + i * STEP;
            const bool there = row < n && key < keys;
            if (c.gate != LA_DECAY) /* a log decay: slopes are never per key */
                x[i] = make_float4(decay_of(x[i].x, LA_LOG), decay_of(x[i].y, LA_LOG),
                                   decay_of(x[i].z, LA_LOG), decay_of(x[i].w, LA_LOG));
            else if (!there)
                x[i] = make_float4(1, 1, 1, 1);
            *(float4 *)(a + row * KP + key) = x[i];
        }
        return;
    }
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < C; row += KEY_THREADS / 32) {
        float x[KP / 32];
        if (row < n)
            load_row(x, at(c.x[LA_G], u.b, t + row, u.hv, first_key), c.x[LA_G].dtype, lane, 32,
                     keys);
#pragma unroll
        for (int j = 0; j < KP / 32; j++)
            a[row * KP + lane + 32 * j] =
                row < n && lane + 32 * j < keys ? decay_of(x[j], c.gate) : 1;
    }
}

/* Diagonal blocks pair by pair. A warp has a block. A lane has its column lane % 16 and every other
 * pair of keys. The results are rows of the sums x k' and q k'; `looks` is the tile of x. If
 * `early`, q of the additive rule, or x of the delta rule, sees the state before the decay of its
 * token. */
template <int KP, la_rule RULE>
__device__ void multiply_pairs(const key_room<KP> &s, const char *looks, bool early,
                               float (&xk)[16], float (&qk)[16])
{
    const int lane = threadIdx.x % 32, j = lane % 16, first = threadIdx.x / 32 * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) xk[i] = qk[i] = 0;
    for (int key = lane / 16 * 2; key < KP; key += 4) {
        float2 k = get_pair(s.k + element_at(first + j, key));
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 a = *(const float2 *)&s.a[(first + i) * KP + key];
            const float2 x = get_pair(looks + element_at(first + i, key));
            const float2 q = get_pair(s.q + element_at(first + i, key));
            const float2 before = k;
            if (i > j) {
                k.x *= a.x;
                k.y *= a.y;
            }
            const float2 for_q = early && RULE == LA_ADDITIVE ? before : k;
            const float2 for_x = early && RULE == LA_DELTA ? before : k;
            if (i >= j) {
                xk[i] += x.x * for_x.x + x.y * for_x.y;
                qk[i] += q.x * for_q.x + q.y * for_q.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        xk[i] += __shfl_xor_sync(~0u, xk[i], 16);
        qk[i] += __shfl_xor_sync(~0u, qk[i], 16);
    }
}

/* q . (bonus k) of each token. Four neighbouring threads have a token. The rows are as the
 * recurrence sees them. The state has no part in this, so a NaN here is no NaN of the chunk. */
template <int KP> __device__ void find_own(key_room<KP> &s)
{
    const int row = threadIdx.x / 4;
    float own = 0;
#pragma unroll 4
    for (int key = threadIdx.x % 4 * 2; key < KP; key += 8) {
        const float2 q = get_pair(s.q + element_at(row, key));
        const float2 k = get_pair(s.k + element_at(row, key));
        const float2 bonus = *(const float2 *)(s.bonus + key);
        own += q.x * k.x * bonus.x + q.y * k.y * bonus.y;
    }
    own = quad_sum(own);
    if (threadIdx.x % 4 == 0) s.own[row] = own;
}

/* With a bonus (the rule BONUS; here it is additive) q reads before the decay of its token, and the
 * diagonal of P is q . (bonus k). Under the delta rule x may look before that decay.
 *
 * Warps 0 to 3 multiply the rows of Q K', warps 4 to 7 those of X K' with the longest row first. So
 * the two warps that share a scheduler have five blocks together. */
template <int KP, la_rule RULE, typename = element>
__global__ void __launch_bounds__(KEY_THREADS, (KP * PLANES > 128 ? 1 : 2))
    prepare_key(const __grid_constant__ call c, const __grid_constant__ chunks w,
                const as_given given)
{
    extern __shared__ __align__(1024) char shared[];
    key_room<KP> &s = *(key_room<KP> *)shared;
    float *L = (float *)s.q; /* lies over q f, x f and k h, after they have been read */
    static_assert(sizeof(float) * C * LD <= 3 * tile_bytes(KP), "L lies over three tiles");
    const int chunk_slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (float)c.scale;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int place = chunk_slot * c.HV + hv; /* the launch has checked that it fits */

    int found = C; /* the first row with a NaN or an infinity */
    if (threadIdx.x < 5) (threadIdx.x < 4 ? s.slow[threadIdx.x] : s.nonfinite) = C;
    load_decays<KP>(c, u, t, n, s.a);
    const bool has_x = RULE == LA_DELTA && c.x[LA_X].data;
    const bool bonus = RULE == LA_ADDITIVE && c.x[LA_U].data;
    const bool early = bonus || (has_x && c.predicts_before); /* of q; under the delta rule of x */
    if (bonus && threadIdx.x < KP)
        s.bonus[threadIdx.x] = (int)threadIdx.x < c.K
                                   ? load<float>(at(c.x[LA_U], u.h, threadIdx.x), c.x[LA_U].dtype)
                                   : 0;
    load_all<KP, KEY_THREADS>(c, u.b, t, n, u.h, s.q, s.k, has_x ? s.xf : NULL, given);
    __syncthreads();
    if (RULE == LA_DELTA && c.x_is_factor) multiply_tile<KP, KEY_THREADS>(s.xf, s.k);
    if (bonus) find_own<KP>(s);

    if (RULE == LA_DELTA && threadIdx.x < C) {
        const float beta = threadIdx.x < n ? load<float>(at(c.x[LA_BETA], u.b, t + threadIdx.x, hv),
                                                         c.x[LA_BETA].dtype)
                                           : 0;
        if (!isfinite(beta)) found = threadIdx.x;
        s.beta[threadIdx.x] = beta;
    }
    for (int i = threadIdx.x; i < 4 * KP; i += KEY_THREADS) {
        const int block = i / KP, key = i % KP;
        float f = 1;
        int slow = C;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float a = s.a[(block * 16 + j) * KP + key];
            if (!isfinite(a)) found = min(found, block * 16 + j);
            f *= a;
            if (!(f >= 1 / REACH && f <= REACH)) slow = min(slow, block * 16 + j);
        }
        s.t[i] = f;
        if (slow < C) atomicMin(s.slow + block, slow);
    }
    __syncthreads();
    float slow_xk[16], slow_qk[16];
    const int slow = warp < 4 ? s.slow[warp] : C;
    if (slow < C) multiply_pairs<KP, RULE>(s, has_x ? s.xf : s.k, early, slow_xk, slow_qk);
    __syncthreads();

    /* Running products up the chunk, then down. A thread has two keys and a block of 16 rows. */
    const int64_t keys = (int64_t)place * tile_bytes(KP);
    char *to_q = w.q + keys, *to_k = w.k + keys, *to_kt = w.kt + keys;
    constexpr int BLOCKS = KEY_THREADS / (KP / 2); /* at a time */
    const int own = threadIdx.x % (KP / 2) * 2;
#pragma unroll
    for (int first = 0; first < 4; first += BLOCKS) {
        const int block = first + threadIdx.x / (KP / 2);
        if (block >= 4) continue;
        float2 all = make_float2(1, 1), h = all;
        for (int j = 3; j > block; j--) {
            all.x *= s.t[j * KP + own];
            all.y *= s.t[j * KP + own + 1];
        }
#pragma unroll 8
        for (int i = block * 16 + 15; i >= block * 16; i--) {
            const float2 a = *(const float2 *)&s.a[i * KP + own];
            const int here = element_at(i, own);
            const float2 k = get_pair(s.k + here);
            put_pair(to_kt + here, k.x * all.x, k.y * all.y);
            if (too_large(k.x * all.x) || too_large(k.y * all.y)) found = 0; /* decays above one */
            put_pair(s.kh + here, k.x * h.x, k.y * h.y);
            all = make_float2(all.x * a.x, all.y * a.y);
            h = make_float2(h.x * a.x, h.y * a.y);
        }
        if (block == 0) *(float2 *)(w.total + (int64_t)place * KP + own) = all;
    }
    __syncthreads(); /* from here on k becomes k / f */
    const auto scale_up = [&](int block, auto before) {
        constexpr bool early_q = decltype(before)::value && RULE == LA_ADDITIVE;
        constexpr bool early_x = decltype(before)::value && RULE == LA_DELTA;
        float2 all = make_float2(1, 1), f = all;
        for (int j = 0; j < block; j++) {
            all.x *= s.t[j * KP + own];
            all.y *= s.t[j * KP + own + 1];
        }
#pragma unroll 8
        for (int i = block * 16; i < block * 16 + 16; i++) {
            const float2 a = *(const float2 *)&s.a[i * KP + own];
            const int here = element_at(i, own);
            const float2 k = get_pair(s.k + here), x = has_x ? get_pair(s.xf + here) : k;
            const float2 q = get_pair(s.q + here);
            const float2 all_before = all, f_before = f;
            all = make_float2(all.x * a.x, all.y * a.y);
            f = make_float2(f.x * a.x, f.y * a.y);
            const float2 all_of_q = early_q ? all_before : all, of_q = early_q ? f_before : f;
            const float2 all_of_x = early_x ? all_before : all, of_x = early_x ? f_before : f;
            const float2 read = make_float2(q.x * all_of_q.x * scale, q.y * all_of_q.y * scale);
            put_pair(to_q + here, read.x, read.y);
            if (too_large(read.x) || too_large(read.y)) found = 0;
            put_pair(s.q + here, q.x * of_q.x, q.y * of_q.y);
            put_pair(s.k + here, __fdividef(k.x, f.x), __fdividef(k.y, f.y));
            if (RULE == LA_DELTA) {
                put_pair(to_k + here, x.x * all_of_x.x, x.y * all_of_x.y);
                put_pair(s.xf + here, x.x * of_x.x, x.y * of_x.y);
            }
        }
    };
#pragma unroll
    for (int first = 0; first < 4; first += BLOCKS) {
        const int block = first + threadIdx.x / (KP / 2);
        if (block >= 4) continue;
        if (early)
            scale_up(block, std::true_type());
        else
            scale_up(block, std::false_type());
    }
    __syncthreads();

    const bool scores = warp < 4, works = scores || RULE == LA_DELTA;
    const int I = scores ? warp : 7 - warp;
    float x[4][2][4] = {}; /* of blocks (I, I), (I, I - 1), ... */
    if (works) {
        const uint32_t rows = address_of(scores ? s.q : s.xf);
        const uint32_t kh = lane_with_rows(address_of(s.kh)), k_f = lane_with_rows(address_of(s.k));
#pragma unroll
        for (int i = 0; i < KP; i += 16) {
            operand of = load_operand(rows, I * 16, i);
#pragma unroll
            for (int back = 0; back < 4; back++) {
                if (back > I) continue;
                if (back > 1) of = scaled(of, s.t + (I - back + 1) * KP + i);
                multiply_with_rows(x[back][0], x[back][1], of, back ? kh : k_f, (I - back) * 16, i);
            }
        }
        /* rows of both halves; those from slow on are computed elsewhere */
        if (I * 16 + lane / 4 < s.slow[I])
            found = min(found, I * 16 + nonfinite_on_diagonal(x[0][0], 0));
        if (I * 16 + 8 + lane / 4 < s.slow[I])
            found = min(found, I * 16 + nonfinite_on_diagonal(x[0][1], 8));
    }
    if (slow < C && lane < 16)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i == lane && warp * 16 + i >= slow &&
                !(isfinite(slow_qk[i]) && isfinite(slow_xk[i])))
                found = min(found, warp * 16 + i);
    int nonfinite = C;
    if (__syncthreads_or(found < C)) { /* x f, k h and a are no longer needed */
        atomicMin(&s.nonfinite, found);
        __syncthreads();
        nonfinite = s.nonfinite;
        if (RULE == LA_DELTA && threadIdx.x < C && threadIdx.x >= nonfinite)
            s.beta[threadIdx.x] = 0;
        __syncthreads();
    }
    if (threadIdx.x == 0) w.nonfinite[place] = nonfinite;
    int too_large_from = C; /* the first row with a score that is too large */
    clear_above<KEY_THREADS>(s.tile);
    const bool lower = RULE == LA_DELTA && w.lower;
    if (lower) clear_above<KEY_THREADS>(s.lower);
    if (RULE == LA_DELTA) clear_pairs(L);

    if (works)
#pragma unroll
        for (int back = 0; back < 4; back++) {
            if (back > I) continue;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = I * 16 + e / 2 * 8 + lane / 4;
                const int column = (I - back) * 16 + e % 2 * 8 + lane % 4 * 2;
                const float y = x[back][e % 2][e / 2 * 2], z = x[back][e % 2][e / 2 * 2 + 1];
                const int last = row < nonfinite ? row : -1; /* the last column of this row */
                const bool here = back || row < s.slow[I];   /* otherwise its score comes later */
                const int found_here = bonus ? last - 1 : last; /* `own` takes the diagonal */
                if (scores && here &&
                    ((column <= found_here && no_element(y * scale)) ||
                     (column < found_here && no_element(z * scale))))
                    too_large_from = min(too_large_from, row);
                if (scores)
                    put_pair(s.tile + element_at(row, column), column <= last ? y * scale : 0,
                             column < last ? z * scale : 0);
                else {
                    *(float2 *)&L[row * LD + column] =
                        make_float2(column < last ? s.beta[row] * y : 0,
                                    column + 1 < last ? s.beta[row] * z : 0);
                    if (lower)
                        put_pair(s.lower + element_at(row, column), column < last ? -y : 0,
                                 column + 1 < last ? -z : 0);
                }
            }
        }
    __syncthreads();
    if (slow < C && lane < 16)
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int row = warp * 16 + i, column = warp * 16 + lane;
            if (row < slow || row < column || row >= nonfinite) continue;
            put_one(s.tile + element_at(row, column), slow_qk[i] * scale);
            if (no_element(slow_qk[i] * scale)) too_large_from = min(too_large_from, row);
            if (RULE == LA_DELTA && row > column) L[row * LD + column] = s.beta[row] * slow_xk[i];
            if (lower && row > column) put_one(s.lower + element_at(row, column), -slow_xk[i]);
        }
    __syncthreads();
    if (bonus) {
        const int row = threadIdx.x;
        if (row < nonfinite) {
            const float own = s.own[row] * scale;
            put_one(s.tile + element_at(row, row), own);
            if (too_large(own)) too_large_from = min(too_large_from, row);
        }
        __syncthreads();
    }
    if (too_large_from < C) atomicMin(w.nonfinite + place, too_large_from);
    if (lower)
        write_tile<PANEL_BYTES, KEY_THREADS>(w.lower + (int64_t)place * PANEL_BYTES, s.lower);
    write_tile<PANEL_BYTES, KEY_THREADS>(w.scores + (int64_t)place * PANEL_BYTES, s.tile);
    if constexpr (RULE == LA_DELTA) {
        invert(L, s.room);
        put_inverse<KEY_THREADS>(L, s.beta, s.tile);
        __syncthreads();
        write_tile<PANEL_BYTES, KEY_THREADS>(w.inverse + (int64_t)place * PANEL_BYTES, s.tile);
    }
}

#include "pair.cuh"

template <int KP, la_decay DECAY, la_rule RULE> constexpr int prepare_bytes(bool with_x)
{
    if constexpr (DECAY == LA_PAIR)
        return (int)sizeof(pair_room<keys_of<KP, DECAY>>);
    else
        return DECAY == LA_KEY ? (int)sizeof(key_room<KP>) : scalar_room_bytes<KP, RULE>(with_x);
}

template <int KP, la_decay DECAY, la_rule RULE> constexpr auto prepare_of()
{
    if constexpr (DECAY == LA_PAIR)
        return prepare_pair<KP>;
    else if constexpr (DECAY == LA_KEY)
        return prepare_key<KP, RULE>;
    else
        return prepare_scalar<KP, RULE>;
}

#endif
