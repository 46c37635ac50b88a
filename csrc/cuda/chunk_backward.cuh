/* The adjoint of the chunk form on tensor cores: three kernels. Arrays are bf16, or float16 in the
 * files named for them (gradient_range.cuh).
 *
 * The first is `prepare`. Under the delta rule it leaves M in the place of A. The second is
 * `chunks_both_ways`, forwards and backwards. The third is the intra-chunk adjoint of every chunk.
 * If q and k are normed or mapped, `map_rows` comes before them in most calls (`maps_rows`). dq and
 * dk go to the arrays of the caller if the third kernel finds whole sums: it can undo what happened
 * to q and k, and a block has all the value heads of a q/k head (`members`). Otherwise they go to a
 * partial per value head, which `reduce_heads` adds up (backward_sums.cuh).
 *
 * With a normaliser, `prepare` leaves what the denominators need (denominators.cuh). The third kernel
 * adds their part to dq, and to dk what comes from the tokens of the chunk. `sum_later` and
 * `reduce_heads` add what comes from later chunks.
 *
 * Calls for the gradients of initial states alone take the first two, without what they keep, or
 * kernels of their own (segment_sums.cuh, delta_starts.cuh).
 *
 * Noncausal calls have kernels of their own (noncausal_backward.cuh). Their launches are here.
 *
 * A file includes chunk.cuh first: long rows go in turns of tokens (token_turns.cuh), whose states
 * come from forward passes. */
#include "backward_sums.cuh"
#include "both_ways_launch.cuh"
#include "delta_launch.cuh"
#include "intra_chunk_adjoint.cuh"
#include "intra_chunk_adjoint_key.cuh"
#include "intra_chunk_adjoint_pair.cuh"
#include "noncausal_backward.cuh"
#include "segment_sums.cuh"
#include "token_turns.cuh"

#include <initializer_list>

/* The keys of a block, where decays are scalar. */
template <int KP> constexpr int scalar_keys = KP > 128 ? 128 : KP;

/* Does the last kernel find the gradient of a denominator? It needs whole rows of q and dq. In
 * float16 its rows of dq are not scaled back yet, so it cannot. */
template <int KP> constexpr bool finds_d_den = KP == scalar_keys<KP> && !NARROW;

/* The last kernel of a call: its blocks for a chunk of a head, and their shared memory. */
struct intra_launch {
    void (*kernel)(call, gradients, chunks, backward_maps, kept, intra_flags);
    int blocks, threads, bytes; /* blocks: parts of the keys, where a block stays */
    int parts_of_da; /* of the gradient of a gate per token: sums over some of the keys each */
    bool stays; /* a block takes one chunk after another, so there is one for each processor */
};

/* Decays that are none or scalar. A block has OWN keys. */
template <int KP, int OWN, la_decay DECAY, la_rule RULE, bool HAS_X>
static intra_launch intra_chunk_adjoint_of_keys(const device_traits &on)
{
    constexpr int PARTS = KP / OWN;
    const size_t room = on.producers ? sizeof(intra_room<OWN, RULE, true>)
                                     : sizeof(intra_room<OWN, RULE, false>);
    return {intra_chunk_adjoint_scalar<OWN, DECAY, RULE, HAS_X, PARTS>,
            PARTS,
            INTRA_THREADS,
            (int)room + (HAS_X ? tile_bytes(OWN) : 0),
            DECAY == LA_TOKEN ? PARTS : 1,
            on.producers > 0};
}

