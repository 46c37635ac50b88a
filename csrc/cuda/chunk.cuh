/* The chunk form on tensor cores, for bf16 arrays: two kernels.
 *
 * `prepare` does what belongs to one chunk of C = 64 tokens alone, all chunks side by side: the
 * scores P = tril(Q K' . G) and, for the delta rule, the inverse A = (I + strict(diag(b) K K' . G))^-1
 * diag(b), where G_ij is the decay from after token j through token i. `walk` then goes from chunk
 * to chunk with the state in registers:
 *
 *     solve  W = V - k^ S      U = A W       (additive rule: U = V)
 *     read   O = q^ S + P U                  (times scale)
 *     carry  S <- diag(a) S + k~' U
 *
 * where q^ and k^ are rows of q and k times the decay from the chunk's start, k~ times the decay to
 * its end, and a is the whole chunk's. A scalar decay scales rows of the products instead. Decays
 * are multiplied, never summed as logarithms (docs/decisions/0005): no exponent is ever positive,
 * and a decay of zero is a zero.
 *
 * `walk` computes everything transposed: a warp owns 16 value columns, as the 16 rows of its left
 * operands. The accumulators of one product are then the left operand of the next, the state stays
 * in registers both as sums and as an operand, and no warp waits for another but for the tiles. */
#include "kernels.cuh"
#include "load.cuh"
#include "tile.cuh"

#include <cuda.h>
#include <cudaTypedefs.h>

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL
#define JOIN(x, y, W) join_quads(x, y, W)
typedef float real, lane, lane_of_state;
enum { MAX_STRIP = 2 };

/* The sums over the four threads that have a column's keys in an accumulator. */
LA_FN void join_quads(float *x, float *y, int W)
{
    for (int w = 0; w < W; w++) x[w] = quad_sum(x[w]);
    for (int w = 0; w < W && y; w++) y[w] = quad_sum(y[w]);
}

#include "../recurrence.h"

enum { C = ROWS, LD = 68 }; /* rows of float32 matrices: 4 banks further each */

/* ---- chunks of sequences ----
 *
 * What prepare leaves for walk lies in slots, one per chunk. Where sequence n's slots begin must be
 * known without the lengths of those before it, so each may leave one slot unused:
 * floor(end / C) - floor(start / C) + 1 >= ceil((end - start) / C). */

struct chunks {
    char *scores, *inverse; /* [slots][HV] tiles of C columns: P, A */
    char *q, *k;            /* [slots][heads] tiles of KP columns; NULL: read as they are given */
    char *kt;               /* per-key decays: [slots][HV] tiles, k~ */
    float *in, *out;        /* scalar decays: [slots][HV][C], from the start, to the end */
    float *total;           /* per-key decays: [slots][HV][KP], of the chunk */
    int *odd;               /* [slots][HV]: the first token with a NaN or an infinity in q, k, the
                             * gate or beta; C if there is none. From it on, P and A are zeros. */
    int slots, heads;
};

__device__ inline int64_t edge_of(const call &c, int n)
{
    const int64_t at = n * c.cu.stride[0];
    const int64_t x = c.cu.dtype == LA_I64 ? ((const int64_t *)c.cu.data)[at]
                                           : ((const int32_t *)c.cu.data)[at];
    return min(max(x, (int64_t)0), (int64_t)c.T);
}

__device__ inline int first_slot(const call &c, int n)
{
    return c.cu.data ? (int)(edge_of(c, n) / C) + n : n * ((c.T + C - 1) / C);
}

/* The sequence whose slot this is: the last that begins at or before it. */
__device__ inline int sequence_of(const call &c, int slot)
{
    if (!c.cu.data) return slot / ((c.T + C - 1) / C);
    int low = 0, high = c.N - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_slot(c, middle) <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* ---- prepare: loads ---- */

struct tensor_maps {
    CUtensorMap q, k, v;
};

/* The driver's, found at run time: nothing is linked against it. */
static PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder()
{
    void *found = NULL;
    cudaDriverEntryPointQueryResult how;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                               cudaEnableDefault, &how);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &how);
#endif
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess ? (PFN_cuTensorMapEncodeTiled_v12000)found : NULL;
}

/* x [B,T,heads,columns] as Hopper's copy engine takes it, in boxes of C tokens and `box` columns;
 * and, for any device: can its rows be copied in pieces of 16 bytes? */
static bool map_of(const call &c, const view &x, int heads, int columns, int box, CUtensorMap *map)
{
    static const auto encode = tensor_map_encoder();
    const int64_t sizes[] = {c.B, c.T, heads};
    cuuint64_t size[4] = {(cuuint64_t)columns, (cuuint64_t)heads, (cuuint64_t)c.T, (cuuint64_t)c.B};
    cuuint64_t stride[3]; /* bytes; of heads, tokens, batch rows */
    const cuuint32_t boxes[4] = {(cuuint32_t)box, 1, C, 1}, step[4] = {1, 1, 1, 1};
    if ((uintptr_t)x.data % 16 || columns % 8) return false;
    for (int i = 0; i < 3; i++) {
        if (sizes[i] > 1 && (x.stride[i] <= 0 || x.stride[i] % 8)) return false;
        stride[2 - i] = sizes[i] > 1 ? (cuuint64_t)x.stride[i] * 2 : (cuuint64_t)columns * 2;
    }
    /* without the engine, rows are copied piece by piece */
    return !encode || encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, x.data, size, stride, boxes,
                             step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                             box == PANEL ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Tokens t..t+n of head h, by all threads; rows and columns past the end are zeros. The caller waits
 * for the copies. */
template <int COLUMNS>
__device__ void copy_tile(const view &x, int columns, int b, int t, int n, int h, uint32_t tile)
{
    const char *from = at(x, b, t, h);
    for (int i = threadIdx.x; i < C * COLUMNS / 8; i += blockDim.x) {
        const int row = i / (COLUMNS / 8), piece = i % (COLUMNS / 8);
        const bool there = row < n && piece * 8 < columns;
        copy_async(tile + piece_at(row, piece),
                   from + (there ? row * x.stride[1] * 2 + piece * 16 : 0), there);
    }
}

__device__ inline void copy_bytes(uint32_t to, const char *from, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16) copy_async(to + i, from + i, true);
}

/* The same rows as the recurrence sees them: normed, mapped. A warp takes a row. */
template <int KP>
__device__ void load_keys(const call &c, const view &from, la_map map, double map_eps, int b, int t,
                          int n, int h, char *tile)
{
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < C; row += blockDim.x / 32) {
        float x[KP / 32], squares = 0;
#pragma unroll
        for (int j = 0; j < KP / 32; j++) {
            const int i = j / 2 * 64 + lane * 2 + j % 2;
            x[j] = row < n && i < c.K ? load<float>(at(from, b, t + row, h, i), LA_BF16) : 0;
            squares += x[j] * x[j];
        }
        const float factor = c.qk_l2norm ? l2norm_factor(warp_sum(squares)) : 1;
#pragma unroll
        for (int j = 0; j < KP / 32; j++) {
            const int i = j / 2 * 64 + lane * 2 + j % 2;
            x[j] *= factor;
            x[j] = row < n && i < c.K ? apply_map(x[j], map, (float)map_eps) : 0;
        }
#pragma unroll
        for (int j = 0; j < KP / 32; j += 2)
            *(uint32_t *)(tile + element_at(row, j * 32 + lane * 2)) = pack(x[j], x[j + 1]);
    }
}

/* q and k of a chunk, ready after the next __syncthreads. */
template <int KP>
__device__ void load_both(const call &c, const chunks &w, int b, int t, int n, int h, char *q,
                          char *k, bool q_as_given, bool k_as_given)
{
    if (q_as_given)
        copy_tile<KP>(c.q, c.K, b, t, n, h, address_of(q));
    else
        load_keys<KP>(c, c.q, c.map[0], c.map_eps[0], b, t, n, h, q);
    if (k_as_given)
        copy_tile<KP>(c.k, c.K, b, t, n, h, address_of(k));
    else
        load_keys<KP>(c, c.k, c.map[1], c.map_eps[1], b, t, n, h, k);
    copies_end_group();
    copies_wait<0>();
}

__device__ inline void write_tile(char *to, const char *tile, int bytes)
{
    for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
        *(uint4 *)(to + i) = *(const uint4 *)(tile + i);
}

/* ---- prepare: the inverse of I + L, L strictly lower triangular [C][C], in place ----
 *
 * Blocks of 16 by substitution in float32; then two at a time, [A 0; B D]^-1 has -D^-1 B A^-1 below
 * the diagonal. Those products keep tf32's 11 bits, three more than the bf16 they end in. The
 * first four warps work; room [4][32][12]. */
