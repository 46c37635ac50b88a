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

#include "adjoint_rows.cuh"

typedef intra_panel<2 * PANEL, LA_DELTA> panel_of_pair;

/* A multiprocessor of Hopper has room for two. The results of the panels lie where these were. */
struct intra_pair_room {
    union {
        alignas(1024) panel_of_pair panel;
        struct { /* numbers of pairs of tokens, with the two columns of states (pair.cuh) */
            /* gradients of the bare products q_i . k_j and k_i . k_j */
            alignas(1024) char dP[PANEL_BYTES], dL[PANEL_BYTES];
            float dG[C * LD_PAIRS]; /* by way of q; then parts of da */
            /* row i: of row b - 1 of G, by way of row i of k; then parts of deta */
            float dH[C * LD_PAIRS];
        };
    };
    alignas(1024) char q[PANEL_BYTES], k[PANEL_BYTES];
    float G[C * LD_PAIRS];
    pair_gates gates;
    pair_columns columns;
    float end_G[COLUMNS_OF_PAIR],
        end_N[COLUMNS_OF_PAIR];       /* gradients of the last rows of G and N */
    float2 above[4][COLUMNS_OF_PAIR]; /* those of the row above each quarter, of N and of G */
    float sums[INTRA_THREADS / 32][3];
    uint64_t full;
};
static_assert(sizeof(intra_pair_room) <= 99 << 10, "as sm_86, sm_89, sm_120");

/* c = x y', or c += x y' with `adds`: rows of this warp times rows of another tile. */
__device__ __forceinline__ void multiply_with_rows_of(float (&c)[8][4], uint32_t x, uint32_t y,
                                                      int row, bool adds)
{
#if HAS_WARP_GROUPS
    (void)row;
#pragma unroll
    for (int j = 0; j < 4; j++) multiply_tiles(c, x, y, j * 16, !adds && j == 0);
#else
#pragma unroll
    for (int j = 0; j < 8 * 4 && !adds; j++) c[j / 4][j % 4] = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) multiply_rows(c, load_left(x, row, j * 16), y, j * 16);
#endif
}

/* c = x y, or c += x y: rows of this warp times another tile. */
__device__ __forceinline__ void multiply_with_columns_of(float (&c)[8][4], uint32_t x, uint32_t y,
                                                         int row, bool adds = false)
{
#if HAS_WARP_GROUPS
    (void)row;
#pragma unroll
    for (int j = 0; j < 4; j++) multiply_panels(c, x, y, j * 16, !adds && j == 0);
#else
#pragma unroll
    for (int j = 0; j < 8 * 4 && !adds; j++) c[j / 4][j % 4] = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) multiply_columns(c, load_left(x, row, j * 16), y, j * 16);
#endif
}

/* The part of a thread of the sums over the columns of x times rows row.. of a tile; and
 * to += by x. Two rows of a thread. */
__device__ __forceinline__ void add_rows(float (&to)[8][4], float2 &sum, const float (&x)[8][4],
                                         float2 by, const char *tile, int row)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 8; m++) {
        const int at = element_at(row + lane / 4, m * 8 + lane % 4 * 2);
        const float2 y = unpack(*(const uint32_t *)(tile + at));
        const float2 z = unpack(*(const uint32_t *)(tile + at + 8 * 128));
        sum.x += x[m][0] * y.x + x[m][1] * y.y;
        sum.y += x[m][2] * z.x + x[m][3] * z.y;
        to[m][0] += by.x * x[m][0];
        to[m][1] += by.x * x[m][1];
        to[m][2] += by.y * x[m][2];
        to[m][3] += by.y * x[m][3];
    }
}

/* The gradients of columns of G and N, from the last row up: dG becomes the parts of da, and dH
 * those of deta. A thread has a quarter of a column. First it goes up its rows from zeros, then
 * from what comes from the quarters below, which is joined as find_columns joins quarters, against
 * their order. */
