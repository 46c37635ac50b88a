/* Tiles: dense products of small matrices, lanes along the columns of the result. There is no
 * attention in this file.
 *
 * R rows by 2 lanes of accumulators: with 16 vector registers 6 x 2 leaves room for the two lanes
 * of B and a broadcast; with 32 registers 8 x 2 divides a chunk of 16 and keeps 16 independent
 * multiply-adds in flight (latency 4, two a cycle, needs 8). Wider tiles measured no faster.
 *
 * Every element is a sum in the order of p that joins what is there at its end, whatever tile it
 * falls in: the same bits however the columns are split. A sum of its own keeps
 * the roundings at the size of the sum: a state takes one rounding a chunk, not one a token. */

/* Terms added up in one chain before the sum joins the total: the error of a chain grows with its
 * length, and at 32 the additions to the totals cost 1/32 of the multiply-adds. */
enum { CHAIN = 32 };

/* Lanes of a row worked on together outside the tiles. */
enum { STRIP = 4 };

#if LA_LANE_BYTES == 64
enum { TILE_ROWS = 8 };
#else
enum { TILE_ROWS = 6 };
#endif

LA_FN void tile_one_chain(const int R, const int NV, int P, const real *restrict A, int64_t ai,
                          int64_t ap, const real *restrict B, int64_t ldb, lane sum[8][2])
{
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) sum[i][j] = (lane){0};
    for (int p = 0; p < P; p++) {
        const lane *b = lanes_in(B + p * ldb);
        lane b0 = b[0], b1 = NV > 1 ? b[1] : b[0];
#pragma GCC unroll 8
        for (int i = 0; i < R; i++) {
            real a = A[i * ai + p * ap];
            sum[i][0] += a * b0;
            if (NV > 1) sum[i][1] += a * b1;
        }
    }
}

LA_FN void tile(const int R, const int NV, int P, const real *restrict A, int64_t ai, int64_t ap,
                const real *restrict B, int64_t ldb, real *restrict C, int64_t ldc,
                const real *restrict c, int64_t ci)
{
    lane total[8][2];
    tile_one_chain(R, NV, P < CHAIN ? P : CHAIN, A, ai, ap, B, ldb, total);
    for (int p = CHAIN; p < P; p += CHAIN) {
        lane sum[8][2];
        const int left = P - p < CHAIN ? P - p : CHAIN;
        tile_one_chain(R, NV, left, A + p * ap, ai, ap, B + p * ldb, ldb, sum);
#pragma GCC unroll 8
        for (int i = 0; i < R; i++)
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) total[i][j] += sum[i][j];
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) {
            lane *to = lanes_of(C + i * ldc) + j;
            if (c)
                *to = c[i * ci] * *to + total[i][j];
            else
                *to = total[i][j];
        }
}

LA_FN void tile_column(const int NV, int64_t M, int P, const real *A, int64_t ai, int64_t ap,
                       const real *B, int64_t ldb, real *C, int64_t ldc, const real *c, int64_t ci)
{
    int64_t i = 0;
    for (; i + TILE_ROWS <= M; i += TILE_ROWS)
        tile(TILE_ROWS, NV, P, A + i * ai, ai, ap, B, ldb, C + i * ldc, ldc, c ? c + i * ci : c,
             ci);
#define LA_REST(R) \
    case R: \
        tile(R, NV, P, A + i * ai, ai, ap, B, ldb, C + i * ldc, ldc, c ? c + i * ci : c, ci); \
        break
    switch (M - i) {
        LA_REST(1);
        LA_REST(2);
        LA_REST(3);
        LA_REST(4);
        LA_REST(5);
#if LA_LANE_BYTES == 64
        LA_REST(6);
        LA_REST(7);
#endif
    }
#undef LA_REST
}

/* The factor c of products that add to what is there. */
static const real one = 1;

/* C[M][N] = diag(c) C + A B, A[i][p] at A[i*ai + p*ap], B[P][N] and C in rows of ldb and ldc reals,
 * N in whole lanes, rows aligned. c NULL: C is not read. ci = 0: one c for every row. */