__device__ inline void invert(float *L, float *room)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool works = warp < 4;
    float *own = room + warp * 32 * 12; /* [32][8], rows 12 apart */
    if (works) {
        float *block = L + warp * 16 * (LD + 1), x[16];
        const int column = lane % 16;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float sum = i == column;
#pragma unroll
            for (int j = 0; j < i; j++) sum -= block[i * LD + j] * x[j];
            x[i] = i < column ? 0 : sum;
        }
        __syncwarp();
        if (lane < 16)
#pragma unroll
            for (int i = 0; i < 16; i++) block[i * LD + column] = x[i];
    }
    __syncthreads();
    { /* 16 -> 32: two warps a pair, 8 columns each */
        float *A = L + warp / 2 % 2 * 32 * (LD + 1), *B = A + 16 * LD, *D = B + 16;
        const int column = warp % 2 * 8;
        float c[4] = {}, e[4] = {};
        if (works) {
            multiply_tf32<2>(c, B, LD, A + column, LD);
            put(own, 12, c, 1);
        }
        __syncthreads(); /* both have read B */
        if (works) {
            multiply_tf32<2>(e, D, LD, own, 12);
            put(B + column, LD, e, -1);
        }
    }
    __syncthreads();
    { /* 32 -> 64: 8 columns a warp */
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

/* A = L diag(beta) as a tile; zeros above the diagonal. */
__device__ inline void write_inverse(const float *L, const float *beta, char *tile, char *to)
{
    for (int i = threadIdx.x; i < C * C / 2; i += blockDim.x) {
        const int row = i / (C / 2), column = i % (C / 2) * 2;
        const bool there = column / 16 <= row / 16;
        *(uint32_t *)(tile + element_at(row, column)) =
            there ? pack(L[row * LD + column] * beta[column],
                         L[row * LD + column + 1] * beta[column + 1])
                  : 0;
    }
    __syncthreads();
    write_tile(to, tile, PANEL_BYTES);
}

/* Sums of products q k' (and k k') of rows row and row + 8, columns column and + 1: on the diagonal,
 * is a token's q or k not finite? Its square says so, and so does its product with the other. Rows
 * from `end` on are somebody else's. */
__device__ __forceinline__ void note_odd(const float (&qk)[4], const float (&kk)[4], int row,
                                         int column, int *odd, int end = C)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int of = row + e / 2 * 8;
        if (of < end && column + e % 2 == of && !(isfinite(qk[e]) && isfinite(kk[e]))) atomicMin(odd, of);
    }
}

/* ---- prepare: scalar decays ---- */

template <int KP> struct scalar_room {
    union {
        struct {
            alignas(1024) char k[tile_bytes(KP)], q[tile_bytes(KP)];
        };
        struct { /* once the products are in registers */
            char tile[PANEL_BYTES];
            float G[C * LD], room[4 * 32 * 12]; /* G, then L in its place */
        };
    };
    float a[C], beta[C];
    int odd[2]; /* of q and k, of a value head */
};

template <int KP, la_rule RULE>
__global__ void __launch_bounds__(128, RULE == LA_DELTA ? 3 : 5) prepare_scalar(const __grid_constant__ call c,
                                                      const __grid_constant__ chunks w, bool q_as_given, bool k_as_given)
{
    extern __shared__ __align__(1024) char shared[];
    scalar_room<KP> &s = *(scalar_room<KP> *)shared;
    const int slot = blockIdx.x / c.H, h = blockIdx.x % c.H, group = c.HV / c.H;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unit u = unit_of(c, sequence_of(c, slot), h * group);
    const int t = u.begin + (slot - first_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;

    if (threadIdx.x == 0) s.odd[0] = C;
    load_both<KP>(c, w, u.b, t, n, h, s.q, s.k, q_as_given, k_as_given);
    __syncthreads();
    const int64_t keys = ((int64_t)slot * w.heads + h) * tile_bytes(KP);
    if (w.q) write_tile(w.q + keys, s.q, tile_bytes(KP));
    if (w.k) write_tile(w.k + keys, s.k, tile_bytes(KP));

    /* Q K' and K K', on and below the diagonal; a warp takes 16 rows */
    float qk[8][4] = {}, kk[8][4] = {};
    const uint32_t k_tile = address_of(s.k), q_tile = address_of(s.q);
    const uint32_t k_rows = lane_with_rows(k_tile);
#pragma unroll
    for (int i = 0; i < KP; i += 16) {
        const left of_q = load_left(q_tile, warp * 16, i);
        left of_k;
        if (RULE == LA_DELTA) of_k = load_left(k_tile, warp * 16, i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j > warp) continue;
            const right b = load_right_of_rows(k_rows, j * 16, i);
            multiply(qk[2 * j], qk[2 * j + 1], of_q, b);
            if (RULE == LA_DELTA) multiply(kk[2 * j], kk[2 * j + 1], of_k, b);
        }
    }

#pragma unroll
    for (int j = 0; j < 8; j++)
        note_odd(qk[j], kk[j], warp * 16 + lane / 4, j * 8 + lane % 4 * 2, s.odd);

    for (int hv = h * group; hv < (h + 1) * group; hv++) {
        const int place = slot * c.HV + hv; /* the launch sees to it that it fits */
        __syncthreads(); /* the head before has been written */
        if (threadIdx.x == 0) s.odd[1] = s.odd[0];
        float a = 1, beta = 0;
        if (threadIdx.x < n) {
            if (c.g.data)
                a = decay_of(load<float>(at(c.g, u.b, t + threadIdx.x, hv), c.g.dtype), c.gate);
            if (RULE == LA_DELTA)
                beta = load<float>(at(c.beta, u.b, t + threadIdx.x, hv), c.beta.dtype);
        }
        __syncthreads();
        if (!isfinite(a) || !isfinite(beta)) atomicMin(s.odd + 1, threadIdx.x);
        __syncthreads();
        const int odd = s.odd[1];
        if (threadIdx.x < C) {
            s.a[threadIdx.x] = threadIdx.x < odd ? a : 1;
            s.beta[threadIdx.x] = threadIdx.x < odd ? beta : 0;
            if (threadIdx.x == 0) w.odd[place] = odd;
        }
        __syncthreads();
        if (c.g.data && threadIdx.x < C) {
            const int j = threadIdx.x;
            float g = 1;
            s.G[j * LD + j] = 1;
            for (int i = j + 1; i < C; i++) s.G[i * LD + j] = g *= s.a[i];
        }
        __syncthreads();
        if (w.in && threadIdx.x < C) {
            w.in[(int64_t)place * C + threadIdx.x] = s.a[0] * s.G[threadIdx.x * LD];
            w.out[(int64_t)place * C + threadIdx.x] = s.G[(C - 1) * LD + threadIdx.x];
        }
        if (RULE == LA_DELTA) __syncthreads();
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = warp * 16 + half * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
                const float2 g = c.g.data ? *(const float2 *)&s.G[row * LD + column]
                                          : make_float2(1, 1);
                const float x = qk[j][2 * half], y = qk[j][2 * half + 1];
                const int last = row < odd ? row : -1; /* the last column of this row */
                *(uint32_t *)(s.tile + element_at(row, column)) =
                    pack(column <= last ? x * g.x : 0, column < last ? y * g.y : 0);
                if (RULE == LA_DELTA) {
                    const float b = s.beta[row];
                    *(float2 *)&s.G[row * LD + column] =
                        make_float2(column < last ? b * kk[j][2 * half] * g.x : 0,
                                    column + 1 < last ? b * kk[j][2 * half + 1] * g.y : 0);
                }
            }
        __syncthreads();
        write_tile(w.scores + (int64_t)place * PANEL_BYTES, s.tile, PANEL_BYTES);
        if (RULE == LA_DELTA) {
            invert(s.G, s.room);
            write_inverse(s.G, s.beta, s.tile, w.inverse + (int64_t)place * PANEL_BYTES);
        }
    }
}

/* ---- prepare: decays per key ----
 *
 * The decay from after token j through token i differs from key to key, so it goes into the operands,
 * block by block of 16 tokens: with f_i the decay from the start of i's block through token i, h_j
 * that from after j to the end of j's block, and t_R that of the whole block R, block (I, J < I) is
 * (k f) diag(t_(J+1) ... t_(I-1)) (k h)'. Diagonal blocks are (k f) (k / f)', which is good for a row
 * as long as f has stayed within 2^-100 and 2^100 up to it, and looks at nothing after it; from the
 * first row where it has not, each pair's decay is multiplied up in float32. */

enum { KEY_THREADS = 256 };

