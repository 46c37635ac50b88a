/* DPLR in chunks: with bfloat16 and at most 64 keys it has kernels (prepare_dplr.cuh). In other calls
 * each token is two of the delta rule with a decay per key.
 *
 *     p = S' x;   S <- diag(a) S - y p' + k v';   o = S' q
 *
 * is first a token with the decay a, which predicts by x before that decay and writes y (0 - p)'.
 * Then comes one without a decay, which predicts nothing (its x is zeros) and writes k v'. The
 * second is read. So the kernels in chunks of the delta rule take calls of twice as many tokens,
 * from arrays in which the rows of both take turns (docs/decisions/0050). */
#include "kernels.cuh"
#include "load.cuh"
#include "token_turns.cuh"

enum { MOST_MOVES = 12, MOVE_THREADS = 256, TOKENS_AT_ONCE = 8 };

/* Rows [B, T, heads] of one array go to another. Without `from` each number is `fill`. */
struct row_move {
    view from, to;
    int heads, columns, size; /* size: of a number, in bytes */
    bool pieces;              /* rows can be copied in pieces of 16 bytes */
    uint64_t fill;
};

struct row_moves {
    int count, B, T;
    row_move move[MOST_MOVES];
};

/* A thread has 16 bytes of a row, of each of TOKENS_AT_ONCE tokens: it finds its place once, and
 * its loads overlap. The blocks of the moves take turns. */
