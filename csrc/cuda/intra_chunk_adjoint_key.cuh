/* intra_chunk_adjoint.cuh for decays per key. The decay from after token j through token i differs
 * from key to key, so it is part of the operands, in blocks of 16 tokens: key_decays.cuh has f, h
 * and t, and the tiles q f, k h and k / f. Rows of q read, and so do rows of x, which is k unless
 * the caller gave it. Rows of k are written. Let dP be the gradient of q . k, and dL that of x . k:
 *
 *     dq_i = f_i (dO_i S' t_0 .. t_(I-1) + .. + dP_I(I-1) (k h)_(I-1) + dP_II (k / f)_I)
 *     dk_j = h_j (U_j dS' t_3 .. t_(J+1) + .. + dP_(J+1)J' (q f)_(J+1)) + dP_JJ' (q f)_J / f_j
 *
 * and dx as dq, with dL in the place of dP and Z in that of dO; dk takes the products of dL' and
 * x f too. The sums over blocks go by the scheme of Horner, from the most distant block on. Within
 * a block dP_II and dL_II are strictly lower triangles. q . k of one token is a term of its own.
 *
 * In a block whose decays leave the reach of tiles, pairs are multiplied one by one in float32.
 *
 * The gradient of log a_i is the sum of all terms that pass token i. The terms are
 * N_mj = (gradient) * (value) for all pairs m >= i > j, where j may be the state before the chunk
 * and m the one after it. There are four kinds of them:
 *
 *     ends      pairs of blocks that end at a token of the block: from its end up
 *     begins    pairs of blocks that begin there: all before token i
 *     passes    pairs of blocks that pass the whole block
 *     near      pairs within the block: those that end at i or later, without those that begin there
 *
 * The last is a difference of sums of the same products, which have the same roundings, over 16
 * tokens. It costs an ulp of float32 of these sums; docs/decisions/0010 is about whole sequences.
 *
 * A row that reads before the decay of its token has f_(i-1) in the place of f_i, and its end does
 * not pass token i. So does q with a bonus (the rule BONUS; here it is additive), whose q . k of one
 * token has the bonus as a factor. So does x if c.predicts_before.
 *
 * DPLR writes rows of y too, with - p in the place of the values (prepare_dplr.cuh): each dP and dL
 * then has one tile for k and one for y. The gradient of x^ S + (x k) V, times -1, is in the place
 * of Z.
 *
 * A group of four warps has q, one has x, one has k, and one has y. A warp has a block of 16
 * tokens. Up to the scores it has rows of accumulators; then each lane has two keys. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_ADJOINT_KEY_CUH
#define LINATTN_CUDA_INTRA_CHUNK_ADJOINT_KEY_CUH

#include "adjoint_rows.cuh"
#include "key_decays.cuh"

enum {
    KEYS = PANEL, /* of a block */
    BLOCKS = BLOCKS_OF_TOKENS,
    BLOCK_PAIRS = BLOCKS * (BLOCKS - 1) / 2,
    ROLE_THREADS = BLOCKS * 32
};

/* The groups of warps: those whose rows read, and those whose rows are written. */
template <la_rule RULE> constexpr int readers = la_predicts(RULE) ? 2 : 1;
template <la_rule RULE> constexpr int writers = RULE == LA_DPLR ? 2 : 1;
template <la_rule RULE>
constexpr int intra_key_threads = (readers<RULE> + writers<RULE>)*ROLE_THREADS;

/* Sums of a warp for its 16 tokens, [rows][KEYS] floats. The same key of four neighbouring rows lies
 * in different banks. */
template <int N> struct key_rows_of_block {
    float x[N * KEYS];
    __device__ __forceinline__ float2 &two(int row, int key)
    {
        return *(float2 *)&x[row * KEYS + (key ^ (row % 4 * 8))];
    }
};

struct alignas(16) decays_of_group : decays_of_chunk<KEYS> {};

/* Where shared memory has been used, it is used again: first there is a panel of value columns. Then
 * the tiles k / f lie there, and at last the sums of the warps, also over dP and dL. */
