/* The numbers that a warp of chunks_forward has in registers: its part of the state, and rows of
 * values and of o. */
#ifndef LINATTN_CUDA_CHUNK_STATE_CUH
#define LINATTN_CUDA_CHUNK_STATE_CUH

#include "chunk_fetch.cuh"
#include "states_in_chunks.cuh"

/* ---- the state of a warp, as states_in_chunks.cuh has it ---- */

/* The state that a walk starts from: the caller's, that of its segment, or zero. To find the ends
 * of segments it is zero, or columns of the identity. */
template <int KP, la_decay DECAY, la_rule RULE, form FORM, int N>
__device__ __forceinline__ void first_state(float (&S)[N][4],
                                            const walk_place<KP, DECAY, RULE, FORM> &p,
                                            const segments &g, int first_key)
{
    const int pair = p.lane % 4 * 2, own_column = p.lane / 4;
    if constexpr (FORM == SEGMENT_ENDS) {
        const int first_row = (p.slice_index - p.slices) * 16 + own_column - first_key - pair;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[i][e] = p.identity && first_row + e / 2 * 8 == i * 8 + e % 2;
    } else if (g.starts) {
        const bool there = p.slice_index < p.slices;
        const float *start =
            g.starts +
            ((p.head * g.count + p.segment) * p.slices * 16 + p.v0 + own_column) * KP + first_key +
            pair;
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[i][e] = there ? start[e / 2 * 8 * KP + i * 8 + e % 2] : 0;
    } else {
        load_state<DECAY>(S, p.c, p.c.x[LA_S0], p.c.x[LA_Y0], p.u.n, p.u.hv, first_key, p.v0,
                          p.columns);
    }
}

/* Store the end of a segment. */
template <int KP, la_decay DECAY, la_rule RULE, form FORM, int N>
__device__ __forceinline__ void store_end(const float (&S)[N][4],
                                          const walk_place<KP, DECAY, RULE, FORM> &p,
                                          const segments &g, int tiles, int first_key)
{
    const int all = tiles * p.width * 16; /* rows of ends, in whole blocks */
    float *end = g.ends + ((p.head * g.count + p.segment) * all + p.v0 + p.lane / 4) * KP +
                 first_key + p.lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        *(float2 *)(end + i * 8) = make_float2(S[i][0], S[i][1]);
        *(float2 *)(end + 8 * KP + i * 8) = make_float2(S[i][2], S[i][3]);
    }
}

/* Store the final state, in the last segment of a sequence. */
template <int KP, la_decay DECAY, la_rule RULE, form FORM, int N>
__device__ __forceinline__ void store_last_state(const float (&S)[N][4],
                                                 const walk_place<KP, DECAY, RULE, FORM> &p,
                                                 const segments &g, int first_key)
{
    const call &c = p.c;
    if (!c.x[LA_ST].data && !(DECAY == LA_PAIR && c.x[LA_YT].data)) return;
    if (p.segment < g.count - 1) return;
    store_state<DECAY>(S, c, c.x[LA_ST], c.x[LA_YT], p.u.n, p.u.hv, first_key, p.v0, p.columns,
                       [](float x) { return x; });
}

/* Divide a state that is too large for the elements by a power of two. Returns that power. */
template <int HALVES, int N>
__device__ __forceinline__ float shrink_state(float (&S)[N][4], partner &other)
{
    float grow = 1, most = 0;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (isfinite(S[j][e])) most = fmaxf(most, fabsf(S[j][e]));
    if (HALVES == 2) most = other.largest(most);
    /* the bits have the order of the numbers */
    const unsigned all = __reduce_max_sync(~0u, __float_as_uint(most));
    while (__uint_as_float(all) > MOST_OF_ELEMENT * grow) grow *= 2;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) S[j][e] /= grow;
    return grow;
}

/* sums = S times a tile. s: S as operands; in planes there is no room for them beside S. */
template <int N, int M>
__device__ __forceinline__ void multiply_state(float (&sums)[8][4], const float (&S)[N][4],
                                               const operand (&s)[M], uint32_t tile)
{
    constexpr int AT_ONCE = PLANES == 1 ? N / 2 : 2;
#pragma unroll
    for (int i = 0; i < N / 2; i += AT_ONCE) {
        operand x[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            x[j] = s[PLANES == 1 ? j : 0];
            if constexpr (PLANES == 2) x[j] = as_operand(S[2 * (i + j)], S[2 * (i + j) + 1]);
        }
        products_begin();
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) multiply_rows(sums, x[j], tile, (i + j) * 16, i + j == 0);
        products_commit();
        if (i + AT_ONCE < N / 2) products_wait<1>();
    }
}

/* S times the decays of the chunk. in: of tokens, from its start; total: per key. */
template <la_decay DECAY, int N>
__device__ __forceinline__ void decay_state(float (&S)[N][4], const float *in, const float *total,
                                            int first_key, int pair)
{
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float2 a = DECAY == LA_KEY ? *(const float2 *)(total + first_key + j * 8 + pair)
                                         : make_float2(in[C - 1], in[C - 1]);
        S[j][0] *= a.x;
        S[j][1] *= a.y;
        S[j][2] *= a.x;
        S[j][3] *= a.y;
    }
}

/* The whole state of the columns of a warp, for chunks that go token by token: its own keys, and
 * those of the other warp. */
