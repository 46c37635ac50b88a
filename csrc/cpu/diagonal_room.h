/* Diagonal scans: the memory of a unit, and the ways of its rows and numbers in and out. */

LA_FN lane lane_sqrt(lane x)
{
    for (int k = 0; k < LANES; k++) x[k] = LA_SQRT(x[k]);
    return x;
}
#define LANE_SQRT lane_sqrt
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
    /* of the map of the tokens, [width]: the sum of the steps, or the product of the decays (GATED) */
    double *passed;
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
    const bool alone = j->room.states_only;
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
    f->passed = arena_take_doubles(m, j->room.want_map ? 1 : 0, width);
    if (!backward) return;
    f->dh = arena_take(m, N, width);
    if (alone) {
        f->dy = arena_take(m, SEGMENT, width);
        f->slope = arena_take(m, SEGMENT, width);
        return;
    }
    const size_t segments = (size_t)((longest + SEGMENT - 1) / SEGMENT);
    for (size_t i = 0; i < sizeof more / sizeof *more; i++)
        *more[i] = arena_take(m, SEGMENT, width);
    f->kept = arena_take(m, segments, la_times(N, width));
    f->states = arena_take(m, SEGMENT + 1, AT_ONCE * LANES);
    f->decays = arena_take(m, SEGMENT, AT_ONCE * LANES);
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
            lane *const step = lanes_of(f->step + i), *const u = lanes_of(f->u + i);
            *step = lane_decay(*step, &rest);
            if (!j->write) continue;
            /* u becomes what is written. 1 - a is exact above 1/2, and rest has the digits that a has
             * lost. The adjoint finds the factor in z, as GATED has no z. */
            const lane factor = scan_factor(*step, (1 - *step) - rest, j->write);
            if (j->room.p->pass == LA_BACKWARD) {
                lanes_of(f->slope + i)[0] = *u * scan_factor_slope(*step, factor, j->write);
                lanes_of(f->z + i)[0] = factor;
            }
            *u *= factor;
        }
    }
}
