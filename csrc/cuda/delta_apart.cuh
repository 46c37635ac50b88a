/* The chunk form of the delta rule on Hopper for few heads with many chunks: some blocks prepare,
 * and others walk. See delta.cuh for the formulas. There each block prepares the chunks that it
 * walks, so that few heads leave many processors idle.
 *
 * The first blocks walk. Each has a tile of the value columns of a head, for all of its chunks. The
 * other ones prepare: X, B and the decays of a chunk, for all tiles of a head. They hand these over
 * through global memory, in a ring of HANDED chunks for each head. The rings are small enough to
 * stay in the L2 cache. The launch puts all blocks on the device at once, so they may wait for one
 * another. Chunks are prepared in the order of their places in their sequences. A block that waits
 * for room in a ring therefore waits for walks that need no later chunk than its own.
 *
 * With fewer heads still, a sequence is walked in segments (delta_ends.cuh). Then one launch has
 * only blocks that prepare, for all chunks, and a later one only blocks that walk.
 *
 * A block has five groups of four warps.
 *
 *     prepares   two pairs of `solve` and `score` of delta.cuh, each with a chunk of its own
 *                fetch   two threads for each pair, which ask the copy engine
 *     walks      walk    one or two groups, for 64 value columns each: W and S
 *                read    a group for each walk: O, from the S and the W that the walk puts into
 *                        shared memory
 *                fetch   three threads that ask the copy engine
 *
 * A chunk of a walk, where the tensor cores work on the left side:
 *
 *                    | S to shared memory
 *     W = S k        | v to registers
 *                    | V - W becomes an operand; a S
 *     S += W X       | W to shared memory */
#ifndef LINATTN_CUDA_DELTA_APART_CUH
#define LINATTN_CUDA_DELTA_APART_CUH

#include "delta_apart_fetch.cuh"
#include "delta_apart_walk.cuh"
#include "delta_score.cuh"
#include "delta_solve.cuh"

template <int KP, la_decay DECAY, typename = element>
__global__ void __launch_bounds__(APART_GROUPS *GROUP, 1)
    delta_apart(const __grid_constant__ call c, const __grid_constant__ tensor_maps maps,
                const __grid_constant__ CUtensorMap to_o, const delta_flags f,
                const handed<KP> between, const segments g)
{
    threads_below<APART_GROUPS * GROUP>();
#if HAS_WARP_GROUPS
    extern __shared__ __align__(1024) char shared[];
    enum { OF_GROUP = 4 * ARRIVALS_OF_WARP };
    /* Registers of a thread. At first each has 96: 65536 of a processor for 640 threads are 102,
     * and eight are given at once. */
    enum { FOR_WALK = 160, FOR_READ = 64, FOR_PREPARE = 112, FOR_FETCH = 32 };
    static_assert(MOST_WALKS * (FOR_WALK + FOR_READ) + FOR_FETCH <= APART_GROUPS * 96, "");
    static_assert(2 * PREPARERS * FOR_PREPARE + FOR_FETCH <= APART_GROUPS * 96, "");
    static_assert(bytes_apart<KP> <= 227 << 10, "");
    /* without a norm its factors are 1 */
    constexpr bool NORMED = DECAY == LA_TOKEN;
    const int group = threadIdx.x / GROUP;
    const auto init = [](auto &barriers, int arrivals) {
        for (uint64_t &x : barriers) barrier_init(address_of(&x), arrivals);
    };
    if ((int)blockIdx.x < between.walkers) {
        walk_room<KP> &s = *(walk_room<KP> *)shared;
        const int walks = between.walks;
        if (threadIdx.x == 0) {
            init(s.full_k, 1);
            init(s.full_x, 1);
            init(s.full_b, 1);
            init(s.full_state, 1);
            init(s.full_w, OF_GROUP);
            init(s.free_k, walks * OF_GROUP);
            init(s.free_x, walks * OF_GROUP);
            init(s.free_b, walks * OF_GROUP);
            init(s.free_state, OF_GROUP);
            init(s.free_w, OF_GROUP);
            barriers_ready();
        }
        __syncthreads();
        const stretch of = stretch_at(c, between.tiles, g.count, blockIdx.x);
        if (group < walks) {
            registers_up_to<FOR_WALK>();
            walk_states<KP, DECAY>(c, g, of, walks, s);
        } else if (group >= MOST_WALKS && group < MOST_WALKS + walks) {
            registers_down_to<FOR_READ>();
            read_outputs<KP, DECAY>(c, to_o, f, of, group - MOST_WALKS, walks, s);
        } else {
            registers_down_to<FOR_FETCH>();
            if (group < 2 * MOST_WALKS || threadIdx.x % 32) return;
            const int warp = threadIdx.x % GROUP / 32;
            if (warp == 0) fetch_given(c, maps, of, walks, s);
            if (warp == 1) fetch_handed<KP, false>(c, maps, of, between, s);
            if (warp == 2) fetch_handed<KP, true>(c, maps, of, between, s);
        }
    } else {
        const int warp = threadIdx.x / 32, pair = group == 2 * PREPARERS ? warp % 4 : group / 2;
        prepare_room<KP> &s = ((prepare_room<KP> *)shared)[pair % PREPARERS];
        if (group == 2 * PREPARERS && warp % 4 < PREPARERS && threadIdx.x % 32 == 0) {
            init(s.barrier_keys, 1);
            init(s.barrier_free, 1);
            init(s.barrier_gates, OF_GROUP);
            init(s.barrier_ready, OF_GROUP);
            barrier_init(address_of(&s.barrier_solved), OF_GROUP);
            barrier_init(address_of(&s.barrier_used), OF_GROUP);
            barriers_ready();
            s.heads = c.N * c.HV;
            s.first = ((int)blockIdx.x - between.walkers) * PREPARERS + pair;
            s.step = ((int)gridDim.x - between.walkers) * PREPARERS;
        }
        /* blocks above the diagonal stay zeros */
        for (int i = threadIdx.x % (2 * GROUP); group < 2 * PREPARERS && i < PANEL_BYTES / 16;
             i += 2 * GROUP)
            for (char *panel : {s.inverse, s.ended, s.inverse_f16})
                *(uint4 *)(panel + i * 16) = make_uint4(0, 0, 0, 0);
        stores_before_copies();
        __syncthreads();
        if (group == 2 * PREPARERS) {
            registers_down_to<FOR_FETCH>();
            if (threadIdx.x % 32) return;
            if (warp % 4 < PREPARERS)
                fetch_keys(c, maps, s);
            else
                hand_over(c, between, s);
            return;
        }
        registers_up_to<FOR_PREPARE>();
        if (group % 2 == 0)
            solve_chunks<KP, DECAY, NORMED>(s, group);
        else
            score_deltas<KP, DECAY, NORMED>(c, f, s, group);
    }
#endif
}

#endif
