/* Norms, feature maps and the sums of keys of a chunk, for the additive rule in one kernel
 * (additive.cuh). A group of four warps changes the tiles of q and k in place
 * (docs/decisions/0051).
 *
 * The normaliser is den_i = q_i z + the row sum of P, where z is the sum of the keys before the
 * chunk. */
#ifndef LINATTN_CUDA_MAPPED_TILES_CUH
#define LINATTN_CUDA_MAPPED_TILES_CUH

#include "prepare.cuh"

enum { MOST_FETCHED = 4 }; /* stages */

template <int KP> struct mapped_room {
    alignas(16) float z[KP];
    alignas(16) float sums[4][KP]; /* of the keys of the rows of each warp */
    compensated<float> exact[KP];  /* z; each key is one thread's */
    /* By stage: q_i z of each row, as a sum for each piece of 8 keys. */
    alignas(16) float den[MOST_FETCHED][C][KP / 8];
};

/* Is all that is done to rows elu + 1, and do they fill their tiles? */
template <int KP> __host__ __device__ bool has_usual_map(const call &c)
{
    return c.map[0] == LA_ELU1 && c.map[1] == LA_ELU1 && !c.qk_l2norm && c.K == KP;
}

/* A number that is rounded to bfloat16 next. For it the formulas of elements.h have no branch for
 * rare cases, and exp is two instructions. Down to exp(-88) that has an error of 2^-17 of the
 * result at most, from the rounded product; bfloat16 keeps 2^-9. */
struct rough {
    float x;
    __device__ rough() {}
    __device__ rough(float y) : x(y) {}
};
__device__ __forceinline__ bool operator<(rough x, rough y) { return x.x < y.x; }
__device__ __forceinline__ bool operator>(rough x, rough y) { return x.x > y.x; }
__device__ __forceinline__ rough operator+(rough x, rough y) { return x.x + y.x; }
__device__ __forceinline__ rough operator*(rough x, rough y) { return x.x * y.x; }
__device__ __forceinline__ rough operator/(rough x, rough y) { return __fdividef(x.x, y.x); }
__device__ __forceinline__ rough sqrt(rough x)
{
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(x.x) : "f"(x.x));
    return x;
}
__device__ __forceinline__ rough exp(rough x)
{
    const float LOG2_E = 1.4426950408889634f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x.x) : "f"(x.x * LOG2_E));
    return x;
}

/* As apply_map. A warp has seven predicates and would wait for each choice, so elu + 1 has none. */
__device__ __forceinline__ rough apply_map(rough x, la_map map, rough eps)
{
    if (map != LA_ELU1) return apply_map<rough>(x, map, eps);
    float above, below;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(above) : "f"(x.x));
    asm("min.f32 %0, %1, 0f00000000;" : "=f"(below) : "f"(x.x));
    return above + exp(rough(below)).x;
}

#if HAS_WARP_GROUPS
/* z before a sequence, or before a segment of a head. A thread has a key. */
template <int KP>
__device__ __forceinline__ void begin_z(const call &c, int n, int place, mapped_room<KP> &m)
{
    const int key = threadIdx.x % 128;
    compensated<float> z = {};
    if (c.x[LA_Z0].data && key < c.K)
        z.sum = load<float>(at(c.x[LA_Z0], n, place, key), c.x[LA_Z0].dtype);
    if (key < KP) {
        m.exact[key] = z;
        m.z[key] = z.total();
    }
    group_waits();
}

/* Add the keys of a chunk to z. */
template <int KP> __device__ __forceinline__ void add_to_z(mapped_room<KP> &m)
{
    const int key = threadIdx.x % 128;
    if (key < KP) {
        compensated<float> z = m.exact[key];
        z.add((m.sums[0][key] + m.sums[1][key]) + (m.sums[2][key] + m.sums[3][key]));
        m.exact[key] = z;
        m.z[key] = z.total();
    }
    group_waits();
}

template <int KP>
__device__ __forceinline__ void store_z(const call &c, const unit &u, const mapped_room<KP> &m)
{
    const int key = threadIdx.x % 128;
    if (c.x[LA_ZT].data && key < c.K)
        store(at(c.x[LA_ZT], u.n, u.hv, key), c.x[LA_ZT].dtype, m.exact[key].total());
}

/* A piece as numbers. */
__device__ __forceinline__ void put_numbers(const uint4 &piece, rough *to)
{
    const uint32_t pairs[] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float2 two = unpack(pairs[e]);
        to[2 * e] = two.x, to[2 * e + 1] = two.y;
    }
}

/* 8 numbers of each of N rows, normed and mapped as the call asks. `map`: of q (0) or of k (1). A
 * row has LANES lanes. Numbers from `there` on become zeros. */
