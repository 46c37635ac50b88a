/* Gradients of states of the delta rule on Hopper. With one segment it is the gradient of the
 * initial state, and no other. With more it is those between segments, for the walks of
 * recompute.cuh. The kernel takes what delta_apart prepares for the forward pass: X, B and the
 * decays of all chunks (delta.cuh). That pass was
 *
 *     W = V - seen (S k)     O = scale in (S q) + W B     S <- a S + W X
 *
 * So from the last chunk to the first one
 *
 *     dW = dS X' + dO B'     dS <- a dS + (scale in dO) q' - (seen dW) k'
 *
 * in the transposed form, in which a warp has 16 value columns. No state of the forward pass has a
 * part in this. A block has all chunks of a head or of a segment, and walks one or two panels of 64
 * columns. Each panel has four warps. The first thread of one more group asks the copy engine. A
 * chunk takes four products, two of which need the ones before. */
#ifndef LINATTN_CUDA_DELTA_STARTS_CUH
#define LINATTN_CUDA_DELTA_STARTS_CUH

#include "delta_apart_walk.cuh"
#include "segments.cuh"

enum { STARTS_STAGES = 3 };

template <int KP> struct starts_room {
    struct {
        char k[tile_bytes(KP)], q[tile_bytes(KP)], x[tile_bytes(KP)], b[PANEL_BYTES];
        char d_o[MOST_WALKS][PANEL_BYTES];
    } chunk[STARTS_STAGES];
    struct {
        float in[C];
        decltype(scored<KP>::numbers) of;
    } numbers[STARTS_STAGES];
    uint64_t full[STARTS_STAGES], free[STARTS_STAGES];
};

#if HAS_WARP_GROUPS
/* The chunks of a head backwards. One thread. maps.v is of dO. */
template <int KP>
__device__ __forceinline__ void fetch_backwards(const call &c, const tensor_maps &maps,
                                                const stretch &of, const handed<KP> &from,
                                                int walks, starts_room<KP> &s)
{
    const unit &u = of.u;
    for (int step = 0; step < of.chunks; step++) {
        const int stage = step % STARTS_STAGES, chunk = of.first + of.chunks - 1 - step;
        const int t = u.begin + chunk * C;
        const uint32_t barrier = address_of(s.full + stage);
        const scored<KP> &x = *from.place_of(c, of.head, chunk);
        auto &to = s.chunk[stage];
        barrier_wait(address_of(s.free + stage), parity(step / STARTS_STAGES - 1));
        barrier_expect(barrier, 3 * tile_bytes(KP) + (1 + walks) * PANEL_BYTES +
                                    sizeof s.numbers[stage]);
#pragma unroll
        for (int j = 0; j < KP / PANEL; j++) {
            engine_copy_box(address_of(to.k) + j * PANEL_BYTES, &maps.k, j * PANEL, u.h, t, u.b,
                            barrier);
            engine_copy_box(address_of(to.q) + j * PANEL_BYTES, &maps.q, j * PANEL, u.h, t, u.b,
                            barrier);
        }
        engine_copy(address_of(to.x), x.x, sizeof x.x, barrier);
        engine_copy(address_of(to.b), x.b, sizeof x.b, barrier);
        engine_copy(address_of(s.numbers + stage), x.in, sizeof s.numbers[stage], barrier);
        for (int j = 0; j < walks; j++) /* zeros, where there are no columns */
            engine_copy_box(address_of(to.d_o[j]), &maps.v, (of.tile * walks + j) * PANEL, u.hv, t,
                            u.b, barrier);
    }
}

/* Clear the rows of q and k behind the n tokens of a chunk: a box may reach into the next sequence,
 * and zero times a NaN of it is not zero. All threads that walk call this. */
template <int KP>
__device__ __forceinline__ void clear_behind(char *k, char *q, int n, int walks)
{
    for (int i = threadIdx.x; i < (C - n) * KP / 8; i += walks * GROUP) {
        const int at = piece_at(n + i / (KP / 8), i % (KP / 8));
        *(uint4 *)(k + at) = *(uint4 *)(q + at) = make_uint4(0, 0, 0, 0);
    }
    stores_before_copies();
    asm volatile("bar.sync 1, %0;" ::"r"(walks * GROUP) : "memory");
}