template <la_rule RULE> struct intra_key_room {
    static constexpr int READERS = readers<RULE>, WRITERS = writers<RULE>;
    struct sums_at_end {
        alignas(1024) char near[WRITERS][PANEL_BYTES]; /* k / f */
        key_rows_of_block<16> of_reads[READERS][BLOCKS];
        key_rows_of_block<16> of_writes[WRITERS][BLOCKS];
        key_rows_of_block<8> of_near[WRITERS][BLOCKS];
    };
    union {
        struct {
            alignas(1024) intra_panel<KEYS, RULE> panel;
            alignas(1024) char scores[READERS][WRITERS][PANEL_BYTES]; /* dP, dL */
        };
        sums_at_end sums;
    };
    alignas(1024) char reads[READERS][PANEL_BYTES];  /* q f, x f */
    alignas(1024) char writes[WRITERS][PANEL_BYTES]; /* k h, y h */
    decays_of_group decays[READERS + WRITERS];       /* each group has its own */
    /* own: dP_ii, of every group that writes; under the delta rule then Z_i . E_i */
    float beta[C], own[READERS][C];
    struct alignas(16) {
        /* sums of terms that end in a block and pass another one; that begin in a block and go to
         * the state after the chunk; that begin in a block, if it is not slow */
        float passes[READERS][BLOCK_PAIRS][KEYS], to_end[WRITERS][BLOCKS][KEYS],
            begins[WRITERS][BLOCKS][KEYS];
        float along[BLOCKS][KEYS]; /* parts of the sum of S * dS over value columns */
    };
    float of_bonus[RULE == LA_ADDITIVE ? (int)BLOCKS : 1][KEYS];
    uint64_t full[2];
};
static_assert(sizeof(intra_key_room<LA_DELTA>) <= 99 << 10, "as sm_86, sm_89, sm_120");
static_assert(sizeof(intra_key_room<LA_ADDITIVE>) <= (227 << 10) / 2 - 1024,
              "two blocks share a multiprocessor");

/* On Hopper the second of several panels comes with the first, behind the room. Under the additive
 * rule two blocks share a multiprocessor, and need what is left of it for the cache. */
template <la_rule RULE> __host__ __device__ constexpr int intra_key_stages(int panels, bool hopper)
{
    return hopper && la_predicts(RULE) && panels > 1 ? 2 : 1;
}
template <la_rule RULE>
static constexpr int SECOND_PANEL = (sizeof(intra_key_room<RULE>) + 1023) / 1024 * 1024;
template <la_rule RULE> static int intra_key_bytes(int panels, bool hopper)
{
    return intra_key_stages<RULE>(panels, hopper) == 1
               ? sizeof(intra_key_room<RULE>)
               : SECOND_PANEL<RULE> + sizeof(intra_panel<KEYS, RULE>);
}
static_assert(SECOND_PANEL<LA_DPLR> + sizeof(intra_panel<KEYS, LA_DPLR>) <= 227 << 10,
              "as on Hopper");

__device__ __forceinline__ float2 operator+(float2 x, float2 y)
{
    return make_float2(x.x + y.x, x.y + y.y);
}

__device__ __forceinline__ float2 operator-(float2 x, float2 y)
{
    return make_float2(x.x - y.x, x.y - y.y);
}

__device__ __forceinline__ float2 operator*(float x, float2 y)
{
    return make_float2(x * y.x, x * y.y);
}

/* Sums per key over the 16 rows of a warp of x [16][KEYS] times their rows of a tile, and times
 * `by` of the key. Lanes that have the same keys first share the keys among themselves. */
template <typename F>
__device__ __forceinline__ void sum_over_rows(const float (&x)[KEYS / 8][4], const char *tile,
                                              int row, F by, float *to)
{
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
    float2 sum[KEYS / 8];
#pragma unroll
    for (int m = 0; m < KEYS / 8; m++) {
        const char *const from = tile + element_at(row + lane / 4, m * 8 + pair);
        const float2 y = get_pair(from), z = get_pair(from + 8 * 128);
        sum[m] = make_float2(x[m][0] * y.x + x[m][2] * z.x, x[m][1] * y.y + x[m][3] * z.y);
    }
#pragma unroll
    for (int half = KEYS / 16; half; half /= 2) {
        const int step = half * 4;
        const bool high = lane & step;
#pragma unroll
        for (int m = 0; m < half; m++) {
            const float2 kept = high ? sum[m + half] : sum[m],
                         given = high ? sum[m] : sum[m + half];
            sum[m] = kept + make_float2(__shfl_xor_sync(~0u, given.x, step),
                                        __shfl_xor_sync(~0u, given.y, step));
        }
    }
    const int key = lane / 4 * 8 + pair;
    *(float2 *)(to + key) = sum[0] * by(key);
}
static_assert(KEYS / 16 * 4 == 16, "the first step is between halves of a warp");

