/* The place of a warp in a launch of chunks_forward, and how its chunks get into shared memory. */
#ifndef LINATTN_CUDA_CHUNK_FETCH_CUH
#define LINATTN_CUDA_CHUNK_FETCH_CUH

#include "chunk_stage.cuh"
#include "walk_parts.cuh"

/* News of each stage, for the warps of a block. On Hopper there are two barriers: the stage has
 * been filled, and every warp is done with it. */
struct stage_news {
    int nonfinite_at[MOST_STAGES]; /* chunks.nonfinite of the chunk */
#if HAS_WARP_GROUPS
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
#endif
};

/* The rows of q, k and x of a chunk that no kernel has prepared. They come from the arrays of the
 * caller to their places in a stage (`part`). Q: does the kernel read q? */
template <typename part, int KP, bool Q> struct rows_of_caller {
    const key_rows &rows;
    const chunks &w;

    __device__ __forceinline__ bool seen() const { return part::has_k && !rows.seen; }
    __device__ __forceinline__ bool written() const { return rows.has_x && !w.k; }
    __device__ __forceinline__ bool q() const { return Q && !w.q; }

#if HAS_WARP_GROUPS
    __device__ __forceinline__ int bytes() const
    {
        return (seen() + written() + q()) * tile_bytes(KP);
    }

    /* Ask the copy engine for the rows of head u.h, from token t on. */
    template <typename M>
    __device__ __forceinline__ void copy(uint32_t base, const M &maps, const unit &u, int t,
                                         uint32_t barrier) const
    {
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++) {
            if (seen())
                engine_copy_box(base + part::k + j * PANEL_BYTES, rows.has_x ? &maps.x : &maps.k,
                                j * PANEL, u.h, t, u.b, barrier);
            if (written())
                engine_copy_box(base + rows.written + j * PANEL_BYTES, &maps.k, j * PANEL, u.h, t,
                                u.b, barrier);
            if (q())
                engine_copy_box(base + part::q + j * PANEL_BYTES, &maps.q, j * PANEL, u.h, t, u.b,
                                barrier);
        }
    }

    /* Clear the rows behind the n tokens of a chunk: a box may reach into the next sequence, whose
     * NaN must not come along. CLEAR_Q: is a row of q behind them multiplied by another row? */
    template <bool CLEAR_Q>
    __device__ __forceinline__ void clear_tail(char *room, int n, int warps) const
    {
        for (int j = threadIdx.x; j < (C - n) * KP / 8; j += warps * 32) {
            const int at = piece_at(n + j / (KP / 8), j % (KP / 8));
            if (seen()) *(uint4 *)(room + part::k + at) = make_uint4(0, 0, 0, 0);
            if (written()) *(uint4 *)(room + rows.written + at) = make_uint4(0, 0, 0, 0);
            if (CLEAR_Q && q()) *(uint4 *)(room + part::q + at) = make_uint4(0, 0, 0, 0);
        }
    }
#else
    /* The part of this thread. */
    __device__ __forceinline__ void copy(uint32_t base, const call &c, const unit &u, int t,
                                         int n) const
    {
        if (seen())
            copy_rows<KP>(c.x[rows.has_x ? LA_X : LA_K], c.K, u.b, t, n, u.h, base + part::k);
        if (written()) copy_rows<KP>(c.x[LA_K], c.K, u.b, t, n, u.h, base + rows.written);
        if (q()) copy_rows<KP>(c.x[LA_Q], c.K, u.b, t, n, u.h, base + part::q);
    }
#endif
};

