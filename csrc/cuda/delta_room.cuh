/* Where the roles of the delta rule in one kernel meet: its shared memory, and what more than one
 * role does with the sums of a chunk. */
#ifndef LINATTN_CUDA_DELTA_ROOM_CUH
#define LINATTN_CUDA_DELTA_ROOM_CUH

#include "roles.cuh"

enum {
    KEY_STAGES = 3,      /* k and q of a chunk: the walks, solve and score, the copy engine */
    PLACES = 8,          /* of chunks: those in stages, and those whose gates are loaded */
    PLACES_AHEAD = 5,    /* of the chunk that a walk is at */
    LOWER = BLOCK + 4,   /* rows of blocks of 16: each 20 banks further */
    LOWER_8 = 12,        /* rows of blocks of 8: each 12 banks further */
    OF_CHUNK = C / BLOCK /* blocks */
};

/* With keys and strengths below these, no sum of X is too large for bfloat16: 2^10 2^50 times the
 * 2^16 of the inverse and 64 tokens is 2^82. From MOST_SCORE on an element rounds to infinity. */
static constexpr float MOST_STRENGTH = 0x1p10f, MOST_SQUARE = 0x1p100f,
                       MOST_SCORE = NARROW ? 65520.0f : TOO_LARGE_FOR_PLANES;

/* The registers of a thread of the roles: 512 or 504 for a lane of all warps. */
template <int WALKS> struct delta_registers {
    static constexpr int walk = WALKS == 2 ? 184 : 216, prepare = WALKS == 2 ? 72 : 144;
    static_assert((WALKS * walk + 2 * prepare) * GROUP <= 65536, "");
};

/* The decays and writing strengths of a chunk. A block is 16 tokens. */
struct gates_of_chunk {
    alignas(16) float a[C]; /* the decays as given */
    float beta[C];
    float of_key[C], of_query[C]; /* factors of the l2 norm, if there is one */
    float from_block_start[C];    /* the decay from the start of the block through a token */
    float block[OF_CHUNK];        /* the decay of a block */
    /* G of the blocks on the diagonal, times the factors of the keys. The last row has the decays
     * to the end of the block, times the same. */
    float within[OF_CHUNK][BLOCK][LOWER];
    int nonfinite[OF_CHUNK]; /* the first token of a block with a NaN or an infinity, or C */
    int n;                   /* the tokens of the chunk; 0: there is no such chunk */
};

/* A chunk of a tile. */
struct alignas(16) chunk_place {
    int b, h, hv, column;    /* the first value column */
    int t, n, end;           /* its tokens, and the end of the sequence */
    int index;               /* of the tile */
    const char *gate, *beta; /* of token 0 of the batch row */
};

/* Shared memory. prepare_room has the same names, for the blocks of delta_apart.cuh that prepare and
 * do not walk. */
template <int KP, int WALKS> struct delta_room {
    static constexpr bool apart = false;
    static constexpr int stages = KEY_STAGES;
    struct {
        char k[tile_bytes(KP)], q[tile_bytes(KP)];
    } keys[KEY_STAGES];
    struct {
        char panel[WALKS][PANEL_BYTES]; /* O leaves by way of the place of v */
    } values[SLOTS];
    struct {
        char x[tile_bytes(KP)], b[PANEL_BYTES];
    } slot[SLOTS];
    char inverse[PANEL_BYTES], ended[PANEL_BYTES];        /* A, A~' */
    char inverse_f16[PANEL_BYTES], half_f16[PANEL_BYTES]; /* (I + L)^-1; a product for it */
    /* -L: the blocks of 8 x 8 on its diagonal */
    alignas(16) float lower[OF_CHUNK][2][8][LOWER_8];
    gates_of_chunk gates[SLOTS];
    chunk_place place[PLACES];
    float in[SLOTS][C]; /* decays from the start of the chunk */
    /* With an l2 norm `in` has the factors of the queries too. `seen` has those of the keys, and
     * `total` is the decay of the chunk. */
    float seen[SLOTS][C], total[SLOTS];
    /* the first token with a NaN or an infinity, or C; as far as `solve` knows */
    int nonfinite[SLOTS], nonfinite_solve[SLOTS];
    uint64_t barrier_keys[KEY_STAGES], barrier_values[SLOTS], barrier_gates[SLOTS];
    uint64_t barrier_ready[SLOTS], barrier_done[SLOTS], barrier_solved, barrier_used;

    /* Where X, B and numbers of a chunk lie. Its keys are in a stage. */
    __device__ __forceinline__ char *place_of_x(int slot, int) { return this->slot[slot].x; }
    __device__ __forceinline__ char *place_of_b(int slot, int) { return this->slot[slot].b; }
    __device__ __forceinline__ float *in_of(int slot, int) { return in[slot]; }
    __device__ __forceinline__ float *seen_of(int slot, int) { return seen[slot]; }
    __device__ __forceinline__ float &total_of(int slot, int) { return total[slot]; }
};

