/* intra_chunk_adjoint.cuh for the decay PAIR, whose rows and decays pair.cuh describes. With
 * U = diag(beta) E and dV = diag(beta) Z, the states give
 *
 *     dq_i = scale (e_i dO_i M' + f_i dO_i Y')         de_i = scale q_i . dO_i M', df_i with Y
 *     dk_i = -beta_i (e_(b-1) Z_i M' + f_(b-1) Z_i Y') de_(b-1), df_(b-1) the same way
 *     dk_j = G_nj U_j dM' + N_nj U_j dY'               dG_nj = k_j . U_j dM', dN_nj with Y
 *     de_n = sum of M * dM,  df_n = sum of Y * dM,  dm_n = sum of Y * dY
 *
 * and the scores, was P_ij = scale G_ij q_i . k_j and L_ij = G_(b-1)j k_i . k_j, give what they do in
 * intra_chunk_adjoint.cuh, and dG. At last the adjoint of the recursions of pair.cuh, from the last
 * row up:
 *
 *     dN_i += dG_i,  dm_i += df_i
 *     da_i = sum_j dG_ij G_(i-1)j + de_i e_(i-1) + df_i f_(i-1)
 *     deta_i = sum_j dN_ij N_(i-1)j + dm_i m_(i-1)
 *     dG_(i-1) += a_i dG_i,  de, df the same way;  dN_(i-1) += eta_i dN_i,  dm the same way
 *
 * A block has PANEL keys, of both states. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_ADJOINT_PAIR_CUH
#define LINATTN_CUDA_INTRA_CHUNK_ADJOINT_PAIR_CUH

#include "intra_chunk_adjoint.cuh"

typedef intra_panel<2 * PANEL, LA_DELTA> panel_of_pair;

/* Gradients of the bare products q_i . k_j and k_i . k_j, and N. On Hopper N has a place of its own.
 * Elsewhere it takes theirs, when they are done. */
template <bool HOPPER> struct products_of_pair {
    alignas(1024) char dP[PANEL_BYTES], dL[PANEL_BYTES];
    float N[C * LD_PAIRS];
};
template <> struct products_of_pair<false> {
    union {
        struct {
            alignas(1024) char dP[PANEL_BYTES], dL[PANEL_BYTES];
        };
        float N[C * LD_PAIRS];
    };
};

/* Numbers of pairs of tokens, with the two columns of states (pair.cuh). */
template <bool HOPPER> struct scores_of_pair : products_of_pair<HOPPER> {
    float G[C * LD_PAIRS];
    float dG[C * LD_PAIRS]; /* by way of q; then parts of da */
    float dH[C * LD_PAIRS]; /* row i: of row b - 1 of G, by way of row i of k */
};

template <bool HOPPER> struct pair_places {
    alignas(1024) panel_of_pair panel[INTRA_STAGES];
    scores_of_pair<true> pairs;
};
template <> struct pair_places<false> {
    union {
        alignas(1024) panel_of_pair panel[1];
        scores_of_pair<false> pairs;
    };
};

template <bool HOPPER> struct intra_pair_room : pair_places<HOPPER> {
    alignas(1024) char q[PANEL_BYTES], k[PANEL_BYTES];
    pair_gates gates;
    /* N of the last row; gradients of the last rows of G and N */
    float worth[COLUMNS_OF_PAIR], end_G[COLUMNS_OF_PAIR], end_N[COLUMNS_OF_PAIR];
    float sums[INTRA_THREADS / 32][3];
    uint64_t full[INTRA_STAGES];
};
static_assert(sizeof(intra_pair_room<false>) <= 99 << 10, "as sm_86, sm_89, sm_120");

/* x <- by x + of y, where a thread has two rows. */
__device__ __forceinline__ void join_rows(float (&x)[8][4], const float (&y)[8][4], float2 by,
                                          float2 of)
{
#pragma unroll
    for (int m = 0; m < 8; m++) {
        x[m][0] = by.x * x[m][0] + of.x * y[m][0];
        x[m][1] = by.x * x[m][1] + of.x * y[m][1];
        x[m][2] = by.y * x[m][2] + of.y * y[m][2];
        x[m][3] = by.y * x[m][3] + of.y * y[m][3];
    }
}

