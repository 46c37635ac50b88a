/* One instance of the chunk form by products of pairs (pairs.h): the forward pass of causal
 * bfloat16 problems in chunks, for one instruction set. dispatch.c sends it no others. Files that
 * include this say what instance.h asks for, and LA_BF16_PRODUCTS. */

#include <math.h>
#include <string.h>

#include "kernels.h"

#define LA_SQRT sqrtf

#include "lanes.h"
#include "kinds.h"
#include "arena.h"
#include "ahead.h"
#include "tile.h"
#include "load.h"
#include "pairs.h"
#include "chunk.h"

#define DEFINE_WALK(decay, rule) \
    LA_KERNEL walk_##decay##_##rule(const la_problem *p, const la_unit *u, int64_t C, arena *m) \
    { \
        chunk_forward(p, u, C, m, LA_##decay, LA_##rule, true); \
    }
LA_PAIRS(DEFINE_WALK)

static void (*const walks[4][2])(const la_problem *, const la_unit *, int64_t, arena *) = {
#define ENTRY(decay, rule) [LA_##decay][LA_##rule] = walk_##decay##_##rule,
    LA_PAIRS(ENTRY)};

/* Tokens per chunk. A chunk reads, scales, writes and copies the state, whatever its length, and
 * beside products of pairs that weighs twice as much as beside those of floats: 32; beside AMX's, which take a
 * tenth of the time, four times as much: 64. But decays per key cost K C^2 in float. */
LA_FN int64_t usual_length(const la_problem *p)
{
#ifdef LA_AMX
    return p->decay == LA_KEY ? 16 : 64;
#else
    return p->decay == LA_KEY ? 16 : 32;
#endif
}

static size_t forward_scratch_bytes(const la_problem *p, int64_t longest, int64_t heads)
{
    arena m = {NULL, 0};
    forward_scratch f;
    forward_take(&f, &m, p, chunk_length(p, longest, usual_length(p)), heads, p->V, kernel_decay(p),
                 p->rule, true);
    return m.used;
}

static void forward(const la_problem *p, const la_unit *u, void *scratch)
{
    arena m = {scratch, 0};
    const int64_t C = chunk_length(p, u->end - u->begin, usual_length(p));
    walks[kernel_decay(p)][p->rule](p, u, C, &m);
    pair_products_end();
}

const la_kernels LA_INSTANCE = {
    .isa = LA_ISA,
    .lanes = LANES,
    .forward_scratch = forward_scratch_bytes,
    .forward = forward,
};
