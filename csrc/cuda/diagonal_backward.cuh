/* Diagonal scans on a GPU: the adjoint. A block goes back through the tiles of its sequences, or of a piece
 * of one. Of each tile it takes LOOP sets of channels one after another: it makes their states once more from the one that was
 * kept, and goes back through them. The sums over channels, dB and dC, stay in registers meanwhile. */
#ifndef LINATTN_CUDA_DIAGONAL_BACKWARD_CUH
#define LINATTN_CUDA_DIAGONAL_BACKWARD_CUH

#include "diagonal.cuh"

#include <cuda_pipeline_primitives.h>

/* A token of a channel, as the adjoint sees it. dy is the gradient of the sum over numbers; `gate` is
 * that of z but for the factor y + D u; slope is that of softplus. */
template <typename real> struct token_values {
    real u, step, dy, slope, gate;
};

template <bool FIXED, typename real>
__device__ __forceinline__ token_values<real> values_of(const scan_call &c, real u, real raw,
                                                        real dy, real z)
{
    token_values<real> x = {u, 1, dy, 1, 0};
    if (FIXED) return x;
    x.step = step_of(c, raw);
    if (c.softplus) x.slope = sigmoid(raw);
    if (!c.x[LA_SCAN_Z].data) return x;
    x.gate = dy * silu_slope(z); /* was y = (y + D u) silu(z) */
    x.dy = dy * silu_of_gate(z);
    return x;
}

/* The gradients of a token. `dw`, `dlog` and `y` are sums over numbers: dh b, the gradients of the
 * exponents times A, c h. */
template <typename real> struct token_gradients {
    real du, ddelta, dz;
};

template <typename real>
__device__ __forceinline__ token_gradients<real> gradients_of(const token_values<real> &x, real D,
                                                              real dw, real dlog, real y)
{
    token_gradients<real> g;
    g.du = x.step * dw + D * x.dy; /* was w = step u */
    g.ddelta = (dlog + x.u * dw) * x.slope;
    g.dz = x.gate * (y + D * x.u);
    return g;
}

/* The sequences of a part. */
__device__ __forceinline__ int first_of_part(const scan_call &c, int part)
{
    return (int)((int64_t)part * c.room.S / c.parts);
}

/* The gradients of {b, b, c, c} of a token, summed over the channels of a warp, to `to`: [4][LANES]. */
template <int LANES, typename real>
__device__ __forceinline__ void store_rows(const real (&x)[4], real *to)
{
    static_assert(LANES == 8 || LANES == 32, "a warp has four channels, or one");
    const int lane = (int)threadIdx.x % 32, nl = lane % LANES;
    if constexpr (LANES == 32) {
#pragma unroll
        for (int k = 0; k < 4; k++) to[k * LANES + nl] = x[k];
    } else {
        real half[2], one[1];
        halve<2, 8>(x, half);
        halve<1, 16>(half, one);
        to[((lane & 8 ? 2 : 0) + (lane & 16 ? 1 : 0)) * LANES + nl] = one[0];
    }
}

/* A tile has GROUP tokens, and a block LOOP sets of channels. */
template <typename real, bool FIXED, bool PAIRS, int LANES, int LOOP, la_dtype GIVEN>
struct scan_backward {
    static constexpr int SET = SCAN_THREADS / LANES, CHANNELS = LOOP * SET;
    /* Channels of a task: all threads have one. */
    static constexpr int TASKS = GROUP * CHANNELS,
                         WIDTH = TASKS < SCAN_THREADS ? 1 : TASKS / SCAN_THREADS;
    static constexpr int WARPS = SCAN_THREADS / 32, ROW = 4 * LANES, SUMS = FIXED ? 3 : 1;
    static_assert(LANES >= GROUP, "a thread has the sums of one token of a group");
    static_assert(2 * CHANNELS <= SCAN_THREADS, "a thread adds up one of D and the bias");
    typedef row_fetch<real, LANES, 2, GROUP, GIVEN> row_fetcher;
    typedef typename row_fetcher::row row;

