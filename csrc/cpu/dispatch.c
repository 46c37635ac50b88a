/* The CPU's entry points: cut a problem into units, give every thread its scratch, run. */
#include "factors.h"
#include "kernels.h"
#include "pool.h"
#include "scratch.h"
#include "../sizes.h"

#include <string.h>

static la_status status_of(const la_problem *p) { return la_stopped(p) ? LA_INTERRUPTED : LA_OK; }

/* The kernel that takes the call. longest: tokens of the longest sequence. */
static void tell_kernel(const la_problem *p, const la_kernels *kernels, int64_t longest)
{
    const bool step = p->pass == LA_STEP, chunks = p->causal && !la_by_token(p) && !step;
    if (!p->taken) return;
    *p->taken = (la_taken){
        .kernel = step         ? "one token"
                  : !p->causal ? "noncausal"
                  : chunks     ? "chunks"
                               : "token by token",
        .unit = kernels->isa,
        .why = chunks && p->mode == LA_RECURRENT ? "gradients of states alone go in chunks" : "",
        .chunk = chunks ? kernels->chunk_tokens(p, longest) : 0,
        .bits = kernels->bits};
}

/* ---- units ---- */

static int64_t sequence_start(const la_problem *p, int64_t n)
{
    const la_array *cu = &p->array[LA_CU];
    return la_integer_at(cu->data, cu->dtype, n * cu->stride[0]);
}

typedef struct {
    const la_problem *p;
    const la_kernels *kernels;
    int64_t heads;           /* value heads in a unit */
    int64_t whole_units;     /* the first units: one for each of so many groups of heads */
    int64_t columns, panels; /* of the other units */
    int64_t parts;           /* of the other units' sequences: one or two */
    double first;            /* the share of a sequence that the first of two parts has */
    const la_partials *sums;
    int64_t blocks; /* of tokens, per batch row */
    char *scratch;
    size_t per_thread;
} job;

static int64_t div_up(int64_t x, int64_t y) { return (x + y - 1) / y; }

static int64_t groups(const la_problem *p, int64_t heads) { return (p->HV + heads - 1) / heads; }

static la_unit unit_at(const job *j, int64_t i)
{
    const la_problem *p = j->p;
    const bool whole = i < j->whole_units;
    const int64_t of_head = j->panels * j->parts;
    const int64_t group = whole ? i : j->whole_units + (i - j->whole_units) / of_head;
    la_unit u = {.panel = whole ? 0 : (i - j->whole_units) % of_head / j->parts};
    u.hv = group % groups(p, j->heads) * j->heads;
    u.n = group / groups(p, j->heads);
    u.h = u.hv / (p->HV / p->H);
    u.heads = u.hv + j->heads < p->HV ? j->heads : p->HV - u.hv;
    u.v0 = u.panel * j->columns;
    u.v1 = !whole && u.v0 + j->columns < p->V ? u.v0 + j->columns : p->V;
    if (p->array[LA_CU].given) {
        u.begin = sequence_start(p, u.n);
        u.end = u.keys_end = sequence_start(p, u.n + 1);
    } else {
        u.b = u.n;
        u.end = p->T;
        u.keys_end = p->L;
        if (p->slots) u.n = p->slots[u.b];
    }
    u.read = u.begin;
    u.stop = u.end;
    u.last = true;
    if (p->states_only) u.read = u.stop;
    if (!whole && j->parts == 2) {
        const int64_t C = j->kernels->chunk_tokens(p, u.end - u.begin);
        const int64_t chunks = div_up(u.end - u.begin, C);
        const int64_t cut = u.begin + (int64_t)((double)chunks * j->first) * C;
        u.last = (i - j->whole_units) % 2;
        *(u.last ? &u.read : &u.stop) = cut;
    }
    return u;
}

static int64_t longest_sequence(const la_problem *p)
{
    if (!p->array[LA_CU].given) return la_longest_row(p);
    int64_t longest = 0;
    for (int64_t n = 0; n < p->N; n++) {
        int64_t length = sequence_start(p, n + 1) - sequence_start(p, n);
        if (length > longest) longest = length;
    }
    return longest;
}

/* A rough figure for sharing out work: 50 multiply-adds a nanosecond. */
static double work_of(const la_problem *p, double products)
{
    return products * (double)p->tokens * (double)p->HV * (double)p->K * (double)p->V / 50;
}

static size_t round_to_pages(size_t bytes) { return la_whole(bytes, 4096); }

