/* The decay PAIR in chunks: a memory M and its momentum Y, of which a token makes
 *
 *     Y <- eta Y + k u',   M <- a M + Y,   u = beta (v - M' k)
 *
 * A write of token j is worth N_ij to Y after token i, and G_ij to M. Before the first token of the
 * chunk M is worth e_i to M after token i, and Y is worth m_i to Y and f_i to M:
 *
 *     N_ij = eta_i N_(i-1)j   G_ij = a_i G_(i-1)j + N_ij   N_jj = G_jj = 1
 *     m_i = eta_i m_(i-1)     f_i = a_i f_(i-1) + m_i      e_i = a_i e_(i-1)
 *
 * So e and f are two more columns of G, and 0 and m two more of N. These are sums and products of
 * numbers that are not negative, and none is divided by another one (docs/decisions/0052). The state
 * of chunk_carry.cuh has the rows of both. Then it is the delta rule with these rows, where b is the
 * first token of the batch of i, and n the last token of the chunk:
 *
 *     q^_i = scale [e_i q_i, f_i q_i]          P_ij = scale G_ij q_i . k_j
 *     k^_i = [e_(b-1) k_i, f_(b-1) k_i]        L_ij = beta_i G_(b-1)j k_i . k_j
 *     k~_j = [G_nj k_j, N_nj k_j]              M <- e_n M + f_n Y + ..,  Y <- m_n Y + ..
 *
 * Batches have a power of two of tokens, up to C, so that a chunk has whole ones. */
#ifndef LINATTN_CUDA_PAIR_CUH
#define LINATTN_CUDA_PAIR_CUH

#include "inverse.cuh"
#include "tile_loads.cuh"

/* The gates of a chunk. Past the end of a sequence beta is 0. */
struct pair_gates {
    alignas(16) float a[C], eta[C], beta[C];
};

/* G has two more columns, for M and Y as they were before the chunk: e and f. N has 0 and m there. */
enum { OF_M = C, OF_Y = C + 1, COLUMNS_OF_PAIR = C + 2 };
static_assert((int)COLUMNS_OF_PAIR <= LD_PAIRS, "the rows have room for them");

/* The first of the tokens that predict from the memory that token i predicts from. */
__device__ __forceinline__ int batch_of(const call &c, int i) { return i & -c.batch; }

/* The shares of M and Y before the chunk in M after its token i, which is -1 for the start. */
__device__ __forceinline__ float2 worth_of_states(const float *G, int i)
{
    return i < 0 ? make_float2(1, 0) : *(const float2 *)(G + i * LD_PAIRS + OF_M);
}

/* The numbers of a thread's token, as they are loaded: so that other loads can begin before these
 * have arrived. */
struct pair_token {
    float gate, eta, beta;
};

__device__ __forceinline__ pair_token load_pair_token(const call &c, const unit &u, int t, int n)
{
    const int i = threadIdx.x;
    const auto number_of = [&](const view &x) {
        return x.data && i < n ? load<float>(at(x, u.b, t + i, u.hv), x.dtype) : 0;
    };
    return {number_of(c.x[LA_G]), number_of(c.x[LA_ETA]), number_of(c.x[LA_BETA])};
}

/* Returns whether the numbers of the thread are finite. */
__device__ __forceinline__ bool store_pair_token(const call &c, const pair_token &x, int n,
                                                 pair_gates &s)
{
    const int i = threadIdx.x;
    if (i >= C) return true;
    const float a = c.x[LA_G].data && i < n ? decay_of(x.gate, c.gate) : 1;
    s.a[i] = a;
    s.eta[i] = x.eta;
    s.beta[i] = x.beta;
    return isfinite(a) && isfinite(x.eta) && isfinite(x.beta);
}

/* Columns are found in quarters of their rows, side by side. Through a quarter a column that has y in
 * N and g in G before it comes to eta y and a g + across y. */