/* A chunk of n tokens from t on, token by token: for a NaN or an infinity, and for keys whose
 * inverse is too large for float16. S is dS of the 16 columns of a warp from first_column on. */
template <int KP, la_decay DECAY>
__device__ __forceinline__ void tokens_backwards(const call &c, const unit &u, int t, int n,
                                                 int first_column, int columns,
                                                 float (&S)[KP / 8][4])
{
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
    /* the numbers of this lane of a row of q or k, and their factor */
    const auto row_of = [&](la_name name, int token, float2(&x)[KP / 8]) {
        const element *const row = (const element *)at(c.x[name], u.b, token, u.h);
        float squares = 0;
#pragma unroll
        for (int i = 0; i < KP / 8; i++) {
            const int key = i * 8 + pair;
            x[i].x = key < c.K ? (float)row[key * c.x[name].stride[3]] : 0;
            x[i].y = key + 1 < c.K ? (float)row[(key + 1) * c.x[name].stride[3]] : 0;
            squares += x[i].x * x[i].x + x[i].y * x[i].y;
        }
        return c.qk_l2norm ? l2norm_factor(quad_sum(squares)) : 1.0f;
    };
#pragma unroll 1
    for (int token = t + n - 1; token >= t; token--) {
        const float beta = load<float>(at(c.x[LA_BETA], u.b, token, u.hv), c.x[LA_BETA].dtype);
        float a = 1;
        if (DECAY == LA_TOKEN)
            a = decay_of(load<float>(at(c.x[LA_G], u.b, token, u.hv), c.x[LA_G].dtype), c.gate);
        float2 x[KP / 8];
        const float of_read = (float)c.scale * row_of(LA_Q, token, x);
        float d_o[2], seen[2] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int column = lane / 4 + half * 8;
            d_o[half] = column < columns
                            ? load<float>(at(c.x[LA_V], u.b, token, u.hv, first_column + column),
                                          ELEMENT_DTYPE)
                            : 0;
        }
#pragma unroll
        for (int i = 0; i < KP / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[i][e] += of_read * (e % 2 ? x[i].y : x[i].x) * d_o[e / 2];
        const float norm = row_of(LA_K, token, x);
#pragma unroll
        for (int i = 0; i < KP / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) seen[e / 2] += (e % 2 ? x[i].y : x[i].x) * S[i][e];
#pragma unroll
        for (int half = 0; half < 2; half++)
            seen[half] = beta * norm * norm * quad_sum(seen[half]);
#pragma unroll
        for (int i = 0; i < KP / 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                S[i][e] = a * (S[i][e] - (e % 2 ? x[i].y : x[i].x) * seen[e / 2]);
    }
}

/* dS of every chunk. c.x[LA_S0] is the gradient of the final state. `to` is the place of the 16
 * columns of this warp. NULL: they are the gradient of the initial state, c.x[LA_ST]. */
template <int KP, la_decay DECAY>
__device__ __forceinline__ void walk_to_start(const call &c, const stretch &of, int walks,
                                              float *to, starts_room<KP> &s)
{
    const unit &u = of.u;
    const int walk = threadIdx.x / GROUP, warp = threadIdx.x / 32 % 4;
    const int first_column = (of.tile * walks + walk) * PANEL + warp * 16;
    const int columns = min(16, c.V - first_column);
    const float scale = (float)c.scale;
    float S[KP / 8][4] = {};
    if (of.last) load_state(c, u, first_column, columns, S);
    float (&front)[PANEL / 8][4] = *(float (*)[PANEL / 8][4]) S;
    float (&back)[PANEL / 8][4] = *(float (*)[PANEL / 8][4])(S + KP / 8 - PANEL / 8);
    const seat at = own_seat();
#pragma unroll 1
    for (int step = 0; step < of.chunks; step++) {
        const int stage = step % STARTS_STAGES;
        const int t = u.begin + (of.first + of.chunks - 1 - step) * C, n = min(C, u.end - t);
        products_wait<0>();
        products_in(S);
        operand of_state[KP / 16], d_o[4], z[4]; /* d_o, z: over the tokens */
#pragma unroll
        for (int j = 0; j < KP / 16; j++) of_state[j] = as_operand(S[2 * j], S[2 * j + 1]);
        barrier_wait(address_of(s.full + stage), parity(step / STARTS_STAGES));
        auto &chunk = s.chunk[stage];
        if (__builtin_expect(s.numbers[stage].of.nonfinite < C, 0)) {
            tokens_backwards<KP, DECAY>(c, u, t, n, first_column, columns, S);
            warp_arrives(address_of(s.free + stage));
            continue;
        }
        if (n < C) clear_behind<KP>(chunk.k, chunk.q, n, walks);
        const uint32_t k = address_for_products<DECAY>(chunk.k), q = k + tile_bytes(KP),
                       X = q + tile_bytes(KP), B = X + tile_bytes(KP);
        const uint32_t values = address_of(chunk.d_o[walk]) + transposed_at(at);
#pragma unroll
        for (int m = 0; m < 4; m++)
            load_matrices_transposed(d_o[m].of[0].x, values + m * 16 * 128);
        if (n < C) keep_before(d_o, at.pair, n);
        float W[8][4];
        products_begin();
#pragma unroll
        for (int j = 0; j < KP / 16; j++) multiply_rows(W, of_state[j], X, j * 16, j == 0);
#pragma unroll
        for (int m = 0; m < 4; m++) multiply_columns(W, d_o[m].of[0], B, m * 16);
        products_commit();
        const auto &numbers_of_chunk = s.numbers[stage];
        float2 seen[8], in[8];
        load_seen<DECAY>(seen, numbers_of_chunk.of.seen, at.pair);
        load_seen<DECAY>(in, numbers_of_chunk.in, at.pair);
        const float a = numbers_of_chunk.of.total;
        products_wait<0>();
        products_in(W);
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int e = m % 2 * 2;
            const float2 top = numbers(d_o[m / 2], e), low = numbers(d_o[m / 2], e + 1);
            const float2 by = make_float2(scale * in[m].x, scale * in[m].y);
            put_pair(d_o[m / 2], e, by.x * top.x, by.y * top.y);
            put_pair(d_o[m / 2], e + 1, by.x * low.x, by.y * low.y);
            put_pair(z[m / 2], e, -seen[m].x * W[m][0], -seen[m].y * W[m][1]);
            put_pair(z[m / 2], e + 1, -seen[m].x * W[m][2], -seen[m].y * W[m][3]);
        }
        if (DECAY == LA_TOKEN) scale_state(front, a);
        products_begin();
#pragma unroll
        for (int m = 0; m < 4; m++) {
            multiply_columns(front, d_o[m].of[0], q, m * 16);
            multiply_columns(front, z[m].of[0], k, m * 16);
        }
        products_commit();
        if constexpr (KP > PANEL) {
            if (DECAY == LA_TOKEN) scale_state(back, a);
            products_begin();
#pragma unroll
            for (int m = 0; m < 4; m++) {
                multiply_columns(back, d_o[m].of[0], q + PANEL_BYTES, m * 16);
                multiply_columns(back, z[m].of[0], k + PANEL_BYTES, m * 16);
            }
            products_commit();
        }
        products_wait<0>();
        products_in(S);
        warp_arrives(address_of(s.free + stage));
    }
    if (!to)
        store_state(c, u, first_column, columns, S);
    else if (first_column < rows_of_ends(c.V))
        store_columns<KP>(to, S);
}
#endif

