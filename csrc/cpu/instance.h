/* One instance: every kernel for one instruction set and one real type, as a table of functions.
 *
 * A file that includes this one defines LA_INSTANCE (the table's name), LA_ISA (the name that users
 * see), LA_LANE_BYTES, LA_REGISTERS, LA_REAL and LA_REAL_BITS, and sets the compiler's target. A
 * kernel is a function with constant decay and rule: there is one for each line of kinds.def, never
 * one for each op. */

#include <math.h>
#include <string.h>

#include "kernels.h"

#if LA_REAL_BITS == 32
#define LA_SQRT sqrtf
#else
#define LA_SQRT sqrt
#endif

#include "lanes.h"
#include "kinds.h"
#include "arena.h"
#include "prefetch.h"
#include "tile.h"
#include "stretch.h"
#include "load.h"
#include "chunk.h"
#include "state_products.h"
#include "chunk_forward.h"
#include "chunk_adjoint_room.h"
#include "chunk_scores_adjoint.h"
#include "chunk_backward.h"
#include "scan.h"
#include "noncausal.h"
#include "reduce.h"
#include "curves.h"
#include "rows.h"
#include "diagonal_room.h"
#include "diagonal_lanes.h"
#include "diagonal_scan.h"
#include "convolve.h"
#include "../activation.h"
#include "group_norm.h"
#include "factor_rows.h"

