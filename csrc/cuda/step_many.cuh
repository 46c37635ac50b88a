/* The step of many states. Each state passes through shared memory: the copy engine fetches it and
 * puts it back.
 *
 * A block of step.cuh waits for a state, works, writes it and ends. While it waits or works, its
 * share of the memory bandwidth is idle. Here a block stays. It has as many stages as its shared
 * memory holds, and while it works on one state, others come and go. CONSUMERS warps compute the
 * token. Each stage has a producer warp, which fetches the state by the copy engine and loads q, k,
 * v and the gates itself.
 *
 * A consumer thread has four keys of eight columns. In the layout [K][V] eight lanes go along 32
 * columns, four such groups share the 16 keys of the warp, and two sets of eight consumer warps
 * share the columns. In [V][K] a warp goes along the keys of eight columns. The keys are shared and
 * the sums added up as in step.cuh, so the bits of a row do not depend on the number of rows.
 * Included by one file per layout, which defines V_FIRST. */
#include "copy.cuh"
#include "kernels.cuh"
#include "token.cuh"

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL _Pragma("unroll")
#define JOIN(x, y, W) join(x, y)
typedef float real, lane, lane_of_state;
enum {
    MOST = 128, /* keys, and columns */
    KEYS = 4,   /* of a thread */
    COLUMNS = 8,
    MAX_STRIP = COLUMNS,
    CONSUMERS = MOST * MOST / (32 * KEYS * COLUMNS),
    KEY_CONSUMERS = V_FIRST ? 1 : MOST / (4 * KEYS), /* the warps that share the keys of a column */
    PIECES = 2,
    MOST_STAGES = 4, /* with more warps each would have too few registers */
    /* Smaller heads go to step.cuh: the stages of a block would have too few bytes in flight. */
    LEAST_BYTES = 32 * 1024,
};

/* A token as the recurrence sees it, with zeros past K and V, and its result. */
struct alignas(16) token_room {
    float q[MOST], k[MOST], a[MOST], v[MOST], o[MOST];
    float qk, beta;
    bool live; /* there is a state */
};

struct alignas(128) step_many_room {
    token_room token[MOST_STAGES];
    float4 sums[CONSUMERS][32]; /* [K][V]: the sums over the keys of a consumer warp, see join */
    uint64_t full[MOST_STAGES], empty[MOST_STAGES];
};
extern __shared__ __align__(128) char step_many_shared[]; /* a step_many_room, then the stages */

/* Key i and column w of this thread. */
__device__ __forceinline__ int key_of(int i)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return (V_FIRST ? lane : warp % KEY_CONSUMERS * 4 + lane / 8) * KEYS + i;
}

__device__ __forceinline__ int column_of(int w)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return V_FIRST ? warp * COLUMNS + w
                   : warp / KEY_CONSUMERS * 64 + w / 4 * 32 + lane % 8 * 4 + w % 4;
}

/* x[0..N/2) <- half of the sums over lanes that differ in bit `step`: the first half in the lanes
 * where it is 0. */
template <int N, int M> __device__ __forceinline__ void sum_half(float (&x)[M], int step)
{
    const bool second = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const float keep = second ? x[i + N / 2] : x[i], write_four = second ? x[i] : x[i + N / 2];
        x[i] = keep + __shfl_xor_sync(~0u, write_four, step);
    }
}

/* The sums over all threads that have these columns, in x and, unless it is NULL, in y. They are
 * added up in the order of the butterflies of step.cuh, but each sum only by the lanes that keep
 * it. */
