/* The chunk form of the delta rule in one kernel, on Hopper: nothing but q, k, v, the gates, o and the
 * states goes through memory. See chunk.cuh for the formulas; here A is folded into the keys that are
 * written and into the scores, so that U is never formed:
 *
 *     X = A~' K    B = P A    where A~ = diag(out) A and A = (I + L)^-1 diag(b)
 *     W = V - k^ S            S <- a S + X' W            O = q^ S + B W
 *
 * The way from one state to the next has two products, where chunks_forward has three. Decays are
 * none or scalar, and q and k are used as the caller gave them.
 *
 * A block has groups of four warps, each with a role. They meet at barriers in shared memory.
 *
 *     walk     one or two groups, for 64 value columns each, with the state in registers. Waits for
 *              `keys`, `values` and `ready`; says `done`
 *     solve    one group. K K', L and its inverse: A and A~. Waits for `keys`, `gates` and `used`; says
 *              `solved`
 *     score    one group. The decays, a chunk ahead: `gates`. Q K' and P; when A is `solved`, B and X:
 *              `used`, `ready`. Three of its threads ask the copy engine for k and q of the next chunk
 *              and for v of this one, as soon as the walks are `done` with the chunk before the last
 *
 * A chunk of a walk, where the tensor cores work on the left side:
 *
 *     W = S k                  | O of the last chunk goes to memory
 *                              | V - W becomes an operand
 *     O = S q, S = a S + W X   | O times the decay
 *     O += W B                 | S becomes the operand of the next chunk
 *
 * The inverse is float32 within blocks of 8 tokens. The blocks below them follow from products of
 * float16, whose 11 bits are those of tf32. A number that is too large for float16 becomes an infinity
 * or a NaN; then the chunk goes token by token.
 *
 * The code of the roles is short on purpose, and the same for all warps: four roles share the
 * instruction cache of a scheduler, and a role that misses it waits for every third instruction. */
#ifndef LINATTN_CUDA_DELTA_CUH
#define LINATTN_CUDA_DELTA_CUH

#include "additive.cuh"

enum {
    KEY_STAGES = 3,      /* k and q of a chunk: the walks, solve and score, the copy engine */
    LOWER = BLOCK + 4,   /* rows of blocks of 16: each 20 banks further */
    LOWER_8 = 12,        /* rows of blocks of 8: each 12 banks further */
    OF_CHUNK = C / BLOCK /* blocks */
};

/* With keys and strengths below these, no sum of X is too large: 2^10 2^50 times the 2^16 of the
 * inverse and 64 tokens is 2^82. From MOST_SCORE on bfloat16 rounds to infinity. */
static constexpr float MOST_STRENGTH = 0x1p10f, MOST_SQUARE = 0x1p100f,
                       MOST_SCORE = TOO_LARGE_FOR_PLANES;

/* The registers of a thread of the roles: 512 or 504 for a lane of all warps. */
template <int WALKS> struct delta_registers {
    static constexpr int walk = WALKS == 2 ? 184 : 216, prepare = WALKS == 2 ? 72 : 144;
    static_assert((WALKS * walk + 2 * prepare) * GROUP <= 65536, "");
};

/* The decays and writing strengths of a chunk. A block is 16 tokens. */
struct gates_of_chunk {
    alignas(16) float a[C]; /* the decays as given */
    float beta[C];
    float from_block_start[C]; /* the decay from the start of the block through a token */
    float block[OF_CHUNK];     /* the decay of a block */
    /* G of the blocks on the diagonal. The last row has the decays to the end of the block. */
    float within[OF_CHUNK][BLOCK][LOWER];
    int nonfinite[OF_CHUNK]; /* the first token of a block with a NaN or an infinity, or C */
    int n;                   /* the tokens of the chunk; 0: there is no such chunk */
};

/* A chunk of a tile. */
struct chunk_place {
    int b, h, hv, column;    /* the first value column */
    int t, n, end;           /* its tokens, and the end of the sequence */
    int index;               /* of the tile */
    const char *gate, *beta; /* of the first token */
};

/* Shared memory. */
template <int KP, int WALKS> struct delta_room {
    struct {
        char k[tile_bytes(KP)], q[tile_bytes(KP)];
    } keys[KEY_STAGES];
    struct {
        char panel[WALKS][PANEL_BYTES]; /* O leaves by way of the place of v */
    } values[SLOTS];
    struct {
        char x[tile_bytes(KP)], b[PANEL_BYTES];
    } slot[SLOTS];
    char inverse[PANEL_BYTES], ended[PANEL_BYTES]; /* A, A~' */
    char inverse_f16[PANEL_BYTES], half_f16[PANEL_BYTES]; /* (I + L)^-1; a product for it */
    /* -L: the blocks of 8 x 8 on its diagonal */
    alignas(16) float lower[OF_CHUNK][2][8][LOWER_8];
    gates_of_chunk gates[SLOTS];
    chunk_place place[KEY_STAGES];
    float in[SLOTS][C]; /* decays from the start of the chunk */
    /* the first token with a NaN or an infinity, or C; as far as `solve` knows */
    int nonfinite[SLOTS], nonfinite_solve[SLOTS];
    uint64_t barrier_keys[KEY_STAGES], barrier_values[SLOTS], barrier_gates[SLOTS];
    uint64_t barrier_ready[SLOTS], barrier_done[SLOTS], barrier_solved, barrier_used;
};

