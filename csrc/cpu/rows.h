/* Rows of tokens from an array [B,T,D] of any strides, as padded rows of reals, and back. Either
 * channels or tokens are neighbours in most arrays. */

/* Numbers `stride` elements apart, as reals. */
LA_COLD void gather(real *restrict to, int64_t n, const char *from, int64_t stride, la_dtype dtype)
{
    switch (dtype) {
    case LA_F64:
        for (int64_t i = 0; i < n; i++) to[i] = (real)((const double *)from)[i * stride];
        break;
    case LA_F32:
        for (int64_t i = 0; i < n; i++) to[i] = ((const float *)from)[i * stride];
        break;
    case LA_F16:
        for (int64_t i = 0; i < n; i++) to[i] = from_f16(((const uint16_t *)from)[i * stride]);
        break;
    default:
        for (int64_t i = 0; i < n; i++) to[i] = from_bf16(((const uint16_t *)from)[i * stride]);
        break;
    }
}

/* The same as a padded row. */
LA_FN void load_apart(real *to, int64_t n, const char *from, int64_t stride, la_dtype dtype)
{
    if (stride == 1 || n == 1) {
        load_row(to, n, from, dtype);
        return;
    }
    gather(to, n, from, stride, dtype);
    for (int64_t i = n; i < padded(n); i++) to[i] = 0;
}

LA_COLD void scatter(char *to, int64_t stride, la_dtype dtype, const real *from, int64_t n)
{
    const int64_t size = la_size_of(dtype);
    for (int64_t i = 0; i < n; i++) store_element(to + i * stride * size, dtype, from[i]);
}

/* n tokens of `channels` channels from d on, in rows of `width` reals: the channels, padded with
 * zeros. `column` is room for n padded reals. */
LA_COLD void load_tokens(const la_array *x, int64_t b, int64_t t, int64_t n, int64_t d,
                         int64_t channels, real *to, int64_t width, real *column)
{
    if (x->stride[2] != 1 && channels > 1 && n > 1 && x->stride[1] == 1) {
        for (int64_t c = 0; c < width; c++) {
            if (c < channels) convert_row(column, n, at(x, b, t, d + c), x->dtype);
            for (int64_t i = 0; i < n; i++) to[i * width + c] = c < channels ? column[i] : 0;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const char *from = at(x, b, t + i, d);
        real *row = to + i * width;
        load_apart(row, channels, from, x->stride[2], x->dtype);
    }
}

LA_COLD void store_tokens(const la_array *x, int64_t b, int64_t t, int64_t n, int64_t d,
                          int64_t channels, const real *from, int64_t width, real *column)
{
    if (x->stride[2] != 1 && channels > 1 && n > 1 && x->stride[1] == 1) {
        for (int64_t c = 0; c < channels; c++) {
            for (int64_t i = 0; i < n; i++) column[i] = from[i * width + c];
            store_row(at(x, b, t, d + c), x->dtype, column, n);
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        char *to = at(x, b, t + i, d);
        const real *row = from + i * width;
        if (x->stride[2] == 1 || channels == 1)
            store_row(to, x->dtype, row, channels);
        else
            scatter(to, x->stride[2], x->dtype, row, channels);
    }
}
