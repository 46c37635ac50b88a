/* The two passes over the chunks of the backward pass, on tensor cores. One
 * recomputes the pass of `chunks_forward` without its reads, and keeps what the adjoint of a chunk
 * needs. The other goes backwards with dS, the gradient of the state, in registers. Columns of S
 * never mix, so everything is transposed as in chunk_carry.cuh: a warp has 16 value columns.
 * docs/math.md has the formulas, section 6. This file has the part from chunk to chunk,
 * intra_chunk_adjoint.cuh the part within a chunk.
 *
 *     recompute   W = V - k^ S,  E = W - M (b W),  U = b E
 *                 S <- diag(a) S + k~' U
 *                 keeps S (before the chunk) and E
 *     backward    dU = k~ dS + P' dO,  Z = dU - M' (b dU),  dV = b Z
 *                 dS <- diag(a) dS + q^' dO - k^' dV
 *                 keeps dS (after the chunk) and Z
 *
 * Here M = L (I + diag(b) L)^-1. It follows from E = W - L U and U = b E, and from Z = dU - L' dV
 * and dV = b Z, without a division by b.
 *
 * Where the caller gave x, it stands in the place of k in k^, and L is that of x and k.
 *
 * DPLR (prepare_dplr.cuh) has X in the place of k^, and keeps - p in the place of E:
 *
 *     recompute   T = X S,  p = T + M V
 *                 S <- diag(a) S - y~' T + K' V
 *     backward    dT = - y~ dS,  dV = K dS + P' dO,  Z = - A' (dT - P_y' dO)
 *                 dS <- diag(a) dS + Q' dO + X' dT
 *
 * U = diag(b) E and dV = diag(b) Z, where Z is the gradient of U. E and Z are kept, not U and dV,
 * because the gradient of beta is then Z_i . E_i, without a division. The additive rule has U = V
 * and dV = dU, and keeps neither.
 *
 * In the backward pass a NaN in dO must not reach later tokens. In a product with a triangle, zero
 * times NaN would carry it there: see `spoiled`. */
#ifndef LINATTN_CUDA_RECOMPUTE_CUH
#define LINATTN_CUDA_RECOMPUTE_CUH

#include "recompute_rows.cuh"
#include "states_in_chunks.cuh"

/* A chunk at work: where its parts lie, and the part of this thread. */
struct adjoint_chunk {
    char *room;
    uint32_t base; /* of the room, for copies and products */
    int t, n;      /* the first token; the tokens */
    int64_t place; /* among the chunk slots and heads */
    int warp, line, lane;
    int pair;         /* the two tokens, or keys, of every eight that this thread has */
    int slice, piece; /* where this lane reads 8 x 8 blocks of v, and where it reads rows of 8 */
    const float *in, *out, *of_look, *of_beta, *total;
    bool nonfinite; /* the whole chunk is spoiled, and all that depends on it */
};

