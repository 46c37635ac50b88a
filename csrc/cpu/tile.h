/* Tiles: dense products of small matrices, lanes along the columns of the result. There is no
 * attention in this file.
 *
 * A tile is R rows of W lanes, one accumulator each. With 32 vector registers it has 16
 * accumulators, as 8 x 2. 8 rows divide a chunk of 16, and 16 accumulators keep enough
 * multiply-adds in flight: with a latency of 4, two a cycle need 8, and NEON, up to four a cycle,
 * needs 16. The other registers hold the two lanes of the right factor and, before their
 * multiply-adds, the eight elements of the left one: 26 in all. A cycle of four multiply-adds then
 * needs 2.5 loads, and such cores do 3. With 16 registers, 6 x 2 leaves room for the two lanes of
 * the right factor and a broadcast.
 *
 * A short sum is one chain without totals, and the work around it weighs as much as its terms.
 * There the loop over terms is unrolled. With 32 registers its tile is 6 x 4: 10 loads for 24
 * multiply-adds, not for 16, and rows of a whole panel.
 *
 * Every element is a sum in the order of its terms, and joins the present value when it is
 * complete, in any tile: the bits are the same however the columns are split. A sum of its own
 * keeps the roundings at the size of the sum: a state takes one rounding a chunk, not one a
 * token. */

/* Terms that are added up in one chain before the sum joins the total. The error of a chain grows
 * with its length, and at 32 the additions to the totals cost 1/32 of the multiply-adds. */
enum { CHAIN = 32 };

/* A tile has TILE accumulators, as TILE / 2 rows of two lanes; for short sums, as TALL rows of
 * WIDE. Triangles go by blocks of ROWS rows and STRIP lanes, whose sums leave room for a row that
 * is solved. */
#if LA_REGISTERS == 32
enum { TILE = 16, STRIP = 2, ROWS = 8, TALL = 6, WIDE = 4 };
#else
enum { TILE = 12, STRIP = 2, ROWS = 4, TALL = 6, WIDE = 2 };
#endif

/* sum[r][w] += left[r] right[w]: one term of each sum. */
LA_FN void add_term(const int R, const int W, const real *restrict left, int64_t left_row,
                    const real *restrict right, lane *sum)
{
    lane b[WIDE];
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) b[w] = lanes_in(right)[w];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const real a = left[r * left_row];
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) sum[r * W + w] += a * b[w];
    }
}

/* sum[r][w] += sum over terms of left[r][term] right[term][w] */
LA_FN void add_terms(const int R, const int W, int terms, const real *restrict left,
                     int64_t left_row, int64_t left_term, const real *restrict right,
                     int64_t right_row, lane *sum)
{
    for (int term = 0; term < terms; term++)
        add_term(R, W, left + term * left_term, left_row, right + term * right_row, sum);
}

/* The same for a number of terms that the compiler knows. Beside so few multiply-adds, counters and
 * addresses cost something, and an unrolled loop needs none. */
LA_FN void add_known(const int R, const int W, const int terms, const real *restrict left,
                     int64_t left_row, int64_t left_term, const real *restrict right,
                     int64_t right_row, lane *sum)
{
#pragma GCC unroll 4
    for (int term = 0; term < terms; term++)
        add_term(R, W, left + term * left_term, left_row, right + term * right_row, sum);
}

/* total[r][w] = sum over terms of left[r][term] right[term][w], in registers. The terms that do not
 * fill a chain come first. */
LA_FN void tile_sum(const int R, const int W, int terms, const real *restrict left,
                    int64_t left_row, int64_t left_term, const real *restrict right,
                    int64_t right_row, lane *total)
{
#pragma GCC unroll 16
    for (int i = 0; i < R * W; i++) total[i] = (lane){0};
    int term = terms % CHAIN;
    add_terms(R, W, term, left, left_row, left_term, right, right_row, total);
    for (; term < terms; term += CHAIN) {
        lane sum[TILE];
#pragma GCC unroll 16
        for (int i = 0; i < R * W; i++) sum[i] = (lane){0};
        add_known(R, W, CHAIN, left + term * left_term, left_row, left_term,
                  right + term * right_row, right_row, sum);
#pragma GCC unroll 16
        for (int i = 0; i < R * W; i++) total[i] += sum[i];
    }
}

