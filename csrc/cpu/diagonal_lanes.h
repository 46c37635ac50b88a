/* Diagonal scans: a lane of channels through the tokens of a segment, and back. */

/* ---- the recurrence of a lane of channels ----
 *
 * A few numbers of the state at a time go through all tokens of the segment: they stay in
 * registers. What a token has of a number lies at [N][SEGMENT][LANES], so that a number's tokens
 * are neighbours. */

/* exp(step A) of `many` numbers, which are pairs or reals. */
LA_FN void scan_decays(const lane step, const lane *A, lane *a, const int many, const bool pairs,
                       const bool near)
{
    const real LOG2_E = (real)1.44269504088896340736;
    const lane step2 = step * LOG2_E;
    const int each = pairs ? 2 : 1;
    lane power[AT_ONCE];
#if LA_NEAR_POWERS
    if (near) {
        lanes_near_powers(step2, A, a, many);
        return;
    }
#endif
    (void)near;
    for (int k = 0; k < many; k += each) power[k / each] = step2 * A[k];
    lanes_exp2(power, many / each);
    for (int k = 0; k < many; k += each) {
        a[k] = power[k / each];
        if (!pairs) continue;
        lane sine;
        const lane cosine = lane_cos_sin(step * A[k + 1], &sine);
        a[k + 1] = a[k] * sine;
        a[k] = a[k] * cosine;
    }
}

/* Numbers m and on of B or C: of token i, or of the channels (FIXED). */
LA_FN lane scan_number(const scan_room *f, const real *x, int64_t block, int64_t i, int64_t m,
                       const la_scan_form form)
{
    if (form == LA_FIXED) return lanes_in(x)[block * f->N + m];
    return x[i * padded(f->N) + m] - LANE_ZERO;
}

/* Adds to a row of sums, `all` of the first stretch of numbers and `more` of the one of number m. */
LA_FN void add_to_sum(real *all, real *more, int64_t at, int64_t m, lane x)
{
    lane *const sum = lanes_of((m < STRETCH_OF_SUM ? all : more) + at);
    *sum = m % STRETCH_OF_SUM ? *sum + x : x;
}

/* `many` numbers of the state of a lane of channels, from m on, through n tokens. `keeps`: each
 * token's decays and states are kept for the adjoint. `reads`: the reads are added to y. */
LA_FN void scan_some(const scan_room *f, int64_t block, int64_t n, int64_t m, const int many,
                     const la_scan_form form, const bool pairs, const bool keeps, const bool reads,
                     const bool near)
{
    const lane *A = lanes_in(f->A) + block * f->N + m;
    lane *const state = lanes_of(f->h) + block * f->N + m;
    lane h[MOST_NUMBERS], a[MOST_NUMBERS];
    for (int k = 0; k < many; k++) {
        h[k] = state[k];
        a[k] = A[k];
        if (keeps) lanes_of(f->states)[k * (SEGMENT + 1)] = h[k];
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i * f->width + block * LANES;
        const lane u = lanes_in(f->u + at)[0];
        lane w = u, sum[2] = {LANE_ZERO, LANE_ZERO};
        if (m == 0) fetch_ahead(f, block, i);
        const lane step = form == LA_FIXED ? LANE_ZERO : lanes_in(f->step + at)[0];
        if (form == LA_SELECTIVE) w = step * u;
        if (form == LA_GATED_SCAN) {
            a[0] = step;
            sum[0] = h[0] = scan_write(h[0], a[0], u, 1 - LANE_ZERO);
        }
#pragma GCC unroll 8
        for (int k = 0; form != LA_GATED_SCAN && k < many; k += pairs ? 2 : 1) {
            if (form == LA_SELECTIVE && k % AT_ONCE == 0)
                scan_decays(step, A + k, a + k, many < AT_ONCE ? many : AT_ONCE, pairs, near);
            lane b[2], c[2];
            for (int part = 0; part <= pairs; part++) {
                b[part] = scan_number(f, f->B, block, i, m + k + part, form);
                if (reads) c[part] = scan_number(f, f->C, block, i, m + k + part, form);
            }
            if (pairs) {
                scan_write_pair(h + k, a + k, w, b);
                if (reads) sum[0] += scan_read_pair(h + k, c);
            } else {
                h[k] = scan_write(h[k], a[k], w, b[0]);
                if (reads) sum[k % 2] += c[0] * h[k];
            }
        }
        for (int k = 0; keeps && k < many; k++) {
            if (form != LA_FIXED) lanes_of(f->decays)[k * SEGMENT + i] = a[k];
            lanes_of(f->states)[k * (SEGMENT + 1) + i + 1] = h[k];
        }
        if (reads) add_to_sum(f->y, f->more_y, at, m, sum[0] + sum[1]);
    }
    for (int k = 0; k < many; k++) state[k] = h[k];
}

