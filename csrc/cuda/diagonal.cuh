/* DIAGONAL SCANS on a GPU (../diagonal.h): what the passes have in common.
 *
 * The state stays in registers, and tokens follow one another. A thread has NUMBERS numbers of a
 * channel's state, and LANES neighbouring threads have a channel. A block has some channels. It fetches
 * their tokens a tile at a time, makes what all threads of a channel need of a token, and leaves it in
 * shared memory. Sums over numbers are sums over LANES threads of GROUP tokens at a time, after which
 * each thread has the sums of some of these tokens.
 *
 * If a channel has more numbers than its threads, blocks share them, and a last kernel adds up what they
 * have read.
 *
 * GATED, with one number in a state, has kernels of its own: diagonal_gated.cuh. */
#ifndef LINATTN_CUDA_DIAGONAL_CUH
#define LINATTN_CUDA_DIAGONAL_CUH

#include "rooms.cuh"

#include <type_traits>

extern "C" {
#include "../diagonal.h"
}

#define lane real
#define LANE_ZERO 0
#define LANE_SQRT sqrt
#include "../diagonal_token.h"
#undef lane
#undef LANE_ZERO
#undef LANE_SQRT

/* A call for states alone: the state after the tokens, or the gradient of the one before them. */
enum scan_alone { NOT_ALONE, STATE_ALONE, GRADIENT_ALONE };

struct scan_call {
    room_call room;
    scan_alone alone;
    view x[LA_SCAN_ARRAYS], d[LA_SCAN_ARRAYS]; /* d: gradients, those of outputs included */
    int N, G;
    bool softplus;
    int write;      /* of GATED */
    bool fours;     /* u, delta, z, y and their gradients lie in fours of channels */
    bool row_fours; /* B and C lie in fours of numbers */
    bool along;     /* tokens are neighbours in memory */
    int panels;     /* of a group's channels */
    int blocks;     /* of a channel's numbers */
    int numbers;    /* of all blocks */
    int cuts;       /* of each sequence, whose pieces the adjoint goes through side by side */
    int parts;      /* of the sequences, or all their pieces, each with sums of its own */
    char *sums;     /* [3][blocks][B T][D]: reads, or sums of the adjoint, if blocks > 1 */
    char *kept;     /* [places][D][numbers]: the state before each tile of the adjoint */
    char *later;    /* [S][cuts][D][numbers]: the gradient of the state after each piece */
    char *dB, *dC;  /* [panels][B T][G][numbers] */
    double *dA, *dB0, *dC0; /* [parts][D][N] */
    double *dD, *dbias;     /* [parts][D] */
};

enum {
    SCAN_THREADS = 128,
    GROUP = 8, /* tokens whose sums over numbers are added up together; a tile of the adjoint */
};

template <typename real> struct __align__(2 * sizeof(real)) two {
    real x, y;
};
template <typename real> struct __align__(16) four {
    real x, y, z, w;
};

/* ---- numbers ---- */

/* Of a float by way of doubles: sincosf has 2 ulp, and a complex decay near 1 has many tokens of them. */
__device__ __forceinline__ void cos_sin(float x, float *cosine, float *sine)
{
    double c, s;
    sincos((double)x, &s, &c);
    *cosine = (float)c;
    *sine = (float)s;
}
__device__ __forceinline__ void cos_sin(double x, double *cosine, double *sine)
{
    sincos(x, sine, cosine);
}

/* A thread's numbers of the arrays that all tokens share. A is the decay of FIXED, or the rate. */
template <typename real, int NUMBERS> struct thread_numbers {
    real A[NUMBERS], b[NUMBERS], c[NUMBERS];

    /* The least magnitude of the first `count`. */
    __device__ __forceinline__ real least_rate(int count) const
    {
        real least = fabs(A[0]);
#pragma unroll
        for (int k = 1; k < NUMBERS; k++) least = k < count ? min(least, fabs(A[k])) : least;
        return least;
    }
};

/* Is an exponent of this warp near 0? `step` and `rate` are the least of a thread's, in magnitude. */
__device__ __forceinline__ bool is_near(float step, float rate)
{
    return __any_sync(~0u, step * rate < NEAREST);
}
__device__ __forceinline__ bool is_near(double, double) { return true; }

/* A step as it is staged. Of reals it is a power's: the rounding of step log2(e) is another one for each
 * token, where that of A log2(e) would be one error in all decays. */
template <bool PAIRS, typename real> __device__ __forceinline__ real staged(real step)
{
    return PAIRS ? step : step * (real)LOG2_E;
}

