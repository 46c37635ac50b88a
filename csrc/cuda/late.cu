/* Late gradients (../late.h): dv += dS' phi(k), and dk += phi'(k) (dS v + dz), in bfloat16.
 *
 * A block has a head and every `parts`th tile of 64 tokens. dS stays in its shared memory. Each number
 * of dS is a sum of two bfloat16 numbers there: dS v and dz are of either sign, and their sum may be
 * much smaller than each of them. A warp has 16 tokens. Its products with dS go back to its rows by way of
 * shared memory, in the place of k and v, so that a row of dk or dv is read and written as a whole.
 *
 * Floors for 2^18 tokens of 32 heads of 128: six arrays of 2.1 GB, 3.1 ms at 4.2 TB/s; three products,
 * 0.8 TFLOP or 1.6 ms. Two blocks share a processor, so that one loads while the other multiplies.
 * The rows of the next tile are on their way to the L2 cache meanwhile.
 *
 * Registers: 2 sums of W / 8 x 4 floats. Shared memory: late_room. */
#include "kernels.cuh"

#include "copy.cuh"
#include "load.cuh"
#include "products.cuh"
#include "rooms.cuh"

enum { MOST_TOKENS = 1 << 30 }; /* a block may look one stride past them */
enum { LATE_THREADS = 128, LATE_ROWS = 16, BLOCKS_OF_LATE = 2 };

struct late_call {
    view k, v, dk, dv, dS, dz;
    int T, H, K, V, parts;
    la_map map;
    float eps;
};

/* W: K and V, or the next power of two */
template <int W> struct __align__(1024) late_room {
    char high[W / ROWS][tile_bytes(W)], low[W / ROWS][tile_bytes(W)]; /* dS, 64 keys each */
    char rows[2][tile_bytes(W)];                                      /* k and v; then sums */
    float dz[W];
};
static_assert(BLOCKS_OF_LATE * sizeof(late_room<128>) <= 227 * 1024,
              "two blocks share a processor");
static_assert(2 * tile_bytes(128) == ROWS * 128 * (int)sizeof(float),
              "sums take the place of rows");

/* Where four columns of a row of sums lie: an exclusive or spreads the rows over all banks. */
template <int W> __device__ __forceinline__ int place_of_four(int row, int four)
{
    return row * W * (int)sizeof(float) + ((four ^ row % 8) << 4);
}

/* The tile of k or v at token t, zeros where it has no row or no column. */
template <int W>
__device__ __forceinline__ void load_rows(const view &x, int b, int h, int t, int rows, int columns,
                                          char *tile)
{
    constexpr int PIECES = W / 8;
    const uint32_t to = address_of(tile);
#pragma unroll
    for (int i = 0; i < ROWS * PIECES; i += LATE_THREADS) {
        const int row = (i + (int)threadIdx.x) / PIECES, piece = (int)threadIdx.x % PIECES;
        const bool there = row < rows && piece * 8 < columns;
        copy_async(to + piece_at(row, piece),
                   at(x, b, t + (there ? row : 0), h, there ? piece * 8 : 0), there);
    }
}

__device__ __forceinline__ uint32_t added(uint32_t two, float x, float y)
{
    const float2 old = unpack(two);
    return pack(old.x + x, old.y + y);
}

/* Add this warp's sums to its rows of dk or dv, from token t on. */
template <int W>
__device__ __forceinline__ void add_to_rows(const float (&x)[W / 8][4], char *sums, const view &to,
                                            int b, int h, int t, int rows, int columns)
{
    constexpr int PIECES = W / 8;
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < W / 8; j++)
#pragma unroll
        for (int low = 0; low < 2; low++)
            *(float2 *)(sums + place_of_four<W>(row + 8 * low, 2 * j + column / 4) +
                        column % 4 * 4) = make_float2(x[j][2 * low], x[j][2 * low + 1]);
    __syncwarp();
    constexpr int EACH = LATE_ROWS * PIECES / 32; /* pieces of a lane, STEP rows apart */
    constexpr int STEP = 32 / PIECES;
    const int own = lane / PIECES, piece = lane % PIECES;
    const bool there = piece * 8 < columns;
    char *const place = at(to, b, t + own, h, there ? piece * 8 : 0);
    const int64_t apart = STEP * to.stride[1] * 2;
    uint4 old[EACH]; /* all are on their way before one is stored */
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (there && own + i * STEP < rows) old[i] = *(const uint4 *)(place + i * apart);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int of_row = own + i * STEP;
        if (!there || of_row >= rows) continue;
        const float4 x = *(const float4 *)(sums + place_of_four<W>(of_row, 2 * piece));
        const float4 y = *(const float4 *)(sums + place_of_four<W>(of_row, 2 * piece + 1));
        *(uint4 *)(place + i * apart) =
            make_uint4(added(old[i].x, x.x, x.y), added(old[i].y, x.z, x.w),
                       added(old[i].z, y.x, y.y), added(old[i].w, y.z, y.w));
    }
    __syncwarp();
}