LA_FN void join(float *x, float *y)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float z[2 * COLUMNS];
    /* at the end lane i has the sum whose number is i with its bits reversed */
    if constexpr (V_FIRST) {
#pragma unroll
        for (int w = 0; w < COLUMNS; w++) z[w] = x[w], z[COLUMNS + w] = y ? y[w] : 0;
        int step = 1;
        if (y) sum_half<16>(z, 1), step = 2;
        sum_half<8>(z, step);
        sum_half<4>(z, 2 * step);
        sum_half<2>(z, 4 * step);
        for (step *= 8; step < 32; step *= 2) z[0] += __shfl_xor_sync(~0u, z[0], step);
#pragma unroll
        for (int w = 0; w < COLUMNS; w++) {
            const int reversed = (w & 4) / 4 + (w & 2) + (w & 1) * 4;
            x[w] = __shfl_sync(~0u, z[0], y ? 2 * reversed : reversed);
            if (y) y[w] = __shfl_sync(~0u, z[0], 2 * reversed + 1);
        }
    } else {
        /* bit 3 of a lane says which four columns it has, bit 4 whether they are of x or of y */
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float four[4] = {x[e], y ? y[e] : x[4 + e], y ? x[4 + e] : 0, y ? y[4 + e] : 0};
#pragma unroll
            for (int i = 0; i < 4; i++) z[4 * i + e] = four[i];
        }
        if (y) {
            sum_half<16>(z, 8);
            sum_half<8>(z, 16);
        } else {
            sum_half<8>(z, 8);
#pragma unroll
            for (int e = 0; e < 4; e++) z[e] += __shfl_xor_sync(~0u, z[e], 16);
        }
        step_many_room *s = (step_many_room *)step_many_shared;
        some_warps_wait(CONSUMERS); /* all warps have read the last sums */
        s->sums[warp][lane] = make_float4(z[0], z[1], z[2], z[3]);
        some_warps_wait(CONSUMERS);
        float sum[4] = {};
#pragma unroll
        for (int i = 0; i < KEY_CONSUMERS; i++) {
            const float4 one = s->sums[warp / KEY_CONSUMERS * KEY_CONSUMERS + i][lane];
            sum[0] += one.x;
            sum[1] += one.y;
            sum[2] += one.z;
            sum[3] += one.w;
        }
#pragma unroll
        for (int w = 0; w < COLUMNS; w++) {
            x[w] = __shfl_sync(~0u, sum[w % 4], w / 4 * 8 + lane % 8);
            if (y) y[w] = __shfl_sync(~0u, sum[w % 4], 16 + w / 4 * 8 + lane % 8);
        }
    }
}

#include "../recurrence.h"

#if HAS_COPY_ENGINE
/* Four neighbouring numbers in shared memory. */
__device__ __forceinline__ void read_four(float *x, const float *from)
{
    const float4 y = *(const float4 *)from;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}

__device__ __forceinline__ void write_four(float *to, const float (&x)[4])
{
    *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
}

/* The producer warp of stage s: every stages-th head of this block. A state goes and the next one
 * comes in PIECES pieces. A piece comes as soon as the old one has left its place. */
