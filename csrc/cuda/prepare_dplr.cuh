/* `prepare` for DPLR, with at most 64 keys. With p_i = S' x_i of the state before the decay of
 * token i,
 *
 *     S <- diag(a_i) S - y_i p_i' + k_i v_i',   o_i = S' q_i
 *
 * In a chunk let ^ be a row times the decay from the start of the chunk through its token (x:
 * through the token before), ~ a row times the decay to the end, and (x k) the products of rows
 * times the decays between them, for tokens that x sees. P are such products of q, the own token
 * included.
 *
 *     p = A (x^ S + (x k) V)        A = (I + (x y))^-1
 *     o = q^ S + P_k V - P_y p      S <- diag(a) S + k~' V - y~' p
 *
 * Here p is put in, so that the walk needs no product more than that of the delta rule:
 *
 *     X = A x^,  M = A (x k)        T  = X S
 *     Q = q^ - P_y X                o  = Q S + P V
 *     P = P_k - P_y M               S <- diag(a) S - y~' T + K' V
 *     K = k~ - M' y~
 *
 * Warp w has tokens 16 w to 16 w + 15 of each tile. */
#ifndef LINATTN_CUDA_PREPARE_DPLR_CUH
#define LINATTN_CUDA_PREPARE_DPLR_CUH

#include "key_decays.cuh"

enum { DPLR_KEYS = PANEL, DPLR_THREADS = key_threads<DPLR_KEYS> };

struct dplr_room {
    alignas(1024) char q[PANEL_BYTES], x[PANEL_BYTES], k[PANEL_BYTES],
        y[PANEL_BYTES]; /* q f, later Q; x f; k h, later K; y h */
    union {
        struct { /* k / f, y / f */
            alignas(1024) char near_k[PANEL_BYTES], near_y[PANEL_BYTES];
        };
        struct {
            alignas(1024) char xk[PANEL_BYTES]; /* (x k), later P */
            union {
                float room[4 * 32 * 12];
                alignas(1024) char M[PANEL_BYTES];
            };
        };
    };
    union {
        pairs_of_block pairs[4][BLOCKS_OF_TOKENS]; /* of q and k, x and k, q and y, x and y */
        alignas(16) float L[C * LD];               /* (x y), then A */
        alignas(1024) char X[PANEL_BYTES];
    };
    alignas(16) float before[BLOCKS_OF_TOKENS * DPLR_KEYS]; /* the decays of the blocks before */
    alignas(16) float after[BLOCKS_OF_TOKENS * DPLR_KEYS];  /* and of those after a block */
    decays_of_chunk<DPLR_KEYS> decays;
};
static_assert(PLANES == 2 || sizeof(dplr_room) <= 99 << 10, "as sm_86, sm_89, sm_120");

/* The rows of a block times one number per key, [16][DPLR_KEYS]. */
typedef float rows_of_block[DPLR_KEYS / 16][2][4];

__device__ __forceinline__ void add_rows(rows_of_block &x, const rows_of_block &y, const float *by)
{
#pragma unroll
    for (int m = 0; m < DPLR_KEYS / 8; m++) {
        const float2 a = *(const float2 *)(by + m * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++) x[m / 2][m % 2][e] += (e % 2 ? a.y : a.x) * y[m / 2][m % 2][e];
    }
}

/* a times the rows of block J of a tile. */
__device__ __forceinline__ void multiply_rows_of_block(rows_of_block &x, const left &a,
                                                       uint32_t columns, int J)
{
#pragma unroll
    for (int m = 0; m < DPLR_KEYS / 16; m++)
        multiply(x[m][0], x[m][1], a, load_right(columns, J * TOKENS_OF_BLOCK, m * 16));
}

/* The rows of block I of a tile as sums. */
__device__ __forceinline__ void load_rows_of_block(rows_of_block &x, const char *tile, int I)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < DPLR_KEYS / 4; e++) {
        const float2 y = get_pair(tile + element_at(I * TOKENS_OF_BLOCK + lane / 4 + e % 2 * 8,
                                                    e / 2 * 8 + lane % 4 * 2));
        x[e / 4][e / 2 % 2][e % 2 * 2] = y.x;
        x[e / 4][e / 2 % 2][e % 2 * 2 + 1] = y.y;
    }
}

