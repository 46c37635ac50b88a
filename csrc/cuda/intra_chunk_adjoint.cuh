/* The adjoint of everything that depends on one chunk alone, for all chunks side by side. It goes
 * from the states that recompute.cuh kept to dq, dk and the gradients of the gate and of beta.
 * docs/math.md, section 6:
 *
 *     dP = lower(dO U')       dL = -strict(dV U')       U = diag(b) E, dV = diag(b) Z
 *     dq^ = dO S'             dk^ = -dV S'              dk~ = U dS'
 *     dbeta_i = Z_i . E_i     de = sum of S * dS
 *
 * and from there the adjoint of the scores. Where the caller gave x, dk^ is the gradient of x^, and
 * L is that of x and k. Two groups of four warps share a chunk. One computes the sums that end in
 * dq, the other those that end in dk and dx. A warp has 16 tokens. Value columns come panel by
 * panel. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_ADJOINT_CUH
#define LINATTN_CUDA_INTRA_CHUNK_ADJOINT_CUH

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

/* x lies behind this, where the caller gave one. */
template <int KP, la_rule RULE, bool HOPPER> struct intra_room : intra_places<KP, RULE, HOPPER> {
    alignas(1024) char q[tile_bytes(KP)], k[tile_bytes(KP)];
    float a[C], beta[C], e[C], r[C]; /* e: decay from the start of the chunk; r: to its end */
    /* q . dq^, x . dx^, k . dk~: parts of the gradients of decays. A part of x is at the token
     * whose decay x sees */
    float of_q[C], of_x[C], of_r[C];
    float up[4][C], of_e[4][C], quarter[4], da[2][C], sums[INTRA_THREADS / 32];
    uint64_t full[INTRA_STAGES];
};

/* HAS_X: the caller gave x. Then dx and dk are apart, which takes registers. PARTS: the blocks of a
 * chunk, which have KP keys each. Every block makes the gradients of the scores. The gradient of the
 * gate is a sum over keys: each block makes its part. */
