/* `prepare` for decays per key. See prepare.cuh, and key_decays.cuh for the products of tiles.
 *
 * A warp makes its block of 16 tokens of each tile, and a panel of keys. With one panel, warp w
 * also has rows 16 w to 16 w + 15 of P and of L. With more panels, warps 0 to 3 have those of P
 * and warps 4 to 7 those of L. */
#ifndef LINATTN_CUDA_PREPARE_KEY_CUH
#define LINATTN_CUDA_PREPARE_KEY_CUH

#include "key_decays.cuh"

/* The tiles of rows: q f, where P comes later; k h and k / f; and under the delta rule x f, or k f
 * without an x. `pairs` are those within slow blocks, of q and k, and of x and k. */
template <int KP, la_rule RULE> struct key_room {
    alignas(1024) char q[tile_bytes(KP)], k[tile_bytes(KP)], near[tile_bytes(KP)];
    pairs_of_block pairs[1][BLOCKS_OF_TOKENS];
    float bonus[KP], own[C]; /* BONUS, here additive: q . (bonus k) of each token */
    decays_of_chunk<KP> decays;
};
template <int KP> struct key_room<KP, LA_DELTA> {
    union {
        struct {
            alignas(1024) char q[tile_bytes(KP)], k[tile_bytes(KP)], near[tile_bytes(KP)],
                x[tile_bytes(KP)];
            pairs_of_block pairs[2][BLOCKS_OF_TOKENS];
        };
        struct { /* after the products of rows are in registers */
            alignas(16) float L[C * LD], room[4 * 32 * 12];
            alignas(1024) char tile[PANEL_BYTES]; /* -L, then A; for gradients -M */
        };
    };
    float beta[C];
    decays_of_chunk<KP> decays;
};

static_assert(PLANES == 2 || sizeof(key_room<128, LA_DELTA>) <= 99 << 10,
              "as sm_86, sm_89, sm_120");

/* q . (bonus k) of each token, by threads that are neighbours. The rows are as the recurrence sees
 * them. The state has no part in this, so a NaN here is no NaN of the chunk. */
template <int KP, typename room> __device__ __forceinline__ void find_own(room &s)
{
    constexpr int SHARE = key_threads<KP> / C; /* threads of a token */
    const int row = threadIdx.x / SHARE;
    float own = 0;
#pragma unroll 4
    for (int key = threadIdx.x % SHARE * 2; key < KP; key += 2 * SHARE) {
        const float2 q = get_pair(s.q + element_at(row, key));
        const float2 k = get_pair(s.k + element_at(row, key));
        const float2 bonus = *(const float2 *)(s.bonus + key);
        own += q.x * k.x * bonus.x + q.y * k.y * bonus.y;
    }
#pragma unroll
    for (int step = 1; step < SHARE; step *= 2) own += __shfl_xor_sync(~0u, own, step);
    if (threadIdx.x % SHARE == 0) s.own[row] = own;
}

/* The rows times their decays, in place. Here prepare leaves those that the state sees, those that
 * it takes, and the decay of the chunk. reads: the call reads q. early: the rows of q, under the
 * delta rule those of x, come before the decay of their token. Returns whether a number is too large
 * for the elements. */
template <int KP, la_rule RULE>
__device__ __forceinline__ bool scale_rows(key_room<KP, RULE> &s, const chunks &w, int place,
                                           const lane_decays &x, float scale, bool reads,
                                           bool has_x, bool early)
{
    constexpr bool delta = RULE == LA_DELTA;
    const int64_t keys = (int64_t)place * tile_bytes(KP);
    const float2 after = decays_between<KP>(s.decays, x.key, x.block + 1, BLOCKS_OF_TOKENS);
    const float2 before = decays_between<KP>(s.decays, x.key, 0, x.block);
    const float2 scaled = before * make_float2(scale, scale);
    bool large = false;
    if (!delta && early)
        large = scale_reads<true>(x, scaled, s.q, s.q, w.q + keys);
    else if (reads)
        large = scale_reads<false>(x, scaled, s.q, s.q, w.q + keys);
    if constexpr (delta) {
        const char *const from = has_x ? s.x : s.k;
        if (early)
            scale_reads<true>(x, before, from, s.x, w.k + keys);
        else
            scale_reads<false>(x, before, from, s.x, w.k + keys);
    }
    large |= scale_writes(x, after, {{s.k, s.near, w.kt + keys}});
    if (x.block == 0)
        *(float2 *)(w.total + (int64_t)place * KP + x.key) =
            after * *(const float2 *)&s.decays.t[x.key];
    return large;
}

/* Rows I of the products of x and k, `sums`, become those of L: strictly below the diagonal, times
 * beta. keeps: gradients follow, and s.tile gets them without beta, as -L. */
