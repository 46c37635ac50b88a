/* The walk from state to state of the delta rule in one kernel, and its copies. See delta.cuh. */
#ifndef LINATTN_CUDA_DELTA_WALK_CUH
#define LINATTN_CUDA_DELTA_WALK_CUH

#include "delta_room.cuh"

#if HAS_WARP_GROUPS
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
        p.beta = at(c.x[LA_BETA], p.b, 0, p.hv);
        if (c.x[LA_G].data) p.gate = at(c.x[LA_G], p.b, 0, p.hv);
    }
    p.n = min(C, p.end - p.t);
    return p;
}

/* Three threads ask the copy engine, each for one of these. A fourth one finds the places of
 * chunks. */
enum { ASKS_FOR_K, ASKS_FOR_Q, ASKS_FOR_V, ASKS_FOR_PLACES };

/* k or q of a chunk, or the news that there is no such chunk; or v. */
template <int KP, int WALKS>
__device__ __forceinline__ void fetch(const tensor_maps &maps, int asks_for, int chunk,
                                      delta_room<KP, WALKS> &s)
{
    const chunk_place &p = s.place[chunk % PLACES];
    const int stage = chunk % KEY_STAGES, slot = chunk % SLOTS;
    if (asks_for == ASKS_FOR_V) {
        const uint32_t barrier = address_of(s.barrier_values + slot);
        if (p.n == 0) return;
        barrier_expect(barrier, WALKS * PANEL_BYTES);
#pragma unroll
        for (int j = 0; j < WALKS; j++) /* zeros, where there are no columns */
            engine_copy_box(address_of(s.values[slot].panel[j]), &maps.v, p.column + j * PANEL,
                            p.hv, p.t, p.b, barrier);
    } else {
        const uint32_t barrier = address_of(s.barrier_keys + stage);
        const uint32_t to = address_of(asks_for == ASKS_FOR_Q ? s.keys[stage].q : s.keys[stage].k);
        const CUtensorMap *const map = asks_for == ASKS_FOR_Q ? &maps.q : &maps.k;
        barrier_expect(barrier, p.n ? tile_bytes(KP) : 0);
        if (p.n == 0) return;
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++)
            engine_copy_box(to + j * PANEL_BYTES, map, j * PANEL, p.h, p.t, p.b, barrier);
    }
}

