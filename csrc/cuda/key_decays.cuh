/* Decays per key as parts of the operands, in blocks of 16 tokens.
 *
 * Let f_i be the decay from the start of the block of i through token i, h_j the decay from after
 * token j to the end of the block of j, and t_B the decay of the whole block B. The decay from
 * after j through i is
 *
 *     f_i (t_(I-1) ... t_(J+1)) h_j        blocks I > J
 *     f_i / f_j                            one block
 *
 * So rows that read are in tiles of x f. Rows that are written are in tiles of k h and, for pairs
 * within a block, of k / f. A product within a block is right for a row if f has stayed in reach
 * (between 1 / REACH and REACH) up to this row; rows after it do not matter. From the first row
 * where f has not, the `slow` one, pairs are multiplied one by one in float32. The exponents of
 * bf16 reach from 2^-126 to 2^127, those of float16 from 2^-14 to 2^15. The range that REACH leaves
 * is for the rows.
 *
 * A warp has a block of 16 tokens and PANEL keys. A lane has two of the keys. */
#ifndef LINATTN_CUDA_KEY_DECAYS_CUH
#define LINATTN_CUDA_KEY_DECAYS_CUH

#include "inverse.cuh"
#include "power.cuh"
#include "tile_loads.cuh"

static constexpr float REACH = NARROW ? 0x1p8f : 0x1p100f;

enum { TOKENS_OF_BLOCK = 16, BLOCKS_OF_TOKENS = C / TOKENS_OF_BLOCK };

template <int KP> constexpr int key_threads = KP / PANEL * BLOCKS_OF_TOKENS * 32;

/* The chunk of a block of prepare. */
struct own_chunk {
    unit u;
    int t, n;  /* its first token, and how many: none in a slot without a chunk */
    int place; /* the launch has checked that it fits */
};

__device__ __forceinline__ own_chunk chunk_of_block(const call &c)
{
    const int chunk_slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV;
    own_chunk x;
    x.u = unit_of(c, sequence_of(c, chunk_slot), hv);
    x.t = x.u.begin + (chunk_slot - first_chunk_slot(c, x.u.n)) * C;
    x.n = min(C, x.u.end - x.t);
    x.place = chunk_slot * c.HV + hv;
    return x;
}

/* The decays of a chunk that all warps need. */
template <int KP> struct decays_of_chunk {
    float t[BLOCKS_OF_TOKENS * KP];
    /* for the keys of each panel: the first slow row of a block, or TOKENS_OF_BLOCK */
    int slow[KP / PANEL][BLOCKS_OF_TOKENS];
    int nonfinite; /* the first token with a NaN or an infinity, or C */

    __device__ __forceinline__ int first_slow(int block) const
    {
        int first = TOKENS_OF_BLOCK;
#pragma unroll
        for (int i = 0; i < KP / PANEL; i++) first = min(first, slow[i][block]);
        return first;
    }
    __device__ __forceinline__ bool has_slow() const
    {
        int first = TOKENS_OF_BLOCK;
#pragma unroll
        for (int i = 0; i < BLOCKS_OF_TOKENS; i++) first = min(first, first_slow(i));
        return first < TOKENS_OF_BLOCK;
    }
};

__device__ __forceinline__ float2 operator*(float2 x, float2 y)
{
    return make_float2(x.x * y.x, x.y * y.y);
}

/* The decays of a lane, and its place in the tiles. */
struct lane_decays {
    float2 a[TOKENS_OF_BLOCK];
    int block, key;

    /* The byte of row i of the block in a tile. */
    __device__ __forceinline__ int at(int i) const
    {
        const int lane = threadIdx.x % 32;
        return key / PANEL * PANEL_BYTES + (block * TOKENS_OF_BLOCK + i) * 128 + lane % 4 * 4 +
               ((lane / 4 ^ i % 8) << 4);
    }
};

/* The decays of two keys of a token as the caller gave them, one by one. */
__device__ __forceinline__ float2 given_decays(const call &c, const unit &u, int token, int key)
{
    const view &g = c.x[LA_G];
    const float none = c.gate == LA_DECAY;
    float2 x = make_float2(none, none);
    if (key < c.K) x.x = load<float>(at(g, u.b, token, u.hv, key), g.dtype);
    if (key + 1 < c.K) x.y = load<float>(at(g, u.b, token, u.hv, key + 1), g.dtype);
    return x;
}

