/* Gates from projections on the CPU: rows of whole tokens, shared out in blocks. A block adds up
 * its own part of a parameter's gradient. The parts are added in the order of the blocks, and
 * the blocks depend on the sizes alone: so do the bits. */
#include "kernels.h"
#include "pool.h"
#include "scratch.h"
#include "../sizes.h"

#include <string.h>

enum {
    SHORT_ROW = 1024,       /* numbers: shorter tokens share a row, so that lanes are full */
    BLOCK_NUMBERS = 16384,  /* in a block at least: 25 us of work */
    NUMBERS_TO_SUM = 65536, /* the same with sums, which are then added up by one thread */
    MOST_SUMS = 64, /* blocks with sums of their own: no more memory than 64 rows in float64 */
};

typedef struct {
    la_gate_rows w;
    const la_kernels *kernels;
    int64_t block;           /* rows in a block */
    double *d_rate, *d_bias; /* [blocks][columns], or NULL */
} job;

static int64_t div_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

static int64_t end_of(const job *j, int64_t first)
{
    return first + j->block < j->w.rows ? first + j->block : j->w.rows;
}

static void forward_block(void *context, int64_t unit, int thread)
{
    const job *j = context;
    (void)thread;
    j->kernels->gate_forward(&j->w, unit * j->block, end_of(j, unit * j->block));
}

static double *sums_of(const job *j, double *all, int64_t unit)
{
    if (!all) return NULL;
    double *const own = all + unit * j->w.columns;
    memset(own, 0, (size_t)j->w.columns * sizeof *own);
    return own;
}

static void backward_block(void *context, int64_t unit, int thread)
{
    const job *j = context;
    (void)thread;
    j->kernels->gate_backward(&j->w, unit * j->block, end_of(j, unit * j->block),
                              sums_of(j, j->d_rate, unit), sums_of(j, j->d_bias, unit));
}

/* A sum, and what its roundings have lost: one number of A_log may serve a million of x. */
typedef struct {
    double sum, lost;
} running;

static void add(running *r, double x)
{
    const double next = r->sum + x, back = next - r->sum;
    r->lost += (r->sum - (next - back)) + (x - back);
    r->sum = next;
}

/* An infinity has lost nothing. */
static double total_of(running r) { return r.sum - r.sum == 0 ? r.sum + r.lost : r.sum; }

/* The gradient of a parameter: the sum over blocks, over the tokens of a row, and over the axes
 * that one number serves. `total` is room for it. */
static void add_up(const job *j, const la_gate_parameter *a, const double *sums, int64_t blocks,
                   running *total)
{
    const la_gating *x = j->w.job;
    if (!a->gradient) return;
    memset(total, 0, (size_t)a->count * sizeof *total);
    for (int64_t tokens = blocks * j->w.columns / (x->P * x->Q); tokens > 0; tokens--)
        for (int64_t p = 0; p < x->P; p++)
            for (int64_t q = 0; q < x->Q; q++)
                add(&total[p * a->dense[0] + q * a->dense[1]], *sums++);
    for (int64_t i = 0; i < a->count; i++) {
        const double number = total_of(total[i]);
        char *const to = a->gradient + i * la_size_of(a->given->dtype);
        j->kernels->store_numbers(to, a->given->dtype, &number, 1);
    }
}

/* The gradients of parameters of which no number is read: sums of nothing, which have no bits
 * set. */
static la_status of_nothing(const la_gating *j)
{
    const la_gate_parameter *const both[] = {&j->rate, &j->bias};
    for (int i = 0; i < 2; i++)
        if (both[i]->gradient)
            memset(both[i]->gradient, 0,
                   (size_t)(both[i]->count * la_size_of(both[i]->given->dtype)));
    return LA_OK;
}

static int64_t most_of(int64_t x, int64_t y) { return x > y ? x : y; }

la_status la_gates(la_gating *x)
{
    if (!x->count) return of_nothing(x);
    job j = {.w = {.job = x}, .kernels = la_cpu_kernels(x->real)};
    const int64_t token = x->P * x->Q;
    const int64_t fold = x->dense && token < SHORT_ROW ? SHORT_ROW / token : 1;
    j.w.columns = token * (fold < x->rows ? fold : x->rows);
    j.w.rows = div_up(x->count, j.w.columns);
    const bool sums = x->rate.gradient || x->bias.gradient;
    j.block = most_of(1, (sums ? NUMBERS_TO_SUM : BLOCK_NUMBERS) / j.w.columns);
    if (sums) j.block = most_of(j.block, div_up(j.w.rows, MOST_SUMS));
    const int64_t blocks = div_up(j.w.rows, j.block);

    const size_t padding = (size_t)j.kernels->lanes; /* behind a row of a parameter */
    const size_t row = la_whole(
        la_times(la_plus((size_t)j.w.columns, 2 * padding), (size_t)la_size_of(x->real)), 64);
    const size_t all = la_times(la_times((size_t)blocks, (size_t)j.w.columns), sizeof(double));
    const size_t total =
        sums ? la_times((size_t)most_of(x->rate.count, x->bias.count), sizeof(running)) : 0;
    running *totals = NULL;
    const struct {
        void **at;
        size_t bytes;
    } parts[] = {{&j.w.rate, x->rate.given ? row : 0},
                 {&j.w.bias, x->bias.given ? row : 0},
                 {(void **)&j.d_rate, x->rate.gradient ? all : 0},
                 {(void **)&j.d_bias, x->bias.gradient ? all : 0},
                 {(void **)&totals, total}};
    enum { PARTS = sizeof parts / sizeof *parts };
    size_t bytes = 0;
    for (int i = 0; i < PARTS; i++) bytes = la_plus(bytes, la_whole(parts[i].bytes, 64));
    char *const block = bytes ? la_scratch_take(la_whole(bytes, 4096)) : NULL, *next = block;
    if (bytes && !block) return la_out_of_scratch(x->message);
    for (int i = 0; i < PARTS; i++) {
        if (parts[i].bytes) *parts[i].at = next;
        next += la_whole(parts[i].bytes, 64);
    }

    j.kernels->gate_parameters(&j.w);
    /* With AVX2 1.7 ns for each number, and 3.2 in a backward pass. */
    const int threads = la_pool_threads(blocks, (double)x->count * (x->d ? 3 : 1.5));
    la_pool_run(threads, blocks, x->d ? backward_block : forward_block, &j, NULL);
    if (sums) {
        add_up(&j, &x->rate, j.d_rate, blocks, totals);
        add_up(&j, &x->bias, j.d_bias, blocks, totals);
    }
    if (block) la_scratch_give(block);
    return LA_OK;
}