template <int KP> struct key_room {
    /* k becomes k / f, q becomes q f */
    alignas(1024) char k[tile_bytes(KP)], q[tile_bytes(KP)], kf[tile_bytes(KP)], kh[tile_bytes(KP)];
    union {
        float a[C * KP];
        struct {
            char tile[PANEL_BYTES];
            float room[4 * 32 * 12];
        };
    };
    float t[4 * KP], beta[C];
    int odd, slow[4]; /* slow: of each block, the first row whose diagonal goes pair by pair */
};

/* x by its keys' numbers: the left operand's columns are key.. + lane % 4 * 2 + {0, 1, 8, 9}. */
__device__ __forceinline__ left scaled(const left &x, const float *by)
{
    const float *y = by + threadIdx.x % 4 * 2;
    left z;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 of = unpack(x.x[e]), g = *(const float2 *)(y + e / 2 * 8);
        z.x[e] = pack(of.x * g.x, of.y * g.y);
    }
    return z;
}

/* The decays of a chunk, [C][KP] floats; ones past its end. */
template <int KP> __device__ void load_decays(const call &c, const unit &u, int t, int n, float *a)
{
    const bool rows_of_4 = c.g.dtype == LA_F32 && c.K % 4 == 0 && (uintptr_t)c.g.data % 16 == 0 &&
                           (c.g.stride[0] | c.g.stride[1] | c.g.stride[2]) % 4 == 0;
    if (rows_of_4) {
#pragma unroll 8
        for (int i = threadIdx.x; i < C * KP / 4; i += KEY_THREADS) {
            const int row = i / (KP / 4), key = i % (KP / 4) * 4;
            float4 x = make_float4(1, 1, 1, 1);
            if (row < n && key < c.K) {
                x = *(const float4 *)at(c.g, u.b, t + row, u.hv, key);
                x = make_float4(decay_of(x.x, c.gate), decay_of(x.y, c.gate), decay_of(x.z, c.gate),
                                decay_of(x.w, c.gate));
            }
            *(float4 *)(a + row * KP + key) = x;
        }
        return;
    }
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < C; row += KEY_THREADS / 32) {
        float x[KP / 32];
        if (row < n) load_row(x, at(c.g, u.b, t + row, u.hv), c.g.dtype, lane, 32, c.K);
#pragma unroll
        for (int j = 0; j < KP / 32; j++)
            a[row * KP + lane + 32 * j] =
                row < n && lane + 32 * j < c.K ? decay_of(x[j], c.gate) : 1;
    }
}

/* Diagonal blocks pair by pair: a warp has a block, a lane its column lane % 16 and every other pair
 * of keys. Rows of the sums k k' and q k'. */
template <int KP>
__device__ void multiply_pairs(const key_room<KP> &s, float (&kk)[16], float (&qk)[16])
{
    const int lane = threadIdx.x % 32, j = lane % 16, first = threadIdx.x / 32 * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) kk[i] = qk[i] = 0;
    for (int key = lane / 16 * 2; key < KP; key += 4) {
        float2 x = unpack(*(const uint32_t *)(s.k + element_at(first + j, key)));
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 a = *(const float2 *)&s.a[(first + i) * KP + key];
            const float2 k = unpack(*(const uint32_t *)(s.k + element_at(first + i, key)));
            const float2 q = unpack(*(const uint32_t *)(s.q + element_at(first + i, key)));
            if (i > j) {
                x.x *= a.x;
                x.y *= a.y;
            }
            if (i >= j) {
                kk[i] += k.x * x.x + k.y * x.y;
                qk[i] += q.x * x.x + q.y * x.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        kk[i] += __shfl_xor_sync(~0u, kk[i], 16);
        qk[i] += __shfl_xor_sync(~0u, qk[i], 16);
    }
}

template <int KP, la_rule RULE>
__global__ void __launch_bounds__(KEY_THREADS, 2) prepare_key(const __grid_constant__ call c,
                                                   const __grid_constant__ chunks w, bool q_as_given,
                                                   bool k_as_given)
{
    extern __shared__ __align__(1024) char shared[];
    key_room<KP> &s = *(key_room<KP> *)shared;
    float *L = (float *)s.q; /* over q f, k f and k h, once they have been read */
    static_assert(sizeof(float) * C * LD <= 3 * tile_bytes(KP), "L lies over three tiles");
    const int slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unit u = unit_of(c, sequence_of(c, slot), hv);
    const int t = u.begin + (slot - first_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int place = slot * c.HV + hv; /* the launch sees to it that it fits */

    if (threadIdx.x < 5) (threadIdx.x < 4 ? s.slow[threadIdx.x] : s.odd) = C;
    load_decays<KP>(c, u, t, n, s.a);
    load_both<KP>(c, w, u.b, t, n, u.h, s.q, s.k, q_as_given, k_as_given);
    __syncthreads();

    if (RULE == LA_DELTA && threadIdx.x < C) {
        const float beta =
            threadIdx.x < n ? load<float>(at(c.beta, u.b, t + threadIdx.x, hv), c.beta.dtype) : 0;
        if (!isfinite(beta)) atomicMin(&s.odd, threadIdx.x);
        s.beta[threadIdx.x] = beta;
    }
    for (int i = threadIdx.x; i < 4 * KP; i += KEY_THREADS) {
        const int block = i / KP, key = i % KP;
        float f = 1;
        int slow = C, odd = C;
#pragma unroll
        for (int j = 15; j >= 0; j--)
            if (!isfinite(s.a[(block * 16 + j) * KP + key])) odd = block * 16 + j;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            f *= s.a[(block * 16 + j) * KP + key];
            if (!(f >= 0x1p-100f && f <= 0x1p100f)) slow = min(slow, block * 16 + j);
        }
        s.t[i] = f;
        if (slow < C) atomicMin(s.slow + block, slow);
        if (odd < C) atomicMin(&s.odd, odd);
    }
    __syncthreads();
    float slow_kk[16], slow_qk[16];
    const bool works = warp < 4; /* on the products; all load and scale */
    const int slow = works ? s.slow[warp] : C;
    if (slow < C) multiply_pairs<KP>(s, slow_kk, slow_qk);
    __syncthreads();

    /* Running products up the chunk, then down: two keys and a block of 16 rows a thread. */
    const int64_t keys = (int64_t)place * tile_bytes(KP);
    char *to_q = w.q + keys, *to_k = w.k + keys, *to_kt = w.kt + keys;
    const int own = threadIdx.x % (KP / 2) * 2, block = threadIdx.x / (KP / 2);
    if (block < 4) {
        float2 all = make_float2(1, 1), h = all;
        for (int j = 3; j > block; j--) {
            all.x *= s.t[j * KP + own];
            all.y *= s.t[j * KP + own + 1];
        }
#pragma unroll 8
        for (int i = block * 16 + 15; i >= block * 16; i--) {
            const float2 a = *(const float2 *)&s.a[i * KP + own];
            const int here = element_at(i, own);
            const float2 k = unpack(*(const uint32_t *)(s.k + here));
            *(uint32_t *)(to_kt + here) = pack(k.x * all.x, k.y * all.y);
            *(uint32_t *)(s.kh + here) = pack(k.x * h.x, k.y * h.y);
            all = make_float2(all.x * a.x, all.y * a.y);
            h = make_float2(h.x * a.x, h.y * a.y);
        }
        if (block == 0) *(float2 *)(w.total + (int64_t)place * KP + own) = all;
    }
    __syncthreads(); /* k turns into k / f */
    if (block < 4) {
        float2 all = make_float2(1, 1), f = all;
        for (int j = 0; j < block; j++) {
            all.x *= s.t[j * KP + own];
            all.y *= s.t[j * KP + own + 1];
        }
#pragma unroll 8
        for (int i = block * 16; i < block * 16 + 16; i++) {
            const float2 a = *(const float2 *)&s.a[i * KP + own];
            const int here = element_at(i, own);
            const float2 k = unpack(*(const uint32_t *)(s.k + here));
            const float2 q = unpack(*(const uint32_t *)(s.q + here));
            all = make_float2(all.x * a.x, all.y * a.y);
            f = make_float2(f.x * a.x, f.y * a.y);
            *(uint32_t *)(to_q + here) = pack(q.x * all.x, q.y * all.y);
            *(uint32_t *)(s.q + here) = pack(q.x * f.x, q.y * f.y);
            *(uint32_t *)(s.k + here) = pack(__fdividef(k.x, f.x), __fdividef(k.y, f.y));
            if (RULE == LA_DELTA) {
                *(uint32_t *)(to_k + here) = pack(k.x * all.x, k.y * all.y);
                *(uint32_t *)(s.kf + here) = pack(k.x * f.x, k.y * f.y);
            }
        }
    }
    __syncthreads();

    float qk[8][4] = {}, kk[8][4] = {};
    const uint32_t kf = address_of(s.kf), qf = address_of(s.q);
    const uint32_t kh = lane_with_rows(address_of(s.kh)), k_f = lane_with_rows(address_of(s.k));
#pragma unroll
    for (int i = 0; i < KP; i += 16) {
        if (!works) continue;
        left of_q = load_left(qf, warp * 16, i), of_k;
        if (RULE == LA_DELTA) of_k = load_left(kf, warp * 16, i);
#pragma unroll
        for (int back = 0; back < 4; back++) { /* block (warp, warp - back) */
            if (back > warp) continue;
            if (back > 1) {
                const float *by = s.t + (warp - back + 1) * KP + i;
                of_q = scaled(of_q, by);
                if (RULE == LA_DELTA) of_k = scaled(of_k, by);
            }
            const right b = load_right_of_rows(back ? kh : k_f, (warp - back) * 16, i);
#pragma unroll
            for (int j = 0; j < 4; j++) { /* constant places of the sums */
                if (j != warp - back) continue;
                multiply(qk[2 * j], qk[2 * j + 1], of_q, b);
                if (RULE == LA_DELTA) multiply(kk[2 * j], kk[2 * j + 1], of_k, b);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        note_odd(qk[j], kk[j], warp * 16 + lane / 4, j * 8 + lane % 4 * 2, &s.odd,
                 works ? slow : 0);
    if (slow < C && lane < 16)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i == lane && warp * 16 + i >= slow && !(isfinite(slow_qk[i]) && isfinite(slow_kk[i])))
                atomicMin(&s.odd, warp * 16 + i);
    __syncthreads(); /* k f, k h and a are done with */
    const int odd = s.odd;
    if (threadIdx.x == 0) w.odd[place] = odd;
    if (RULE == LA_DELTA && threadIdx.x < C && threadIdx.x >= odd) s.beta[threadIdx.x] = 0;
    __syncthreads();

#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (!works) continue;
            const int row = warp * 16 + half * 8 + lane / 4, column = j * 8 + lane % 4 * 2;
            const float x = qk[j][2 * half], y = qk[j][2 * half + 1];
            const int last = row < odd ? row : -1; /* the last column of this row */
            *(uint32_t *)(s.tile + element_at(row, column)) =
                pack(column <= last ? x : 0, column < last ? y : 0);
            if (RULE == LA_DELTA) {
                const float b = s.beta[row];
                *(float2 *)&L[row * LD + column] =
                    make_float2(column < last ? b * kk[j][2 * half] : 0,
                                column + 1 < last ? b * kk[j][2 * half + 1] : 0);
            }
        }
    if (slow < C) {
        __syncwarp();
        const int column = warp * 16 + lane % 16;
        if (lane < 16)
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int row = warp * 16 + i;
                if (row < slow || row < column || row >= odd) continue;
                *(bf16 *)(s.tile + element_at(row, column)) = __float2bfloat16_rn(slow_qk[i]);
                if (RULE == LA_DELTA && row > column)
                    L[row * LD + column] = s.beta[row] * slow_kk[i];
            }
    }
    __syncthreads();
    write_tile(w.scores + (int64_t)place * PANEL_BYTES, s.tile, PANEL_BYTES);
    if (RULE == LA_DELTA) {
        invert(L, s.room);
        write_inverse(L, s.beta, s.tile, w.inverse + (int64_t)place * PANEL_BYTES);
    }
}

