/* Products of bfloat16 numbers, two per element of a lane at a time, summed in float. There is no
 * attention in this file. An instance that includes it defines LA_BF16_PRODUCTS: 1, by the
 * processor's instruction; 2, in plain C, as a test of the first.
 *
 * A word is two bfloat16 numbers, the first in its low half. The product of two words is the sum of
 * two products. A left factor lies in rows of words. A right factor is reals; a strip of its
 * columns at a time is packed into words. LA_PLANES says what a word holds:
 *
 *     1  two neighbours along the sum: the rows of the left factor as they are, those of the right
 *        one zipped by twos. Half as many words as terms. A number that is no bfloat16 number is
 *        rounded to 8 bits. An odd number of terms is filled up with a zero.
 *     2  one term: on the left its bfloat16 number twice, on the right a real as the sum of two
 *        numbers, high and low. 16 bits of a real. The left factor must have bfloat16 numbers.
 *
 * The instruction takes denormal numbers for zeros, returns none, and rounds between the two
 * products in its own way. All of that is far below the rounding of the factors. So is the error of
 * one chain over all terms: 64 x 2^-24 for the 64 words of K = 128. Chains of CHAIN (tile.h) gain
 * nothing. */

enum { TERMS = LA_PLANES == 1 ? 2 : 1 }; /* of a word */

/* Words of a left factor's row that are read at once: those behind a sum's own are zeros. Rows of a
 * left factor that are read at once: those behind a product's own may hold anything. */
enum { PADDED_WORDS = 16, ROWS_READ = 32 };
enum { STRIP_LANES = 2 }; /* of a strip of a right factor */

typedef uint16_t half;
/* They lie in an arena of reals, so they may alias everything. */
typedef uint32_t word __attribute__((may_alias));
typedef uint32_t words __attribute__((vector_size(LA_LANE_BYTES), may_alias));
typedef half halves __attribute__((vector_size(LA_LANE_BYTES), may_alias));
typedef half half_lane __attribute__((vector_size(LA_LANE_BYTES / 2), aligned(2), may_alias));

LA_FN words *words_of(word *x) { return (words *)__builtin_assume_aligned(x, LA_LANE_BYTES); }
LA_FN const words *words_in(const word *x)
{
    return (const words *)__builtin_assume_aligned(x, LA_LANE_BYTES);
}

LA_FN word *arena_take_words(arena *m, size_t rows, size_t columns)
{
    return (word *)arena_take(m, rows, columns);
}

