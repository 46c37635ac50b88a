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
 * panel.
 *
 * On Hopper there are as many blocks as processors, and each takes chunk after chunk. The copy
 * engine has two panels on their way at all times, also those of the next chunk. The rows of q, k
 * and x are needed after the panels, and those of the next chunk come when dq and dk have left.
 * Full rows of dq and dk leave by the copy engine, from the places of q and k. A block may take the
 * value heads of a q/k head one after another. Then it adds up their dq and dk in memory of its
 * own, which stays in the L2 cache. On other devices a block has one chunk.
 *
 * intra_chunk_parts.cuh has the shared memory and the parts that are functions of their own. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_ADJOINT_CUH
#define LINATTN_CUDA_INTRA_CHUNK_ADJOINT_CUH

#include "intra_chunk_parts.cuh"

/* HAS_X: the caller gave x. Then dx and dk are apart, which takes registers. PARTS: the parts of
 * the keys, with KP keys each. Each part makes the gradients of the scores. The gradient of the gate
 * is a sum over keys: each part makes its own. */
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
    char *const seen = HAS_X ? shared + sizeof(room) : s.k;
    char *const dP = s.pairs.dP, *const dL = s.pairs.dL;
    float *const G = s.pairs.G, *const dG = s.pairs.dG;
    const int panels = (c.V + PANEL - 1) / PANEL, members = hopper ? to.members : 1;
    const float scale = (float)c.scale;
    const int back = HAS_X && c.predicts_before; /* row i of L has row i - 1 of G */

    /* Fetch the rows of q, or those of k and x: one thread asks the copy engine for each of the
     * two, or all threads copy. */
    const auto fetch_rows = [&](const intra_place &p, bool of_q) {
        const struct {
            char *to;
            const char *prepared;
            la_name name;
            const CUtensorMap *map;
        } rows[] = {{s.q, w.q, LA_Q, &maps.q},
                    {s.k, w.k, LA_K, &maps.k},
                    {HAS_X ? seen : NULL, w.x, LA_X, &maps.x}};
        const int64_t keys =
            (((int64_t)p.slot * w.heads + p.u.h) * PARTS + p.part) * tile_bytes(KP);
#pragma unroll
        for (const auto &one : rows) {
            if (of_q != (one.name == LA_Q) || !one.to) continue;
            const uint32_t to = address_of(one.to);
#if HAS_WARP_GROUPS
            const uint32_t full = address_of(&s.full_rows);
            if (one.prepared) engine_copy(to, one.prepared + keys, tile_bytes(KP), full);
            for (int j = 0; j < (one.prepared ? 0 : KP / PANEL); j++)
                engine_copy_box(to + j * PANEL_BYTES, one.map, p.part * KP + j * PANEL, p.u.h, p.t,
                                p.u.b, full);
#else
            if (one.prepared)
                copy_bytes(to, one.prepared + keys, tile_bytes(KP));
            else
                copy_rows<KP>(c.x[one.name], c.K, p.u.b, p.t, p.n, p.u.h, to, p.part * KP);
#endif
        }
#if HAS_WARP_GROUPS
        barrier_expect(address_of(&s.full_rows), (of_q || !HAS_X ? 1 : 2) * tile_bytes(KP));
#else
        copies_end_group();
#endif
    };
    /* Fetch panel i of a chunk of this block, or, behind its last one, of a later chunk. `number`
     * counts the panels of this block. Panel 0 of a chunk also finds the place of the chunk. */
    const auto fetch = [&](int chunk, int i, int number) {
        for (; i >= panels; i -= panels) chunk++;
        const int stage = number % STAGES;
        intra_place &p = s.place[chunk % INTRA_PLACES];
        if (hopper && i == 0 && chunk > 0)
            p = place_after<PARTS>(c, w.chunk_slots, members, s.place[(chunk - 1) % INTRA_PLACES]);
        if (p.n == 0) return;
        fetch_panel<KP, RULE>(c, d, maps, f, p.u, p.t, p.n,
                              ((int64_t)p.slot * c.HV + p.u.hv) * panels + i, i, s.panel[stage],
                              s.full + stage, p.part * KP, PARTS * KP);
#if HAS_WARP_GROUPS
        barrier_expect(address_of(s.full + stage), panel_bytes<KP, RULE>);
#endif
    };
    if (threadIdx.x == 0) {
        intra_place before = {};
        before.index = (int)blockIdx.x - (int)gridDim.x; /* so that the next one is the first */
        before.member = members;
        s.place[0] = place_after<PARTS>(c, w.chunk_slots, members, before);
#if HAS_WARP_GROUPS
        for (int j = 0; j < STAGES; j++) barrier_init(address_of(s.full + j), 1);
        barrier_init(address_of(&s.full_rows), 2);
        barriers_ready();
#endif
    }
    __syncthreads();
    if (s.place[0].n == 0) return;
    if (!hopper || threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) fetch(0, i, i);
    }
    if (!hopper || threadIdx.x == 0) fetch_rows(s.place[0], true);
    if (!hopper || threadIdx.x == INTRA_GROUP) fetch_rows(s.place[0], false);
    /* The gates of a token are loaded a chunk before they are used. */
    uint32_t early_a = 0, early_beta = 0;
    const auto load_gates = [&](const intra_place &p) {
        const int i = threadIdx.x;
        if (i >= p.n) return;
        if (DECAY == LA_TOKEN)
            early_a = load_early(at(c.x[LA_G], p.u.b, p.t + i, p.u.hv), c.x[LA_G].dtype);
        if (delta)
            early_beta = load_early(at(c.x[LA_BETA], p.u.b, p.t + i, p.u.hv), c.x[LA_BETA].dtype);
    };
    load_gates(s.place[0]);

