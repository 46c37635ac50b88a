/* Diagonal scans (../diagonal.h): a panel of channels of one sequence, a lane of channels at a
 * time.
 *
 * Tokens go in segments: the rows of a segment are read once, for all channels of the panel, and
 * lie in the first cache while lane after lane goes through them. A lane's state stays there too.
 */

#include "../diagonal_token.h"
#include "exponent.h"

enum {
    SEGMENT = 16,               /* tokens; a backward pass keeps a state for each */
    MOST_NUMBERS = 2 * AT_ONCE, /* of a lane's state, that go through a segment together */
    /* Sums over the numbers of a state are made of sums of stretches of this many, as NumPy's are: one
     * chain of additions over 150 numbers has 1.5 times the error of NumPy's sum. */
    STRETCH_OF_SUM = 32,
};

_Static_assert(STRETCH_OF_SUM % MOST_NUMBERS == 0, "numbers that go together are of one stretch");

/* The memory of a unit. Rows of tokens are [SEGMENT][width], numbers of channels are
 * [blocks][N][LANES]. */
typedef struct {
    int64_t channels, width, blocks, N;
    real *u, *step, *z, *y; /* step: delta after its bias and softplus, or the decay of GATED */
    real *B, *C;            /* rows of a token (SELECTIVE), or numbers of channels (FIXED) */
    real *A, *h, *D, *bias;
    real *reach; /* of a channel, the largest magnitude of A */
    real *column;
    /* sums of the reads, and of their gradients, of a stretch of numbers but the first */
    real *more_y, *more_du, *more_dstep;
    /* rows of the next segment, which are fetched while this one is computed */
    struct {
        const char *first;
        int64_t token, lane; /* bytes from one to the next */
    } ahead[4];
    /* of a backward pass */
    real *dy, *du, *dstep, *slope, *kept, *states, *decays, *dh, *dB, *dC;
    double *dA, *dB0, *dC0, *dD, *dbias; /* [blocks][N][LANES], or [width] */
} scan_room;

/* Sums over all tokens are doubles. Half a lane of floats makes whole vectors of them. */
LA_FN void add_lane(double *to, lane x)
{
#if LA_REAL_BITS == 64
    lanes_of(to)[0] += x;
#else
    typedef float half __attribute__((vector_size(LA_LANE_BYTES / 2)));
    typedef double doubles __attribute__((vector_size(LA_LANE_BYTES), may_alias));
    const union {
        lane all;
        half part[2];
    } floats = {x};
    for (int i = 0; i < 2; i++)
        ((doubles *)to)[i] += __builtin_convertvector(floats.part[i], doubles);
#endif
}

LA_FN double *arena_take_doubles(arena *m, size_t rows, size_t columns)
{
    return (double *)arena_take(m, la_times(rows, sizeof(double) / sizeof(real)), columns);
}

LA_FN void scan_take_room(scan_room *f, arena *m, const la_diagonal *j, int64_t channels,
                          int64_t longest)
{
    const size_t N = (size_t)j->N, row = (size_t)padded(j->N);
    *f = (scan_room){0};
    f->channels = channels;
    f->width = padded(channels);
    f->blocks = f->width / LANES;
    f->N = j->N;
    const size_t width = (size_t)f->width;
    real **const rows[] = {&f->u, &f->step, &f->z, &f->y, &f->more_y};
    real **const more[] = {&f->dy, &f->du, &f->dstep, &f->slope, &f->more_du, &f->more_dstep};
    const bool fixed = j->room.form == LA_FIXED, backward = j->room.p->pass == LA_BACKWARD;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = arena_take(m, SEGMENT, width);
    f->B = fixed ? arena_take(m, N, width) : arena_take(m, SEGMENT, row);
    f->C = fixed ? arena_take(m, N, width) : arena_take(m, SEGMENT, row);
    f->A = arena_take(m, N, width);
    f->h = arena_take(m, N, width);
    f->D = arena_take(m, 1, width);
    f->bias = arena_take(m, 1, width);
    f->reach = arena_take(m, 1, width);
    f->column = arena_take(m, 1, (size_t)(row > SEGMENT ? row : SEGMENT) + LANES);
    if (!backward) return;
    const size_t segments = (size_t)((longest + SEGMENT - 1) / SEGMENT);
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        *more[i] = arena_take(m, SEGMENT, width);
    f->kept = arena_take(m, segments, la_times(N, width));
    f->states = arena_take(m, SEGMENT + 1, AT_ONCE * LANES);
    f->decays = arena_take(m, SEGMENT, AT_ONCE * LANES);
    f->dh = arena_take(m, N, width);
    f->dB = arena_take(m, fixed ? 0 : SEGMENT, la_times(N, LANES));
    f->dC = arena_take(m, fixed ? 0 : SEGMENT, la_times(N, LANES));
    f->dA = arena_take_doubles(m, N, width);
    f->dB0 = arena_take_doubles(m, N, fixed ? width : 0);
    f->dC0 = arena_take_doubles(m, N, fixed ? width : 0);
    f->dD = arena_take_doubles(m, 1, width);
    f->dbias = arena_take_doubles(m, 1, width);
}