template <int KP, la_decay DECAY, la_rule RULE>
static intra_launch intra_chunk_adjoint_of(const call &c, const device_traits &on)
{
    if constexpr (DECAY == LA_PAIR) {
        constexpr int parts = KP / (2 * PANEL);
        return {intra_chunk_adjoint_pair<parts>, parts, INTRA_THREADS, (int)sizeof(intra_pair_room),
                parts, false};
    } else if constexpr (DECAY == LA_KEY) {
        return {intra_chunk_adjoint_key<(KP > 128 ? 256 : 128), RULE>,
                KP / KEYS,
                intra_key_threads<RULE>,
                intra_key_bytes<RULE>((int)div_up(c.V, PANEL), on.producers),
                1,
                false};
    } else {
        constexpr int OWN = scalar_keys<KP>;
        if (RULE != LA_DELTA || !c.x[LA_X].data)
            return intra_chunk_adjoint_of_keys<KP, OWN, DECAY, RULE, false>(on);
        const intra_launch with_x =
            intra_chunk_adjoint_of_keys<KP, OWN, DECAY, RULE, RULE == LA_DELTA>(on);
        /* with rows of x, 128 keys take more than 99 KiB */
        if constexpr (KP == 128 && RULE == LA_DELTA)
            if (!on.producers && with_x.bytes > on.room)
                return intra_chunk_adjoint_of_keys<KP, 64, DECAY, RULE, true>(on);
        return with_x;
    }
}

static void narrow(call &c, gradients &d, int h, int n)
{
    const int group = c.HV / c.H, hv = h * group;
    move_along(2, h, {&d[LA_DQ], &d[LA_DK], &d[LA_DX], &d[LA_DY]});
    move_along(2, hv, {&d[LA_DO], &d[LA_DV], &d[LA_DG], &d[LA_DBETA], &d[LA_DETA]});
    move_along(0, h, {&d[LA_DU]});
    move_along(1, hv, {&d[LA_DST], &d[LA_DZT], &d[LA_DYT], &d[LA_DS0], &d[LA_DZ0], &d[LA_DY0]});
    narrow(&c, h, n);
}

struct backward_scratch {
    intra_launch intra;
    chunks w;
    kept f;
    intra_flags to;
    bool maps_rows; /* map_rows comes before the other kernels */
    char *rows;     /* its rows of q and k */
    float *norms;   /* and its factors, if the last kernel needs them */
    /* The gradient of num of a normalised call, or do in the range of float16: [B T][HV][V]. */
    char *d_num;
    /* Of a normalised call: the denominators, [HV][B T], and with more than 128 keys the rest of
     * what normaliser.cuh needs. */
    float *den;
    through_z<float> z;
};

/* Lay out the scratch that the kernels of a call leave one another, from `room` on (NULL: count
 * only). Returns its bytes. */