#pragma unroll 1
    for (int chunk = 0, number = 0;; chunk++) {
        const intra_place &p = s.place[chunk % INTRA_PLACES];
        const int n = p.n;
        if (n == 0) return;
        const bool last_member = p.member == members - 1;
        if (threadIdx.x < C) {
            const int i = threadIdx.x;
            s.a[i] =
                DECAY == LA_TOKEN && i < n ? decay_of(loaded(early_a, c.x[LA_G].dtype), c.gate) : 1;
            s.beta[i] = !delta ? 1 : i < n ? loaded(early_beta, c.x[LA_BETA].dtype) : 0;
        }
        __syncthreads();
        if (hopper) find_decays<DECAY>(s);

        float X[8][4] = {};      /* dO U' or Z U' */
        float Y[KP / 8][4] = {}; /* dO S' or Z S', then dq or dx; dx is part of dk without an x */
        float R[KP / 8][4] = {}; /* second group: U dS', then dk beside dx. Additive: that is Y */
        float along = 0;         /* the sum of S * dS */
        /* first group, on Hopper: S dS', whose diagonal has that sum */
        float (&of_states)[8][4] = *(float (*)[8][4])R;
        constexpr bool has_r = delta || (hopper && DECAY == LA_TOKEN);
#pragma unroll 1
        for (int i = 0; i < panels; i++, number++) {
            intra_panel<KP, RULE> &x = s.panel[number % STAGES];
#if HAS_WARP_GROUPS
            barrier_wait(address_of(s.full + number % STAGES), number / STAGES % 2);
            if (n < C) {
                /* a box may reach into the next sequence, whose NaN must not come along */
                for (int j = threadIdx.x; j < (C - n) * 8; j += INTRA_THREADS) {
                    const int at = piece_at(n + j / 8, j % 8);
                    if (!delta) *(uint4 *)(x.U + at) = make_uint4(0, 0, 0, 0);
                    *(uint4 *)(x.dO + at) = make_uint4(0, 0, 0, 0);
                }
                stores_before_copies();
                __syncthreads();
            }
#else
            copies_wait<0>();
            __syncthreads();
#endif
            const uint32_t U = address_of(x.U), S = address_of(x.S), dS = address_of(x.dS);
            const bool first_group = own_intra_seat().first_group;
            const int row0 = own_intra_seat().row0;
            /* the additive rule has no Z, and the second group no X */
            const uint32_t own = address_of(first_group ? x.dO : delta ? x.Z : x.U);
            left a[4], b[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                a[j] = load_left(own, row0, j * 16);
                if (delta && !first_group) b[j] = load_left(U, row0, j * 16);
            }
            /* All sums are written before the products begin. Each group has its own beginning:
             * the compiler would add one where the ways part, and then wait for each product. */
            const auto begin = [&] {
                products_in(X);
                products_in(Y);
                if (has_r) products_in(R);
                products_begin();
            };
            if (first_group) {
                begin();
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    multiply_rows(X, a[j], U, j * 16);
                    multiply_columns(Y, a[j], S, j * 16);
                }
#if HAS_WARP_GROUPS
                if (DECAY == LA_TOKEN)
#pragma unroll
                    for (int j = 0; j < KP; j += 16) multiply_tiles(of_states, S, dS, j, false);
#endif
                products_commit();
            } else {
                begin();
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (delta) multiply_rows(X, a[j], U, j * 16);
                    multiply_columns(Y, a[j], delta ? S : dS, j * 16);
                }
                if (delta)
#pragma unroll
                    for (int j = 0; j < 4; j++) multiply_columns(R, b[j], dS, j * 16);
                products_commit();
            }
            if (DECAY == LA_TOKEN && !hopper)
