/* Shared by the adjoints of a chunk, whatever its decay is: the panels that they read, products
 * with rows of a tile, and the gradients of q, k and x on their way out. */
#ifndef LINATTN_CUDA_ADJOINT_ROWS_CUH
#define LINATTN_CUDA_ADJOINT_ROWS_CUH

#include "recompute.cuh"

enum { INTRA_THREADS = 256, INTRA_GROUP = INTRA_THREADS / 2, INTRA_STAGES = 2 };

/* The place of the gradients of q, k and x. It is the array of the caller (direct) if two things
 * hold. A block adds up all value heads that share them. q and k were used as given, or this kernel
 * undoes their l2 norm (`norms`) or elu + 1 (`elu`). Otherwise the place is a partial per value
 * head, for `reduce_heads`. da is a number per token if there is a gate per head, or if several
 * blocks have the keys of a chunk. Otherwise it is NULL, and the gradient goes to the array of the
 * gate. */
struct intra_flags {
    bool direct_q, direct_k; /* k: and x, and y */
    bool elu;
    as_given given;
    float *dq, *dk, *dx, *dy; /* [HV][B T][kp] */
    float *da;                /* [parts of the keys][HV][B T] */
    float *dbonus;            /* [chunk slots][HV][KP]; NULL without a bonus */
    const float
        *norms; /* factors of q and k, [2][B T H], where the last kernel has to undo a norm */
    int kp;
    /* normalised: the denominators times the scale, [HV][B T], and the sum of the keys before each
     * chunk, [chunk slots][HV][KP]. dz, of that shape: the sum of d_den q of each chunk. */
    const float *den, *z;
    float *dz;
    /* The last kernel of scalar decays on Hopper. `boxes`: the copy engine can store dq, dk and dx.
     * members: the value heads that a block takes one after another, and whose dq, dk and dx it adds
     * up in `partials`. */
    bool boxes;
    int members;
    float4 *partials;
};

/* A panel of value columns. */
template <int KP, la_rule RULE> struct intra_panel {
    char U[PANEL_BYTES], dO[PANEL_BYTES]; /* U: E, or V */
    char Z[la_predicts(RULE) ? PANEL_BYTES : 16];
    alignas(RULE == LA_DPLR ? 1024 : 16) char p[RULE == LA_DPLR ? PANEL_BYTES : 16]; /* - p */
    alignas(1024) char S[tile_bytes(KP)], dS[tile_bytes(KP)];
};

/* Where a thread is, in two groups of four warps. Asked for anew in each part of a chunk: addresses
 * that follow from it would otherwise be kept from chunk to chunk. */
struct intra_seat {
    bool first_group;
    int lane, row0;     /* the 16 rows of this warp */
    int top, low, pair; /* of sums: two rows, and columns `pair`, + 1 */
};

__device__ __forceinline__ intra_seat own_intra_seat()
{
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    /* shows the compiler that all lanes have the same value */
    const int warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
    const int row0 = warp % 4 * 16, top = row0 + lane / 4;
    return {warp < 4, lane, row0, top, top + 8, lane % 4 * 2};
}

/* Sums over the columns of x [16 rows][8 N] times rows row.. of a tile, for the two rows of this
 * thread. */
template <int N>
__device__ __forceinline__ float2 dot_rows(const float (&x)[N][4], const char *tile, int row)
{
    const int lane = threadIdx.x % 32;
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int m = 0; m < N; m++) {
        const int at = element_at(row + lane / 4, m * 8 + lane % 4 * 2);
        const float2 y = unpack(*(const uint32_t *)(tile + at));
        const float2 z = unpack(*(const uint32_t *)(tile + at + 8 * 128));
        sum.x += x[m][0] * y.x + x[m][1] * y.y;
        sum.y += x[m][2] * z.x + x[m][3] * z.y;
    }
    return make_float2(quad_sum(sum.x), quad_sum(sum.y));
}

/* The same rows as operands, which lie in a thread as its sums do. */
template <int N> __device__ __forceinline__ void load_rows(left (&to)[N], const char *tile, int row)
{
#pragma unroll
    for (int j = 0; j < N; j++) to[j] = load_left(address_of(tile), row, j * 16);
}