enum { QUARTER = C / 4 };
struct pair_quarter {
    float a, eta, across;
};
struct pair_columns {
    pair_quarter quarter[4];
    float2 end[C];                /* y and g of column j after the quarter of row j */
    float worth[COLUMNS_OF_PAIR]; /* N of the last token */
};

__device__ __forceinline__ float2 through(const pair_quarter &q, float2 x)
{
    return make_float2(q.eta * x.x, q.a * x.y + q.across * x.x);
}

__device__ __forceinline__ void load_rows(const float *from, float (&to)[QUARTER])
{
#pragma unroll
    for (int e = 0; e < QUARTER; e += 4) {
        const float4 x = *(const float4 *)(from + e);
        to[e] = x.x, to[e + 1] = x.y, to[e + 2] = x.z, to[e + 3] = x.w;
    }
}

/* A quarter of column j, from y and g before it to those behind it. With BEGINS its own row may be
 * there, and nothing changes behind the last token. `stores`: its rows of G. */
template <bool BEGINS>
__device__ __forceinline__ float2 find_quarter(const pair_gates &gates, int n, int j, int first,
                                               float2 x, bool stores, float *G, pair_columns &s)
{
    float a[QUARTER], eta[QUARTER];
    load_rows(gates.a + first, a);
    load_rows(gates.eta + first, eta);
#pragma unroll
    for (int e = 0; e < QUARTER; e++) {
        const int i = first + e;
        const float y = eta[e] * x.x, g = a[e] * x.y + y;
        if (!BEGINS || i < n) x = make_float2(y, g);
        if (BEGINS && i == j) x = make_float2(1, 1);
        if (!stores) continue;
        G[i * LD_PAIRS + j] = x.y;
        if (i == n - 1) s.worth[j] = x.x;
    }
    return x;
}

/* G up to row n - 1, from the quarter of the diagonal on. The columns have zeros there above their
 * diagonal. All threads of a block call this. */
__device__ __forceinline__ void find_columns(const pair_gates &gates, int n, float *G,
                                             pair_columns &s)
{
    const int i = threadIdx.x;
    if (i < C) {
        s.end[i] =
            find_quarter<true>(gates, n, i, i / QUARTER * QUARTER, make_float2(0, 0), true, G, s);
    } else if (i < C + 8) {
        const int quarter = (i - C) / 2, j = OF_M + i % 2;
        const float2 x = find_quarter<true>(gates, n, j, quarter * QUARTER,
                                            make_float2(j == OF_Y, j == OF_M), quarter == 0, G, s);
        if (j == OF_M)
            s.quarter[quarter].a = x.y;
        else
            s.quarter[quarter].eta = x.x, s.quarter[quarter].across = x.y;
    }
    __syncthreads();
    /* the others: three quarters of columns 0 to 15, ... and of the states */
    const bool of_state = i >= 96;
    const int quarter = of_state ? 1 + (i - 96) / 2 : i < 48 ? 3 : i < 80 ? 2 : 1;
    const int j = of_state ? OF_M + i % 2 : i < 48 ? i : i < 80 ? i - 48 : i - 80;
    if (i >= 102 || quarter * QUARTER >= n) return;
    float2 x = of_state ? make_float2(j == OF_Y, j == OF_M) : s.end[j];
    for (int q = of_state ? 0 : j / QUARTER + 1; q < quarter; q++) x = through(s.quarter[q], x);
    find_quarter<false>(gates, n, j, quarter * QUARTER, x, true, G, s);
}

/* M <- e M + f Y, Y <- m Y for the numbers of a thread: panels of M and of Y by turns. */
template <int N> __device__ __forceinline__ void decay_pair(float (&S)[N][4], const float *totals)
{
    const float e = totals[0], f = totals[1], m = totals[2];
    constexpr int HALF = PANEL / 8;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4 && j % (2 * HALF) < HALF; i++) {
            S[j][i] = e * S[j][i] + f * S[j + HALF][i];
            S[j + HALF][i] *= m;
        }
}

