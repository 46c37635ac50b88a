/* Diagonal scans on a GPU: forward passes, steps, and the states that a backward pass starts from, forwards
 * and backwards. */
#ifndef LINATTN_CUDA_DIAGONAL_FORWARD_CUH
#define LINATTN_CUDA_DIAGONAL_FORWARD_CUH

#include "diagonal.cuh"

/* READ: a forward pass or a step. KEEP: the states before each tile of the adjoint are kept. LATER: the
 * gradient of the state goes back through the tokens, and is kept after each piece of the sequence. A
 * call for states alone keeps none. It stores the last one, and of KEEP the map of the tokens. */
enum scan_work { READ, KEEP, LATER };

template <typename real, bool FIXED, bool PAIRS, int LANES, int NUMBERS, scan_work WORK,
          la_dtype GIVEN>
struct scan_forward {
    static constexpr bool READS = WORK == READ, BACK = WORK == LATER;
    static constexpr int CHANNELS = SCAN_THREADS / LANES;
    /* Each thread stages four channels of a token; a double of 64 numbers needs the memory of two. */
    static constexpr int MOST = sizeof(real) == 8 ? MOST_TILE / 2 : MOST_TILE;
    static constexpr int EACH = SCAN_THREADS * FOUR / CHANNELS;
    static constexpr int TILE = EACH < MOST ? EACH : MOST;
    static constexpr int PER = lane_sums<LANES>::PER;
    static constexpr bool TWO_WAYS = !FIXED && !PAIRS && sizeof(real) == 4;
    typedef row_fetch<real, LANES, NUMBERS, TILE, GIVEN> row_fetcher;
    typedef typename row_fetcher::row row;

    struct memory {
        /* the staged step, and what is written times b, or the gradient of what is read by c */
        two<real> steps[2][TILE][CHANNELS];
        row rows[FIXED ? 1 : 2][FIXED ? 1 : TILE];
        real reads[READS ? 2 : 1][READS ? TILE : 1][CHANNELS + FOUR];
    };

    const scan_call &c;
    memory &on_chip;
    scan_place p;
    sequence s;
    tile_task own;
    int nl, ch, d, m, first; /* first: channel of the task */
    bool there;
    real h[NUMBERS], bias[FOUR], D[FOUR], least_rate;
    double passed; /* the sum of the steps, for the map of the tokens */
    thread_numbers<real, NUMBERS> numbers;
    bits4<real> u, delta, z, past_u, past_z;
    cursor<GIVEN> of_u, of_delta, of_z, of_y;
    row_fetcher of_rows;

    __device__ __forceinline__ scan_forward(const scan_call &call, memory &shared, int block)
        : c(call), on_chip(shared)
    {
        nl = (int)threadIdx.x % LANES;
        ch = (int)threadIdx.x / LANES;
        p = place_of(c, block, CHANNELS, LANES * NUMBERS);
        s = sequence_of(c.room, p.rest);
        own = task_of<CHANNELS, TILE, FOUR>(c, p.d1 - p.d0);
        d = p.d0 + ch;
        m = p.m0 + NUMBERS * nl;
        first = p.d0 + own.column;
        there = d < p.d1;
    }

    /* u, or the gradient of y */
    __device__ __forceinline__ const view &written() const
    {
        return BACK ? c.d[LA_SCAN_Y] : c.x[LA_SCAN_U];
    }
    /* Begin to fetch the tile of token t. */
    __device__ __forceinline__ void start(int t)
    {
        const int count = s.end - t, left = own.token < count ? own.left : 0;
        constexpr int ON = BACK ? -TILE : TILE;
        of_u.template load<FOUR>(c, written(), left, u);
        of_u.go(written(), ON);
        if (FIXED) return;
        of_delta.template load<FOUR>(c, c.x[LA_SCAN_DELTA], left, delta);
        of_delta.go(c.x[LA_SCAN_DELTA], ON);
        if (WORK != KEEP) of_z.template load<FOUR>(c, c.x[LA_SCAN_Z], left, z);
        if (WORK != KEEP) of_z.go(c.x[LA_SCAN_Z], ON);
        of_rows.start(c, p, count);
        of_rows.go(c, ON);
    }