template <int N>
__device__ __forceinline__ float2 dot_rows(const float (&x)[N][4], const left (&rows)[N / 2])
{
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int m = 0; m < N; m++) {
        const float2 y = unpack(rows[m / 2].x[m % 2 * 2]), z = unpack(rows[m / 2].x[m % 2 * 2 + 1]);
        sum.x += x[m][0] * y.x + x[m][1] * y.y;
        sum.y += x[m][2] * z.x + x[m][3] * z.y;
    }
    return make_float2(quad_sum(sum.x), quad_sum(sum.y));
}

template <int N> __device__ __forceinline__ void scale_rows(float (&x)[N][4], float top, float low)
{
#pragma unroll
    for (int m = 0; m < N; m++) {
        x[m][0] *= top;
        x[m][1] *= top;
        x[m][2] *= low;
        x[m][3] *= low;
    }
}

/* Sums of a warp, which are gradients of normed rows, become those of the rows before the norm. The
 * tile has the normed rows y = f x. `factors` has f for each of the n tokens of the chunk. */
template <int N>
__device__ __forceinline__ void undo_norm(float (&x)[N][4], const char *tile, int row, int n,
                                          const float *factors, int apart)
{
    const int lane = threadIdx.x % 32, top = row + lane / 4, low = top + 8;
    const float2 along = dot_rows(x, tile, row);
    const float f = top < n ? factors[(int64_t)top * apart] : 0;
    const float g = low < n ? factors[(int64_t)low * apart] : 0;
#pragma unroll
    for (int m = 0; m < N; m++) {
        const int at = element_at(top, m * 8 + lane % 4 * 2);
        const float2 y = unpack(*(const uint32_t *)(tile + at));
        const float2 z = unpack(*(const uint32_t *)(tile + at + 8 * 128));
        x[m][0] = l2norm_gradient(x[m][0], y.x, along.x, f);
        x[m][1] = l2norm_gradient(x[m][1], y.y, along.x, f);
        x[m][2] = l2norm_gradient(x[m][2], z.x, along.y, g);
        x[m][3] = l2norm_gradient(x[m][3], z.y, along.y, g);
    }
}

/* Was y = elu(x) + 1, whose slope is 1 above x = 0 and y below. The tile has y. */
template <int N>
__device__ __forceinline__ void undo_elu(float (&x)[N][4], const char *tile, int row)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < N; m++) {
        const int at = element_at(row + lane / 4, m * 8 + lane % 4 * 2);
        const float2 y = unpack(*(const uint32_t *)(tile + at));
        const float2 z = unpack(*(const uint32_t *)(tile + at + 8 * 128));
        const float slopes[] = {y.x, y.y, z.x, z.y};
#pragma unroll
        for (int e = 0; e < 4; e++) x[m][e] *= slopes[e] > 1 ? 1 : slopes[e];
    }
}

/* Store rows of dq or dk from the sums of a warp: to the rows of the caller, or in float32 to the
 * partial of a value head, from `first_key` on. */
template <int N>
__device__ __forceinline__ void store_rows(const call &c, const unit &u, const view &to,
                                           float *partial, int kp, int t, int n, int row,
                                           const float (&x)[N][4], int first_key = 0)
{
    const int lane = threadIdx.x % 32, pair = first_key + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + lane / 4 + half * 8;
        if (i >= n) continue;
        if (partial) {
            float *part = partial + ((int64_t)u.b * c.T + t + i) * kp + pair;
#pragma unroll
            for (int m = 0; m < N; m++)
                if (m * 8 + pair < kp)
                    *(float2 *)(part + m * 8) = make_float2(x[m][half * 2], x[m][half * 2 + 1]);
            continue;
        }
        element *own = (element *)at(to, u.b, t + i, u.h) + pair;
        if (c.K % (N * 8) == 0) {
#pragma unroll
            for (int m = 0; m < N; m++)
                *(uint32_t *)(own + m * 8) = pack(x[m][half * 2], x[m][half * 2 + 1]);
            continue;
        }
#pragma unroll
        for (int m = 0; m < N; m++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (m * 8 + pair + e < c.K) own[m * 8 + e] = element_of(x[m][half * 2 + e]);
    }
}

