/* Legal problems at random: every op, pass, mode, dtype, layout and option of the core. */
#include "sample.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void block_map(block *b, size_t bytes, bool at_end);

/* ---- choices ---- */

static uint64_t generate(draw *d)
{
    d->state += 0x9e3779b97f4a7c15; /* splitmix64 */
    uint64_t x = d->state;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

uint64_t draw_bits(draw *d)
{
    if (!d->from_bytes) return generate(d);
    if (!d->left) return 0;
    d->left--;
    return *d->bytes++;
}

int64_t draw_int(draw *d, int64_t low, int64_t high)
{
    return low + (int64_t)(draw_bits(d) % (uint64_t)(high - low + 1));
}

bool draw_chance(draw *d, int one_in) { return draw_int(d, 0, one_in - 1) == one_in - 1; }

double draw_real(draw *d, double low, double high)
{
    return low + (high - low) * (double)(generate(d) >> 11) / 0x1p53;
}

/* Sizes around vectors, tiles, chunks and panels, and any others. */
static int64_t draw_size(draw *d, int64_t largest)
{
    static const int64_t near[] = {1,  2,  3,  7,  8,  15,  16,  17, 31,
                                   32, 33, 63, 64, 65, 127, 128, 129};
    int64_t n = draw_chance(d, 2) ? draw_int(d, 1, largest < 200 ? largest : 200)
                                  : near[draw_int(d, 0, sizeof near / sizeof *near - 1)];
    return n < largest ? n : largest;
}

/* ---- elements ---- */

static void store(char *to, la_dtype dtype, double x)
{
    float f = (float)x;
    uint32_t word;
    uint16_t half;
    memcpy(&word, &f, 4);
    switch (dtype) {
    case LA_F64: memcpy(to, &x, 8); return;
    case LA_F32: memcpy(to, &f, 4); return;
    case LA_BF16: half = (uint16_t)(word >> 16); break;
    case LA_F16: { /* towards zero; what is too large becomes inf, what is too small 0 */
        int exponent = (int)(word >> 23 & 255) - 127 + 15;
        half = (uint16_t)(word >> 16 & 0x8000);
        if (exponent == 143)
            half |= (uint16_t)(isnan(f) ? 0x7e00 : 0x7c00);
        else if (exponent > 30)
            half |= 0x7c00;
        else if (exponent > 0)
            half |= (uint16_t)(exponent << 10 | (word >> 13 & 1023));
        break;
    }
    case LA_I32: memcpy(to, &(int32_t){(int32_t)x}, 4); return;
    default: memcpy(to, &(int64_t){(int64_t)x}, 8); return;
    }
    memcpy(to, &half, 2);
}

static double draw_value(const sample *s, draw *d, int name)
{
    static const double wild[] = {INFINITY, -INFINITY, NAN, 1e30, -1e30, 1e-42, -0., 0., -1e4, 2};
    const la_problem *p = &s->p;
    if (!s->tame && draw_real(d, 0, 1) < 0.1) return wild[(int)draw_real(d, 0, 9.999)];
    double luck = draw_real(d, 0, 1);
    switch (name) {
    case LA_G:
        if (p->gate == LA_DECAY) return luck < 0.1 ? 0 : luck < 0.2 ? 1 : draw_real(d, 0, 1);
        luck = luck < 0.05 ? -INFINITY : luck < 0.1 ? -1e4 : luck < 0.2 ? 0 : draw_real(d, -1, 0);
        return p->gate == LA_SLOPE ? -luck : luck;
    case LA_ETA:
    case LA_BETA: return luck < 0.1 ? 0 : draw_real(d, 0, 0.9);
    case LA_X:
    case LA_Y:
    case LA_K: /* |k| < 1, or a rule that predicts would grow */
        return draw_real(d, -1, 1) / (la_predicts(p->rule) ? sqrt((double)p->K) : 1);
    case LA_Z0: return draw_real(d, 0.5, 1.5); /* so that no denominator is near zero */
    default: return draw_real(d, -1, 1);
    }
}

/* ---- arrays ---- */

/* The kernels want rows with unit stride of these; the rest may lie anywhere. */
static bool has_rows(const la_problem *p, int name)
{
    if (name == LA_G || name == LA_DG) return p->decay == LA_KEY;
    return name != LA_BETA && name != LA_DBETA && name != LA_ETA && name != LA_DETA &&
           name != LA_CU && name != LA_SLOT;
}

static la_dtype dtype_for(const la_problem *p, draw *d, int name, la_dtype dtype)
{
    const la_dtype real = dtype == LA_F64 ? LA_F64 : LA_F32;
    switch (name) {
    case LA_G:
    case LA_U:
    case LA_ETA:
    case LA_BETA: return (la_dtype)draw_int(d, LA_F64, LA_BF16);
    case LA_DG: return p->array[LA_G].dtype;
    case LA_DU: return p->array[LA_U].dtype;
    case LA_DETA: return p->array[LA_ETA].dtype;
    case LA_DBETA: return p->array[LA_BETA].dtype;
    case LA_CU:
    case LA_SLOT: return draw_chance(d, 2) ? LA_I32 : LA_I64;
    case LA_S0:
    case LA_Y0:
    case LA_Z0: return real == LA_F32 && draw_chance(d, 3) ? LA_BF16 : real;
    case LA_ST:
    case LA_YT:
    case LA_ZT:
    case LA_DST:
    case LA_DYT:
    case LA_DZT:
    case LA_DS0:
    case LA_DY0:
    case LA_DZ0: return real;
    default: return dtype;
    }
}

/* Every row a state of its own, or none: a walk through the pool by a step that meets all of it. */
static void fill_slots(const la_problem *p, draw *d, la_array *a)
{
    int64_t at = draw_int(d, 0, p->P - 1);
    for (int64_t n = 0; n < p->B; n++) {
        store(array_element(a, n), a->dtype, draw_chance(d, 4) ? -1 : (double)at);
        at = (at + 1) % p->P;
    }
}

/* Axes in any order, gaps between them, some backwards, some of inputs repeated (stride 0). */
static void add_array(sample *s, draw *d, int name, la_dtype dtype, bool output)
{
    la_problem *p = &s->p;
    la_array *a = &p->array[name];
    const bool in_place = output && name < LA_O, rows = has_rows(p, name);
    a->given = true;
    a->dtype = dtype_for(p, d, name, dtype);
    a->ndim = la_shape_of(p, (la_name)name, a->shape);
    bool done[LA_MAX_DIMS] = {false};
    int64_t extent = 1, back = 0;
    for (int n = 0; n < a->ndim; n++) {
        int axis = a->ndim - 1;
        if (n || !rows) axis = (int)draw_int(d, 0, a->ndim - 1);
        while (done[axis]) axis = (axis + 1) % a->ndim;
        done[axis] = true;
        const bool row = rows && axis == a->ndim - 1;
        if (a->shape[axis] <= 1) {
            a->stride[axis] = draw_int(d, -99, 99); /* nobody may step along it */
        } else if (!output && !row && draw_chance(d, 8) && name != LA_CU && name != LA_SLOT) {
            a->stride[axis] = 0;
        } else {
            a->stride[axis] = extent;
            extent = a->stride[axis] * a->shape[axis];
            if (!row || draw_chance(d, 2)) extent += draw_chance(d, 3) ? draw_int(d, 1, 5) : 0;
            if (!row && draw_chance(d, 6)) {
                back += a->stride[axis] * (a->shape[axis] - 1);
                a->stride[axis] = -a->stride[axis];
            }
        }
    }
    block *b = &s->block[name];
    block_map(b, (array_size(a) ? (size_t)extent : 0) * la_size_of(a->dtype), draw_chance(d, 2));
    a->data = b->start + back * la_size_of(a->dtype);
    s->written[name] = output;
    if (name == LA_SLOT) fill_slots(p, d, a);
    if (name != LA_CU && name != LA_SLOT && (!output || in_place))
        for (int64_t i = 0; i < array_size(a); i++)
            store(array_element(a, i), a->dtype, draw_value(s, d, name));
    if (name == LA_CU) {
        int64_t at = 0;
        for (int64_t n = 0; n <= p->N; n++) {
            store(array_element(a, n), a->dtype, (double)at);
            at = n == p->N - 1 ? p->T : draw_chance(d, 4) ? at : draw_int(d, at, p->T);
        }
    }
    if (b->bytes) memcpy(b->saved, b->start, b->bytes);
}

/* ---- problems ---- */

static void draw_letters(la_problem *p, draw *d, int64_t largest)
{
    p->one_head = draw_chance(d, 6);
    p->B = p->one_head ? 1 : draw_chance(d, 12) ? 0 : draw_int(d, 1, 3);
    p->H = p->one_head ? 1 : draw_int(d, 1, 3);
    p->HV = p->one_head ? 1 : p->H * draw_int(d, 1, 3);
    p->K = draw_size(d, largest);
    p->V = draw_size(d, largest);
    p->T = p->pass == LA_STEP ? 1 : draw_chance(d, 12) ? 0 : draw_size(d, largest);
    while (p->B * p->T * p->HV * p->K * p->V > 1 << 21) { /* a millisecond or so */
        p->K = (p->K + 1) / 2;
        p->V = (p->V + 1) / 2;
    }
    p->N = p->B;
    if (p->pass == LA_STEP && draw_chance(d, 2)) {
        p->array[LA_SLOT].given = true;
        p->P = (p->B ? p->B : 1) + (draw_chance(d, 3) ? 0 : draw_int(d, 1, 4));
    }
    if (p->pass != LA_STEP && draw_chance(d, 4)) {
        p->array[LA_CU].given = true;
        p->B = 1;
        p->N = p->T ? draw_int(d, 1, 5) : draw_int(d, 0, 2);
    }
}

static void draw_options(sample *s, draw *d)
{
    static const la_map positive[] = {LA_ELU1, LA_RELU, LA_RELU2, LA_EXP};
    la_problem *p = &s->p;
    p->L = p->T;
    p->mode = (la_mode)draw_int(d, LA_CHUNK, LA_PARALLEL);
    if ((p->has_chunk = draw_chance(d, 2))) p->chunk = draw_int(d, 1, draw_chance(d, 4) ? 250 : 40);
    p->predicts_before = p->decay == LA_TOKEN && p->rule == LA_DELTA && draw_chance(d, 4);
    const bool gates = la_is_gated(p->decay, p->rule) && p->pass != LA_BACKWARD;
    p->x_is_factor = gates && draw_chance(d, 3);
    if (p->decay == LA_PAIR && p->pass != LA_STEP && draw_chance(d, 2))
        p->batch = draw_int(d, 1, draw_chance(d, 4) ? 250 : 40);
    if ((p->has_scale = draw_chance(d, 3))) p->scale = (double)draw_int(d, -4, 4) / 4;
    p->gate = (la_gate)draw_int(d, LA_LOG, p->decay == LA_HEAD ? LA_SLOPE : LA_DECAY);
    p->qk_l2norm = draw_chance(d, 3);
    p->state_v_first = draw_chance(d, 3);
    p->want_final = draw_chance(d, 2);
    if (p->op == LA_OP_linear_attention) {
        p->normaliser = (la_normaliser)draw_int(d, LA_UNNORMALISED, LA_ADD);
        p->causal = p->pass == LA_STEP || !draw_chance(d, 3);
        if (!p->causal && !p->array[LA_CU].given && draw_chance(d, 2))
            p->L = draw_chance(d, 4) ? 0 : draw_size(d, 60);
        if (p->normaliser && p->has_scale && s->tame) p->scale = 0.5; /* a denominator is > 0 */
        for (int i = 0; i < 2; i++) {
            p->map[i] = p->normaliser && s->tame ? positive[draw_int(d, 0, 3)]
                                                 : (la_map)draw_int(d, LA_IDENTITY, LA_EXP);
            p->map_eps[i] = 1e-3;
        }
        p->eps = draw_chance(d, 3) ? 1e-3 : 1e-6;
    }
}

void sample_make(sample *s, draw *d, int64_t largest)
{
    memset(s, 0, sizeof *s);
    la_problem *p = &s->p;
    const la_pass pass = (la_pass)draw_int(d, LA_FORWARD, LA_BACKWARD);
    la_problem_init(p, (la_op)draw_int(d, 0, LA_OPS - 1), pass);
    s->tame = !draw_chance(d, 6);
    const la_dtype dtype = (la_dtype)draw_int(d, LA_F64, LA_BF16);
    draw_letters(p, d, largest);
    draw_options(s, d);
    const bool state = pass == LA_STEP || draw_chance(d, 2), final = draw_chance(d, 2);
    const bool gate = draw_chance(d, 3), wants_x = p->predicts_before || p->x_is_factor;
    const bool x = p->rule == LA_DPLR || wants_x || draw_chance(d, 3), eta = !draw_chance(d, 4),
               weight = draw_chance(d, 2), skip = draw_chance(d, 2);
    for (int name = LA_Q; name < LA_ARRAYS; name++) {
        const la_array_row *row = &la_array_rows[name];
        bool output = name >= LA_O && !(name >= LA_DQ && la_array_rows[row->of].role == LA_OUTPUT);
        bool has;
        switch (name) {
        case LA_X: has = x; break;
        case LA_W: has = gate && x; break;
        case LA_ETA: has = eta; break;
        case LA_WEIGHT: has = weight; break;
        case LA_SKIP: has = skip; break;
        case LA_DX: has = x && pass == LA_BACKWARD; break;
        case LA_DW: has = gate && x && pass == LA_BACKWARD; break;
        case LA_DWEIGHT: has = weight && pass == LA_BACKWARD; break;
        case LA_DSKIP: has = skip && pass == LA_BACKWARD; break;
        case LA_DETA: has = eta && pass == LA_BACKWARD; break;
        case LA_S0:
        case LA_Y0:
        case LA_Z0: has = state, output = pass == LA_STEP; break;
        case LA_CU:
        case LA_SLOT: has = p->array[name].given; break;
        case LA_O: has = pass != LA_BACKWARD; break;
        case LA_ST:
        case LA_YT:
        case LA_ZT: has = pass == LA_FORWARD && p->want_final; break;
        case LA_DST:
        case LA_DYT:
        case LA_DZT: has = pass == LA_BACKWARD && final; break;
        case LA_DS0:
        case LA_DY0:
        case LA_DZ0: has = pass == LA_BACKWARD && state; break;
        default: has = name < LA_O || pass == LA_BACKWARD;
        }
        if (has && la_has(p, (la_name)name)) add_array(s, d, name, dtype, output);
    }
}

void sample_describe(const sample *s)
{
    static const char *const passes[] = {"forward", "step", "backward"};
    static const char *const modes[] = {"chunk", "recurrent", "parallel"};
    const la_problem *p = &s->p;
    fprintf(
        stderr,
        "  %s %s %s %s on %s, %d threads: B %lld T %lld L %lld H %lld HV %lld K %lld V %lld N %lld"
        "%s%s%s pool %lld chunk %lld batch %lld normaliser %d maps %d %d l2norm %d causal %d "
        "scale %g v_first %d%s\n",
        la_variants[p->op].name, passes[p->pass], modes[p->mode],
        la_dtype_names[p->array[LA_Q].dtype], la_isa(), la_get_num_threads(), (long long)p->B,
        (long long)p->T, (long long)p->L, (long long)p->H, (long long)p->HV, (long long)p->K,
        (long long)p->V, (long long)p->N, p->one_head ? " one head" : "",
        p->array[LA_CU].given ? " packed" : "",
        p->predicts_before ? " before"
        : p->x_is_factor   ? " factor"
                           : "",
        (long long)p->P, (long long)p->chunk, (long long)p->batch, p->normaliser, p->map[0],
        p->map[1], p->qk_l2norm, p->causal, p->scale, p->state_v_first, s->tame ? "" : " wild");
}
