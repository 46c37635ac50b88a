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

#include "walk_parts.cuh"

/* Registers are given to four warps at once. The producer comes with three idle warps, and leaves
 * most of its registers to the consumers. 65536 = 128 (40 + 2 * 232), less 1024. */
enum {
    MOST_STAGES = 3,
    MOST_WARPS = 8,
    PRODUCERS = 4,
    PRODUCER_REGISTERS = 40,
    CONSUMER_REGISTERS = 232
};

/* After the stages: the numbers that two warps exchange, 32 per lane in each of two rooms. */
__host__ __device__ constexpr int bytes_exchanged(int halves, int width)
{
    return halves == 1 ? 0 : 2 * width * 32 * 32 * 4;
}

/* A stage: where the parts of a chunk lie in shared memory. */
template <int KP, la_decay DECAY, la_rule RULE> struct stage {
    static constexpr int halves = KP > 128 ? 2 : 1, keys = KP / halves; /* of a warp */
    /* otherwise k~ alone is used */
    static constexpr bool has_k = la_predicts(RULE) || !lies_in_rows<DECAY>;
    static constexpr int k = 0, q = k + (has_k ? tile_bytes(KP) : 0), kt = q + tile_bytes(KP);
    static constexpr int scores = kt + (lies_in_rows<DECAY> ? tile_bytes(KP) : 0);
    static constexpr int inverse = scores + PANEL_BYTES, y = inverse; /* DELTA, DPLR */
    static constexpr int in = inverse + (RULE == LA_DELTA  ? PANEL_BYTES
                                         : RULE == LA_DPLR ? tile_bytes(KP)
                                                           : 0);
    static constexpr int den = in; /* ops with a normaliser have no decay */
    static constexpr bool may_divide = DECAY == LA_NONE && RULE == LA_ADDITIVE;
    static constexpr int out = in + (DECAY == LA_TOKEN || may_divide ? C * 4 : 0);
    static constexpr int total = out + (DECAY == LA_TOKEN ? C * 4 : 0);
    static constexpr int v = (total + totals<KP, DECAY> * 4 + 1023) / 1024 * 1024;
    /* v: a panel for every four slices of 16 columns. o leaves by way of the same place, unless in
     * planes. w: the same for its gates, behind the v of the widest block. */
    static constexpr int w = v + (MOST_WARPS / halves + 3) / 4 * PANEL_BYTES;
    __host__ __device__ static constexpr int bytes(int width, bool with_x, bool with_w = false)
    {
        return (with_w ? w : v) + (width + 3) / 4 * PANEL_BYTES + bytes_for_x<KP, DECAY>(with_x);
    }
    __host__ __device__ static constexpr int exchanged(int width)
    {
        return bytes_exchanged(halves, width);
    }
};

struct forward_flags {
    /* rows of v, and of its gates if there are any, can be fetched in pieces of 16 bytes; rows of o
     * can be stored so (not in planes) */
    bool v_pieces, o_pieces;
    int stages, stage_bytes;
};

/* A sequence in `count` segments, which are worked on side by side when there are few heads
 * (docs/math.md: the segment map). A segment maps the state before it as S -> M S + X, so there are
 * three launches. SEGMENT_ENDS goes through every segment from a state of zero, which ends as X.
 * For the delta rule it also starts from the columns of the identity with v = 0, which end as those
 * of M. `join_decays` or `join_maps` goes along the segments. CAUSAL goes through each segment again,
 * from its true state. */
struct segments {
    int count;
    bool from_start; /* the end of the first segment is its true state, so it needs no M */
    float *ends;     /* [N * HV][count][16 (slices + key slices)][KP]: X', then M' */
    float *starts;   /* [N * HV][count][16 slices][KP]: S'; NULL: the initial state of the call */
    int *vanished;   /* [N * HV][count]: is M zero, so that it was not stored? NULL: no M is */
};

/* Rows of the ends for so many columns: whole slices of 16. */
__host__ __device__ constexpr int rows_of_ends(int columns) { return (columns + 15) / 16 * 16; }

/* A launch computes the causal form, the ends of segments, or the noncausal form. The last goes
 * through the chunks twice: first to write all, then to read. */
