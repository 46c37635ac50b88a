/* Lanes: a lane is a SIMD vector of reals, in the compiler's own vector type. This file has the few
 * operations on lanes that plain C arithmetic does not have. It is included once per instance.
 * Everything is static: otherwise the linker could choose a copy that was compiled for a newer
 * machine.
 *
 * The instance files define LA_REAL (float or double), LA_REAL_BITS, LA_LANE_BYTES, and
 * LA_REGISTERS, the number of vector registers: 16 or 32. They define LA_AVX512 where there is
 * AVX-512. */

typedef LA_REAL real;
#if LA_REAL_BITS == 32
#define REAL_DTYPE LA_F32
typedef double real2; /* more digits, for the few numbers in which errors would add up */
#else
#define REAL_DTYPE LA_F64
typedef long double real2;
#endif
typedef real lane __attribute__((vector_size(LA_LANE_BYTES))); /* may alias its elements */

/* A lane in the user's own state, which is aligned to an element only. */
typedef real lane_of_state __attribute__((vector_size(LA_LANE_BYTES), aligned(LA_REAL_BITS / 8)));

#if LA_REAL_BITS == 32
typedef int32_t lane_int __attribute__((vector_size(LA_LANE_BYTES)));
#else
typedef int64_t lane_int __attribute__((vector_size(LA_LANE_BYTES)));
#endif

enum { LANES = LA_LANE_BYTES / sizeof(real) };

#define LA_FN static inline __attribute__((always_inline, unused))
#ifdef __clang__
#define LA_COLD static __attribute__((noinline, unused))
#else /* gcc makes copies for constant arguments too, as large as they are */
#define LA_COLD static __attribute__((noinline, noclone, unused))
#endif

LA_FN int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
LA_FN int64_t padded(int64_t n) { return round_up(n, LANES); }

LA_FN lane *lanes_of(real *x) { return (lane *)__builtin_assume_aligned(x, LA_LANE_BYTES); }
LA_FN const lane *lanes_in(const real *x)
{
    return (const lane *)__builtin_assume_aligned(x, LA_LANE_BYTES);
}

/* The sum over a lane, by halves, in a fixed order. The halves are taken by a union, because
 * compilers then see a register and not memory. */
typedef real lane_16 __attribute__((vector_size(16)));
typedef real lane_32 __attribute__((vector_size(32)));

LA_FN real lane_sum(lane x)
{
#if LA_LANE_BYTES == 64
    union {
        lane all;
        lane_32 half[2];
    } x64 = {x};
    union {
        lane_32 all;
        lane_16 half[2];
    } x32 = {x64.half[0] + x64.half[1]};
    lane_16 y = x32.half[0] + x32.half[1];
#elif LA_LANE_BYTES == 32
    union {
        lane all;
        lane_16 half[2];
    } x32 = {x};
    lane_16 y = x32.half[0] + x32.half[1];
#else
    lane_16 y = x;
#endif
#if LA_REAL_BITS == 32
    return (y[0] + y[2]) + (y[1] + y[3]);
#else
    return y[0] + y[1];
#endif
}
#define LANE_SUM lane_sum
#define LANE_ZERO ((lane){0})

/* mask ? x : y, bit by bit. A mask is a comparison of lanes. */
LA_FN lane pick(lane_int mask, lane x, lane y)
{
    return (lane)((mask & (lane_int)x) | (~mask & (lane_int)y));
}
#define LANE_PICK pick

/* For exp: the larger and the smaller of two lanes (where one is NaN, the second), a lane rounded
 * to whole numbers, and x 2^n. */
#if LA_AVX512 && LA_REAL_BITS == 32
LA_FN lane lane_most(lane x, lane y) { return (lane)_mm512_max_ps((__m512)x, (__m512)y); }
LA_FN lane lane_least(lane x, lane y) { return (lane)_mm512_min_ps((__m512)x, (__m512)y); }
LA_FN lane lane_rounded(lane x) { return (lane)_mm512_roundscale_ps((__m512)x, 0); }
LA_FN lane lane_times_power(lane x, lane n) { return (lane)_mm512_scalef_ps((__m512)x, (__m512)n); }
#elif LA_AVX512
LA_FN lane lane_most(lane x, lane y) { return (lane)_mm512_max_pd((__m512d)x, (__m512d)y); }
LA_FN lane lane_least(lane x, lane y) { return (lane)_mm512_min_pd((__m512d)x, (__m512d)y); }
LA_FN lane lane_rounded(lane x) { return (lane)_mm512_roundscale_pd((__m512d)x, 0); }
LA_FN lane lane_times_power(lane x, lane n)
{
    return (lane)_mm512_scalef_pd((__m512d)x, (__m512d)n);
}
#else
#if LA_REAL_BITS == 32
enum { MANTISSA = 23, BIAS = 127 };
#define LA_ROUND 0x1.8p23f /* added, it leaves no digits behind the point */
#else
enum { MANTISSA = 52, BIAS = 1023 };
#define LA_ROUND 0x1.8p52
#endif
LA_FN lane lane_most(lane x, lane y) { return pick(y < x, x, y); }
LA_FN lane lane_least(lane x, lane y) { return pick(y > x, x, y); }
LA_FN lane lane_rounded(lane x) { return (x + LA_ROUND) - LA_ROUND; }

