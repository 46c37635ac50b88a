/* ELEMENTS: what is done to single numbers on the way between the user's arrays and the recurrence,
 * for both devices.
 *
 *     q, k     x <- phi(x r)                         r = (x'x + 1e-6)^-1/2, phi the feature map
 *     gate     a = exp(g) | exp(-slope) | the decay itself
 *     curve    g = c A softplus(u) | c sigmoid(A u), in a pass of its own before the recurrence
 *     read     o = scale num / divisor(scale den)    num = S' q, den = z' q
 *
 * Each has its adjoint beside it. A new feature map or a new kind of gate is written here, once.
 *
 * A `lane` is a SIMD vector on a CPU, and one number in a CUDA thread. A `real` is one number.
 * `map`, `gate` and the options of the read are the same for all numbers of a call.
 *
 * Needs:
 *     LA_ELEMENT                before a function of lanes and reals (CUDA: a template of the type)
 *     LA_PLAIN                  before any other function
 *     real, lane                a number; a lane
 *     LANE_ZERO                 a lane of zeros
 *     LANE_PICK(mask, x, y)     mask ? x : y, where mask is a comparison of lanes
 *     LANE_EXP(x)               exp
 *     LANE_OVER(x, y)           x / y, for y from 1 to 2^127. A device may have a quicker way there
 *     LANE_DECAY(log, gate, rest)
 *                               exp of a log decay. A device that knows what the rounding took away
 *                               puts it in *rest, which is 0 before
 *     LA_SQRT(x)                the square root of a real
 *     la_options                a struct that has normaliser, eps and scale as la_problem has them
 */

/* ---- q and k: l2 norm, feature map ---- */

/* As in flash-linear-attention: x / sqrt(sum x^2 + 1e-6). */
LA_ELEMENT real l2norm_factor(real squares) { return 1 / (real)LA_SQRT(squares + (real)1e-6); }

/* Was y = x r, r = (x'x + 1e-6)^-1/2: dx = r (dy - y y'dy). `along` is y'dy. */
LA_ELEMENT lane l2norm_gradient(lane dy, lane y, real along, real factor)
{
    return factor * (dy - y * along);
}

/* All maps but the identity: for kernels that choose the map once and not for each number. */
#define LA_EACH_MAP(X) X(LA_ELU1) X(LA_RELU) X(LA_RELU2) X(LA_EXP)

LA_ELEMENT lane apply_map(lane x, la_map map, real eps)
{
    const lane zero = LANE_ZERO;
    switch (map) {
    /* exp(x) below zero, never expm1(x) + 1: that is exactly 0 from about -17 on in float32 */
    case LA_ELU1: return LANE_PICK(x > zero, x + 1, LANE_EXP(LANE_PICK(x > zero, zero, x)));
    case LA_RELU: return LANE_PICK(x < zero, zero, x) + eps; /* a NaN stays one */
    case LA_RELU2: x = LANE_PICK(x < zero, zero, x); return x * x;
    case LA_EXP: return LANE_EXP(x);
    default: return x;
    }
}

/* phi'(x), of the user's x after its norm. */
LA_ELEMENT lane map_slope(lane x, la_map map)
{
    const lane zero = LANE_ZERO, one = 1 - zero;
    switch (map) {
    case LA_ELU1: return LANE_PICK(x > zero, one, LANE_EXP(LANE_PICK(x > zero, zero, x)));
    case LA_RELU: return LANE_PICK(x > zero, one, zero);
    case LA_RELU2: return LANE_PICK(x > zero, 2 * x, zero);
    case LA_EXP: return LANE_EXP(x);
    default: return one;
    }
}

/* ---- the gate ---- */

/* The logarithm of a decay that is not given as the decay itself. */
LA_ELEMENT lane log_decay(lane g, la_gate gate) { return gate == LA_SLOPE ? -g : g; }

/* The decay that a gate gives. *rest is the part that its rounding took away, as far as known. */
LA_ELEMENT lane decay_in_two(lane g, la_gate gate, lane *rest)
{
    *rest = LANE_ZERO;
    return gate == LA_DECAY ? g : LANE_DECAY(log_decay(g, gate), gate, rest);
}

LA_ELEMENT lane decay_of(lane g, la_gate gate)
{
    lane rest;
    return decay_in_two(g, gate, &rest);
}

/* The gradient of a gate as it was given, from that of its decay a. */
LA_ELEMENT real gate_gradient(real da, real a, la_gate gate)
{
    return gate == LA_DECAY ? da : gate == LA_SLOPE ? -a * da : a * da;
}

/* ---- a gate from a projection u (gates.def): A = exp(A_log) is `rate`, and c is `factor` ---- */

LA_ELEMENT lane magnitude(lane u)
{
    const lane zero = LANE_ZERO;
    return LANE_PICK(u < zero, -u, u);
}

