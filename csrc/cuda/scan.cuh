/* Token by token: the recurrent mode, and every dtype that tensor cores would round.
 *
 * A block goes through one sequence of one value head, with some of its value columns. A thread has
 * ROWS keys of STRIP columns of the state in registers, so that each element of q or k that it
 * reads from shared memory serves STRIP columns. PARTS lanes of a warp share the columns and halve
 * their sums step by step. The prediction of the delta rule is needed in every lane: it goes back
 * in the same way. The read is only stored: its sum is finished during the next token.
 *
 * Tokens come through shared memory in batches, with two buffers. While the block works on one
 * batch, the next one is written to the other buffer, and the one after that is on its way to
 * registers. Loading and working are two duties. With many heads every warp has both. With few
 * heads a block has warps for each, so that the chain of tokens waits for nothing else. An op with
 * a normaliser has a warp for z.
 *
 * Included by one file per real type. */
#include "kernels.cuh"
#include "scan_loader.cuh"
#include "states.cuh"

#define LA_FN static __device__ __forceinline__
#define LANE_ZERO 0
#define LANE_SUM(x) (x)
#define UNROLL _Pragma("unroll")
#define JOIN(x, y, W) join(x, y)

/* Register w holds column w ^ turn of the STRIP columns, where turn depends on the lane. Then
 * `halves` gives away the same registers in every lane, without a selection. */
template <typename real, int PARTS> struct recurrence {
    typedef real lane, lane_of_state;
    enum { MAX_STRIP = STRIP, STRIPS = 32 / PARTS }; /* strips of a warp: in neighbouring lanes */

    static __device__ __forceinline__ int part() { return threadIdx.x % 32 / STRIPS; }
    static __device__ __forceinline__ int turn() { return part() % 2 * 2 + part() / 2 % 2; }

    static __device__ __forceinline__ real beside(real x, int parts)
    {
        return __shfl_xor_sync(~0u, x, parts * STRIPS);
    }

    /* x[0] becomes the sum of column `turn` over the PARTS lanes. The other elements are used
     * up. */
    static __device__ __forceinline__ void halves(real (&x)[STRIP])
    {
        const real third = beside(x[2], 1), fourth = beside(x[3], 1);
        x[0] += third;
        x[1] += fourth;
        x[0] += beside(x[1], 2);
#pragma unroll
        for (int step = 4; step < PARTS; step *= 2) x[0] += beside(x[0], step);
    }

    /* x is a prediction if there is a y. A read, y or x alone, can wait: `work` sums it. */
    static __device__ __forceinline__ void join(real *x, const real *y)
    {
        if (!y) return;
        real sum[STRIP] = {x[0], x[1], x[2], x[3]};
        halves(sum);
        x[0] = sum[0];
        x[1] = beside(x[0], 2);
        x[2] = beside(x[0], 1);
        x[3] = beside(x[1], 1);
    }

#include "../recurrence.h"
};

/* The warps of each duty: the first `loaders` load; those from `first` on work. */
struct duties {
    int loaders, first, workers;
};

/* A number that is the same in all lanes, in a way that the compiler can see. It moves no shuffle
 * past a branch that may divide a warp. */
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(~0u, x, 0); }

/* The key of row i of a thread. */
template <typename real, int PARTS> __device__ __forceinline__ int key_of_row(int part, int i)
{
    constexpr int PIECE = 16 / sizeof(real);
    return i / PIECE * PIECE * PARTS + part * PIECE + i % PIECE;
}

