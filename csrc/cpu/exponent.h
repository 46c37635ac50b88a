/* Powers of two and angles, for decays that a scan makes of its own numbers: exp(delta A), one for
 * each number of a state. They are most of its work, so they take as few steps as their digits
 * allow. */

enum { AT_ONCE = LA_REGISTERS / 8 }; /* lanes that take turns */

/* 2^x for `many` lanes. The result is 0 below the least denormal number and infinite above the
 * largest real; a NaN stays one. 2^r for |r| <= 1/2 is 1 + r c(r), where c interpolates (2^r - 1) /
 * r in the Chebyshev points of [-1/2, 1/2]: the error is 5e-9 in float32 (half an ulp is 6e-8), and
 * 8e-18 in float64 (1.1e-16).
 *
 * Each step waits for the one before it, and a processor looks some 60 steps ahead: the steps of
 * several lanes take turns. */
LA_FN void lanes_exp2(lane *x, const int many)
{
#if LA_REAL_BITS == 32
    static const real c[] = {0.693147188026f,   0.240226507606f,   0.0555035711422f,
                             0.00961808255728f, 0.00133908633647f, 0.000154531629451f};
    const real lowest = -152, highest = 129;
#else
    static const real c[] = {0x1.62e42fefa39efp-1,  0x1.ebfbdff82c598p-3,  0x1.c6b08d704a0c2p-5,
                             0x1.3b2ab6fba1ddap-7,  0x1.5d87fe78a5276p-10, 0x1.430913096fd9fp-13,
                             0x1.ffcbfc670dcd4p-17, 0x1.62bfd47773353p-20, 0x1.b524fae627834p-24,
                             0x1.e6063f7217bc6p-28, 0x1.e9d3fe3952179p-32};
    const real lowest = -1077, highest = 1025;
#endif
    enum { TERMS = sizeof c / sizeof *c };
    lane n[AT_ONCE], series[AT_ONCE];
    for (int k = 0; k < many; k++) {
#if !LA_AVX512 /* whose own instruction knows both ends */
        x[k] = lane_least(highest - LANE_ZERO, lane_most(lowest - LANE_ZERO, x[k]));
#else
        (void)lowest, (void)highest;
#endif
        n[k] = lane_rounded(x[k]);
    }
    for (int k = 0; k < many; k++) x[k] -= n[k];
    for (int k = 0; k < many; k++) series[k] = c[TERMS - 1] - LANE_ZERO;
    for (int i = TERMS - 2; i >= 0; i--)
        for (int k = 0; k < many; k++) series[k] = series[k] * x[k] + c[i];
    for (int k = 0; k < many; k++) series[k] = 1 + series[k] * x[k];
    for (int k = 0; k < many; k++) x[k] = lane_times_power(series[k], n[k]);
}

#if LA_AVX512 && LA_REAL_BITS == 32
#define LA_NEAR_POWERS 1
/* 2^(step rate[k]) for `many` products of at most NEAREST_POWER in magnitude. It takes six
 * multiply-adds, and steps that other ports do beside them. lanes_exp2 and the product take seven, a
 * rounding and a scaling.
 *
 * x = k + j/16 + r, |r| <= 1/32. Added to MAGIC, x is rounded to a sixteenth: j is the sum's last four
 * bits, and k stands before them. The table has the bits of 2^(j/16), less j at the place where k is
 * added to the exponent, since j comes along. 2^r is a series of degree 3: the first term that it
 * leaves out is 0.0096 r^4 = 9e-9. With j = 0, near 1, nothing is rounded but the series. */
enum { NEAREST_POWER = 125 };

LA_FN void lanes_near_powers(lane step, const lane *rate, lane *x, const int many)
{
    /* clang-format off */
    static const uint32_t table[LANES] __attribute__((aligned(LA_LANE_BYTES))) = {
        0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3,
        0x3f7837f0, 0x3f76f532, 0x3f75fed7, 0x3f75583f,
        0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
        0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d,
    };
    /* clang-format on */
    const real MAGIC = 0x1.8p19f; /* whose last bit is a sixteenth */
    const real LN2 = 0.693147180560f, LN2_2 = 0.240226506959f, LN2_3 = 0.0555041086648f;
    const __m512i powers = _mm512_load_si512(table);
    lane sum[AT_ONCE], r[AT_ONCE], series[AT_ONCE];
    for (int k = 0; k < many; k++) sum[k] = step * rate[k] + MAGIC;
    for (int k = 0; k < many; k++) r[k] = step * rate[k] - (sum[k] - MAGIC);
    for (int k = 0; k < many; k++) series[k] = LN2_3 * r[k] + LN2_2;
    for (int k = 0; k < many; k++) series[k] = series[k] * r[k] + LN2;
    for (int k = 0; k < many; k++) {
        const __m512i last = _mm512_castps_si512((__m512)sum[k]);
        const __m512i power = _mm512_permutexvar_epi32(last, powers);
        x[k] = (lane)_mm512_castsi512_ps(_mm512_add_epi32(power, _mm512_slli_epi32(last, 19)));
    }
    for (int k = 0; k < many; k++) x[k] += (x[k] * r[k]) * series[k];
}
#else
#define LA_NEAR_POWERS 0
#endif

