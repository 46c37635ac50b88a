/* The chunk form of the additive rule in one kernel, on Hopper: P does not go through memory. See
 * chunk.cuh for the formulas. Decays are none or scalar. Without a decay, q and k may have a norm
 * and feature maps, and o a normaliser (MAPPED, mapped_tiles.cuh). Otherwise q and k are used as
 * the caller gave them.
 *
 * A block has groups of four warps, each with a role. They meet at barriers in shared memory.
 *
 *     walk     one or two groups, for 64 value columns each: waits for `full`, for `mapped` if
 *              MAPPED, and for `ready`. It reads and carries, and its state stays in registers:
 *              `empty`, `free`
 *     score    one or two groups, which take chunks by turns: waits for `full`, or for `mapped` if
 *              MAPPED, and for `free`. P, and the decays from the start of the chunk and to its end,
 *              or the divisors: `ready`, `empty`
 *     fetch    one warp works: waits for `empty`, and asks the copy engine for q, k, v: `full`
 *     map      if MAPPED, in the place of `fetch`: waits for `full`, and maps q and k in their
 *              tiles: `mapped`. There is one group that scores, and one of its threads fetches
 *
 * Scoring and fetching go on ahead of the walk, also from one head to the next. The walk waits for
 * no product that its next line does not need. The tensor cores work meanwhile:
 *
 *     O = S q     | O of the last chunk goes to memory, V becomes an operand
 *     S += V k    | O times the decay
 *     O += V P    | S becomes the operand of the next chunk
 *
 * A sequence may be cut into segments, so that few heads have tiles for all processors. The sums of
 * segment_sums.cuh are then the states before the segments.
 *
 * Registers of a thread of each role: 2 * 192 + 104 + 24 = 512, or 192 + 2 * 104 + 24. MAPPED:
 * 2 * 192 + 72 + 56. A register that is missing costs a load from the L2 cache, since the stages
 * leave no room in L1. */
#ifndef LINATTN_CUDA_ADDITIVE_CUH
#define LINATTN_CUDA_ADDITIVE_CUH

#include "additive_room.cuh"

#if HAS_WARP_GROUPS
/* P and the decays of every chunk of this group. A warp has 16 rows.
 *
 * Decays are products in blocks of 16 tokens: the decay from token j to token i of a later block is
 * that from j to the end of its block, times those of the blocks between, times that from the start
 * of the block of i. */
