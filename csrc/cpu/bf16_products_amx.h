/* bf16_strip (bf16_products.h) by AMX: matrix registers of 16 rows of 64 bytes, and an instruction
 * that adds the product of 16 x 16 words and 16 x 16 words to 16 x 16 floats. An instance that
 * includes this file defines LA_AMX: 1, by the processor's instructions; 2, in plain C, as a test
 * of the first.
 *
 * Four registers are sums, 32 rows of 32 columns; two and two hold the factors. A product takes 16
 * cycles and a load 8, and a product waits 52 for the one before it in the same sums: four of them
 * are 64 cycles (Intel's optimization manual, throughput and latency of TDPBF16PS and TILELOADD).
 *
 * Like the instructions of bf16_products.h these take denormal numbers for zeros, and return
 * none. */

enum { AMX_ROWS = 16, AMX_WIDE = STRIP_LANES * LANES }; /* rows of a register; columns of a block */

/* The sizes of the registers, as LDTILECFG reads them. */
typedef struct amx_shape {
    uint8_t palette, unused[15];
    uint16_t bytes[16]; /* of a row */
    uint8_t rows[16];
} amx_shape;

#if LA_AMX == 1
#define amx_configure(shape) _tile_loadconfig(shape)
#define amx_zero(i) _tile_zero(i)
#define amx_load(i, from, ld) _tile_loadd(i, from, (ld) * 4)
#define amx_store(i, to, ld) _tile_stored(i, to, (ld) * 4)
#define amx_multiply(sums, a, b) _tile_dpbf16ps(sums, a, b)
#define amx_release() _tile_release()
/* The intrinsics of some compilers do not tell them that memory is read. */
#define amx_reads_memory() __asm__ volatile("" ::: "memory")
#else
static _Thread_local struct {
    amx_shape shape;
    uint32_t x[8][AMX_ROWS][16];
} amx;

LA_FN void amx_configure(const amx_shape *shape) { amx.shape = *shape; }
LA_FN void amx_zero(int i) { memset(amx.x[i], 0, sizeof amx.x[i]); }
LA_FN void amx_release(void) { amx.shape.palette = 0; }
LA_FN void amx_reads_memory(void) {}

LA_FN void amx_load(int i, const void *from, int64_t ld)
{
    for (int r = 0; r < amx.shape.rows[i]; r++)
        memcpy(amx.x[i][r], (const char *)from + r * ld * 4, amx.shape.bytes[i]);
}

LA_FN void amx_store(int i, void *to, int64_t ld)
{
    for (int r = 0; r < amx.shape.rows[i]; r++)
        memcpy((char *)to + r * ld * 4, amx.x[i][r], amx.shape.bytes[i]);
}

LA_FN void amx_multiply(int sums, int a, int b)
{
    for (int r = 0; r < amx.shape.rows[sums]; r++) {
        lane sum;
        memcpy(&sum, amx.x[sums][r], sizeof sum);
        for (int p = 0; p < amx.shape.rows[b]; p++) {
            words right;
            memcpy(&right, amx.x[b][p], sizeof right);
            sum = dot_words(sum, amx.x[a][r][p] - (words){0}, right);
        }
        memcpy(amx.x[sums][r], &sum, sizeof sum);
    }
}
#endif

/* All registers in full size: factors are padded (bf16_products.h). */
LA_FN void bf16_products_begin(void)
{
    amx_shape shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = 64;
        shape.rows[i] = AMX_ROWS;
    }
    amx_configure(&shape);
}

/* The processor's next thread need not save the registers. */
LA_FN void bf16_products_end(void) { amx_release(); }

/* R times 16 rows, W lanes of columns. */
LA_FN void amx_sums(const int R, const int W, int64_t steps, const word *left, int64_t left_row,
                    const word *right, real *to, int64_t ld)
{
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int64_t step = 0; step < steps; step += PADDED_WORDS) {
        amx_load(4, left + step, left_row);
        if (R > 1) amx_load(5, left + AMX_ROWS * left_row + step, left_row);
        amx_load(6, right + step * W * LANES, W * LANES);
        if (W > 1) amx_load(7, right + step * W * LANES + LANES, W * LANES);
        amx_multiply(0, 4, 6);
        if (R > 1) amx_multiply(2, 5, 6);
        if (W == 1) continue;
        amx_multiply(1, 4, 7);
        if (R > 1) amx_multiply(3, 5, 7);
    }
    amx_store(0, to, ld);
    if (W > 1) amx_store(1, to + LANES, ld);
    if (R > 1) amx_store(2, to + AMX_ROWS * ld, ld);
    if (R > 1 && W > 1) amx_store(3, to + AMX_ROWS * ld + LANES, ld);
}

/* Sums that do not fill registers, or to which diag(keep) from is added, go through memory. */
LA_FN void amx_block(const int R, const int W, int64_t height, int64_t steps, const word *left,
                     int64_t left_row, const word *right, real *to, int64_t to_row,
                     const real *from, const real *keep, int64_t keep_row, prefetch *next)
{
    real sums[2 * AMX_ROWS * AMX_WIDE] __attribute__((aligned(64)));
    if (!from && height == R * AMX_ROWS) {
        amx_sums(R, W, steps, left, left_row, right, to, to_row);
        return;
    }
    amx_sums(R, W, steps, left, left_row, right, sums, AMX_WIDE);
    for (int64_t r = 0; r < height; r++) {
        if (next && r % (TILE / 2) == 0) prefetch_some(next); /* as often as other tiles do */
#pragma GCC unroll 2
        for (int v = 0; v < W; v++) {
            lane x = lanes_in(sums + r * AMX_WIDE)[v];
            if (from) x += keep[r * keep_row] * lanes_in(from + r * to_row)[v];
            lanes_of(to + r * to_row)[v] = x;
        }
    }
}

LA_FN void bf16_strip(const int W, int64_t rows, int64_t steps, const word *left, int64_t left_row,
                      const word *right, real *to, int64_t to_row, const real *from,
                      const real *keep, int64_t keep_row, prefetch *next)
{
    amx_reads_memory();
#define LA_BLOCK(R) \
    amx_block(R, W, height, steps, left + i * left_row, left_row, right, to + i * to_row, to_row, \
              from ? from + i * to_row : from, keep ? keep + i * keep_row : keep, keep_row, next)
    for (int64_t i = 0; i < rows; i += 2 * AMX_ROWS) {
        const int64_t height = rows - i < 2 * AMX_ROWS ? rows - i : 2 * AMX_ROWS;
        if (height > AMX_ROWS)
            LA_BLOCK(2);
        else
            LA_BLOCK(1);
    }
#undef LA_BLOCK
}