    __device__ __forceinline__ void stage(int buffer)
    {
        real us[FOUR], ds[FOUR] = {}, zs[FOUR] = {};
        if (!FIXED) of_rows.stage(c, on_chip.rows[FIXED ? 0 : buffer]);
        if (!own.is) return; /* channels that there are not are zeros */
        numbers_of(u, dtype_of<GIVEN>(written()), us);
        if (!FIXED) numbers_of(delta, dtype_of<GIVEN>(c.x[LA_SCAN_DELTA]), ds);
        if (BACK && c.x[LA_SCAN_Z].data) numbers_of(z, dtype_of<GIVEN>(c.x[LA_SCAN_Z]), zs);
#pragma unroll
        for (int e = 0; e < FOUR; e++) {
            const real step = FIXED ? 0 : step_of(c, ds[e] + bias[e]);
            real w = FIXED ? us[e] : step * us[e];
            if (BACK) w = !FIXED && c.x[LA_SCAN_Z].data ? us[e] * silu_of_gate(zs[e]) : us[e];
            on_chip.steps[buffer][own.token][own.column + e] = {staged<PAIRS>(step), w};
        }
    }

    /* y of the tile of token t, whose reads are there. */
    __device__ __forceinline__ void finish(int t, int buffer)
    {
        real us[FOUR], zs[FOUR] = {}, ys[FOUR];
        if (own.left && t + own.token < s.end) {
            const four<real> sums =
                *(const four<real> *)&on_chip.reads[READS ? buffer : 0][own.token][own.column];
            ys[0] = sums.x, ys[1] = sums.y, ys[2] = sums.z, ys[3] = sums.w;
            if (c.blocks > 1) {
                const int64_t token = (int64_t)s.b * c.room.T + t + own.token;
                const int64_t row = ((int64_t)p.block * c.room.B * c.room.T + token) * c.room.D;
                for (int e = 0; e < own.left; e++) ((real *)c.sums)[row + first + e] = ys[e];
            } else {
                numbers_of(past_u, dtype_of<GIVEN>(c.x[LA_SCAN_U]), us);
                if (!FIXED && c.x[LA_SCAN_Z].data)
                    numbers_of(past_z, dtype_of<GIVEN>(c.x[LA_SCAN_Z]), zs);
#pragma unroll
                for (int e = 0; e < FOUR; e++)
                    ys[e] = finished(c, dtype_of<GIVEN>(c.x[LA_SCAN_Y]), ys[e], us[e], D[e], zs[e]);
                of_y.template store<FOUR>(c, c.x[LA_SCAN_Y], own.left, ys);
            }
        }
        of_y.go(c.x[LA_SCAN_Y], TILE);
    }

    /* GROUP tokens of the tile from i on, `count` of which there are. */
    /* Was h' = a h + w b, y = c h': dh <- a (dh + dy c), through GROUP tokens from the last one on. */
    template <bool WHOLE>
    __device__ __forceinline__ void back(int buffer, int i, int count,
                                         const two<real> (&steps)[GROUP])
    {
#pragma unroll
        for (int k = GROUP - 1; k >= 0; k--) {
            if (!WHOLE && k >= count) continue;
            real a[NUMBERS], cs[NUMBERS];
            const real *const of_token = on_chip.rows[FIXED ? 0 : buffer][FIXED ? 0 : i + k].x[nl];
            if (!FIXED) copy_numbers(of_token + NUMBERS, cs);
            decays<FIXED, PAIRS, true>(numbers, steps[k].x, a);
            go_back<PAIRS>(h, a, steps[k].y, FIXED ? numbers.c : cs);
        }
    }

