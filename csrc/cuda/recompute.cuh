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

#include "chunk_carry.cuh"

/* There are ADJOINT_STAGES stages. One has to do where there is no room for two: on devices without
 * the copy engine, and with more than 128 keys. */
enum { ADJOINT_STAGES = 2, ADJOINT_WARPS = 8, ADJOINT_PRODUCERS = 4 };

/* The results of both passes: tiles of C rows. */
struct kept {
    /* [chunk slots][HV][V / 64, rounded up] tiles of KP columns: S', dS' */
    char *states, *d_states;
    /* [chunk slots][HV][V / 64, rounded up] panels of C tokens; delta rules only */
    char *E, *Z;
};

struct backward_maps {
    CUtensorMap q, k, x, v, d_o;
    CUtensorMap dq, dk, dx; /* of the caller */
};

/* The warps that have the same columns. With more than 128 keys they are two, and each has half of
 * the keys. */
template <int KP> constexpr int adjoint_halves = KP > 128 ? 2 : 1;

/* A stage: where the parts of a chunk lie in shared memory. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD> struct adjoint_stage {
    static constexpr bool delta = RULE == LA_DELTA, dplr = RULE == LA_DPLR;
    /* otherwise k~ alone is used; DPLR: X */
    static constexpr bool has_k = delta || dplr || !lies_in_rows<DECAY>;
    static constexpr int k = 0, q = k + (has_k ? tile_bytes(KP) : 0);
    static constexpr int kt = q + (BACKWARD ? tile_bytes(KP) : 0);
    static constexpr int scores = kt + (lies_in_rows<DECAY> ? tile_bytes(KP) : 0);
    static constexpr int inverse = scores + (BACKWARD ? PANEL_BYTES : 0);
    static constexpr bool has_inverse = dplr && BACKWARD, has_lower = delta || (dplr && !BACKWARD);
    static constexpr int lower = inverse + (has_inverse ? PANEL_BYTES : 0);
    static constexpr int y = lower + (has_lower ? PANEL_BYTES : 0);
    static constexpr int scores_y = y + (dplr ? tile_bytes(KP) : 0);
    static constexpr int in = scores_y + (dplr && BACKWARD ? PANEL_BYTES : 0);
    static constexpr int out = in + (DECAY == LA_TOKEN ? C * 4 : 0);
    static constexpr int beta = out + (DECAY == LA_TOKEN ? C * 4 : 0);
    static constexpr int total = beta + (delta ? C * 4 : 0);
    static constexpr int v = (total + totals<KP, DECAY> * 4 + 1023) / 1024 * 1024;
    static constexpr int halves = adjoint_halves<KP>, keys = KP / halves; /* of a warp */
    /* A panel for every four slices of 16 columns: v or dO, and the results that leave by way of its
     * place. */
    __host__ __device__ static constexpr int bytes(int width, bool with_x)
    {
        return v + width / 4 * PANEL_BYTES + bytes_for_x<KP, DECAY>(with_x);
    }
};

/* For each of the two columns of this thread: one past the last token with a NaN or an infinity. */
__device__ __forceinline__ void spoiled_up_to(const left (&x)[4], int (&end)[2])
{
    end[0] = end[1] = 0;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int t = m * 16 + e / 2 * 8 + threadIdx.x % 4 * 2;
            if ((x[m].x[e] & 0x7f80) == 0x7f80) end[e % 2] = max(end[e % 2], t + 1);
            if ((x[m].x[e] & 0x7f800000) == 0x7f800000) end[e % 2] = max(end[e % 2], t + 2);
        }
#pragma unroll
    for (int w = 0; w < 2; w++) {
        end[w] = max(end[w], __shfl_xor_sync(~0u, end[w], 1));
        end[w] = max(end[w], __shfl_xor_sync(~0u, end[w], 2));
    }
}

/* Set the tokens before `end` to zero. */
__device__ __forceinline__ void clear_before(left (&x)[4], const int (&end)[2])
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int t = m * 16 + e / 2 * 8 + threadIdx.x % 4 * 2;
            if (t < end[e % 2]) x[m].x[e] &= t + 1 < end[e % 2] ? 0 : 0xffff0000;
        }
}

