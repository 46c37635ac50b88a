/* The chunk form on tensor cores: two kernels. Arrays are bf16; in the files named for them,
 * float16 or float32.
 *
 * `prepare` computes everything that depends on one chunk of C = 64 tokens alone, for all chunks
 * side by side. These are the scores P = tril(Q K' . G) and, for the delta rule, the inverse
 * A = (I + strict(diag(b) K K' . G))^-1 diag(b). G_ij is the decay from after token j through token
 * i. Then `chunks_forward` goes from chunk to chunk with the state in registers:
 *
 *     solve  W = V - k^ S      U = A W       (additive rule: U = V)
 *     read   O = q^ S + P U                  (times scale)
 *     carry  S <- diag(a) S + k~' U
 *
 * where q^ and k^ are rows of q and k times the decay from the start of the chunk, k~ is k times
 * the decay to its end, and a is the decay of the whole chunk. Where the caller gave x, it stands
 * in the place of k in k^ and of the left k in A, times k if it is a factor. Where the caller gave
 * gates of values, V is multiplied by them. A call of the additive rule may have a bonus. Then q^
 * and P have the decays before a token's own, and P_ii is q_i . (bonus k_i). A scalar decay scales
 * rows of the products instead. Decays are multiplied, never summed as logarithms
 * (docs/decisions/0005). No exponent is ever positive, and a decay of zero is a zero.
 *
 * `chunks_forward` computes everything transposed: a warp owns 16 value columns, as the 16 rows of
 * its left operands. The accumulators of one product are then the left operand of the next. The
 * state stays in registers, both as sums and as an operand. A warp waits for the tiles and, with
 * K > 128, for the warp with the other half of its keys; otherwise no warp waits for another.
 * `scale` is part of P and q^, and of the factors of the rows of q^ S.
 *
 * On Hopper many calls of the additive rule and of the delta rule take one kernel instead:
 * additive.cuh, delta.cuh, delta_apart.cuh. Very few heads take those of delta_ends.cuh. The rows of
 * DPLR are those of prepare_dplr.cuh. */
#include "segments.cuh"
#include "additive.cuh"
#include "delta.cuh"
#include "delta_apart.cuh"
#include "delta_ends.cuh"
#include "rows.cuh"
#include "denominators.cuh"

/* ---- the two launches, and their scratch ---- */

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

/* The number of segments of each sequence. There are as many as fill the device with blocks of four
 * warps, provided that a segment has eight chunks to pay for its launches. With the delta rule the
 * ends of the segments cost more than the pass itself (2 of 2.6 parts: K more columns), so that
 * fewer than four segments do not pay. */