struct delta_flags {
    bool o_pieces; /* rows of o can be stored in pieces of 16 bytes */
    bool o_boxes;  /* the copy engine can store o */
    int tiles;     /* of 64 value columns for each walk */
};

#if HAS_WARP_GROUPS
/* The four warps of a group wait for one another. */
__device__ __forceinline__ void group_waits()
{
    asm volatile("bar.sync %0, 128;" ::"r"(2 + threadIdx.x / GROUP) : "memory");
}

/* Parity for a wait: use `use` of a barrier has ended. use == -1 has. */
__device__ __forceinline__ int parity(int use) { return use & 1; }

/* Has a walk left chunk - 2, so that its places are free? */
template <typename room> __device__ __forceinline__ void wait_for_place(room &s, int chunk)
{
    barrier_wait(address_of(s.barrier_done + chunk % SLOTS), parity(chunk / SLOTS - 1));
}

__device__ __forceinline__ void multiply_f16(float (&c)[4], const left &a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high)
{
    const __half2 x = __floats2half2_rn(low, high);
    return *(const uint32_t *)&x;
}

__device__ __forceinline__ left as_left_f16(const float (&x)[2][4])
{
    return {{pack_f16(x[0][0], x[0][1]), pack_f16(x[0][2], x[0][3]), pack_f16(x[1][0], x[1][1]),
             pack_f16(x[1][2], x[1][3])}};
}

__device__ __forceinline__ uint32_t transpose(uint32_t x)
{
    uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* Has one of these pairs of float16 a NaN or an infinity? */
template <int N> __device__ __forceinline__ bool f16_nonfinite(const uint32_t (&x)[N])
{
    const __half2 zero = __float2half2_rn(0);
    __half2 sum = zero;
#pragma unroll
    for (int i = 0; i < N; i++) sum = __hfma2(*(const __half2 *)&x[i], zero, sum);
    return (*(const uint32_t *)&sum & 0x7fff7fff) != 0;
}

/* The block of 16 x 16 on the diagonal, of the sums of 16 rows of a warp. */
__device__ __forceinline__ void own_block(const float (&x)[8][4], int warp, float (&own)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int half = i / 4, e = i % 4;
        const float low = warp & 1 ? x[2 + half][e] : x[half][e];
        const float high = warp & 1 ? x[6 + half][e] : x[4 + half][e];
        own[half][e] = warp & 2 ? high : low;
    }
}

/* Zeros in the rows of the chunk from `rows` on; row: the first one of this thread. */
__device__ __forceinline__ void zero_rows(float (&x)[8][4], int row, int rows)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (row + i / 2 % 2 * 8 >= rows) x[i / 4][i % 4] = 0;
}

/* each(J, p) for all blocks J but the last: p is the sums of block J times the decays between the two
 * tokens and times `by` of the two rows of this thread. From the block on the diagonal on, p is zeros
 * if ZEROS, and of no use otherwise. All warps go through the same instructions. */
template <la_decay DECAY, bool ZEROS, typename F>
__device__ __forceinline__ void scale_blocks(const float (&x)[8][4], const gates_of_chunk &g,
                                             const float2 by, F each)
{
    const seat at = own_seat();
    float2 of_rows = by;
    if (DECAY == LA_TOKEN) {
        of_rows.x *= g.from_block_start[at.warp * BLOCK + at.row];
        of_rows.y *= g.from_block_start[at.warp * BLOCK + at.row + 8];
    }
#pragma unroll
    for (int J = OF_CHUNK - 2; J >= 0; J--) {
        const bool before = J < at.warp;
        float2 ends[2] = {make_float2(1, 1), make_float2(1, 1)};
        if (DECAY == LA_TOKEN)
#pragma unroll
            for (int half = 0; half < 2; half++)
                ends[half] = *(const float2 *)&g.within[J][BLOCK - 1][half * 8 + at.pair];
        float p[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int half = i / 4, lower = i / 2 % 2, odd = i % 2;
            const float row = lower ? of_rows.y : of_rows.x;
            const float y = x[2 * J + half][i % 4] * (row * (odd ? ends[half].y : ends[half].x));
            p[half][i % 4] = ZEROS && !before ? 0 : y;
        }
        if (DECAY == LA_TOKEN && before) {
            const float block = g.block[J];
            of_rows.x *= block;
            of_rows.y *= block;
        }
        each(J, p);
    }
}

/* own times the decays and times `by` of the two rows. On the diagonal and above it are zeros if
 * STRICT; otherwise above it. */
template <la_decay DECAY, bool STRICT>
__device__ __forceinline__ void scale_own_block(float (&own)[2][4], const gates_of_chunk &g,
                                                const float2 by)
{
    const seat at = own_seat();
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const int half = i / 4, lower = i / 2 % 2;
        const int row = at.row + lower * 8, column = half * 8 + at.pair;
        float2 G = make_float2(1, 1);
        if (DECAY == LA_TOKEN) G = *(const float2 *)&g.within[at.warp][row][column];
        const float factor = lower ? by.y : by.x;
        float &x = own[half][i % 4], &y = own[half][i % 4 + 1];
        x = column < row + !STRICT ? x * factor * G.x : 0;
        y = column + 1 < row + !STRICT ? y * factor * G.y : 0;
    }
}