/* x [16 rows][KEYS] times a number per key. */
__device__ __forceinline__ void scale_keys(float (&x)[KEYS / 8][4], const float *by)
{
#pragma unroll
    for (int m = 0; m < KEYS / 8; m++) {
        const float2 a = *(const float2 *)(by + m * 8 + threadIdx.x % 4 * 2);
        x[m][0] *= a.x;
        x[m][1] *= a.y;
        x[m][2] *= a.x;
        x[m][3] *= a.y;
    }
}

/* c [16][KEYS] += a times 16 rows of a tile, from `row` on. */
__device__ __forceinline__ void multiply_block(float (&c)[KEYS / 8][4], const left &a,
                                               const char *tile, int row)
{
    const uint32_t columns = lane_with_columns(address_of(tile));
#pragma unroll
    for (int m = 0; m < KEYS / 16; m++)
        multiply(c[2 * m], c[2 * m + 1], a, load_right(columns, row, m * 16));
}

/* N rows of the sums of a warp, from `first` (0 or 8) on, to shared memory. The lanes then read their
 * own keys. */
template <int N>
__device__ __forceinline__ void put_rows(key_rows_of_block<N> &to, const float (&x)[KEYS / 8][4],
                                         int first, int count)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < KEYS / 8; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (half * 8 >= first && half * 8 < first + count)
                to.two((lane / 4 + half * 8) % N, m * 8 + lane % 4 * 2) =
                    make_float2(x[m][2 * half], x[m][2 * half + 1]);
    __syncwarp();
}

/* The pairs within a block one by one, for the two keys of a lane. */
struct slow_pairs {
    /* products of this group's rows of the block, and for rows that read their parts of the gradient
     * of log a. They are in local memory, since few blocks need them. */
    float2 row[TOKENS_OF_BLOCK], gate[TOKENS_OF_BLOCK];
};

__device__ __forceinline__ float score_at(const char *scores, int block, int i, int j)
{
    const int first = block * TOKENS_OF_BLOCK;
    return (float)*(const element *)(scores + element_at(first + i, first + j));
}

/* READS: those rows are the group's own, else the rows that are written. `early`: rows read before
 * the decay of their token. */
template <bool READS>
__device__ __forceinline__ void add_slow_pairs(slow_pairs &to, const lane_decays &x,
                                               const char *scores, const char *reads,
                                               const char *writes, bool early)
{
    float2 a[TOKENS_OF_BLOCK], terms[TOKENS_OF_BLOCK];
#pragma unroll
    for (int i = 0; i < TOKENS_OF_BLOCK; i++) a[i] = x.a[i];
#pragma unroll 1
    for (int j = 0; j < TOKENS_OF_BLOCK; j++) {
        const float2 k = get_pair(writes + x.at(j));
        float2 decay = make_float2(1, 1);
#pragma unroll 1
        for (int i = j + 1; i < TOKENS_OF_BLOCK; i++) {
            const float2 before = decay;
            decay = decay * a[i];
            const float2 y = score_at(scores, x.block, i, j) * (early ? before : decay);
            const float2 q = get_pair(reads + x.at(i));
            if (READS)
                to.row[i] = to.row[i] + y * k;
            else
                to.row[j] = to.row[j] + y * q;
            terms[i] = y * k * q;
        }
        float2 run = make_float2(0, 0);
#pragma unroll 1
        for (int i = TOKENS_OF_BLOCK - 1; i > j && READS; i--) {
            if (early) to.gate[i] = to.gate[i] + run;
            run = run + terms[i];
            if (!early) to.gate[i] = to.gate[i] + run;
        }
    }
}

/* Rows of a gradient of this block's keys go to the array of the caller, or in float32 to the partial
 * of a value head. A lane has two keys. */
struct rows_out {
    char *to;       /* the row of the first token of the chunk, at the first key of the lane */
    float *partial; /* the same, or NULL */
    int64_t step;   /* bytes to the next row, or floats */
    int keys;       /* how many of the two there are, in the array or in the partial */
    bool pairs;