static int segments_for(const call &c, const device_traits &d, bool delta)
{
    const int64_t blocks = (int64_t)c.N * c.HV * ((c.V + 63) / 64);
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

template <int KP, la_decay DECAY, la_rule RULE, form FORM>
static cudaError_t launch_chunks_forward(const call &c, const chunks &w, const tensor_maps &maps,
                                         forward_flags f, const segments &g, const device_traits &d,
                                         int slices, int width, cudaStream_t stream)
{
    typedef stage<KP, DECAY, RULE> part;
    const int tiles = (slices + width - 1) / width, exchanged = part::exchanged(width);
    f.stage_bytes = part::bytes(width, c.x[LA_X].data, has_gates(c, d));
    /* without producers a warp is one chunk ahead, and a second block has more use for the room */
    const int most = d.producers ? (int)MOST_STAGES : 2;
    f.stages = min((d.room - exchanged - 1024) / f.stage_bytes, most);
    const int bytes = f.stages * f.stage_bytes + exchanged;
    const auto kernel = chunks_forward<KP, DECAY, RULE, FORM>;
    return launch(kernel, (int64_t)c.N * c.HV * g.count * tiles,
                  (width * part::halves + d.producers) * 32, bytes, stream, c, w, maps, f, g,
                  tiles);
}

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_segments(const call &c, const chunks &w, const tensor_maps &maps,
                                   const forward_flags &f, const device_traits &d,
                                   cudaMemPool_t pool, cudaStream_t stream)
{
    typedef stage<KP, DECAY, RULE> part;
    const int slices = (c.V + 15) / 16;
    const int key_slices = la_predicts(RULE) ? key_slices_of<KP, DECAY>(c) : 0;
    segments g = {segments_for(c, d, la_predicts(RULE)), false, NULL, NULL, NULL};
    const int64_t heads = (int64_t)c.N * c.HV, units = heads * g.count;
    const int width = width_of_blocks<part>(c, d, units, slices);
    if constexpr (DECAY == LA_NONE && RULE == LA_ADDITIVE)
        if (!c.causal)
            return launch_chunks_forward<KP, DECAY, RULE, NONCAUSAL>(c, w, maps, f, g, d, slices,
                                                                     width, stream);
    if (g.count == 1)
        return launch_chunks_forward<KP, DECAY, RULE, CAUSAL>(c, w, maps, f, g, d, slices, width,
                                                              stream);

    const int ends_width = width_of_blocks<part>(c, d, units, slices + key_slices);
    const int64_t rows = (slices + key_slices + ends_width - 1) / ends_width * ends_width * 16;
    const int64_t ends = units * rows * KP, starts = units * slices * 16 * KP;
    cudaError_t error =
        cudaMallocFromPoolAsync((void **)&g.ends, (ends + starts) * 4, pool, stream);
    if (error != cudaSuccess) return error;
    float *const after_ends = g.ends + ends;
    error = launch_chunks_forward<KP, DECAY, RULE, SEGMENT_ENDS>(
        c, w, maps, f, g, d, slices + key_slices, ends_width, stream);
    g.starts = after_ends;
    if (error == cudaSuccess) error = launch_join<KP, DECAY, RULE>(c, w, g, (int)rows, stream);
    if (error == cudaSuccess)
        error = launch_chunks_forward<KP, DECAY, RULE, CAUSAL>(c, w, maps, f, g, d, slices, width,
                                                               stream);
    const cudaError_t freed = cudaFreeAsync(g.ends, stream);
    return error == cudaSuccess ? freed : error;
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

/* The additive rule in one kernel. A block has two walks and one group that scores, or one walk and
 * two such groups. The walks of a block share the scores, so that two take less than twice the time.
 * Returns cudaErrorNotSupported, with nothing done, where two kernels are needed. */
template <int KP, la_decay DECAY>
static cudaError_t launch_additive(call c, const device_traits &d, cudaMemPool_t pool,
                                   cudaStream_t stream)
{
    /* In float16 a mapped number may be too large for its tile. Its chunk would go token by token,
     * but z would be wrong for all later ones. */
    constexpr bool maps_tiles = DECAY == LA_NONE && !NARROW;
    const bool normalised = is_normalised(&c, DECAY, LA_ADDITIVE);
    const bool mapped = !rows_are_as_given(c) || normalised;
    if (!d.producers || !c.causal || (mapped && !maps_tiles) || segments_for(c, d, false) > 1)
        return cudaErrorNotSupported;
    const bool o_pieces = o_in_pieces(c);
    additive_flags best = {};
    double least = 0;
    for (int walks = 1; walks <= MOST_WALKS; walks++) {
        const int room = d.room - PLACE_OF_STAGES - (int)sizeof(meeting) -
                         (mapped ? (int)sizeof(mapped_room<KP>) : 0) - 1024;
        const int stages = min(room / fetched<KP>::bytes(walks), (int)MOST_FETCHED);
        const int tiles = (c.V + walks * PANEL - 1) / (walks * PANEL);
        const int64_t units = (int64_t)c.N * c.HV * tiles;
        const int64_t rounds = (units + d.processors - 1) / d.processors;
        const double cost = (double)rounds * (1 + 0.6 * walks);
        if (stages < 2 || units > INT32_MAX || (best.walks && cost >= least)) continue;
        least = cost;
        best = {o_pieces, walks, mapped ? 1 : 3 - walks, stages, tiles};
    }
    if (!best.walks) return cudaErrorNotSupported;
    /* A norm, or a map that is not elu + 1, takes longer than the walk of a chunk. map_rows shares
     * this among all processors, which is quicker where the tiles leave some without work. */
    if (mapped && !normalised && !has_usual_map<KP>(c) &&
        (int64_t)c.N * c.HV * best.tiles < d.processors)
        return cudaErrorNotSupported;

    return with_maps(c, pool, stream, [&](const tensor_maps &maps) {
        auto kernel = additive_forward<KP, DECAY, false>;
        if constexpr (maps_tiles)
            if (mapped) kernel = additive_forward<KP, DECAY, true>;
        return launch(kernel, min((int64_t)c.N * c.HV * best.tiles, (int64_t)d.processors),
                      (best.walks + best.scoring + 1) * GROUP,
                      PLACE_OF_STAGES + best.stages * fetched<KP>::bytes(best.walks), stream, c,
                      maps, best);
    });
}

/* Run a kernel of the delta rule with the tensor maps, and the factors of the l2 norm. */
template <typename F>
static cudaError_t with_norms(call &c, delta_flags f, cudaMemPool_t pool, cudaStream_t stream,
                              F run)
{
    float *norms = NULL;
    if (c.qk_l2norm) {
        const cudaError_t error = cudaMallocFromPoolAsync(
            (void **)&norms, 2 * (int64_t)c.B * c.T * c.H * sizeof *norms, pool, stream);
        if (error != cudaSuccess) return error;
    }
    const cudaError_t error = with_maps(c, pool, stream, [&](const tensor_maps &maps) {
        CUtensorMap to_o = {};
        f.o_boxes = map_of(c, c.x[LA_O], c.HV, c.V, &to_o);
        f.norms = norms;
        if (norms) {
            const cudaError_t error = launch_norms(c, norms, stream);
            if (error != cudaSuccess) return error;
        }
        return run(maps, to_o, f);
    });
    const cudaError_t freed = norms ? cudaFreeAsync(norms, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

/* Some blocks prepare and others walk. */
template <int KP, la_decay DECAY>
static cudaError_t launch_delta_apart(call &c, const delta_flags &f, const device_traits &d,
                                      int walks, cudaMemPool_t pool, cudaStream_t stream)
{
    const int64_t heads = (int64_t)c.N * c.HV;
    handed<KP> between = {};
    between.tiles = f.tiles;
    between.walks = walks;
    between.walkers = (int)heads * f.tiles;
    const int64_t ring = heads * HANDED * sizeof(scored<KP>),
                  counters = heads * (HANDED + 2 * f.tiles) * sizeof(counter);
    cudaError_t error =
        cudaMallocFromPoolAsync((void **)&between.chunks, ring + counters, pool, stream);
    if (error != cudaSuccess) return error;
    between.there = (counter *)(between.chunks + heads * HANDED);
    between.taken = between.there + heads * HANDED;
    error = cudaMemsetAsync(between.there, 0, counters, stream);
    if (error == cudaSuccess)
        error = with_norms(
            c, f, pool, stream,
            [&](const tensor_maps &maps, const CUtensorMap &to_o, const delta_flags &f) {
                return launch_together(delta_apart<KP, DECAY>, d.processors, APART_GROUPS * GROUP,
                                       bytes_apart<KP>, stream, c, maps, to_o, f, between,
                                       segments{1, false, NULL, NULL, NULL});
            });
    if (error == cudaErrorCooperativeLaunchTooLarge) { /* part of the device is for others */
        cudaGetLastError();
        error = cudaErrorNotSupported;
    }
    const cudaError_t freed = cudaFreeAsync(between.chunks, stream);
    return error == cudaSuccess ? freed : error;
}

/* The scratch of launch_delta_segments, in bytes. */
template <int KP> static int64_t bytes_of_segments(const call &c, int count)
{
    const int64_t prepared = chunk_slots_of(c, C) * c.HV * (int64_t)sizeof(scored<KP>);
    const int64_t rows = 2 * rows_of_ends(c.V) + rows_of_ends(c.K); /* of ends and of starts */
    return prepared + (int64_t)c.N * c.HV * count * (rows * KP * 4 + (int64_t)sizeof(int));
}

/* One launch prepares all chunks. Others walk each segment to its end, join the ends, and walk each
 * segment again from its true state. */
template <int KP, la_decay DECAY>
static cudaError_t launch_delta_segments(call &c, const delta_flags &f, const device_traits &d,
                                         int count, int walks, cudaMemPool_t pool,
                                         cudaStream_t stream)
{
    const int64_t heads = (int64_t)c.N * c.HV, chunks = chunk_slots_of(c, C) * c.HV;
    const int of_values = (int)div_up(c.V, MOST_WALKS * PANEL), identity = rows_of_ends(c.V);
    const int rows = identity + rows_of_ends(c.K);
    handed<KP> all = {};
    cudaError_t error = cudaMallocFromPoolAsync((void **)&all.chunks,
                                                bytes_of_segments<KP>(c, count), pool, stream);
    if (error != cudaSuccess) return error;
    segments g = {count, true, (float *)(all.chunks + chunks), NULL, NULL};
    float *const starts = g.ends + heads * count * rows * KP;
    g.vanished = (int *)(starts + heads * count * identity * KP);
    handed<KP> walked = all;
    walked.tiles = f.tiles;
    walked.walks = walks;
    walked.walkers = (int)(heads * count * f.tiles);
    error = with_norms(
        c, f, pool, stream,
        [&](const tensor_maps &maps, const CUtensorMap &to_o, const delta_flags &f) {
            cudaError_t error = launch(delta_apart<KP, DECAY>, d.processors, APART_GROUPS * GROUP,
                                       bytes_apart<KP>, stream, c, maps, to_o, f, all, g);
            if (error == cudaSuccess)
                error = launch(delta_ends<KP, DECAY>, heads * count * (of_values + 1),
                               (MOST_WALKS + 1) * GROUP, sizeof(ends_room<KP>), stream, c, maps,
                               all, g, of_values, identity, rows);
            g.starts = starts;
            if (error == cudaSuccess)
                error = launch_join<KP, DECAY, LA_DELTA>(c, {}, g, rows, stream);
            if (error == cudaSuccess)
                error = launch(delta_apart<KP, DECAY>, walked.walkers, APART_GROUPS * GROUP,
                               bytes_apart<KP>, stream, c, maps, to_o, f, walked, g);
            return error;
        });
    const cudaError_t freed = cudaFreeAsync(all.chunks, stream);
    return error == cudaSuccess ? freed : error;
}

template <int KP, la_decay DECAY, int WALKS>
static cudaError_t launch_delta_walks(call &c, delta_flags f, const device_traits &d,
                                      cudaMemPool_t pool, cudaStream_t stream)
{
    return with_norms(
        c, f, pool, stream,
        [&](const tensor_maps &maps, const CUtensorMap &to_o, const delta_flags &f) {
            auto kernel = delta_forward<KP, DECAY, WALKS, false>;
            if constexpr (DECAY == LA_TOKEN)
                if (f.norms) kernel = delta_forward<KP, DECAY, WALKS, true>;
            return launch(kernel, min((int64_t)c.N * c.HV * f.tiles, (int64_t)d.processors),
                          (WALKS + 2) * GROUP, sizeof(delta_room<KP, WALKS>), stream, c, maps, to_o,
                          f);
        });
}

/* A call without a decay, as one with a decay of 1. */
static cudaError_t launch_with_gates(call c, cudaMemPool_t pool, cudaStream_t stream)
{
    void *zero = NULL; /* the logarithm */
    cudaError_t error = cudaMallocFromPoolAsync(&zero, sizeof(float), pool, stream);
    if (error != cudaSuccess) return error;
    c.x[LA_G] = {(char *)zero, {0, 0, 0, 0}, LA_F32};
    c.gate = LA_LOG;
    error = cudaMemsetAsync(zero, 0, sizeof(float), stream);
    if (error == cudaSuccess)
        error = (NARROW ? chunk_token_f16 : chunk_token)[LA_DELTA](c, pool, stream);
    const cudaError_t freed = cudaFreeAsync(zero, stream);
    return error == cudaSuccess ? freed : error;
}

/* Times of the delta rule on an H200 in microseconds, for K = V = 128 where K is not said
 * (docs/decisions/0045 and 0053). A chunk of one kernel with one walk and with two; a chunk of
 * chunks_forward with one panel of value columns and with two; a chunk of a head in `prepare`; the
 * launches that one kernel saves. */
template <la_decay DECAY>
static constexpr double DELTA_CHUNK[MOST_WALKS] = {DECAY == LA_NONE ? 2.4 : 3.1,
                                                   DECAY == LA_NONE ? 2.8 : 3.5};
static constexpr double FORWARD_CHUNK[MOST_WALKS] = {1.7, 2.5}, PREPARED_CHUNK = 0.0168,
                        SAVED_LAUNCHES = 30;
/* A chunk of a head of q: the rows' l2 norm before two kernels, and in find_norms. */
static constexpr double NORMED_ROWS = NARROW ? 0.037 : 0.018, FOUND_NORMS = 0.009;
/* A chunk of a walk in a block that only walks, with one panel and with two; a chunk on a processor
 * that only prepares; the launch, and the way of the first chunk from block to block. */
template <int KP, la_decay DECAY>
static constexpr double APART_CHUNK[MOST_WALKS] = {
    KP == 64 ? DECAY == LA_NONE ? 0.93 : 0.97 : DECAY == LA_NONE ? 1.15 : 1.27,
    KP == 64 ? DECAY == LA_NONE ? 1.55 : 1.75 : DECAY == LA_NONE ? 1.9 : 2.1};
template <int KP> static constexpr double PREPARED_APART = KP == 64 ? 1.45 : 1.8;
static constexpr double APART_LAUNCH = 14;
/* Segments: their launches, and a chunk in three passes. */
static constexpr double SEGMENTS_LAUNCH = 82;
template <la_decay DECAY> static constexpr double SEGMENTS_CHUNK = DECAY == LA_NONE ? 3.9 : 4.8;
/* Segments of delta_ends.cuh: a chunk of a block of delta_ends, the launches, a step of join_maps,
 * and the bytes that go through memory in a microsecond. The other constants are those of blocks
 * apart. */
template <int KP> static constexpr double ENDS_CHUNK = KP == 64 ? 0.7 : 0.95;
static constexpr double ENDS_LAUNCH = 30, JOINED_SEGMENT = 2, MOVED = 3.2e6;

/* How many segments a head should have, and how many walks a block. */
struct segments_plan {
    int count, walks;
    double time; /* microseconds; 0: no plan */
};

template <int KP, la_decay DECAY>
static segments_plan plan_segments(const call &c, const device_traits &d, double chunks)
{
    enum { LEAST_CHUNKS = 8, MOST_SEGMENTS = 32 }; /* a segment of fewer has as much of launches */
    segments_plan best = {};
    const int64_t heads = (int64_t)c.N * c.HV;
    /* the least times of both walks, by what they read and write */
    const double keys = chunks * (double)c.N * c.H * tile_bytes(KP),
                 values = chunks * (double)heads * c.V * C * 2,
                 of_ends = (keys + values + chunks * (double)heads * tile_bytes(KP)) / MOVED,
                 of_walks = (2 * keys + 2 * values +
                             chunks * (double)heads * (double)sizeof(scored<KP>)) /
                            MOVED;
    if (NARROW || bytes_apart<KP> > d.room || (int)sizeof(ends_room<KP>) > d.room) return best;
    const auto rounds = [&](int64_t blocks) { return (double)div_up(blocks, d.processors); };
    for (int count = 2; count <= MOST_SEGMENTS && chunks / count >= LEAST_CHUNKS; count++) {
        if (bytes_of_segments<KP>(c, count) > MOST_SCRATCH) break;
        const int64_t of_values = div_up(c.V, MOST_WALKS * PANEL);
        /* with decays, as if all M were zero; launch_with_gates gives all tokens one of 1 */
        const view &gate = c.x[LA_G];
        const bool decays = DECAY == LA_TOKEN && (gate.stride[1] || gate.stride[2]);
        const int64_t of_identity = decays ? 0 : count - 2;
        const double each = chunks / count,
                     ends = rounds(heads * ((count - 1) * of_values + of_identity)) * each *
                            ENDS_CHUNK<KP>;
        for (int walks = 1; walks <= MOST_WALKS; walks++) {
            const double walked = rounds(heads * count * div_up(c.V, walks * PANEL)) * each *
                                  APART_CHUNK<KP, DECAY>[walks - 1],
                         time = chunks * (double)heads * PREPARED_APART<KP> / d.processors +
                                max(ends, of_ends) + max(walked, of_walks) + ENDS_LAUNCH +
                                count * JOINED_SEGMENT;
            if (best.count == 0 || time < best.time) best = {count, walks, time};
        }
    }
    return best;
}

/* The delta rule in one kernel, where that takes less time than two. A block has one walk or two,
 * and prepares the chunks that it walks; or other blocks prepare them. Returns
 * cudaErrorNotSupported, with nothing done, where two kernels are needed or better. */
template <int KP, la_decay DECAY>
static cudaError_t launch_delta(call c, const device_traits &d, cudaMemPool_t pool,
                                cudaStream_t stream)
{
    if (c.K % PIECE || c.V % PIECE) return cudaErrorNotSupported; /* no box has such rows */
    const int segments = segments_for(c, d, true); /* of two kernels */
    if (!d.producers || !c.causal || !has_no_map(c) || c.x[LA_X].data || c.x[LA_W].data ||
        (NARROW && segments > 1) || (int)sizeof(delta_room<KP, MOST_WALKS>) > d.room)
        return cudaErrorNotSupported;
    const int64_t heads = (int64_t)c.N * c.HV;
    const double chunks = (double)div_up(c.x[LA_CU].data ? div_up(c.T, max(c.N, 1)) : c.T, C);
    const auto walkers = [&](int i) { return heads * div_up(c.V, i * PANEL); };
    const auto rounds = [&](int i) { return (double)div_up(walkers(i), d.processors); };
    /* microseconds of the call: in one kernel, with blocks apart, and in two kernels */
    double one = 0, apart = 0, two = 0;
    int walks = 0, walks_apart = 0;
    for (int i = 1; i <= MOST_WALKS; i++) {
        const double here = chunks * rounds(i) * DELTA_CHUNK<DECAY>[i - 1],
                     there = chunks * rounds(i) * FORWARD_CHUNK[i - 1];
        if (i == 1 || here < one) one = here, walks = i;
        if (i == 1 || there < two) two = there;
        const int64_t preparing = d.processors - walkers(i);
        if (NARROW || preparing <= 0 || bytes_apart<KP> > d.room) continue;
        const double prepared = (double)heads * PREPARED_APART<KP> / (double)preparing,
                     each = max(APART_CHUNK<KP, DECAY>[i - 1], prepared),
                     with_others = chunks * each + APART_LAUNCH;
        if (!walks_apart || with_others < apart) apart = with_others, walks_apart = i;
    }
    if (segments > 1) {
        two = SEGMENTS_LAUNCH + chunks * SEGMENTS_CHUNK<DECAY> / segments;
        one = two; /* not tried: it walks each head on one processor */
    } else
        two += chunks * (double)heads * PREPARED_CHUNK + SAVED_LAUNCHES;
    segments_plan ends = plan_segments<KP, DECAY>(c, d, chunks);
    if (c.qk_l2norm) {
        const double of_norms = chunks * (double)c.N * c.H;
        one += of_norms * FOUND_NORMS;
        apart += of_norms * FOUND_NORMS;
        ends.time += of_norms * FOUND_NORMS;
        two += of_norms * NORMED_ROWS;
        if (2 * (int64_t)c.B * c.T * c.H > INT32_MAX) return cudaErrorNotSupported;
    }
    const bool goes_by_ends =
        ends.count && ends.time < min(one, two) && !(walks_apart && apart <= ends.time);
    const bool goes_apart = !goes_by_ends && walks_apart && apart < min(one, two);
    if ((!goes_apart && !goes_by_ends && two <= one) || walkers(walks) > INT32_MAX)
        return cudaErrorNotSupported;
    const auto step = [](const view &x) { return x.stride[1] * (int64_t)la_size_of(x.dtype); };
    const int64_t gate_step = step(c.x[LA_G]), beta_step = step(c.x[LA_BETA]);
    if (gate_step != (int)gate_step || beta_step != (int)beta_step) return cudaErrorNotSupported;
    if (DECAY == LA_NONE && c.qk_l2norm) return launch_with_gates(c, pool, stream);
    delta_flags f = {o_in_pieces(c), false, 0, (int)gate_step, (int)beta_step, NULL};
    const auto tiles = [&](int i) { return (int)div_up(c.V, i * PANEL); };
    if constexpr (!NARROW) {
        if (goes_by_ends) {
            f.tiles = tiles(ends.walks);
            return launch_delta_segments<KP, DECAY>(c, f, d, ends.count, ends.walks, pool, stream);
        }
        if (goes_apart) {
            f.tiles = tiles(walks_apart);
            return launch_delta_apart<KP, DECAY>(c, f, d, walks_apart, pool, stream);
        }
    }
    f.tiles = tiles(walks);
    return walks == 1 ? launch_delta_walks<KP, DECAY, 1>(c, f, d, pool, stream)
                      : launch_delta_walks<KP, DECAY, 2>(c, f, d, pool, stream);
}

/* An upper bound for the scratch of a call in two kernels, in bytes. plan_segments has its own. */
template <int KP, la_decay DECAY, la_rule RULE> static int64_t scratch_of(const call &c)
{
    const int64_t chunk_slots = chunk_slots_of(c, C), places = chunk_slots * c.HV,
                  tile = tile_bytes(KP);
    const int64_t keys = chunk_slots * (lies_in_rows<DECAY> ? c.HV : c.H) * tile;
    const int64_t numbers = DECAY == LA_TOKEN ? 3 * C : KP + C;
    return places * PANEL_BYTES * (RULE == LA_DELTA ? 2 : 1) + (c.x[LA_X].data ? 3 : 2) * keys +
           (lies_in_rows<DECAY> ? places * tile + 2 * dense_bytes(c, c.H, c.K) : 0) + /* mapped */
           (RULE == LA_DPLR ? places * tile : 0) + places * 4 * (numbers + 1) +
           (RULE == LA_ADDITIVE ? dense_bytes(c, c.HV, c.V) : 0);
}

/* All heads of a call, or those of one turn. */
template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_turn(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    constexpr bool has_k = stage<KP, DECAY, RULE>::has_k;
    const bool has_x = RULE == LA_DELTA && c.x[LA_X].data;
    const int room_of_prepare = prepare_bytes<KP, DECAY, RULE>(has_x);
    device_traits d;
    cudaError_t error = traits_of_device((const void *)chunks_forward<KP, DECAY, RULE, CAUSAL>, &d);
    if (error != cudaSuccess) return error;
    if (room_of_prepare > d.room || width_of_blocks<stage<KP, DECAY, RULE>>(c, d, 1, 1) == 0)
        return cudaErrorNotSupported; /* nothing has been done */
    if constexpr (RULE == LA_ADDITIVE && DECAY != LA_KEY && PLANES == 1 && KP <= 128) {
        error = launch_additive<KP, DECAY>(c, d, pool, stream);
        if (error != cudaErrorNotSupported) return error;
    }
    /* in float16 for KP = 128 alone: each KP has four kernels, which take a minute to compile */
    constexpr bool fuses = PLANES == 1 && (NARROW ? KP == 128 : KP <= 128);
    if constexpr (RULE == LA_DELTA && !lies_in_rows<DECAY> && fuses) {
        error = launch_delta<KP, DECAY>(c, d, pool, stream);
        if (error != cudaErrorNotSupported) return error;
    }
    /* The kernels below are quicker with rows as given. In float16 a mapped number may be too large;
     * `prepare` sees that, and the chunk goes token by token from the caller's rows. */
    if constexpr (PLANES == 1 && !NARROW && KP <= 128)
        if (!rows_are_as_given(c) && d.producers && !c.x[LA_X].data &&
            2 * (int64_t)c.B * c.T * c.H <= INT32_MAX)
            return with_mapped_rows(c, pool, stream, [&](const call &mapped) {
                return launch_turn<KP, DECAY, RULE>(mapped, pool, stream);
            });
    tensor_maps maps = {};
    forward_flags f = {};
    CUtensorMap map_of_y; /* chunks_forward takes y~ */
    const bool plain = PLANES == 1 && !c.qk_l2norm;
    const as_given given = {
        plain && c.map[0] == LA_IDENTITY && can_fetch(c, d, c.x[LA_Q], c.H, c.K, &maps.q),
        plain && c.map[1] == LA_IDENTITY && can_fetch(c, d, c.x[LA_K], c.H, c.K, &maps.k),
        PLANES == 1 && la_predicts(RULE) && c.x[LA_X].data &&
            can_fetch(c, d, c.x[LA_X], c.H, c.K, &maps.x),
        RULE == LA_DPLR && can_fetch(c, d, c.x[LA_Y], c.H, c.K, &map_of_y)};
    f.v_pieces = can_fetch(c, d, c.x[LA_V], c.HV, c.V, &maps.v) &&
                 (!c.x[LA_W].data || can_fetch(c, d, c.x[LA_W], c.HV, c.V, &maps.w));
    f.o_pieces = o_in_pieces(c);
    const bool normalised = is_normalised(&c, DECAY, RULE);
    const int64_t chunk_slots = chunk_slots_of(c, C);
    const int heads = lies_in_rows<DECAY> ? c.HV : c.H;
    const int64_t places = chunk_slots * c.HV, tile = tile_bytes(KP);
    const int64_t score = places * PANEL_BYTES, keys = chunk_slots * heads * tile;
    const bool keep_q = lies_in_rows<DECAY> || !given.q;
    const bool keep_k = has_k && (lies_in_rows<DECAY> || !given.k);
    const bool keep_x = has_x && !lies_in_rows<DECAY> && !given.x;
    const int64_t inverse = RULE == LA_DELTA ? score : 0;
    const int64_t kt = lies_in_rows<DECAY> ? places * tile : 0, y = RULE == LA_DPLR ? kt : 0;
    const int64_t numbers = places * 4 *
                            (lies_in_rows<DECAY> ? totals<KP, DECAY>
                             : DECAY == LA_TOKEN ? (c.predicts_before ? 3 : 2) * C
                             : normalised        ? KP + C
                                                 : 0);
    const int64_t bytes =
        score + inverse + (keep_q + keep_k + keep_x) * keys + kt + y + numbers + places * 4;
    if (chunk_slots * c.HV > INT32_MAX) return cudaErrorInvalidConfiguration;

    char *room = NULL;
    if (bytes) error = cudaMallocFromPoolAsync((void **)&room, bytes, pool, stream);
    if (error != cudaSuccess) return error;
    chunks w = {};
    char *next = room;
    const auto cut = [&](int64_t n) {
        char *x = n ? next : NULL;
        next += n;
        return x;
    };
    w.chunk_slots = (int)chunk_slots;
    w.heads = heads;
    w.scores = cut(score);
    w.inverse = cut(inverse);
    w.q = cut(keep_q ? keys : 0);
    w.k = cut(keep_k ? keys : 0);
    w.x = cut(keep_x ? keys : 0);
    w.kt = cut(kt);
    w.y = cut(y);
    float *x = (float *)cut(numbers);
    w.nonfinite = (int *)cut(places * 4);
    if (lies_in_rows<DECAY>) w.total = x;
    if (DECAY == LA_TOKEN) {
        w.in = x;
        w.out = x + places * C;
        if (c.predicts_before) w.look = x + 2 * places * C;
    }
    if (normalised) {
        w.z = x;
        w.den = x + places * KP;
    }

    if (places)
        error = launch(prepare_of<KP, DECAY, RULE>(), chunk_slots * heads,
                       prepare_threads<KP, DECAY>, room_of_prepare, stream, c, w, given);
    if constexpr (DECAY == LA_NONE && RULE == LA_ADDITIVE)
        if (error == cudaSuccess && normalised) error = launch_divisors<KP>(c, w, stream);
    if (error == cudaSuccess) {
        error = launch_segments<KP, DECAY, RULE>(c, w, maps, f, d, pool, stream);
    }
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

/* As many heads at once as MOST_SCRATCH allows. */
template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_chunks(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    call some = c;
    narrow(&some, 0, 1);
    const int heads = heads_at_once(c, scratch_of<KP, DECAY, RULE>(some));
    cudaError_t error = cudaSuccess;
    for (int h = 0; h < c.H && error == cudaSuccess; h += heads) {
        some = c;
        narrow(&some, h, min(heads, c.H - h));
        error = launch_turn<KP, DECAY, RULE>(some, pool, stream);
    }
    return error;
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t chunks_any(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return c.K <= 64 ? launch_chunks<64, DECAY, RULE>(c, pool, stream)
                     : launch_chunks<128, DECAY, RULE>(c, pool, stream);
}

/* A pair of states, which have KP / 2 keys each. */
template <int KP>
static cudaError_t chunks_of_pairs(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return launch_chunks<KP, LA_PAIR, LA_DELTA>(c, pool, stream);
}

/* 128 < K <= 256 */
template <la_decay DECAY, la_rule RULE>
static cudaError_t chunks_k256(const call &c, cudaMemPool_t pool, cudaStream_t stream)
{
    return launch_chunks<256, DECAY, RULE>(c, pool, stream);
}