LA_COLD void product(int64_t M, int64_t N, int64_t P, const real *A, int64_t ai, int64_t ap,
                     const real *B, int64_t ldb, real *C, int64_t ldc, const real *c, int64_t ci)
{
    int64_t j = 0;
    for (; j + 2 * LANES <= N; j += 2 * LANES)
        tile_column(2, M, (int)P, A, ai, ap, B + j, ldb, C + j, ldc, c, ci);
    if (j < N) tile_column(1, M, (int)P, A, ai, ap, B + j, ldb, C + j, ldc, c, ci);
}

/* total[w] = sum_j a_j x_j over n rows, a_j at a[j*step], x_j NV lanes of a row: for triangles, whose
 * rows have different lengths and must not touch what lies outside. */
LA_FN void weighted_sum(const int NV, int64_t n, const real *a, int64_t step, const real *x,
                        int64_t width, lane *total)
{
    for (int w = 0; w < NV; w++) total[w] = (lane){0};
    for (int64_t first = 0; first < n; first += CHAIN) {
        const int64_t last = first + CHAIN < n ? first + CHAIN : n;
        lane sum[STRIP];
#pragma GCC unroll 4
        for (int w = 0; w < NV; w++) sum[w] = (lane){0};
        for (int64_t j = first; j < last; j++) {
            const real aj = a[j * step];
#pragma GCC unroll 4
            for (int w = 0; w < NV; w++) sum[w] += aj * lanes_in(x + j * width)[w];
        }
#pragma GCC unroll 4
        for (int w = 0; w < NV; w++) total[w] += sum[w];
    }
}

/* Call body(NV, w) for strips of STRIP lanes over a row's width, then for what is left, lane by
 * lane: four chains of additions at once hide each other's latency. */
#define FOR_EACH_STRIP(width, body) \
    do { \
        int64_t w_ = 0; \
        for (; w_ + STRIP * LANES <= (width); w_ += STRIP * LANES) body(STRIP, w_); \
        for (; w_ < (width); w_ += LANES) body(1, w_); \
    } while (0)

/* A block of 16-byte vectors on its way from rows to columns. */
#if defined(__clang__) || __GNUC__ >= 12
#define HAVE_SHUFFLE 1
#if LA_REAL_BITS == 32
enum { BLOCK = 4 };
LA_FN void transpose_block(const real *from, int64_t ld_from, real *to, int64_t ld_to)
{
    lane_16 r[4], s[4];
    for (int i = 0; i < 4; i++) __builtin_memcpy(&r[i], from + i * ld_from, 16);
    s[0] = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
    s[1] = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    s[2] = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
    s[3] = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(s[0], s[2], 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(s[0], s[2], 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(s[1], s[3], 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(s[1], s[3], 2, 3, 6, 7);
    for (int i = 0; i < 4; i++) __builtin_memcpy(to + i * ld_to, &r[i], 16);
}
#else
enum { BLOCK = 2 };
LA_FN void transpose_block(const real *from, int64_t ld_from, real *to, int64_t ld_to)
{
    lane_16 r[2], s[2];
    for (int i = 0; i < 2; i++) __builtin_memcpy(&r[i], from + i * ld_from, 16);
    s[0] = __builtin_shufflevector(r[0], r[1], 0, 2);
    s[1] = __builtin_shufflevector(r[0], r[1], 1, 3);
    for (int i = 0; i < 2; i++) __builtin_memcpy(to + i * ld_to, &s[i], 16);
}
#endif
#endif

/* to[n][m] = from[m][n]; the columns of `to` from M up to its padding become 0. */
LA_COLD void transpose(int64_t M, int64_t N, const real *restrict from, int64_t ld_from,
                       real *restrict to, int64_t ld_to)
{
    int64_t whole_m = 0, whole_n = 0;
#if HAVE_SHUFFLE
    whole_m = M / BLOCK * BLOCK;
    whole_n = N / BLOCK * BLOCK;
    for (int64_t n = 0; n < whole_n; n += BLOCK)
        for (int64_t m = 0; m < whole_m; m += BLOCK)
            transpose_block(from + m * ld_from + n, ld_from, to + n * ld_to + m, ld_to);
#endif
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

/* y += a x */
LA_FN void add_scaled(int64_t n, real *y, real a, const real *x)
{
    for (int64_t i = 0; i < n; i += LANES) lanes_of(y + i)[0] += a * lanes_in(x + i)[0];
}

LA_FN void fill(int64_t n, real *x, real value)
{
    for (int64_t i = 0; i < n; i++) x[i] = value;
}
