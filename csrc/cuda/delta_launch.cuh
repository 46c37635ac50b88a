/* The launches of the delta rule in one kernel, by blocks apart and by the ends of segments, those for
 * states alone, and the model of measured times that chooses. Hopper alone. */
#ifndef LINATTN_CUDA_DELTA_LAUNCH_CUH
#define LINATTN_CUDA_DELTA_LAUNCH_CUH

#include "forward_launch.cuh"
#include "segments.cuh"
#include "delta.cuh"
#include "delta_apart.cuh"
#include "delta_ends.cuh"
#include "delta_starts.cuh"
#include "rows.cuh"

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

/* The states before the segments, at `starts`. One launch prepares all chunks, another one walks
 * each segment to its end, and a third one joins the ends. starts == NULL: the join goes on to the
 * final state. */
template <int KP, la_decay DECAY>
static cudaError_t launch_ends(const call &c, const tensor_maps &maps, const CUtensorMap &to_o,
                               const delta_flags &f, const handed<KP> &all, segments &g,
                               float *starts, const device_traits &d, cudaStream_t stream)
{
    const int of_values = (int)div_up(c.V, MOST_WALKS * PANEL), identity = rows_of_ends(c.V);
    const int rows = identity + rows_of_ends(c.K);
    const int64_t units = (int64_t)c.N * c.HV * g.count;
    cudaError_t error = launch(delta_apart<KP, DECAY>, d.processors, APART_GROUPS * GROUP,
                               bytes_apart<KP>, stream, c, maps, to_o, f, all, g);
    if (error == cudaSuccess)
        error = launch(delta_ends<KP, DECAY>, units * (of_values + 1), (MOST_WALKS + 1) * GROUP,
                       sizeof(ends_room<KP>), stream, c, maps, all, g, of_values, identity, rows);
    g.starts = starts;
    if (error == cudaSuccess) error = launch_join<KP, DECAY, LA_DELTA>(c, {}, g, rows, stream);
    return error;
}

