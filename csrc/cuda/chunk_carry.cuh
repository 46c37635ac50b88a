/* The pass over the chunks with the state in registers: solve, read, carry. See chunk.cuh for the
 * formulas.
 *
 * A warp has 16 value columns and goes through its chunks without waiting for other warps, except
 * that on Hopper four warps share their products. On Hopper a producer warp fetches the tiles, as
 * many chunks in advance as shared memory has room for. Elsewhere every thread copies its part of
 * the next chunk.
 *
 * With more than 128 keys a state does not fit the registers of a warp. Then two warps have the
 * same columns and half of the keys each. A product over keys is then two sums, which the two warps
 * exchange. Both have all of the U that follows from them, and each finishes half of the tokens of
 * O. */
#ifndef LINATTN_CUDA_CHUNK_CARRY_CUH
#define LINATTN_CUDA_CHUNK_CARRY_CUH

#include "chunk_state.cuh"

/* The delta rule: U = A (V - k^ S), with V in U at first, and Ut. `read` asks for the product of
 * the read, which runs beside the product with A. The caller waits for it. */
template <int KP, la_decay DECAY, la_rule RULE, form FORM, int N, int M, typename F>
__device__ __forceinline__ void
solve_delta(operand (&U)[4], operand (&Ut)[4], const float (&S)[N][4], const operand (&s)[M],
            partner &other, const char *room, uint32_t base, int own, const key_rows &rows,
            int pair, int end, F read)
{
    typedef stage<KP, DECAY, RULE> part;
    const float *out = (const float *)(room + part::out);
    float W[8][4] = {}, X[8][4] = {};
    multiply_state(W, S, s, base + part::k + own);
    products_wait<0>();
    products_in(W);
    add_other_half<part::halves>(W, other);
    subtract_read<DECAY>(W, U, (const float *)(room + rows.look), pair);
    operand x[4];
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = as_operand(W[2 * j], W[2 * j + 1]);
    if (end < C) keep_before(x, pair, end);
    products_begin();
#pragma unroll
    for (int j = 0; j < 4; j++) multiply_rows(X, x[j], base + part::inverse, j * 16, j == 0, j);
    products_commit();
    read();
    products_wait<FORM == CAUSAL>(); /* for U, not yet for the read */
    products_in(X);
#pragma unroll
    for (int m = 0; m < 4; m++) U[m] = as_operand(X[2 * m], X[2 * m + 1]);
    if constexpr (DECAY == LA_TOKEN)
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const float2 a = *(const float2 *)(out + m * 8 + pair);
            put_pair(Ut[m / 2], m % 2 * 2, a.x * X[m][0], a.y * X[m][1]);
            put_pair(Ut[m / 2], m % 2 * 2 + 1, a.x * X[m][2], a.y * X[m][3]);
        }
}

/* DPLR: T = - X S. `read` as above. */
template <form FORM, int N, int M, typename F>
__device__ __forceinline__ void solve_dplr(operand (&T)[4], const float (&S)[N][4],
                                           const operand (&s)[M], uint32_t tile, int pair, int end,
                                           F read)
{
    float W[8][4] = {};
    multiply_state(W, S, s, tile);
    read();
    products_wait<FORM == CAUSAL>(); /* for T, not yet for the read */
    products_in(W);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        T[j] = as_operand(W[2 * j], W[2 * j + 1]);
#pragma unroll
        for (int e = 0; e < 4; e++) T[j].of[0].x[e] ^= 0x80008000;
    }
    if (end < C) keep_before(T, pair, end);
}

/* A NaN or an infinity in v or in the state is in U now. Then the chunk is repeated without the
 * tokens from the first such one on, which becomes `end`: 0, if it is in the state, or if a second
 * time does not help. They become exact zeros, which change nothing in the tokens before. In the
 * noncausal form every token reads all, so there is no token to protect. With the additive rule U
 * does not show a state that is too large for the elements (in planes: too large for a rest, since
 * the rest of an infinity is a NaN; that is `large`). Such a chunk goes token by token. */
