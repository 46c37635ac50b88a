/* Causal convolutions of channels (../convolution.h). A token needs the W - 1 tokens before it alone,
 * so a unit begins anywhere. Rows of channels that lie as reals are read and written where they are;
 * all others, and the ends of rows, go through rows of scratch.
 *
 * Each number is a sum in one order, the bias and then the taps from the token's own on, so its bits
 * do not depend on the layout of the arrays or on the cuts. */

enum {
    CONVOLVE_AT_ONCE = 8, /* tokens (or lanes of tokens) that share the loads of taps */
    CONVOLVE_TILE = 16,   /* tokens of rows in scratch */
    CONVOLVE_STRIP = 128, /* channels of rows in scratch: 16 + 3 rows of them are 10 KiB */
    CONVOLVE_LINE = 512,  /* tokens of a channel in scratch */
};

LA_FN lane lane_at(const real *x) { return *(const lane_of_state *)x; }

/* Past the caches: y is aligned to a lane. */
LA_FN void stream_lane(real *y, lane x)
{
#if defined(__clang__)
    __builtin_nontemporal_store(x, lanes_of(y));
#elif LA_AVX512 && LA_REAL_BITS == 32
    _mm512_stream_ps(y, (__m512)x);
#elif LA_AVX512
    _mm512_stream_pd(y, (__m512d)x);
#elif defined(__x86_64__) && LA_LANE_BYTES == 32 && LA_REAL_BITS == 32
    __builtin_ia32_movntps256(y, x);
#elif defined(__x86_64__) && LA_LANE_BYTES == 32
    __builtin_ia32_movntpd256(y, x);
#elif defined(__x86_64__) && LA_REAL_BITS == 32
    __builtin_ia32_movntps(y, x);
#elif defined(__x86_64__)
    __builtin_ia32_movntpd(y, x);
#else
    *lanes_of(y) = x;
#endif
}

