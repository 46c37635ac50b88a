/* Causal convolutions on the CPU: a call is cut into units of some tokens and a panel of channels,
 * whatever sequences these tokens belong to. The cuts of a backward pass depend on the sizes alone,
 * and so do the bits of its sums. */
#include "kernels.h"
#include "pool.h"
#include "scratch.h"
#include "../sizes.h"

#include <string.h>

enum {
    PANEL = 1024,     /* channels of a unit: a page of each row in float32 */
    BLOCK = 64,       /* tokens of a unit */
    PANEL_ALONG = 16, /* the same where tokens are neighbours */
    BLOCK_ALONG = 4096,
    MOST_PARTS = 16,     /* of the tokens of a backward pass, each with sums of its own */
    PART = 256,          /* tokens of a part at least */
    STREAMED = 32 << 20, /* bytes of y: as many as a last cache has */
    CACHE_LINE = 64,
};

typedef struct {
    la_convolution *j;
    const la_kernels *kernels;
    la_convolution_taps taps;
    int64_t panel, panels, first; /* channels of panels; `first`: of the first one more */
    int64_t block, blocks;        /* tokens of a unit; units of a row */
    int64_t parts;
    double *sums; /* [parts][W + 1][width] */
    char *scratch;
    size_t per_thread;
} job;

static int64_t div_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
static int64_t least_of(int64_t x, int64_t y) { return x < y ? x : y; }
static int64_t most_of(int64_t x, int64_t y) { return x > y ? x : y; }

static char *scratch_of(const job *x, int thread)
{
    return x->scratch + (size_t)thread * x->per_thread;
}

/* Where panel i begins. */
static int64_t cut(const job *x, int64_t i)
{
    return i ? least_of(x->first + i * x->panel, x->j->D) : 0;
}

static la_convolution_unit panel_at(const job *x, int64_t i)
{
    return (la_convolution_unit){.d0 = cut(x, i), .d1 = cut(x, i + 1)};
}

static bool is_packed(const la_convolution *j) { return j->room.p->array[LA_CU].given; }

static void take_sequence(const la_convolution *j, la_convolution_unit *u, int64_t n)
{
    u->n = n;
    u->b = la_room_row(&j->room, n);
    u->begin = la_room_start(&j->room, n);
    u->end = is_packed(j) ? la_room_start(&j->room, n + 1) : j->T;
    u->state = j->room.p->slots ? j->room.p->slots[n] : n;
}

/* The sequence that token t of row b is in. */
static int64_t sequence_at(const la_convolution *j, int64_t b, int64_t t)
{
    int64_t low = 0, high = j->S; /* it begins at or before t; it begins after */
    if (!is_packed(j)) return b;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        *(la_room_start(&j->room, middle) <= t ? &low : &high) = middle;
    }
    return low;
}

/* Tokens t0 .. t1 of row b, sequence by sequence. */
static void run_tokens(const job *x, la_convolution_unit u, int64_t b, int64_t t0, int64_t t1,
                       double *sums, char *scratch)
{
    for (int64_t t = t0; t < t1; t = u.t1) {
        take_sequence(x->j, &u, sequence_at(x->j, b, t));
        u.t0 = t;
        u.t1 = least_of(t1, u.end);
        if (sums)
            x->kernels->convolution_backward(x->j, &u, &x->taps, sums, scratch);
        else
            x->kernels->convolution_forward(x->j, &u, &x->taps, scratch);
    }
}

static void forward_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    const int64_t block = i / x->panels, t = block % x->blocks * x->block;
    if (la_stopped(x->j->room.p)) return;
    run_tokens(x, panel_at(x, i % x->panels), block / x->blocks, t, least_of(t + x->block, x->j->T),
               NULL, scratch_of(x, thread));
}

static void state_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    la_convolution_unit u = panel_at(x, i % x->panels);
    (void)thread;
    take_sequence(x->j, &u, i / x->panels);
    x->kernels->convolution_state(x->j, &u);
}