/* The decay itself: slopes are never per key. */
__device__ __forceinline__ float2 as_decays(const call &c, float2 x)
{
    if (c.gate == LA_DECAY) return x;
    return make_float2(power_of_two(x.x, (float)LOG2_E), power_of_two(x.y, (float)LOG2_E));
}

/* As the caller gave them. Those of tokens past the end of a chunk of n are of no decay. */
__device__ __forceinline__ lane_decays load_decays(const call &c, const unit &u, int t, int n,
                                                   int panel)
{
    lane_decays x;
    x.block = threadIdx.x / 32 % BLOCKS_OF_TOKENS;
    x.key = panel * PANEL + threadIdx.x % 32 * 2;
    const view &g = c.x[LA_G];
    const int first = x.block * TOKENS_OF_BLOCK, keys = c.K - x.key;
    const int rows = keys > 0 ? n - first : 0;
    const char *from = at(g, u.b, t + first, u.hv, x.key);
    const int64_t step = g.stride[1] * la_size_of(g.dtype);
    const bool pairs = g.stride[3] == 1 && (uintptr_t)g.data % (2 * la_size_of(g.dtype)) == 0 &&
                       ((g.stride[0] | g.stride[1] | g.stride[2] | c.K) & 1) == 0;
    const float none = c.gate == LA_DECAY;
#pragma unroll
    for (int i = 0; i < TOKENS_OF_BLOCK; i++) x.a[i] = make_float2(none, none);
    if (pairs && g.dtype == LA_F32) {
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++, from += step)
            if (i < rows) x.a[i] = *(const float2 *)from;
    } else if (pairs && g.dtype == LA_BF16) {
        uint32_t two[TOKENS_OF_BLOCK];
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++, from += step) {
            two[i] = none ? 0x3f803f80 : 0;
            if (i < rows) two[i] = *(const uint32_t *)from;
        }
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++)
            x.a[i] =
                make_float2(__uint_as_float(two[i] << 16), __uint_as_float(two[i] & 0xffff0000));
    } else { /* by way of local memory: its code and its registers are few */
        float2 y[TOKENS_OF_BLOCK];
#pragma unroll 2
        for (int i = 0; i < TOKENS_OF_BLOCK; i++)
            y[i] = i < rows ? given_decays(c, u, t + first + i, x.key) : x.a[0];
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++) x.a[i] = y[i];
    }
    return x;
}

__device__ __forceinline__ bool in_reach(float x)
{
    return fabsf(x) >= 1 / REACH && fabsf(x) <= REACH;
}

/* Makes decays of what load_decays has loaded, and leaves t and the first slow row. Returns the
 * first token with a decay that is not finite, or C. */
template <int KP>
__device__ __forceinline__ int share_decays(const call &c, lane_decays &x, decays_of_chunk<KP> &s)
{
    float2 t = make_float2(1, 1), most = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
        x.a[i] = as_decays(c, x.a[i]);
        t = t * x.a[i];
        most = make_float2(fmaxf(most.x, fabsf(x.a[i].x)), fmaxf(most.y, fabsf(x.a[i].y)));
    }
    *(float2 *)&s.t[x.block * KP + x.key] = t;
    int found = C, slow = TOKENS_OF_BLOCK;
    /* usual decays are at most 1. Then no f is below t. */
    const bool usual = fmaxf(most.x, most.y) <= 1 && fminf(fabsf(t.x), fabsf(t.y)) >= 1 / REACH;
    if (!usual) {
        float2 f = make_float2(1, 1);
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
            const float2 a = x.a[i];
            if (!isfinite(a.x) || !isfinite(a.y)) found = min(found, x.block * TOKENS_OF_BLOCK + i);
            f = f * a;
            if (!in_reach(f.x) || !in_reach(f.y)) slow = min(slow, i);
        }
    }
    slow = (int)__reduce_min_sync(~0u, (unsigned)slow);
    if (threadIdx.x % 32 == 0) s.slow[x.key / PANEL][x.block] = slow;
    return found;
}

/* The product of the decays of blocks first to last - 1. */
template <int KP>
__device__ __forceinline__ float2 decays_between(const decays_of_chunk<KP> &s, int key, int first,
                                                 int last)
{
    float2 x = make_float2(1, 1);
#pragma unroll
    for (int j = 0; j < BLOCKS_OF_TOKENS; j++)
        if (j >= first && j < last) x = x * *(const float2 *)&s.t[j * KP + key];
    return x;
}

/* Rows that read, from one tile to another or in place: times f. `to`, unless NULL: the rows times
 * f and `before`. BEFORE: the decay of the own token is left out. Returns whether a number is too
 * large for the elements. */