/* Other threads see what was streamed only after this. */
LA_FN void end_streams(void)
{
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

/* z / (1 + exp(-z)) of one lane, or of CONVOLVE_AT_ONCE. The power of two is infinite for z below -88
 * (-709 in float64), where silu is above -1e-36 and becomes 0. */
LA_FN void lanes_silu(lane *z, const int many)
{
    const real LOG2_E = (real)1.44269504088896340736;
    const real lowest = LA_REAL_BITS == 32 ? -105 : -750;
    const int some = many < AT_ONCE ? many : AT_ONCE;
    for (int first = 0; first < many; first += some) {
        lane power[AT_ONCE];
        for (int k = 0; k < some; k++) { /* no infinity, and a NaN stays one */
            z[first + k] = lane_most(lowest - LANE_ZERO, z[first + k]);
            power[k] = lane_most(2 * lowest - LANE_ZERO, z[first + k] * -LOG2_E);
        }
        lanes_exp2(power, some);
        for (int k = 0; k < some; k++) z[first + k] /= 1 + power[k];
    }
}
_Static_assert(CONVOLVE_AT_ONCE % AT_ONCE == 0, "lanes_silu has no rest");

/* ---- sums over taps ---- */

/* `tokens` rows of y, which lie ys apart, from the rows of x, xs apart: row k of y is the sum of taps
 * times the rows k, k - 1, ... of x. The processor guesses a row's next numbers, but not the rows
 * after these: they are sent for, into the second cache. The first one holds few rows that lie a
 * multiple of 4 KiB apart. */
LA_FN void convolve_some(const real *x, int64_t xs, real *restrict y, int64_t ys, int64_t lanes,
                         const real *taps, const real *bias, int64_t width, const int64_t W,
                         const int tokens, const bool activated, const bool streams)
{
    for (int64_t c = 0; c < lanes * LANES; c += LANES) {
        lane z[CONVOLVE_AT_ONCE];
        for (int k = 0; tokens > 1 && k < tokens; k++)
            __builtin_prefetch(x + (k + tokens) * xs + c, 0, 2);
        for (int k = 0; k < tokens; k++) z[k] = lane_at(bias + c);
        for (int64_t i = 0; i < W; i++) {
            const lane tap = lane_at(taps + i * width + c);
            for (int k = 0; k < tokens; k++) z[k] += tap * lane_at(x + (k - i) * xs + c);
        }
        if (activated) lanes_silu(z, tokens);
        for (int k = 0; k < tokens; k++) {
            if (streams)
                stream_lane(y + k * ys + c, z[k]);
            else
                *(lane_of_state *)(y + k * ys + c) = z[k];
        }
    }
}

LA_FN void convolve_rows(const real *x, int64_t xs, real *y, int64_t ys, int64_t n, int64_t lanes,
                         const real *taps, const real *bias, int64_t width, const int64_t W,
                         const bool activated, bool streams)
{
    int64_t t = 0;
    if (streams) {
        for (; t + CONVOLVE_AT_ONCE <= n; t += CONVOLVE_AT_ONCE)
            convolve_some(x + t * xs, xs, y + t * ys, ys, lanes, taps, bias, width, W,
                          CONVOLVE_AT_ONCE, activated, true);
        end_streams();
    }
    for (; t + CONVOLVE_AT_ONCE <= n; t += CONVOLVE_AT_ONCE)
        convolve_some(x + t * xs, xs, y + t * ys, ys, lanes, taps, bias, width, W, CONVOLVE_AT_ONCE,
                      activated, false);
    for (; t < n; t++)
        convolve_some(x + t * xs, xs, y + t * ys, ys, lanes, taps, bias, width, W, 1, activated,
                      false);
}

/* One channel, whose tokens are neighbours: `many` lanes of them. Its taps lie `width` apart. */
LA_FN void convolve_line_some(const real *x, real *restrict y, const real *taps, const real *bias,
                              int64_t width, const int64_t W, const int many, const bool activated)
{
    lane z[CONVOLVE_AT_ONCE];
    for (int k = 0; k < many; k++) z[k] = *bias - LANE_ZERO;
    for (int64_t i = 0; i < W; i++) {
        const lane tap = taps[i * width] - LANE_ZERO;
        for (int k = 0; k < many; k++) z[k] += tap * lane_at(x + k * LANES - i);
    }
    if (activated) lanes_silu(z, many);
    for (int k = 0; k < many; k++) *(lane_of_state *)(y + k * LANES) = z[k];
}

LA_FN void convolve_line(const real *x, real *y, int64_t lanes, const real *taps, const real *bias,
                         int64_t width, const int64_t W, const bool activated)
{
    int64_t i = 0;
    for (; i + CONVOLVE_AT_ONCE <= lanes; i += CONVOLVE_AT_ONCE)
        convolve_line_some(x + i * LANES, y + i * LANES, taps, bias, width, W, CONVOLVE_AT_ONCE,
                           activated);
    for (; i < lanes; i++)
        convolve_line_some(x + i * LANES, y + i * LANES, taps, bias, width, W, 1, activated);
}

typedef void rows_function(const real *x, int64_t xs, real *y, int64_t ys, int64_t n, int64_t lanes,
                           const real *taps, const real *bias, int64_t width, int64_t W,
                           bool streams);
typedef void line_function(const real *x, real *y, int64_t lanes, const real *taps,
                           const real *bias, int64_t width, int64_t W);

/* The widths of models have code of their own, any other width the last. */
#define LA_CONVOLUTIONS(X) X(2, 2) X(3, 3) X(4, 4) X(any, W)

#define LA_CONVOLUTION(name, taps_of, suffix, activated) \
    LA_COLD void rows_##name##suffix(const real *x, int64_t xs, real *y, int64_t ys, int64_t n, \
                                     int64_t lanes, const real *taps, const real *bias, \
                                     int64_t width, int64_t W, bool streams) \
    { \
        (void)W; \
        convolve_rows(x, xs, y, ys, n, lanes, taps, bias, width, taps_of, activated, streams); \
    } \
    LA_COLD void line_##name##suffix(const real *x, real *y, int64_t lanes, const real *taps, \
                                     const real *bias, int64_t width, int64_t W) \
    { \
        (void)W; \
        convolve_line(x, y, lanes, taps, bias, width, taps_of, activated); \
    }
#define LA_CONVOLUTION_PAIR(name, taps_of) \
    LA_CONVOLUTION(name, taps_of, , false) \
    LA_CONVOLUTION(name, taps_of, _silu, true)