template <int KP, la_decay DECAY, la_rule RULE>
static int64_t lay_out(const call &c, const gradients &d, char *room, backward_scratch *x)
{
    constexpr bool predicts = la_predicts(RULE), dplr = RULE == LA_DPLR,
                   in_rows = lies_in_rows<DECAY>;
    chunks &w = x->w;
    kept &f = x->f;
    intra_flags &to = x->to;
    const int64_t chunk_slots = chunk_slots_of(c, C);
    const int64_t places = chunk_slots * c.HV, tile = tile_bytes(KP),
                  panels = (c.V + PANEL - 1) / PANEL;
    const int64_t tokens = (int64_t)c.B * c.T, score = places * PANEL_BYTES;
    const int heads = in_rows ? c.HV : c.H;
    const int64_t keys = chunk_slots * heads * tile;
    const bool normalised = is_normalised(&c, DECAY, RULE), has_x = predicts && c.x[LA_X].data;
    const bool copies_do = normalised || NARROW;
    const bool all = !c.states_only; /* else nothing is for the last kernel */
    const bool has_bonus = DECAY == LA_KEY && !predicts && c.x[LA_U].data;
    const int64_t da_parts = x->intra.parts_of_da;
    w.chunk_slots = (int)chunk_slots;
    w.heads = heads;
    to.kp = (c.K + 31) / 32 * 32;
    const bool by_chunks = normalised && finds_d_den<KP>;
    x->z.segments = normalised && !by_chunks ? segments_of_keys(c) : 0;
    const struct {
        char **to;
        int64_t bytes;
    } parts[] = {
        {&w.scores, score},
        {&w.inverse, dplr ? score : 0},
        {&w.lower, predicts ? score : 0},
        {(char **)&w.beta, predicts && !dplr ? places * C * 4 : 0},
        {&w.scores_y, dplr ? score : 0},
        {&w.q, in_rows || !to.given.q ? keys : 0},
        {&w.k, in_rows      ? (predicts ? keys : 0)
               : to.given.k ? 0
                            : keys},
        {&w.x, has_x && !in_rows && !to.given.x ? keys : 0},
        {&w.kt, in_rows ? keys : 0},
        {&w.y, dplr ? keys : 0},
        {(char **)&w.total, (places * totals<KP, DECAY> * 4 + 1023) / 1024 * 1024},
        {(char **)&w.in, DECAY == LA_TOKEN ? places * C * 4 : 0},
        {(char **)&w.out, DECAY == LA_TOKEN ? places * C * 4 : 0},
        {(char **)&w.look, DECAY == LA_TOKEN && c.predicts_before ? places * C * 4 : 0},
        {(char **)&w.nonfinite, (places * 4 + 1023) / 1024 * 1024},
        {&x->rows, x->maps_rows ? (mapped_bytes(c) + 1023) / 1024 * 1024 : 0},
        {&f.states, all ? places * panels * tile : 0},
        {&f.d_states, all ? places * panels * tile : 0},
        {&f.E, all && predicts ? places * panels * PANEL_BYTES : 0},
        {&f.Z, all && predicts ? places * panels * PANEL_BYTES : 0},
        {(char **)&to.dq, to.direct_q || !all ? 0 : tokens * c.HV * to.kp * 4},
        {(char **)&to.dk, to.direct_k || !all ? 0 : tokens * c.HV * to.kp * 4},
        {(char **)&to.dx, to.direct_k || !has_x || !all ? 0 : tokens * c.HV * to.kp * 4},
        {(char **)&to.dy, to.direct_k || !dplr || !all ? 0 : tokens * c.HV * to.kp * 4},
        {(char **)&w.z, by_chunks ? places * KP * 4 : 0},
        {(char **)&w.den, by_chunks ? places * C * 4 : 0},
        {(char **)&to.dz, by_chunks ? places * KP * 4 : 0},
        {(char **)&x->z.z, x->z.segments * c.HV * to.kp * 8},
        {&x->d_num, copies_do ? tokens * c.HV * c.V * 2 : 0},
        {(char **)&x->den, normalised ? tokens * c.HV * 4 : 0},
        {(char **)&to.dbonus, all && has_bonus ? places * KP * 4 : 0},
        {(char **)&x->norms, x->maps_rows && to.direct_q && c.qk_l2norm ? 2 * tokens * c.H * 4 : 0},
        {(char **)&to.da,
         all && (d.per_head || da_parts > 1) ? states_of<DECAY> * da_parts * tokens * c.HV * 4 : 0},
    };
    int64_t bytes = 0;
    for (const auto &part : parts) {
        *part.to = part.bytes && room ? room + bytes : NULL;
        bytes += part.bytes;
    }
    to.norms = x->norms;
    to.den = by_chunks ? x->den : NULL;
    to.z = w.z;
    x->z = {0, c.HV, 1, to.kp, 0, tokens, x->z.segments, to.dq, to.dk, x->den, x->z.z};
    return bytes;
}

/* The gradient of num without the scale: was o = scale num / divisor. den times `scale` is a
 * denominator. A thread has eight columns. */
static __global__ void __launch_bounds__(256)
    divide(const __grid_constant__ call c, const __grid_constant__ gradients d, const float *den,
           float scale, char *to)
{
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x, tokens = (int64_t)c.B * c.T;
    const int groups = c.V / 8, column = (int)(i % groups) * 8, hv = (int)(i / groups % c.HV);
    const int64_t token = i / groups / c.HV;
    if (token >= tokens) return;
    const float by = divisor_of(&c, den[hv * tokens + token] * scale);
    uint4 x = *(const uint4 *)at(d[LA_DO], (int)(token / c.T), (int)(token % c.T), hv, column);
    uint32_t *const pair = (uint32_t *)&x;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float low = __uint_as_float(pair[j] << 16),
                    high = __uint_as_float(pair[j] & 0xffff0000);
        pair[j] = pack(low / by, high / by);
    }
    *(uint4 *)(to + i * 16) = x;
}

