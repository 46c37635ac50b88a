/* The CPU's entry points: choose the instance once, cut a problem into units, give every thread
 * its scratch, run. */
#define _GNU_SOURCE
#include "kernels.h"
#include "pool.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* ---- instruction sets ---- */

/* By feature bits (the compiler's builtins also ask the system whether it saves the registers),
 * never by the name of a processor family. */
static bool anywhere(void) { return true; }

#if defined(__x86_64__)
static bool with_avx2(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi2");
}

static bool with_avx512(void)
{
    return with_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
}

static bool with_avx512bf16(void) { return with_avx512() && __builtin_cpu_supports("avx512bf16"); }

/* The system keeps these registers for those who have asked: once, for all threads of the process. (Some
 * compilers' builtins and headers do not know the names yet.) */
static bool with_amx(void)
{
#if defined(__linux__)
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 }; /* CPUID 7, EDX */
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILE_DATA = 18 };
    static _Atomic int allowed = -1;
    if (atomic_load(&allowed) < 0) {
        unsigned a, b, c, d;
        const bool has = with_avx512bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
                         (d & AMX_BF16) && (d & AMX_TILE);
        atomic_store(&allowed,
                     has && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA));
    }
    return atomic_load(&allowed) == 1;
#else
    return false;
#endif
}
#endif

typedef struct {
    const la_kernels *f32, *f64;
    bool (*runs_here)(void);
    const la_kernels *bf16; /* for what in_pairs says; or NULL */
} instance;

/* From the least to the best: the last that runs here is chosen. AVX-512-BF16 has twice the rate only by
 * some makers' instructions (on Sapphire Rapids half of it), and no feature bit says so: it serves those
 * who ask for it by name (docs/decisions/0020). So does AMX by one number for a real: it is faster than by two, and
 * rounds to 8 bits (0026). */
static const instance instances[] = {
    {&la_cpu_baseline_f32, &la_cpu_baseline_f64, anywhere, NULL},
#if defined(__x86_64__)
#if defined(LA_EMULATE_BF16)
    {&la_cpu_avx2_f32, &la_cpu_avx2_f64, with_avx2, &la_cpu_avx2_bf16},
    {&la_cpu_avx2_f32, &la_cpu_avx2_f64, with_avx2, &la_cpu_avx2_amx},
#endif
    {&la_cpu_avx2_f32, &la_cpu_avx2_f64, with_avx2, NULL},
    {&la_cpu_avx512_f32, &la_cpu_avx512_f64, with_avx512bf16, &la_cpu_avx512_bf16},
    {&la_cpu_avx512_f32, &la_cpu_avx512_f64, with_amx, &la_cpu_amx_bf16},
    {&la_cpu_avx512_f32, &la_cpu_avx512_f64, with_avx512, NULL},
    {&la_cpu_avx512_f32, &la_cpu_avx512_f64, with_amx, &la_cpu_amx},
#elif defined(__aarch64__)
    {&la_cpu_neon_f32, &la_cpu_neon_f64, anywhere, NULL}, /* every AArch64 Linux has it */
#endif
};
enum { INSTANCES = sizeof instances / sizeof *instances };

static _Atomic int chosen = -1;

static int choose(void)
{
    int i = atomic_load(&chosen);
    if (i >= 0) return i;
    for (i = INSTANCES - 1; i > 0 && !instances[i].runs_here(); i--) continue;
    atomic_store(&chosen, i);
    return i;
}

static const char *name_of(const instance *i) { return (i->bf16 ? i->bf16 : i->f32)->isa; }

bool la_isa_choose(const char *name)
{
    for (int i = 0; i < INSTANCES; i++)
        if (!strcmp(name, name_of(&instances[i]))) {
            if (!instances[i].runs_here()) return false;
            atomic_store(&chosen, i);
            return true;
        }
    return false;
}

const char *la_isa(void) { return name_of(&instances[choose()]); }
int la_isa_count(void) { return INSTANCES; }

const char *la_isa_name(int i, bool *here)
{
    *here = instances[i].runs_here();
    return name_of(&instances[i]);
}

static const la_kernels *kernels_for(const la_problem *p)
{
    const instance *i = &instances[choose()];
    return p->real == LA_F64 ? i->f64 : i->f32;
}

/* A forward pass whose large products can be those of bfloat16 pairs: of keys as the user gave them. A decay per
 * key would scale them. Instances that round a float to 8 bits miss the acceptance rule in chunks of 129 and
 * more, with few keys; such chunks, and mode="parallel", stay in float. */
