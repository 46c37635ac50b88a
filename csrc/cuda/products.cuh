/* Products of tiles on tensor cores: the operands that a warp reads from tiles, and the
 * instructions that multiply them. No attention here. */
#ifndef LINATTN_CUDA_PRODUCTS_CUH
#define LINATTN_CUDA_PRODUCTS_CUH

#include "tile.cuh"

/* ---- fragments: 16 x 16 pieces of operands, as mma takes them ---- */

/* A left operand [16 rows][16 k], which lies in rows. */
struct left {
    uint32_t x[4];
};

/* Right operands [16 k][8 n], two of them side by side. */
struct right {
    uint32_t x[4];
};

__device__ __forceinline__ void load_matrices(uint32_t (&x)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(uint32_t (&x)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

/* Rows row.. and columns column.. of a tile as a left operand. */
__device__ __forceinline__ left load_left(uint32_t tile, int row, int column)
{
    const int lane = threadIdx.x % 32;
    left a;
    load_matrices(a.x, tile + piece_at(row + lane % 16, column / 8 + lane / 16));
    return a;
}

/* The rows of a warp of a transposed tile, as left operands: they are columns column.. of the
 * tile. */
__device__ __forceinline__ left load_left_transposed(uint32_t tile, int row, int column)
{
    const int lane = threadIdx.x % 32;
    left a;
    load_matrices_transposed(
        a.x, tile + piece_at(row + lane / 16 * 8 + lane % 8, column / 8 + lane / 8 % 2));
    return a;
}

/* The address from which this lane reads the 16 x 16 blocks of a tile as right operands. The rows
 * of the block are n (B = tile') or k (B = tile). The address of each block then costs an exclusive
 * or, for its pieces, and constants. */
__device__ __forceinline__ uint32_t lane_with_rows(uint32_t tile)
{
    const int lane = threadIdx.x % 32;
    return tile + piece_at(lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

__device__ __forceinline__ uint32_t lane_with_columns(uint32_t tile)
{
    const int lane = threadIdx.x % 32;
    return tile + piece_at(lane % 16, lane / 16);
}

__device__ __forceinline__ uint32_t block_at(uint32_t of_lane, unsigned row, unsigned column)
{
    return (of_lane ^ (column / 16 % 4 << 5)) + column / PANEL * PANEL_BYTES + row * 128;
}

__device__ __forceinline__ right load_right_of_rows(uint32_t of_lane, int row, int column)
{
    right b;
    load_matrices(b.x, block_at(of_lane, row, column));
    return b;
}

__device__ __forceinline__ right load_right(uint32_t of_lane, int row, int column)
{
    right b;
    load_matrices_transposed(b.x, block_at(of_lane, row, column));
    return b;
}

__device__ __forceinline__ uint32_t pack(float low, float high)
{
    const element_pair x = pair_of(low, high);
    return *(const uint32_t *)&x;
}

__device__ __forceinline__ float2 unpack(uint32_t x)
{
    return numbers_of(*(const element_pair *)&x);
}

/* Products of elements, each rounded once. */
__device__ __forceinline__ uint32_t times(uint32_t x, uint32_t y)
{
    const element_pair z = __hmul2(*(const element_pair *)&x, *(const element_pair *)&y);
    return *(const uint32_t *)&z;
}

__device__ __forceinline__ uint4 times(const uint4 &x, const uint4 &y)
{
    return make_uint4(times(x.x, y.x), times(x.y, y.y), times(x.z, y.z), times(x.w, y.w));
}

/* Two neighbouring numbers of a tile or an operand. Each number is the sum of its planes. */
struct pair_in_planes {
    uint32_t x[PLANES];
};

__device__ __forceinline__ pair_in_planes in_planes(float low, float high)
{
    pair_in_planes y;
#pragma unroll
    for (int i = 0; i < PLANES; i++) {
        y.x[i] = pack(low, high);
        if (i + 1 == PLANES) break;
        const float2 taken = unpack(y.x[i]);
        low -= taken.x;
        high -= taken.y;
    }
    return y;
}

__device__ __forceinline__ float2 numbers(const pair_in_planes &x)
{
    float2 sum = unpack(x.x[PLANES - 1]);
    if (PLANES == 2) {
        const float2 most = unpack(x.x[0]);
        sum = make_float2(most.x + sum.x, most.y + sum.y);
    }
    return sum;
}

/* `to` and `from` are addresses in the first plane. */
__device__ __forceinline__ void put_pair(char *to, const pair_in_planes &x)
{
#pragma unroll
    for (int i = 0; i < PLANES; i++) *(uint32_t *)(to + i * PLANE_BYTES) = x.x[i];
}

__device__ __forceinline__ void put_pair(char *to, float low, float high)
{
    put_pair(to, in_planes(low, high));
}

__device__ __forceinline__ void put_one(char *to, float x)
{
    const pair_in_planes y = in_planes(x, 0);
#pragma unroll
    for (int i = 0; i < PLANES; i++) *(uint16_t *)(to + i * PLANE_BYTES) = (uint16_t)y.x[i];
}

__device__ __forceinline__ float2 get_pair(const char *from)
{
    pair_in_planes x;
#pragma unroll
    for (int i = 0; i < PLANES; i++) x.x[i] = *(const uint32_t *)(from + i * PLANE_BYTES);
    const float2 sum = numbers(x);
    if (PLANES == 1) return sum;
    const float2 most = unpack(x.x[0]); /* the rest of an infinity is a NaN */
    return make_float2(isinf(most.x) ? most.x : sum.x, isinf(most.y) ? most.y : sum.y);
}

/* A left operand in planes. Its pair e is x[e] of every plane. */
struct operand {
    left of[PLANES];
};

__device__ __forceinline__ float2 numbers(const left &a, int e) { return unpack(a.x[e]); }
__device__ __forceinline__ float2 numbers(const operand &a, int e)
{
    pair_in_planes x;
#pragma unroll
    for (int i = 0; i < PLANES; i++) x.x[i] = a.of[i].x[e];
    return numbers(x);
}

__device__ __forceinline__ void put_pair(operand &a, int e, float low, float high)
{
    const pair_in_planes x = in_planes(low, high);
#pragma unroll
    for (int i = 0; i < PLANES; i++) a.of[i].x[e] = x.x[i];
}

__device__ __forceinline__ operand load_operand(uint32_t tile, int row, int column)
{
    operand a;
#pragma unroll
    for (int i = 0; i < PLANES; i++) a.of[i] = load_left(tile + i * PLANE_BYTES, row, column);
    return a;
}

__device__ __forceinline__ operand as_operand(const float (&x)[4], const float (&y)[4])
{
    operand a;
    put_pair(a, 0, x[0], x[1]);
    put_pair(a, 1, x[2], x[3]);
    put_pair(a, 2, y[0], y[1]);
    put_pair(a, 3, y[2], y[3]);
    return a;
}

/* Two neighbouring accumulators [16][8] as a left operand [16][16]. Both have the same layout. */
__device__ __forceinline__ left as_left(const float (&x)[4], const float (&y)[4])
{
    return {{pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3])}};
}

__device__ __forceinline__ void multiply(float (&c)[4], const left &a, uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32." ELEMENT_NAME "." ELEMENT_NAME
        ".f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b0), "r"(b1));
}

/* c[0], c[1] += a b: 16 columns. */
__device__ __forceinline__ void multiply(float (&c0)[4], float (&c1)[4], const left &a,
                                         const right &b)
{
    multiply(c0, a, b.x[0], b.x[1]);
    multiply(c1, a, b.x[2], b.x[3]);
}

/* c [16][16] += a B', where B is 16 rows of a tile from `row` on, and 16 of its columns from
 * `column` on. of_lane is what lane_with_rows returns. */
__device__ __forceinline__ void multiply_with_rows(float (&c0)[4], float (&c1)[4], const operand &a,
                                                   uint32_t of_lane, int row, int column)
{
#pragma unroll
    for (int i = PLANES - 1; i >= 0; i--) { /* the planes of the tile, small numbers first */
        const right b = load_right_of_rows(of_lane + i * PLANE_BYTES, row, column);
#pragma unroll
        for (int j = PLANES - 1 - i; j >= 0; j--) multiply(c0, c1, a.of[j], b);
    }
}

/* ---- products of 16 rows of a warp with a whole tile ----
 *
 * c [16][8 N] += a B. The 16 k of B are columns of a tile (B = tile', the rows of the tile are n)
 * or 16 of its rows (B = tile, its columns are n). Hopper computes them for four warps at once.
 * Warps 4 i to 4 i + 3 of a block go through the same products at the same time. The sums are valid
 * after `products_wait`; before that no code may touch them. Elsewhere each warp loads B piece by
 * piece, and the sums are valid at once. The layouts of a and c are the same. */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HAS_WARP_GROUPS 1

/* All four warps of a group call this. */
template <int N> __device__ __forceinline__ void registers_down_to()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void registers_up_to()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

__device__ __forceinline__ void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Wait until all but the last LEFT committed products are done. */
template <int LEFT> __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* Keeps the compiler from reading the sums before the wait that precedes this. */
template <int N> __device__ __forceinline__ void products_in(float (&c)[N][4])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
}

/* The four warps wait for one another. A role whose group is known says so: its barrier is a constant
 * of the instruction then. */
__device__ __forceinline__ void group_waits(int group = threadIdx.x / 128)
{
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
}

/* Is x true in any thread of the four warps? */
__device__ __forceinline__ bool any_of_group(bool x, int group = threadIdx.x / 128)
{
    int any;
    asm volatile("{\n"
                 ".reg .pred mine, all;\n"
                 "setp.ne.s32 mine, %1, 0;\n"
                 "bar.red.or.pred all, %2, 128, mine;\n"
                 "selp.s32 %0, 1, 0, all;\n"
                 "}"
                 : "=r"(any)
                 : "r"((int)x), "r"(2 + group)
                 : "memory");
    return any;
}

/* The descriptor of a tile for the tensor cores, from `offset` bytes on: the address, the strides
 * between panels and between groups of eight rows, all in units of 16 bytes, and a 1 for
 * SWIZZLE_128B. Shared memory ends before 2^18 bytes, so an address stays within its 14 bits, and
 * the descriptor of the next product costs one addition. */
__device__ __forceinline__ uint64_t descriptor(uint32_t at, int offset)
{
    const uint32_t low = (at / 16 | PANEL_BYTES / 16 << 16) + offset / 16;
    return (uint64_t)(1 << 30 | 8 * 128 / 16) << 32 | low;
}

#define F4(i, HOW) HOW(c[i][0]), HOW(c[i][1]), HOW(c[i][2]), HOW(c[i][3])
#define F16(i, HOW) F4(i, HOW), F4(i + 1, HOW), F4(i + 2, HOW), F4(i + 3, HOW)
#define F32(HOW) F16(0, HOW), F16(4, HOW)
#define F64(HOW) F32(HOW), F16(8, HOW), F16(12, HOW)
#define R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define R16_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define R16_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define R16_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define R16_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PRODUCT(N, SUMS, A, B, ADDS, TRANSPOSED, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ELEMENT_NAME "." ELEMENT_NAME \
                 " {" SUMS "}, {" A "}, " B ", " #ADDS ", 1, 1, " #TRANSPOSED ";" \
                 : __VA_ARGS__ \
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "l"(b))
#define PRODUCT_F16(N, SUMS, A, B, ADDS, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" SUMS "}, {" A "}, " B \
                 ", " #ADDS ", 1, 1, 1;" \
                 : __VA_ARGS__ \
                 : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "l"(b))
