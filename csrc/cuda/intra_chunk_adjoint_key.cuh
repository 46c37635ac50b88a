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
 * tokens. Up to the scores it has rows of accumulators; then each lane has two keys.
 *
 * intra_chunk_key_parts.cuh has the shared memory and the parts that need no place in a chunk. */
#ifndef LINATTN_CUDA_INTRA_CHUNK_ADJOINT_KEY_CUH
#define LINATTN_CUDA_INTRA_CHUNK_ADJOINT_KEY_CUH

#include "intra_chunk_key_parts.cuh"

/* The stages of a chunk, and what they share: the arguments of the kernel, its shared memory, and
 * the place of the block and of the thread. */
template <int MOST, la_rule RULE> struct key_adjoint {
    static constexpr bool delta = RULE == LA_DELTA, dplr = RULE == LA_DPLR;
    static constexpr int READERS = readers<RULE>, WRITERS = writers<RULE>;
    static constexpr int BONUS_BLOCKS = RULE == LA_ADDITIVE ? (int)BLOCKS : 1;

    const call &c;
    const gradients &d;
    const backward_maps &maps;
    const kept &f;
    const intra_flags &to;
    intra_key_room<RULE> &s;
    const key_seat &me;
    const key_place &p;
    const panel_visits &visits;
    bool bonus, has_x;
    bool early_x, early; /* rows of x, or of this group, read before the decay of their token */

    __device__ __forceinline__ intra_panel<KEYS, RULE> &panel_at(int stage) const
    {
        if (stage == 0) return s.panel;
        return *(intra_panel<KEYS, RULE> *)((char *)&s + SECOND_PANEL<RULE>);
    }

    __device__ __forceinline__ void fetch(int visit) const
    {
        const int i = visit % visits.panels, stage = visit & (visits.stages - 1);
        fetch_panel<KEYS, RULE>(c, d, maps, f, p.u, p.t, p.n, p.number * visits.panels + i, i,
                                panel_at(stage), s.full + stage, p.first_key, p.all_keys);
#if HAS_WARP_GROUPS
        barrier_expect(address_of(s.full + stage), panel_bytes<KEYS, RULE>);
#endif
    }

    /* One thread asks the copy engine, or all threads copy. */
    static __device__ __forceinline__ bool this_thread_fetches()
    {
        return !HAS_WARP_GROUPS || threadIdx.x == 0;
    }

    /* Make the barriers, and fetch the first panels. */
    __device__ __forceinline__ void begin() const
    {
#if HAS_WARP_GROUPS
        if (threadIdx.x == 0) {
            for (int i = 0; i < visits.stages; i++) barrier_init(address_of(s.full + i), 1);
            barriers_ready();
        }
#endif
        if (this_thread_fetches())
            for (int i = 0; i < min(visits.stages, visits.fetches); i++) fetch(i);
    }

    /* Load the rows of this group, which are `own` here and below, and the strengths of all tokens.
     */
    __device__ __forceinline__ void load_own_rows(char *own) const
    {
        const la_name name = !me.reads      ? (me.writer ? LA_Y : LA_K)
                             : me.role == 0 ? LA_Q
                             : has_x        ? LA_X
                                            : LA_K;
        const bool as_given = name == LA_Q   ? to.given.q
                              : name == LA_X ? to.given.x
                              : name == LA_Y ? to.given.y
                                             : to.given.k;
        if (as_given)
            copy_tile<KEYS, ROLE_THREADS>(c.x[name], c.K, p.u.b, p.t, p.n, p.u.h, address_of(own),
                                          p.first_key, threadIdx.x % ROLE_THREADS);
        else
            load_keys<MOST, ROLE_THREADS, KEYS>(c, name, p.u.b, p.t, p.n, p.u.h, own, p.first_key,
                                                threadIdx.x % ROLE_THREADS);
        copies_end_group();
        if (threadIdx.x < C)
            s.beta[threadIdx.x] =
                !delta              ? 1
                : threadIdx.x < p.n ? load<float>(at(c.x[LA_BETA], p.u.b, p.t + threadIdx.x, p.hv),
                                                  c.x[LA_BETA].dtype)
                                    : 0;
    }

    /* The factor of a row of this group in all its products. */
    __device__ __forceinline__ float factor_of(int row) const
    {
        const float beta = s.beta[row];
        return !me.reads ? beta : me.role ? -beta : (float)c.scale;
    }

    /* Rows of dP or dL of this group, with what group `of` of those that write has written. */
    __device__ __forceinline__ void put_scores(const float (&scores)[KEYS / 8][4], int of) const
    {
        char *const tile = s.scores[me.role][of];
        const int top = me.top, low = me.low;
        const float y_top = factor_of(top), y_low = factor_of(low);
#pragma unroll
        for (int m = 0; m < KEYS / 8; m++) {
            if (m / 2 > me.block) continue;
            const int j = m * 8 + me.pair;
            const float2 b = *(const float2 *)(s.beta + j);
            float y[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int i = e < 2 ? top : low;
                y[e] = (e < 2 ? y_top : y_low) * (e % 2 ? b.y : b.x) * scores[m][e];
                if (i == j + e % 2 && (me.role == 0 || delta))
                    s.own[me.role ? 1 : of][i] = me.role ? scores[m][e] : y[e];
                if (j + e % 2 >= i) y[e] = 0;
            }
            *(uint32_t *)(tile + element_at(top, j)) = pack(y[0], y[1]);
            *(uint32_t *)(tile + element_at(low, j)) = pack(y[2], y[3]);
        }
    }

    /* The products of a panel. The gradients of the scores of this group's rows, with group `of` of
     * those that write; and where that is the first one, the products with the states: Y. */
    __device__ __forceinline__ void add_panel(const intra_panel<KEYS, RULE> &panel, int of,
                                              float (&scores)[KEYS / 8][4], float (&Y)[KEYS / 8][4],
                                              float2 &along) const
    {
        const uint32_t U = address_of(of ? panel.p : panel.U);
        const uint32_t rows = address_of(!me.reads ? (me.writer ? panel.p : panel.U)
                                         : me.role ? panel.Z
                                                   : panel.dO);
        const uint32_t state = address_of(me.reads ? panel.S : panel.dS);
        left a[4];
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = load_left(rows, me.row0, j * 16);
        products_begin();
        if (of == 0)
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(Y, a[j], state, j * 16);
        if (me.reads)
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_rows(scores, a[j], U, j * 16);
        products_commit();
        if (me.role == READERS && of == 0) /* which has the least to do */
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const int at = element_at(me.row0 + j, me.lane * 2);
                along = along + get_pair(panel.S + at) * get_pair(panel.dS + at);
            }
        products_wait<0>();
        products_in(Y);
        products_in(scores);
    }

    /* dP_ii of a token is the gradient of q . k, or of q . (bonus k). The bonus of the keys of a
     * lane, or ones. */
    __device__ __forceinline__ float2 load_bonus() const
    {
        const view &of_bonus = c.x[LA_U];
        float2 factor = make_float2(1, 1);
        if (bonus) {
            const int key = p.first_key + me.lane * 2;
            if (key < c.K) factor.x = load<float>(at(of_bonus, p.u.h, key), of_bonus.dtype);
            if (key + 1 < c.K) factor.y = load<float>(at(of_bonus, p.u.h, key + 1), of_bonus.dtype);
        }
        return factor;
    }

    __device__ __forceinline__ void store_dbeta() const /* Z_i . E_i */
    {
        const int i = threadIdx.x % ROLE_THREADS;
        if (i < p.n)
            store(at(d[LA_DBETA], p.u.b, p.t + i, p.hv), d[LA_DBETA].dtype,
                  result_range(d)(s.own[READERS - 1][i]));
    }

    /* The rows of this group take their decays: q f, x f, or k h and k / f. */
    __device__ __forceinline__ void scale_own_rows(const lane_decays &x, char *own) const
    {
        const float2 one = make_float2(1, 1);
        if (!me.reads)
            scale_writes(x, one, {{own, s.sums.near[me.writer], NULL}});
        else if (early)
            scale_reads<true>(x, one, own, own, NULL);
        else
            scale_reads<false>(x, one, own, own, NULL);
    }

    /* Rows that read: Y takes dP or dL with the rows that were written, block after block towards
     * the own one. Before that, what has come from before a block gives sums of terms that pass
     * it. */
    __device__ __forceinline__ void multiply_reads(float (&Y)[KEYS / 8][4], const char *own,
                                                   bool slow) const
    {
        const decays_of_chunk<KEYS> &decays = s.decays[me.role];
        const int block = me.block, row0 = me.row0;
        for (int J = 0; J < block; J++) {
            scale_keys(Y, decays.t + J * KEYS);
            sum_over_rows(
                Y, own, row0, [&](int key) { return decays_between(decays, key, J + 1, block); },
                s.passes[me.role][block * (block - 1) / 2 + J]);
#pragma unroll
            for (int j = 0; j < WRITERS; j++)
                multiply_block(Y, load_left(address_of(s.scores[me.role][j]), row0, J * 16),
                               s.writes[j], J * 16);
        }
        if (!slow)
#pragma unroll
            for (int j = 0; j < WRITERS; j++)
                multiply_block(Y, load_left(address_of(s.scores[me.role][j]), row0, row0),
                               s.sums.near[j], row0);
    }

    /* Rows that are written: Y takes dP' and dL' with the rows that read, from the last block on.
     * Those of the own block go to `near`, without 1 / f. */
    __device__ __forceinline__ void multiply_writes(float (&Y)[KEYS / 8][4],
                                                    float (&near)[KEYS / 8][4], const char *own,
                                                    bool slow) const
    {
        const decays_of_chunk<KEYS> &decays = s.decays[me.role];
        const int block = me.block, row0 = me.row0, writer = me.writer;
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

    /* The last group that reads collects the gradients of log a. */
    __device__ __forceinline__ bool collects() const { return me.role == READERS - 1; }
    __device__ __forceinline__ bool adds_x() const { return delta && !has_x; } /* was x = k */

    /* dq or dx, and the terms of this group that end in the block, with those that are near:
     * `sums`. Where x is k, dx stays in shared memory for the group of k. */
    __device__ __forceinline__ void finish_reads(lane_decays &x, float2 factor, const char *own,
                                                 int own_rows, const float (&Y)[KEYS / 8][4],
                                                 bool slow, const slow_pairs &pairs,
                                                 const rows_out &out,
                                                 float2 (&sums)[TOKENS_OF_BLOCK]) const
    {
        const int lane = me.lane, row0 = me.row0;
        const float2 one = make_float2(1, 1);
        key_rows_of_block<16> &rows = s.sums.of_reads[me.role][me.block];
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
            if (me.role == 0 && !slow)
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
        if (!(me.role && adds_x())) out.store(rows, row0, 0, own_rows);
        if (!collects()) {
            __syncwarp();
#pragma unroll
            for (int i = 0; i < TOKENS_OF_BLOCK; i++) rows.two(i, lane * 2) = sums[i];
        }
    }

    /* dk or dy, and the terms of this group: near ones in shared memory, and the sum of those that
     * begin in the block. Where x is k, dk without dx stays in `sums`. d_bonus: parts of the
     * gradient of the bonus, from slow pairs. */
    __device__ __forceinline__ void
    finish_writes(const lane_decays &x, float2 factor, const char *own, int own_rows,
                  const float (&Y)[KEYS / 8][4], const float (&near)[KEYS / 8][4], bool slow,
                  const slow_pairs &pairs, float2 d_bonus, const rows_out &out,
                  float2 (&sums)[TOKENS_OF_BLOCK]) const
    {
        const int lane = me.lane, row0 = me.row0, block = me.block, writer = me.writer;
        key_rows_of_block<16> &rows = s.sums.of_writes[writer][block];
        key_rows_of_block<8> &of_near = s.sums.of_near[writer][block];
        float2 h = make_float2(1, 1), later = make_float2(0, 0), begins = later;
        /* 1 / f */
        const float2 all = *(const float2 *)&s.decays[me.role].t[block * KEYS + lane * 2];
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
                if (adds_x())
                    sums[i] = dy;
                else
                    of_near.two(i % 8, lane * 2) = dy;
            }
            if (slow)
#pragma unroll
                for (int i = first; i < first + 8; i++)
                    if (adds_x())
                        sums[i] = sums[i] + pairs.row[i];
                    else
                        of_near.two(i % 8, lane * 2) = of_near.two(i % 8, lane * 2) + pairs.row[i];
            if (!adds_x()) out.store(of_near, row0, first, min(first + 8, own_rows));
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

    /* dk where x is k: with dx, which the group of x has left. */
    __device__ __forceinline__ void add_dx(const float2 (&dk)[TOKENS_OF_BLOCK], int own_rows,
                                           const rows_out &out) const
    {
#pragma unroll
        for (int first = 0; first < 16; first += 8) {
            key_rows_of_block<8> &of_near = s.sums.of_near[me.writer][me.block];
#pragma unroll
            for (int i = first; i < first + 8; i++)
                of_near.two(i % 8, me.lane * 2) =
                    dk[i] + s.sums.of_reads[READERS - 1][me.block].two(i, me.lane * 2);
            out.store(of_near, me.row0, first, min(first + 8, own_rows));
            __syncwarp();
        }
    }

    /* The gradient of the bonus, for join_bonus. */
    __device__ __forceinline__ void store_dbonus() const
    {
        const int key = threadIdx.x % ROLE_THREADS;
        float sum = 0;
        for (int i = 0; i < BLOCKS; i++) sum += s.of_bonus[i % BONUS_BLOCKS][key];
        to.dbonus[p.number * p.all_keys + p.first_key + key] = sum;
    }

    /* The gradients of log a of a block: all terms. */
    __device__ __forceinline__ void collect(const float2 (&sums)[TOKENS_OF_BLOCK],
                                            key_rows_of_block<16> &rows) const
    {
        const decays_of_chunk<KEYS> &decays = s.decays[me.role];
        const int lane = me.lane, block = me.block;
        float2 passes = make_float2(0, 0), all = make_float2(1, 1);
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
#pragma unroll
        for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
            float2 y = sums[i] + passes;
            if (READERS == 2) y = y + rows.two(i, lane * 2);
#pragma unroll
            for (int j = 0; j < WRITERS; j++) y = y + s.sums.of_writes[j][block].two(i, lane * 2);
            rows.two(i, lane * 2) = y;
        }
    }
};

