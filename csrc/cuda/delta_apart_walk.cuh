/* The two roles of a block that walks, where other blocks prepare. See delta_apart.cuh. */
#ifndef LINATTN_CUDA_DELTA_APART_WALK_CUH
#define LINATTN_CUDA_DELTA_APART_WALK_CUH

#include "delta_apart_room.cuh"

#if HAS_WARP_GROUPS
/* Rows of o from token `first` on, of a chunk of n, from the registers of a warp. */
static __device__ __noinline__ void store_tokens(const call &c, const unit &u, int t, int n,
                                                 int first, int column, const float (&O)[8][4])
{
    const int lane = threadIdx.x % 32;
    for (int m = 0; m < 8; m++)
        for (int e = 0; e < 4; e++) {
            const int token = m * 8 + lane % 4 * 2 + e % 2, of = column + lane / 4 + e / 2 * 8;
            if (token >= first && token < n && of < c.V)
                store(at(c.x[LA_O], u.b, t + token, u.hv, of), c.x[LA_O].dtype, O[m][e]);
        }
}

/* A state before a segment, from join_maps. */
template <int KP>
__device__ __forceinline__ void load_start(const call &c, const segments &g, const stretch &of,
                                           int first_column, float (&S)[KP / 8][4])
{
    const int slices = (c.V + 15) / 16, lane = threadIdx.x % 32;
    const float *const from =
        g.starts + (((int64_t)of.head * g.count + of.segment) * slices * 16 + first_column) * KP +
        lane / 4 * KP + lane % 4 * 2;
    const bool there = first_column < slices * 16;
#pragma unroll
    for (int i = 0; i < KP / 8; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 x =
                there ? *(const float2 *)(from + half * 8 * KP + i * 8) : make_float2(0, 0);
            S[i][2 * half] = x.x;
            S[i][2 * half + 1] = x.y;
        }
}

/* Store the 16 columns of a warp in float32. */
template <int KP>
__device__ __forceinline__ void store_columns(float *first_column, const float (&S)[KP / 8][4])
{
    const int lane = threadIdx.x % 32;
    float *const to = first_column + lane / 4 * KP + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < KP / 8; i++) {
        *(float2 *)(to + i * 8) = make_float2(S[i][0], S[i][1]);
        *(float2 *)(to + 8 * KP + i * 8) = make_float2(S[i][2], S[i][3]);
    }
}

/* What the tokens of a chunk see of a state, from blocks that prepare. */
template <la_decay DECAY>
__device__ __forceinline__ void load_seen(float2 (&seen)[8], const float *from, int pair)
{
#pragma unroll
    for (int m = 0; m < 8; m++)
        seen[m] = DECAY == LA_TOKEN ? *(const float2 *)(from + m * 8 + pair) : make_float2(1, 1);
}

/* x becomes V - seen W; it was V. */
__device__ __forceinline__ void take_from_values(operand (&x)[4], const float (&W)[8][4],
                                                 const float2 (&seen)[8])
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float (&w)[4] = W[2 * m + half];
            const float2 b = seen[2 * m + half];
            const float2 top = numbers(x[m], half * 2), low = numbers(x[m], half * 2 + 1);
            put_pair(x[m], half * 2, top.x - b.x * w[0], top.y - b.y * w[1]);
            put_pair(x[m], half * 2 + 1, low.x - b.x * w[2], low.y - b.y * w[3]);
        }
}

/* The rare part of a chunk. x is W over the tokens; `nonfinite` is the first token with a NaN or an
 * infinity in q, k or a gate. Returns the first token that the products leave out, or C. Its W and
 * those after it become zeros. */
static __device__ __forceinline__ int leave_out(const call &c, const unit &u, int t, int n,
                                                int first_column, int columns, int nonfinite,
                                                int pair, operand (&x)[4])
{
    keep_before(x, pair, n);
    int end = min(C, nonfinite);
    if (__any_sync(~0u, has_nonfinite(x)) && columns > 0)
        end = min(end, first_nonfinite(c, u, t, n, first_column, columns));
    keep_before(x, pair, end);
    if (__any_sync(~0u, has_nonfinite(x))) { /* the state has it */
        end = 0;
        keep_before(x, pair, 0);
    }
    return end;
}