/* Going up column j: dG becomes the parts of da, and N those of deta. */
template <typename room>
__device__ __forceinline__ void undo_column(const call &c, room &s, int n, int j)
{
    const float *const G = s.pairs.G;
    float *const dG = s.pairs.dG, *const dH = s.pairs.dH, *const N = s.pairs.N;
    float x = s.end_G[j], y = s.end_N[j]; /* dG and dN of this row */
    const auto seen = [&](int i) {        /* by way of the tokens that see row i of G */
                                   float sum = 0;
                                   if (i + 1 < n && batch_of(c, i + 1) == i + 1)
                                       for (int row = i + 1; row < min(i + 1 + c.batch, n); row++)
                                           sum += dH[row * LD_PAIRS + j];
                                   return sum;
    };
    for (int first = (n - 1) / PAIR_ROWS * PAIR_ROWS; first >= 0; first -= PAIR_ROWS) {
        float own[PAIR_ROWS], g[PAIR_ROWS], worth[PAIR_ROWS], a[PAIR_ROWS], eta[PAIR_ROWS];
        load_rows(s.gates.a + first, a);
        load_rows(s.gates.eta + first, eta);
#pragma unroll
        for (int e = 0; e < PAIR_ROWS; e++) {
            const int i = first + e, at = i * LD_PAIRS + j;
            own[e] = i < n ? dG[at] : 0;
            if (c.batch == 1) own[e] += i + 1 < n ? dH[at + LD_PAIRS] : 0;
            g[e] = i ? G[at - LD_PAIRS] : j == OF_M;
            worth[e] = i ? N[at - LD_PAIRS] : j == OF_Y;
        }
        if (c.batch > 1)
#pragma unroll
            for (int e = 0; e < PAIR_ROWS; e++) own[e] += seen(first + e);
#pragma unroll
        for (int e = PAIR_ROWS - 1; e >= 0; e--) {
            if (first + e >= n) continue;
            x += own[e];
            y += x;
            own[e] = x * g[e];
            worth[e] *= y;
            x *= a[e];
            y *= eta[e];
        }
#pragma unroll
        for (int e = 0; e < PAIR_ROWS; e++) {
            const int at = (first + e) * LD_PAIRS + j;
            if (first + e < n) dG[at] = own[e], N[at] = worth[e];
        }
    }
}

/* PARTS: the blocks of a chunk. Each makes the gradients of the scores, and its part of those of the
 * gates. */
