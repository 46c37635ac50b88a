/* A stretch: the rows of a chunk between two checks whether the call is to end (watch.h). A chunk
 * may be as long as its sequence (mode="parallel"). Work that grows with the square of its tokens
 * then takes seconds, so it goes by stretches of rows. When the call is to end, the rest of the
 * chunk is left out, and outputs are undefined. A chunk of the usual length is one stretch, without
 * a check. */

/* A multiple of a tile's rows, so that the tiles are the same. 48 rows of 30,000 tokens and 256
 * keys are 370 million multiply-adds, 10 to 50 ms. */
enum { STRETCH = 48 };

/* The end of the stretch that begins at row `first` of n. It is `first` if no rows are left, or if
 * the call is to end. */
LA_FN int64_t stretch_end(const la_problem *p, int64_t first, int64_t n)
{
    if (first && (first >= n || la_stopped(p))) return first;
    return first + STRETCH < n ? first + STRETCH : n;
}

/* Is the call to end, after so many rows of its chunk? For loops over rows outside of this file. */
LA_FN bool stopped_after(const la_problem *p, int64_t rows)
{
    return rows && rows % STRETCH == 0 && la_stopped(p);
}

/* The same between two parts of a chunk of n tokens, for work that grows only linearly with n. */
LA_FN bool stopped_between(const la_problem *p, int64_t n) { return n > STRETCH && la_stopped(p); }

/* The same where a row is multiplied with every key, and reads and writes a row of memory for each:
 * 4 rows of 30,000 tokens and 256 keys take 40 to 120 ms. n: the chunk's tokens. */
LA_FN bool stopped_after_keys(const la_problem *p, int64_t rows, int64_t n)
{
    return n > STRETCH && rows % 4 == 3 && la_stopped(p);
}

/* narrow_product, by stretches. */
LA_FN void long_narrow_product(const la_problem *p, int64_t rows, int64_t columns, int64_t terms,
                               const real *left, int64_t left_row, const real *right,
                               int64_t right_row, real *to, int64_t to_row)
{
    for (int64_t i = 0, end; (end = stretch_end(p, i, rows)) > i; i = end)
        narrow_product(end - i, columns, terms, left + i * left_row, left_row, right, right_row,
                       to + i * to_row, to_row);
}

/* product, by stretches: to = keep to + left right. Without keep: to = left right. */
LA_FN void long_product(const la_problem *p, int64_t rows, int64_t columns, int64_t terms,
                        const real *left, int64_t left_row, int64_t left_term, const real *right,
                        int64_t right_row, real *to, int64_t to_row, const real *keep)
{
    for (int64_t i = 0, end; (end = stretch_end(p, i, rows)) > i; i = end)
        product(end - i, columns, terms, left + i * left_row, left_row, left_term, right, right_row,
                to + i * to_row, to_row, keep, 0);
}
