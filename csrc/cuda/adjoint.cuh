/* Gradients, token by token: the recurrent mode, and every dtype that tensor cores would round.
 *
 * Included by one file per real type and size of K. The file defines `real` and the split of a
 * block:
 *     COLUMNS, PARTS  value columns of a block, and threads of a column: 256 threads
 *     MOST_ROWS       keys of a thread for the largest K: more would not fit its registers
 *     BATCH           tokens in shared memory at a time
 *     TURNS           2: the sums of a token are added up while those of the next one are written;
 *                     1: before that
 *
 * A block has one sequence of one value head and COLUMNS of its value columns. It goes through the
 * tokens backwards with dS in registers. The adjoint of a token needs the state before it, and
 * states come forwards. So a first pass keeps the state before every segment of M tokens. Then,
 * from the last segment to the first, the states of a segment are recomputed and all kept, and its
 * tokens are taken backwards. With M near sqrt T this keeps 2 sqrt T states instead of T, for one
 * more forward pass (docs/math.md, 8).
 *
 * Sums over value columns (dq, dk, da, dbeta) end as partials, which partials.cuh adds up. */
#include "partials.cuh"

enum { ADJOINT_THREADS = WARPS * 32 };

template <int ROWS, bool RARE> struct adjoint_room {
    static constexpr int SUMS = RARE ? (int)ROWS_OF_SUMS : (int)OF_X;
    batch<ROWS, RARE> tokens;               /* o holds the gradient of num */
    key_row<ROWS> sums[TURNS][SUMS][WARPS]; /* the part of each warp of the sums of a token */
    real scalars[TURNS][NUMBERS_OF_SUMS][WARPS];
};

/* With the additive rule dS is little more than a sum over all tokens, and its roundings would add
 * up. They are collected here, and dS gets them back once per batch. If batches are short, the
 * rounding of that is kept too; with 16 tokens it is small enough. */
template <la_decay DECAY, la_rule RULE, int ROWS> struct kahan_rows {
    static constexpr bool SUMS_UP = RULE == LA_ADDITIVE && DECAY != LA_KEY;
    real lost[SUMS_UP ? ROWS : 1] = {};

    /* Was dS = a (before + q dO'). */
    __device__ __forceinline__ void collect(const real *dS, const real *before, const real *q,
                                            real d_o, real a)
    {
#pragma unroll
        for (int i = 0; i < (SUMS_UP ? ROWS : 0); i++) {
            const real x = q[i] * d_o, sum = before[i] + x, back = sum - before[i];
            lost[i] += (before[i] - (sum - back)) + (x - back);
            if (DECAY != LA_NONE) lost[i] = lost[i] * a + fma(sum, a, -dS[i]);
        }
    }
    __device__ __forceinline__ void add_to(real *dS)
    {
#pragma unroll
        for (int i = 0; i < (SUMS_UP ? ROWS : 0); i++) {
            const real before = dS[i];
            dS[i] += lost[i];
            lost[i] = BATCH < 16 ? lost[i] - (dS[i] - before) : 0;
        }
    }
};