__device__ __forceinline__ void undo_columns(const call &c, intra_pair_room &s, int n)
{
    const float *const G = s.G;
    float *const dG = s.dG, *const dH = s.dH;
    /* all of columns 48 to 63 lies in quarter 3, of columns 32 to 47 in quarters 2 and 3, ... */
    const int place = threadIdx.x;
    const bool of_state = place >= 160;
    const int quarter = of_state      ? (place - 160) / 2
                        : place < 64  ? 3
                        : place < 112 ? 2
                        : place < 144 ? 1
                                      : 0;
    const int j = of_state ? OF_M + place % 2
                           : place - (quarter == 3   ? 0
                                      : quarter == 2 ? 64
                                      : quarter == 1 ? 112
                                                     : 144);
    const int first = quarter * QUARTER, at = first * LD_PAIRS + j;
    const bool works = place < 168 && first < n;
    float own[QUARTER], a[QUARTER], eta[QUARTER];
    if (works) {
        load_rows(s.gates.a + first, a);
        load_rows(s.gates.eta + first, eta);
#pragma unroll
        for (int e = 0; e < QUARTER; e++) {
            const int i = first + e;
            own[e] = i < n ? dG[at + e * LD_PAIRS] : 0;
            if (c.batch == 1 && i + 1 < n) own[e] += dH[at + (e + 1) * LD_PAIRS];
        }
        if (c.batch > 1) /* by way of the tokens that see row i of G */
            for (int e = 0; e < QUARTER; e++) {
                const int i = first + e;
                if (batch_of(c, i + 1) != i + 1) continue;
                float sum = 0;
                for (int row = i + 1; row < min(i + 1 + c.batch, n); row++)
                    sum += dH[row * LD_PAIRS + j];
#pragma unroll
                for (int other = 0; other < QUARTER; other++) own[other] += other == e ? sum : 0;
            }
        float x = 0, y = 0; /* dG and dN */
#pragma unroll
        for (int e = QUARTER - 1; e >= 0; e--) {
            if (first + e >= n) continue;
            x += own[e];
            y += x;
            x *= a[e];
            y *= eta[e];
        }
        s.above[quarter][j] = make_float2(y, x);
    }
    __syncthreads(); /* dH is no longer needed */
    if (!works) return;
    float2 up = make_float2(s.end_N[j], s.end_G[j]);
    for (int q = (n - 1) / QUARTER; q > quarter; q--) {
        const pair_quarter &by = s.columns.quarter[q];
        const float2 here = s.above[q][j];
        up = make_float2(here.x + by.eta * up.x + by.across * up.y, here.y + by.a * up.y);
    }
    float x = up.y, y = up.x;
    /* N of the row before the quarter */
    float worth = of_state ? j == OF_Y : j >= first ? 0 : s.columns.end[j].x;
    for (int q = of_state ? 0 : j / QUARTER + 1; q < quarter; q++)
        worth *= s.columns.quarter[q].eta;
    float g[QUARTER], N[QUARTER]; /* of the row before */
#pragma unroll
    for (int e = 0; e < QUARTER; e++) {
        g[e] = first + e ? G[at + (e - 1) * LD_PAIRS] : j == OF_M;
        N[e] = worth;
        worth = first + e == j ? 1 : worth * eta[e];
    }
#pragma unroll
    for (int e = QUARTER - 1; e >= 0; e--) {
        if (first + e >= n) continue;
        x += own[e];
        y += x;
        dG[at + e * LD_PAIRS] = x * g[e];
        dH[at + e * LD_PAIRS] = y * N[e];
        x *= a[e];
        y *= eta[e];
    }
}

/* The part of a thread of the sums of M * dM, Y * dM and Y * dY in a panel. */
__device__ __forceinline__ void add_states(float (&along)[3], const panel_of_pair &x)
{
#pragma unroll 1
    for (int j = threadIdx.x * 16; j < PANEL_BYTES; j += INTRA_THREADS * 16) {
        const uint4 M = *(const uint4 *)(x.S + j), Y = *(const uint4 *)(x.S + PANEL_BYTES + j);
        const uint4 dM = *(const uint4 *)(x.dS + j), dY = *(const uint4 *)(x.dS + PANEL_BYTES + j);
        const uint32_t Ms[] = {M.x, M.y, M.z, M.w}, Ys[] = {Y.x, Y.y, Y.z, Y.w};
        const uint32_t dMs[] = {dM.x, dM.y, dM.z, dM.w}, dYs[] = {dY.x, dY.y, dY.z, dY.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float2 m = unpack(Ms[e]), y = unpack(Ys[e]);
            const float2 dm = unpack(dMs[e]), dy = unpack(dYs[e]);
            along[0] += m.x * dm.x + m.y * dm.y;
            along[1] += y.x * dm.x + y.y * dm.y;
            along[2] += y.x * dy.x + y.y * dy.y;
        }
    }
}