#pragma unroll 4
                for (int j = threadIdx.x * 16; j < tile_bytes(KP); j += INTRA_THREADS * 16) {
                    const uint4 y = *(const uint4 *)(x.S + j), z = *(const uint4 *)(x.dS + j);
                    const uint32_t ys[4] = {y.x, y.y, y.z, y.w}, zs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float2 y2 = unpack(ys[e]), z2 = unpack(zs[e]);
                        along += y2.x * z2.x + y2.y * z2.y;
                    }
                }
            products_wait<0>();
            products_in(X);
            products_in(Y);
            if (has_r) products_in(R);
            __syncthreads(); /* the panel is no longer needed */
            if (hopper ? threadIdx.x == 0 : i + 1 < panels) fetch(chunk, i + STAGES, number);
        }
#if HAS_WARP_GROUPS
        barrier_wait(address_of(&s.full_rows), (p.rows - 1) % 2);
        if (n < C) { /* as above */
            for (int j = threadIdx.x; j < (C - n) * KP / 8; j += INTRA_THREADS) {
                const int at = piece_at(n + j / (KP / 8), j % (KP / 8));
                *(uint4 *)(s.q + at) = make_uint4(0, 0, 0, 0);
                *(uint4 *)(s.k + at) = make_uint4(0, 0, 0, 0);
                if (HAS_X) *(uint4 *)(seen + at) = make_uint4(0, 0, 0, 0);
            }
            stores_before_copies();
            __syncthreads();
        }
#else
        find_decays<DECAY>(s);
        __syncthreads();