    struct memory {
        four<real> steps[GROUP][CHANNELS]; /* the staged step, what is written times b, dy, u */
        row rows[FIXED ? 1 : GROUP];
        real later[3][GROUP][CHANNELS]; /* the step, slope, gate */
        /* sums over numbers: dw, dlog and y; then dy u and ddelta */
        real sums[3][GROUP][CHANNELS + FOUR];
        real rows_of[FIXED ? 1 : WARPS][GROUP][ROW]; /* dB and dC of a warp's channels */
        /* a thread's own, for each set of channels */
        two<real> kept[2][LOOP][SCAN_THREADS]; /* states before a tile, of two tiles by turns */
        two<double> totals[SUMS][LOOP][SCAN_THREADS]; /* dA; of FIXED dB and dC too */
        two<real> dh[LOOP][SCAN_THREADS];
        two<real> numbers[SUMS][LOOP][SCAN_THREADS]; /* A; of FIXED B and C too */
    };

    const scan_call &c;
    memory &on_chip;
    scan_place p;
    sequence s;
    tile_task own;
    int nl, ch, thread, m;
    bool gated, summed;
    int64_t tokens;
    double of_channel; /* dD or dbias of a channel */
    real dh[2], bias[FOUR], D[FOUR], of_rows_sum[GROUP][4];
    thread_numbers<real, 2> numbers;
    bits4<real> u, delta, z, dy;
    cursor<GIVEN> of_u, of_delta, of_z, of_dy, to_u, to_delta, to_z;
    row_fetcher of_rows;

    __device__ __forceinline__ scan_backward(const scan_call &call, memory &shared)
        : c(call), on_chip(shared)
    {
        thread = (int)threadIdx.x;
        nl = thread % LANES;
        ch = thread / LANES;
        p = place_of(c, (int)blockIdx.x, CHANNELS, 2 * LANES);
        m = p.m0 + 2 * nl;
        own = task_of<CHANNELS, GROUP, WIDTH>(c, p.d1 - p.d0);
        gated = !FIXED && c.x[LA_SCAN_Z].data;
        summed = (c.dD || c.dbias) && c.blocks == 1;
        tokens = (int64_t)c.room.B * c.room.T;
        of_channel = 0;
    }

    /* The thread's channel in set j. */
    __device__ __forceinline__ int channel(int j) const { return p.d0 + j * SET + ch; }

    __device__ __forceinline__ void begin()
    {
        load_per_channel(c.x[LA_SCAN_BIAS], p.d0 + own.column, own.left, bias);
        load_per_channel(c.x[LA_SCAN_D], p.d0 + own.column, own.left, D);
        for (int j = 0; j < LOOP; j++) {
            load_numbers<FIXED>(c, channel(j), m, channel(j) < p.d1, numbers);
            const real(*const known[3])[2] = {&numbers.A, &numbers.b, &numbers.c};
            for (int k = 0; k < SUMS; k++)
                on_chip.numbers[k][j][thread] = {(*known[k])[0], (*known[k])[1]};
            for (int k = 0; k < SUMS; k++) on_chip.totals[k][j][thread] = {0, 0};
        }
    }

    /* ---- from memory, and back ---- */