template <bool BEFORE>
__device__ __forceinline__ bool scale_reads(const lane_decays &x, float2 before, const char *from,
                                            char *tile, char *to)
{
    bool large = false;
    float2 f = make_float2(1, 1);
#pragma unroll
    for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
        const float2 of_last = f;
        f = f * x.a[i];
        const float2 y = get_pair(from + x.at(i)) * (BEFORE ? of_last : f);
        put_pair(tile + x.at(i), y.x, y.y);
        if (!to) continue;
        const float2 z = y * before;
        put_pair(to + x.at(i), z.x, z.y);
        large |= too_large(z.x) || too_large(z.y);
    }
    return large;
}

/* 1 / x within an ulp, for an x in reach. */
__device__ __forceinline__ float hardware_reciprocal(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Rows that are written: those of these tiles, in place, become rows times h. */
struct written_rows {
    char *tile, *near; /* near: rows over f */
    char *to;          /* unless NULL: the rows times h and `after` */
};

template <int N>
__device__ __forceinline__ bool scale_writes(const lane_decays &x, float2 after,
                                             const written_rows (&rows)[N])
{
    bool large = false;
    float2 f = make_float2(1, 1), h = f;
#pragma unroll
    for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
        f = f * x.a[i];
        const float2 over = make_float2(hardware_reciprocal(f.x), hardware_reciprocal(f.y));
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float2 y = get_pair(rows[j].tile + x.at(i)) * over;
            put_pair(rows[j].near + x.at(i), y.x, y.y);
        }
    }
#pragma unroll
    for (int i = TOKENS_OF_BLOCK - 1; i >= 0; i--) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float2 y = get_pair(rows[j].tile + x.at(i)) * h;
            put_pair(rows[j].tile + x.at(i), y.x, y.y);
            if (!rows[j].to) continue;
            const float2 z = y * after;
            put_pair(rows[j].to + x.at(i), z.x, z.y);
            large |= too_large(z.x) || too_large(z.y); /* decays above one */
        }
        h = h * x.a[i];
    }
    return large;
}

/* x times a number per key. The columns of the left operand are lane % 4 * 2 + {0, 1, 8, 9} behind
 * a key, by[0] and by[1] those of two and two. */
__device__ __forceinline__ operand scaled(const operand &x, const float2 (&by)[2])
{
    operand z;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 y = numbers(x, e) * by[e / 2];
        put_pair(z, e, y.x, y.y);
    }
    return z;
}

/* Sums of blocks (I, I), (I, I - 1), ...: rows of I that read, with rows that are written. */
typedef float sums_of_blocks[BLOCKS_OF_TOKENS][2][4];

__device__ __forceinline__ void clear(sums_of_blocks &x)
{
#pragma unroll
    for (int i = 0; i < BLOCKS_OF_TOKENS * 8; i++) x[i / 8][i % 8 / 4][i % 4] = 0;
}

/* FIRST to LAST - 1 of these blocks; those before them stay as they are. */
template <int KP, int FIRST = 0, int LAST = BLOCKS_OF_TOKENS>
__device__ __forceinline__ void multiply_blocks(sums_of_blocks &x, const char *reads,
                                                const char *writes, const char *near,
                                                const decays_of_chunk<KP> &s, int I)
{
    const uint32_t rows = address_of(reads), columns = lane_with_rows(address_of(writes)),
                   near_columns = lane_with_rows(address_of(near));
#pragma unroll
    for (int i = 0; i < KP; i += 16) {
        const operand own = load_operand(rows, I * TOKENS_OF_BLOCK, i);
        if (FIRST == 0)
            multiply_with_rows(x[0][0], x[0][1], own, near_columns, I * TOKENS_OF_BLOCK, i);
        float2 by[2] = {make_float2(1, 1), make_float2(1, 1)};
#pragma unroll
        for (int back = 1; back < LAST; back++) {
            if (back > I) continue;
            const float *const t = s.t + (I - back + 1) * KP + i + threadIdx.x % 4 * 2;
            if (back > 1)
#pragma unroll
                for (int e = 0; e < 2; e++) by[e] = by[e] * *(const float2 *)(t + 8 * e);
            if (back >= FIRST)
                multiply_with_rows(x[back][0], x[back][1], back > 1 ? scaled(own, by) : own,
                                   columns, (I - back) * TOKENS_OF_BLOCK, i);
        }
    }
}

typedef float pairs_of_block[TOKENS_OF_BLOCK][TOKENS_OF_BLOCK];