template <la_decay DECAY, la_rule RULE>
__device__ __forceinline__ void produce(const call &c, step_many_room &room, uint32_t stage, int s,
                                        int stages, int bytes)
{
    const uint32_t full = address_of(&room.full[s]), empty = address_of(&room.empty[s]);
    const int lane = threadIdx.x % 32, piece = bytes / PIECES;
    token_room &token = room.token[s];
    char *state = NULL, *o_row = NULL;
    int o_head = 0;
    float den = 0;
    int round = 0;
    const auto put_back = [&] {
        barrier_wait(empty, round - 1 & 1);
        if (lane == 0 && state)
            for (int i = 0; i < PIECES; i++)
                engine_copy_back(state + i * piece, stage + i * piece, piece);
        float o[4];
        read_four(o, token.o + lane * 4);
        if (la_weighs(DECAY, RULE))
#pragma unroll
            for (int e = 0; e < 4; e++) o[e] = with_skip(c, o_head, o[e], token.v[lane * 4 + e]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int column = lane * 4 + e;
            if (column < c.V)
                store(o_row + column * c.x[LA_O].stride[3] * la_size_of(c.x[LA_O].dtype),
                      c.x[LA_O].dtype, state ? finish(c, o[e], den) : 0.0f);
        }
        __syncwarp();
    };

    for (int u = blockIdx.x + s * gridDim.x; u < c.N * c.HV; u += stages * gridDim.x, round++) {
        const int n = u / c.HV, hv = u % c.HV, h = hv / (c.HV / c.H),
                  state_index = state_index_of(c, n);
        four_bits q_bits[1], k_bits[1], a_bits[1];
        uint64_t g_bits = 0, beta_bits = 0;
        load_key_bits<KEYS>(c, c.x[LA_Q], n, h, q_bits);
        load_key_bits<KEYS>(c, c.x[LA_K], n, h, k_bits);
        if (DECAY == LA_KEY) load_decay_bits<KEYS>(c, n, hv, a_bits);
        if (DECAY == LA_TOKEN) g_bits = bits_of(at(c.x[LA_G], n, 0, hv), c.x[LA_G].dtype);
        const view &factor = c.x[la_weighs(DECAY, RULE) ? LA_WEIGHT : LA_BETA];
        const bool has_factor = RULE == LA_DELTA || (la_weighs(DECAY, RULE) && factor.data);
        if (has_factor) beta_bits = bits_of(at(factor, n, 0, hv), factor.dtype);
        const four_bits v_bits =
            load_four_bits(at(c.x[LA_V], n, 0, hv, lane * 4), c.x[LA_V].dtype, c.V - lane * 4);

        if (round) put_back();
        o_row = at(c.x[LA_O], n, 0, hv);
        o_head = hv;
        state = state_index < 0 ? NULL : at(c.x[LA_S0], state_index, hv);
        if (lane == 0 && state) {
            barrier_expect(full, bytes);
            static_assert(PIECES == 2, "one wait each");
            engine_has_read<1>();
            engine_copy(stage, state, piece, full);
            engine_has_read<0>();
            engine_copy(stage + piece, state + piece, piece, full);
        } else if (lane == 0) {
            barrier_arrive(full);
        }

        float q[KEYS], k[KEYS], a[KEYS], v[4], qk = 0;
        make_key(c, q_bits, c.x[LA_Q].dtype, 0, q);
        make_key(c, k_bits, c.x[LA_K].dtype, 1, k);
        if (DECAY == LA_KEY) make_decay(c, a_bits, a);
        numbers(v, v_bits, c.x[LA_V].dtype);
        write_four(token.q + lane * 4, q);
        write_four(token.k + lane * 4, k);
        write_four(token.v + lane * 4, v);
        if (DECAY == LA_KEY) write_four(token.a + lane * 4, a);
        if (RULE == LA_DELTA) {
#pragma unroll
            for (int i = 0; i < KEYS; i++) qk += q[i] * k[i];
            qk = warp_sum(qk);
        }
        if (c.normaliser != LA_UNNORMALISED && state) {
            float next[KEYS];
            char *z = at(c.x[LA_Z0], state_index, hv);
            den = warp_sum(denominator(c, z, q, k, next));
            store_keys(z, c.x[LA_Z0].dtype, c.K, next);
        }
        if (lane == 0) {
            if (DECAY == LA_TOKEN) token.a[0] = decay_of(number(g_bits, c.x[LA_G].dtype), c.gate);
            token.beta = has_factor ? number(beta_bits, factor.dtype) : 1;
            token.qk = qk;
            token.live = state != NULL;
        }
        warp_arrives(full);
    }
    if (round) put_back();
    if (lane == 0) engine_has_read<0>();
}

/* The part of a thread of a state, between shared memory and the [keys][columns] of the
 * recurrence. */
template <bool LOAD>
__device__ __forceinline__ void move_state(float (&S)[KEYS][COLUMNS], char *stage, const call &c,
                                           la_dtype dtype)
{
    const int size = la_size_of(dtype);
#pragma unroll
    for (int i = 0; i < KEYS * COLUMNS / 4; i++) {
        /* four neighbouring numbers: columns of key i / 2, or the keys of column i */
        const int key = key_of(V_FIRST ? 0 : i / 2), column = column_of(V_FIRST ? i : i % 2 * 4);
        char *four = stage + (V_FIRST ? column * c.K + key : key * c.V + column) * size;
        const bool there = key < c.K && column < c.V;
        float x[4] = {};
        if (LOAD && there) load_four(x, four, dtype, 4, true);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float &of_S = V_FIRST ? S[e][i] : S[i / 2][i % 2 * 4 + e];
            if (LOAD)
                of_S = x[e];
            else
                x[e] = of_S;
        }
        if (!LOAD && there) store_four(four, x, dtype, 4, true);
    }
}

/* One branch on the dtype serves all numbers. */
template <bool LOAD>
__device__ __forceinline__ void move_state(float (&S)[KEYS][COLUMNS], char *stage, const call &c)
{
    if (c.x[LA_S0].dtype == LA_F32)
        move_state<LOAD>(S, stage, c, LA_F32);
    else
        move_state<LOAD>(S, stage, c, LA_BF16);
}

#endif