/* One turn, after its heads and its scratch have been laid out. */
template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_turn(const call &given, const gradients &given_d,
                               const backward_scratch &x, const device_traits &on,
                               cudaMemPool_t pool, cudaStream_t stream)
{
    call c = given; /* as the kernels see it */
    gradients d = given_d;
    const bool normalised = is_normalised(&c, DECAY, RULE);
    const auto prepare = prepare_of<KP, DECAY, RULE>();
    const intra_launch &intra = x.intra;
    const int64_t places = (int64_t)x.w.chunk_slots * c.HV, tokens = (int64_t)c.B * c.T;
    cudaError_t error = cudaSuccess;
    if (x.rows && tokens) {
        error = launch_map_rows(c, x.rows, x.norms, stream);
        if (error != cudaSuccess) return error;
    }
    const auto launch_divide = [&](float scale) {
        return launch(divide, (tokens * c.HV * (c.V / 8) + 255) / 256, 256, 0, stream, c, given_d,
                      x.den, scale, x.d_num);
    };
    const int64_t row = (int64_t)c.HV * c.V;
    const view copy_of_do = {x.d_num, {c.T * row, row, c.V, 1}, ELEMENT_DTYPE};
    if constexpr (NARROW) {
        if (normalised && tokens) error = find_denominators(c, x.z, stream);
        if (error == cudaSuccess) /* without tokens it is that of the states' gradients */
            error = find_range(c, given_d, x.den, x.d_num, on.processors, stream);
        if (error != cudaSuccess) return error;
        d[LA_DO] = copy_of_do;
    } else if (normalised) {
        d[LA_DO] = copy_of_do;
        if (!finds_d_den<KP> && tokens) {
            error = find_denominators(c, x.z, stream);
            if (error == cudaSuccess) error = launch_divide((float)c.scale);
            if (error != cudaSuccess) return error;
        }
    }
    backward_maps maps = {};
    /* if this fails, prepare leaves copies of q, k or x */
    can_fetch(c, on, c.x[LA_Q], c.H, c.K, &maps.q);
    can_fetch(c, on, c.x[LA_K], c.H, c.K, &maps.k);
    const bool has_x = c.x[LA_X].data;
    if (has_x) can_fetch(c, on, c.x[LA_X], c.H, c.K, &maps.x);
    if (!can_fetch(c, on, c.x[LA_V], c.HV, c.V, &maps.v) ||
        !can_fetch(c, on, d[LA_DO], c.HV, c.V, &maps.d_o))
        return cudaErrorInvalidValue; /* cannot happen: the arrays of all heads could be fetched */
    if (places)
        error = launch(prepare, (int64_t)x.w.chunk_slots * x.w.heads, prepare_threads<KP, DECAY>,
                       prepare_bytes<KP, DECAY, RULE>(has_x), stream, c, x.w, x.to.given);
    if constexpr (DECAY == LA_NONE && RULE == LA_ADDITIVE && finds_d_den<KP>)
        if (normalised && tokens) {
            if (error == cudaSuccess) error = launch_divisors<KP>(c, x.w, stream, x.den);
            if (error == cudaSuccess) error = launch_divide(1);
        }
    if (error == cudaSuccess)
        error = launch_both_ways<KP, DECAY, RULE>(c, d, x.w, maps, x.f, on, pool, stream);
    if (c.states_only) return error;
    if (error == cudaSuccess && x.to.dbonus) /* not every slot has a chunk */
        error = cudaMemsetAsync(x.to.dbonus, 0, places * KP * 4, stream);
    const int64_t parts = places * intra.blocks / x.to.members;
    intra_flags to = x.to;
    to.boxes = intra.stays && can_fetch(c, on, d[LA_DQ], c.H, c.K, &maps.dq) &&
               can_fetch(c, on, d[LA_DK], c.H, c.K, &maps.dk) &&
               (!has_x || can_fetch(c, on, d[LA_DX], c.H, c.K, &maps.dx));
    if (error == cudaSuccess)
        error = launch(intra.kernel, intra.stays ? min(parts, (int64_t)on.processors) : parts,
                       intra.threads, intra.bytes, stream, c, d, x.w, maps, x.f, to);
    if (error == cudaSuccess && normalised)
        error = finds_d_den<KP>
                    ? launch(sum_later<KP>, (int64_t)c.N * c.HV, SUM_THREADS, 0, stream, c, d,
                             x.to.dz)
                    : undo_denominators(c, d, x.z, stream);
    if (error == cudaSuccess && places && !(x.to.direct_q && x.to.direct_k))
        error = launch(reduce_heads<keys_of<KP, DECAY>>,
                       (int64_t)x.w.chunk_slots * c.H * BLOCKS_OF_CHUNK, 256, 0, stream, given, d,
                       x.to);
    if (error == cudaSuccess && DECAY == LA_KEY && RULE == LA_ADDITIVE && c.x[LA_U].data)
        error = launch(join_bonus, div_up(c.K, 32) * c.H, 256, 0, stream, c, d, x.to.dbonus, KP,
                       x.w.chunk_slots);
    if (error == cudaSuccess && intra.parts_of_da > 1)
        error = launch(join_gates, div_up(states_of<DECAY> * tokens * c.HV, 256), 256, 0, stream, c,
                       d, x.to.da, intra.blocks, states_of<DECAY>);
    if (error == cudaSuccess && d.per_head) error = reduce_gates(c, d, x.to.da, stream);
    return error;
}