/* A warp: its columns of v, its half of the keys, its chunks. */
template <int KP, la_decay DECAY, la_rule RULE, form FORM> struct walk_place {
    typedef stage<KP, DECAY, RULE> part;
    static constexpr int HALVES = part::halves;

    const call &c;
    const chunks &w;
    const tensor_maps &maps;
    const forward_flags &f;
    stage_news &news;
    char *shared;

    int warps, width; /* of the block, without producers: all, and those of one half of keys */
    int warp, lane;
    int half, line; /* of the keys; the warp among those of its half */
    int tile, segment;
    int64_t head;
    unit u;
    int slices, slice_index; /* of 16 columns: of v, and this one */
    bool identity;           /* columns of M: v = 0 */
    int v0, columns;
    int v_slices; /* of this block */
    int first_chunk, last_chunk, chunk_slot0;
    key_rows rows;
    bool gated;
    int bytes; /* of a stage */

    __device__ __forceinline__ walk_place(const call &c, const chunks &w, const tensor_maps &maps,
                                          const forward_flags &f, const segments &g, int tiles,
                                          stage_news &news, char *shared)
        : c(c), w(w), maps(maps), f(f), news(news), shared(shared)
    {
        warps = blockDim.x / 32 - HAS_WARP_GROUPS * PRODUCERS, width = warps / HALVES;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        half = HALVES == 2 && warp >= width, line = warp - half * width;
        tile = blockIdx.x % tiles;
        segment = blockIdx.x / tiles % g.count;
        head = blockIdx.x / tiles / g.count;
        u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
        slices = (c.V + 15) / 16, slice_index = tile * width + line;
        identity = FORM == SEGMENT_ENDS && slice_index >= slices;
        v0 = slice_index * 16, columns = identity ? 0 : min(16, c.V - v0);
        v_slices = min(max(slices - tile * width, 0), width);
        const int all_chunks = (u.end - u.begin + C - 1) / C;
        first_chunk = first_of_segment(all_chunks, segment, g.count);
        last_chunk = first_of_segment(all_chunks, segment + 1, g.count);
        chunk_slot0 = first_chunk_slot(c, u.n);
        rows = key_rows_of<part, KP, DECAY, RULE>(c, w, width);
        gated = la_is_gated(DECAY, RULE) && c.x[LA_W].data;
        /* The copy engine fetches the gates to a stage too. As a parameter this number takes no
         * register, but with one half of keys nvcc 13.0 then spills another one. */
        bytes = la_is_gated(DECAY, RULE) && HALVES == 2 ? f.stage_bytes
                : HAS_WARP_GROUPS && gated              ? part::bytes(width, rows.has_x, true)
                                                        : rows.bytes;
    }

    static constexpr bool READS = FORM != SEGMENT_ENDS; /* else q and P have no use */

    __device__ __forceinline__ rows_of_caller<part, KP, READS> of_caller() const
    {
        return {rows, w};
    }

    /* Fetch chunk i into a stage: one thread asks the copy engine, or all threads copy. */
    __device__ __forceinline__ void fetch(int i, int into) const
    {
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
            {part::q, READS && w.q ? w.q + keys : NULL, tile_bytes(KP)},
            {part::kt, lies_in_rows<DECAY> ? w.kt + place * tile_bytes(KP) : NULL, tile_bytes(KP)},
            {part::scores, READS ? w.scores + place * PANEL_BYTES : NULL, PANEL_BYTES},
            {part::inverse, RULE == LA_DELTA ? w.inverse + place * PANEL_BYTES : NULL, PANEL_BYTES},
            {part::y, RULE == LA_DPLR ? w.y + place * tile_bytes(KP) : NULL, tile_bytes(KP)},
            {part::in, DECAY == LA_TOKEN ? w.in + place * C : NULL, C * 4},
            {part::out, DECAY == LA_TOKEN ? w.out + place * C : NULL, C * 4},
            {part::den, part::may_divide && w.den ? w.den + place * C : NULL, C * 4},
            {part::total, lies_in_rows<DECAY> ? w.total + place * totals<KP, DECAY> : NULL,
             totals<KP, DECAY> * 4},
        };
#if HAS_WARP_GROUPS
        const uint32_t barrier = address_of(news.full + into);
        const int nonfinite = w.nonfinite[place];
        const int v_panels = f.v_pieces ? (v_slices + 3) / 4 : 0;
        int bytes = of_caller().bytes() + v_panels * (gated ? 2 : 1) * PANEL_BYTES;
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) bytes += x.bytes;
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) engine_copy(base + x.offset, x.from, x.bytes, barrier);
        of_caller().copy(base, maps, u, t, barrier);
        for (int j = 0; j < v_panels * PLANES; j++) {
            const int column = tile * width * 16 + j * BOX;
            engine_copy_box(base + part::v + j * BOX_BYTES, &maps.v, column, u.hv, t, u.b, barrier);
            if (gated)
                engine_copy_box(base + part::w + j * BOX_BYTES, &maps.w, column, u.hv, t, u.b,
                                barrier);
        }
        news.nonfinite_at[into] = nonfinite;
        barrier_expect(barrier, bytes);
