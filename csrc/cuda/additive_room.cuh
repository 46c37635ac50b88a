/* Where the roles of the additive rule in one kernel meet, and the way of its chunks into shared
 * memory. See additive.cuh. */
#ifndef LINATTN_CUDA_ADDITIVE_ROOM_CUH
#define LINATTN_CUDA_ADDITIVE_ROOM_CUH

#include "mapped_tiles.cuh"
#include "roles.cuh"

enum {
    MOST_GROUPS = 4,
    WALK_REGISTERS = 192,
    SCORE_REGISTERS = 104,
    FETCH_REGISTERS = 24,
    TRIANGLE = 24 /* rows of triangles of decays: each 24 banks further, for pairs of a row */
};
static_assert(2 * WALK_REGISTERS + SCORE_REGISTERS + FETCH_REGISTERS <= 65536 / GROUP, "");

template <bool MAPPED> struct additive_registers {
    static constexpr int walk = WALK_REGISTERS, score = SCORE_REGISTERS, fetch = FETCH_REGISTERS;
};
template <> struct additive_registers<true> {
    static constexpr int walk = WALK_REGISTERS, score = 72, map = 56;
    static_assert(2 * walk + score + map <= 65536 / GROUP, "");
};

/* A stage: k, q, and a panel of v for each walk. */
template <int KP> struct fetched {
    static constexpr int k = 0, q = tile_bytes(KP), v = 2 * tile_bytes(KP);
    __host__ __device__ static constexpr int bytes(int walks) { return v + walks * PANEL_BYTES; }
};

/* Where the roles meet. */
struct meeting {
    float in[SLOTS][C], out[SLOTS][C]; /* decays from the start, to the end. MAPPED: 1 / divisor */
    int nonfinite[SLOTS];              /* the first token with a NaN or an infinity, or C */
    uint64_t full[MOST_FETCHED], mapped[MOST_FETCHED], empty[MOST_FETCHED];
    uint64_t ready[SLOTS], free[SLOTS];
};

/* The numbers of a group that scores. They are there twice: a warp may write those of the next chunk
 * while another one reads. */
struct desk {
    struct {
        alignas(16) float a[C]; /* the decays as given */
        /* in a block of 16: decays to its end, times the weight, and of all of it */
        float to_block_end[C], block[C / BLOCK];
    } turn[2];
    /* G of the blocks on the diagonal, times the weights; for each warp alone */
    float within[C / BLOCK][BLOCK][TRIANGLE];
};

struct additive_flags {
    bool o_pieces; /* rows of o can be stored in pieces of 16 bytes */
    int walks, scoring;
    int stages;
    int tiles;    /* of 64 `walks` value columns */
    int segments; /* of a sequence. The initial states are [N][HV][segments][K][V] then */
};

/* Shared memory: P, O on its way out, the desks, the stages. */
enum {
    PLACE_OF_O = SLOTS * PANEL_BYTES,
    PLACE_OF_DESKS = PLACE_OF_O + MOST_WALKS * PANEL_BYTES,
    PLACE_OF_STAGES = (PLACE_OF_DESKS + 2 * (int)sizeof(desk) + 1023) / 1024 * 1024
};

#if HAS_WARP_GROUPS
__device__ __forceinline__ int tiles_of_call(const call &c, const additive_flags &f)
{
    return c.N * c.HV * f.segments * f.tiles;
}

/* Asked for anew where it is needed, as own_seat() is. */
__device__ __forceinline__ tile_of_head tile_at(const call &c, const additive_flags &f, int index)
{
    asm volatile("" : "+r"(index));
    return tile_at(c, f.tiles, index, f.segments);
}

template <typename F>
__device__ __forceinline__ void for_each_tile(const call &c, const additive_flags &f, F each)
{
    for (int i = blockIdx.x; i < tiles_of_call(c, f); i += gridDim.x) each(tile_at(c, f, i), i);
}

/* Asks the copy engine for the chunks of a block, one after another. */
template <int KP> struct fetching {
    const call &c;
    const tensor_maps &maps;
    const additive_flags &f;
    uint32_t stages;
    meeting &s;
    ring r;
    int index; /* of the tile */
    tile_of_head x;
    int t;

    __device__ __forceinline__ fetching(const call &c, const tensor_maps &maps,
                                        const additive_flags &f, uint32_t stages, meeting &s)
        : c(c), maps(maps), f(f), stages(stages), s(s), r{f.stages, 0, 0}, index(blockIdx.x)
    {
        find_tile();
    }
    /* The first tile from `index` on that has tokens. */
    __device__ __forceinline__ void find_tile()
    {
        for (; !done(); index += gridDim.x) {
            x = tile_at(c, f, index);
            t = x.u.begin;
            if (t < x.u.end) return;
        }
    }
    __device__ __forceinline__ bool done() const { return index >= tiles_of_call(c, f); }
    __device__ __forceinline__ bool has_room() const
    {
        return barrier_passed(address_of(s.empty + r.at), r.round ^ 1);
    }
    __device__ __forceinline__ void next()
    {
        typedef fetched<KP> part;
        const int bytes = part::bytes(f.walks), first_column = x.tile * f.walks * PANEL;
        const uint32_t base = stages + r.at * bytes, barrier = address_of(s.full + r.at);
        barrier_wait(address_of(s.empty + r.at), r.round ^ 1);
        barrier_expect(barrier, bytes);
        for (int j = 0; j < KP / PANEL; j++) {
            engine_copy_box(base + part::q + j * PANEL_BYTES, &maps.q, j * PANEL, x.u.h, t, x.u.b,
                            barrier);
            engine_copy_box(base + part::k + j * PANEL_BYTES, &maps.k, j * PANEL, x.u.h, t, x.u.b,
                            barrier);
        }
        for (int j = 0; j < f.walks; j++) /* zeros, where there are no columns */
            engine_copy_box(base + part::v + j * PANEL_BYTES, &maps.v, first_column + j * PANEL,
                            x.u.hv, t, x.u.b, barrier);
        r.next();
        t += C;
        if (t < x.u.end) return;
        index += gridDim.x;
        find_tile();
    }
};
#endif

#endif