/* W and S of every chunk. A warp has 16 value columns. */
template <int KP, la_decay DECAY>
__device__ __forceinline__ void walk_states(const call &c, const segments &g, const stretch &of,
                                            int walks, walk_room<KP> &s)
{
    const unit &u = of.u;
    const int walk = threadIdx.x / GROUP, warp = threadIdx.x / 32 % 4;
    const int first_column = (of.tile * walks + walk) * PANEL + warp * 16;
    const int columns = min(16, c.V - first_column);
    const int chunks = of.chunks, begin = u.begin + of.first * C;
    float S[KP / 8][4];
    if (g.starts)
        load_start<KP>(c, g, of, first_column, S);
    else
        load_state(c, u, first_column, columns, S);
    /* A wait takes 80 cycles even when there is nothing to wait for. To ask before another wait takes
     * none. */
    const auto passed = [](const uint64_t *barrier, int phase) {
        return __all_sync(~0u, barrier_passed(address_of(barrier), phase));
    };
#pragma unroll AHEAD /* so that the places of a chunk are constants */
    for (int chunk = 0; chunk < chunks; chunk++) {
        const int stage = chunk % AHEAD, phase = chunk / AHEAD & 1;
        const int t = begin + chunk * C, n = min(C, u.end - t);
        const seat at = own_seat();
        const bool k_there = passed(s.full_k + stage, phase);
        /* the state as it is before the chunk, for W and for `read` */
        barrier_wait(address_of(s.free_state + walk), parity(chunk - 1));
        {
            const uint32_t to = address_of(s.state[walk]) + lane_with_columns(0);
#pragma unroll
            for (int j = 0; j < KP / 16; j++)
                store_matrices(block_at(to, at.warp * BLOCK, j * BLOCK),
                               as_operand(S[2 * j], S[2 * j + 1]).of[0].x);
        }
        stores_before_copies();
        if (!k_there) barrier_wait(address_of(s.full_k + stage), phase);
        group_waits();
        float W[8][4];
        const uint32_t k = address_for_products<DECAY>(s.k[stage]);
        const uint32_t state = address_for_products<DECAY>(s.state[walk]);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP; j += 16) multiply_tiles(W, state, k, j, j == 0);
        products_commit();
        if (at.thread == 0) barrier_arrive(address_of(s.full_state + walk));
        operand x[4]; /* v, then W, over the tokens */
        {
            const uint32_t values = address_of(s.v[stage][walk]) + transposed_at(at);
#pragma unroll
            for (int m = 0; m < 4; m++)
                load_matrices_transposed(x[m].of[0].x, values + m * 16 * 128);
        }
        const bool w_free = passed(s.free_w + walk, parity(chunk - 1));
        barrier_wait(address_of(s.full_x + stage), phase);
        float2 seen[8];
        load_seen<DECAY>(seen, s.numbers[stage].seen, at.pair);
        const int nonfinite = s.numbers[stage].nonfinite;
        const float a = s.numbers[stage].total;
        products_wait<0>();
        products_in(W);
        warp_arrives(address_of(s.free_k + stage));
        take_from_values(x, W, seen);
        int end = C; /* the products leave out the tokens from here on, which go one by one */
        float after[KP / 2];
        if (__builtin_expect(__any_sync(~0u, has_nonfinite(x) || n < C || nonfinite < C), 0)) {
            end = leave_out(c, u, t, n, first_column, columns, nonfinite, at.pair, x);
            if (end < C) state_for_tokens(S, after);
        }
        if (DECAY == LA_TOKEN) scale_state(S, a);
        const uint32_t X = address_for_products<DECAY>(s.x[stage]);
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_columns(S, x[j].of[0], X, j * 16);
        products_commit();
        if (!w_free) barrier_wait(address_of(s.free_w + walk), parity(chunk - 1));
        {
            const uint32_t to = address_of(s.w[walk]) + lane_with_columns(0);
#pragma unroll
            for (int j = 0; j < 4; j++)
                store_matrices(block_at(to, at.warp * BLOCK, j * BLOCK), x[j].of[0].x);
        }
        if (at.lane == 0) s.kept[walk][at.warp] = end;
        stores_before_copies();
        warp_arrives(address_of(s.full_w + walk));
        products_wait<0>();
        products_in(S);
        warp_arrives(address_of(s.free_x + stage));
        if (__builtin_expect(end < C, 0)) {
            float O[8][4] = {};
            rest_by_tokens<KP, DECAY, LA_DELTA>(c, u, t, n, end, first_column, columns, after, O);
            store_tokens(c, u, t, n, end, first_column, O);
            state_from_tokens(after, S);
        }
    }
    if (of.last && c.x[LA_ST].data) store_state(c, u, first_column, columns, S);
}

