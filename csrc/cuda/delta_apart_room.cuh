/* Where the blocks of delta_apart.cuh and delta_ends.cuh meet in global memory, and the shared memory
 * of those that prepare and of those that walk. */
#ifndef LINATTN_CUDA_DELTA_APART_ROOM_CUH
#define LINATTN_CUDA_DELTA_APART_ROOM_CUH

#include "delta_room.cuh"

enum {
    HANDED = 8,       /* chunks of a head between the blocks that prepare and those that walk */
    PREPARERS = 2,    /* pairs of groups in a block that prepares */
    APART_GROUPS = 5, /* of a block */
    AHEAD = 2         /* chunks in the shared memory of a block that walks */
};

/* The scores of a chunk, as they go from block to block. */
template <int KP> struct scored {
    char x[tile_bytes(KP)], b[PANEL_BYTES];
    float in[C];
    struct {
        float seen[C], total;
        int nonfinite, expands; /* expands: a token makes a state longer; see delta_solve.cuh */
        int unused;
    } numbers;
    char unused[1024 - sizeof in - sizeof numbers];
};
static_assert(sizeof(scored<64>) % 1024 == 0, "a tile begins at a multiple of 1024");

/* A number that many threads of other blocks read again and again until it changes. Each has a
 * cache line of its own. With those of all heads in a few lines, whatever else lay in that part of
 * the L2 cache had to wait: a tile took up to 6,600 cycles (docs/decisions/0053). */
struct alignas(128) counter {
    int n;
};

/* The meeting place. Where one launch prepares and walks, it is a ring for each head, and all
 * counters begin at zero. Where one launch prepares all chunks for later ones, there are no counters
 * (NULL), and each chunk has a place. */
template <int KP> struct handed {
    scored<KP> *chunks; /* [N * HV][HANDED], or [chunk slots][HV] */
    counter *there;     /* [N * HV][HANDED]: 1 + the last chunk that was handed over here */
    counter *taken;     /* [N * HV][tiles][2]: how many X, and how many B, a walk has taken */
    int walkers;        /* blocks that walk; they are the first ones */
    int tiles, walks;   /* tiles of a head, and panels of value columns in a tile */

    /* The number of a place in a ring. */
    static __device__ __forceinline__ int in_ring(int head, int chunk)
    {
        return head * HANDED + chunk % HANDED;
    }
    __device__ __forceinline__ scored<KP> *place_of(const call &c, int head, int chunk) const
    {
        if (there) return chunks + in_ring(head, chunk);
        return chunks + (int64_t)(first_chunk_slot(c, head / c.HV) + chunk) * c.HV + head % c.HV;
    }
};

/* The chunks of a head that a block walks: all of them, or those of a segment. */
struct stretch {
    unit u;
    int head, tile;    /* head: among those of all sequences */
    int segment;       /* of the head */
    int first, chunks; /* the first chunk, and how many there are */
    bool last;         /* it ends the sequence */
};

/* Blocks go through the tiles of a stretch, then through the segments, then through the heads. */
__device__ __forceinline__ stretch stretch_at(const call &c, int tiles, int count, int index)
{
    stretch x;
    x.tile = index % tiles;
    x.segment = index / tiles % count;
    x.head = index / tiles / count;
    x.u = unit_of(c, x.head / c.HV, x.head % c.HV);
    const int all = (x.u.end - x.u.begin + C - 1) / C;
    x.first = first_of_segment(all, x.segment, count);
    x.chunks = first_of_segment(all, x.segment + 1, count) - x.first;
    x.last = x.segment == count - 1;
    return x;
}

/* Wait for another block. Its stores before the counter came to n are visible then. */
__device__ __forceinline__ void wait_until_at_least(const counter *x, int n)
{
    int now;
    for (;;) {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(&x->n) : "memory");
        if (now >= n) return;
        __nanosleep(100);
    }
}

__device__ __forceinline__ void set_counter(counter *x, int n)
{
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(&x->n), "r"(n) : "memory");
}

/* The same where the other block only read, by way of the copy engine. The reads are over when it
 * sets the counter, so no store has to be visible. */
__device__ __forceinline__ void wait_until_read(const counter *x, int n)
{
    int now;
    for (;;) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(&x->n) : "memory");
        if (now >= n) return;
        __nanosleep(200);
    }
}

__device__ __forceinline__ void set_read(counter *x, int n)
{
    asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(&x->n), "r"(n) : "memory");
}