#define PRODUCT_OF_TILES(ADDS, TRANSPOSED, HOW) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT_NAME "." ELEMENT_NAME \
                 " {" R16_0 ", " R16_1 "}, %32, %33, " #ADDS ", 1, 1, 0, " #TRANSPOSED ";" \
                 : F32(HOW) \
                 : "l"(a), "l"(b))
#define PRODUCT_64(ADDS, TRANSPOSED, HOW) \
    PRODUCT(64, R16_0 ", " R16_1, "%32, %33, %34, %35", "%36", ADDS, TRANSPOSED, F32(HOW))
#define PRODUCT_128(ADDS, TRANSPOSED, HOW) \
    PRODUCT(128, R16_0 ", " R16_1 ", " R16_2 ", " R16_3, "%64, %65, %66, %67", "%68", ADDS, \
            TRANSPOSED, F64(HOW))

/* c += a tile'[column..][..]. `first`: c = that product, where sums begin (otherwise zeros would be
 * written to all of them first). `zeros`: so many blocks of 16 rows of the tile are zeros there.
 * That does not help here: to split a product, one would have to wait between its parts. */
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const left &a, uint32_t tile,
                                              int column, bool first = false, int zeros = 0)
{
    const uint64_t b = descriptor(tile, column / PANEL * PANEL_BYTES + column % PANEL * 2);
    (void)zeros;
    if (first)
        PRODUCT_64(0, 0, "=f");
    else
        PRODUCT_64(1, 0, "+f");
}