/* 2^n as a product of two powers, because n reaches below the normal exponents. */
LA_FN lane lane_times_power(lane x, lane n)
{
    const lane_int power = (lane_int)(n + LA_ROUND) - (lane_int)(LA_ROUND - (lane){0});
    const lane_int half = power >> 1, rest = power - half;
    return x * (lane)((half + BIAS) << MANTISSA) * (lane)((rest + BIAS) << MANTISSA);
}
#endif

/* Splits x = n ln2 + r, |r| <= ln2/2. Gives n, and exp(r) - 1 by its own series.
 *
 * The first term that the series leaves out is (ln2/2)^8/8! = 5e-9 in float32 (half an ulp is
 * 6e-8), and (ln2/2)^14/14! = 4e-18 in float64 (1.1e-16). ln2 is split so that n * LN2_HIGH is
 * exact. x is clamped to a range that is just wide enough for exp(x) to reach 0 and infinity. */
LA_FN lane exp_less_one(lane x, lane *n)
{
#if LA_REAL_BITS == 32
    enum { DEGREE = 7 };
    const real lowest = -105, highest = 90;
    const real LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
#else
    enum { DEGREE = 13 };
    const real lowest = -750, highest = 710;
    const real LN2_HIGH = 0x1.62e42fee0p-1, LN2_LOW = 0x1.a39ef35793c76p-33;
#endif
    const real LOG2_E = (real)1.44269504088896340736;
    /* clang-format off */
    static const real over_factorial[] = {
        1,           1,           (real)(1. / 2),       (real)(1. / 6),        (real)(1. / 24),
        (real)(1. / 120),         (real)(1. / 720),     (real)(1. / 5040),     (real)(1. / 40320),
        (real)(1. / 362880),      (real)(1. / 3628800), (real)(1. / 39916800),
        (real)(1. / 479001600),   (real)(1. / 6227020800)};
    /* clang-format on */
    x = lane_least(highest - (lane){0}, lane_most(lowest - (lane){0}, x));
    *n = lane_rounded(x * LOG2_E);
    const lane r = (x - *n * LN2_HIGH) - *n * LN2_LOW;
    lane series = over_factorial[DEGREE] - (lane){0};
    for (int i = DEGREE - 1; i >= 1; i--) series = series * r + over_factorial[i];
    return series * r;
}

/* exp, within 2 ulp over the whole range: 0 below the least denormal number, inf above the largest
 * real. A NaN stays one. */
LA_FN lane lane_exp(lane x)
{
    lane n;
    const lane less_one = exp_less_one(x, &n);
    return lane_times_power(1 + less_one, n);
}
#define LANE_EXP lane_exp
#define LANE_OVER(x, y) ((x) / (y))

/* x itself, which the compiler fuses with nothing. */
LA_FN lane lane_as_it_is(lane x)
{
#if defined(__x86_64__) && LA_AVX512
    __asm__("" : "+v"(x));
#elif defined(__x86_64__) && LA_LANE_BYTES < 64
    __asm__("" : "+x"(x));
#elif defined(__aarch64__)
    __asm__("" : "+w"(x));
#endif
    return x;
}

/* exp(x) = (decay + *rest) 2^n, where *rest is what rounding took away. For x near 0 the two have as
 * many digits as x. Every decay is made here. Left to itself, the compiler would fuse the last
 * product of the series with the sum in some places and not in others, and the bits would differ. */
LA_FN lane decay_before_power(lane x, lane *rest, lane *n)
{
    const lane less_one = lane_as_it_is(exp_less_one(x, n)), decay = 1 + less_one;
    *rest = less_one - (decay - 1); /* exact, because |less_one| < 1 */
    return decay;
}

/* A decay, exp(x), and in *rest the part that its rounding took away. */
LA_FN lane lane_decay(lane x, lane *rest)
{
    lane n;
    const lane decay = decay_before_power(x, rest, &n);
    *rest = lane_times_power(*rest, n);
    return lane_times_power(decay, n);
}

/* exp(x), rounded so that it pays back what was `owed`, the relative error of the decays before it.
 * The debt is not divided by the decay: before the power of two, that is within a half of 1. A
 * division for each key and token costs 3 % of a gradient of gla. */
LA_FN lane lane_decay_paid_back(lane x, lane *owed)
{
    lane n, rest;
    const lane decay = decay_before_power(x, &rest, &n), due = rest + decay * *owed;
    const lane paid = decay + due;
    *owed = due - (paid - decay);
    return lane_times_power(paid, n);
}
#define LANE_DECAY(log, gate, rest) lane_decay(log, rest)