template <int PARTS, typename = element>
__global__ void __launch_bounds__(INTRA_THREADS, 1)
    intra_chunk_adjoint_pair(const __grid_constant__ call c, const __grid_constant__ gradients d,
                             const __grid_constant__ chunks w,
                             const __grid_constant__ backward_maps maps,
                             const __grid_constant__ kept f, const __grid_constant__ intra_flags to)
{
    constexpr bool hopper = HAS_WARP_GROUPS;
    constexpr int STAGES = hopper ? INTRA_STAGES : 1, BOTH = 2 * PANEL;
    extern __shared__ __align__(1024) char shared[];
    typedef intra_pair_room<hopper> room;
    room &s = *(room *)shared;
    const pair_gates &of = s.gates;
    scores_of_pair<hopper> &p = s.pairs;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane % 4 * 2;
    /* shows the compiler that all lanes have the same value */
    const bool first_group = __shfl_sync(~0u, warp, 0) < 4;
    /* the rows of this thread */
    const int row0 = warp % 4 * 16, top = row0 + lane / 4, low = top + 8;
    const int part = blockIdx.x % PARTS, index = blockIdx.x / PARTS;
    const int chunk_slot = index / c.HV, hv = index % c.HV;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int64_t place = (int64_t)chunk_slot * c.HV + hv;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const float scale = (float)c.scale;

    const auto fetch = [&](int i) {
        fetch_panel<BOTH, LA_DELTA>(c, d, maps, f, u, t, n, place * panels + i, i,
                                    s.panel[i % STAGES], s.full + i % STAGES, part * BOTH,
                                    PARTS * BOTH);
#if HAS_WARP_GROUPS
        barrier_expect(address_of(s.full + i % STAGES), panel_bytes<BOTH, LA_DELTA>);
#endif
    };
#if HAS_WARP_GROUPS
    if (threadIdx.x == 0) {
        for (int j = 0; j < STAGES; j++) barrier_init(address_of(s.full + j), 1);
        barriers_ready();
        for (int i = 0; i < min(panels, STAGES); i++) fetch(i);
    }
#else
    fetch(0);
#endif
    load_pair_gates(c, u, t, n, s.gates);
    load_all<PARTS * PANEL, INTRA_THREADS, PANEL>(c, u.b, t, n, u.h, s.q, s.k, NULL, to.given,
                                                  part * PANEL);
    __syncthreads();
    const auto find_decays = [&](float *N) {
        if (threadIdx.x < COLUMNS_OF_PAIR)
            s.worth[threadIdx.x] = find_column(of, n, threadIdx.x, p.G, N);
    };
    if (hopper) find_decays(p.N);

    float X[8][4] = {};                     /* dO E' or Z E' */
    float of_M[8][4] = {}, of_Y[8][4] = {}; /* dO M' or Z M', then dq or dk; the same with Y */
    float to_M[8][4] = {}, to_Y[8][4] = {}; /* second group: E dM', E dY' */
    float along[3] = {};                    /* the sums of M * dM, Y * dM, Y * dY */
    for (int i = 0; i < panels; i++) {
        panel_of_pair &x = s.panel[i % STAGES];
#if HAS_WARP_GROUPS
        barrier_wait(address_of(s.full + i % STAGES), i / STAGES % 2);
        if (n < C) { /* a box may reach into the next sequence, whose NaN must not come along */
            for (int j = threadIdx.x; j < (C - n) * 8; j += INTRA_THREADS)
                *(uint4 *)(x.dO + piece_at(n + j / 8, j % 8)) = make_uint4(0, 0, 0, 0);
            stores_before_copies();
            __syncthreads();
        }
#else
        copies_wait<0>();
        __syncthreads();
#endif
        const uint32_t U = address_of(x.U), S = address_of(x.S), dS = address_of(x.dS);
        const uint32_t own = address_of(first_group ? x.dO : x.Z);
        left a[4], b[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            a[j] = load_left(own, row0, j * 16);
            if (!first_group) b[j] = load_left(U, row0, j * 16);
        }
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            multiply_rows(X, a[j], U, j * 16);
            multiply_columns(of_M, a[j], S, j * 16);
            multiply_columns(of_Y, a[j], S + PANEL_BYTES, j * 16);
        }
        if (!first_group) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply_columns(to_M, b[j], dS, j * 16);
                multiply_columns(to_Y, b[j], dS + PANEL_BYTES, j * 16);
            }
        }
        products_commit();