/* c += a tile[row..][..] */
__device__ __forceinline__ void multiply_columns(float (&c)[16][4], const left &a, uint32_t tile,
                                                 int row)
{
    const uint64_t b = descriptor(tile, row * 128);
    PRODUCT_128(1, 1, "+f");
}

__device__ __forceinline__ void multiply_columns(float (&c)[8][4], const left &a, uint32_t tile,
                                                 int row)
{
    const uint64_t b = descriptor(tile, row * 128);
    PRODUCT_64(1, 1, "+f");
}

/* c (+)= a tile[row..][column..], 16 or 32 columns of a panel of float16. */
__device__ __forceinline__ void multiply_f16(float (&c)[2][4], const left &a, uint32_t tile,
                                             int row, int column, bool first)
{
    const uint64_t b = descriptor(tile, row * 128 + column * 2);
    if (first)
        PRODUCT_F16(16, R8, "%8, %9, %10, %11", "%12", 0, F4(0, "=f"), F4(1, "=f"));
    else
        PRODUCT_F16(16, R8, "%8, %9, %10, %11", "%12", 1, F4(0, "+f"), F4(1, "+f"));
}

__device__ __forceinline__ void multiply_f16(float (&c)[4][4], const left &a, uint32_t tile,
                                             int row, int column, bool first)
{
    const uint64_t b = descriptor(tile, row * 128 + column * 2);
    if (first)
        PRODUCT_F16(32, R16_0, "%16, %17, %18, %19", "%20", 0, F16(0, "=f"));
    else
        PRODUCT_F16(32, R16_0, "%16, %17, %18, %19", "%20", 1, F16(0, "+f"));
}