/* ---- loads and stores ---- */

LA_FN char *scan_at(const la_array *x, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    return x->data +
           (i0 * x->stride[0] + i1 * x->stride[1] + i2 * x->stride[2] + i3 * x->stride[3]) *
               la_size_of(x->dtype);
}

/* n tokens of the unit's channels. */
LA_FN void load_scan_rows(const la_array *x, int64_t b, int64_t t, int64_t n, int64_t d,
                          const scan_room *f, real *to)
{
    load_tokens(x, b, t, n, d, f->channels, to, f->width, f->column);
}

LA_FN void store_scan_rows(const la_array *x, int64_t b, int64_t t, int64_t n, int64_t d,
                           const scan_room *f, const real *from)
{
    store_tokens(x, b, t, n, d, f->channels, from, f->width, f->column);
}

/* n tokens of a group's rows of B or C. */
LA_FN void load_scan_groups(const la_array *x, int64_t b, int64_t t, int64_t n, int64_t g,
                            int64_t N, real *to)
{
    for (int64_t i = 0; i < n; i++)
        load_apart(to + i * padded(N), N, scan_at(x, b, t + i, g, 0), x->stride[3], x->dtype);
}

/* The rows of the segment that begins at token t come next. A row of a panel is too short for the
 * processor to see where the next one lies. */
LA_FN void look_ahead(const la_diagonal *j, const la_scan_unit *u, int64_t t, scan_room *f)
{
    la_array *const *array = j->room.array;
    const bool gated = j->room.form == LA_GATED_SCAN, backward = j->room.p->pass == LA_BACKWARD;
    const la_array *const rows[] = {array[LA_SCAN_U], array[gated ? LA_SCAN_G : LA_SCAN_DELTA],
                                    array[LA_SCAN_Z],
                                    backward ? j->room.gradient[LA_SCAN_Y] : array[LA_SCAN_Y]};
    for (int k = 0; k < 4; k++) {
        const la_array *x = rows[k];
        const bool there = x && x->stride[2] == 1 && t >= u->begin && t < u->end;
        f->ahead[k].first = there ? scan_at(x, u->b, t, u->d0, 0) : NULL;
        f->ahead[k].token = there ? x->stride[1] * la_size_of(x->dtype) : 0;
        f->ahead[k].lane = there ? LANES * la_size_of(x->dtype) : 0;
    }
}

LA_FN void fetch_ahead(const scan_room *f, int64_t block, int64_t i)
{
    for (int k = 0; k < 4; k++) {
        if (!f->ahead[k].first) continue;
        const uintptr_t at = (uintptr_t)f->ahead[k].first;
        __builtin_prefetch(
            (const void *)(at + (uintptr_t)(i * f->ahead[k].token + block * f->ahead[k].lane)));
    }
}

/* Numbers of channels, from or to an array [D,N], or [S,D,N] of which `at` is one sequence's part.
 */
LA_FN int64_t scan_place(const scan_room *f, int64_t channel, int64_t m)
{
    return (channel / LANES * f->N + m) * LANES + channel % LANES;
}

LA_COLD void load_channels(const scan_room *f, real *to, const char *at, const la_array *x,
                           int64_t of_channel, int64_t of_number)
{
    const int64_t size = la_size_of(x->dtype);
    for (int64_t c = 0; c < f->width; c++)
        for (int64_t m = 0; m < f->N; m++)
            to[scan_place(f, c, m)] =
                c < f->channels
                    ? load_element(at + (c * of_channel + m * of_number) * size, x->dtype)
                    : 0;
}