template <int KP>
__device__ __forceinline__ void put_lower(key_room<KP, LA_DELTA> &s, sums_of_blocks &sums, int I,
                                          int nonfinite, bool keeps)
{
    const int row = I * TOKENS_OF_BLOCK + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    if (keeps) clear_rows_above(s.tile, I);
#pragma unroll
    for (int back = 0; back < BLOCKS_OF_TOKENS; back++) {
        if (back > I) continue;
        const int first = (I - back) * TOKENS_OF_BLOCK;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            float &y = sums[back][e / 4][e % 4];
            const int here = row + e % 4 / 2 * 8, column = first + pair + e / 4 * 8 + e % 2;
            y = here < nonfinite && (back || column < here) ? -y : 0;
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int here = row + e % 2 * 8;
            const float2 y =
                make_float2(sums[back][e / 2][e % 2 * 2], sums[back][e / 2][e % 2 * 2 + 1]);
            const float beta = here < nonfinite ? -s.beta[here] : 0;
            *(float2 *)&s.L[here * LD + first + pair + e / 2 * 8] =
                make_float2(beta * y.x, beta * y.y);
        }
        if (keeps) store_block(s.tile, I * TOKENS_OF_BLOCK, first, sums[back]);
    }
}

/* Rows I of A = (I + L)^-1 diag(beta) as a tile. */
template <int KP>
__device__ __forceinline__ void put_inverse(key_room<KP, LA_DELTA> &s, int I, int nonfinite)
{
    const int row = I * TOKENS_OF_BLOCK + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    clear_rows_above(s.tile, I);
    for (int J = 0; J <= I; J++) {
        float A[2][4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = J * TOKENS_OF_BLOCK + pair + e / 2 * 8;
            float2 beta = *(const float2 *)(s.beta + column);
            if (column >= nonfinite) beta.x = 0;
            if (column + 1 >= nonfinite) beta.y = 0;
            const float2 y = *(const float2 *)&s.L[(row + e % 2 * 8) * LD + column] * beta;
            A[e / 2][e % 2 * 2] = y.x;
            A[e / 2][e % 2 * 2 + 1] = y.y;
        }
        store_block(s.tile, I * TOKENS_OF_BLOCK, J * TOKENS_OF_BLOCK, A);
    }
}

/* With a bonus q reads before the decay of its token, and the diagonal of P is q . (bonus k). Under
 * the delta rule x may look before that decay. */
