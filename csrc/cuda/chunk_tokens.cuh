/* The rare way through a chunk, token by token. It stands apart from the walks, whose code is
 * short. */
#ifndef LINATTN_CUDA_CHUNK_TOKENS_CUH
#define LINATTN_CUDA_CHUNK_TOKENS_CUH

#include "prepare.cuh"

/* x[j] = work(number j of this thread), of a row as in load_keys_of_quad. Past the last key it is
 * `otherwise`. Eight numbers are loaded at a time: all at once, they were a sixth of the code of a
 * file. */
template <la_dtypes OF, int N, typename F>
__device__ __forceinline__ void row_by_eights(float (&x)[N], la_dtype dtype, const char *row,
                                              int64_t apart, int keys, float otherwise, F work)
{
    const int pair = threadIdx.x % 4 * 2;
#pragma unroll 1
    for (int j = 0; j < N; j += 8) {
        float eight[8];
        with_type<OF, float>(dtype, [&](auto *type) {
            typedef std::remove_pointer_t<decltype(type)> T;
            load_keys_of_quad<T>(eight, row + j * 4 * apart * (int)sizeof(T), apart, keys - j * 4);
        });
#pragma unroll
        for (int e = 0; e < 8; e++)
            x[j + e] = j * 4 + e / 2 * 8 + pair + e % 2 < keys ? work(eight[e]) : otherwise;
    }
}

/* A chunk with a NaN or an infinity goes token by token, for its state, and for O from token
 * `first` on. In a product with a triangle, zero times infinity would spoil the tokens before it.
 * `state` (products.cuh has its order) and O [eight tokens][column, token of two] are the numbers of
 * S' and O' of this thread, in the layout of chunks_forward. O has the tokens first_read to
 * first_read + reads, and comes out scaled. */