/* The decays of a step: exp(step A). NEAR: exponents may be near 0. */
template <bool FIXED, bool PAIRS, bool NEAR, typename real, int NUMBERS>
__device__ __forceinline__ void decays(const thread_numbers<real, NUMBERS> &own, real step,
                                       real (&a)[NUMBERS])
{
#pragma unroll
    for (int k = 0; k < NUMBERS; k += PAIRS ? 2 : 1) {
        if (FIXED) {
            a[k] = own.A[k];
            if (PAIRS) a[k + 1] = own.A[k + 1];
        } else if (PAIRS) {
            real cosine, sine;
            const real size = power_of_two_near(step * (real)LOG2_E, own.A[k]);
            cos_sin(step * own.A[k + 1], &cosine, &sine);
            a[k] = size * cosine;
            a[k + 1] = size * sine;
        } else {
            a[k] = NEAR ? power_of_two_near(step, own.A[k]) : power_of_two(step, own.A[k]);
        }
    }
}

/* The two parts of complex number k. */
template <typename real, int NUMBERS>
__device__ __forceinline__ real (&pair_of(real (&x)[NUMBERS], int k))[2]
{
    return *(real(*)[2])(x + k);
}
template <typename real, int NUMBERS>
__device__ __forceinline__ const real (&pair_of(const real (&x)[NUMBERS], int k))[2]
{
    return *(const real(*)[2])(x + k);
}

template <bool PAIRS, typename real, int NUMBERS>
__device__ __forceinline__ void write(real (&h)[NUMBERS], const real (&a)[NUMBERS], real w,
                                      const real (&b)[NUMBERS])
{
#pragma unroll
    for (int k = 0; k < NUMBERS; k += PAIRS ? 2 : 1)
        if (PAIRS)
            scan_write_pair(pair_of(h, k), pair_of(a, k), w, pair_of(b, k));
        else
            h[k] = scan_write(h[k], a[k], w, b[k]);
}

template <bool PAIRS, typename real, int NUMBERS>
__device__ __forceinline__ real read(const real (&h)[NUMBERS], const real (&c)[NUMBERS])
{
    real sum = 0;
#pragma unroll
    for (int k = 0; k < NUMBERS; k += PAIRS ? 2 : 1)
        sum += PAIRS ? scan_read_pair(pair_of(h, k), pair_of(c, k)) : c[k] * h[k];
    return sum;
}

/* Back through a token: h is the gradient of the state after it, w that of y, and it becomes the gradient
 * of the state before. */
template <bool PAIRS, typename real, int NUMBERS>
__device__ __forceinline__ void go_back(real (&h)[NUMBERS], const real (&a)[NUMBERS], real w,
                                        const real (&c)[NUMBERS])
{
    const real none[2] = {};
    real unused[2];
#pragma unroll
    for (int k = 0; k < NUMBERS; k += PAIRS ? 2 : 1)
        if (PAIRS) {
            scan_read_pair_adjoint(w, none, pair_of(c, k), pair_of(h, k), unused);
            by_conjugate(pair_of(h, k), pair_of(a, k), pair_of(h, k));
        } else {
            h[k] = a[k] * (h[k] + w * c[k]);
        }
}

/* The sums over LANES threads of a group's tokens. Thread nl of a channel gets those of tokens
 * nl PER + k. */
template <int LANES> struct lane_sums {
    static constexpr int PER = LANES < GROUP ? GROUP / LANES : 1;

    template <typename real>
    static __device__ __forceinline__ void of(const real (&x)[GROUP], real (&to)[PER])
    {
        if constexpr (LANES == 2) {
            halve<4, 1>(x, to);
        } else if constexpr (LANES == 4) {
            real half[4];
            halve<4, 2>(x, half);
            halve<2, 1>(half, to);
        } else {
            real half[4], quarter[2];
            halve<4, 4>(x, half);
            halve<2, 2>(half, quarter);
            halve<1, 1>(quarter, to);
#pragma unroll
            for (int step = GROUP; step < LANES; step *= 2)
                to[0] += __shfl_xor_sync(~0u, to[0], step);
        }
    }
};

/* y <- (y + D u) silu(z), of this dtype */
template <typename real>
__device__ __forceinline__ real finished(const scan_call &c, la_dtype dtype, real y, real u, real D,
                                         real z)
{
    if (c.x[LA_SCAN_D].data) y += D * u;
    return c.x[LA_SCAN_Z].data ? y * silu_for(dtype, z) : y;
}

/* silu(z), by the sigmoid that its slope has too. */
template <typename real> __device__ __forceinline__ real silu_of_gate(real z)
{
    const real open = sigmoid(z);
    return open > 0 ? z * open : open;
}

/* delta <- softplus(delta + bias) */
template <typename real> __device__ __forceinline__ real step_of(const scan_call &c, real raw)
{
    return c.softplus ? softplus(raw) : raw;
}

/* ---- the dtype of arrays of tokens ----
 *
 * Kernels for common calls have it as a constant, GIVEN, and arrays that lie in fours. A branch on it for
 * each four numbers was a third of the instructions of a backward pass (docs/decisions/0039). */
