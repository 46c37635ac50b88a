/* The decays, keys and scores of every chunk of the delta rule in one kernel. See delta.cuh. */
#ifndef LINATTN_CUDA_DELTA_SCORE_CUH
#define LINATTN_CUDA_DELTA_SCORE_CUH

#include "delta_room.cuh"

#if HAS_WARP_GROUPS
/* The numbers of a token before they are known. */
struct early_gates {
    int n; /* the tokens of the chunk */
    uint32_t a, beta;
    float of_key, of_query;
};

/* One instruction. With int64_t the compiler multiplies two wide factors. */
__device__ __forceinline__ int64_t wide_product(int x, int y)
{
    int64_t product;
    asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
    return product;
}

template <la_decay DECAY, bool NORMED>
__device__ __forceinline__ early_gates load_gates_early(const call &c, const delta_flags &f,
                                                        const chunk_place &p)
{
    early_gates x = {p.n};
    const int token = own_seat().token;
    if (token >= x.n) return x;
    const int t = p.t + token;
    if (NORMED && f.norms) {
        const float *const norm = f.norms + ((int64_t)p.b * c.T + t) * c.H + p.h;
        x.of_query = norm[0];
        x.of_key = norm[(int64_t)c.B * c.T * c.H];
    } else
        x.of_query = x.of_key = 1;
    x.beta = load_early(p.beta + wide_product(t, f.beta_step), c.x[LA_BETA].dtype);
    if (DECAY == LA_TOKEN) x.a = load_early(p.gate + wide_product(t, f.gate_step), c.x[LA_G].dtype);
    return x;
}

/* The decays of a chunk. A warp has 16 tokens, each in two lanes. A lane has half a row of G. */
template <la_decay DECAY, bool NORMED>
__device__ __forceinline__ void prepare_gates(const call &c, const early_gates &x,
                                              gates_of_chunk &g)
{
    const seat me = own_seat();
    if (me.thread == 0) g.n = x.n;
    const bool there = me.token < x.n, writes = me.lane < BLOCK;
    bool found = false;
    const float beta = there ? loaded(x.beta, c.x[LA_BETA].dtype) : 0;
    if (writes) g.beta[me.token] = beta;
    found |= !isfinite(beta);
    /* decays and factors stay numbers, as `solve` needs them for the tokens before */
    if constexpr (NORMED) {
        const bool usable = isfinite(x.of_key);
        found |= !usable;
        if (writes) {
            g.of_key[me.token] = usable ? x.of_key : 0;
            g.of_query[me.token] = x.of_query;
        }
    }
    if constexpr (DECAY == LA_TOKEN) {
        const float given = there ? decay_of(loaded(x.a, c.x[LA_G].dtype), c.gate) : 1;
        const bool usable = isfinite(given);
        if (writes) g.a[me.token] = usable ? given : 0;
        found |= !usable;
        __syncwarp();
        const int row = me.lane % BLOCK, first = me.lane / BLOCK * 8;
        float of[8], to[8], product = 1;
        *(float4 *)of = *(const float4 *)(g.a + me.warp * BLOCK + first);
        *(float4 *)(of + 4) = *(const float4 *)(g.a + me.warp * BLOCK + first + 4);
#pragma unroll
        for (int j = 7; j >= 0; j--) {
            to[j] = product;
            if (first + j <= row) product *= of[j];
        }
        /* of the other half, which comes later */
        const float later = __shfl_down_sync(~0u, product, BLOCK), factor = first ? 1 : later;
#pragma unroll
        for (int j = 0; j < 8; j++) to[j] *= factor;
        if (NORMED)
#pragma unroll
            for (int j = 0; j < 8; j++) to[j] *= g.of_key[me.warp * BLOCK + first + j];
        float *const place = g.within[me.warp][row] + first;
        *(float4 *)place = *(const float4 *)to;
        *(float4 *)(place + 4) = *(const float4 *)(to + 4);
        product *= factor;
        if (writes) g.from_block_start[me.token] = product;
        if (me.lane == BLOCK - 1) g.block[me.warp] = product;
    }
    int first = C;
    if (__builtin_expect(__any_sync(~0u, found), 0))
        first = me.warp * BLOCK + __ffs((int)__ballot_sync(~0u, found)) - 1;
    if (me.lane == 0) g.nonfinite[me.warp] = first;
}