template <int KP, la_decay DECAY, bool MAPPED>
__device__ __forceinline__ void score_chunks(const call &c, const tensor_maps &maps,
                                             const additive_flags &f, int group, char *shared,
                                             desk &d, meeting &s, const mapped_room<KP> *of_rows)
{
    typedef fetched<KP> part;
    const float scale = (float)c.scale;
    const view &gate = c.x[LA_G], &weights = c.x[LA_WEIGHT];
    /* blocks above the diagonal stay zeros */
    for (int i = threadIdx.x - f.walks * GROUP; i < SLOTS * PANEL_BYTES / 16;
         i += f.scoring * GROUP)
        *(uint4 *)(shared + i * 16) = make_uint4(0, 0, 0, 0);
    asm volatile("bar.sync 1, %0;" ::"r"(f.scoring * GROUP) : "memory");

    /* MAPPED: one thread fetches. Its warp waits for others anyway. */
    fetching<KP> ahead(c, maps, f, address_of(shared) + PLACE_OF_STAGES, s);
    const auto fetch_if_free = [&] {
        if (!ahead.done() && ahead.has_room()) ahead.next();
    };
    ring r = {f.stages, 0, 0};
    int chunk = 0; /* of all tiles: the group has every one, or every second one */
    for_each_tile(c, f, [&](const tile_of_head &of, int) {
        const unit &u = of.u;
        const float skip = DECAY == LA_TOKEN ? scale * with_skip(c, u.hv, 0.0f, 1.0f) : 0;
        int left = u.end - u.begin; /* tokens */
        uint32_t next_a = 0, next_weight = 0;
        /* those of the own token, so many tokens further */
        const auto load_next = [&](int further) {
            const int t = own_seat().token + further;
            if (DECAY != LA_TOKEN || t >= left) return;
            next_a = load_early(at(gate, u.b, u.end - left + t, u.hv), gate.dtype);
            if (weights.data)
                next_weight = load_early(at(weights, u.b, u.end - left + t, u.hv), weights.dtype);
        };
        load_next(((chunk ^ group) & (f.scoring - 1)) * C);
        for (; left > 0; left -= C, chunk++, r.next()) {
            if ((chunk ^ group) & (f.scoring - 1)) continue;
            const int slot = chunk % SLOTS;
            const uint32_t stage =
                address_of(shared) + PLACE_OF_STAGES + r.at * part::bytes(f.walks);
            auto &turn = d.turn[chunk / f.scoring % 2];
            int *const nonfinite_at = s.nonfinite + slot;
            const int n = min(C, left);
            float x[8][4];
            if (MAPPED) {
                if (own_seat().thread == 0)
                    while (!barrier_passed(address_of(s.mapped + r.at), r.round)) fetch_if_free();
                __syncwarp();
            }
            barrier_wait(address_of((MAPPED ? s.mapped : s.full) + r.at), r.round);
            products_begin();
#pragma unroll
            for (int j = 0; j < KP; j += 16)
                multiply_tiles(x, stage + part::q, stage + part::k, j, j == 0);
            products_commit();
            if (MAPPED) {
                if (own_seat().thread == 0) fetch_if_free();
                __syncwarp();
            }

            float from_start = 1, to_end = 1; /* of the own token, in its block */
            bool found = false;
            if (DECAY == LA_TOKEN) {
                const seat at = own_seat();
                float a = 1;
                if (at.token < n) {
                    a = decay_of(loaded(next_a, gate.dtype), c.gate);
                    if (weights.data) to_end = loaded(next_weight, weights.dtype);
                }
                found = !(isfinite(a) && isfinite(to_end));
                load_next(f.scoring * C);
                if (at.lane < BLOCK) turn.a[at.token] = a;
                __syncwarp();
                float decays[BLOCK], g[BLOCK];
#pragma unroll
                for (int j = 0; j < BLOCK; j += 4)
                    *(float4 *)(decays + j) = *(const float4 *)(turn.a + at.warp * BLOCK + j);
#pragma unroll
                for (int j = 0; j < BLOCK; j++) {
                    if (j > at.lane % BLOCK)
                        to_end *= decays[j];
                    else
                        from_start *= decays[j];
                    g[j] = to_end;
                }
                if (at.lane < BLOCK) {
#pragma unroll
                    for (int j = 0; j < BLOCK; j++) d.within[at.warp][j][at.lane] = g[j];
                    turn.to_block_end[at.token] = to_end;
                    if (at.lane == BLOCK - 1) turn.block[at.warp] = from_start;
                }
            }
            barrier_wait(address_of(s.free + slot), chunk / SLOTS % 2 ^ 1);
            if (threadIdx.x % GROUP == 0) *nonfinite_at = C;
            products_wait<0>();
            products_in(x);

            const seat at = own_seat();
            float own[2]
                     [4]; /* of the block on the diagonal. An index that is not constant would put
                              * x into memory. */
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float low = at.warp & 1 ? x[2 + j][e] : x[j][e];
                    const float high = at.warp & 1 ? x[6 + j][e] : x[4 + j][e];
                    own[j][e] = at.warp & 2 ? high : low;
                }
            const int first =
                min(found ? at.token : C, at.warp * BLOCK + min(nonfinite_on_diagonal(own[0], 0),
                                                                nonfinite_on_diagonal(own[1], 8)));
            int nonfinite = C; /* the first token that is not finite */
            if (any_of_group(first < n)) {
                if (first < n) atomicMin(nonfinite_at, first);
                any_of_group(false);
                nonfinite = *nonfinite_at;
            }

            float2 rows = make_float2(scale, scale); /* factors of the two rows of this thread */
            float block[4] = {1, 1, 1, 1};
            if (DECAY == LA_TOKEN) {
                *(float4 *)block = *(const float4 *)turn.block;
                rows.x *= __shfl_sync(~0u, from_start, at.row);
                rows.y *= __shfl_sync(~0u, from_start, at.row + 8);
                if (at.lane < BLOCK) {
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        if (j < at.warp) from_start *= block[j];
                        if (j > at.warp) to_end *= block[j];
                    }
                    s.in[slot][at.token] = from_start;
                    s.out[slot][at.token] = to_end;
                }
            }
            int too_large_from = C;
            float2 sums = make_float2(0, 0); /* MAPPED: of P in these rows, a quarter of each */
            const int here = at.warp * BLOCK + at.row;
            const auto put = [&](int J, float2(&p)[4]) {
                uint32_t packed[4];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (MAPPED) (e % 2 ? sums.y : sums.x) += p[e].x + p[e].y;
                    if (here + e % 2 * 8 >= nonfinite) p[e] = make_float2(0, 0);
                    if (no_element(p[e].x) || no_element(p[e].y))
                        too_large_from = min(too_large_from, here + e % 2 * 8);
                    packed[e] = pack(p[e].x, p[e].y);
                }
                store_matrices(address_of(shared) + slot * PANEL_BYTES +
                                   piece_at(at.warp * BLOCK + at.lane % 16, J * 2 + at.lane / 16),
                               packed);
            };
            float2 p[4];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = at.row + e % 2 * 8, column = e / 2 * 8 + at.pair;
                float2 g = make_float2(scale, scale);
                if (DECAY == LA_TOKEN) {
                    const float2 x = *(const float2 *)&d.within[at.warp][row][column];
                    g = make_float2(scale * x.x, scale * x.y);
                }
                p[e].x = own[e / 2][e % 2 * 2] * g.x + (column == row ? skip : 0);
                p[e].y = own[e / 2][e % 2 * 2 + 1] * g.y + (column + 1 == row ? skip : 0);
                if (column > row) p[e].x = 0;
                if (column >= row) p[e].y = 0;
            }
            put(at.warp, p);
