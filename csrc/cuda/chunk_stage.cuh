/* A launch of chunks_forward: where the parts of a chunk lie in shared memory, the segments of a
 * sequence, and the forms that a launch computes. */
#ifndef LINATTN_CUDA_CHUNK_STAGE_CUH
#define LINATTN_CUDA_CHUNK_STAGE_CUH

#include "chunk_slots.cuh"

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
 * of M. `join_decays` or `join_maps` goes along the segments. CAUSAL goes through each segment
 * again, from its true state. */
struct segments {
    int count;
    bool from_start; /* the end of the first segment is its true state, so it needs no M */
    float *ends;     /* [N * HV][count][16 (slices + key slices)][KP]: X', then M' */
    float *starts;   /* [N * HV][count][16 slices][KP]: S'; NULL: the initial state of the call.
                      * A call for states alone has none: the join goes on to the final states */
    int *vanished;   /* [N * HV][count]: is M zero, so that it was not stored? NULL: no M is */
};

/* Rows of the ends for so many columns: whole slices of 16. */
__host__ __device__ constexpr int rows_of_ends(int columns) { return (columns + 15) / 16 * 16; }

/* A launch computes the causal form, the ends of segments, or the noncausal form. The last goes
 * through the chunks twice: first to write all, then to read. */
enum form { CAUSAL, SEGMENT_ENDS, NONCAUSAL };

#endif