static constexpr la_dtype ANY_DTYPE = (la_dtype)-1;

template <la_dtype GIVEN> __device__ __forceinline__ la_dtype dtype_of(const view &x)
{
    return GIVEN == ANY_DTYPE ? x.dtype : GIVEN;
}
template <la_dtype GIVEN> __device__ __forceinline__ bool in_fours(const scan_call &c)
{
    return GIVEN != ANY_DTYPE || c.fours;
}
template <la_dtype GIVEN> __device__ __forceinline__ bool rows_in_fours(const scan_call &c)
{
    return GIVEN != ANY_DTYPE || c.row_fours;
}

/* ---- places ---- */

/* A block's channels [d0,d1) of group g, the first of its numbers, and the rest of its index. */
struct scan_place {
    int g, panel, d0, d1, m0, block;
    int rest;
};

__device__ __forceinline__ scan_place place_of(const scan_call &c, int i, int channels, int numbers)
{
    scan_place p;
    const int of_group = c.room.D / c.G;
    p.block = i % c.blocks;
    i /= c.blocks;
    p.panel = i % c.panels;
    i /= c.panels;
    p.g = i % c.G;
    p.rest = i / c.G;
    p.d0 = p.g * of_group + p.panel * channels;
    p.d1 = min(p.d0 + channels, (p.g + 1) * of_group);
    p.m0 = p.block * numbers;
    return p;
}

/* Tokens of each piece of a sequence but the last: whole tiles of any kernel. */
enum { MOST_TILE = 32 };

__device__ __forceinline__ int tokens_of_piece(const scan_call &c, const sequence &s)
{
    return ((s.end - s.begin) / c.cuts + MOST_TILE) / MOST_TILE * MOST_TILE;
}

/* Number m of channel d of an array [D,N], or 0 past its ends. */
template <typename real>
__device__ __forceinline__ real shared_number(const view &x, int d, int m, bool there)
{
    return x.data && there ? load<real>(at(x, d, m), x.dtype) : 0;
}

template <bool FIXED, typename real, int NUMBERS>
__device__ __forceinline__ void load_numbers(const scan_call &c, int d, int m, bool there,
                                             thread_numbers<real, NUMBERS> &own)
{
#pragma unroll
    for (int k = 0; k < NUMBERS; k++) {
        const bool is = there && m + k < c.N;
        own.A[k] = shared_number<real>(c.x[LA_SCAN_A], d, m + k, is);
        own.b[k] = FIXED ? shared_number<real>(c.x[LA_SCAN_B0], d, m + k, is) : 0;
        own.c[k] = FIXED ? shared_number<real>(c.x[LA_SCAN_C0], d, m + k, is) : 0;
    }
}

template <typename real, int NUMBERS>
__device__ __forceinline__ void load_state(const view &x, int n, int d, int m, int N, bool there,
                                           real (&h)[NUMBERS])
{
#pragma unroll
    for (int k = 0; k < NUMBERS; k++)
        h[k] = x.data && there && m + k < N ? load<real>(at(x, n, d, m + k), x.dtype) : 0;
}

template <typename real, int NUMBERS>
__device__ __forceinline__ void store_state(const view &x, int n, int d, int m, int N, bool there,
                                            const real (&h)[NUMBERS])
{
#pragma unroll
    for (int k = 0; k < NUMBERS; k++)
        if (x.data && there && m + k < N) store(at(x, n, d, m + k), x.dtype, h[k]);
}

/* A thread's part of a tile of CHANNELS columns: a token, and WIDTH neighbouring channels. */
struct tile_task {
    int token, column, left; /* left: channels that there are */
    bool is;                 /* is there a task for this thread? */
};

template <int CHANNELS, int TOKENS, int WIDTH>
__device__ __forceinline__ tile_task task_of(const scan_call &c, int channels)
{
    constexpr int PARTS = CHANNELS / WIDTH;
    static_assert(WIDTH <= FOUR && TOKENS * PARTS <= SCAN_THREADS, "a thread has one task");
    const int t = (int)threadIdx.x;
    tile_task own;
    if (c.along) {
        own.token = t % TOKENS;
        own.column = t / TOKENS * WIDTH;
    } else {
        own.token = t / PARTS;
        own.column = t % PARTS * WIDTH;
    }
    own.is = own.token < TOKENS && own.column < CHANNELS;
    own.left = own.is ? max(0, min(WIDTH, channels - own.column)) : 0;
    return own;
}