    template <bool WHOLE, bool NEAR>
    __device__ __forceinline__ void group(int buffer, int i, int count,
                                          const two<real> (&steps)[GROUP])
    {
        real sums[GROUP], to[PER];
#pragma unroll
        for (int k = 0; k < GROUP; k++) {
            sums[k] = 0;
            if (!WHOLE && k >= count) continue;
            real a[NUMBERS], b[NUMBERS];
            const real *const of_token = on_chip.rows[FIXED ? 0 : buffer][FIXED ? 0 : i + k].x[nl];
            if (!FIXED) copy_numbers(of_token, b);
            decays<FIXED, PAIRS, NEAR>(numbers, steps[k].x, a);
            write<PAIRS>(h, a, steps[k].y, FIXED ? numbers.b : b);
            if (!READS) continue;
            if (!FIXED) copy_numbers(of_token + NUMBERS, b);
            sums[k] = read<PAIRS>(h, FIXED ? numbers.c : b);
        }
        if (!READS) return;
        lane_sums<LANES>::of(sums, to);
        if (LANES > GROUP && nl >= GROUP) return;
#pragma unroll
        for (int k = 0; k < PER; k++)
            on_chip.reads[READS ? buffer : 0][i + nl * PER + k][ch] = to[k];
    }

    template <bool WHOLE> __device__ __forceinline__ void group(int buffer, int i, int count)
    {
        two<real> steps[GROUP];
#pragma unroll
        for (int k = 0; k < GROUP; k++) steps[k] = on_chip.steps[buffer][i + k][ch];
        if (WORK == KEEP && !FIXED && c.x[LA_SCAN_MT].data) {
            real sum = 0;
#pragma unroll
            for (int k = 0; k < GROUP; k++) sum += WHOLE || k < count ? steps[k].x : 0;
            passed += (double)sum;
        }
        if constexpr (BACK) {
            back<WHOLE>(buffer, i, count, steps);
            return;
        }
        if constexpr (TWO_WAYS && WHOLE) {
            real least = fabs(steps[0].x);
#pragma unroll
            for (int k = 1; k < GROUP; k++) least = min(least, fabs(steps[k].x));
            if (!is_near(least, least_rate)) {
                group<true, false>(buffer, i, count, steps);
                return;
            }
        }
        group<WHOLE, true>(buffer, i, count, steps);
    }

    __device__ __forceinline__ void keep(int64_t place)
    {
        real *const to = (real *)c.kept + (place * c.room.D + d) * c.numbers + m;
        if (!there || !c.kept) return;
#pragma unroll
        for (int k = 0; k < NUMBERS; k += 2) *(two<real> *)(to + k) = {h[k], h[k + 1]};
    }

    /* The gradient after the piece of the sequence that ends at t. */
    __device__ __forceinline__ void keep_later(int t)
    {
        const int piece = tokens_of_piece(c, s), ended = (t - s.begin) / piece;
        if (ended * piece != t - s.begin || !ended || !there || !c.later) return;
        const int64_t row = (int64_t)p.rest * c.cuts + ended - 1;
        real *const to = (real *)c.later + (row * c.room.D + d) * c.numbers + m;
#pragma unroll
        for (int k = 0; k < NUMBERS; k += 2) *(two<real> *)(to + k) = {h[k], h[k + 1]};
    }

    /* The whole tile of token t. */
    __device__ __forceinline__ void tile(int t, int buffer, int64_t place)
    {
#pragma unroll
        for (int k = 0; k < TILE; k += GROUP) {
            const int i = BACK ? TILE - GROUP - k : k;
            if (WORK == KEEP) keep(place + (t + i - s.begin) / GROUP);
            group<true>(buffer, i, GROUP);
        }
    }
    /* The same of the last tile, of `count` tokens. */
    __device__ __forceinline__ void last_tile(int t, int count, int buffer, int64_t place)
    {
        const int groups = (count + GROUP - 1) / GROUP;
        for (int k = 0; k < groups; k++) {
            const int i = (BACK ? groups - 1 - k : k) * GROUP;
            if (WORK == KEEP) keep(place + (t + i - s.begin) / GROUP);
            group<false>(buffer, i, count - i);
        }
    }

