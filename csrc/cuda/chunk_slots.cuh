/* Chunks of sequences, in slots of C tokens: what the kernels of chunks leave one another, and how
 * a decay lies there. */
#ifndef LINATTN_CUDA_CHUNK_SLOTS_CUH
#define LINATTN_CUDA_CHUNK_SLOTS_CUH

#include "copy.cuh"
#include "kernels.cuh"
#include "load.cuh"
#include "products.cuh"

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL
#define JOIN(x, y, W) join_quads(x, y, W)
#define KEY_BEFORE true
typedef float real, lane, lane_of_state;
enum { MAX_STRIP = 2 };

/* The sums over the four threads that have the keys of a column in an accumulator. */
LA_FN void join_quads(float *x, float *y, int W)
{
    for (int w = 0; w < W; w++) x[w] = quad_sum(x[w]);
    for (int w = 0; w < W && y; w++) y[w] = quad_sum(y[w]);
}

#include "../recurrence.h"

enum {
    C = ROWS,
    LD = 68,       /* rows of float32 matrices: each 4 banks further, for fragments of tf32 */
    LD_PAIRS = 72, /* each 8 banks further, for pairs in the layout of accumulators */
    SCALAR_THREADS = 128
};

/* Decays that are part of the rows that prepare leaves, which are then those of a value head. Other
 * decays scale rows of the products instead. */
template <la_decay DECAY> constexpr bool lies_in_rows = DECAY == LA_KEY || DECAY == LA_PAIR;

/* PAIR: the rows of the state are PANEL keys of the memory, the same keys of its momentum, the next
 * PANEL keys of the memory, and so on. KP counts both. */
template <la_decay DECAY> constexpr int states_of = DECAY == LA_PAIR ? 2 : 1;
template <int KP, la_decay DECAY> constexpr int keys_of = KP / states_of<DECAY>;

/* The state that has a row, and the key of the row. */
template <la_decay DECAY>
__device__ __forceinline__ const view &state_of_row(const view &M, const view &Y, int row)
{
    return DECAY == LA_PAIR && row / PANEL % 2 ? Y : M;
}
template <la_decay DECAY> __device__ __forceinline__ int key_of_row(int row)
{
    return DECAY == LA_PAIR ? row / (2 * PANEL) * PANEL + row % PANEL : row;
}

/* ---- chunks of sequences: what prepare leaves to chunks_forward, in slots of C tokens ---- */

/* Numbers of a chunk that its state is multiplied by, where decays lie in rows. Those of PAIR are e,
 * f and m of prepare_pair.cuh, and one that is not used. */
template <int KP, la_decay DECAY>
constexpr int totals = DECAY == LA_KEY    ? KP
                       : DECAY == LA_PAIR ? 4
                                          : 0;

struct chunks {
    /* [chunk slots][HV] tiles of C columns: P, A. A is NULL for gradients of the delta rule */
    char *scores, *inverse;
    /* for gradients: of the delta rule - M, in the place of A; of DPLR: M, and A in the place of the
     * inverse; otherwise NULL */
    char *lower;
    float *beta;    /* for gradients of the delta rule: [chunk slots][HV][C] */
    char *scores_y; /* for gradients of DPLR: P_y without the scale */
    /* [chunk slots][heads] tiles of KP columns; NULL: read from the arrays of the caller */
    char *q, *k;
    char *x;         /* scalar decays: the same, where the caller gave x */
    char *kt;        /* decays in rows: [chunk slots][HV] tiles, k~ */
    char *y;         /* DPLR: the same, y~ */
    float *in, *out; /* scalar decays: [chunk slots][HV][C], from the start, to the end */
    float *look;     /* the decay of the state that x sees, if that is not `in` */
    float *total;    /* decays in rows: [chunk slots][HV][totals], of the chunk */
    /* normalised: [chunk slots][HV][KP], the sum of the keys of the chunk; then the sum of the
     * other chunks that its tokens see */
    float *z;
    float *den; /* normalised: [chunk slots][HV][C], the row sums of P; then the denominators */
    /* [chunk slots][HV]: the first token with a NaN or an infinity in q, k, the gate or beta; C if
     * there is none. From it on, P and A are zeros; M
     * is not. */
    int *nonfinite;
    int chunk_slots, heads;
};

__device__ inline int first_chunk_slot(const call &c, int n)
{
    return (int)first_chunk_slot(c, n, C);
}

/* The first chunk of a segment, where a sequence of so many chunks has `count` segments: chunks *
 * segment / count. There is no 64-bit division: it is a function call, and takes registers of a
 * walk. The segments of a short sequence may have no chunk. */
__device__ __forceinline__ int first_of_segment(int chunks, int segment, int count)
{
    return chunks / count * segment + chunks % count * segment / count;
}

/* The sequence of a chunk slot: the last one that begins at or before it. */
__device__ inline int sequence_of(const call &c, int chunk_slot)
{
    if (!c.x[LA_CU].data) return chunk_slot / ((c.T + C - 1) / C);
    int low = 0, high = c.N - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first_chunk_slot(c, middle) <= chunk_slot)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The bytes of a stage behind v, where decays are scalar and the caller gave x: k, and the decays
 * that x sees. The place of k then has x. */
template <int KP, la_decay DECAY> __host__ __device__ constexpr int bytes_for_x(bool with_x)
{
    return with_x && !lies_in_rows<DECAY> ? tile_bytes(KP) + 1024 : 0;
}

/* Where a stage (`part`) has the rows that are written to the state, and the decays of the rows
 * that the state sees. The latter rows are at part::k. */
struct key_rows {
    bool has_x; /* x is apart from k */
    int bytes;  /* of the whole stage */
    int written, look;
    const char *seen; /* the rows seen, where prepare has left them; NULL: the caller's array */
};

template <typename part, int KP, la_decay DECAY, la_rule RULE>
__device__ __forceinline__ key_rows key_rows_of(const call &c, const chunks &w, int width)
{
    key_rows x;
    x.has_x = RULE == LA_DELTA && !lies_in_rows<DECAY> && c.x[LA_X].data;
    x.bytes = part::bytes(width, x.has_x);
    x.written = lies_in_rows<DECAY> ? part::kt : x.has_x ? part::bytes(width, false) : part::k;
    x.look = x.has_x && w.look ? x.written + tile_bytes(KP) : part::in;
    x.seen = x.has_x ? w.x : w.k;
    return x;
}

#endif
