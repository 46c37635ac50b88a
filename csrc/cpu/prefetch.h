/* Rows that are prefetched while the tiles compute.
 *
 * A head's rows are short and lie far apart, too far for the hardware to guess the next one. If all
 * are requested at once, most requests are dropped, because there is no place to keep them. A few
 * with every tile of a product arrive before they are used (docs/decisions/0012). */

enum { CACHE_LINE = 64, MOST_ARRAYS = 13 };

typedef struct prefetch {
    struct {
        const char *at;
        int64_t stride, bytes; /* from row to row, of a row */
    } array[MOST_ARRAYS];
    int arrays, array_now;
    int64_t rows, row_now; /* of each array */
    int64_t tiles;         /* the tiles that the rows are spread over */
    int64_t due;           /* rows that are due, times tiles */
} prefetch;

LA_FN void prefetch_some(prefetch *x)
{
    x->due += x->arrays * x->rows;
    for (; x->due >= x->tiles && x->array_now < x->arrays; x->due -= x->tiles) {
        const char *row = x->array[x->array_now].at + x->row_now * x->array[x->array_now].stride;
#pragma GCC unroll 4
        for (int64_t byte = 0; byte < x->array[x->array_now].bytes; byte += CACHE_LINE)
            __builtin_prefetch(row + byte, 0, 3);
        if (++x->row_now == x->rows) {
            x->row_now = 0;
            x->array_now++;
        }
    }
}
