/* Tiles: dense products of small matrices, lanes along the columns of the result. There is no
 * attention in this file.
 *
 * A tile is R rows of NV lanes, one accumulator each. With 32 vector registers 16 accumulators, as
 * 8 x 2, divide a chunk of 16 and keep enough multiply-adds in flight (latency 4, two a cycle,
 * needs 8; NEON, up to four a cycle, 16), and what is left holds the two lanes of B and, before
 * their multiply-adds, the eight elements of A: 26. A cycle of four multiply-adds then asks for 2.5
 * loads, of which such cores do 3. With 16 registers 6 x 2 leaves room for the two lanes of B and a
 * broadcast.
 *
 * A short sum is one chain, has no totals beside it, and is over before what surrounds it is paid
 * for. There the loop over p is unrolled and, with 32 registers, the tile 6 x 4: 10 loads for 24
 * multiply-adds, not for 16, and rows of a whole panel.
 *
 * Every element is a sum in the order of p that joins what is there at its end, whatever tile it
 * falls in: the same bits however the columns are split. A sum of its own keeps the roundings at the
 * size of the sum: a state takes one rounding a chunk, not one a token. */

/* Terms added up in one chain before the sum joins the total: the error of a chain grows with its
 * length, and at 32 the additions to the totals cost 1/32 of the multiply-adds. */
enum { CHAIN = 32 };

/* TILE accumulators, as TILE / 2 rows of two lanes; short sums as TALL rows of WIDE; triangles go by
 * blocks of ROWS rows and STRIP lanes, whose sums leave room for a row of what is solved. */
#if LA_REGISTERS == 32
enum { TILE = 16, STRIP = 2, ROWS = 8, TALL = 6, WIDE = 4 };
#else
enum { TILE = 12, STRIP = 2, ROWS = 4, TALL = 6, WIDE = 2 };
#endif

/* sum[r][w] += A[r] B[w]: one term of each sum. */
LA_FN void add_term(const int R, const int NV, const real *restrict A, int64_t ai,
                    const real *restrict B, lane *sum)
{
    lane b[WIDE];
#pragma GCC unroll 4
    for (int w = 0; w < NV; w++) b[w] = lanes_in(B)[w];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const real a = A[r * ai];
#pragma GCC unroll 4
        for (int w = 0; w < NV; w++) sum[r * NV + w] += a * b[w];
    }
}

/* sum[r][w] += sum over p of A[r][p] B[p][w] */
LA_FN void add_terms(const int R, const int NV, int P, const real *restrict A, int64_t ai,
                     int64_t ap, const real *restrict B, int64_t ldb, lane *sum)
{
    for (int p = 0; p < P; p++) add_term(R, NV, A + p * ap, ai, B + p * ldb, sum);
}

/* The same for a P that the compiler knows: what counts and addresses cost shows beside so few
 * multiply-adds, and goes where the loop is unrolled. */
LA_FN void add_known(const int R, const int NV, const int P, const real *restrict A, int64_t ai,
                     int64_t ap, const real *restrict B, int64_t ldb, lane *sum)
{
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) add_term(R, NV, A + p * ap, ai, B + p * ldb, sum);
}

/* total[r][w] = sum over p < P of A[r][p] B[p][w], in registers. What does not fill a chain comes
 * first. */
LA_FN void tile_sum(const int R, const int NV, int P, const real *restrict A, int64_t ai,
                    int64_t ap, const real *restrict B, int64_t ldb, lane *total)
{
#pragma GCC unroll 16
    for (int i = 0; i < R * NV; i++) total[i] = (lane){0};
    int p = P % CHAIN;
    add_terms(R, NV, p, A, ai, ap, B, ldb, total);
    for (; p < P; p += CHAIN) {
        lane sum[TILE];
#pragma GCC unroll 16
        for (int i = 0; i < R * NV; i++) sum[i] = (lane){0};
        add_known(R, NV, CHAIN, A + p * ap, ai, ap, B + p * ldb, ldb, sum);
#pragma GCC unroll 16
        for (int i = 0; i < R * NV; i++) total[i] += sum[i];
    }
}