/* Begin to bring the rows of a later tile to the cache of level 2. */
template <int W>
__device__ __forceinline__ void look_ahead(const view &x, int b, int h, int t, int rows,
                                           int columns)
{
    constexpr int LINES = W / 64; /* of a row, if it begins with one */
#pragma unroll
    for (int i = 0; i < ROWS * LINES; i += LATE_THREADS) {
        const int row = (i + (int)threadIdx.x) / LINES, line = (int)threadIdx.x % LINES;
        if (row < rows && line * 64 < columns)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(at(x, b, t + row, h) + line * 128));
    }
}

template <int W>
static __global__
__launch_bounds__(LATE_THREADS, BLOCKS_OF_LATE) void add_late(const __grid_constant__ late_call c)
{
    extern __shared__ __align__(1024) char late_shared[];
    late_room<W> &room = *(late_room<W> *)late_shared;
    const int part = blockIdx.x % c.parts, head = blockIdx.x / c.parts;
    const int h = head % c.H, b = head / c.H, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < W * W / 2; i += LATE_THREADS) {
        const int key = i / (W / 2), column = i % (W / 2) * 2;
        const bool there = key < c.K && column < c.V;
        const float x = there ? *(const float *)at(c.dS, b, h, key, column) : 0;
        const float y = there ? *(const float *)at(c.dS, b, h, key, column + 1) : 0;
        const uint32_t high = pack(x, y);
        const float2 taken = unpack(high); /* an infinity leaves no rest */
        *(uint32_t *)(room.high[key / ROWS] + element_at(key % ROWS, column)) = high;
        *(uint32_t *)(room.low[key / ROWS] + element_at(key % ROWS, column)) =
            pack(isinf(taken.x) ? 0 : x - taken.x, isinf(taken.y) ? 0 : y - taken.y);
    }
    for (int i = threadIdx.x; i < W; i += LATE_THREADS)
        room.dz[i] = i < c.K ? *(const float *)at(c.dz, b, h, i) : 0;

    const uint32_t k_tile = address_of(room.rows[0]), v_tile = address_of(room.rows[1]);
    const int first_row = warp * LATE_ROWS;
    char *const sums = room.rows[0] + first_row * W * (int)sizeof(float);