/* O of every chunk, and the states. A warp has 16 value columns. */
template <int KP, la_decay DECAY, int WALKS, bool NORMED>
__device__ __forceinline__ void walk_deltas(const call &c, const tensor_maps &maps,
                                            const CUtensorMap &to_o, const delta_flags &f,
                                            delta_room<KP, WALKS> &s)
{
    /* the warps of the last walk */
    const int warp = threadIdx.x / 32 - (WALKS - 1) * 4;
    const int asks_for = threadIdx.x % 32 == 0 ? warp : -1;
    if (asks_for == ASKS_FOR_PLACES) {
        chunk_place place = {};
        place.index = (int)blockIdx.x - (int)gridDim.x; /* so that the next one is the first */
#pragma unroll 1
        for (int i = 0; i <= PLACES_AHEAD; i++)
            s.place[i] = place = place_after<WALKS>(c, f.tiles, place);
    }
    if (warp >= 0) group_waits();
    if (asks_for >= 0)
#pragma unroll 1
        for (int i = 0; i < (asks_for == ASKS_FOR_V ? (int)SLOTS : (int)KEY_STAGES); i++)
            if (asks_for == ASKS_FOR_PLACES)
                barrier_arrive(address_of(s.barrier_keys + i));
            else
                fetch(maps, asks_for, i, s);
    const float scale = (float)c.scale;
    /* few numbers stay in registers: the rare paths ask for the unit again */
    const auto first_column = [&](int column) { /* of this warp */
        const int thread = threadIdx.x;
        return column + thread / GROUP * PANEL + thread % GROUP / 32 * 16;
    };
    float S[KP / 8][4];
    operand of_state[KP / 16];
    const auto state_as_operand = [&] {
#pragma unroll
        for (int j = 0; j < KP / 16; j++) of_state[j] = as_operand(S[2 * j], S[2 * j + 1]);
    };
    /* The state of the first tile with tokens, from tile `index` on. The others keep theirs. */
    const auto begin_tile = [&](int index) {
        for (; index < c.N * c.HV * f.tiles; index += (int)gridDim.x) {
            const tile_of_head of = tile_at(c, f.tiles, index);
            const int first = first_column(of.tile * WALKS * PANEL), columns = min(16, c.V - first);
            load_state(c, of.u, first, columns, S);
            if (of.u.begin < of.u.end) break;
            if (c.x[LA_ST].data) store_state(c, of.u, first, columns, S);
        }
        state_as_operand();
    };
    /* O of the chunk before may still be in the place of its v: for the threads to store, or for the
     * engine to read. */
    enum { NOTHING, FOR_THREADS, FOR_ENGINE } waiting = NOTHING;
    /* O of a chunk goes to memory, if it is not on its way. Its places are free. */
    const auto send = [&](int before) {
        if (waiting == FOR_THREADS) {
            const chunk_place &p = s.place[before % PLACES];
            const int thread = threadIdx.x, first = first_column(p.column);
            store_o(c, f.o_pieces, s.values[before % SLOTS].panel[thread / GROUP],
                    at(c.x[LA_O], p.b, p.t + thread % 32 / 2, p.hv, first + thread % 2 * 8),
                    min(16, c.V - first), p.n);
            stores_before_copies();
        } else if (threadIdx.x % GROUP == 0)
            engine_has_read<0>();
        waiting = NOTHING;
        warp_arrives(address_of(s.barrier_done + before % SLOTS));
    };
    begin_tile(blockIdx.x);
    ring r = {KEY_STAGES, 0, 0};
    int chunk = 0; /* of all tiles */
    /* C, or when a chunk is repeated, the first token that the products leave out */
    int end = C;
    for (;;) {
        const int slot = chunk % SLOTS;
        const seat at = own_seat();
        const int pair = at.pair;
        const chunk_place &p = s.place[chunk % PLACES];
        const uint32_t k = address_for_products<DECAY>(s.keys[r.at].k);
        barrier_wait(address_of(s.barrier_keys + r.at), r.round);
        const int kept = min(p.n, end);
        if (p.n == 0) break;
        const bool by_engine = f.o_boxes && p.n == C;
        operand x[4]; /* W, over the tokens */
        {
            float W[8][4];
            products_begin();
#pragma unroll
            for (int j = 0; j < KP / 16; j++)
                multiply_rows(W, of_state[j], k, j * 16, j == 0);
            products_commit();
            if (waiting) {
                send(chunk - 1);
                if (asks_for >= 0) {
                    /* into the places of the chunk before, when all walks have left it */
                    if (asks_for == ASKS_FOR_PLACES) {
                        s.place[(chunk + PLACES_AHEAD) % PLACES] = place_after<WALKS>(
                            c, f.tiles, s.place[(chunk + PLACES_AHEAD - 1) % PLACES]);
                        barrier_arrive(address_of(s.barrier_keys + (chunk + 2) % KEY_STAGES));
                    } else {
                        wait_until_done(s, chunk - 1);
                        fetch(maps, asks_for, asks_for == ASKS_FOR_V ? chunk + 1 : chunk + 2, s);
                    }
                }
                __syncwarp();
            }
            barrier_wait(address_of(s.barrier_values + slot), parity(chunk / SLOTS));
            barrier_wait(address_of(s.barrier_ready + slot), parity(chunk / SLOTS));
            products_wait<0>();
            products_in(W);
            const float *const seen = NORMED ? s.seen[slot] : s.in[slot];
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
                            ? *(const float2 *)(seen + (2 * m + half) * 8 + pair)
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
                const int column = first_column(p.column);
                if (end == C && column < c.V)
                    first = min(first, first_nonfinite(c, tile_at(c, f.tiles, p.index).u, p.t, p.n,
                                                       column, min(16, c.V - column)));
                end = first < C ? first : 0; /* 0: the state has it */
            }
            /* again, so that they take no registers in the chunks that are not repeated */
            state_as_operand();
            continue;
        }
        float after[KP / 2]; /* for chunks that go token by token */
        if (__builtin_expect(end < C, 0)) state_for_tokens(S, after);
        float O[8][4];
        const uint32_t q = address_for_products<DECAY>(s.keys[r.at].q);
        const uint32_t X = address_for_products<DECAY>(s.slot[slot].x), B = X + tile_bytes(KP);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP / 16; j++)
            multiply_rows(O, of_state[j], q, j * 16, j == 0);
        products_commit();
        if (DECAY == LA_TOKEN) {
            const float a = NORMED ? s.total[slot] : s.in[slot][C - 1];
            scale_state(S, a);
        }
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++)
            multiply_columns(S, x[j].of[0], X, j * 16);
        products_commit();
        products_wait<1>(); /* for the read of the state, not yet for the state */
        products_in(O);
        scale_o<DECAY>(O, s.in[slot] + pair, scale);
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++)
            multiply_rows(O, x[j].of[0], B, j * 16);
        products_commit();
        products_wait<1>(); /* for the state, not yet for O */
        products_in(S);
        state_as_operand();
        products_wait<0>();
        products_in(O);
        if (__builtin_expect(end < C, 0)) {
            const int column = first_column(p.column);
            rest_by_tokens<KP, DECAY, LA_DELTA>(c, tile_at(c, f.tiles, p.index).u, p.t, p.n, end,
                                                column, min(16, c.V - column), after, O);
            state_from_tokens(after, S);
            state_as_operand();
        }
        uint32_t o[4][4];
        pack_o(O, o);
        char *const panel = s.values[slot].panel[threadIdx.x / GROUP];
        put_o(panel, o);
        if (by_engine) {
            stores_before_copies();
            group_waits();
            if (threadIdx.x % GROUP == 0)
                engine_store_box(&to_o, address_of(panel),
                                 p.column + (int)threadIdx.x / GROUP * PANEL, p.hv, p.t, p.b);
        }
        if (p.t + C >= p.end) {
            const int column = first_column(p.column);
            if (c.x[LA_ST].data)
                store_state(c, tile_at(c, f.tiles, p.index).u, column, min(16, c.V - column), S);
            begin_tile(p.index + (int)gridDim.x);
        }
        r.next();
        chunk++;
        end = C;
        waiting = by_engine ? FOR_ENGINE : FOR_THREADS;
    }
    if (waiting) send(chunk - 1);
}
#endif

#endif
