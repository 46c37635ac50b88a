/* Scratch, cut from one block. The same cuts over no block measure how large the block must be. */

#include "../sizes.h"

typedef struct arena {
    char *base; /* NULL while measuring */
    size_t used;
} arena;

/* Room for rows x columns reals. A size that is too large shows while measuring, so it is never
 * cut. */
LA_FN real *arena_take(arena *m, size_t rows, size_t columns)
{
    real *x = m->base ? (real *)(m->base + m->used) : NULL;
    const size_t bytes = la_times(la_times(rows, columns), sizeof(real));
    m->used = la_plus(m->used, la_whole(bytes, 64));
    return x;
}
