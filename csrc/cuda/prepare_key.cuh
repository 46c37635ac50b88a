/* `prepare` for decays per key. See prepare.cuh.
 *
 * The decay from after token j through token i differs from key to key, so it is part of the
 * operands, in blocks of 16 tokens. Let f_i be the decay from the start of the block of i through
 * token i, h_j the decay from after j to the end of the block of j, and t_R the decay of the whole
 * block R. Then block (I, J < I) is (x f) diag(t_(J+1) ... t_(I-1)) (k h)', where x is q, x or k.
 * Diagonal blocks are (x f) (k / f)'. That is accurate for a row if f has stayed between 1 / REACH
 * and REACH up to this row; rows after it do not matter. From the first row where f has not, the
 * decay of each pair is multiplied up in float32. The exponents of bf16 reach from 2^-126 to 2^127,
 * those of float16 from 2^-14 to 2^15. The range that REACH leaves is for k and q. */
#ifndef LINATTN_CUDA_PREPARE_KEY_CUH
#define LINATTN_CUDA_PREPARE_KEY_CUH

#include "inverse.cuh"
#include "tile_loads.cuh"
#include <type_traits>

static constexpr float REACH = NARROW ? 0x1p8f : 0x1p100f;

template <int KP> struct key_room {
    /* k becomes k / f, q becomes q f. xf has x, which becomes x f; without an x, k f. The additive
     * rule has no xf. There a bonus lies in its place, and a token's weight in its own read. */
    alignas(1024) char k[tile_bytes(KP)], q[tile_bytes(KP)];
    union {
        alignas(1024) char xf[tile_bytes(KP)];
        struct {
            float bonus[KP], own[C];
        };
    };
    alignas(1024) char kh[tile_bytes(KP)];
    union {
        float a[C * KP];
        struct {
            char tile[PANEL_BYTES];
            float room[4 * 32 * 12];
            alignas(16) char lower[PANEL_BYTES]; /* for gradients */
        };
    };
    float t[4 * KP], beta[C];
    int nonfinite,
        slow[4]; /* slow: the first row of each block whose diagonal part goes pair by pair */
};

static_assert(PLANES == 2 || sizeof(key_room<128>) <= 99 << 10, "as sm_86, sm_89, sm_120");

/* x times a number per key. The columns of the left operand are key.. + lane % 4 * 2 +
 * {0, 1, 8, 9}. */
__device__ __forceinline__ operand scaled(const operand &x, const float *by)
{
    const float *y = by + threadIdx.x % 4 * 2;
    operand z;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 of = numbers(x, e), g = *(const float2 *)(y + e / 2 * 8);
        put_pair(z, e, of.x * g.x, of.y * g.y);
    }
    return z;
}

/* The decays of a chunk, [C][KP] floats, from `first_key` on. They are ones past its end. */
template <int KP>
__device__ void load_decays(const call &c, const unit &u, int t, int n, float *a, int first_key = 0)
{
    const int keys = c.K - first_key;
    const bool rows_of_4 =
        c.x[LA_G].dtype == LA_F32 && c.K % 4 == 0 && (uintptr_t)c.x[LA_G].data % 16 == 0 &&
        (c.x[LA_G].stride[0] | c.x[LA_G].stride[1] | c.x[LA_G].stride[2]) % 4 == 0;
    if (rows_of_4) { /* all loads start before the first wait */
        constexpr int COUNT = C * KP / 4 / KEY_THREADS, STEP = KEY_THREADS / (KP / 4);
        const int first = threadIdx.x / (KP / 4), key = threadIdx.x % (KP / 4) * 4;
        const float *from = (const float *)at(c.x[LA_G], u.b, t, u.hv, first_key + key);
        float4 x[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int row = first + i * STEP;
            x[i] = row < n && key < keys ? *(const float4 *)(from + row * c.x[LA_G].stride[1])
                                         : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int row = first + i * STEP;
            const bool there = row < n && key < keys;
            if (c.gate != LA_DECAY) /* a log decay: slopes are never per key */
                x[i] = make_float4(decay_of(x[i].x, LA_LOG), decay_of(x[i].y, LA_LOG),
                                   decay_of(x[i].z, LA_LOG), decay_of(x[i].w, LA_LOG));
            else if (!there)
                x[i] = make_float4(1, 1, 1, 1);
            *(float4 *)(a + row * KP + key) = x[i];
        }
        return;
    }
    const int lane = threadIdx.x % 32;
    for (int row = threadIdx.x / 32; row < C; row += KEY_THREADS / 32) {
        float x[KP / 32];
        if (row < n)
            load_row(x, at(c.x[LA_G], u.b, t + row, u.hv, first_key), c.x[LA_G].dtype, lane, 32,
                     keys);
#pragma unroll
        for (int j = 0; j < KP / 32; j++)
            a[row * KP + lane + 32 * j] =
                row < n && lane + 32 * j < keys ? decay_of(x[j], c.gate) : 1;
    }
}