/* Keep the state of a warp as the adjoint of the chunk needs it. s: the state as operands. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD, int N>
__device__ __forceinline__ void
keep_state(const left (&s)[N], const adjoint_place<KP, DECAY, RULE, BACKWARD> &p,
           const adjoint_chunk &x, const kept &f, int staged, int own)
{
    constexpr int KEYS = N * 16;
    if (p.v0 >= p.panels * PANEL || p.c.states_only) return;
    char *const to =
        (BACKWARD ? f.d_states : f.states) + (x.place * p.panels + p.panel) * tile_bytes(KP) + own;
#if HAS_WARP_GROUPS
    if (staged) {
        send_state<KEYS>(to, x.line % 4 * 16,
                         address_of(p.shared) + staged + x.warp * (KEYS / PANEL * BYTES_OF_ROWS),
                         s);
        return;
    }
#endif
    put_state<KEYS>(to, x.line % 4 * 16, s);
}

/* Keep rows of E or of Z. Two warps with the same columns have the same rows. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD>
__device__ __forceinline__ void keep_rows(char *panels, const float (&numbers)[8][4],
                                          const adjoint_place<KP, DECAY, RULE, BACKWARD> &p,
                                          const adjoint_chunk &x)
{
    if (p.half || p.v0 >= p.panels * PANEL || p.c.states_only) return;
    put_columns(x.base + x.slice, numbers);
    char *to = panels + (x.place * p.panels + p.panel) * PANEL_BYTES +
               piece_at(x.lane / 2, x.line % 4 * 2 + x.lane % 2);
#pragma unroll
    for (int j = 0; j < 4; j++)
        *(uint4 *)(to + j * 16 * 128) = *(const uint4 *)(x.room + x.piece + j * 16 * 128);
}

/* Keep E. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD>
__device__ __forceinline__ void keep_E(float (&E)[8][4],
                                       const adjoint_place<KP, DECAY, RULE, BACKWARD> &p,
                                       const adjoint_chunk &x, const kept &f)
{
    if (x.nonfinite) {
        const int all[2] = {C, C};
        spoil_before(E, all);
    }
    keep_rows(f.E, E, p, x);
}

/* Store dV, by way of the place of dO. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD>
__device__ __forceinline__ void store_dv(const float (&dV)[8][4],
                                         const adjoint_place<KP, DECAY, RULE, BACKWARD> &p,
                                         const adjoint_chunk &x)
{
    if (p.half || p.columns <= 0 || p.c.states_only) return;
    put_columns(x.base + x.slice, dV);
    char *to = at(p.d[LA_DV], p.u.b, x.t + x.lane / 2, p.u.hv, p.v0 + x.lane % 2 * 8);
    const int64_t row = p.d[LA_DV].stride[1] * 2;
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j * 16 + x.lane / 2 < x.n && x.lane % 2 * 8 < p.columns)
            *(uint4 *)(to + j * 16 * row) = *(const uint4 *)(x.room + x.piece + j * 16 * 128);
}

/* S or dS times the decays of the chunk. */
template <la_decay DECAY, bool BACKWARD, int N>
__device__ __forceinline__ void decay_chunk(float (&S)[N][4], const adjoint_chunk &x, int first_key)
{
    if constexpr (DECAY == LA_PAIR && BACKWARD)
        undecay_pair(S, x.total);
    else if constexpr (DECAY == LA_PAIR)
        decay_pair(S, x.total);
    else if constexpr (DECAY != LA_NONE)
        decay_state<DECAY>(S, x.in, x.total, first_key, x.pair);
}

/* The products of all operands, each of 16 keys, or of 16 tokens: c += a B, and c += a B'. */
template <int N>
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const left (&a)[N], uint32_t tile)
{
#pragma unroll
    for (int j = 0; j < N; j++) multiply_rows(c, a[j], tile, j * 16);
}
template <int N>
__device__ __forceinline__ void multiply_columns(float (&c)[N][4], const left (&a)[4],
                                                 uint32_t tile)
{
#pragma unroll
    for (int j = 0; j < 4; j++) multiply_columns(c, a[j], tile, j * 16);
}

/* ---- forwards: keeps E, carries S. v: the values, as operands over the tokens ---- */

/* T = X S, p = T + M V, S <- diag(a) S - y~' T + K' V */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD, int N, int M>
__device__ __forceinline__ void recompute_dplr(float (&S)[N][4], const left (&s)[M],
                                               const left (&v)[4],
                                               const adjoint_place<KP, DECAY, RULE, BACKWARD> &p,
                                               const adjoint_chunk &x, const kept &f)
{
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    float E[8][4] = {};
    products_begin();
    multiply_rows(E, s, x.base + part::k);
    products_commit();
    products_wait<0>();
    products_in(E);
    left T[4];
    as_operands(T, E, NULL, -1);
    decay_chunk<DECAY, BACKWARD>(S, x, 0);
    products_begin();
    multiply_rows(E, v, x.base + part::lower);
    products_commit();
    products_begin();
    multiply_columns(S, T, x.base + part::y);
    multiply_columns(S, v, x.base + p.rows.written);
    products_commit();
    products_wait<1>();
    products_in(E);
#pragma unroll
    for (int m = 0; m < 8 * 4; m++) E[m / 4][m % 4] = -E[m / 4][m % 4];
    keep_E(E, p, x, f);
    products_wait<0>();
    products_in(S);
}