/* ---- walk ---- */

enum { SLICE_BYTES = C * 16 * 2 };

/* A warp's 16 value columns of a chunk: 64 rows of two 16-byte pieces. */
__device__ __forceinline__ int slice_at(int row, int piece)
{
    return row * 32 + ((piece ^ (row / 4 & 1)) << 4);
}

/* Where the parts of a stage lie in shared memory. */
template <int KP, la_decay DECAY, la_rule RULE> struct stage {
    static constexpr bool has_k = RULE == LA_DELTA || DECAY != LA_KEY; /* else k~ is all there is */
    static constexpr int k = 0, q = k + (has_k ? tile_bytes(KP) : 0), kt = q + tile_bytes(KP);
    static constexpr int scores = kt + (DECAY == LA_KEY ? tile_bytes(KP) : 0);
    static constexpr int inverse = scores + PANEL_BYTES;
    static constexpr int in = inverse + (RULE == LA_DELTA ? PANEL_BYTES : 0);
    static constexpr int out = in + (DECAY == LA_TOKEN ? C * 4 : 0);
    static constexpr int total = out + (DECAY == LA_TOKEN ? C * 4 : 0);
    static constexpr int v = total + (DECAY == LA_KEY ? KP * 4 : 0);
    __host__ __device__ static constexpr int bytes(int warps) { return (v + warps * SLICE_BYTES + 1023) / 1024 * 1024; }
};

struct walk_flags {
    bool v_pieces, o_pieces; /* rows of v come, rows of o go in pieces of 16 bytes */
};

/* A sequence in `count` segments, walked side by side when there are few heads (docs/math.md: the
 * segment map). What a segment makes of the state before it is S -> M S + X, so there are three
 * launches: TO_ENDS walks every segment from a state of zero, which ends as X, and, for the delta rule,
 * from the columns of the identity with v = 0, which end as M's; `join_segments` goes along the
 * segments; ALONG walks each again from the state it then has. */
struct segments {
    int count;
    float *ends;   /* [N * HV][count][16 (slices + key slices)][KP]: X', then M' */
    float *starts; /* [N * HV][count][16 slices][KP]: S'; NULL: the call's own initial state */
};

/* What a walk is for: the causal form; the ends of segments; the form that is not causal, which goes
 * through the chunks twice, to write all and then to read. */
enum way { ALONG, TO_ENDS, ACROSS };

/* A chunk that holds a NaN or an infinity goes token by token, for its state and for O from token
 * `first` on: in a product with a triangle, zero times infinity would spoil the tokens before it.
 * O' [16 columns][C] and S' as walk has them. */
template <int KP, la_decay DECAY, la_rule RULE>
__device__ __noinline__ void token_walk(const call &c, const unit &u, int t, int n, int first,
                                        int v0, int columns, float *S, float *O)
{
    const int lane = threadIdx.x % 32, column = lane / 4, pair = lane % 4 * 2;
    float q[KP / 4], k[KP / 4], a[DECAY == LA_KEY ? KP / 4 : 1] = {1};
    for (int i = 0; i < n; i++) {
        float squares_q = 0, squares_k = 0, qk = 0;
        for (int j = 0; j < KP / 4; j++) {
            const int key = j / 2 * 8 + pair + j % 2;
            const bool there = key < c.K;
            q[j] = there ? load<float>(at(c.q, u.b, t + i, u.h, key), LA_BF16) : 0;
            k[j] = there ? load<float>(at(c.k, u.b, t + i, u.h, key), LA_BF16) : 0;
            squares_q += q[j] * q[j];
            squares_k += k[j] * k[j];
            if (DECAY == LA_KEY)
                a[j] = there ? decay_of(load<float>(at(c.g, u.b, t + i, u.hv, key), c.g.dtype),
                                        c.gate)
                             : 1;
        }
        const float factor_q = c.qk_l2norm ? l2norm_factor(quad_sum(squares_q)) : 1;
        const float factor_k = c.qk_l2norm ? l2norm_factor(quad_sum(squares_k)) : 1;
        for (int j = 0; j < KP / 4; j++) {
            const bool there = j / 2 * 8 + pair + j % 2 < c.K;
            q[j] = there ? apply_map(q[j] * factor_q, c.map[0], (float)c.map_eps[0]) : 0;
            k[j] = there ? apply_map(k[j] * factor_k, c.map[1], (float)c.map_eps[1]) : 0;
            qk += q[j] * k[j];
        }
        if (DECAY == LA_TOKEN) a[0] = decay_of(load<float>(at(c.g, u.b, t + i, u.hv), c.g.dtype), c.gate);
        const float beta =
            RULE == LA_DELTA ? load<float>(at(c.beta, u.b, t + i, u.hv), c.beta.dtype) : 0;
        float v[2], o[2];
        for (int w = 0; w < 2; w++)
            v[w] = column + 8 * w < columns
                       ? load<float>(at(c.v, u.b, t + i, u.hv, v0 + column + 8 * w), LA_BF16)
                       : 0;
        la_token(S, 2, 2, KP / 4, q, k, v, a, beta, quad_sum(qk), o, DECAY, RULE);
        if (i / 2 % 4 * 2 != pair || i < first) continue;
        O[i / 8 * 4 + i % 2] = o[0];
        O[i / 8 * 4 + 2 + i % 2] = o[1];
    }
}

