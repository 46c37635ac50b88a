/* The lengths of chunks, for kernels of every kind (kinds.def). */

#define LA_KERNEL static __attribute__((noinline)) void

/* The delta rule writes the difference between a value and what the state predicts. If a chunk has
 * more tokens than keys, these writes undo one another, and their sum loses digits. With 32 tokens
 * per key the error of the state is 8e-7 of its rms in float32, and it grows with their number
 * (docs/decisions/0007). */
enum { MOST_TOKENS_PER_KEY = 32 };

/* Tokens per chunk. usual: their number if the caller does not say. */
LA_FN int64_t chunk_length(const la_problem *p, int64_t longest, int64_t usual)
{
    int64_t C = p->mode == LA_PARALLEL ? longest : p->chunk ? p->chunk : usual;
    if (la_predicts(p->rule) && C / MOST_TOKENS_PER_KEY >= p->K) C = MOST_TOKENS_PER_KEY * p->K;
    C = C < p->batch ? p->batch : C - C % p->batch; /* batches lie in one chunk */
    if (C > longest) C = longest;
    return C < 1 ? 1 : C;
}