/* The sums of a token over the value columns of a block, by way of shared memory. */
template <la_decay DECAY, la_rule RULE, int ROWS, bool RARE> struct sums_of_token {
    adjoint_room<ROWS, RARE> &s;
    const adjoint_scratch &f;
    const int64_t first_row; /* of this block's partials: that of token 0 */
    int turn = 0;            /* which of s.sums is being written */

    /* The part of this warp of a sum of rows. */
    __device__ __forceinline__ void rows(int which, real (&x)[ROWS])
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = threadIdx.x % PARTS;
        if constexpr (PARTS == 32) { /* a warp has one column */
#pragma unroll
            for (int i = 0; i < ROWS; i++) s.sums[turn][which][warp].part(part)[i] = x[i];
        } else { /* a warp has four columns */
            real half[ROWS / 2], own[ROWS / 4];
            halve<ROWS / 2, 16>(x, half);
            halve<ROWS / 4, 8>(half, own);
            const int first = lane / 16 * (ROWS / 2) + lane / 8 % 2 * (ROWS / 4);
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++)
                s.sums[turn][which][warp].part(part)[first + i] = own[i];
        }
    }
    /* The part of this warp of a sum of numbers. */
    __device__ __forceinline__ void number(number_of_sums which, real x)
    {
        const real sum = warp_sum(x);
        if (threadIdx.x % 32 == 0) s.scalars[turn][which][threadIdx.x / 32] = sum;
    }
    /* Add up the parts of the warps for token t, and store them as a partial. */
    __device__ __forceinline__ void store(int t, bool of_q, bool of_k)
    {
        __syncthreads();
        real *const rows[] = {f.dq, f.dk, f.da, f.dx, f.dy}, *const ones[] = {f.da, f.dbeta,
                                                                              f.deta};
        for (int i = threadIdx.x; i < f.kp; i += ADJOINT_THREADS) {
#pragma unroll
            for (int row = 0; row < s.SUMS; row++) {
                if (row == OF_Q ? !of_q : row == OF_K ? !of_k : false) continue;
                if (!is_summed<DECAY, RULE, RARE>((row_of_sums)row)) continue;
                real x = 0;
                for (int w = 0; w < WARPS; w++) x += s.sums[turn][row][w].at(i);
                rows[row][(first_row + t) * f.kp + i] = x;
            }
        }
#pragma unroll
        for (int one = 0; one < NUMBERS_OF_SUMS; one++) {
            if (!is_summed<DECAY, RULE>((number_of_sums)one)) continue;
            if (threadIdx.x != one || !of_q || !of_k) continue;
            real x = 0;
            for (int w = 0; w < WARPS; w++) x += s.scalars[turn][one][w];
            ones[one][first_row + t] = x;
        }
        if (TURNS == 2)
            turn ^= 1;
        else
            __syncthreads();
    }
};

/* Noncausal: every token reads what all tokens have written. Pass 0 writes all, pass 1 is the
 * adjoint of all reads, pass 2 the adjoint of all writes. mine: v has the own column. */
template <la_decay DECAY, la_rule RULE, int ROWS, bool RARE, typename F>
__device__ __forceinline__ void
noncausal_adjoint(const call &c, const gradients &d, const unit &u, batch<ROWS, RARE> &s, int part,
                  int own_column, int column, bool mine, real (&S)[ROWS], real (&dS)[ROWS],
                  kahan_rows<DECAY, RULE, ROWS> &kahan,
                  sums_of_token<DECAY, RULE, ROWS, RARE> &sums, F load_tokens)
{
    for (int pass = 0; pass < 3 && !c.causal; pass++) {
        const int end = min(u.end, pass == 1 ? c.queries : c.keys);
        for (int t = u.begin; t < end; t += BATCH) {
            const int n = min((int)BATCH, end - t);
            load_tokens(t, n, pass == 1);
            for (int i = 0; i < n; i++) {
                const real *q = s.q[i].part(part), *k = s.k[i].part(part);
                const real v = s.v[i][own_column], d_num = s.o[i][own_column];
                real g[ROWS], before[ROWS], dv = 0;
#pragma unroll
                for (int j = 0; j < ROWS; j++) {
                    before[j] = dS[j];
                    if (pass == 0) S[j] += k[j] * v;
                    if (pass == 1) { /* was num = S' q */
                        g[j] = S[j] * d_num;
                        dS[j] += q[j] * d_num;
                    } else { /* was S <- S + k v' */
                        g[j] = dS[j] * v;
                        dv += dS[j] * k[j];
                    }
                }
                if (pass == 1) kahan.collect(dS, before, q, d_num, 1);
                if (pass == 0) continue;
                dv = parts_sum(dv);
                if (pass == 2 && mine && part == 0)
                    store(at(d[LA_DV], u.b, t + i, u.hv, column), d[LA_DV].dtype, dv);
                sums.rows(pass - 1, g);
                sums.store(t + i, pass == 1, pass == 2);
            }
            kahan.add_to(dS);
        }
    }
}