/* `after`: the state after the chunk, in la_token's order [key][column]. */
template <int KP, la_decay DECAY, la_rule RULE>
__device__ __forceinline__ void walk_tokens(const call &c, const unit &u, int t, int n, int first,
                                            int v0, int columns, const float (&S)[KP / 8][4],
                                            float (&O)[8][4], float (&after)[KP / 2])
{
    float o[8 * 4];
#pragma unroll
    for (int i = 0; i < KP / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) after[(i * 2 + e % 2) * 2 + e / 2] = S[i][e];
#pragma unroll
    for (int i = 0; i < 8 * 4; i++) o[i] = O[i / 4][i % 4];
    token_walk<KP, DECAY, RULE>(c, u, t, n, first, v0, columns, after, o);
#pragma unroll
    for (int i = 0; i < 8 * 4; i++) O[i / 4][i % 4] = o[i];
}

/* A row's piece of 8 columns of o, of which `there` exist. */
__device__ __forceinline__ void store_piece(char *to, uint4 x, int there)
{
    const uint32_t of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < there) *(uint16_t *)(to + i * 2) = (uint16_t)(of[i / 2] >> i % 2 * 16);
}

/* Is one of two bf16 a NaN or an infinity: is its exponent all ones? */
__device__ __forceinline__ bool not_finite(uint32_t x)
{
    return (x & 0x7f800000) == 0x7f800000 || (x & 0x7f80) == 0x7f80;
}

/* Is any number of [16 columns][C] a NaN or an infinity? Zero times it is not zero, then. */
__device__ __forceinline__ bool any_odd(const left (&x)[4])
{
    const __nv_bfloat162 zero = __floats2bfloat162_rn(0, 0);
    __nv_bfloat162 sum[2] = {zero, zero};
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[e % 2] = __hfma2(*(const __nv_bfloat162 *)&x[m].x[e], zero, sum[e % 2]);
    const __nv_bfloat162 all = __hadd2(sum[0], sum[1]);
    return __any_sync(~0u, (*(const uint32_t *)&all & 0x7fff7fff) != 0);
}

/* Numbers of tokens t and t + 1, without those from token `end` on. */
__device__ __forceinline__ uint32_t before(uint32_t x, int t, int end)
{
    return t + 1 < end ? x : t < end ? x & 0xffff : 0;
}

/* The first token of [16 columns][C] that is not finite in some column; C if all are. */
static __device__ __noinline__ int first_odd_of(uint4 a, uint4 b, uint4 c, uint4 d)
{
    const uint32_t x[16] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w,
                            c.x, c.y, c.z, c.w, d.x, d.y, d.z, d.w};
    unsigned first = C;
#pragma unroll
    for (int i = 15; i >= 0; i--) {
        const unsigned t = i / 4 * 16 + i % 4 / 2 * 8 + threadIdx.x % 4 * 2;
        if (not_finite(x[i] & 0xffff0000)) first = min(first, t + 1);
        if (not_finite(x[i] & 0xffff)) first = min(first, t);
    }
    return (int)__reduce_min_sync(~0u, first);
}

__device__ __forceinline__ int first_odd(const left (&x)[4])
{
    const auto four = [](const left &y) { return make_uint4(y.x[0], y.x[1], y.x[2], y.x[3]); };
    return first_odd_of(four(x[0]), four(x[1]), four(x[2]), four(x[3]));
}

template <int KP, la_decay DECAY, la_rule RULE, way WAY>
__global__ void __launch_bounds__(256, 1)
    walk(const __grid_constant__ call c, const __grid_constant__ chunks w,
         const __grid_constant__ tensor_maps maps, const walk_flags f, const segments g, int tiles)
{
    typedef stage<KP, DECAY, RULE> part;
    extern __shared__ __align__(1024) char shared[];
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool normalised = DECAY == LA_NONE && RULE == LA_ADDITIVE &&
                            c.normaliser != LA_UNNORMALISED;
    const bool ones = normalised && warp == warps - 1; /* the column of ones: z, and its read */
    const int own = warps - normalised, tile = blockIdx.x % tiles;
    const int segment = blockIdx.x / tiles % g.count;
    const int64_t head = blockIdx.x / tiles / g.count;
    const unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    const int slices = (c.V + 15) / 16, slice_index = ones ? 0 : tile * own + warp;
    const bool identity = WAY == TO_ENDS && slice_index >= slices; /* M's columns: v = 0 */
    const int v0 = slice_index * 16, columns = ones ? 1 : identity ? 0 : min(16, c.V - v0);
    const int v_slices = min(max(slices - tile * own, 0), own); /* of this block */
    const int all_chunks = (u.end - u.begin + C - 1) / C;
    const int first_chunk = (int)((int64_t)all_chunks * segment / g.count);
    const int last_chunk = (int)((int64_t)all_chunks * (segment + 1) / g.count);
    const int slot0 = first_slot(c, u.n), bytes = part::bytes(warps);
    float *den = (float *)(shared + 2 * bytes); /* [C], if normalised */
    const int pair = lane % 4 * 2; /* this thread's two tokens, or keys, of every eight */
    const float scale = (float)c.scale;
    const int64_t o_row = c.o.stride[1] * 2;
    char *o_lane = at(c.o, u.b, u.begin + lane / 2, u.hv, v0 + lane % 2 * 8);

    /* S' [16 columns][KP]: thread has columns lane / 4 and + 8, keys 8 i + pair and + 1 */
    float S[KP / 8][4];
    const view &from = ones ? c.z0 : c.s0, &to = ones ? c.zt : c.st;
#pragma unroll
    for (int i = 0; i < KP / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = lane / 4 + e / 2 * 8, key = i * 8 + pair + e % 2;
            S[i][e] = 0;
            if (WAY == TO_ENDS)
                S[i][e] = identity && (slice_index - slices) * 16 + column == key;
            else if (g.starts)
                S[i][e] = slice_index < slices
                              ? g.starts[((head * g.count + segment) * slices * 16 + v0 + column) *
                                             KP + key]
                              : 0;
            else if (from.data && column < columns && key < c.K)
                S[i][e] = load<float>(at(from, u.n, u.hv, key, ones ? 0 : v0 + column), from.dtype);
        }

    /* Chunk i into stage `room`; by the copy engine, or by everybody. */
    const auto fetch = [&](int i, char *room, uint32_t barrier) {
        const uint32_t base = address_of(room);
        const int t = u.begin + i * C, n = min(C, u.end - t);
        const int64_t place = (int64_t)(slot0 + i) * c.HV + u.hv;
        const int64_t keys = ((int64_t)(slot0 + i) * w.heads + (w.heads == c.HV ? u.hv : u.h)) *
                             tile_bytes(KP);
        const struct {
            int at;
            const void *from;
            int bytes;
        } pieces[] = {
            {part::k, part::has_k && w.k ? w.k + keys : NULL, tile_bytes(KP)},
            {part::q, w.q ? w.q + keys : NULL, tile_bytes(KP)},
            {part::kt, DECAY == LA_KEY ? w.kt + place * tile_bytes(KP) : NULL, tile_bytes(KP)},
            {part::scores, w.scores + place * PANEL_BYTES, PANEL_BYTES},
            {part::inverse, RULE == LA_DELTA ? w.inverse + place * PANEL_BYTES : NULL, PANEL_BYTES},
            {part::in, DECAY == LA_TOKEN ? w.in + place * C : NULL, C * 4},
            {part::out, DECAY == LA_TOKEN ? w.out + place * C : NULL, C * 4},
            {part::total, DECAY == LA_KEY ? w.total + place * KP : NULL, KP * 4},
        };
        char *slice = room + part::v + warp * SLICE_BYTES;
#if HAS_COPY_ENGINE
        if (threadIdx.x == 0) {
            int bytes = (part::has_k && !w.k ? tile_bytes(KP) : 0) + (!w.q ? tile_bytes(KP) : 0) +
                        (f.v_pieces ? v_slices * SLICE_BYTES : 0);
#pragma unroll
            for (const auto &x : pieces)
                if (x.from) bytes += x.bytes;
            barrier_expect(barrier, bytes);
#pragma unroll
            for (const auto &x : pieces)
                if (x.from) engine_copy(base + x.at, x.from, x.bytes, barrier);
#pragma unroll
            for (int j = 0; j < KP / PANEL; j++) {
                if (part::has_k && !w.k)
                    engine_copy_box(base + part::k + j * PANEL_BYTES, &maps.k, j * PANEL, u.h, t, u.b,
                                    barrier);
                if (!w.q)
                    engine_copy_box(base + part::q + j * PANEL_BYTES, &maps.q, j * PANEL, u.h, t, u.b,
                                    barrier);
            }
            if (f.v_pieces)
                for (int j = 0; j < v_slices; j++)
                    engine_copy_box(base + part::v + j * SLICE_BYTES, &maps.v, (tile * own + j) * 16,
                                    u.hv, t, u.b, barrier);
        }
        const bool v_comes = f.v_pieces && !ones;
#else
        if (part::has_k && !w.k) copy_tile<KP>(c.k, c.K, u.b, t, n, u.h, base + part::k);
        if (!w.q) copy_tile<KP>(c.q, c.K, u.b, t, n, u.h, base + part::q);
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) copy_bytes(base + x.at, (const char *)x.from, x.bytes);
        const bool v_comes = f.v_pieces && !ones;
        if (v_comes && columns > 0) {
            const char *x = at(c.v, u.b, t, u.hv, v0);
            for (int j = lane; j < C * 2; j += 32) {
                const bool there = j / 2 < n && j % 2 * 8 < columns;
                copy_async(address_of(slice) + slice_at(j / 2, j % 2),
                           x + (there ? j / 2 * c.v.stride[1] * 2 + j % 2 * 16 : 0), there);
            }
        }
        copies_end_group();
#endif
        if (v_comes || columns <= 0) return;
        for (int j = lane; j < C * 16; j += 32) {
            const int row = j / 16, column = j % 16;
            bf16 x = __float2bfloat16_rn(0);
            if (row < n && column < columns)
                x = ones ? __float2bfloat16_rn(1)
                         : *(const bf16 *)at(c.v, u.b, t + row, u.hv, v0 + column);
            *(bf16 *)(slice + slice_at(row, column / 8) + column % 8 * 2) = x;
        }
    };