template <int LANES, int N>
__device__ __forceinline__ void map_pieces(const call &c, int map, int there, rough (&x)[8 * N])
{
    if (c.qk_l2norm)
#pragma unroll
        for (int i = 0; i < N; i++) {
            float squares = 0;
#pragma unroll
            for (int e = 0; e < 8; e++) squares += x[i * 8 + e].x * x[i * 8 + e].x;
#pragma unroll
            for (int step = 1; step < LANES; step *= 2)
                squares += __shfl_xor_sync(~0u, squares, step);
            const rough factor = l2norm_factor(rough(squares));
#pragma unroll
            for (int e = 0; e < 8; e++) x[i * 8 + e].x *= factor.x;
        }
    apply_map_to_all(x, c.map[map], rough((float)c.map_eps[map]));
    if (c.K % (LANES * 8)) /* a map of zero may be 1 */
#pragma unroll
        for (int i = 0; i < 8 * N; i++)
            if (i % 8 >= there) x[i].x = 0;
}

/* The part of z'q of a row that one of four lanes adds. */
template <int KP> __device__ __forceinline__ float quarter_of_den(const float (&den)[KP / 8])
{
    const float *const from = den + threadIdx.x % 4 * (KP / 32);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < KP / 32; j++) sum += from[j];
    return sum;
}

/* Map the n rows of the tiles of q and k, in place; further rows of k become zeros. z'q of each row
 * goes to `den`, one number for each piece. The sum of the keys of each warp goes to m.sums. */
template <int KP, bool USUAL>
__device__ __forceinline__ void map_tiles(const call &c, char *q, char *k, int n,
                                          mapped_room<KP> &m, float (*den)[KP / 8])
{
    /* A lane has a piece of rows that are a multiple of 8 apart: all have the same swizzle. It
     * works on PAIR rows at once. */
    constexpr int LANES = KP / 8, STEP = 128 / LANES, PAIR = 2;
    int thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread)); /* its addresses need not stay in registers */
    const int lane = thread % 32, piece = lane % LANES, first = thread / LANES;
    const int there = c.K - piece * 8;
    float z[8], sums[8] = {};
    *(float4 *)z = *(const float4 *)(m.z + piece * 8);
    *(float4 *)(z + 4) = *(const float4 *)(m.z + piece * 8 + 4);
#pragma unroll 1
    for (int row = first; row < C; row += PAIR * STEP) {
        rough x[8 * PAIR];
        const auto map_rows_of = [&](int map, char *tile) {
            char *const at = tile + piece_at(first, piece) + (row - first) * 128;
            uint4 of[PAIR];
#pragma unroll
            for (int j = 0; j < PAIR; j++) of[j] = *(const uint4 *)(at + j * STEP * 128);
#pragma unroll
            for (int j = 0; j < PAIR; j++) put_numbers(of[j], x + j * 8);
            if (USUAL)
#pragma unroll
                for (int i = 0; i < 8 * PAIR; i++) x[i] = apply_map(x[i], LA_ELU1, rough(0));
            else
                map_pieces<LANES, PAIR>(c, map, there, x);
#pragma unroll
            for (int j = 0; j < PAIR; j++) {
                if (!USUAL && map && row + j * STEP >= n)
#pragma unroll
                    for (int e = 0; e < 8; e++) x[j * 8 + e].x = 0;
                const auto two = [&](int e) { return pack(x[j * 8 + e].x, x[j * 8 + e + 1].x); };
                *(uint4 *)(at + j * STEP * 128) = make_uint4(two(0), two(2), two(4), two(6));
            }
        };
        map_rows_of(0, q);
#pragma unroll
        for (int j = 0; j < PAIR; j++) {
            float of_piece = 0;
#pragma unroll
            for (int e = 0; e < 8; e++) of_piece += x[j * 8 + e].x * z[e];
            den[row + j * STEP][piece] = of_piece;
        }
        map_rows_of(1, k);
#pragma unroll
        for (int j = 0; j < PAIR; j++)
#pragma unroll
            for (int e = 0; e < 8; e++) sums[e] += x[j * 8 + e].x;
    }
#pragma unroll
    for (int step = LANES; step < 32; step *= 2)
#pragma unroll
        for (int e = 0; e < 8; e++) sums[e] += __shfl_xor_sync(~0u, sums[e], step);
    if (lane >= LANES) return;
    float *const to = m.sums[thread / 32] + piece * 8;
    *(float4 *)to = make_float4(sums[0], sums[1], sums[2], sums[3]);
    *(float4 *)(to + 4) = make_float4(sums[4], sums[5], sums[6], sums[7]);
}
#endif

#endif