template <int KP, la_decay DECAY, la_rule RULE>
__device__ __noinline__ void tokens_of_chunk(const call &c, const unit &u, int t, int n, int first,
                                             int v0, int columns, float *state, float *O,
                                             int first_read, int reads)
{
    const int lane = threadIdx.x % 32, column = lane / 4, pair = lane % 4 * 2;
    float in_keys[STATE_AS_SUMS ? KP / 2 : 1], *const S = STATE_AS_SUMS ? in_keys : state;
    for (int i = 0; STATE_AS_SUMS && i < KP / 2; i++) S[i] = state[place_in_sums(i)];
    float q[KP / 4], k[KP / 4], looks[KP / 4], y[RULE == LA_DPLR ? KP / 4 : 1];
    float a[DECAY == LA_KEY ? KP / 4 : 1] = {1};
    const bool has_x = la_predicts(RULE) && c.x[LA_X].data;
    for (int i = 0; i < n; i++) {
        const auto same = [](float x) { return x; };
        const auto row_of = [&](float(&x)[KP / 4], const view &of) {
            row_by_eights<LA_DTYPE_OF_Q>(x, ELEMENT_DTYPE, at(of, u.b, t + i, u.h), of.stride[3],
                                         c.K, 0, same);
        };
        const view &g = c.x[LA_G], &of_bonus = c.x[LA_U];
        row_of(q, c.x[LA_Q]);
        row_of(k, c.x[LA_K]);
        if (has_x) row_of(looks, c.x[LA_X]);
        if constexpr (RULE == LA_DPLR) row_of(y, c.x[LA_Y]);
        if constexpr (DECAY == LA_KEY)
            row_by_eights<LA_DTYPE_FLOAT>(a, g.dtype, at(g, u.b, t + i, u.hv), g.stride[3], c.K, 1,
                                          [&](float x) { return decay_of(x, c.gate); });
        float bonus[RULE == LA_BONUS ? KP / 4 : 1];
        if constexpr (RULE == LA_BONUS)
            row_by_eights<LA_DTYPE_FLOAT>(bonus, of_bonus.dtype, at(of_bonus, u.h),
                                          of_bonus.stride[1], c.K, 0, same);
        float squares_q = 0, squares_k = 0, qk = 0, qy = 0;
        for (int j = 0; j < KP / 4; j++) {
            squares_q += q[j] * q[j];
            squares_k += k[j] * k[j];
        }
        const float factor_q = c.qk_l2norm ? l2norm_factor(quad_sum(squares_q)) : 1;
        const float factor_k = c.qk_l2norm ? l2norm_factor(quad_sum(squares_k)) : 1;
#pragma unroll 1
        for (int j = 0; j < KP / 4; j++) {
            const bool there = j / 2 * 8 + pair + j % 2 < c.K;
            q[j] = there ? apply_map(q[j] * factor_q, c.map[0], (float)c.map_eps[0]) : 0;
            k[j] = there ? apply_map(k[j] * factor_k, c.map[1], (float)c.map_eps[1]) : 0;
            if (la_is_gated(DECAY, RULE) && c.x_is_factor) looks[j] *= k[j];
            qk += q[j] * k[j] * (RULE == LA_BONUS ? bonus[j] : 1);
            if (RULE == LA_DPLR) qy += q[j] * y[j];
        }
        if (DECAY == LA_TOKEN)
            a[0] = decay_of(load<float>(at(c.x[LA_G], u.b, t + i, u.hv), c.x[LA_G].dtype), c.gate);
        const view &factor = c.x[la_weighs(DECAY, RULE) ? LA_WEIGHT : LA_BETA];
        const bool has_factor = RULE == LA_DELTA || (la_weighs(DECAY, RULE) && factor.data);
        const float beta = has_factor ? load<float>(at(factor, u.b, t + i, u.hv), factor.dtype) : 1;
        float v[2], o[2];
        for (int w = 0; w < 2; w++)
            v[w] = column + 8 * w < columns
                       ? load<float>(at(c.x[LA_V], u.b, t + i, u.hv, v0 + column + 8 * w),
                                     ELEMENT_DTYPE)
                       : 0;
        if (la_is_gated(DECAY, RULE) && c.x[LA_W].data)
            for (int w = 0; w < 2; w++)
                if (column + 8 * w < columns)
                    v[w] *= load<float>(at(c.x[LA_W], u.b, t + i, u.hv, v0 + column + 8 * w),
                                        ELEMENT_DTYPE);
        la_operands x = {};
        x.q = q, x.k = k, x.x = has_x ? looks : k, x.a = a, x.v = v;
        if (RULE == LA_DPLR) x.y = y, x.qy = quad_sum(qy);
        x.beta = beta, x.own = quad_sum(qk), x.before = c.predicts_before;
        /* Only pairs of DPLR look before a decay per key (dplr.cu). The second token of a pair has
         * no x. It must not predict, since zero times a NaN is a NaN. */
        constexpr bool may_be_pairs = DECAY == LA_KEY && RULE == LA_DELTA;
        if (may_be_pairs && c.predicts_before && (t + i - u.begin) % 2)
            la_token(la_strip_of(S, 2), {}, 2, KP / 4, &x, o, DECAY,
                     may_be_pairs ? LA_ADDITIVE : RULE);
        else
            la_token(la_strip_of(S, 2), {}, 2, KP / 4, &x, o, DECAY, RULE);
        if (la_weighs(DECAY, RULE))
            for (int w = 0; w < 2; w++) o[w] = with_skip(c, u.hv, o[w], v[w]);
        const int read = i - first_read;
        if (i / 2 % 4 * 2 != pair || i < first || read < 0 || read >= reads) continue;
        O[read / 8 * 4 + read % 2] = o[0] * (float)c.scale;
        O[read / 8 * 4 + 2 + read % 2] = o[1] * (float)c.scale;
    }
    for (int i = 0; STATE_AS_SUMS && i < KP / 2; i++) state[place_in_sums(i)] = S[i];
}

/* Here a call of the additive rule may have a bonus, and PAIR has two states. */
template <int KP, la_decay DECAY, la_rule RULE>
__device__ __forceinline__ void chunk_by_tokens(const call &c, const unit &u, int t, int n,
                                                int first, int v0, int columns, float *S, float *O,
                                                int first_read, int reads)
{
    if constexpr (DECAY == LA_PAIR)
        return pair_by_tokens<KP>(c, u, t, n, first, v0, columns, S, O, first_read, reads);
    if constexpr (DECAY == LA_KEY && RULE == LA_ADDITIVE)
        if (c.x[LA_U].data)
            return tokens_of_chunk<KP, DECAY, LA_BONUS>(c, u, t, n, first, v0, columns, S, O,
                                                        first_read, reads);
    if constexpr (DECAY != LA_PAIR)
        tokens_of_chunk<KP, DECAY, RULE>(c, u, t, n, first, v0, columns, S, O, first_read, reads);
}

#endif