/* The block on the diagonal pair by pair, from rows as they were loaded. BEFORE: row i reads
 * before the decay of token i. A lane has column lane % 16 and every other pair of the keys of its
 * warp, whose decays the lanes have. The warps of several panels add their sums by turns. All
 * threads of the kernel call this. */
template <int KP>
__device__ __forceinline__ void multiply_pairs(const lane_decays &x, int slow, const char *reads,
                                               const char *writes, bool before, pairs_of_block &to)
{
    const int lane = threadIdx.x % 32, j = lane % 16, first = x.block * TOKENS_OF_BLOCK;
    const int panel = x.key / PANEL;
    float sum[TOKENS_OF_BLOCK] = {};
#pragma unroll 1
    for (int from = lane / 16; from < PANEL / 2 && slow < TOKENS_OF_BLOCK; from += 2) {
        const int key = panel * PANEL + 2 * from;
        float2 k = get_pair(writes + element_at(first + j, key));
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
            const float2 a =
                make_float2(__shfl_sync(~0u, x.a[i].x, from), __shfl_sync(~0u, x.a[i].y, from));
            const float2 read = get_pair(reads + element_at(first + i, key)), earlier = k;
            if (i > j) k = k * a;
            const float2 seen = before ? earlier : k;
            if (i >= j) sum[i] += read.x * seen.x + read.y * seen.y;
        }
    }
#pragma unroll 1
    for (int turn = 0; turn < KP / PANEL; turn++) {
        if (slow < TOKENS_OF_BLOCK && turn == panel)
#pragma unroll
            for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
                const float both = sum[i] + __shfl_xor_sync(~0u, sum[i], 16);
                if (lane < 16) to[i][j] = turn ? to[i][j] + both : both;
            }
        __syncthreads();
    }
}

/* These sums in the place of those of tiles, from row `slow` on. */
__device__ __forceinline__ void load_pairs(float (&x)[2][4], int slow, const pairs_of_block &from)
{
    const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    if (slow == TOKENS_OF_BLOCK) return;
#pragma unroll
    for (int e = 0; e < 8; e++) {
        const int here = row + e % 4 / 2 * 8;
        if (here >= slow) x[e / 4][e % 4] = from[here][column + e / 4 * 8 + e % 2];
    }
}

/* The first token of block I that shows a NaN or an infinity in a product with itself, or C. */
__device__ __forceinline__ int nonfinite_of_block(const float (&x)[2][4], int I)
{
    const int found = min(nonfinite_on_diagonal(x[0], 0), nonfinite_on_diagonal(x[1], 8));
    return found < C ? I * TOKENS_OF_BLOCK + found : C;
}

/* The first token with a NaN or an infinity that a thread of the block has found, or C. All threads
 * call this, and get the same. */
template <int KP> __device__ __forceinline__ int share_nonfinite(int found, decays_of_chunk<KP> &s)
{
    if (!__syncthreads_or(found < C)) return C;
    atomicMin(&s.nonfinite, found);
    __syncthreads();
    return s.nonfinite;
}

/* Sums of a block of 16 x 16, packed, to a tile. */
__device__ __forceinline__ void store_block(char *tile, int row, int column, const float (&x)[2][4])
{
    if (PLANES == 1) {
        store_left(tile, row, column, as_left(x[0], x[1]));
        return;
    }
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; e++)
        put_pair(tile + element_at(row + lane / 4 + e % 2 * 8, column + lane % 4 * 2 + e / 2 * 8),
                 x[e / 2][e % 2 * 2], x[e / 2][e % 2 * 2 + 1]);
}

/* The rows of block I of a panel, as they lie in shared memory. A warp copies its own. */
__device__ __forceinline__ void write_rows(char *to, const char *tile, int I)
{
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PLANES; j++) {
        const int at = j * PLANE_BYTES + I * TOKENS_OF_BLOCK * 128 + threadIdx.x % 32 * 16;
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK * 128; i += 32 * 16)
            *(uint4 *)(to + at + i) = *(const uint4 *)(tile + at + i);
    }
}

/* Zeros in the blocks behind the one on the diagonal, in a panel. */
__device__ __forceinline__ void clear_rows_above(char *tile, int I)
{
    const int lane = threadIdx.x % 32;
    for (int piece = 2 * I + 2 + lane / 16; piece < 8; piece += 2)
#pragma unroll
        for (int j = 0; j < PLANES; j++)
            *(uint4 *)(tile + j * PLANE_BYTES + piece_at(I * TOKENS_OF_BLOCK + lane % 16, piece)) =
                make_uint4(0, 0, 0, 0);
}

#endif