/* The same for the gradients dM and dY: was M <- e M + f Y, Y <- m Y. */
template <int N>
__device__ __forceinline__ void undecay_pair(float (&dS)[N][4], const float *totals)
{
    const float e = totals[0], f = totals[1], m = totals[2];
    constexpr int HALF = PANEL / 8;
#pragma unroll
    for (int j = 0; j < N; j++)
#pragma unroll
        for (int i = 0; i < 4 && j % (2 * HALF) < HALF; i++) {
            dS[j + HALF][i] = m * dS[j + HALF][i] + f * dS[j][i];
            dS[j][i] *= e;
        }
}

/* tokens_of_chunk (chunk_tokens.cuh) for a pair. */
template <int KP>
__device__ __noinline__ void pair_by_tokens(const call &c, const unit &u, int t, int n, int first,
                                            int v0, int columns, float *S, float *O, int first_read,
                                            int reads)
{
    enum { KEYS = KP / 2 / 4, NUMBERS = KEYS * 2, OF_PANEL = PANEL / 4 * 2 };
    const int lane = threadIdx.x % 32, column = lane / 4, pair = lane % 4 * 2;
    float q[KEYS], k[KEYS], a, M[NUMBERS], Y[NUMBERS], M0[NUMBERS];
    const auto place = [](int i) {
        const int own = STATE_AS_SUMS ? place_in_sums(i % OF_PANEL) : i % OF_PANEL;
        return i / OF_PANEL * 2 * OF_PANEL + own;
    };
    for (int i = 0; i < NUMBERS; i++) {
        M[i] = S[place(i)];
        Y[i] = S[place(i) + OF_PANEL];
    }
    for (int i = 0; i < n; i++) {
        float squares_q = 0, squares_k = 0, qk = 0;
        load_keys_of_quad<element>(q, at(c.x[LA_Q], u.b, t + i, u.h), c.x[LA_Q].stride[3], c.K);
        load_keys_of_quad<element>(k, at(c.x[LA_K], u.b, t + i, u.h), c.x[LA_K].stride[3], c.K);
        for (int j = 0; j < KEYS; j++) {
            squares_q += q[j] * q[j];
            squares_k += k[j] * k[j];
        }
        const float factor_q = c.qk_l2norm ? l2norm_factor(quad_sum(squares_q)) : 1;
        const float factor_k = c.qk_l2norm ? l2norm_factor(quad_sum(squares_k)) : 1;
        for (int j = 0; j < KEYS; j++) {
            q[j] *= factor_q;
            k[j] *= factor_k;
            qk += q[j] * k[j];
        }
        const auto number_of = [&](const view &x, float otherwise) {
            return x.data ? load<float>(at(x, u.b, t + i, u.hv), x.dtype) : otherwise;
        };
        float v[2], o[2];
        for (int w = 0; w < 2; w++)
            v[w] = column + 8 * w < columns
                       ? load<float>(at(c.x[LA_V], u.b, t + i, u.hv, v0 + column + 8 * w),
                                     ELEMENT_DTYPE)
                       : 0;
        a = c.x[LA_G].data ? decay_of(number_of(c.x[LA_G], 0), c.gate) : 1;
        la_operands x = {};
        x.q = q, x.k = k, x.x = k, x.a = &a, x.v = v;
        x.beta = number_of(c.x[LA_BETA], 0), x.eta = number_of(c.x[LA_ETA], 0);
        x.own = quad_sum(qk);
        if (c.batch > 1) {
            for (int j = 0; j < NUMBERS && batch_of(c, i) == i; j++) M0[j] = M[j];
            x.batched = true;
            x.M0 = la_strip_of(M0, 2);
        }
        la_token(la_strip_of(M, 2), la_strip_of(Y, 2), 2, KEYS, &x, o, LA_PAIR, LA_DELTA);
        const int read = i - first_read;
        if (i / 2 % 4 * 2 != pair || i < first || read < 0 || read >= reads) continue;
        O[read / 8 * 4 + read % 2] = o[0] * (float)c.scale;
        O[read / 8 * 4 + 2 + read % 2] = o[1] * (float)c.scale;
    }
    for (int i = 0; i < NUMBERS; i++) {
        S[place(i)] = M[i];
        S[place(i) + OF_PANEL] = Y[i];
    }
}