/* W = V - k^ S, E = W - M (b W), U = b E, S <- diag(a) S + k~' U */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD, int N, int M>
__device__ __forceinline__ void
recompute_delta(float (&S)[N][4], const left (&s)[M], left (&v)[4], partner &other,
                const adjoint_place<KP, DECAY, RULE, BACKWARD> &p, const adjoint_chunk &x,
                const kept &f, int first_key, int own)
{
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    float E[8][4] = {};
    products_begin();
    multiply_rows(E, s, x.base + part::k + own);
    products_commit();
    products_wait<0>();
    products_in(E);
    add_other_half<part::halves>(E, other);
    subtract_read<DECAY>(E, v, x.of_look, x.pair); /* W */
    as_operands(v, E, x.of_beta, 1);
    products_begin();
    multiply_rows(E, v, x.base + part::lower);
    products_commit();
    decay_chunk<DECAY, BACKWARD>(S, x, first_key);
    products_wait<0>();
    products_in(E);
    left U[4];
    as_operands(U, E, DECAY == LA_TOKEN ? x.out : NULL, 1, x.of_beta);
    products_in(S);
    products_begin();
    multiply_columns(S, U, x.base + p.rows.written + own);
    products_commit();
    keep_E(E, p, x, f);
    products_wait<0>();
    products_in(S);
}

/* ---- backwards: keeps Z, stores dV, carries dS ---- */

/* DPLR: was p = A (x^ S + (x k) V), of which o takes P_y p and S takes y~' p. Z is the gradient of
 * the parentheses, times -1. d_o: dO, without the scale. The products of dS are on their way when
 * it returns. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD, int N, int M>
__device__ __forceinline__ void
dplr_backwards(float (&dS)[N][4], const left (&s)[M], const left (&d_o)[4], float (&dU)[8][4],
               const adjoint_place<KP, DECAY, RULE, BACKWARD> &p, const adjoint_chunk &x,
               const kept &f, bool spoiled, const int (&end)[2], float scale)
{
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    /* W: y~ dS + P_y' dO; dT here times -1 */
    float W[8][4] = {}, Z[8][4] = {};
    products_begin();
    multiply_columns(W, d_o, x.base + part::scores_y);
    products_commit();
    products_wait<0>();
    products_in(W);
#pragma unroll
    for (int m = 0; m < 8 * 4; m++) W[m / 4][m % 4] *= scale;
    float dT[8][4] = {};
    products_begin();
    multiply_rows(dT, s, x.base + part::y);
    products_commit();
    products_wait<0>();
    products_in(dT);
#pragma unroll
    for (int m = 0; m < 8 * 4; m++) W[m / 4][m % 4] += dT[m / 4][m % 4];
    left y[4], z[4];
    as_operands(y, W, NULL, 1);
    as_operands(z, dT, NULL, -1);
    products_begin();
    multiply_columns(Z, y, x.base + part::inverse);
    products_commit();
    products_begin();
    multiply_columns(dS, d_o, x.base + part::q);
    multiply_columns(dS, z, x.base + part::k);
    products_commit();
    products_wait<1>();
    products_in(Z);
    if (spoiled) {
        spoil_before(Z, end);
        spoil_before(dU, end);
    }
    keep_rows(f.Z, Z, p, x);
    __syncwarp(); /* dV leaves by way of the same place */
}