    __device__ __forceinline__ void run()
    {
        load_numbers<FIXED>(c, d, m, there, numbers);
        /* numbers that there are not are zeros, of which any power will do */
        least_rate = there && m < c.N ? numbers.least_rate(min(NUMBERS, c.N - m)) : HUGE_VAL;
        if (BACK)
            load_state(c.d[LA_SCAN_ST], p.rest, d, m, c.N, there, h);
        else
            load_state(c.x[LA_SCAN_S0], s.state, d, m, c.N, there, h);
        passed = 0;
        load_per_channel(c.x[LA_SCAN_BIAS], first, own.left, bias);
        load_per_channel(c.x[LA_SCAN_D], first, own.left, D);
        const int tiles = (s.end - s.begin + TILE - 1) / TILE;
        const int from = s.begin + (BACK ? max(tiles - 1, 0) * TILE : 0), t0 = from + own.token;
        const int64_t place = WORK == KEEP ? first_place(c.room, p.rest, GROUP) : 0;
        of_u.set(written(), s.b, t0, first);
        of_y.set(c.x[LA_SCAN_Y], s.b, t0, first);
        if (!FIXED) of_delta.set(c.x[LA_SCAN_DELTA], s.b, t0, first);
        if (!FIXED) of_z.set(c.x[LA_SCAN_Z], s.b, t0, first);
        if (!FIXED) of_rows.set(c, p, s.b, from);
        if (tiles) start(from);
        for (int k = 0; k < tiles + (READS && tiles); k++) {
            const int t = BACK ? from - k * TILE : from + k * TILE, buffer = k % 2;
            if (k < tiles) stage(buffer);
            __syncthreads();
            if (READS && k) finish(t - TILE, 1 - buffer);
            if (k == tiles) break;
            past_u = u;
            past_z = z;
            if (k + 1 < tiles) start(BACK ? t - TILE : t + TILE);
            if (t + TILE <= s.end)
                tile(t, buffer, place);
            else
                last_tile(t, s.end - t, buffer, place);
            if (BACK) keep_later(t);
        }
        if (READS || (WORK == KEEP && c.alone))
            store_state(c.x[c.room.step ? LA_SCAN_S0 : LA_SCAN_ST], s.state, d, m, c.N, there, h);
        if (BACK && c.alone) store_state(c.d[LA_SCAN_S0], p.rest, d, m, c.N, there, h);
        if (WORK == KEEP && c.x[LA_SCAN_MT].data) store_map();
    }

    /* M of the tokens, which turn a state h into M h and what they write. */
    __device__ __forceinline__ void store_map()
    {
        const double count = s.end - s.begin;
        real M[NUMBERS];
#pragma unroll
        for (int k = 0; k < NUMBERS; k += PAIRS ? 2 : 1) {
            double pair[2];
            scan_map(FIXED ? LA_FIXED : LA_SELECTIVE, PAIRS, numbers.A[k],
                     PAIRS ? numbers.A[k + PAIRS] : 0, PAIRS ? passed : passed / LOG2_E, count,
                     pair); /* steps are staged */
            M[k] = (real)pair[0];
            if (PAIRS) M[k + PAIRS] = (real)pair[1];
        }
        store_state(c.x[LA_SCAN_MT], p.rest, d, m, c.N, there, M);
    }

    /* A row of a step without a state reads zeros. */
    __device__ __forceinline__ void clear()
    {
        const real zeros[FOUR] = {};
        of_y.set(c.x[LA_SCAN_Y], s.b, 0, first);
        if (own.token == 0) of_y.template store<FOUR>(c, c.x[LA_SCAN_Y], own.left, zeros);
    }
};

template <typename real, int LANES> constexpr int blocks_of_scan()
{
    return sizeof(real) == 8 || LANES == 32 ? 1 : 5;
}

template <typename real, bool FIXED, bool PAIRS, int LANES, int NUMBERS, la_dtype GIVEN>
static __global__ __launch_bounds__(SCAN_THREADS, blocks_of_scan<real, LANES>()) void scan_tokens(
    const __grid_constant__ scan_call c)
{
    typedef scan_forward<real, FIXED, PAIRS, LANES, NUMBERS, READ, GIVEN> pass;
    extern __shared__ __align__(16) char shared[];
    pass scan(c, *(typename pass::memory *)shared, (int)blockIdx.x);
    if (scan.s.state < 0)
        scan.clear();
    else
        scan.run();
}

/* The states before the tiles of the adjoint. If sequences are cut, half of the blocks make the gradients
 * after the pieces meanwhile. Calls for states alone take this kernel, too. */