#if HAS_COPY_ENGINE
    /* Of each stage: it has been filled; every warp is done with it. */
    __shared__ uint64_t filled[2], done[2];
    const uint32_t barriers = address_of(filled), done_with = address_of(done);
    if (threadIdx.x == 0) {
        for (int j = 0; j < 2; j++) {
            barrier_init(barriers + 8 * j, 1);
            barrier_init(done_with + 8 * j, warps);
        }
        barriers_ready();
    }
#else
    const uint32_t barriers = 0;
#endif
    const auto odd_of = [&](int i) { return w.odd[(int64_t)(slot0 + i) * c.HV + u.hv]; };
    int turn = 0; /* chunks so far, both passes */
    for (int pass = WAY == ACROSS ? 0 : 1; pass < 2; pass++) {
        const bool writes = WAY != ACROSS || pass == 0;
        const bool reads = WAY == ALONG || (WAY == ACROSS && pass == 1);
        __syncthreads();
        if (first_chunk < last_chunk)
            fetch(first_chunk, shared + turn % 2 * bytes, barriers + turn % 2 * 8);
        int odd_next = first_chunk < last_chunk ? odd_of(first_chunk) : C;
        for (int i = first_chunk; i < last_chunk; i++, turn++) {
            char *room = shared + turn % 2 * bytes;
            const uint32_t base = address_of(room);
            const int t = u.begin + i * C, n = min(C, u.end - t);
#if HAS_COPY_ENGINE
            barrier_wait(barriers + turn % 2 * 8, turn / 2 % 2);
            if (n < C) { /* boxes go on into the next sequence, whose NaN must not come along */
                if (part::has_k && !w.k)
                    for (int j = threadIdx.x; j < (C - n) * KP / 8; j += blockDim.x)
                        *(uint4 *)(room + part::k + piece_at(n + j / (KP / 8), j % (KP / 8))) =
                            make_uint4(0, 0, 0, 0);
                if (f.v_pieces && columns > 0 && !ones)
                    for (int j = lane; j < (C - n) * 2; j += 32)
                        *(uint4 *)(room + part::v + warp * SLICE_BYTES +
                                   slice_at(n + j / 2, j % 2)) = make_uint4(0, 0, 0, 0);
                stores_before_copies();
                __syncthreads();
            }
            if (threadIdx.x == 0 && turn > 0 && i + 1 < last_chunk)
                barrier_wait(done_with + (turn + 1) % 2 * 8, (turn - 1) / 2 % 2);
            __syncwarp();
#else
            copies_wait<0>();
            __syncthreads(); /* chunk i is there, and nobody needs chunk i - 1 any more */
#endif
            const int odd_here = odd_next;
            if (i + 1 < last_chunk) {
                fetch(i + 1, shared + (turn + 1) % 2 * bytes, barriers + (turn + 1) % 2 * 8);
                odd_next = odd_of(i + 1);
            }
            const float *in = (const float *)(room + part::in);
            const float *out = (const float *)(room + part::out);
            const uint32_t slice = base + part::v + warp * SLICE_BYTES;
            const int slice_row = lane / 16 * 8 + lane % 8, slice_piece = lane / 8 % 2;

            left s[KP / 16]; /* S', as it is before the chunk */
#pragma unroll
            for (int j = 0; j < KP / 16; j++) s[j] = as_left(S[2 * j], S[2 * j + 1]);

            /* U: V as it lies, or A (V - k^ S); as left operands over the tokens */
            left U[4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if (columns > 0)
                    load_matrices_transposed(U[m].x, slice + slice_at(m * 16 + slice_row, slice_piece));
                else
                    U[m] = {};
            }
            /* The first token here with a NaN or an infinity: it and what follows are left out of the
             * products, exact zeros that change nothing before them. */
            int odd = odd_here;
            if (any_odd(U)) odd = min(odd, first_odd(U));
            if (WAY == ACROSS) odd = C; /* every token reads all: there is no before */
            if (odd < C)
#pragma unroll
                for (int m = 0; m < 4; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        U[m].x[e] = before(U[m].x[e], m * 16 + e / 2 * 8 + pair, odd);

            /* k^ S, A (V - k^ S) and q^ S, transposed: [16 columns][C] */
            float O[8][4] = {}, X[8][4] = {};
            if constexpr (RULE == LA_DELTA) {
                float kS[8][4] = {};
                products_begin();
#pragma unroll
                for (int j = 0; j < KP / 16; j++) multiply_rows(kS, s[j], base + part::k, j * 16);
                products_commit();
                products_wait<0>();
                products_in(kS);
#pragma unroll
                for (int m = 0; m < 8; m++) {
                    const float2 g = DECAY == LA_TOKEN ? *(const float2 *)(in + m * 8 + pair)
                                                       : make_float2(1, 1);
                    const float2 top = unpack(U[m / 2].x[m % 2 * 2]);
                    const float2 low = unpack(U[m / 2].x[m % 2 * 2 + 1]);
                    kS[m][0] = top.x - g.x * kS[m][0];
                    kS[m][1] = top.y - g.y * kS[m][1];
                    kS[m][2] = low.x - g.x * kS[m][2];
                    kS[m][3] = low.y - g.y * kS[m][3];
                }
                if (odd < C)
#pragma unroll
                    for (int m = 0; m < 8; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            if (m * 8 + pair + e % 2 >= odd) kS[m][e] = 0;
                left x[4];
#pragma unroll
                for (int j = 0; j < 4; j++) x[j] = as_left(kS[2 * j], kS[2 * j + 1]);
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_rows(X, x[j], base + part::inverse, j * 16, j);
                products_commit();
            }
            if (reads) {
                products_begin();
#pragma unroll
                for (int j = 0; j < KP / 16; j++) multiply_rows(O, s[j], base + part::q, j * 16);
            }
            products_commit();
            if constexpr (RULE == LA_DELTA) {
                products_wait<1>(); /* for A (V - k^ S) */
                products_in(X);
#pragma unroll
                for (int m = 0; m < 4; m++) U[m] = as_left(X[2 * m], X[2 * m + 1]);
                if (any_odd(U)) odd = 0; /* the state may hold one, too */
            }
            left Ut[4]; /* rows of U times the decay to the chunk's end */
#pragma unroll
            for (int m = 0; m < 4; m++) Ut[m] = U[m];
            if constexpr (DECAY == LA_TOKEN)
#pragma unroll
                for (int m = 0; m < 4; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float2 g = *(const float2 *)(out + m * 16 + e / 2 * 8 + pair);
                        const float2 x = unpack(U[m].x[e]);
                        Ut[m].x[e] = pack(g.x * x.x, g.y * x.y);
                    }
            products_wait<0>();
            products_in(O);

            if (reads) {
                if (DECAY == LA_TOKEN)
#pragma unroll
                    for (int m = 0; m < 8; m++) {
                        const float2 g = *(const float2 *)(in + m * 8 + pair);
                        O[m][0] *= g.x;
                        O[m][1] *= g.y;
                        O[m][2] *= g.x;
                        O[m][3] *= g.y;
                    }
                if (WAY != ACROSS) {
                    products_begin();
#pragma unroll
                    for (int j = 0; j < 4; j++) multiply_rows(O, U[j], base + part::scores, j * 16, j);
                    products_commit();
                }
            }
            products_wait<0>();
            products_in(O);
            float after[KP / 2]; /* the state, where tokens went one by one */
            if (odd < C) walk_tokens<KP, DECAY, RULE>(c, u, t, n, odd, v0, columns, S, O, after);

            if (writes) {
                if constexpr (DECAY != LA_NONE)
#pragma unroll
                    for (int j = 0; j < KP / 8; j++) {
                        const float2 a =
                            DECAY == LA_KEY ? *(const float2 *)(room + part::total + (j * 8 + pair) * 4)
                                            : make_float2(in[C - 1], in[C - 1]);
                        S[j][0] *= a.x;
                        S[j][1] *= a.y;
                        S[j][2] *= a.x;
                        S[j][3] *= a.y;
                    }
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_columns(S, Ut[j], base + (DECAY == LA_KEY ? part::kt : part::k), j * 16);
                products_commit();
            }

            if (reads) {
#pragma unroll
                for (int m = 0; m < 8; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) O[m][e] *= scale;
                if (normalised) {
                    __syncthreads();
                    if (ones && lane < 4)
#pragma unroll
                        for (int m = 0; m < 8; m++)
                            *(float2 *)(den + m * 8 + pair) = make_float2(O[m][0], O[m][1]);
                    __syncthreads();
#pragma unroll
                    for (int m = 0; m < 8; m++) {
                        const float2 d = *(const float2 *)(den + m * 8 + pair);
                        const float x = clamped(c, d.x), y = clamped(c, d.y);
                        O[m][0] /= x;
                        O[m][1] /= y;
                        O[m][2] /= x;
                        O[m][3] /= y;
                    }
                }
                if (!ones && columns > 0) { /* by way of the place of v, which is in registers now */
#pragma unroll
                    for (int m = 0; m < 8; m += 2) {
                        const uint32_t x[4] = {pack(O[m][0], O[m][1]), pack(O[m][2], O[m][3]),
                                               pack(O[m + 1][0], O[m + 1][1]),
                                               pack(O[m + 1][2], O[m + 1][3])};
                        store_matrices_transposed(slice + slice_at(m * 8 + slice_row, slice_piece), x);
                    }
                    __syncwarp();
                    const char *from = room + part::v + warp * SLICE_BYTES;
                    char *o = o_lane + (int64_t)i * C * o_row;
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const int row = j * 16 + lane / 2, there = columns - lane % 2 * 8;
                        const uint4 x = *(const uint4 *)(from + slice_at(row, lane % 2));
                        if (row >= n) continue;
                        if (f.o_pieces && there >= 8)
                            *(uint4 *)(o + j * 16 * o_row) = x;
                        else
                            store_piece(o + j * 16 * o_row, x, there);
                    }
                }
            }
            products_wait<0>();
            products_in(S);
            if (odd < C && writes)
#pragma unroll
                for (int j = 0; j < KP / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) S[j][e] = after[(j * 2 + e % 2) * 2 + e / 2];
#if HAS_COPY_ENGINE
            stores_before_copies();
            __syncwarp();
            if (lane == 0) barrier_arrive(done_with + turn % 2 * 8);
#endif
        }
    }

    if (WAY == TO_ENDS) {
        const int all = tiles * own * 16; /* rows of ends, whole blocks of them */
        float *end = g.ends + ((head * g.count + segment) * all + v0 + lane / 4) * KP + pair;
#pragma unroll
        for (int i = 0; i < KP / 8; i++) {
            *(float2 *)(end + i * 8) = make_float2(S[i][0], S[i][1]);
            *(float2 *)(end + 8 * KP + i * 8) = make_float2(S[i][2], S[i][3]);
        }
        return;
    }
    if (!to.data || (ones && tile) || segment < g.count - 1) return;
#pragma unroll
    for (int i = 0; i < KP / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = lane / 4 + e / 2 * 8, key = i * 8 + pair + e % 2;
            if (column < columns && key < c.K)
                store(at(to, u.n, u.hv, key, ones ? 0 : v0 + column), to.dtype, S[i][e]);
        }
}

