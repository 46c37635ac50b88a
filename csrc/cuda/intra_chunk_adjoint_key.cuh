/* intra_chunk_adjoint.cuh for decays per key. The decay from after token j through token i differs
 * from key to key, so it is part of the operands, in blocks of 16 tokens, as in prepare.cuh. f_i is
 * the decay from the start of the block of i through i, h_j the decay from after j to the end of
 * the block of j, and t_B the decay of the whole block B. A pair of tokens in blocks I > J has the
 * factor f_i (t between) h_j. No factor divides. Let X_IJ be one product of blocks of 16:
 *
 *     dq_i += f_i (X_I0 t_1 .. t_(I-1) + .. + X_I(I-1)),  X_IJ = dP_IJ (k h)_J
 *     dk_j += h_j (X_3J .. + X_(J+1)J),                   X_IJ = dP_IJ' (q f)_I + dL_IJ' (x f)_I
 *     dx_i as dq_i with dL in the place of dP. It belongs to dk_i unless the caller gave x.
 *
 * Both sums go by the scheme of Horner. Pairs within a block go one by one in float32.
 *
 * The gradient of log a_i is the sum of all terms that pass token i. The terms are
 * N_mj = (gradient) * (value) for all pairs m >= i > j, where j may be the state before the chunk
 * and m the one after it. Pairs that end within the block of i are a running sum from its end up.
 * Pairs that begin there are a running sum from its start down. Pairs that pass the whole block are
 * one number per key: `passes`. There are only sums, and no differences (docs/decisions/0010).
 *
 * With a bonus (the rule BONUS; here it is additive) a token reads before its decay. So f_i is the
 * decay through token i-1, and a sum that ends at token i has no part in the gradient of a_i. To
 * read before the decay of token i is to read after the decay of token i-1. So the loop over pairs
 * stays: row i of q and of dP takes the place of row i-1. The diagonal of P is q . (bonus k), a
 * part of its own.
 *
 * If the caller gave x, x may look before the decay of its token (c.predicts_before). Then row i of
 * x takes f_(i-1), and its sum has no part in the gradient of a_i. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_ADJOINT_KEY_CUH
#define LINATTN_CUDA_INTRA_CHUNK_ADJOINT_KEY_CUH

#include "adjoint_rows.cuh"

enum { BLOCKS = C / 16, KEYS = 64 /* of a block; more leave no registers */ };

/* [C][KEYS] floats. The same key of four neighbouring rows lies in different banks. */
struct key_matrix {
    float x[C * KEYS];
    __device__ float &at(int row, int key) { return x[row * KEYS + (key ^ (row % 4 * 8))]; }
    __device__ float2 &two(int row, int key) { return *(float2 *)&at(row, key); }
};

/* On Hopper the decays and the gradients of the scores have places of their own, so that the first
 * panel comes early. A block of another device may have 99 KiB. There they lie where the panels have
 * been, and the decays come twice. */
template <la_rule RULE, bool HOPPER> struct intra_key_places {
    union {
        alignas(1024) intra_panel<KEYS, RULE> panel;
        struct {
            alignas(1024) char qf[tile_bytes(KEYS)], xf[tile_bytes(KEYS)], kh[tile_bytes(KEYS)];
        };
        key_matrix dk; /* over q f and x f */
    };
    alignas(1024) char dP[PANEL_BYTES], dL[PANEL_BYTES];
    key_matrix a;
};
template <la_rule RULE> struct intra_key_places<RULE, false> {
    union {
        alignas(1024) intra_panel<KEYS, RULE> panel;
        struct {
            alignas(1024) char qf[tile_bytes(KEYS)], xf[tile_bytes(KEYS)], kh[tile_bytes(KEYS)];
            union {
                struct {
                    alignas(1024) char dP[PANEL_BYTES], dL[PANEL_BYTES];
                };
                key_matrix a;
            };
        };
        key_matrix dk; /* over q f and x f */
    };
};

