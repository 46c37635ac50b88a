/* Shared by the launches of the forward pass: the traits of a device, the plans that follow from
 * them, and copies of arrays that the copy engine cannot take. */
#ifndef LINATTN_CUDA_FORWARD_LAUNCH_CUH
#define LINATTN_CUDA_FORWARD_LAUNCH_CUH

#include "chunk_carry.cuh"

/* The traits of the current device and of its code, from which the splits below follow. */
struct device_traits {
    int processors;
    int room; /* shared memory of a block, in bytes */
    /* the number of warps is a multiple of this: tensor cores of Hopper work for four at once */
    int warp_step;
    int producers; /* warps that only fetch */
};

static cudaError_t traits_of_device(const void *kernel, device_traits *d)
{
    int device;
    cudaFuncAttributes code;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&d->processors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = most_shared_memory(device, &d->room);
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
        cudaGetLastError(); /* this build has code for other devices only */
        return cudaErrorNotSupported;
    }
    if (error != cudaSuccess) return error;
    const bool hopper = code.maxThreadsPerBlock > MOST_WARPS * 32; /* this is the code for Hopper */
    d->warp_step = hopper ? 4 : 1;
    d->producers = hopper ? PRODUCERS : 0;
    return cudaSuccess;
}

/* Can rows of x be fetched in pieces of 16 bytes? On Hopper the copy engine does it, by the map. */
static bool can_fetch(const call &c, const device_traits &d, const view &x, int heads, int columns,
                      CUtensorMap *map)
{
    return map_of(c, x, heads, columns, d.producers ? map : NULL);
}

/* Has a stage of chunks_forward the gates of v? Only the copy engine fetches them. */
static bool has_gates(const call &c, const device_traits &d)
{
    return c.x[LA_W].data && d.producers;
}

/* The chunks of a sequence, of packed ones on average. */
static int64_t chunks_of_sequence(const call &c)
{
    return div_up(c.x[LA_CU].data ? div_up(c.T, max(c.N, 1)) : c.T, C);
}

/* The number of segments of each sequence. There are as many as fill the device with blocks of four
 * warps, provided that a segment has eight chunks to pay for its launches. With the delta rule the
 * ends of the segments cost more than the pass itself (2 of 2.6 parts: K more columns), so that
 * fewer than four segments do not pay. */
static int segments_for(const call &c, const device_traits &d, bool delta)
{
    const int64_t blocks = max((int64_t)c.N * c.HV * ((c.V + 63) / 64), (int64_t)1);
    const int64_t chunks = (c.x[LA_CU].data ? c.T / max(c.N, 1) : c.T) / C;
    if (!c.causal) return 1;
    const int64_t count = min(min(d.processors / blocks, chunks / 8), (int64_t)32);
    return count < (delta ? 4 : 2) ? 1 : (int)count;
}

/* The number of slices of 16 value columns per block of chunks_forward. A slice belongs to a warp,
 * or to two. All warps of a block read the same tiles, so a block of many slices saves traffic, and
 * blocks of few slices fill the device when there are few heads. The choice minimizes the number of
 * rounds times the work per round. A round is as many blocks as fit at once. The work of a
 * multiprocessor has a fixed part (the chain of products) and a part proportional to its warps.
 * Returns 0 if even one slice does not fit. */
