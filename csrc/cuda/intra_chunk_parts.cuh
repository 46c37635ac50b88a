/* Parts of intra_chunk_adjoint.cuh: the layout of shared memory, the order of chunks, and the
 * adjoints of beta, of the decays and of the denominators. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_PARTS_CUH
#define LINATTN_CUDA_INTRA_CHUNK_PARTS_CUH

#include "adjoint_rows.cuh"

/* Numbers of pairs of tokens. */
struct intra_pairs {
    /* of the bare products q_i . k_j, x_i . k_j */
    alignas(1024) char dP[PANEL_BYTES], dL[PANEL_BYTES];
    float G[C * LD_PAIRS], dG[C * LD_PAIRS];
};

/* On Hopper the next panel comes while a block works on one, and the pairs have a place of their
 * own. A block of another device may have less than half of that memory. There the pairs lie where
 * the panels have been. */
template <int KP, la_rule RULE, bool HOPPER> struct intra_places {
    alignas(1024) intra_panel<KP, RULE> panel[INTRA_STAGES];
    intra_pairs pairs;
};
template <int KP, la_rule RULE> struct intra_places<KP, RULE, false> {
    union {
        alignas(1024) intra_panel<KP, RULE> panel[1];
        intra_pairs pairs;
    };
};

/* A chunk of a value head. */
struct intra_place {
    unit u;
    int t, n;       /* its first token; its tokens, or 0: there is no such chunk */
    int slot, part; /* of chunks; of keys */
    int index;      /* among the chunks of groups of value heads that blocks take */
    int member;     /* of the group */
    int rows;       /* how often the block has asked for rows of q, k and x, with this chunk */
};

enum { INTRA_PLACES = 4 }; /* of the chunk at work, and of those whose panels are on their way */

/* x lies behind this, where the caller gave one. */
template <int KP, la_rule RULE, bool HOPPER> struct intra_room : intra_places<KP, RULE, HOPPER> {
    alignas(1024) char q[tile_bytes(KP)], k[tile_bytes(KP)];
    float a[C], beta[C], e[C], r[C]; /* e: decay from the start of the chunk; r: to its end */
    /* q . dq^, x . dx^, k . dk~: parts of the gradients of decays. A part of x is at the token
     * whose decay x sees */
    float of_q[C], of_x[C], of_r[C];
    float up[4][C], of_e[4][C], quarter[4], da[2][C], sums[INTRA_THREADS / 32];
    intra_place place[INTRA_PLACES];
    uint64_t full[INTRA_STAGES], full_rows;
};

static_assert(sizeof(intra_room<128, LA_DELTA, false>) <= 99 << 10, "as sm_86, sm_89, sm_120");

/* The chunk that a block takes after p. */
template <int PARTS>
static __device__ __noinline__ intra_place place_after(const call &c, int chunk_slots, int members,
                                                       intra_place p)
{
    const int groups = c.HV / members;
    do {
        if (++p.member >= members) {
            p.member = 0;
            p.index += (int)gridDim.x;
        }
        p.n = 0;
        if (p.index >= chunk_slots * groups * PARTS) break;
        p.part = p.index % PARTS;
        p.slot = p.index / PARTS / groups;
        p.u = unit_of(c, sequence_of(c, p.slot), p.index / PARTS % groups * members + p.member);
        p.t = p.u.begin + (p.slot - first_chunk_slot(c, p.u.n)) * C;
        p.n = min(C, p.u.end - p.t);
    } while (p.n <= 0); /* not every slot has a chunk */
    if (p.member == 0) p.rows++;
    return p;
}

/* 16 numbers of an array, from a multiple of 4 on. */
__device__ __forceinline__ void load_16(float (&to)[16], const float *from)
{
#pragma unroll
    for (int i = 0; i < 16; i += 4) *(float4 *)(to + i) = *(const float4 *)(from + i);
}

/* The decay from token j to token i, in G. The decays as given are in a. A thread has 16 rows of
 * column j. It multiplies within its rows, and then by what comes before them. */