/* Diagonal blocks pair by pair. A warp has a block. A lane has its column lane % 16 and every other
 * pair of keys. The results are rows of the sums x k' and q k'; `looks` is the tile of x. If
 * `early`, q of the additive rule, or x of the delta rule, sees the state before the decay of its
 * token. */
template <int KP, la_rule RULE>
__device__ void multiply_pairs(const key_room<KP> &s, const char *looks, bool early,
                               float (&xk)[16], float (&qk)[16])
{
    const int lane = threadIdx.x % 32, j = lane % 16, first = threadIdx.x / 32 * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) xk[i] = qk[i] = 0;
    for (int key = lane / 16 * 2; key < KP; key += 4) {
        float2 k = get_pair(s.k + element_at(first + j, key));
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 a = *(const float2 *)&s.a[(first + i) * KP + key];
            const float2 x = get_pair(looks + element_at(first + i, key));
            const float2 q = get_pair(s.q + element_at(first + i, key));
            const float2 before = k;
            if (i > j) {
                k.x *= a.x;
                k.y *= a.y;
            }
            const float2 for_q = early && RULE == LA_ADDITIVE ? before : k;
            const float2 for_x = early && RULE == LA_DELTA ? before : k;
            if (i >= j) {
                xk[i] += x.x * for_x.x + x.y * for_x.y;
                qk[i] += q.x * for_q.x + q.y * for_q.y;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        xk[i] += __shfl_xor_sync(~0u, xk[i], 16);
        qk[i] += __shfl_xor_sync(~0u, qk[i], 16);
    }
}

/* q . (bonus k) of each token. Four neighbouring threads have a token. The rows are as the
 * recurrence sees them. The state has no part in this, so a NaN here is no NaN of the chunk. */
template <int KP> __device__ void find_own(key_room<KP> &s)
{
    const int row = threadIdx.x / 4;
    float own = 0;
#pragma unroll 4
    for (int key = threadIdx.x % 4 * 2; key < KP; key += 8) {
        const float2 q = get_pair(s.q + element_at(row, key));
        const float2 k = get_pair(s.k + element_at(row, key));
        const float2 bonus = *(const float2 *)(s.bonus + key);
        own += q.x * k.x * bonus.x + q.y * k.y * bonus.y;
    }
    own = quad_sum(own);
    if (threadIdx.x % 4 == 0) s.own[row] = own;
}

/* With a bonus (the rule BONUS; here it is additive) q reads before the decay of its token, and the
 * diagonal of P is q . (bonus k). Under the delta rule x may look before that decay.
 *
 * Warps 0 to 3 multiply the rows of Q K', warps 4 to 7 those of X K' with the longest row first. So
 * the two warps that share a scheduler have five blocks together. */