/* The sum of dbonus over the columns of each warp, then over the warps in their order. */
template <int ROWS, bool RARE>
__device__ __forceinline__ void store_bonus(adjoint_room<ROWS, RARE> &s,
                                            const double (&dbonus)[ROWS], const adjoint_scratch &f,
                                            int64_t partial)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = threadIdx.x % PARTS;
    static_assert(sizeof(s.sums) >= WARPS * ROWS * PARTS * sizeof(double), "their room");
    double *const of_warps = (double *)&s.sums; /* [WARPS][kp] */
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        const int key = part * ROWS + i;
        double x = dbonus[i];
        for (int step = PARTS; step < 32; step *= 2) x += __shfl_xor_sync(~0u, x, step);
        if (lane < PARTS && key < f.kp) of_warps[warp * f.kp + key] = x;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < f.kp; i += ADJOINT_THREADS) {
        double x = 0;
        for (int w = 0; w < WARPS; w++) x += of_warps[w * f.kp + i];
        f.dbonus[partial * f.kp + i] = x;
    }
}

template <la_decay DECAY, la_rule RULE, int ROWS, bool RARE>
static __global__ void __launch_bounds__(ADJOINT_THREADS, 1)
    adjoint(const __grid_constant__ call c, const __grid_constant__ gradients d,
            const __grid_constant__ adjoint_scratch f)
{
    if (is_needless(d)) return;
    extern __shared__ char shared[];
    adjoint_room<ROWS, RARE> &s = *(adjoint_room<ROWS, RARE> *)shared;
    constexpr bool PAIR = DECAY == LA_PAIR;
    const int tile = blockIdx.x % f.tiles, head = blockIdx.x / f.tiles % f.heads;
    const unit u = unit_of(c, blockIdx.x / f.tiles / f.heads, f.first + head);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = threadIdx.x % PARTS;
    const int v0 = tile * COLUMNS, own_column = threadIdx.x / PARTS, column = v0 + own_column;
    const bool mine = column < c.V;
    const int64_t partial = (int64_t)head * f.tiles + tile, row0 = (int64_t)u.b * c.T;
    const int64_t first_row = partial * f.tokens + row0;
    const real *const den = f.den + head * f.tokens + row0;
    constexpr int STATE = (PAIR ? 2 : 1) * ROWS * ADJOINT_THREADS;
    real *const states =
        f.states + partial * (f.segments + (int64_t)c.N * f.kept) * STATE + threadIdx.x;
    real *const starts = states + first_chunk_slot(c, u.n, f.M) * STATE;
    real *const kept = states + (f.segments + (int64_t)u.n * f.kept) * STATE;
    real *const dM0 = kept + (int64_t)f.M * STATE; /* of batches: registers would spill */
    const bool normalised = is_normalised(&c, DECAY, RULE);
    real S[ROWS], dS[ROWS], Y[PAIR ? ROWS : 1], dY[PAIR ? ROWS : 1];
    double dbonus[RULE == LA_BONUS ? ROWS : 1] = {};

    const auto put_state = [&](real *to) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) to[i * ADJOINT_THREADS] = S[i];
#pragma unroll
        for (int i = 0; i < (PAIR ? ROWS : 0); i++) to[(ROWS + i) * ADJOINT_THREADS] = Y[i];
    };
    const auto get_state = [&](const real *from) {
#pragma unroll
        for (int i = 0; i < ROWS; i++) S[i] = from[i * ADJOINT_THREADS];
#pragma unroll
        for (int i = 0; i < (PAIR ? ROWS : 0); i++) Y[i] = from[(ROWS + i) * ADJOINT_THREADS];
    };
    /* Tokens t..t+n into shared memory, with the gradient of num. */
    const auto load_tokens = [&](int t, int n, bool backwards) {
        __syncthreads(); /* all threads are done with the batch before */
        /* with a call of this function gradients in float32 take 1.06 of their time */
        if constexpr (sizeof(real) == 4 && PARTS == 8)
            load_batch<DECAY, RULE, ROWS>(c, u, t, n, v0, s.tokens);
        else
            call_load_batch<DECAY, RULE, ROWS>(c, u, t, n, v0, s.tokens);
        for (int i = warp; i < n && backwards && lane < COLUMNS; i += WARPS)
            if (v0 + lane < c.V) {
                const real x =
                    load<real>(at(d[LA_DO], u.b, t + i, u.hv, v0 + lane), d[LA_DO].dtype);
                /* was o = scale num / divisor */
                s.tokens.o[i][lane] = finish(c, x, normalised ? den[t + i] : (real)0);
            } else {
                s.tokens.o[i][lane] = 0;
            }
        __syncthreads();
    };
    /* The memory that a batch found is the kept one of its first token: of token i of a segment, or
     * the only one that a pass keeps which keeps no others. A segment has whole batches. */
    const auto in_batch = [&](int i, bool keeps_all, la_operands &x) {
        if (!PAIR || c.batch == 1) return;
        real *const M0 = kept + (int64_t)(keeps_all ? i - i % c.batch : 0) * STATE;
        if (!keeps_all && i % c.batch == 0) put_state(M0);
        x.batched = true;
        x.M0 = la_strip_of(M0, ADJOINT_THREADS);
    };