/* clang-format off */
#define LA_KIND(decay, rule) \
    LA_KERNEL chunks_forward_##decay##_##rule(const la_problem *p, const la_unit *u, int64_t C, \
                                              arena *m) \
    { \
        chunks_forward(p, u, C, m, LA_##decay, LA_##rule); \
    } \
    LA_KERNEL scan_forward_##decay##_##rule(const la_problem *p, const la_unit *u, \
                                            const la_states *to, arena *m) \
    { \
        scan_forward(p, u, to, m, LA_##decay, LA_##rule); \
    } \
    LA_KERNEL step_##decay##_##rule(const la_problem *p, const la_unit *u, arena *m) \
    { \
        step_in_place(p, u, m, LA_##decay, LA_##rule); \
    } \
    LA_KERNEL chunks_backward_##decay##_##rule(const la_problem *p, const la_unit *u, \
                                               const la_partials *sums, int64_t C, arena *m) \
    { \
        chunks_backward(p, u, sums, C, m, LA_##decay, LA_##rule); \
    } \
    LA_KERNEL scan_backward_##decay##_##rule(const la_problem *p, const la_unit *u, \
                                             const la_partials *sums, arena *m) \
    { \
        scan_backward(p, u, sums, m, LA_##decay, LA_##rule); \
    }
#include "../kinds.def"

static const struct {
    void (*chunks_forward)(const la_problem *, const la_unit *, int64_t, arena *);
    void (*scan_forward)(const la_problem *, const la_unit *, const la_states *, arena *);
    void (*step)(const la_problem *, const la_unit *, arena *);
    void (*chunks_backward)(const la_problem *, const la_unit *, const la_partials *, int64_t,
                            arena *);
    void (*scan_backward)(const la_problem *, const la_unit *, const la_partials *, arena *);
} kinds[LA_KINDS] = {
#define LA_KIND(decay, rule) \
    [LA_##decay##_##rule] = {chunks_forward_##decay##_##rule, \
                             scan_forward_##decay##_##rule, \
                             step_##decay##_##rule, \
                             chunks_backward_##decay##_##rule, \
                             scan_backward_##decay##_##rule},
#include "../kinds.def"
};
/* clang-format on */

/* Tokens per chunk. The products with the state cost the same per token for any C, and those within
 * the chunk grow with C. 16 rows already run the tiles at full speed. */
enum { CHUNK = 16 };

static int64_t chunk_tokens(const la_problem *p, int64_t length)
{
    return chunk_length(p, length, CHUNK);
}

/* The scratch of a unit with all columns; narrower units need less. */
static size_t forward_scratch_bytes(const la_problem *p, int64_t longest, int64_t heads)
{
    arena m = {NULL, 0};
    const int64_t C = chunk_tokens(p, longest);
    if (!p->causal) {
        noncausal_scratch f;
        noncausal_take(&f, &m, p, C < 64 ? C : 64, p->V);
    } else if (la_by_token(p)) {
        scan_scratch f;
        scan_take(&f, &m, p);
    } else {
        forward_scratch f;
        forward_take(&f, &m, p, C, heads, p->V, la_kernel_decay(p), p->rule);
    }
    return m.used;
}

static int64_t length_of(const la_unit *u)
{
    return (u->keys_end > u->end ? u->keys_end : u->end) - u->begin;
}

static const la_states final_states = {LA_ST, LA_YT, LA_ZT};
static const la_states states_of_step = {LA_S0, LA_Y0, LA_Z0};

static void forward(const la_problem *p, const la_unit *u, void *scratch)
{
    arena m = {scratch, 0};
    const int64_t C = chunk_tokens(p, length_of(u));
    if (p->causal && !la_by_token(p)) {
        kinds[p->kind].chunks_forward(p, u, C, &m);
        return;
    }
    for (int64_t i = 0; i < u->heads; i++) {
        const la_unit one = head_of(p, u, i);
        m.used = 0;
        if (p->causal)
            kinds[p->kind].scan_forward(p, &one, &final_states, &m);
        else
            noncausal_forward(p, &one, C < 64 ? C : 64, &m);
    }
}

static size_t step_scratch_bytes(const la_problem *p)
{
    arena m = {NULL, 0};
    scan_scratch f;
    scan_take(&f, &m, p);
    return m.used;
}

static void step(const la_problem *p, const la_unit *u, void *scratch)
{
    arena m = {scratch, 0};
    if (state_in_place(p))
        kinds[p->kind].step(p, u, &m);
    else
        kinds[p->kind].scan_forward(p, u, &states_of_step, &m);
}

static size_t backward_scratch_bytes(const la_problem *p, int64_t longest)
{
    arena m = {NULL, 0};
    const int64_t C = chunk_tokens(p, longest);
    const int64_t columns = p->V < LA_BACKWARD_PANEL ? p->V : LA_BACKWARD_PANEL;
    if (!p->causal) {
        noncausal_scratch f;
        noncausal_take(&f, &m, p, C < 64 ? C : 64, columns);
    } else if (la_by_token(p)) {
        scan_backward_scratch f;
        scan_backward_take(&f, &m, p, longest);
    } else {
        backward_scratch f;
        backward_take(&f, &m, p, C, longest, columns, la_kernel_decay(p), p->rule);
    }
    return m.used;
}

static void backward(const la_problem *p, const la_unit *u, const la_partials *sums, void *scratch)
{
    arena m = {scratch, 0};
    const int64_t C = chunk_tokens(p, length_of(u));
    if (!p->causal) {
        noncausal_backward(p, u, sums, C < 64 ? C : 64, &m);
    } else if (la_by_token(p)) {
        kinds[p->kind].scan_backward(p, u, sums, &m);
    } else {
        kinds[p->kind].chunks_backward(p, u, sums, C, &m);
    }
}

static size_t reduce_scratch_bytes(const la_problem *p)
{
    arena m = {NULL, 0};
    reduce_scratch f;
    reduce_take(&f, &m, p);
    return m.used;
}

const la_kernels LA_INSTANCE = {
    .isa = LA_ISA,
    .lanes = LANES,
    .bits = LA_REAL_BITS == 32 ? 24 : 53,
    .forward_scratch = forward_scratch_bytes,
    .forward = forward,
    .chunk_tokens = chunk_tokens,
    .step_scratch = step_scratch_bytes,
    .step = step,
    .backward_scratch = backward_scratch_bytes,
    .backward = backward,
    .reduce_scratch = reduce_scratch_bytes,
    .reduce = reduce,
    .reduce_head = reduce_head,
    .outside = outside,
    .gate_parameters = gate_parameters,
    .gate_forward = gate_forward,
    .gate_backward = gate_backward,
    .diagonal_scratch = diagonal_scratch,
    .diagonal_forward = diagonal_forward,
    .diagonal_backward = diagonal_backward,
    .diagonal_reduce = diagonal_reduce,
    .convolution_taps = convolution_taps,
    .convolution_scratch = convolution_scratch,
    .convolution_forward = convolution_forward,
    .convolution_state = convolution_state,
    .convolution_backward = convolution_backward,
    .group_norm = group_norm,
    .make_written = make_written,
    .undo_factors = undo_factors,
    .store_numbers = store_numbers,
};