/* The tokens that the two rows of a thread see, and the factors of their products. */
struct sight_of_rows {
    int top, low;       /* they see the writes of the tokens before these */
    float x_top, x_low; /* of products with dO or Z */
};

/* The adjoint of the scores: X becomes rows of dP or dL, those of this group, which are left in
 * shared memory, as are its parts of dG. `bare` has the bare products. */
__device__ __forceinline__ void adjoint_of_pair_scores(intra_pair_room &s, const intra_seat &me,
                                                       const sight_of_rows &sees, float (&X)[8][4],
                                                       const float (&bare)[8][4])
{
    char *const tile = me.first_group ? s.dP : s.dL;
    float *const dG = me.first_group ? s.dG : s.dH;
    const int top = me.top, low = me.low;
    const float *const G_top = s.G + max(sees.top - 1, 0) * LD_PAIRS + me.pair;
    const float *const G_low = s.G + max(sees.low - 1, 0) * LD_PAIRS + me.pair;
#pragma unroll
    for (int m = 0; m < 8; m++) {
        const int j = m * 8 + me.pair;
        const float2 b = *(const float2 *)(s.gates.beta + j);
        const float2 g_top = *(const float2 *)(G_top + m * 8);
        const float2 g_low = *(const float2 *)(G_low + m * 8);
        const float x0 = j < sees.top ? sees.x_top * b.x * X[m][0] : 0;
        const float x1 = j + 1 < sees.top ? sees.x_top * b.y * X[m][1] : 0;
        const float x2 = j < sees.low ? sees.x_low * b.x * X[m][2] : 0;
        const float x3 = j + 1 < sees.low ? sees.x_low * b.y * X[m][3] : 0;
        /* not all of G above its diagonal has a number */
        X[m][0] = j < sees.top ? x0 * g_top.x : 0;
        X[m][1] = j + 1 < sees.top ? x1 * g_top.y : 0;
        X[m][2] = j < sees.low ? x2 * g_low.x : 0;
        X[m][3] = j + 1 < sees.low ? x3 * g_low.y : 0;
        *(uint32_t *)(tile + element_at(top, j)) = pack(X[m][0], X[m][1]);
        *(uint32_t *)(tile + element_at(low, j)) = pack(X[m][2], X[m][3]);
        /* the diagonal of G is 1, whatever the gates are */
        *(float2 *)(dG + top * LD_PAIRS + j) =
            make_float2(j < top ? x0 * bare[m][0] : 0, j + 1 < top ? x1 * bare[m][1] : 0);
        *(float2 *)(dG + low * LD_PAIRS + j) =
            make_float2(j < low ? x2 * bare[m][2] : 0, j + 1 < low ? x3 * bare[m][3] : 0);
    }
}

/* The products of dP and dL with rows of q and k, added to dq or dk. */
__device__ __forceinline__ void multiply_pair_scores(const intra_pair_room &s, bool first_group,
                                                     int row0, float (&sum)[8][4])
{
    const uint32_t dP = address_of(s.dP), dL = address_of(s.dL);
    const uint32_t q = address_of(s.q), k = address_of(s.k);
    left across[4];
    if (!first_group)
#pragma unroll
        for (int j = 0; j < 4; j++) across[j] = load_left_transposed(dP, j * 16, row0);
    products_begin();
    multiply_with_columns_of(sum, first_group ? dP : dL, k, row0, true); /* was q k', k k' */
    if (!first_group) {
#pragma unroll
        for (int j = 0; j < 4; j++) multiply_columns(sum, across[j], q, j * 16);
#pragma unroll
        for (int j = 0; j < 4; j++)
            multiply_columns(sum, load_left_transposed(dL, j * 16, row0), k, j * 16);
    }
    products_commit();
    products_wait<0>();
    products_in(sum);
}

/* The gradients of both gates of a token: the sums of the rows that undo_columns has left. Four
 * threads have a row. */
template <int PARTS>
__device__ __forceinline__ void
store_gates_of_pair(const call &c, const gradients &d, const intra_flags &to, const unit &u, int t,
                    int n, int hv, int part, const intra_pair_room &s)
{
    const int i = threadIdx.x / 4;
    float da = 0, deta = 0;
    const auto add = [&](int j) {
        da += s.dG[i * LD_PAIRS + j];
        deta += s.dH[i * LD_PAIRS + j];
    };
#pragma unroll 4
    for (int j = threadIdx.x % 4; j < i; j += 4) add(j);
    if (threadIdx.x % 4 < 2) add(OF_M + threadIdx.x % 4);
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
        store(at(d[LA_DG], u.b, t + i, hv), d[LA_DG].dtype,
              gate_gradient(da, s.gates.a[i], d.gate));
    if (d[LA_DETA].data) store(at(d[LA_DETA], u.b, t + i, hv), d[LA_DETA].dtype, deta);
}

