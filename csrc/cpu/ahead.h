/* Rows to ask memory for while the tiles compute.
 *
 * A head's rows are short and lie far apart, too far for the hardware to guess the next one. Asked
 * for all at once most requests are dropped, for want of a place to keep them; a few with every tile
 * of a product arrive before they are used (docs/decisions/0012). */

enum { CACHE_LINE = 64, ROWS_AHEAD = 9 };

typedef struct ahead {
    struct {
        const char *at;
        int64_t stride, bytes; /* from row to row, of a row */
    } part[ROWS_AHEAD];
    int parts, part_now;
    int64_t rows, row_now; /* of each part */
    int64_t tiles;         /* that the rows are to be spread over */
    int64_t owed;          /* rows, times tiles */
} ahead;

LA_FN void ask(ahead *x)
{
    x->owed += x->parts * x->rows;
    for (; x->owed >= x->tiles && x->part_now < x->parts; x->owed -= x->tiles) {
        const char *row = x->part[x->part_now].at + x->row_now * x->part[x->part_now].stride;
#pragma GCC unroll 4
        for (int64_t byte = 0; byte < x->part[x->part_now].bytes; byte += CACHE_LINE)
            __builtin_prefetch(row + byte, 0, 3);
        if (++x->row_now == x->rows) {
            x->row_now = 0;
            x->part_now++;
        }
    }
}