#pragma unroll
            for (int J = 2; J >= 0; J--) {
                if (J >= at.warp) continue;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float2 g = make_float2(1, 1);
                    if (DECAY == LA_TOKEN)
                        g = *(const float2 *)(turn.to_block_end + J * BLOCK + e / 2 * 8 + at.pair);
                    const float of_row = e % 2 ? rows.y : rows.x;
                    p[e].x = x[2 * J + e / 2][e % 2 * 2] * (of_row * g.x);
                    p[e].y = x[2 * J + e / 2][e % 2 * 2 + 1] * (of_row * g.y);
                }
                put(J, p);
                rows.x *= block[J];
                rows.y *= block[J];
            }
            if (NARROW && too_large_from < n) atomicMin(nonfinite_at, too_large_from);
            if constexpr (MAPPED) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int row = here + e * 8;
                    const float before = quarter_of_den<KP>(of_rows->den[r.at][row]);
                    const float den = quad_sum(scale * before + (e ? sums.y : sums.x));
                    if (at.lane % 4 == 0)
                        s.in[slot][row] =
                            c.normaliser == LA_UNNORMALISED ? 1 : 1 / divisor_of(&c, den);
                }
            }
            /* a box may reach into the next sequence, whose NaN must not come along */
            for (int j = at.thread; !MAPPED && j < (C - n) * KP / 8; j += GROUP)
                *(uint4 *)(shared + PLACE_OF_STAGES + r.at * part::bytes(f.walks) + part::k +
                           piece_at(n + j / (KP / 8), j % (KP / 8))) = make_uint4(0, 0, 0, 0);
            stores_before_copies();
            warp_arrives(address_of(s.ready + slot));
            warp_arrives(address_of(s.empty + r.at));
        }
    });
}

/* q and k of every chunk in their tiles, and z. */
template <int KP>
__device__ __forceinline__ void map_chunks(const call &c, const additive_flags &f, char *shared,
                                           meeting &s, mapped_room<KP> &m)
{
    typedef fetched<KP> part;
    ring r = {f.stages, 0, 0};
    for_each_tile(c, f, [&](const tile_of_head &of, int) {
        const unit &u = of.u;
        begin_z(c, u.n, u.hv * f.segments + of.segment, m);
        for (int left = u.end - u.begin; left > 0; left -= C, r.next()) {
            char *const tiles = shared + PLACE_OF_STAGES + r.at * part::bytes(f.walks);
            barrier_wait(address_of(s.full + r.at), r.round);
            if (has_usual_map<KP>(c) && left >= C)
                map_tiles<KP, true>(c, tiles + part::q, tiles + part::k, C, m, m.den[r.at]);
            else
                map_tiles<KP, false>(c, tiles + part::q, tiles + part::k, left, m, m.den[r.at]);
            stores_before_copies();
            group_waits();
            warp_arrives(address_of(s.mapped + r.at));
            add_to_z(m);
        }
        if (of.tile == 0 && of.segment == f.segments - 1) store_z(c, u, m);
    });
}

