/* The launch of the walks of both ways, and of what finds the states between their segments. */
#ifndef LINATTN_CUDA_BOTH_WAYS_LAUNCH_CUH
#define LINATTN_CUDA_BOTH_WAYS_LAUNCH_CUH

#include "delta_launch.cuh"
#include "recompute.cuh"
#include "segment_sums.cuh"

/* For blocks of `width` slices of 16 columns: the bytes of a stage, which are those of the larger
 * pass; and the number of stages that there is room for. */
template <int KP, la_decay DECAY, la_rule RULE> static int bytes_both_ways(const call &c, int width)
{
    return adjoint_stage<KP, DECAY, RULE, true>::bytes(width, c.x[LA_X].data);
}

template <int KP, la_decay DECAY, la_rule RULE>
static int stages_both_ways(const call &c, const device_traits &on, int width)
{
    if (width * adjoint_halves<KP> > ADJOINT_WARPS) return 0;
    const int room =
        on.room - bytes_exchanged(adjoint_halves<KP>, width) - 1024; /* for the barriers */
    const int fit = min(room / bytes_both_ways<KP, DECAY, RULE>(c, width), (int)ADJOINT_STAGES);
    return on.producers && KP <= 128 && fit < ADJOINT_STAGES ? 0 : fit;
}

/* How the walks of both ways are divided among blocks. */
struct walks_plan {
    int width, segments; /* slices of a block; segments of a sequence */
};

/* Microseconds of chunks_both_ways on an H200 with K = V = 128 (docs/decisions/0064): a chunk of a
 * block of the backward pass and of the forward pass, with one panel and with two; what a block
 * takes beside its chunks; a chunk of a head, if all processors wait for memory. */
template <la_rule RULE>
static constexpr double BACK_CHUNK[MOST_WALKS] = {RULE == LA_ADDITIVE ? 1.92 : 2.6,
                                                  RULE == LA_ADDITIVE ? 2.52 : 3.6};
template <la_rule RULE>
static constexpr double FORTH_CHUNK[MOST_WALKS] = {RULE == LA_ADDITIVE ? 1.05 : 1.6,
                                                   RULE == LA_ADDITIVE ? 1.55 : 2.4};
static constexpr double WALK_START = 20;
template <la_rule RULE>
static constexpr double MOVED_CHUNK = RULE == LA_ADDITIVE ? 0.0455 : 0.0585;

/* When the last block ends, if `blocks` come first that take `back` each, and then as many that
 * take `forth`. A processor has one block at a time, and begins the next one as it ends. */
static double end_of_blocks(int64_t blocks, double back, double forth, int processors)
{
    const int64_t late = blocks % processors; /* processors that have one block more */
    double early_end = (double)(blocks / processors) * back, late_end = early_end + back,
           end = late ? late_end : early_end;
    for (int64_t left = forth > 0 ? blocks : 0; left > 0;) {
        const bool to_late = late && late_end < early_end;
        double &from = to_late ? late_end : early_end;
        from += forth;
        left -= to_late ? late : processors - late;
        end = max(end, from);
    }
    return end;
}

/* Microseconds of both walks. */
template <int KP, la_rule RULE>
static double time_both_ways(const call &c, int walks, int segments, const device_traits &on)
{
    const int64_t heads = (int64_t)c.N * c.HV, panels = div_up(c.V, PANEL);
    const double chunks = (double)chunks_of_sequence(c), of_segment = chunks / segments,
                 back = WALK_START + of_segment * BACK_CHUNK<RULE>[walks - 1],
                 forth = c.states_only ? 0 : WALK_START + of_segment * FORTH_CHUNK<RULE>[walks - 1];
    const double walked =
        end_of_blocks(heads * div_up(panels, walks) * segments, back, forth, on.processors);
    const double moved =
        chunks * (double)heads * MOVED_CHUNK<RULE> * KP / 128 * (double)panels / 2;
    /* where one is much less than the other, it takes no time of its own */
    return sqrt(sqrt(walked * walked * walked * walked + moved * moved * moved * moved));
}

/* Which calls may have segments. */
template <int KP, la_decay DECAY, la_rule RULE>
constexpr bool cuts_both_ways =
    KP <= 128 && !NARROW && (RULE == LA_ADDITIVE || (RULE == LA_DELTA && !lies_in_rows<DECAY>));

template <int KP, la_decay DECAY, la_rule RULE>
static bool can_cut(const call &c, const device_traits &on)
{
    if (!on.producers || c.states_only || (int64_t)c.N * c.HV == 0) return false;
    /* states_between would copy rows that have no boxes, which prepare has copied already */
    if (c.K % PIECE || !rows_are_as_given(c) || !map_of(c, c.x[LA_Q], c.H, c.K, NULL) ||
        !map_of(c, c.x[LA_K], c.H, c.K, NULL))
        return false;
    if constexpr (RULE == LA_DELTA)
        return has_states_between<KP, DECAY>(c, on);
    else
        return (int)sizeof(part_room<KP, DECAY>) <= on.room;
}