/* Are the exponents of all n tokens and of all numbers of a lane of channels near? So is a NaN in A,
 * which stays one in either way. */
LA_FN bool exponents_are_near(const scan_room *f, int64_t block, int64_t n)
{
#if LA_NEAR_POWERS
    const real LOG2_E = (real)1.44269504088896340736;
    const lane most = NEAREST_POWER - LANE_ZERO;
    const lane reach = LOG2_E * lanes_in(f->reach)[block];
    lane_int far = {0};
    for (int64_t i = 0; i < n; i++) /* a NaN among the steps is far */
        far |= ~(magnitude(lanes_in(f->step + i * f->width)[block]) * reach <= most);
    bool any = false;
    for (int k = 0; k < LANES; k++) any |= far[k] != 0;
    return !any;
#else
    (void)f, (void)block, (void)n;
    return false;
#endif
}

/* The sums of a stretch of numbers that ends with number m: they are added to those of all. */
LA_FN void end_stretch(const scan_room *f, int64_t block, int64_t n, int64_t m, real *all,
                       const real *more)
{
    if (m <= STRETCH_OF_SUM || (m < f->N && m % STRETCH_OF_SUM)) return;
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i * f->width + block * LANES;
        lanes_of(all + at)[0] += lanes_in(more + at)[0];
    }
}

/* The gradient of `many` numbers, from m on, back through n tokens, and no other gradient. f->dy has
 * those of the reads. It needs no state. */
LA_FN void scan_some_gradient(const scan_room *f, int64_t block, int64_t n, int64_t m,
                              const int many, const la_scan_form form, const bool pairs,
                              const bool near)
{
    const lane *A = lanes_in(f->A) + block * f->N + m;
    lane *const d_state = lanes_of(f->dh) + block * f->N + m;
    const lane none[2] = {LANE_ZERO, LANE_ZERO};
    lane dh[MOST_NUMBERS], a[MOST_NUMBERS];
    for (int k = 0; k < many; k++) {
        dh[k] = d_state[k];
        a[k] = A[k];
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        const int64_t at = i * f->width + block * LANES;
        const lane dy = lanes_in(f->dy + at)[0];
        const lane step = form == LA_FIXED ? LANE_ZERO : lanes_in(f->step + at)[0];
        if (m == 0) fetch_ahead(f, block, i);
        if (form == LA_GATED_SCAN) dh[0] = step * (dh[0] + dy); /* was h' = a h + u, y = h' */
        for (int k = 0; form != LA_GATED_SCAN && k < many; k += pairs ? 2 : 1) {
            if (form == LA_SELECTIVE && k % AT_ONCE == 0)
                scan_decays(step, A + k, a + k, many < AT_ONCE ? many : AT_ONCE, pairs, near);
            lane c[2], unused[2];
            for (int part = 0; part <= pairs; part++)
                c[part] = scan_number(f, f->C, block, i, m + k + part, form);
            if (pairs) { /* was h' = a h + w b, y = 2 Re(c h') */
                scan_read_pair_adjoint(dy, none, c, dh + k, unused);
                by_conjugate(dh + k, a + k, dh + k);
            } else { /* was h' = a h + w b, y = sum of c h' */
                dh[k] = a[k] * (dh[k] + dy * c[0]);
            }
        }
    }
    for (int k = 0; k < many; k++) d_state[k] = dh[k];
}