/* Z = dU - M' (b dU), dS <- diag(a) dS + q^' dO - k^' (b Z). dU becomes dV = b Z. The products of
 * dS are on their way when it returns. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD, int N>
__device__ __forceinline__ void
delta_backwards(float (&dS)[N][4], const left (&d_o)[4], float (&dU)[8][4],
                const adjoint_place<KP, DECAY, RULE, BACKWARD> &p, const adjoint_chunk &x,
                const kept &f, bool spoiled, const int (&end)[2], int own)
{
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    left y[4], z[4];
    as_operands(y, dU, x.of_beta, 1);
    products_begin(); /* dU becomes Z */
    multiply_columns(dU, y, x.base + part::lower);
    products_commit();
    products_begin();
    multiply_columns(dS, d_o, x.base + part::q + own);
    products_commit();
    products_wait<1>();
    products_in(dU);
    as_operands(z, dU, DECAY == LA_TOKEN ? x.of_look : NULL, -1, x.of_beta);
    products_begin();
    multiply_columns(dS, z, x.base + part::k + own);
    products_commit();
    if (spoiled) spoil_before(dU, end);
    keep_rows(f.Z, dU, p, x);
    __syncwarp(); /* dV leaves by way of the same place */
#pragma unroll
    for (int m = 0; m < 8; m++) {
        const float2 b = *(const float2 *)(x.of_beta + m * 8 + x.pair);
        dU[m][0] *= b.x;
        dU[m][1] *= b.y;
        dU[m][2] *= b.x;
        dU[m][3] *= b.y;
    }
}

/* A chunk backwards. d_o: dO, as operands over the tokens, which get the scale and the decays. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD, int N, int M>
__device__ __forceinline__ void
chunk_backwards(float (&dS)[N][4], const left (&s)[M], left (&d_o)[4], partner &other,
                const adjoint_place<KP, DECAY, RULE, BACKWARD> &p, const adjoint_chunk &x,
                const kept &f, int staged, int first_key, int own, float scale)
{
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    constexpr int HALVES = part::halves;
    int end[2] = {};
    spoiled_up_to(d_o, end);
    if (x.nonfinite) end[0] = end[1] = C;
    const bool spoiled = __any_sync(~0u, end[0] | end[1]);
    if (spoiled) clear_before(d_o, end);
    /* was O = P U, S' = .. + (r k)' U: r multiplies only the second product, whose sum over
     * keys may be that of two warps */
    constexpr bool apart = DECAY == LA_TOKEN || HALVES == 2;
    float dU[8][4] = {}, of_read[apart ? 8 : 1][4] = {};
    if (RULE == LA_ADDITIVE && p.c.states_only) { /* dS takes no part of dU */
        decay_chunk<DECAY, BACKWARD>(dS, x, first_key);
    } else {
        products_begin();
        multiply_rows(dU, s, x.base + p.rows.written + own);
        if constexpr (apart)
            multiply_columns(of_read, d_o, x.base + part::scores);
        else
            multiply_columns(dU, d_o, x.base + part::scores);
        products_commit();
        keep_state(s, p, x, f, staged, own);
        decay_chunk<DECAY, BACKWARD>(dS, x, first_key);
        products_wait<0>();
        products_in(dU);
        products_in(of_read);
        add_other_half<HALVES>(dU, other);
        if constexpr (apart)
#pragma unroll
            for (int m = 0; m < 8; m++) {
                const float2 a = DECAY == LA_TOKEN ? *(const float2 *)(x.out + m * 8 + x.pair)
                                                   : make_float2(1, 1);
                dU[m][0] = a.x * dU[m][0] + of_read[m][0];
                dU[m][1] = a.y * dU[m][1] + of_read[m][1];
                dU[m][2] = a.x * dU[m][2] + of_read[m][2];
                dU[m][3] = a.y * dU[m][3] + of_read[m][3];
            }
    }
    /* dO times the scale and the decay from the start of the chunk, unless q^ has them */
    if (!lies_in_rows<DECAY>) scale_operands(d_o, DECAY == LA_TOKEN ? x.in : NULL, scale);
    if constexpr (RULE == LA_DPLR) {
        dplr_backwards(dS, s, d_o, dU, p, x, f, spoiled, end, scale);
    } else if constexpr (RULE == LA_DELTA) {
        delta_backwards(dS, d_o, dU, p, x, f, spoiled, end, own);
    } else {
        products_begin();
        multiply_columns(dS, d_o, x.base + part::q + own);
        products_commit();
        if (spoiled) spoil_before(dU, end);
    }
    result_range(p.d).finish(dU);
    store_dv(dU, p, x);
    products_wait<0>();
    products_in(dS);
    if (spoiled)
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (end[e / 2]) dS[j][e] = nanf("");
}

