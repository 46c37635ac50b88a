/* Scratch, cut from one block: run the same cuts over no block to learn how large it must be. */

typedef struct arena {
    char *base; /* NULL while measuring */
    size_t used;
} arena;

LA_FN real *take(arena *m, int64_t count)
{
    real *x = m->base ? (real *)(m->base + m->used) : NULL;
    m->used += (size_t)round_up(count * (int64_t)sizeof(real), 64);
    return x;
}