#endif
        const intra_seat me = own_intra_seat();
        const bool first_group = me.first_group;
        const int row0 = me.row0, top = me.top, low = me.low, lane = me.lane, pair = me.pair;
        if (DECAY == LA_TOKEN) {
            if (hopper && first_group) {
                const float2 own = diagonal_of(of_states);
                along = own.x + own.y;
            }
            along = warp_sum(along);
            if (lane == 0) s.sums[threadIdx.x / 32] = along;
        }

        /* Rows of the gradients of the scores, those of this group. The bare products q_i . k_j or
         * x_i . k_j are recomputed. */
        const float b_top = s.beta[top], b_low = s.beta[low];
        if (first_group || delta) {
            const float x_top = first_group ? scale : -b_top, x_low = first_group ? scale : -b_low;
            left own[KP / 16];
            load_rows(own, first_group ? s.q : seen, row0);
            const float2 sum = dot_rows(Y, own);
            /* the first token of x may see no decay of the chunk */
            const int before = first_group ? 0 : back;
            scale_rows(Y, x_top * (top >= before ? s.e[top - before] : 1),
                       x_low * s.e[low - before]);
            float *const to = first_group ? s.of_q : s.of_x;
            if (lane % 4 == 0) {
                if (top >= before) to[top - before] = x_top * sum.x;
                to[low - before] = x_low * sum.y;
            }
        }
        if (!first_group) {
            float (&r)[KP / 8][4] = delta ? R : Y;
            left own[KP / 16];
            load_rows(own, s.k, row0);
            const float2 sum = dot_rows(r, own);
            if (lane % 4 == 0) {
                s.of_r[top] = b_top * sum.x;
                s.of_r[low] = b_low * sum.y;
            }
            scale_rows(r, b_top * s.r[top], b_low * s.r[low]);
            if (delta && !HAS_X) /* was x = k */
#pragma unroll
                for (int m = 0; m < KP / 8; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) Y[m][e] += R[m][e];
        }
        const la_name of_sums = first_group ? LA_Q : HAS_X ? LA_X : LA_K; /* Y */
        if (p.member > 0) {
            add_sums(Y, sums_of_block<KP>(to.partials, of_sums));
            if (HAS_X && !first_group) add_sums(R, sums_of_block<KP>(to.partials, LA_K));
        }
        float (&dk)[KP / 8][4] = HAS_X ? R : Y;
        float bare[8][4] = {};
        if (DECAY == LA_TOKEN && (first_group || delta)) {
            left own[KP / 16];
            load_rows(own, first_group ? s.q : seen, row0);
            products_begin();
#pragma unroll
            for (int j = 0; j < KP / 16; j++) multiply_rows(bare, own[j], address_of(s.k), j * 16);
            products_commit();
            products_wait<0>();
            products_in(bare);
        }
        left own[4]; /* dP or dL, as operands over the columns */
        if (first_group || delta) {
            if (delta && !first_group && p.part == 0 && d[LA_DBETA].data)
                if (const float2 of = diagonal_of(X); has_diagonal(lane)) { /* Z_i . E_i */
#pragma unroll 1
                    for (int i = 0; i < 2; i++) {
                        const int token = i ? low : top;
                        if (token < n)
                            store(at(d[LA_DBETA], p.u.b, p.t + token, p.u.hv), d[LA_DBETA].dtype,
                                  i ? of.y : of.x);
                    }
                }
#pragma unroll
            for (int m = 0; m < 8; m++) {
                const int j = m * 8 + pair;
                const float2 b = *(const float2 *)(s.beta + j);
                const float x_top = first_group ? scale : -b_top,
                            x_low = first_group ? scale : -b_low;
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
                if (DECAY == LA_TOKEN && first_group) { /* was P = G q k': dG, below the diagonal */
                    *(float2 *)(dG + top * LD_PAIRS + j) = make_float2(
                        j < top ? x0 * bare[m][0] : 0, j + 1 < top ? x1 * bare[m][1] : 0);
                    *(float2 *)(dG + low * LD_PAIRS + j) = make_float2(
                        j < low ? x2 * bare[m][2] : 0, j + 1 < low ? x3 * bare[m][3] : 0);
                } else if (DECAY == LA_TOKEN) {
                    bare[m][0] = j < top - back ? x0 * bare[m][0] : 0;
                    bare[m][1] = j + 1 < top - back ? x1 * bare[m][1] : 0;
                    bare[m][2] = j < low - back ? x2 * bare[m][2] : 0;
                    bare[m][3] = j + 1 < low - back ? x3 * bare[m][3] : 0;
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++) own[j] = as_left(X[2 * j], X[2 * j + 1]);
            put_rows(first_group ? dP : dL, row0, X);
        }
        __syncthreads();
        if (DECAY == LA_NONE && !delta && PARTS == 1 && to.den)
            adjoint_of_denominators<KP>(c, to, p, first_group, s, X, Y, own);
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
            const auto begin = [&] {
                products_in(Y);
                if (HAS_X) products_in(R);
                products_begin();
            };
            const auto end = [&] {
                products_commit();
                products_wait<0>();
                products_in(Y);
                if (HAS_X) products_in(R);
            };
            if (first_group) { /* was P = q k' */
                begin();
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(Y, own[j], k, j * 16);
                end();
            } else { /* and L = x k' */
                left across[4], twice[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    across[j] = load_left_transposed(address_of(dP), j * 16, row0);
                    if (delta) twice[j] = load_left_transposed(address_of(dL), j * 16, row0);
                }
                begin();
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    multiply_columns(dk, across[j], q, j * 16);
                    if (delta) multiply_columns(Y, own[j], k, j * 16);
                    if (delta) multiply_columns(dk, twice[j], x, j * 16);
                }
                end();
            }
        }
        const bool direct = first_group ? to.direct_q : to.direct_k;
        if (!HAS_X && PARTS == 1 && direct && last_member) {
            const char *const rows = first_group ? s.q : s.k;
            if (to.elu) undo_elu(Y, rows, row0);
            if (to.norms)
                undo_norm(Y, rows, row0, n,
                          to.norms +
                              ((int64_t)(first_group ? p.u.b : c.B + p.u.b) * c.T + p.t) * c.H +
                              p.u.h,
                          c.H);
        }
        __syncthreads(); /* the scores of pairs are complete, and rows are no longer needed */
        if (!last_member) {
            keep_sums(Y, sums_of_block<KP>(to.partials, of_sums));
            if (HAS_X && !first_group) keep_sums(R, sums_of_block<KP>(to.partials, LA_K));
        } else if (hopper && direct && to.boxes && n == C) {
#if HAS_WARP_GROUPS
            const auto send = [&](const char *tile, const CUtensorMap &map) {
#pragma unroll
                for (int j = 0; j < KP / PANEL; j++)
                    engine_store_box(&map, address_of(tile) + j * PANEL_BYTES,
                                     p.part * KP + j * PANEL, p.u.h, p.t, p.u.b);
            };
            put_rows(first_group ? s.q : seen, row0, Y);
            if (HAS_X && !first_group) put_rows(s.k, row0, R);
            stores_before_copies();
            group_waits();
            if (threadIdx.x == 0) send(s.q, maps.dq);
            if (threadIdx.x == INTRA_GROUP) {
                send(s.k, maps.dk);
                if (HAS_X) send(seen, maps.dx);
            }
#endif
        } else {
            const int64_t apart = (int64_t)c.B * c.T * to.kp * p.u.hv;
            if (first_group || HAS_X)
                store_rows(c, p.u, d[first_group ? LA_DQ : LA_DX],
                           direct ? NULL : (first_group ? to.dq : to.dx) + apart, to.kp, p.t, n,
                           row0, Y, p.part * KP);
            if (!first_group)
                store_rows(c, p.u, d[LA_DK], direct ? NULL : to.dk + apart, to.kp, p.t, n, row0, dk,
                           p.part * KP);
        }
        const intra_place &next = s.place[(chunk + 1) % INTRA_PLACES];
        if (hopper) load_gates(next);
        if constexpr (DECAY == LA_TOKEN) adjoint_of_decays(c, d, to, p, s);
        if (!hopper) return;
#if HAS_WARP_GROUPS
        if (last_member && threadIdx.x % INTRA_GROUP == 0) {
            engine_has_read<0>(); /* the copies from these places are read */
            if (next.n > 0) fetch_rows(next, threadIdx.x == 0);
        }
#endif
    }
}

#endif