template <int KP, la_rule RULE, typename = element>
__global__ void __launch_bounds__(key_threads<KP>, PLANES == 2 ? 1 : 512 / key_threads<KP>)
    prepare_key(const __grid_constant__ call c, const __grid_constant__ chunks w,
                const as_given given)
{
    threads_below<key_threads<KP>>();
    constexpr bool delta = RULE == LA_DELTA;
    constexpr int THREADS = key_threads<KP>, PANELS = KP / PANEL;
    extern __shared__ __align__(1024) char shared[];
    key_room<KP, RULE> &s = *(key_room<KP, RULE> *)shared;
    const own_chunk chunk = chunk_of_block(c);
    const unit &u = chunk.u;
    const int t = chunk.t, n = chunk.n, place = chunk.place;
    if (n <= 0) return;
    const float scale = (float)c.scale;
    const bool has_x = delta && c.x[LA_X].data;
    const bool bonus = !delta && c.x[LA_U].data;
    const bool early = bonus || (has_x && c.predicts_before); /* of q; under the delta rule of x */
    const bool reads = !delta || w.scores; /* else the call makes states alone */
    int found = C; /* the first row with a NaN or an infinity */

    if (threadIdx.x == 0) s.decays.nonfinite = C;
    if (reads) begin_to_load<KP, THREADS>(c, LA_Q, u.b, t, n, u.h, s.q, given.q);
    begin_to_load<KP, THREADS>(c, LA_K, u.b, t, n, u.h, s.k, given.k);
    if constexpr (delta) {
        if (has_x) begin_to_load<KP, THREADS>(c, LA_X, u.b, t, n, u.h, s.x, given.x);
        if (threadIdx.x < C) {
            const float beta =
                (int)threadIdx.x < n
                    ? load<float>(at(c.x[LA_BETA], u.b, t + threadIdx.x, u.hv), c.x[LA_BETA].dtype)
                    : 0;
            if (!isfinite(beta)) found = threadIdx.x;
            s.beta[threadIdx.x] = beta;
        }
    } else if (bonus && threadIdx.x < KP)
        s.bonus[threadIdx.x] = (int)threadIdx.x < c.K
                                   ? load<float>(at(c.x[LA_U], u.h, threadIdx.x), c.x[LA_U].dtype)
                                   : 0;
    copies_end_group();
    const int panel = threadIdx.x / 32 / BLOCKS_OF_TOKENS;
    lane_decays x = load_decays(c, u, t, n, panel);
    copies_wait<0>();
    found = min(found, share_decays<KP>(c, x, s.decays));
    if constexpr (delta)
        if (c.x_is_factor) {
            __syncthreads();
            multiply_tile<KP, THREADS>(s.x, s.k);
        }
    if constexpr (!delta)
        if (bonus) {
            __syncthreads();
            find_own<KP>(s);
        }
    __syncthreads();
    if (s.decays.has_slow())
#pragma unroll 1
        for (int which = !reads; which < 1 + delta; which++) {
            const char *rows = s.q;
            if constexpr (delta)
                if (which) rows = has_x ? s.x : s.k;
            multiply_pairs<KP>(x, s.decays.first_slow(x.block), rows, s.k, early && which == delta,
                               s.pairs[which][x.block]);
        }

    if (scale_rows(s, w, place, x, scale, reads, has_x, early)) found = 0;
    __syncthreads();

    /* Warps 0 to 3 have P. L follows, or is the others' part; the additive rule lets those have
     * half of P. */
    const int I = x.block;
    const bool scores = reads && panel == 0, others = panel == 1;
    constexpr int HALF = !delta && PANELS > 1 ? BLOCKS_OF_TOKENS / 2 : BLOCKS_OF_TOKENS;
    sums_of_blocks sums = {};
    if (scores) {
        multiply_blocks<KP, 0, HALF>(sums, s.q, s.k, s.near, s.decays, I);
        load_pairs(sums[0], s.decays.first_slow(I), s.pairs[0][I]);
        found = min(found, nonfinite_of_block(sums[0], I));
    }
    const auto multiply_x = [&](auto &s) {
        multiply_blocks<KP>(sums, s.x, s.k, s.near, s.decays, I);
        load_pairs(sums[0], s.decays.first_slow(I), s.pairs[1][I]);
        found = min(found, nonfinite_of_block(sums[0], I));
    };
    if (PANELS > 1 && others) {
        if constexpr (delta)
            multiply_x(s);
        else
            multiply_blocks<KP, HALF>(sums, s.q, s.k, s.near, s.decays, I);
    }
    int nonfinite = share_nonfinite(found, s.decays);

    const int row = I * TOKENS_OF_BLOCK + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
    int too_large_from = C; /* the first row with a score that is too large */
    if (scores || (!delta && others)) {
        if (scores) clear_rows_above(s.q, I);
#pragma unroll
        for (int back = 0; back < BLOCKS_OF_TOKENS; back++) {
            if (back > I || (back >= HALF) == scores) continue;
            const int first = (I - back) * TOKENS_OF_BLOCK;
#pragma unroll
            for (int e = 0; e < 8; e++) {
                float &y = sums[back][e / 4][e % 4];
                const int here = row + e % 4 / 2 * 8, column = first + pair + e / 4 * 8 + e % 2;
                const bool own = back == 0 && bonus && here == column;
                y *= scale;
                if constexpr (!delta)
                    if (own) y = s.own[here] * scale; /* a NaN here is no NaN of the chunk */
                if (here >= nonfinite || (back == 0 && column > here))
                    y = 0;
                else if (own ? too_large(y) : no_element(y))
                    too_large_from = min(too_large_from, here);
            }
            store_block(s.q, I * TOKENS_OF_BLOCK, first, sums[back]);
        }
        if (HALF == BLOCKS_OF_TOKENS) write_rows(w.scores + (int64_t)place * PANEL_BYTES, s.q, I);
    }
    if (HALF < BLOCKS_OF_TOKENS) {
        __syncthreads();
        write_tile<PANEL_BYTES, THREADS>(w.scores + (int64_t)place * PANEL_BYTES, s.q);
    }
    if constexpr (delta) {
        if (PANELS == 1) {
            clear(sums);
            multiply_x(s);
            nonfinite = share_nonfinite(found, s.decays);
        } else
            __syncthreads(); /* no warp reads rows any more, as behind share_nonfinite */
        const bool lower = w.lower, solves = PANELS == 1 || others;
        clear_pairs(s.L);
        if (solves) put_lower(s, sums, I, nonfinite, lower);
        if (lower && threadIdx.x < C)
            w.beta[(int64_t)place * C + threadIdx.x] = s.beta[threadIdx.x];
        __syncthreads();
        invert(s.L, s.room);
        if (lower) { /* gradients follow: - M */
            multiply_with_inverse(s.tile, s.L);
            __syncthreads();
            write_tile<PANEL_BYTES, THREADS>(w.lower + (int64_t)place * PANEL_BYTES, s.tile);
        } else if (panel == 0) {
            put_inverse(s, I, nonfinite);
            write_rows(w.inverse + (int64_t)place * PANEL_BYTES, s.tile, I);
        }
    }
    if (threadIdx.x == 0) w.nonfinite[place] = nonfinite;
    if (NARROW) {
        __syncthreads();
        if (too_large_from < C) atomicMin(w.nonfinite + place, too_large_from);
    }
}

#endif