/* The angles of `far`, by the C library: they are rare, and its functions take any angle. */
LA_COLD lane far_cos_sin(lane x, lane_int far, lane cosine, lane *sine)
{
    for (int i = 0; i < LANES; i++) {
        if (!far[i]) continue;
        cosine[i] = LA_REAL_BITS == 32 ? (real)cosf((float)x[i]) : (real)cos((double)x[i]);
        (*sine)[i] = LA_REAL_BITS == 32 ? (real)sinf((float)x[i]) : (real)sin((double)x[i]);
    }
    return cosine;
}

/* cos x and sin x. x = k pi/2 + r, where pi/2 comes in three parts. The first two have so few bits
 * that k times them is exact up to |k| = 2^13 in float32 and 2^20 in float64. Larger angles, and what
 * is no number, go to far_cos_sin.
 *
 * The first terms that the series leave out, at r = pi/4: r^12 / 13! = 9e-12 of sin r and r^12 / 12!
 * = 1e-10 in float32, r^18 / 19! = 1e-19 and r^18 / 18! = 2e-18 in float64. */
LA_FN lane lane_cos_sin(lane x, lane *sine)
{
#if LA_REAL_BITS == 32
    enum { TERMS = 5 };
    const real furthest = 0x1p13f;
    const real part[] = {0x1.92p0f, 0x1.fb4p-12f, 0x1.4442d2p-24f};
#else
    enum { TERMS = 8 };
    const real furthest = 0x1p20;
    const real part[] = {0x1.921fb544p0, 0x1.0b4611a6p-34, 0x1.3198a2e037073p-69};
#endif
    static const real over_factorial[] = {
        1,
        1,
        (real)(1. / 2),
        (real)(1. / 6),
        (real)(1. / 24),
        (real)(1. / 120),
        (real)(1. / 720),
        (real)(1. / 5040),
        (real)(1. / 40320),
        (real)(1. / 362880),
        (real)(1. / 3628800),
        (real)(1. / 39916800),
        (real)(1. / 479001600),
        (real)(1. / 6227020800),
        (real)(1. / 87178291200),
        (real)(1. / 1307674368000),
        (real)(1. / 20922789888000),
        (real)(1. / 355687428096000),
    };
    const real HALF_PI_INVERSE = (real)0.63661977236758134308;
    const lane all = lane_rounded(x * HALF_PI_INVERSE);
    const lane_int near = (all <= furthest) & (all >= -furthest), far = ~near;
    const lane k = LANE_PICK(near, all, LANE_ZERO);
    const lane r = LANE_PICK(near, ((x - k * part[0]) - k * part[1]) - k * part[2], LANE_ZERO);
    const lane square = -r * r;
    lane c = over_factorial[2 * TERMS] - LANE_ZERO;
    lane s = over_factorial[2 * TERMS + 1] - LANE_ZERO;
    for (int i = TERMS - 1; i >= 0; i--) {
        c = c * square + over_factorial[2 * i];
        s = s * square + over_factorial[2 * i + 1];
    }
    s = s * r;
    /* k modulo 4: which quarter of the circle */
    const lane quarter = k - 4 * lane_rounded(k * (real)0.25);
    const lane_int odd = (quarter == 1) | (quarter == -1);
    const lane cosine = LANE_PICK(odd, s, c), sinus = LANE_PICK(odd, c, s);
    const lane_int turned = (quarter == 2) | (quarter == -2);
    *sine = LANE_PICK(turned | (quarter == -1), -sinus, sinus);
    const lane found = LANE_PICK(turned | (quarter == 1), -cosine, cosine);
    bool any = false;
    for (int i = 0; i < LANES; i++) any |= far[i] != 0;
    return any ? far_cos_sin(x, far, found, sine) : found;
}
