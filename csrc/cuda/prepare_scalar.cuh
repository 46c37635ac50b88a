/* `prepare` for scalar decays, and for none. See prepare.cuh. */
#ifndef LINATTN_CUDA_PREPARE_SCALAR_CUH
#define LINATTN_CUDA_PREPARE_SCALAR_CUH

#include "inverse.cuh"
#include "tile_loads.cuh"

/* x has a place behind q, which may be past the end of this: see scalar_room_bytes. */
template <int KP, la_rule RULE> struct scalar_room {
    float a[C], beta[C];
    int nonfinite[2]; /* in q, k and x; in the gate and beta of a value head */
    union {
        struct {
            alignas(1024) char k[tile_bytes(KP)], q[tile_bytes(KP)];
        };
        struct { /* after the products are in registers */
            char tile[PANEL_BYTES];
            float G[C * LD_PAIRS], L[RULE == LA_DELTA ? C * LD : 4];
            float room[RULE == LA_DELTA ? 4 * 32 * 12 : 4];
        };
    };
};

template <int KP, la_rule RULE> constexpr int scalar_room_bytes(bool with_x)
{
    const int all = sizeof(scalar_room<KP, RULE>), three = 1024 + 3 * tile_bytes(KP);
    return with_x && three > all ? three : all;
}

/* Blocks of 16 x 16 on and below the diagonal: Q K' has ten, X K' has ten. Warp w takes those of
 * row w of Q K' and of row 3 - w of X K'. These are w + 1 and 4 - w: five for every warp. X is K
 * unless the caller gave x. The products of a token with itself show whether it has a NaN or an
 * infinity. */
template <int KP, la_rule RULE>
__device__ __forceinline__ void multiply_rows(float (&x)[5][2][4], scalar_room<KP, RULE> &s,
                                              const char *x_tile)
{
    const int warp = threadIdx.x / 32;
    const uint32_t look_tile = address_of(x_tile), q_tile = address_of(s.q);
    const uint32_t k_rows = lane_with_rows(address_of(s.k));
#pragma unroll
    for (int i = 0; i < KP; i += 16) {
        const operand of_q = load_operand(q_tile, warp * 16, i);
        operand of_x;
        if (RULE == LA_DELTA) of_x = load_operand(look_tile, (3 - warp) * 16, i);
#pragma unroll
        for (int j = 0; j < 5; j++) {
            const bool scores = j <= warp;
            if (RULE == LA_ADDITIVE && !scores) continue;
            operand of = of_q;
            if (RULE == LA_DELTA && !scores) of = of_x;
            multiply_with_rows(x[j][0], x[j][1], of, k_rows, (scores ? j : 4 - j) * 16, i);
        }
    }
#pragma unroll
    for (int j = 0; j < 5; j++)
        if (j == warp || (RULE == LA_DELTA && j == warp + 1)) { /* on the diagonal */
            const int row =
                min(nonfinite_on_diagonal(x[j][0], 0), nonfinite_on_diagonal(x[j][1], 8));
            if (row < C) atomicMin(s.nonfinite, (j == warp ? warp : 3 - warp) * 16 + row);
        }
}

/* G_ij is the decay from after token j through token i. A thread has a column. out, unless NULL:
 * the decays to the end of the chunk, with weights times these. */
template <int KP, la_rule RULE>
__device__ __forceinline__ void find_G(scalar_room<KP, RULE> &s, bool weighs, float *out)
{
    const int j = threadIdx.x;
    float g = 1;
    s.G[j * LD_PAIRS + j] = 1;
#pragma unroll 4
    for (int i = j / 32 * 32; i < C; i += 4) {
        const float4 of = *(const float4 *)(s.a + i);
        const float four[4] = {of.x, of.y, of.z, of.w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (i + e > j) s.G[(i + e) * LD_PAIRS + j] = g *= four[e];
    }
    if (weighs) g *= s.beta[j];
    if (out) out[j] = g;
}

/* - L of this warp's row of blocks, without beta. back: row i has the decays of row i - back. */
template <int KP>
__device__ __forceinline__ void put_lower(scalar_room<KP, LA_DELTA> &s, const float (&x)[5][2][4],
                                          bool decays, int back, int first_row, int first_pair)
{
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 5; j++) {
        if (j <= warp) continue;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int row = (3 - warp) * 16 + e / 2 * 8 + first_row;
            const int column = (4 - j) * 16 + e % 2 * 8 + first_pair;
            const float2 g = decays
                                 ? *(const float2 *)(s.G + max(row - back, 0) * LD_PAIRS + column)
                                 : make_float2(1, 1);
            const float y = x[j][e % 2][e / 2 * 2], z = x[j][e % 2][e / 2 * 2 + 1];
            put_pair(s.tile + element_at(row, column), column < row ? -y * g.x : 0,
                     column + 1 < row ? -z * g.y : 0);
        }
    }
}