template <int KP, la_decay DECAY, bool MAPPED>
__device__ __forceinline__ void walk(const call &c, const additive_flags &f, char *shared,
                                     meeting &s)
{
    typedef fetched<KP> part;
    const float scale = (float)c.scale;
    ring r = {f.stages, 0, 0};
    int chunk = 0; /* of all tiles */
    for_each_tile(c, f, [&](const tile_of_head &first, int index) {
        /* few numbers stay in registers: the rare paths ask for the unit again */
        const auto first_column = [&](int tile) {
            const int thread = threadIdx.x;
            return (tile * f.walks + thread / GROUP) * PANEL + thread % GROUP / 32 * 16;
        };
        const int columns = min(16, c.V - first_column(first.tile)); /* of this warp */
        int left = first.u.end - first.u.begin;                      /* tokens */
        char *to_o = at(c.x[LA_O], first.u.b, first.u.begin + threadIdx.x % 32 / 2, first.u.hv,
                        first_column(first.tile) + threadIdx.x % 2 * 8);
        float S[KP / 8][4];
        unit before = first.u;
        before.hv = before.hv * f.segments + first.segment;
        load_state(c, before, first_column(first.tile), columns, S);
        uint32_t o[4][4];     /* of the last chunk, on its way out */
        bool waiting = false; /* to be sent */
        const auto send = [&](int n) {
            char *const panel = shared + PLACE_OF_O + threadIdx.x / GROUP * PANEL_BYTES;
            put_o(panel, o);
            store_o(c, f.o_pieces, panel, to_o, columns, n);
            to_o += C * c.x[LA_O].stride[1] * 2;
            waiting = false;
        };

        operand of_state[KP / 16];
        const auto state_as_operand = [&] {
#pragma unroll
            for (int j = 0; j < KP / 16; j++) of_state[j] = as_operand(S[2 * j], S[2 * j + 1]);
        };
        state_as_operand();
        int end =
            C; /* C, or when a chunk is repeated, the first token that the products leave out */
        while (left > 0) {
            const uint32_t base =
                address_of(shared) + PLACE_OF_STAGES + r.at * part::bytes(f.walks);
            const int slot = chunk % SLOTS;
            const uint32_t scores = address_of(shared) + slot * PANEL_BYTES;
            const seat at = own_seat();
            const int pair = at.pair;
            const float *in = s.in[slot] + pair, *out = s.out[slot] + pair;
            const int n = min(C, left), kept = min(n, end);
            barrier_wait(address_of(s.full + r.at), r.round);
            if (MAPPED) barrier_wait(address_of(s.mapped + r.at), r.round);
            float O[8][4];
            products_begin();
#pragma unroll
            for (int j = 0; j < KP / 16; j++)
                multiply_rows(O, of_state[j], base + part::q, j * 16, j == 0);
            products_commit();
            if (waiting) send(C);

            operand V[4], Vt[4]; /* as left operands; Vt: times the decay to the end of the chunk */
#pragma unroll
            for (int m = 0; m < 4; m++) {
                load_matrices_transposed(V[m].of[0].x, base + part::v +
                                                           threadIdx.x / GROUP * PANEL_BYTES +
                                                           transposed_at(at) + m * 16 * 128);
            }
            if (kept < C) keep_before(V, pair, kept);
            barrier_wait(address_of(s.ready + slot), chunk / SLOTS % 2);
            if constexpr (DECAY == LA_TOKEN) {
#pragma unroll
                for (int m = 0; m < 4; m++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const float2 a = *(const float2 *)(out + m * 16 + e / 2 * 8);
                        const float2 x = numbers(V[m], e);
                        put_pair(Vt[m], e, a.x * x.x, a.y * x.y);
                    }
            }
            if constexpr (DECAY != LA_TOKEN) {
#pragma unroll
                for (int m = 0; m < 4; m++) Vt[m] = V[m];
            }
            /* as in chunks_forward: a chunk with a NaN or an infinity is repeated without the tokens
             * from the first one on, and these go token by token */
            bool nonfinite = end > 0 && (has_nonfinite(V) || (end == C && s.nonfinite[slot] < C));
            if (NARROW && DECAY == LA_TOKEN && end == C) nonfinite |= has_nonfinite(Vt);
            const bool state_too_large =
                NARROW && end == C && __any_sync(~0u, has_nonfinite(of_state));
            nonfinite |= state_too_large;
            if (__builtin_expect(any_of_group(nonfinite), 0)) {
                products_wait<0>();
                if (__any_sync(~0u, nonfinite)) {
                    int first = end < C ? 0 : s.nonfinite[slot];
                    if (end == C && columns > 0) {
                        const tile_of_head x = tile_at(c, f, index);
                        first = min(first, first_nonfinite(c, x.u, x.u.end - left, n,
                                                           first_column(x.tile), columns));
                    }
                    if (state_too_large) first = C;
                    end = first < C ? first : 0; /* 0: the state has it */
                }
                /* again, so that they take no registers in the chunks that are not repeated */
                state_as_operand();
#pragma unroll
                for (int m = 0; m < 16; m++) o[m / 4][m % 4] = 0;
                continue;
            }
            float after[KP / 2]; /* for chunks that go token by token */
            if (__builtin_expect(end < C, 0)) state_for_tokens(S, after);
            if (DECAY == LA_TOKEN) {
                const float a = s.in[slot][C - 1];
                scale_state(S, a);
            }
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_columns(S, Vt[j], base + part::k, j * 16);
            products_commit();
            products_wait<1>(); /* for the read of the state, not yet for the state */
            products_in(O);
            scale_o<DECAY == LA_TOKEN>(O, in, scale);
            products_begin();
#pragma unroll
            for (int j = 0; j < 4; j++) multiply_rows(O, V[j], scores, j * 16);
            products_commit();
            products_wait<1>(); /* for the state, not yet for O */
            products_in(S);
            state_as_operand();
            products_wait<0>();
            products_in(O);
            if (__builtin_expect(end < C, 0)) {
                const tile_of_head x = tile_at(c, f, index);
                rest_by_tokens<KP, DECAY, LA_ADDITIVE>(c, x.u, x.u.end - left, n, end,
                                                       first_column(x.tile), columns, after, O);
                state_from_tokens(after, S);
                state_as_operand();
            }
            if (MAPPED) scale_o<true>(O, in, 1); /* by the divisors */
            warp_arrives(address_of(s.empty + r.at));
            warp_arrives(address_of(s.free + slot));
            pack_o(O, o);
            r.next();
            chunk++;
            end = C;
            waiting = true;
            left -= C;
        }
        if (waiting) send(left + C);
        if (!c.x[LA_ST].data) return;
        const tile_of_head x = tile_at(c, f, index);
        if (x.segment < f.segments - 1) return;
        store_state(c, x.u, first_column(x.tile), columns, S);
    });
}
#endif