template <la_decay DECAY, typename room> __device__ __forceinline__ void find_decays(room &s)
{
    float *const G = s.pairs.G;
    if constexpr (DECAY == LA_TOKEN) {
        const int j = threadIdx.x % C, quarter = threadIdx.x / C, own = j / 16;
        alignas(16) float g[16];
        load_16(g, s.a + quarter * 16);
        float product = 1;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (quarter * 16 + i > j) product *= g[i];
            g[i] = product;
        }
        if (own == quarter) s.up[0][j] = product;
        if (j == 0) s.quarter[quarter] = product;
        __syncthreads();
        float before = 1;
        if (own < quarter) before = s.up[0][j];
#pragma unroll
        for (int q = 1; q < 3; q++)
            if (own < q && q < quarter) before *= s.quarter[q];
#pragma unroll
        for (int i = 0; i < 16; i++) G[(quarter * 16 + i) * LD_PAIRS + j] = g[i] * before;
        if (quarter == 3) s.r[j] = g[15] * before;
        __syncthreads();
    }
    if (threadIdx.x < C) {
        s.of_x[threadIdx.x] = 0;
        s.e[threadIdx.x] = DECAY == LA_TOKEN ? s.a[0] * G[threadIdx.x * LD_PAIRS] : 1;
        if (DECAY == LA_NONE) s.r[threadIdx.x] = 1;
    }
}

/* The gradient of the decay of each token. Adjoint of the recursions that made G and e: e_i = a_i
 * e_(i-1), and row i of G is a_i times the row before. D_ij = dG_ij + a_(i+1) D_(i+1)j, and da_i =
 * sum_j D_ij G_(i-1)j + (gradient of e_i) e_(i-1). Each thread goes up its 16 rows of a column, and
 * then again to add what comes from the rows below them. */
template <typename room>
__device__ __forceinline__ void adjoint_of_decays(const call &c, const gradients &d,
                                                  const intra_flags &to, const intra_place &p,
                                                  room &s)
{
    const float *const G = s.pairs.G, *const dG = s.pairs.dG;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int j = threadIdx.x % C, first_row = threadIdx.x / C * 16;
    alignas(16) float a[16], of[16], more[16];
    float D[16], g[16], x = 0, y = 1, of_e = 0;
    load_16(a, s.a + first_row);
    load_16(of, s.of_q + first_row);
    load_16(more, s.of_x + first_row);
    const float behind = first_row < C - 16 ? s.a[first_row + 16] : 1;
    const auto a_after = [&](int i) { return i < 15 ? a[i + 1] : behind; };
#pragma unroll
    for (int i = 15; i >= 0; i--) {
        const int row = first_row + i;
        g[i] = G[row * LD_PAIRS + j];
        x = x * a_after(i) + dG[row * LD_PAIRS + j];
        /* was k~_j = r_j k_j, where r is the last row */
        if (i == 15 && row == C - 1 && j < C - 1) x += s.of_r[j];
        D[i] = x;
        y *= a_after(i);
        if (row >= j) of_e += g[i] * (of[i] + more[i]);
    }
    s.up[threadIdx.x / C][j] = x;
    s.of_e[threadIdx.x / C][j] = of_e;
    /* the product of a over its rows, each one later */
    if (j == 0) s.quarter[threadIdx.x / C] = y;
    __syncthreads();
    x = 0;
    for (int q = 3; q > threadIdx.x / C; q--) x = s.up[q][j] + s.quarter[q] * x;
    const float g_before = G[max(first_row - 1, 0) * LD_PAIRS + j];
#pragma unroll
    for (int i = 15; i >= 0; i--) {
        x *= a_after(i);
        D[i] = first_row + i > j ? (D[i] + x) * (i > 0 ? g[i > 0 ? i - 1 : 0] : g_before) : 0;
    }
    /* sums over the columns of the warp: one of two lanes has a row */
    float half[8], four[4], two[2], one[1];
    halve<8, 16>(D, half);
    halve<4, 8>(half, four);
    halve<2, 4>(four, two);
    halve<1, 2>(two, one);
    one[0] += __shfl_xor_sync(~0u, one[0], 1);
    if (lane % 2 == 0)
        s.da[warp % 2][first_row + lane / 16 * 8 + lane / 8 % 2 * 4 + lane / 4 % 2 * 2 +
                       lane / 2 % 2] = one[0];
    __syncthreads();
    const int i = threadIdx.x;
    if (i >= p.n) return;
    float e = 0;
    for (int q = 0; q < INTRA_THREADS / 32; q++) e += s.sums[q];
    e = e * s.r[i] + (s.of_e[0][i] + s.of_e[1][i]) + (s.of_e[2][i] + s.of_e[3][i]);
    const float da = result_range(d)(s.da[0][i] + s.da[1][i] + e * (i ? s.e[i - 1] : 1));
    if (to.da)
        to.da[(((int64_t)p.part * c.HV + p.u.hv) * c.B + p.u.b) * c.T + p.t + i] = da;
    else
        store(at(d[LA_DG], p.u.b, p.t + i, p.u.hv), d[LA_DG].dtype,
              gate_gradient(da, s.a[i], d.gate));
}