/* The states at which segments start: S' <- S' M' + X', one segment after another, in float32. A
 * block has 16 value columns of a head, a thread a key. `rows` of ends per segment. */
template <int KP, la_decay DECAY, la_rule RULE>
__global__ void __launch_bounds__(KP)
    join_segments(const __grid_constant__ call c, const __grid_constant__ chunks w, const segments g,
                  int rows)
{
    __shared__ float S[16][KP];
    const int slices = (c.V + 15) / 16, slice = blockIdx.x % slices, key = threadIdx.x;
    const int64_t head = blockIdx.x / slices;
    const unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    const int all_chunks = (u.end - u.begin + C - 1) / C, slot0 = first_slot(c, u.n);
    float own[16];
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const int column = slice * 16 + j;
        own[j] = c.s0.data && column < c.V && key < c.K
                     ? load<float>(at(c.s0, u.n, u.hv, key, column), c.s0.dtype)
                     : 0;
    }
    for (int segment = 0; segment < g.count; segment++) {
        float *start =
            g.starts + ((head * g.count + segment) * slices * 16 + slice * 16) * KP + key;
#pragma unroll
        for (int j = 0; j < 16; j++) start[j * KP] = own[j];
        if (segment == g.count - 1) return;

        const float *end = g.ends + (head * g.count + segment) * rows * KP + key;
        if constexpr (RULE == LA_ADDITIVE) {
            const int first = (int)((int64_t)all_chunks * segment / g.count);
            const int last = (int)((int64_t)all_chunks * (segment + 1) / g.count);
            float a = 1;
            if (DECAY != LA_NONE)
#pragma unroll 8
                for (int i = first; i < last; i++) {
                    const int64_t place = (int64_t)(slot0 + i) * c.HV + u.hv;
                    a *= DECAY == LA_KEY ? w.total[place * KP + key] : w.in[place * C + C - 1];
                }
#pragma unroll
            for (int j = 0; j < 16; j++) own[j] = a * own[j] + end[(slice * 16 + j) * KP];
        } else {
#pragma unroll
            for (int j = 0; j < 16; j++) {
                S[j][key] = own[j];
                own[j] = end[(slice * 16 + j) * KP];
            }
            __syncthreads();
            const float *M = end + (int64_t)slices * 16 * KP;
#pragma unroll 4
            for (int i = 0; i < c.K; i += 4) {
                float m[4]; /* M has rows for whole slices of keys */
#pragma unroll
                for (int e = 0; e < 4; e++) m[e] = M[(i + e) * KP];
#pragma unroll
                for (int j = 0; j < 16; j++) {
                    const float4 x = *(const float4 *)&S[j][i];
                    own[j] += x.x * m[0] + x.y * m[1] + x.z * m[2] + x.w * m[3];
                }
            }
            __syncthreads();
        }
    }
}

/* ---- the two launches, and the memory between them ---- */

template <int KP, la_decay DECAY, la_rule RULE> constexpr auto prepare_of()
{
    if constexpr (DECAY == LA_KEY)
        return prepare_key<KP, RULE>;
    else
        return prepare_scalar<KP, RULE>;
}

/* What the splits below go by, of the current device. */
struct device_traits {
    int processors;
    int room;      /* shared memory of a block, in bytes */
    int warp_step; /* warps come in this many: Hopper's tensor cores work for four at once */
};

static cudaError_t traits_of_device(device_traits *d)
{
    int device, major;
    cudaError_t error = cudaGetDevice(&device);
    const struct {
        int *to;
        cudaDeviceAttr what;
    } asked[] = {{&d->processors, cudaDevAttrMultiProcessorCount},
                 {&d->room, cudaDevAttrMaxSharedMemoryPerBlockOptin},
                 {&major, cudaDevAttrComputeCapabilityMajor}};
    for (const auto &x : asked)
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(x.to, x.what, device);
    d->warp_step = error == cudaSuccess && major == 9 ? 4 : 1;
    return error;
}

/* Segments of each sequence: as many as fill the device with blocks of four warps, as long as a
 * segment has eight chunks to pay for its launches. With the delta rule the ends cost more than the
 * walk itself (2 of 2.6 parts: K more columns), so that fewer than four do not pay. */