/* A block has KEYS of the keys of a chunk, which are up to MOST. */
template <int MOST, la_rule RULE, typename = element>
__global__ void __launch_bounds__(intra_key_threads<RULE>, RULE == LA_ADDITIVE ? 2 : 1)
    intra_chunk_adjoint_key(const __grid_constant__ call c, const __grid_constant__ gradients d,
                            const __grid_constant__ chunks w,
                            const __grid_constant__ backward_maps maps,
                            const __grid_constant__ kept f, const __grid_constant__ intra_flags to)
{
    threads_below<intra_key_threads<RULE>>();
    constexpr bool delta = RULE == LA_DELTA, dplr = RULE == LA_DPLR;
    constexpr int READERS = readers<RULE>, WRITERS = writers<RULE>;
    extern __shared__ __align__(1024) char shared[];
    intra_key_room<RULE> &s = *(intra_key_room<RULE> *)shared;
    const key_seat me = own_key_seat<RULE>();
    key_place p;
    p.all_keys = c.K > KEYS ? MOST : (int)KEYS;
    const int parts = p.all_keys / KEYS, index = blockIdx.x / parts;
    p.first_key = blockIdx.x % parts * KEYS;
    if (p.first_key >= c.K) return;
    const int chunk_slot = index / c.HV;
    p.hv = index % c.HV;
    p.u = unit_of(c, sequence_of(c, chunk_slot), p.hv);
    p.t = p.u.begin + (chunk_slot - first_chunk_slot(c, p.u.n)) * C;
    p.n = min(C, p.u.end - p.t);
    if (p.n <= 0) return;
    p.number = (int64_t)chunk_slot * c.HV + p.hv;
    const panel_visits visits = visits_of<RULE>(c);
    const bool bonus = RULE == LA_ADDITIVE && to.dbonus;
    const bool has_x = dplr || (delta && c.x[LA_X].data);
    const bool early_x = dplr || (has_x && c.predicts_before);
    const key_adjoint<MOST, RULE> of = {
        c, d, maps, f, to, s, me, p, visits, bonus, has_x, early_x, me.role ? early_x : bonus};

    of.begin();
    /* the rows of this group; the kernel would spill more if it had this before */
    char *const own = me.reads ? s.reads[me.role] : s.writes[me.writer];
    of.load_own_rows(own);
    lane_decays x = load_decays(c, p.u, p.t, p.n, p.first_key / PANEL);
    x.key = me.lane * 2; /* in the tiles of this block */
    decays_of_chunk<KEYS> &decays = s.decays[me.role];
    share_decays(c, x, decays);
#if HAS_WARP_GROUPS
    __syncthreads(); /* the barrier is there */
#endif

    float scores[KEYS / 8][4] = {}; /* dO U' or Z U' */
    float Y[KEYS / 8][4] = {};      /* dO S' or Z S', or U dS' */
    float2 along = make_float2(0, 0);
#pragma unroll 1
    for (int visit = 0; visit < visits.count; visit++) {
        const int writer = WRITERS == 1 ? 0 : visit / visits.panels;
        const int i = visit - writer * visits.panels;
        auto &panel = of.panel_at((visits.stay ? i : visit) & (visits.stages - 1));
        if (!HAS_WARP_GROUPS || visit < visits.fetches)
            wait_for_panel<RULE, intra_key_threads<RULE>>(
                panel, s.full + (visit & (visits.stages - 1)), visit / visits.stages % 2, p.n);
        of.add_panel(panel, writer, scores, Y, along);
        if (visit + visits.stages < visits.fetches || visit + 1 == visits.count)
            __syncthreads(); /* the panel is no longer needed */
        if (of.this_thread_fetches() && visit + visits.stages < visits.fetches)
            of.fetch(visit + visits.stages);
        if (WRITERS > 1 && i + 1 == visits.panels) {
            if (me.reads) of.put_scores(scores, writer);
#pragma unroll
            for (int m = 0; m < KEYS / 2; m++) scores[m / 4][m % 4] = 0;
        }
    }
    if (WRITERS == 1 && me.reads) of.put_scores(scores, 0);
    if (me.role == READERS) *(float2 *)&s.along[me.block][me.lane * 2] = along;
    scale_rows(Y, of.factor_of(me.top), of.factor_of(me.low));
    const bool slow = decays.slow[0][me.block] < TOKENS_OF_BLOCK;
    const float2 factor = of.load_bonus();
    copies_wait<0>();
    __syncthreads();
    if (delta && !me.reads && p.first_key == 0 && d[LA_DBETA].data) of.store_dbeta();

    /* The pairs within a slow block one by one, and what its tokens do with themselves. This is no
     * function of its own: the kernel of DPLR would spill more. */
    slow_pairs pairs;
    float2 slow_bonus = make_float2(0, 0);
    if (decays.has_slow()) {
        if (slow) {
#pragma unroll 1
            for (int i = 0; i < TOKENS_OF_BLOCK; i++) {
                pairs.row[i] = pairs.gate[i] = make_float2(0, 0);
                if (me.role == 1 && me.reads) continue; /* x sees no write of its own token */
#pragma unroll
                for (int j = 0; j < WRITERS; j++) {
                    if (!me.reads && j != me.writer) continue;
                    const float2 q = get_pair(s.reads[0] + x.at(i)),
                                 k = get_pair(s.writes[j] + x.at(i));
                    pairs.row[i] =
                        pairs.row[i] + s.own[j][me.row0 + i] * (factor * (me.reads ? k : q));
                    slow_bonus = slow_bonus + s.own[j][me.row0 + i] * (q * k);
                }
            }
#pragma unroll 1
            for (int r = 0; r < READERS; r++)
#pragma unroll 1
                for (int j = 0; j < WRITERS; j++)
                    if (me.reads && r == me.role)
                        add_slow_pairs<true>(pairs, x, s.scores[r][j], s.reads[r], s.writes[j],
                                             of.early);
                    else if (!me.reads && j == me.writer)
                        add_slow_pairs<false>(pairs, x, s.scores[r][j], s.reads[r], s.writes[j],
                                              r ? early_x : bonus);
        }
        __syncthreads(); /* no row is needed as it was loaded */
    }
    of.scale_own_rows(x, own);
    __syncthreads();

    float near[KEYS / 8][4] = {}; /* of rows that are written: without 1 / f */
    if (me.reads)
        of.multiply_reads(Y, own, slow);
    else
        of.multiply_writes(Y, near, own, slow);
    __syncthreads(); /* the scores are no longer needed */

    /* From here on a lane has two keys of the 16 tokens. */
    const int64_t apart = (int64_t)c.B * c.T * to.kp * p.hv;
    float2 sums[TOKENS_OF_BLOCK]; /* ends and near; dk where dx is added to it */
    const la_name name = !me.reads ? (me.writer ? LA_DY : LA_DK) : me.role ? LA_DX : LA_DQ;
    float *const partials = name == LA_DQ   ? to.dq
                            : name == LA_DK ? to.dk
                            : name == LA_DX ? to.dx
                                            : to.dy;
    const rows_out out(c, p.u, d, name,
                       (me.role ? to.direct_k : to.direct_q) ? NULL : partials + apart, to.kp, p.t,
                       p.first_key + me.lane * 2);
    const int own_rows = min(16, p.n - me.row0); /* of this warp, as far as there are tokens */
    if (me.reads)
        of.finish_reads(x, factor, own, own_rows, Y, slow, pairs, out, sums);
    else
        of.finish_writes(x, factor, own, own_rows, Y, near, slow, pairs, slow_bonus, out, sums);
    __syncthreads();

    if (!me.reads && of.adds_x()) of.add_dx(sums, own_rows, out);
    if (bonus && me.role == 1 && threadIdx.x % ROLE_THREADS < KEYS) of.store_dbonus();
    if (!of.collects()) return;
    key_rows_of_block<16> &rows = s.sums.of_reads[0][me.block];
    of.collect(sums, rows);
    store_dg(c, d, p, me, rows, own_rows);
}

#endif