template <int HALVES, int N>
__device__ __forceinline__ void state_for_tokens(float (&after)[N * HALVES * 4],
                                                 const float (&S)[N][4], partner &other, int half)
{
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            after[place_for_tokens((half * N + j) * 4 + e)] = S[j][e];
    if constexpr (HALVES == 2)
#pragma unroll
        for (int i = 0; i < N; i += 8) {
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
                    after[place_for_tokens(((1 - half) * N + i + j) * 4 + e)] = theirs[j][e];
        }
}

/* ---- rows of values and of o: [16 columns][64 tokens] ---- */

/* Ut = U, each token times its decay to the end of the chunk. */
__device__ __forceinline__ void scale_rows(operand (&Ut)[4], const operand (&U)[4],
                                           const float *out, int pair)
{
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 a = *(const float2 *)(out + m * 16 + e / 2 * 8 + pair);
            const float2 x = numbers(U[m], e);
            put_pair(Ut[m], e, a.x * x.x, a.y * x.y);
        }
}

/* x of this warp becomes the sum over all keys. */
template <int HALVES>
__device__ __forceinline__ void add_other_half(float (&x)[8][4], partner &other)
{
    if constexpr (HALVES == 2) {
        float theirs[8][4];
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) theirs[m][e] = x[m][e];
        other.exchange(theirs);
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) x[m][e] += theirs[m][e];
    }
}

/* W becomes V - diag(a) W, with V in U. */
template <la_decay DECAY, typename X>
__device__ __forceinline__ void subtract_read(float (&W)[8][4], const X (&U)[4],
                                              const float *of_look, int pair)
{
#pragma unroll
    for (int m = 0; m < 8; m++) {
        const float2 a =
            DECAY == LA_TOKEN ? *(const float2 *)(of_look + m * 8 + pair) : make_float2(1, 1);
        const float2 top = numbers(U[m / 2], m % 2 * 2);
        const float2 low = numbers(U[m / 2], m % 2 * 2 + 1);
        W[m][0] = top.x - a.x * W[m][0];
        W[m][1] = top.y - a.y * W[m][1];
        W[m][2] = low.x - a.x * W[m][2];
        W[m][3] = low.y - a.y * W[m][3];
    }
}

/* Rows of o times `factor` and the decays from the start of the chunk. */
template <la_decay DECAY>
__device__ __forceinline__ void scale_read(float (&O)[8][4], const float *in, float factor,
                                           int pair)
{
#pragma unroll
    for (int m = 0; m < 8; m++) {
        const float2 a =
            DECAY == LA_TOKEN ? *(const float2 *)(in + m * 8 + pair) : make_float2(1, 1);
        const float x = factor * a.x, y = factor * a.y;
        O[m][0] *= x;
        O[m][1] *= y;
        O[m][2] *= x;
        O[m][3] *= y;
    }
}

/* Both warps of two have sums over their keys. Each finishes half of the tokens: the first READ
 * times eight of O are then those. */
template <int READ>
__device__ __forceinline__ void share_read(float (&O)[8][4], partner &other, int half)
{
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

/* Divide the first READ times eight tokens of O by their denominators. */
template <int READ>
__device__ __forceinline__ void divide_read(float (&O)[8][4], const float *den, int pair)
{
#pragma unroll
    for (int m = 0; m < READ; m++) {
        const float2 by = *(const float2 *)(den + m * 8 + pair);
        O[m][0] /= by.x;
        O[m][1] /= by.y;
        O[m][2] /= by.x;
        O[m][3] /= by.y;
    }
}

/* Store o of the tokens of this warp, from first_read times eight on, of a chunk of n tokens from t
 * on. */
template <int READ, int KP, la_decay DECAY, la_rule RULE, form FORM>
__device__ __forceinline__ void
store_read(const float (&O)[8][4], const walk_place<KP, DECAY, RULE, FORM> &p, char *room,
           int slice, int o_piece, bool o_vectors, int t, int n, int first_read)
{
    const call &c = p.c;
    const int lane = p.lane, pair = lane % 4 * 2, columns = p.columns;
    if constexpr (PLANES == 2) { /* eight neighbours of a row, stored directly */
        float *to_o = (float *)at(c.x[LA_O], p.u.b, t, p.u.hv, p.v0);
#pragma unroll
        for (int m = 0; m < READ; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = (first_read + m) * 8 + pair + e % 2;
                const int column = lane / 4 + e / 2 * 8;
                if (row < n && column < columns) to_o[row * c.x[LA_O].stride[1] + column] = O[m][e];
            }
    } else if (columns > 0) { /* by way of the place of v, which is in registers now */
#pragma unroll
        for (int m = 0; m < READ; m += 2) {
            const uint32_t x[4] = {pack(O[m][0], O[m][1]), pack(O[m][2], O[m][3]),
                                   pack(O[m + 1][0], O[m + 1][1]), pack(O[m + 1][2], O[m + 1][3])};
            store_matrices_transposed(address_of(room) + slice + (first_read + m) * 8 * 128, x);
        }
        __syncwarp();
        /* and every 16 rows further on */
        const int row = first_read * 8 + lane / 2;
        char *to_o = at(c.x[LA_O], p.u.b, t + row, p.u.hv, p.v0 + lane % 2 * 8);
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

#endif
