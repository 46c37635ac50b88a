/* The norm of each head's output and its gate, in a layer's step, in pieces of a row that stay in
 * the first cache. */

enum { NORM_PIECE = 32 * LANES };

/* n numbers of a [N,HV*V] or [V] array of any strides, from column i on. */
LA_FN void norm_piece(real *to, int64_t n, const la_array *x, int64_t row, int64_t i)
{
    const int last = x->ndim - 1;
    const int64_t at = (last ? row * x->stride[0] : 0) + i * x->stride[last];
    load_apart(to, n, x->data + at * la_size_of(x->dtype), x->stride[last], x->dtype);
}

LA_FN real mean_of_squares(const la_head_norm *j, const char *from)
{
    real room[NORM_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    lane sum = LANE_ZERO;
    for (int64_t i = 0; i < j->V; i += NORM_PIECE) {
        const int64_t n = i + NORM_PIECE < j->V ? NORM_PIECE : j->V - i;
        load_row(room, n, from + i * la_size_of(j->dtype), j->dtype);
        for (int64_t k = 0; k < n; k += LANES) sum += lanes_of(room + k)[0] * lanes_of(room + k)[0];
    }
    return lane_sum(sum) / (real)j->V;
}

static void head_norm(const la_head_norm *j, int64_t first, int64_t last)
{
    real o[NORM_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    real by[NORM_PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const int64_t size = la_size_of(j->dtype);
    for (int64_t r = first; r < last; r++) {
        const char *from = j->o + r * j->V * size;
        real factor = 1;
        if (j->weight) factor = 1 / LA_SQRT(mean_of_squares(j, from) + (real)j->eps);
        for (int64_t i = 0; i < j->V; i += NORM_PIECE) {
            const int64_t n = i + NORM_PIECE < j->V ? NORM_PIECE : j->V - i;
            load_row(o, n, from + i * size, j->dtype);
            if (j->weight) {
                norm_piece(by, n, j->weight, 0, i);
                for (int64_t k = 0; k < n; k += LANES)
                    lanes_of(o + k)[0] *= factor * lanes_of(by + k)[0];
            }
            if (j->gate) {
                norm_piece(by, n, j->gate, r / j->HV, r % j->HV * j->V + i);
                for (int64_t k = 0; k < n; k += LANES)
                    lanes_of(o + k)[0] *= activated(lanes_of(by + k)[0], j->activation);
            }
            store_row(j->y + (r * j->V + i) * size, j->dtype, o, n);
        }
    }
}