/* c (+)= q k', 64 rows of both, columns column..column + 16 of their tiles. */
__device__ __forceinline__ void multiply_tiles(float (&c)[8][4], uint32_t q, uint32_t k, int column,
                                               bool first)
{
    const int offset = column / PANEL * PANEL_BYTES + column % PANEL * 2;
    const uint64_t a = descriptor(q, offset), b = descriptor(k, offset);
    if (first)
        PRODUCT_OF_TILES(0, 0, "=f");
    else
        PRODUCT_OF_TILES(1, 0, "+f");
}

/* c (+)= p[..][at..at + 16] k[at..at + 16][..], for panels of 64 columns. */
__device__ __forceinline__ void multiply_panels(float (&c)[8][4], uint32_t p, uint32_t k, int at,
                                                bool first)
{
    const uint64_t a = descriptor(p, at * 2), b = descriptor(k, at * 128);
    if (first)
        PRODUCT_OF_TILES(0, 1, "=f");
    else
        PRODUCT_OF_TILES(1, 1, "+f");
}

#undef F4
#undef F16
#undef F32
#undef F64
#undef R8
#undef R16_0
#undef R16_1
#undef R16_2
#undef R16_3
#undef PRODUCT
#undef PRODUCT_64
#undef PRODUCT_OF_TILES
#undef PRODUCT_F16
#undef PRODUCT_128
#else
#define HAS_WARP_GROUPS 0

__device__ __forceinline__ void products_begin() {}
__device__ __forceinline__ void products_commit() {}
template <int LEFT> __device__ __forceinline__ void products_wait() {}
template <int N> __device__ __forceinline__ void products_in(float (&)[N][4]) {}
__device__ __forceinline__ bool any_of_group(bool x) { return __any_sync(~0u, x); }

__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const left &a, uint32_t tile,
                                              int column, bool first = false, int zeros = 0)
{
    if (first)
#pragma unroll
        for (int m = 0; m < 8; m++) c[m][0] = c[m][1] = c[m][2] = c[m][3] = 0;
    const uint32_t rows = lane_with_rows(tile);
#pragma unroll
    for (int m = zeros; m < 4; m++)
        multiply(c[2 * m], c[2 * m + 1], a, load_right_of_rows(rows, m * 16, column));
}

template <int N>
__device__ __forceinline__ void multiply_columns(float (&c)[N][4], const left &a, uint32_t tile,
                                                 int row)
{
    const uint32_t columns = lane_with_columns(tile);
#pragma unroll
    for (int m = 0; m < N / 2; m++)
        multiply(c[2 * m], c[2 * m + 1], a, load_right(columns, row, m * 16));
}
#endif