/* READS: y too. CARRIES: the state alone. GIVES: the gradient of the state alone, backwards. */
typedef enum { READS, CARRIES, GIVES } scan_way;

LA_FN void scan_some_by(const scan_room *f, int64_t block, int64_t n, int64_t m, const int many,
                        const la_scan_form form, const bool pairs, const scan_way way,
                        const bool near)
{
    if (way == GIVES)
        scan_some_gradient(f, block, n, m, many, form, pairs, near);
    else
        scan_some(f, block, n, m, many, form, pairs, false, way == READS, near);
}

LA_FN void scan_numbers(const scan_room *f, int64_t block, int64_t n, const la_scan_form form,
                        const bool pairs, const scan_way way, const bool near)
{
    const int each = pairs ? 2 : 1;
    for (int64_t m = 0, last; m < f->N; m = last) {
        if (near && m + MOST_NUMBERS <= f->N) { /* far powers leave fewer registers */
            last = m + MOST_NUMBERS;
            scan_some_by(f, block, n, m, MOST_NUMBERS, form, pairs, way, near);
        } else if (form != LA_GATED_SCAN && m + AT_ONCE <= f->N) {
            last = m + AT_ONCE;
            scan_some_by(f, block, n, m, AT_ONCE, form, pairs, way, near);
        } else {
            last = m + each;
            scan_some_by(f, block, n, m, each, form, pairs, way, near);
        }
        if (way == READS) end_stretch(f, block, n, last, f->y, f->more_y);
    }
}

LA_FN void scan_tokens(const scan_room *f, int64_t block, int64_t n, const la_scan_form form,
                       const bool pairs, const scan_way way)
{
    if (form == LA_SELECTIVE && !pairs && exponents_are_near(f, block, n))
        scan_numbers(f, block, n, form, pairs, way, true);
    else
        scan_numbers(f, block, n, form, pairs, way, false);
}

/* ---- its adjoint ---- */

/* Tokens n - 1 to 0 of `many` numbers. f->dy has the gradients of the reads. The gradients of what
 * a token has are added to du and dstep (over numbers) and to dB and dC (over channels); those of
 * what all tokens share are added to the sums of A, and for FIXED to those of B and C. */
