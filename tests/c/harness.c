/* harness [cases [first seed]]: random problems through the C core, no Python.
 *
 * Each legal problem runs token by token on the baseline instruction set, then as drawn, on a drawn
 * instruction set and number of threads. Both must leave all memory but the outputs alone and agree;
 * another number of threads must give the same bits. Each is then corrupted, and la_check must answer
 * without touching anything. */
#include "sample.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool check_corrupted(const sample *s, draw *d); /* corrupt.c */

/* The outputs of a run, as numbers, one array after the other. */
static double *results(const sample *s, int64_t *count)
{
    int64_t n = 0, at = 0;
    for (int name = 0; name < LA_ARRAYS; name++)
        if (s->written[name]) n += array_size(&s->p.array[name]);
    double *x = malloc(sizeof *x * (size_t)(n + 1));
    if (!x) abort();
    for (int name = 0; name < LA_ARRAYS; name++) {
        const la_array *a = &s->p.array[name];
        for (int64_t i = 0; s->written[name] && i < array_size(a); i++)
            x[at++] = element_value(array_element(a, i), a->dtype);
    }
    *count = n;
    return x;
}

static double unit_roundoff(la_dtype dtype)
{
    return dtype == LA_F64   ? 0x1p-53
           : dtype == LA_F32 ? 0x1p-24
           : dtype == LA_F16 ? 0x1p-11
                             : 0x1p-8;
}

/* Inputs are of order 1, so sums have terms of the size of their largest result or of 1. Two orders
 * of summation differ by about u sqrt(terms) of that; SLACK covers what follows on (the solve, the
 * normaliser). Storing in a narrow dtype adds at most one unit in the last place of the element.
 * A wrong index or mask is off by order 1. Products of rounded factors are sums over keys, and over
 * tokens, of terms that are each off by half a unit of what was multiplied; nothing follows on that is as
 * large. */
enum { SLACK = 8 };
static double worst_ratio;

static bool agree(const sample *s, const double *x, const double *y)
{
    const la_problem *p = &s->p;
    const int bits = s->run.pass == LA_FORWARD ? la_forward_bits(&s->run) : 53;
    const bool rounded = bits <= 16;
    const double u = rounded ? ldexp(1, -bits - 1) / SLACK : unit_roundoff(s->run.real);
    const double terms = rounded ? (double)p->K + (double)la_longest_row(p)
                                 : (double)(la_longest_row(p) + 1) * (double)p->K * (double)p->V *
                                       (double)(p->HV / p->H);
    for (int name = 0; name < LA_ARRAYS; name++) {
        if (!s->written[name]) continue;
        const la_array *a = &p->array[name];
        const int64_t n = array_size(a);
        const double own = a->dtype == s->run.real ? 0 : 2 * unit_roundoff(a->dtype);
        double size = 1;
        for (int64_t i = 0; i < n; i++) size = fmax(size, fabs(x[i]));
        for (int64_t i = 0; i < n; i++) {
            double sums = SLACK * u * sqrt(terms) * size;
            double bound = sums + own * fabs(x[i]) + (a->dtype == LA_F16 ? 0x1p-23 : 0);
            double off = fabs(x[i] - y[i]);
            if (off <= own * fabs(x[i])) off = 0;
            worst_ratio = fmax(worst_ratio, off / bound);
            if (off <= bound) continue;
            fprintf(stderr, "%s[%lld]: %.17g token by token, %.17g as drawn, bound %.3g\n",
                    la_array_name(&s->run, (la_name)name), (long long)i, x[i], y[i], bound);
            return false;
        }
        x += n;
        y += n;
    }
    return true;
}

static bool run_and_look(sample *s)
{
    la_status status = sample_run(s);
    if (status) {
        fprintf(stderr, "a legal problem was refused: %s\n", s->run.message);
        return false;
    }
    if (s->tame && la_gate_above_one(&s->run)) {
        fprintf(stderr, "a decay within [0, 1] was called growth\n");
        return false;
    }
    return sample_intact(s);
}

static void choose_isa(draw *d)
{
    for (;;) {
        bool here;
        const char *name = la_isa_name((int)draw_int(d, 0, la_isa_count() - 1), &here);
        if (here && la_isa_choose(name)) return;
    }
}

/* Does the call write an element? A step without a row of the batch leaves a whole pool alone. */
static bool writes_something(const sample *s)
{
    if (s->p.pass == LA_STEP && !s->p.B) return false;
    for (int name = 0; name < LA_ARRAYS; name++)
        if (s->written[name] && array_size(&s->p.array[name])) return true;
    return false;
}

/* No memory: the status says so and nothing has been written. A call that writes nothing returns before
 * it asks for memory. */
static bool check_no_memory(sample *s)
{
    la_fail_allocation(1);
    la_status status = sample_run(s);
    la_fail_allocation(0);
    if (status == (writes_something(s) ? LA_MEMORY_ERROR : LA_OK)) return sample_untouched(s);
    fprintf(stderr, "no memory, and status %d\n", status);
    return false;
}

static bool check_one(sample *s, draw *d)
{
    const la_mode mode = s->p.mode;
    int64_t n;
    s->p.mode = LA_RECURRENT;
    la_isa_choose("baseline");
    la_set_num_threads(1);
    if (!run_and_look(s)) return false;
    double *plain = results(s, &n);

    s->p.mode = mode;
    choose_isa(d);
    la_set_num_threads((int)draw_int(d, 1, 4));
    bool good = run_and_look(s);
    double *drawn = results(s, &n);
    if (good && s->tame) good = agree(s, plain, drawn);
    if (good && draw_chance(d, 3)) {
        la_set_num_threads((int)draw_int(d, 1, 4));
        good = run_and_look(s);
        double *again = results(s, &n);
        if (good && memcmp(drawn, again, sizeof *again * (size_t)n)) {
            fprintf(stderr, "other bits on another number of threads\n");
            good = false;
        }
        free(again);
    }
    if (good && draw_chance(d, 8)) good = check_no_memory(s);
    free(plain);
    free(drawn);
    return good && check_corrupted(s, d);
}

static volatile long seed;

/* A shut page was touched: say where to look, then die of it. */
static void say_seed(int number)
{
    fprintf(stderr, "signal %d; again with: harness 1 %ld\n", number, seed);
    signal(number, SIG_DFL);
}

int main(int argc, char **argv)
{
    const long cases = argc > 1 ? atol(argv[1]) : 2000, first = argc > 2 ? atol(argv[2]) : 1;
    signal(SIGSEGV, say_seed);
    for (seed = first; seed < first + cases; seed++) {
        draw d = {.state = (uint64_t)seed * 0x9e3779b97f4a7c15};
        sample s;
        sample_make(&s, &d, draw_chance(&d, 6) ? 300 : 70);
        if (!check_one(&s, &d)) {
            sample_describe(&s);
            fprintf(stderr, "  again with: harness 1 %ld\n", seed);
            return 1;
        }
        sample_free(&s);
    }
    printf("harness: %ld problems from seed %ld; largest difference %.2g of its bound\n", cases,
           first, worst_ratio);
    return 0;
}
