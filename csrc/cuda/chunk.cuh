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
#include "additive.cuh"
#include "delta_launch.cuh"
#include "denominators.cuh"
#include "segment_sums.cuh"

/* ---- the two launches, and their scratch ---- */

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

/* The final states alone, and maps. Each segment is walked once, from a state of zero, and the join
 * goes on to the end. */
template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_states(const call &c, const chunks &w, const tensor_maps &maps,
                                 const forward_flags &f, const device_traits &d,
                                 cudaMemPool_t pool, cudaStream_t stream)
{
    typedef stage<KP, DECAY, RULE> part;
    const int64_t heads = (int64_t)c.N * c.HV;
    const int64_t chunks_of_one = (c.x[LA_CU].data ? c.T / max(c.N, 1) : c.T) / C;
    int slices = (c.V + 15) / 16;
    if (la_predicts(RULE)) slices += key_slices_of<KP, DECAY>(c);
    const int64_t enough = d.processors / max(heads * div_up(slices * 16, 64), (int64_t)1);
    const int64_t count =
        max((int64_t)1, min(min(enough, chunks_of_one / LEAST_CHUNKS), (int64_t)MOST_SEGMENTS));
    /* zeros that become the state of one segment need no map */
    const bool alone = count == 1 && !c.x[LA_S0].data && !c.x[LA_Y0].data && !c.x[LA_MT].data;
    if (alone) slices = (c.V + 15) / 16;
    segments g = {(int)count, alone, NULL, NULL, NULL};
    const int width = width_of_blocks<part>(c, d, heads * count, slices);
    const int64_t rows = (slices + width - 1) / width * width * 16;
    cudaError_t error =
        cudaMallocFromPoolAsync((void **)&g.ends, heads * count * rows * KP * 4, pool, stream);
    if (error != cudaSuccess) return error;
    error = launch_chunks_forward<KP, DECAY, RULE, SEGMENT_ENDS>(c, w, maps, f, g, d, slices, width,
                                                                 stream);
    if (error == cudaSuccess) error = launch_join<KP, DECAY, RULE>(c, w, g, (int)rows, stream);
    const cudaError_t freed = cudaFreeAsync(g.ends, stream);
    return error == cudaSuccess ? freed : error;
}

/* Microseconds of a chunk of a block of additive_forward, with one walk and with two, on an H200
 * (docs/decisions/0063). */
template <la_decay DECAY>
static constexpr double ADDITIVE_CHUNK[MOST_WALKS] = {DECAY == LA_NONE ? 1.45 : 1.85,
                                                      DECAY == LA_NONE ? 2.1 : 2.6};

/* How a call of the additive rule in one kernel is divided among blocks. A block has two walks and
 * one group that scores, or one walk and two such groups. The walks of a block share the scores, so
 * that two take less than twice the time. cuts: sequences may have segments. The result has no
 * walks if there is no room. */
template <int KP, la_decay DECAY>
static additive_flags plan_additive(const call &c, const device_traits &d, bool mapped, bool cuts)
{
    additive_flags best = {};
    double least = 0;
    const int64_t heads = (int64_t)c.N * c.HV, chunks = chunks_of_sequence(c);
    for (int walks = 1; walks <= MOST_WALKS; walks++) {
        const int room = d.room - PLACE_OF_STAGES - (int)sizeof(meeting) -
                         (mapped ? (int)sizeof(mapped_room<KP>) : 0) - 1024;
        const int stages = min(room / fetched<KP>::bytes(walks), (int)MOST_FETCHED);
        const int tiles = (c.V + walks * PANEL - 1) / (walks * PANEL);
        for (int count = 1; stages >= 2 && may_have_segments(c, count, d); count++) {
            if (count > 1 && !cuts) break;
            const int64_t units = heads * tiles * count;
            if (units > INT32_MAX) break;
            const double walked = (double)div_up(units, d.processors) * (double)chunks / count *
                                  ADDITIVE_CHUNK<DECAY>[walks - 1],
                         both = walked + time_between<KP, DECAY>(c, count, d),
                         time = count > 1 ? both * LEAST_GAIN : both;
            if (best.walks && time >= least) continue;
            least = time;
            best = {o_in_pieces(c), walks, mapped ? 1 : 3 - walks, stages, tiles, count};
        }
    }
    return best;
}

/* The additive rule in one kernel. Returns cudaErrorNotSupported, with nothing done, where two
 * kernels are needed. */