/* A and A~ of every chunk. A warp has 16 rows. */
template <int KP, la_decay DECAY, int WALKS>
__device__ __forceinline__ void solve_chunks(delta_room<KP, WALKS> &s)
{
    ring r = {KEY_STAGES, 0, 0};
    for (int chunk = 0;; chunk++, r.next()) {
        const int slot = chunk % SLOTS;
        const gates_of_chunk &g = s.gates[slot];
        barrier_wait(address_of(s.barrier_gates + slot), parity(chunk / SLOTS));
        const int n = g.n;
        if (n == 0) return;
        auto &keys = s.keys[r.at];
        float x[8][4];
        barrier_wait(address_of(s.barrier_keys + r.at), r.round);
        if (__builtin_expect(n < C, 0)) {
            /* a box may reach into the next sequence, whose NaN must not come along */
            for (int j = threadIdx.x % GROUP; j < (C - n) * KP / 8; j += GROUP)
                *(uint4 *)(keys.k + piece_at(n + j / (KP / 8), j % (KP / 8))) =
                    make_uint4(0, 0, 0, 0);
            stores_before_copies();
            group_waits();
        }
        products_begin();
#pragma unroll
        for (int j = 0; j < KP; j += 16)
            multiply_tiles(x, address_of(keys.k), address_of(keys.k), j, j == 0);
        products_commit();
        const seat at = own_seat();
        if (at.thread == 0) s.nonfinite_solve[slot] = C;
        float2 by =
            make_float2(-g.beta[at.warp * BLOCK + at.row], -g.beta[at.warp * BLOCK + at.row + 8]);
        const int found = g.nonfinite[at.warp];
        const uint32_t T = address_of(s.inverse_f16), half = address_of(s.half_f16);
        const uint32_t T_columns = lane_with_columns(T), half_columns = lane_with_columns(half);
        products_wait<0>();
        products_in(x);
        float own_sums[2][4];
        own_block(x, at.warp, own_sums);
        /* Products of a key and itself that are far from too large, as are the strengths: so are the
         * numbers of X then. A NaN is none of them. */
        {
            const bool first = at.row == at.pair, second = at.row == at.pair + 1;
            const float top = first ? own_sums[0][0] : second ? own_sums[0][1] : 0;
            const float low = first ? own_sums[1][2] : second ? own_sums[1][3] : 0;
            const int row = at.warp * BLOCK + at.row;
            int nonfinite = found;
            if (!(low < MOST_SQUARE && fabsf(by.y) < MOST_STRENGTH))
                nonfinite = min(nonfinite, row + 8);
            if (!(top < MOST_SQUARE && fabsf(by.x) < MOST_STRENGTH))
                nonfinite = min(nonfinite, row);
            if (__builtin_expect(any_of_group(nonfinite < n), 0)) {
                /* L, A and the strengths are zeros from it on */
                if (nonfinite < n) atomicMin(s.nonfinite_solve + slot, nonfinite);
                group_waits();
                const int rows = s.nonfinite_solve[slot];
                zero_rows(x, row, rows);
                own_block(x, at.warp, own_sums);
                if (row >= rows) by.x = 0;
                if (row + 8 >= rows) by.y = 0;
                if (at.thread < C && at.thread >= rows) s.gates[slot].beta[at.thread] = 0;
                group_waits();
            }
        }
        left L[OF_CHUNK - 1]; /* -L of the blocks before the one on the diagonal */
        scale_blocks<DECAY, false>(x, g, by,
                                   [&](int J, const float(&p)[2][4]) { L[J] = as_left_f16(p); });
        /* The block on the diagonal in quarters. Those on its diagonal are inverted by substitution:
         * a lane has a row y, and y (I + L) = e. */
        uint32_t quarter; /* -L of the one below */
        bool bad = false;
        {
            auto &own = own_sums;
            scale_own_block<DECAY, true>(own, g, by);
            quarter = pack_f16(own[0][2], own[0][3]);
            *(float2 *)&s.lower[at.warp][0][at.row][at.pair] = make_float2(own[0][0], own[0][1]);
            *(float2 *)&s.lower[at.warp][1][at.row][at.pair] = make_float2(own[1][2], own[1][3]);
        }
        __syncwarp();
        float y[8];
        const int own_row = at.lane % BLOCK;
#pragma unroll
        for (int j = 0; j < 8; j++) y[j] = j == at.lane % 8;
#pragma unroll
        for (int j = 7; j > 0; j--)
#pragma unroll
            for (int i = 0; i < j; i += 4) {
                const float4 z = *(const float4 *)&s.lower[at.warp][own_row / 8][j][i];
                y[i] += y[j] * z.x;
                if (i + 1 < j) y[i + 1] += y[j] * z.y;
                if (i + 2 < j) y[i + 2] += y[j] * z.z;
                if (i + 3 < j) y[i + 3] += y[j] * z.w;
            }
        if (at.lane < BLOCK)
            *(uint4 *)(s.inverse_f16 +
                       piece_at(at.warp * BLOCK + own_row, at.warp * 2 + own_row / 8)) =
                make_uint4(pack_f16(y[0], y[1]), pack_f16(y[2], y[3]), pack_f16(y[4], y[5]),
                           pack_f16(y[6], y[7]));
        __syncwarp();
        left own = load_left(T, at.warp * BLOCK, at.warp * BLOCK); /* T of the block */
        {
            float sum[4] = {}, below[4] = {};
            const right of = load_right(T_columns, at.warp * BLOCK, at.warp * BLOCK);
            multiply_f16(sum, {{0, quarter, 0, 0}}, of.x[0], 0);
            own.x[1] = 0;
            multiply_f16(below, own, 0, transpose(pack_f16(sum[2], sum[3])));
            own.x[1] = pack_f16(below[2], below[3]);
        }
        __syncwarp();
        *(uint32_t *)(s.inverse_f16 + element_at(at.warp * BLOCK + 8 + at.row,
                                                 at.warp * BLOCK + at.pair)) = own.x[1];
        bad |= f16_nonfinite(own.x);

        /* block (I of this warp, J) of T, times beta: of A; times the decays to the end, too: of A~ */
        float2 out = make_float2(1, 1); /* of the two rows of this thread */
        if (DECAY == LA_TOKEN) {
            out.x = g.within[at.warp][BLOCK - 1][at.row];
            out.y = g.within[at.warp][BLOCK - 1][at.row + 8];
#pragma unroll
            for (int j = 1; j < OF_CHUNK; j++)
                if (j > at.warp) out = make_float2(out.x * g.block[j], out.y * g.block[j]);
        }
        const auto put = [&](const left &block, int J) {
            left A, ended;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float2 beta = *(const float2 *)(g.beta + J * BLOCK + e / 2 * 8 + at.pair);
                float2 z = __half22float2(*(const __half2 *)&block.x[e]);
                z = make_float2(z.x * beta.x, z.y * beta.y);
                A.x[e] = pack(z.x, z.y);
                const float of_row = e % 2 ? out.y : out.x;
                ended.x[e] = pack(z.x * of_row, z.y * of_row);
            }
            store_matrices(address_of(s.inverse) +
                               block_at(lane_with_columns(0), at.warp * BLOCK, J * BLOCK),
                           A.x);
            store_matrices_transposed(address_of(s.ended) +
                                          block_at(lane_with_rows(0), J * BLOCK, at.warp * BLOCK),
                                      ended.x);
        };
        const auto others_see = [] {
            stores_before_copies();
            group_waits();
        };
        const auto only = [&](bool here, const left &x) {
            left y;
#pragma unroll
            for (int e = 0; e < 4; e++) y.x[e] = here ? x.x[e] : 0;
            return y;
        };

        /* The blocks below the diagonal, with T = (I + L)^-1. First those next to it in the two
         * quarters on the diagonal: T_IJ = T_II (-L_IJ T_JJ). Then those of the quarter below:
         * [T_22 0; T_32 T_33] ([-L_20 -L_21; -L_30 -L_31] [T_00 0; T_10 T_11]). */
        const int warp = at.warp;
        left next; /* T of the block before the own one, for odd warps */
        {
            float sum[2][4];
            left first = only(warp == 1, L[0]), second = only(warp == 3, L[2]);
            others_see();
            products_begin();
            multiply_f16(sum, first, T, 0, 0, true);
            multiply_f16(sum, second, T, 2 * BLOCK, 2 * BLOCK, false);
            products_commit();
            /* score has read A and A~ of the last chunk */
            barrier_wait(address_of(&s.barrier_used), parity(chunk - 1));
            put(own, warp);
            products_wait<0>();
            products_in(sum);
            store_matrices(block_at(half_columns, warp * BLOCK, 0), as_left_f16(sum).x);
            first = only(warp == 1, own), second = only(warp == 3, own);
            others_see();
            products_begin();
            multiply_f16(sum, first, half, BLOCK, 0, true);
            multiply_f16(sum, second, half, 3 * BLOCK, 0, false);
            products_commit();
            products_wait<0>();
            products_in(sum);
            next = as_left_f16(sum);
            if (warp % 2) {
                bad |= f16_nonfinite(next.x);
                store_matrices(block_at(T_columns, warp * BLOCK, (warp - 1) * BLOCK), next.x);
            }
        }
        float sum[4][4];
        const left L0 = only(warp >= 2, L[0]), L1 = only(warp >= 2, L[1]);
        others_see();
        products_begin();
        multiply_f16(sum, L0, T, 0, 0, true);
        multiply_f16(sum, L1, T, BLOCK, 0, false);
        products_commit();
        if (warp % 2) put(next, warp - 1);
        products_wait<0>();
        products_in(sum);
        const auto half_of = [&](int i) {
            return left{{pack_f16(sum[2 * i][0], sum[2 * i][1]),
                         pack_f16(sum[2 * i][2], sum[2 * i][3]),
                         pack_f16(sum[2 * i + 1][0], sum[2 * i + 1][1]),
                         pack_f16(sum[2 * i + 1][2], sum[2 * i + 1][3])}};
        };
        store_matrices(block_at(half_columns, warp * BLOCK, 0), half_of(0).x);
        store_matrices(block_at(half_columns, warp * BLOCK, BLOCK), half_of(1).x);
#pragma unroll
        for (int e = 0; e < 4; e++) next.x[e] = warp == 2 ? own.x[e] : warp == 3 ? next.x[e] : 0;
        own = only(warp == 3, own);
        others_see();
        products_begin();
        multiply_f16(sum, next, half, 2 * BLOCK, 0, true);
        multiply_f16(sum, own, half, 3 * BLOCK, 0, false);
        products_commit();
        products_wait<0>();
        products_in(sum);
        if (warp >= 2) {
            const left two[2] = {half_of(0), half_of(1)};
            bad |= f16_nonfinite(two[0].x) || f16_nonfinite(two[1].x);
            put(two[0], 0);
            put(two[1], 1);
        }
        if (bad) atomicMin(s.nonfinite_solve + slot, 0);
        stores_before_copies();
        warp_arrives(address_of(&s.barrier_solved));
    }
}