/* The same in planes. */
__device__ __forceinline__ void multiply_rows(float (&c)[8][4], const operand &a, uint32_t tile,
                                              int column, bool first = false, int zeros = 0)
{
#pragma unroll
    for (int i = PLANES - 1; i >= 0; i--)
#pragma unroll
        for (int j = PLANES - 1 - i; j >= 0; j--)
            multiply_rows(c, a.of[j], tile + i * PLANE_BYTES, column, first && i == PLANES - 1,
                          zeros);
}

template <int N>
__device__ __forceinline__ void multiply_columns(float (&c)[N][4], const operand &a, uint32_t tile,
                                                 int row)
{
#pragma unroll
    for (int i = PLANES - 1; i >= 0; i--)
#pragma unroll
        for (int j = PLANES - 1 - i; j >= 0; j--)
            multiply_columns(c, a.of[j], tile + i * PLANE_BYTES, row);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
/* Store four 8 x 8 matrices of 16-bit numbers to shared memory. Lane 8 i + j has the address of row
 * j of matrix i. */
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&x)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}
#endif

/* Store four 8 x 8 matrices of 16-bit numbers to shared memory, transposed. A thread has two
 * numbers of a row. Lane 8 i + j has the address of row j of transposed matrix i. */
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, const uint32_t (&x)[4])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t y;
        asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x[i]));
        const uint32_t row = __shfl_sync(~0u, to, i * 8 + lane / 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(row + lane % 4 * 4), "r"(y) : "memory");
    }
#endif
}

/* ---- float32 matrices in shared memory, multiplied with the 11 bits of tf32 ---- */

__device__ __forceinline__ uint32_t tf32(float x)
{
    uint32_t y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 /* one instruction; the other one is three */
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
#endif
    return y;
}

/* c [16][8] += A [16][8 STEPS] B [8 STEPS][8], with rows lda and ldb apart. */
template <int STEPS>
__device__ __forceinline__ void multiply_tf32(float (&c)[4], const float *A, int lda,
                                              const float *B, int ldb)
{
    const int lane = threadIdx.x % 32, i = lane / 4, j = lane % 4;
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const float *a = A + i * lda + 8 * s + j, *b = B + (8 * s + j) * ldb + i;
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(tf32(a[0])), "r"(tf32(a[8 * lda])), "r"(tf32(a[4])), "r"(tf32(a[8 * lda + 4])),
              "r"(tf32(b[0])), "r"(tf32(b[4 * ldb])));
    }
}

/* Store an accumulator [16][8] times sign, to rows ld apart. */
__device__ __forceinline__ void put(float *to, int ld, const float (&c)[4], float sign)
{
    const int lane = threadIdx.x % 32;
    float *x = to + lane / 4 * ld + lane % 4 * 2;
    x[0] = sign * c[0];
    x[1] = sign * c[1];
    x[8 * ld] = sign * c[2];
    x[8 * ld + 1] = sign * c[3];
}

/* A left operand as a block of a tile. */
__device__ __forceinline__ void store_left(char *tile, int row, int column, const left &a)
{
    const int lane = threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    store_matrices(address_of(tile) + piece_at(row + lane % 16, column / 8 + lane / 16), a.x);
#else
#pragma unroll
    for (int e = 0; e < 4; e++)
        *(uint32_t *)(tile + element_at(row + lane / 4 + e % 2 * 8,
                                        column + lane % 4 * 2 + e / 2 * 8)) = a.x[e];
#endif
}

/* A state in sums has [column, key of two] for every eight keys of a thread. The recurrence wants
 * [key][column]: of every four numbers the two in the middle change places. Walks on Hopper do that
 * as they give a state to a chunk that goes token by token. Other walks leave it to that chunk. They
 * read the state back as pieces of 16 bytes, and would move registers in every chunk for it. */
static constexpr bool STATE_AS_SUMS = !HAS_WARP_GROUPS;
__device__ __forceinline__ int place_in_sums(int i) { return i / 4 * 4 + i % 2 * 2 + i / 2 % 2; }
/* The place of number i in sums. */
__device__ __forceinline__ int place_for_tokens(int i)
{
    return STATE_AS_SUMS ? i : place_in_sums(i);
}

#endif