LA_CONVOLUTIONS(LA_CONVOLUTION_PAIR)
#undef LA_CONVOLUTION_PAIR
#undef LA_CONVOLUTION

static rows_function *rows_function_of(int64_t W, bool activated)
{
    switch (W) {
    case 2: return activated ? rows_2_silu : rows_2;
    case 3: return activated ? rows_3_silu : rows_3;
    case 4: return activated ? rows_4_silu : rows_4;
    default: return activated ? rows_any_silu : rows_any;
    }
}

static line_function *line_function_of(int64_t W, bool activated)
{
    switch (W) {
    case 2: return activated ? line_2_silu : line_2;
    case 3: return activated ? line_3_silu : line_3;
    case 4: return activated ? line_4_silu : line_4;
    default: return activated ? line_any_silu : line_any;
    }
}

/* ---- what a unit works on ---- */

/* Rows of positions (tokens, and those before the first one) are as long as the strip at hand. */
typedef struct {
    real *x, *z, *d, *y, *column;
    real *from, *to; /* a channel's line */
} convolution_room;

LA_FN void convolution_take(convolution_room *f, arena *m, const la_convolution *j)
{
    const size_t reach = (size_t)j->W - 1;
    const size_t line = la_plus(CONVOLVE_LINE + 2 * LANES, la_times(2, reach));
    *f = (convolution_room){0};
    f->x = arena_take(m, la_plus(CONVOLVE_TILE, la_times(2, reach)), CONVOLVE_STRIP);
    f->y = arena_take(m, CONVOLVE_TILE, CONVOLVE_STRIP);
    f->column = arena_take(m, 1, la_plus(CONVOLVE_TILE + LANES, la_times(2, reach)));
    f->from = arena_take(m, 1, line);
    f->to = arena_take(m, 1, line);
    if (j->room.p->pass != LA_BACKWARD) return;
    f->z = arena_take(m, la_plus(CONVOLVE_TILE, reach), CONVOLVE_STRIP);
    f->d = arena_take(m, la_plus(CONVOLVE_TILE, reach), CONVOLVE_STRIP);
}

static size_t convolution_scratch(const la_convolution *j)
{
    arena m = {NULL, 0};
    convolution_room f;
    convolution_take(&f, &m, j);
    return m.used;
}

/* The rows of taps, the bias, and zeros: three kinds of rows, W + 2 in all. */
static void convolution_taps(const la_convolution *j, const la_convolution_taps *w)
{
    const la_array *weight = j->room.array[LA_CONVOLUTION_WEIGHT];
    const la_array *bias = j->room.array[LA_CONVOLUTION_BIAS];
    real *const taps = w->taps;
    fill(round_up(w->width, LANES) * (j->W + 2), taps, 0);
    for (int64_t i = 0; i < j->W; i++)
        gather(taps + i * w->width, j->D, at(weight, 0, j->W - 1 - i, 0), weight->stride[0],
               weight->dtype);
    if (bias) gather(taps + j->W * w->width, j->D, bias->data, bias->stride[0], bias->dtype);
}

LA_FN const real *taps_at(const la_convolution_taps *w, int64_t row, int64_t d)
{
    return (const real *)w->taps + row * w->width + d;
}

/* Number m of the unit's initial state, of n channels from d on. */
LA_FN void load_before(const la_convolution *j, const la_convolution_unit *u, int64_t m, int64_t d,
                       int64_t n, real *to)
{
    const la_array *S = j->room.array[LA_CONVOLUTION_S0];
    if (S && m + j->older >= 0)
        gather(to, n, at(S, u->state, d, m + j->older), S->stride[1], S->dtype);
    else
        memset(to, 0, (size_t)n * sizeof *to);
}

/* `count` rows of inputs from position p on. Behind the last token they are zeros. */
LA_FN void load_inputs(const la_convolution *j, const la_convolution_unit *u, int64_t p,
                       int64_t count, int64_t d, int64_t channels, real *to, real *column)
{
    const int64_t width = padded(channels), reach = j->W - 1, stop = p + count;
    for (; p < stop && p < u->begin; p++, to += width) {
        load_before(j, u, p - u->begin + reach, d, channels, to);
        for (int64_t c = channels; c < width; c++) to[c] = 0;
    }
    const int64_t tokens = (stop < u->end ? stop : u->end) - p;
    if (tokens > 0) {
        load_tokens(j->room.array[LA_CONVOLUTION_X], u->b, p, tokens, d, channels, to, width,
                    column);
        to += tokens * width;
        p += tokens;
    }
    if (p < stop) fill((stop - p) * width, to, 0);
}