template <int KP, la_rule RULE, typename = element>
__global__ void __launch_bounds__(SCALAR_THREADS, KP > 128 || PLANES == 2 ? 3
                                                  : RULE == LA_DELTA      ? 4
                                                                          : 5)
    prepare_scalar(const __grid_constant__ call c, const __grid_constant__ chunks w,
                   const as_given given)
{
    threads_below<SCALAR_THREADS>();
    extern __shared__ __align__(1024) char shared[];
    scalar_room<KP, RULE> &s = *(scalar_room<KP, RULE> *)shared;
    constexpr int THREADS = SCALAR_THREADS;
    const int chunk_slot = blockIdx.x / c.H, h = blockIdx.x % c.H, group = c.HV / c.H;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (float)c.scale;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), h * group);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;

    /* loaded one head in advance */
    constexpr bool WEIGHS = RULE == LA_ADDITIVE;
    const view &weights = c.x[LA_WEIGHT];
    const bool weighs = WEIGHS && (weights.data || c.x[LA_SKIP].data);
    float a = 1, beta = 0;
    const auto load_gates = [&](int hv) {
        if (threadIdx.x >= n) return;
        if (c.x[LA_G].data)
            a = load<float>(at(c.x[LA_G], u.b, t + threadIdx.x, hv), c.x[LA_G].dtype);
        if (RULE == LA_DELTA)
            beta = load<float>(at(c.x[LA_BETA], u.b, t + threadIdx.x, hv), c.x[LA_BETA].dtype);
    };
    load_gates(h * group);
    if (threadIdx.x == 0) s.nonfinite[0] = C;
    char *const x_tile = RULE == LA_DELTA && c.x[LA_X].data ? s.q + tile_bytes(KP) : NULL;
    load_all<KP, THREADS>(c, u.b, t, n, h, s.q, s.k, x_tile, given);
    __syncthreads();
    const int64_t keys = ((int64_t)chunk_slot * w.heads + h) * tile_bytes(KP);
    if (w.q) write_tile<tile_bytes(KP), THREADS>(w.q + keys, s.q);
    if (w.k) write_tile<tile_bytes(KP), THREADS>(w.k + keys, s.k);
    if (RULE == LA_DELTA && w.x) write_tile<tile_bytes(KP), THREADS>(w.x + keys, x_tile);
    float2 all_keys = make_float2(0, 0);
    if (RULE == LA_ADDITIVE && w.z && threadIdx.x < KP / 2)