/* The numbers of a token before they are known. */
struct early_gates {
    uint32_t a, beta;
};

template <la_decay DECAY>
__device__ __forceinline__ early_gates load_gates_early(const call &c, const chunk_place &p)
{
    early_gates x = {};
    const int token = own_seat().token;
    if (token >= p.n) return x;
    const view &gate = c.x[LA_G], &strength = c.x[LA_BETA];
    x.beta = load_early(p.beta + token * strength.stride[1] * la_size_of(strength.dtype),
                        strength.dtype);
    if (DECAY == LA_TOKEN)
        x.a = load_early(p.gate + token * gate.stride[1] * la_size_of(gate.dtype), gate.dtype);
    return x;
}

/* The decays of a chunk. A warp has 16 tokens, each in two lanes. A lane has a row of G. */
template <la_decay DECAY>
__device__ __forceinline__ void prepare_gates(const call &c, int n, const early_gates &x,
                                              gates_of_chunk &g)
{
    const seat me = own_seat();
    if (me.thread == 0) g.n = n;
    const bool there = me.token < n, writes = me.lane < BLOCK;
    bool found = false;
    const float beta = there ? loaded(x.beta, c.x[LA_BETA].dtype) : 0;
    if (writes) g.beta[me.token] = beta;
    found |= !isfinite(beta);
    if constexpr (DECAY == LA_TOKEN) {
        const float a = there ? decay_of(loaded(x.a, c.x[LA_G].dtype), c.gate) : 1;
        if (writes) g.a[me.token] = a;
        found |= !isfinite(a);
        __syncwarp();
        float row[BLOCK], product = 1;
#pragma unroll
        for (int j = 0; j < BLOCK; j += 4)
            *(float4 *)(row + j) = *(const float4 *)(g.a + me.warp * BLOCK + j);
#pragma unroll
        for (int j = BLOCK - 1; j >= 0; j--) {
            const float of = row[j];
            row[j] = product;
            if (j <= me.lane % BLOCK) product *= of;
        }
        if (writes) {
            float *const to = g.within[me.warp][me.lane];
#pragma unroll
            for (int j = 0; j < BLOCK; j += 4) *(float4 *)(to + j) = *(const float4 *)(row + j);
            g.from_block_start[me.token] = product;
            if (me.lane == BLOCK - 1) g.block[me.warp] = product;
        }
    }
    const unsigned all = __ballot_sync(~0u, found) & 0xffff;
    if (me.lane == 0) g.nonfinite[me.warp] = all ? me.warp * BLOCK + __ffs((int)all) - 1 : C;
}