template <la_rule RULE, bool HOPPER> struct intra_key_room : intra_key_places<RULE, HOPPER> {
    alignas(1024) char q[tile_bytes(KEYS)], k[tile_bytes(KEYS)];
    /* first f and h; then the sums that end, and those that begin, at a token; at last dq and dx of
     * pairs within a block */
    key_matrix f, h;
    float t[BLOCKS][KEYS], beta[C];
    /* of pairs within a block: dP_ij at [j][i], and dL_ij, which has no diagonal, at [15 - j][15 -
     * i] */
    float near[BLOCKS][16][16];
    alignas(16) float own[RULE == LA_DELTA ? 4 : C]; /* with a bonus: dP_ii */
    alignas(16) float q_from_state[BLOCKS][KEYS], to_end[BLOCKS][KEYS];
    union { /* sums of dbonus over a block, under the additive rule, which reads no x */
        float x_from_state[BLOCKS][KEYS], of_bonus[BLOCKS][KEYS];
    };
    float state[BLOCKS][KEYS]; /* parts of the sum of S * dS over value columns */
    float from_0_past_1[KEYS], from_0_to_3[KEYS], from_1_to_3[KEYS];
    uint64_t full;
};
static_assert(sizeof(intra_key_room<LA_DELTA, false>) <= 99 << 10, "as sm_86, sm_89, sm_120");
static_assert(sizeof(intra_key_room<LA_ADDITIVE, false>) <= 99 << 10, "the same");

/* The decays of a chunk, [C][KEYS] floats, from `first_key` on. They are ones past its end. */
__device__ inline void load_decay_matrix(const call &c, const unit &u, int t, int n, float *a,
                                  int first_key)
{
    const int keys = c.K - first_key;
    const bool rows_of_4 =
        c.x[LA_G].dtype == LA_F32 && c.K % 4 == 0 && (uintptr_t)c.x[LA_G].data % 16 == 0 &&
        (c.x[LA_G].stride[0] | c.x[LA_G].stride[1] | c.x[LA_G].stride[2]) % 4 == 0;
    if (rows_of_4) { /* all loads start before the first wait */
        constexpr int COUNT = C * KEYS / 4 / INTRA_THREADS, STEP = INTRA_THREADS / (KEYS / 4);
        const int first = threadIdx.x / (KEYS / 4), key = threadIdx.x % (KEYS / 4) * 4;
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
            *(float4 *)(a + row * KEYS + key) = x[i];
        }
        return;
    }
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < C; row += INTRA_THREADS / 32) {
        float x[KEYS / 32];
        if (row < n)
            load_row(x, at(c.x[LA_G], u.b, t + row, u.hv, first_key), c.x[LA_G].dtype, lane, 32,
                     keys);
#pragma unroll
        for (int j = 0; j < KEYS / 32; j++)
            a[row * KEYS + lane + 32 * j] =
                row < n && lane + 32 * j < keys ? decay_of(x[j], c.gate) : 1;
    }
}

/* The sum over the eight threads that have the same keys of other rows. */
__device__ __forceinline__ float2 sum_of_rows(float2 x)
{
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        x.x += __shfl_xor_sync(~0u, x.x, step);
        x.y += __shfl_xor_sync(~0u, x.y, step);
    }
    return x;
}

/* Sums per key over the 16 rows of a warp of x [16][KEYS] times their rows of a tile. */
__device__ __forceinline__ void sum_rows(const float (&x)[KEYS / 8][4], const char *tile, int row,
                                         float *to)
{
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < KEYS / 8; m++) {
        const int at = element_at(row + lane / 4, m * 8 + pair);
        const float2 y = unpack(*(const uint32_t *)(tile + at));
        const float2 z = unpack(*(const uint32_t *)(tile + at + 8 * 128));
        const float2 sum =
            sum_of_rows(make_float2(x[m][0] * y.x + x[m][2] * z.x, x[m][1] * y.y + x[m][3] * z.y));
        if (lane < 4) *(float2 *)(to + m * 8 + pair) = sum;
    }
}