enum form { CAUSAL, SEGMENT_ENDS, NONCAUSAL };

template <int KP, la_decay DECAY, la_rule RULE, form FORM, typename = element>
__global__ void __launch_bounds__((MOST_WARPS + HAS_WARP_GROUPS * PRODUCERS) * 32, 1)
    chunks_forward(const __grid_constant__ call c, const __grid_constant__ chunks w,
                   const __grid_constant__ tensor_maps maps, const forward_flags f,
                   const segments g, int tiles)
{
    typedef stage<KP, DECAY, RULE> part;
    constexpr int HALVES = part::halves, KEYS = part::keys;
    extern __shared__ __align__(1024) char shared[];
    const int warps = blockDim.x / 32 - HAS_WARP_GROUPS * PRODUCERS, width = warps / HALVES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int half = HALVES == 2 && warp >= width, line = warp - half * width;
    const int tile = blockIdx.x % tiles;
    const int segment = blockIdx.x / tiles % g.count;
    const int64_t head = blockIdx.x / tiles / g.count;
    const unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    const int slices = (c.V + 15) / 16, slice_index = tile * width + line;
    const bool identity = FORM == SEGMENT_ENDS && slice_index >= slices; /* columns of M: v = 0 */
    const int v0 = slice_index * 16, columns = identity ? 0 : min(16, c.V - v0);
    const int v_slices = min(max(slices - tile * width, 0), width); /* of this block */
    const int all_chunks = (u.end - u.begin + C - 1) / C;
    const int first_chunk = first_of_segment(all_chunks, segment, g.count);
    const int last_chunk = first_of_segment(all_chunks, segment + 1, g.count);
    const int chunk_slot0 = first_chunk_slot(c, u.n);
    const key_rows rows = key_rows_of<part, KP, DECAY, RULE>(c, w, width);
    const bool gated = la_is_gated(DECAY, RULE) && c.x[LA_W].data;
    /* Of a stage, to which the copy engine fetches the gates too. As a parameter it takes no
     * register, but with one half of keys nvcc 13.0 then spills another one. */
    const int bytes = la_is_gated(DECAY, RULE) && HALVES == 2 ? f.stage_bytes
                      : HAS_WARP_GROUPS && gated              ? part::bytes(width, rows.has_x, true)
                                                              : rows.bytes;

    __shared__ int nonfinite_at[MOST_STAGES]; /* w.nonfinite of the chunk */
#if HAS_WARP_GROUPS
    /* Of each stage: the barrier that it has been filled, and the one that every warp is done with
     * it. */
    __shared__ uint64_t full[MOST_STAGES], empty[MOST_STAGES];
#endif
    /* Fetch chunk i into a stage: one thread asks the copy engine, or all threads copy. */
    const auto fetch = [&](int i, int into) {
        const uint32_t base = address_of(shared + into * bytes);
        const int t = u.begin + i * C;
        const int64_t place = (int64_t)(chunk_slot0 + i) * c.HV + u.hv;
        const int64_t keys =
            ((int64_t)(chunk_slot0 + i) * w.heads + (w.heads == c.HV ? u.hv : u.h)) *
            tile_bytes(KP);
        const struct {
            int offset;
            const void *from;
            int bytes;
        } pieces[] = {
            {part::k, part::has_k && rows.seen ? rows.seen + keys : NULL, tile_bytes(KP)},
            {rows.written, rows.has_x && w.k ? w.k + keys : NULL, tile_bytes(KP)},
            {rows.look, rows.has_x && w.look ? w.look + place * C : NULL, C * 4},
            {part::q, w.q ? w.q + keys : NULL, tile_bytes(KP)},
            {part::kt, lies_in_rows<DECAY> ? w.kt + place * tile_bytes(KP) : NULL, tile_bytes(KP)},
            {part::scores, w.scores + place * PANEL_BYTES, PANEL_BYTES},
            {part::inverse, RULE == LA_DELTA ? w.inverse + place * PANEL_BYTES : NULL, PANEL_BYTES},
            {part::y, RULE == LA_DPLR ? w.y + place * tile_bytes(KP) : NULL, tile_bytes(KP)},
            {part::in, DECAY == LA_TOKEN ? w.in + place * C : NULL, C * 4},
            {part::out, DECAY == LA_TOKEN ? w.out + place * C : NULL, C * 4},
            {part::den, part::may_divide && w.den ? w.den + place * C : NULL, C * 4},
            {part::total, lies_in_rows<DECAY> ? w.total + place * totals<KP, DECAY> : NULL,
             totals<KP, DECAY> * 4},
        };
#if HAS_WARP_GROUPS
        const uint32_t barrier = address_of(full + into);
        const int nonfinite = w.nonfinite[place];
        const int v_panels = f.v_pieces ? (v_slices + 3) / 4 : 0;
        int bytes = (part::has_k && !rows.seen ? tile_bytes(KP) : 0) +
                    (rows.has_x && !w.k ? tile_bytes(KP) : 0) + (!w.q ? tile_bytes(KP) : 0) +
                    v_panels * (gated ? 2 : 1) * PANEL_BYTES;
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) bytes += x.bytes;
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) engine_copy(base + x.offset, x.from, x.bytes, barrier);
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++) {
            if (part::has_k && !rows.seen)
                engine_copy_box(base + part::k + j * PANEL_BYTES, rows.has_x ? &maps.x : &maps.k,
                                j * PANEL, u.h, t, u.b, barrier);
            if (rows.has_x && !w.k)
                engine_copy_box(base + rows.written + j * PANEL_BYTES, &maps.k, j * PANEL, u.h, t,
                                u.b, barrier);
            if (!w.q)
                engine_copy_box(base + part::q + j * PANEL_BYTES, &maps.q, j * PANEL, u.h, t, u.b,
                                barrier);
        }
        for (int j = 0; j < v_panels * PLANES; j++) {
            const int column = tile * width * 16 + j * BOX;
            engine_copy_box(base + part::v + j * BOX_BYTES, &maps.v, column, u.hv, t, u.b, barrier);
            if (gated)
                engine_copy_box(base + part::w + j * BOX_BYTES, &maps.w, column, u.hv, t, u.b,
                                barrier);
        }
        nonfinite_at[into] = nonfinite;
        barrier_expect(barrier, bytes);