#else
        const int n = min(C, u.end - t);
        of_caller().copy(base, c, u, t, n);
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) copy_bytes(base + x.offset, (const char *)x.from, x.bytes);
        /* of two warps with the same columns the first one copies */
        if (PLANES == 1 && f.v_pieces && columns > 0 && half == 0) {
            const char *const x = at(c.x[LA_V], u.b, t, u.hv, v0);
            const int64_t of_row = c.x[LA_V].stride[1] * 2;
            const uint32_t to = base + part::v + line / 4 * PANEL_BYTES +
                                piece_at(lane / 2, line % 4 * 2 + lane % 2);
            const int rows = lane % 2 * 8 < columns ? n - lane / 2 : 0; /* that exist */
            const char *from = x + lane / 2 * of_row + lane % 2 * 16;
#pragma unroll
            for (int i = 0; i < C; i += 16, from += 16 * of_row)
                copy_async(to + i * 128, i < rows ? from : x, i < rows);
        }
        if (threadIdx.x == 0) news.nonfinite_at[into] = w.nonfinite[place];
        copies_end_group();
#endif
    }

#if HAS_WARP_GROUPS
    /* All threads of the block call this. */
    __device__ __forceinline__ void start_barriers() const
    {
        if (threadIdx.x == 0) {
            for (int j = 0; j < MOST_STAGES; j++) {
                barrier_init(address_of(news.full + j), 1);
                barrier_init(address_of(news.empty + j), warps * ARRIVALS_OF_WARP);
            }
            barriers_ready();
        }
        __syncthreads();
    }

    /* The thread that fetches: all chunks of each pass. */
    __device__ __forceinline__ void produce(int first_pass) const
    {
        int into = 0, round = 0;
        for (int pass = first_pass; pass < 2; pass++)
            for (int i = first_chunk; i < last_chunk; i++) {
                /* returns at once the first time */
                barrier_wait(address_of(news.empty + into), round ^ 1);
                fetch(i, into);
                if (++into == f.stages) into = 0, round ^= 1;
            }
    }

    /* Clear the rows behind the n tokens of a chunk. */
    __device__ __forceinline__ void clear_tail(char *room, int n) const
    {
        of_caller().template clear_tail<false>(room, n, warps);
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
    /* Multiply the values of a chunk by their gates, where the rows were copied. Two warps may have
     * the same columns and half of the keys each: the first one multiplies for both. */
    __device__ __forceinline__ void gate_values(char *room, int t, int n) const
    {
        if (PLANES == 2 || !gated || !f.v_pieces) return;
        if (half == 0 && columns > 0) {
            const view &gates = c.x[LA_W];
            for (int j = lane; j < C * 2; j += 32) {
                uint4 *const x = (uint4 *)(room + part::v + line / 4 * PANEL_BYTES +
                                           piece_at(j / 2, line % 4 * 2 + j % 2));
                if (j / 2 < n && j % 2 * 8 < columns)
                    *x = times(*x, *(const uint4 *)at(gates, u.b, t + j / 2, u.hv, v0 + j % 2 * 8));
            }
        }
        if (HALVES == 2)
            __syncthreads();
        else
            __syncwarp();
    }
#endif

    /* Copy the rows of v that cannot be copied in pieces. Two warps with the same columns write the
     * same. */
    __device__ __forceinline__ void copy_values(char *room, int t, int n) const
    {
        if (PLANES == 1 && !f.v_pieces && columns > 0) {
            for (int j = lane; j < C * 16; j += 32) {
                const int row = j / 16, column = j % 16;
                const bool there = row < n && column < columns;
                element x = element_of(0);
                if (there) x = *(const element *)at(c.x[LA_V], u.b, t + row, u.hv, v0 + column);
                if (there && gated)
                    x = element_of((float)x * (float)*(const element *)at(c.x[LA_W], u.b, t + row,
                                                                          u.hv, v0 + column));
                *(element *)(room + part::v + line / 4 * PANEL_BYTES +
                             element_at(row, line % 4 * 16 + column)) = x;
            }
            __syncwarp();
        }
    }

    /* The values of this warp's columns, times their gates, as left operands over the tokens.
     * slice: where this lane reads its 8 x 8 blocks of v. */
    __device__ __forceinline__ void load_values(operand (&U)[4], char *room, int slice, int t,
                                                int n) const
    {
        const uint32_t base = address_of(room);
        const int pair = lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            if constexpr (PLANES == 1) {
                load_matrices_transposed(U[m].of[0].x, base + slice + m * 16 * 128);
                if (HAS_WARP_GROUPS && gated && f.v_pieces) {
                    uint32_t by[4];
                    load_matrices_transposed(by, base + slice + part::w - part::v + m * 16 * 128);
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
                    const float x = *(const float *)at(c.x[LA_V], u.b, t + row, u.hv, v0 + column);
                    return gated
                               ? x * *(const float *)at(c.x[LA_W], u.b, t + row, u.hv, v0 + column)
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
    }
};

#endif