/* A thread's place in an array of tokens: that of its task in a tile, which goes on tile by tile. */
template <la_dtype GIVEN> struct cursor {
    char *at;

    __device__ __forceinline__ void set(const view &x, int b, int t, int d)
    {
        at = x.data ? ::at(x, b, t, d) : NULL;
    }
    __device__ __forceinline__ void go(const view &x, int tokens)
    {
        at += tokens * x.stride[1] * la_size_of(dtype_of<GIVEN>(x));
    }
    /* WIDTH channels, of which `left` are there. */
    template <int WIDTH, typename real>
    __device__ __forceinline__ void load(const scan_call &c, const view &x, int left,
                                         bits4<real> &to) const
    {
        if (x.data)
            load_bits(to, at, dtype_of<GIVEN>(x), x.stride[2], left,
                      WIDTH == FOUR && in_fours<GIVEN>(c));
    }
    template <int WIDTH, typename real>
    __device__ __forceinline__ void store(const scan_call &c, const view &x, int left,
                                          const real (&from)[FOUR]) const
    {
        store_four(at, dtype_of<GIVEN>(x), x.stride[2], left, WIDTH == FOUR && in_fours<GIVEN>(c),
                   from);
    }
};

template <typename real>
__device__ __forceinline__ void load_per_channel(const view &x, int d, int left, real (&to)[FOUR])
{
#pragma unroll
    for (int e = 0; e < FOUR; e++)
        to[e] = x.data && e < left ? load<real>(at(x, d + e), x.dtype) : 0;
}

/* Rows of B and C: a thread has four numbers of a token at a time, and EACH tasks of a tile. In shared
 * memory each thread of a channel has its b, and then its c. */
template <typename real, int LANES, int NUMBERS, int TOKENS, la_dtype GIVEN> struct row_fetch {
    static constexpr int FOURS = LANES * NUMBERS / FOUR; /* of B, and of C */
    static constexpr int EACH = (TOKENS * 2 * FOURS + SCAN_THREADS - 1) / SCAN_THREADS;
    struct __align__(16) row {
        real x[LANES][2 * NUMBERS];
    };
    bits4<real> bits[EACH];
    const char *at[EACH];

    static __device__ __forceinline__ int token(int k)
    {
        return ((int)threadIdx.x + k * SCAN_THREADS) / (2 * FOURS);
    }
    static __device__ __forceinline__ int part(int k)
    {
        return ((int)threadIdx.x + k * SCAN_THREADS) % (2 * FOURS);
    }
    static __device__ __forceinline__ const view &array(const scan_call &c, int k)
    {
        return c.x[part(k) % 2 ? LA_SCAN_C : LA_SCAN_B];
    }
    __device__ __forceinline__ void set(const scan_call &c, const scan_place &p, int b, int t)
    {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            at[k] = ::at(array(c, k), b, t + token(k), p.g, p.m0 + part(k) / 2 * FOUR);
    }
    __device__ __forceinline__ void go(const scan_call &c, int tokens)
    {
#pragma unroll
        for (int k = 0; k < EACH; k++)
            at[k] += tokens * array(c, k).stride[1] * la_size_of(dtype_of<GIVEN>(array(c, k)));
    }
    __device__ __forceinline__ void start(const scan_call &c, const scan_place &p, int count)
    {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            const view &x = array(c, k);
            const int left = token(k) < count ? min(FOUR, c.N - p.m0 - part(k) / 2 * FOUR) : 0;
            load_bits(bits[k], at[k], dtype_of<GIVEN>(x), x.stride[3], left,
                      rows_in_fours<GIVEN>(c));
        }
    }
    __device__ __forceinline__ void stage(const scan_call &c, row *rows) const
    {
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            real x[FOUR];
            if (token(k) >= TOKENS) break;
            numbers_of(bits[k], dtype_of<GIVEN>(c.x[LA_SCAN_B]), x);
            const int m = part(k) / 2 * FOUR, which = part(k) % 2 * NUMBERS;
            real(&to)[LANES][2 * NUMBERS] = rows[token(k)].x;
            if constexpr (NUMBERS == 2) {
                *(two<real> *)(to[m / 2] + which) = {x[0], x[1]};
                *(two<real> *)(to[m / 2 + 1] + which) = {x[2], x[3]};
            } else {
                *(four<real> *)(to[m / NUMBERS] + which + m % NUMBERS) = {x[0], x[1], x[2], x[3]};
            }
        }
    }
};

/* NUMBERS neighbours in shared memory. */
template <int NUMBERS, typename real>
__device__ __forceinline__ void copy_numbers(const real *from, real (&to)[NUMBERS])
{
    if constexpr (NUMBERS == 2) {
        const two<real> x = *(const two<real> *)from;
        to[0] = x.x, to[1] = x.y;
    } else {
#pragma unroll
        for (int k = 0; k < NUMBERS; k += FOUR) {
            const four<real> x = *(const four<real> *)(from + k);
            to[k] = x.x, to[k + 1] = x.y, to[k + 2] = x.z, to[k + 3] = x.w;
        }
    }
}

#endif
