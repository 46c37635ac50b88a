/* Scratch, cut from one block. The same cuts over no block measure how large the block must be. */

#include "../sizes.h"

typedef struct arena {
    char *base; /* NULL while measuring */
    size_t used;
} arena;

enum { ARENA_UNIT = 64 };

LA_COLD void arena_measure(arena *m, size_t rows, size_t columns)
{
    const size_t bytes = la_times(la_times(rows, columns), sizeof(real));
    m->used = la_plus(m->used, la_whole(bytes, ARENA_UNIT));
}

/* Room for rows x columns reals. A size that is too large shows while measuring, so it is never
 * cut: a cut needs no check. It is made in many places, and checks would be a tenth of the code. */
LA_FN real *arena_take(arena *m, size_t rows, size_t columns)
{
    if (!m->base) {
        arena_measure(m, rows, columns);
        return NULL;
    }
    real *x = (real *)(m->base + m->used);
    const size_t bytes = rows * columns * sizeof(real);
    m->used += (bytes + ARENA_UNIT - 1) / ARENA_UNIT * ARENA_UNIT;
    return x;
}