static void forward_unit(void *context, int64_t i, int thread)
{
    const job *j = context;
    la_unit u = unit_at(j, i);
    if ((u.read == u.stop && !u.last) || la_stopped(j->p)) return;
    j->kernels->forward(j->p, &u, j->scratch + (size_t)thread * j->per_thread);
}

/* A row of the batch that has no state reads zeros, which have no bits set in any dtype. */
static void clear_output(const la_problem *p, const la_unit *u)
{
    const la_array *o = &p->array[LA_O];
    const int64_t size = la_size_of(o->dtype);
    memset(o->data + (u->b * o->stride[0] + u->hv * o->stride[2]) * size, 0, (size_t)(p->V * size));
}

static void step_unit(void *context, int64_t i, int thread)
{
    const job *j = context;
    la_unit u = unit_at(j, i);
    if (u.n < 0) {
        clear_output(j->p, &u);
        return;
    }
    j->kernels->step(j->p, &u, j->scratch + (size_t)thread * j->per_thread);
}

/* ---- forward: units as large as threads allow ----
 *
 * Columns of different units never mix, and every column is computed the same way wherever it lies.
 * So the split may follow the number of threads without moving a bit (docs/decisions/0008). Units
 * of one head need the same scores, and each unit computes its own: to read those of another core
 * costs as much, and on some machines several times as much. */

/* The cost of a token's scores for one head, in columns. */
static int64_t cost_of_scores(const la_problem *p, int64_t C)
{
    if (!p->causal || la_by_token(p)) return 8;
    return (C / 2 + 8) * (p->decay == LA_KEY ? 3 : 2) / 2;
}

/* Heads that are fewer than the threads, or left over when each thread has had as many. Their
 * columns are divided. If threads are still left, the sequence is divided too, in two parts. The
 * unit with the second part also goes through the first one for its state, without reading; both
 * parts take equally long. (A third part would save a tenth.) */
static void share_out(job *j, int64_t heads, int threads, int64_t longest)
{
    enum { NARROW = 16 }; /* a lane of AVX-512 */
    const la_problem *p = j->p;
    const int most = p->causal && !la_by_token(p) && !p->states_only ? 2 : 1;
    const double scores = (double)cost_of_scores(p, j->kernels->chunk_tokens(p, longest));
    /* Without reading: this share of a column's work, and 3/4 of the scores'. */
    const double unread = p->rule == LA_DELTA ? 2 / 3. : 1 / 2.;
    /* Doing work twice is worth it if that saves an eighth. */
    double least = (scores + (double)p->V) * 7 / 8;
    job x = *j;
    for (int64_t panels = 1; panels <= div_up(p->V, NARROW); panels++)
        for (x.parts = 1; x.parts <= most; x.parts++) {
            x.columns = div_up(div_up(p->V, panels), NARROW) * NARROW;
            if (x.columns > p->V) x.columns = p->V;
            x.panels = div_up(p->V, x.columns);
            const double all = scores + (double)x.columns;
            const double early = (scores * 3 / 4 + (double)x.columns * unread) / all;
            x.first = 1 / (2 - early); /* first = early first + (1 - first) */
            const double time = (double)div_up(heads * x.panels * x.parts, threads) * all *
                                (x.parts == 2 ? x.first : 1);
            if (time >= least) continue;
            least = time;
            *j = x;
        }
}

/* With many heads, a unit is up to four neighbouring heads, whose rows are neighbours too
 * (prefetch.h). Their states must fit in half of a small L2 cache, and each thread must get two
 * units. With few heads, floor(heads / threads) * threads heads become one unit each; `share_out`
 * divides the rest. */
static void split(job *j, int threads)
{
    enum { MOST_HEADS = 4, STATES = 256 << 10 };
    const la_problem *p = j->p;
    const int64_t size = la_size_of(p->real), longest = longest_sequence(p);
    for (j->heads = MOST_HEADS; j->heads > 1; j->heads /= 2)
        if (p->N * groups(p, j->heads) >= (threads > 1 ? 2 * threads : 1) &&
            j->heads * p->K * p->V * size <= STATES)
            break;
    j->whole_units = p->N * groups(p, j->heads);
    j->columns = p->V;
    j->panels = j->parts = 1;
    if (j->heads > 1 || !longest || threads < 2) return;
    /* The number of heads, if all sequences were as long as the longest. */
    const int64_t heads = div_up(p->tokens * p->HV, longest);
    const int64_t left = heads < threads ? heads : p->N * p->HV % threads;
    if (!left) return;
    share_out(j, left, threads, longest);
    if (j->panels * j->parts > 1) j->whole_units = heads < threads ? 0 : j->whole_units - left;
}