__device__ __forceinline__ void spoil_before(float (&x)[8][4], const int (&end)[2])
{
#pragma unroll
    for (int m = 0; m < 8; m++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (m * 8 + threadIdx.x % 4 * 2 + e % 2 < end[e / 2]) x[m][e] = nanf("");
}

/* x [16 columns][64 tokens] as operands over the tokens, each token times its numbers in `by` and
 * `also` (NULL: one). */
__device__ __forceinline__ void as_operands(left (&to)[4], const float (&x)[8][4], const float *by,
                                            float factor, const float *also = NULL)
{
#pragma unroll
    for (int m = 0; m < 8; m++) {
        float2 a = by ? *(const float2 *)(by + m * 8 + threadIdx.x % 4 * 2) : make_float2(1, 1);
        if (also) {
            const float2 b = *(const float2 *)(also + m * 8 + threadIdx.x % 4 * 2);
            a = make_float2(a.x * b.x, a.y * b.y);
        }
        to[m / 2].x[m % 2 * 2] = pack(factor * a.x * x[m][0], factor * a.y * x[m][1]);
        to[m / 2].x[m % 2 * 2 + 1] = pack(factor * a.x * x[m][2], factor * a.y * x[m][3]);
    }
}

/* The same for operands. */
__device__ __forceinline__ void scale_operands(left (&x)[4], const float *by, float factor)
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 a = by ? *(const float2 *)(by + m * 16 + e / 2 * 8 + threadIdx.x % 4 * 2)
                                : make_float2(1, 1);
            const float2 y = unpack(x[m].x[e]);
            x[m].x[e] = pack(factor * a.x * y.x, factor * a.y * y.y);
        }
}

/* Store x' of the 16 columns of a warp, by way of its 16 columns of a panel at `slice`. */
__device__ __forceinline__ void put_columns(uint32_t slice, const float (&x)[8][4])
{
#pragma unroll
    for (int m = 0; m < 8; m += 2) {
        const uint32_t y[4] = {pack(x[m][0], x[m][1]), pack(x[m][2], x[m][3]),
                               pack(x[m + 1][0], x[m + 1][1]), pack(x[m + 1][2], x[m + 1][3])};
        store_matrices_transposed(slice + m * 8 * 128, y);
    }
    __syncwarp();
}

/* The rows of a warp in a panel. */
enum { BYTES_OF_ROWS = 16 * PANEL * 2 };

#if HAS_WARP_GROUPS
/* Store S', which already is operands, as 16 rows of a tile whose rows are value columns; `row` is
 * the first. They leave by way of `staged`, which is the warp's own. */
template <int KP>
__device__ __forceinline__ void send_state(char *tile, int row, uint32_t staged,
                                           const left (&s)[KP / 16])
{
    const int lane = threadIdx.x % 32;
    if (lane == 0) engine_has_read<0>(); /* the state that lay here has left */
    __syncwarp();
    const uint32_t to = lane_with_columns(staged);
#pragma unroll
    for (int j = 0; j < KP / 16; j++)
        store_matrices((to ^ (j % 4 << 5)) + j / 4 * BYTES_OF_ROWS, s[j].x);
    stores_before_copies();
    __syncwarp();
    if (lane == 0)
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++)
            engine_copy_back(tile + j * PANEL_BYTES + row * 128, staged + j * BYTES_OF_ROWS,
                             BYTES_OF_ROWS);
}
#endif

/* Store S', which already is operands, as a tile whose rows are value columns. `row` is the first
 * row of this warp. */
template <int KP>
__device__ __forceinline__ void put_state(char *tile, int row, const left (&s)[KP / 16])
{
    const int lane = threadIdx.x % 32;
    /* the first piece of the row */
    char *const own = tile + element_at(row + lane / 4, lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < KP / 8; i++) {
        char *to = (char *)((uintptr_t)own ^ (i % 8 << 4)) + i / 8 * PANEL_BYTES;
        *(uint32_t *)to = s[i / 2].x[i % 2 * 2];
        *(uint32_t *)(to + 8 * 128) = s[i / 2].x[i % 2 * 2 + 1];
    }
}

