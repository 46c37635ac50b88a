/* Gradients of long rows in turns of tokens, from the last turn to the first.
 *
 * The scratch of a call is bounded. So a call of long rows takes some heads at a time. If these are
 * few, most processors wait for their walks. A turn of tokens has all heads. First come the states
 * before all turns, by calls for states alone from left to right. Then each turn is a call of its
 * own: its initial state is one of these, and the gradient of its final state comes from the turn
 * behind it. The numbers between two turns are those that a walk has in registers. */
#ifndef LINATTN_CUDA_TOKEN_TURNS_CUH
#define LINATTN_CUDA_TOKEN_TURNS_CUH

#include "launch.cuh"
#include "load.cuh"

/* A turn has whole chunks. Where fewer tokens fit, a turn takes its heads in turns: with fewer
 * tokens the calls' own times would count. A block walks WALK_COLUMNS columns of values. */
enum { LEAST_FIT = 2048, TURN_STEP = 64, WALK_COLUMNS = 64 };

/* The tokens of a turn of all heads, if a q/k head of all tokens takes `each` bytes; or 0, if heads
 * should be taken in turns. From measured times of kda: blocks for a third of the processors are
 * enough for turns of heads (docs/decisions/0067). */
static int64_t tokens_of_turn(const call &c, const gradients &d, int64_t each, int processors)
{
    const int heads = heads_at_once(c, each);
    const int64_t directions = c.states_only ? 1 : 2, /* blocks: of a q/k head */
                  blocks = directions * c.N * (c.HV / c.H) * div_up(c.V, WALK_COLUMNS);
    const bool some_gradient_is_a_sum = d.per_head || d[LA_DU].data;
    if (heads == c.H || 3 * heads * blocks > processors || c.x[LA_CU].data || !c.causal ||
        c.normaliser != LA_UNNORMALISED || d.range || (some_gradient_is_a_sum && !c.states_only))
        return 0;
    const int64_t fit = MOST_SCRATCH / (each / c.T + 1) / c.H / TURN_STEP * TURN_STEP,
                  turns = div_up(c.T, max(fit, (int64_t)LEAST_FIT));
    return turns > 1 ? div_up(div_up(c.T, turns), TURN_STEP) * TURN_STEP : 0;
}

/* The same call, of n tokens from t on. */
static void take_tokens(call *c, gradients *d, int64_t t, int64_t n)
{
    move_along(1, t, {&c->x[LA_Q], &c->x[LA_K], &c->x[LA_V], &c->x[LA_X], &c->x[LA_Y], &c->x[LA_W],
                      &c->x[LA_G], &c->x[LA_BETA], &c->x[LA_ETA], &c->x[LA_WEIGHT]});
    move_along(1, t, {&(*d)[LA_DO], &(*d)[LA_DQ], &(*d)[LA_DK], &(*d)[LA_DV], &(*d)[LA_DX],
                      &(*d)[LA_DY], &(*d)[LA_DG], &(*d)[LA_DBETA], &(*d)[LA_DETA]});
    c->T = c->queries = c->keys = (int)n;
}

/* forward(call) makes its final state alone, and backward(call, gradients) is a backward pass.
 * states: of a sequence, two of a pair. After cudaErrorNotSupported gradients of some turns may
 * have been written: the caller's next way writes all of them. */
template <typename F, typename B>
static cudaError_t in_turns_of_tokens(const call &c, const gradients &d, int64_t tokens, int states,
                                      cudaMemPool_t pool, cudaStream_t stream, F forward,
                                      B backward)
{
    static const struct {
        la_name first, last, d_first, d_last;
    } names[2] = {{LA_S0, LA_ST, LA_DS0, LA_DST}, {LA_Y0, LA_YT, LA_DY0, LA_DYT}};
    const int64_t turns = div_up(c.T, tokens), row = (int64_t)c.K * c.V,
                  size = c.N * c.HV * row, starts = c.states_only ? 0 : turns - 1;
    float *room = NULL;
    cudaError_t error = cudaMallocFromPoolAsync(
        (void **)&room, (size_t)((starts + 2) * states * size * 4), pool, stream);
    if (error != cudaSuccess) return error;
    /* state j before turn i + 1; the gradients of those behind an even turn and an odd one */
    const auto state = [&](int64_t i, int j) {
        return view{(char *)(room + (i * states + j) * size), {c.HV * row, row, c.V, 1}, LA_F32};
    };
    const auto turn = [&](int64_t i, call *some, gradients *of) {
        *some = c;
        *of = d;
        take_tokens(some, of, i * tokens, min(tokens, c.T - i * tokens));
        for (int j = 0; j < states; j++) {
            some->x[names[j].last] = {};
            if (i > 0) some->x[names[j].first] = c.states_only ? view{} : state(i - 1, j);
            if (i > 0) (*of)[names[j].d_first] = state(starts + i % 2, j);
            if (i < turns - 1) (*of)[names[j].d_last] = state(starts + (i + 1) % 2, j);
        }
    };
    call some;
    gradients of;
    for (int64_t i = 0; i < starts && error == cudaSuccess; i++) {
        turn(i, &some, &of);
        for (int j = 0; j < states; j++) some.x[names[j].last] = state(i, j);
        some.states_only = true;
        error = forward(some);
    }
    for (int64_t i = turns - 1; i >= 0 && error == cudaSuccess; i--) {
        turn(i, &some, &of);
        error = backward(some, of);
    }
    const cudaError_t freed = cudaFreeAsync(room, stream);
    return error == cudaSuccess ? freed : error;
}

#endif