static la_status run_forward(la_problem *p)
{
    job j = {.p = p, .kernels = la_cpu_forward_kernels(p)};
    int threads = la_pool_threads(INT64_MAX, work_of(p, 3));
    split(&j, threads);
    tell_kernel(p, j.kernels, longest_sequence(p));
    const int64_t units =
        j.whole_units + (p->N * groups(p, j.heads) - j.whole_units) * j.panels * j.parts;
    if (units < threads) threads = (int)units;
    j.per_thread = round_to_pages(j.kernels->forward_scratch(p, longest_sequence(p), j.heads));
    j.scratch = la_scratch_take(la_times(j.per_thread, threads));
    if (!j.scratch) return la_out_of_scratch(p->message);
    la_pool_run(threads, units, forward_unit, &j, p);
    la_scratch_give(j.scratch);
    return status_of(p);
}

/* M of a segment: the final states of the columns of the identity, where nothing is written. The
 * call is repeated with V = K, and v is one row of zeros for all tokens. */
static la_status find_map(la_problem *p)
{
    const la_array *const M = &p->array[LA_MT];
    const size_t size = la_size_of(p->real), zeros = la_times(p->K, sizeof(double));
    const size_t bytes = la_plus(zeros, la_times(la_times(p->K, p->K), size));
    char *block = la_scratch_take(bytes);
    la_problem map = *p;
    if (!block) return la_out_of_scratch(p->message);
    memset(block, 0, bytes);
    for (int64_t i = 0; i < p->K; i++)
        if (p->real == LA_F64)
            ((double *)(block + zeros))[i * p->K + i] = 1;
        else
            ((float *)(block + zeros))[i * p->K + i] = 1;
    map.V = p->K;
    map.array[LA_V].data = block; /* zeros have no bits set in any dtype */
    map.array[LA_V].stride[0] = map.array[LA_V].stride[1] = map.array[LA_V].stride[2] = 0;
    map.array[LA_V].stride[3] = 1;
    map.array[LA_W].given = false; /* gates of values that are zeros */
    map.array[LA_S0] = (la_array){.data = block + zeros, .given = true, .dtype = p->real};
    map.array[LA_S0].stride[2] = p->K;
    map.array[LA_S0].stride[3] = 1;
    map.array[LA_ST] = *M;
    const la_status status = run_forward(&map);
    if (status) memcpy(p->message, map.message, sizeof map.message);
    la_scratch_give(block);
    return status;
}

la_status la_forward(la_problem *p)
{
    if (la_writes_nothing(p)) return LA_OK;
    const la_status status = run_forward(p);
    return status || !p->array[LA_MT].given ? status : find_map(p);
}

la_status la_step(la_problem *p)
{
    if (la_writes_nothing(p)) return LA_OK;
    job j = {.p = p,
             .kernels = la_cpu_kernels(p->real),
             .heads = 1,
             .columns = p->V,
             .panels = 1,
             .parts = 1};
    tell_kernel(p, j.kernels, 1);
    int64_t units = p->N * p->HV;
    /* A step is bound by memory: it reads and writes 4 bytes for each pair of multiply-adds. */
    int threads = la_pool_threads(units, work_of(p, 8));
    j.per_thread = round_to_pages(j.kernels->step_scratch(p));
    j.scratch = la_scratch_take(la_times(j.per_thread, threads));
    if (!j.scratch) return la_out_of_scratch(p->message);
    la_pool_run(threads, units, step_unit, &j, NULL); /* always to its end */
    la_scratch_give(j.scratch);
    return LA_OK;
}

/* ---- backward: units make partial sums, then these are reduced ---- */

enum { REDUCE_TOKENS = 64 };

static void backward_unit(void *context, int64_t i, int thread)
{
    const job *j = context;
    la_unit u = unit_at(j, i);
    if (la_stopped(j->p)) return;
    j->kernels->backward(j->p, &u, j->sums, j->scratch + (size_t)thread * j->per_thread);
}

static void reduce_unit(void *context, int64_t i, int thread)
{
    const job *j = context;
    if (la_stopped(j->p)) return;
    la_rows r = {.h = i % j->p->H, .b = i / j->p->H / j->blocks};
    r.begin = i / j->p->H % j->blocks * REDUCE_TOKENS;
    r.end = r.begin + REDUCE_TOKENS < j->sums->row ? r.begin + REDUCE_TOKENS : j->sums->row;
    j->kernels->reduce(j->p, &r, j->sums, j->scratch + (size_t)thread * j->per_thread);
}