#pragma unroll 8
        for (int i = 0; i < C; i++) {
            const float2 x = get_pair(s.k + element_at(i, threadIdx.x * 2));
            all_keys = make_float2(all_keys.x + x.x, all_keys.y + x.y);
        }

    float x[5][2][4] = {};
    multiply_rows(x, s, x_tile ? x_tile : s.k);
    const int back = c.predicts_before; /* row i of L has row i - 1 of G */
    __syncthreads();
    clear_above<THREADS>(s.tile);
    if (RULE == LA_DELTA) clear_pairs(s.L);

    for (int hv = h * group; hv < (h + 1) * group; hv++) {
        const int64_t place = (int64_t)chunk_slot * c.HV + hv;
        if (c.x[LA_G].data && threadIdx.x < n) a = decay_of(a, c.gate);
        if (weighs) /* not in advance, for which there is no register */
            beta = weights.data && threadIdx.x < n
                       ? load<float>(at(weights, u.b, t + threadIdx.x, hv), weights.dtype)
                       : 1;
        if (threadIdx.x < C) {
            s.a[threadIdx.x] = a;
            s.beta[threadIdx.x] = beta;
        }
        const bool found = threadIdx.x < n && !(isfinite(a) && isfinite(beta));
        int nonfinite = C;
        if (__syncthreads_or(found || s.nonfinite[0] < C)) {
            if (threadIdx.x == 0) s.nonfinite[1] = s.nonfinite[0];
            __syncthreads();
            if (found) atomicMin(s.nonfinite + 1, threadIdx.x);
            __syncthreads();
            nonfinite = s.nonfinite[1];
            if (threadIdx.x < C && threadIdx.x >= nonfinite) s.beta[threadIdx.x] = 0;
        }
        if (threadIdx.x == 0) w.nonfinite[place] = nonfinite;
        if (RULE == LA_DELTA && w.beta && threadIdx.x < C)
            w.beta[place * C + threadIdx.x] = s.beta[threadIdx.x];
        if (RULE == LA_ADDITIVE && w.z && threadIdx.x < KP / 2)
            *(float2 *)(w.z + place * KP + threadIdx.x * 2) = all_keys;
        if (hv + 1 < (h + 1) * group) load_gates(hv + 1);

        if (c.x[LA_G].data && threadIdx.x < C) find_G(s, weighs, w.out ? w.out + place * C : NULL);
        __syncthreads();
        if (w.in && threadIdx.x < C)
            w.in[place * C + threadIdx.x] = s.a[0] * s.G[threadIdx.x * LD_PAIRS];
        if (RULE == LA_DELTA && w.look && threadIdx.x < C)
            w.look[place * C + threadIdx.x] =
                threadIdx.x ? s.a[0] * s.G[(threadIdx.x - 1) * LD_PAIRS] : 1;
        float row_sums[2] = {};
        int first_row = lane / 4, first_pair = lane % 4 * 2;
        /* keeps the compiler from holding 40 addresses for all heads */
        asm volatile("" : "+r"(first_row), "+r"(first_pair));
        /* Two copies, so that calls without weights and skips do not pay for them. */
        const auto put_products = [&](auto with_weights) {
            constexpr bool weighted = decltype(with_weights)::value;
            const float skip = weighted ? scale * with_skip(c, hv, 0.0f, 1.0f) : 0;
#pragma unroll
            for (int j = 0; j < 5; j++) {
                const bool scores = j <= warp;
                if (RULE == LA_ADDITIVE && !scores) continue;
                const int I = scores ? warp : 3 - warp, J = scores ? j : 4 - j;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int row = I * 16 + e / 2 * 8 + first_row;
                    const int column = J * 16 + e % 2 * 8 + first_pair;
                    const int from = RULE == LA_DELTA && !scores ? max(row - back, 0) : row;
                    float2 g = c.x[LA_G].data ? *(const float2 *)(s.G + from * LD_PAIRS + column)
                                              : make_float2(1, 1);
                    if constexpr (weighted) {
                        /* volatile: there are no registers to hold those of all columns */
                        const volatile float *const weight = s.beta + column;
                        g = make_float2(g.x * weight[0], g.y * weight[1]);
                    }
                    const float y = x[j][e % 2][e / 2 * 2] * g.x,
                                z = x[j][e % 2][e / 2 * 2 + 1] * g.y;
                    const int last = row < nonfinite ? row : -1; /* the last column of this row */
                    if (scores) {
                        float p = column <= row ? y * scale : 0, r = column < row ? z * scale : 0;
                        if (weighted && column == row) p += skip;
                        if (weighted && column + 1 == row) r += skip;
                        const pair_in_planes both = in_planes(p, r);
                        const bool kept = row < nonfinite, large = no_element(p) || no_element(r);
                        const float2 rounded = kept && !large ? numbers(both) : make_float2(p, r);
                        /* with the rounding that they have in the product with v */
                        row_sums[e / 2] += rounded.x + rounded.y;
                        put_pair(s.tile + element_at(row, column), kept ? both : pair_in_planes());
                        if (kept && large) atomicMin(w.nonfinite + place, row);
                    } else if (RULE == LA_DELTA)
                        *(float2 *)(s.L + row * LD + column) =
                            make_float2(column < last ? s.beta[row] * y : 0,
                                        column + 1 < last ? s.beta[row] * z : 0);
                }
            }
        };
        if (weighs)
            put_products(std::bool_constant<WEIGHS>());
        else
            put_products(std::false_type());
        __syncthreads();
        if (RULE == LA_ADDITIVE && w.den)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float sum = quad_sum(row_sums[e]);
                if (lane % 4 == 0) w.den[place * C + warp * 16 + e * 8 + lane / 4] = sum;
            }
        write_tile<PANEL_BYTES, THREADS>(w.scores + place * PANEL_BYTES, s.tile);
        if constexpr (RULE == LA_DELTA) {
            invert(s.L, s.room);
            if (w.lower) { /* gradients follow: - L, then - M */
                put_lower(s, x, c.x[LA_G].data, back, first_row, first_pair);
                __syncthreads();
                multiply_with_inverse(s.tile, s.L);
                __syncthreads();
                write_tile<PANEL_BYTES, THREADS>(w.lower + place * PANEL_BYTES, s.tile);
            } else {
                put_inverse<THREADS>(s.L, s.beta, s.tile);
                __syncthreads();
                write_tile<PANEL_BYTES, THREADS>(w.inverse + place * PANEL_BYTES, s.tile);
            }
        }
    }
}

#endif