/* Work on n tokens. READ: they only read the state, which all tokens have written. */
template <bool READ, la_rule RULE, typename real, la_decay DECAY, int KP>
__device__ __forceinline__ void work(real (&S)[rows<KP> * STRIP], scanned<real, DECAY, KP> *tokens,
                                     int n, int strip)
{
    constexpr int ROWS = rows<KP>, PARTS = parts<KP>;
    typedef recurrence<real, PARTS> math;
    typedef scanned<real, DECAY, KP> token;
    constexpr int PIECE = 16 / sizeof(real), APART = sizeof(token) / sizeof(real);
    const int part = math::part(), turn = math::turn();
    const real *from = tokens->q + part * PIECE, *columns = &tokens->v[turn][strip * STRIP];
    const real *scalars = tokens->scalars;
    real *to = tokens->o + strip * STRIP + turn; /* the place of the read of the previous token */
    real q[ROWS], k[ROWS], a[DECAY == LA_KEY ? ROWS : 1] = {}, v[STRIP];
    typename math::la_operands x = {};
    x.q = q, x.k = x.x = k, x.a = a, x.v = v;
    real skip = 0;
    const auto read_token = [&] {
        read_rows<PARTS>(q, from);
        read_rows<PARTS>(k, from + KP);
        if constexpr (DECAY == LA_KEY) read_rows<PARTS>(a, from + 2 * KP);
        read_four(v, columns);
        if (DECAY != LA_TOKEN && RULE != LA_DELTA) return;
        real of_token[4];
        read_four(of_token, scalars);
        if (DECAY == LA_TOKEN) a[0] = of_token[token::A];
        if (la_weighs(DECAY, RULE)) {
            x.beta = of_token[token::BETA];
            skip = part == 0 ? of_token[token::SKIP] : 0;
        }
        if (RULE == LA_DELTA) {
            x.beta = of_token[token::BETA];
            x.own =
                part == 0 ? of_token[token::QK] : 0; /* the reads of the parts will be added up */
        }
    };
    real o[STRIP], before[STRIP] = {};
    read_token();
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        math::halves(before);
        if constexpr (READ)
            math::la_read_all(math::la_strip_of(S, STRIP), STRIP, ROWS, &x, o);
        else
            math::la_token(math::la_strip_of(S, STRIP), {}, STRIP, ROWS, &x, o, DECAY, RULE);
        if (la_weighs(DECAY, RULE) && skip != 0)
#pragma unroll
            for (int w = 0; w < STRIP; w++) o[w] += skip * v[w];
        if (i + 1 < n) {
            from += APART;
            columns += APART;
            scalars += APART;
        }
        read_token(); /* after the last token this reads it again, without effect */
        if (i > 0) {
            *to = before[0]; /* every fourth part stores the same number */
            to += APART;
        }
#pragma unroll
        for (int w = 0; w < STRIP; w++) before[w] = o[w];
    }
    math::halves(before);
    *to = before[0];
}

/* The same for z, as a column of ones. One warp has all of it. */
template <typename real, la_decay DECAY, int KP, int KEYS>
__device__ __forceinline__ void work_on_z(real (&z)[KEYS], scanned<real, DECAY, KP> *tokens, int n,
                                          bool writes, bool reads)
{
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int i = 0; i < n; i++) {
        real den = 0;
#pragma unroll
        for (int j = 0; j < KEYS; j++) {
            const int key = key_of_lane(lane, j);
            if (key >= KP) continue;
            if (writes) z[j] += tokens[i].k[key];
            den += z[j] * tokens[i].q[key];
        }
        if (!reads) continue;
        den = warp_sum(den);
        if (lane == 0) tokens[i].scalars[tokens->DEN] = den;
    }
}

