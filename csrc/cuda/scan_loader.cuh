/* The tokens of scan.cuh: their numbers on the way from memory, their place in shared memory, and
 * the warps that load them. */
#ifndef LINATTN_CUDA_SCAN_LOADER_CUH
#define LINATTN_CUDA_SCAN_LOADER_CUH

#include "token.cuh"

enum { STRIP = 4, WORKERS = 4 };

/* The split of KP keys (K, padded). A warp has enough lanes for 256 of them in rows of 8. */
template <int KP> constexpr int rows = KP <= 256 ? 8 : 16;
template <int KP> constexpr int parts = KP / rows<KP>;

/* Numbers that are being loaded. They keep the bits that they have in memory until they are needed.
 * Only float64 in a problem of floats is converted at once. */
template <typename real> struct in_flight;

template <> struct in_flight<float> {
    typedef uint32_t one;
    typedef four_bits four;
    static __device__ __forceinline__ la_dtype of(la_dtype dtype)
    {
        return dtype == LA_F64 ? LA_F32 : dtype;
    }
    static __device__ __forceinline__ one load_one(const char *from, la_dtype dtype)
    {
        if (dtype == LA_F64) return __float_as_uint((float)*(const double *)from);
        return (uint32_t)bits_of(from, dtype);
    }
    static __device__ __forceinline__ float number_of(one x, la_dtype dtype)
    {
        return number(x, of(dtype));
    }
    static __device__ __forceinline__ four load(const char *from, la_dtype dtype, int there)
    {
        if (dtype != LA_F64) return load_four_bits(from, dtype, there);
        four x = {};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (e < there) x.x[e] = load_one(from + 8 * e, dtype);
        return x;
    }
    static __device__ __forceinline__ void numbers_of(float (&x)[4], const four &y, la_dtype dtype)
    {
        numbers(x, y, of(dtype));
    }
};

template <> struct in_flight<double> {
    typedef double one;
    struct four {
        double x[4];
    };
    static __device__ __forceinline__ one load_one(const char *from, la_dtype dtype)
    {
        return ::load<double>(from, dtype);
    }
    static __device__ __forceinline__ double number_of(one x, la_dtype) { return x; }
    static __device__ __forceinline__ four load(const char *from, la_dtype dtype, int there)
    {
        four x;
#pragma unroll
        for (int e = 0; e < 4; e++)
            x.x[e] = e < there ? load_one(from + e * la_size_of(dtype), dtype) : 0;
        return x;
    }
    static __device__ __forceinline__ void numbers_of(double (&x)[4], const four &y, la_dtype)
    {
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = y.x[e];
    }
};

/* Four neighbouring numbers in shared memory; the rows of a thread, whose pieces of 16 bytes are
 * PARTS pieces apart. */
template <typename real> struct alignas(16) four_of {
    real x[4];
};

template <typename real> __device__ __forceinline__ void read_four(real (&x)[4], const real *from)
{
    const four_of<real> y = *(const four_of<real> *)from;
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = y.x[e];
}

template <typename real> __device__ __forceinline__ void write_four(real *to, const real (&x)[4])
{
    *(four_of<real> *)to = {x[0], x[1], x[2], x[3]};
}

template <int PARTS, typename real, int ROWS>
__device__ __forceinline__ void read_rows(real (&x)[ROWS], const real *from)
{
    constexpr int PIECE = 16 / sizeof(real);
    struct alignas(16) piece {
        real x[PIECE];
    };
#pragma unroll
    for (int i = 0; i < ROWS; i += PIECE) {
        const piece y = *(const piece *)(from + i * PARTS);
#pragma unroll
        for (int e = 0; e < PIECE; e++) x[i + e] = y.x[e];
    }
}

/* A token as the recurrence sees it, with zeros past K and V, and its read. */
template <typename real, la_decay DECAY, int KP> struct alignas(16) scanned {
    static constexpr int PARTS = parts<KP>, COLUMNS = WORKERS * STRIP * (32 / PARTS);
    static constexpr int APART =
        COLUMNS + (PARTS == 32 ? 4 : 8); /* so that the lanes of a warp use different banks */
    real q[KP], k[KP], a[DECAY == LA_KEY ? KP : 4]; /* work() relies on this order */
    real v[STRIP][APART];                           /* in the order of each turn */
    real o[COLUMNS];
    /* of the additive rule BETA is the weight of the write, and SKIP the factor of v in the read */
    enum { A, BETA, QK, SKIP = QK, DEN, SCALARS };
    real scalars[SCALARS];
};