#pragma unroll 1
    for (int t = part * ROWS; t < c.T; t += c.parts * ROWS) {
        const int n = min((int)ROWS, c.T - t);
        __syncthreads(); /* the sums before have left */
        load_rows<W>(c.k, b, h, t, n, c.K, room.rows[0]);
        load_rows<W>(c.v, b, h, t, n, c.V, room.rows[1]);
        copies_end_group();
        const int later = t + c.parts * ROWS, rows_later = min((int)ROWS, c.T - later);
        look_ahead<W>(c.k, b, h, later, rows_later, c.K);
        look_ahead<W>(c.v, b, h, later, rows_later, c.V);
        look_ahead<W>(c.dk, b, h, later, rows_later, c.K);
        look_ahead<W>(c.dv, b, h, later, rows_later, c.V);
        copies_wait<0>();
        __syncthreads();
        float of_keys[W / 8][4] = {}, of_values[W / 8][4] = {};
#pragma unroll 1
        for (int i = 0; i < W; i += 16) { /* of the values: dS v */
            const left v = load_left(v_tile, first_row, i);
#pragma unroll
            for (int m = 0; m < W / 16; m++) {
                float(&x)[4] = of_keys[2 * m], (&y)[4] = of_keys[2 * m + 1];
                const uint32_t low = lane_with_rows(address_of(room.low[m / 4]));
                const uint32_t high = lane_with_rows(address_of(room.high[m / 4]));
                multiply(x, y, v, load_right_of_rows(low, m % 4 * 16, i));
                multiply(x, y, v, load_right_of_rows(high, m % 4 * 16, i));
            }
        }
#pragma unroll 1
        for (int i = 0; i < W; i += 16) { /* of the keys: dS' phi(k) */
            left k = load_left(k_tile, first_row, i);
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float2 x = unpack(k.x[e]);
                k.x[e] = pack(apply_map(x.x, c.map, c.eps), apply_map(x.y, c.map, c.eps));
            }
            const uint32_t columns = lane_with_columns(address_of(room.high[i / ROWS]));
#pragma unroll
            for (int m = 0; m < W / 16; m++)
                multiply(of_values[2 * m], of_values[2 * m + 1], k,
                         load_right(columns, i % ROWS, m * 16));
        }
#pragma unroll
        for (int j = 0; j < W / 8; j++) { /* was phi(k) */
            const int column = j * 8 + lane % 4 * 2;
            const float2 dz = *(const float2 *)(room.dz + column);
#pragma unroll
            for (int low = 0; low < 2; low++) {
                const int row = first_row + lane / 4 + 8 * low;
                const float2 k =
                    unpack(*(const uint32_t *)(room.rows[0] + element_at(row, column)));
                float *const own = &of_keys[j][2 * low];
                own[0] = map_slope(k.x, c.map) * (own[0] + dz.x);
                own[1] = map_slope(k.y, c.map) * (own[1] + dz.y);
            }
        }
        __syncthreads(); /* no warp needs k and v */
        add_to_rows<W>(of_keys, sums, c.dk, b, h, t + first_row, n - first_row, c.K);
        add_to_rows<W>(of_values, sums, c.dv, b, h, t + first_row, n - first_row, c.V);
    }
}

template <int W> static cudaError_t launch_late(late_call c, int64_t heads, cudaStream_t stream)
{
    int device, processors = 0, room = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = most_shared_memory(device, &room);
    if (error != cudaSuccess) return error;
    if ((int)sizeof(late_room<W>) > room) return cudaErrorNotSupported;
    const int64_t seats = BLOCKS_OF_LATE * processors;
    c.parts = (int)max((int64_t)1, min(seats / max(heads, (int64_t)1), div_up(c.T, ROWS)));
    return launch(add_late<W>, heads * c.parts, LATE_THREADS, sizeof(late_room<W>), stream, c);
}

cudaError_t run_late(const la_late &j, cudaStream_t stream)
{
    const la_array &k = *j.k, &v = *j.v;
    late_call c = {};
    c.k = view_of(j.k), c.v = view_of(j.v), c.dk = view_of(j.dk), c.dv = view_of(j.dv);
    c.dS = view_of(j.dS), c.dz = view_of(j.dz);
    c.map = j.map;
    c.eps = (float)j.map_eps;
    const int64_t heads = k.shape[0] * k.shape[2], K = k.shape[3], V = v.shape[3];
    if (k.shape[2] != v.shape[2] || k.shape[1] > MOST_TOKENS || heads > INT32_MAX || K > 128 ||
        V > 128)
        return cudaErrorNotSupported;
    for (const view &x : {c.k, c.dk})
        if (x.dtype != LA_BF16 || !lies_in(8, x, 3, K)) return cudaErrorNotSupported;
    for (const view &x : {c.v, c.dv})
        if (x.dtype != LA_BF16 || !lies_in(8, x, 3, V)) return cudaErrorNotSupported;
    c.T = (int)k.shape[1];
    c.H = (int)k.shape[2];
    c.K = (int)K;
    c.V = (int)V;
    if (!c.T) return cudaSuccess;
    return max(K, V) > 64 ? launch_late<128>(c, heads, stream) : launch_late<64>(c, heads, stream);
}