    __device__ __forceinline__ rows_out(const call &c, const unit &u, const view &x, float *parts,
                                        int kp, int t, int key)
    {
        partial = parts ? parts + ((int64_t)u.b * c.T + t) * kp + key : NULL;
        to = at(x, u.b, t, u.h, key);
        step = parts ? kp : x.stride[1] * (int64_t)sizeof(element);
        keys = max(0, min(2, (parts ? kp : c.K) - key));
        pairs = c.K % KEYS == 0;
    }
    /* Rows first to last - 1 of the sums of a warp, whose first row is row0 of the chunk. Loops keep
     * the code short: with all rows written out, the kernel waited for its own instructions half of
     * the time (docs/decisions/0056). */
    template <int N>
    __device__ __forceinline__ void store(key_rows_of_block<N> &from, int row0, int first,
                                          int last) const
    {
        const int key = threadIdx.x % 32 * 2;
        __syncwarp();
        if (partial) {
            float *own = partial + (row0 + first) * step;
#pragma unroll 4
            for (int i = first; i < last; i++, own += step)
                if (keys) *(float2 *)own = from.two(i % N, key);
            return;
        }
        char *own = to + (row0 + first) * step;
        if (pairs) {
#pragma unroll 4
            for (int i = first; i < last; i++, own += step) {
                const float2 x = from.two(i % N, key);
                *(uint32_t *)own = pack(x.x, x.y);
            }
            return;
        }
#pragma unroll 1
        for (int i = first; i < last; i++, own += step) {
            const float2 x = from.two(i % N, key);
            if (keys > 0) ((element *)own)[0] = element_of(x.x);
            if (keys > 1) ((element *)own)[1] = element_of(x.y);
        }
    }
};

/* A block has KEYS of the keys of a chunk, which are up to MOST. */
template <int MOST, la_rule RULE>
__global__ void __launch_bounds__(intra_key_threads<RULE>, RULE == LA_ADDITIVE ? 2 : 1)
    intra_chunk_adjoint_key(const __grid_constant__ call c, const __grid_constant__ gradients d,
                            const __grid_constant__ chunks w,
                            const __grid_constant__ backward_maps maps,
                            const __grid_constant__ kept f, const __grid_constant__ intra_flags to)
{
    constexpr bool delta = RULE == LA_DELTA, dplr = RULE == LA_DPLR;
    constexpr int READERS = readers<RULE>, WRITERS = writers<RULE>;
    constexpr int BONUS_BLOCKS = RULE == LA_ADDITIVE ? (int)BLOCKS : 1;
    extern __shared__ __align__(1024) char shared[];
    intra_key_room<RULE> &s = *(intra_key_room<RULE> *)shared;
    const int lane = threadIdx.x % 32, pair = lane % 4 * 2;
    /* shows the compiler that all lanes have the same value */
    const int role = __shfl_sync(~0u, threadIdx.x / ROLE_THREADS, 0);
    const bool reads = role < READERS;
    const int writer = role - READERS;
    const int block = __shfl_sync(~0u, threadIdx.x / 32 % BLOCKS, 0);
    const int row0 = block * 16, top = row0 + lane / 4, low = top + 8;
    const int all_keys = c.K > KEYS ? MOST : (int)KEYS, parts = all_keys / KEYS; /* of a tile */
    const int first_key = blockIdx.x % parts * KEYS, index = blockIdx.x / parts;
    if (first_key >= c.K) return;
    const int chunk_slot = index / c.HV, hv = index % c.HV;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int64_t place = (int64_t)chunk_slot * c.HV + hv;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const bool bonus = RULE == LA_ADDITIVE && to.dbonus;
    const bool has_x = dplr || (delta && c.x[LA_X].data);
    /* rows that read before the decay of their token */
    const bool early_x = dplr || (has_x && c.predicts_before), early = role ? early_x : bonus;

    /* All panels come once for each group that writes, unless there is room for all of them: then
     * they stay. One thread asks the copy engine, or all threads copy. */
    const int stages = intra_key_stages<RULE>(panels, HAS_WARP_GROUPS);
    const bool stay = panels <= stages, fetches = !HAS_WARP_GROUPS || threadIdx.x == 0;
    const int visits = WRITERS * panels, all_fetches = stay ? panels : visits;
    const auto panel_at = [&](int stage) -> intra_panel<KEYS, RULE> & {
        if (stage == 0) return s.panel;
        return *(intra_panel<KEYS, RULE> *)(shared + SECOND_PANEL<RULE>);
    };
    const auto fetch = [&](int visit) {
        const int i = visit % panels, stage = visit & (stages - 1);
        fetch_panel<KEYS, RULE>(c, d, maps, f, u, t, n, place * panels + i, i, panel_at(stage),
                                s.full + stage, first_key, all_keys);
#if HAS_WARP_GROUPS
        barrier_expect(address_of(s.full + stage), panel_bytes<KEYS, RULE>);
#endif
    };
#if HAS_WARP_GROUPS
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; i++) barrier_init(address_of(s.full + i), 1);
        barriers_ready();
    }