/* x [16 rows][KEYS] times a number per key. */
__device__ __forceinline__ void scale_keys(float (&x)[KEYS / 8][4], const float *by)
{
#pragma unroll
    for (int m = 0; m < KEYS / 8; m++) {
        const float2 a = *(const float2 *)(by + m * 8 + threadIdx.x % 4 * 2);
        x[m][0] *= a.x;
        x[m][1] *= a.y;
        x[m][2] *= a.x;
        x[m][3] *= a.y;
    }
}

/* x times rows row.. of a matrix, and times a number per row. If `early`, each row has the numbers
 * of the row before, and the first of a block has ones. */
__device__ __forceinline__ void scale_all(float (&x)[KEYS / 8][4], key_matrix &by, int row,
                                          float top, float low, bool early = false)
{
    const int lane = threadIdx.x % 32, first = row + lane / 4 - early;
#pragma unroll
    for (int m = 0; m < KEYS / 8; m++) {
        const int key = m * 8 + lane % 4 * 2;
        const float2 a = early && lane < 4 ? make_float2(1, 1) : by.two(first, key);
        const float2 b = by.two(first + 8, key);
        x[m][0] *= top * a.x;
        x[m][1] *= top * a.y;
        x[m][2] *= low * b.x;
        x[m][3] *= low * b.y;
    }
}

/* c [16][KEYS] += a times 16 rows of a tile, from `row` on. */
__device__ __forceinline__ void multiply_block(float (&c)[KEYS / 8][4], const left &a,
                                               uint32_t tile, int row)
{
    const uint32_t columns = lane_with_columns(tile);
#pragma unroll
    for (int m = 0; m < KEYS / 16; m++)
        multiply(c[2 * m], c[2 * m + 1], a, load_right(columns, row, m * 16));
}