template <int KP, la_decay DECAY, la_rule RULE, form FORM, int L, int M>
__device__ __forceinline__ bool
must_repeat(int &end, const operand (&U)[4], const operand (&Ut)[4], const operand (&T)[L],
            const operand (&s)[M], bool large, bool reads, const int &nonfinite_at,
            const walk_place<KP, DECAY, RULE, FORM> &p, const unit &u, int t, int n)
{
    constexpr int HALVES = stage<KP, DECAY, RULE>::halves;
    bool nonfinite = end > 0 && (has_nonfinite(U) || (RULE == LA_DPLR && has_nonfinite(T)) ||
                                 (end == C && nonfinite_at < C));
    /* decays above one may make it too large */
    if (NARROW && DECAY == LA_TOKEN && end == C) nonfinite |= has_nonfinite(Ut);
    const bool state_too_large =
        (NARROW || PLANES == 2) && RULE == LA_ADDITIVE && reads && end == C &&
        in_either_half<HALVES>(__any_sync(~0u, large || (NARROW && has_nonfinite(s))), p.line);
    nonfinite |= state_too_large;
    if (__builtin_expect(!any_of_group(nonfinite), 1)) return false;
    products_wait<0>();
    if (__any_sync(~0u, nonfinite)) {
        int first = end < C ? 0 : nonfinite_at;
        if (end == C && p.columns > 0)
            first = min(first, first_nonfinite(p.c, u, t, n, p.v0, p.columns));
        if (state_too_large) first = C;
        end = first < C ? first : 0; /* 0: the state has it */
    }
    return true;
}

/* Go through the tokens from `end` on one by one, after the products of those before. after: the
 * state before the chunk, which becomes the one after it. */
