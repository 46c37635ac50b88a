/* Parts of intra_chunk_adjoint_key.cuh: the groups of warps and where a thread is in them, the
 * layout of shared memory, products of rows with numbers per key, pairs of tokens one by one, and
 * rows of gradients on their way out. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_KEY_PARTS_CUH
#define LINATTN_CUDA_INTRA_CHUNK_KEY_PARTS_CUH

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

/* Where a thread is: the role of its group, and the rows of its warp. */
struct key_seat {
    int lane, pair;
    int role; /* the groups that read come first */
    bool reads;
    int writer; /* among the groups that write */
    int block, row0, top, low;
};

template <la_rule RULE> __device__ __forceinline__ key_seat own_key_seat()
{
    key_seat me;
    me.lane = threadIdx.x % 32;
    me.pair = me.lane % 4 * 2;
    /* shows the compiler that all lanes have the same value */
    me.role = __shfl_sync(~0u, threadIdx.x / ROLE_THREADS, 0);
    me.reads = me.role < readers<RULE>;
    me.writer = me.role - readers<RULE>;
    me.block = __shfl_sync(~0u, threadIdx.x / 32 % BLOCKS, 0);
    me.row0 = me.block * 16;
    me.top = me.row0 + me.lane / 4;
    me.low = me.top + 8;
    return me;
}

/* The keys and the chunk of a block. */
struct key_place {
    int first_key, all_keys; /* all_keys: of a tile */
    unit u;
    int hv;         /* of u: kernels that read it there spill more */
    int t, n;       /* its first token, its tokens */
    int64_t number; /* of the chunk of a value head, among all of them */
};

/* Sums of a warp for its 16 tokens, [rows][KEYS] floats. The same key of four neighbouring rows
 * lies in different banks. */
template <int N> struct key_rows_of_block {
    float x[N * KEYS];
    __device__ __forceinline__ float2 &two(int row, int key)
    {
        return *(float2 *)&x[row * KEYS + (key ^ (row % 4 * 8))];
    }
};

struct alignas(16) decays_of_group : decays_of_chunk<KEYS> {
};

/* Where shared memory has been used, it is used again: first there is a panel of value columns.
 * Then the tiles k / f lie there, and at last the sums of the warps, also over dP and dL. */
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

/* All panels come once for each group that writes, unless there is room for all of them: then they
 * stay. */
struct panel_visits {
    int panels, stages;
    bool stay;
    int count, fetches; /* of all panels */
};

template <la_rule RULE> __device__ __forceinline__ panel_visits visits_of(const call &c)
{
    panel_visits x;
    x.panels = (c.V + PANEL - 1) / PANEL;
    x.stages = intra_key_stages<RULE>(x.panels, HAS_WARP_GROUPS);
    x.stay = x.panels <= x.stages;
    x.count = writers<RULE> * x.panels;
    x.fetches = x.stay ? x.panels : x.count;
    return x;
}

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

/* N rows of the sums of a warp, from `first` (0 or 8) on, to shared memory. The lanes then read
 * their own keys. */
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
    /* products of this group's rows of the block, and for rows that read their parts of the
     * gradient of log a. They are in local memory, since few blocks need them. */
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

/* Rows of a gradient of this block's keys go to the array of the caller, or in float32 to the
 * partial of a value head. A lane has two keys. */
struct rows_out {
    char *to;       /* the row of the first token of the chunk, at the first key of the lane */
    float *partial; /* the same, or NULL */
    int64_t step;   /* bytes to the next row, or floats */
    int keys;       /* how many of the two there are, in the array or in the partial */
    bool pairs;
    result_range range;

    __device__ __forceinline__ rows_out(const call &c, const unit &u, const gradients &d,
                                        la_name name, float *parts, int kp, int t, int key)
        : range(d)
    {
        const view &x = d[name];
        partial = parts ? parts + ((int64_t)u.b * c.T + t) * kp + key : NULL;
        to = at(x, u.b, t, u.h, key);
        step = parts ? kp : x.stride[1] * (int64_t)sizeof(element);
        keys = max(0, min(2, (parts ? kp : c.K) - key));
        pairs = c.K % KEYS == 0;
    }
    __device__ __forceinline__ float2 finished(float2 x) const
    {
        return make_float2(range(x.x), range(x.y));
    }
    /* Rows first to last - 1 of the sums of a warp, whose first row is row0 of the chunk. Loops
     * keep the code short: with all rows written out, the kernel waited for its own instructions
     * half of the time (docs/decisions/0056). */
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
                if (keys) *(float2 *)own = finished(from.two(i % N, key));
            return;
        }
        char *own = to + (row0 + first) * step;
        if (pairs) {
#pragma unroll 4
            for (int i = first; i < last; i++, own += step) {
                const float2 x = finished(from.two(i % N, key));
                *(uint32_t *)own = pack(x.x, x.y);
            }
            return;
        }
#pragma unroll 1
        for (int i = first; i < last; i++, own += step) {
            const float2 x = finished(from.two(i % N, key));
            if (keys > 0) ((element *)own)[0] = element_of(x.x);
            if (keys > 1) ((element *)own)[1] = element_of(x.y);
        }
    }
};

/* The gradients of log a of a warp go to the array of the gate. */
__device__ __forceinline__ void store_dg(const call &c, const gradients &d, const key_place &p,
                                         const key_seat &me, key_rows_of_block<16> &rows,
                                         int own_rows)
{
    const view &of_g = d[LA_DG];
    const result_range out(d);
    const int lane = me.lane, key = p.first_key + lane * 2;
    const int64_t step = of_g.stride[1] * la_size_of(of_g.dtype);
    char *own_g = at(of_g, p.u.b, p.t + me.row0, p.hv, key);
    if (of_g.dtype == LA_F32 && of_g.stride[3] == 1 && (uintptr_t)of_g.data % 8 == 0 &&
        ((of_g.stride[0] | of_g.stride[1] | of_g.stride[2] | c.K) & 1) == 0) {
#pragma unroll 4
        for (int i = 0; i < own_rows; i++, own_g += step)
            if (key < c.K) {
                const float2 y = rows.two(i, lane * 2);
                *(float2 *)own_g = make_float2(out(y.x), out(y.y));
            }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < own_rows; i++, own_g += step) {
        const float2 y = rows.two(i, lane * 2);
        if (key < c.K) store(own_g, of_g.dtype, out(y.x));
        if (key + 1 < c.K)
            store(own_g + of_g.stride[3] * la_size_of(of_g.dtype), of_g.dtype, out(y.y));
    }
}

#endif
