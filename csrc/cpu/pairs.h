/* Pairs: products of bfloat16 numbers, two a lane's element at a time, summed in float. There is no
 * attention in this file. An instance has it that says LA_BF16_PRODUCTS: 1, by the processor's
 * instruction, twice as fast as float multiply-adds; 2, spelled out, as a test of the first.
 *
 * A word is two bfloat16 numbers that are neighbours along a sum, the first in its low half. A
 * product's left factor lies in rows as it is, A[row][p, p+1]; its right factor has its rows zipped by
 * twos, B[p / 2][column][2]. An odd count is filled up with a zero.
 *
 * The instruction takes denormal numbers for zeros, leaves none, and rounds between the two products
 * in its own way: all that is far below the 2^-9 that the factors are rounded by. So is the error of
 * one chain over all terms: of 64 for K = 128, 64 x 2^-24. Chains of CHAIN (tile.h) buy nothing. */

typedef uint16_t half;
/* Stored as words, rows are moved as lanes of reals too (transpose): they alias everything. */
typedef uint32_t word __attribute__((may_alias));
typedef uint32_t words __attribute__((vector_size(LA_LANE_BYTES), may_alias));
typedef uint32_t words_unaligned __attribute__((vector_size(LA_LANE_BYTES), aligned(2), may_alias));
typedef half halves __attribute__((vector_size(LA_LANE_BYTES), may_alias));
typedef half half_lane __attribute__((vector_size(LA_LANE_BYTES / 2), aligned(2), may_alias));

LA_FN words *words_of(word *x) { return (words *)__builtin_assume_aligned(x, LA_LANE_BYTES); }
LA_FN const words *words_in(const word *x)
{
    return (const words *)__builtin_assume_aligned(x, LA_LANE_BYTES);
}

LA_FN word *take_words(arena *m, int64_t count) { return (word *)take(m, count); }

#if LA_BF16_PRODUCTS == 1
/* A lane of bfloat16 numbers, anywhere, as reals. (From convertvector gcc makes four pieces of it.) */
LA_FN lane widen(const char *x)
{
    return (lane)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)x)), 16);
}

LA_FN lane dot_pairs(lane sum, words a, words b)
{
    return (lane)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

/* Two lanes, rounded, one after the other. */
LA_FN words join(lane x, lane y) { return (words)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x); }

/* Two lanes, rounded, in pairs. */
LA_FN words zip(lane x, lane y)
{
    const halves order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (words)_mm512_permutexvar_epi16((__m512i)order, (__m512i)join(x, y));
}

LA_FN void store_halves(char *to, lane x)
{
    *(half_lane *)to = (half_lane)_mm512_cvtneps_pbh((__m512)x);
}
#else
LA_FN lane widen(const char *x)
{
    return (lane)(__builtin_convertvector(*(const half_lane *)x, words) << 16);
}

LA_FN lane dot_pairs(lane sum, words a, words b)
{
    sum += (lane)(a & 0xffff0000) * (lane)(b & 0xffff0000);
    return sum + (lane)(a << 16) * (lane)(b << 16);
}

/* Rounded, in the words' low halves: to_bf16 for a lane. */
LA_FN words low_halves(lane x)
{
    const words bits = (words)x, nan = (words)(x != x);
    const words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (nan & (bits >> 16 | 0x40)) | (~nan & rounded);
}

LA_FN words join(lane x, lane y)
{
    union {
        half_lane part[2];
        words all;
    } z = {{__builtin_convertvector(low_halves(x), half_lane),
            __builtin_convertvector(low_halves(y), half_lane)}};
    return z.all;
}

LA_FN words zip(lane x, lane y) { return low_halves(x) | low_halves(y) << 16; }

LA_FN void store_halves(char *to, lane x)
{
    *(half_lane *)to = __builtin_convertvector(low_halves(x), half_lane);
}
#endif

/* A lane of the first numbers of pairs, from two lanes of pairs; of the second ones. */
LA_FN words firsts(words x, words y)
{
#if HAVE_ZIP
    return (words)__builtin_shufflevector((halves)x, (halves)y, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18,
                                          20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46,
                                          48, 50, 52, 54, 56, 58, 60, 62);
#else
    halves z;
    for (int i = 0; i < 2 * LANES; i++) z[i] = ((halves)(i < LANES ? x : y))[2 * i % (2 * LANES)];
    return (words)z;
#endif
}
LA_FN words seconds(words x, words y) { return firsts(x >> 16, y >> 16); }

/* sum[r][w] += sum over p < P of A[r][p] . B[p][w], pairs of A in rows of ai words. */
LA_FN void add_pairs(const int R, const int NV, int P, const word *restrict A, int64_t ai,
                     const word *restrict B, int64_t ldb, lane *sum)
{
    for (int p = 0; p < P; p++) {
        words b[STRIP];
#pragma GCC unroll 4
        for (int w = 0; w < NV; w++) b[w] = words_in(B + p * ldb)[w];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const words a = A[r * ai + p] - (words){0};
#pragma GCC unroll 4
            for (int w = 0; w < NV; w++) sum[r * NV + w] = dot_pairs(sum[r * NV + w], a, b[w]);
        }
    }
}

LA_FN void pair_sum(const int R, const int NV, int P, const word *restrict A, int64_t ai,
                    const word *restrict B, int64_t ldb, lane *sum)
{
#pragma GCC unroll 16
    for (int i = 0; i < R * NV; i++) sum[i] = (lane){0};
    add_pairs(R, NV, P, A, ai, B, ldb, sum);
}