/* known: P, at most CHAIN, if the compiler is to know it; else 0. */
LA_FN void tile(const int R, const int NV, const int known, int P, const real *restrict A,
                int64_t ai, int64_t ap, const real *restrict B, int64_t ldb, real *C, int64_t ldc,
                const real *D, const real *restrict c, int64_t ci)
{
    lane total[TALL * WIDE];
    if (known) {
#pragma GCC unroll 24
        for (int i = 0; i < R * NV; i++) total[i] = (lane){0};
#pragma GCC unroll 16
        for (int p = 0; p < known; p++) add_term(R, NV, A + p * ap, ai, B + p * ldb, total);
    } else {
        tile_sum(R, NV, P, A, ai, ap, B, ldb, total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < NV; w++) {
            lane x = total[r * NV + w];
            if (D) x += c[r * ci] * lanes_in(D + r * ldc)[w];
            lanes_of(C + r * ldc)[w] = x;
        }
}

LA_FN void tile_column(const int NV, const int tall, const int known, int64_t M, int P,
                       const real *A, int64_t ai, int64_t ap, const real *B, int64_t ldb, real *C,
                       int64_t ldc, const real *D, const real *c, int64_t ci, prefetch *next)
{
    int64_t i = 0;
#define LA_TILE(R) \
    tile(R, NV, known, P, A + i * ai, ai, ap, B, ldb, C + i * ldc, ldc, D ? D + i * ldc : D, \
         c ? c + i * ci : c, ci)
    for (; i + tall <= M; i += tall) {
        if (next) prefetch_some(next);
        LA_TILE(tall);
    }
    switch (M - i) {
    case 1: LA_TILE(1); break;
    case 2: LA_TILE(2); break;
    case 3: LA_TILE(3); break;
    case 4: LA_TILE(4); break;
    case 5: LA_TILE(5); break;
    case 6:
        if (tall > 6) LA_TILE(6);
        break;
    case 7:
        if (tall > 7) LA_TILE(7);
        break;
    }
#undef LA_TILE
}

/* The factor c of products that add to what is there. */
static const real one = 1;

/* Sums as short as a chunk, or two: what a tile costs besides its multiply-adds shows, and is less
 * where the compiler knows the length, and, in a panel as wide as a tile, of WIDE lanes or of two,
 * where its rows are. */
enum { SHORT = 16 };

/* C[M][N] = diag(c) D + A B, A[i][p] at A[i*ai + p*ap], B[P][N] in rows of ldb reals, C and D of ldc,
 * N in whole lanes, rows aligned. D may be C, or NULL for 0. ci = 0: one c for every row. next: the
 * rows to prefetch meanwhile, or NULL. */
LA_COLD void product_and_prefetch(int64_t M, int64_t N, int64_t P, const real *A, int64_t ai,
                                  int64_t ap, const real *B, int64_t ldb, real *C, int64_t ldc,
                                  const real *D, const real *c, int64_t ci, prefetch *next)
{
    int64_t j = 0;
    if (P == 2 * SHORT && ai == 2 * SHORT && ap == 1)
        for (; j + WIDE * LANES <= N; j += WIDE * LANES)
            tile_column(WIDE, TALL, 2 * SHORT, M, 2 * SHORT, A, 2 * SHORT, 1, B + j, ldb, C + j,
                        ldc, D ? D + j : D, c, ci, next);
    if (P == SHORT && ai == SHORT && ap == 1) {
        if (N == WIDE * LANES && ldb == N && ldc == N && D) {
            tile_column(WIDE, TALL, SHORT, M, SHORT, A, SHORT, 1, B, WIDE * LANES, C, WIDE * LANES,
                        D, c, ci, next);
            return;
        }
        if (WIDE > 2 && N == 2 * LANES && ldb == N && ldc == N && D) {
            tile_column(2, TILE / 2, SHORT, M, SHORT, A, SHORT, 1, B, 2 * LANES, C, 2 * LANES, D, c,
                        ci, next);
            return;
        }
        for (; j + WIDE * LANES <= N; j += WIDE * LANES)
            tile_column(WIDE, TALL, SHORT, M, SHORT, A, SHORT, 1, B + j, ldb, C + j, ldc,
                        D ? D + j : D, c, ci, next);
    }
    for (; j + 2 * LANES <= N; j += 2 * LANES)
        tile_column(2, TILE / 2, 0, M, (int)P, A, ai, ap, B + j, ldb, C + j, ldc, D ? D + j : D, c,
                    ci, next);
    if (j < N)
        tile_column(1, TILE / 2, 0, M, (int)P, A, ai, ap, B + j, ldb, C + j, ldc, D ? D + j : D, c,
                    ci, next);
}

/* In place, or (c NULL) alone: C = diag(c) C + A B. */
LA_FN void product(int64_t M, int64_t N, int64_t P, const real *A, int64_t ai, int64_t ap,
                   const real *B, int64_t ldb, real *C, int64_t ldc, const real *c, int64_t ci)
{
    product_and_prefetch(M, N, P, A, ai, ap, B, ldb, C, ldc, c ? C : NULL, c, ci, NULL);
}

/* C = A B for few columns, where a tile of one lane has too few multiply-adds in flight: even and odd
 * p are chains of their own. A in rows of ai reals. */
LA_FN void narrow_tile(const int R, int64_t P, const real *restrict A, int64_t ai,
                       const real *restrict B, int64_t ldb, real *restrict C, int64_t ldc)
{
    lane total[TILE / 2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) total[r] = (lane){0};
    for (int64_t first = 0; first < P; first += CHAIN) {
        const int64_t last = first + CHAIN < P ? first + CHAIN : P;
        lane even[TILE / 2], odd[TILE / 2];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) even[r] = odd[r] = (lane){0};
        for (int64_t p = first; p + 1 < last; p += 2) {
            const lane b0 = lanes_in(B + p * ldb)[0], b1 = lanes_in(B + (p + 1) * ldb)[0];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                even[r] += A[r * ai + p] * b0;
                odd[r] += A[r * ai + p + 1] * b1;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if (last % 2) even[r] += A[r * ai + last - 1] * lanes_in(B + (last - 1) * ldb)[0];
            total[r] += even[r] + odd[r];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) lanes_of(C + r * ldc)[0] = total[r];
}

LA_COLD void narrow_product(int64_t M, int64_t N, int64_t P, const real *A, int64_t ai,
                            const real *B, int64_t ldb, real *C, int64_t ldc)
{
    for (int64_t j = 0; j < N; j += LANES) {
        int64_t i = 0;
        for (; i + TILE / 2 <= M; i += TILE / 2)
            narrow_tile(TILE / 2, P, A + i * ai, ai, B + j, ldb, C + i * ldc + j, ldc);
        for (; i + 2 <= M; i += 2)
            narrow_tile(2, P, A + i * ai, ai, B + j, ldb, C + i * ldc + j, ldc);
        if (i < M) narrow_tile(1, P, A + i * ai, ai, B + j, ldb, C + i * ldc + j, ldc);
    }
}

/* For triangles, whose rows have different lengths and must not touch what lies outside: call
 * block(R, NV, i, w, ...) for R rows from i and NV lanes from column w, the rows from `first` up to n
 * in order within a strip of columns. */
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

/* ZIP_LOW and ZIP_HIGH: the lower, and the upper, halves of two lanes, element by element in turn. */
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

/* The sums over each of LANES lanes, side by side: the same rounds, the two halves added. */
LA_FN lane sum_each(lane *x)
{
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++)
            x[i] = zip_low(x[i], x[i + half]) + zip_high(x[i], x[i + half]);
    return x[0];
}