template <int KP, la_decay DECAY, la_rule RULE>
static walks_plan plan_both_ways(const call &c, const device_traits &on)
{
    const int64_t heads = (int64_t)c.N * c.HV, panels = div_up(c.V, PANEL);
    const bool both = panels > 1 && stages_both_ways<KP, DECAY, RULE>(c, on, 8);
    walks_plan best = {4, 1};
    if (!on.producers) {
        /* not measured: two panels share a block's tiles, if all processors have a block then */
        const bool enough = heads * ((panels + 1) / 2) * (c.states_only ? 1 : 2) >= on.processors;
        if (both && enough) best.width = 8;
        return best;
    }
    bool cuts = false;
    if constexpr (cuts_both_ways<KP, DECAY, RULE>) cuts = can_cut<KP, DECAY, RULE>(c, on);
    double least = 0;
    for (int walks = 1; walks <= (both ? 2 : 1); walks++)
        for (int count = 1; may_have_segments(c, count, on) && (count == 1 || cuts); count++) {
            double time = time_both_ways<KP, RULE>(c, walks, count, on);
            if constexpr (cuts_both_ways<KP, DECAY, RULE> && RULE == LA_DELTA)
                time += time_between_delta<KP, DECAY>(c, count, on);
            else if constexpr (cuts_both_ways<KP, DECAY, RULE>)
                time += 2 * time_between<KP, DECAY>(c, count, on);
            if (count > 1) time *= LEAST_GAIN;
            if (walks + count > 2 && time >= least) continue;
            least = time;
            best = {walks * 4, count};
        }
    return best;
}

template <int KP, la_decay DECAY, la_rule RULE>
static cudaError_t launch_both_ways(call c, gradients d, const chunks &w, const backward_maps &maps,
                                    const kept &f, const device_traits &on, cudaMemPool_t pool,
                                    cudaStream_t stream)
{
    const auto kernel = chunks_both_ways<KP, DECAY, RULE>;
    const int panels = (c.V + PANEL - 1) / PANEL;
    const walks_plan plan = plan_both_ways<KP, DECAY, RULE>(c, on);
    const int64_t heads = (int64_t)c.N * c.HV;
    const auto stages = [&](int width) { return stages_both_ways<KP, DECAY, RULE>(c, on, width); };
    const int passes = c.states_only ? 1 : 2, width = plan.width;
    const int tiles = (panels + width / 4 - 1) / (width / 4);
    const int bytes = stages(width) * bytes_both_ways<KP, DECAY, RULE>(c, width) +
                      bytes_exchanged(adjoint_halves<KP>, width);
    /* Where there is room, states leave by the copy engine. */
    const int states =
        width * adjoint_halves<KP> * (KP / adjoint_halves<KP> / PANEL) * BYTES_OF_ROWS;
    const int staged = on.producers && bytes + states + 1024 <= on.room ? bytes : 0;
    void *held[2] = {};
    cudaError_t error = cudaSuccess;
    if constexpr (cuts_both_ways<KP, DECAY, RULE> && RULE == LA_DELTA) {
        /* the scratch for the states that the walks keep is free until then, and large enough */
        static_assert(2 * (tile_bytes(KP) + PANEL_BYTES) >= sizeof(scored<KP>), "");
        if (plan.segments > 1)
            error = delta_states_between<KP, DECAY>(c, d[LA_DO], plan.segments, f.states,
                                                    &c.x[LA_S0], &d[LA_DST], held, on, pool,
                                                    stream);
    } else if constexpr (cuts_both_ways<KP, DECAY, RULE>) {
        if (plan.segments > 1) {
            const summed forward = {LA_K, false, c.x[LA_V], 1};
            summed back = {LA_Q, false, d[LA_DO], (float)c.scale};
            back.before_token = c.x[LA_U].data;
            error = states_between<KP, DECAY, false>(c, forward, plan.segments, &c.x[LA_S0],
                                                     NULL, held, on, pool, stream);
            if (error == cudaSuccess)
                error = states_between<KP, DECAY, true>(c, back, plan.segments, &d[LA_DST],
                                                        NULL, held + 1, on, pool, stream);
        }
    }
    if (error == cudaSuccess)
        error = launch(kernel, passes * heads * plan.segments * tiles,
                       (width * adjoint_halves<KP> + on.producers) * 32,
                       bytes + (staged ? states : 0), stream, c, d, w, maps, f, tiles,
                       plan.segments, stages(width), staged);
    for (void *one : held) {
        const cudaError_t freed = one ? cudaFreeAsync(one, stream) : cudaSuccess;
        if (error == cudaSuccess) error = freed;
    }
    return error;
}

#endif