/* between: [N HV][segments][rows_of_ends(V)][KP]. Segment i writes E at place i - 1: the gradient
 * of its first state, if that of its end state is zero. The last segment starts from the gradient
 * of the final state. join_starts then adds M' dS to each E. NULL: there is one segment. */
template <int KP, la_decay DECAY, typename = element>
__global__ void __launch_bounds__((MOST_WALKS + 1) * GROUP, 1)
    delta_starts(const __grid_constant__ call c, const __grid_constant__ tensor_maps maps,
                 const handed<KP> from, int tiles, int walks, int segments, float *between)
{
    threads_below<(MOST_WALKS + 1) * GROUP>();
#if HAS_WARP_GROUPS
    extern __shared__ __align__(1024) char shared[];
    starts_room<KP> &s = *(starts_room<KP> *)shared;
    enum { FOR_WALK = 232, FOR_FETCH = 40 };
    const stretch of = stretch_at(c, tiles, segments, blockIdx.x);
    if (between && of.segment == 0) return; /* the first state is for the walks of both ways */
    if (threadIdx.x == 0) {
        for (int i = 0; i < STARTS_STAGES; i++) {
            barrier_init(address_of(s.full + i), 1);
            barrier_init(address_of(s.free + i), walks * 4 * ARRIVALS_OF_WARP);
        }
        barriers_ready();
    }
    __syncthreads();
    if ((int)threadIdx.x >= walks * GROUP) {
        registers_down_to<FOR_FETCH>();
        if ((int)threadIdx.x == walks * GROUP) fetch_backwards(c, maps, of, from, walks, s);
    } else {
        registers_up_to<FOR_WALK>();
        const int64_t place = (int64_t)of.head * segments + of.segment - 1;
        const int column = of.tile * walks * PANEL + (int)threadIdx.x / 32 * 16; /* of this warp */
        walk_to_start<KP, DECAY>(
            c, of, walks, between ? between + (place * rows_of_ends(c.V) + column) * KP : NULL, s);
    }
#endif
}

