/* The inverse of every chunk of the delta rule in one kernel. See delta.cuh. */
#ifndef LINATTN_CUDA_DELTA_SOLVE_CUH
#define LINATTN_CUDA_DELTA_SOLVE_CUH

#include "delta_room.cuh"

#if HAS_WARP_GROUPS
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

/* Let the chunk end before the first token with a NaN or an infinity: L, A and the strengths become
 * zeros from it on. Blocks apart are told in s.expands whether a token makes a state longer. x: the
 * sums of X, whose block on the diagonal is own_sums. by: minus the strengths of the two rows of this
 * thread. found: the first token of the block whose gates have one. */
template <bool NORMED, typename room>
__device__ __forceinline__ void check_chunk(room &s, int slot, const seat &at, int group, int n,
                                            int found, float (&x)[8][4], float (&own_sums)[2][4],
                                            float2 &by)
{
    const gates_of_chunk &g = s.gates[slot];
    /* Products of a key and itself that are far from too large, as are the strengths: so are the
     * numbers of X then. A NaN is none of them. */
    const bool first = at.row == at.pair, second = at.row == at.pair + 1;
    const float top = first ? own_sums[0][0] : second ? own_sums[0][1] : 0;
    const float low = first ? own_sums[1][2] : second ? own_sums[1][3] : 0;
    const int row = at.warp * BLOCK + at.row;
    int nonfinite = found;
    if (!(low < MOST_SQUARE && fabsf(by.y) < MOST_STRENGTH)) nonfinite = min(nonfinite, row + 8);
    if (!(top < MOST_SQUARE && fabsf(by.x) < MOST_STRENGTH)) nonfinite = min(nonfinite, row);
    if (__builtin_expect(any_of_group(nonfinite < n, group), 0)) {
        if (nonfinite < n) atomicMin(s.nonfinite_solve + slot, nonfinite);
        group_waits(group);
        const int rows = s.nonfinite_solve[slot];
        zero_rows(x, row, rows);
        own_block(x, at.warp, own_sums);
        if (row >= rows) by.x = 0;
        if (row + 8 >= rows) by.y = 0;
        if (at.thread < C && at.thread >= rows) s.gates[slot].beta[at.thread] = 0;
        group_waits(group);
    }
    /* A token takes S to a (I - b k k') S. The matrix in brackets makes no column longer if
     * b k'k is between 0 and 2. */
    if constexpr (room::apart) {
        float2 square = make_float2(top, low);
        if (NORMED) {
            const float x = g.of_key[row], y = g.of_key[row + 8];
            square = make_float2(top * x * x, low * y * y);
        }
        const float from = -fmaxf(by.x, by.y), to = -fminf(by.x * square.x, by.y * square.y);
        if (__builtin_expect(!(from >= 0 && to <= 2), 0)) s.expands[slot] = 1;
    }
}

/* T = (I + L)^-1 of the block on the diagonal, which goes to shared memory too. lower: -L of the
 * block. It is inverted in quarters. Those on its diagonal are inverted by substitution: a lane has
 * a row y, and y (I + L) = e. */
template <typename room>
__device__ __forceinline__ left invert_own_block(room &s, const seat &at, uint32_t T_columns,
                                                 const float (&lower)[2][4])
{
    const uint32_t quarter = pack_f16(lower[0][2], lower[0][3]); /* -L of the one below */
    *(float2 *)&s.lower[at.warp][0][at.row][at.pair] = make_float2(lower[0][0], lower[0][1]);
    *(float2 *)&s.lower[at.warp][1][at.row][at.pair] = make_float2(lower[1][2], lower[1][3]);
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
        *(uint4 *)(s.inverse_f16 + piece_at(at.warp * BLOCK + own_row, at.warp * 2 + own_row / 8)) =
            make_uint4(pack_f16(y[0], y[1]), pack_f16(y[2], y[3]), pack_f16(y[4], y[5]),
                       pack_f16(y[6], y[7]));
    __syncwarp();
    left own; /* both loads have one address */
    load_matrices(own.x, block_at(T_columns, at.warp * BLOCK, at.warp * BLOCK));
    {
        float sum[4] = {}, below[4] = {};
        const right of = load_right(T_columns, at.warp * BLOCK, at.warp * BLOCK);
        multiply_f16(sum, {{0, quarter, 0, 0}}, of.x[0], 0);
        own.x[1] = 0;
        multiply_f16(below, own, 0, transpose(pack_f16(sum[2], sum[3])));
        own.x[1] = pack_f16(below[2], below[3]);
    }
    __syncwarp();
    *(uint32_t *)(s.inverse_f16 +
                  element_at(at.warp * BLOCK + 8 + at.row, at.warp * BLOCK + at.pair)) = own.x[1];
    return own;
}

