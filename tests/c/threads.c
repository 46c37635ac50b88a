/* threads [rounds]: callers at once in one pool, the number of threads changing under them. For
 * ThreadSanitizer; each caller's results must also be the bits that it got alone. */
#include "sample.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLERS = 8, PROBLEMS = 4 };

static long rounds = 20;
static atomic_bool failed;

/* Large enough to be shared out: the pool's threshold is 30 us of work a thread. few: in chunks,
 * with half as many heads as threads at times, so that threads share a head. */
static void make_large(sample *s, draw *d, bool few)
{
    for (;;) {
        sample_make(s, d, 160);
        const la_problem *p = &s->p;
        const bool shared = p->N * p->HV <= 2 && p->causal && p->mode == LA_CHUNK &&
                            p->chunk <= 40 && p->pass == LA_FORWARD;
        if (p->B * p->T * p->HV * p->K * p->V > 1 << 19 && p->pass != LA_STEP && (shared || !few))
            return;
        sample_free(s);
    }
}

static size_t total_bytes(const sample *s)
{
    size_t n = 0;
    for (int name = 0; name < LA_ARRAYS; name++)
        if (s->written[name]) n += s->block[name].bytes;
    return n;
}

/* Which NaN is not promised: where two meet, the sign is that of an instruction's first operand, and the
 * compiler orders them anew in each copy of a loop. */
static void settle_nan(char *x, la_dtype dtype, size_t bytes)
{
    const size_t size = la_size_of(dtype);
    for (size_t i = 0; i + size <= bytes; i += size)
        if (isnan(element_value(x + i, dtype))) memset(x + i, 0xff, size);
}

static char *copy_outputs(const sample *s)
{
    char *copy = malloc(total_bytes(s) + 1), *at = copy;
    if (!copy) abort();
    for (int name = 0; name < LA_ARRAYS; name++)
        if (s->written[name]) {
            const block *from = &s->block[name];
            const la_array *x = &s->p.array[name];
            const size_t before = (size_t)(x->data - from->start) % la_size_of(x->dtype);
            memcpy(at, from->start, from->bytes);
            settle_nan(at + before, x->dtype, from->bytes - before);
            at += s->block[name].bytes;
        }
    return copy;
}

static void *caller(void *number)
{
    sample s[PROBLEMS];
    char *alone[PROBLEMS];
    draw d = {.state = (uint64_t)(uintptr_t)number * 1000003};
    for (int i = 0; i < PROBLEMS; i++) {
        make_large(&s[i], &d, i % 2);
        if (sample_run(&s[i])) atomic_store(&failed, true);
        alone[i] = copy_outputs(&s[i]);
    }
    for (long round = 0; round < rounds; round++)
        for (int i = 0; i < PROBLEMS; i++) {
            la_set_num_threads((int)draw_int(&d, 1, 4));
            char *now = NULL;
            if (sample_run(&s[i]) || !sample_intact(&s[i]) ||
                memcmp(now = copy_outputs(&s[i]), alone[i], total_bytes(&s[i]))) {
                sample_describe(&s[i]);
                atomic_store(&failed, true);
            }
            free(now);
        }
    for (int i = 0; i < PROBLEMS; i++) {
        free(alone[i]);
        sample_free(&s[i]);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t id[CALLERS];
    if (argc > 1) rounds = atol(argv[1]);
    for (uintptr_t i = 0; i < CALLERS; i++)
        if (pthread_create(&id[i], NULL, caller, (void *)(i + 1))) return 2;
    for (int i = 0; i < CALLERS; i++) pthread_join(id[i], NULL);
    printf("threads: %d callers, %ld rounds of %d problems: %s\n", CALLERS, rounds, PROBLEMS,
           atomic_load(&failed) ? "WRONG" : "same bits as alone");
    return atomic_load(&failed);
}