/* The chunk after p. */
template <int WALKS>
__device__ __forceinline__ chunk_place place_after(const call &c, int tiles, chunk_place p)
{
    p.t += C;
    while (p.t >= p.end) { /* a place behind the last one stays there */
        p.index += (int)gridDim.x;
        if (p.index >= c.N * c.HV * tiles) {
            p.n = 0;
            return p;
        }
        const tile_of_head x = tile_at(c, tiles, p.index);
        p.b = x.u.b, p.h = x.u.h, p.hv = x.u.hv, p.column = x.tile * WALKS * PANEL;
        p.t = x.u.begin, p.end = x.u.end;
    }
    p.n = min(C, p.end - p.t);
    p.beta = at(c.x[LA_BETA], p.b, p.t, p.hv);
    if (c.x[LA_G].data) p.gate = at(c.x[LA_G], p.b, p.t, p.hv);
    return p;
}

/* The decays, B and X of every chunk. A warp has 16 rows. */
template <int KP, la_decay DECAY, int WALKS>
__device__ __forceinline__ void score_deltas(const call &c, const tensor_maps &maps,
                                             const delta_flags &f, delta_room<KP, WALKS> &s)
{
    const float scale = (float)c.scale;
    /* Three warps ask for k, q and v, the fourth one finds the places of chunks. */
    const int asks_for = threadIdx.x % 32 == 0 ? (int)(threadIdx.x % GROUP / 32) : -1;
    const auto fetch_keys = [&](int stage) {
        const chunk_place &p = s.place[stage];
        if (asks_for < 0 || asks_for > 1 || p.n == 0) return;
        const uint32_t barrier = address_of(s.barrier_keys + stage);
        const uint32_t to = address_of(asks_for ? s.keys[stage].q : s.keys[stage].k);
        const CUtensorMap *const map = asks_for ? &maps.q : &maps.k;
        barrier_expect(barrier, tile_bytes(KP));
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++)
            engine_copy_box(to + j * PANEL_BYTES, map, j * PANEL, p.h, p.t, p.b, barrier);
    };
    if (asks_for == 3) {
        chunk_place before = {};
        before.index = (int)blockIdx.x - (int)gridDim.x; /* so that the next one is the first */
#pragma unroll 1
        for (int i = 0; i < 2; i++) s.place[i] = before = place_after<WALKS>(c, f.tiles, before);
    }
    group_waits();
    fetch_keys(0);
    prepare_gates<DECAY>(c, s.place[0].n, load_gates_early<DECAY>(c, s.place[0]), s.gates[0]);
    warp_arrives(address_of(s.barrier_gates));
    group_waits(); /* for the gates; those of a later chunk are known since B of the one before */

    ring r = {KEY_STAGES, 0, 0};
    for (int chunk = 0;; chunk++, r.next()) {
        const int slot = chunk % SLOTS, next = (chunk + 1) % SLOTS;
        const int next_stage = r.at + 1 < KEY_STAGES ? r.at + 1 : 0;
        const int n = s.place[r.at].n;
        if (n == 0) return;
        auto &keys = s.keys[r.at];
        wait_for_place(s, chunk);
        if (asks_for == 2) {
            const chunk_place &p = s.place[r.at];
            const uint32_t barrier = address_of(s.barrier_values + slot);
            barrier_expect(barrier, WALKS * PANEL_BYTES);
#pragma unroll
            for (int j = 0; j < WALKS; j++) /* zeros, where there are no columns */
                engine_copy_box(address_of(s.values[slot].panel[j]), &maps.v, p.column + j * PANEL,
                                p.hv, p.t, p.b, barrier);
        }
        fetch_keys(next_stage);
        const early_gates early = load_gates_early<DECAY>(c, s.place[next_stage]);
        if (asks_for == 3) {
            s.nonfinite[slot] = C;
            const int after = KEY_STAGES - r.at - next_stage;
            s.place[after] = place_after<WALKS>(c, f.tiles, s.place[next_stage]);
        }
        __syncwarp();

        char *const panel = s.slot[slot].b; /* first P, then B */
        float y[8][4];
        barrier_wait(address_of(s.barrier_keys + r.at), r.round);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP; j += 16)
            multiply_tiles(y, address_of(keys.q), address_of(keys.k), j, j == 0);
        products_commit();
        prepare_gates<DECAY>(c, s.place[next_stage].n, early, s.gates[next]);
        warp_arrives(address_of(s.barrier_gates + next));

        const seat at = own_seat();
        const uint32_t to_panels = lane_with_columns(0);
        {
            const gates_of_chunk &g = s.gates[slot];
            const float2 by = make_float2(scale, scale);
            const uint32_t to = address_of(panel) + to_panels;
            products_wait<0>();
            products_in(y);
            /* the rows after the chunk may have a NaN */
            if (__builtin_expect(n < C, 0)) zero_rows(y, at.warp * BLOCK + at.row, n);
            scale_blocks<DECAY, true>(y, g, by, [&](int J, const float(&p)[2][4]) {
                store_matrices(block_at(to, at.warp * BLOCK, J * BLOCK), as_left(p[0], p[1]).x);
            });
            if (at.warp < OF_CHUNK - 1) {
                const uint32_t zeros[4] = {};
                store_matrices(block_at(to, at.warp * BLOCK, C - BLOCK), zeros);
            }
            float own[2][4];
            own_block(y, at.warp, own);
            scale_own_block<DECAY, false>(own, g, by);
            store_matrices(block_at(to, at.warp * BLOCK, at.warp * BLOCK),
                           as_left(own[0], own[1]).x);
        }
        if (DECAY == LA_TOKEN && at.lane < BLOCK) {
            const gates_of_chunk &g = s.gates[slot];
            float from_start = g.from_block_start[at.token];
#pragma unroll
            for (int j = 0; j < OF_CHUNK - 1; j++)
                if (j < at.warp) from_start *= g.block[j];
            s.in[slot][at.token] = from_start;
        }
        stores_before_copies();
        barrier_wait(address_of(&s.barrier_solved), parity(chunk));
        /* B, then the panels of X */
