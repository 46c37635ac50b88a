/* The pool. Workers are started when they are first needed. They spin briefly for the next job,
 * because waking a sleeping thread costs 80 us, and a kernel on a short sequence less. Then they
 * sleep on a condition variable.
 *
 * fork: a child process has no workers, so its copy of the pool is reset and starts its own when
 * needed. The parent cannot be in the middle of a job of the forking thread, because la_pool_run
 * returns only when the job is done. A job of another thread belongs to the parent alone.
 *
 * Concurrent callers: the pool serves one at a time. A caller that finds the pool busy runs
 * single-threaded. `la_pool_threads` reports this in advance when it can, because splitting work
 * into more units increases the total work. That costs parallelism, never correctness: results do
 * not depend on which thread computes a unit. */
#define _GNU_SOURCE
#include "pool.h"
#include "../watch.h"

#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* Where a test holds a worker up (tests/c/waits.c): before it has entered a job that it has seen,
 * and after. */
#if !defined(LA_POOL_PAUSE)
#define LA_POOL_PAUSE(inside)
#endif

enum { MAX_THREADS = 256 };

/* Below this much work per extra thread, sharing costs more than it saves: handing a job to a
 * spinning worker takes about 1 us, and to a sleeping one 80 us. */
static const double WORTH_SHARING = 30e3;

/* Spin this long before sleeping: two wake-ups' worth, so that a loop of calls keeps the workers
 * awake. */
static const int64_t SPIN_NANOSECONDS = 160 * 1000;

static struct {
    pthread_mutex_t caller; /* held by the caller whose job runs */
    _Atomic bool busy;      /* so that other callers can see it in advance */
    pthread_mutex_t lock;   /* guards the fields below, with the condition */
    pthread_cond_t wake;
    int started;          /* workers that exist */
    _Atomic uint64_t job; /* number of the job on offer */
    _Atomic int wanted;   /* workers that may still join it */
    _Atomic int working;  /* workers inside it */
    _Atomic int64_t next; /* its next unit */
    int64_t units;
    la_work *work;
    void *context;
    fenv_t mode; /* the caller's floating-point mode: its job is computed in it */
} pool = {.caller = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER};

static _Atomic int chosen_threads; /* 0: the default */
static _Thread_local bool inside;  /* this thread is already in a job */

/* 0: not set; -1: not a number of threads. OpenMP's variable is a list, with a number per level of
 * nesting, and may ask for more threads than are possible. */
static int from_environment(const char *name, bool list)
{
    const char *text = getenv(name);
    if (!text || !*text) return 0;
    char *end;
    const long n = strtol(text, &end, 10);
    while (*end == ' ') end++;
    if (end == text || n < 1 || (*end && !(list && *end == ','))) return -1;
    if (n > MAX_THREADS) return list ? MAX_THREADS : -1;
    return (int)n;
}

static int threads_of_linattn(void) { return from_environment("LINATTN_NUM_THREADS", false); }
static int threads_of_openmp(void) { return from_environment("OMP_NUM_THREADS", true); }

const char *la_threads_unreadable(const char **text)
{
    const int ours = threads_of_linattn();
    const char *name = ours < 0                               ? "LINATTN_NUM_THREADS"
                       : ours == 0 && threads_of_openmp() < 0 ? "OMP_NUM_THREADS"
                                                              : NULL;
    *text = name ? getenv(name) : NULL;
    return name;
}

