/* Diagonal scans (../diagonal.h): a panel of channels of one sequence, a lane of channels at a
 * time.
 *
 * Tokens go in segments: the rows of a segment are read once, for all channels of the panel, and
 * lie in the first cache while lane after lane goes through them. A lane's state stays there too.
 */

/* ---- a form's functions ---- */

typedef void scan_function(const scan_room *f, int64_t block, int64_t n);

/* The functions of a form: its reads, its states alone, its way back, and the gradient of its states
 * alone. */
typedef struct {
    scan_function *read, *carry, *back, *give;
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
        scan_tokens(f, block, n, form, pairs, READS); \
    } \
    LA_COLD void carry_##name(const scan_room *f, int64_t block, int64_t n) \
    { \
        scan_tokens(f, block, n, form, pairs, CARRIES); \
    } \
    LA_COLD void give_##name(const scan_room *f, int64_t block, int64_t n) \
    { \
        scan_tokens(f, block, n, form, pairs, GIVES); \
    } \
    LA_COLD void back_##name(const scan_room *f, int64_t block, int64_t n) \
    { \
        scan_tokens_back(f, block, n, form, pairs); \
    } \
    static const scan_functions scan_##name = {read_##name, carry_##name, back_##name, give_##name};
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

/* ---- the map of the tokens: they turn a state h into M h and what they write ---- */

LA_FN void begin_map(const la_diagonal *j, const scan_room *f)
{
    for (int64_t c = 0; c < f->width; c++) f->passed[c] = j->room.form == LA_GATED_SCAN;
}

LA_COLD void map_segment(const la_diagonal *j, int64_t n, const scan_room *f)
{
    if (j->room.form == LA_FIXED) return; /* its decays are the same for all tokens */
    const bool gated = j->room.form == LA_GATED_SCAN;
    for (int64_t i = 0; i < n; i++) {
        const real *step = f->step + i * f->width;
        for (int64_t c = 0; c < f->width; c++)
            f->passed[c] = gated ? f->passed[c] * (double)step[c] : f->passed[c] + (double)step[c];
    }
}

/* M, in the place of the state, which has been stored. */
LA_COLD void store_map(const la_diagonal *j, const la_scan_unit *u, const scan_room *f)
{
    const bool pairs = j->room.pairs;
    const double count = (double)(u->end - u->begin);
    for (int64_t c = 0; c < f->width; c++)
        for (int64_t m = 0; m < f->N; m += pairs ? 2 : 1) {
            const int64_t at = scan_place(f, c, m), beside = pairs ? scan_place(f, c, m + 1) : at;
            double M[2];
            scan_map((la_scan_form)j->room.form, pairs, f->A[at], pairs ? f->A[beside] : 0,
                     f->passed[c], count, M);
            f->h[at] = (real)M[0];
            if (pairs) f->h[beside] = (real)M[1];
        }
    store_scan_state(f, f->h, j->room.array[LA_SCAN_MT], u->state, u->d0);
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
    if (j->room.want_map) begin_map(j, &f);
    for (int64_t t = u->begin; t < u->end; t += SEGMENT) {
        const int64_t n = t + SEGMENT < u->end ? SEGMENT : u->end - t;
        if (la_stopped(j->room.p)) return;
        load_segment(j, u, t, n, &f);
        look_ahead(j, u, t + SEGMENT, &f);
        if (j->room.states_only) {
            for (int64_t block = 0; block < f.blocks; block++) by->carry(&f, block, n);
            if (j->room.want_map) map_segment(j, n, &f);
            continue;
        }
        for (int64_t block = 0; block < f.blocks; block++) by->read(&f, block, n);
        finish_segment(j, u, t, n, &f);
        store_scan_rows(j->room.array[LA_SCAN_Y], u->b, t, n, u->d0, &f, f.y);
    }
    store_scan_state(&f, f.h, j->room.array[step ? LA_SCAN_S0 : LA_SCAN_ST], u->state, u->d0);
    if (j->room.want_map) store_map(j, u, &f);
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

/* Was w = factor u, of GATED: the gradient of w becomes that of u, and adds to that of g. `slope` is
 * u times the factor's derivative. */
LA_COLD void finish_write_adjoint(const scan_room *f, int64_t n)
{
    for (int64_t i = 0; i < n * f->width; i += LANES) {
        lane *const dw = lanes_of(f->du + i);
        lanes_of(f->dstep + i)[0] += *dw * lanes_in(f->slope + i)[0];
        *dw *= lanes_in(f->z + i)[0];
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
    if (j->write) finish_write_adjoint(f, n);
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

/* The gradients of the states before the unit's sequences, and no others. */
LA_FN void gradients_alone(const la_diagonal *j, const la_scan_unit *all, scan_room *f)
{
    la_array *const *array = j->room.array, *const *gradient = j->room.gradient;
    la_scan_unit unit = *all, *const u = &unit;
    const scan_functions *by = scan_functions_of(j);
    for (int64_t s = all->first; s < all->last; s++) {
        la_scan_sequence(j, u, s);
        load_scan_state(f, f->dh, gradient[LA_SCAN_ST], s, u->d0);
        const int64_t segments = (u->end - u->begin + SEGMENT - 1) / SEGMENT;
        for (int64_t t = u->begin + (segments - 1) * SEGMENT; t >= u->begin; t -= SEGMENT) {
            const int64_t n = t + SEGMENT < u->end ? SEGMENT : u->end - t;
            if (la_stopped(j->room.p)) return;
            load_segment(j, u, t, n, f);
            load_scan_rows(gradient[LA_SCAN_Y], u->b, t, n, u->d0, f, f->dy);
            if (array[LA_SCAN_Z]) load_scan_rows(array[LA_SCAN_Z], u->b, t, n, u->d0, f, f->z);
            look_ahead(j, u, t - SEGMENT, f);
            for (int64_t block = 0; block < f->blocks; block++) {
                if (array[LA_SCAN_Z]) begin_gate_adjoint(f, block, n);
                by->give(f, block, n);
            }
        }
        store_scan_state(f, f->dh, gradient[LA_SCAN_S0], s, u->d0);
    }
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
    if (j->room.states_only) {
        gradients_alone(j, all, &f);
        return;
    }
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
