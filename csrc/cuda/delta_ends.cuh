/* The ends of segments of the delta rule on Hopper, for few heads with very many chunks. See
 * chunk_stage.cuh for segments, and delta.cuh for the formulas. Four launches do this:
 *
 *     delta_apart     without blocks that walk: X, B and the decays of all chunks
 *     delta_ends      the end of each segment but the last one
 *     join_maps       the state before each segment
 *     delta_apart     without blocks that prepare: O, from these states
 *
 * A call for states alone has the first three, with the ends of all segments, and the join goes on to
 * the final state. If it wants M, the first segment is like any other one.
 *
 * The first segment of a sequence goes from the initial state, so its end is a true state. Any
 * other one goes from a state of zero, and from the columns of the identity with v = 0. A block has
 * two panels of 64 columns of one of these. It has three groups of four warps: two walks, and one
 * whose first thread asks the copy engine. Where the decay of a segment is so small that M is zero,
 * a block for the identity ends at once. There is no O here, so a chunk takes two products:
 *
 *     W = S k      | v to registers
 *                  | V - W becomes an operand; a S
 *     S += W X                                       */
#ifndef LINATTN_CUDA_DELTA_ENDS_CUH
#define LINATTN_CUDA_DELTA_ENDS_CUH

#include "delta_apart_walk.cuh"

#include <cfloat>

/* Chunks in shared memory. The way of a chunk there takes longer than the work on one. */
enum { ENDS_STAGES = 4 };

template <int KP> struct ends_room {
    struct {
        char k[tile_bytes(KP)], x[tile_bytes(KP)], v[MOST_WALKS][PANEL_BYTES];
    } chunk[ENDS_STAGES];
    decltype(scored<KP>::numbers) numbers[ENDS_STAGES];
    uint64_t full[ENDS_STAGES], free[ENDS_STAGES];
};

#if HAS_WARP_GROUPS
/* The chunks of a segment. One thread. */
template <int KP>
__device__ __forceinline__ void fetch_chunks(const call &c, const tensor_maps &maps,
                                             const stretch &of, bool has_v, const handed<KP> &from,
                                             ends_room<KP> &s)
{
    const unit &u = of.u;
    for (int chunk = 0; chunk < of.chunks; chunk++) {
        const int stage = chunk % ENDS_STAGES, t = u.begin + (of.first + chunk) * C;
        const uint32_t barrier = address_of(s.full + stage);
        const scored<KP> &x = *from.place_of(c, of.head, of.first + chunk);
        auto &to = s.chunk[stage];
        barrier_wait(address_of(s.free + stage), parity(chunk / ENDS_STAGES - 1));
        barrier_expect(barrier, tile_bytes(KP) + sizeof x.x + sizeof x.numbers +
                                    (has_v ? MOST_WALKS * PANEL_BYTES : 0));
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++)
            engine_copy_box(address_of(to.k) + j * PANEL_BYTES, &maps.k, j * PANEL, u.h, t, u.b,
                            barrier);
        engine_copy(address_of(to.x), x.x, sizeof x.x, barrier);
        engine_copy(address_of(s.numbers + stage), &x.numbers, sizeof x.numbers, barrier);
        for (int j = 0; j < MOST_WALKS && has_v; j++) /* zeros, where there are no columns */
            engine_copy_box(address_of(to.v[j]), &maps.v, (of.tile * MOST_WALKS + j) * PANEL, u.hv,
                            t, u.b, barrier);
    }
}

/* Is M of a segment zero? It is no longer than the decay of the segment, if no token makes a state
 * longer. What it makes of a state is then below the smallest normal number of float32 times the
 * state. */
template <int KP>
__device__ __forceinline__ bool vanishes(const call &c, const stretch &of, const handed<KP> &from)
{
    float decay = 1;
    bool longer = false;
    for (int chunk = threadIdx.x % 32; chunk < of.chunks; chunk += 32) {
        const auto &x = from.place_of(c, of.head, of.first + chunk)->numbers;
        decay *= x.total;
        longer |= !(x.total >= 0 && x.total <= 1) || x.expands || x.nonfinite < C;
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) decay *= __shfl_xor_sync(~0u, decay, lanes);
    return decay < FLT_MIN && !__any_sync(~0u, longer);
}

