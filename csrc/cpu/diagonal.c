/* Diagonal scans on the CPU: a call is cut into units of a sequence and a panel of channels.
 * Channels never mix, but in dB and dC: these are added up over a group's panels in their order.
 * The cuts depend on the sizes alone, and so do the bits. */
#include "kernels.h"
#include "pool.h"
#include "scratch.h"
#include "../sizes.h"

enum {
    MOST_PARTS = 16,    /* of the sequences of a backward pass, each with sums of its own */
    REDUCE_TOKENS = 64, /* in a unit of sums over panels */
};

typedef struct {
    la_diagonal *j;
    const la_kernels *kernels;
    int64_t panels, longest; /* panels of a group */
    la_scan_sums sums;
    char *scratch;
    size_t per_thread;
} job;

static int64_t div_up(int64_t x, int64_t y) { return (x + y - 1) / y; }
static int64_t least_of(int64_t x, int64_t y) { return x < y ? x : y; }

void la_scan_sequence(const la_diagonal *j, la_scan_unit *u, int64_t n)
{
    const bool packed = j->room.array[LA_SCAN_U] && j->room.p->array[LA_CU].given;
    u->b = packed ? 0 : n;
    u->begin = packed ? la_room_start(&j->room, n) : 0;
    u->end = packed ? la_room_start(&j->room, n + 1) : j->T;
    u->state = j->room.p->slots ? j->room.p->slots[n] : n;
}

static int64_t longest_sequence(const la_diagonal *j)
{
    int64_t longest = 0;
    la_scan_unit u;
    if (!j->room.p->array[LA_CU].given) return j->T;
    for (int64_t n = 0; n < j->S; n++) {
        la_scan_sequence(j, &u, n);
        if (u.end - u.begin > longest) longest = u.end - u.begin;
    }
    return longest;
}

/* The channels of panel i of all groups. */
static la_scan_unit panel_at(const job *x, int64_t i)
{
    const int64_t of_group = x->j->D / x->j->G;
    la_scan_unit u = {.group = i / x->panels, .panel = i % x->panels, .longest = x->longest};
    u.d0 = u.group * of_group + u.panel * LA_SCAN_PANEL;
    u.d1 = least_of(u.d0 + LA_SCAN_PANEL, (u.group + 1) * of_group);
    return u;
}

static char *scratch_of(const job *x, int thread)
{
    return x->scratch + (size_t)thread * x->per_thread;
}

static void forward_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    const int64_t panels = x->panels * x->j->G;
    la_scan_unit u = panel_at(x, i % panels);
    la_scan_sequence(x->j, &u, i / panels);
    if (la_stopped(x->j->room.p)) return;
    if (u.state < 0)
        la_room_clear(x->j->room.array[LA_SCAN_Y], u.b, u.d0, u.d1);
    else
        x->kernels->diagonal_forward(x->j, &u, scratch_of(x, thread));
}

static void backward_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    const int64_t panels = x->panels * x->j->G;
    la_scan_unit u = panel_at(x, i % panels);
    u.part = i / panels;
    u.first = u.part * x->j->S / x->sums.parts;
    u.last = (u.part + 1) * x->j->S / x->sums.parts;
    if (!la_stopped(x->j->room.p))
        x->kernels->diagonal_backward(x->j, &u, &x->sums, scratch_of(x, thread));
}

static void reduce_unit(void *context, int64_t i, int thread)
{
    const job *x = context;
    const int64_t tokens = x->j->B * x->j->T;
    (void)thread;
    if (la_stopped(x->j->room.p)) return;
    for (int64_t t = i * REDUCE_TOKENS; t < least_of(tokens, (i + 1) * REDUCE_TOKENS); t++) {
        x->kernels->diagonal_reduce(x->j, t, &x->sums, LA_SCAN_B, x->sums.dB);
        x->kernels->diagonal_reduce(x->j, t, &x->sums, LA_SCAN_C, x->sums.dC);
    }
}

/* The sum over the parts of a gradient [D,N] or [D]. */
static void add_up(const job *x, la_scan_line line, double *sums, int64_t N)
{
    const la_array *to = x->j->room.gradient[line];
    const int64_t count = x->j->D * N;
    if (!to) return;
    for (int64_t i = 0; i < count; i++) {
        double sum = 0;
        for (int64_t part = 0; part < x->sums.parts; part++) sum += sums[part * count + i];
        char *const at =
            to->data + (i / N * to->stride[0] + i % N * to->stride[1]) * la_size_of(to->dtype);
        x->kernels->store_numbers(at, to->dtype, &sum, 1);
    }
}