#pragma unroll
    for (int j = 0; j < (PAIR ? ROWS : 0); j++)
        if (c.batch > 1) dM0[j * ADJOINT_THREADS] = 0;
    sums_of_token<DECAY, RULE, ROWS, RARE> sums = {s, f, first_row};

    constexpr bool SUMS_UP = kahan_rows<DECAY, RULE, ROWS>::SUMS_UP;
    kahan_rows<DECAY, RULE, ROWS> kahan;

    load_part(c, c.x[LA_S0], u, part, column, S);
    load_part(c, d[LA_DST], u, part, column, dS);
    if constexpr (PAIR) {
        load_part(c, c.x[LA_Y0], u, part, column, Y);
        load_part(c, d[LA_DYT], u, part, column, dY);
    }
    if constexpr (is_plain<DECAY, RULE>)
        noncausal_adjoint(c, d, u, s.tokens, part, own_column, column, mine, S, dS, kahan, sums,
                          load_tokens);
    /* The segments forwards: each keeps the state before it, and the last one keeps all its states.
     * Then the segments backwards: each but the last first recomputes all its states. */
    const int segments = c.causal ? (u.end - u.begin + f.M - 1) / f.M : 0;
    for (int step = 0; step < 2 * segments - 1; step++) {
        const bool forward_only = step < segments - 1;
        const int segment = step < segments ? step : 2 * segments - 2 - step;
        const int a = u.begin + segment * f.M, b = min(a + f.M, u.end);
        if (forward_only)
            put_state(starts + (int64_t)segment * STATE);
        else if (step >= segments)
            get_state(starts + (int64_t)segment * STATE);
        for (int t = a; t < b; t += BATCH) {
            const int n = min((int)BATCH, b - t);
            load_tokens(t, n, false);
            for (int i = 0; i < n; i++) {
                la_operands x = operands_of<DECAY, RULE>(s.tokens, i, part, own_column);
                real o;
                if (RARE) x.before = c.predicts_before;
                if (!forward_only) put_state(kept + (int64_t)(t - a + i) * STATE);
                in_batch(t - a + i, !forward_only, x);
                la_token(la_strip_of(S, 1), la_strip_of(Y, 1), 1, ROWS, &x, &o, DECAY, RULE);
            }
        }
        if (forward_only) continue;
        for (int t = a + (b - a - 1) / BATCH * BATCH; t >= a; t -= BATCH) {
            const int n = min((int)BATCH, b - t);
            load_tokens(t, n, true);
            for (int i = n - 1; i >= 0; i--) {
                la_operands x = operands_of<DECAY, RULE>(s.tokens, i, part, own_column);
                if (RARE) x.before = c.predicts_before;
                in_batch(t - a + i, true, x);
                real gq[ROWS] = {}, gk[ROWS] = {}, ga[DECAY == LA_KEY ? ROWS : 1] = {}, gb = 0, dv;
                constexpr bool OWN_X = has_x<DECAY, RULE, RARE>;
                real gx[OWN_X ? ROWS : 1] = {}, gy[RULE == LA_DPLR ? ROWS : 1] = {}, geta = 0;
                real gbonus[RULE == LA_BONUS ? ROWS : 1] = {};
                const la_token_gradients g = {
                    gq, gk,  OWN_X ? gx : gk, gy,  gbonus,
                    ga, &gb, &geta,           &dv, la_strip_of(dM0, ADJOINT_THREADS)};
                get_state(kept + (int64_t)(t - a + i) * STATE);
                real before[SUMS_UP ? ROWS : 1];
#pragma unroll
                for (int j = 0; j < (SUMS_UP ? ROWS : 0); j++) before[j] = dS[j];
                la_token_adjoint(S, dS, Y, dY, 1, ROWS, &x, &s.tokens.o[i][own_column], &g, DECAY,
                                 RULE);
                if (PAIR && c.batch > 1 && (t - a + i) % c.batch == 0) /* was M0 = S */
#pragma unroll
                    for (int j = 0; j < (PAIR ? ROWS : 0); j++) {
                        dS[j] += dM0[j * ADJOINT_THREADS];
                        dM0[j * ADJOINT_THREADS] = 0;
                    }
                kahan.collect(dS, before, x.q, s.tokens.o[i][own_column], x.a[0]);
                if (mine && part == 0)
                    store(at(d[LA_DV], u.b, t + i, u.hv, column), d[LA_DV].dtype, dv);
                sums.rows(OF_Q, gq);
                sums.rows(OF_K, gk);
                if constexpr (DECAY == LA_KEY) sums.rows(OF_A, ga);
                if constexpr (OWN_X) sums.rows(OF_X, gx);
                if constexpr (RULE == LA_DPLR) sums.rows(OF_Y, gy);
                if constexpr (RULE == LA_BONUS)
#pragma unroll
                    for (int j = 0; j < ROWS; j++) dbonus[j] += gbonus[j];
                if (DECAY == LA_TOKEN || PAIR) sums.number(OF_SCALAR, ga[0]);
                if (RULE == LA_DELTA) sums.number(OF_BETA, part == 0 ? gb : 0);
                if (PAIR) sums.number(OF_ETA, geta);
                sums.store(t + i, true, true);
            }
            kahan.add_to(dS);
        }
    }
    if constexpr (RULE == LA_BONUS)
        store_bonus(s, dbonus, f, (int64_t)u.n * f.heads * f.tiles + partial);
    store_part(c, d[LA_DS0], u, part, column, dS);
    if constexpr (PAIR) store_part(c, d[LA_DY0], u, part, column, dY);
}

