/* One token of a diagonal scan (diagonal.h), and its adjoint, for both devices.
 *
 * h is a number of the state, or two of them (real and imaginary part) in the functions of pairs. w
 * is what is written times b: delta u (SELECTIVE) or u. The adjoints walk backwards in time: dh is
 * the gradient of the state after the token, and becomes that of the state before it.
 *
 * Needs `lane`, LA_ELEMENT, LA_PLAIN, LANE_ZERO and LANE_PICK as elements.h does, LANE_SQRT, and
 * diagonal.h. */

/* ---- reals ---- */

LA_ELEMENT lane scan_write(lane h, lane a, lane w, lane b) { return a * h + w * b; }

/* Was h' = a h + w b. Gives dh, and the gradients of a, w and b. */
LA_ELEMENT lane scan_write_adjoint(lane dh, lane h, lane a, lane w, lane b, lane *da, lane *dw,
                                   lane *db)
{
    *da = dh * h;
    *dw = dh * b;
    *db = dh * w;
    return a * dh;
}

/* ---- complex numbers: x[0] + i x[1] ---- */

LA_ELEMENT void scan_write_pair(lane h[2], const lane a[2], lane w, const lane b[2])
{
    const lane re = a[0] * h[0] - a[1] * h[1], im = a[0] * h[1] + a[1] * h[0];
    h[0] = re + w * b[0];
    h[1] = im + w * b[1];
}

/* y is twice the real part of c h: the other half of the conjugate pairs. */
LA_ELEMENT lane scan_read_pair(const lane h[2], const lane c[2])
{
    return 2 * (c[0] * h[0] - c[1] * h[1]);
}

/* The gradients of c and h of a read; that of h is added. */
LA_ELEMENT void scan_read_pair_adjoint(lane dy, const lane h[2], const lane c[2], lane dh[2],
                                       lane dc[2])
{
    const lane twice = 2 * dy;
    dc[0] = twice * h[0];
    dc[1] = -twice * h[1];
    dh[0] += twice * c[0];
    dh[1] -= twice * c[1];
}

/* x conj(y): how gradients go through a product of complex numbers. */
LA_ELEMENT void by_conjugate(const lane x[2], const lane y[2], lane to[2])
{
    const lane re = x[0] * y[0] + x[1] * y[1], im = x[1] * y[0] - x[0] * y[1];
    to[0] = re;
    to[1] = im;
}

LA_ELEMENT void scan_write_pair_adjoint(lane dh[2], const lane h[2], const lane a[2], lane w,
                                        const lane b[2], lane da[2], lane *dw, lane db[2])
{
    by_conjugate(dh, h, da);
    *dw = dh[0] * b[0] + dh[1] * b[1];
    db[0] = dh[0] * w;
    db[1] = dh[1] * w;
    by_conjugate(dh, a, dh);
}

/* ---- GATED: the factor of what a token writes, from its decay a = exp(g) and 1 - a ---- */

LA_ELEMENT lane scan_factor(lane a, lane less, const int write)
{
    return write == LA_WRITE_ROOT ? LANE_SQRT(less * (1 + a)) : less;
}

/* Its derivative by g: was 1 - a, or s = sqrt(1 - a^2), whose derivative -a^2 / s is infinite at
 * a = 1. There 1 / (2 s) is held at 1000, as in RecurrentGemma. */
LA_ELEMENT lane scan_factor_slope(lane a, lane factor, const int write)
{
    const lane least = (real)(.5 / 1000) - LANE_ZERO;
    if (write != LA_WRITE_ROOT) return -a;
    return -a * a / LANE_PICK(factor > least, factor, least);
}

/* ---- the map of tokens, which turn a state h into M h and what they write ----
 *
 * M is the product of their decays: of SELECTIVE exp(rate passed), where `passed` is the sum of the
 * steps; of FIXED rate^count; of GATED `passed` itself. The rate of a pair is rate + i turn. */
LA_PLAIN void scan_map(la_scan_form form, bool pairs, double rate, double turn, double passed,
                       double count, double M[2])
{
    double size = passed, angle = 0;
    if (form == LA_SELECTIVE) {
        size = exp(passed * rate);
        angle = passed * turn;
    } else if (form == LA_FIXED) {
        size = pow(pairs ? hypot(rate, turn) : rate, count);
        angle = count * atan2(turn, rate);
    }
    if (count == 0) size = 1; /* passed is 0, and rate may be infinite */
    M[0] = pairs ? size * cos(angle) : size;
    M[1] = pairs ? size * sin(angle) : 0;
}