/* TOKENS: the tokens of a batch that a loader has registers for. LOADERS and WORKERS_BESIDE: the
 * warps where loading is a duty of its own. 11 warps leave a thread 168 registers, 7 warps the most
 * there can be. A token of twice the bytes has half of the loaders, so that a batch takes the same
 * shared memory. */
template <typename real, int KP> struct most {
    static constexpr int TOKENS = sizeof(real) == 4 && KP < 256 ? 2 : 1;
    static constexpr int LOADERS = (KP <= 256 ? 32 : 16) / (int)sizeof(real), WORKERS_BESIDE = 2;
    static constexpr int THREADS = (LOADERS + WORKERS_BESIDE + 1) * 32;
};

/* The tokens of a loader: number `warp` of a batch, and every loaders-th after it. */
template <typename real, la_decay DECAY, la_rule RULE, int KP> struct batch_loader {
    typedef in_flight<real> kind;
    typedef scanned<real, DECAY, KP> token;
    static constexpr int TOKENS = most<real, KP>::TOKENS;
    /* Such calls may be noncausal, and the tokens of q are then not those of k and v. */
    static constexpr bool PLAIN = DECAY == LA_NONE && RULE == LA_ADDITIVE;
    /* of a lane */
    static constexpr int KEYS = KP > 128 ? KP / 32 : 4, COLUMNS = (token::COLUMNS + 31) / 32;
    /* beta, or the weight of the write */
    static constexpr bool WEIGHS = la_weighs(DECAY, RULE);
    const call &c;
    const unit u;
    const view &factor;
    const int loaders, v0, columns, lane, warp;
    const char *const q0, *const k0, *const g0, *const v_0;
    typename kind::four q[TOKENS][KEYS / 4], k[TOKENS][KEYS / 4];
    typename kind::four g[DECAY == LA_KEY ? TOKENS : 1][KEYS / 4];
    typename kind::one v[TOKENS][COLUMNS], scalar_g, beta;

    __device__ __forceinline__ batch_loader(const call &c, const unit &u, int loaders, int warp,
                                            int v0, int columns)
        : c(c), u(u), factor(c.x[WEIGHS ? LA_WEIGHT : LA_BETA]), loaders(loaders), v0(v0),
          columns(min(columns, c.V - v0)), lane(threadIdx.x % 32), warp(warp),
          q0(at(c.x[LA_Q], u.b, 0, u.h, lane * 4)), k0(at(c.x[LA_K], u.b, 0, u.h, lane * 4)),
          g0(DECAY == LA_KEY ? at(c.x[LA_G], u.b, 0, u.hv, lane * 4) : NULL),
          v_0(at(c.x[LA_V], u.b, 0, u.hv, v0 + lane))
    {
    }

    /* Start the loads of tokens t..t+n. */
    __device__ __forceinline__ void fetch(int t, int n)
    {
        const auto keys = [&](const view &x, const char *from, int i,
                              typename kind::four(&to)[KEYS / 4], bool there) {
            const int size = la_size_of(x.dtype), K = there ? c.K : 0;
            from += (t + i) * x.stride[1] * size;
#pragma unroll
            for (int j = 0; j < KEYS / 4; j++)
                to[j] = kind::load(from + j * 128 * size, x.dtype, K - lane * 4 - j * 128);
        };
#pragma unroll
        for (int e = 0; e < TOKENS; e++) {
            const int i = warp + loaders * e;
            if (i >= n) break;
            const bool reads = !PLAIN || t + i < c.queries, writes = !PLAIN || t + i < c.keys;
            keys(c.x[LA_Q], q0, i, q[e], reads);
            keys(c.x[LA_K], k0, i, k[e], writes);
            if constexpr (DECAY == LA_KEY) keys(c.x[LA_G], g0, i, g[e], true);
            const int size = la_size_of(c.x[LA_V].dtype);
            const char *from = v_0 + (t + i) * c.x[LA_V].stride[1] * size;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if (lane + 32 * j < columns && writes)
                    v[e][j] =
                        kind::load_one(from + 32 * j * c.x[LA_V].stride[3] * size, c.x[LA_V].dtype);
        }
        if (warp == 0 && lane < n) { /* a lane has a token */
            if (DECAY == LA_TOKEN)
                scalar_g = kind::load_one(at(c.x[LA_G], u.b, t + lane, u.hv), c.x[LA_G].dtype);
            if (RULE == LA_DELTA || (WEIGHS && factor.data))
                beta = kind::load_one(at(factor, u.b, t + lane, u.hv), factor.dtype);
        }
    }

    /* Write the fetched tokens to shared memory, as the recurrence sees them. */
    __device__ __forceinline__ void put(token *to, int n)
    {
        const auto unpack_keys = [&](const typename kind::four(&from)[KEYS / 4], la_dtype dtype,
                                     real(&x)[KEYS]) {
#pragma unroll
            for (int j = 0; j < KEYS; j += 4) {
                real four[4];
                kind::numbers_of(four, from[j / 4], dtype);
#pragma unroll
                for (int e = 0; e < 4; e++) x[j + e] = four[e];
            }
        };
        const auto store_keys = [&](real *to, const real(&x)[KEYS]) {
#pragma unroll
            for (int j = 0; j < KEYS; j += 4) {
                const real four[4] = {x[j], x[j + 1], x[j + 2], x[j + 3]};
                if (key_of_lane(lane, j) < KP) write_four(to + key_of_lane(lane, j), four);
            }
        };
#pragma unroll
        for (int e = 0; e < TOKENS; e++) {
            const int i = warp + loaders * e;
            if (i >= n) break;
            real x[KEYS], y[KEYS];
            unpack_keys(q[e], c.x[LA_Q].dtype, x);
            norm_and_map(c, 0, x, by_fours());
            store_keys(to[i].q, x);
            unpack_keys(k[e], c.x[LA_K].dtype, y);
            norm_and_map(c, 1, y, by_fours());
            store_keys(to[i].k, y);
            if (RULE == LA_DELTA) {
                real qk = 0;
#pragma unroll
                for (int j = 0; j < KEYS; j++) qk += x[j] * y[j];
                qk = warp_sum(qk);
                if (lane == 0) to[i].scalars[token::QK] = qk;
            }
            if constexpr (DECAY == LA_KEY) {
                unpack_keys(g[e], c.x[LA_G].dtype, x);
                if (c.gate == LA_LOG)
#pragma unroll
                    for (int j = 0; j < KEYS; j++)
                        x[j] = key_of_lane(lane, j) < c.K ? decay_of(x[j], LA_LOG) : 0;
                store_keys(to[i].a, x);
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                const int column = lane + 32 * j;
                if (column >= token::COLUMNS) break;
                const real x = column < columns ? kind::number_of(v[e][j], c.x[LA_V].dtype) : 0;
#pragma unroll
                for (int turn = 0; turn < STRIP; turn++) to[i].v[turn][column ^ turn] = x;
            }
        }
        if (warp == 0 && lane < n) {
            if (DECAY == LA_TOKEN)
                to[lane].scalars[token::A] =
                    decay_of(kind::number_of(scalar_g, c.x[LA_G].dtype), c.gate);
            if (RULE == LA_DELTA || WEIGHS)
                to[lane].scalars[token::BETA] =
                    factor.data ? kind::number_of(beta, factor.dtype) : 1;
            if (WEIGHS) to[lane].scalars[token::SKIP] = with_skip(c, u.hv, (real)0, (real)1);
        }
    }

    /* Store the reads of tokens t..t+n. */
    __device__ __forceinline__ void store_reads(const token *from, int t, int n) const
    {
#pragma unroll
        for (int e = 0; e < TOKENS; e++) {
            const int i = warp + loaders * e;
            if (i >= n) break;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                if (lane + 32 * j < columns)
                    store(at(c.x[LA_O], u.b, t + i, u.hv, v0 + lane + 32 * j), c.x[LA_O].dtype,
                          finish(c, from[i].o[lane + 32 * j], from[i].scalars[token::DEN]));
        }
    }
};

#endif