static int segments_for(const call &c, const device_traits &d, bool delta)
{
    const int64_t blocks = (int64_t)c.N * c.HV * ((c.V + 63) / 64);
    const int64_t chunks = (c.cu.data ? c.T / max(c.N, 1) : c.T) / C;
    if (!c.causal || c.normaliser != LA_UNNORMALISED) return 1;
    const int64_t count = min(min(d.processors / blocks, chunks / 8), (int64_t)32);
    return count < (delta ? 4 : 2) ? 1 : (int)count;
}

/* Warps per block of walk, each with 16 value columns. All warps of a block read the same tiles, so
 * a wide block saves traffic; narrow ones fill the device when there are few heads. Taken is the one
 * with the least rounds times work per round, a round being as many blocks as fit at once, and a
 * multiprocessor's work a fixed part (the chain of products) and one in proportion to its warps.
 * None (0) if not even the narrowest fits. */
template <typename part>
static int warps_per_block(const call &c, const device_traits &d, int64_t heads, int slices)
{
    const bool normalised = c.normaliser != LA_UNNORMALISED;
    int best = 0;
    double least = 0;
    for (int warps = max(d.warp_step, 1 + normalised); warps <= 8; warps *= 2) {
        const int own = warps - normalised;
        const int64_t blocks = heads * ((slices + own - 1) / own);
        const int64_t fit = min(d.room / (2 * part::bytes(warps) + 1024), 8 / warps);
        if (fit == 0) break;
        const int64_t rounds = (blocks + d.processors * fit - 1) / (d.processors * fit);
        const int64_t each = (blocks + d.processors - 1) / d.processors;
        const double cost = (double)rounds * (1 + 0.15 * (double)(warps * min(each, fit)));
        if (best == 0 || cost < least) {
            least = cost;
            best = warps;
        }
    }
    return best;
}

template <int KP, la_decay DECAY, la_rule RULE, way WAY>
static cudaError_t launch_walk(const call &c, const chunks &w, const tensor_maps &maps,
                               const walk_flags &f, const segments &g, int slices, int warps,
                               cudaStream_t stream)
{
    const bool normalised = c.normaliser != LA_UNNORMALISED;
    const int own = warps - normalised, tiles = (slices + own - 1) / own;
    const int bytes = 2 * stage<KP, DECAY, RULE>::bytes(warps) + (normalised ? C * 4 : 0);
    const auto kernel = walk<KP, DECAY, RULE, WAY>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<(unsigned)((int64_t)c.N * c.HV * g.count * tiles), warps * 32, bytes, stream>>>(
        c, w, maps, f, g, tiles);
    return cudaGetLastError();
}

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_walks(const call &c, const chunks &w, const tensor_maps &maps,
                                const walk_flags &f, cudaMemPool_t pool, cudaStream_t stream)
{
    typedef stage<KP, DECAY, RULE> part;
    const int slices = (c.V + 15) / 16, key_slices = RULE == LA_DELTA ? (c.K + 15) / 16 : 0;
    device_traits d;
    cudaError_t error = traits_of_device(&d);
    if (error != cudaSuccess) return error;
    segments g = {segments_for(c, d, RULE == LA_DELTA), NULL, NULL};
    const int64_t heads = (int64_t)c.N * c.HV, units = heads * g.count;
    const int warps = warps_per_block<part>(c, d, units, slices);
    if (warps == 0) return cudaErrorNotSupported; /* too little shared memory */
    if constexpr (DECAY == LA_NONE && RULE == LA_ADDITIVE)
        if (!c.causal)
            return launch_walk<KP, DECAY, RULE, ACROSS>(c, w, maps, f, g, slices, warps, stream);
    if (g.count == 1)
        return launch_walk<KP, DECAY, RULE, ALONG>(c, w, maps, f, g, slices, warps, stream);

    const int ends_warps = warps_per_block<part>(c, d, units, slices + key_slices);
    const int64_t rows = (slices + key_slices + ends_warps - 1) / ends_warps * ends_warps * 16;
    const int64_t ends = units * rows * KP, starts = units * slices * 16 * KP;
    error = cudaMallocFromPoolAsync((void **)&g.ends, (ends + starts) * 4, pool, stream);
    if (error != cudaSuccess) return error;
    float *const after_ends = g.ends + ends;
    error = launch_walk<KP, DECAY, RULE, TO_ENDS>(c, w, maps, f, g, slices + key_slices, ends_warps, stream);
    g.starts = after_ends;
    if (error == cudaSuccess) {
        join_segments<KP, DECAY, RULE>
            <<<(unsigned)(heads * slices), KP, 0, stream>>>(c, w, g, (int)rows);
        error = cudaGetLastError();
    }
    if (error == cudaSuccess)
        error = launch_walk<KP, DECAY, RULE, ALONG>(c, w, maps, f, g, slices, warps, stream);
    const cudaError_t freed = cudaFreeAsync(g.ends, stream);
    return error == cudaSuccess ? freed : error;
}

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_chunks(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    constexpr bool has_k = stage<KP, DECAY, RULE>::has_k;
    tensor_maps maps = {};
    walk_flags f = {};
    const bool q_as_given = map_of(c, c.q, c.H, c.K, PANEL, &maps.q) && !c.qk_l2norm &&
                            c.map[0] == LA_IDENTITY;
    const bool k_as_given = map_of(c, c.k, c.H, c.K, PANEL, &maps.k) && !c.qk_l2norm &&
                            c.map[1] == LA_IDENTITY;
    f.v_pieces = map_of(c, c.v, c.HV, c.V, 16, &maps.v);
    f.o_pieces = (uintptr_t)c.o.data % 16 == 0 &&
                 (c.o.stride[0] | c.o.stride[1] | c.o.stride[2]) % 8 == 0;
    const int64_t slots = c.cu.data ? (int64_t)c.T / C + c.N : (int64_t)c.N * ((c.T + C - 1) / C);
    const int heads = DECAY == LA_KEY ? c.HV : c.H;
    const int64_t places = slots * c.HV, tile = tile_bytes(KP);
    const int64_t score = places * PANEL_BYTES, keys = slots * heads * tile;
    const bool keep_q = DECAY == LA_KEY || !q_as_given;
    const bool keep_k = has_k && (DECAY == LA_KEY || !k_as_given);
    const int64_t inverse = RULE == LA_DELTA ? score : 0;
    const int64_t kt = DECAY == LA_KEY ? places * tile : 0;
    const int64_t numbers = places * 4 * (DECAY == LA_KEY ? KP : DECAY == LA_TOKEN ? 2 * C : 0);
    const int64_t bytes =
        score + inverse + (keep_q ? keys : 0) + (keep_k ? keys : 0) + kt + numbers + places * 4;
    if (slots * c.HV > INT32_MAX) return cudaErrorInvalidConfiguration;

    char *room = NULL;
    cudaError_t error = cudaSuccess;
    if (bytes) error = cudaMallocFromPoolAsync((void **)&room, bytes, pool, stream);
    if (error != cudaSuccess) return error;
    chunks w = {};
    char *next = room;
    const auto take = [&](int64_t n) {
        char *x = n ? next : NULL;
        next += n;
        return x;
    };
    w.slots = (int)slots;
    w.heads = heads;
    w.scores = take(score);
    w.inverse = take(inverse);
    w.q = take(keep_q ? keys : 0);
    w.k = take(keep_k ? keys : 0);
    w.kt = take(kt);
    float *x = (float *)take(numbers);
    w.odd = (int *)take(places * 4);
    if (DECAY == LA_KEY) w.total = x;
    if (DECAY == LA_TOKEN) {
        w.in = x;
        w.out = x + places * C;
    }

    if (places) {
        const int prepare_bytes = DECAY == LA_KEY ? sizeof(key_room<KP>) : sizeof(scalar_room<KP>);
        const auto prepare = prepare_of<KP, DECAY, RULE>();
        error = cudaFuncSetAttribute(prepare, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     prepare_bytes);
        if (error == cudaSuccess) {
            prepare<<<(unsigned)(slots * heads), DECAY == LA_KEY ? KEY_THREADS : 128,
                      prepare_bytes, stream>>>(c, w, q_as_given, k_as_given);
            error = cudaGetLastError();
        }
    }
    if (error == cudaSuccess) {
        error = launch_walks<KP, DECAY, RULE>(c, w, maps, f, pool, stream);
    }
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t chunks_any(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return c.K <= 64 ? launch_chunks<64, DECAY, RULE>(c, pool, stream)
                     : launch_chunks<128, DECAY, RULE>(c, pool, stream);
}
