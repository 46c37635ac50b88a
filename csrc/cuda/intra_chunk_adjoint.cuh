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

/* The sums of a chunk over its value columns, and what becomes of them. The arrays belong to the
 * kernel: as members they would be set to zero twice. */
template <int KP> struct intra_sums {
    float (&X)[8][4];      /* dO U' or Z U' */
    float (&Y)[KP / 8][4]; /* dO S' or Z S', then dq or dx; dx is part of dk without an x */
    float (&R)[KP / 8][4]; /* second group: U dS', then dk beside dx. Additive: that is Y */
    float &along;          /* the sum of S * dS */

    /* first group, on Hopper: S dS', whose diagonal has that sum */
    __device__ __forceinline__ float (&of_states() const)[8][4] { return *(float(*)[8][4])R; }
};

/* The gates of a token as they were loaded. */
struct gates_ahead {
    uint32_t a, beta;
};

/* The stages of a chunk, and what they share: the arguments of the kernel, and the shared memory.
 * HAS_X: the caller gave x. Then dx and dk are apart, which takes registers. PARTS: the parts of
 * the keys, with KP keys each. Each part makes the gradients of the scores. The gradient of the
 * gate is a sum over keys: each part makes its own. */
template <int KP, la_decay DECAY, la_rule RULE, bool HAS_X, int PARTS> struct scalar_adjoint {
    static constexpr bool delta = RULE == LA_DELTA, hopper = HAS_WARP_GROUPS;
    static constexpr int STAGES = hopper ? INTRA_STAGES : 1;
    typedef intra_room<KP, RULE, hopper> room;
    typedef intra_sums<KP> sums;

    const call &c;
    const gradients &d;
    const chunks &w;
    const backward_maps &maps;
    const kept &f;
    const intra_flags &to;
    room &s;
    char *seen; /* the rows of x */
    int panels, members;
    float scale;
    int back; /* row i of L has row i - 1 of G */

    /* Fetch the rows of q, or those of k and x: one thread asks the copy engine for each of the
     * two, or all threads copy. */
    __device__ __forceinline__ void fetch_rows(const intra_place &p, bool of_q) const
    {
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
    }

    /* Wait for these rows, on Hopper. On other devices they come with the first panel. */
    __device__ __forceinline__ void wait_for_rows(const intra_place &p, int n) const
    {
#if HAS_WARP_GROUPS
        barrier_wait(address_of(&s.full_rows), (p.rows - 1) % 2);
        if (n < C) { /* as wait_for_panel */
#pragma unroll 1
            for (int j = threadIdx.x; j < (C - n) * KP / 8; j += INTRA_THREADS) {
                const int at = piece_at(n + j / (KP / 8), j % (KP / 8));
                *(uint4 *)(s.q + at) = make_uint4(0, 0, 0, 0);
                *(uint4 *)(s.k + at) = make_uint4(0, 0, 0, 0);
                if (HAS_X) *(uint4 *)(seen + at) = make_uint4(0, 0, 0, 0);
            }
            stores_before_copies();
            __syncthreads();
        }
#endif
    }

    /* Fetch panel i of a chunk of this block, or, behind its last one, of a later chunk. `number`
     * counts the panels of this block. Panel 0 of a chunk also finds the place of the chunk. */
    __device__ __forceinline__ void fetch(int chunk, int i, int number) const
    {
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
    }

    /* One thread finds the place of the first chunk, and makes the barriers. */
    __device__ __forceinline__ void begin() const
    {
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

    /* The gates of a token are loaded a chunk before they are used. */
    __device__ __forceinline__ void load_gates(const intra_place &p, gates_ahead &early) const
    {
        const int i = threadIdx.x;
        if (i >= p.n) return;
        if (DECAY == LA_TOKEN)
            early.a = load_early(at(c.x[LA_G], p.u.b, p.t + i, p.u.hv), c.x[LA_G].dtype);
        if (delta)
            early.beta = load_early(at(c.x[LA_BETA], p.u.b, p.t + i, p.u.hv), c.x[LA_BETA].dtype);
    }

    __device__ __forceinline__ void share_gates(const gates_ahead &early, int n) const
    {
        if (threadIdx.x < C) {
            const int i = threadIdx.x;
            s.a[i] =
                DECAY == LA_TOKEN && i < n ? decay_of(loaded(early.a, c.x[LA_G].dtype), c.gate) : 1;
            s.beta[i] = !delta ? 1 : i < n ? loaded(early.beta, c.x[LA_BETA].dtype) : 0;
        }
    }

    /* The products of a panel, added to the sums over value columns. */
    __device__ __forceinline__ void add_panel(const intra_panel<KP, RULE> &x, const sums &of) const
    {
        constexpr bool has_r = delta || (hopper && DECAY == LA_TOKEN);
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
            products_in(of.X);
            products_in(of.Y);
            if (has_r) products_in(of.R);
            products_begin();
        };
        if (first_group) {
            begin();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply_rows(of.X, a[j], U, j * 16);
                multiply_columns(of.Y, a[j], S, j * 16);
            }
#if HAS_WARP_GROUPS
            if (DECAY == LA_TOKEN)
#pragma unroll
                for (int j = 0; j < KP; j += 16) multiply_tiles(of.of_states(), S, dS, j, false);
#endif
            products_commit();
        } else {
            begin();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (delta) multiply_rows(of.X, a[j], U, j * 16);
                multiply_columns(of.Y, a[j], delta ? S : dS, j * 16);
            }
            if (delta)
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_columns(of.R, b[j], dS, j * 16);
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
                    of.along += y2.x * z2.x + y2.y * z2.y;
                }
            }
        products_wait<0>();
        products_in(of.X);
        products_in(of.Y);
        if (has_r) products_in(of.R);
    }

    /* The sum of S * dS, by warps. */
    __device__ __forceinline__ void share_sum_of_states(const intra_seat &me, const sums &of) const
    {
        if (hopper && me.first_group) {
            const float2 own = diagonal_of(of.of_states());
            of.along = own.x + own.y;
        }
        of.along = warp_sum(of.along);
        if (me.lane == 0) s.sums[threadIdx.x / 32] = of.along;
    }

    /* The products with the states become parts of dq, dx and dk: each row takes its decay from the
     * start of the chunk or to its end. Before that, its product with the row of q, x or k is part
     * of the gradients of decays. beta: of the two rows of this thread. */
    __device__ __forceinline__ void weigh_rows(const intra_seat &me, float2 beta,
                                               const sums &of) const
    {
        const bool first_group = me.first_group;
        const int row0 = me.row0, top = me.top, low = me.low, lane = me.lane;
        if (first_group || delta) {
            const float x_top = first_group ? scale : -beta.x,
                        x_low = first_group ? scale : -beta.y;
            left own[KP / 16];
            load_rows(own, first_group ? s.q : seen, row0);
            const float2 sum = dot_rows(of.Y, own);
            /* the first token of x may see no decay of the chunk */
            const int before = first_group ? 0 : back;
            scale_rows(of.Y, x_top * (top >= before ? s.e[top - before] : 1),
                       x_low * s.e[low - before]);
            float *const to = first_group ? s.of_q : s.of_x;
            if (lane % 4 == 0) {
                if (top >= before) to[top - before] = x_top * sum.x;
                to[low - before] = x_low * sum.y;
            }
        }
        if (!first_group) {
            float(&r)[KP / 8][4] = delta ? of.R : of.Y;
            left own[KP / 16];
            load_rows(own, s.k, row0);
            const float2 sum = dot_rows(r, own);
            if (lane % 4 == 0) {
                s.of_r[top] = beta.x * sum.x;
                s.of_r[low] = beta.y * sum.y;
            }
            scale_rows(r, beta.x * s.r[top], beta.y * s.r[low]);
            if (delta && !HAS_X) /* was x = k */
#pragma unroll
                for (int m = 0; m < KP / 8; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) of.Y[m][e] += of.R[m][e];
        }
    }

    /* The array that Y of a group is a gradient of. */
    static __device__ __forceinline__ la_name name_of_sums(bool first_group)
    {
        return first_group ? LA_Q : HAS_X ? LA_X : LA_K;
    }

    /* The sums of the value heads before, or those for the next one. */
    __device__ __forceinline__ void add_sums_of_members(bool first_group, const sums &of) const
    {
        add_sums(of.Y, sums_of_block<KP>(to.partials, name_of_sums(first_group)));
        if (HAS_X && !first_group) add_sums(of.R, sums_of_block<KP>(to.partials, LA_K));
    }

    __device__ __forceinline__ void keep_sums_of_members(bool first_group, const sums &of) const
    {
        keep_sums(of.Y, sums_of_block<KP>(to.partials, name_of_sums(first_group)));
        if (HAS_X && !first_group) keep_sums(of.R, sums_of_block<KP>(to.partials, LA_K));
    }

    /* The bare products q_i . k_j or x_i . k_j again, for the gradients of decays. */
    __device__ __forceinline__ void multiply_bare(const intra_seat &me, float (&bare)[8][4]) const
    {
        left own[KP / 16];
        load_rows(own, me.first_group ? s.q : seen, me.row0);
        products_begin();
#pragma unroll
        for (int j = 0; j < KP / 16; j++) multiply_rows(bare, own[j], address_of(s.k), j * 16);
        products_commit();
        products_wait<0>();
        products_in(bare);
    }

    /* The adjoint of the scores: X becomes rows of dP or dL, those of this group, which are left in
     * shared memory and as operands over the columns (`own`). With decays, the first group leaves
     * its part of dG, and in the second one `bare` becomes such a part (add_to_decays). */
    __device__ __forceinline__ void adjoint_of_scores(const intra_seat &me, float2 beta,
                                                      float (&X)[8][4], float (&bare)[8][4],
                                                      left (&own)[4]) const
    {
        float *const G = s.pairs.G, *const dG = s.pairs.dG;
        const bool first_group = me.first_group;
        const int top = me.top, low = me.low;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            const int j = m * 8 + me.pair;
            const float2 b = *(const float2 *)(s.beta + j);
            const float x_top = first_group ? scale : -beta.x,
                        x_low = first_group ? scale : -beta.y;
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
        put_rows(first_group ? s.pairs.dP : s.pairs.dL, me.row0, X);
    }

    /* Was L = G x k': the part of dG of the second group, added to that of the first. */
    __device__ __forceinline__ void add_to_decays(const intra_seat &me,
                                                  const float (&bare)[8][4]) const
    {
        float *const dG = s.pairs.dG;
#pragma unroll
        for (int m = 0; m < 8; m++) {
            float2 *x = (float2 *)(dG + max(me.top - back, 0) * LD_PAIRS + m * 8 + me.pair);
            float2 *y = (float2 *)(dG + (me.low - back) * LD_PAIRS + m * 8 + me.pair);
            if (me.top >= back) *x = make_float2(x->x + bare[m][0], x->y + bare[m][1]);
            *y = make_float2(y->x + bare[m][2], y->y + bare[m][3]);
        }
    }

    /* The products of dP and dL with rows, added to dq, dk and dx. own: as adjoint_of_scores left
     * it. */
    __device__ __forceinline__ void multiply_scores(const intra_seat &me, const left (&own)[4],
                                                    const sums &of) const
    {
        const int row0 = me.row0;
        const uint32_t q = address_of(s.q), k = address_of(s.k), x = address_of(seen);
        float(&dk)[KP / 8][4] = HAS_X ? of.R : of.Y;
        const auto begin = [&] {
            products_in(of.Y);
            if (HAS_X) products_in(of.R);
            products_begin();
        };
        const auto end = [&] {
            products_commit();
            products_wait<0>();
            products_in(of.Y);
            if (HAS_X) products_in(of.R);
        };
        if (me.first_group) { /* was P = q k' */
            begin();
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(of.Y, own[j], k, j * 16);
            end();
        } else { /* and L = x k' */
            left across[4], twice[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                across[j] = load_left_transposed(address_of(s.pairs.dP), j * 16, row0);
                if (delta) twice[j] = load_left_transposed(address_of(s.pairs.dL), j * 16, row0);
            }
            begin();
#pragma unroll
            for (int j = 0; j < 4; j++) {
                multiply_columns(dk, across[j], q, j * 16);
                if (delta) multiply_columns(of.Y, own[j], k, j * 16);
                if (delta) multiply_columns(dk, twice[j], x, j * 16);
            }
            end();
        }
    }

    /* The adjoint of what was done to q and k as they were loaded. */
    __device__ __forceinline__ void undo_loading(const intra_place &p, int n, const intra_seat &me,
                                                 float (&Y)[KP / 8][4]) const
    {
        const char *const rows = me.first_group ? s.q : s.k;
        if (to.elu) undo_elu(Y, rows, me.row0);
        if (to.norms)
            undo_norm(Y, rows, me.row0, n,
                      to.norms +
                          ((int64_t)(me.first_group ? p.u.b : c.B + p.u.b) * c.T + p.t) * c.H +
                          p.u.h,
                      c.H);
    }

    /* dq, dk and dx of a full chunk leave by the copy engine. */
    __device__ __forceinline__ void send_rows(const intra_place &p, const intra_seat &me,
                                              const sums &of) const
    {
#if HAS_WARP_GROUPS
        const auto send = [&](const char *tile, const CUtensorMap &map) {
#pragma unroll
            for (int j = 0; j < KP / PANEL; j++)
                engine_store_box(&map, address_of(tile) + j * PANEL_BYTES, p.part * KP + j * PANEL,
                                 p.u.h, p.t, p.u.b);
        };
        put_rows(me.first_group ? s.q : seen, me.row0, of.Y);
        if (HAS_X && !me.first_group) put_rows(s.k, me.row0, of.R);
        stores_before_copies();
        group_waits();
        if (threadIdx.x == 0) send(s.q, maps.dq);
        if (threadIdx.x == INTRA_GROUP) {
            send(s.k, maps.dk);
            if (HAS_X) send(seen, maps.dx);
        }
#endif
    }

    /* Threads store dq, dk and dx, for the caller (direct) or for reduce_heads. */
    __device__ __forceinline__ void store_sums(const intra_place &p, int n, const intra_seat &me,
                                               bool direct, const sums &of) const
    {
        const bool first_group = me.first_group;
        const float(&dk)[KP / 8][4] = HAS_X ? of.R : of.Y;
        const int64_t apart = (int64_t)c.B * c.T * to.kp * p.u.hv;
        if (first_group || HAS_X)
            store_rows(c, p.u, d[first_group ? LA_DQ : LA_DX],
                       direct ? NULL : (first_group ? to.dq : to.dx) + apart, to.kp, p.t, n,
                       me.row0, of.Y, p.part * KP);
        if (!first_group)
            store_rows(c, p.u, d[LA_DK], direct ? NULL : to.dk + apart, to.kp, p.t, n, me.row0, dk,
                       p.part * KP);
    }
};

