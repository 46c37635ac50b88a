/* The kinds of kernel, and what they all ask of a problem. */

/* clang-format off */
/* The six pairs of (decay, rule). HEAD is TOKEN with token stride 0. */
#define LA_PAIRS(X) \
    X(NONE, ADDITIVE) X(NONE, DELTA) X(TOKEN, ADDITIVE) X(TOKEN, DELTA) X(KEY, ADDITIVE) X(KEY, DELTA)
/* clang-format on */

#define LA_KERNEL static __attribute__((noinline)) void

LA_FN la_decay kernel_decay(const la_problem *p)
{
    return p->decay == LA_HEAD ? LA_TOKEN : p->decay;
}

/* Tokens per chunk; usual, where the caller leaves it to us. */
LA_FN int64_t chunk_length(const la_problem *p, int64_t longest, int64_t usual)
{
    int64_t C = p->mode == LA_PARALLEL ? longest : p->chunk ? p->chunk : usual;
    if (C > longest) C = longest;
    return C < 1 ? 1 : C;
}