#endif
    if (fetches)
        for (int i = 0; i < min(stages, all_fetches); i++) fetch(i);
    char *const own = reads ? s.reads[role] : s.writes[writer]; /* the rows of this group */
    const la_name name = !reads ? (writer ? LA_Y : LA_K) : role == 0 ? LA_Q : has_x ? LA_X : LA_K;
    const bool as_given = name == LA_Q   ? to.given.q
                          : name == LA_X ? to.given.x
                          : name == LA_Y ? to.given.y
                                         : to.given.k;
    if (as_given)
        copy_tile<KEYS, ROLE_THREADS>(c.x[name], c.K, u.b, t, n, u.h, address_of(own), first_key,
                                      threadIdx.x % ROLE_THREADS);
    else
        load_keys<MOST, ROLE_THREADS, KEYS>(c, name, u.b, t, n, u.h, own, first_key,
                                            threadIdx.x % ROLE_THREADS);
    copies_end_group();
    if (threadIdx.x < C)
        s.beta[threadIdx.x] =
            !delta ? 1
            : threadIdx.x < n
                ? load<float>(at(c.x[LA_BETA], u.b, t + threadIdx.x, hv), c.x[LA_BETA].dtype)
                : 0;
    lane_decays x = load_decays(c, u, t, n, first_key / PANEL);
    x.key = lane * 2; /* in the tiles of this block */
    decays_of_chunk<KEYS> &decays = s.decays[role];
    share_decays(c, x, decays);
#if HAS_WARP_GROUPS
    __syncthreads(); /* the barrier is there */
#endif

    /* The gradients of the scores of this group's rows, with one group that writes after another.
     * The first time the products with the states too. */
    float scores[KEYS / 8][4] = {}; /* dO U' or Z U' */
    float Y[KEYS / 8][4] = {};      /* dO S' or Z S', or U dS' */
    float2 along = make_float2(0, 0);
    const auto factor_of = [&](int row) {
        const float beta = s.beta[row];
        return !reads ? beta : role ? -beta : (float)c.scale;
    };
    const auto put_scores = [&](int of) {
        char *const tile = s.scores[role][of];
        const float y_top = factor_of(top), y_low = factor_of(low);
#pragma unroll
        for (int m = 0; m < KEYS / 8; m++) {
            if (m / 2 > block) continue;
            const int j = m * 8 + pair;
            const float2 b = *(const float2 *)(s.beta + j);
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = e < 2 ? top : low;
                y[e] = (e < 2 ? y_top : y_low) * (e % 2 ? b.y : b.x) * scores[m][e];
                if (i == j + e % 2 && (role == 0 || delta))
                    s.own[role ? 1 : of][i] = role ? scores[m][e] : y[e];
                if (j + e % 2 >= i) y[e] = 0;
            }
            *(uint32_t *)(tile + element_at(top, j)) = pack(y[0], y[1]);
            *(uint32_t *)(tile + element_at(low, j)) = pack(y[2], y[3]);
        }
    };