template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD>
__device__ __forceinline__ void
chunks_for_adjoint(const call &c, const gradients &d, const chunks &w, const backward_maps &maps,
                   const kept &f, int tiles, int segments, int stages, int staged, int index)
{
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    constexpr int KEYS = part::keys;
    extern __shared__ __align__(1024) char shared[];
    __shared__ adjoint_news news;
    const adjoint_place<KP, DECAY, RULE, BACKWARD> p(c, d, w, maps, tiles, segments, index, news,
                                                     shared);
    const int half = p.half;
#if HAS_WARP_GROUPS
    p.start_barriers(stages);
    if (p.warp >= p.warps) {
        registers_down_to<40>();
        if (p.warp == p.warps && p.lane == 0) p.produce(stages);
        return;
    }
    registers_up_to<232>();
#endif

    const float scale = (float)c.scale;
    /* the first key of this warp, and its place in tiles of keys */
    const int first_key = half * KEYS, own = half * tile_bytes(KEYS);
    partner other = {(float4 *)(shared + stages * p.bytes) + p.line * 32 + p.lane, p.line, p.width,
                     half};

    /* S' or dS' [16 columns][KEYS]: a thread has columns lane / 4 and + 8, keys 8 i + pair, + 1 */
    float S[KEYS / 8][4];
    const view &from = BACKWARD ? d[LA_DST] : c.x[LA_S0];
    const view &from_Y = BACKWARD ? d[LA_DYT] : c.x[LA_Y0];
    load_state<DECAY>(S, c, from, from_Y, p.u.n, p.u.hv * segments + p.segment, first_key, p.v0,
                      p.columns);
    if (NARROW && BACKWARD)
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) S[i][e] *= up_of(d);

    int stage_at = 0, round = 0;
    /* Without a producer the warps fetch. With two stages they are one chunk ahead, and the first
     * turn only fetches. So `fetch` is in one place. */
    const int ahead = !HAS_WARP_GROUPS && stages > 1;
    for (int step = -ahead; step < p.own_chunks; step++) {
        int thread = threadIdx.x;
        /* Asked for anew in each chunk: what follows from it would take registers from the sums. */
        if (DECAY == LA_TOKEN) asm volatile("" : "+r"(thread));
        const int warp = thread / 32, lane = thread % 32, line = warp - half * p.width;
        const int place_of_v = part::v + line / 4 * PANEL_BYTES;
        char *const room = shared + stage_at * p.bytes;
        const int i = p.chunk_at(step), t = p.u.begin + i * C, n = min(C, p.u.end - t);
#if HAS_WARP_GROUPS
        barrier_wait(address_of(news.full + stage_at), round);
        if (n < C) p.clear_tail(room, place_of_v, line, lane, n);
#else
        copies_wait<0>();
        __syncthreads(); /* the chunk is there, and every warp is done with the one before */
        if (step + ahead < p.own_chunks)
            p.fetch(step + ahead, ahead && step >= 0 ? stage_at ^ 1 : stage_at);
        if (step < 0) continue;
        if (!ahead) {
            copies_wait<0>();
            __syncthreads();
        }
#endif
        const adjoint_chunk x = {
            room,
            address_of(room),
            t,
            n,
            (int64_t)(p.chunk_slot0 + i) * c.HV + p.u.hv,
            warp,
            line,
            lane,
            lane % 4 * 2,
            place_of_v + piece_at(lane / 16 * 8 + lane % 8, line % 4 * 2 + lane / 8 % 2),
            place_of_v + piece_at(lane / 2, line % 4 * 2 + lane % 2),
            (const float *)(room + part::in),
            (const float *)(room + part::out),
            (const float *)(room + p.rows.look),
            (const float *)(room + part::beta),
            (const float *)(room + part::total),
            news.nonfinite_at[stage_at] < C,
        };

        left s[KEYS / 16];
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) s[j] = as_left(S[2 * j], S[2 * j + 1]);
        left v[4]; /* V or dO, as operands over the tokens */