/* The decays, B and X of every chunk. A warp has 16 rows. */
template <int KP, la_decay DECAY, bool NORMED, typename room>
__device__ __forceinline__ void score_deltas(const call &c, const delta_flags &f, room &s,
                                             int group)
{
    const float scale = (float)c.scale;
    const auto prepare = [&](int chunk, const early_gates &early) {
        prepare_gates<DECAY, NORMED>(c, early, s.gates[chunk % SLOTS]);
        warp_arrives(address_of(s.barrier_gates + chunk % SLOTS));
    };
    /* with the keys of a chunk the places of the next two are known, too */
    barrier_wait(address_of(s.barrier_keys), 0);
    const auto load = [&](int chunk) {
        return load_gates_early<DECAY, NORMED>(c, f, s.place[chunk % PLACES]);
    };
    prepare(0, load(0));
    early_gates early = load(1);
    /* for the gates; those of a later chunk are known since B of the one before */
    group_waits(group);

    ring r = {room::stages, 0, 0};
    for (int chunk = 0;; chunk++, r.next()) {
        const int slot = chunk % SLOTS;
        const gates_of_chunk &g = s.gates[slot];
        const int n = g.n;
        if (n == 0) return;
        auto &keys = s.keys[r.at];
        char *const panel = s.place_of_b(slot, r.at); /* first P, then B */
        float y[8][4];
        const uint32_t k = address_for_products<DECAY>(keys.k), q = k + tile_bytes(KP);
        barrier_wait(address_of(s.barrier_keys + r.at), r.round);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP; j += 16) multiply_tiles(y, q, k, j, j == 0);
        products_commit();
        const seat at = own_seat();
        const uint32_t to_panels = lane_with_columns(0);
        prepare(chunk + 1, early);
        early = load(chunk + 2);
        if constexpr (!room::apart)
            if (chunk >= SLOTS) wait_until_done(s, chunk - SLOTS);
        if (at.thread == 0) s.nonfinite[slot] = C;
        {
            float2 by = make_float2(scale, scale);
            if (NORMED) {
                by.x *= g.of_query[at.warp * BLOCK + at.row];
                by.y *= g.of_query[at.warp * BLOCK + at.row + 8];
            }
            const uint32_t to = address_of(panel) + to_panels;
            products_wait<0>();
            products_in(y);
            if (room::apart) group_waits(group); /* P lies over q */
            /* the rows after the chunk may have a NaN */
            if (__builtin_expect(n < C, 0)) zero_rows(y, at.warp * BLOCK + at.row, n);
            scale_blocks<DECAY>(y, g, by, [&](int J, bool before, const float(&p)[2][4]) {
                left P = as_left(p[0], p[1]);
#pragma unroll
                for (uint32_t &pair : P.x) pair = before ? pair : 0;
                store_matrices(block_at(to, at.warp * BLOCK, J * BLOCK), P.x);
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
            float from_start = g.from_block_start[at.token];
#pragma unroll
            for (int j = 0; j < OF_CHUNK - 1; j++)
                if (j < at.warp) from_start *= g.block[j];
            if (NORMED || room::apart) {
                s.in_of(slot, r.at)[at.token] = from_start * (NORMED ? g.of_query[at.token] : 1);
                s.seen_of(slot, r.at)[at.token] = from_start * (NORMED ? g.of_key[at.token] : 1);
                if (at.token == C - 1) s.total_of(slot, r.at) = from_start;
            } else
                s.in_of(slot, r.at)[at.token] = from_start;
        }
        stores_before_copies();
        barrier_wait(address_of(&s.barrier_solved), parity(chunk));
        if (at.thread == 0) atomicMin(s.nonfinite + slot, s.nonfinite_solve[slot]);
        /* B, then the panels of X */
#pragma unroll 1
        for (int j = 0; j <= KP / PANEL; j++) {
            char *const to = j ? s.place_of_x(slot, r.at) + (j - 1) * PANEL_BYTES : panel;
            const uint32_t a = address_for_products<DECAY>(j ? s.ended : panel);
            const uint32_t b = j ? k + (j - 1) * PANEL_BYTES : address_of(s.inverse);
            if (j == 0) group_waits(group); /* P is there */
            products_begin();
#pragma unroll
            for (int J = 0; J < C; J += 16) multiply_panels(y, a, b, J, J == 0);
            products_commit();
            products_wait<0>();
            products_in(y);
            if (j == 0 || room::apart) group_waits(group); /* B lies over P, or X over k */
            if (j == KP / PANEL) warp_arrives(address_of(&s.barrier_used));
            operand packed[OF_CHUNK];
#pragma unroll
            for (int J = 0; J < OF_CHUNK; J++) {
                packed[J] = as_operand(y[2 * J], y[2 * J + 1]);
                store_matrices(address_of(to) + block_at(to_panels, at.warp * BLOCK, J * BLOCK),
                               packed[J].of[0].x);
            }
            if ((j == 0 || NARROW) && __builtin_expect(has_nonfinite(packed), 0)) {
                int first = j ? 0 : C; /* row of B with one: only this token reads it */
#pragma unroll
                for (int i = 31; i >= 0; i--) {
                    const int row = at.warp * BLOCK + at.row + i / 2 % 2 * 8;
                    if (!(fabsf(y[i / 4][i % 4]) < MOST_SCORE)) first = min(first, row);
                }
                /* where `solve` has found a NaN, the state goes token by token and reads no X */
                const bool read = j == 0 || s.nonfinite_solve[slot] == C;
                if (first < n && read) atomicMin(s.nonfinite + slot, first);
            }
        }
        stores_before_copies();
        warp_arrives(address_of(s.barrier_ready + slot));
    }
}

#endif

#endif
