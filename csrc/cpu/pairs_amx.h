/* pair_product (pairs.h) by AMX: matrix registers of 16 rows of 64 bytes, and an instruction that adds to 16 x 16
 * floats the product of 16 x 16 pairs and 16 x 16 pairs. An instance has it that says LA_AMX: 1, by the
 * processor's instructions; 2, spelled out, as a test of the first.
 *
 * Four registers are sums: 16 rows of 64 columns. A product takes 16 cycles, a load 8, and a product waits 52
 * for the one before it in the same sums: with four of them 64 cycles of products hide the loads, 40, and the
 * wait (Intel's optimization manual, throughput and latency of TDPBF16PS and TILELOADD). The others are the
 * factors, and the same once more for the last pairs of a sum, where they are fewer than 16.
 *
 * As the instructions of pairs.h these take denormal numbers for zeros, and leave none. */

enum { AMX_ROWS = 16, AMX_PAIRS = 16, AMX_COLUMNS = 4 * LANES };

/* What the registers hold, as LDTILECFG reads it. */
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
/* The intrinsics of some compilers do not say that they read memory. */
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
            sum = dot_pairs(sum, amx.x[a][r][p] - (words){0}, right);
        }
        memcpy(amx.x[sums][r], &sum, sizeof sum);
    }
}
#endif

LA_FN void amx_shape_for(amx_shape *shape, int rows, int64_t P)
{
    const int last = P % AMX_PAIRS ? (int)(P % AMX_PAIRS) : AMX_PAIRS;
    *shape = (amx_shape){.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape->bytes[i] = 64;
        shape->rows[i] = (uint8_t)rows;
    }
    shape->rows[5] = AMX_PAIRS;
    shape->bytes[6] = (uint16_t)(4 * last);
    shape->rows[7] = (uint8_t)last;
}

/* As many rows as the shape says, NV lanes of columns. */
LA_FN void amx_sums(const int NV, int64_t P, const word *A, int64_t ai, const word *B, int64_t ldb,
                    real *to, int64_t ld)
{
    int64_t p = 0;
#define LA_EACH(DO, ...) \
    DO(0, __VA_ARGS__); \
    if (NV > 1) DO(1, __VA_ARGS__); \
    if (NV > 2) DO(2, __VA_ARGS__); \
    if (NV > 3) DO(3, __VA_ARGS__)
#define LA_ZERO(v, _) amx_zero(v)
#define LA_MULTIPLY(v, a, b) \
    do { \
        amx_load(b, B + p * ldb + (v) * LANES, ldb); \
        amx_multiply(v, a, b); \
    } while (0)
#define LA_STORE(v, _) amx_store(v, to + (v) * LANES, ld)
    LA_EACH(LA_ZERO, 0);
    for (; p + AMX_PAIRS <= P; p += AMX_PAIRS) {
        amx_load(4, A + p, ai);
        LA_EACH(LA_MULTIPLY, 4, 5);
    }
    if (p < P) {
        amx_load(6, A + p, ai);
        LA_EACH(LA_MULTIPLY, 6, 7);
    }
    LA_EACH(LA_STORE, 0);
#undef LA_EACH
#undef LA_ZERO
#undef LA_MULTIPLY
#undef LA_STORE
}

/* C = sums + diag(c) D, and Z is C once more, zipped. */
LA_FN void amx_finish(const int rows, const int NV, const real *sums, real *C, int64_t ldc,
                      const real *D, const real *c, int64_t ci, word *Z, ahead *next)
{
#pragma GCC unroll 8
    for (int r = 0; r < rows; r += 2) {
        if (next && r % TALL == 0) ask(next); /* as often as tiles of TALL rows would */
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            lane x[2] = {{0}, {0}};
#pragma GCC unroll 2
            for (int y = 0; y < 2; y++) {
                if (r + y == rows) break;
                x[y] = lanes_in(sums + (r + y) * AMX_COLUMNS)[v] +
                       c[(r + y) * ci] * lanes_in(D + (r + y) * ldc)[v];
                lanes_of(C + (r + y) * ldc)[v] = x[y];
            }
            words_of(Z + r / 2 * ldc)[v] = zip(x[0], x[1]);
        }
    }
}

/* D and Z are both given, or neither. */
LA_FN void amx_block(const int NV, int rows, int64_t P, const word *A, int64_t ai, const word *B,
                     int64_t ldb, real *C, int64_t ldc, const real *D, const real *c, int64_t ci,
                     word *Z, ahead *next)
{
    real sums[AMX_ROWS * AMX_COLUMNS] __attribute__((aligned(64)));
    if (!D) {
        amx_sums(NV, P, A, ai, B, ldb, C, ldc);
        return;
    }
    amx_sums(NV, P, A, ai, B, ldb, sums, AMX_COLUMNS);
    if (rows == AMX_ROWS)
        amx_finish(AMX_ROWS, NV, sums, C, ldc, D, c, ci, Z, next);
    else
        amx_finish(rows, NV, sums, C, ldc, D, c, ci, Z, next);
}

LA_COLD void pair_product(int64_t M, int64_t N, int64_t P, const word *A, int64_t ai, const word *B,
                          int64_t ldb, real *C, int64_t ldc, const real *D, const real *c,
                          int64_t ci, word *Z, ahead *next)
{
    amx_shape shape = {0};
    amx_reads_memory();
    for (int64_t i = 0; i < M; i += AMX_ROWS) {
        const int rows = M - i < AMX_ROWS ? (int)(M - i) : AMX_ROWS;
        if (rows != shape.rows[0]) {
            amx_shape_for(&shape, rows, P);
            amx_configure(&shape);
        }
        int64_t j = 0;
#define LA_BLOCK(NV) \
    amx_block(NV, rows, P, A + i * ai, ai, B + j, ldb, C + i * ldc + j, ldc, \
              D ? D + i * ldc + j : D, c ? c + i * ci : c, ci, Z ? Z + i / 2 * ldc + j : Z, next)
        for (; j + AMX_COLUMNS <= N; j += AMX_COLUMNS) LA_BLOCK(4);
        for (; j < N; j += LANES) LA_BLOCK(1);
#undef LA_BLOCK
    }
}

/* Whoever has the processor next need not save the registers. */
LA_FN void pair_products_end(void) { amx_release(); }