#if LA_BF16_PRODUCTS == 1
LA_FN lane dot_words(lane sum, words a, words b)
{
    return (lane)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

/* Two lanes, rounded, one behind the other. */
LA_FN words join(lane x, lane y) { return (words)_mm512_cvtne2ps_pbh((__m512)y, (__m512)x); }

/* Two lanes, rounded, element by element in turn. */
LA_FN words zip(lane x, lane y)
{
    const halves order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (words)_mm512_permutexvar_epi16((__m512i)order, (__m512i)join(x, y));
}
#else
LA_FN lane dot_words(lane sum, words a, words b)
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
#endif

/* Two bfloat16 numbers whose sum is x, to 16 bits: the upper half of x, and the rest of x, rounded.
 * The rest of an infinity is 0. (The addition that rounds can turn a NaN into a zero, but the upper
 * half of that NaN is a NaN too.) */
LA_FN words split(lane x)
{
    const lane high = (lane)((words)x & 0xffff0000), zero = {0};
    const lane low = pick(x == high, zero, x - high);
    return (words)x >> 16 | (((words)low + 0x8000) & 0xffff0000);
}

/* Words of a row of n numbers. */
LA_FN int64_t words_for(int64_t n) { return (n + TERMS - 1) / TERMS; }
LA_FN int64_t padded_words(int64_t n) { return round_up(words_for(n), PADDED_WORDS); }

/* A row of n numbers in whole lanes, for a left factor. LA_PLANES 1 rounds them. */
LA_FN void pack_left(word *to, const real *x, int64_t n)
{
    const lane zero = {0};
    for (int64_t i = 0; i < n; i += TERMS * LANES) {
        const lane *y = lanes_in(x + i);
        if (LA_PLANES == 1)
            words_of(to + i / TERMS)[0] = join(y[0], i + LANES < n ? y[1] : zero);
        else
            words_of(to + i / TERMS)[0] = (words)y[0] | (words)y[0] >> 16;
    }
}

/* W lanes of n rows of a right factor, with zeros behind them. */
LA_FN void pack_right(const int W, word *to, const real *from, int64_t ld, int64_t n)
{
    const lane zero = {0};
    for (int64_t i = 0; i < n; i += TERMS)
#pragma GCC unroll 2
        for (int w = 0; w < W; w++) {
            const lane *x = lanes_in(from + i * ld) + w;
            words_of(to + i / TERMS * W * LANES)[w] =
                LA_PLANES == 2 ? split(x[0])
                               : zip(x[0], i + 1 < n ? lanes_in(from + (i + 1) * ld)[w] : zero);
        }
    for (int64_t i = words_for(n) * W; i < padded_words(n) * W; i++) words_of(to)[i] = (words)zero;
}

/* W lanes of bf16_product: `right` is packed, and a step of the sums is one word. */
LA_FN void bf16_strip(const int W, int64_t rows, int64_t steps, const word *left, int64_t left_row,
                      const word *right, real *to, int64_t to_row, const real *from,
                      const real *keep, int64_t keep_row, prefetch *next);

#ifdef LA_AMX
#include "bf16_products_amx.h"
#else
/* to = left right, plus diag(keep) from if there is one. */
LA_FN void bf16_tile(const int R, const int W, int steps, const word *restrict left,
                     int64_t left_row, const word *restrict right, real *to, int64_t to_row,
                     const real *from, const real *keep, int64_t keep_row)
{
    lane x[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < R * W; i++) x[i] = (lane){0};
#pragma GCC unroll 4
    for (int step = 0; step < steps; step++) {
        words b[STRIP_LANES];
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) b[w] = words_in(right + step * W * LANES)[w];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const words a = left[r * left_row + step] - (words){0};
#pragma GCC unroll 4
            for (int w = 0; w < W; w++) x[r * W + w] = dot_words(x[r * W + w], a, b[w]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            if (from) x[r * W + w] += keep[r * keep_row] * lanes_in(from + r * to_row)[w];
            lanes_of(to + r * to_row)[w] = x[r * W + w];
        }
}

LA_FN void bf16_strip(const int W, int64_t rows, int64_t steps, const word *left, int64_t left_row,
                      const word *right, real *to, int64_t to_row, const real *from,
                      const real *keep, int64_t keep_row, prefetch *next)
{
    int64_t i = 0;
#define LA_TILE(R) \
    bf16_tile(R, W, (int)steps, left + i * left_row, left_row, right, to + i * to_row, to_row, \
              from ? from + i * to_row : from, keep ? keep + i * keep_row : keep, keep_row)
    for (; i + TILE / 2 <= rows; i += TILE / 2) {
        if (next) prefetch_some(next);
        LA_TILE(TILE / 2);
    }
    for (; i + 2 <= rows; i += 2) LA_TILE(2);
    if (i < rows) LA_TILE(1);
#undef LA_TILE
}

LA_FN void bf16_products_begin(void) {}
LA_FN void bf16_products_end(void) {}
#endif

/* to[rows][columns] = diag(keep) from + left right, as in product_and_prefetch, with n terms. left
 * has rows of words, left_row apart; right is [n][columns]. strip: room for padded_words(n) rows of
 * STRIP_LANES lanes. `from` and `next` may be NULL. */
LA_COLD void bf16_product(int64_t rows, int64_t columns, int64_t n, const word *left,
                          int64_t left_row, const real *right, int64_t right_row, real *to,
                          int64_t to_row, const real *from, const real *keep, int64_t keep_row,
                          word *strip, prefetch *next)
{
    int64_t j = 0;
#define LA_STRIP(W) \
    pack_right(W, strip, right + j, right_row, n); \
    bf16_strip(W, rows, words_for(n), left, left_row, strip, to + j, to_row, \
               from ? from + j : from, keep, keep_row, next)
    for (; j + STRIP_LANES * LANES <= columns; j += STRIP_LANES * LANES) {
        LA_STRIP(STRIP_LANES);
    }
    if (j < columns) {
        LA_STRIP(1);
    }
#undef LA_STRIP
}