template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD>
__device__ __forceinline__ void
chunks_for_adjoint(const call &c, const gradients &d, const chunks &w, const backward_maps &maps,
                   const kept &f, int tiles, int stages, int staged, int index)
{
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    constexpr bool delta = RULE == LA_DELTA, dplr = RULE == LA_DPLR;
    constexpr int HALVES = part::halves, KEYS = part::keys;
    extern __shared__ __align__(1024) char shared[];
    const int warps = blockDim.x / 32 - HAS_WARP_GROUPS * ADJOINT_PRODUCERS,
              warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int width = warps / HALVES, half = HALVES == 2 && warp >= width,
              line = warp - half * width;
    const int tile = index % tiles, head = index / tiles;
    const unit u = unit_of(c, head / c.HV, head % c.HV);
    const int panels = (c.V + PANEL - 1) / PANEL, panel = tile * (width / 4) + line / 4;
    const int v0 = panel * PANEL + line % 4 * 16, columns = min(16, c.V - v0);
    const int own_panels = min(width / 4, panels - tile * (width / 4));
    const int all_chunks = (u.end - u.begin + C - 1) / C;
    const int chunk_slot0 = first_chunk_slot(c, u.n);
    const key_rows rows = key_rows_of<part, KP, DECAY, RULE>(c, w, width);
    const int bytes = rows.bytes;
    const auto chunk_at = [&](int i) { return BACKWARD ? all_chunks - 1 - i : i; };

    __shared__ int nonfinite_at[ADJOINT_STAGES]; /* w.nonfinite of the chunk */
#if HAS_WARP_GROUPS
    __shared__ uint64_t full[ADJOINT_STAGES], empty[ADJOINT_STAGES];
#endif
    /* Fetch the chunk of a step into a stage: one thread asks the copy engine, or all threads
     * copy. */
    const auto fetch = [&](int step, int into) {
        const int i = chunk_at(step), t = u.begin + i * C;
        const int64_t place = (int64_t)(chunk_slot0 + i) * c.HV + u.hv;
        const int64_t keys =
            ((int64_t)(chunk_slot0 + i) * w.heads + (w.heads == c.HV ? u.hv : u.h)) *
            tile_bytes(KP);
        const uint32_t base = address_of(shared + into * bytes);
        const struct {
            int offset;
            const void *from;
            int bytes;
        } pieces[] = {
            {part::k, part::has_k && rows.seen ? rows.seen + keys : NULL, tile_bytes(KP)},
            {rows.written, rows.has_x && w.k ? w.k + keys : NULL, tile_bytes(KP)},
            {rows.look, rows.has_x && w.look ? w.look + place * C : NULL, C * 4},
            {part::q, BACKWARD && w.q ? w.q + keys : NULL, tile_bytes(KP)},
            {part::kt, lies_in_rows<DECAY> ? w.kt + place * tile_bytes(KP) : NULL, tile_bytes(KP)},
            {part::scores, BACKWARD ? w.scores + place * PANEL_BYTES : NULL, PANEL_BYTES},
            {part::inverse, part::has_inverse ? w.inverse + place * PANEL_BYTES : NULL,
             PANEL_BYTES},
            {part::lower, part::has_lower ? w.lower + place * PANEL_BYTES : NULL, PANEL_BYTES},
            {part::y, dplr ? w.y + place * tile_bytes(KP) : NULL, tile_bytes(KP)},
            {part::scores_y, dplr && BACKWARD ? w.scores_y + place * PANEL_BYTES : NULL,
             PANEL_BYTES},
            {part::in, DECAY == LA_TOKEN ? w.in + place * C : NULL, C * 4},
            {part::out, DECAY == LA_TOKEN ? w.out + place * C : NULL, C * 4},
            {part::beta, delta ? w.beta + place * C : NULL, C * 4},
            {part::total, lies_in_rows<DECAY> ? w.total + place * totals<KP, DECAY> : NULL,
             totals<KP, DECAY> * 4},
        };
        /* the first value column of the block */
        const int column = tile * (width / 4) * PANEL;
#if HAS_WARP_GROUPS
        const uint32_t barrier = address_of(full + into);
        const int nonfinite = w.nonfinite[place];
        int expected = (part::has_k && !rows.seen ? tile_bytes(KP) : 0) +
                       (rows.has_x && !w.k ? tile_bytes(KP) : 0) +
                       (BACKWARD && !w.q ? tile_bytes(KP) : 0) + own_panels * PANEL_BYTES;
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) {
                expected += x.bytes;
                engine_copy(base + x.offset, x.from, x.bytes, barrier);
            }
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++) {
            if (part::has_k && !rows.seen)
                engine_copy_box(base + part::k + j * PANEL_BYTES, rows.has_x ? &maps.x : &maps.k,
                                j * PANEL, u.h, t, u.b, barrier);
            if (rows.has_x && !w.k)
                engine_copy_box(base + rows.written + j * PANEL_BYTES, &maps.k, j * PANEL, u.h, t,
                                u.b, barrier);
            if (BACKWARD && !w.q)
                engine_copy_box(base + part::q + j * PANEL_BYTES, &maps.q, j * PANEL, u.h, t, u.b,
                                barrier);
        }
        for (int j = 0; j < own_panels; j++)
            engine_copy_box(base + part::v + j * PANEL_BYTES, BACKWARD ? &maps.d_o : &maps.v,
                            column + j * PANEL, u.hv, t, u.b, barrier);
        nonfinite_at[into] = nonfinite;
        barrier_expect(barrier, expected);