/* ---- forward ---- */

/* Any channels and tokens, by rows of scratch. */
LA_FN void forward_in_scratch(const la_convolution *j, const la_convolution_unit *u,
                              const la_convolution_taps *w, const convolution_room *f, int64_t d0,
                              int64_t d1, int64_t t0, int64_t t1)
{
    rows_function *const rows = rows_function_of(j->W, j->silu);
    for (int64_t t = t0; t < t1; t += CONVOLVE_TILE)
        for (int64_t d = d0; d < d1; d += CONVOLVE_STRIP) {
            const int64_t n = t + CONVOLVE_TILE < t1 ? CONVOLVE_TILE : t1 - t;
            const int64_t channels = d + CONVOLVE_STRIP < d1 ? CONVOLVE_STRIP : d1 - d;
            const int64_t width = padded(channels), reach = j->W - 1;
            load_inputs(j, u, t - reach, n + reach, d, channels, f->x, f->column);
            rows(f->x + reach * width, width, f->y, width, n, width / LANES, taps_at(w, 0, d),
                 taps_at(w, j->W, d), w->width, j->W, false);
            store_tokens(j->room.array[LA_CONVOLUTION_Y], u->b, t, n, d, channels, f->y, width,
                         f->column);
        }
}

/* Tokens whose inputs all lie in rows of x. */
LA_FN void forward_in_place(const la_convolution *j, const la_convolution_unit *u,
                            const la_convolution_taps *w, const convolution_room *f, int64_t t0,
                            int64_t t1)
{
    const la_array *x = j->room.array[LA_CONVOLUTION_X], *y = j->room.array[LA_CONVOLUTION_Y];
    int64_t d = u->d0;
    if (y->stride[1] % LANES == 0) { /* up to where lanes of y lie in one cache line */
        const uintptr_t place = (uintptr_t)at(y, u->b, t0, d) / sizeof(real);
        d += (int64_t)(-place % LANES);
        if (d > u->d1) d = u->d1;
        if (d > u->d0) forward_in_scratch(j, u, w, f, u->d0, d, t0, t1);
    }
    const int64_t lanes = (u->d1 - d) / LANES, rest = d + lanes * LANES;
    if (lanes)
        rows_function_of(j->W, j->silu)((const real *)at(x, u->b, t0, d), x->stride[1],
                                        (real *)at(y, u->b, t0, d), y->stride[1], t1 - t0, lanes,
                                        taps_at(w, 0, d), taps_at(w, j->W, d), w->width, j->W,
                                        w->streams);
    if (rest < u->d1) forward_in_scratch(j, u, w, f, rest, u->d1, t0, t1);
}

/* n tokens of a channel by lines of scratch. */
LA_FN void forward_line_in_scratch(const la_convolution *j, const la_convolution_unit *u,
                                   const la_convolution_taps *w, const convolution_room *f,
                                   int64_t d, int64_t t, int64_t n)
{
    const la_array *x = j->room.array[LA_CONVOLUTION_X], *y = j->room.array[LA_CONVOLUTION_Y];
    const int64_t reach = j->W - 1;
    int64_t p = t - reach;
    real *to = f->from;
    for (; p < u->begin; p++) load_before(j, u, p - u->begin + reach, d, 1, to++);
    convert_row(to, t + n - p, at(x, u->b, p, d), x->dtype);
    fill(padded(n) - n, f->from + reach + n, 0);
    line_function_of(j->W, j->silu)(f->from + reach, f->to, padded(n) / LANES, taps_at(w, 0, d),
                                    taps_at(w, j->W, d), w->width, j->W);
    convert_row_back(at(y, u->b, t, d), y->dtype, f->to, n);
}