template <typename part>
static int width_of_blocks(const call &c, const device_traits &d, int64_t heads, int slices)
{
    int best = 0;
    double least = 0;
    const bool with_x = c.x[LA_X].data, with_w = has_gates(c, d);
    /* Without producer warps, the next chunk should have a stage while the consumers work on this
     * one. Where not even one slice has room for two, one stage has to do. */
    const auto room_of = [&](int stages, int width) {
        return d.room /
               (stages * part::bytes(width, with_x, with_w) + part::exchanged(width) + 1024);
    };
    const int stages = d.producers || room_of(2, d.warp_step) == 0 ? 1 : 2;
    for (int width = d.warp_step; width * part::halves <= MOST_WARPS; width *= 2) {
        const int warps = width * part::halves;
        const int64_t blocks = heads * ((slices + width - 1) / width);
        const int64_t fit =
            min(room_of(stages, width), d.producers ? 1 : MOST_WARPS / warps); /* by registers */
        if (fit == 0) break;
        const int64_t rounds = (blocks + d.processors * fit - 1) / (d.processors * fit);
        const int64_t each = (blocks + d.processors - 1) / d.processors;
        const double cost = (double)rounds * (1 + 0.15 * (double)(warps * min(each, fit)));
        if (best == 0 || cost < least) {
            least = cost;
            best = width;
        }
    }
    return best;
}

/* x [B,T,heads,columns], row after row, to rows `padded` numbers apart. */
template <typename = element>
__global__ void copy_dense(const __grid_constant__ view x, int T, int heads, int columns,
                           int padded, int64_t count, char *to)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / padded, column = i % padded, t = row / heads;
        if (column < columns)
            ((uint16_t *)to)[i] = *(const uint16_t *)at(x, t / T, t % T, row % heads, column);
    }
}

/* The bytes of such a copy of an array. */
static int64_t dense_bytes(const call &c, int heads, int columns)
{
    return (int64_t)c.B * c.T * heads * ((columns + PIECE - 1) / PIECE * PIECE) * 2;
}

/* Describe x to the copy engine. If that cannot take it, it becomes a view of a copy that it can, so
 * that the layout of an array changes no bit. *held is then to be freed. */
template <typename = element>
static cudaError_t map_of_any(const call &c, view *x, int heads, int columns, CUtensorMap *map,
                              void **held, cudaMemPool_t pool, cudaStream_t stream)
{
    if (map_of(c, *x, heads, columns, map)) return cudaSuccess;
    const int padded = (columns + PIECE - 1) / PIECE * PIECE;
    const int64_t bytes = dense_bytes(c, heads, columns), blocks = (bytes / 2 + 1023) / 1024;
    cudaError_t error = cudaMallocFromPoolAsync(held, bytes, pool, stream);
    if (error == cudaSuccess)
        error = launch(copy_dense<>, min(blocks, (int64_t)1 << 16), 256, 0, stream, *x, c.T, heads,
                       columns, padded, bytes / 2, (char *)*held);
    const int64_t row = (int64_t)heads * padded;
    *x = {(char *)*held, {c.T * row, row, padded, 1}, x->dtype};
    if (error != cudaSuccess) return error;
    return map_of(c, *x, heads, columns, map) ? cudaSuccess : cudaErrorNotSupported;
}

/* Run a kernel with descriptions of q, k and v, of copies of them where that is needed. */
template <typename F>
static cudaError_t with_maps(call &c, cudaMemPool_t pool, cudaStream_t stream, F run)
{
    const struct {
        la_name name;
        int heads, columns;
    } arrays[] = {{LA_Q, c.H, c.K}, {LA_K, c.H, c.K}, {LA_V, c.HV, c.V}};
    tensor_maps maps = {};
    CUtensorMap *const to[] = {&maps.q, &maps.k, &maps.v};
    void *held[3] = {};
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < 3 && error == cudaSuccess; i++)
        error = map_of_any(c, &c.x[arrays[i].name], arrays[i].heads, arrays[i].columns, to[i],
                           held + i, pool, stream);
    if (error == cudaSuccess) error = run(maps);
    for (void *x : held) {
        const cudaError_t freed = x ? cudaFreeAsync(x, stream) : cudaSuccess;
        if (error == cudaSuccess) error = freed;
    }
    return error;
}

/* Can rows of o be stored in pieces of 16 bytes? */
static bool o_in_pieces(const call &c)
{
    const view &o = c.x[LA_O];
    return (uintptr_t)o.data % 16 == 0 && (o.stride[0] | o.stride[1] | o.stride[2]) % 8 == 0;
}

#endif