static void step_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    la_convolution_unit u = panel_at(x, i % x->panels);
    take_sequence(x->j, &u, i / x->panels);
    u.t1 = 1;
    if (u.state < 0) {
        la_room_clear(x->j->room.array[LA_CONVOLUTION_Y], u.b, u.d0, u.d1);
        return;
    }
    x->kernels->convolution_forward(x->j, &u, &x->taps, scratch_of(x, thread));
    if (x->j->part == LA_WHOLE_STEP) x->kernels->convolution_state(x->j, &u);
}

static void move_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    la_convolution_unit u = panel_at(x, i % x->panels);
    (void)thread;
    take_sequence(x->j, &u, i / x->panels);
    u.t1 = 1;
    if (u.state >= 0) x->kernels->convolution_state(x->j, &u);
}

/* Tokens of all rows, one row after another. */
static void backward_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    const la_convolution *j = x->j;
    const int64_t part = i / x->panels, tokens = j->B * j->T;
    const int64_t last = tokens * (part + 1) / x->parts;
    double *const sums = x->sums + part * (j->W + 1) * x->taps.width;
    const la_convolution_unit u = panel_at(x, i % x->panels);
    for (int64_t k = 0; k <= j->W; k++)
        memset(sums + k * x->taps.width + u.d0, 0, (size_t)(u.d1 - u.d0) * sizeof *sums);
    for (int64_t t = tokens * part / x->parts, n; t < last; t += n) {
        n = least_of(least_of(last - t, j->T - t % j->T), BLOCK);
        if (la_stopped(j->room.p)) return;
        run_tokens(x, u, t / j->T, t % j->T, t % j->T + n, sums, scratch_of(x, thread));
    }
}

/* The gradient of an initial state: that of the inputs before the first token. */
static void initial_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    la_convolution_unit u = panel_at(x, i % x->panels);
    take_sequence(x->j, &u, i / x->panels);
    u.t0 = u.begin - (x->j->W - 1);
    u.t1 = u.begin;
    x->kernels->convolution_backward(x->j, &u, &x->taps, NULL, scratch_of(x, thread));
}

/* The gradients of taps and bias, of a panel: the sum over the parts in their order. */
static void add_up_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    const la_convolution *j = x->j;
    const la_array *weight = j->room.gradient[LA_CONVOLUTION_WEIGHT];
    const la_array *bias = j->room.gradient[LA_CONVOLUTION_BIAS];
    const la_convolution_unit u = panel_at(x, i);
    const int64_t width = x->taps.width;
    (void)thread;
    for (int64_t d = u.d0; d < u.d1; d++)
        for (int64_t k = 0; k <= j->W; k++) {
            const la_array *to = k < j->W ? weight : bias;
            double sum = 0;
            for (int64_t part = 0; part < x->parts; part++)
                sum += x->sums[(part * (j->W + 1) + k) * width + d];
            if (!to) continue;
            const int64_t at = d * to->stride[0] + (k < j->W ? (j->W - 1 - k) * to->stride[1] : 0);
            x->kernels->store_numbers(to->data + at * la_size_of(to->dtype), to->dtype, &sum, 1);
        }
}

/* Memory for the taps, the sums and the scratch of threads. */
static char *take_memory(job *x, int threads)
{
    const la_convolution *j = x->j;
    const size_t width = (size_t)x->taps.width;
    const size_t rows = la_times(la_plus((size_t)j->W, 2), width);
    const size_t taps = la_whole(la_times(rows, (size_t)la_size_of(j->room.p->real)), 4096);
    const size_t part = la_times(la_plus((size_t)j->W, 1), width);
    const size_t sums = la_whole(la_times(la_times(part, (size_t)x->parts), sizeof *x->sums), 4096);
    const size_t scratch = la_whole(la_times(x->per_thread, (size_t)threads), 4096);
    char *const block = la_scratch_take(la_plus(la_plus(taps, sums), scratch));
    if (!block) return NULL;
    x->taps.taps = block;
    x->sums = (double *)(block + taps);
    x->scratch = block + taps + sums;
    x->kernels->convolution_taps(j, &x->taps);
    return block;
}