#pragma unroll 1
        for (int j = 0; j <= KP / PANEL; j++) {
            char *const to = j ? s.slot[slot].x + (j - 1) * PANEL_BYTES : panel;
            const uint32_t a = address_of(j ? s.ended : panel);
            const uint32_t b = address_of(j ? keys.k + (j - 1) * PANEL_BYTES : s.inverse);
            if (j == 0) group_waits(); /* P is there */
            products_begin();
#pragma unroll
            for (int J = 0; J < C; J += 16) multiply_panels(y, a, b, J, J == 0);
            products_commit();
            products_wait<0>();
            products_in(y);
            if (j == 0) group_waits(); /* B lies over P */
            if (j == KP / PANEL) warp_arrives(address_of(&s.barrier_used));
            operand packed[OF_CHUNK];
#pragma unroll
            for (int J = 0; J < OF_CHUNK; J++) {
                packed[J] = as_operand(y[2 * J], y[2 * J + 1]);
                store_matrices(address_of(to) + block_at(to_panels, at.warp * BLOCK, J * BLOCK),
                               packed[J].of[0].x);
            }
            if (j == 0 && __builtin_expect(has_nonfinite(packed), 0)) {
                int first = C; /* row of B with one: only this token reads it */
#pragma unroll
                for (int i = 31; i >= 0; i--) {
                    const int row = at.warp * BLOCK + at.row + i / 2 % 2 * 8;
                    if (!(fabsf(y[i / 4][i % 4]) < MOST_SCORE)) first = min(first, row);
                }
                if (first < n) atomicMin(s.nonfinite + slot, first);
            }
        }
        if (at.thread == 0) atomicMin(s.nonfinite + slot, s.nonfinite_solve[slot]);
        stores_before_copies();
        warp_arrives(address_of(s.barrier_ready + slot));
    }
}

