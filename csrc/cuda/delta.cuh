/* The chunk form of the delta rule in one kernel, on Hopper: nothing but q, k, v, the gates, o and
 * the states goes through memory. See chunk.cuh for the formulas; here A is folded into the keys
 * that are written and into the scores, so that U is never formed:
 *
 *     X = A~' K    B = P A    where A~ = diag(out) A and A = (I + L)^-1 diag(b)
 *     W = V - k^ S            S <- a S + X' W            O = q^ S + B W
 *
 * The way from one state to the next has two products, where chunks_forward has three. Decays are
 * none or scalar, and q and k are used as the caller gave them. An l2 norm is a factor of each row,
 * which is found before and stands with the decays. A call with a norm and without a decay takes the
 * kernel of a decay of 1.
 *
 * A block has groups of four warps, each with a role. They meet at barriers in shared memory.
 *
 *     walk     one or two groups, for 64 value columns each, with the state in registers. Waits for
 *              `keys`, `values` and `ready`; says `done`. Three threads of the last group ask the
 *              copy engine: for k and q two chunks ahead, for v one chunk ahead
 *     solve    one group. K K', L and its inverse: A and A~. Waits for `keys`, `gates` and `used`;
 *              says `solved`
 *     score    one group. The decays, a chunk ahead: `gates`. Q K' and P: waits for `keys` and
 *              `done`. When A is `solved`, B and X: `used`, `ready`
 *
 * A chunk of a walk, where the tensor cores work on the left side:
 *
 *     W = S k                  | O of the last chunk goes to memory
 *                              | V - W becomes an operand
 *     O = S q, S = a S + W X   | O times the decay
 *     O += W B                 | S becomes the operand of the next chunk
 *
 * The inverse is float32 within blocks of 8 tokens. The blocks below them follow from products of
 * float16, whose 11 bits are those of tf32. A number that is too large for float16 becomes an
 * infinity or a NaN; then the chunk goes token by token.
 *
 * The code of the roles is short on purpose, and the same for all warps: four roles share the
 * instruction cache of a scheduler, and a role that misses it waits for every third instruction. */
#ifndef LINATTN_CUDA_DELTA_CUH
#define LINATTN_CUDA_DELTA_CUH

#include "delta_score.cuh"
#include "delta_solve.cuh"
#include "delta_walk.cuh"

template <int KP, la_decay DECAY, int WALKS, bool NORMED, typename = element>
__global__ void __launch_bounds__((WALKS + 2) * GROUP, 1)
    delta_forward(const __grid_constant__ call c, const __grid_constant__ tensor_maps maps,
                  const __grid_constant__ CUtensorMap to_o, const delta_flags f)
{
    threads_below<(WALKS + 2) * GROUP>();
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
        init(s.barrier_keys, 3); /* k, q, and a place */
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
        walk_deltas<KP, DECAY, WALKS, NORMED>(c, maps, to_o, f, s);
    } else {
        registers_down_to<registers::prepare>();
        if (group == WALKS)
            solve_chunks<KP, DECAY, NORMED>(s, WALKS);
        else
            score_deltas<KP, DECAY, NORMED>(c, f, s, WALKS + 1);
    }
#endif
}

#endif