/* The bytes that the copy engine counts for a panel. */
template <int KP, la_rule RULE>
constexpr int panel_bytes = (RULE == LA_DPLR    ? 4
                             : RULE == LA_DELTA ? 3
                                                : 2) *
                                PANEL_BYTES +
                            2 * tile_bytes(KP);

/* Fetch panel i of a chunk; its number among all panels is `number`. The keys of S and dS begin at
 * `first_key`. One thread asks the copy engine, which counts panel_bytes at the barrier; or all
 * threads copy. */
template <int KP, la_rule RULE>
__device__ __forceinline__ void
fetch_panel(const call &c, const gradients &d, const backward_maps &maps, const kept &f,
            const unit &u, int t, int n, int64_t number, int i, intra_panel<KP, RULE> &to,
            const uint64_t *full, int first_key = 0, int all_keys = KP)
{
    const int64_t states = number * tile_bytes(all_keys) + first_key / PANEL * PANEL_BYTES;
#if HAS_WARP_GROUPS
    const uint32_t barrier = address_of(full);
    if (la_predicts(RULE)) {
        engine_copy(address_of(RULE == LA_DPLR ? to.p : to.U), f.E + number * PANEL_BYTES,
                    PANEL_BYTES, barrier);
        engine_copy(address_of(to.Z), f.Z + number * PANEL_BYTES, PANEL_BYTES, barrier);
    }
    if (RULE != LA_DELTA)
        engine_copy_box(address_of(to.U), &maps.v, i * PANEL, u.hv, t, u.b, barrier);
    engine_copy_box(address_of(to.dO), &maps.d_o, i * PANEL, u.hv, t, u.b, barrier);
    engine_copy(address_of(to.S), f.states + states, tile_bytes(KP), barrier);
    engine_copy(address_of(to.dS), f.d_states + states, tile_bytes(KP), barrier);
#else
    if (la_predicts(RULE)) {
        copy_bytes(address_of(RULE == LA_DPLR ? to.p : to.U), f.E + number * PANEL_BYTES,
                   PANEL_BYTES);
        copy_bytes(address_of(to.Z), f.Z + number * PANEL_BYTES, PANEL_BYTES);
    }
    if (RULE != LA_DELTA)
        copy_rows<PANEL>(c.x[LA_V], c.V, u.b, t, n, u.hv, address_of(to.U), i * PANEL);
    copy_rows<PANEL>(d[LA_DO], c.V, u.b, t, n, u.hv, address_of(to.dO), i * PANEL);
    copy_bytes(address_of(to.S), f.states + states, tile_bytes(KP));
    copy_bytes(address_of(to.dS), f.d_states + states, tile_bytes(KP));
    copies_end_group();
#endif
}

/* Wait for a panel, whose copies the barrier `full` counts. Of its chunk n tokens exist. A box may
 * reach into the next sequence, whose NaN must not come along: there are zeros behind the last
 * token. All threads of the block call this. */
template <la_rule RULE, int THREADS, int KP>
__device__ __forceinline__ void wait_for_panel(intra_panel<KP, RULE> &x, const uint64_t *full,
                                               int parity, int n)
{
#if HAS_WARP_GROUPS
    barrier_wait(address_of(full), parity);
    if (n < C) {
        for (int j = threadIdx.x; j < (C - n) * 8; j += THREADS) {
            const int at = piece_at(n + j / 8, j % 8);
            if (RULE != LA_DELTA) *(uint4 *)(x.U + at) = make_uint4(0, 0, 0, 0);
            *(uint4 *)(x.dO + at) = make_uint4(0, 0, 0, 0);
        }
        stores_before_copies();
        __syncthreads();
    }
#else
    (void)x, (void)full, (void)parity, (void)n;
    copies_wait<0>();
    __syncthreads();
#endif
}

#endif