LA_FN void forward_along(const la_convolution *j, const la_convolution_unit *u,
                         const la_convolution_taps *w, const convolution_room *f)
{
    const la_array *x = j->room.array[LA_CONVOLUTION_X], *y = j->room.array[LA_CONVOLUTION_Y];
    const int64_t reach = j->W - 1, whole = u->begin + reach;
    for (int64_t d = u->d0; d < u->d1; d++)
        for (int64_t t = u->t0, n; t < u->t1; t += n) {
            n = u->t1 - t < CONVOLVE_LINE ? u->t1 - t : CONVOLVE_LINE;
            const int64_t lanes = (u->t1 - t) / LANES;
            if (x->dtype == REAL_DTYPE && t >= whole && lanes) {
                n = lanes * LANES;
                line_function_of(j->W, j->silu)((const real *)at(x, u->b, t, d),
                                                (real *)at(y, u->b, t, d), lanes, taps_at(w, 0, d),
                                                taps_at(w, j->W, d), w->width, j->W);
                continue;
            }
            if (x->dtype == REAL_DTYPE && t < whole && n > whole - t) n = whole - t;
            forward_line_in_scratch(j, u, w, f, d, t, n);
        }
}

static void convolution_forward(const la_convolution *j, const la_convolution_unit *u,
                                const la_convolution_taps *w, void *scratch)
{
    arena m = {scratch, 0};
    convolution_room f;
    const la_array *x = j->room.array[LA_CONVOLUTION_X], *y = j->room.array[LA_CONVOLUTION_Y];
    const bool in_place =
        x->dtype == REAL_DTYPE && x->stride[2] == 1 && y->stride[2] == 1 && u->t1 - u->begin > 1;
    convolution_take(&f, &m, j);
    if (w->along) {
        forward_along(j, u, w, &f);
        return;
    }
    /* Tokens before `whole` have inputs in the initial state. */
    int64_t whole = in_place ? u->begin + j->W - 1 : u->t1;
    whole = whole < u->t0 ? u->t0 : whole > u->t1 ? u->t1 : whole;
    forward_in_scratch(j, u, w, &f, u->d0, u->d1, u->t0, whole);
    if (whole < u->t1) forward_in_place(j, u, w, &f, whole, u->t1);
}

/* The last W - 1 inputs, and in a step older ones before them, the oldest first: each place is
 * written after it was read. */
static void convolution_state(const la_convolution *j, const la_convolution_unit *u)
{
    const bool step = j->room.p->pass == LA_STEP;
    const la_array *x = j->room.array[LA_CONVOLUTION_X];
    const la_array *to = j->room.array[step ? LA_CONVOLUTION_S0 : LA_CONVOLUTION_ST];
    const int64_t reach = j->W - 1, length = u->end - u->begin;
    real row[CONVOLVE_STRIP + LANES];
    for (int64_t d = u->d0; d < u->d1; d += CONVOLVE_STRIP) {
        const int64_t n = d + CONVOLVE_STRIP < u->d1 ? CONVOLVE_STRIP : u->d1 - d;
        for (int64_t m = -j->older; m < reach; m++) {
            const int64_t p = length - reach + m; /* from the sequence's first token on */
            if (p < 0)
                load_before(j, u, p + reach, d, n, row);
            else
                gather(row, n, at(x, u->b, u->begin + p, d), x->stride[2], x->dtype);
            scatter(at(to, u->state, d, m + j->older), to->stride[1], to->dtype, row, n);
        }
    }
}

/* ---- backward ----
 *
 * Was z[t] = bias + sum of tap i times x[t - i], y = act(z), and the final state was the last W - 1
 * inputs: dz = act'(z) dy, dx[p] = sum of tap i times dz[p + i], and the final state's gradient. An
 * input of the initial state is one before the first token. */

/* dz of `count` positions from p on; zeros where there is no token. f->x has the inputs from W - 1
 * positions earlier on. */