template <int KP, la_decay DECAY, la_rule RULE, bool HAS_X, int PARTS, typename = element>
__global__ void __launch_bounds__(INTRA_THREADS, 1)
    intra_chunk_adjoint_scalar(const __grid_constant__ call c, const __grid_constant__ gradients d,
                               const __grid_constant__ chunks w,
                               const __grid_constant__ backward_maps maps,
                               const __grid_constant__ kept f,
                               const __grid_constant__ intra_flags to)
{
    threads_below<INTRA_THREADS>();
    typedef scalar_adjoint<KP, DECAY, RULE, HAS_X, PARTS> stages;
    typedef typename stages::room room;
    constexpr bool delta = stages::delta, hopper = stages::hopper;
    constexpr int STAGES = stages::STAGES;
    extern __shared__ __align__(1024) char shared[];
    room &s = *(room *)shared;
    const int panels = (c.V + PANEL - 1) / PANEL, members = hopper ? to.members : 1;
    char *const seen = HAS_X ? shared + sizeof(room) : s.k;
    const float scale = (float)c.scale;
    const int back = HAS_X && c.predicts_before;
    const stages of = {c, d, w, maps, f, to, s, seen, panels, members, scale, back};

    if (threadIdx.x == 0) of.begin();
    __syncthreads();
    if (s.place[0].n == 0) return;
    if (!hopper || threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < STAGES; i++) of.fetch(0, i, i);
    }
    if (!hopper || threadIdx.x == 0) of.fetch_rows(s.place[0], true);
    if (!hopper || threadIdx.x == INTRA_GROUP) of.fetch_rows(s.place[0], false);
    gates_ahead early = {};
    of.load_gates(s.place[0], early);