static bool in_pairs(const la_problem *p)
{
    enum { MOST_TOKENS = 64 };
    return p->causal && p->mode == LA_CHUNK && p->chunk <= MOST_TOKENS && p->decay != LA_KEY &&
           p->map[0] == LA_IDENTITY && p->map[1] == LA_IDENTITY &&
           p->normaliser == LA_UNNORMALISED && p->array[LA_Q].dtype == LA_BF16;
}

static const la_kernels *forward_kernels_for(const la_problem *p)
{
    const la_kernels *bf16 = instances[choose()].bf16;
    return bf16 && in_pairs(p) ? bf16 : kernels_for(p);
}

int la_forward_bits(const la_problem *p) { return forward_kernels_for(p)->bits; }

/* ---- scratch ---- */

static _Atomic int fail_countdown;

void la_fail_allocation(int n) { atomic_store(&fail_countdown, n); }

/* The block of the last call is kept for the next: fresh memory costs a page fault every 4 KiB. One
 * is kept, and only up to this size; whoever finds it taken allocates. */
#if defined(LA_POISON)
static const size_t MOST_KEPT = 0; /* each call its own, so that a sanitizer sees where it ends */
#else
static const size_t MOST_KEPT = (size_t)64 << 20;
#endif
enum { HEADER = 4096 }; /* in front of a block: its size, and room to keep pages aligned */
static _Atomic(char *) kept;

/* Aligned to a page: tiles want cache lines, and neighbours on other threads want none shared. */
static void *allocate(size_t bytes)
{
    if (atomic_load(&fail_countdown) > 0 && atomic_fetch_sub(&fail_countdown, 1) == 1) return NULL;
    if (bytes > PTRDIFF_MAX / 2) return NULL;
    char *block = atomic_exchange(&kept, NULL);
    if (block && *(size_t *)block < bytes) {
        free(block);
        block = NULL;
    }
    if (!block) {
        void *fresh;
        if (posix_memalign(&fresh, 4096, HEADER + bytes)) return NULL;
        block = fresh;
        *(size_t *)block = bytes;
    }
#if defined(LA_POISON)
    memset(block + HEADER, 0xff, bytes); /* NaN in every dtype: reading the unwritten shows */
#endif
    return block + HEADER;
}

static void release(void *scratch)
{
    char *block = (char *)scratch - HEADER;
    if (*(size_t *)block <= MOST_KEPT) block = atomic_exchange(&kept, block);
    free(block);
}

static la_status out_of_memory(la_problem *p)
{
    static const char text[] = "not enough memory for the call's scratch";
    memcpy(p->message, text, sizeof text);
    return LA_MEMORY_ERROR;
}

/* ---- units ---- */

static int64_t sequence_start(const la_problem *p, int64_t n)
{
    const la_array *cu = &p->array[LA_CU];
    if (cu->dtype == LA_I64) return ((const int64_t *)cu->data)[n * cu->stride[0]];
    return ((const int32_t *)cu->data)[n * cu->stride[0]];
}

typedef struct {
    const la_problem *p;
    const la_kernels *kernels;
    int64_t heads;           /* value heads in a unit */
    int64_t wide;            /* so many groups of heads come first, and are one unit each */
    int64_t columns, panels; /* of the others' units */
    const la_partials *sums;
    int64_t blocks; /* of tokens, per batch row */
    char *scratch;
    size_t per_thread;
} job;

static int64_t groups(const la_problem *p, int64_t heads) { return (p->HV + heads - 1) / heads; }

static la_unit unit_at(const job *j, int64_t i)
{
    const la_problem *p = j->p;
    const bool wide = i < j->wide;
    const int64_t group = wide ? i : j->wide + (i - j->wide) / j->panels;
    la_unit u = {.panel = wide ? 0 : (i - j->wide) % j->panels};
    u.hv = group % groups(p, j->heads) * j->heads;
    u.n = group / groups(p, j->heads);
    u.h = u.hv / (p->HV / p->H);
    u.heads = u.hv + j->heads < p->HV ? j->heads : p->HV - u.hv;
    u.v0 = u.panel * j->columns;
    u.v1 = !wide && u.v0 + j->columns < p->V ? u.v0 + j->columns : p->V;
    if (p->array[LA_CU].given) {
        u.begin = sequence_start(p, u.n);
        u.end = sequence_start(p, u.n + 1);
    } else {
        u.b = u.n;
        u.end = p->T;
        if (p->slots) u.n = p->slots[u.b];
    }
    return u;
}

static int64_t longest_sequence(const la_problem *p)
{
    if (!p->array[LA_CU].given) return p->T;
    int64_t longest = 0;
    for (int64_t n = 0; n < p->N; n++) {
        int64_t length = sequence_start(p, n + 1) - sequence_start(p, n);
        if (length > longest) longest = length;
    }
    return longest;
}