LA_COLD void store_channels(const scan_room *f, const real *from, char *at, const la_array *x,
                            int64_t of_channel, int64_t of_number)
{
    const int64_t size = la_size_of(x->dtype);
    for (int64_t c = 0; c < f->channels; c++)
        for (int64_t m = 0; m < f->N; m++)
            store_element(at + (c * of_channel + m * of_number) * size, x->dtype,
                          from[scan_place(f, c, m)]);
}

/* Numbers [D,N] that all tokens share; zeros where the call has none. */
LA_FN void load_shared(const scan_room *f, real *to, const la_array *x, int64_t d)
{
    if (x)
        load_channels(f, to, scan_at(x, d, 0, 0, 0), x, x->stride[0], x->stride[1]);
    else
        fill(f->N * f->width, to, 0);
}

LA_FN void load_scan_state(const scan_room *f, real *to, const la_array *x, int64_t n, int64_t d)
{
    if (x)
        load_channels(f, to, scan_at(x, n, d, 0, 0), x, x->stride[1], x->stride[2]);
    else
        fill(f->N * f->width, to, 0);
}

LA_FN void store_scan_state(const scan_room *f, const real *from, const la_array *x, int64_t n,
                            int64_t d)
{
    if (x) store_channels(f, from, scan_at(x, n, d, 0, 0), x, x->stride[1], x->stride[2]);
}

/* A number a channel; zeros where the call has none. */
LA_FN void load_per_channel(const scan_room *f, real *to, const la_array *x, int64_t d)
{
    fill(f->width, to, 0);
    for (int64_t c = 0; x && c < f->channels; c++)
        to[c] = load_element(scan_at(x, d + c, 0, 0, 0), x->dtype);
}

/* delta <- softplus(delta + bias), and its slope for the adjoint. */
LA_COLD void settle_steps(const la_diagonal *j, int64_t n, const scan_room *f)
{
    const bool backward = j->room.p->pass == LA_BACKWARD;
    for (int64_t i = 0; i < n; i++)
        for (int64_t c = 0; c < f->width; c += LANES) {
            lane *const step = lanes_of(f->step + i * f->width + c);
            const lane raw = *step + lanes_in(f->bias + c)[0];
            *step = j->softplus ? softplus(raw) : raw;
            if (backward && j->softplus) lanes_of(f->slope + i * f->width + c)[0] = sigmoid(raw);
        }
}

/* The rows of a segment as the recurrence takes them. */
LA_COLD void load_segment(const la_diagonal *j, const la_scan_unit *u, int64_t t, int64_t n,
                          const scan_room *f)
{
    la_array *const *array = j->room.array;
    const la_scan_form form = (la_scan_form)j->room.form;
    load_scan_rows(array[LA_SCAN_U], u->b, t, n, u->d0, f, f->u);
    if (form == LA_SELECTIVE) {
        load_scan_groups(array[LA_SCAN_B], u->b, t, n, u->group, f->N, f->B);
        load_scan_groups(array[LA_SCAN_C], u->b, t, n, u->group, f->N, f->C);
        load_scan_rows(array[LA_SCAN_DELTA], u->b, t, n, u->d0, f, f->step);
        if (array[LA_SCAN_BIAS] || j->softplus) settle_steps(j, n, f);
    }
    if (form == LA_GATED_SCAN) {
        load_scan_rows(array[LA_SCAN_G], u->b, t, n, u->d0, f, f->step);
        for (int64_t i = 0; i < n * f->width; i += LANES) {
            lane rest;
            lane *const step = lanes_of(f->step + i);
            *step = lane_decay(*step, &rest);
        }
    }
}

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

LA_FN void scan_numbers(const scan_room *f, int64_t block, int64_t n, const la_scan_form form,
                        const bool pairs, const bool reads, const bool near)
{
    const int each = pairs ? 2 : 1;
    for (int64_t m = 0, last; m < f->N; m = last) {
        if (near && m + MOST_NUMBERS <= f->N) { /* far powers leave fewer registers */
            last = m + MOST_NUMBERS;
            scan_some(f, block, n, m, MOST_NUMBERS, form, pairs, false, reads, near);
        } else if (form != LA_GATED_SCAN && m + AT_ONCE <= f->N) {
            last = m + AT_ONCE;
            scan_some(f, block, n, m, AT_ONCE, form, pairs, false, reads, near);
        } else {
            last = m + each;
            scan_some(f, block, n, m, each, form, pairs, false, reads, near);
        }
        if (reads) end_stretch(f, block, n, last, f->y, f->more_y);
    }
}