#else
        const int n = min(C, u.end - t);
        if (part::has_k && !rows.seen)
            copy_rows<KP>(c.x[rows.has_x ? LA_X : LA_K], c.K, u.b, t, n, u.h, base + part::k);
        if (rows.has_x && !w.k) copy_rows<KP>(c.x[LA_K], c.K, u.b, t, n, u.h, base + rows.written);
        if (BACKWARD && !w.q) copy_rows<KP>(c.x[LA_Q], c.K, u.b, t, n, u.h, base + part::q);
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) copy_bytes(base + x.offset, (const char *)x.from, x.bytes);
        for (int j = 0; j < own_panels; j++)
            copy_rows<PANEL>(BACKWARD ? d[LA_DO] : c.x[LA_V], c.V, u.b, t, n, u.hv,
                             base + part::v + j * PANEL_BYTES, column + j * PANEL);
        if (threadIdx.x == 0) nonfinite_at[into] = w.nonfinite[place];
        copies_end_group();
#endif
    };
#if HAS_WARP_GROUPS
    if (threadIdx.x == 0) {
        for (int j = 0; j < stages; j++) {
            barrier_init(address_of(full + j), 1);
            barrier_init(address_of(empty + j), warps * ARRIVALS_OF_WARP);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warp >= warps) {
        registers_down_to<40>();
        if (warp > warps || lane > 0) return;
        int into = 0, round = 0;
        for (int step = 0; step < all_chunks; step++) {
            barrier_wait(address_of(empty + into), round ^ 1); /* returns at once the first time */
            fetch(step, into);
            if (++into == stages) into = 0, round ^= 1;
        }
        return;
    }
    registers_up_to<232>();
#else
    if (all_chunks > 0) fetch(0, 0);
#endif

    /* the two tokens, or keys, of every eight that this thread has */
    const int pair = lane % 4 * 2;
    const float scale = (float)c.scale;
    /* the first key of this warp, and its place in tiles of keys */
    const int first_key = half * KEYS, own = half * tile_bytes(KEYS);
    partner other = {(float4 *)(shared + stages * bytes) + line * 32 + lane, line, width, half};
    /* x of this warp becomes the sum over all keys */
    const auto sum_over_keys = [&](float (&x)[8][4]) {
        if constexpr (HALVES == 2) {
            float theirs[8][4];
#pragma unroll
            for (int m = 0; m < 8 * 4; m++) theirs[m / 4][m % 4] = x[m / 4][m % 4];
            other.exchange(theirs);
#pragma unroll
            for (int m = 0; m < 8 * 4; m++) x[m / 4][m % 4] += theirs[m / 4][m % 4];
        }
    };

    /* S' or dS' [16 columns][KEYS]: a thread has columns lane / 4 and + 8, keys 8 i + pair and + 1 */
    float S[KEYS / 8][4];
    const view &from = BACKWARD ? d[LA_DST] : c.x[LA_S0];
    const view &from_Y = BACKWARD ? d[LA_DYT] : c.x[LA_Y0];
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = lane / 4 + e / 2 * 8, row = first_key + i * 8 + pair + e % 2;
            const view &x = state_of_row<DECAY>(from, from_Y, row);
            const int key = key_of_row<DECAY>(row);
            S[i][e] = x.data && column < columns && key < c.K
                          ? load<float>(at(x, u.n, u.hv, key, v0 + column), x.dtype)
                          : 0;
        }

    int stage_at = 0, round = 0;
    for (int step = 0; step < all_chunks; step++) {
        int thread = threadIdx.x;
        /* Asked for anew in each chunk: what follows from it would take registers from the sums. */
        if (DECAY == LA_TOKEN) asm volatile("" : "+r"(thread));
        const int warp = thread / 32, lane = thread % 32, line = warp - half * width,
                  pair = lane % 4 * 2;
        const int place_of_v = part::v + line / 4 * PANEL_BYTES;
        const int slice =
            place_of_v + piece_at(lane / 16 * 8 + lane % 8, line % 4 * 2 + lane / 8 % 2);
        const int piece = place_of_v + piece_at(lane / 2, line % 4 * 2 + lane % 2);
        char *room = shared + stage_at * bytes;
        const uint32_t base = address_of(room);
        const int i = chunk_at(step), t = u.begin + i * C, n = min(C, u.end - t);
        const int64_t place = (int64_t)(chunk_slot0 + i) * c.HV + u.hv;
#if HAS_WARP_GROUPS
        barrier_wait(address_of(full + stage_at), round);
        if (n < C) { /* a box may reach into the next sequence, whose NaN must not come along */
            for (int j = threadIdx.x; j < (C - n) * KP / 8; j += warps * 32) {
                const int at = piece_at(n + j / (KP / 8), j % (KP / 8));
                if (part::has_k && !rows.seen)
                    *(uint4 *)(room + part::k + at) = make_uint4(0, 0, 0, 0);
                if (rows.has_x && !w.k)
                    *(uint4 *)(room + rows.written + at) = make_uint4(0, 0, 0, 0);
                if (BACKWARD && !w.q) *(uint4 *)(room + part::q + at) = make_uint4(0, 0, 0, 0);
            }
            for (int j = lane; j < (C - n) * 2; j += 32)
                *(uint4 *)(room + place_of_v + piece_at(n + j / 2, line % 4 * 2 + j % 2)) =
                    make_uint4(0, 0, 0, 0);
            stores_before_copies();
            some_warps_wait(warps);
        }
#else
        copies_wait<0>();
        __syncthreads(); /* the chunk is there, and every warp is done with the one before */
        if (stages > 1 && step + 1 < all_chunks) fetch(step + 1, stage_at ^ 1);
#endif
        const float *in = (const float *)(room + part::in),
                    *out = (const float *)(room + part::out),
                    *of_look = (const float *)(room + rows.look),
                    *of_beta = (const float *)(room + part::beta);
        /* the whole chunk is spoiled, and all that depends on it */
        const bool nonfinite = nonfinite_at[stage_at] < C;

        left s[KEYS / 16];
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) s[j] = as_left(S[2 * j], S[2 * j + 1]);
        /* the state as the adjoint of the chunk needs it */
        const auto keep_state = [&] {
            if (v0 >= panels * PANEL) return;
            char *const to = (BACKWARD ? f.d_states : f.states) +
                             (place * panels + panel) * tile_bytes(KP) + own;
#if HAS_WARP_GROUPS
            if (staged) {
                send_state<KEYS>(
                    to, line % 4 * 16,
                    address_of(shared) + staged + warp * (KEYS / PANEL * BYTES_OF_ROWS), s);
                return;
            }
#endif
            put_state<KEYS>(to, line % 4 * 16, s);
        };
        left x[4]; /* V or dO, as operands over the tokens */
