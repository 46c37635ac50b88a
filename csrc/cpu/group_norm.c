/* The norm of groups in a layer's step on the CPU. */
#include "kernels.h"
#include "pool.h"

enum { ROWS_OF_BLOCK = 16 };

static void block_of_rows(void *context, int64_t unit, int thread)
{
    const la_group_norm *j = context;
    const int64_t first = unit * ROWS_OF_BLOCK;
    const int64_t last = first + ROWS_OF_BLOCK < j->rows ? first + ROWS_OF_BLOCK : j->rows;
    (void)thread;
    la_cpu_kernels(j->real)->group_norm(j, first, last);
}

void la_group_norm_run(const la_group_norm *j)
{
    const int64_t blocks = (j->rows + ROWS_OF_BLOCK - 1) / ROWS_OF_BLOCK;
    /* About as long as a gate from a projection: 1.7 ns for each number. */
    const int threads = la_pool_threads(blocks, 1.7 * (double)j->rows * (double)j->size);
    la_pool_run(threads, blocks, block_of_rows, (void *)j, NULL);
}