LA_FN void scan_tokens(const scan_room *f, int64_t block, int64_t n, const la_scan_form form,
                       const bool pairs, const bool reads)
{
    if (form == LA_SELECTIVE && !pairs && exponents_are_near(f, block, n))
        scan_numbers(f, block, n, form, pairs, reads, true);
    else
        scan_numbers(f, block, n, form, pairs, reads, false);
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

/* ---- a form's functions ---- */

typedef void scan_function(const scan_room *f, int64_t block, int64_t n);

/* The functions of a form: its reads, its states alone, and its way back. */
typedef struct {
    scan_function *read, *carry, *back;
} scan_functions;

#define LA_SCAN_KINDS(X) \
    X(selective, LA_SELECTIVE, false) \
    X(selective_pairs, LA_SELECTIVE, true) \
    X(fixed, LA_FIXED, false) \
    X(fixed_pairs, LA_FIXED, true) \
    X(gated, LA_GATED_SCAN, false)

#define LA_SCAN_KIND(name, form, pairs) \
    LA_COLD void read_##name(const scan_room *f, int64_t block, int64_t n) \
    { \
        scan_tokens(f, block, n, form, pairs, true); \
    } \
    LA_COLD void carry_##name(const scan_room *f, int64_t block, int64_t n) \
    { \
        scan_tokens(f, block, n, form, pairs, false); \
    } \
    LA_COLD void back_##name(const scan_room *f, int64_t block, int64_t n) \
    { \
        scan_tokens_back(f, block, n, form, pairs); \
    } \
    static const scan_functions scan_##name = {read_##name, carry_##name, back_##name};
LA_SCAN_KINDS(LA_SCAN_KIND)
#undef LA_SCAN_KIND

static const scan_functions *scan_functions_of(const la_diagonal *j)
{
    switch ((la_scan_form)j->room.form) {
    case LA_SELECTIVE: return j->room.pairs ? &scan_selective_pairs : &scan_selective;
    case LA_FIXED: return j->room.pairs ? &scan_fixed_pairs : &scan_fixed;
    default: return &scan_gated;
    }
}

/* ---- forward ---- */

/* y <- (y + D u) silu(z) */
LA_FN void finish_segment(const la_diagonal *j, const la_scan_unit *u, int64_t t, int64_t n,
                          const scan_room *f)
{
    const la_array *z = j->room.array[LA_SCAN_Z], *D = j->room.array[LA_SCAN_D];
    if (z) load_scan_rows(z, u->b, t, n, u->d0, f, f->z);
    for (int64_t i = 0; (z || D) && i < n; i++)
        for (int64_t c = 0; c < f->width; c += LANES) {
            const int64_t at = i * f->width + c;
            lane *const y = lanes_of(f->y + at);
            if (D) *y += lanes_in(f->D + c)[0] * lanes_in(f->u + at)[0];
            if (!z) continue;
            const lane gate = lanes_in(f->z + at)[0];
            *y *= gate * sigmoid(gate);
        }
}

/* The numbers that all tokens share. */
LA_FN void load_constants(const la_diagonal *j, const la_scan_unit *u, const scan_room *f)
{
    la_array *const *array = j->room.array;
    load_shared(f, f->A, array[LA_SCAN_A], u->d0);
    if (j->room.form == LA_FIXED) {
        load_shared(f, f->B, array[LA_SCAN_B0], u->d0);
        load_shared(f, f->C, array[LA_SCAN_C0], u->d0);
    }
    load_per_channel(f, f->D, array[LA_SCAN_D], u->d0);
    load_per_channel(f, f->bias, array[LA_SCAN_BIAS], u->d0);
    if (LA_NEAR_POWERS && j->room.form == LA_SELECTIVE && !j->room.pairs) {
        fill(f->width, f->reach, 0);
        for (int64_t k = 0; k < f->blocks * f->N; k++) {
            lane *const most = lanes_of(f->reach) + k / f->N;
            *most = lane_most(magnitude(lanes_in(f->A)[k]), *most); /* a NaN in A is passed over */
        }
    }
}

static size_t diagonal_scratch(const la_diagonal *j, int64_t channels, int64_t longest)
{
    arena m = {NULL, 0};
    scan_room f;
    scan_take_room(&f, &m, j, channels, longest);
    return m.used;
}

/* One token of a SELECTIVE scan of reals. Its state would be turned to lanes of channels and back for
 * nothing: here a lane has numbers of one channel, whose reads are added up across it. */
LA_COLD void scan_step(const la_diagonal *j, const la_scan_unit *u, const scan_room *f)
{
    const la_array *state = j->room.array[LA_SCAN_S0], *rates = j->room.array[LA_SCAN_A];
    const real LOG2_E = (real)1.44269504088896340736;
    const int64_t row = padded(f->N);
    real *const A = f->A, *const h = f->h;
    for (int64_t c = 0; c < f->channels; c++) {
        char *const h_at = scan_at(state, u->state, u->d0 + c, 0, 0);
        load_row(h, f->N, h_at, state->dtype);
        load_apart(A, f->N, scan_at(rates, u->d0 + c, 0, 0, 0), rates->stride[1], rates->dtype);
        const real step2 = f->step[c] * LOG2_E, w = f->step[c] * f->u[c];
        lane sum = LANE_ZERO;
        for (int64_t m = 0; m < row; m += LANES) {
            lane a = step2 * lanes_in(A + m)[0];
            lanes_exp2(&a, 1);
            lane *const some = lanes_of(h + m);
            *some = scan_write(*some, a, w - LANE_ZERO, lanes_in(f->B + m)[0]);
            sum += lanes_in(f->C + m)[0] * *some;
        }
        f->y[c] = LANE_SUM(sum);
        store_row(h_at, state->dtype, h, f->N);
    }
}

static void diagonal_forward(const la_diagonal *j, const la_scan_unit *u, void *scratch)
{
    arena m = {scratch, 0};
    scan_room f;
    const bool step = j->room.p->pass == LA_STEP;
    const scan_functions *by = scan_functions_of(j);
    scan_take_room(&f, &m, j, u->d1 - u->d0, 0);
    const la_array *const state = j->room.array[LA_SCAN_S0];
    if (step && j->room.form == LA_SELECTIVE && !j->room.pairs &&
        (j->N == 1 || state->stride[2] == 1)) {
        load_per_channel(&f, f.D, j->room.array[LA_SCAN_D], u->d0);
        load_per_channel(&f, f.bias, j->room.array[LA_SCAN_BIAS], u->d0);
        load_segment(j, u, 0, 1, &f);
        scan_step(j, u, &f);
        finish_segment(j, u, 0, 1, &f);
        store_scan_rows(j->room.array[LA_SCAN_Y], u->b, 0, 1, u->d0, &f, f.y);
        return;
    }
    load_constants(j, u, &f);
    load_scan_state(&f, f.h, j->room.array[LA_SCAN_S0], u->state, u->d0);
    for (int64_t t = u->begin; t < u->end; t += SEGMENT) {
        const int64_t n = t + SEGMENT < u->end ? SEGMENT : u->end - t;
        if (la_stopped(j->room.p)) return;
        load_segment(j, u, t, n, &f);
        look_ahead(j, u, t + SEGMENT, &f);
        for (int64_t block = 0; block < f.blocks; block++) by->read(&f, block, n);
        finish_segment(j, u, t, n, &f);
        store_scan_rows(j->room.array[LA_SCAN_Y], u->b, t, n, u->d0, &f, f.y);
    }
    store_scan_state(&f, f.h, j->room.array[step ? LA_SCAN_S0 : LA_SCAN_ST], u->state, u->d0);
}

/* ---- backward ---- */

/* Was y = (y + D u) silu(z), for a lane of channels: dy becomes the gradient of the sum over n, and
 * z that of z but for the factor y + D u, which the way back makes once more. D's is added to dD,
 * and the rest of u's is added to du later. */
LA_COLD void begin_gate_adjoint(const scan_room *f, int64_t block, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i * f->width + block * LANES;
        lane *const dy = lanes_of(f->dy + at), *const z = lanes_of(f->z + at);
        const lane gate = *z;
        *z = *dy * silu_slope(gate);
        *dy *= gate * sigmoid(gate);
    }
}