/* A block has KEYS of the keys of a chunk, which are up to MOST. */
template <int MOST, la_rule RULE, bool HAS_X>
__global__ void __launch_bounds__(INTRA_THREADS, 1)
    intra_chunk_adjoint_key(const __grid_constant__ call c, const __grid_constant__ gradients d,
                            const __grid_constant__ chunks w,
                            const __grid_constant__ backward_maps maps,
                            const __grid_constant__ kept f, const __grid_constant__ intra_flags to)
{
    constexpr bool delta = RULE == LA_DELTA;
    extern __shared__ __align__(1024) char shared[];
    typedef intra_key_room<RULE, HAS_WARP_GROUPS> room;
    room &s = *(room *)shared;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane % 4 * 2;
    /* shows the compiler that all lanes have the same value */
    const bool first_group = __shfl_sync(~0u, warp, 0) < 4;
    const int block = warp % 4, row0 = block * 16, top = row0 + lane / 4, low = top + 8;
    const int all_keys = c.K > KEYS ? MOST : (int)KEYS, parts = all_keys / KEYS; /* of a tile */
    const int first_key = blockIdx.x % parts * KEYS, index = blockIdx.x / parts;
    if (first_key >= c.K) return;
    const int chunk_slot = index / c.HV, hv = index % c.HV;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int64_t place = (int64_t)chunk_slot * c.HV + hv;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const float scale = (float)c.scale;
    const bool bonus = !delta && to.dbonus;
    const bool early_x = HAS_X && c.predicts_before;

    /* one thread asks the copy engine, or all threads copy */
    const bool fetches = !HAS_WARP_GROUPS || threadIdx.x == 0;
    const auto fetch = [&](int i) {
        fetch_panel<KEYS, RULE>(c, d, maps, f, u, t, n, place * panels + i, i, s.panel, &s.full,
                                first_key, all_keys);
#if HAS_WARP_GROUPS
        barrier_expect(address_of(&s.full), panel_bytes<KEYS, RULE>);
#endif
    };
#if HAS_WARP_GROUPS
    if (threadIdx.x == 0) {
        barrier_init(address_of(&s.full), 1);
        barriers_ready();
        fetch(0);
    }
#endif
    load_decay_matrix(c, u, t, n, s.a.x, first_key); /* rows in their order */
    load_all<MOST, INTRA_THREADS, KEYS>(c, u.b, t, n, u.h, s.q, s.k, NULL, to.given, first_key);
    /* there is room for x only where something else has been, so it comes twice */
    const auto load_x = [&](char *tile) {
        load_all<MOST, INTRA_THREADS, KEYS>(c, u.b, t, n, u.h, NULL, NULL, tile, to.given,
                                            first_key);
    };
    if (threadIdx.x < C)
        s.beta[threadIdx.x] =
            !delta ? 1
            : threadIdx.x < n
                ? load<float>(at(c.x[LA_BETA], u.b, t + threadIdx.x, hv), c.x[LA_BETA].dtype)
                : 0;
    __syncthreads();
    /* a thread has two keys and a block of 16 tokens */
    const int own_key = threadIdx.x % (KEYS / 2) * 2, own_block = threadIdx.x / (KEYS / 2);
    const bool has_keys = own_block < BLOCKS;
    if (has_keys) {
        float2 x = make_float2(1, 1);
#pragma unroll
        for (int i = 15; i >= 0; i--) {
            const int row = own_block * 16 + i;
            const float2 a = *(const float2 *)&s.a.x[row * KEYS + own_key];
            s.h.two(row, own_key) = x;
            x = make_float2(x.x * a.x, x.y * a.y);
        }
        x = make_float2(1, 1);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int row = own_block * 16 + i;
            const float2 a = *(const float2 *)&s.a.x[row * KEYS + own_key];
            x = make_float2(x.x * a.x, x.y * a.y);
            s.f.two(row, own_key) = x;
        }
        *(float2 *)&s.t[own_block][own_key] = x;
        if (bonus) {
            x = make_float2(1, 1);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int row = own_block * 16 + i;
                const float2 after = s.f.two(row, own_key);
                s.f.two(row, own_key) = x;
                x = after;
            }
        }
    }
#if !HAS_WARP_GROUPS
    __syncthreads(); /* the panel comes where the decays are */
    fetch(0);