enum { JOIN_WARPS = 8 };

/* Sums over a warp, of eight columns at once. A lane returns the sum of column_of_sum(). */
__device__ __forceinline__ float sum_of_columns(float (&x)[JOINED])
{
    static_assert(JOINED == 8, "");
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 4, by = 16; half > 0; half /= 2, by /= 2)
#pragma unroll
        for (int j = 0; j < half; j++) {
            const bool high = lane & by;
            const float own = high ? x[j + half] : x[j], other = high ? x[j] : x[j + half];
            x[j] = own + __shfl_xor_sync(~0u, other, by);
        }
    return quad_sum(x[0]);
}

__device__ __forceinline__ int column_of_sum() { return threadIdx.x % 32 / 4; }

/* From the last segment to the first: dS <- M' dS + E. dS replaces E in `between`. c.x[LA_S0] is
 * the gradient of the final state, which is already part of the E of the last segment. g has M of
 * each middle segment, from delta_ends. A block has JOINED value columns of a head. Each of its
 * warps has one key in JOIN_WARPS. */
template <int KP, typename = element>
__global__ void __launch_bounds__(JOIN_WARPS * 32)
    join_starts(const __grid_constant__ call c, const segments g, int rows, float *between)
{
    threads_below<JOIN_WARPS * 32>();
    const int columns = rows_of_ends(c.V), groups = columns / JOINED;
    const int first_column = blockIdx.x % groups * JOINED;
    const int64_t head = blockIdx.x / groups;
    const unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    const int chunks = (u.end - u.begin + C - 1) / C;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto after = [&](int segment) {
        return between + ((head * g.count + segment) * columns + first_column) * KP;
    };
    for (int i = threadIdx.x; i < JOINED * KP; i += JOIN_WARPS * 32)
        after(g.count - 1)[i] = initial_state_of<LA_TOKEN>(c, u, i % KP, first_column + i / KP);
    for (int segment = g.count - 2; segment > 0; segment--, __syncthreads()) {
        if (first_of_segment(chunks, segment, g.count) ==
            first_of_segment(chunks, segment + 1, g.count)) { /* as in join_maps */
            for (int i = threadIdx.x; i < JOINED * KP; i += JOIN_WARPS * 32)
                after(segment - 1)[i] = after(segment)[i];
            continue;
        }
        const bool there = lane < KP / 4; /* this lane has four keys of dS */
        float4 dS[JOINED];
#pragma unroll
        for (int j = 0; j < JOINED; j++)
            dS[j] = there ? ((const float4 *)after(segment))[j * (KP / 4) + lane]
                          : make_float4(0, 0, 0, 0);
        /* a state with a NaN times an M of zeros is still a NaN */
        const bool zero = g.vanished[head * g.count + segment] || !there;
        const float *const M =
            g.ends + ((head * g.count + segment) * rows + columns) * KP + lane * 4;
        float *const to = after(segment - 1) + column_of_sum() * KP;
#pragma unroll 4
        for (int key = warp; key < KP; key += JOIN_WARPS) {
            float4 m = make_float4(0, 0, 0, 0);
            if (!zero && key < rows - columns) m = *(const float4 *)(M + key * KP);
            float sum[JOINED];
#pragma unroll
            for (int j = 0; j < JOINED; j++)
                sum[j] = m.x * dS[j].x + m.y * dS[j].y + m.z * dS[j].z + m.w * dS[j].w;
            const float all = sum_of_columns(sum);
            if (lane % 4 == 0) to[key] += all;
        }
    }
}

#endif