/* Has this thread a number from 2^64 on, an infinity or a NaN? Without one all numbers of V - W are
 * below 2^64 + KP 2^64 2^50, because a key is shorter than the root of MOST_SQUARE. */
template <int N> __device__ __forceinline__ bool has_large(const operand (&x)[N])
{
    const element_pair factor = pair_of(0x1p64f, 0x1p64f); /* the product is an infinity */
    element_pair sum[4] = {pair_of(0, 0), pair_of(0, 0), pair_of(0, 0), pair_of(0, 0)};
#pragma unroll
    for (int m = 0; m < N; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum[e] = __hfma2(*(const element_pair *)&x[m].of[0].x[e], factor, sum[e]);
    /* zero times an infinity or a NaN is not zero */
    const element_pair all = __hadd2(__hadd2(sum[0], sum[1]), __hadd2(sum[2], sum[3]));
    const element_pair none = __hmul2(all, pair_of(0, 0));
    return (*(const uint32_t *)&none & 0x7fff7fff) != 0;
}

/* The state at the end of a segment. A warp has 16 columns of it, from `row` of the ends on. */
template <int KP, la_decay DECAY>
__device__ __forceinline__ void walk_to_end(const call &c, const segments &g, const stretch &of,
                                            bool has_v, int row, int rows, ends_room<KP> &s)
{
    const unit &u = of.u;
    const int walk = threadIdx.x / GROUP, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int first_column = (of.tile * MOST_WALKS + walk) * PANEL + warp * 16;
    const int columns = has_v ? min(16, c.V - first_column) : 0;
    float S[KP / 8][4];
    if (has_v && of.segment == 0 && g.from_start && c.x[LA_S0].data)
        load_state(c, u, first_column, columns, S);
    else
#pragma unroll
        for (int i = 0; i < KP / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[i][e] =
                    !has_v && first_column + lane / 4 + e / 2 * 8 == i * 8 + lane % 4 * 2 + e % 2;
    /* the keys of the first panel, and those of the last one */
    float (&front)[PANEL / 8][4] = *(float (*)[PANEL / 8][4]) S;
    float (&back)[PANEL / 8][4] = *(float (*)[PANEL / 8][4])(S + KP / 8 - PANEL / 8);
    const seat at = own_seat();
#pragma unroll 1 /* four chunks in a round took 8 us longer: the first round fetches its code */
    for (int chunk = 0; chunk < of.chunks; chunk++) {
        const int stage = chunk % ENDS_STAGES, t = u.begin + (of.first + chunk) * C;
        const int n = min(C, u.end - t);
        /* Nothing is on its way. From the round before the compiler does not know, and would wait for
         * W before it lets the state be scaled. */
        products_wait<0>();
        products_in(S);
        operand of_state[KP / 16], x[4]; /* x: v, then W, over the tokens */
#pragma unroll
        for (int j = 0; j < KP / 16; j++) of_state[j] = as_operand(S[2 * j], S[2 * j + 1]);
        barrier_wait(address_of(s.full + stage), parity(chunk / ENDS_STAGES));
        float W[8][4];
        const uint32_t k = address_for_products<DECAY>(s.chunk[stage].k), X = k + tile_bytes(KP);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP / 16; j++) multiply_rows(W, of_state[j], k, j * 16, j == 0);
        products_commit();
        const uint32_t values = address_of(s.chunk[stage].v[walk]) + transposed_at(at);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            x[m] = {};
            if (has_v) load_matrices_transposed(x[m].of[0].x, values + m * 16 * 128);
        }
        const int nonfinite = s.numbers[stage].nonfinite;
        float2 seen[8];
        load_seen<DECAY>(seen, s.numbers[stage].seen, at.pair);
        /* If W is sure to be finite, the state is scaled before W is there. There is no branch while
         * a product is on its way, or the compiler would wait for it. */
        bool rare = nonfinite < C || n < C;
        if (DECAY == LA_TOKEN) rare = __any_sync(~0u, has_large(of_state) | has_large(x) | rare);
        const float a = s.numbers[stage].total;
        const float scale = rare ? 1 : a;
        if (DECAY == LA_TOKEN) scale_state(front, scale);
        products_wait<0>();
        products_in(W);
        take_from_values(x, W, seen);
        if (DECAY == LA_NONE) rare = __any_sync(~0u, has_nonfinite(x) | rare);
        int end = C; /* the products leave out the tokens from here on, which go one by one */
        float after[KP / 2];
        if (__builtin_expect(rare, 0)) {
            end = leave_out(c, u, t, n, first_column, columns, nonfinite, at.pair, x);
            if (end < C) state_for_tokens(S, after);
            if (DECAY == LA_TOKEN) scale_state(S, a);
        }
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_columns(front, x[j].of[0], X, j * 16);
        products_commit();
        if constexpr (KP > PANEL) {
            if (DECAY == LA_TOKEN) scale_state(back, scale);
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(back, x[j].of[0], X + PANEL_BYTES, j * 16);
            products_commit();
        }
        products_wait<0>();
        products_in(S);
        warp_arrives(address_of(s.free + stage));
        if (__builtin_expect(end < C, 0)) {
            float O[8][4] = {};
            rest_by_tokens<KP, DECAY, LA_DELTA>(c, u, t, n, end, first_column, columns, after, O);
            state_from_tokens(after, S);
        }
    }
    if (first_column >= rows_of_ends(has_v ? c.V : c.K)) return;
    store_columns<KP>(
        g.ends + (((int64_t)of.head * g.count + of.segment) * rows + row + first_column) * KP, S);
}
#endif