template <int KP> constexpr int64_t bytes_of_partials = 3 * C * KP * 4; /* dq, dk, dx of a block */

template <int KP> __device__ __forceinline__ float4 *sums_of_block(float4 *partials, la_name name)
{
    const int array = name == LA_Q ? 0 : name == LA_K ? 1 : 2;
    return partials + (blockIdx.x * bytes_of_partials<KP> + array * C * KP * 4) / 16 +
           threadIdx.x % INTRA_GROUP;
}

/* Sums of a warp, added to those of the value heads before, or kept for the next one. A thread
 * finds its own numbers again. */
template <int N> __device__ __forceinline__ void add_sums(float (&x)[N][4], const float4 *from)
{
#pragma unroll
    for (int m = 0; m < N; m++) {
        const float4 y = from[m * INTRA_GROUP];
        x[m][0] += y.x, x[m][1] += y.y, x[m][2] += y.z, x[m][3] += y.w;
    }
}

template <int N> __device__ __forceinline__ void keep_sums(const float (&x)[N][4], float4 *to)
{
#pragma unroll
    for (int m = 0; m < N; m++)
        to[m * INTRA_GROUP] = make_float4(x[m][0], x[m][1], x[m][2], x[m][3]);
}

/* The diagonal of 64 x 64 sums, in rows `top` and `low`. A lane has it if has_diagonal; otherwise
 * zeros. */
__device__ __forceinline__ bool has_diagonal(int lane) { return lane % 4 == lane / 8; }

__device__ __forceinline__ float2 diagonal_of(const float (&x)[8][4])
{
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, odd = lane / 4 % 2;
    float2 own = make_float2(0, 0);
#pragma unroll
    for (int m = 0; m < 4; m++)
        if (m == warp && has_diagonal(lane))
            own = make_float2(odd ? x[2 * m][1] : x[2 * m][0],
                              odd ? x[2 * m + 1][3] : x[2 * m + 1][2]);
    return own;
}

/* The gradient of beta: Z_i . E_i, the diagonal of X. */
__device__ __forceinline__ void store_dbeta(const gradients &d, const intra_place &p, int n,
                                            const intra_seat &me, const float (&X)[8][4])
{
    if (const float2 of = diagonal_of(X); has_diagonal(me.lane)) {
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            const int token = i ? me.low : me.top;
            if (token < n)
                store(at(d[LA_DBETA], p.u.b, p.t + token, p.u.hv), d[LA_DBETA].dtype,
                      result_range(d)(i ? of.y : of.x));
        }
    }
}

/* Was den_i = q_i z_i, where z_i has the keys up to token i: dz_i = d_den_i q_i. The keys of
 * the chunk get their part by way of dP, since each was weighted with 1. */
