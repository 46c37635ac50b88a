/* One instance of the chunk form with products of bfloat16 numbers (state_products_bf16.h), for one
 * instruction set: the forward pass of the problems that wants_bf16 (isa.c) lets through. A file
 * that includes this one defines LA_INSTANCE and LA_ISA (instance.h), LA_BF16_PRODUCTS and
 * LA_PLANES (bf16_products.h), and, where they apply, LA_AMX (bf16_products_amx.h) and LA_PANEL
 * (chunk_forward.h). It sets the compiler's target. */
#define LA_LANE_BYTES 64
#define LA_REGISTERS 32
#define LA_REAL float
#define LA_REAL_BITS 32

#include <math.h>
#include <string.h>

#include "kernels.h"

#define LA_SQRT sqrtf

#include "lanes.h"
#include "kinds.h"
#include "arena.h"
#include "prefetch.h"
#include "tile.h"
#include "stretch.h"
#include "load.h"
#include "bf16_products.h"
#include "chunk.h"
#include "state_products_bf16.h"
#include "chunk_forward.h"

/* Tokens per chunk. A chunk reads, scales and writes the state once, whatever its length. Beside
 * products of bfloat16 numbers this costs relatively more than beside those of floats, so chunks
 * are longer. */
enum { CHUNK = 32 };

/* clang-format off */
#define LA_BF16_KINDS(X) X(NONE, ADDITIVE) X(NONE, DELTA) X(TOKEN, ADDITIVE) X(TOKEN, DELTA)
/* clang-format on */
#define DEFINE_KIND(decay, rule) \
    LA_KERNEL chunks_forward_##decay##_##rule(const la_problem *p, const la_unit *u, int64_t C, \
                                              arena *m) \
    { \
        chunks_forward(p, u, C, m, LA_##decay, LA_##rule); \
    }
LA_BF16_KINDS(DEFINE_KIND)

static void (*const kinds[][2])(const la_problem *, const la_unit *, int64_t, arena *) = {
#define ENTRY(decay, rule) [LA_##decay][LA_##rule] = chunks_forward_##decay##_##rule,
    LA_BF16_KINDS(ENTRY)};

static int64_t chunk_tokens(const la_problem *p, int64_t length)
{
    return chunk_length(p, length, CHUNK);
}

static size_t forward_scratch_bytes(const la_problem *p, int64_t longest, int64_t heads)
{
    arena m = {NULL, 0};
    forward_scratch f;
    forward_take(&f, &m, p, chunk_tokens(p, longest), heads, p->V, la_kernel_decay(p), p->rule);
    return m.used;
}

static void forward(const la_problem *p, const la_unit *u, void *scratch)
{
    arena m = {scratch, 0};
    const int64_t C = chunk_tokens(p, u->end - u->begin);
    bf16_products_begin();
    kinds[la_kernel_decay(p)][p->rule](p, u, C, &m);
    bf16_products_end();
}

const la_kernels LA_INSTANCE = {
    .isa = LA_ISA,
    .lanes = LANES,
    .bits = 8 * LA_PLANES,
    .forward_scratch = forward_scratch_bytes,
    .forward = forward,
    .chunk_tokens = chunk_tokens,
};