__device__ __forceinline__ void store_rows_of_block(char *tile, int I, const rows_of_block &x)
{
#pragma unroll
    for (int m = 0; m < DPLR_KEYS / 16; m++) store_block(tile, I * TOKENS_OF_BLOCK, m * 16, x[m]);
}

/* Zeros for tokens from `first` on. */
__device__ __forceinline__ void clear_rows_from(char *tile, int first)
{
    for (int i = threadIdx.x; i < (C - first) * 8; i += DPLR_THREADS)
        *(uint4 *)(tile + first * 128 + i * 16) = make_uint4(0, 0, 0, 0);
}

/* Rows I of M = A (x k), which stay, and of X = A x^, which go to w.k. X takes the place of A. keeps: gradients follow, and they
 * need A and M. */
__device__ __forceinline__ void find_M_and_X(dplr_room &s, const chunks &w, int64_t tile, int I,
                                             bool keeps)
{
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2; /* of a block */
    sums_of_blocks M = {}; /* of blocks (I, 0), (I, 1), ... */
    rows_of_block X = {};
    const uint32_t xk = lane_with_columns(address_of(s.xk)),
                   x_f = lane_with_columns(address_of(s.x));
#pragma unroll
    for (int J = 0; J < BLOCKS_OF_TOKENS; J++) {
        if (J > I) continue;
        left A;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 y = *(const float2 *)&s.L[(I * TOKENS_OF_BLOCK + row + e % 2 * 8) * LD +
                                                   J * TOKENS_OF_BLOCK + pair + e / 2 * 8];
            A.x[e] = pack(y.x, y.y);
        }
        if (keeps) store_left(s.M, I * TOKENS_OF_BLOCK, J * TOKENS_OF_BLOCK, A);
#pragma unroll
        for (int j = 0; j <= J; j++)
            multiply(M[j][0], M[j][1], A, load_right(xk, J * TOKENS_OF_BLOCK, j * 16));
        rows_of_block of_J = {};
        multiply_rows_of_block(of_J, A, x_f, J);
        add_rows(X, of_J, s.before + J * DPLR_KEYS);
    }
    if (keeps) write_rows(w.inverse + tile, s.M, I);
    __syncthreads(); /* A and (x k) are no longer needed */
#pragma unroll
    for (int j = 0; j < BLOCKS_OF_TOKENS; j++)
        if (j <= I) store_block(s.M, I * TOKENS_OF_BLOCK, j * TOKENS_OF_BLOCK, M[j]);
    if (keeps) write_rows(w.lower + tile, s.M, I);
    store_rows_of_block(s.X, I, X);
    write_rows(w.k + tile, s.X, I);
    __syncthreads();
}

/* Rows I of P = P_k - P_y M and of Q = q^ - P_y X, times the scale. P comes as P_k, and
 * both have blocks (I, I), (I, I - 1), ... */
__device__ __forceinline__ void find_P_and_Q(dplr_room &s, const chunks &w, int64_t tile, int I,
                                             float scale, sums_of_blocks &P,
                                             left (&P_y)[BLOCKS_OF_TOKENS])
{
    const uint32_t M = lane_with_columns(address_of(s.M)), X = lane_with_columns(address_of(s.X));
    rows_of_block Q, rows = {};
#pragma unroll
    for (int m = 0; m < DPLR_KEYS / 16; m++)
#pragma unroll
        for (int e = 0; e < 8; e++) Q[m][e / 4][e % 4] = 0;
#pragma unroll
    for (int back = 0; back < BLOCKS_OF_TOKENS; back++) {
        if (back > I) continue;
        const int J = I - back;
#pragma unroll
        for (int e = 0; e < 4; e++) P_y[back].x[e] ^= 0x80008000; /* - P_y */
        multiply_rows_of_block(Q, P_y[back], X, J);
#pragma unroll
        for (int of = 0; of < BLOCKS_OF_TOKENS; of++) /* M of block (J, I - of) */
            if (of >= back && of <= I)
                multiply(P[of][0], P[of][1], P_y[back],
                         load_right(M, J * TOKENS_OF_BLOCK, (I - of) * 16));
    }
    load_rows_of_block(rows, s.q, I);
    add_rows(Q, rows, s.before + I * DPLR_KEYS);
#pragma unroll
    for (int m = 0; m < DPLR_KEYS / 16; m++)
#pragma unroll
        for (int e = 0; e < 8; e++) Q[m][e / 4][e % 4] *= scale;
    store_rows_of_block(s.q, I, Q);
    write_rows(w.q + tile, s.q, I);
    clear_rows_above(s.xk, I);
#pragma unroll
    for (int back = 0; back < BLOCKS_OF_TOKENS; back++) {
        if (back > I) continue;
#pragma unroll
        for (int e = 0; e < 8; e++) P[back][e / 4][e % 4] *= scale;
        store_block(s.xk, I * TOKENS_OF_BLOCK, (I - back) * TOKENS_OF_BLOCK, P[back]);
    }
    write_rows(w.scores + tile, s.xk, I);
}