#else
        const int n = min(C, u.end - t);
        if (part::has_k && !rows.seen)
            copy_rows<KP>(c.x[rows.has_x ? LA_X : LA_K], c.K, u.b, t, n, u.h, base + part::k);
        if (rows.has_x && !w.k) copy_rows<KP>(c.x[LA_K], c.K, u.b, t, n, u.h, base + rows.written);
        if (!w.q) copy_rows<KP>(c.x[LA_Q], c.K, u.b, t, n, u.h, base + part::q);
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) copy_bytes(base + x.offset, (const char *)x.from, x.bytes);
        if (PLANES == 1 && f.v_pieces && columns > 0) {
            const char *x = at(c.x[LA_V], u.b, t, u.hv, v0);
            const uint32_t to = base + part::v + line / 4 * PANEL_BYTES;
            for (int j = lane; j < C * 2; j += 32) {
                const bool there = j / 2 < n && j % 2 * 8 < columns;
                copy_async(to + piece_at(j / 2, line % 4 * 2 + j % 2),
                           x + (there ? j / 2 * c.x[LA_V].stride[1] * 2 + j % 2 * 16 : 0), there);
            }
        }
        if (threadIdx.x == 0) nonfinite_at[into] = w.nonfinite[place];
        copies_end_group();
#endif
    };

    const int first_pass = FORM == NONCAUSAL ? 0 : 1;