#pragma unroll 1
    for (int visit = 0; visit < visits; visit++) {
        const int of = WRITERS == 1 ? 0 : visit / panels, i = visit - of * panels;
        auto &panel = panel_at((stay ? i : visit) & (stages - 1));
#if HAS_WARP_GROUPS
        if (visit < all_fetches) {
            barrier_wait(address_of(s.full + (visit & (stages - 1))), visit / stages % 2);
            if (n < C) { /* a box may reach into the next sequence, whose NaN must not come along */
                for (int j = threadIdx.x; j < (C - n) * 8; j += intra_key_threads<RULE>) {
                    const int at = piece_at(n + j / 8, j % 8);
                    if (!delta) *(uint4 *)(panel.U + at) = make_uint4(0, 0, 0, 0);
                    *(uint4 *)(panel.dO + at) = make_uint4(0, 0, 0, 0);
                }
                stores_before_copies();
                __syncthreads();
            }
        }
#else
        copies_wait<0>();
        __syncthreads();
#endif
        const uint32_t U = address_of(of ? panel.p : panel.U);
        const uint32_t rows = address_of(!reads ? (writer ? panel.p : panel.U)
                                         : role ? panel.Z
                                                : panel.dO);
        const uint32_t state = address_of(reads ? panel.S : panel.dS);
        left a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = load_left(rows, row0, j * 16);
        products_begin();
        if (of == 0)
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(Y, a[j], state, j * 16);
        if (reads)
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_rows(scores, a[j], U, j * 16);
        products_commit();
        if (role == READERS && of == 0) /* which has the least to do */
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const int at = element_at(row0 + j, lane * 2);
                along = along + get_pair(panel.S + at) * get_pair(panel.dS + at);
            }
        products_wait<0>();
        products_in(Y);
        products_in(scores);
        if (visit + stages < all_fetches || visit + 1 == visits)
            __syncthreads(); /* the panel is no longer needed */
        if (fetches && visit + stages < all_fetches) fetch(visit + stages);
        if (WRITERS > 1 && i + 1 == panels) {
            if (reads) put_scores(of);
#pragma unroll
            for (int m = 0; m < KEYS / 2; m++) scores[m / 4][m % 4] = 0;
        }
    }
    if (WRITERS == 1 && reads) put_scores(0);
    if (role == READERS) *(float2 *)&s.along[block][lane * 2] = along;
    scale_rows(Y, factor_of(top), factor_of(low));
    const bool slow = decays.slow[0][block] < TOKENS_OF_BLOCK;
    const view &of_bonus = c.x[LA_U];
    /* dP_ii of a token is the gradient of q . k, or of q . (bonus k) */
    float2 factor = make_float2(1, 1);
    if (bonus) {
        const int key = first_key + lane * 2;
        if (key < c.K) factor.x = load<float>(at(of_bonus, u.h, key), of_bonus.dtype);
        if (key + 1 < c.K) factor.y = load<float>(at(of_bonus, u.h, key + 1), of_bonus.dtype);
    }
    copies_wait<0>();
    __syncthreads();
    if (delta && !reads && first_key == 0 && d[LA_DBETA].data) { /* Z_i . E_i */
        const int i = threadIdx.x % ROLE_THREADS;
        if (i < n) store(at(d[LA_DBETA], u.b, t + i, hv), d[LA_DBETA].dtype, s.own[READERS - 1][i]);
    }

    slow_pairs pairs;
    float2 slow_bonus = make_float2(0, 0);
    if (decays.has_slow()) {
        if (slow) {
#pragma unroll 1
            for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
                pairs.row[i] = pairs.gate[i] = make_float2(0, 0);
                if (role == 1 && reads) continue; /* x sees no write of its own token */
#pragma unroll
                for (int j = 0; j < WRITERS; j++) {
                    if (!reads && j != writer) continue;
                    const float2 q = get_pair(s.reads[0] + x.at(i)),
                                 k = get_pair(s.writes[j] + x.at(i));
                    pairs.row[i] = pairs.row[i] + s.own[j][row0 + i] * (factor * (reads ? k : q));
                    slow_bonus = slow_bonus + s.own[j][row0 + i] * (q * k);
                }
            }
#pragma unroll 1
            for (int r = 0; r < READERS; r++)
#pragma unroll 1
                for (int j = 0; j < WRITERS; j++)
                    if (reads && r == role)
                        add_slow_pairs<true>(pairs, x, s.scores[r][j], s.reads[r], s.writes[j],
                                             early);
                    else if (!reads && j == writer)
                        add_slow_pairs<false>(pairs, x, s.scores[r][j], s.reads[r], s.writes[j],
                                              r ? early_x : bonus);
        }
        __syncthreads(); /* no row is needed as it was loaded */
    }
    const float2 one = make_float2(1, 1);
    if (!reads)
        scale_writes(x, one, {{own, s.sums.near[writer], NULL}});
    else if (early)
        scale_reads<true>(x, one, own, own, NULL);
    else
        scale_reads<false>(x, one, own, own, NULL);
    __syncthreads();

    float near[KEYS / 8][4] = {}; /* of rows that are written: without 1 / f */
    if (reads) {
        for (int J = 0; J < block; J++) {
            scale_keys(Y, decays.t + J * KEYS);
            sum_over_rows(
                Y, own, row0, [&](int key) { return decays_between(decays, key, J + 1, block); },
                s.passes[role][block * (block - 1) / 2 + J]);
#pragma unroll
            for (int j = 0; j < WRITERS; j++)
                multiply_block(Y, load_left(address_of(s.scores[role][j]), row0, J * 16),
                               s.writes[j], J * 16);
        }
        if (!slow)
#pragma unroll
            for (int j = 0; j < WRITERS; j++)
                multiply_block(Y, load_left(address_of(s.scores[role][j]), row0, row0),
                               s.sums.near[j], row0);
    } else {
        sum_over_rows(
            Y, own, row0, [&](int key) { return decays_between(decays, key, block + 1, BLOCKS); },
            s.to_end[writer][block]);
        for (int I = BLOCKS - 1; I > block; I--) {
            scale_keys(Y, decays.t + I * KEYS);
#pragma unroll
            for (int r = 0; r < READERS; r++)
                multiply_block(Y,
                               load_left_transposed(address_of(s.scores[r][writer]), I * 16, row0),
                               s.reads[r], I * 16);
        }
        if (!slow)
#pragma unroll
            for (int r = 0; r < READERS; r++)
                multiply_block(near,
                               load_left_transposed(address_of(s.scores[r][writer]), row0, row0),
                               s.reads[r], row0);
    }
    __syncthreads(); /* the scores are no longer needed */

    /* From here on a lane has two keys of the 16 tokens. The last group that reads collects the
     * gradients of log a. */
    const bool collects = role == READERS - 1;
    const int64_t apart = (int64_t)c.B * c.T * to.kp * hv;
    const bool adds_x = delta && !has_x; /* was x = k */
    float2 sums[TOKENS_OF_BLOCK];        /* ends and near; dk where dx is added to it */
    const la_name of = !reads ? (writer ? LA_DY : LA_DK) : role ? LA_DX : LA_DQ;
    float *const partials = of == LA_DQ ? to.dq : of == LA_DK ? to.dk : of == LA_DX ? to.dx : to.dy;
    const rows_out out(c, u, d[of], (role ? to.direct_k : to.direct_q) ? NULL : partials + apart,
                       to.kp, t, first_key + lane * 2);
    const int own_rows = min(16, n - row0);
    if (reads) {
        key_rows_of_block<16> &rows = s.sums.of_reads[role][block];
        float2(&f)[TOKENS_OF_BLOCK] = x.a, run = make_float2(0, 0);
#pragma unroll
        for (int i = 1; i < TOKENS_OF_BLOCK; i++) f[i] = f[i - 1] * f[i];
        put_rows(rows, Y, 0, 16);
#pragma unroll
        for (int i = TOKENS_OF_BLOCK - 1; i >= 0; i--) {
            const float2 y = rows.two(i, lane * 2), term = y * get_pair(own + x.at(i));
            sums[i] = early ? run : run + term;
            run = run + term;
            float2 dy = (early ? i ? f[max(i - 1, 0)] : one : f[i]) * y;
            if (role == 0 && !slow)
#pragma unroll
                for (int j = 0; j < WRITERS; j++) {
                    const float2 k = f[i] * get_pair(s.sums.near[j] + x.at(i));
                    dy = dy + s.own[j][row0 + i] * (factor * k);
                }
            rows.two(i, lane * 2) = dy;
        }
        if (slow)
#pragma unroll
            for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
                rows.two(i, lane * 2) = rows.two(i, lane * 2) + pairs.row[i];
                sums[i] = sums[i] + pairs.gate[i];
            }
        if (!(role && adds_x)) out.store(rows, row0, 0, own_rows);
        if (!collects) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < TOKENS_OF_BLOCK; i++) rows.two(i, lane * 2) = sums[i];
        }
    } else {
        key_rows_of_block<16> &rows = s.sums.of_writes[writer][block];
        key_rows_of_block<8> &of_near = s.sums.of_near[writer][block];
        float2 h = one, later = make_float2(0, 0), begins = later, d_bonus = slow_bonus;
        /* 1 / f */
        const float2 all = *(const float2 *)&decays.t[block * KEYS + lane * 2];
        float2 over_f = make_float2(hardware_reciprocal(all.x), hardware_reciprocal(all.y));
#pragma unroll
        for (int first = 8; first >= 0; first -= 8) {
            put_rows(rows, Y, first, 8);
            put_rows(of_near, near, first, 8);
#pragma unroll
            for (int i = first + 7; i >= first; i--) {
                const float2 y = rows.two(i, lane * 2), term = y * get_pair(own + x.at(i));
                float2 dy = h * y;
                begins = begins + term;
                later = later - term;
                rows.two(i, lane * 2) = term;
                if (!slow) {
                    const float2 z = of_near.two(i % 8, lane * 2),
                                 k = get_pair(s.sums.near[writer] + x.at(i)),
                                 q = get_pair(s.reads[0] + x.at(i));
                    /* q is q f, or with a bonus q f / a */
                    const float2 of_own = s.own[writer][row0 + i] * (bonus ? x.a[i] * q : q);
                    later = later - z * k;
                    rows.two(i, lane * 2) = later;
                    dy = dy + over_f * (z + of_own * factor);
                    d_bonus = d_bonus + of_own * k;
                }
                h = h * x.a[i];
                over_f = over_f * x.a[i];
                if (adds_x)
                    sums[i] = dy;
                else
                    of_near.two(i % 8, lane * 2) = dy;
            }
            if (slow)
#pragma unroll
                for (int i = first; i < first + 8; i++)
                    if (adds_x)
                        sums[i] = sums[i] + pairs.row[i];
                    else
                        of_near.two(i % 8, lane * 2) = of_near.two(i % 8, lane * 2) + pairs.row[i];
            if (!adds_x) out.store(of_near, row0, first, min(first + 8, own_rows));
            __syncwarp(); /* the next rows of `near` take the place of these */
        }
        if (slow) { /* sums alone: all decays may be strong, and then so small are all gradients */
            begins = make_float2(0, 0);
#pragma unroll 1
            for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
                const float2 term = rows.two(i, lane * 2);
                rows.two(i, lane * 2) = begins;
                begins = begins + term;
            }
            begins = make_float2(0, 0);
        }
        *(float2 *)&s.begins[writer][block][lane * 2] = begins;
        if (bonus) *(float2 *)&s.of_bonus[block % BONUS_BLOCKS][lane * 2] = d_bonus;
    }
    __syncthreads();

    if (!reads && adds_x)