    __device__ __forceinline__ void set(int t)
    {
        const int token = t + own.token, d = p.d0 + own.column;
        of_u.set(c.x[LA_SCAN_U], s.b, token, d);
        of_dy.set(c.d[LA_SCAN_Y], s.b, token, d);
        to_u.set(c.d[LA_SCAN_U], s.b, token, d);
        if (FIXED) return;
        of_delta.set(c.x[LA_SCAN_DELTA], s.b, token, d);
        of_z.set(c.x[LA_SCAN_Z], s.b, token, d);
        to_delta.set(c.d[LA_SCAN_DELTA], s.b, token, d);
        to_z.set(c.d[LA_SCAN_Z], s.b, token, d);
        of_rows.set(c, p, s.b, t);
    }
    /* Begin to fetch a tile of `count` tokens, whose states are kept at `place`; then the one before. */
    __device__ __forceinline__ void start(int64_t place, int buffer, int count)
    {
        const int there = own.token < count ? own.left : 0;
        of_u.template load<WIDTH>(c, c.x[LA_SCAN_U], there, u);
        of_dy.template load<WIDTH>(c, c.d[LA_SCAN_Y], there, dy);
        of_u.go(c.x[LA_SCAN_U], -GROUP);
        of_dy.go(c.d[LA_SCAN_Y], -GROUP);
#pragma unroll
        for (int j = 0; j < LOOP; j++) {
            const real *const from =
                (const real *)c.kept + (place * c.room.D + channel(j)) * c.numbers + m;
            two<real> *const to = &on_chip.kept[buffer][j][thread];
            if (channel(j) < p.d1)
                __pipeline_memcpy_async(to, from, sizeof *to);
            else
                *to = {0, 0};
        }
        __pipeline_commit();
        if (FIXED) return;
        of_delta.template load<WIDTH>(c, c.x[LA_SCAN_DELTA], there, delta);
        of_z.template load<WIDTH>(c, c.x[LA_SCAN_Z], there, z);
        of_rows.start(c, p, count);
        of_delta.go(c.x[LA_SCAN_DELTA], -GROUP);
        of_z.go(c.x[LA_SCAN_Z], -GROUP);
        of_rows.go(c, -GROUP);
    }
    __device__ __forceinline__ void stage()
    {
        real us[FOUR], ds[FOUR] = {}, zs[FOUR] = {}, dys[FOUR];
        if (!FIXED) of_rows.stage(c, on_chip.rows);
        if (!own.is) return; /* channels that there are not are zeros */
        numbers_of(u, dtype_of<GIVEN>(c.x[LA_SCAN_U]), us);
        numbers_of(dy, dtype_of<GIVEN>(c.d[LA_SCAN_Y]), dys);
        if (!FIXED) numbers_of(delta, dtype_of<GIVEN>(c.x[LA_SCAN_DELTA]), ds);
        if (gated) numbers_of(z, dtype_of<GIVEN>(c.x[LA_SCAN_Z]), zs);
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const int k = own.column + e;
            const token_values<real> x = values_of<FIXED>(c, us[e], ds[e] + bias[e], dys[e], zs[e]);
            on_chip.steps[own.token][k] = {staged<PAIRS>(x.step), x.step * x.u, x.dy, x.u};
            on_chip.later[0][own.token][k] = x.step;
            on_chip.later[1][own.token][k] = x.slope;
            on_chip.later[2][own.token][k] = x.gate;
        }
    }

    /* ---- a tile of a set of channels ---- */

    __device__ __forceinline__ void take_numbers(int j)
    {
        real(*const known[3])[2] = {&numbers.A, &numbers.b, &numbers.c};
#pragma unroll
        for (int k = 0; k < SUMS; k++) {
            const two<real> x = on_chip.numbers[k][j][thread];
            (*known[k])[0] = x.x, (*known[k])[1] = x.y;
        }
    }

    /* Back through token i. `after` and `before` are states, and dh becomes the gradient of the second. */
    __device__ __forceinline__ void token(int i, int column, const real (&a)[2],
                                          const real (&before)[2], const real (&after)[2],
                                          real (&sum)[3][2], real &dw, real &dlog)
    {
        const four<real> step = on_chip.steps[i][column];
        real b[2], cs[2], da[2], db[2], dc[2], log[2];
        if (FIXED) {
            b[0] = numbers.b[0], b[1] = numbers.b[1], cs[0] = numbers.c[0], cs[1] = numbers.c[1];
        } else {
            real x[4];
            copy_numbers(on_chip.rows[FIXED ? 0 : i].x[nl], x);
            b[0] = x[0], b[1] = x[1], cs[0] = x[2], cs[1] = x[3];
        }
        if (PAIRS) {
            scan_read_pair_adjoint(step.z, after, cs, dh, dc);
            scan_write_pair_adjoint(dh, before, a, step.y, b, da, &dw, db);
            by_conjugate(da, a, log);
        } else {
            dw = 0;
#pragma unroll
            for (int k = 0; k < 2; k++) { /* was y = sum of c h' */
                real one;
                dc[k] = step.z * after[k];
                dh[k] = scan_write_adjoint(dh[k] + step.z * cs[k], before[k], a[k], step.y, b[k],
                                           &da[k], &one, &db[k]);
                dw += one;
                log[k] = da[k] * a[k];
            }
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (FIXED) {
                sum[0][k] += da[k];
                sum[1][k] += db[k];
                sum[2][k] += dc[k];
            } else { /* was a = exp(step A); a staged step's factor comes last */
                sum[0][k] += step.x * log[k];
                dlog += log[k] * numbers.A[k];
                of_rows_sum[i][k] += db[k];
                of_rows_sum[i][2 + k] += dc[k];
            }
        }
    }

    /* The states of a tile's tokens once more, and back through them. */
    template <bool WHOLE> __device__ __forceinline__ void back(int buffer, int j, int count)
    {
        const int column = j * SET + ch;
        const two<real> kept = on_chip.kept[buffer][j][thread], later = on_chip.dh[j][thread];
        real states[GROUP + 1][2], a[GROUP][2], sum[3][2] = {}, of[GROUP], one[1];
        states[0][0] = kept.x, states[0][1] = kept.y;
        dh[0] = later.x, dh[1] = later.y;
        take_numbers(j);
#pragma unroll
        for (int i = 0; i < GROUP; i++) {
            real(&h)[2] = states[i + 1];
            h[0] = states[i][0], h[1] = states[i][1];
            of[i] = 0;
            if (!WHOLE && i >= count) continue;
            const two<real> step = *(const two<real> *)&on_chip.steps[i][column];
            real b[2];
            const real *const of_token = on_chip.rows[FIXED ? 0 : i].x[nl];
            if (!FIXED) copy_numbers(of_token, b);
            decays<FIXED, PAIRS, true>(numbers, step.x, a[i]);
            write<PAIRS>(h, a[i], step.y, FIXED ? numbers.b : b);
            if (!gated) continue;
            copy_numbers(of_token + 2, b);
            of[i] = read<PAIRS>(h, b);
        }
        one[0] = 0;
        if (gated) lane_sums<LANES>::of(of, one);
        if (nl < GROUP) on_chip.sums[2][nl][column] = one[0];
        real dlog[GROUP];
#pragma unroll
        for (int i = GROUP - 1; i >= 0; i--) {
            of[i] = dlog[i] = 0;
            if (WHOLE || i < count)
                token(i, column, a[i], states[i], states[i + 1], sum, of[i], dlog[i]);
        }
        lane_sums<LANES>::of(of, one);
        if (nl < GROUP) on_chip.sums[0][nl][column] = one[0];
        if (!FIXED) lane_sums<LANES>::of(dlog, one);
        if (nl < GROUP) on_chip.sums[1][nl][column] = FIXED ? 0 : one[0];
#pragma unroll
        for (int k = 0; k < SUMS; k++) {
            two<double> &total = on_chip.totals[k][j][thread];
            total = {total.x + (double)sum[k][0], total.y + (double)sum[k][1]};
        }
        on_chip.dh[j][thread] = {dh[0], dh[1]};
    }

    template <bool WHOLE> __device__ __forceinline__ void back_through_sets(int buffer, int count)
    {
#pragma unroll
        for (int i = 0; i < GROUP; i++)
#pragma unroll
            for (int k = 0; k < 4; k++) of_rows_sum[i][k] = 0;
#pragma unroll 1
        for (int j = 0; j < LOOP; j++) back<WHOLE>(buffer, j, count);
        if constexpr (!FIXED) {
#pragma unroll
            for (int i = 0; i < GROUP; i++)
                store_rows<LANES>(of_rows_sum[i], on_chip.rows_of[thread / 32][i]);
        }
    }

    /* The gradients of the tile of token t. */
    __device__ __forceinline__ void finish(int t, int count)
    {
        real du[FOUR], ddelta[FOUR], dz[FOUR];
        const int i = own.token;
        if (!own.is) return;
        if (c.blocks > 1) {
            const int64_t token = (int64_t)s.b * c.room.T + t + i;
            for (int k = 0; k < 3 && i < count; k++)
                for (int e = 0; e < own.left; e++)
                    ((real *)c.sums)[((k * c.blocks + p.block) * tokens + token) * c.room.D + p.d0 +
                                     own.column + e] = on_chip.sums[k][i][own.column + e];
            return;
        }
#pragma unroll
        for (int e = 0; e < WIDTH; e++) {
            const int k = own.column + e;
            const four<real> step = on_chip.steps[i][k];
            const token_values<real> x = {step.w, on_chip.later[0][i][k], step.z,
                                          on_chip.later[1][i][k], on_chip.later[2][i][k]};
            const token_gradients<real> g = gradients_of(
                x, D[e], on_chip.sums[0][i][k], on_chip.sums[1][i][k], on_chip.sums[2][i][k]);
            du[e] = g.du, ddelta[e] = g.ddelta, dz[e] = g.dz;
            if (!summed) continue;
            on_chip.sums[0][i][k] = i < count && e < own.left ? x.dy * x.u : 0;
            on_chip.sums[1][i][k] = i < count && e < own.left ? g.ddelta : 0;
        }
        if (i < count) {
            to_u.template store<WIDTH>(c, c.d[LA_SCAN_U], own.left, du);
            if (!FIXED) to_delta.template store<WIDTH>(c, c.d[LA_SCAN_DELTA], own.left, ddelta);
            if (gated) to_z.template store<WIDTH>(c, c.d[LA_SCAN_Z], own.left, dz);
        }
    }

    __device__ __forceinline__ void sum_channels()
    {
        if (thread >= 2 * CHANNELS) return;
        real sum = 0;
#pragma unroll
        for (int i = 0; i < GROUP; i++)
            sum += on_chip.sums[thread / CHANNELS][i][thread % CHANNELS];
        of_channel += (double)sum;
    }

    /* dB and dC of a tile: the sums over the block's warps, to the panel's place. */
    __device__ __forceinline__ void add_rows(int t, int count)
    {
        for (int i = thread; i < count * ROW; i += SCAN_THREADS) {
            const int token = i / ROW, which = i % ROW / (2 * LANES), k = i % (2 * LANES);
            real sum = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++)
                sum +=
                    on_chip.rows_of[FIXED ? 0 : warp][token][(2 * which + k % 2) * LANES + k / 2];
            const int64_t at_token = p.panel * tokens + (int64_t)s.b * c.room.T + t + token;
            ((real *)(which ? c.dC : c.dB))[(at_token * c.G + p.g) * c.numbers + p.m0 + k] = sum;
        }
    }

    /* ---- all of it ---- */

    /* The gradient of the state after piece `cut` of the sequence, which ends at `last`. */
    __device__ __forceinline__ void load_later(int n, int cut, int last, int j)
    {
        const bool is = channel(j) < p.d1;
        if (last == s.end) {
            load_state(c.d[LA_SCAN_ST], n, channel(j), m, c.N, is, dh);
            return;
        }
        const int64_t row = (int64_t)n * c.cuts + cut;
        const real *const from =
            (const real *)c.later + (row * c.room.D + channel(j)) * c.numbers + m;
        dh[0] = is ? from[0] : 0, dh[1] = is ? from[1] : 0;
    }

    /* Piece `cut` of sequence n, or all of it. */
    __device__ __forceinline__ void run_sequence(int n, int cut)
    {
        s = sequence_of(c.room, n);
        const int piece = c.cuts == 1 ? s.end - s.begin : tokens_of_piece(c, s);
        const int first = min(s.begin + cut * piece, s.end), last = min(first + piece, s.end);
        if (cut && first == last) return; /* a short sequence has fewer pieces */
        const int tiles = (last - first + GROUP - 1) / GROUP;
        const int64_t place = first_place(c.room, n, GROUP) + (first - s.begin) / GROUP;
        for (int j = 0; j < LOOP; j++) {
            load_later(n, cut, last, j);
            on_chip.dh[j][thread] = {dh[0], dh[1]};
        }
        set(first + (tiles - 1) * GROUP);
        if (tiles) start(place + tiles - 1, (tiles - 1) % 2, last - first - (tiles - 1) * GROUP);
        for (int k = tiles - 1; k >= 0; k--) {
            const int t = first + k * GROUP, count = min((int)GROUP, last - t);
            stage();
            __pipeline_wait_prior(0);
            __syncthreads();
            if (k) start(place + k - 1, (k - 1) % 2, GROUP);
            if (count == GROUP)
                back_through_sets<true>(k % 2, count);
            else
                back_through_sets<false>(k % 2, count);
            __syncthreads();
            if (!FIXED) add_rows(t, count);
            finish(t, count);
            to_u.go(c.d[LA_SCAN_U], -GROUP);
            if (!FIXED) to_delta.go(c.d[LA_SCAN_DELTA], -GROUP);
            if (!FIXED) to_z.go(c.d[LA_SCAN_Z], -GROUP);
            if (!summed) continue;
            __syncthreads();
            sum_channels();
        }
        if (cut) return;
        for (int j = 0; j < LOOP; j++) {
            dh[0] = on_chip.dh[j][thread].x, dh[1] = on_chip.dh[j][thread].y;
            store_state(c.d[LA_SCAN_S0], n, channel(j), m, c.N, channel(j) < p.d1, dh);
        }
    }

    __device__ __forceinline__ void end()
    {
        double *const to[3] = {c.dA, c.dB0, c.dC0};
        const int64_t row = (int64_t)p.rest * c.room.D;
        for (int j = 0; j < LOOP; j++)
            for (int k = 0; k < SUMS; k++) {
                two<double> total = on_chip.totals[k][j][thread];
                if (!FIXED && !PAIRS)
                    total = {total.x / LOG2_E, total.y / LOG2_E}; /* staged steps */
                const int64_t number = (row + channel(j)) * c.N + m;
                if (!to[k] || channel(j) >= p.d1) continue;
                if (m < c.N) to[k][number] = total.x;
                if (m + 1 < c.N) to[k][number + 1] = total.y;
            }
        double *const sums = thread < CHANNELS ? c.dD : c.dbias;
        const int d = p.d0 + thread % CHANNELS;
        if (thread < 2 * CHANNELS && d < p.d1 && sums && c.blocks == 1) sums[row + d] = of_channel;
    }
};