/* ---- the noncausal form ---- */

struct noncausal_scratch {
    sums_of_tokens sums;
    intra_flags to;
    char *rows, *d_num; /* as in backward_scratch */
    through_z<float> z;
};

/* As the other one. */
template <int KP>
static int64_t lay_out(const call &c, const device_traits &on, char *room, noncausal_scratch *x)
{
    const int64_t tokens = (int64_t)c.B * c.T, panels = div_up(c.V, PANEL),
                  tiles = (int64_t)c.N * c.HV * panels;
    const bool normalised = c.normaliser != LA_UNNORMALISED, plain = rows_are_as_given(c);
    const int64_t chunks_of_one = chunks_of_sequence(c);
    const int64_t enough = div_up(on.processors * BLOCKS_OF_PROCESSOR, max(tiles, (int64_t)1));
    const int64_t parts = max((int64_t)1, min(enough, chunks_of_one));
    x->sums.of_sequence = (int)parts;
    x->to.kp = (c.K + 31) / 32 * 32;
    x->z.segments = normalised ? segments_of_keys(c) : 0;
    const int64_t partials = tokens * c.HV * x->to.kp * 4;
    const struct {
        char **to;
        int64_t bytes;
    } pieces[] = {
        {(char **)&x->sums.parts, tiles * parts * 2 * KP * PANEL * 4},
        {&x->sums.joined, tiles * 2 * tile_bytes(KP)},
        {&x->rows, plain ? 0 : (mapped_bytes(c) + 1023) / 1024 * 1024},
        {(char **)&x->to.dq, x->to.direct_q ? 0 : partials},
        {(char **)&x->to.dk, x->to.direct_k ? 0 : partials},
        {(char **)&x->z.z, x->z.segments * c.HV * x->to.kp * 8},
        {&x->d_num, normalised ? tokens * c.HV * c.V * 2 : 0},
        {(char **)&x->z.den, normalised ? tokens * c.HV * 4 : 0},
    };
    int64_t bytes = 0;
    for (const auto &piece : pieces) {
        *piece.to = piece.bytes && room ? room + bytes : NULL;
        bytes += piece.bytes;
    }
    x->z = {0, c.HV, 1, x->to.kp, 0, tokens, x->z.segments, x->to.dq, x->to.dk, x->z.den, x->z.z};
    return bytes;
}