#endif

    float X[8][4] = {};        /* dO U' or Z U' */
    float Y[KEYS / 8][4] = {}; /* dO S' or Z S'; later dq, dk without the pairs within a block */
    float R[KEYS / 8][4] = {}; /* second group: U dS' */
    float2 along = make_float2(0, 0);
    for (int i = 0; i < panels; i++) {
#if HAS_WARP_GROUPS
        barrier_wait(address_of(&s.full), i % 2);
        if (n < C) { /* a box may reach into the next sequence, whose NaN must not come along */
            for (int j = threadIdx.x; j < (C - n) * 8; j += INTRA_THREADS) {
                const int at = piece_at(n + j / 8, j % 8);
                if (!delta) *(uint4 *)(s.panel.U + at) = make_uint4(0, 0, 0, 0);
                *(uint4 *)(s.panel.dO + at) = make_uint4(0, 0, 0, 0);
            }
            stores_before_copies();
            __syncthreads();
        }
#else
        copies_wait<0>();
        __syncthreads();
#endif
        const uint32_t U = address_of(s.panel.U), S = address_of(s.panel.S);
        const uint32_t own = address_of(first_group ? s.panel.dO : s.panel.Z);
        left a[4], b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (first_group || delta) a[j] = load_left(own, row0, j * 16);
            if (!first_group) b[j] = load_left(U, row0, j * 16);
        }
        products_begin();
        if (first_group || delta) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply_rows(X, a[j], U, j * 16);
                multiply_columns(Y, a[j], S, j * 16);
            }
        }
        if (!first_group) {
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(R, b[j], address_of(s.panel.dS), j * 16);
        }
        products_commit();
        if (has_keys)
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const int at = element_at(own_block * 16 + j, own_key);
                const float2 p = unpack(*(const uint32_t *)(s.panel.S + at));
                const float2 q = unpack(*(const uint32_t *)(s.panel.dS + at));
                along.x += p.x * q.x;
                along.y += p.y * q.y;
            }
        products_wait<0>();
        products_in(X);
        products_in(Y);
        products_in(R);
        __syncthreads(); /* the panel is no longer needed */
        if (fetches && i + 1 < panels) fetch(i + 1);
    }
    if (has_keys) *(float2 *)&s.state[own_block][own_key] = along;
    if (HAS_X) load_x(s.xf);

    /* the gradients of the scores, those of this group */
    const float b_top = s.beta[top], b_low = s.beta[low];
    if (first_group || delta) {
        char *tile = first_group ? s.dP : s.dL;
        if (delta && !first_group && first_key == 0 && d[LA_DBETA].data) /* Z_i . E_i */
#pragma unroll
            for (int m = 0; m < 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = e < 2 ? top : low, j = m * 8 + pair + e % 2;
                    if (i == j && i < n)
                        store(at(d[LA_DBETA], u.b, t + i, hv), d[LA_DBETA].dtype, X[m][e]);
                }
        const int diagonal = first_group; /* P has a diagonal, L has none */
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int j = m * 8 + pair;
            const float2 b = *(const float2 *)(s.beta + j);
            const float x_top = first_group ? scale : -b_top, x_low = first_group ? scale : -b_low;
            X[m][0] = j < top + diagonal ? x_top * b.x * X[m][0] : 0;
            X[m][1] = j + 1 < top + diagonal ? x_top * b.y * X[m][1] : 0;
            X[m][2] = j < low + diagonal ? x_low * b.x * X[m][2] : 0;
            X[m][3] = j + 1 < low + diagonal ? x_low * b.y * X[m][3] : 0;
            *(uint32_t *)(tile + element_at(top, j)) = pack(X[m][0], X[m][1]);
            *(uint32_t *)(tile + element_at(low, j)) = pack(X[m][2], X[m][3]);
            if (m / 2 == block) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = (e < 2 ? top : low) % 16, column = j % 16 + e % 2;
                    if (first_group && bonus) {
                        if (column == row) s.own[row0 + row] = X[m][e];
                        if (column < row) s.near[block][column][row - 1] = X[m][e];
                        if (row == 0) s.near[block][column][15] = 0; /* no later token reads here */
                    } else if (first_group && column <= row)
                        s.near[block][column][row] = X[m][e];
                    if (!first_group && column < row)
                        s.near[block][15 - column][15 - row] = X[m][e];
                }
            }
        }
    }
    if (HAS_X) __syncthreads(); /* x is there */
    /* was q^ = e q, x^ = e x: terms that begin at the state before the chunk */
    for (int B = 0; B < block; B++) scale_keys(Y, s.t[B]);
    const bool early = early_x && !first_group;
    scale_all(Y, s.f, row0, first_group ? scale : -b_top, first_group ? scale : -b_low, early);
    const char *const x_rows = HAS_X ? s.xf : s.k;
    sum_rows(Y, first_group ? s.q : x_rows, row0,
             first_group ? s.q_from_state[block] : s.x_from_state[block]);
    if (!first_group) { /* was k~ = r k: terms that end at the state after the chunk */
        for (int B = block + 1; B < BLOCKS; B++) scale_keys(R, s.t[B]);
        scale_all(R, s.h, row0, b_top, b_low);
        sum_rows(R, s.k, row0, s.to_end[block]);
    }
    if (HAS_X) __syncthreads(); /* x becomes x f */

    /* operands in blocks, over the place of the panel */
    if (has_keys)