/* to[n][m] = from[m][n]; the columns of `to` from M up to its padding become 0. Rows are aligned. */
LA_COLD void transpose(int64_t M, int64_t N, const real *restrict from, int64_t ld_from,
                       real *restrict to, int64_t ld_to)
{
    const int64_t whole_m = M / LANES * LANES, whole_n = N / LANES * LANES;
    for (int64_t n = 0; n < whole_n; n += LANES)
        for (int64_t m = 0; m < whole_m; m += LANES) {
            lane x[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) x[i] = lanes_in(from + (m + i) * ld_from + n)[0];
            transpose_square(x);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) lanes_of(to + (n + i) * ld_to + m)[0] = x[i];
        }
    if (whole_m == M && whole_n == N) return;
    for (int64_t n = 0; n < N; n++) {
        for (int64_t m = n < whole_n ? whole_m : 0; m < M; m++)
            to[n * ld_to + m] = from[m * ld_from + n];
        for (int64_t m = M; m < padded(M); m++) to[n * ld_to + m] = 0;
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

/* The same for so many terms that one number of theirs would not do: parts of 4 x 8 lanes, four
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

/* y += a x */
LA_FN void add_scaled(int64_t n, real *y, real a, const real *x)
{
    for (int64_t i = 0; i < n; i += LANES) lanes_of(y + i)[0] += a * lanes_in(x + i)[0];
}

LA_FN void fill(int64_t n, real *x, real value)
{
    for (int64_t i = 0; i < n; i++) x[i] = value;
}
