/* Tiles in shared memory: their elements and their layout. No attention here.
 *
 * Elements are bf16. They are float16 in files that define LA_TILES_OF_F16 before they include this
 * one. A tile is 64 rows of elements in panels of 64 columns. A row of a panel has 128 bytes. Its
 * eight pieces of 16 bytes lie at piece ^ (row % 8), so that the same piece of eight rows, which
 * ldmatrix reads at once, lies in eight different banks. The tensor memory engine calls this layout
 * SWIZZLE_128B.
 *
 * Files that define LA_TILES_OF_F32 hold each float32 number x as two bf16: x rounded, and the
 * rest. These two keep 16 or 17 of the 24 bits of x from 2^-117 on, and its range; tf32 keeps 11
 * bits. A panel is then two planes: the rounded numbers and, PLANE_BYTES further, the rests. A
 * product of two such numbers is three products: all but rest times rest (docs/decisions/0025). */
#ifndef LINATTN_CUDA_TILE_CUH
#define LINATTN_CUDA_TILE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "../linattn.h"

#ifdef LA_TILES_OF_F16
#define ELEMENT_NAME "f16" /* in the names of instructions */
typedef __half element;
typedef __half2 element_pair;
static constexpr la_dtype ELEMENT_DTYPE = LA_F16;
static constexpr float MOST_OF_ELEMENT = 65504;

__device__ __forceinline__ element_pair pair_of(float low, float high)
{
    return __floats2half2_rn(low, high);
}
__device__ __forceinline__ float2 numbers_of(element_pair x) { return __half22float2(x); }
__device__ __forceinline__ element element_of(float x) { return __float2half_rn(x); }
__device__ __forceinline__ element_pair given(element x, element y) { return __halves2half2(x, y); }
typedef element_pair given_pair;
#else
#define ELEMENT_NAME "bf16"
#ifdef LA_TILES_OF_F32
typedef float element;
static constexpr la_dtype ELEMENT_DTYPE = LA_F32;
#else
typedef __nv_bfloat16 element;
static constexpr la_dtype ELEMENT_DTYPE = LA_BF16;
#endif
typedef __nv_bfloat162 element_pair;
static constexpr float MOST_OF_ELEMENT = __builtin_inff(); /* the range is that of float32 */

__device__ __forceinline__ element_pair pair_of(float low, float high)
{
    return __floats2bfloat162_rn(low, high);
}
__device__ __forceinline__ float2 numbers_of(element_pair x)
{
    const uint32_t bits = *(const uint32_t *)&x; /* cheaper than two conversions */
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000));
}
#ifdef LA_TILES_OF_F32
__device__ __forceinline__ float2 numbers_of(float2 x) { return x; }
__device__ __forceinline__ element element_of(float x) { return x; }
__device__ __forceinline__ float2 given(float x, float y) { return make_float2(x, y); }
typedef float2 given_pair; /* two neighbouring numbers of an array of the caller */
#else
__device__ __forceinline__ element element_of(float x) { return __float2bfloat16_rn(x); }
__device__ __forceinline__ element_pair given(element x, element y)
{
    return __halves2bfloat162(x, y);
}
typedef element_pair given_pair;
#endif
#endif
/* float32 numbers may be too large for the elements */
static constexpr bool NARROW = ELEMENT_DTYPE == LA_F16;
enum { PLANES = ELEMENT_DTYPE == LA_F32 ? 2 : 1 };
/* from here on bf16 rounds to infinity */
static constexpr float TOO_LARGE_FOR_PLANES = 0x1.ffp127f;

enum { ROWS = 64, PANEL = 64, PLANE_BYTES = ROWS * PANEL * 2, PANEL_BYTES = PLANES * PLANE_BYTES };

__host__ __device__ constexpr int tile_bytes(int columns) { return columns / PANEL * PANEL_BYTES; }

/* Byte offset of a 16-byte piece (8 columns) of a row. Quotients of unsigned numbers are shifts. */
__device__ __forceinline__ int piece_at(unsigned row, unsigned piece)
{
    return piece / 8 * PANEL_BYTES + row * 128 + ((piece % 8 ^ row % 8) << 4);
}

__device__ __forceinline__ int element_at(unsigned row, unsigned column)
{
    return piece_at(row, column / 8) + column % 8 * 2;
}

#endif