#pragma unroll 4
        for (int i = 0; i < 16; i++) {
            const int row = own_block * 16 + i, at = element_at(row, own_key);
            const float2 q = unpack(*(const uint32_t *)(s.q + at));
            const float2 k = unpack(*(const uint32_t *)(s.k + at));
            const float2 a = s.f.two(row, own_key), b = s.h.two(row, own_key);
            *(uint32_t *)(s.qf + at) = pack(q.x * a.x, q.y * a.y);
            if (delta) {
                const float2 x = HAS_X ? unpack(*(const uint32_t *)(s.xf + at)) : k;
                float2 of_x = a;
                if (early_x) of_x = i ? s.f.two(max(row - 1, 0), own_key) : make_float2(1, 1);
                *(uint32_t *)(s.xf + at) = pack(x.x * of_x.x, x.y * of_x.y);
            }
            *(uint32_t *)(s.kh + at) = pack(k.x * b.x, k.y * b.y);
        }
    __syncthreads();

    /* pairs in different blocks: first those that end in the block of this warp, then those that
     * begin there */
    if (first_group || delta) {
        const uint32_t tile = address_of(first_group ? s.dP : s.dL);
        float x[KEYS / 8][4] = {};
        for (int J = 0; J < block; J++) {
            if (J) scale_keys(x, s.t[J]);
            multiply_block(x, load_left(tile, row0, J * 16), address_of(s.kh), J * 16);
        }
        if (block) scale_all(x, s.f, row0, 1, 1, early);
#pragma unroll
        for (int m = 0; m < KEYS / 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) Y[m][e] += x[m][e];
    }
    if (!first_group) {
        float x[KEYS / 8][4] = {};
        /* the terms so far that pass block 1 or 2: sums over the tokens of this block */
        const auto passing = [&](const float *by, const float *and_by, float *sums) {
#pragma unroll
            for (int m = 0; m < KEYS / 8; m++) {
                const int key = m * 8 + pair, at = element_at(top, key);
                const float2 y = unpack(*(const uint32_t *)(s.k + at)), a = s.h.two(top, key);
                const float2 z = unpack(*(const uint32_t *)(s.k + at + 8 * 128)),
                             b = s.h.two(low, key);
                const float2 t = *(const float2 *)(by + key);
                const float2 r = and_by ? *(const float2 *)(and_by + key) : make_float2(1, 1);
                const float2 sum =
                    sum_of_rows(make_float2(x[m][0] * a.x * y.x + x[m][2] * b.x * z.x,
                                            x[m][1] * a.y * y.y + x[m][3] * b.y * z.y));
                if (lane < 4)
                    *(float2 *)(sums + key) = make_float2(t.x * r.x * sum.x, t.y * r.y * sum.y);
            }
        };
        for (int I = BLOCKS - 1; I > block; I--) {
            if (I < BLOCKS - 1) scale_keys(x, s.t[I]);
            multiply_block(x, load_left_transposed(address_of(s.dP), I * 16, row0),
                           address_of(s.qf), I * 16);
            if (delta)
                multiply_block(x, load_left_transposed(address_of(s.dL), I * 16, row0),
                               address_of(s.xf), I * 16);
            if (block == 0 && I == 3) passing(s.t[2], s.t[1], s.from_0_to_3);
            if (block == 0 && I == 2) passing(s.t[1], NULL, s.from_0_past_1);
            if (block == 1 && I == 3) passing(s.t[2], NULL, s.from_1_to_3);
        }
        if (block < BLOCKS - 1) scale_all(x, s.h, row0, 1, 1);
#pragma unroll
        for (int m = 0; m < KEYS / 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) R[m][e] += x[m][e];
    }
    __syncthreads(); /* f, h and the operands are no longer needed */
    const char *const seen = HAS_X ? s.kh : s.k;
    if (!HAS_WARP_GROUPS) load_decay_matrix(c, u, t, n, s.a.x, first_key);
    if (HAS_X) load_x(s.kh);
    /* sums that end at a token go over f, those that begin there over h */
    const auto put = [&](const float(&x)[KEYS / 8][4], const char *tile, key_matrix &sums, bool add,
                         bool early = false) {
#pragma unroll
        for (int m = 0; m < KEYS / 8; m++) {
            const int key = m * 8 + pair, at = element_at(top, key);
            const float2 y = unpack(*(const uint32_t *)(tile + at));
            const float2 z = unpack(*(const uint32_t *)(tile + at + 8 * 128));
            /* a sum that ends at the first token passes no token of this block */
            float2 &p = sums.two(top - (early && lane >= 4), key), &q = sums.two(low - early, key);
            if (!early || lane >= 4)
                p = make_float2((add ? p.x : 0) + x[m][0] * y.x, (add ? p.y : 0) + x[m][1] * y.y);
            q = make_float2((add ? q.x : 0) + x[m][2] * z.x, (add ? q.y : 0) + x[m][3] * z.y);
        }
    };
    if (first_group)
        put(Y, s.q, s.f, false);
    else
        put(R, s.k, s.h, false);
    __syncthreads();
    if (!first_group) {
        if (delta) put(Y, seen, s.f, true, early_x);
        if constexpr (HAS_X) { /* dk waits in shared memory for the pairs within a block */
#pragma unroll
            for (int m = 0; m < KEYS / 8; m++) {
                s.dk.two(top, m * 8 + pair) = make_float2(R[m][0], R[m][1]);
                s.dk.two(low, m * 8 + pair) = make_float2(R[m][2], R[m][3]);
            }
        } else { /* was x = k */
#pragma unroll
            for (int m = 0; m < KEYS / 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) Y[m][e] = (delta ? Y[m][e] : 0) + R[m][e];
        }
    }
    __syncthreads();

    /* Pairs within a block, one key after the other. The row of token j goes down the block,
     * rho_i = a_i rho_(i-1), and its gradient comes back up. */
    {
        constexpr int NEAR_KEYS = KEYS * BLOCKS / INTRA_THREADS; /* of a thread */
        const int near_key = threadIdx.x % (KEYS / NEAR_KEYS) * NEAR_KEYS;
        const int own_block = threadIdx.x / (KEYS / NEAR_KEYS);
#pragma unroll 1
        for (int key = near_key; key < near_key + NEAR_KEYS; key++) {
            float q[16], x[16], a[16], dq[16], dx[16], da[16];
            const float(*near)[16] = s.near[own_block];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int row = own_block * 16 + i, at = element_at(row, key);
                q[i] = (float)*(const element *)(s.q + at);
                x[i] = (float)*(const element *)(seen + at);
                a[i] = s.a.x[row * KEYS + key];
                dq[i] = dx[i] = da[i] = 0;
            }
            if (bonus)
#pragma unroll
                for (int i = 0; i < 16; i++) q[i] = i < 15 ? q[min(i + 1, 15)] : 0;
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const int row = own_block * 16 + j;
                float rho[16], of_rho = 0;
                rho[j] = HAS_X ? (float)*(const element *)(s.k + element_at(row, key)) : x[j];
#pragma unroll
                for (int i = j + 1; i < 16; i++) rho[i] = rho[i - 1] * a[i];
#pragma unroll
                for (int i = 15; i > j; i--) {
                    const float p = near[j][i];
                    of_rho += p * q[i];
                    dq[i] += p * rho[i];
                    const float y = delta ? near[15 - j][15 - i] : 0;
                    if (delta && !early_x) {
                        of_rho += y * x[i];
                        dx[i] += y * rho[i];
                    }
                    da[i] += of_rho * rho[i - 1];
                    of_rho *= a[i];
                    if (delta && early_x) {
                        of_rho += y * x[i];
                        dx[i] += y * rho[i - 1];
                    }
                }
                dq[j] += near[j][j] * rho[j];
                if (HAS_X)
                    s.dk.at(row, key) += of_rho + near[j][j] * q[j];
                else
                    dx[j] += of_rho + near[j][j] * q[j];
            }
            /* The terms that pass the whole block. */
            float passes = 0, all = 1;
            for (int i = 0; i < BLOCKS; i++) {
                passes += s.state[i][key];
                all *= s.t[i][key];
            }
            passes *= all;
            for (int i = own_block + 1; i < BLOCKS; i++)
                passes += s.q_from_state[i][key] + (delta ? s.x_from_state[i][key] : 0);
            for (int i = 0; i < own_block; i++) passes += s.to_end[i][key];
            if (own_block == 1) passes += s.from_0_past_1[key];
            if (own_block == 2) passes += s.from_0_to_3[key] + s.from_1_to_3[key];
            float ends[16], sum = passes;