template <int READ, int KP, la_decay DECAY, la_rule RULE, form FORM, int N>
__device__ __forceinline__ void
go_by_tokens(float (&O)[8][4], float (&S)[N][4], float (&after)[KP / 2], bool writes,
             const walk_place<KP, DECAY, RULE, FORM> &p, const unit &u, int t, int n, int end)
{
    float o[READ * 4];
#pragma unroll
    for (int m = 0; m < READ * 4; m++) o[m] = O[m / 4][m % 4];
    chunk_by_tokens<KP, DECAY, RULE>(p.c, u, t, n, end, p.v0, p.columns, after, o,
                                     p.half * READ * 8, READ * 8);
#pragma unroll
    for (int m = 0; m < READ * 4; m++) O[m / 4][m % 4] = o[m];
    if (writes)
#pragma unroll
        for (int j = 0; j < N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[j][e] = after[place_for_tokens((p.half * N + j) * 4 + e)];
}

/* A turn of the loop over chunks: it only fetches the first chunk, it works on a chunk, or it works
 * on the same one again. */
enum turn { FETCHES, WORKS, REPEATS };

template <int KP, la_decay DECAY, la_rule RULE, form FORM, typename = element>
__global__ void __launch_bounds__((MOST_WARPS + HAS_WARP_GROUPS * PRODUCERS) * 32, 1)
    chunks_forward(const __grid_constant__ call c, const __grid_constant__ chunks w,
                   const __grid_constant__ tensor_maps maps, const forward_flags f,
                   const segments g, int tiles)
{
    threads_below<(MOST_WARPS + HAS_WARP_GROUPS * PRODUCERS) * 32>();
    typedef stage<KP, DECAY, RULE> part;
    constexpr int HALVES = part::halves, KEYS = part::keys;
    extern __shared__ __align__(1024) char shared[];
    __shared__ stage_news news;
    const walk_place<KP, DECAY, RULE, FORM> p(c, w, maps, f, g, tiles, news, shared);
    const int lane = p.lane, half = p.half, line = p.line, columns = p.columns;
    const int first_chunk = p.first_chunk, last_chunk = p.last_chunk;
    const unit u = p.u; /* functions that are not inlined take its address */

    const int first_pass = FORM == NONCAUSAL ? 0 : 1;
#if HAS_WARP_GROUPS
    p.start_barriers();
    if (p.warp >= p.warps) {
        registers_down_to<PRODUCER_REGISTERS>();
        if (p.warp == p.warps && lane == 0) p.produce(first_pass);
        return;
    }
    registers_up_to<CONSUMER_REGISTERS>();
#endif

    /* the two tokens, or keys, of every eight that this thread has */
    const int pair = lane % 4 * 2;
    const float scale = (float)c.scale;
    /* the places where this lane reads 8 x 8 blocks of v, transposed, and writes those of o, in the
     * columns of its warp */
    const int slice = part::v + line / 4 * PANEL_BYTES +
                      piece_at(lane / 16 * 8 + lane % 8, line % 4 * 2 + lane / 8 % 2);
    const int o_piece =
        part::v + line / 4 * PANEL_BYTES + piece_at(lane / 2, line % 4 * 2 + lane % 2);
    const bool o_vectors = f.o_pieces && columns == 16;

    /* the first key of this warp, and its place in tiles of keys */
    const int first_key = half * KEYS, own = half * tile_bytes(KEYS);
    constexpr int READ = 8 / HALVES; /* how many times eight tokens of O this warp finishes */
    const int first_read = half * READ;
    partner other = {(float4 *)(shared + f.stages * p.bytes) + line * 32 + lane, line, p.width,
                     half};

    float S[KEYS / 8][4];
    first_state(S, p, g, first_key);

    int stage_at = 0, round = 0;
    int end = C; /* C, or when a chunk is repeated, the first token that the products leave out */
    for (int pass = first_pass; pass < 2; pass++) {
        const bool writes = FORM != NONCAUSAL || pass == 0;
        const bool reads = FORM == CAUSAL || (FORM == NONCAUSAL && pass == 1);
        /* The sum that all tokens read may be too large for the elements. Divided by a power of two
         * it is not. */
        float grow = 1;
        if (NARROW && FORM == NONCAUSAL && reads) grow = shrink_state<HALVES>(S, other);
        /* Without a producer the warps fetch. With two stages they are one chunk ahead, and the
         * first turn only fetches. So `fetch`, a sixth of the code, is in one place. There are at
         * most two stages here (chunk.cuh). */
        const bool ahead = !HAS_WARP_GROUPS && f.stages > 1;
        turn now = ahead ? FETCHES : WORKS;
        for (int i = first_chunk - ahead; i < last_chunk; i++) {
            char *room = shared + stage_at * p.bytes;
            const uint32_t base = address_of(room);
            const int t = u.begin + i * C, n = min(C, u.end - t);
#if HAS_WARP_GROUPS
            barrier_wait(address_of(news.full + stage_at), round);
            if (n < C && now != REPEATS) p.clear_tail(room, n);
#else
            if (now != REPEATS) {
                copies_wait<0>();
                __syncthreads(); /* chunk i is there, and every warp is done with chunk i - 1 */
                if (i + ahead < last_chunk)
                    p.fetch(i + ahead, ahead && now == WORKS ? stage_at ^ 1 : stage_at);
                if (now == FETCHES) {
                    now = WORKS;
                    continue;
                }
                if (!ahead) {
                    copies_wait<0>();
                    __syncthreads();
                }
                p.gate_values(room, t, n);
            }
#endif
            p.copy_values(room, t, n);
            const float *in = (const float *)(room + part::in);
            const float *out = (const float *)(room + part::out);
            const float *total = (const float *)(room + part::total);

            /* S' before the chunk. In planes there is no room for it beside S. */
            operand s[PLANES == 1 ? KEYS / 16 : 1];
            if constexpr (PLANES == 1)
#pragma unroll
                for (int j = 0; j < KEYS / 16; j++) s[j] = as_operand(S[2 * j], S[2 * j + 1]);
            bool large = false; /* for planes; other elements become infinities */
            if constexpr (PLANES == 2 && RULE == LA_ADDITIVE)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) large |= !(fabsf(S[j][e]) < TOO_LARGE_FOR_PLANES);

            /* U: V as it lies, or A (V - k^ S), as left operands over the tokens */
            operand U[4], Ut[4]; /* Ut: rows times the decay to the end of the chunk */
            p.load_values(U, room, slice, t, n);
            if (end < C) keep_before(U, pair, end);

            float O[8][4] = {};
            const auto read_state = [&] {
                if (reads) multiply_state(O, S, s, base + part::q + own);
            };
            operand T[RULE == LA_DPLR ? 4 : 1]; /* - X S */
            if constexpr (RULE == LA_DPLR) {
                static_assert(HALVES == 1 && PLANES == 1, "prepare_dplr has 64 keys");
                solve_dplr<FORM>(T, S, s, base + part::k + own, pair, end, read_state);
            }
            if constexpr (RULE == LA_DELTA)
                solve_delta<KP, DECAY, RULE, FORM>(U, Ut, S, s, other, room, base, own, p.rows,
                                                   pair, end, read_state);
            else if constexpr (PLANES == 1 && DECAY == LA_TOKEN)
                scale_rows(Ut, U, out, pair); /* nothing for DPLR: its decays lie in rows */
            if constexpr (DECAY != LA_TOKEN)
#pragma unroll
                for (int m = 0; m < 4; m++) Ut[m] = U[m];
            if (FORM != NONCAUSAL && must_repeat(end, U, Ut, T, s, large, reads,
                                                 news.nonfinite_at[stage_at], p, u, t, n)) {
                now = REPEATS;
                i--;
                continue;
            }

            float after[KP / 2]; /* the state, for chunks that go token by token */
            if (__builtin_expect(end < C, 0)) state_for_tokens<HALVES>(after, S, other, half);
            if (RULE == LA_ADDITIVE) read_state();
            /* the planes of S are no longer needed */
            if constexpr (RULE == LA_ADDITIVE && PLANES == 2 && DECAY == LA_TOKEN)
                scale_rows(Ut, U, out, pair);
            if constexpr (DECAY == LA_PAIR)
                decay_pair(S, total);
            else if (writes && DECAY != LA_NONE)
                decay_state<DECAY>(S, in, total, first_key, pair);
            if (writes) {
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_columns(S, Ut[j], base + p.rows.written + own, j * 16);
                if constexpr (RULE == LA_DPLR)
#pragma unroll
                    for (int j = 0; j < 4; j++) multiply_columns(S, T[j], base + part::y, j * 16);
                products_commit();
            }
            if (reads) {
                products_wait<FORM == CAUSAL>(); /* for q^ S, not yet for the state */
                products_in(O);
                /* otherwise q^ has all of it */
                if (!lies_in_rows<DECAY>) scale_read<DECAY>(O, in, grow * scale, pair);
                if (FORM != NONCAUSAL) { /* two warps sum over half of the tokens each */
                    if constexpr (HALVES == 2)
#pragma unroll
                        for (int j = 0; j < 2; j++)
#pragma unroll
                            for (int i = 0; i < PLANES * 4; i++)
                                U[j].of[i / 4].x[i % 4] =
                                    half ? U[2 + j].of[i / 4].x[i % 4] : U[j].of[i / 4].x[i % 4];
                    products_begin();
#pragma unroll
                    for (int j = 0; j < 4 / HALVES; j++)
                        multiply_rows(O, U[j], base + part::scores, half * 32 + j * 16, false,
                                      HALVES == 1 ? j : 0);
                    products_commit();
                }
            }
            products_wait<0>();
            products_in(O);
            products_in(S);
            if constexpr (HALVES == 2)
                if (reads) share_read<READ>(O, other, half);
            if (__builtin_expect(end < C, 0))
                go_by_tokens<READ>(O, S, after, writes, p, u, t, n, end);
            if (reads) {
                if (part::may_divide && w.den)
                    divide_read<READ>(O, (const float *)(room + part::den) + first_read * 8, pair);
                store_read<READ>(O, p, room, slice, o_piece, o_vectors, t, n, first_read);
            }
#if HAS_WARP_GROUPS
            stores_before_copies();
            warp_arrives(address_of(news.empty + stage_at));
#endif
            if (++stage_at == f.stages) stage_at = 0, round ^= 1;
            end = C;
            now = WORKS;
        }
        if (NARROW && FORM == NONCAUSAL && reads)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) S[j][e] *= grow;
    }

    if (FORM == SEGMENT_ENDS)
        store_end(S, p, g, tiles, first_key);
    else
        store_last_state(S, p, g, first_key);
}

#endif