/* ---- prepare ---- */

template <int KEYS> struct pair_room {
    pair_gates gates;
    pair_columns columns;
    alignas(16) float G[C * LD_PAIRS];
    int nonfinite;
    union {
        struct {
            alignas(1024) char k[tile_bytes(KEYS)], q[tile_bytes(KEYS)];
        };
        struct { /* after the products are in registers */
            char tile[PANEL_BYTES];
            float L[C * LD], room[4 * 32 * 12];
        };
    };
};
static_assert(PLANES == 2 || sizeof(pair_room<128>) <= 99 << 10, "as sm_86, sm_89, sm_120");

/* Eight elements, each times a number and rounded once. */
__device__ __forceinline__ uint4 times_number(const uint4 &x, float by)
{
    const uint32_t of[4] = {x.x, x.y, x.z, x.w};
    uint32_t to[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 y = unpack(of[e]);
        to[e] = pack(y.x * by, y.y * by);
    }
    return make_uint4(to[0], to[1], to[2], to[3]);
}

/* Blocks of 16 x 16 are shared among the warps as in prepare_scalar. A block has a chunk of a value
 * head. */
template <int KP, typename = element>
__global__ void __launch_bounds__(SCALAR_THREADS, 3)
    prepare_pair(const __grid_constant__ call c, const __grid_constant__ chunks w,
                 const as_given given)
{
    threads_below<SCALAR_THREADS>();
    constexpr int KEYS = KP / 2, THREADS = SCALAR_THREADS;
    extern __shared__ __align__(1024) char shared[];
    pair_room<KEYS> &s = *(pair_room<KEYS> *)shared;
    pair_gates &d = s.gates;
    const int chunk_slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (float)c.scale;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int64_t place = (int64_t)chunk_slot * c.HV + hv;

    if (threadIdx.x == 0) s.nonfinite = C;
    const pair_token own = load_pair_token(c, u, t, n);
    load_all<KEYS, THREADS>(c, u.b, t, n, u.h, s.q, s.k, NULL, given);
    const bool finite = store_pair_token(c, own, n, d);
    __syncthreads();
    if (!finite) atomicMin(&s.nonfinite, (int)threadIdx.x);
    find_columns(d, n, s.G, s.columns);

    float x[5][2][4] = {};
    const uint32_t k_tile = address_of(s.k), q_tile = address_of(s.q);
    const uint32_t k_rows = lane_with_rows(k_tile);
#pragma unroll
    for (int i = 0; i < KEYS; i += 16) {
        const operand of_q = load_operand(q_tile, warp * 16, i);
        const operand of_k = load_operand(k_tile, (3 - warp) * 16, i);
#pragma unroll
        for (int j = 0; j < 5; j++) {
            const bool scores = j <= warp;
            operand of = of_q;
            if (!scores) of = of_k;
            multiply_with_rows(x[j][0], x[j][1], of, k_rows, (scores ? j : 4 - j) * 16, i);
        }
    }
#pragma unroll
    for (int j = 0; j < 5; j++)
        if (j == warp || j == warp + 1) { /* on the diagonal */
            const int row =
                min(nonfinite_on_diagonal(x[j][0], 0), nonfinite_on_diagonal(x[j][1], 8));
            if (row < C) atomicMin(&s.nonfinite, (j == warp ? warp : 3 - warp) * 16 + row);
        }
    __syncthreads();
    const int nonfinite = s.nonfinite, end = min(nonfinite, n);
    if (threadIdx.x == 0) {
        w.nonfinite[place] = nonfinite;
        const float2 of_states = worth_of_states(s.G, n - 1);
        *(float4 *)(w.total + place * 4) =
            make_float4(of_states.x, of_states.y, s.columns.worth[OF_Y], 0);
    }

    /* the rows of both states */
    char *const to_q = w.q + place * tile_bytes(KP), *const to_k = w.k + place * tile_bytes(KP),
                *const to_kt = w.kt + place * tile_bytes(KP);
#pragma unroll 2
    for (int i = threadIdx.x; i < C * KEYS / 8; i += THREADS) {
        const int row = i / (KEYS / 8), piece = i % (KEYS / 8), b = batch_of(c, row);
        const uint4 q = *(const uint4 *)(s.q + piece_at(row, piece));
        const uint4 k = *(const uint4 *)(s.k + piece_at(row, piece));
        const int of_M = piece_at(row, piece / 8 * 16 + piece % 8), of_Y = of_M + PANEL_BYTES;
        /* rows past the end are zeros, and so are their products with any finite number */
        const float2 by_q = worth_of_states(s.G, min(row, n - 1));
        const float2 by_k = worth_of_states(s.G, min(b, n) - 1);
        const bool there = row < n;
        *(uint4 *)(to_q + of_M) = times_number(q, scale * by_q.x);
        *(uint4 *)(to_q + of_Y) = times_number(q, scale * by_q.y);
        *(uint4 *)(to_k + of_M) = times_number(k, by_k.x);
        *(uint4 *)(to_k + of_Y) = times_number(k, by_k.y);
        *(uint4 *)(to_kt + of_M) = times_number(k, there ? s.G[(n - 1) * LD_PAIRS + row] : 0);
        *(uint4 *)(to_kt + of_Y) = times_number(k, there ? s.columns.worth[row] : 0);
    }
    __syncthreads(); /* from here on the tile, L and room lie over q and k */
    clear_above<THREADS>(s.tile);
    clear_pairs(s.L);
    if (threadIdx.x < C && threadIdx.x >= nonfinite) d.beta[threadIdx.x] = 0;
    __syncthreads();
    /* put(row, column, x . k, whether it is a score), for each two neighbours */
    const auto each_pair = [&](auto put) {
#pragma unroll
        for (int j = 0; j < 5; j++) {
            const bool scores = j <= warp;
            const int I = scores ? warp : 3 - warp, J = scores ? j : 4 - j;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = I * 16 + e / 2 * 8 + lane / 4;
                const int column = J * 16 + e % 2 * 8 + lane % 4 * 2;
                const int from = scores ? row : batch_of(c, row) - 1;
                const int last = row < end ? from : -1; /* the last column of this row */
                const float2 g = *(const float2 *)(s.G + max(from, 0) * LD_PAIRS + column);
                put(row, column, column <= last ? x[j][e % 2][e / 2 * 2] * g.x : 0,
                    column + 1 <= last ? x[j][e % 2][e / 2 * 2 + 1] * g.y : 0, scores);
            }
        }
    };
    each_pair([&](int row, int column, float y, float z, bool scores) {
        if (scores)
            put_pair(s.tile + element_at(row, column), y * scale, z * scale);
        else
            *(float2 *)(s.L + row * LD + column) = make_float2(d.beta[row] * y, d.beta[row] * z);
    });
    __syncthreads();
    write_tile<PANEL_BYTES, THREADS>(w.scores + place * PANEL_BYTES, s.tile);
    invert(s.L, s.room);
    if (!w.lower) {
        put_inverse<THREADS>(s.L, d.beta, s.tile);
        __syncthreads();
        write_tile<PANEL_BYTES, THREADS>(w.inverse + place * PANEL_BYTES, s.tile);
        return;
    }
    /* gradients follow: - L, then - M */
    each_pair([&](int row, int column, float y, float z, bool scores) {
        if (!scores) put_pair(s.tile + element_at(row, column), -y, -z);
    });
    if (threadIdx.x < C) w.beta[place * C + threadIdx.x] = d.beta[threadIdx.x];
    __syncthreads();
    multiply_with_inverse(s.tile, s.L);
    __syncthreads();
    write_tile<PANEL_BYTES, THREADS>(w.lower + place * PANEL_BYTES, s.tile);
}

#endif
