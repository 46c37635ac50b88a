/* The lengths of chunks, for kernels of every kind (kinds.def). */

#define LA_KERNEL static __attribute__((noinline)) void

/* The delta rule writes the difference between a value and what the state predicts. If a chunk has
 * more tokens than keys, these writes undo one another, and their sum loses digits. With 32 tokens
 * per key the error of the state is 8e-7 of its rms in float32, and it grows with their number
 * (docs/decisions/0007). A token of the rule DPLR writes two rows. */
enum { MOST_ROWS_PER_KEY = 32 };

/* Tokens per chunk. usual: their number if the caller does not say. */
LA_FN int64_t chunk_length(const la_problem *p, int64_t longest, int64_t usual)
{
    int64_t C = p->mode == LA_PARALLEL ? longest : p->chunk ? p->chunk : usual;
    if (C > longest) C = longest;
    const int64_t most = MOST_ROWS_PER_KEY / (p->rule == LA_DPLR ? 2 : 1);
    if (la_predicts(p->rule) && C / most >= p->K) C = most * p->K;
    return C < 1 ? 1 : C;
}
