/* One pass over a gate before anything is computed: does some decay exceed one? For a decay per key
 * it reads as many numbers as q or k have, so it is shared out too. */
#include "kernels.h"
#include "pool.h"

#include <stdatomic.h>

typedef struct {
    const la_problem *p;
    const la_kernels *kernels;
    double lowest, highest;
    int64_t B, T, blocks; /* a per-head gate has one token; `blocks` of tokens */
    _Atomic bool found;
} gate_pass;

enum { BLOCK = 64 };

static bool token_outside(const gate_pass *j, const char *row)
{
    const la_problem *p = j->p;
    const la_array *g = &p->array[LA_G];
    const int64_t size = la_size_of(g->dtype);
#define OUTSIDE(x, n, stride) j->kernels->outside(x, g->dtype, n, stride, j->lowest, j->highest)
    if (p->decay != LA_KEY) return OUTSIDE(row, p->HV, g->stride[2]);
    if (g->stride[2] == p->K) return OUTSIDE(row, p->HV * p->K, 1);
    for (int64_t h = 0; h < p->HV; h++)
        if (OUTSIDE(row + h * g->stride[2] * size, p->K, 1)) return true;
    return false;
#undef OUTSIDE
}

static void block_of_tokens(void *context, int64_t unit, int thread)
{
    gate_pass *j = context;
    const la_array *g = &j->p->array[LA_G];
    const int64_t size = la_size_of(g->dtype);
    const int64_t b = unit / j->blocks, first = unit % j->blocks * BLOCK;
    const int64_t last = first + BLOCK < j->T ? first + BLOCK : j->T;
    (void)thread;
    for (int64_t t = first; t < last && !atomic_load_explicit(&j->found, memory_order_relaxed); t++)
        if (token_outside(j, g->data + (b * g->stride[0] + t * g->stride[1]) * size))
            atomic_store(&j->found, true);
}

bool la_gate_above_one(const la_problem *p)
{
    if (p->decay == LA_NONE) return false;
    const bool head = p->decay == LA_HEAD;
    gate_pass j = {.p = p,
                   .kernels = la_cpu_kernels(p->array[LA_G].dtype),
                   .lowest = p->gate == LA_LOG ? -__builtin_inf() : 0,
                   .highest = p->gate == LA_DECAY ? 1
                              : p->gate == LA_LOG ? 0
                                                  : __builtin_inf(),
                   .B = head ? 1 : p->B,
                   .T = head ? 1 : p->T};
    j.blocks = (j.T + BLOCK - 1) / BLOCK;
    /* Reading from the L3 cache or from memory: about .1 ns for 4 bytes. */
    const int64_t units = j.B * j.blocks;
    const double numbers =
        (double)j.B * (double)j.T * (double)p->HV * (double)(p->decay == LA_KEY ? p->K : 1);
    la_pool_run(la_pool_threads(units, .1 * numbers), units, block_of_tokens, &j, NULL);
    return atomic_load(&j.found);
}