/* Which way the forward pass goes. */
static void choose_cuts(job *x)
{
    const la_convolution *j = x->j;
    const la_array *in = j->room.array[LA_CONVOLUTION_X], *out = j->room.array[LA_CONVOLUTION_Y];
    const bool step = j->room.p->pass == LA_STEP;
    if (!step && in->stride[1] == 1 && in->stride[2] != 1 && out->stride[1] == 1) {
        x->taps.along = true;
        x->panel = PANEL_ALONG;
        x->block = BLOCK_ALONG;
    }
    const int64_t size = la_size_of(out->dtype);
    const bool lines = !step && !x->taps.along && out->dtype == j->room.p->real &&
                       out->stride[2] == 1 && out->stride[1] * size % CACHE_LINE == 0;
    x->taps.streams = lines && j->B * j->T * j->D > STREAMED / size;
    if (lines) /* panels begin where cache lines of y do */
        x->first = (int64_t)(-(uintptr_t)out->data % CACHE_LINE) / size;
}

static la_status run_forward(job *x, double work)
{
    const la_convolution *j = x->j;
    const bool step = j->room.p->pass == LA_STEP;
    choose_cuts(x);
    x->panels = div_up(most_of(j->D - x->first, j->D > 0), x->panel);
    x->blocks = div_up(j->T, x->block);
    const int64_t of_states = j->S * x->panels;
    const int64_t units = step ? of_states : j->B * x->blocks * x->panels;
    const int threads = la_pool_threads(units, work);
    char *const block = take_memory(x, threads);
    if (!block) return la_out_of_scratch(x->j->room.p->message);
    la_pool_run(threads, units, step ? step_unit : forward_unit, x, step ? NULL : j->room.p);
    if (j->room.array[LA_CONVOLUTION_ST] && !la_stopped(j->room.p))
        la_pool_run(threads, of_states, state_unit, x, j->room.p);
    la_scratch_give(block);
    return la_stopped(j->room.p) ? LA_INTERRUPTED : LA_OK;
}

static la_status move_states(job *x)
{
    x->panels = div_up(x->j->D, x->panel);
    la_pool_run(1, x->j->S * x->panels, move_unit, x, NULL);
    return LA_OK;
}

static la_status run_backward(job *x, double work)
{
    const la_convolution *j = x->j;
    la_array *const *gradient = j->room.gradient;
    x->panels = div_up(j->D, x->panel);
    x->parts = most_of(1, least_of(j->B * j->T / PART, MOST_PARTS));
    const int64_t units = x->parts * x->panels;
    const int threads = la_pool_threads(units, work);
    char *const block = take_memory(x, threads);
    if (!block) return la_out_of_scratch(x->j->room.p->message);
    la_pool_run(threads, units, backward_unit, x, j->room.p);
    if (gradient[LA_CONVOLUTION_S0])
        la_pool_run(threads, j->S * x->panels, initial_unit, x, j->room.p);
    if (!la_stopped(j->room.p)) la_pool_run(threads, x->panels, add_up_unit, x, j->room.p);
    la_scratch_give(block);
    return la_stopped(j->room.p) ? LA_INTERRUPTED : LA_OK;
}

la_status la_convolution_run(la_convolution *j)
{
    job x = {.j = j, .kernels = la_cpu_kernels(j->room.p->real), .panel = PANEL, .block = BLOCK};
    la_room_tell(&j->room, x.kernels->isa, x.kernels->bits);
    if (j->part == LA_MOVE_STATE) return move_states(&x);
    const int64_t lanes = x.kernels->lanes;
    x.per_thread = la_whole(x.kernels->convolution_scratch(j), 64);
    x.taps.width = div_up(j->D, lanes) * lanes + lanes;
    /* About .5 ns for each number, whose reads and writes take as long, and a tenth for a tap. */
    const double work = (.5 + .1 * (double)j->W) * (double)j->B * (double)j->T * (double)j->D;
    return j->room.p->pass == LA_BACKWARD ? run_backward(&x, 4 * work) : run_forward(&x, work);
}