#pragma unroll
        for (int m = 0; m < 4; m++) load_matrices_transposed(x[m].x, base + slice + m * 16 * 128);
        if (columns <= 0)
#pragma unroll
            for (int m = 0; m < 4; m++) x[m] = {};
        const auto decay_state = [&] {
            const float *const by = (const float *)(room + part::total);
            if constexpr (DECAY == LA_PAIR && BACKWARD)
                undecay_pair(S, by);
            else if constexpr (DECAY == LA_PAIR)
                decay_pair(S, by);
            else if constexpr (DECAY != LA_NONE) {
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++) {
                    const float2 a = DECAY == LA_KEY
                                         ? *(const float2 *)(by + first_key + j * 8 + pair)
                                         : make_float2(in[C - 1], in[C - 1]);
                    S[j][0] *= a.x;
                    S[j][1] *= a.y;
                    S[j][2] *= a.x;
                    S[j][3] *= a.y;
                }
            }
        };

        if constexpr (!BACKWARD) {
            float E[8][4] = {};
            keep_state();
            const auto keep_E = [&] {
                if (nonfinite) {
                    const int all[2] = {C, C};
                    spoil_before(E, all);
                }
                if (half == 0 && v0 < panels * PANEL) {
                    put_columns(base + slice, E);
                    char *to = f.E + (place * panels + panel) * PANEL_BYTES +
                               piece_at(lane / 2, line % 4 * 2 + lane % 2);
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        *(uint4 *)(to + j * 16 * 128) =
                            *(const uint4 *)(room + piece + j * 16 * 128);
                }
            };
            if constexpr (dplr) { /* T = X S, p = T + M V, S <- diag(a) S - y~' T + K' V */
                products_begin();
#pragma unroll
                for (int j = 0; j < KEYS / 16; j++) multiply_rows(E, s[j], base + part::k, j * 16);
                products_commit();
                products_wait<0>();
                products_in(E);
                left T[4];
                as_operands(T, E, NULL, -1);
                decay_state();
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_rows(E, x[j], base + part::lower, j * 16);
                products_commit();
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(S, T[j], base + part::y, j * 16);
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(S, x[j], base + rows.written, j * 16);
                products_commit();
                products_wait<1>();
                products_in(E);
#pragma unroll
                for (int m = 0; m < 8 * 4; m++) E[m / 4][m % 4] = -E[m / 4][m % 4];
                keep_E();
                products_wait<0>();
                products_in(S);
            } else if constexpr (delta) {
                products_begin();
#pragma unroll
                for (int j = 0; j < KEYS / 16; j++)
                    multiply_rows(E, s[j], base + part::k + own, j * 16);
                products_commit();
                products_wait<0>();
                products_in(E);
                sum_over_keys(E);
#pragma unroll
                for (int m = 0; m < 8; m++) { /* W */
                    const float2 a = DECAY == LA_TOKEN ? *(const float2 *)(of_look + m * 8 + pair)
                                                       : make_float2(1, 1);
                    const float2 top = unpack(x[m / 2].x[m % 2 * 2]);
                    const float2 low = unpack(x[m / 2].x[m % 2 * 2 + 1]);
                    E[m][0] = top.x - a.x * E[m][0];
                    E[m][1] = top.y - a.y * E[m][1];
                    E[m][2] = low.x - a.x * E[m][2];
                    E[m][3] = low.y - a.y * E[m][3];
                }
                as_operands(x, E, of_beta, 1);
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_rows(E, x[j], base + part::lower, j * 16);
                products_commit();
                decay_state();
                products_wait<0>();
                products_in(E);
                left U[4];
                as_operands(U, E, DECAY == LA_TOKEN ? out : NULL, 1, of_beta);
                products_in(S);
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_columns(S, U[j], base + rows.written + own, j * 16);
                products_commit();
                keep_E();
                products_wait<0>();
                products_in(S);
            } else {
                if (DECAY == LA_TOKEN) scale_operands(x, out, 1);
                decay_state();
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_columns(S, x[j], base + rows.written + own, j * 16);
                products_commit();
                products_wait<0>();
                products_in(S);
            }
        } else {
            int end[2] = {};
            spoiled_up_to(x, end);
            if (nonfinite) end[0] = end[1] = C;
            const bool spoiled = __any_sync(~0u, end[0] | end[1]);
            if (spoiled) clear_before(x, end);
            /* was O = P U, S' = .. + (r k)' U: r multiplies only the second product, whose sum over
             * keys may be that of two warps */
            constexpr bool apart = DECAY == LA_TOKEN || HALVES == 2;
            float dU[8][4] = {}, of_read[apart ? 8 : 1][4] = {};
            products_begin();
#pragma unroll
            for (int j = 0; j < KEYS / 16; j++)
                multiply_rows(dU, s[j], base + rows.written + own, j * 16);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if constexpr (apart)
                    multiply_columns(of_read, x[j], base + part::scores, j * 16);
                else
                    multiply_columns(dU, x[j], base + part::scores, j * 16);
            products_commit();
            keep_state();
            decay_state();
            products_wait<0>();
            products_in(dU);
            products_in(of_read);
            sum_over_keys(dU);
            const auto keep_Z = [&](const float (&Z)[8][4]) {
                if (half || v0 >= panels * PANEL) return;
                put_columns(base + slice, Z);
                char *to = f.Z + (place * panels + panel) * PANEL_BYTES +
                           piece_at(lane / 2, line % 4 * 2 + lane % 2);
#pragma unroll
                for (int j = 0; j < 4; j++)
                    *(uint4 *)(to + j * 16 * 128) = *(const uint4 *)(room + piece + j * 16 * 128);
                __syncwarp();
            };
            /* dO times the scale and the decay from the start of the chunk, unless q^ has them */
            if (!lies_in_rows<DECAY>) scale_operands(x, DECAY == LA_TOKEN ? in : NULL, scale);
            if constexpr (apart)
#pragma unroll
                for (int m = 0; m < 8; m++) {
                    const float2 a = DECAY == LA_TOKEN ? *(const float2 *)(out + m * 8 + pair)
                                                       : make_float2(1, 1);
                    dU[m][0] = a.x * dU[m][0] + of_read[m][0];
                    dU[m][1] = a.y * dU[m][1] + of_read[m][1];
                    dU[m][2] = a.x * dU[m][2] + of_read[m][2];
                    dU[m][3] = a.y * dU[m][3] + of_read[m][3];
                }
            float dV[8][4];
            if constexpr (dplr) {
                /* was p = A (x^ S + (x k) V), of which o takes P_y p and S takes y~' p. Z is the
                 * gradient of the parentheses, times -1. W: y~ dS + P_y' dO; dT here times -1 */
                float W[8][4] = {}, Z[8][4] = {};
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_columns(W, x[j], base + part::scores_y, j * 16);
                products_commit();
                products_wait<0>();
                products_in(W);
#pragma unroll
                for (int m = 0; m < 8 * 4; m++) W[m / 4][m % 4] *= scale;
                float dT[8][4] = {};
                products_begin();
#pragma unroll
                for (int j = 0; j < KEYS / 16; j++) multiply_rows(dT, s[j], base + part::y, j * 16);
                products_commit();
                products_wait<0>();
                products_in(dT);
#pragma unroll
                for (int m = 0; m < 8 * 4; m++) W[m / 4][m % 4] += dT[m / 4][m % 4];
                left y[4], z[4];
                as_operands(y, W, NULL, 1);
                as_operands(z, dT, NULL, -1);
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(Z, y[j], base + part::inverse, j * 16);
                products_commit();
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(S, x[j], base + part::q, j * 16);
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(S, z[j], base + part::k, j * 16);
                products_commit();
                products_wait<1>();
                products_in(Z);
                if (spoiled) {
                    spoil_before(Z, end);
                    spoil_before(dU, end);
                }
                keep_Z(Z);
#pragma unroll
                for (int m = 0; m < 8 * 4; m++) dV[m / 4][m % 4] = dU[m / 4][m % 4];
            } else if constexpr (delta) {
                left y[4], z[4];
                as_operands(y, dU, of_beta, 1);
                products_begin(); /* dU becomes Z */
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(dU, y[j], base + part::lower, j * 16);
                products_commit();
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(S, x[j], base + part::q + own, j * 16);
                products_commit();
                products_wait<1>();
                products_in(dU);
                as_operands(z, dU, DECAY == LA_TOKEN ? of_look : NULL, -1, of_beta);
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(S, z[j], base + part::k + own, j * 16);
                products_commit();
                if (spoiled) spoil_before(dU, end);
                keep_Z(dU);
#pragma unroll
                for (int m = 0; m < 8; m++) {
                    const float2 b = *(const float2 *)(of_beta + m * 8 + pair);
                    dV[m][0] = b.x * dU[m][0];
                    dV[m][1] = b.y * dU[m][1];
                    dV[m][2] = b.x * dU[m][2];
                    dV[m][3] = b.y * dU[m][3];
                }
            } else {
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(S, x[j], base + part::q + own, j * 16);
                products_commit();
                if (spoiled) spoil_before(dU, end);
#pragma unroll
                for (int m = 0; m < 8 * 4; m++) dV[m / 4][m % 4] = dU[m / 4][m % 4];
            }
            if (half == 0 && columns > 0) {
                put_columns(base + slice, dV);
                char *to = at(d[LA_DV], u.b, t + lane / 2, u.hv, v0 + lane % 2 * 8);
                const int64_t row = d[LA_DV].stride[1] * 2;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (j * 16 + lane / 2 < n && lane % 2 * 8 < columns)
                        *(uint4 *)(to + j * 16 * row) =
                            *(const uint4 *)(room + piece + j * 16 * 128);
            }
            products_wait<0>();
            products_in(S);
            if (spoiled)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (end[e / 2]) S[j][e] = nanf("");
        }
        if constexpr (!BACKWARD)
            if (nonfinite)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) S[j][e] = nanf("");
