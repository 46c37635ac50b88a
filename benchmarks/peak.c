/* The ceilings that the figures are shares of: float32 multiply-adds a second and bytes a second, on
 * one core. ceilings.py compiles this with -march=native, so that it is this machine's peak. */
#include <stddef.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

#if defined(__aarch64__)
#define REGISTER(x) "+w"(x)
#else
#define REGISTER(x) "+x"(x)
#endif

/* Enough independent chains to cover the latency of a multiply-add (4 to 5 cycles) on two or four
 * ports, and few enough for 16 registers with the two factors. */
enum { CHAINS = LANES == 16 ? 24 : 12 };

/* Returns the floating-point operations done; *sink keeps them from being optimised away. */
double peak_fma(long rounds, float *sink) {
    lanes sum[CHAINS], a, b;
    for (int i = 0; i < LANES; i++)
        a[i] = 0.999f, b[i] = 1e-3f * (float)(i + 1); /* sums near b / (1 - a), never denormal */
    for (int c = 0; c < CHAINS; c++)
        sum[c] = b + (float)c;
    for (long r = 0; r < rounds; r++) {
        /* the compiler may not see through a and b */
        __asm__ volatile("" : REGISTER(a), REGISTER(b));
#pragma GCC unroll 24
        for (int c = 0; c < CHAINS; c++)
            sum[c] = sum[c] * a + b;
    }
    for (int c = 1; c < CHAINS; c++)
        sum[0] += sum[c];
    *sink = 0;
    for (int i = 0; i < LANES; i++)
        *sink += sum[0][i];
    return 2.0 * LANES * CHAINS * (double)rounds;
}

/* One pass over a state as a step must make it: every element read, changed and written. n is a
 * multiple of LANES, x is aligned as lanes are. */
double peak_update(float *x, size_t n, float factor) {
    lanes *p = (lanes *)x;
    for (size_t i = 0; i < n / LANES; i++)
        p[i] *= factor;
    return 2.0 * (double)(n * sizeof *x);
}

/* From DRAM to DRAM; read and write are counted, a write-allocate is not. */
double peak_copy(char *to, const char *from, size_t bytes) {
    memcpy(to, from, bytes);
    return 2.0 * (double)bytes;
}