/* A rough figure for sharing out work: multiply-adds at 50 a nanosecond. */
static double work_of(const la_problem *p, double products)
{
    return products * (double)p->tokens * (double)p->HV * (double)p->K * (double)p->V / 50;
}

static size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static void forward_unit(void *context, int64_t i, int thread)
{
    const job *j = context;
    la_unit u = unit_at(j, i);
    j->kernels->forward(j->p, &u, j->scratch + (size_t)thread * j->per_thread);
}

/* A row of the batch that has no state: zeros have no bits set in any dtype. */
static void clear_output(const la_problem *p, const la_unit *u)
{
    const la_array *o = &p->array[LA_O];
    const int64_t size = o->dtype == LA_F64 ? 8 : o->dtype == LA_F32 ? 4 : 2;
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

static int64_t over(int64_t x, int64_t y) { return (x + y - 1) / y; }

/* Columns of different units never mix and every column is computed the same way wherever it lies,
 * so the split may follow the number of threads without moving a bit. Many heads: those whose rows are
 * neighbours go together (ahead.h), as long as their states fit in half of a small L2 cache and every
 * thread has two units. Fewer: as many as divide by the threads go whole, and the columns of those that
 * are left are shared out while threads would have none, though each unit makes its own scores. */
static void split(job *j, int threads)
{
    enum { MOST_HEADS = 4, STATES = 256 << 10, NARROW = 64 };
    const la_problem *p = j->p;
    const int64_t size = p->real == LA_F64 ? 8 : 4, left = p->N * p->HV % threads;
    for (j->heads = MOST_HEADS; j->heads > 1; j->heads /= 2)
        if (p->N * groups(p, j->heads) >= (threads > 1 ? 2 * threads : 1) &&
            j->heads * p->K * p->V * size <= STATES)
            break;
    j->wide = p->N * groups(p, j->heads);
    j->columns = p->V;
    while (j->heads == 1 && left && left * over(p->V, j->columns) < threads && j->columns > NARROW)
        j->columns = over(j->columns / 2, NARROW) * NARROW;
    j->panels = over(p->V, j->columns);
    if (j->panels > 1) j->wide -= left;
}

/* ---- forward, by scores that the units of a head share ----
 *
 * Threads that share a head would each make its chunks' scores. Instead the sequences are walked in
 * rounds of a few chunks: while units walk over the chunks of one round, each in columns of its own,
 * others make the scores of the next round's, in the other half of the head's rooms. No unit waits
 * for another of its run; the end of la_pool_run is where rounds meet (docs/decisions/0008). */

enum { NARROWEST = 32 }; /* two lanes of AVX-512, a tile's width */

typedef struct {
    job j;
    int64_t heads;  /* of all sequences */
    int64_t C;      /* tokens in a chunk */
    int64_t chunks; /* in a round */
    int64_t rounds, now;
    int64_t rooms; /* of a head */
    size_t room_bytes;
    char *room;
} relay;

/* What scores cost a token, in columns: a column takes 3 K multiply-adds, scores up to 2 C K and, in
 * chunks of 16, half of their time for loads and decays. */
static int64_t cost_of_scores(int64_t C) { return C + 16; }

/* Columns a unit so that the slowest thread has least to do; its time, in columns of the longest
 * sequence. Scores fill what walks leave idle, but for those of a single round: these come first. */
static int64_t share_columns(relay *r, int64_t whole, int threads)
{
    const la_problem *p = r->j.p;
    const int64_t scores = cost_of_scores(r->C);
    int64_t least = INT64_MAX;
    for (int64_t panels = 1; panels <= over(p->V, NARROWEST); panels++) {
        int64_t columns = over(over(p->V, panels), NARROWEST) * NARROWEST;
        if (columns > p->V) columns = p->V;
        const int64_t walk = over(whole * over(p->V, columns), threads) * columns;
        const int64_t even = over(whole * (scores + p->V), threads);
        const int64_t first = over(whole * r->chunks, threads) * scores / r->chunks;
        const int64_t time = r->rounds == 1 ? first + walk : walk > even ? walk : even;
        if (time >= least) continue;
        least = time;
        r->j.columns = columns;
        r->j.panels = over(p->V, columns);
    }
    return least;
}

/* Is this the way for p, and how? `alone` is how units would go that share nothing. */
static bool share(relay *r, const job *alone, int threads)
{
    enum { ROUND = 512, CACHE = 2 << 20 }; /* tokens; what a core has of L2 and L3, or less */
    const la_problem *p = alone->p;
    const int64_t longest = longest_sequence(p);
    if (threads < 2 || !longest || !alone->kernels->scores || !p->causal || p->mode == LA_RECURRENT)
        return false;
    /* To read what another core has made costs about as much as to make it: it pays where a head
     * has two threads or more, and no sooner. Heads as if all sequences were as long. */
    const int64_t whole = over(p->tokens * p->HV, longest);
    if (2 * whole > threads) return false;

    *r = (relay){.j = *alone, .heads = p->N * p->HV};
    r->j.heads = 1;
    r->j.wide = 0;
    r->C = r->j.kernels->chunk_tokens(p, longest);
    r->room_bytes = r->j.kernels->scores_room(p, r->C);
    const int64_t most = over(longest, r->C);
    const size_t room = (size_t)threads * (r->room_bytes > CACHE ? r->room_bytes : CACHE);
    for (int64_t chunks = over(ROUND, r->C);; chunks /= 2) {
        if (!chunks) return false;
        r->rounds = over(most, chunks);
        r->chunks = over(most, r->rounds);
        r->rooms = r->rounds > 1 ? 2 * r->chunks : r->chunks;
        if ((size_t)(r->heads * r->rooms) * r->room_bytes <= room) break;
    }
    const int64_t columns = alone->wide ? p->V : alone->columns;
    const int64_t time =
        over(whole * over(p->V, columns), threads) * (cost_of_scores(r->C) + columns);
    return share_columns(r, whole, threads) * 8 <= time * 7; /* rounds cost something too */
}

static void relay_unit(void *context, int64_t i, int thread)
{
    const relay *r = context;
    const job *j = &r->j;
    const int64_t round = r->chunks * r->C, walks = r->now < 0 ? 0 : r->heads * j->panels;
    (void)thread;
    if (i < walks) {
        la_unit u = unit_at(j, i);
        la_chunks made = {.C = r->C, .begin = u.begin + r->now * round, .rooms = r->rooms};
        made.end = made.begin + round < u.end ? made.begin + round : u.end;
        made.bytes = r->room_bytes;
        made.room = r->room + (size_t)(i / j->panels * r->rooms) * r->room_bytes;
        if (made.begin < u.end || r->now == 0) /* without tokens a state is passed on */
            j->kernels->columns(j->p, &u, &made, j->scratch + (size_t)i * j->per_thread);
        return;
    }
    const int64_t head = (i - walks) / r->chunks;
    const int64_t chunk = (r->now + 1) * r->chunks + (i - walks) % r->chunks;
    la_unit u = unit_at(j, head * j->panels);
    const int64_t t = u.begin + chunk * r->C;
    if (t < u.end)
        j->kernels->scores(j->p, &u, t, r->C,
                           r->room + (size_t)(head * r->rooms + chunk % r->rooms) * r->room_bytes);
}

static la_status forward_in_rounds(la_problem *p, relay *r, int threads)
{
    const int64_t walks = r->heads * r->j.panels, makes = r->heads * r->chunks;
    const size_t rooms = whole_pages((size_t)(r->heads * r->rooms) * r->room_bytes);
    r->j.per_thread = whole_pages(r->j.kernels->columns_scratch(p, r->C, r->j.columns));
    r->room = allocate(rooms + r->j.per_thread * (size_t)walks);
    if (!r->room) return out_of_memory(p);
    r->j.scratch = r->room + rooms;
    for (r->now = -1; r->now < r->rounds; r->now++)
        la_pool_run(threads, (r->now < 0 ? 0 : walks) + (r->now + 1 < r->rounds ? makes : 0),
                    relay_unit, r);
    release(r->room);
    return LA_OK;
}

la_status la_forward(la_problem *p)
{
    job j = {.p = p, .kernels = forward_kernels_for(p)};
    relay r;
    double nanoseconds = work_of(p, 3);
    /* A head's columns, and one more that makes its scores. */
    int threads = la_pool_threads(p->N * p->HV * (over(p->V, NARROWEST) + 1), nanoseconds);
    split(&j, threads);
    if (share(&r, &j, threads)) return forward_in_rounds(p, &r, threads);
    int64_t units = j.wide + (p->N * groups(p, j.heads) - j.wide) * j.panels;
    threads = la_pool_threads(units, nanoseconds);
    j.per_thread = whole_pages(j.kernels->forward_scratch(p, longest_sequence(p), j.heads));
    j.scratch = allocate(j.per_thread * (size_t)threads);
    if (!j.scratch) return out_of_memory(p);
    la_pool_run(threads, units, forward_unit, &j);
    release(j.scratch);
    return LA_OK;
}

la_status la_step(la_problem *p)
{
    job j = {.p = p, .kernels = kernels_for(p), .heads = 1, .columns = p->V, .panels = 1};
    int64_t units = p->N * p->HV;
    /* A step is bound by memory: 4 bytes read and written per multiply-add pair. */
    int threads = la_pool_threads(units, work_of(p, 8));
    j.per_thread = whole_pages(j.kernels->step_scratch(p));
    j.scratch = allocate(j.per_thread * (size_t)threads);
    if (!j.scratch) return out_of_memory(p);
    la_pool_run(threads, units, step_unit, &j);
    release(j.scratch);
    return LA_OK;
}

/* ---- backward: units fill their slots, then the slots are gathered ---- */

enum { GATHER_TOKENS = 64 };

static void backward_unit(void *context, int64_t i, int thread)
{
    const job *j = context;
    la_unit u = unit_at(j, i);
    j->kernels->backward(j->p, &u, j->sums, j->scratch + (size_t)thread * j->per_thread);
}

static void gather_unit(void *context, int64_t i, int thread)
{
    const job *j = context;
    la_rows r = {.h = i % j->p->H, .b = i / j->p->H / j->blocks};
    r.begin = i / j->p->H % j->blocks * GATHER_TOKENS;
    r.end = r.begin + GATHER_TOKENS < j->p->T ? r.begin + GATHER_TOKENS : j->p->T;
    j->kernels->gather(j->p, &r, j->sums, j->scratch + (size_t)thread * j->per_thread);
}

static void gather_head_unit(void *context, int64_t hv, int thread)
{
    const job *j = context;
    (void)thread;
    j->kernels->gather_head(j->p, hv, j->sums);
}

/* A single unit would run on a single core. Its scores are made twice then, on whatever number of threads:
 * the width must not depend on it. */
static int64_t backward_columns(const la_problem *p)
{
    const bool one_unit = p->N * p->HV == 1 && p->V <= LA_BACKWARD_PANEL;
    const int64_t widest = one_unit ? LA_BACKWARD_PANEL / 2 : LA_BACKWARD_PANEL;
    return p->V < widest ? p->V : widest;
}

la_status la_backward(la_problem *p)
{
    job j = {.p = p, .kernels = kernels_for(p), .heads = 1};
    const size_t real = p->real == LA_F64 ? 8 : 4;
    la_partials sums = {.tokens = p->tokens};
    sums.kp = (p->K + j.kernels->lanes - 1) / j.kernels->lanes * j.kernels->lanes;
    j.columns = backward_columns(p);
    j.panels = sums.panels = (p->V + j.columns - 1) / j.columns;
    j.sums = &sums;
    j.blocks = (p->T + GATHER_TOKENS - 1) / GATHER_TOKENS;

    sums.alone = p->causal && p->mode != LA_RECURRENT && sums.panels == 1 && p->HV == p->H;

    const size_t slots = (size_t)(p->HV * sums.panels), tokens = (size_t)p->tokens;
    const size_t numbers = whole_pages(slots * tokens * real);
    const size_t rows = sums.alone ? 0 : whole_pages(slots * tokens * (size_t)sums.kp * real);
    const size_t gate = p->decay == LA_HEAD                 ? numbers
                        : p->decay == LA_NONE || sums.alone ? 0
                        : p->decay == LA_KEY                ? rows
                                                            : numbers;
    const size_t beta = p->rule == LA_DELTA && !sums.alone ? numbers : 0;
    const size_t z = p->normaliser == LA_UNNORMALISED
                         ? 0
                         : whole_pages(slots * (size_t)p->N * (size_t)sums.kp * real);
    const int64_t units = p->N * p->HV * j.panels;
    const int threads = la_pool_threads(units, work_of(p, 11));
    size_t each = j.kernels->backward_scratch(p, longest_sequence(p));
    const size_t for_gather = j.kernels->gather_scratch(p);
    j.per_thread = whole_pages(each > for_gather ? each : for_gather);

    char *block = allocate(2 * rows + gate + beta + z + j.per_thread * (size_t)threads);
    if (!block) return out_of_memory(p);
    sums.dq = block;
    sums.dk = block + rows;
    sums.da = block + 2 * rows;
    sums.dbeta = block + 2 * rows + gate;
    sums.dz0 = block + 2 * rows + gate + beta;
    j.scratch = block + 2 * rows + gate + beta + z;

    la_pool_run(threads, units, backward_unit, &j);
    if (!sums.alone) la_pool_run(threads, p->B * j.blocks * p->H, gather_unit, &j);
    la_pool_run(threads, p->HV, gather_head_unit, &j);
    release(block);
    return LA_OK;
}