/* Each segment is walked again from its true state, unless states alone are wanted. */
template <int KP, la_decay DECAY>
static cudaError_t launch_delta_segments(call &c, const delta_flags &f, const device_traits &d,
                                         int count, int walks, cudaMemPool_t pool,
                                         cudaStream_t stream)
{
    const int64_t heads = (int64_t)c.N * c.HV, chunks = chunk_slots_of(c, C) * c.HV;
    const int identity = rows_of_ends(c.V), rows = identity + rows_of_ends(c.K);
    handed<KP> all = {};
    cudaError_t error = cudaMallocFromPoolAsync((void **)&all.chunks,
                                                bytes_of_segments<KP>(c, count), pool, stream);
    if (error != cudaSuccess) return error;
    segments g = {count, !c.x[LA_MT].data, (float *)(all.chunks + chunks), NULL, NULL};
    float *const starts = g.ends + heads * count * rows * KP;
    g.vanished = (int *)(starts + heads * count * identity * KP);
    handed<KP> walked = all;
    walked.tiles = f.tiles;
    walked.walks = walks;
    walked.walkers = (int)(heads * count * f.tiles);
    error = with_norms(
        c, f, pool, stream,
        [&](const tensor_maps &maps, const CUtensorMap &to_o, const delta_flags &f) {
            cudaError_t error = launch_ends<KP, DECAY>(
                c, maps, to_o, f, all, g, c.states_only ? NULL : starts, d, stream);
            if (error == cudaSuccess && !c.states_only)
                error = launch(delta_apart<KP, DECAY>, walked.walkers, APART_GROUPS * GROUP,
                               bytes_apart<KP>, stream, c, maps, to_o, f, walked, g);
            return error;
        });
    const cudaError_t freed = cudaFreeAsync(all.chunks, stream);
    return error == cudaSuccess ? freed : error;
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

/* Can delta_apart prepare the chunks of this call, for kernels that make states alone? f becomes what
 * it needs to know. */
template <int KP>
static bool prepares_for_states(const call &c, const device_traits &d, delta_flags *f)
{
    const auto step = [](const view &x) { return x.stride[1] * (int64_t)la_size_of(x.dtype); };
    const int64_t gate_step = step(c.x[LA_G]), beta_step = step(c.x[LA_BETA]);
    *f = {false, false, 1, (int)gate_step, (int)beta_step, NULL};
    return !NARROW && c.K % PIECE == 0 && c.V % PIECE == 0 && d.producers && has_no_map(c) &&
           !c.x[LA_X].data && !c.x[LA_W].data && bytes_apart<KP> <= d.room &&
           gate_step == (int)gate_step && beta_step == (int)beta_step &&
           2 * (int64_t)c.B * c.T * c.H <= INT32_MAX;
}

/* The final states alone, and the map of each sequence: the first three launches of
 * launch_delta_segments, of which the join goes on to the end. Returns cudaErrorNotSupported, with
 * nothing done, where other kernels are needed. */
template <int KP, la_decay DECAY>
static cudaError_t launch_delta_states(call c, const device_traits &d, cudaMemPool_t pool,
                                       cudaStream_t stream)
{
    delta_flags f;
    if (!prepares_for_states<KP>(c, d, &f) || (int)sizeof(ends_room<KP>) > d.room)
        return cudaErrorNotSupported;
    if (DECAY == LA_NONE && c.qk_l2norm) return launch_with_gates(c, pool, stream);
    const int64_t heads = (int64_t)c.N * c.HV, of_values = div_up(c.V, MOST_WALKS * PANEL);
    const int64_t chunks = chunks_of_sequence(c);
    const int64_t enough = d.processors / max(heads * (of_values + 1), (int64_t)1);
    int64_t count = min(min(enough, chunks / LEAST_CHUNKS), (int64_t)MOST_SEGMENTS);
    while (count > 1 && bytes_of_segments<KP>(c, (int)count) > MOST_SCRATCH) count--;
    count = max(count, (int64_t)1);
    if (heads * count * (of_values + 1) > INT32_MAX) return cudaErrorNotSupported;
    if constexpr (NARROW)
        return cudaErrorNotSupported;
    else
        return launch_delta_segments<KP, DECAY>(c, f, d, (int)count, 1, pool, stream);
}

/* The gradients of the first states alone, of as many heads at once as the scratch allows. */
template <int KP, la_decay DECAY>
static cudaError_t launch_delta_starts(const call &given, const view &d_o, const view &d_last,
                                       const view &d_first, const device_traits &d,
                                       cudaMemPool_t pool, cudaStream_t stream)
{
    delta_flags f;
    call c = given;
    c.x[LA_V] = d_o;
    c.x[LA_S0] = d_last;
    c.x[LA_ST] = d_first;
    /* without a decay there are no factors of a norm; no map describes an array without tokens */
    if (!prepares_for_states<KP>(c, d, &f) || (int)sizeof(starts_room<KP>) > d.room ||
        (DECAY == LA_NONE && c.qk_l2norm) || c.T == 0)
        return cudaErrorNotSupported;
    const int group = c.HV / c.H;
    /* two panels share the tiles of a block, unless processors would be left without one */
    const bool enough = (int64_t)c.N * c.HV * div_up(c.V, PANEL) > d.processors;
    const int walks = enough ? MOST_WALKS : 1, tiles = (int)div_up(c.V, walks * PANEL);
    const int64_t slots = chunk_slots_of(c, C) * (int64_t)sizeof(scored<KP>);
    if ((int64_t)c.N * c.HV * tiles > INT32_MAX) return cudaErrorNotSupported;
    const int heads = heads_at_once(c, slots * group);
    handed<KP> all = {};
    cudaError_t error = cudaSuccess;
    if (slots)
        error =
            cudaMallocFromPoolAsync((void **)&all.chunks, slots * group * heads, pool, stream);
    for (int h = 0; h < c.H && error == cudaSuccess; h += heads) {
        call some = c;
        narrow(&some, h, min(heads, c.H - h));
        error = with_norms(
            some, f, pool, stream,
            [&](const tensor_maps &maps, const CUtensorMap &to_o, const delta_flags &f) {
                const segments none = {1, false, NULL, NULL, NULL};
                cudaError_t error =
                    launch(delta_apart<KP, DECAY>, d.processors, APART_GROUPS * GROUP,
                           bytes_apart<KP>, stream, some, maps, to_o, f, all, none);
                if (error == cudaSuccess)
                    error = launch(delta_starts<KP, DECAY>, (int64_t)some.N * some.HV * tiles,
                                   (walks + 1) * GROUP, sizeof(starts_room<KP>), stream, some, maps,
                                   all, tiles, walks, 1, (float *)NULL);
                return error;
            });
    }
    const cudaError_t freed = all.chunks ? cudaFreeAsync(all.chunks, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

/* Can the walks of both ways go in segments? See delta_states_between. */
template <int KP, la_decay DECAY>
static bool has_states_between(const call &c, const device_traits &d)
{
    delta_flags f;
    return prepares_for_states<KP>(c, d, &f) && (int)sizeof(ends_room<KP>) <= d.room &&
           (int)sizeof(starts_room<KP>) <= d.room && !(DECAY == LA_NONE && c.qk_l2norm) && c.T > 0;
}

/* Find the states between the segments of a call of the delta rule, and their gradients. *first is
 * the initial state, and becomes the states before the segments. *last is the gradient of the final
 * state, and becomes the gradients of the states after the segments. chunks: a place for what
 * delta_apart prepares. The caller frees *held. */
template <int KP, la_decay DECAY>
static cudaError_t delta_states_between(call c, const view &d_o, int count, void *chunks,
                                        view *first, view *last, void **held,
                                        const device_traits &d, cudaMemPool_t pool,
                                        cudaStream_t stream)
{
    delta_flags f;
    prepares_for_states<KP>(c, d, &f);
    const int64_t heads = (int64_t)c.N * c.HV, units = heads * count;
    const int columns = rows_of_ends(c.V), rows = columns + rows_of_ends(c.K);
    const int tiles = (int)div_up(c.V, PANEL);
    const int64_t size = (int64_t)columns * KP;
    cudaError_t error = cudaMallocFromPoolAsync(
        held, units * ((rows * KP + 2 * size) * 4 + (int64_t)sizeof(int)), pool, stream);
    if (error != cudaSuccess) return error;
    segments g = {count, true, (float *)*held, NULL, NULL};
    float *const starts = g.ends + units * rows * KP, *const between = starts + units * size;
    g.vanished = (int *)(between + units * size);
    handed<KP> all = {};
    all.chunks = (scored<KP> *)chunks;
    error = with_norms(
        c, f, pool, stream,
        [&](const tensor_maps &maps, const CUtensorMap &to_o, const delta_flags &f) {
            cudaError_t error =
                launch_ends<KP, DECAY>(c, maps, to_o, f, all, g, starts, d, stream);
            call back = c;
            tensor_maps maps_back = maps;
            back.x[LA_V] = d_o;
            back.x[LA_S0] = *last;
            if (error == cudaSuccess && !map_of(c, d_o, c.HV, c.V, &maps_back.v))
                error = cudaErrorInvalidValue; /* cannot happen: both ways fetch it so */
            if (error == cudaSuccess)
                error = launch(delta_starts<KP, DECAY>, units * tiles, 2 * GROUP,
                               sizeof(starts_room<KP>), stream, back, maps_back, all, tiles, 1,
                               count, between);
            if (error == cudaSuccess)
                error = launch(join_starts<KP>, heads * columns / JOINED, JOIN_WARPS * 32, 0,
                               stream, back, g, rows, between);
            return error;
        });
    *first = {(char *)starts, {c.HV * count * size, size, 1, KP}, LA_F32};
    *last = {(char *)between, {c.HV * count * size, size, 1, KP}, LA_F32};
    return error;
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

/* Microseconds of delta_states_between (docs/decisions/0063): a chunk of a block of delta_starts,
 * and the launches. */
static constexpr double STARTS_CHUNK = 0.95, BETWEEN_LAUNCH = 40;

template <int KP, la_decay DECAY>
static double time_between_delta(const call &c, int count, const device_traits &d)
{
    if (count == 1) return 0;
    const int64_t heads = (int64_t)c.N * c.HV;
    const double chunks = (double)chunks_of_sequence(c);
    const auto walked = [&](int64_t blocks) {
        return (double)div_up(blocks, d.processors) * chunks / count;
    };
    /* also with decays: it takes a segment of many tokens to make an M zero */
    const int64_t of_values = (count - 1) * div_up(c.V, MOST_WALKS * PANEL),
                  of_identity = count - 2;
    /* both joins read each M for every JOINED columns */
    const int64_t maps = 2 * heads * of_identity * KP * KP * 4 * div_up(c.V, JOINED);
    return chunks * (double)heads * PREPARED_APART<KP> / d.processors +
           walked(heads * (of_values + of_identity)) * ENDS_CHUNK<KP> +
           walked(heads * (count - 1) * div_up(c.V, PANEL)) * STARTS_CHUNK + BETWEEN_LAUNCH +
           2 * count * JOINED_SEGMENT + (double)maps / MOVED;
}

/* How many segments a head should have, and how many walks a block. */
struct segments_plan {
    int count, walks;
    double time; /* microseconds; 0: no plan */
};

template <int KP, la_decay DECAY>
static segments_plan plan_segments(const call &c, const device_traits &d, double chunks)
{
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
    const double chunks = (double)chunks_of_sequence(c);
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

#endif