/* known: the number of terms, at most CHAIN, if the compiler is to know it; else 0. */
LA_FN void tile(const int R, const int W, const int known, int terms, const real *restrict left,
                int64_t left_row, int64_t left_term, const real *restrict right, int64_t right_row,
                real *to, int64_t to_row, const real *from, const real *restrict keep,
                int64_t keep_row, int64_t apart, real factor)
{
    lane total[TALL * WIDE];
    if (known) {
#pragma GCC unroll 24
        for (int i = 0; i < R * W; i++) total[i] = (lane){0};
#pragma GCC unroll 16
        for (int term = 0; term < known; term++)
            add_term(R, W, left + term * left_term, left_row, right + term * right_row, total);
    } else {
        tile_sum(R, W, terms, left, left_row, left_term, right, right_row, total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            lane x = total[r * W + w];
            if (apart) x += factor * lanes_in(from + apart + r * to_row)[w];
            if (from) x += keep[r * keep_row] * lanes_in(from + r * to_row)[w];
            lanes_of(to + r * to_row)[w] = x;
        }
}

LA_FN void tile_column(const int W, const int tall, const int known, int64_t rows, int terms,
                       const real *left, int64_t left_row, int64_t left_term, const real *right,
                       int64_t right_row, real *to, int64_t to_row, const real *from,
                       const real *keep, int64_t keep_row, int64_t apart, real factor,
                       prefetch *next)
{
    int64_t i = 0;
#define LA_TILE(R) \
    tile(R, W, known, terms, left + i * left_row, left_row, left_term, right, right_row, \
         to + i * to_row, to_row, from ? from + i * to_row : from, \
         keep ? keep + i * keep_row : keep, keep_row, apart, factor)
    for (; i + tall <= rows; i += tall) {
        if (next) prefetch_some(next);
        LA_TILE(tall);
    }
    /* at most three more tiles: one of each height would be twice the code */
    if (i + 4 <= rows) {
        LA_TILE(4);
        i += 4;
    }
    if (i + 2 <= rows) {
        LA_TILE(2);
        i += 2;
    }
    if (i < rows) LA_TILE(1);
#undef LA_TILE
}

/* `keep` for a product that is added to the present value. */
static const real one = 1;

/* Sums as short as a chunk, or as two. The cost of a tile besides its multiply-adds shows there. It
 * is less if the compiler knows the number of terms and, in a panel of one tile's width (WIDE lanes
 * or two), the distance of the rows. */
enum { SHORT = 16 };

/* to[rows][columns] = diag(keep) from + factor (what lies `apart` reals behind from) + left right.
 *
 * left[i][term] is left[i * left_row + term * left_term]. right[terms][columns] has rows right_row
 * reals apart; `to` and `from` have rows to_row apart. Columns are whole lanes, rows are aligned.
 * `from` may be `to`, or NULL for 0. keep_row 0: one number for every row. apart 0: no
 * such rows. next: the rows to prefetch meanwhile, or NULL. */
LA_FN void product_of(int64_t rows, int64_t columns, int64_t terms, const real *left,
                      int64_t left_row, int64_t left_term, const real *right, int64_t right_row,
                      real *to, int64_t to_row, const real *from, const real *keep,
                      int64_t keep_row, int64_t apart, real factor, prefetch *next)
{
    int64_t j = 0;
    if (terms == 2 * SHORT && left_row == 2 * SHORT && left_term == 1)
        for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
            tile_column(WIDE, TALL, 2 * SHORT, rows, 2 * SHORT, left, 2 * SHORT, 1, right + j,
                        right_row, to + j, to_row, from ? from + j : from, keep, keep_row, apart,
                        factor, next);
    if (terms == SHORT && left_row == SHORT && left_term == 1) {
        if (columns == WIDE * LANES && right_row == columns && to_row == columns && from) {
            tile_column(WIDE, TALL, SHORT, rows, SHORT, left, SHORT, 1, right, WIDE * LANES, to,
                        WIDE * LANES, from, keep, keep_row, apart, factor, next);
            return;
        }
        if (WIDE > 2 && columns == 2 * LANES && right_row == columns && to_row == columns && from) {
            tile_column(2, TILE / 2, SHORT, rows, SHORT, left, SHORT, 1, right, 2 * LANES, to,
                        2 * LANES, from, keep, keep_row, apart, factor, next);
            return;
        }
        for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
            tile_column(WIDE, TALL, SHORT, rows, SHORT, left, SHORT, 1, right + j, right_row,
                        to + j, to_row, from ? from + j : from, keep, keep_row, apart, factor,
                        next);
    }
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        tile_column(2, TILE / 2, 0, rows, (int)terms, left, left_row, left_term, right + j,
                    right_row, to + j, to_row, from ? from + j : from, keep, keep_row, apart,
                    factor, next);
    if (j < columns)
        tile_column(1, TILE / 2, 0, rows, (int)terms, left, left_row, left_term, right + j,
                    right_row, to + j, to_row, from ? from + j : from, keep, keep_row, apart,
                    factor, next);
}

LA_COLD void product_and_prefetch(int64_t rows, int64_t columns, int64_t terms, const real *left,
                                  int64_t left_row, int64_t left_term, const real *right,
                                  int64_t right_row, real *to, int64_t to_row, const real *from,
                                  const real *keep, int64_t keep_row, prefetch *next)
{
    product_of(rows, columns, terms, left, left_row, left_term, right, right_row, to, to_row, from,
               keep, keep_row, 0, 0, next);
}

/* to = keep from + factor (what lies apart) + left right, of rows as wide as `right`: the state of
 * a pair that takes from the other. */
LA_COLD void product_of_pair(int64_t rows, int64_t width, int64_t terms, const real *left,
                             int64_t left_row, const real *right, real *to, const real *from,
                             real keep, int64_t apart, real factor, prefetch *next)
{
    if (!apart) return; /* states of no elements */
    product_of(rows, width, terms, left, left_row, 1, right, width, to, width, from, &keep, 0,
               apart, factor, next);
}

/* In place: to = diag(keep) to + left right. Without keep: to = left right. */
LA_FN void product(int64_t rows, int64_t columns, int64_t terms, const real *left, int64_t left_row,
                   int64_t left_term, const real *right, int64_t right_row, real *to,
                   int64_t to_row, const real *keep, int64_t keep_row)
{
    product_and_prefetch(rows, columns, terms, left, left_row, left_term, right, right_row, to,
                         to_row, keep ? to : NULL, keep, keep_row, NULL);
}

/* to = left right for few columns, where a tile of one lane has too few multiply-adds in flight:
 * even and odd terms are chains of their own. */
LA_FN void narrow_tile(const int R, int64_t terms, const real *restrict left, int64_t left_row,
                       const real *restrict right, int64_t right_row, real *restrict to,
                       int64_t to_row)
{
    lane total[TILE / 2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = (lane){0};
    for (int64_t first = 0; first < terms; first += CHAIN) {
        const int64_t last = first + CHAIN < terms ? first + CHAIN : terms;
        lane even[TILE / 2], odd[TILE / 2];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) even[r] = odd[r] = (lane){0};
        for (int64_t term = first; term + 1 < last; term += 2) {
            const lane b0 = lanes_in(right + term * right_row)[0],
                       b1 = lanes_in(right + (term + 1) * right_row)[0];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                even[r] += left[r * left_row + term] * b0;
                odd[r] += left[r * left_row + term + 1] * b1;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if (last % 2)
                even[r] +=
                    left[r * left_row + last - 1] * lanes_in(right + (last - 1) * right_row)[0];
            total[r] += even[r] + odd[r];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) lanes_of(to + r * to_row)[0] = total[r];
}

LA_COLD void narrow_product(int64_t rows, int64_t columns, int64_t terms, const real *left,
                            int64_t left_row, const real *right, int64_t right_row, real *to,
                            int64_t to_row)
{
    for (int64_t j = 0; j < columns; j += LANES) {
        int64_t i = 0;
        for (; i + TILE / 2 <= rows; i += TILE / 2)
            narrow_tile(TILE / 2, terms, left + i * left_row, left_row, right + j, right_row,
                        to + i * to_row + j, to_row);
        for (; i + 2 <= rows; i += 2)
            narrow_tile(2, terms, left + i * left_row, left_row, right + j, right_row,
                        to + i * to_row + j, to_row);
        if (i < rows)
            narrow_tile(1, terms, left + i * left_row, left_row, right + j, right_row,
                        to + i * to_row + j, to_row);
    }
}

/* For triangles, whose rows have different lengths and must not touch what lies outside: call
 * block(R, W, i, w, ...) for R rows from i and W lanes from column w. Within a strip of columns the
 * rows from `first` up to n come in order. */
#define FOR_EACH_BLOCK(first, n, width, block, ...) \
    do { \
        int64_t w_ = 0; \
        for (; w_ + STRIP * LANES <= (width); w_ += STRIP * LANES) { \
            int64_t i_ = (first); \
            for (; i_ + ROWS <= (n); i_ += ROWS) block(ROWS, STRIP, i_, w_, __VA_ARGS__); \
            for (; i_ + 3 <= (n); i_ += 3) block(3, STRIP, i_, w_, __VA_ARGS__); \
            for (; i_ < (n); i_++) block(1, STRIP, i_, w_, __VA_ARGS__); \
        } \
        for (; w_ < (width); w_ += LANES) { \
            int64_t i_ = (first); \
            for (; i_ + ROWS <= (n); i_ += ROWS) block(ROWS, 1, i_, w_, __VA_ARGS__); \
            for (; i_ + 3 <= (n); i_ += 3) block(3, 1, i_, w_, __VA_ARGS__); \
            for (; i_ < (n); i_++) block(1, 1, i_, w_, __VA_ARGS__); \
        } \
    } while (0)

/* ZIP_LOW and ZIP_HIGH: the lower halves of two lanes, or the upper ones, element by element in
 * turn. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAVE_ZIP 1
#endif
#endif
#if HAVE_ZIP
/* clang-format off */
#if LA_LANE_BYTES * 8 / LA_REAL_BITS == 16
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LA_LANE_BYTES * 8 / LA_REAL_BITS == 8
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif LA_LANE_BYTES * 8 / LA_REAL_BITS == 4
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#else
#define ZIP_LOW 0, 2
#define ZIP_HIGH 1, 3
#endif
/* clang-format on */
LA_FN lane zip_low(lane x, lane y) { return __builtin_shufflevector(x, y, ZIP_LOW); }
LA_FN lane zip_high(lane x, lane y) { return __builtin_shufflevector(x, y, ZIP_HIGH); }
#else
LA_FN lane zip_low(lane x, lane y)
{
    lane z;
    for (int i = 0; i < LANES; i++) z[i] = (i % 2 ? y : x)[i / 2];
    return z;
}
LA_FN lane zip_high(lane x, lane y)
{
    lane z;
    for (int i = 0; i < LANES; i++) z[i] = (i % 2 ? y : x)[LANES / 2 + i / 2];
    return z;
}
#endif

/* A square of LANES lanes, rows to columns: one round of zips moves a bit of the row's number to
 * the column's, and one of the column's to the row's. */
LA_FN void transpose_square(lane *x)
{
#pragma GCC unroll 16
    for (int round = 1; round < LANES; round *= 2) {
        lane y[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = zip_low(x[i], x[i + LANES / 2]);
            y[2 * i + 1] = zip_high(x[i], x[i + LANES / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
}

/* The sums over each of LANES lanes, side by side: the same rounds of zips, with the two halves
 * added. */
LA_FN lane sum_each(lane *x)
{
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            x[i] = zip_low(x[i], x[i + half]) + zip_high(x[i], x[i + half]);
    return x[0];
}

/* to[n][m] = from[m][n]. In `to`, the columns behind the last row of `from` are padding, and become
 * 0. Rows are aligned. */
LA_COLD void transpose(int64_t rows, int64_t columns, const real *restrict from, int64_t ld_from,
                       real *restrict to, int64_t ld_to)
{
    const int64_t whole_m = rows / LANES * LANES, whole_n = columns / LANES * LANES;
    for (int64_t n = 0; n < whole_n; n += LANES)
        for (int64_t m = 0; m < whole_m; m += LANES) {
            lane x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = lanes_in(from + (m + i) * ld_from + n)[0];
            transpose_square(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) lanes_of(to + (n + i) * ld_to + m)[0] = x[i];
        }
    if (whole_m == rows && whole_n == columns) return;
    for (int64_t n = 0; n < columns; n++) {
        for (int64_t m = n < whole_n ? whole_m : 0; m < rows; m++)
            to[n * ld_to + m] = from[m * ld_from + n];
        for (int64_t m = rows; m < padded(rows); m++) to[n * ld_to + m] = 0;
    }
}

/* sum_i x_i y_i over n reals in whole lanes (padding is zero). */
LA_FN real dot(int64_t n, const real *x, const real *y)
{
    lane total = {0};
    for (int64_t first = 0; first < n; first += CHAIN * LANES) {
        const int64_t last = first + CHAIN * LANES < n ? first + CHAIN * LANES : n;
        lane sum = {0};
        for (int64_t i = first; i < last; i += LANES)
            sum += lanes_in(x + i)[0] * lanes_in(y + i)[0];
        total += sum;
    }
    return lane_sum(total);
}

/* The same for so many terms that one real is not enough for their sum: parts of CHAIN lanes, four
 * chains at a time. n is a multiple of LANES. */
LA_FN real2 long_dot(int64_t n, const real *x, const real *y)
{
    real2 total = 0;
    int64_t i = 0;
    for (; i + CHAIN * LANES <= n; i += CHAIN * LANES) {
        lane sum[4] = {{0}};
        for (int j = 0; j < CHAIN; j += 4)
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) sum[s] += lanes_in(x + i)[j + s] * lanes_in(y + i)[j + s];
        total += lane_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    return total + dot(n - i, x + i, y + i);
}

/* long_dot three times, of x0 y0, x1 y0 and x1 y1, in one pass: x0 and x1 are two halves of x, n
 * reals each, as y0 and y1 are. */
LA_FN void long_dots_of_pair(int64_t n, const real *x, const real *y, real *to)
{
    real2 total[3] = {0};
    int64_t i = 0;
    for (; i + CHAIN * LANES <= n; i += CHAIN * LANES) {
        const lane *x0 = lanes_in(x + i), *x1 = lanes_in(x + n + i);
        const lane *y0 = lanes_in(y + i), *y1 = lanes_in(y + n + i);
        lane sum[12] = {{0}};
        for (int j = 0; j < CHAIN; j += 4)
#pragma GCC unroll 4
            for (int s = 0; s < 4; s++) {
                sum[s] += x0[j + s] * y0[j + s];
                sum[4 + s] += x1[j + s] * y0[j + s];
                sum[8 + s] += x1[j + s] * y1[j + s];
            }
        for (int d = 0; d < 3; d++)
            total[d] += lane_sum((sum[4 * d] + sum[4 * d + 1]) + (sum[4 * d + 2] + sum[4 * d + 3]));
    }
    to[0] = (real)(total[0] + dot(n - i, x + i, y + i));
    to[1] = (real)(total[1] + dot(n - i, x + n + i, y + i));
    to[2] = (real)(total[2] + dot(n - i, x + n + i, y + n + i));
}

/* y += a x */
LA_FN void add_scaled(int64_t n, real *y, real a, const real *x)
{
    for (int64_t i = 0; i < n; i += LANES) lanes_of(y + i)[0] += a * lanes_in(x + i)[0];
}

LA_FN void fill(int64_t n, real *x, real value)
{
    for (int64_t i = 0; i < n; i++) x[i] = value;
}