template <int KP, la_decay DECAY, int WALKS>
__device__ __forceinline__ void walk_deltas(const call &c, const CUtensorMap &to_o,
                                            const delta_flags &f, delta_room<KP, WALKS> &s)
{
    const float scale = (float)c.scale;
    ring r = {KEY_STAGES, 0, 0};
    int chunk = 0; /* of all tiles */
    for_each_tile(c, f.tiles, [&](const unit &first_u, int first_tile, int index) {
        /* few numbers stay in registers: the rare paths ask for the unit again */
        const auto first_column = [&](int tile) {
            const int thread = threadIdx.x;
            return (tile * WALKS + thread / GROUP) * PANEL + thread % GROUP / 32 * 16;
        };
        const int columns = min(16, c.V - first_column(first_tile)); /* of this warp */
        int left = first_u.end - first_u.begin;                      /* tokens */
        const int end_of_tokens = first_u.end, hv = first_u.hv, b = first_u.b;
        float S[KP / 8][4];
        load_state(c, first_u, first_column(first_tile), columns, S);
        bool waiting = false; /* O of the last chunk is in the place of its v */
        /* n tokens of it to memory, if they are not on their way */
        const auto send = [&](int n) {
            const int before = (chunk - 1) % SLOTS;
            if (!f.o_boxes || n < C) {
                const int thread = threadIdx.x;
                store_o(c, f.o_pieces, s.values[before].panel[thread / GROUP],
                        at(c.x[LA_O], b, end_of_tokens - left - C + thread % 32 / 2, hv,
                           first_column(tile_at(c, f.tiles, index).tile) + thread % 2 * 8),
                        columns, n);
                stores_before_copies();
            } else if (threadIdx.x % GROUP == 0)
                engine_has_read<0>();
            waiting = false;
            warp_arrives(address_of(s.barrier_done + before));
        };

        operand of_state[KP / 16];
        const auto state_as_operand = [&] {
#pragma unroll
            for (int j = 0; j < KP / 16; j++) of_state[j] = as_operand(S[2 * j], S[2 * j + 1]);
        };
        state_as_operand();
        /* C, or when a chunk is repeated, the first token that the products leave out */
        int end = C;
        while (left > 0) {
            const int slot = chunk % SLOTS;
            const seat at = own_seat();
            const int pair = at.pair;
            const int n = min(C, left), kept = min(n, end);
            barrier_wait(address_of(s.barrier_keys + r.at), r.round);
            operand x[4]; /* W, over the tokens */
            {
                float W[8][4];
                products_begin();
#pragma unroll
                for (int j = 0; j < KP / 16; j++)
                    multiply_rows(W, of_state[j], address_of(s.keys[r.at].k), j * 16, j == 0);
                products_commit();
                if (waiting) send(C);
                barrier_wait(address_of(s.barrier_values + slot), parity(chunk / SLOTS));
                barrier_wait(address_of(s.barrier_ready + slot), parity(chunk / SLOTS));
                products_wait<0>();
                products_in(W);
                const uint32_t values = address_of(s.values[slot].panel[threadIdx.x / GROUP]);
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    load_matrices_transposed(x[m].of[0].x,
                                             values + transposed_at(at) + m * 16 * 128);
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const float(&w)[4] = W[2 * m + half];
                        const float2 a =
                            DECAY == LA_TOKEN
                                ? *(const float2 *)(s.in[slot] + (2 * m + half) * 8 + pair)
                                : make_float2(1, 1);
                        const float2 top = numbers(x[m], half * 2);
                        const float2 low = numbers(x[m], half * 2 + 1);
                        put_pair(x[m], half * 2, top.x - a.x * w[0], top.y - a.y * w[1]);
                        put_pair(x[m], half * 2 + 1, low.x - a.x * w[2], low.y - a.y * w[3]);
                    }
                }
            }
            if (__builtin_expect(kept < C, 0)) keep_before(x, pair, kept);
            /* as in chunks_forward: a chunk with a NaN or an infinity is repeated without the tokens
             * from the first one on, and these go token by token */
            const bool nonfinite =
                end > 0 && (has_nonfinite(x) || (end == C && s.nonfinite[slot] < C));
            if (__builtin_expect(any_of_group(nonfinite), 0)) {
                if (__any_sync(~0u, nonfinite)) {
                    int first = end < C ? 0 : s.nonfinite[slot];
                    if (end == C && columns > 0) {
                        const tile_of_head of = tile_at(c, f.tiles, index);
                        first = min(first, first_nonfinite(c, of.u, of.u.end - left, n,
                                                           first_column(of.tile), columns));
                    }
                    end = first < C ? first : 0; /* 0: the state has it */
                }
                /* again, so that they take no registers in the chunks that are not repeated */
                state_as_operand();
                continue;
            }
            float after[KP / 2]; /* for chunks that go token by token */
            if (__builtin_expect(end < C, 0))
#pragma unroll
                for (int j = 0; j < KP / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) after[(j * 2 + e % 2) * 2 + e / 2] = S[j][e];
            float O[8][4];
            products_begin();
#pragma unroll
            for (int j = 0; j < KP / 16; j++)
                multiply_rows(O, of_state[j], address_of(s.keys[r.at].q), j * 16, j == 0);
            products_commit();
            if (DECAY == LA_TOKEN) {
                const float a = s.in[slot][C - 1];
#pragma unroll
                for (int j = 0; j < KP / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) S[j][e] *= a;
            }
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply_columns(S, x[j].of[0], address_of(s.slot[slot].x), j * 16);
            products_commit();
            products_wait<1>(); /* for the read of the state, not yet for the state */
            products_in(O);
#pragma unroll
            for (int m = 0; m < 8; m++) {
                const float2 a = DECAY == LA_TOKEN ? *(const float2 *)(s.in[slot] + m * 8 + pair)
                                                   : make_float2(1, 1);
                O[m][0] *= a.x * scale;
                O[m][1] *= a.y * scale;
                O[m][2] *= a.x * scale;
                O[m][3] *= a.y * scale;
            }
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++)
                multiply_rows(O, x[j].of[0], address_of(s.slot[slot].b), j * 16);
            products_commit();
            products_wait<1>(); /* for the state, not yet for O */
            products_in(S);
            state_as_operand();
            products_wait<0>();
            products_in(O);
            if (__builtin_expect(end < C, 0)) {
                float numbers_of_o[32];
#pragma unroll
                for (int m = 0; m < 32; m++) numbers_of_o[m] = O[m / 4][m % 4];
                const tile_of_head of = tile_at(c, f.tiles, index);
                chunk_by_tokens<KP, DECAY, LA_DELTA>(c, of.u, of.u.end - left, n, end,
                                                     first_column(of.tile), columns, after,
                                                     numbers_of_o, 0, C);
#pragma unroll
                for (int m = 0; m < 32; m++) O[m / 4][m % 4] = numbers_of_o[m];
#pragma unroll
                for (int j = 0; j < KP / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) S[j][e] = after[(j * 2 + e % 2) * 2 + e / 2];
                state_as_operand();
            }
            uint32_t o[4][4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                o[m][0] = pack(O[2 * m][0], O[2 * m][1]);
                o[m][1] = pack(O[2 * m][2], O[2 * m][3]);
                o[m][2] = pack(O[2 * m + 1][0], O[2 * m + 1][1]);
                o[m][3] = pack(O[2 * m + 1][2], O[2 * m + 1][3]);
            }
            char *const panel = s.values[slot].panel[threadIdx.x / GROUP];
            put_o(panel, o);
            if (f.o_boxes && n == C) {
                stores_before_copies();
                group_waits();
                if (threadIdx.x % GROUP == 0)
                    engine_store_box(&to_o, address_of(panel), first_column(first_tile), hv,
                                     end_of_tokens - left, b);
            }
            r.next();
            chunk++;
            end = C;
            waiting = true;
            left -= C;
        }
        if (waiting) send(left + C);
        if (!c.x[LA_ST].data) return;
        const tile_of_head of = tile_at(c, f.tiles, index);
        store_state(c, of.u, first_column(of.tile), columns, S);
    });
}
#endif