#pragma unroll 1
    for (int chunk = 0, number = 0;; chunk++) {
        const intra_place &p = s.place[chunk % INTRA_PLACES];
        const int n = p.n;
        if (n == 0) return;
        const bool last_member = p.member == members - 1;
        of.share_gates(early, n);
        __syncthreads();
        if (hopper) find_decays<DECAY>(s);

        float X[8][4] = {}, Y[KP / 8][4] = {}, R[KP / 8][4] = {}, along = 0;
        const intra_sums<KP> x = {X, Y, R, along};
#pragma unroll 1
        for (int i = 0; i < panels; i++, number++) {
            intra_panel<KP, RULE> &panel = s.panel[number % STAGES];
            wait_for_panel<RULE, INTRA_THREADS>(panel, s.full + number % STAGES,
                                                number / STAGES % 2, n);
            of.add_panel(panel, x);
            __syncthreads(); /* the panel is no longer needed */
            if (hopper ? threadIdx.x == 0 : i + 1 < panels) of.fetch(chunk, i + STAGES, number);
        }
#if HAS_WARP_GROUPS
        of.wait_for_rows(p, n);
#else
        find_decays<DECAY>(s); /* where the panels were */
        __syncthreads();
#endif
        const intra_seat me = own_intra_seat();
        const bool first_group = me.first_group;
        if (DECAY == LA_TOKEN) of.share_sum_of_states(me, x);
        const float2 beta = make_float2(s.beta[me.top], s.beta[me.low]);
        of.weigh_rows(me, beta, x);
        if (p.member > 0) of.add_sums_of_members(first_group, x);
        float bare[8][4] = {};
        if (DECAY == LA_TOKEN && (first_group || delta)) of.multiply_bare(me, bare);
        left own[4]; /* dP or dL, as operands over the columns */
        if (first_group || delta) {
            if (delta && !first_group && p.part == 0 && d[LA_DBETA].data)
                store_dbeta(d, p, n, me, x.X);
            of.adjoint_of_scores(me, beta, x.X, bare, own);
        }
        __syncthreads();
        if (DECAY == LA_NONE && !delta && PARTS == 1 && !NARROW && to.den)
            adjoint_of_denominators<KP>(c, to, p, first_group, s, x.X, x.Y, own);
        if (DECAY == LA_TOKEN && delta && !first_group) of.add_to_decays(me, bare);
        of.multiply_scores(me, own, x);
        const bool direct = first_group ? to.direct_q : to.direct_k;
        if (!HAS_X && PARTS == 1 && direct && last_member) of.undo_loading(p, n, me, x.Y);
        if (NARROW && last_member) {
            result_range(d).finish(x.Y);
            if (HAS_X && !first_group) result_range(d).finish(x.R);
        }
        __syncthreads(); /* the scores of pairs are complete, and rows are no longer needed */
        if (!last_member)
            of.keep_sums_of_members(first_group, x);
        else if (hopper && direct && to.boxes && n == C)
            of.send_rows(p, me, x);
        else
            of.store_sums(p, n, me, direct, x);
        const intra_place &next = s.place[(chunk + 1) % INTRA_PLACES];
        if (hopper) of.load_gates(next, early);
        if constexpr (DECAY == LA_TOKEN) adjoint_of_decays(c, d, to, p, s);
        if (!hopper) return;
#if HAS_WARP_GROUPS
        if (last_member && threadIdx.x % INTRA_GROUP == 0) {
            engine_has_read<0>(); /* the copies from these places are read */
            if (next.n > 0) of.fetch_rows(next, threadIdx.x == 0);
        }
#endif
    }
}

#endif