template <int KP, la_decay DECAY>
static cudaError_t launch_additive(call c, const device_traits &d, cudaMemPool_t pool,
                                   cudaStream_t stream)
{
    /* In float16 a mapped number may be too large for its tile. Its chunk would go token by token,
     * but z would be wrong for all later ones. The sums of segments do not see such a number. */
    constexpr bool maps_tiles = DECAY == LA_NONE && !NARROW;
    if (c.K % PIECE || c.V % PIECE) return cudaErrorNotSupported; /* no box has such rows */
    const bool normalised = is_normalised(&c, DECAY, LA_ADDITIVE);
    const bool mapped = !rows_are_as_given(c) || normalised;
    const bool cuts = !NARROW && (!mapped || !c.qk_l2norm);
    if (!d.producers || !c.causal || (mapped && !maps_tiles) ||
        (!cuts && segments_for(c, d, false) > 1))
        return cudaErrorNotSupported;
    const additive_flags f = plan_additive<KP, DECAY>(c, d, mapped, cuts);
    if (!f.walks) return cudaErrorNotSupported;
    /* A norm, or a map that is not elu + 1, takes longer than the walk of a chunk. map_rows shares
     * this among all processors, which is quicker where the tiles leave some without work. */
    if (mapped && !normalised && !has_usual_map<KP>(c) &&
        (int64_t)c.N * c.HV * f.tiles * f.segments < d.processors)
        return cudaErrorNotSupported;
    return with_maps(c, pool, stream, [&](const tensor_maps &maps) {
        auto kernel = additive_forward<KP, DECAY, false>;
        if constexpr (maps_tiles)
            if (mapped) kernel = additive_forward<KP, DECAY, true>;
        cudaError_t error = cudaSuccess;
        void *held = NULL;
        if constexpr (!NARROW)
            if (f.segments > 1)
                error = states_between<KP, DECAY, false>(
                    c, keys_and_values<DECAY>(c, d), f.segments, &c.x[LA_S0], &c.x[LA_Z0], &held,
                    d, pool, stream);
        if (error == cudaSuccess)
            error = launch(kernel,
                           min((int64_t)c.N * c.HV * f.segments * f.tiles, (int64_t)d.processors),
                           (f.walks + f.scoring + 1) * GROUP,
                           PLACE_OF_STAGES + f.stages * fetched<KP>::bytes(f.walks), stream, c,
                           maps, f);
        const cudaError_t freed = held ? cudaFreeAsync(held, stream) : cudaSuccess;
        return error == cudaSuccess ? freed : error;
    });
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
    /* in float16 a number with a map or a weight may be too large, which chunks_forward sees */
    if constexpr (RULE == LA_ADDITIVE && PLANES == 1 && !NARROW && KP <= 128)
        if (c.states_only) {
            const summed x = keys_and_values<DECAY>(c, d);
            if (x.maps || c.normaliser == LA_UNNORMALISED)
                error = launch_sum<KP, DECAY, false>(c, x, d, pool, stream);
            else
                error = cudaErrorNotSupported; /* it would leave out z */
            if (error != cudaErrorNotSupported) return error;
        }
    if constexpr (RULE == LA_ADDITIVE && DECAY != LA_KEY && PLANES == 1 && KP <= 128)
        if (!c.states_only) {
            error = launch_additive<KP, DECAY>(c, d, pool, stream);
            if (error != cudaErrorNotSupported) return error;
        }
    /* in float16 for KP = 128 alone: each KP has four kernels, which take a minute to compile */
    constexpr bool fuses = PLANES == 1 && (NARROW ? KP == 128 : KP <= 128);
    if constexpr (RULE == LA_DELTA && !lies_in_rows<DECAY> && fuses) {
        error = c.states_only ? launch_delta_states<KP, DECAY>(c, d, pool, stream)
                              : launch_delta<KP, DECAY>(c, d, pool, stream);
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
    /* states alone: prepare_key can leave out q, and with it P */
    const bool reads = !(DECAY == LA_KEY && RULE == LA_DELTA && c.states_only);
    const bool keep_q = reads && (lies_in_rows<DECAY> || !given.q);
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
        (reads ? score : 0) + inverse + (keep_q + keep_k + keep_x) * keys + kt + y + numbers +
        places * 4;
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
    w.scores = cut(reads ? score : 0);
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
        error = c.states_only ? launch_states<KP, DECAY, RULE>(c, w, maps, f, d, pool, stream)
                              : launch_segments<KP, DECAY, RULE>(c, w, maps, f, d, pool, stream);
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