static la_status run_forward(job *x, double work)
{
    const bool step = x->j->room.p->pass == LA_STEP;
    const int64_t units = x->j->S * x->panels * x->j->G;
    const int threads = la_pool_threads(units, work);
    x->scratch = la_scratch_take(la_whole(la_times(x->per_thread, (size_t)threads), 4096));
    if (!x->scratch) return la_out_of_scratch(x->j->room.p->message);
    la_pool_run(threads, units, forward_unit, x, step ? NULL : x->j->room.p);
    la_scratch_give(x->scratch);
    return la_stopped(x->j->room.p) ? LA_INTERRUPTED : LA_OK;
}

static la_status run_backward(job *x, double work)
{
    la_diagonal *const j = x->j;
    la_scan_sums *const sums = &x->sums;
    sums->panels = x->panels;
    sums->parts = least_of(j->S > 1 ? j->S : 1, MOST_PARTS);
    const int64_t units = sums->parts * x->panels * j->G;
    const int threads = la_pool_threads(units, work);
    const size_t per_token = la_times(
        la_times(la_times((size_t)(j->B * j->T), (size_t)(j->G * j->N)), (size_t)x->panels),
        (size_t)la_size_of(j->room.p->real));
    const size_t per_channel =
        la_times(la_times((size_t)sums->parts, (size_t)j->D), sizeof(double));
    const size_t per_number = la_times(per_channel, (size_t)j->N);
    la_array *const *gradient = j->room.gradient;
    const struct {
        void **at;
        size_t bytes;
    } parts[] = {{(void **)&sums->dA, gradient[LA_SCAN_A] ? per_number : 0},
                 {(void **)&sums->dB0, gradient[LA_SCAN_B0] ? per_number : 0},
                 {(void **)&sums->dC0, gradient[LA_SCAN_C0] ? per_number : 0},
                 {(void **)&sums->dD, gradient[LA_SCAN_D] ? per_channel : 0},
                 {(void **)&sums->dbias, gradient[LA_SCAN_BIAS] ? per_channel : 0},
                 {&sums->dB, gradient[LA_SCAN_B] ? per_token : 0},
                 {&sums->dC, gradient[LA_SCAN_C] ? per_token : 0},
                 {(void **)&x->scratch, la_times(x->per_thread, (size_t)threads)}};
    enum { PARTS = sizeof parts / sizeof *parts };
    size_t bytes = 0;
    for (int i = 0; i < PARTS; i++) bytes = la_plus(bytes, la_whole(parts[i].bytes, 4096));
    char *const block = la_scratch_take(bytes ? bytes : 4096), *next = block;
    if (!block) return la_out_of_scratch(j->room.p->message);
    for (int i = 0; i < PARTS; i++) {
        if (parts[i].bytes) *parts[i].at = next;
        next += la_whole(parts[i].bytes, 4096);
    }
    la_pool_run(threads, units, backward_unit, x, j->room.p);
    if (gradient[LA_SCAN_B])
        la_pool_run(threads, div_up(j->B * j->T, REDUCE_TOKENS), reduce_unit, x, j->room.p);
    const bool stopped = la_stopped(j->room.p);
    if (!stopped) {
        add_up(x, LA_SCAN_A, sums->dA, j->N);
        add_up(x, LA_SCAN_B0, sums->dB0, j->N);
        add_up(x, LA_SCAN_C0, sums->dC0, j->N);
        add_up(x, LA_SCAN_D, sums->dD, 1);
        add_up(x, LA_SCAN_BIAS, sums->dbias, 1);
    }
    la_scratch_give(block);
    return stopped ? LA_INTERRUPTED : LA_OK;
}

la_status la_diagonal_run(la_diagonal *j)
{
    const bool backward = j->room.p->pass == LA_BACKWARD;
    job x = {.j = j, .kernels = la_cpu_kernels(j->room.p->real)};
    la_room_tell(&j->room, x.kernels->isa, x.kernels->bits);
    x.longest = longest_sequence(j);
    x.panels = div_up(j->D / j->G, LA_SCAN_PANEL);
    const int64_t channels = least_of(j->D / j->G, LA_SCAN_PANEL);
    x.per_thread = la_whole(x.kernels->diagonal_scratch(j, channels, x.longest), 64);
    /* About half a nanosecond for each number of a state and token. */
    const double work = .5 * (double)j->B * (double)j->T * (double)j->D * (double)j->N;
    if (!backward) return run_forward(&x, work);
    return run_backward(&x, j->room.states_only ? work : 4 * work);
}