/* One turn, after its heads and its scratch have been laid out. */
template <int KP>
static cudaError_t launch_noncausal_turn(const call &given, const gradients &given_d,
                                         const noncausal_scratch &x, cudaStream_t stream)
{
    call c = given; /* as the kernels see it */
    gradients d = given_d;
    const int64_t tokens = (int64_t)c.B * c.T, panels = div_up(c.V, PANEL),
                  tiles = (int64_t)c.N * c.HV * panels, chunk_slots = chunk_slots_of(c, C);
    cudaError_t error = cudaSuccess;
    if (x.rows && tokens) error = launch_map_rows(c, x.rows, NULL, stream);
    if (x.d_num) {
        const int64_t row = (int64_t)c.HV * c.V;
        if (error == cudaSuccess) error = find_denominators(c, x.z, stream);
        if (error == cudaSuccess)
            error = launch(divide, div_up(tokens * c.HV * (c.V / 8), 256), 256, 0, stream, c,
                           given_d, x.z.den, (float)c.scale, x.d_num);
        d[LA_DO] = {x.d_num, {c.T * row, row, c.V, 1}, LA_BF16};
    }
    if (error == cudaSuccess)
        error = launch(sum_tokens<KP>, tiles * x.sums.of_sequence, NONCAUSAL_THREADS,
                       SUMS_STAGES * sizeof(sums_stage<KP>), stream, c, d, x.to.given, x.sums);
    if (error == cudaSuccess)
        error = launch(join_sums<KP>, 2 * tiles, 256, 0, stream, c, d, x.sums);
    if (error == cudaSuccess)
        error = launch(read_sums<KP>, chunk_slots * c.HV, NONCAUSAL_THREADS, sizeof(read_room<KP>),
                       stream, c, d, x.sums, x.to);
    if (error == cudaSuccess && x.d_num) error = undo_denominators(c, d, x.z, stream);
    if (error == cudaSuccess && !x.to.direct_q)
        error = launch(reduce_heads<KP>, chunk_slots * c.H * BLOCKS_OF_CHUNK, 256, 0, stream, given,
                       d, x.to);
    return error;
}