#if HAS_WARP_GROUPS
    if (threadIdx.x == 0) {
        for (int j = 0; j < MOST_STAGES; j++) {
            barrier_init(address_of(full + j), 1);
            barrier_init(address_of(empty + j), warps * ARRIVALS_OF_WARP);
        }
        barriers_ready();
    }
    __syncthreads();
    if (warp >= warps) {
        registers_down_to<PRODUCER_REGISTERS>();
        if (warp > warps || lane > 0) return;
        int into = 0, round = 0;
        for (int pass = first_pass; pass < 2; pass++)
            for (int i = first_chunk; i < last_chunk; i++) {
                /* returns at once the first time */
                barrier_wait(address_of(empty + into), round ^ 1);
                fetch(i, into);
                if (++into == f.stages) into = 0, round ^= 1;
            }
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
    partner other = {(float4 *)(shared + f.stages * bytes) + line * 32 + lane, line, width, half};

    /* S' [16 columns][KEYS]: a thread has columns lane / 4 and + 8, keys 8 i + pair and + 1 */
    float S[KEYS / 8][4];
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = lane / 4 + e / 2 * 8, row = first_key + i * 8 + pair + e % 2;
            S[i][e] = 0;
            if (FORM == SEGMENT_ENDS)
                S[i][e] = identity && (slice_index - slices) * 16 + column == row;
            else if (g.starts)
                S[i][e] =
                    slice_index < slices
                        ? g.starts[((head * g.count + segment) * slices * 16 + v0 + column) * KP +
                                   row]
                        : 0;
            else {
                const view &x = state_of_row<DECAY>(c.x[LA_S0], c.x[LA_Y0], row);
                const int key = key_of_row<DECAY>(row);
                if (x.data && column < columns && key < c.K)
                    S[i][e] = load<float>(at(x, u.n, u.hv, key, v0 + column), x.dtype);
            }
        }

    int stage_at = 0, round = 0;
    bool second_time = false;
    int end = C; /* C, or when a chunk is repeated, the first token that the products leave out */
    for (int pass = first_pass; pass < 2; pass++) {
        const bool writes = FORM != NONCAUSAL || pass == 0;
        const bool reads = FORM == CAUSAL || (FORM == NONCAUSAL && pass == 1);
        /* The sum that all tokens read may be too large for the elements. Divided by a power of two
         * it is not. */
        float grow = 1;
        if (NARROW && FORM == NONCAUSAL && reads) {
            float most = 0;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (isfinite(S[j][e])) most = fmaxf(most, fabsf(S[j][e]));
            if (HALVES == 2) most = other.largest(most);
            /* the bits have the order of the numbers */
            const unsigned all = __reduce_max_sync(~0u, __float_as_uint(most));
            while (__uint_as_float(all) > MOST_OF_ELEMENT * grow) grow *= 2;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) S[j][e] /= grow;
        }
#if !HAS_WARP_GROUPS
        __syncthreads();
        if (first_chunk < last_chunk) fetch(first_chunk, stage_at);