/* log(1 + y) for y from 0 to 1, within 1 ulp or so: 2 artanh(s) with s = y / (2 + y), as a
 * series in s^2. 2 s = y - s y, and y has all its digits, so roundings of s count by s y alone,
 * a third of y at most. s^2 is at most 1/9. The first term that the series leaves out is
 * 9^-7 / 15 = 1e-8 of the first one in float32 (half an ulp is 6e-8), and 9^-16 / 33 = 2e-17 in
 * float64 (1.1e-16). */
LA_ELEMENT lane log_of_one_more(lane y)
{
    const lane s = LANE_OVER(y, 2 + y), z = s * s;
    const int last = sizeof(real) == 8 ? 15 : 6;
    lane series = (real)(2. / (2 * last + 1)) - LANE_ZERO;
    for (int k = last - 1; k > 0; k--) series = series * z + (real)(2. / (2 * k + 1));
    return y - s * (y - z * series);
}

/* exp has no argument above 0, so nothing overflows, and no digit is lost at either end. */
LA_ELEMENT lane softplus(lane u)
{
    const lane zero = LANE_ZERO;
    return LANE_PICK(u < zero, zero, u) + log_of_one_more(LANE_EXP(-magnitude(u)));
}

LA_ELEMENT lane sigmoid(lane u)
{
    const lane zero = LANE_ZERO, one = 1 - zero, small = LANE_EXP(-magnitude(u));
    return LANE_OVER(LANE_PICK(u < zero, small, one), 1 + small);
}

/* sigmoid(u) sigmoid(-u). 1 - sigmoid(u) would have no digits for u above 17 in float32. */
LA_ELEMENT lane sigmoid_slope(lane u)
{
    const lane small = LANE_EXP(-magnitude(u)), more = 1 + small;
    return LANE_OVER(small, more * more);
}

/* u sigmoid(u), where u may be infinite. exp(-lowest) is about the largest number that there is, so below
 * `lowest` the product is as good as 0. */
LA_ELEMENT lane silu(lane u)
{
    const lane lowest = (real)(sizeof(real) == 8 ? -709 : -88) - LANE_ZERO, one = 1 - LANE_ZERO;
    u = LANE_PICK(u < lowest, lowest, u);
    return u * LANE_OVER(one, 1 + LANE_EXP(-u));
}

/* Its slope. Where the second factor has come down to 0, so has the product: u may be infinite
 * there. */
LA_ELEMENT lane silu_slope(lane u)
{
    const lane zero = LANE_ZERO, slope = sigmoid_slope(u);
    return sigmoid(u) + LANE_PICK(slope > zero, u * slope, slope);
}

LA_ELEMENT lane curve_of(lane u, lane rate, la_curve curve, real factor)
{
    if (curve == LA_SOFTPLUS) return factor * rate * softplus(u);
    return factor * sigmoid(rate * u);
}

/* The gradient of u, given dg. *along becomes that of A_log.
 *     was g = c A softplus(u):     du = c A sigmoid(u) dg,               dA_log = g dg
 *     was g = c sigmoid(A u):      du = c A sigmoid(A u) sigmoid(-A u) dg,  dA_log = u du */
LA_ELEMENT lane curve_gradient(lane dg, lane u, lane rate, la_curve curve, real factor, lane *along)
{
    if (curve == LA_SOFTPLUS) {
        const lane scaled = factor * rate * dg;
        *along = scaled * softplus(u);
        return scaled * sigmoid(u);
    }
    const lane w = rate * u, dw = factor * dg * sigmoid_slope(w);
    *along = dw * w;
    return rate * dw;
}

/* ---- the read ---- */

/* Are reads divided? Only the additive rule without a decay has a normaliser. Where `decay` and
 * `rule` are compile-time constants, the code of the other kinds has none. */
LA_PLAIN bool is_normalised(const la_options *c, const la_decay decay, const la_rule rule)
{
    return decay == LA_NONE && rule == LA_ADDITIVE && c->normaliser != LA_UNNORMALISED;
}

/* den is scaled: scale z'q. */
LA_ELEMENT real divisor_of(const la_options *c, real den)
{
    if (c->normaliser == LA_ADD) return den + (real)c->eps;
    return den <= (real)c->eps ? (real)c->eps : den; /* a NaN stays one */
}

/* The gradient of z'q. den is scaled, and num_dnum is num' dnum. Was o = scale num / divisor, of
 * which a clamped divisor is constant. */
LA_ELEMENT real d_denominator(const la_options *c, real den, real num_dnum)
{
    if (c->normaliser == LA_CLAMP && den <= (real)c->eps) return 0;
    return -(real)c->scale * num_dnum / divisor_of(c, den);
}
