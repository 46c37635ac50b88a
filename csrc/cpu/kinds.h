/* What kernels of every kind (kinds.def) ask of a problem. */

#define LA_KERNEL static __attribute__((noinline)) void

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
