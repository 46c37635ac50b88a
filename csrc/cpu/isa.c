/* The instruction set whose kernels a problem gets: chosen once, by the processor or by name. */
#define _GNU_SOURCE
#include "kernels.h"

#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* By feature bits, never by the name of a processor family. (The compiler's builtins also check
 * that the system saves the registers.) */
static bool anywhere(void) { return true; }

#if defined(__x86_64__) && !defined(LA_ONE_SET) /* tests/c/Makefile */
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

/* The system saves these registers for a process that has requested them, once for all its threads.
 * Some compilers' builtins and headers do not know the names yet. */
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
    const la_kernels *bf16; /* for the problems of wants_bf16, or NULL */
} instance;

/* From the least to the best: the last one that runs here is chosen. Two stand before a lesser one,
 * so that only their names choose them. AVX-512-BF16 has twice the rate only on some makers'
 * processors (on Sapphire Rapids half of it), and no feature bit says so (docs/decisions/0020). AMX
 * with one number for a real is faster than with two, and rounds to 8 bits (0026). */
static const instance instances[] = {
    {&la_cpu_baseline_f32, &la_cpu_baseline_f64, anywhere, NULL},
#if defined(__x86_64__) && !defined(LA_ONE_SET)
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

const la_kernels *la_cpu_kernels(la_dtype real)
{
    const instance *i = &instances[choose()];
    return real == LA_F64 ? i->f64 : i->f32;
}

/* Can the large products of a forward pass be those of bfloat16 numbers? Only if the keys are
 * multiplied as the user gave them, and a decay per key would scale them. Instances that round a
 * float to 8 bits miss the acceptance rule in chunks of 129 tokens and more, with few keys. So such
 * chunks, and mode="parallel", stay in float. */
static bool wants_bf16(const la_problem *p)
{
    enum { MOST_TOKENS = 64 };
    return p->causal && p->mode == LA_CHUNK && p->chunk <= MOST_TOKENS && p->decay != LA_KEY &&
           p->decay != LA_PAIR && !p->array[LA_X].given && p->map[0] == LA_IDENTITY &&
           p->map[1] == LA_IDENTITY && p->normaliser == LA_UNNORMALISED &&
           p->array[LA_Q].dtype == LA_BF16;
}

const la_kernels *la_cpu_forward_kernels(const la_problem *p)
{
    const la_kernels *bf16 = instances[choose()].bf16;
    return bf16 && wants_bf16(p) ? bf16 : la_cpu_kernels(p->real);
}

int la_forward_bits(const la_problem *p) { return la_cpu_forward_kernels(p)->bits; }