LA_COLD void end_gate_adjoint(const scan_room *f, int64_t block, int64_t n)
{
    const lane D = lanes_in(f->D)[block];
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = i * f->width + block * LANES;
        lanes_of(f->z + at)[0] *= lanes_in(f->y + at)[0] + D * lanes_in(f->u + at)[0];
    }
}

/* The parts of du and ddelta that come from D, and from delta's bias and softplus, and the sums over
 * tokens of both. */
LA_FN void finish_adjoint(const la_diagonal *j, const scan_room *f, int64_t n)
{
    const bool D = j->room.array[LA_SCAN_D], selective = j->room.form == LA_SELECTIVE;
    for (int64_t c = 0; c < f->width; c += LANES) {
        lane of_D = LANE_ZERO, of_bias = LANE_ZERO;
        for (int64_t i = 0; i < n; i++) {
            const int64_t at = i * f->width + c;
            const lane dy = lanes_in(f->dy + at)[0];
            if (D) {
                lanes_of(f->du + at)[0] += dy * lanes_in(f->D + c)[0];
                of_D += dy * lanes_in(f->u + at)[0];
            }
            if (!selective) continue;
            lane *const dstep = lanes_of(f->dstep + at);
            if (j->softplus) *dstep *= lanes_in(f->slope + at)[0];
            of_bias += *dstep;
        }
        add_lane(f->dD + c, of_D);
        add_lane(f->dbias + c, of_bias);
    }
}