static int default_threads(void)
{
    int n = threads_of_linattn();
    if (n < 1) n = threads_of_openmp();
    if (n < 0) n = 0;
#if defined(__linux__)
    cpu_set_t set;
    if (!n && !sched_getaffinity(0, sizeof set, &set)) n = CPU_COUNT(&set);
#endif
    if (!n) n = (int)sysconf(_SC_NPROCESSORS_ONLN);
    return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

void la_set_num_threads(int n)
{
    atomic_store(&chosen_threads, n < 0 ? 0 : n > MAX_THREADS ? MAX_THREADS : n);
}

int la_get_num_threads(void)
{
    int n = atomic_load(&chosen_threads);
    if (n) return n;
    n = default_threads();
    atomic_store(&chosen_threads, n);
    return n;
}

int la_pool_threads(int64_t units, double nanoseconds)
{
    if (inside || units < 2 || nanoseconds < WORTH_SHARING || atomic_load(&pool.busy)) return 1;
    int n = la_get_num_threads();
    if (n > units) n = (int)units;
    if (n * WORTH_SHARING / 2 > nanoseconds) n = (int)(nanoseconds / (WORTH_SHARING / 2));
    return n < 1 ? 1 : n;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void take_units(int thread)
{
    inside = true;
    for (;;) {
        int64_t unit = atomic_fetch_add(&pool.next, 1);
        if (unit >= pool.units) break;
        pool.work(pool.context, unit, thread);
    }
    inside = false;
}

/* Wait until a job after `seen` is on offer. */
static uint64_t wait_for_job(uint64_t seen)
{
    uint64_t job;
    int64_t until = now() + SPIN_NANOSECONDS;
    for (int i = 0; (job = atomic_load(&pool.job)) == seen; i++) {
        relax();
        if (i % 64 == 63 && now() > until) {
            pthread_mutex_lock(&pool.lock);
            while ((job = atomic_load(&pool.job)) == seen)
                pthread_cond_wait(&pool.wake, &pool.lock);
            pthread_mutex_unlock(&pool.lock);
            break;
        }
    }
    return job;
}

static void *worker(void *first_job)
{
    uint64_t seen = (uint64_t)(uintptr_t)first_job;
    for (;;) {
        seen = wait_for_job(seen);
        LA_POOL_PAUSE(false);
        /* Enter first, then check whether the job still wants workers: a caller with the next job
         * waits until all workers have left. */
        atomic_fetch_add(&pool.working, 1);
        LA_POOL_PAUSE(true);
        int place = atomic_fetch_sub(&pool.wanted, 1);
        if (place > 0) {
            fesetenv(&pool.mode);
            take_units(place);
        }
        atomic_fetch_sub(&pool.working, 1);
    }
    return NULL;
}

static void after_fork_in_child(void)
{
    pthread_mutex_init(&pool.caller, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    atomic_store(&pool.busy, false);
    pool.started = 0;
    atomic_store(&pool.wanted, 0);
    atomic_store(&pool.working, 0);
    inside = false;
}

static void register_fork_handler(void) { pthread_atfork(NULL, NULL, after_fork_in_child); }

/* Signals belong to the caller's threads: Ctrl-C must reach Python's main thread. */
static void start_workers(int count)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork_handler);
    if (pool.started >= count) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.started < count) {
        pthread_t id;
        void *seen = (void *)(uintptr_t)atomic_load(&pool.job);
        if (pthread_create(&id, NULL, worker, seen)) break; /* fewer threads: slower, still right */
        pthread_detach(id);
        pool.started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- calls that end early ---- */

/* About ten times a second. */
enum { CHECK_NANOSECONDS = 100 * 1000 * 1000 };

/* A tenth of the cost of now(), and exact to some milliseconds. */
static int64_t about_now(void)
{
#if defined(CLOCK_MONOTONIC_COARSE)
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
#else
    return now();
#endif
}

void la_watch_begin(la_watch *w, bool (*interrupted)(void *caller), void *caller)
{
    w->interrupted = interrupted;
    w->caller = caller;
    w->thread = &inside;
    w->next = about_now() + CHECK_NANOSECONDS;
    atomic_init(&w->stop, false);
}

bool la_stopped(const la_problem *p)
{
    la_watch *const w = p->watch;
    if (!w) return false;
    if (atomic_load_explicit(&w->stop, memory_order_relaxed)) return true;
    if (w->thread != &inside || about_now() < w->next) return false;
    if (w->interrupted(w->caller)) atomic_store(&w->stop, true);
    w->next = about_now() + CHECK_NANOSECONDS;
    return atomic_load_explicit(&w->stop, memory_order_relaxed);
}

/* The caller has no unit left, and another thread may still need seconds for one. A check takes 10
 * ns, and the pauses between two checks take some microseconds. */
static void wait_for_workers(const la_problem *p)
{
    enum { PAUSES = 256 };
    for (unsigned i = 1; atomic_load(&pool.working); i++) {
        relax();
        if (i % PAUSES == 0 && p) la_stopped(p);
    }
}

void la_pool_run(int threads, int64_t units, la_work *work, void *context, const la_problem *p)
{
    if (threads < 2 || inside || pthread_mutex_trylock(&pool.caller)) {
        bool before = inside;
        inside = true;
        for (int64_t unit = 0; unit < units; unit++) work(context, unit, 0);
        inside = before;
        return;
    }
    atomic_store(&pool.busy, true);
    start_workers(threads - 1);
    while (atomic_load(&pool.working)) relax(); /* workers that came late to the last job */
    pool.work = work;
    pool.context = context;
    pool.units = units;
    fegetenv(&pool.mode);
    atomic_store(&pool.next, 0);
    atomic_store(&pool.wanted, threads - 1);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.job, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);

    take_units(0);
    atomic_store(&pool.wanted, 0); /* no worker joins any more */
    wait_for_workers(p);
    atomic_store(&pool.busy, false);
    pthread_mutex_unlock(&pool.caller);
}