template <typename real, bool FIXED, bool PAIRS, int LANES, int NUMBERS, la_dtype GIVEN>
static __global__ __launch_bounds__(SCAN_THREADS, blocks_of_scan<real, LANES>()) void scan_states(
    const __grid_constant__ scan_call c)
{
    typedef scan_forward<real, FIXED, PAIRS, LANES, NUMBERS, KEEP, GIVEN> forwards;
    typedef scan_forward<real, FIXED, PAIRS, LANES, NUMBERS, LATER, GIVEN> backwards;
    extern __shared__ __align__(16) char shared[];
    const int block = (int)blockIdx.x, half = (int)gridDim.x / 2;
    const bool is_later = c.cuts > 1 && block >= half;
    if (is_later || c.alone == GRADIENT_ALONE)
        backwards(c, *(typename backwards::memory *)shared, is_later ? block - half : block).run();
    else
        forwards(c, *(typename forwards::memory *)shared, block).run();
}

/* Adds up what the blocks of a channel's numbers have read. A thread has a number of y. */
template <typename real>
static __global__ __launch_bounds__(256) void finish_reads(const __grid_constant__ scan_call c)
{
    const int64_t tokens = (int64_t)c.room.B * c.room.T,
                  i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= tokens * c.room.D) return;
    const int64_t b = i / c.room.D / c.room.T, t = i / c.room.D % c.room.T;
    const int d = (int)(i % c.room.D);
    const view &u = c.x[LA_SCAN_U], &D = c.x[LA_SCAN_D], &z = c.x[LA_SCAN_Z], &y = c.x[LA_SCAN_Y];
    if (c.room.slot.data && sequence_of(c.room, (int)b).state < 0) return; /* zeros are there */
    real sum = 0;
    for (int k = 0; k < c.blocks; k++) sum += ((const real *)c.sums)[k * tokens * c.room.D + i];
    sum = finished(c, y.dtype, sum, load<real>(at(u, b, t, d), u.dtype),
                   D.data ? load<real>(at(D, d), D.dtype) : 0,
                   z.data ? load<real>(at(z, b, t, d), z.dtype) : 0);
    store(at(y, b, t, d), y.dtype, sum);
}

/* ---- one token of many states ---- */

/* A step of the real SELECTIVE form whose states, B and C have their numbers in fours. A thread has four
 * numbers of a channel, of ROWS rows of the batch. Of the ROWS steps, outputs and indices of states each
 * of a channel's threads makes one, and hands it to the others. DTYPE is that of u. */