static void reduce_head_unit(void *context, int64_t hv, int thread)
{
    const job *j = context;
    (void)thread;
    j->kernels->reduce_head(j->p, hv, j->sums);
}

/* A single unit would run on a single core. So its columns are halved, and its scores are made
 * twice, for any number of threads: the width must not depend on that number. */
static int64_t backward_columns(const la_problem *p)
{
    const bool one_unit = p->N * p->HV == 1 && p->V <= LA_BACKWARD_PANEL;
    const int64_t widest = one_unit ? LA_BACKWARD_PANEL / 2 : LA_BACKWARD_PANEL;
    return p->V < widest ? p->V : widest;
}

static la_status backward_of_rule(la_problem *p)
{
    job j = {.p = p, .kernels = la_cpu_kernels(p->real), .heads = 1, .parts = 1};
    const size_t real = la_size_of(p->real);
    la_partials sums = {.tokens = p->tokens, .row = la_longest_row(p)};
    sums.kp = (p->K + j.kernels->lanes - 1) / j.kernels->lanes * j.kernels->lanes;
    j.columns = backward_columns(p);
    j.panels = sums.panels = (p->V + j.columns - 1) / j.columns;
    j.sums = &sums;
    tell_kernel(p, j.kernels, longest_sequence(p));
    j.blocks = (sums.row + REDUCE_TOKENS - 1) / REDUCE_TOKENS;

    /* Of states alone there are no sums over value columns. */
    const bool only = p->states_only;
    sums.alone = only || (p->causal && !la_by_token(p) && sums.panels == 1 && p->HV == p->H);

    const size_t partials = only ? 0 : la_times(p->HV, sums.panels);
    const size_t all = la_times(partials, p->tokens);
    const size_t numbers = round_to_pages(la_times(all, real));
    const size_t rows = sums.alone ? 0 : round_to_pages(la_times(all, la_times(sums.kp, real)));
    const size_t gate = p->decay == LA_HEAD                 ? numbers
                        : p->decay == LA_NONE || sums.alone ? 0
                        : p->decay == LA_KEY                ? rows
                                                            : numbers;
    const size_t beta = p->rule == LA_DELTA && !sums.alone ? numbers : 0;
    const size_t eta = p->decay == LA_PAIR && !sums.alone ? numbers : 0;
    const size_t x = p->array[LA_X].given ? rows : 0, y = p->rule == LA_DPLR ? rows : 0;
    const size_t by_sequence =
        round_to_pages(la_times(la_times(partials, p->N), la_times(sums.kp, real)));
    const size_t z = p->normaliser == LA_UNNORMALISED ? 0 : by_sequence;
    const size_t bonus = p->rule == LA_BONUS && p->tokens ? by_sequence : 0;
    /* Without tokens and without a state, the gradients of a gate per head and of a bonus are still
     * written: zero. */
    const bool any_units = only || p->tokens || p->array[LA_S0].given;
    const int64_t units = any_units ? p->N * p->HV * j.panels : 0;
    const int threads = la_pool_threads(units, work_of(p, 11));
    size_t each = any_units ? j.kernels->backward_scratch(p, longest_sequence(p)) : 0;
    const size_t for_reduce = p->tokens ? j.kernels->reduce_scratch(p) : 0;
    j.per_thread = round_to_pages(each > for_reduce ? each : for_reduce);

    const struct {
        void **at;
        size_t bytes;
    } parts[] = {{&sums.dq, rows},      {&sums.dk, rows},
                 {&sums.dx, x},         {&sums.dy, y},
                 {&sums.da, gate},      {&sums.dbeta, beta},
                 {&sums.deta, eta},     {&sums.dz0, z},
                 {&sums.dbonus, bonus}, {(void **)&j.scratch, la_times(j.per_thread, threads)}};
    size_t bytes = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        bytes = la_plus(bytes, parts[i].bytes);
    char *block = la_scratch_take(bytes), *next = block;
    if (!block) return la_out_of_scratch(p->message);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].at = next;
        next += parts[i].bytes;
    }

    la_pool_run(threads, units, backward_unit, &j, p);
    if (!sums.alone) la_pool_run(threads, p->B * j.blocks * p->H, reduce_unit, &j, p);
    if (!only && !la_stopped(p)) la_pool_run(threads, p->HV, reduce_head_unit, &j, p);
    la_scratch_give(block);
    return status_of(p);
}

la_status la_backward(la_problem *p)
{
    if (la_writes_nothing(p)) return LA_OK;
    return la_has_factors(p) ? la_backward_with_factors(p, backward_of_rule) : backward_of_rule(p);
}