template <int KP, la_decay DECAY, la_rule RULE, bool HAS_X, int PARTS>
__global__ void __launch_bounds__(INTRA_THREADS, 1)
    intra_chunk_adjoint_scalar(const __grid_constant__ call c, const __grid_constant__ gradients d,
                               const __grid_constant__ chunks w,
                               const __grid_constant__ backward_maps maps,
                               const __grid_constant__ kept f,
                               const __grid_constant__ intra_flags to)
{
    constexpr bool delta = RULE == LA_DELTA, hopper = HAS_WARP_GROUPS;
    constexpr int STAGES = hopper ? INTRA_STAGES : 1;
    extern __shared__ __align__(1024) char shared[];
    typedef intra_room<KP, RULE, hopper> room;
    room &s = *(room *)shared;
    char *const dP = s.pairs.dP, *const dL = s.pairs.dL;
    float *const G = s.pairs.G, *const dG = s.pairs.dG;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane % 4 * 2;
    /* shows the compiler that all lanes have the same value */
    const bool first_group = __shfl_sync(~0u, warp, 0) < 4;
    /* the rows of this thread */
    const int row0 = warp % 4 * 16, top = row0 + lane / 4, low = top + 8;
    const int part = blockIdx.x % PARTS, first_key = part * KP, index = blockIdx.x / PARTS;
    const int chunk_slot = index / c.HV, hv = index % c.HV;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int64_t place = (int64_t)chunk_slot * c.HV + hv;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const float scale = (float)c.scale;
    const int back = HAS_X && c.predicts_before; /* row i of L has row i - 1 of G */
    char *const seen = HAS_X ? shared + sizeof(room) : s.k;

    /* Fetch a panel, and first q, k and x: one thread asks the copy engine, or all threads copy. */
    const auto fetch = [&](int i) {
        const struct {
            char *to;
            const char *prepared;
            la_name name;
            const CUtensorMap *map;
        } rows[] = {{s.q, w.q, LA_Q, &maps.q},
                    {s.k, w.k, LA_K, &maps.k},
                    {HAS_X ? seen : NULL, w.x, LA_X, &maps.x}};
        const int64_t keys =
            (((int64_t)chunk_slot * w.heads + u.h) * PARTS + part) * tile_bytes(KP);
        uint64_t *const full = s.full + i % STAGES;
#pragma unroll
        for (const auto &one : rows) {
            if (i > 0 || !one.to) continue;
            const uint32_t to = address_of(one.to);
#if HAS_WARP_GROUPS
            if (one.prepared)
                engine_copy(to, one.prepared + keys, tile_bytes(KP), address_of(full));
            for (int j = 0; j < (one.prepared ? 0 : KP / PANEL); j++)
                engine_copy_box(to + j * PANEL_BYTES, one.map, first_key + j * PANEL, u.h, t, u.b,
                                address_of(full));
#else
            if (one.prepared)
                copy_bytes(to, one.prepared + keys, tile_bytes(KP));
            else
                copy_rows<KP>(c.x[one.name], c.K, u.b, t, n, u.h, to, first_key);
#endif
        }
        fetch_panel<KP, RULE>(c, d, maps, f, u, t, n, place * panels + i, i, s.panel[i % STAGES],
                              full, first_key, PARTS * KP);
#if HAS_WARP_GROUPS
        barrier_expect(address_of(full),
                       panel_bytes<KP, RULE> + (i == 0 ? (HAS_X ? 3 : 2) * tile_bytes(KP) : 0));
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
    /* meanwhile the gates */
    if (threadIdx.x < C) {
        const int i = threadIdx.x;
        s.a[i] = DECAY == LA_TOKEN && i < n
                     ? decay_of(load<float>(at(c.x[LA_G], u.b, t + i, hv), c.x[LA_G].dtype), c.gate)
                     : 1;
        s.beta[i] = delta && i < n
                        ? load<float>(at(c.x[LA_BETA], u.b, t + i, hv), c.x[LA_BETA].dtype)
                    : delta ? 0
                            : 1;
    }
    __syncthreads();
    /* G by columns. A thread has 16 rows of column j, both of G and of the sums below. */
    const int j_own = threadIdx.x % C, first_row = threadIdx.x / C * 16;
    const auto find_decays = [&] {
        if constexpr (DECAY == LA_TOKEN) {
            float g = 1;
            for (int i = j_own + 1; i < first_row; i++) g *= s.a[i];
#pragma unroll
            for (int i = first_row; i < first_row + 16; i++) {
                g = i > j_own ? g * s.a[i] : 1;
                G[i * LD_PAIRS + j_own] = g;
            }
            if (first_row == C - 16) s.r[j_own] = g;
            __syncthreads();
        }
        if (threadIdx.x < C) {
            s.of_x[threadIdx.x] = 0;
            s.e[threadIdx.x] = DECAY == LA_TOKEN ? s.a[0] * G[threadIdx.x * LD_PAIRS] : 1;
            if (DECAY == LA_NONE) s.r[threadIdx.x] = 1;
        }
    };
    if (hopper) find_decays();

    float X[8][4] = {};      /* dO U' or Z U' */
    float Y[KP / 8][4] = {}; /* dO S' or Z S', then dq or dx; dx is part of dk without an x */
    float R[KP / 8][4] = {}; /* second group: U dS', then dk beside dx */
    float along = 0;         /* the sum of S * dS */
    for (int i = 0; i < panels; i++) {
        intra_panel<KP, RULE> &x = s.panel[i % STAGES];
#if HAS_WARP_GROUPS
        barrier_wait(address_of(s.full + i % STAGES), i / STAGES % 2);
        if (n < C) { /* a box may reach into the next sequence, whose NaN must not come along */
            for (int j = threadIdx.x; j < (C - n) * 8; j += INTRA_THREADS) {
                const int at = piece_at(n + j / 8, j % 8);
                if (!delta) *(uint4 *)(x.U + at) = make_uint4(0, 0, 0, 0);
                *(uint4 *)(x.dO + at) = make_uint4(0, 0, 0, 0);
            }
            for (int j = threadIdx.x; j < (C - n) * KP / 8 && i == 0; j += INTRA_THREADS) {
                const int at = piece_at(n + j / (KP / 8), j % (KP / 8));
                *(uint4 *)(s.q + at) = make_uint4(0, 0, 0, 0);
                *(uint4 *)(s.k + at) = make_uint4(0, 0, 0, 0);
                if (HAS_X) *(uint4 *)(seen + at) = make_uint4(0, 0, 0, 0);
            }
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
            if (first_group || delta) a[j] = load_left(own, row0, j * 16);
            if (!first_group) b[j] = load_left(U, row0, j * 16);
        }
        products_begin();
        if (first_group || delta) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply_rows(X, a[j], U, j * 16);
                multiply_columns(Y, a[j], S, j * 16);
            }
        }
        if (!first_group) {
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(R, b[j], dS, j * 16);
        }
        products_commit();
        if (DECAY == LA_TOKEN)
#pragma unroll 4
            for (int j = threadIdx.x * 16; j < tile_bytes(KP); j += INTRA_THREADS * 16) {
                const uint4 y = *(const uint4 *)(x.S + j), z = *(const uint4 *)(x.dS + j);
                const uint32_t ys[4] = {y.x, y.y, y.z, y.w}, zs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float2 p = unpack(ys[e]), q = unpack(zs[e]);
                    along += p.x * q.x + p.y * q.y;
                }
            }
        products_wait<0>();
        products_in(X);
        products_in(Y);
        products_in(R);
        __syncthreads(); /* the panel is no longer needed */
        if ((!hopper || threadIdx.x == 0) && i + STAGES < panels) fetch(i + STAGES);
    }
    if (!hopper) {
        find_decays();
        __syncthreads();
    }
    if (DECAY == LA_TOKEN) {
        along = warp_sum(along);
        if (lane == 0) s.sums[warp] = along;
    }

    /* Rows of the gradients of the scores, those of this group. The bare products q_i . k_j or x_i
     * . k_j are recomputed. */
    const float b_top = s.beta[top], b_low = s.beta[low];
    if (first_group || delta) {
        const float x_top = first_group ? scale : -b_top, x_low = first_group ? scale : -b_low;
        const float2 sum = dot_rows(Y, first_group ? s.q : seen, row0);
        const int before = first_group ? 0 : back; /* the first token sees no decay of the chunk */
        scale_rows(Y, x_top * (top >= before ? s.e[top - before] : 1), x_low * s.e[low - before]);
        float *const to = first_group ? s.of_q : s.of_x;
        if (lane % 4 == 0) {
            if (top >= before) to[top - before] = x_top * sum.x;
            to[low - before] = x_low * sum.y;
        }
    }
    if (!first_group) {
        const float2 sum = dot_rows(R, s.k, row0);
        if (lane % 4 == 0) {
            s.of_r[top] = b_top * sum.x;
            s.of_r[low] = b_low * sum.y;
        }
        scale_rows(R, b_top * s.r[top], b_low * s.r[low]);
        if (!HAS_X) /* was x = k */
#pragma unroll
            for (int m = 0; m < KP / 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) Y[m][e] = (delta ? Y[m][e] : 0) + R[m][e];
    }
    float(&dk)[KP / 8][4] = HAS_X ? R : Y;
    float bare[8][4] = {};
    if (DECAY == LA_TOKEN && (first_group || delta)) {
        const uint32_t rows = address_of(first_group ? s.q : seen), k = address_of(s.k);
        left a[KP / 16];
#pragma unroll
        for (int j = 0; j < KP / 16; j++) a[j] = load_left(rows, row0, j * 16);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP / 16; j++) multiply_rows(bare, a[j], k, j * 16);
        products_commit();
        products_wait<0>();
        products_in(bare);
    }
    left own[4]; /* dP or dL, as operands over the columns */
    if (first_group || delta) {
        char *tile = first_group ? dP : dL;
        if (delta && !first_group && part == 0 && d[LA_DBETA].data) /* Z_i . E_i */
#pragma unroll
            for (int m = 0; m < 8; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int i = e < 2 ? top : low, j = m * 8 + pair + e % 2;
                    if (i == j && i < n)
                        store(at(d[LA_DBETA], u.b, t + i, hv), d[LA_DBETA].dtype, X[m][e]);
                }
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int j = m * 8 + pair;
            const float2 b = *(const float2 *)(s.beta + j);
            const float x_top = first_group ? scale : -b_top, x_low = first_group ? scale : -b_low;
            float2 g_top = make_float2(1, 1), g_low = g_top;
            if (DECAY == LA_TOKEN) {
                const int before = first_group ? 0 : back;
                g_top = *(const float2 *)(G + max(top - before, 0) * LD_PAIRS + j);
                g_low = *(const float2 *)(G + (low - before) * LD_PAIRS + j);
            }
            const int diagonal = first_group; /* P has a diagonal, L has none */
            const float x0 = j < top + diagonal ? x_top * b.x * X[m][0] : 0;
            const float x1 = j + 1 < top + diagonal ? x_top * b.y * X[m][1] : 0;
            const float x2 = j < low + diagonal ? x_low * b.x * X[m][2] : 0;
            const float x3 = j + 1 < low + diagonal ? x_low * b.y * X[m][3] : 0;
            X[m][0] = x0 * g_top.x;
            X[m][1] = x1 * g_top.y;
            X[m][2] = x2 * g_low.x;
            X[m][3] = x3 * g_low.y;
            *(uint32_t *)(tile + element_at(top, j)) = pack(X[m][0], X[m][1]);
            *(uint32_t *)(tile + element_at(low, j)) = pack(X[m][2], X[m][3]);
            if (DECAY == LA_TOKEN && first_group) { /* was P = G q k': dG, below the diagonal */
                *(float2 *)(dG + top * LD_PAIRS + j) =
                    make_float2(j < top ? x0 * bare[m][0] : 0, j + 1 < top ? x1 * bare[m][1] : 0);
                *(float2 *)(dG + low * LD_PAIRS + j) =
                    make_float2(j < low ? x2 * bare[m][2] : 0, j + 1 < low ? x3 * bare[m][3] : 0);
            } else if (DECAY == LA_TOKEN) {
                bare[m][0] = j < top - back ? x0 * bare[m][0] : 0;
                bare[m][1] = j + 1 < top - back ? x1 * bare[m][1] : 0;
                bare[m][2] = j < low - back ? x2 * bare[m][2] : 0;
                bare[m][3] = j + 1 < low - back ? x3 * bare[m][3] : 0;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) own[j] = as_left(X[2 * j], X[2 * j + 1]);
    }
    __syncthreads();
    /* Was den_i = q_i z_i, where z_i has the keys up to token i: dz_i = d_den_i q_i. The keys of
     * the chunk get their part by way of dP, since each was weighted with 1. */
    const bool through_z = DECAY == LA_NONE && !delta && PARTS == 1 && to.den;
    if (through_z) {
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
            const float *const den = to.den + ((int64_t)hv * c.B + u.b) * c.T + t;
            const float d_top = top < n ? d_denominator(&c, den[top], with_num.x) : 0;
            const float d_low = low < n ? d_denominator(&c, den[low], with_num.y) : 0;
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
    if (DECAY == LA_TOKEN && delta && !first_group) /* and L = G x k' */
#pragma unroll
        for (int m = 0; m < 8; m++) {
            float2 *x = (float2 *)(dG + max(top - back, 0) * LD_PAIRS + m * 8 + pair);
            float2 *y = (float2 *)(dG + (low - back) * LD_PAIRS + m * 8 + pair);
            if (top >= back) *x = make_float2(x->x + bare[m][0], x->y + bare[m][1]);
            *y = make_float2(y->x + bare[m][2], y->y + bare[m][3]);
        }
    {
        const uint32_t q = address_of(s.q), k = address_of(s.k), x = address_of(seen);
        left across[4], twice[4];
        if (!first_group)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                across[j] = load_left_transposed(address_of(dP), j * 16, row0);
                if (delta) twice[j] = load_left_transposed(address_of(dL), j * 16, row0);
            }
        products_begin();
        if (first_group) {
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(Y, own[j], k, j * 16); /* was P = q k' */
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply_columns(dk, across[j], q, j * 16);
                if (delta) { /* was L = x k' */
                    multiply_columns(Y, own[j], k, j * 16);
                    multiply_columns(dk, twice[j], x, j * 16);
                }
            }
        }
        products_commit();
        products_wait<0>();
        products_in(Y);
        if (HAS_X) products_in(R);
    }
    const bool direct = first_group ? to.direct_q : to.direct_k;
    if (!HAS_X && PARTS == 1 && direct && to.elu) undo_elu(Y, first_group ? s.q : s.k, row0);
    if (!HAS_X && PARTS == 1 && direct && to.norms)
        undo_norm(Y, first_group ? s.q : s.k, row0, n,
                  to.norms + ((int64_t)(first_group ? u.b : c.B + u.b) * c.T + t) * c.H + u.h, c.H);
    const int64_t apart = (int64_t)c.B * c.T * to.kp * hv;
    if (first_group || HAS_X)
        store_rows(c, u, d[first_group ? LA_DQ : LA_DX],
                   direct ? NULL : (first_group ? to.dq : to.dx) + apart, to.kp, t, n, row0, Y,
                   first_key);
    if (!first_group)
        store_rows(c, u, d[LA_DK], direct ? NULL : to.dk + apart, to.kp, t, n, row0, dk, first_key);
    __syncthreads();
    if constexpr (DECAY == LA_TOKEN) {
        /* Adjoint of the recursions that made G and e: e_i = a_i e_(i-1), and row i of G is a_i
         * times the row before. D_ij = dG_ij + a_(i+1) D_(i+1)j, and da_i = sum_j D_ij G_(i-1)j +
         * (gradient of e_i) e_(i-1). Each thread goes up its 16 rows, and then again to add what
         * comes from the rows below them. */
        float D[16], x = 0, y = 1, of_e = 0;
#pragma unroll
        for (int i = 15; i >= 0; i--) {
            const int row = first_row + i;
            const float a = row < C - 1 ? s.a[row + 1] : 1;
            x = x * a + dG[row * LD_PAIRS + j_own];
            /* was k~_j = r_j k_j, where r is the last row */
            if (row == C - 1 && j_own < C - 1) x += s.of_r[j_own];
            D[i] = x;
            y *= a;
            if (row >= j_own) of_e += G[row * LD_PAIRS + j_own] * (s.of_q[row] + s.of_x[row]);
        }
        s.up[threadIdx.x / C][j_own] = x;
        s.of_e[threadIdx.x / C][j_own] = of_e;
        /* the product of a over its rows, each one later */
        if (j_own == 0) s.quarter[threadIdx.x / C] = y;
        __syncthreads();
        x = 0;
        for (int q = 3; q > threadIdx.x / C; q--) x = s.up[q][j_own] + s.quarter[q] * x;
#pragma unroll
        for (int i = 15; i >= 0; i--) {
            const int row = first_row + i;
            x *= row < C - 1 ? s.a[row + 1] : 1;
            D[i] = row > j_own ? (D[i] + x) * G[max(row - 1, 0) * LD_PAIRS + j_own] : 0;
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
        if (i >= n) return;
        float e = 0;
        for (int q = 0; q < INTRA_THREADS / 32; q++) e += s.sums[q];
        e = e * s.r[i] + (s.of_e[0][i] + s.of_e[1][i]) + (s.of_e[2][i] + s.of_e[3][i]);
        const float da = s.da[0][i] + s.da[1][i] + e * (i ? s.e[i - 1] : 1);
        if (to.da)
            to.da[(((int64_t)part * c.HV + hv) * c.B + u.b) * c.T + t + i] = da;
        else
            store(at(d[LA_DG], u.b, t + i, hv), d[LA_DG].dtype, gate_gradient(da, s.a[i], d.gate));
    }
}

#endif