#pragma unroll
            for (int i = 15; i >= 0; i--) ends[i] = sum += s.f.at(own_block * 16 + i, key);
            sum = 0;
            if (bonus) {
                /* a sum that ends at a token does not pass it */
#pragma unroll
                for (int i = 0; i < 16; i++) ends[i] = i < 15 ? ends[min(i + 1, 15)] : passes;
                /* was P_ii = q . (bonus k) */
                const view &of = c.x[LA_U];
                const float by =
                    first_key + key < c.K ? load<float>(at(of, u.h, first_key + key), of.dtype) : 0;
                float of_bonus = 0;
#pragma unroll
                for (int i = 15; i >= 0; i--) {
                    const int row = own_block * 16 + i;
                    const float own = s.own[row];
                    const float own_q = (float)*(const element *)(s.q + element_at(row, key));
                    dq[i] = (i ? dq[max(i - 1, 0)] : 0) + own * by * x[i];
                    dx[i] += own * by * own_q;
                    of_bonus += own * own_q * x[i];
                }
                s.of_bonus[own_block][key] = of_bonus;
            }
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int row = own_block * 16 + i;
                if (row < n && first_key + key < c.K)
                    store(at(d[LA_DG], u.b, t + row, hv, first_key + key), d[LA_DG].dtype,
                          ends[i] + sum + a[i] * da[i]);
                sum += s.h.at(row, key);
                (HAS_X ? s.h : s.dk).at(row, key) = dx[i];
            }