template <int KP, la_rule RULE, typename = element>
__global__ void __launch_bounds__(KEY_THREADS, (KP * PLANES > 128 ? 1 : 2))
    prepare_key(const __grid_constant__ call c, const __grid_constant__ chunks w,
                const as_given given)
{
    extern __shared__ __align__(1024) char shared[];
    key_room<KP> &s = *(key_room<KP> *)shared;
    float *L = (float *)s.q; /* lies over q f, x f and k h, after they have been read */
    static_assert(sizeof(float) * C * LD <= 3 * tile_bytes(KP), "L lies over three tiles");
    const int chunk_slot = blockIdx.x / c.HV, hv = blockIdx.x % c.HV;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float scale = (float)c.scale;
    const unit u = unit_of(c, sequence_of(c, chunk_slot), hv);
    const int t = u.begin + (chunk_slot - first_chunk_slot(c, u.n)) * C, n = min(C, u.end - t);
    if (n <= 0) return;
    const int place = chunk_slot * c.HV + hv; /* the launch has checked that it fits */

    int found = C; /* the first row with a NaN or an infinity */
    if (threadIdx.x < 5) (threadIdx.x < 4 ? s.slow[threadIdx.x] : s.nonfinite) = C;
    load_decays<KP>(c, u, t, n, s.a);
    const bool has_x = RULE == LA_DELTA && c.x[LA_X].data;
    const bool bonus = RULE == LA_ADDITIVE && c.x[LA_U].data;
    const bool early = bonus || (has_x && c.predicts_before); /* of q; under the delta rule of x */
    if (bonus && threadIdx.x < KP)
        s.bonus[threadIdx.x] = (int)threadIdx.x < c.K
                                   ? load<float>(at(c.x[LA_U], u.h, threadIdx.x), c.x[LA_U].dtype)
                                   : 0;
    load_all<KP, KEY_THREADS>(c, u.b, t, n, u.h, s.q, s.k, has_x ? s.xf : NULL, given);
    __syncthreads();
    if (RULE == LA_DELTA && c.x_is_factor) multiply_tile<KP, KEY_THREADS>(s.xf, s.k);
    if (bonus) find_own<KP>(s);

    if (RULE == LA_DELTA && threadIdx.x < C) {
        const float beta = threadIdx.x < n ? load<float>(at(c.x[LA_BETA], u.b, t + threadIdx.x, hv),
                                                         c.x[LA_BETA].dtype)
                                           : 0;
        if (!isfinite(beta)) found = threadIdx.x;
        s.beta[threadIdx.x] = beta;
    }
    for (int i = threadIdx.x; i < 4 * KP; i += KEY_THREADS) {
        const int block = i / KP, key = i % KP;
        float f = 1;
        int slow = C;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float a = s.a[(block * 16 + j) * KP + key];
            if (!isfinite(a)) found = min(found, block * 16 + j);
            f *= a;
            if (!(f >= 1 / REACH && f <= REACH)) slow = min(slow, block * 16 + j);
        }
        s.t[i] = f;
        if (slow < C) atomicMin(s.slow + block, slow);
    }
    __syncthreads();
    float slow_xk[16], slow_qk[16];
    const int slow = warp < 4 ? s.slow[warp] : C;
    if (slow < C) multiply_pairs<KP, RULE>(s, has_x ? s.xf : s.k, early, slow_xk, slow_qk);
    __syncthreads();

    /* Running products up the chunk, then down. A thread has two keys and a block of 16 rows. */
    const int64_t keys = (int64_t)place * tile_bytes(KP);
    char *to_q = w.q + keys, *to_k = w.k + keys, *to_kt = w.kt + keys;
    constexpr int BLOCKS = KEY_THREADS / (KP / 2); /* at a time */
    const int own = threadIdx.x % (KP / 2) * 2;
