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

/* The delta rule writes what its state lacks, so that writes of more tokens than there are keys undo one
 * another, and a chunk's sum of them loses digits: with 32 tokens per key the state's error is 8e-7 of
 * its rms in float32, and it grows with their number (docs/decisions/0007). */
enum { MOST_TOKENS_PER_KEY = 32 };

/* Tokens per chunk; usual, where the caller leaves it to us. */
LA_FN int64_t chunk_length(const la_problem *p, int64_t longest, int64_t usual)
{
    int64_t C = p->mode == LA_PARALLEL ? longest : p->chunk ? p->chunk : usual;
    if (C > longest) C = longest;
    if (p->rule == LA_DELTA && C / MOST_TOKENS_PER_KEY >= p->K) C = MOST_TOKENS_PER_KEY * p->K;
    return C < 1 ? 1 : C;
}