#pragma unroll
            for (int i = 0; i < 16; i++) s.f.at(own_block * 16 + i, key) = dq[i];
        }
    }
    __syncthreads();
    if (bonus && threadIdx.x < KEYS) {
        const int key = threadIdx.x;
        float sum = 0;
        for (int i = 0; i < BLOCKS; i++) sum += s.of_bonus[i][key];
        to.dbonus[place * all_keys + first_key + key] = sum;
    }
    const int64_t apart = (int64_t)c.B * c.T * to.kp * hv;
    key_matrix &near = first_group ? s.f : HAS_X ? s.h : s.dk;
#pragma unroll
    for (int m = 0; m < KEYS / 8; m++) {
        const float2 x = near.two(top, m * 8 + pair), y = near.two(low, m * 8 + pair);
        Y[m][0] += x.x;
        Y[m][1] += x.y;
        Y[m][2] += y.x;
        Y[m][3] += y.y;
    }
    const view &of_Y = d[first_group ? LA_DQ : HAS_X ? LA_DX : LA_DK];
    float *const partial = first_group ? to.dq : HAS_X ? to.dx : to.dk;
    store_rows(c, u, of_Y, (first_group ? to.direct_q : to.direct_k) ? NULL : partial + apart,
               to.kp, t, n, row0, Y, first_key);
    if (HAS_X && !first_group) {
#pragma unroll
        for (int m = 0; m < KEYS / 8; m++) {
            const float2 x = s.dk.two(top, m * 8 + pair), y = s.dk.two(low, m * 8 + pair);
            R[m][0] = x.x;
            R[m][1] = x.y;
            R[m][2] = y.x;
            R[m][3] = y.y;
        }
        store_rows(c, u, d[LA_DK], to.direct_k ? NULL : to.dk + apart, to.kp, t, n, row0, R,
                   first_key);
    }
}

#endif