#endif
        for (int i = first_chunk; i < last_chunk; i++) {
            char *room = shared + stage_at * bytes;
            const uint32_t base = address_of(room);
            const int t = u.begin + i * C, n = min(C, u.end - t);
#if HAS_WARP_GROUPS
            barrier_wait(address_of(full + stage_at), round);
            /* a box may reach into the next sequence, whose NaN must not come along */
            if (n < C && !second_time) {
                for (int j = threadIdx.x; j < (C - n) * KP / 8 && part::has_k; j += warps * 32) {
                    const int at = piece_at(n + j / (KP / 8), j % (KP / 8));
                    if (!rows.seen) *(uint4 *)(room + part::k + at) = make_uint4(0, 0, 0, 0);
                    if (rows.has_x && !w.k)
                        *(uint4 *)(room + rows.written + at) = make_uint4(0, 0, 0, 0);
                }
                if (PLANES == 1 && f.v_pieces && columns > 0)
                    for (int j = lane; j < (C - n) * 2; j += 32) {
                        char *const piece = room + part::v + line / 4 * PANEL_BYTES +
                                            piece_at(n + j / 2, line % 4 * 2 + j % 2);
                        *(uint4 *)piece = make_uint4(0, 0, 0, 0);
                        if (gated) *(uint4 *)(piece + part::w - part::v) = make_uint4(0, 0, 0, 0);
                    }
                stores_before_copies();
                some_warps_wait(warps);
            }
#else
            if (!second_time) {
                copies_wait<0>();
                __syncthreads(); /* chunk i is there, and every warp is done with chunk i - 1 */
                if (f.stages > 1 && i + 1 < last_chunk)
                    fetch(i + 1, stage_at + 1 == f.stages ? 0 : stage_at + 1);
                /* Each warp has columns of its own: K > 128 is for Hopper alone (setup.py). */
                if (PLANES == 1 && gated && f.v_pieces && columns > 0) {
                    const view &gates = c.x[LA_W];
                    for (int j = lane; j < C * 2; j += 32) {
                        uint4 *const x = (uint4 *)(room + part::v + line / 4 * PANEL_BYTES +
                                                   piece_at(j / 2, line % 4 * 2 + j % 2));
                        if (j / 2 < n && j % 2 * 8 < columns)
                            *x = times(*x, *(const uint4 *)at(gates, u.b, t + j / 2, u.hv,
                                                              v0 + j % 2 * 8));
                    }
                    __syncwarp();
                }
            }
#endif
            /* Rows that cannot be copied in pieces. Two warps with the same columns write the
             * same. */
            if (PLANES == 1 && !f.v_pieces && columns > 0) {
                for (int j = lane; j < C * 16; j += 32) {
                    const int row = j / 16, column = j % 16;
                    const bool there = row < n && column < columns;
                    element x = element_of(0);
                    if (there) x = *(const element *)at(c.x[LA_V], u.b, t + row, u.hv, v0 + column);
                    if (there && gated)
                        x = element_of((float)x * (float)*(const element *)at(
                                                      c.x[LA_W], u.b, t + row, u.hv, v0 + column));
                    *(element *)(room + part::v + line / 4 * PANEL_BYTES +
                                 element_at(row, line % 4 * 16 + column)) = x;
                }
                __syncwarp();
            }
            const float *in = (const float *)(room + part::in);
            const float *out = (const float *)(room + part::out);
            const float *of_look = (const float *)(room + rows.look);

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
            /* sums = S times a tile */
            const auto multiply_state = [&](float(&sums)[8][4], int tile) {
                constexpr int AT_ONCE = PLANES == 1 ? KEYS / 16 : 2;
#pragma unroll
                for (int i = 0; i < KEYS / 16; i += AT_ONCE) {
                    operand x[AT_ONCE];
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j++) {
                        x[j] = s[PLANES == 1 ? j : 0];
                        if constexpr (PLANES == 2)
                            x[j] = as_operand(S[2 * (i + j)], S[2 * (i + j) + 1]);
                    }
                    products_begin();
#pragma unroll
                    for (int j = 0; j < AT_ONCE; j++)
                        multiply_rows(sums, x[j], base + tile + own, (i + j) * 16, i + j == 0);
                    products_commit();
                    if (i + AT_ONCE < KEYS / 16) products_wait<1>();
                }
            };

            /* U: V as it lies, or A (V - k^ S), as left operands over the tokens */
            operand U[4], Ut[4]; /* Ut: rows times the decay to the end of the chunk */
#pragma unroll
            for (int m = 0; m < 4; m++) {
                if constexpr (PLANES == 1) {
                    load_matrices_transposed(U[m].of[0].x, base + slice + m * 16 * 128);
                    if (HAS_WARP_GROUPS && gated && f.v_pieces) {
                        uint32_t by[4];
                        load_matrices_transposed(by,
                                                 base + slice + part::w - part::v + m * 16 * 128);
#pragma unroll
                        for (int e = 0; e < 4; e++) U[m].of[0].x[e] = times(U[m].of[0].x[e], by[e]);
                    }
                } else {
                    const auto value = [&](int row, int column) {
                        if (row >= n || column >= columns) return 0.0f;
                        if (HAS_WARP_GROUPS && f.v_pieces) {
                            const float x = value_in_box(room + part::v, row, line * 16 + column);
                            return gated ? x * value_in_box(room + part::w, row, line * 16 + column)
                                         : x;
                        }
                        const float x =
                            *(const float *)at(c.x[LA_V], u.b, t + row, u.hv, v0 + column);
                        return gated ? x * *(const float *)at(c.x[LA_W], u.b, t + row, u.hv,
                                                              v0 + column)
                                     : x;
                    };
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int row = m * 16 + e / 2 * 8 + pair, column = lane / 4 + e % 2 * 8;
                        put_pair(U[m], e, value(row, column), value(row + 1, column));
                    }
                }
            }
            if (columns <= 0)