#pragma unroll
    for (int first = 0; first < 4; first += BLOCKS) {
        const int block = first + threadIdx.x / (KP / 2);
        if (block >= 4) continue;
        float2 all = make_float2(1, 1), h = all;
        for (int j = 3; j > block; j--) {
            all.x *= s.t[j * KP + own];
            all.y *= s.t[j * KP + own + 1];
        }
#pragma unroll 8
        for (int i = block * 16 + 15; i >= block * 16; i--) {
            const float2 a = *(const float2 *)&s.a[i * KP + own];
            const int here = element_at(i, own);
            const float2 k = get_pair(s.k + here);
            put_pair(to_kt + here, k.x * all.x, k.y * all.y);
            if (too_large(k.x * all.x) || too_large(k.y * all.y)) found = 0; /* decays above one */
            put_pair(s.kh + here, k.x * h.x, k.y * h.y);
            all = make_float2(all.x * a.x, all.y * a.y);
            h = make_float2(h.x * a.x, h.y * a.y);
        }
        if (block == 0) *(float2 *)(w.total + (int64_t)place * KP + own) = all;
    }
    __syncthreads(); /* from here on k becomes k / f */
    const auto scale_up = [&](int block, auto before) {
        constexpr bool early_q = decltype(before)::value && RULE == LA_ADDITIVE;
        constexpr bool early_x = decltype(before)::value && RULE == LA_DELTA;
        float2 all = make_float2(1, 1), f = all;
        for (int j = 0; j < block; j++) {
            all.x *= s.t[j * KP + own];
            all.y *= s.t[j * KP + own + 1];
        }
#pragma unroll 8
        for (int i = block * 16; i < block * 16 + 16; i++) {
            const float2 a = *(const float2 *)&s.a[i * KP + own];
            const int here = element_at(i, own);
            const float2 k = get_pair(s.k + here), x = has_x ? get_pair(s.xf + here) : k;
            const float2 q = get_pair(s.q + here);
            const float2 all_before = all, f_before = f;
            all = make_float2(all.x * a.x, all.y * a.y);
            f = make_float2(f.x * a.x, f.y * a.y);
            const float2 all_of_q = early_q ? all_before : all, of_q = early_q ? f_before : f;
            const float2 all_of_x = early_x ? all_before : all, of_x = early_x ? f_before : f;
            const float2 read = make_float2(q.x * all_of_q.x * scale, q.y * all_of_q.y * scale);
            put_pair(to_q + here, read.x, read.y);
            if (too_large(read.x) || too_large(read.y)) found = 0;
            put_pair(s.q + here, q.x * of_q.x, q.y * of_q.y);
            put_pair(s.k + here, __fdividef(k.x, f.x), __fdividef(k.y, f.y));
            if (RULE == LA_DELTA) {
                put_pair(to_k + here, x.x * all_of_x.x, x.y * all_of_x.y);
                put_pair(s.xf + here, x.x * of_x.x, x.y * of_x.y);
            }
        }
    };
#pragma unroll
    for (int first = 0; first < 4; first += BLOCKS) {
        const int block = first + threadIdx.x / (KP / 2);
        if (block >= 4) continue;
        if (early)
            scale_up(block, std::true_type());
        else
            scale_up(block, std::false_type());
    }
    __syncthreads();

    const bool scores = warp < 4, works = scores || RULE == LA_DELTA;
    const int I = scores ? warp : 7 - warp;
    float x[4][2][4] = {}; /* of blocks (I, I), (I, I - 1), ... */
    if (works) {
        const uint32_t rows = address_of(scores ? s.q : s.xf);
        const uint32_t kh = lane_with_rows(address_of(s.kh)), k_f = lane_with_rows(address_of(s.k));
#pragma unroll
        for (int i = 0; i < KP; i += 16) {
            operand of = load_operand(rows, I * 16, i);
#pragma unroll
            for (int back = 0; back < 4; back++) {
                if (back > I) continue;
                if (back > 1) of = scaled(of, s.t + (I - back + 1) * KP + i);
                multiply_with_rows(x[back][0], x[back][1], of, back ? kh : k_f, (I - back) * 16, i);
            }
        }
        /* rows of both halves; those from slow on are computed elsewhere */
        if (I * 16 + lane / 4 < s.slow[I])
            found = min(found, I * 16 + nonfinite_on_diagonal(x[0][0], 0));
        if (I * 16 + 8 + lane / 4 < s.slow[I])
            found = min(found, I * 16 + nonfinite_on_diagonal(x[0][1], 8));
    }
    if (slow < C && lane < 16)
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i == lane && warp * 16 + i >= slow &&
                !(isfinite(slow_qk[i]) && isfinite(slow_xk[i])))
                found = min(found, warp * 16 + i);
    int nonfinite = C;
    if (__syncthreads_or(found < C)) { /* x f, k h and a are no longer needed */
        atomicMin(&s.nonfinite, found);
        __syncthreads();
        nonfinite = s.nonfinite;
        if (RULE == LA_DELTA && threadIdx.x < C && threadIdx.x >= nonfinite)
            s.beta[threadIdx.x] = 0;
        __syncthreads();
    }
    if (threadIdx.x == 0) w.nonfinite[place] = nonfinite;
    int too_large_from = C; /* the first row with a score that is too large */
    clear_above<KEY_THREADS>(s.tile);
    const bool lower = RULE == LA_DELTA && w.lower;
    if (lower) clear_above<KEY_THREADS>(s.lower);
    if (RULE == LA_DELTA) clear_pairs(L);

    if (works)
