/* Gates from projections, in pieces of a row that stay in the first cache: x is read once, and
 * the result is written once. Each piece goes through the same code, so the bits of a number do
 * not depend on where it lies. */

enum { GATE_PIECE = 32 * LANES };

/* Number i of row r. Where tokens have gaps, a row is one token. */
LA_FN const char *gate_number(const la_gate_rows *w, const la_gate_numbers *x, int64_t r, int64_t i)
{
    const la_gating *j = w->job;
    if (j->dense) return x->data + (r * w->columns + i) * la_size_of(x->dtype);
    const int64_t inner = r / j->lead[2];
    const int64_t at = r % j->lead[2] * x->lead[2] + inner % j->lead[1] * x->lead[1] +
                       inner / j->lead[1] * x->lead[0] + i / j->Q * x->head + i % j->Q;
    return x->data + at * la_size_of(x->dtype);
}

/* n numbers of row r from i on: where they lie, or as reals in `room`, which is GATE_PIECE +
 * LANES long. */
LA_FN const lane_of_state *gate_piece(const la_gate_rows *w, const la_gate_numbers *x, int64_t r,
                                      int64_t i, int64_t n, real *room)
{
    const la_gating *j = w->job;
    const bool one_run = j->dense || j->P == 1 || x->head == j->Q;
    if (one_run && x->dtype == REAL_DTYPE && n % LANES == 0)
        return (const lane_of_state *)gate_number(w, x, r, i);
    for (int64_t done = 0, run; done < n; done += run) {
        const int64_t left = j->Q - (i + done) % j->Q; /* of this head */
        run = one_run || left > n - done ? n - done : left;
        convert_row(room + done, run, gate_number(w, x, r, i + done), x->dtype);
    }
    return (const lane_of_state *)room;
}

/* How many numbers row r has. */
LA_FN int64_t gate_length(const la_gate_rows *w, int64_t r)
{
    const int64_t left = w->job->count - r * w->columns;
    return left < w->columns ? left : w->columns;
}

/* A row of a parameter, or of its exponentials. It may write up to LANES numbers more. */
LA_FN void parameter_row(const la_gate_rows *w, const la_gate_parameter *a, real *to,
                         const bool exponential)
{
    const la_gating *j = w->job;
    const int64_t size = la_size_of(a->given->dtype), token = j->P * j->Q;
    for (int64_t p = 0; p < j->P; p++) {
        const char *from = a->given->data + p * a->stride[0] * size;
        const int64_t numbers = a->stride[1] ? j->Q : 1;
        real *row = to + p * j->Q;
        for (int64_t q = 0; q < numbers; q++)
            row[q] = load_element(from + q * a->stride[1] * size, a->given->dtype);
        if (exponential)
            for (int64_t q = 0; q < numbers; q += LANES) {
                lane_of_state *some = (lane_of_state *)(row + q);
                *some = LANE_EXP(*some);
            }
        for (int64_t q = numbers; q < j->Q; q++) row[q] = row[0];
    }
    for (int64_t i = token; i < padded(w->columns); i++) to[i] = to[i - token];
}

static void gate_parameters(const la_gate_rows *w)
{
    if (w->rate) parameter_row(w, &w->job->rate, w->rate, true);
    if (w->bias) parameter_row(w, &w->job->bias, w->bias, false);
}

/* The parameters of a lane of columns. */
LA_FN lane gate_rate(const la_gate_rows *w, int64_t column)
{
    return w->rate ? lanes_in((const real *)w->rate + column)[0] : 1 - LANE_ZERO;
}
LA_FN lane gate_bias(const la_gate_rows *w, int64_t column)
{
    return w->bias ? lanes_in((const real *)w->bias + column)[0] : LANE_ZERO;
}

LA_COLD void gate_values(const la_gate_rows *w, const lane_of_state *x, int64_t first, int64_t n,
                         real *g)
{
    const la_curve curve = w->job->curve;
    const real factor = (real)w->job->factor;
    for (int64_t i = 0; i < n; i += LANES) {
        const lane u = x[i / LANES] + gate_bias(w, first + i);
        lanes_of(g + i)[0] = curve_of(u, gate_rate(w, first + i), curve, factor);
    }
}

static void gate_forward(const la_gate_rows *w, int64_t first, int64_t last)
{
    real room[GATE_PIECE + LANES] __attribute__((aligned(LA_LANE_BYTES)));
    real g[GATE_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const la_gating *j = w->job;
    for (int64_t r = first; r < last; r++) {
        const int64_t length = gate_length(w, r);
        char *const row = j->to + r * w->columns * (int64_t)sizeof(real);
        for (int64_t i = 0; i < length; i += GATE_PIECE) {
            const int64_t n = i + GATE_PIECE < length ? GATE_PIECE : length - i;
            gate_values(w, gate_piece(w, &j->from, r, i, n, room), i, n, g);
            store_row(row + i * (int64_t)sizeof(real), REAL_DTYPE, g, n);
        }
    }
}

LA_COLD void gate_gradients(const la_gate_rows *w, const lane_of_state *d, const lane_of_state *x,
                            int64_t first, int64_t n, real *du, real *along)
{
    const la_curve curve = w->job->curve;
    const real factor = (real)w->job->factor;
    for (int64_t i = 0; i < n; i += LANES) {
        const lane u = x[i / LANES] + gate_bias(w, first + i);
        lanes_of(du + i)[0] = curve_gradient(d[i / LANES], u, gate_rate(w, first + i), curve,
                                             factor, lanes_of(along + i));
    }
}

static void gate_backward(const la_gate_rows *w, int64_t first, int64_t last, double *d_rate,
                          double *d_bias)
{
    real room_x[GATE_PIECE + LANES] __attribute__((aligned(LA_LANE_BYTES)));
    real room_d[GATE_PIECE + LANES] __attribute__((aligned(LA_LANE_BYTES)));
    real du[GATE_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    real along[GATE_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const la_gating *j = w->job;
    const int64_t size = la_size_of(j->from.dtype);
    for (int64_t r = first; r < last; r++) {
        const int64_t length = gate_length(w, r);
        for (int64_t i = 0; i < length; i += GATE_PIECE) {
            const int64_t n = i + GATE_PIECE < length ? GATE_PIECE : length - i;
            gate_gradients(w, gate_piece(w, &j->df, r, i, n, room_d),
                           gate_piece(w, &j->from, r, i, n, room_x), i, n, du, along);
            store_row(j->to + (r * w->columns + i) * size, j->from.dtype, du, n);
            if (d_rate)
                for (int64_t k = 0; k < n; k++) d_rate[i + k] += (double)along[k];
            if (d_bias)
                for (int64_t k = 0; k < n; k++) d_bias[i + k] += (double)du[k];
        }
    }
}

static void store_numbers(char *to, la_dtype dtype, const double *from, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        char *const at_i = to + i * la_size_of(dtype);
        if (dtype == LA_F64)
            *(double *)at_i = from[i];
        else
            store_element(at_i, dtype, (real)from[i]);
    }
}
