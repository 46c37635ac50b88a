/* A small private thread pool: units of independent work over a few threads. */
#ifndef LINATTN_CPU_POOL_H
#define LINATTN_CPU_POOL_H

#include "../linattn.h"

#include <stdint.h>

typedef void la_work(void *context, int64_t unit, int thread);

/* The number of threads that a call with this many units and this much work would get, at most: 1
 * if the work is too small to share, or if the pool is at work for another caller. */
int la_pool_threads(int64_t units, double nanoseconds);

/* Call work(context, unit, thread) for every unit in [0, units), thread in [0, threads). The caller
 * takes part. A nested call, or one that finds the pool at work for another caller, runs all units
 * itself. p: the problem whose signals the caller checks while it waits for the other threads.
 * NULL: it checks none. */
void la_pool_run(int threads, int64_t units, la_work *work, void *context, const la_problem *p);

#endif
