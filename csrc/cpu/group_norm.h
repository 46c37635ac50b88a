/* The norm of groups of a token's output and its gate, in a layer's step, in pieces of a row that
 * stay in the first cache. */

enum { NORM_PIECE = 32 * LANES };

/* n numbers of a [N,HV*V] or [HV*V] array of any strides, from column i on. */
LA_FN void norm_piece(real *to, int64_t n, const la_array *x, int64_t token, int64_t i)
{
    const int last = x->ndim - 1;
    const int64_t at = (last ? token * x->stride[0] : 0) + i * x->stride[last];
    load_apart(to, n, x->data + at * la_size_of(x->dtype), x->stride[last], x->dtype);
}

/* Where row r of the norm begins: in the numbers of its token. */
typedef struct {
    int64_t token, column;
} norm_place;

LA_FN norm_place norm_row(const la_group_norm *j, int64_t r)
{
    const int64_t groups = j->groups;
    return (norm_place){r / groups, r % groups * j->size};
}

/* x *= activation(gate) */
LA_FN void gate_by(const la_group_norm *j, real *x, int64_t n, norm_place at, int64_t i)
{
    real by[NORM_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    norm_piece(by, n, j->gate, at.token, at.column + i);
    for (int64_t k = 0; k < n; k += LANES)
        lanes_of(x + k)[0] *= activated(lanes_of(by + k)[0], j->activation);
}

/* o of a row from number i on, times the gate if that comes first. */
LA_FN void normed_piece(const la_group_norm *j, real *x, int64_t n, const char *o, norm_place at,
                        int64_t i)
{
    load_row(x, n, o + i * la_size_of(j->dtype), j->dtype);
    if (j->gate && j->gate_first) gate_by(j, x, n, at, i);
}

LA_FN real mean_of_squares(const la_group_norm *j, const char *o, norm_place at)
{
    real x[NORM_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    lane sum = LANE_ZERO;
    for (int64_t i = 0; i < j->size; i += NORM_PIECE) {
        const int64_t n = i + NORM_PIECE < j->size ? NORM_PIECE : j->size - i;
        normed_piece(j, x, n, o, at, i);
        for (int64_t k = 0; k < n; k += LANES) sum += lanes_of(x + k)[0] * lanes_of(x + k)[0];
    }
    return lane_sum(sum) / (real)j->size;
}

/* x *= factor weight */
LA_FN void weigh_piece(const la_group_norm *j, real *x, int64_t n, real factor, norm_place at,
                       int64_t i)
{
    real by[NORM_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const bool shared = j->weight->shape[0] == j->size; /* by all rows of a token */
    norm_piece(by, n, j->weight, 0, (shared ? 0 : at.column) + i);
    for (int64_t k = 0; k < n; k += LANES) lanes_of(x + k)[0] *= factor * lanes_of(by + k)[0];
}

static void group_norm(const la_group_norm *j, int64_t first, int64_t last)
{
    real x[NORM_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const int64_t bytes = la_size_of(j->dtype);
    for (int64_t r = first; r < last; r++) {
        const char *const o = j->o + r * j->size * bytes;
        const norm_place at = norm_row(j, r);
        real factor = 1;
        if (j->weight) factor = 1 / LA_SQRT(mean_of_squares(j, o, at) + (real)j->eps);
        for (int64_t i = 0; i < j->size; i += NORM_PIECE) {
            const int64_t n = i + NORM_PIECE < j->size ? NORM_PIECE : j->size - i;
            normed_piece(j, x, n, o, at, i);
            if (j->weight) weigh_piece(j, x, n, factor, at, i);
            if (j->gate && !j->gate_first) gate_by(j, x, n, at, i);
            store_row(j->y + (r * j->size + i) * bytes, j->dtype, x, n);
        }
    }
}