template <la_decay DECAY, la_rule RULE>
static __global__ void __launch_bounds__((CONSUMERS + MOST_STAGES) * 32, 1)
    step_many(const __grid_constant__ call c, const int stages)
{
#if HAS_COPY_ENGINE
    step_many_room &room = *(step_many_room *)step_many_shared;
    char *first_stage = step_many_shared + sizeof(step_many_room);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int bytes = c.K * c.V * la_size_of(c.x[LA_S0].dtype);
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; s++) {
            /* the bytes of the copy engine, and the arrival of the producer */
            barrier_init(address_of(&room.full[s]), 1 + ARRIVALS_OF_WARP);
            barrier_init(address_of(&room.empty[s]), CONSUMERS * ARRIVALS_OF_WARP);
        }
        barriers_ready();
    }
    __syncthreads();

    if (warp >= CONSUMERS) {
        const int s = warp - CONSUMERS;
        produce<DECAY, RULE>(c, room, address_of(first_stage + s * bytes), s, stages, bytes);
        return;
    }

    int s = 0, phase = 0;
    for (int u = blockIdx.x; u < c.N * c.HV; u += gridDim.x) {
        token_room &token = room.token[s];
        barrier_wait(address_of(&room.full[s]), phase);
        if (token.live) {
            float S[KEYS][COLUMNS], q[KEYS], k[KEYS], v[COLUMNS], o[COLUMNS];
            float a[DECAY == LA_KEY ? KEYS : 1];
            char *stage = first_stage + s * bytes;
            move_state<true>(S, stage, c);
            read_four(q, token.q + key_of(0));
            read_four(k, token.k + key_of(0));
            read_four(v, token.v + column_of(0));
            read_four(v + 4, token.v + column_of(4));
            if constexpr (DECAY == LA_KEY)
                read_four(a, token.a + key_of(0));
            else
                a[0] = token.a[0];
            la_operands x = {};
            x.q = q, x.k = x.x = k, x.a = a, x.v = v;
            x.beta = token.beta, x.own = token.qk;
            la_token(la_strip_of(&S[0][0], COLUMNS), {}, COLUMNS, KEYS, &x, o, DECAY, RULE);
            move_state<false>(S, stage, c);
            stores_before_copies();
#pragma unroll
            for (int w = 0; w < COLUMNS; w += 4) /* all of them have the sums: one stores them */
                if (V_FIRST ? lane == w : warp % KEY_CONSUMERS == 0 && lane / 8 == w / 4)
                    *(float4 *)(token.o + column_of(w)) =
                        make_float4(o[w], o[w + 1], o[w + 2], o[w + 3]);
        }
        warp_arrives(address_of(&room.empty[s]));
        if (++s == stages) s = 0, phase ^= 1;
    }
#endif
}

/* Returns cudaErrorNotSupported, with nothing done, where this kernel is not faster or the states
 * do not suit it. Each head must lie in one piece that the copy engine can take, and there must be
 * enough heads for every block to overlap copies and work. */
template <la_decay DECAY, la_rule RULE>
static cudaError_t step_many_any(const call &c, cudaStream_t stream)
{
    const int size = c.x[LA_S0].dtype == LA_F32 ? 4 : 2, bytes = c.K * c.V * size;
    const int64_t *stride = c.x[LA_S0].stride, heads = (int64_t)c.N * c.HV;
    const int length = V_FIRST ? c.K : c.V;
    const bool one_piece = stride[V_FIRST ? 3 : 2] == length && stride[V_FIRST ? 2 : 3] == 1;
    const bool aligned = length % 4 == 0 && bytes % (16 * PIECES) == 0 &&
                         (uintptr_t)c.x[LA_S0].data % 16 == 0 &&
                         (stride[0] | stride[1]) * size % 16 == 0;
    if (c.K > MOST || c.V > MOST || bytes < LEAST_BYTES || !one_piece || !aligned)
        return cudaErrorNotSupported;

    const auto kernel = step_many<DECAY, RULE>;
    int device, processors = 0, shared = 0;
    cudaFuncAttributes code;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess && heads < 2 * processors) return cudaErrorNotSupported;
    if (error == cudaSuccess) error = most_shared_memory(device, &shared);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, kernel);
    if (error != cudaSuccess) return error;
    const int stages = min((shared - (int)sizeof(step_many_room)) / bytes, (int)MOST_STAGES);
    if (code.binaryVersion < 90 || stages < 2) return cudaErrorNotSupported;
    const int room = (int)sizeof(step_many_room) + stages * bytes;
    return launch(kernel, processors, (CONSUMERS + stages) * 32, room, stream, c, stages);
}