/* ---- launches ---- */

/* Scratch of a launch, in bytes. If all heads need more, the heads are taken in turns. */
static const int64_t ROOM = (int64_t)2 << 30;

template <la_decay DECAY, la_rule RULE, int ROWS, bool RARE>
static cudaError_t launch_adjoint(const call &c, const gradients &d, cudaMemPool_t pool,
                                  cudaStream_t stream)
{
    const auto kernel = adjoint<DECAY, RULE, ROWS, RARE>;
    const int bytes = sizeof(adjoint_room<ROWS, RARE>), group = c.HV / c.H;
    const bool normalised = is_normalised(&c, DECAY, RULE);
    int device, most_bytes;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = most_shared_memory(device, &most_bytes);
    if (error != cudaSuccess) return error;
    if (bytes > most_bytes) return cudaErrorNotSupported; /* nothing has been done */
    adjoint_scratch f = {};
    f.tiles = (c.V + COLUMNS - 1) / COLUMNS;
    f.kp = (c.K + 31) / 32 * 32;
    f.tokens = (int64_t)c.B * c.T;
    const int64_t most =
        c.x[LA_CU].data ? f.tokens / max(c.N, 1) : c.T; /* tokens of an average sequence */
    for (f.M = BATCH; (int64_t)f.M * f.M < most;) f.M += BATCH;
    const int64_t batch = max(min(c.batch, c.T), 1); /* a segment has whole ones */
    if (DECAY == LA_PAIR) f.M = (int)min((f.M + batch - 1) / batch * batch, (int64_t)INT32_MAX);
    f.segments = (int)chunk_slots_of(c, f.M);
    const int64_t state = (DECAY == LA_PAIR ? 2 : 1) * ROWS * ADJOINT_THREADS;
    f.kept = f.M + (DECAY == LA_PAIR && c.batch > 1);
    const int64_t states = c.causal ? f.segments + (int64_t)c.N * f.kept : 0;
    /* numbers of a value head, in this order, each rounded up to whole cache lines */
    const auto lines = [](int64_t n) { return (n + 31) / 32 * 32; };
    const int64_t row = lines(f.tiles * f.tokens * f.kp), one = lines(f.tiles * f.tokens);
    const int64_t of_da = DECAY == LA_KEY ? row : is_summed<DECAY, RULE>(OF_SCALAR) ? one : 0;
    const int64_t of_x = is_summed<DECAY, RULE, RARE>(OF_X) ? row : 0;
    const int64_t of_y = is_summed<DECAY, RULE, RARE>(OF_Y) ? row : 0;
    const int64_t of_beta = RULE == LA_DELTA ? one : 0, of_den = normalised ? lines(f.tokens) : 0;
    const int64_t of_eta = DECAY == LA_PAIR ? one : 0;
    const int64_t of_bonus =
        RULE == LA_BONUS ? lines((int64_t)c.N * f.tiles * f.kp * (int)(8 / sizeof(real))) : 0;
    const int64_t segments = normalised ? chunk_slots_of(c, SEGMENT) : 0;
    const int64_t of_z = segments * f.kp * (int64_t)(sizeof(double) / sizeof(real));
    const int64_t each = 2 * row + of_da + of_x + of_y + of_beta + of_eta + of_bonus + of_den +
                         of_z + f.tiles * states * state;
    f.heads =
        (int)min((int64_t)c.H, max(ROOM / (each * (int64_t)sizeof(real) * group + 1), (int64_t)1)) *
        group;

    real *room = NULL;
    const int64_t all = each * f.heads * (int64_t)sizeof(real) + 1;
    error = cudaMallocFromPoolAsync((void **)&room, all, pool, stream);
    if (error != cudaSuccess) return error;
    f.dq = room;
    f.dk = f.dq + row * f.heads;
    f.da = f.dk + row * f.heads;
    f.dx = f.da + of_da * f.heads;
    f.dy = f.dx + of_x * f.heads;
    f.dbeta = f.dy + of_y * f.heads;
    f.deta = f.dbeta + of_beta * f.heads;
    f.dbonus = (double *)(f.deta + of_eta * f.heads);
    f.den = f.deta + (of_eta + of_bonus) * f.heads;
    f.z = (double *)(f.den + of_den * f.heads);
    f.states = f.den + (of_den + of_z) * f.heads;
    const int most_heads = f.heads;
    for (f.first = 0; f.first < c.HV && error == cudaSuccess; f.first += most_heads) {
        f.heads = min(most_heads, c.HV - f.first);
        const int64_t units = (int64_t)c.N * f.heads;
        const through_z<real> by_z = {f.first,  f.heads, f.tiles, f.kp,  0,  f.tokens,
                                      segments, f.dq,    f.dk,    f.den, f.z,  d.range};
        if constexpr (is_plain<DECAY, RULE>)
            if (normalised) error = launch_denominators(c, by_z, stream);
        if (error != cudaSuccess) break;
        error = launch(kernel, units * f.tiles, ADJOINT_THREADS, bytes, stream, c, d, f);
        if constexpr (is_plain<DECAY, RULE>)
            if (error == cudaSuccess && normalised)
                error = launch_denominators_adjoint(c, d, by_z, stream);
        if (error != cudaSuccess) break;
        error = launch_reduce<DECAY, RULE, ROWS * PARTS / 32, RARE>(c, d, f, stream);
        if (RULE == LA_BONUS && error == cudaSuccess)
            error = launch(reduce_bonus, f.heads / group, REDUCE_THREADS, 0, stream, c, d, f);
        if (error == cudaSuccess && d.per_head)
            error = launch(reduce_gate_of_head, f.heads, REDUCE_THREADS, 0, stream, c, d, f);
    }
    const cudaError_t freed = cudaFreeAsync(room, stream);
    return error == cudaSuccess ? freed : error;
}

template <la_decay DECAY, la_rule RULE, bool RARE = false>
static cudaError_t adjoint_any(const call &c, const gradients &d, cudaMemPool_t pool,
                               cudaStream_t stream)
{
    /* float64 serves for checks, and its kernels take a minute to compile: it has those for the
     * largest K only */
    if constexpr (sizeof(real) == 4 && PARTS == 8)
        if (c.K <= 128) return launch_adjoint<DECAY, RULE, 16, RARE>(c, d, pool, stream);
    return launch_adjoint<DECAY, RULE, MOST_ROWS, RARE>(c, d, pool, stream);
}