template <int KP, typename room>
__device__ __forceinline__ void adjoint_of_denominators(const call &c, const intra_flags &to,
                                                        const intra_place &p, bool first_group,
                                                        room &s, float (&X)[8][4],
                                                        float (&Y)[KP / 8][4], left (&own)[4])
{
    const intra_seat me = own_intra_seat();
    const int row0 = me.row0, top = me.top, low = me.low, lane = me.lane, pair = me.pair;
    const int64_t place = (int64_t)p.slot * c.HV + p.u.hv;
    char *const dP = s.pairs.dP;
    float *const G = s.pairs.G;
    if (first_group) {
        const auto add_keys = [&] {
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(Y, own[j], address_of(s.k), j * 16);
            products_commit();
            products_wait<0>();
            products_in(Y);
        };
        /* The operands for the keys up to the own token: what rounding takes from d_den, and
         * then the rounded d_den. dq may be far smaller than its parts, so it needs both. */
        const auto lower = [&](float x_top, float x_low) {
#pragma unroll
            for (int m = 0; m < 8; m++) {
                const int j = m * 8 + pair;
                X[m][0] = j <= top ? x_top : 0;
                X[m][1] = j + 1 <= top ? x_top : 0;
                X[m][2] = j <= low ? x_low : 0;
                X[m][3] = j + 1 <= low ? x_low : 0;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) own[j] = as_left(X[2 * j], X[2 * j + 1]);
        };
        add_keys();
        const float2 with_num = dot_rows(Y, s.q, row0); /* num . dnum = q . dq */
        const float *const den = to.den + ((int64_t)p.u.hv * c.B + p.u.b) * c.T + p.t;
        const float d_top = top < p.n ? d_denominator(&c, den[top], with_num.x) : 0;
        const float d_low = low < p.n ? d_denominator(&c, den[low], with_num.y) : 0;
        if (lane % 4 == 0) {
            s.of_q[top] = d_top;
            s.of_q[low] = d_low;
        }
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int j = m * 8 + pair;
            *(uint32_t *)(dP + element_at(top, j)) =
                pack(X[m][0] + (j <= top ? d_top : 0), X[m][1] + (j + 1 <= top ? d_top : 0));
            *(uint32_t *)(dP + element_at(low, j)) =
                pack(X[m][2] + (j <= low ? d_low : 0), X[m][3] + (j + 1 <= low ? d_low : 0));
        }
        const float2 rounded = unpack(pack(d_top, d_low));
        lower(d_top - rounded.x, d_low - rounded.y);
        add_keys();
        lower(rounded.x, rounded.y);
#pragma unroll
        for (int m = 0; m < KP / 8; m++) {
            const float2 z = *(const float2 *)(to.z + place * KP + m * 8 + pair);
            Y[m][0] += d_top * z.x;
            Y[m][1] += d_top * z.y;
            Y[m][2] += d_low * z.x;
            Y[m][3] += d_low * z.y;
        }
    }
    __syncthreads();
    /* a thread has two keys, and every fourth row of 128 keys or every eighth of 64 */
    constexpr int ROWS_APART = INTRA_THREADS / (KP / 2);
    const int key = threadIdx.x % (KP / 2) * 2, first = threadIdx.x / (KP / 2);
    float2 sum = make_float2(0, 0);
#pragma unroll 4
    for (int i = first; i < C; i += ROWS_APART) {
        const float2 q = unpack(*(const uint32_t *)(s.q + element_at(i, key)));
        sum.x += s.of_q[i] * q.x;
        sum.y += s.of_q[i] * q.y;
    }
    *(float2 *)(G + first * KP + key) = sum; /* without decays there is no G */
    __syncthreads();
    if (threadIdx.x < KP) {
        float all = 0;
        for (int i = 0; i < ROWS_APART; i++) all += G[i * KP + threadIdx.x];
        to.dz[place * KP + threadIdx.x] = all;
    }
}

/* Sums of a warp, as rows of a tile. */
template <int N>
__device__ __forceinline__ void put_rows(char *tile, int row0, const float (&x)[N][4])
{
#pragma unroll
    for (int m = 0; m < N; m += 2) store_left(tile, row0, m * 8, as_left(x[m], x[m + 1]));
}

#endif