/* One turn after another, of as many heads as the scratch allows. */
template <int KP>
static cudaError_t launch_noncausal(const call &c, const gradients &d, const device_traits &on,
                                    cudaMemPool_t pool, cudaStream_t stream)
{
    const bool plain = rows_are_as_given(c), mapped = !plain && c.K % PIECE == 0;
    const int64_t rows = 2 * (int64_t)c.B * c.T * c.H;
    if (c.queries != c.keys || rows > INT32_MAX || !map_of(c, c.x[LA_V], c.HV, c.V, NULL) ||
        !map_of(c, d[LA_DO], c.HV, c.V, NULL) ||
        (int)(SUMS_STAGES * sizeof(sums_stage<KP>)) > on.room)
        return cudaErrorNotSupported; /* nothing has been done */
    noncausal_scratch x = {};
    x.to.given = {mapped || (plain && map_of(c, c.x[LA_Q], c.H, c.K, NULL)),
                  mapped || (plain && map_of(c, c.x[LA_K], c.H, c.K, NULL))};
    x.to.direct_q = x.to.direct_k = plain && c.HV == c.H && c.normaliser == LA_UNNORMALISED;
    call some = c;
    gradients d_some = d;
    narrow(some, d_some, 0, 1);
    const int64_t each = lay_out<KP>(some, on, NULL, &x);
    const int heads = heads_at_once(c, each);
    const int64_t parts = div_up(c.T, C) + c.N; /* at most */
    if (parts * heads * (c.HV / c.H) * div_up(c.V, PANEL) > INT32_MAX) return cudaErrorNotSupported;

    char *room = NULL;
    cudaError_t error = cudaMallocFromPoolAsync((void **)&room, each * heads, pool, stream);
    for (int h = 0; h < c.H && error == cudaSuccess; h += heads) {
        some = c;
        d_some = d;
        narrow(some, d_some, h, min(heads, c.H - h));
        lay_out<KP>(some, on, room, &x);
        error = launch_noncausal_turn<KP>(some, d_some, x, stream);
    }
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_chunk_backward(const call &c, const gradients &d, cudaMemPool_t pool,
                                         cudaStream_t stream)
{
    const bool has_x = c.x[LA_X].data;
    device_traits on;
    cudaError_t error = traits_of_device((const void *)chunks_both_ways<KP, DECAY, RULE>, &on);
    if (error != cudaSuccess) return error;
    if constexpr (DECAY == LA_NONE && RULE == LA_ADDITIVE && KP <= 128 && !NARROW)
        if (!c.causal) return launch_noncausal<KP>(c, d, on, pool, stream);
    if constexpr (RULE == LA_ADDITIVE && KP <= 128 && !NARROW)
        if (c.states_only) {
            const int64_t rows = 2 * (int64_t)c.B * c.T * c.H;
            if (!rows_are_as_given(c) && on.producers && rows > 0 && rows <= INT32_MAX)
                return with_mapped_rows(c, pool, stream, [&](const call &mapped) {
                    return launch_chunk_backward<KP, DECAY, RULE>(mapped, d, pool, stream);
                });
            const summed x = {LA_Q,     false,    d[LA_DO],           (float)c.scale,
                              d[LA_DST], d[LA_DS0], c.x[LA_U].data != NULL};
            const cudaError_t alone = launch_sum<KP, DECAY, true>(c, x, on, pool, stream);
            if (alone != cudaErrorNotSupported) return alone;
        }
    if constexpr (RULE == LA_DELTA && !lies_in_rows<DECAY> && KP <= 128 && !NARROW)
        if (c.states_only) {
            const cudaError_t alone = launch_delta_starts<KP, DECAY>(
                c, d[LA_DO], d[LA_DST], d[LA_DS0], on, pool, stream);
            if (alone != cudaErrorNotSupported) return alone;
        }
    const intra_launch intra = intra_chunk_adjoint_of<KP, DECAY, RULE>(c, on);
    if (prepare_bytes<KP, DECAY, RULE>(has_x) > on.room || intra.bytes > on.room ||
        stages_both_ways<KP, DECAY, RULE>(c, on, 4) == 0)
        return cudaErrorNotSupported; /* nothing has been done */
    /* intra_chunk_adjoint_key computes the gradient of the logarithm; it cannot be divided by a
     * decay of zero */
    if (DECAY == LA_KEY && c.gate == LA_DECAY) return cudaErrorNotSupported;
    if (NARROW && !d.range) return cudaErrorNotSupported;
    CUtensorMap map;
    const auto fits = [&](const view &x, int heads, int columns) {
        return can_fetch(c, on, x, heads, columns, &map);
    };
    if (!fits(c.x[LA_V], c.HV, c.V) || !fits(d[LA_DO], c.HV, c.V)) return cudaErrorNotSupported;
    const bool plain = rows_are_as_given(c);
    backward_scratch x = {intra};
    x.maps_rows = !plain && KP <= 128 && !has_x && DECAY != LA_PAIR &&
                  2 * (int64_t)c.B * c.T * c.H <= INT32_MAX;
    const bool mapped = x.maps_rows && c.K % PIECE == 0; /* each row begins at 16 bytes */
    x.to.given = {mapped || (plain && fits(c.x[LA_Q], c.H, c.K)),
                  mapped || (plain && fits(c.x[LA_K], c.H, c.K)),
                  has_x && fits(c.x[LA_X], c.H, c.K), RULE == LA_DPLR && fits(c.x[LA_Y], c.H, c.K)};
    /* the last kernel undoes a norm, or elu + 1, if its blocks have whole rows */
    const bool elu = !c.qk_l2norm && c.map[0] == LA_ELU1 && c.map[1] == LA_ELU1;
    const bool undoes = x.maps_rows && (has_no_map(c) || elu) && !lies_in_rows<DECAY>;
    const bool normalised = is_normalised(&c, DECAY, RULE);
    x.to.elu = elu;
    /* The last kernel adds up the value heads of a q/k head if its blocks stay, and if there are two
     * groups of value heads for each of them. */
    const int64_t groups = chunk_slots_of(c, C) * c.H * intra.blocks;
    const bool adds_up =
        (plain || undoes) && !normalised && intra.stays && groups >= 2 * (int64_t)on.processors;
    x.to.members = adds_up ? c.HV / c.H : 1;
    x.to.direct_q =
        (plain || undoes) && c.HV == c.H * x.to.members && (finds_d_den<KP> || !normalised);
    x.to.direct_k = x.to.direct_q && !normalised;

    call some = c;
    gradients d_some = d;
    narrow(some, d_some, 0, 1);
    const int64_t each = lay_out<KP, DECAY, RULE>(some, d_some, NULL, &x);
    bool cuts = false; /* then few heads have blocks enough */
    if constexpr (cuts_both_ways<KP, DECAY, RULE>) cuts = can_cut<KP, DECAY, RULE>(c, on);
    static_assert((int)WALK_COLUMNS == (int)PANEL, "");
    const int64_t tokens = cuts ? 0 : tokens_of_turn(c, d, each, on.processors);
    if (tokens) {
        error = in_turns_of_tokens(
            c, d, tokens, states_of<DECAY>, pool, stream,
            [&](const call &some) { return launch_chunks<KP, DECAY, RULE>(some, pool, stream); },
            [&](const call &some, const gradients &of) {
                return launch_chunk_backward<KP, DECAY, RULE>(some, of, pool, stream);
            });
        if (error != cudaErrorNotSupported) return error;
        error = cudaSuccess;
    }
    const int heads = heads_at_once(c, each);
    const int64_t chunks_of_turn = (int64_t)x.w.chunk_slots * heads * (c.HV / c.H);
    if (chunks_of_turn * intra.blocks > INT32_MAX) return cudaErrorNotSupported;

    /* of all turns, and at most 13 MB, which MOST_SCRATCH does not count */
    const int64_t partials =
        x.to.members > 1 ? on.processors * bytes_of_partials<scalar_keys<KP>> : 0;
    char *room = NULL;
    if (error == cudaSuccess && each)
        error = cudaMallocFromPoolAsync((void **)&room, partials + each * heads, pool, stream);
    x.to.partials = (float4 *)room;
    for (int h = 0; h < c.H && error == cudaSuccess; h += heads) {
        some = c;
        d_some = d;
        narrow(some, d_some, h, min(heads, c.H - h));
        lay_out<KP, DECAY, RULE>(some, d_some, room + partials, &x);
        error = launch_turn<KP, DECAY, RULE>(some, d_some, x, on, pool, stream);
    }
    const cudaError_t freed = room ? cudaFreeAsync(room, stream) : cudaSuccess;
    return error == cudaSuccess ? freed : error;
}

template <la_decay DECAY, la_rule RULE>
static cudaError_t chunk_backward_any(const call &c, const gradients &d, cudaMemPool_t pool,
                                      cudaStream_t stream)
{
    return c.K <= 64 ? launch_chunk_backward<64, DECAY, RULE>(c, d, pool, stream)
                     : launch_chunk_backward<128, DECAY, RULE>(c, d, pool, stream);
}

template <int KP>
static cudaError_t chunk_backward_of_pairs(const call &c, const gradients &d, cudaMemPool_t pool,
                                           cudaStream_t stream)
{
    return launch_chunk_backward<KP, LA_PAIR, LA_DELTA>(c, d, pool, stream);
}

/* 128 < K <= 256 */
template <la_decay DECAY, la_rule RULE>
static cudaError_t chunk_backward_k256(const call &c, const gradients &d, cudaMemPool_t pool,
                                       cudaStream_t stream)
{
    return launch_chunk_backward<256, DECAY, RULE>(c, d, pool, stream);
}