#pragma unroll
                for (int m = 0; m < 4; m++) U[m] = {};
            if (end < C) keep_before(U, pair, end);

            /* the rows of U of the additive rule, for the carry */
            const auto scale_rows = [&] {
                if constexpr (DECAY == LA_TOKEN) {
#pragma unroll
                    for (int m = 0; m < 4; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const float2 a = *(const float2 *)(out + m * 16 + e / 2 * 8 + pair);
                            const float2 x = numbers(U[m], e);
                            put_pair(Ut[m], e, a.x * x.x, a.y * x.y);
                        }
                }
            };

            float O[8][4] = {};
            const auto read_state = [&] { multiply_state(O, part::q); };
            operand T[RULE == LA_DPLR ? 4 : 1]; /* - X S */
            if constexpr (RULE == LA_DPLR) {
                static_assert(HALVES == 1 && PLANES == 1, "prepare_dplr has 64 keys");
                float W[8][4] = {};
                multiply_state(W, part::k);
                if (reads) read_state();
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
            if constexpr (RULE == LA_DELTA) {
                float W[8][4] = {}, X[8][4] = {};
                multiply_state(W, part::k);
                products_wait<0>();
                products_in(W);
                if constexpr (HALVES == 2) {
                    float theirs[8][4];
#pragma unroll
                    for (int m = 0; m < 8; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++) theirs[m][e] = W[m][e];
                    other.exchange(theirs);
#pragma unroll
                    for (int m = 0; m < 8; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++) W[m][e] += theirs[m][e];
                }
#pragma unroll
                for (int m = 0; m < 8; m++) {
                    const float2 a = DECAY == LA_TOKEN ? *(const float2 *)(of_look + m * 8 + pair)
                                                       : make_float2(1, 1);
                    const float2 top = numbers(U[m / 2], m % 2 * 2);
                    const float2 low = numbers(U[m / 2], m % 2 * 2 + 1);
                    W[m][0] = top.x - a.x * W[m][0];
                    W[m][1] = top.y - a.y * W[m][1];
                    W[m][2] = low.x - a.x * W[m][2];
                    W[m][3] = low.y - a.y * W[m][3];
                }
                operand x[4];
#pragma unroll
                for (int j = 0; j < 4; j++) x[j] = as_operand(W[2 * j], W[2 * j + 1]);
                if (end < C) keep_before(x, pair, end);
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_rows(X, x[j], base + part::inverse, j * 16, j == 0, j);
                products_commit();
                if (reads) read_state();
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
            } else if (PLANES == 1) { /* nothing for DPLR: its decays lie in rows */
                scale_rows();
            }
            if constexpr (DECAY != LA_TOKEN)
#pragma unroll
                for (int m = 0; m < 4; m++) Ut[m] = U[m];
            /* A NaN or an infinity in v or in the state is in U now. Then the chunk is repeated
             * without the tokens from the first such one on. They become exact zeros, which change
             * nothing in the tokens before. In the noncausal form every token reads all, so there
             * is no token to protect. With the additive rule U does not show a state that is too
             * large for the elements (in planes: too large for a rest, since the rest of an
             * infinity is a NaN). Such a chunk goes token by token. */
            if (FORM != NONCAUSAL) {
                bool nonfinite =
                    end > 0 && (has_nonfinite(U) || (RULE == LA_DPLR && has_nonfinite(T)) ||
                                (end == C && nonfinite_at[stage_at] < C));
                /* decays above one may make it too large */
                if (NARROW && DECAY == LA_TOKEN && end == C) nonfinite |= has_nonfinite(Ut);
                const bool state_too_large =
                    (NARROW || PLANES == 2) && RULE == LA_ADDITIVE && reads && end == C &&
                    in_either_half<HALVES>(__any_sync(~0u, large || (NARROW && has_nonfinite(s))),
                                           line);
                nonfinite |= state_too_large;
                if (__builtin_expect(any_of_group(nonfinite), 0)) {
                    products_wait<0>();
                    if (__any_sync(~0u, nonfinite)) {
                        int first = end < C ? 0 : nonfinite_at[stage_at];
                        if (end == C && columns > 0)
                            first = min(first, first_nonfinite(c, u, t, n, v0, columns));
                        if (state_too_large) first = C;
                        end = first < C ? first : 0; /* 0: the state has it */
                    }
                    second_time = true;
                    i--;
                    continue;
                }
            }

            /* for chunks that go token by token: the state, and the read */
            float after[KP / 2], o[READ * 4];
            if (__builtin_expect(end < C, 0)) {
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        after[((half * KEYS / 8 + j) * 2 + e % 2) * 2 + e / 2] = S[j][e];
                if constexpr (HALVES == 2)
#pragma unroll
                    for (int i = 0; i < KEYS / 8; i += 8) {
                        float theirs[8][4];
#pragma unroll
                        for (int j = 0; j < 8; j++)
#pragma unroll
                            for (int e = 0; e < 4; e++) theirs[j][e] = S[i + j][e];
                        other.exchange(theirs);
#pragma unroll
                        for (int j = 0; j < 8; j++)
#pragma unroll
                            for (int e = 0; e < 4; e++)
                                after[(((1 - half) * KEYS / 8 + i + j) * 2 + e % 2) * 2 + e / 2] =
                                    theirs[j][e];
                    }
            }
            if (RULE == LA_ADDITIVE && reads) read_state();
            /* the planes of S are no longer needed */
            if (RULE == LA_ADDITIVE && PLANES == 2) scale_rows();
            if constexpr (DECAY == LA_PAIR)
                decay_pair(S, (const float *)(room + part::total));
            else if (writes && DECAY != LA_NONE)
#pragma unroll
                for (int j = 0; j < KEYS / 8; j++) {
                    const float2 a =
                        DECAY == LA_KEY
                            ? *(const float2 *)(room + part::total + (first_key + j * 8 + pair) * 4)
                            : make_float2(in[C - 1], in[C - 1]);
                    S[j][0] *= a.x;
                    S[j][1] *= a.y;
                    S[j][2] *= a.x;
                    S[j][3] *= a.y;
                }
            if (writes) {
                products_begin();
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_columns(S, Ut[j], base + rows.written + own, j * 16);
                if constexpr (RULE == LA_DPLR)
#pragma unroll
                    for (int j = 0; j < 4; j++) multiply_columns(S, T[j], base + part::y, j * 16);
                products_commit();
            }
            if (reads) {
                products_wait<FORM == CAUSAL>(); /* for q^ S, not yet for the state */
                products_in(O);
                if (!lies_in_rows<DECAY>) /* otherwise q^ has all of it */
#pragma unroll
                    for (int m = 0; m < 8; m++) {
                        const float2 a = DECAY == LA_TOKEN ? *(const float2 *)(in + m * 8 + pair)
                                                           : make_float2(1, 1);
                        const float x = grow * scale * a.x, y = grow * scale * a.y;
                        O[m][0] *= x;
                        O[m][1] *= y;
                        O[m][2] *= x;
                        O[m][3] *= y;
                    }
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
                if (reads) {
                    float theirs[READ][4];
#pragma unroll
                    for (int m = 0; m < READ; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            theirs[m][e] = half ? O[m][e] : O[READ + m][e];
                            O[m][e] = half ? O[READ + m][e] : O[m][e];
                        }
                    other.exchange(theirs);
#pragma unroll
                    for (int m = 0; m < READ; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++) O[m][e] += theirs[m][e];
                }
            if (__builtin_expect(end < C, 0)) {
#pragma unroll
                for (int m = 0; m < READ * 4; m++) o[m] = O[m / 4][m % 4];
                chunk_by_tokens<KP, DECAY, RULE>(c, u, t, n, end, v0, columns, after, o,
                                                 first_read * 8, READ * 8);
#pragma unroll
                for (int m = 0; m < READ * 4; m++) O[m / 4][m % 4] = o[m];
                if (writes)
#pragma unroll
                    for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            S[j][e] = after[((half * KEYS / 8 + j) * 2 + e % 2) * 2 + e / 2];
            }

            if (reads) {
                if (part::may_divide && w.den)
#pragma unroll
                    for (int m = 0; m < READ; m++) {
                        const float2 by =
                            *(const float2 *)(room + part::den + ((first_read + m) * 8 + pair) * 4);
                        O[m][0] /= by.x;
                        O[m][1] /= by.y;
                        O[m][2] /= by.x;
                        O[m][3] /= by.y;
                    }
                if constexpr (PLANES == 2) { /* eight neighbours of a row, stored directly */
                    float *to_o = (float *)at(c.x[LA_O], u.b, t, u.hv, v0);
#pragma unroll
                    for (int m = 0; m < READ; m++)
#pragma unroll
                        for (int e = 0; e < 4; e++) {
                            const int row = (first_read + m) * 8 + pair + e % 2;
                            const int column = lane / 4 + e / 2 * 8;
                            if (row < n && column < columns)
                                to_o[row * c.x[LA_O].stride[1] + column] = O[m][e];
                        }
                } else if (columns > 0) { /* by way of the place of v, which is in registers now */
#pragma unroll
                    for (int m = 0; m < READ; m += 2) {
                        const uint32_t x[4] = {pack(O[m][0], O[m][1]), pack(O[m][2], O[m][3]),
                                               pack(O[m + 1][0], O[m + 1][1]),
                                               pack(O[m + 1][2], O[m + 1][3])};
                        store_matrices_transposed(base + slice + (first_read + m) * 8 * 128, x);
                    }
                    __syncwarp();
                    /* and every 16 rows further on */
                    const int row = first_read * 8 + lane / 2;
                    char *to_o = at(c.x[LA_O], u.b, t + row, u.hv, v0 + lane % 2 * 8);
                    const int64_t o_row = c.x[LA_O].stride[1] * 2;
                    uint4 x[READ / 2];
#pragma unroll
                    for (int j = 0; j < READ / 2; j++)
                        x[j] = *(const uint4 *)(room + o_piece + (first_read * 8 + j * 16) * 128);
                    if (o_vectors && n == C) {
#pragma unroll
                        for (int j = 0; j < READ / 2; j++) *(uint4 *)(to_o + j * 16 * o_row) = x[j];
                    } else {
#pragma unroll
                        for (int j = 0; j < READ / 2; j++) {
                            if (row + j * 16 >= n) continue;
                            if (o_vectors)
                                *(uint4 *)(to_o + j * 16 * o_row) = x[j];
                            else
                                store_piece(to_o + j * 16 * o_row, x[j], columns - lane % 2 * 8);
                        }
                    }
                }
            }
#if HAS_WARP_GROUPS
            stores_before_copies();
            warp_arrives(address_of(empty + stage_at));
#else
            if (f.stages == 1) {
                __syncthreads(); /* every warp is done with the only stage */
                if (i + 1 < last_chunk) fetch(i + 1, 0);
            }
#endif
            if (++stage_at == f.stages) stage_at = 0, round ^= 1;
            end = C;
            second_time = false;
        }
        if (NARROW && FORM == NONCAUSAL && reads)
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) S[j][e] *= grow;
    }

    if (FORM == SEGMENT_ENDS) {
        const int all = tiles * width * 16; /* rows of ends, in whole blocks */
        float *end =
            g.ends + ((head * g.count + segment) * all + v0 + lane / 4) * KP + first_key + pair;
#pragma unroll
        for (int i = 0; i < KEYS / 8; i++) {
            *(float2 *)(end + i * 8) = make_float2(S[i][0], S[i][1]);
            *(float2 *)(end + 8 * KP + i * 8) = make_float2(S[i][2], S[i][3]);
        }
        return;
    }
    if (!c.x[LA_ST].data && !(DECAY == LA_PAIR && c.x[LA_YT].data)) return;
    if (segment < g.count - 1) return;
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = lane / 4 + e / 2 * 8, row = first_key + i * 8 + pair + e % 2;
            const view &to = state_of_row<DECAY>(c.x[LA_ST], c.x[LA_YT], row);
            const int key = key_of_row<DECAY>(row);
            if (to.data && column < columns && key < c.K)
                store(at(to, u.n, u.hv, key, v0 + column), to.dtype, S[i][e]);
        }
}

#endif
