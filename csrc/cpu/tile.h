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

#if LA_LANE_BYTES == 64
enum { TILE_ROWS = 8 };
#else
enum { TILE_ROWS = 6 };
#endif

LA_FN void tile(const int R, const int NV, int P, const real *restrict A, int64_t ai, int64_t ap,
                const real *restrict B, int64_t ldb, real *restrict C, int64_t ldc,
                const real *restrict c, int64_t ci)
{
    lane total[8][2];
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) total[i][j] = (lane){0};
    for (int first = 0; first < P; first += CHAIN) {
        const int last = first + CHAIN < P ? first + CHAIN : P;
        lane sum[8][2];
#pragma GCC unroll 8
        for (int i = 0; i < R; i++)
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) sum[i][j] = (lane){0};
        for (int p = first; p < last; p++) {
            const lane *b = lanes_in(B + p * ldb);
            lane b0 = b[0], b1 = NV > 1 ? b[1] : b[0];
#pragma GCC unroll 8
            for (int i = 0; i < R; i++) {
                real a = A[i * ai + p * ap];
                sum[i][0] += a * b0;
                if (NV > 1) sum[i][1] += a * b1;
            }
        }
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

/* sum_j a_j x_j over n rows, a_j at a[j*step], x_j one lane of a row: for triangles, whose rows have
 * different lengths and must not touch what lies outside. */
LA_FN lane weighted_sum(int64_t n, const real *a, int64_t step, const real *x, int64_t width)
{
    lane total = {0};
    for (int64_t first = 0; first < n; first += CHAIN) {
        const int64_t last = first + CHAIN < n ? first + CHAIN : n;
        lane sum = {0};
        for (int64_t j = first; j < last; j++) sum += a[j * step] * lanes_in(x + j * width)[0];
        total += sum;
    }
    return total;
}

/* to[n][m] = from[m][n]; the columns of `to` from M up to its padding become 0. */
LA_COLD void transpose(int64_t M, int64_t N, const real *restrict from, int64_t ld_from,
                       real *restrict to, int64_t ld_to)
{
    for (int64_t n0 = 0; n0 < N; n0 += 16) {
        int64_t n1 = n0 + 16 < N ? n0 + 16 : N;
        for (int64_t m = 0; m < M; m++)
            for (int64_t n = n0; n < n1; n++) to[n * ld_to + m] = from[m * ld_from + n];
        for (int64_t m = M; m < padded(M); m++)
            for (int64_t n = n0; n < n1; n++) to[n * ld_to + m] = 0;
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
