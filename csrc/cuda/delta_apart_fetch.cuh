/* The threads that ask the copy engine, in the blocks of delta_apart.cuh. */
#ifndef LINATTN_CUDA_DELTA_APART_FETCH_CUH
#define LINATTN_CUDA_DELTA_APART_FETCH_CUH

#include "delta_apart_room.cuh"

#if HAS_WARP_GROUPS
/* ---- in a block that prepares ---- */

/* The keys and queries of the chunks of a pair of groups. One thread. */
template <int KP>
__device__ __forceinline__ void fetch_keys(const call &c, const tensor_maps &maps,
                                           prepare_room<KP> &s)
{
    int next = s.first; /* of the chunks whose places are not known */
    const auto find_place = [&](int chunk) {
        const chunk_place p = s.place_from(c, next);
        s.place[chunk % PLACES] = p;
        next = p.index + s.step;
    };
    /* with the keys of a chunk come the places of the next two */
    for (int i = 0; i < 2; i++) find_place(i);
    for (int chunk = 0;; chunk++) {
        const int stage = chunk % s.stages;
        const uint32_t barrier = address_of(s.barrier_keys + stage);
        const chunk_place p = s.place[chunk % PLACES];
        auto &into = s.keys[stage];
        find_place(chunk + 2);
        barrier_wait(address_of(s.barrier_free + stage), parity(chunk / s.stages - 1));
        barrier_expect(barrier, p.n ? 2 * tile_bytes(KP) : 0);
        if (p.n == 0) return;
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++) {
            engine_copy_box(address_of(into.k) + j * PANEL_BYTES, &maps.k, j * PANEL, p.h, p.t, p.b,
                            barrier);
            engine_copy_box(address_of(into.q) + j * PANEL_BYTES, &maps.q, j * PANEL, p.h, p.t, p.b,
                            barrier);
        }
    }
}

/* The way of a chunk from a pair of groups to the blocks that walk. One thread. */
template <int KP>
__device__ __forceinline__ void hand_over(const call &c, const handed<KP> &to, prepare_room<KP> &s)
{
    barrier_wait(address_of(s.barrier_keys), 0); /* for the first places */
    for (int chunk = 0; s.place[chunk % PLACES].n; chunk++) {
        const int slot = chunk % SLOTS, stage = chunk % s.stages;
        const int index = s.place[chunk % PLACES].index, head = index % s.heads;
        const int of_head = index / s.heads;
        if (to.taken) /* all walks have taken what lies there */
            for (int j = 0; j < 2 * to.tiles; j++)
                wait_until_read(to.taken + head * 2 * to.tiles + j, of_head + 1 - HANDED);
        barrier_wait(address_of(s.barrier_ready + slot), parity(chunk / SLOTS));
        s.stage(stage).numbers.nonfinite = s.nonfinite[slot];
        s.stage(stage).numbers.expands = s.expands[slot];
        stores_before_copies();
        engine_copy_back(to.place_of(c, head, of_head), address_of(s.keys[stage].k),
                         sizeof(scored<KP>));
        engine_has_read<0>();
        barrier_arrive(address_of(s.barrier_free + stage));
        engine_has_stored();
        if (to.there) set_counter(to.there + to.in_ring(head, of_head), of_head + 1);
    }
}

/* ---- in a block that walks ---- */

/* The keys and the values, which the caller gave. One thread. */
template <int KP>
__device__ __forceinline__ void fetch_given(const call &c, const tensor_maps &maps,
                                            const stretch &of, int walks, walk_room<KP> &s)
{
    const unit &u = of.u;
    for (int chunk = 0; chunk < of.chunks; chunk++) {
        const int stage = chunk % AHEAD, t = u.begin + (of.first + chunk) * C;
        const uint32_t barrier = address_of(s.full_k + stage);
        barrier_wait(address_of(s.free_k + stage), parity(chunk / AHEAD - 1));
        barrier_expect(barrier, tile_bytes(KP) + walks * PANEL_BYTES);
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++)
            engine_copy_box(address_of(s.k[stage]) + j * PANEL_BYTES, &maps.k, j * PANEL, u.h, t,
                            u.b, barrier);
        for (int j = 0; j < walks; j++) /* zeros, where there are no columns */
            engine_copy_box(address_of(s.v[stage][j]), &maps.v, (of.tile * walks + j) * PANEL,
                            u.hv, t, u.b, barrier);
    }
}

/* X, or B with the queries, from the blocks that prepare. One thread for each. */
template <int KP, bool OF_B>
__device__ __forceinline__ void fetch_handed(const call &c, const tensor_maps &maps,
                                             const stretch &of, const handed<KP> &from,
                                             walk_room<KP> &s)
{
    const unit &u = of.u;
    counter *const taken =
        from.taken ? from.taken + (of.head * from.tiles + of.tile) * 2 + OF_B : NULL;
    uint64_t *const full = OF_B ? s.full_b : s.full_x, *const free = OF_B ? s.free_b : s.free_x;
    for (int chunk = 0; chunk < of.chunks; chunk++) {
        const int stage = chunk % AHEAD, t = u.begin + (of.first + chunk) * C;
        const uint32_t barrier = address_of(full + stage);
        const scored<KP> &x = *from.place_of(c, of.head, of.first + chunk);
        if (from.there) wait_until_at_least(from.there + from.in_ring(of.head, chunk), chunk + 1);
        memory_before_copies();
        barrier_wait(address_of(free + stage), parity(chunk / AHEAD - 1));
        if (OF_B) {
            barrier_expect(barrier, tile_bytes(KP) + sizeof x.b + sizeof x.in);
#pragma unroll
            for (int j = 0; j < KP / PANEL; j++)
                engine_copy_box(address_of(s.q[stage]) + j * PANEL_BYTES, &maps.q, j * PANEL, u.h,
                                t, u.b, barrier);
            engine_copy(address_of(s.b[stage]), x.b, sizeof x.b, barrier);
            engine_copy(address_of(s.in[stage]), x.in, sizeof x.in, barrier);
        } else {
            barrier_expect(barrier, sizeof x.x + sizeof x.numbers);
            engine_copy(address_of(s.x[stage]), x.x, sizeof x.x, barrier);
            engine_copy(address_of(s.numbers + stage), &x.numbers, sizeof x.numbers, barrier);
        }
        if (chunk == 0 || !taken) continue;
        barrier_wait(address_of(full + (chunk - 1) % AHEAD), parity((chunk - 1) / AHEAD));
        set_read(taken, chunk);
    }
}
#endif

#endif