#if HAS_WARP_GROUPS
        stores_before_copies();
        warp_arrives(address_of(empty + stage_at));
#else
        if (stages == 1) {
            __syncthreads(); /* every warp is done with the only stage */
            if (step + 1 < all_chunks) fetch(step + 1, 0);
        }
#endif
        if (++stage_at == stages) stage_at = 0, round ^= 1;
    }
#if HAS_WARP_GROUPS
    engine_has_read<0>();
#endif
    if constexpr (BACKWARD)
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int column = lane / 4 + e / 2 * 8, row = first_key + i * 8 + pair + e % 2;
                const view &to = state_of_row<DECAY>(d[LA_DS0], d[LA_DY0], row);
                const int key = key_of_row<DECAY>(row);
                if (to.data && column < columns && key < c.K)
                    store(at(to, u.n, u.hv, key, v0 + column), to.dtype, S[i][e]);
            }
}

/* Neither pass needs the results of the other, so they run side by side. The backward pass takes
 * longer and has the first half of the blocks. staged: from here on states lie in shared memory on
 * their way to the copy engine; 0: there is no room for them. */
template <int KP, la_decay DECAY, la_rule RULE>
__global__ void __launch_bounds__((ADJOINT_WARPS + HAS_WARP_GROUPS * ADJOINT_PRODUCERS) * 32, 1)
    chunks_both_ways(const __grid_constant__ call c, const __grid_constant__ gradients d,
                     const __grid_constant__ chunks w, const __grid_constant__ backward_maps maps,
                     const __grid_constant__ kept f, int tiles, int stages, int staged)
{
    const int half = gridDim.x / 2, index = blockIdx.x % half;
    if (HAS_WARP_GROUPS && KP <= 128) stages = ADJOINT_STAGES;
    if (blockIdx.x < half)
        chunks_for_adjoint<KP, DECAY, RULE, true>(c, d, w, maps, f, tiles, stages, staged, index);
    else
        chunks_for_adjoint<KP, DECAY, RULE, false>(c, d, w, maps, f, tiles, stages, staged, index);
}

#endif
