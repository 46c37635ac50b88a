/* waits: the pool's two waits for workers, and what the caller does in the second. Each has a
 * schedule on which a pool without it fails every time. A worker is held up at the places of
 * LA_POOL_PAUSE, or in a unit. It stays until
 * what must not happen has happened, or for a tenth of a second. */
static void hold_worker(int inside);
#define LA_POOL_PAUSE hold_worker
#include "../../csrc/cpu/pool.c"

#include <stdio.h>

enum { HELD_NANOSECONDS = 100 * 1000 * 1000, THREADS = 2 };

static int64_t hold_until(const atomic_bool *happened)
{
    const int64_t until = now() + HELD_NANOSECONDS;
    while (!atomic_load(happened) && now() < until) relax();
    return atomic_load(happened);
}

static void wait_for(const atomic_bool *happened)
{
    while (!atomic_load(happened)) relax();
}

/* ---- before a job: no worker is inside by way of the last one ---- */

static atomic_bool holding, first_over, entered, left, second_began, began_too_early;

/* The worker sees the first job, enters when it is over, and stays for a while. */
static void hold_worker(int inside)
{
    if (!atomic_load(&holding)) return;
    if (!inside) {
        wait_for(&first_over);
        return;
    }
    atomic_store(&entered, true);
    hold_until(&second_began);
    atomic_store(&left, true);
}

static void first_job(void *context, int64_t unit, int thread)
{
    (void)context, (void)unit, (void)thread;
}

static void second_job(void *context, int64_t unit, int thread)
{
    (void)context, (void)unit, (void)thread;
    if (!atomic_load(&left)) atomic_store(&began_too_early, true);
    atomic_store(&second_began, true);
}

static bool a_job_begins_with_no_worker_inside(void)
{
    atomic_store(&holding, true);
    la_pool_run(THREADS, 1, first_job, NULL, NULL);
    atomic_store(&first_over, true);
    wait_for(&entered);
    la_pool_run(THREADS, 1, second_job, NULL, NULL);
    wait_for(&left);
    atomic_store(&holding, false);
    return !atomic_load(&began_too_early);
}

/* ---- after a job: its last unit is done ---- */

static atomic_bool begun[THREADS], returned, returned_too_early, done;

/* A unit for each thread: neither goes on before both have begun. */
static void slow_in_the_worker(void *context, int64_t unit, int thread)
{
    (void)context, (void)unit;
    atomic_store(&begun[thread], true);
    wait_for(&begun[1 - thread]);
    if (!thread) return;
    if (hold_until(&returned)) atomic_store(&returned_too_early, true);
    atomic_store(&done, true);
}

static bool a_call_returns_after_its_last_unit(void)
{
    la_pool_run(THREADS, THREADS, slow_in_the_worker, NULL, NULL);
    atomic_store(&returned, true);
    wait_for(&done);
    return !atomic_load(&returned_too_early);
}

/* ---- while it waits: the caller looks for signals ---- */

static atomic_bool began[THREADS], stopped_in_time;

static bool always(void *caller)
{
    (void)caller;
    return true;
}

/* The caller's unit ends at once. The worker's goes on until the call is to end. */
static void long_in_the_worker(void *context, int64_t unit, int thread)
{
    enum { ENOUGH = 20 }; /* looks of the caller */
    const int64_t until = now() + ENOUGH * (int64_t)CHECK_NANOSECONDS;
    bool stopped = false;
    (void)unit;
    atomic_store(&began[thread], true);
    wait_for(&began[1 - thread]);
    if (!thread) return;
    while (!(stopped = la_stopped(context)) && now() < until) relax();
    atomic_store(&stopped_in_time, stopped);
}

static bool a_caller_that_waits_looks_for_signals(void)
{
    la_watch watch;
    la_problem p = {.watch = &watch};
    la_watch_begin(&watch, always, NULL);
    la_pool_run(THREADS, THREADS, long_in_the_worker, &p, &p);
    return atomic_load(&stopped_in_time);
}

int main(void)
{
    const bool before = a_job_begins_with_no_worker_inside();
    const bool after = a_call_returns_after_its_last_unit();
    const bool meanwhile = a_caller_that_waits_looks_for_signals();
    printf("waits: before a job: %s; after a job: %s; meanwhile: %s\n", before ? "right" : "WRONG",
           after ? "right" : "WRONG", meanwhile ? "right" : "WRONG");
    return !before || !after || !meanwhile;
}