/* The sums over the channels of a panel: of token i, for each number. */
LA_COLD void sum_channels(const real *d, int64_t i, int64_t N, real *to)
{
    int64_t m = 0;
    for (; m + LANES <= N; m += LANES) {
        lane x[LANES];
#pragma GCC unroll 16
        for (int k = 0; k < LANES; k++) x[k] = lanes_in(d)[(m + k) * SEGMENT + i];
        *(lane_of_state *)(to + m) = sum_each(x);
    }
    for (; m < N; m++) to[m] = LANE_SUM(lanes_in(d)[m * SEGMENT + i]);
}

/* A panel's part of dB and dC: the sums over its channels. */
LA_FN void store_groups(const la_diagonal *j, const la_scan_unit *u, const la_scan_sums *sums,
                        int64_t t, int64_t n, const scan_room *f)
{
    const int64_t N = f->N, tokens = j->B * j->T;
    for (int64_t i = 0; i < n; i++) {
        const int64_t token = u->b * j->T + t + i;
        const int64_t at = ((u->panel * tokens + token) * j->G + u->group) * N;
        sum_channels(f->dB, i, N, (real *)sums->dB + at);
        sum_channels(f->dC, i, N, (real *)sums->dC + at);
    }
}

LA_FN void backward_segment(const la_diagonal *j, const la_scan_unit *u, const la_scan_sums *sums,
                            int64_t t, int64_t n, const real *kept, const scan_room *f)
{
    la_array *const *array = j->room.array, *const *gradient = j->room.gradient;
    const scan_functions *by = scan_functions_of(j);
    const bool selective = j->room.form == LA_SELECTIVE;
    const int64_t N = f->N;
    load_segment(j, u, t, n, f);
    load_scan_rows(gradient[LA_SCAN_Y], u->b, t, n, u->d0, f, f->dy);
    if (array[LA_SCAN_Z]) load_scan_rows(array[LA_SCAN_Z], u->b, t, n, u->d0, f, f->z);
    if (selective) {
        fill(N * SEGMENT * LANES, f->dB, 0);
        fill(N * SEGMENT * LANES, f->dC, 0);
    }
    memcpy(f->h, kept, sizeof(real) * (size_t)(N * f->width));
    for (int64_t block = 0; block < f->blocks; block++) {
        if (array[LA_SCAN_Z]) begin_gate_adjoint(f, block, n);
        by->back(f, block, n);
        if (array[LA_SCAN_Z]) end_gate_adjoint(f, block, n);
    }
    finish_adjoint(j, f, n);
    store_scan_rows(gradient[LA_SCAN_U], u->b, t, n, u->d0, f, f->du);
    if (j->room.form == LA_GATED_SCAN)
        store_scan_rows(gradient[LA_SCAN_G], u->b, t, n, u->d0, f, f->dstep);
    if (!selective) return;
    store_scan_rows(gradient[LA_SCAN_DELTA], u->b, t, n, u->d0, f, f->dstep);
    if (array[LA_SCAN_Z]) store_scan_rows(gradient[LA_SCAN_Z], u->b, t, n, u->d0, f, f->z);
    store_groups(j, u, sums, t, n, f);
}

/* Sums over the tokens of the unit's sequences, [channels][N], to their place among those of all
 * units. */