#pragma unroll
        for (int back = 0; back < 4; back++) {
            if (back > I) continue;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = I * 16 + e / 2 * 8 + lane / 4;
                const int column = (I - back) * 16 + e % 2 * 8 + lane % 4 * 2;
                const float y = x[back][e % 2][e / 2 * 2], z = x[back][e % 2][e / 2 * 2 + 1];
                const int last = row < nonfinite ? row : -1; /* the last column of this row */
                const bool here = back || row < s.slow[I];   /* otherwise its score comes later */
                const int found_here = bonus ? last - 1 : last; /* `own` takes the diagonal */
                if (scores && here &&
                    ((column <= found_here && no_element(y * scale)) ||
                     (column < found_here && no_element(z * scale))))
                    too_large_from = min(too_large_from, row);
                if (scores)
                    put_pair(s.tile + element_at(row, column), column <= last ? y * scale : 0,
                             column < last ? z * scale : 0);
                else {
                    *(float2 *)&L[row * LD + column] =
                        make_float2(column < last ? s.beta[row] * y : 0,
                                    column + 1 < last ? s.beta[row] * z : 0);
                    if (lower)
                        put_pair(s.lower + element_at(row, column), column < last ? -y : 0,
                                 column + 1 < last ? -z : 0);
                }
            }
        }
    __syncthreads();
    if (slow < C && lane < 16)
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int row = warp * 16 + i, column = warp * 16 + lane;
            if (row < slow || row < column || row >= nonfinite) continue;
            put_one(s.tile + element_at(row, column), slow_qk[i] * scale);
            if (no_element(slow_qk[i] * scale)) too_large_from = min(too_large_from, row);
            if (RULE == LA_DELTA && row > column) L[row * LD + column] = s.beta[row] * slow_xk[i];
            if (lower && row > column) put_one(s.lower + element_at(row, column), -slow_xk[i]);
        }
    __syncthreads();
    if (bonus) {
        const int row = threadIdx.x;
        if (row < nonfinite) {
            const float own = s.own[row] * scale;
            put_one(s.tile + element_at(row, row), own);
            if (too_large(own)) too_large_from = min(too_large_from, row);
        }
        __syncthreads();
    }
    if (too_large_from < C) atomicMin(w.nonfinite + place, too_large_from);
    if (lower)
        write_tile<PANEL_BYTES, KEY_THREADS>(w.lower + (int64_t)place * PANEL_BYTES, s.lower);
    write_tile<PANEL_BYTES, KEY_THREADS>(w.scores + (int64_t)place * PANEL_BYTES, s.tile);
    if constexpr (RULE == LA_DELTA) {
        invert(L, s.room);
        put_inverse<KEY_THREADS>(L, s.beta, s.tile);
        __syncthreads();
        write_tile<PANEL_BYTES, KEY_THREADS>(w.inverse + (int64_t)place * PANEL_BYTES, s.tile);
    }
}

#endif