#pragma unroll 2
        for (int j = threadIdx.x * 4; j < PANEL_BYTES; j += INTRA_THREADS * 4) {
            const float2 M = unpack(*(const uint32_t *)(x.S + j));
            const float2 Y = unpack(*(const uint32_t *)(x.S + PANEL_BYTES + j));
            const float2 dM = unpack(*(const uint32_t *)(x.dS + j));
            const float2 dY = unpack(*(const uint32_t *)(x.dS + PANEL_BYTES + j));
            along[0] += M.x * dM.x + M.y * dM.y;
            along[1] += Y.x * dM.x + Y.y * dM.y;
            along[2] += Y.x * dY.x + Y.y * dY.y;
        }
        products_wait<0>();
        products_in(X);
        products_in(of_M);
        products_in(of_Y);
        products_in(to_M);
        products_in(to_Y);
        __syncthreads(); /* the panel is no longer needed */
        if ((!hopper || threadIdx.x == 0) && i + STAGES < panels) fetch(i + STAGES);
    }
    if (!hopper) {
        find_decays(NULL);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        along[i] = warp_sum(along[i]);
        if (lane == 0) s.sums[warp][i] = along[i];
    }

    /* the rows of M and Y that q or k see, and k~ */
    const float b_top = of.beta[top], b_low = of.beta[low];
    /* the columns of G that they see. There is nothing behind the end of the sequence. */
    const int top_sees = min(first_group ? top + 1 : batch_of(c, top), n);
    const int low_sees = min(first_group ? low + 1 : batch_of(c, low), n);
    const float x_top = first_group ? scale : -b_top, x_low = first_group ? scale : -b_low;
    float *const dG = first_group ? p.dG : p.dH;
    {
        const float2 with_M = dot_rows(of_M, first_group ? s.q : s.k, row0);
        const float2 with_Y = dot_rows(of_Y, first_group ? s.q : s.k, row0);
        if (lane % 4 == 0) {
            *(float2 *)(dG + top * LD_PAIRS + OF_M) =
                make_float2(x_top * with_M.x, x_top * with_Y.x);
            *(float2 *)(dG + low * LD_PAIRS + OF_M) =
                make_float2(x_low * with_M.y, x_low * with_Y.y);
        }
        const float2 by_top = worth_of_states(p.G, top_sees - 1);
        const float2 by_low = worth_of_states(p.G, low_sees - 1);
        join_rows(of_M, of_Y, make_float2(x_top * by_top.x, x_low * by_low.x),
                  make_float2(x_top * by_top.y, x_low * by_low.y));
    }
    if (!first_group) {
        const float2 with_M = dot_rows(to_M, s.k, row0), with_Y = dot_rows(to_Y, s.k, row0);
        if (lane % 4 == 0) {
            s.end_G[top] = b_top * with_M.x, s.end_G[low] = b_low * with_M.y;
            s.end_N[top] = b_top * with_Y.x, s.end_N[low] = b_low * with_Y.y;
        }
        const float *const last = p.G + (n - 1) * LD_PAIRS;
        const auto worth = [&](int i, const float *of_last) { return i < n ? of_last[i] : 0; };
        join_rows(to_M, to_Y, make_float2(b_top * worth(top, last), b_low * worth(low, last)),
                  make_float2(b_top * worth(top, s.worth), b_low * worth(low, s.worth)));
        join_rows(of_M, to_M, make_float2(1, 1), make_float2(1, 1));
    }
    /* Rows of the gradients of the scores, those of this group. The bare products q_i . k_j or
     * k_i . k_j are recomputed. */
    float bare[8][4] = {};
    {
        const uint32_t rows = address_of(first_group ? s.q : s.k), k = address_of(s.k);
        left a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = load_left(rows, row0, j * 16);
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_rows(bare, a[j], k, j * 16);
        products_commit();
        products_wait<0>();
        products_in(bare);
    }
    left own[4]; /* dP or dL, as operands over the columns */
    {
        char *const tile = first_group ? p.dP : p.dL;
        if (!first_group && part == 0 && d[LA_DBETA].data) /* Z_i . E_i */
#pragma unroll
            for (int m = 0; m < 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = e < 2 ? top : low, j = m * 8 + pair + e % 2;
                    if (i == j && i < n)
                        store(at(d[LA_DBETA], u.b, t + i, hv), d[LA_DBETA].dtype, X[m][e]);
                }
        const float *const G_top = p.G + max(top_sees - 1, 0) * LD_PAIRS + pair;
        const float *const G_low = p.G + max(low_sees - 1, 0) * LD_PAIRS + pair;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int j = m * 8 + pair;
            const float2 b = *(const float2 *)(of.beta + j);
            const float2 g_top = *(const float2 *)(G_top + m * 8);
            const float2 g_low = *(const float2 *)(G_low + m * 8);
            const float x0 = j < top_sees ? x_top * b.x * X[m][0] : 0;
            const float x1 = j + 1 < top_sees ? x_top * b.y * X[m][1] : 0;
            const float x2 = j < low_sees ? x_low * b.x * X[m][2] : 0;
            const float x3 = j + 1 < low_sees ? x_low * b.y * X[m][3] : 0;
            X[m][0] = x0 * g_top.x;
            X[m][1] = x1 * g_top.y;
            X[m][2] = x2 * g_low.x;
            X[m][3] = x3 * g_low.y;
            *(uint32_t *)(tile + element_at(top, j)) = pack(X[m][0], X[m][1]);
            *(uint32_t *)(tile + element_at(low, j)) = pack(X[m][2], X[m][3]);
            /* the diagonal of G is 1, whatever the gates are */
            *(float2 *)(dG + top * LD_PAIRS + j) =
                make_float2(j < top ? x0 * bare[m][0] : 0, j + 1 < top ? x1 * bare[m][1] : 0);
            *(float2 *)(dG + low * LD_PAIRS + j) =
                make_float2(j < low ? x2 * bare[m][2] : 0, j + 1 < low ? x3 * bare[m][3] : 0);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) own[j] = as_left(X[2 * j], X[2 * j + 1]);
    }
    __syncthreads();
    {
        const uint32_t q = address_of(s.q), k = address_of(s.k);
        left across[4], twice[4];
        if (!first_group)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                across[j] = load_left_transposed(address_of(p.dP), j * 16, row0);
                twice[j] = load_left_transposed(address_of(p.dL), j * 16, row0);
            }
        products_begin();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            multiply_columns(of_M, own[j], k, j * 16); /* was P = q k', L = k k' */
            if (!first_group) {
                multiply_columns(of_M, across[j], q, j * 16);
                multiply_columns(of_M, twice[j], k, j * 16);
            }
        }
        products_commit();
        products_wait<0>();
        products_in(of_M);
    }
    const int64_t apart = (int64_t)c.B * c.T * to.kp * hv;
    if (first_group)
        store_rows(c, u, d[LA_DQ], to.direct_q ? NULL : to.dq + apart, to.kp, t, n, row0, of_M,
                   part * PANEL);
    else
        store_rows(c, u, d[LA_DK], to.direct_k ? NULL : to.dk + apart, to.kp, t, n, row0, of_M,
                   part * PANEL);
    __syncthreads();

    if (!hopper) {
        find_decays(p.N);
        __syncthreads();
    }
    if (threadIdx.x < COLUMNS_OF_PAIR) {
        if (threadIdx.x >= C) { /* the states, over all warps of the sums */
            float sum[3] = {};
            for (int i = 0; i < INTRA_THREADS / 32; i++)
                for (int e = 0; e < 3; e++) sum[e] += s.sums[i][e];
            s.end_G[threadIdx.x] = sum[threadIdx.x == OF_Y];
            s.end_N[threadIdx.x] = threadIdx.x == OF_Y ? sum[2] : 0;
        }
        undo_column(c, s, n, threadIdx.x);
    }
    __syncthreads();
    const int i = threadIdx.x / 4; /* four threads have a row */
    float da = 0, deta = 0;
#pragma unroll 8
    for (int j = threadIdx.x % 4; j < COLUMNS_OF_PAIR; j += 4) {
        da += p.dG[i * LD_PAIRS + j];
        deta += p.N[i * LD_PAIRS + j];
    }
    da = quad_sum(da);
    deta = quad_sum(deta);
    if (i >= n || threadIdx.x % 4) return;
    if (to.da) {
        const int64_t tokens = (int64_t)c.B * c.T, token = (int64_t)u.b * c.T + t + i;
        to.da[((int64_t)part * c.HV + hv) * tokens + token] = da;
        to.da[((int64_t)(PARTS + part) * c.HV + hv) * tokens + token] = deta;
        return;
    }
    if (d[LA_DG].data)
        store(at(d[LA_DG], u.b, t + i, hv), d[LA_DG].dtype, gate_gradient(da, of.a[i], d.gate));
    if (d[LA_DETA].data) store(at(d[LA_DETA], u.b, t + i, hv), d[LA_DETA].dtype, deta);
}

#endif