LA_FN void store_sums(const la_diagonal *j, const la_scan_unit *u, const scan_room *f, double *to,
                      const double *from, int64_t N)
{
    if (!to) return;
    double *const part = to + (u->part * j->D + u->d0) * N;
    for (int64_t c = 0; c < f->channels; c++)
        for (int64_t m = 0; m < N; m++) part[c * N + m] = from[N == 1 ? c : scan_place(f, c, m)];
}

static void diagonal_backward(const la_diagonal *j, const la_scan_unit *all,
                              const la_scan_sums *sums, void *scratch)
{
    arena m = {scratch, 0};
    scan_room f;
    la_array *const *array = j->room.array, *const *gradient = j->room.gradient;
    la_scan_unit unit = *all, *const u = &unit;
    const scan_functions *by = scan_functions_of(j);
    scan_take_room(&f, &m, j, u->d1 - u->d0, u->longest);
    const size_t numbers = (size_t)(f.N * f.width);
    load_constants(j, u, &f);
    memset(f.dA, 0, numbers * sizeof *f.dA);
    memset(f.dD, 0, (size_t)f.width * sizeof *f.dD);
    memset(f.dbias, 0, (size_t)f.width * sizeof *f.dbias);
    if (j->room.form == LA_FIXED) {
        memset(f.dB0, 0, numbers * sizeof *f.dB0);
        memset(f.dC0, 0, numbers * sizeof *f.dC0);
    }
    for (int64_t n = all->first; n < all->last; n++) {
        la_scan_sequence(j, u, n);
        load_scan_state(&f, f.h, array[LA_SCAN_S0], n, u->d0);
        const int64_t segments = (u->end - u->begin + SEGMENT - 1) / SEGMENT;
        for (int64_t s = 0; s < segments; s++) {
            const int64_t t = u->begin + s * SEGMENT;
            if (la_stopped(j->room.p)) return;
            memcpy(f.kept + (size_t)s * numbers, f.h, numbers * sizeof(real));
            if (s == segments - 1) break;
            load_segment(j, u, t, SEGMENT, &f);
            look_ahead(j, u, t + SEGMENT, &f);
            for (int64_t block = 0; block < f.blocks; block++) by->carry(&f, block, SEGMENT);
        }
        load_scan_state(&f, f.dh, gradient[LA_SCAN_ST], n, u->d0);
        for (int64_t s = segments - 1; s >= 0; s--) {
            const int64_t t = u->begin + s * SEGMENT;
            const int64_t count = t + SEGMENT < u->end ? SEGMENT : u->end - t;
            if (la_stopped(j->room.p)) return;
            look_ahead(j, u, t - SEGMENT, &f);
            backward_segment(j, u, sums, t, count, f.kept + (size_t)s * numbers, &f);
        }
        store_scan_state(&f, f.dh, gradient[LA_SCAN_S0], n, u->d0);
    }
    store_sums(j, u, &f, sums->dA, f.dA, f.N);
    store_sums(j, u, &f, sums->dB0, f.dB0, f.N);
    store_sums(j, u, &f, sums->dC0, f.dC0, f.N);
    store_sums(j, u, &f, sums->dD, f.dD, 1);
    store_sums(j, u, &f, sums->dbias, f.dbias, 1);
}

/* dB and dC of a token: the panels of each group, in order. */
static void diagonal_reduce(const la_diagonal *j, int64_t token, const la_scan_sums *sums,
                            la_scan_line line, const void *partial)
{
    const la_array *to = j->room.gradient[line];
    const int64_t row = j->G * j->N, one_panel = j->B * j->T * row, size = la_size_of(to->dtype);
    for (int64_t g = 0; g < j->G; g++) {
        const real *from = (const real *)partial + token * row + g * j->N;
        char *const at_group = scan_at(to, token / j->T, token % j->T, g, 0);
        for (int64_t m = 0; m < j->N; m += LANES) {
            const int64_t some = m + LANES < j->N ? LANES : j->N - m;
            real sum[LANES] __attribute__((aligned(LA_LANE_BYTES))) = {0};
            for (int64_t panel = 0; panel < sums->panels; panel++) {
                const real *x = from + panel * one_panel + m;
                if (some == LANES)
                    *lanes_of(sum) += *(const lane_of_state *)x;
                else
                    for (int64_t k = 0; k < some; k++) sum[k] += x[k];
            }
            for (int64_t k = 0; k < some; k++)
                store_element(at_group + (m + k) * to->stride[3] * size, to->dtype, sum[k]);
        }
    }
}