/* The shared memory of two groups, `solve` and `score`. It has the names of delta_room, so that
 * their functions work on both. X lies over the keys that it is made of. B lies over the queries,
 * and the numbers lie behind B. So one copy takes all of them to memory. */
template <int KP> struct alignas(1024) prepare_room {
    static constexpr bool apart = true;
    static constexpr int stages = 2;
    static constexpr int of_queries = (int)sizeof(scored<KP>) - tile_bytes(KP);
    struct {
        char k[tile_bytes(KP)];
        char q[tile_bytes(KP) < of_queries ? of_queries : tile_bytes(KP)];
    } keys[stages];
    char inverse[PANEL_BYTES], ended[PANEL_BYTES];
    char inverse_f16[PANEL_BYTES], half_f16[PANEL_BYTES];
    alignas(16) float lower[OF_CHUNK][2][8][LOWER_8];
    gates_of_chunk gates[SLOTS];
    chunk_place place[PLACES];
    int nonfinite[SLOTS], nonfinite_solve[SLOTS], expands[SLOTS];
    uint64_t barrier_keys[stages], barrier_free[stages], barrier_gates[SLOTS];
    uint64_t barrier_ready[SLOTS];
    uint64_t barrier_solved, barrier_used;
    int first, step; /* of the chunks of all heads: this pair has every step-th */
    int heads;       /* sequences times value heads */

#if HAS_WARP_GROUPS
    __device__ __forceinline__ scored<KP> &stage(int i) { return *(scored<KP> *)keys[i].k; }
    __device__ __forceinline__ char *place_of_x(int, int i) { return stage(i).x; }
    __device__ __forceinline__ char *place_of_b(int, int i) { return stage(i).b; }
    __device__ __forceinline__ float *in_of(int, int i) { return stage(i).in; }
    __device__ __forceinline__ float *seen_of(int, int i) { return stage(i).numbers.seen; }
    __device__ __forceinline__ float &total_of(int, int i) { return stage(i).numbers.total; }

    /* The place of the first chunk from number `index` on that there is. The numbers go through the
     * first chunks of all heads, then through the second ones, and so on. */
    __device__ __forceinline__ chunk_place place_from(const call &c, int index)
    {
        chunk_place p = {};
        const int chunks = (c.T + C - 1) / C;
        for (; index / heads < chunks; index += step) {
            const int head = index % heads;
            const unit u = unit_of(c, head / c.HV, head % c.HV);
            p.t = u.begin + index / heads * C;
            if (p.t >= u.end) continue;
            p.b = u.b, p.h = u.h, p.hv = u.hv;
            p.n = min(C, u.end - p.t), p.end = u.end;
            p.beta = at(c.x[LA_BETA], p.b, 0, p.hv);
            if (c.x[LA_G].data) p.gate = at(c.x[LA_G], p.b, 0, p.hv);
            break;
        }
        p.index = index;
        return p;
    }
#endif
};

/* The shared memory of a block that walks. Each part of a chunk has places of its own, which are
 * free again at different times. */
template <int KP> struct walk_room {
    char k[AHEAD][tile_bytes(KP)], q[AHEAD][tile_bytes(KP)], x[AHEAD][tile_bytes(KP)];
    char b[AHEAD][PANEL_BYTES], v[AHEAD][MOST_WALKS][PANEL_BYTES];
    char state[MOST_WALKS][tile_bytes(KP)]; /* S of each walk, for `read` */
    char w[MOST_WALKS][PANEL_BYTES];        /* W of each walk */
    char o[MOST_WALKS][2][PANEL_BYTES];     /* by turns */
    alignas(16) float in[AHEAD][C];
    decltype(scored<KP>::numbers) numbers[AHEAD];
    int kept[MOST_WALKS][4]; /* of each warp of a walk: the first token that W leaves out, or C */
    uint64_t full_k[AHEAD], free_k[AHEAD]; /* k and v, for `walk` */
    uint64_t full_x[AHEAD], free_x[AHEAD]; /* X, for `walk` */
    uint64_t full_b[AHEAD], free_b[AHEAD]; /* B and q, for `read` */
    uint64_t full_state[MOST_WALKS], free_state[MOST_WALKS];
    uint64_t full_w[MOST_WALKS], free_w[MOST_WALKS];
};

/* The shared memory of a block of either kind. */
template <int KP>
static constexpr int bytes_apart =
    (int)sizeof(walk_room<KP>) > PREPARERS * (int)sizeof(prepare_room<KP>)
        ? (int)sizeof(walk_room<KP>)
        : PREPARERS * (int)sizeof(prepare_room<KP>);

#endif