template <int KP, la_decay DECAY, int WALKS, typename = element>
__global__ void __launch_bounds__((WALKS + 2) * GROUP, 1)
    delta_forward(const __grid_constant__ call c, const __grid_constant__ tensor_maps maps,
                  const __grid_constant__ CUtensorMap to_o, const delta_flags f)
{
#if HAS_WARP_GROUPS
    extern __shared__ __align__(1024) char shared[];
    delta_room<KP, WALKS> &s = *(delta_room<KP, WALKS> *)shared;
    enum { OF_GROUP = 4 * ARRIVALS_OF_WARP };
    typedef delta_registers<WALKS> registers;
    const int group = threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        const auto init = [](auto &barriers, int arrivals) {
            for (uint64_t &x : barriers) barrier_init(address_of(&x), arrivals);
        };
        init(s.barrier_keys, 2);
        init(s.barrier_values, 1);
        init(s.barrier_gates, OF_GROUP);
        init(s.barrier_ready, OF_GROUP);
        init(s.barrier_done, WALKS * OF_GROUP);
        barrier_init(address_of(&s.barrier_solved), OF_GROUP);
        barrier_init(address_of(&s.barrier_used), OF_GROUP);
        barriers_ready();
    }
    /* blocks above the diagonal stay zeros */
    for (int i = threadIdx.x; i < PANEL_BYTES / 16; i += blockDim.x)
        for (char *panel : {s.inverse, s.ended, s.inverse_f16, s.slot[0].b, s.slot[1].b})
            *(uint4 *)(panel + i * 16) = make_uint4(0, 0, 0, 0);
    stores_before_copies();
    __syncthreads();
    if (group < WALKS) {
        registers_up_to<registers::walk>();
        walk_deltas<KP, DECAY, WALKS>(c, to_o, f, s);
    } else {
        registers_down_to<registers::prepare>();
        if (group == WALKS)
            solve_chunks<KP, DECAY, WALKS>(s);
        else
            score_deltas<KP, DECAY, WALKS>(c, maps, f, s);
    }
#endif
}

#endif