static __global__ void __launch_bounds__(MOVE_THREADS)
    move_rows(const __grid_constant__ row_moves m)
{
    const row_move &x = m.move[blockIdx.x % m.count];
    const int of_piece = 16 / x.size, pieces = (x.columns + of_piece - 1) / of_piece;
    const int of_token = x.heads * pieces, of_row = (m.T + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    const int64_t i = (int64_t)(blockIdx.x / m.count) * MOVE_THREADS + threadIdx.x;
    const int place = (int)(i % of_token), group = (int)(i / of_token);
    const int h = place / pieces, column = place % pieces * of_piece;
    const int b = group / of_row, t = group % of_row * TOKENS_AT_ONCE;
    if (b >= m.B) return;
    const int tokens = min(TOKENS_AT_ONCE, m.T - t);
    char *const to = at(x.to, b, t, h, column);
    const char *const from = x.from.data ? at(x.from, b, t, h, column) : NULL;
    const int64_t to_next = x.to.stride[1] * x.size, from_next = x.from.stride[1] * x.size;
    if (x.pieces) {
        const uint32_t low = (uint32_t)x.fill, high = (uint32_t)(x.fill >> 32);
        uint4 rows[TOKENS_AT_ONCE];
#pragma unroll
        for (int j = 0; j < TOKENS_AT_ONCE; j++)
            rows[j] = from && j < tokens ? *(const uint4 *)(from + j * from_next)
                                         : make_uint4(low, high, low, high);
#pragma unroll
        for (int j = 0; j < TOKENS_AT_ONCE; j++)
            if (j < tokens) *(uint4 *)(to + j * to_next) = rows[j];
        return;
    }
    const int64_t to_step = x.to.stride[3] * x.size, from_step = x.from.stride[3] * x.size;
    const int there = min(of_piece, x.columns - column);
    for (int j = 0; j < tokens * there; j++) {
        const int token = j / there, e = j % there;
        char *const one = to + token * to_next + e * to_step;
        const char *const y =
            from ? from + token * from_next + e * from_step : (const char *)&x.fill;
        if (x.size == 8)
            *(uint64_t *)one = *(const uint64_t *)y;
        else if (x.size == 4)
            *(uint32_t *)one = *(const uint32_t *)y;
        else
            *(uint16_t *)one = *(const uint16_t *)y;
    }
}

/* The edges of the sequences among twice as many tokens, and the strength of every write. */
static __global__ void begin_pairs(const __grid_constant__ call c, int *edges, float *one)
{
    if (threadIdx.x == 0) *one = 1;
    for (int i = threadIdx.x; i <= c.N && c.x[LA_CU].data; i += blockDim.x)
        edges[i] = 2 * edge_of(c, i);
}

/* 1 as bits, as often as it fits. */
static uint64_t ones_of(la_dtype dtype)
{
    switch (dtype) {
    case LA_F64: return 0x3ff0000000000000;
    case LA_F32: return 0x3f8000003f800000;
    case LA_F16: return 0x3c003c003c003c00;
    default: return 0x3f803f803f803f80;
    }
}

namespace {

/* The arrays of a call of pairs, and the moves between them and those of the caller. */
struct pairs_of_tokens {
    call c;           /* as the caller gave it */
    char *room;       /* NULL: only count */
    int64_t bytes;    /* of the room */
    row_moves fills, before, after;

    pairs_of_tokens(const call &given, char *at)
        : c(given), room(at), bytes(0), fills{}, before{}, after{}
    {
        for (row_moves *x : {&fills, &before, &after}) x->B = c.B, x->T = c.T;
    }
    char *take(int64_t n)
    {
        char *const x = room ? room + bytes : NULL;
        bytes += (n + 255) / 256 * 256;
        return x;
    }
    /* An array of pairs, [B, 2 T, heads, columns]. */
    view array(int heads, int columns, la_dtype dtype)
    {
        const int size = (int)la_size_of(dtype);
        const int64_t row = div_up(columns * size, 16) * 16 / size, token = heads * row;
        return {take(2 * (int64_t)c.B * c.T * token * size), {2 * c.T * token, token, row, 1},
                dtype};
    }
    /* The first or the second tokens of pairs. */
    static view half(view x, int second)
    {
        if (x.data) x.data += second * x.stride[1] * la_size_of(x.dtype);
        x.stride[1] *= 2;
        return x;
    }
    void move(row_moves &moves, const view &from, const view &to, int heads, int columns,
              uint64_t fill)
    {
        const int size = (int)la_size_of(to.dtype);
        bool pieces = columns * size % 16 == 0;
        for (const view *x : {&from, &to})
            pieces &= !x->data || (x->stride[3] == 1 && (uintptr_t)x->data % 16 == 0 &&
                                   (x->stride[0] | x->stride[1] | x->stride[2]) * size % 16 == 0);
        moves.move[moves.count++] = {from, to, heads, columns, size, pieces, fill};
    }
    /* An array whose rows of first and second tokens are these; without one they are `fill`. */
    view interleaved(const view &first, const view &second, int heads, int columns,
                     uint64_t fill = 0)
    {
        const view to = array(heads, columns, (first.data ? first : second).dtype);
        move(first.data ? before : fills, first, half(to, 0), heads, columns, fill);
        move(second.data ? before : fills, second, half(to, 1), heads, columns, fill);
        return to;
    }
    /* An array whose rows of first and second tokens go to these at last. */
    view divided(const view &first, const view &second, int heads, int columns)
    {
        if (!first.data && !second.data) return {}; /* a call for states alone */
        const view from = array(heads, columns, (first.data ? first : second).dtype);
        if (first.data) move(after, half(from, 0), first, heads, columns, 0);
        if (second.data) move(after, half(from, 1), second, heads, columns, 0);
        return from;
    }
    call pairs(bool is_backward)
    {
        const view none = {};
        call x = c;
        int *const edges = (int *)take((c.N + 1) * (int64_t)sizeof(int));
        float *const one = (float *)take(sizeof(float));
        x.T = 2 * c.T;
        x.queries = x.keys = x.T;
        x.predicts_before = true;
        if (c.x[LA_CU].data) x.x[LA_CU] = {(char *)edges, {1, 0, 0, 0}, LA_I32};
        x.x[LA_BETA] = {(char *)one, {0, 0, 0, 0}, LA_F32};
        x.x[LA_Y] = none;
        x.x[LA_K] = interleaved(c.x[LA_Y], c.x[LA_K], c.H, c.K);
        x.x[LA_X] = interleaved(c.x[LA_X], none, c.H, c.K);
        /* states alone: a state depends on no q, and its gradient on no v. Others stand there */
        x.x[LA_Q] = c.states_only && !is_backward ? x.x[LA_K]
                                                  : interleaved(none, c.x[LA_Q], c.H, c.K);
        x.x[LA_V] = c.states_only && is_backward ? none : interleaved(none, c.x[LA_V], c.HV, c.V);
        x.x[LA_G] = interleaved(c.x[LA_G], none, c.HV, c.K,
                                c.gate == LA_DECAY ? ones_of(c.x[LA_G].dtype) : 0);
        return x;
    }
    cudaError_t launch_moves(const row_moves &moves, cudaStream_t stream) const
    {
        int64_t most = 0;
        for (int i = 0; i < moves.count; i++) {
            const row_move &x = moves.move[i];
            most = max(most, c.B * div_up(c.T, TOKENS_AT_ONCE) * x.heads *
                                 div_up(x.columns, 16 / x.size));
        }
        return launch(move_rows, moves.count * div_up(most, MOVE_THREADS), MOVE_THREADS, 0, stream,
                      moves);
    }
    /* run, between the moves. x: the call of pairs. filled: the call before had the same room and
     * as many heads, so that what no token changes is there. */
    template <typename F>
    cudaError_t around(const call &x, bool filled, cudaStream_t stream, F run) const
    {
        cudaError_t error = cudaSuccess;
        if (!filled) {
            error = launch(begin_pairs, 1, 256, 0, stream, c, (int *)x.x[LA_CU].data,
                           (float *)x.x[LA_BETA].data);
            if (error == cudaSuccess) error = launch_moves(fills, stream);
        }
        if (error == cudaSuccess) error = launch_moves(before, stream);
        if (error == cudaSuccess) error = run();
        if (error == cudaSuccess) error = launch_moves(after, stream);
        return error;
    }
};

} // namespace

/* turn(first head, heads, filled, room) for as many heads at once as fit; each: the bytes of one.
 * filled: see `around`. */
template <typename F>
static cudaError_t in_turns(const call &c, int64_t each, cudaMemPool_t pool, cudaStream_t stream,
                            F turn)
{
    const int heads = heads_at_once(c, each);
    char *room = NULL;
    cudaError_t error = cudaMallocFromPoolAsync((void **)&room, each * heads, pool, stream);
    for (int h = 0; h < c.H && error == cudaSuccess; h += heads)
        error = turn(h, min(heads, c.H - h), h > 0 && c.H - h >= heads, room);
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

static call some_heads(const call &c, int h, int n)
{
    call some = c;
    narrow(&some, h, n);
    return some;
}

/* Can a call be one of pairs? Rows of y lie among those of k, and no norm or map is theirs. */
static bool can_be_pairs(const call &c)
{
    return c.T <= INT_MAX / 2 && rows_are_as_given(c);
}

cudaError_t dplr_in_chunks(const call &c, chunk_launcher delta, cudaMemPool_t pool,
                           cudaStream_t stream)
{
    if (c.x[LA_Q].dtype == LA_BF16 && c.K <= 64) {
        const cudaError_t error = chunk_dplr(c, pool, stream);
        if (error != cudaErrorNotSupported) return error;
    }
    if (!can_be_pairs(c)) return cudaErrorNotSupported;
    const auto lay_out = [](pairs_of_tokens &x) {
        call pairs = x.pairs(false);
        pairs.x[LA_O] = x.divided({}, x.c.x[LA_O], x.c.HV, x.c.V);
        return pairs;
    };
    pairs_of_tokens one(some_heads(c, 0, 1), NULL);
    lay_out(one);
    return in_turns(c, one.bytes, pool, stream, [&](int h, int n, bool filled, char *room) {
        pairs_of_tokens x(some_heads(c, h, n), room);
        const call pairs = lay_out(x);
        return x.around(pairs, filled, stream, [&] { return delta(pairs, pool, stream); });
    });
}

cudaError_t dplr_gradients_in_chunks(const call &c, const gradients &d, backward_launcher delta,
                                     chunk_launcher forward, cudaMemPool_t pool,
                                     cudaStream_t stream)
{
    if (c.K <= 64) {
        const cudaError_t error = chunk_backward_dplr(c, d, pool, stream);
        if (error != cudaErrorNotSupported) return error;
    }
    /* known before the arrays of pairs are made: the kernels refuse these */
    if (!can_be_pairs(c) || c.gate == LA_DECAY || c.V % 8) return cudaErrorNotSupported;
    const auto lay_out = [](pairs_of_tokens &x, gradients &d) {
        const call &c = x.c;
        call pairs = x.pairs(true);
        d[LA_DO] = x.interleaved({}, d[LA_DO], c.HV, c.V);
        if (c.states_only) pairs.x[LA_V] = d[LA_DO];
        d[LA_DQ] = x.divided({}, d[LA_DQ], c.H, c.K);
        d[LA_DK] = x.divided(d[LA_DY], d[LA_DK], c.H, c.K);
        d[LA_DX] = x.divided(d[LA_DX], {}, c.H, c.K);
        d[LA_DV] = x.divided({}, d[LA_DV], c.HV, c.V);
        d[LA_DG] = x.divided(d[LA_DG], {}, c.HV, c.K);
        d[LA_DY] = d[LA_DBETA] = {};
        return pairs;
    };
    const auto some_of = [&](int h, int n) {
        gradients some = d;
        const int group = c.HV / c.H, hv = h * group;
        move_along(2, h, {&some[LA_DQ], &some[LA_DK], &some[LA_DX], &some[LA_DY]});
        move_along(2, hv, {&some[LA_DO], &some[LA_DV], &some[LA_DG]});
        move_along(1, hv, {&some[LA_DST], &some[LA_DS0]});
        return some;
    };
    pairs_of_tokens one(some_heads(c, 0, 1), NULL);
    gradients d_one = some_of(0, 1);
    lay_out(one, d_one);
    int device, processors;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    const int64_t tokens = tokens_of_turn(c, d, one.bytes, processors);
    if (tokens) {
        error = in_turns_of_tokens(
            c, d, tokens, 1, pool, stream,
            [&](const call &some) { return dplr_in_chunks(some, forward, pool, stream); },
            [&](const call &some, const gradients &of) {
                return dplr_gradients_in_chunks(some, of, delta, forward, pool, stream);
            });
        if (error != cudaErrorNotSupported) return error;
    }
    return in_turns(c, one.bytes, pool, stream, [&](int h, int n, bool filled, char *room) {
        pairs_of_tokens x(some_heads(c, h, n), room);
        gradients d_some = some_of(h, n);
        const call pairs = lay_out(x, d_some);
        return x.around(pairs, filled, stream, [&] { return delta(pairs, d_some, pool, stream); });
    });
}