/* Rows I of K = k~ - M' y~. */
__device__ __forceinline__ void find_K(dplr_room &s, const chunks &w, int64_t tile, int I)
{
    const uint32_t y_h = lane_with_columns(address_of(s.y));
    rows_of_block K = {}, rows;
    load_rows_of_block(rows, s.k, I);
    add_rows(K, rows, s.after + I * DPLR_KEYS);
#pragma unroll
    for (int J = 0; J < BLOCKS_OF_TOKENS; J++) {
        if (J < I) continue;
        left a = load_left_transposed(address_of(s.M), J * TOKENS_OF_BLOCK, I * TOKENS_OF_BLOCK);
#pragma unroll
        for (int e = 0; e < 4; e++) a.x[e] ^= 0x80008000;
        rows_of_block of_J = {};
        multiply_rows_of_block(of_J, a, y_h, J);
        add_rows(K, of_J, s.after + J * DPLR_KEYS);
    }
    store_rows_of_block(s.k, I, K);
    write_rows(w.kt + tile, s.k, I);
}

template <int KP, typename = element>
__global__ void __launch_bounds__(DPLR_THREADS, 3)
    prepare_dplr(const __grid_constant__ call c, const __grid_constant__ chunks w,
                 const as_given given)
{
    threads_below<DPLR_THREADS>();
    static_assert(KP == DPLR_KEYS && PLANES == 1 && !NARROW,
                  "others are pairs of tokens (dplr.cu)");
    extern __shared__ __align__(1024) char shared[];
    dplr_room &s = *(dplr_room *)shared;
    const own_chunk chunk = chunk_of_block(c);
    const unit &u = chunk.u;
    const int t = chunk.t, n = chunk.n, place = chunk.place;
    if (n <= 0) return;
    const float scale = (float)c.scale;
    const int64_t tile = (int64_t)place * PANEL_BYTES; /* of this chunk */

    if (threadIdx.x == 0) s.decays.nonfinite = C;
    begin_to_load<KP, DPLR_THREADS>(c, LA_Q, u.b, t, n, u.h, s.q, given.q);
    begin_to_load<KP, DPLR_THREADS>(c, LA_K, u.b, t, n, u.h, s.k, given.k);
    begin_to_load<KP, DPLR_THREADS>(c, LA_X, u.b, t, n, u.h, s.x, given.x);
    begin_to_load<KP, DPLR_THREADS>(c, LA_Y, u.b, t, n, u.h, s.y, given.y);
    copies_end_group();
    lane_decays x = load_decays(c, u, t, n, 0);
    copies_wait<0>();
    int found = share_decays<KP>(c, x, s.decays);
    __syncthreads();
    if (s.decays.has_slow())
#pragma unroll 1
        for (int which = 0; which < 4; which++)
            multiply_pairs<KP>(x, s.decays.first_slow(x.block), which % 2 ? s.x : s.q,
                               which / 2 ? s.y : s.k, which % 2, s.pairs[which][x.block]);

    const int I = x.block;
    {
        const float2 before = decays_between<KP>(s.decays, x.key, 0, I);
        const float2 after = decays_between<KP>(s.decays, x.key, I + 1, BLOCKS_OF_TOKENS);
        *(float2 *)&s.before[I * KP + x.key] = before;
        *(float2 *)&s.after[I * KP + x.key] = after;
        scale_reads<false>(x, before, s.q, s.q, NULL);
        scale_reads<true>(x, before, s.x, s.x, NULL);
        scale_writes(x, after, {{s.k, s.near_k, NULL}, {s.y, s.near_y, w.y + tile}});
        if (I == 0)
            *(float2 *)(w.total + (int64_t)place * KP + x.key) =
                after * *(const float2 *)&s.decays.t[x.key];
    }
    __syncthreads();

    /* rows I of the four products. A pair of rows i, j of (x k) and (x y) has j < i. */
    const int slow = s.decays.first_slow(I);
    const int row = threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2; /* of a block */
    sums_of_blocks P, sums; /* of blocks (I, I), (I, I - 1), ... */
    left P_y[BLOCKS_OF_TOKENS];
    /* One text for all four: written out, the kernel waited longer for its own instructions
     * (docs/decisions/0056). */
#pragma unroll 1
    for (int which = 0; which < 4; which++) {
        const bool of_x = which % 2, of_y = which / 2;
        clear(sums);
        multiply_blocks<KP>(sums, of_x ? s.x : s.q, of_y ? s.y : s.k, of_y ? s.near_y : s.near_k,
                            s.decays, I);
        load_pairs(sums[0], slow, s.pairs[which][I]);
        if (which == 0 || which == 3) found = min(found, nonfinite_of_block(sums[0], I));
#pragma unroll
        for (int e = 0; e < 8; e++)
            if (pair + e / 4 * 8 + e % 2 + of_x > row + e % 4 / 2 * 8) sums[0][e / 4][e % 4] = 0;
        if (which == 0) {
#pragma unroll
            for (int i = 0; i < BLOCKS_OF_TOKENS * 8; i++)
                P[i / 8][i % 8 / 4][i % 4] = sums[i / 8][i % 8 / 4][i % 4];
        } else if (which == 1) {
            __syncthreads(); /* k / f is no longer needed */
#pragma unroll
            for (int back = 0; back < BLOCKS_OF_TOKENS; back++)
                if (back <= I)
                    store_block(s.xk, I * TOKENS_OF_BLOCK, (I - back) * TOKENS_OF_BLOCK,
                                sums[back]);
        } else if (which == 2) {
#pragma unroll
            for (int back = 0; back < BLOCKS_OF_TOKENS; back++)
                P_y[back] = as_left(sums[back][0], sums[back][1]);
        }
    }
    const int nonfinite = share_nonfinite(found, s.decays);
    if (nonfinite < C) { /* as if the chunk ended before this token */
        for (char *rows : {s.q, s.x, s.k, s.y, s.xk, w.y + tile}) clear_rows_from(rows, nonfinite);
#pragma unroll
        for (int back = 0; back < BLOCKS_OF_TOKENS; back++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (I * TOKENS_OF_BLOCK + row + e % 2 * 8 < nonfinite) continue;
                P_y[back].x[e] = 0;
                P[back][e / 2][e % 2 * 2] = P[back][e / 2][e % 2 * 2 + 1] = 0;
                sums[back][e / 2][e % 2 * 2] = sums[back][e / 2][e % 2 * 2 + 1] = 0;
            }
    }
    if (threadIdx.x == 0) w.nonfinite[place] = nonfinite;
    const bool keeps = w.lower; /* gradients follow */
    if (keeps) {
        /* by way of the place of M, which is free until `invert` */
        clear_rows_above(s.M, I);
#pragma unroll
        for (int back = 0; back < BLOCKS_OF_TOKENS; back++)
            if (back <= I)
                store_left(s.M, I * TOKENS_OF_BLOCK, (I - back) * TOKENS_OF_BLOCK, P_y[back]);
        write_rows(w.scores_y + tile, s.M, I);
    }
    clear_pairs(s.L);
#pragma unroll
    for (int back = 0; back < BLOCKS_OF_TOKENS; back++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (back <= I)
                *(float2 *)&s.L[(I * TOKENS_OF_BLOCK + row + e % 2 * 8) * LD +
                                (I - back) * TOKENS_OF_BLOCK + pair + e / 2 * 8] =
                    make_float2(sums[back][e / 2][e % 2 * 2], sums[back][e / 2][e % 2 * 2 + 1]);
    __syncthreads();
    invert(s.L, s.room);
    if (keeps) clear_rows_above(s.M, I);

    find_M_and_X(s, w, tile, I, keeps);
    find_P_and_Q(s, w, tile, I, scale, P, P_y);
    find_K(s, w, tile, I);
}

#endif