/* PARTS: the blocks of a chunk. Each makes the gradients of the scores, and its part of those of
 * the gates. */
template <int PARTS, typename = element>
__global__ void __launch_bounds__(INTRA_THREADS, HAS_WARP_GROUPS + 1)
    intra_chunk_adjoint_pair(const __grid_constant__ call c, const __grid_constant__ gradients d,
                             const __grid_constant__ chunks w,
                             const __grid_constant__ backward_maps maps,
                             const __grid_constant__ kept f, const __grid_constant__ intra_flags to)
{
    threads_below<INTRA_THREADS>();
    constexpr int BOTH = 2 * PANEL;
    extern __shared__ __align__(1024) char shared[];
    intra_pair_room &s = *(intra_pair_room *)shared;
    const pair_gates &of = s.gates;
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
        fetch_panel<BOTH, LA_DELTA>(c, d, maps, f, u, t, n, place * panels + i, i, s.panel, &s.full,
                                    part * BOTH, PARTS * BOTH);
#if HAS_WARP_GROUPS
        barrier_expect(address_of(&s.full), panel_bytes<BOTH, LA_DELTA>);
#endif
    };
#if HAS_WARP_GROUPS
    if (threadIdx.x == 0) {
        barrier_init(address_of(&s.full), 1);
        barriers_ready();
        fetch(0);
    }
#else
    fetch(0);
#endif
    const pair_token token = load_pair_token(c, u, t, n);
    load_all<PARTS * PANEL, INTRA_THREADS, PANEL>(c, u.b, t, n, u.h, s.q, s.k, NULL, to.given,
                                                  part * PANEL);
    store_pair_token(c, token, n, s.gates);
#if HAS_WARP_GROUPS
    stores_before_copies(); /* tensor cores read q and k */
#endif
    __syncthreads();
    find_columns(of, n, s.G, s.columns);
    __syncthreads();

    /* The rows of G that q or k see; there is nothing behind the end of the sequence. Then the
     * factors of the products with states, from these rows and from the last one. */
    const float b_top = of.beta[top], b_low = of.beta[low];
    const int top_sees = min(first_group ? top + 1 : batch_of(c, top), n);
    const int low_sees = min(first_group ? low + 1 : batch_of(c, low), n);
    const float x_top = first_group ? scale : -b_top, x_low = first_group ? scale : -b_low;
    const float2 by_top = worth_of_states(s.G, top_sees - 1);
    const float2 by_low = worth_of_states(s.G, low_sees - 1);
    const float *const last = s.G + (n - 1) * LD_PAIRS, *const worth = s.columns.worth;

    float X[8][4];        /* dO E' or Z E' */
    float sum[8][4] = {}; /* dq or dk */
    float along[3] = {};  /* the sums of M * dM, Y * dM, Y * dY */
    /* of two rows: q . dO M' or k . Z M', the same with Y, k . E dM', k . E dY' */
    float2 with_M = make_float2(0, 0), with_Y = with_M, with_dM = with_M, with_dY = with_M;
    for (int i = 0; i < panels; i++) {
        const panel_of_pair &x = s.panel;
#if HAS_WARP_GROUPS
        barrier_wait(address_of(&s.full), i % 2);
        if (n < C) { /* as wait_for_panel, which would let this kernel spill more */
            for (int j = threadIdx.x; j < (C - n) * 8; j += INTRA_THREADS)
                *(uint4 *)(s.panel.dO + piece_at(n + j / 8, j % 8)) = make_uint4(0, 0, 0, 0);
            stores_before_copies();
            __syncthreads();
        }
#else
        copies_wait<0>();
        __syncthreads();
#endif
        const uint32_t U = address_of(x.U), S = address_of(x.S), dS = address_of(x.dS);
        const uint32_t own = address_of(first_group ? x.dO : x.Z);
        float T[8][4]; /* products with a state */
        const auto finish = [&](float2 &with, float by_top, float by_low) {
            products_commit();
            products_wait<0>();
            products_in(T);
            add_rows(sum, with, T, make_float2(by_top, by_low), first_group ? s.q : s.k, row0);
        };
        products_begin();
        multiply_with_rows_of(X, own, U, row0, i > 0);
        multiply_with_columns_of(T, own, S, row0);
        products_commit();
        add_states(along, x);
        products_wait<0>();
        products_in(X);
        finish(with_M, x_top * by_top.x, x_low * by_low.x);
        products_begin();
        multiply_with_columns_of(T, own, S + PANEL_BYTES, row0);
        finish(with_Y, x_top * by_top.y, x_low * by_low.y);
        if (!first_group) {
            products_begin();
            multiply_with_columns_of(T, U, dS, row0);
            finish(with_dM, top < n ? b_top * last[top] : 0, low < n ? b_low * last[low] : 0);
            products_begin();
            multiply_with_columns_of(T, U, dS + PANEL_BYTES, row0);
            finish(with_dY, top < n ? b_top * worth[top] : 0, low < n ? b_low * worth[low] : 0);
        }
        __syncthreads(); /* the panel is no longer needed */
        if ((!HAS_WARP_GROUPS || threadIdx.x == 0) && i + 1 < panels) fetch(i + 1);
    }