template <typename real, la_decay DECAY, la_rule RULE, int KP>
__global__ void __launch_bounds__(most<real, KP>::THREADS)
    scan(const __grid_constant__ call c, const __grid_constant__ duties have)
{
    constexpr int ROWS = rows<KP>, PARTS = parts<KP>;
    typedef recurrence<real, PARTS> math;
    typedef batch_loader<real, DECAY, RULE, KP> loader;
    typedef typename loader::token token;
    constexpr bool PLAIN = loader::PLAIN; /* these may be normalised and noncausal */
    extern __shared__ __align__(16) char scan_shared[];
    const int batch = have.loaders * most<real, KP>::TOKENS,
              columns = have.workers * STRIP * math::STRIPS;
    const int tiles = (c.V + columns - 1) / columns, tile = blockIdx.x % tiles, v0 = tile * columns;
    const int64_t head = blockIdx.x / tiles;
    const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    unit u = unit_of(c, (int)(head / c.HV), (int)(head % c.HV));
    u.n = warp_uniform(state_index_of(c, u.n));
    u.begin = warp_uniform(u.begin);
    u.end = warp_uniform(u.end);
    if (u.n < 0) { /* a row of a step without a state */
        for (int i = threadIdx.x; i < min(columns, c.V - v0); i += blockDim.x)
            store(at(c.x[LA_O], u.b, 0, u.hv, v0 + i), c.x[LA_O].dtype, (real)0);
        return;
    }

    const int strip = (warp - have.first) * math::STRIPS + lane % math::STRIPS;
    const bool loads = warp < have.loaders, ones = PLAIN && warp == have.first + have.workers;
    const bool works = warp >= have.first && warp < have.first + have.workers &&
                       v0 + (warp - have.first) * STRIP * math::STRIPS < c.V;
    const auto number_of = [&](const state_of_head &x, int i) {
        return x.place(key_of_row<real, PARTS>(math::part(), i / STRIP),
                       v0 + strip * STRIP + (i % STRIP ^ math::turn()));
    };
    const auto number_of_z = [&](const view &x, int i) {
        const int key = key_of_lane(lane, i);
        return x.data && key < c.K ? at(x, u.n, u.hv, key) : NULL;
    };
    real S[ROWS * STRIP] = {}, z[PLAIN ? loader::KEYS : 1] = {};
    if (const state_of_head from(c, c.x[LA_S0], u.n, u.hv); from.first && works)
        load_numbers(S, c.x[LA_S0].dtype, [&](int i) { return number_of(from, i); });
    if constexpr (PLAIN)
        if (ones)
            load_numbers(z, c.x[LA_Z0].dtype, [&](int i) { return number_of_z(c.x[LA_Z0], i); });

    /* The noncausal form goes through the keys first, which write, and then through the queries,
     * which read. */
    const bool twice = PLAIN && !c.causal;
    const int written = twice ? min(u.end, c.keys) : u.end;
    const auto batches_to = [&](int end) {
        return (end - u.begin) / batch + ((end - u.begin) % batch != 0);
    };
    const int batches = batches_to(written);
    const int count = twice ? batches + batches_to(min(u.end, c.queries)) : batches;
    const auto first_of = [&](int j) { return u.begin + (j < batches ? j : j - batches) * batch; };
    const auto room = [&](int j) { return (token *)scan_shared + j % 2 * batch; };
    const auto end_of = [&](int j) { return j < batches ? written : min(u.end, c.queries); };
    const auto size_of = [&](int j) { return min(batch, end_of(j) - first_of(j)); };
    const auto reads = [&](int j) { return !PLAIN || c.causal || j >= batches; };
    loader feed(c, u, have.loaders, warp, v0, columns);
    /* Turn j works on batch j, writes the next one, fetches the one after that, and stores the one
     * before. */
#pragma unroll 1
    for (int j = -2; j <= count; j++) {
        if (loads) {
            if (j >= -1 && j + 1 < count) feed.put(room(j + 1), size_of(j + 1));
            if (j + 2 < count) feed.fetch(first_of(j + 2), size_of(j + 2));
            if (j >= 1 && reads(j - 1))
                feed.store_reads(room(j - 1), first_of(j - 1), size_of(j - 1));
        }
        const bool there = j >= 0 && j < count;
        if constexpr (PLAIN) {
            const bool writes = c.causal || j < batches;
            if (there && ones) work_on_z(z, room(j), size_of(j), writes, reads(j));
            if (there && works && writes) work<false, RULE>(S, room(j), size_of(j), strip);
            if (there && works && !writes) work<true, RULE>(S, room(j), size_of(j), strip);
        } else if (there && works) {
            work<false, RULE>(S, room(j), size_of(j), strip);
        }
        __syncthreads();
    }

    if (const state_of_head to(c, c.x[LA_ST], u.n, u.hv); to.first && works)
        store_numbers(S, c.x[LA_ST].dtype, [&](int i) { return number_of(to, i); });
    if constexpr (PLAIN)
        if (ones && tile == 0)
            store_numbers(z, c.x[LA_ZT].dtype, [&](int i) { return number_of_z(c.x[LA_ZT], i); });
}