#pragma unroll
        for (int first = 0; first < 16; first += 8) {
            key_rows_of_block<8> &of_near = s.sums.of_near[writer][block];
#pragma unroll
            for (int i = first; i < first + 8; i++)
                of_near.two(i % 8, lane * 2) =
                    sums[i] + s.sums.of_reads[READERS - 1][block].two(i, lane * 2);
            out.store(of_near, row0, first, min(first + 8, own_rows));
            __syncwarp();
        }
    if (bonus && role == 1 && threadIdx.x % ROLE_THREADS < KEYS) {
        const int key = threadIdx.x % ROLE_THREADS;
        float sum = 0;
        for (int i = 0; i < BLOCKS; i++) sum += s.of_bonus[i % BONUS_BLOCKS][key];
        to.dbonus[place * all_keys + first_key + key] = sum;
    }
    if (!collects) return;
    float2 passes = make_float2(0, 0), all = one;
    for (int i = 0; i < BLOCKS; i++) {
        passes = passes + *(const float2 *)&s.along[i][lane * 2];
        all = all * *(const float2 *)&decays.t[i * KEYS + lane * 2];
    }
    passes = passes * all;
    for (int i = block + 1; i < BLOCKS; i++)
#pragma unroll
        for (int r = 0; r < READERS; r++)
            passes = passes + *(const float2 *)&s.passes[r][i * (i - 1) / 2 + block][lane * 2];