/* O of every chunk of a walk, from its states and its W. A warp has 16 value columns. */
template <int KP, la_decay DECAY>
__device__ __forceinline__ void read_outputs(const call &c, const CUtensorMap &to_o,
                                             const delta_flags &f, const stretch &of, int walk,
                                             int walks, walk_room<KP> &s)
{
    const unit &u = of.u;
    const int column = (of.tile * walks + walk) * PANEL;
    const float scale = (float)c.scale;
    for (int chunk = 0; chunk < of.chunks; chunk++) {
        const int stage = chunk % AHEAD;
        const int t = u.begin + (of.first + chunk) * C, n = min(C, u.end - t);
        const seat at = own_seat();
        float O[8][4];
        const uint32_t q = address_for_products<DECAY>(s.q[stage]);
        const uint32_t S = address_for_products<DECAY>(s.state[walk]);
        barrier_wait(address_of(s.full_b + stage), parity(chunk / AHEAD));
        barrier_wait(address_of(s.full_state + walk), parity(chunk));
        products_begin();
#pragma unroll
        for (int j = 0; j < KP; j += 16) multiply_tiles(O, S, q, j, j == 0);
        products_commit();
        float2 in[8];
#pragma unroll
        for (int m = 0; m < 8; m++) {
            in[m] = DECAY == LA_TOKEN ? *(const float2 *)(s.in[stage] + m * 8 + at.pair)
                                      : make_float2(1, 1);
            in[m] = make_float2(in[m].x * scale, in[m].y * scale);
        }
        products_wait<0>();
        products_in(O);
        warp_arrives(address_of(s.free_state + walk));
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) O[m][e] *= e % 2 ? in[m].y : in[m].x;
        const uint32_t b = address_for_products<DECAY>(s.b[stage]);
        const uint32_t w = address_for_products<DECAY>(s.w[walk]);
        barrier_wait(address_of(s.full_w + walk), parity(chunk));
        products_begin();
#pragma unroll
        for (int j = 0; j < C; j += 16) multiply_tiles(O, w, b, j, false);
        products_commit();
        const int4 all = *(const int4 *)s.kept[walk];
        char *const panel = s.o[walk][chunk % 2];
        if (at.thread == 0) engine_has_read<1>(); /* the O that lay here has left */
        group_waits();
        products_wait<0>();
        products_in(O);
        warp_arrives(address_of(s.free_w + walk));
        warp_arrives(address_of(s.free_b + stage));
        uint32_t o[4][4];
        pack_o(O, o);
        put_o(panel, o);
        if (f.o_boxes && n == C && min(min(all.x, all.y), min(all.z, all.w)) == C) {
            stores_before_copies();
            group_waits();
            if (at.thread == 0) engine_store_box(&to_o, address_of(panel), column, u.hv, t, u.b);
        } else {
            const int first = column + at.warp * 16;
            const int kept = at.warp < 2 ? at.warp ? all.y : all.x : at.warp == 2 ? all.z : all.w;
            store_o(c, f.o_pieces, panel,
                    ::at(c.x[LA_O], u.b, t + at.lane / 2, u.hv, first + at.lane % 2 * 8),
                    min(16, c.V - first), min(n, kept));
            stores_before_copies();
        }
    }
}
#endif

#endif