LA_FN void scan_some_adjoint(const scan_room *f, int64_t block, int64_t n, int64_t m,
                             const int many, const la_scan_form form, const bool pairs)
{
    const bool fixed = form == LA_FIXED;
    const int64_t channel = block * f->N + m;
    lane *const d_state = lanes_of(f->dh) + channel;
    lane dh[AT_ONCE], after[AT_ONCE], A[AT_ONCE], dA[AT_ONCE], dB[AT_ONCE], dC[AT_ONCE];
    for (int k = 0; k < many; k++) {
        dh[k] = d_state[k];
        after[k] = lanes_in(f->states)[k * (SEGMENT + 1) + n];
        A[k] = lanes_in(f->A)[channel + k];
        dA[k] = dB[k] = dC[k] = LANE_ZERO;
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        const int64_t at = i * f->width + block * LANES;
        const lane u = lanes_in(f->u + at)[0], dy = lanes_in(f->dy + at)[0];
        const lane step = form == LA_SELECTIVE ? lanes_in(f->step + at)[0] : 1 - LANE_ZERO;
        const lane w = step * u;
        lane dw = LANE_ZERO, dstep = LANE_ZERO, before[AT_ONCE], a[AT_ONCE];
        for (int k = 0; k < many; k++) {
            before[k] = lanes_in(f->states)[k * (SEGMENT + 1) + i];
            a[k] = fixed ? A[k] : lanes_in(f->decays)[k * SEGMENT + i];
        }
        if (form == LA_GATED_SCAN) { /* was h' = a h + u, y = h', a = exp(g) */
            lane da, db;
            dh[0] =
                scan_write_adjoint(dh[0] + dy, before[0], a[0], u, 1 - LANE_ZERO, &da, &dw, &db);
            dstep = da * a[0];
        }
        for (int k = 0; form != LA_GATED_SCAN && k < many; k += pairs ? 2 : 1) {
            lane b[2], c[2], da[2], db[2], dc[2], dlog[2], one;
            for (int part = 0; part <= pairs; part++) {
                b[part] = scan_number(f, f->B, block, i, m + k + part, form);
                c[part] = scan_number(f, f->C, block, i, m + k + part, form);
            }
            if (pairs) {
                scan_read_pair_adjoint(dy, after + k, c, dh + k, dc);
                scan_write_pair_adjoint(dh + k, before + k, a + k, w, b, da, &one, db);
                by_conjugate(da, a + k, dlog);
            } else { /* was y = sum of c h' */
                dc[0] = dy * after[k];
                dh[k] =
                    scan_write_adjoint(dh[k] + dy * c[0], before[k], a[k], w, b[0], da, &one, db);
                dlog[0] = da[0] * a[k];
            }
            dw += one;
            for (int part = 0; part <= pairs; part++) {
                const int64_t place = (m + k + part) * SEGMENT + i;
                if (fixed) {
                    dA[k + part] += da[part];
                    dB[k + part] += db[part];
                    dC[k + part] += dc[part];
                    continue;
                }
                /* was a = exp(step A): dlog is the gradient of the exponent, a da or conj(a) da */
                dA[k + part] += step * dlog[part];
                dstep += dlog[part] * A[k + part];
                lanes_of(f->dB)[place] += db[part];
                lanes_of(f->dC)[place] += dc[part];
            }
        }
        for (int k = 0; k < many; k++) after[k] = before[k];
        /* was w = step u */
        add_to_sum(f->du, f->more_du, at, m, step * dw);
        add_to_sum(f->dstep, f->more_dstep, at, m, form == LA_SELECTIVE ? dstep + u * dw : dstep);
    }
    for (int k = 0; k < many; k++) {
        d_state[k] = dh[k];
        if (form == LA_GATED_SCAN) continue;
        const int64_t place = (channel + k) * LANES;
        add_lane(f->dA + place, dA[k]);
        if (!fixed) continue;
        add_lane(f->dB0 + place, dB[k]);
        add_lane(f->dC0 + place, dC[k]);
    }
}

/* Recomputes `many` numbers with what their adjoint needs, and goes back through them: what is kept
 * for a few numbers stays in the first cache. The adjoint of a gate z needs the reads too, and
 * SELECTIVE alone has one. */
LA_FN void scan_some_back(const scan_room *f, int64_t block, int64_t n, int64_t m, const int many,
                          const la_scan_form form, const bool pairs, const bool near)
{
    scan_some(f, block, n, m, many, form, pairs, true, form == LA_SELECTIVE, near);
    scan_some_adjoint(f, block, n, m, many, form, pairs);
}

LA_FN void scan_numbers_back(const scan_room *f, int64_t block, int64_t n, const la_scan_form form,
                             const bool pairs, const bool near)
{
    const int each = pairs ? 2 : 1;
    for (int64_t m = 0, last; m < f->N; m = last) {
        if (form != LA_GATED_SCAN && m + AT_ONCE <= f->N) {
            last = m + AT_ONCE;
            scan_some_back(f, block, n, m, AT_ONCE, form, pairs, near);
        } else {
            last = m + each;
            scan_some_back(f, block, n, m, each, form, pairs, near);
        }
        if (form == LA_SELECTIVE) end_stretch(f, block, n, last, f->y, f->more_y);
        end_stretch(f, block, n, last, f->du, f->more_du);
        end_stretch(f, block, n, last, f->dstep, f->more_dstep);
    }
}

LA_FN void scan_tokens_back(const scan_room *f, int64_t block, int64_t n, const la_scan_form form,
                            const bool pairs)
{
    if (form == LA_SELECTIVE && !pairs && exponents_are_near(f, block, n))
        scan_numbers_back(f, block, n, form, pairs, true);
    else
        scan_numbers_back(f, block, n, form, pairs, false);
}
