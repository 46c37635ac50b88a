/* GATED scans on a GPU: h = exp(g) h + u, and y = h.
 *
 * A block has 32 channels, a lane each, and goes down the tokens a tile at a time. Its warps share a
 * tile's tokens: each makes of its RUN tokens one, h <- product h + write, and goes through the earlier
 * warps' to its own first state. The adjoint is the same scan in reverse. */
#ifndef LINATTN_CUDA_DIAGONAL_GATED_CUH
#define LINATTN_CUDA_DIAGONAL_GATED_CUH

#include "diagonal.cuh"

enum { GATED_WARPS = 8, RUN = 8, GATED_TILE = GATED_WARPS * RUN };

template <typename real> struct gated_scan {
    /* {product, write} of each warp's tokens, of two tiles by turns; a backward pass has two scans */
    struct memory {
        two<real> runs[2][2][GATED_WARPS][32];
    };
    const scan_call &c;
    memory &on_chip;
    int warp, lane, n, d;
    bool there;
    sequence s;

    __device__ __forceinline__ gated_scan(const scan_call &call, memory &shared)
        : c(call), on_chip(shared)
    {
        const int panels = (c.room.D + 31) / 32;
        warp = (int)threadIdx.x / 32;
        lane = (int)threadIdx.x % 32;
        n = (int)blockIdx.x / panels;
        d = (int)blockIdx.x % panels * 32 + lane;
        there = d < c.room.D;
        s = sequence_of(c.room, n);
    }

    /* The thread's tokens of a tile, as they lie in memory: nothing waits for them yet. Doubles that are
     * summed as floats become floats at once. */
    typedef typename std::conditional<sizeof(real) == 8, uint64_t, uint32_t>::type bits;

    template <typename stored>
    static __device__ __forceinline__ void fetch_stored(const char *from, int64_t step, int left,
                                                        bits (&to)[RUN])
    {
#pragma unroll
        for (int k = 0; k < RUN; k++) to[k] = k < left ? *(const stored *)(from + k * step) : 0;
    }
    /* Of the tile of token t. Tokens that there are not are zeros. A branch for each load would make it
     * wait for the one before. */
    __device__ __forceinline__ void fetch_tokens(const view &x, int t, bits (&to)[RUN]) const
    {
        const int first = t + warp * RUN, left = there ? s.end - first : 0;
        const int size = (int)la_size_of(x.dtype);
        const char *from = at(x, s.b, first, d);
        const int64_t step = x.stride[1] * size;
        if (size == 2)
            fetch_stored<uint16_t>(from, step, left, to);
        else if (size == 4)
            fetch_stored<uint32_t>(from, step, left, to);
        else if constexpr (sizeof(real) == 8)
            fetch_stored<uint64_t>(from, step, left, to);
        else
#pragma unroll
            for (int k = 0; k < RUN; k++)
                to[k] = k < left ? __float_as_uint((float)*(const double *)(from + k * step)) : 0;
    }
    static __device__ __forceinline__ void numbers_of(const bits (&from)[RUN], la_dtype dtype,
                                                      real (&to)[RUN])
    {
#pragma unroll
        for (int k = 0; k < RUN; k++)
            if constexpr (sizeof(real) == 8)
                to[k] = dtype == LA_F64 ? __longlong_as_double((long long)from[k])
                                        : number((uint32_t)from[k], dtype);
            else
                to[k] = number(from[k], dtype == LA_F64 ? LA_F32 : dtype);
    }
    __device__ __forceinline__ void store_tokens(const view &x, int t,
                                                 const real (&from)[RUN]) const
    {
        const int first = t + warp * RUN, left = there ? s.end - first : 0;
        char *const to = at(x, s.b, first, d);
        const int64_t step = x.stride[1] * la_size_of(x.dtype);
#pragma unroll
        for (int k = 0; k < RUN; k++)
            if (k < left) store(to + k * step, x.dtype, from[k]);
    }

    /* This warp's tokens as one, for the others to see after __syncthreads. A missing token has a = 1. */
    __device__ __forceinline__ void put(int scan, int buffer, real product, real write)
    {
        on_chip.runs[scan][buffer][warp][lane] = {product, write};
    }
    /* `h` goes through the runs of warps [first,last), in this order, or backwards. */
    __device__ __forceinline__ real through(int scan, int buffer, int first, int last, real h) const
    {
        for (int k = first; k < last; k++) {
            const two<real> run = on_chip.runs[scan][buffer][k][lane];
            h = run.x * h + run.y;
        }
        return h;
    }
    __device__ __forceinline__ real back_through(int scan, int buffer, int first, int last,
                                                 real h) const
    {
        for (int k = last - 1; k >= first; k--) {
            const two<real> run = on_chip.runs[scan][buffer][k][lane];
            h = run.x * h + run.y;
        }
        return h;
    }

    __device__ __forceinline__ real initial() const
    {
        const view &x = c.x[LA_SCAN_S0];
        return x.data && there ? load<real>(at(x, s.state, d), x.dtype) : 0;
    }
    /* g becomes the decay, and u what is written; of a call that has a factor of it, `factor` is that.
     * The run as one token: {product, write}. */
    __device__ __forceinline__ two<real> run_of(real (&u)[RUN], real (&g)[RUN],
                                                real (&factor)[RUN]) const
    {
        two<real> run = {1, 0};
#pragma unroll
        for (int k = 0; k < RUN; k++) {
            const real log = g[k];
            g[k] = power_of_two_near(log * (real)LOG2_E, (real)1);
            if (c.write) {
                factor[k] = scan_factor(g[k], -expm1(log), c.write);
                u[k] *= factor[k];
            }
            run = {g[k] * run.x, g[k] * run.y + u[k]};
        }
        return run;
    }

    /* READS: a forward pass or a step. Otherwise the states before each tile are kept; or in a call for
     * states alone the last one, and the map of the tokens. */
    template <bool READS> __device__ __forceinline__ void forward()
    {
        real h = initial(), u[RUN], g[RUN], factor[RUN];
        const view &last = c.x[c.room.step ? LA_SCAN_S0 : LA_SCAN_ST], &map = c.x[LA_SCAN_MT];
        double product = 1; /* of all decays */
        real *kept = (real *)c.kept + first_place(c.room, n, GATED_TILE) * c.room.D + d;
        int buffer = 0;
        if (s.state < 0) {
            const real zeros[RUN] = {};
            store_tokens(c.x[LA_SCAN_Y], 0, zeros);
            return;
        }
        bits next_u[RUN], next_g[RUN];
        fetch_tokens(c.x[LA_SCAN_U], s.begin, next_u);
        fetch_tokens(c.x[LA_SCAN_G], s.begin, next_g);
        for (int t = s.begin; t < s.end; t += GATED_TILE, buffer ^= 1) {
            if (!READS && warp == 0 && there && c.kept) *kept = h;
            kept += c.room.D;
            numbers_of(next_u, c.x[LA_SCAN_U].dtype, u);
            numbers_of(next_g, c.x[LA_SCAN_G].dtype, g);
            fetch_tokens(c.x[LA_SCAN_U], t + GATED_TILE, next_u); /* while this tile is worked on */
            fetch_tokens(c.x[LA_SCAN_G], t + GATED_TILE, next_g);
            const two<real> run = run_of(u, g, factor);
            put(0, buffer, run.x, run.y);
            __syncthreads();
            real own = through(0, buffer, 0, warp, h);
            h = through(0, buffer, warp, GATED_WARPS, own);
            if (!READS && map.data)
                for (int k = 0; k < GATED_WARPS; k++)
                    product *= (double)on_chip.runs[0][buffer][k][lane].x;
            if constexpr (READS) {
#pragma unroll
                for (int k = 0; k < RUN; k++) u[k] = own = g[k] * own + u[k];
                store_tokens(c.x[LA_SCAN_Y], t, u);
            }
        }
        if ((READS || c.alone) && warp == 0 && there && last.data)
            store(at(last, s.state, d), last.dtype, h);
        if (!READS && warp == 0 && there && map.data)
            store(at(map, n, d), map.dtype, (real)product);
    }

    __device__ __forceinline__ void backward()
    {
        const view &d_last = c.d[LA_SCAN_ST], &d_first = c.d[LA_SCAN_S0];
        real dh = d_last.data && there ? load<real>(at(d_last, n, d), d_last.dtype) : 0;
        const int tiles = (s.end - s.begin + GATED_TILE - 1) / GATED_TILE;
        const real *kept = (const real *)c.kept + first_place(c.room, n, GATED_TILE) * c.room.D + d;
        bits next_u[RUN] = {}, next_g[RUN], next_dy[RUN];
        real next_first = 0;
        const auto fetch = [&](int k) { /* a tile, while the one behind it is worked on */
            const int t = s.begin + k * GATED_TILE;
            if (k < 0) return;
            if (!c.alone) fetch_tokens(c.x[LA_SCAN_U], t, next_u);
            fetch_tokens(c.x[LA_SCAN_G], t, next_g);
            fetch_tokens(c.d[LA_SCAN_Y], t, next_dy);
            next_first = there && c.kept ? kept[(int64_t)k * c.room.D] : 0;
        };
        fetch(tiles - 1);
        for (int k = tiles - 1; k >= 0; k--) {
            const int t = s.begin + k * GATED_TILE, buffer = k % 2;
            real u[RUN], a[RUN], dy[RUN], before[RUN], factor[RUN], slope[RUN];
            const real first = next_first;
            numbers_of(next_u, c.x[LA_SCAN_U].dtype, u);
            numbers_of(next_g, c.x[LA_SCAN_G].dtype, a);
            numbers_of(next_dy, c.d[LA_SCAN_Y].dtype, dy);
            fetch(k - 1);
#pragma unroll
            for (int i = 0; i < RUN; i++) slope[i] = u[i];
            const two<real> run = run_of(u, a, factor);
            if (c.write)
#pragma unroll
                for (int i = 0; i < RUN; i++)
                    slope[i] *= scan_factor_slope(a[i], factor[i], c.write);
            put(0, buffer, run.x, run.y);
            /* was h' = a h + u, y = h': dh <- a (dh + dy), backwards */
            real write = 0;
#pragma unroll
            for (int i = RUN - 1; i >= 0; i--) write = a[i] * (write + dy[i]);
            put(1, buffer, run.x, write);
            __syncthreads();
            real own = through(0, buffer, 0, warp, first);
#pragma unroll
            for (int i = 0; i < RUN; i++) {
                before[i] = own;
                own = a[i] * own + u[i];
            }
            real later = back_through(1, buffer, warp + 1, GATED_WARPS, dh);
            dh = back_through(1, buffer, 0, warp + 1, later);
            if (c.alone) continue;
#pragma unroll
            for (int i = RUN - 1; i >= 0; i--) {
                u[i] = later + dy[i];            /* du */
                dy[i] = u[i] * before[i] * a[i]; /* dg, as a = exp(g) */
                later = u[i] * a[i];
                if (!c.write) continue;
                dy[i] += u[i] * slope[i]; /* was w = factor u */
                u[i] *= factor[i];
            }
            store_tokens(c.d[LA_SCAN_U], t, u);
            store_tokens(c.d[LA_SCAN_G], t, dy);
        }
        if (warp == 0 && there && d_first.data) store(at(d_first, n, d), d_first.dtype, dh);
    }
};

/* Blocks on a processor: of doubles one has the registers that they need. */
template <typename real> constexpr int blocks_of_gated(int of_floats)
{
    return sizeof(real) == 8 ? 1 : of_floats;
}

template <typename real, bool READS>
static __global__ __launch_bounds__(GATED_WARPS * 32, blocks_of_gated<real>(READS ? 4 : 2)) void
gated_tokens(const __grid_constant__ scan_call c)
{
    __shared__ typename gated_scan<real>::memory shared;
    gated_scan<real> scan(c, shared);
    scan.template forward<READS>();
}

template <typename real>
static __global__ __launch_bounds__(GATED_WARPS * 32, blocks_of_gated<real>(2)) void gated_adjoint(
    const __grid_constant__ scan_call c)
{
    __shared__ typename gated_scan<real>::memory shared;
    gated_scan<real> scan(c, shared);
    scan.backward();
}

#endif