/* of_values: the tiles of two panels of value columns. `rows` of the ends hold these and the columns
 * of the identity, from `identity` on. */
template <int KP, la_decay DECAY, typename = element>
__global__ void __launch_bounds__((MOST_WALKS + 1) * GROUP, 1)
    delta_ends(const __grid_constant__ call c, const __grid_constant__ tensor_maps maps,
               const handed<KP> from, const segments g, int of_values, int identity, int rows)
{
    threads_below<(MOST_WALKS + 1) * GROUP>();
#if HAS_WARP_GROUPS
    extern __shared__ __align__(1024) char shared[];
    ends_room<KP> &s = *(ends_room<KP> *)shared;
    /* 504 for a lane of all warps */
    enum { FOR_WALK = 232, FOR_FETCH = 40 };
    stretch of = stretch_at(c, of_values + 1, g.count, blockIdx.x);
    const bool has_v = of.tile < of_values;
    /* a call for states alone goes to the end */
    if ((of.last && !c.states_only) || (!has_v && of.segment == 0 && g.from_start)) return;
    if (!has_v) {
        of.tile = 0;
        const bool zero = DECAY == LA_TOKEN && vanishes(c, of, from);
        if (threadIdx.x == 0) g.vanished[of.head * g.count + of.segment] = zero;
        if (zero) return;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < ENDS_STAGES; i++) {
            barrier_init(address_of(s.full + i), 1);
            barrier_init(address_of(s.free + i), MOST_WALKS * 4 * ARRIVALS_OF_WARP);
        }
        barriers_ready();
    }
    __syncthreads();
    if (threadIdx.x >= MOST_WALKS * GROUP) {
        registers_down_to<FOR_FETCH>();
        if (threadIdx.x == MOST_WALKS * GROUP) fetch_chunks(c, maps, of, has_v, from, s);
    } else {
        registers_up_to<FOR_WALK>();
        walk_to_end<KP, DECAY>(c, g, of, has_v, has_v ? 0 : identity, rows, s);
    }
#endif
}

#endif