/* The decays from the two rows of this thread to the end of the chunk. */
template <la_decay DECAY>
__device__ __forceinline__ float2 decays_to_end(const gates_of_chunk &g, const seat &at)
{
    float2 out = make_float2(1, 1);
    if (DECAY == LA_TOKEN) {
        out.x = g.within[at.warp][BLOCK - 1][at.row];
        out.y = g.within[at.warp][BLOCK - 1][at.row + 8];
#pragma unroll
        for (int j = 1; j < OF_CHUNK; j++)
            if (j > at.warp) out = make_float2(out.x * g.block[j], out.y * g.block[j]);
    }
    return out;
}

/* Block (I of this warp, J) of T times beta is that of A. Times the decays to the end, too, it is
 * that of A~. */
template <typename room>
__device__ __forceinline__ void put_block(room &s, const gates_of_chunk &g, const seat &at,
                                          const float2 to_end, const left &block, int J)
{
    left A, ended;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 beta = *(const float2 *)(g.beta + J * BLOCK + e / 2 * 8 + at.pair);
        float2 z = __half22float2(*(const __half2 *)&block.x[e]);
        z = make_float2(z.x * beta.x, z.y * beta.y);
        A.x[e] = pack(z.x, z.y);
        const float of_row = e % 2 ? to_end.y : to_end.x;
        ended.x[e] = pack(z.x * of_row, z.y * of_row);
    }
    store_matrices(
        address_of(s.inverse) + block_at(lane_with_columns(0), at.warp * BLOCK, J * BLOCK), A.x);
    store_matrices_transposed(
        address_of(s.ended) + block_at(lane_with_rows(0), J * BLOCK, at.warp * BLOCK), ended.x);
}

/* A and A~ of every chunk. A warp has 16 rows. */
template <int KP, la_decay DECAY, bool NORMED, typename room>
__device__ __forceinline__ void solve_chunks(room &s, int group)
{
    ring r = {room::stages, 0, 0};
    for (int chunk = 0;; chunk++, r.next()) {
        const int slot = chunk % SLOTS;
        const gates_of_chunk &g = s.gates[slot];
        auto &keys = s.keys[r.at];
        const uint32_t k = address_for_products<DECAY>(keys.k);
        barrier_wait(address_of(s.barrier_gates + slot), parity(chunk / SLOTS));
        const int n = g.n;
        if (n == 0) return;
        float x[8][4];
        barrier_wait(address_of(s.barrier_keys + r.at), r.round);
        if (__builtin_expect(n < C, 0)) {
            /* a box may reach into the next sequence, whose NaN must not come along */
            for (int j = threadIdx.x % GROUP; j < (C - n) * KP / 8; j += GROUP)
                *(uint4 *)(keys.k + piece_at(n + j / (KP / 8), j % (KP / 8))) =
                    make_uint4(0, 0, 0, 0);
            stores_before_copies();
            group_waits(group);
        }
        products_begin();
#pragma unroll
        for (int j = 0; j < KP; j += 16) multiply_tiles(x, k, k, j, j == 0);
        products_commit();
        const seat at = own_seat();
        if (at.thread == 0) {
            s.nonfinite_solve[slot] = C;
            if constexpr (room::apart) s.expands[slot] = 0;
        }
        float2 by =
            make_float2(-g.beta[at.warp * BLOCK + at.row], -g.beta[at.warp * BLOCK + at.row + 8]);
        const int found = g.nonfinite[at.warp];
        const uint32_t T = address_for_products<DECAY>(s.inverse_f16), half = T + PANEL_BYTES;
        const uint32_t T_columns = lane_with_columns(T), half_columns = lane_with_columns(half);
        products_wait<0>();
        products_in(x);
        float own_sums[2][4];
        own_block(x, at.warp, own_sums);
        check_chunk<NORMED>(s, slot, at, group, n, found, x, own_sums, by);
        if (NORMED) {
            by.x *= g.of_key[at.warp * BLOCK + at.row];
            by.y *= g.of_key[at.warp * BLOCK + at.row + 8];
        }
        left L[OF_CHUNK - 1]; /* -L of the blocks before the one on the diagonal */
        scale_blocks<DECAY>(x, g, by, [&](int J, bool, const float(&p)[2][4]) {
            L[J] = as_left_f16(p);
        });
        scale_own_block<DECAY, true>(own_sums, g, by);
        left own = invert_own_block(s, at, T_columns, own_sums); /* T of the block */
        bool bad = f16_nonfinite(own.x);

        const float2 to_end = decays_to_end<DECAY>(g, at);
        const auto put = [&](const left &block, int J) { put_block(s, g, at, to_end, block, J); };
        const auto others_see = [=] {
            stores_before_copies();
            group_waits(group);
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

#endif

#endif