template <typename real, bool FIXED, bool PAIRS, int LANES, int LOOP, la_dtype GIVEN>
static __global__
__launch_bounds__(SCAN_THREADS,
                  sizeof(real) == 8 ? 1 : 3) void scan_adjoint(const __grid_constant__ scan_call c)
{
    typedef scan_backward<real, FIXED, PAIRS, LANES, LOOP, GIVEN> pass;
    extern __shared__ __align__(16) char shared[];
    pass scan(c, *(typename pass::memory *)shared);
    scan.begin();
    const int part = scan.p.rest;
    if (c.cuts > 1)
        scan.run_sequence(part / c.cuts, part % c.cuts);
    else
        for (int n = first_of_part(c, part); n < first_of_part(c, part + 1); n++)
            scan.run_sequence(n, 0);
    scan.end();
}

/* The end of the adjoint where blocks share a channel's numbers. A thread has a channel of a part. */
template <typename real, bool FIXED>
static __global__
__launch_bounds__(SCAN_THREADS) void finish_adjoint(const __grid_constant__ scan_call c)
{
    const int64_t tokens = (int64_t)c.room.B * c.room.T;
    const int64_t i = (int64_t)blockIdx.x * SCAN_THREADS + threadIdx.x;
    const int d = (int)(i % c.room.D), part = (int)(i / c.room.D);
    if (part >= c.parts) return;
    double of_D = 0, of_bias = 0;
    const auto number = [&](const view &x, int b, int t) {
        return x.data ? load<real>(at(x, b, t, d), x.dtype) : 0;
    };
    const auto put = [&](const view &x, int b, int t, real value) {
        if (x.data) store(at(x, b, t, d), x.dtype, value);
    };
    const view &bias = c.x[LA_SCAN_BIAS], &Ds = c.x[LA_SCAN_D];
    const real own_bias = bias.data ? load<real>(at(bias, d), bias.dtype) : 0;
    const real D = Ds.data ? load<real>(at(Ds, d), Ds.dtype) : 0;
    for (int n = first_of_part(c, part); n < first_of_part(c, part + 1); n++) {
        const sequence s = sequence_of(c.room, n);
        for (int t = s.begin; t < s.end; t++) {
            const int64_t token = ((int64_t)s.b * c.room.T + t) * c.room.D + d;
            real sum[3] = {};
            for (int k = 0; k < 3; k++)
                for (int block = 0; block < c.blocks; block++)
                    sum[k] +=
                        ((const real *)c.sums)[(k * c.blocks + block) * tokens * c.room.D + token];
            const token_values<real> x = values_of<FIXED>(
                c, number(c.x[LA_SCAN_U], s.b, t), number(c.x[LA_SCAN_DELTA], s.b, t) + own_bias,
                number(c.d[LA_SCAN_Y], s.b, t), number(c.x[LA_SCAN_Z], s.b, t));
            const token_gradients<real> g = gradients_of(x, D, sum[0], sum[1], sum[2]);
            put(c.d[LA_SCAN_U], s.b, t, g.du);
            put(c.d[LA_SCAN_DELTA], s.b, t, g.ddelta);
            put(c.d[LA_SCAN_Z], s.b, t, g.dz);
            of_D += (double)(x.dy * x.u);
            of_bias += (double)g.ddelta;
        }
    }
    if (c.dD) c.dD[i] = of_D;
    if (c.dbias) c.dbias[i] = of_bias;
}

/* dB or dC: the panels of each group, in order. A thread has a number of a token. */
template <typename real>
static __global__ __launch_bounds__(256) void add_panels(const __grid_constant__ scan_call c)
{
    const int64_t row = (int64_t)c.G * c.N, tokens = (int64_t)c.room.B * c.room.T;
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= 2 * tokens * row) return;
    const bool is_C = i >= tokens * row;
    const int64_t token = i / row % tokens;
    const int g = (int)(i % row / c.N), m = (int)(i % c.N);
    const real *from = (const real *)(is_C ? c.dC : c.dB) + (token * c.G + g) * c.numbers + m;
    const view &to = c.d[is_C ? LA_SCAN_C : LA_SCAN_B];
    real sum = 0;
    for (int panel = 0; panel < c.panels; panel++) sum += from[panel * tokens * c.G * c.numbers];
    store(at(to, token / c.room.T, token % c.room.T, g, m), to.dtype, sum);
}

#endif