#pragma unroll
        for (int m = 0; m < 4; m++)
            load_matrices_transposed(v[m].x, x.base + x.slice + m * 16 * 128);
        if (p.columns <= 0)
#pragma unroll
            for (int m = 0; m < 4; m++) v[m] = {};

        if constexpr (BACKWARD) {
            chunk_backwards(S, s, v, other, p, x, f, staged, first_key, own, scale);
        } else {
            keep_state(s, p, x, f, staged, own);
            if constexpr (RULE == LA_DPLR) {
                recompute_dplr(S, s, v, p, x, f);
            } else if constexpr (RULE == LA_DELTA) {
                recompute_delta(S, s, v, other, p, x, f, first_key, own);
            } else {
                if (DECAY == LA_TOKEN) scale_operands(v, x.out, 1);
                decay_chunk<DECAY, BACKWARD>(S, x, first_key);
                products_begin();
                multiply_columns(S, v, x.base + p.rows.written + own);
                products_commit();
                products_wait<0>();
                products_in(S);
            }
            if (x.nonfinite)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) S[j][e] = nanf("");
        }
#if HAS_WARP_GROUPS
        stores_before_copies();
        warp_arrives(address_of(news.empty + stage_at));
#endif
        if (++stage_at == stages) stage_at = 0, round ^= 1;
    }
#if HAS_WARP_GROUPS
    engine_has_read<0>();
#endif
    if (BACKWARD && p.segment == 0) {
        const result_range out(d);
        store_state<DECAY>(S, c, d[LA_DS0], d[LA_DY0], p.u.n, p.u.hv, first_key, p.v0, p.columns,
                           out);
    }
}

/* Neither pass needs the results of the other, so they run side by side. The backward pass takes
 * longer and has the first half of the blocks: all of them, where the gradient of the first state is
 * all that is wanted. Then nothing is kept.
 *
 * A block has a tile of a segment. With more than one segment the initial states are
 * [N][HV][segments][K][V], and so are the gradients of the final ones.
 *
 * staged: from here on states lie in shared memory on their way to the copy engine; 0: there is no
 * room for them. */
template <int KP, la_decay DECAY, la_rule RULE, typename = element>
__global__ void __launch_bounds__((ADJOINT_WARPS + HAS_WARP_GROUPS * ADJOINT_PRODUCERS) * 32, 1)
    chunks_both_ways(const __grid_constant__ call c, const __grid_constant__ gradients d,
                     const __grid_constant__ chunks w, const __grid_constant__ backward_maps maps,
                     const __grid_constant__ kept f, int tiles, int segments, int stages,
                     int staged)
{
    threads_below<(ADJOINT_WARPS + HAS_WARP_GROUPS * ADJOINT_PRODUCERS) * 32>();
    const int half = gridDim.x / (c.states_only ? 1 : 2), index = blockIdx.x % half;
    if (HAS_WARP_GROUPS && KP <= 128) stages = ADJOINT_STAGES;
    if (blockIdx.x < half)
        chunks_for_adjoint<KP, DECAY, RULE, true>(c, d, w, maps, f, tiles, segments, stages, staged,
                                                  index);
    else
        chunks_for_adjoint<KP, DECAY, RULE, false>(c, d, w, maps, f, tiles, segments, stages,
                                                   staged, index);
}

#endif