LA_FN void load_dz(const la_convolution *j, const la_convolution_unit *u,
                   const la_convolution_taps *w, const convolution_room *f, int64_t p,
                   int64_t count, int64_t d, int64_t channels)
{
    const int64_t width = padded(channels), reach = j->W - 1;
    const int64_t first = p < u->begin ? u->begin : p;
    const int64_t last = p + count < u->end ? p + count : u->end;
    fill(count * width, f->d, 0);
    if (first >= last) return;
    real *const dz = f->d + (first - p) * width;
    load_tokens(j->room.gradient[LA_CONVOLUTION_Y], u->b, first, last - first, d, channels, dz,
                width, f->column);
    if (!j->silu) return;
    rows_function_of(j->W, false)(f->x + (first - p + reach) * width, width, f->z, width,
                                  last - first, width / LANES, taps_at(w, 0, d),
                                  taps_at(w, j->W, d), w->width, j->W, false);
    for (int64_t i = 0; i < (last - first) * width; i += LANES)
        lanes_of(dz + i)[0] *= silu_slope(lanes_in(f->z + i)[0]);
}

/* The gradients of taps and bias from n tokens, to the sums. */
LA_FN void add_taps(const la_convolution *j, const la_convolution_taps *w,
                    const convolution_room *f, int64_t n, int64_t width, double *sums)
{
    for (int64_t c = 0; c < width; c += LANES)
        for (int64_t i = 0; i <= j->W; i++) {
            lane sum = LANE_ZERO;
            const real *x = f->x + (j->W - 1 - i) * width + c;
            for (int64_t t = 0; t < n; t++) {
                const lane dz = lanes_in(f->d + t * width + c)[0];
                sum += i < j->W ? dz * lanes_in(x + t * width)[0] : dz;
            }
            for (int k = 0; k < LANES; k++) sums[i * w->width + c + k] += (double)sum[k];
        }
}

/* f->y has the gradients of n inputs from position p on: adds what the final state's gives them. */
LA_FN void add_final(const la_convolution *j, const la_convolution_unit *u,
                     const convolution_room *f, int64_t p, int64_t n, int64_t d, int64_t channels)
{
    const la_array *dS = j->room.gradient[LA_CONVOLUTION_ST];
    const int64_t width = padded(channels), before = u->end - (j->W - 1);
    if (!dS) return;
    for (int64_t i = p < before ? before - p : 0; i < n; i++) {
        gather(f->z, channels, at(dS, u->n, d, p + i - before), dS->stride[1], dS->dtype);
        for (int64_t c = 0; c < channels; c++) f->y[i * width + c] += f->z[c];
    }
}

LA_FN void backward_tile(const la_convolution *j, const la_convolution_unit *u,
                         const la_convolution_taps *w, const convolution_room *f, int64_t p,
                         int64_t n, int64_t d, int64_t channels, double *sums)
{
    const int64_t width = padded(channels), reach = j->W - 1, rows = n + reach;
    load_inputs(j, u, p - reach, j->silu ? rows + reach : rows, d, channels, f->x, f->column);
    load_dz(j, u, w, f, p, rows, d, channels);
    if (sums) add_taps(j, w, f, n, width, sums + d);
    /* The same sums, of dz and back in time. */
    const int64_t newest = (n - 1) * width;
    rows_function_of(j->W, false)(f->d + newest, -width, f->y + newest, -width, n, width / LANES,
                                  taps_at(w, 0, d), taps_at(w, j->W + 1, d), w->width, j->W, false);
    add_final(j, u, f, p, n, d, channels);
    if (p >= u->begin) {
        store_tokens(j->room.gradient[LA_CONVOLUTION_X], u->b, p, n, d, channels, f->y, width,
                     f->column);
        return;
    }
    const la_array *to = j->room.gradient[LA_CONVOLUTION_S0];
    for (int64_t i = 0; i < n; i++)
        scatter(at(to, u->n, d, p + i - u->begin + reach), to->stride[1], to->dtype,
                f->y + i * width, channels);
}

static void convolution_backward(const la_convolution *j, const la_convolution_unit *u,
                                 const la_convolution_taps *w, double *sums, void *scratch)
{
    arena m = {scratch, 0};
    convolution_room f;
    convolution_take(&f, &m, j);
    for (int64_t p = u->t0; p < u->t1; p += CONVOLVE_TILE)
        for (int64_t d = u->d0; d < u->d1; d += CONVOLVE_STRIP)
            backward_tile(j, u, w, &f, p, p + CONVOLVE_TILE < u->t1 ? CONVOLVE_TILE : u->t1 - p, d,
                          d + CONVOLVE_STRIP < u->d1 ? CONVOLVE_STRIP : u->d1 - d, sums);
}
