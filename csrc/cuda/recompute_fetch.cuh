/* The place of a warp in a pass of recompute.cuh, and the way of its chunks into shared memory. */
#ifndef LINATTN_CUDA_RECOMPUTE_FETCH_CUH
#define LINATTN_CUDA_RECOMPUTE_FETCH_CUH

#include "chunk_state.cuh"

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
    /* A panel for every four slices of 16 columns: v or dO, and the results that leave by way of
     * its place. */
    __host__ __device__ static constexpr int bytes(int width, bool with_x)
    {
        return v + width / 4 * PANEL_BYTES + bytes_for_x<KP, DECAY>(with_x);
    }
};

/* News of each stage, as in chunk_fetch.cuh. */
struct adjoint_news {
    int nonfinite_at[ADJOINT_STAGES]; /* chunks.nonfinite of the chunk */
#if HAS_WARP_GROUPS
    uint64_t full[ADJOINT_STAGES], empty[ADJOINT_STAGES];
#endif
};

/* A warp: its columns of v, its half of the keys, its sequence. */
template <int KP, la_decay DECAY, la_rule RULE, bool BACKWARD> struct adjoint_place {
    typedef adjoint_stage<KP, DECAY, RULE, BACKWARD> part;
    static constexpr bool delta = RULE == LA_DELTA, dplr = RULE == LA_DPLR;
    static constexpr int HALVES = part::halves;

    const call &c;
    const gradients &d;
    const chunks &w;
    const backward_maps &maps;
    adjoint_news &news;
    char *shared;

    int warps, width; /* of the block, without producers: all, and those of one half of keys */
    int warp, lane;
    int half, line; /* of the keys; the warp among those of its half */
    int tile;
    unit u;
    int panels, panel; /* of value columns: all, and the one of this warp */
    int v0, columns, own_panels;
    int segment, first_chunk, own_chunks; /* of the sequence */
    int chunk_slot0;
    key_rows rows;
    int bytes; /* of a stage */

    __device__ __forceinline__ adjoint_place(const call &c, const gradients &d, const chunks &w,
                                             const backward_maps &maps, int tiles, int segments,
                                             int index, adjoint_news &news, char *shared)
        : c(c), d(d), w(w), maps(maps), news(news), shared(shared)
    {
        warps = blockDim.x / 32 - HAS_WARP_GROUPS * ADJOINT_PRODUCERS, width = warps / HALVES;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        half = HALVES == 2 && warp >= width, line = warp - half * width;
        tile = index % tiles;
        const int head = index / tiles / segments;
        segment = index / tiles % segments;
        u = unit_of(c, head / c.HV, head % c.HV);
        panels = (c.V + PANEL - 1) / PANEL, panel = tile * (width / 4) + line / 4;
        v0 = panel * PANEL + line % 4 * 16, columns = min(16, c.V - v0);
        own_panels = min(width / 4, panels - tile * (width / 4));
        const int chunks = (u.end - u.begin + C - 1) / C;
        first_chunk = first_of_segment(chunks, segment, segments);
        own_chunks = first_of_segment(chunks, segment + 1, segments) - first_chunk;
        chunk_slot0 = first_chunk_slot(c, u.n);
        rows = key_rows_of<part, KP, DECAY, RULE>(c, w, width);
        bytes = rows.bytes;
    }

    /* The chunk of a step. */
    __device__ __forceinline__ int chunk_at(int step) const
    {
        return first_chunk + (BACKWARD ? own_chunks - 1 - step : step);
    }

    __device__ __forceinline__ rows_of_caller<part, KP, BACKWARD> of_caller() const
    {
        return {rows, w};
    }

    /* Fetch the chunk of a step into a stage: one thread asks the copy engine, or all threads
     * copy. */
    __device__ __forceinline__ void fetch(int step, int into) const
    {
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
        const uint32_t barrier = address_of(news.full + into);
        const int nonfinite = w.nonfinite[place];
        int expected = of_caller().bytes() + own_panels * PANEL_BYTES;
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) {
                expected += x.bytes;
                engine_copy(base + x.offset, x.from, x.bytes, barrier);
            }
        of_caller().copy(base, maps, u, t, barrier);
        for (int j = 0; j < own_panels; j++)
            engine_copy_box(base + part::v + j * PANEL_BYTES, BACKWARD ? &maps.d_o : &maps.v,
                            column + j * PANEL, u.hv, t, u.b, barrier);
        news.nonfinite_at[into] = nonfinite;
        barrier_expect(barrier, expected);
#else
        const int n = min(C, u.end - t);
        of_caller().copy(base, c, u, t, n);
#pragma unroll
        for (const auto &x : pieces)
            if (x.from) copy_bytes(base + x.offset, (const char *)x.from, x.bytes);
        for (int j = 0; j < own_panels; j++)
            copy_rows<PANEL>(BACKWARD ? d[LA_DO] : c.x[LA_V], c.V, u.b, t, n, u.hv,
                             base + part::v + j * PANEL_BYTES, column + j * PANEL);
        if (threadIdx.x == 0) news.nonfinite_at[into] = w.nonfinite[place];
        copies_end_group();
#endif
    }

#if HAS_WARP_GROUPS
    /* All threads of the block call this. */
    __device__ __forceinline__ void start_barriers(int stages) const
    {
        if (threadIdx.x == 0) {
            for (int j = 0; j < stages; j++) {
                barrier_init(address_of(news.full + j), 1);
                barrier_init(address_of(news.empty + j), warps * ARRIVALS_OF_WARP);
            }
            barriers_ready();
        }
        __syncthreads();
    }

    /* The thread that fetches. */
    __device__ __forceinline__ void produce(int stages) const
    {
        int into = 0, round = 0;
        for (int step = 0; step < own_chunks; step++) {
            /* returns at once the first time */
            barrier_wait(address_of(news.empty + into), round ^ 1);
            fetch(step, into);
            if (++into == stages) into = 0, round ^= 1;
        }
    }

    /* Clear the rows behind the n tokens of a chunk. place_of_v: where this warp's values lie. */
    __device__ __forceinline__ void clear_tail(char *room, int place_of_v, int line, int lane,
                                               int n) const
    {
        of_caller().template clear_tail<BACKWARD>(room, n, warps);
        for (int j = lane; j < (C - n) * 2; j += 32)
            *(uint4 *)(room + place_of_v + piece_at(n + j / 2, line % 4 * 2 + j % 2)) =
                make_uint4(0, 0, 0, 0);
        stores_before_copies();
        some_warps_wait(warps);
    }
#endif
};

#endif