#pragma unroll
    for (int i = 0; i < 3; i++) {
        along[i] = warp_sum(along[i]);
        if (lane == 0) s.sums[warp][i] = along[i];
    }
    float *const dG = first_group ? s.dG : s.dH;
    for (float2 *const x : {&with_M, &with_Y, &with_dM, &with_dY})
        *x = make_float2(quad_sum(x->x), quad_sum(x->y));
    if (lane % 4 == 0) {
        *(float2 *)(dG + top * LD_PAIRS + OF_M) = make_float2(x_top * with_M.x, x_top * with_Y.x);
        *(float2 *)(dG + low * LD_PAIRS + OF_M) = make_float2(x_low * with_M.y, x_low * with_Y.y);
        if (!first_group) {
            s.end_G[top] = b_top * with_dM.x, s.end_G[low] = b_low * with_dM.y;
            s.end_N[top] = b_top * with_dY.x, s.end_N[low] = b_low * with_dY.y;
        }
    }
    /* Rows of the gradients of the scores, those of this group. The bare products q_i . k_j or
     * k_i . k_j are recomputed. */
    float bare[8][4];
    products_begin();
    multiply_with_rows_of(bare, address_of(first_group ? s.q : s.k), address_of(s.k), row0, false);
    products_commit();
    products_wait<0>();
    products_in(bare);
    if (!first_group && part == 0 && d[LA_DBETA].data) /* Z_i . E_i */
#pragma unroll
        for (int m = 0; m < 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = e < 2 ? top : low, j = m * 8 + pair + e % 2;
                if (i == j && i < n)
                    store(at(d[LA_DBETA], u.b, t + i, hv), d[LA_DBETA].dtype, X[m][e]);
            }
    const intra_seat me = {first_group, lane, row0, top, low, pair};
    const sight_of_rows sees = {top_sees, low_sees, x_top, x_low};
    adjoint_of_pair_scores(s, me, sees, X, bare);
#if HAS_WARP_GROUPS
    stores_before_copies(); /* tensor cores read dP and dL */
#endif
    __syncthreads();
    multiply_pair_scores(s, first_group, row0, sum);
    const int64_t apart = (int64_t)c.B * c.T * to.kp * hv;
    if (first_group)
        store_rows(c, u, d[LA_DQ], to.direct_q ? NULL : to.dq + apart, to.kp, t, n, row0, sum,
                   part * PANEL);
    else
        store_rows(c, u, d[LA_DK], to.direct_k ? NULL : to.dk + apart, to.kp, t, n, row0, sum,
                   part * PANEL);
    __syncthreads();

    if (threadIdx.x >= C && threadIdx.x < COLUMNS_OF_PAIR) { /* of the states, from all warps */
        float sum[3] = {};
        for (int i = 0; i < INTRA_THREADS / 32; i++)
            for (int e = 0; e < 3; e++) sum[e] += s.sums[i][e];
        s.end_G[threadIdx.x] = threadIdx.x == OF_Y ? sum[1] : sum[0];
        s.end_N[threadIdx.x] = threadIdx.x == OF_Y ? sum[2] : 0;
    }
    undo_columns(c, s, n);
    __syncthreads();
    store_gates_of_pair<PARTS>(c, d, to, u, t, n, hv, part, s);
}

#endif