#pragma unroll
    for (int j = 0; j < WRITERS; j++) {
        for (int i = 0; i < block; i++)
            passes = passes + *(const float2 *)&s.to_end[j][i][lane * 2];
        passes = passes + *(const float2 *)&s.begins[j][block][lane * 2];
    }
    key_rows_of_block<16> &rows = s.sums.of_reads[0][block];
#pragma unroll
    for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
        float2 y = sums[i] + passes;
        if (READERS == 2) y = y + rows.two(i, lane * 2);
#pragma unroll
        for (int j = 0; j < WRITERS; j++) y = y + s.sums.of_writes[j][block].two(i, lane * 2);
        rows.two(i, lane * 2) = y;
    }
    const view &of_g = d[LA_DG];
    const int key = first_key + lane * 2;
    const int64_t step = of_g.stride[1] * la_size_of(of_g.dtype);
    char *own_g = at(of_g, u.b, t + row0, hv, key);
    if (of_g.dtype == LA_F32 && of_g.stride[3] == 1 && (uintptr_t)of_g.data % 8 == 0 &&
        ((of_g.stride[0] | of_g.stride[1] | of_g.stride[2] | c.K) & 1) == 0) {
#pragma unroll 4
        for (int i = 0; i < own_rows; i++, own_g += step)
            if (key < c.K) *(float2 *)own_g = rows.two(i, lane * 2);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < own_rows; i++, own_g += step) {
        const float2 y = rows.two(i, lane * 2);
        if (key < c.K) store(own_g, of_g.dtype, y.x);
        if (key + 1 < c.K) store(own_g + of_g.stride[3] * la_size_of(of_g.dtype), of_g.dtype, y.y);
    }
}

#endif