/* Every tile of columns reads the z of a step, so it changes after all of them are done. */
template <typename real, int KEYS>
__global__ void __launch_bounds__(32) advance_z(const __grid_constant__ call c)
{
    typedef in_flight<real> kind;
    unit u = unit_of(c, blockIdx.x / c.HV, blockIdx.x % c.HV);
    u.n = state_index_of(c, u.n);
    if (u.n < 0) return;
    const int lane = threadIdx.x % 32, size = la_size_of(c.x[LA_K].dtype);
    real k[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; i += 4) {
        const int key = key_of_lane(lane, i);
        real four[4];
        kind::numbers_of(
            four, kind::load(at(c.x[LA_K], u.b, 0, u.h) + key * size, c.x[LA_K].dtype, c.K - key),
            c.x[LA_K].dtype);
#pragma unroll
        for (int e = 0; e < 4; e++) k[i + e] = four[e];
    }
    norm_and_map(c, 1, k, by_fours());
#pragma unroll
    for (int i = 0; i < KEYS; i++) {
        if (key_of_lane(lane, i) >= c.K) continue;
        char *z = at(c.x[LA_Z0], u.n, u.hv, key_of_lane(lane, i));
        store(z, c.x[LA_Z0].dtype, load<real>(z, c.x[LA_Z0].dtype) + k[i]);
    }
}

/* If there are more blocks than processors, all WORKERS warps have both duties. Otherwise there are
 * as many blocks as processors can take, and loaders beside the workers. */
template <typename real, la_decay DECAY, la_rule RULE, int KP>
static cudaError_t launch_scan(const call &c, cudaStream_t stream)
{
    const auto kernel = scan<real, DECAY, RULE, KP>;
    const int64_t heads = (int64_t)c.N * c.HV;
    const auto blocks = [&](int workers) {
        const int columns = workers * STRIP * (32 / parts<KP>);
        return heads * ((c.V + columns - 1) / columns);
    };
    int device, processors;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    duties x = {min((int)WORKERS, most<real, KP>::LOADERS), 0, WORKERS};
    if (blocks(most<real, KP>::WORKERS_BESIDE) <= processors) {
        x.loaders = x.first = most<real, KP>::LOADERS;
        x.workers = blocks(1) > processors ? 2 : 1;
    }
    /* at most 75 KiB */
    const int bytes =
        2 * x.loaders * most<real, KP>::TOKENS * (int)sizeof(scanned<real, DECAY, KP>);
    call d = c;
    const bool in_place = c.x[LA_ZT].data && c.x[LA_ZT].data == c.x[LA_Z0].data;
    if (in_place) d.x[LA_ZT].data = NULL;
    const int warps = x.first + x.workers + is_normalised(&c, DECAY, RULE);
    error = launch(kernel, blocks(x.workers), warps * 32, bytes, stream, d, x);
    if (error == cudaSuccess && in_place)
        error = launch(advance_z<real, (KP <= 256 ? 8 : 16)>, heads, 32, 0, stream, c);
    return error;
}

template <typename real, la_decay DECAY, la_rule RULE>
static cudaError_t scan_any(const call &c, cudaStream_t stream)
{
    /* float64 serves for checks, so it has fewer kernels to compile */
    if constexpr (sizeof(real) == 4)
        if (c.K <= 64) return launch_scan<real, DECAY, RULE, 64>(c, stream);
    if (c.K <= 128) return launch_scan<real, DECAY, RULE, 128>(c, stream);
    if (c.K <= 256) return launch_scan<real, DECAY, RULE, 256>(c, stream);
    return launch_scan<real, DECAY, RULE, 512>(c, stream);
}