template <int LANES, la_dtype DTYPE> struct step_pass {
    static constexpr int CHANNELS = SCAN_THREADS / LANES, ROWS = 4;
    static_assert(LANES >= ROWS, "a thread has one row's step");
    const scan_call &c;
    int nl, d, own; /* own: the row of the thread's own step and output */
    bool there, has_numbers;
    thread_numbers<float, FOUR> numbers;
    float least_rate, bias, D;
    const char *states, *Bs, *Cs;

    __device__ __forceinline__ step_pass(const scan_call &call, int panel) : c(call)
    {
        nl = (int)threadIdx.x % LANES;
        own = nl % ROWS;
        d = panel * CHANNELS + (int)threadIdx.x / LANES;
        const int m = nl * FOUR;
        there = d < c.room.D;
        has_numbers = there && m < c.N;
        d = min(d, c.room.D - 1);
        const int g = c.G == 1 ? 0 : d / (c.room.D / c.G);
        const view &A = c.x[LA_SCAN_A], &biases = c.x[LA_SCAN_BIAS], &Ds = c.x[LA_SCAN_D];
        load_along(numbers.A, at(A, d, m), A, has_numbers ? c.N - m : 0);
        least_rate = has_numbers ? numbers.least_rate(FOUR) : HUGE_VALF;
        bias = biases.data ? load<float>(at(biases, d), biases.dtype) : 0;
        D = Ds.data ? load<float>(at(Ds, d), Ds.dtype) : 0;
        states = at(c.x[LA_SCAN_S0], 0, d, m);
        Bs = at(c.x[LA_SCAN_B], 0, 0, g, m);
        Cs = at(c.x[LA_SCAN_C], 0, 0, g, m);
    }
    /* FOUR numbers of A, of which `left` are there. */
    static __device__ __forceinline__ void load_along(float (&to)[FOUR], const char *from,
                                                      const view &A, int left)
    {
        const int64_t step = A.stride[1];
        if (A.dtype == LA_F32)
#pragma unroll
            for (int e = 0; e < FOUR; e++) to[e] = e < left ? ((const float *)from)[e * step] : 0;
        else
            for (int e = 0; e < FOUR; e++)
                to[e] = e < left ? load<float>(from + e * step * la_size_of(A.dtype), A.dtype) : 0;
    }
    __device__ __forceinline__ float number(la_scan_line line, int n) const
    {
        const view &x = c.x[line];
        if (!x.data) return 0;
        return load<float>(x.data + (n * x.stride[0] + d * x.stride[2]) * la_size_of(DTYPE), DTYPE);
    }
    /* ROWS rows from n0 on, as far as they are there. More of them one after another would have fewer
     * blocks, which take longer (docs/decisions/0039). */
    __device__ __forceinline__ void rows(int n0)
    {
        const int last = c.room.S, n = min(n0 + own, last - 1);
        const view &y = c.x[LA_SCAN_Y];
        const int64_t state_bytes = c.x[LA_SCAN_S0].stride[0] * (int64_t)sizeof(float);
        const int64_t B_bytes = c.x[LA_SCAN_B].stride[0] * la_size_of(DTYPE);
        const int64_t C_bytes = c.x[LA_SCAN_C].stride[0] * la_size_of(DTYPE);
        const char *B = Bs + n0 * B_bytes, *C = Cs + n0 * C_bytes;
        const int index = n0 + own < last ? sequence_of(c.room, n).state : -1;
        float4 old[ROWS];
        bits4<float> of_B[ROWS], of_C[ROWS];
        float4 *state[ROWS];
        float sums[ROWS], half[2], sum[1];
#pragma unroll
        for (int k = 0; k < ROWS; k++, B += B_bytes, C += C_bytes) {
            const int of_row = __shfl_sync(~0u, index, k, LANES);
            state[k] =
                of_row >= 0 && has_numbers ? (float4 *)(states + of_row * state_bytes) : NULL;
            if (!state[k]) continue;
            old[k] = __ldcs(state[k]);
            load_bits(of_B[k], B, DTYPE, 1, FOUR, true);
            load_bits(of_C[k], C, DTYPE, 1, FOUR, true);
        }
        const float u = number(LA_SCAN_U, n), z = number(LA_SCAN_Z, n);
        const float step = step_of(c, number(LA_SCAN_DELTA, n) + bias), write = step * u;
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            const float of_row = __shfl_sync(~0u, staged<false>(step), k, LANES);
            const float w = __shfl_sync(~0u, write, k, LANES);
            const bool near = is_near(fabsf(of_row), least_rate);
            sums[k] = 0;
            if (!state[k]) continue;
            float h[FOUR] = {old[k].x, old[k].y, old[k].z, old[k].w}, a[FOUR], b[FOUR], cs[FOUR];
            numbers_of(of_B[k], DTYPE, b);
            numbers_of(of_C[k], DTYPE, cs);
            if (near)
                decays<false, false, true>(numbers, of_row, a);
            else
                decays<false, false, false>(numbers, of_row, a);
            ::write<false>(h, a, w, b);
            sums[k] = read<false>(h, cs);
            __stcs(state[k], make_float4(h[0], h[1], h[2], h[3]));
        }
        halve<2, 2>(sums, half);
        halve<1, 1>(half, sum);
#pragma unroll
        for (int far = ROWS; far < LANES; far *= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], far);
        if (nl < ROWS && n0 + own < last && there)
            store(y.data + (n * y.stride[0] + d * y.stride[2]) * la_size_of(DTYPE), DTYPE,
                  index >= 0 ? finished(c, DTYPE, sum[0], u, D, z) : 0.f);
    }
};

template <int LANES, la_dtype DTYPE>
static __global__
__launch_bounds__(SCAN_THREADS,
                  DTYPE == LA_F32 ? 5 : 6) void scan_step(const __grid_constant__ scan_call c)
{
    typedef step_pass<LANES, DTYPE> pass;
    const int panels = (c.room.D + pass::CHANNELS - 1) / pass::CHANNELS;
    pass step(c, (int)blockIdx.x % panels);
    step.rows((int)blockIdx.x / panels * pass::ROWS);
}

#endif