template <int KP, la_decay DECAY, bool MAPPED, typename = element>
__global__ void __launch_bounds__(MOST_GROUPS *GROUP, 1)
    additive_forward(const __grid_constant__ call c, const __grid_constant__ tensor_maps maps,
                     const additive_flags f)
{
    threads_below<MOST_GROUPS * GROUP>();
#if HAS_WARP_GROUPS
    extern __shared__ __align__(1024) char shared[];
    __shared__ meeting s;
    __shared__ typename std::conditional<MAPPED, mapped_room<KP>, bool>::type of_rows;
    typedef additive_registers<MAPPED> registers;
    const int group = threadIdx.x / GROUP;
    if (threadIdx.x == 0) {
        const int walking = f.walks * 4 * ARRIVALS_OF_WARP, scoring = 4 * ARRIVALS_OF_WARP;
        for (int j = 0; j < f.stages; j++) {
            barrier_init(address_of(s.full + j), 1);
            barrier_init(address_of(s.empty + j), walking + scoring);
            barrier_init(address_of(s.mapped + j), scoring);
        }
        for (int j = 0; j < SLOTS; j++) {
            barrier_init(address_of(s.ready + j), scoring);
            barrier_init(address_of(s.free + j), walking);
        }
        barriers_ready();
    }
    __syncthreads();
    if (group < f.walks) {
        registers_up_to<registers::walk>();
        walk<KP, DECAY, MAPPED>(c, f, shared, s);
    } else if (group < f.walks + f.scoring) {
        registers_down_to<registers::score>();
        desk *const desks = (desk *)(shared + PLACE_OF_DESKS);
        score_chunks<KP, DECAY, MAPPED>(c, maps, f, group - f.walks, shared, desks[group - f.walks],
                                        s, MAPPED ? (mapped_room<KP> *)&of_rows : NULL);
    } else if constexpr (MAPPED) {
        registers_down_to<registers::map>();
        map_chunks<KP>(c, f, shared, s, of_rows);
    } else {
        registers_down_to<registers::fetch>();
        if (threadIdx.x % GROUP == 0)
            for (fetching<KP> x(c, maps, f, address_of(shared) + PLACE_OF_STAGES, s); !x.done();)
                x.next();
    }
#endif
}

#endif