struct delta_flags {
    bool o_pieces;            /* rows of o can be stored in pieces of 16 bytes */
    bool o_boxes;             /* the copy engine can store o */
    int tiles;                /* of 64 value columns for each walk */
    int gate_step, beta_step; /* bytes from one token to the next */
    const float *norms;       /* of find_norms; NULL: q and k are used as given */
};

#if HAS_WARP_GROUPS
/* The address of a tile for products. With decays it helps the compiler to know that all lanes have
 * the same; without them this costs more than it gains (docs/decisions/0048). */
template <la_decay DECAY> __device__ __forceinline__ uint32_t address_for_products(const char *tile)
{
    const uint32_t address = address_of(tile);
    return DECAY == LA_TOKEN ? __shfl_sync(~0u, address, 0) : address;
}

/* Parity for a wait: use `use` of a barrier has ended. use == -1 has. */
__device__ __forceinline__ int parity(int use) { return use & 1; }

/* Have the walks left a chunk, so that its places are free? */
template <typename room> __device__ __forceinline__ void wait_until_done(room &s, int chunk)
{
    barrier_wait(address_of(s.barrier_done + chunk % SLOTS), parity(chunk / SLOTS));
}

/* The block of 16 x 16 on the diagonal, of the sums of 16 rows of a warp. */
__device__ __forceinline__ void own_block(const float (&x)[8][4], int warp, float (&own)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int half = i / 4, e = i % 4;
        const float low = warp & 1 ? x[2 + half][e] : x[half][e];
        const float high = warp & 1 ? x[6 + half][e] : x[4 + half][e];
        own[half][e] = warp & 2 ? high : low;
    }
}

/* Zeros in the rows of the chunk from `rows` on; row: the first one of this thread. */
__device__ __forceinline__ void zero_rows(float (&x)[8][4], int row, int rows)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        if (row + i / 2 % 2 * 8 >= rows) x[i / 4][i % 4] = 0;
}

/* each(J, before, p) for all blocks J but the last: p is the sums of block J times the decays between
 * the two tokens and times `by` of the two rows of this thread. It is of use if the block is before
 * the one on the diagonal. All warps go through the same instructions. */
template <la_decay DECAY, typename F>
__device__ __forceinline__ void scale_blocks(const float (&x)[8][4], const gates_of_chunk &g,
                                             const float2 by, F each)
{
    const seat at = own_seat();
    float2 of_rows = by;
    if (DECAY == LA_TOKEN) {
        of_rows.x *= g.from_block_start[at.warp * BLOCK + at.row];
        of_rows.y *= g.from_block_start[at.warp * BLOCK + at.row + 8];
    }
#pragma unroll
    for (int J = OF_CHUNK - 2; J >= 0; J--) {
        const bool before = J < at.warp;
        float2 ends[2] = {make_float2(1, 1), make_float2(1, 1)};
        if (DECAY == LA_TOKEN)
#pragma unroll
            for (int half = 0; half < 2; half++)
                ends[half] = *(const float2 *)&g.within[J][BLOCK - 1][half * 8 + at.pair];
        float p[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int half = i / 4, lower = i / 2 % 2, odd = i % 2;
            const float row = lower ? of_rows.y : of_rows.x;
            p[half][i % 4] = x[2 * J + half][i % 4] * (row * (odd ? ends[half].y : ends[half].x));
        }
        if (DECAY == LA_TOKEN && before) {
            const float block = g.block[J];
            of_rows.x *= block;
            of_rows.y *= block;
        }
        each(J, before, p);
    }
}

/* own times the decays and times `by` of the two rows. On the diagonal and above it are zeros if
 * STRICT; otherwise above it. */
template <la_decay DECAY, bool STRICT>
__device__ __forceinline__ void scale_own_block(float (&own)[2][4], const gates_of_chunk &g,
                                                const float2 by)
{
    const seat at = own_seat();
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const int half = i / 4, lower = i / 2 % 2;
        const int row = at.row + lower * 8, column = half * 8 + at.pair;
        float2 G = make_float2(1, 1);
        if (DECAY == LA_TOKEN) G = *(const float2 *)&g.within[at.warp][row][column];
        const float factor = lower ? by.y : by.x;
        float &x = own[half][i % 4], &y = own[half][i % 4 + 1];
        x = column < row + !STRICT ? x * factor * G.x : 0;
        y = column + 1 < row + !STRICT ? y * factor * G.y : 0;
    }
}

#endif

#endif