/* C[M][N] = diag(c) D + A B, and Z [M/2][N] the same in zipped rows of ldc words: as product_ahead,
 * A[i][p] at A[i*ai + p], B[P][N], P pairs. D, Z, next may be NULL. */
LA_COLD void pair_product(int64_t M, int64_t N, int64_t P, const word *A, int64_t ai, const word *B,
                          int64_t ldb, real *C, int64_t ldc, const real *D, const real *c,
                          int64_t ci, word *Z, ahead *next);

#ifdef LA_AMX
#include "pairs_amx.h"
#else
/* C = A B, and (D not NULL) + diag(c) D; Z, if not NULL, is C once more, zipped. */
LA_FN void pair_tile(const int R, const int NV, int P, const word *A, int64_t ai, const word *B,
                     int64_t ldb, real *C, int64_t ldc, const real *D, const real *c, int64_t ci,
                     word *Z)
{
    const lane zero = {0};
    lane x[TILE];
    pair_sum(R, NV, P, A, ai, B, ldb, x);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < NV; w++) {
            if (D) x[r * NV + w] += c[r * ci] * lanes_in(D + r * ldc)[w];
            lanes_of(C + r * ldc)[w] = x[r * NV + w];
        }
#pragma GCC unroll 8
    for (int r = 0; Z && r < R; r += 2)
#pragma GCC unroll 4
        for (int w = 0; w < NV; w++)
            words_of(Z + r / 2 * ldc)[w] =
                zip(x[r * NV + w], r + 1 < R ? x[(r + 1) * NV + w] : zero);
}

LA_FN void pair_column(const int NV, int64_t M, int P, const word *A, int64_t ai, const word *B,
                       int64_t ldb, real *C, int64_t ldc, const real *D, const real *c, int64_t ci,
                       word *Z, ahead *next)
{
    int64_t i = 0;
#define LA_TILE(R) \
    pair_tile(R, NV, P, A + i * ai, ai, B, ldb, C + i * ldc, ldc, D ? D + i * ldc : D, \
              c ? c + i * ci : c, ci, Z ? Z + i / 2 * ldc : Z)
    for (; i + TILE / 2 <= M; i += TILE / 2) {
        if (next) ask(next);
        LA_TILE(TILE / 2);
    }
    if (i + 4 <= M) {
        LA_TILE(4);
        i += 4;
    }
    if (i + 2 <= M) {
        LA_TILE(2);
        i += 2;
    }
    if (i < M) LA_TILE(1);
#undef LA_TILE
}

LA_COLD void pair_product(int64_t M, int64_t N, int64_t P, const word *A, int64_t ai, const word *B,
                          int64_t ldb, real *C, int64_t ldc, const real *D, const real *c,
                          int64_t ci, word *Z, ahead *next)
{
    int64_t j = 0;
#define LA_COLUMN(NV, P, ai) \
    pair_column(NV, M, P, A, ai, B + j, ldb, C + j, ldc, D ? D + j : D, c, ci, Z ? Z + j : Z, next)
    if (P == SHORT && ai == SHORT)
        for (; j + 2 * LANES <= N; j += 2 * LANES) LA_COLUMN(2, SHORT, SHORT);
    for (; j + 2 * LANES <= N; j += 2 * LANES) LA_COLUMN(2, (int)P, ai);
    if (j < N) LA_COLUMN(1, (int)P, ai);
#undef LA_COLUMN
}

LA_FN void pair_products_end(void) {}
#endif

/* A row of n reals in whole lanes, rounded, into round_up(n, 2 * LANES) numbers. */
LA_FN void pack_row(word *to, const real *x, int64_t n)
{
    const lane zero = {0};
    for (int64_t i = 0; i < n; i += 2 * LANES)
        words_of(to + i / 2)[0] =
            join(lanes_in(x + i)[0], i + LANES < n ? lanes_in(x + i)[1] : zero);
}

/* n bfloat16 numbers from anywhere, the rest of `size` words 0. */
LA_FN void copy_numbers(word *to, int64_t size, const char *from, int64_t n)
{
    if (n == 2 * size) {
        for (int64_t i = 0; i < size; i += LANES)
            words_of(to + i)[0] = *(const words_unaligned *)(from + 4 * i);
        return;
    }
    memcpy(to, from, (size_t)(2 * n));
    memset((char *)to + 2 * n, 0, (size_t)(4 * size - 2 * n));
}

/* As FOR_EACH_BLOCK (tile.h), of rows first..n, every block from an even row. */
#define FOR_EACH_EVEN_BLOCK(first, n, width, block, ...) \
    do { \
        int64_t w_ = 0; \
        for (; w_ + STRIP * LANES <= (width); w_ += STRIP * LANES) { \
            int64_t i_ = (first); \
            for (; i_ + ROWS <= (n); i_ += ROWS) block(ROWS, STRIP, i_, w_, __VA_ARGS__); \
            for (; i_ + 2 <= (n); i_ += 2) block(2, STRIP, i_, w_, __VA_ARGS__); \
            if (i_ < (n)) block(1, STRIP, i_, w_, __VA_ARGS__); \
        } \
        for (; w_ < (width); w_ += LANES) { \
            int64_t i_ = (first); \
            for (; i_ + ROWS <= (n); i_ += ROWS) block(ROWS, 1, i_, w_, __VA_ARGS__); \
            for (; i_ + 2 <= (n); i_ += 2) block(2, 1, i_, w_, __VA_ARGS__); \
            if (i_ < (n)) block(1, 1, i_, w_, __VA_ARGS__); \
        } \
    } while (0)
