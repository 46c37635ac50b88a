/* Loads and stores: from the user's dtype and strides to padded rows of reals, and back. The l2
 * norm, the feature map, the decay of a gate and the scale of a read are fused into them, and so
 * are the adjoints of these. */

#define LA_ELEMENT LA_FN
#define LA_PLAIN LA_FN
typedef la_problem la_options;
#include "../elements.h"

/* ---- dtypes ---- */

typedef union float_bits {
    float f;
    uint32_t u;
} float_bits;

LA_FN float from_bf16(uint16_t bits)
{
    float_bits x = {.u = (uint32_t)bits << 16};
    return x.f;
}

LA_FN uint16_t to_bf16(float value)
{
    float_bits x = {.f = value};
    if (value != value) return (uint16_t)(x.u >> 16 | 0x40);   /* a NaN stays one, a quiet one */
    return (uint16_t)((x.u + 0x7fff + (x.u >> 16 & 1)) >> 16); /* to nearest, ties to even */
}

/* The exponent and mantissa of a half, moved to their places in a float, make a number that is
 * 2^112 times too small (biases 15 and 127). One multiplication corrects normal and denormal
 * numbers. */
LA_FN float from_f16(uint16_t bits)
{
    float_bits x = {.u = (uint32_t)(bits & 0x7fff) << 13};
    x.f *= 0x1p112f;
    if ((bits & 0x7c00) == 0x7c00) x.u |= 0x7f800000;
    x.u |= (uint32_t)(bits & 0x8000) << 16;
    return x.f;
}

LA_FN uint16_t to_f16(float value)
{
    float_bits x = {.f = value}, y;
    uint16_t sign = (uint16_t)(x.u >> 16 & 0x8000);
    x.u &= 0x7fffffff;
    if (x.u > 0x7f800000) return sign | 0x7e00;
    if (x.u >= 0x477ff000) return sign | 0x7c00; /* 65520 and more round to infinity */
    if (x.u < 0x38800000) {
        /* Below 2^-14 the spacing is 2^-24. Floats just above 1/2 have the same spacing, so the
         * float addition rounds to it. */
        y.f = x.f + 0.5f;
        return sign | (uint16_t)(y.u - 0x3f000000);
    }
    return sign | (uint16_t)((x.u + 0xfff + (x.u >> 13 & 1) - 0x38000000) >> 13);
}

LA_FN real load_element(const char *from, la_dtype dtype)
{
    switch (dtype) {
    case LA_F64: return (real) * (const double *)from;
    case LA_F32: return *(const float *)from;
    case LA_F16: return from_f16(*(const uint16_t *)from);
    case LA_BF16: return from_bf16(*(const uint16_t *)from);
    default: return 0; /* check.c refuses all others */
    }
}

LA_FN void store_element(char *to, la_dtype dtype, real x)
{
    switch (dtype) {
    case LA_F64: *(double *)to = x; break;
    case LA_F32: *(float *)to = (float)x; break;
    case LA_F16: *(uint16_t *)to = to_f16((float)x); break;
    case LA_BF16: *(uint16_t *)to = to_bf16((float)x); break;
    default: break;
    }
}

/* ---- rows: n elements with unit stride ---- */

LA_COLD void convert_row(real *restrict to, int64_t n, const char *restrict from, la_dtype dtype)
{
    switch (dtype) {
    case LA_F64:
        for (int64_t i = 0; i < n; i++) to[i] = (real)((const double *)from)[i];
        break;
    case LA_F32:
        for (int64_t i = 0; i < n; i++) to[i] = ((const float *)from)[i];
        break;
    case LA_F16:
        for (int64_t i = 0; i < n; i++) to[i] = from_f16(((const uint16_t *)from)[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++) to[i] = from_bf16(((const uint16_t *)from)[i]);
        break;
    }
    for (int64_t i = n; i < padded(n); i++) to[i] = 0;
}

/* Usually nothing is converted, and a row is a handful of vectors: too few for a call of memcpy. */
LA_FN void load_row(real *to, int64_t n, const char *from, la_dtype dtype)
{
    if (dtype != REAL_DTYPE || n % LANES) {
        convert_row(to, n, from, dtype);
        return;
    }
    const lane_of_state *x = (const lane_of_state *)from;
    for (int64_t i = 0; i < n / LANES; i++) lanes_of(to)[i] = x[i];
}

LA_COLD void convert_row_back(char *restrict to, la_dtype dtype, const real *restrict from,
                              int64_t n)
{
    switch (dtype) {
    case LA_F64:
        for (int64_t i = 0; i < n; i++) ((double *)to)[i] = from[i];
        break;
    case LA_F32:
        for (int64_t i = 0; i < n; i++) ((float *)to)[i] = (float)from[i];
        break;
    case LA_F16:
        for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = to_f16((float)from[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = to_bf16((float)from[i]);
        break;
    }
}

LA_FN void store_row(char *to, la_dtype dtype, const real *from, int64_t n)
{
    if (dtype != REAL_DTYPE || n % LANES) {
        convert_row_back(to, dtype, from, n);
        return;
    }
    lane_of_state *x = (lane_of_state *)to;
    for (int64_t i = 0; i < n / LANES; i++) x[i] = lanes_in(from)[i];
}

/* Where element (i0, i1, i2, 0) of an array is. */
LA_FN char *at(const la_array *x, int64_t i0, int64_t i1, int64_t i2)
{
    return x->data +
           (i0 * x->stride[0] + i1 * x->stride[1] + i2 * x->stride[2]) * la_size_of(x->dtype);
}

LA_FN char *at_column(const la_array *x, int64_t i0, int64_t i1, int64_t i2, int64_t column)
{
    return at(x, i0, i1, i2) + column * la_size_of(x->dtype);
}

/* ---- feature maps of rows; the padding stays zero ---- */

LA_COLD void map_row(real *x, int64_t n, la_map map, real eps)
{
    if (map == LA_IDENTITY) return;
    for (int64_t i = 0; i < n; i += LANES)
        lanes_of(x + i)[0] = apply_map(lanes_in(x + i)[0], map, eps);
    for (int64_t i = n; i < padded(n); i++) x[i] = 0;
}

/* dx *= phi'(x) */
LA_COLD void map_row_adjoint(real *dx, const real *x, int64_t n, la_map map)
{
    if (map == LA_IDENTITY) return;
    for (int64_t i = 0; i < n; i += LANES)
        lanes_of(dx + i)[0] *= map_slope(lanes_in(x + i)[0], map);
}

/* ---- q and k as the recurrence sees them: l2 norm, feature map ---- */

LA_FN real l2norm_row(real *x, int64_t n)
{
    const real factor = l2norm_factor(dot(n, x, x));
    for (int64_t i = 0; i < n; i += LANES) lanes_of(x + i)[0] *= factor;
    return factor;
}

/* Tokens t..t+n of q or k, in padded rows. */
LA_COLD void load_keys(const la_problem *p, la_name name, int64_t b, int64_t t, int64_t n,
                       int64_t h, real *x)
{
    const la_array *from = &p->array[name];
    const la_map map = p->map[name == LA_K];
    for (int64_t i = 0; i < n; i++) {
        real *row = x + i * padded(p->K);
        load_row(row, p->K, at(from, b, t + i, h), from->dtype);
        if (p->qk_l2norm) l2norm_row(row, p->K);
        if (map != LA_IDENTITY) map_row(row, p->K, map, (real)p->map_eps[name == LA_K]);
    }
}

LA_FN void load_key(const la_problem *p, la_name name, int64_t b, int64_t t, int64_t h, real *x)
{
    load_keys(p, name, b, t, 1, h, x);
}

/* Tokens t..t+n of x or y, in padded rows: no norm and no feature map. */
LA_FN void load_plain_rows(const la_problem *p, la_name name, const la_unit *u, int64_t t,
                           int64_t n, real *to)
{
    const la_array *from = &p->array[name];
    for (int64_t i = 0; i < n; i++)
        load_row(to + i * padded(p->K), p->K, at(from, u->b, t + i, u->h), from->dtype);
}

LA_FN void load_bonus(const la_problem *p, int64_t h, real *to)
{
    const la_array *from = &p->array[LA_U];
    load_row(to, p->K, at(from, h, 0, 0), from->dtype);
}

/* The adjoint of load_key: dx is the gradient of the row that load_key gave, and becomes the
 * gradient of the user's row. x is scratch of the same length. */
LA_COLD void load_key_adjoint(const la_problem *p, la_name name, int64_t b, int64_t t, int64_t h,
                              real *dx, real *x)
{
    const la_array *from = &p->array[name];
    real factor = 1;
    load_row(x, p->K, at(from, b, t, h), from->dtype);
    if (p->qk_l2norm) factor = l2norm_row(x, p->K);
    map_row_adjoint(dx, x, p->K, p->map[name == LA_K]);
    if (p->qk_l2norm) {
        const real along = dot(p->K, x, dx);
        for (int64_t i = 0; i < p->K; i += LANES)
            lanes_of(dx + i)[0] =
                l2norm_gradient(lanes_in(dx + i)[0], lanes_in(x + i)[0], along, factor);
    }
}

/* Stores the user's dq or dk, given dx, the gradient of the row that load_key gave. `room` is
 * scratch of the same length. */
LA_COLD void store_key_gradient(const la_problem *p, la_name name, int64_t b, int64_t t, int64_t h,
                                real *dx, real *room)
{
    const la_array *to = &p->array[name == LA_Q ? LA_DQ : LA_DK];
    if (p->qk_l2norm || p->map[name == LA_K] != LA_IDENTITY)
        load_key_adjoint(p, name, b, t, h, dx, room);
    store_row(at(to, b, t, h), to->dtype, dx, p->K);
}

LA_FN void store_plain_row(const la_problem *p, la_name name, int64_t b, int64_t t, int64_t h,
                           const real *from)
{
    const la_array *to = &p->array[name];
    store_row(at(to, b, t, h), to->dtype, from, p->K);
}

/* beta, eta or the one gate of a token; 0 where it is not given. */
LA_COLD real load_scalar(const la_problem *p, la_name name, const la_unit *u, int64_t t)
{
    const la_array *x = &p->array[name];
    return x->given ? load_element(at(x, u->b, t, u->hv), x->dtype) : 0;
}

/* ---- the decay a = exp(g): a row for a gate per key, otherwise one number ---- */

/* The decays of tokens t..t+n, one number each, in whole lanes: a lane of exponentials costs no
 * more than one. `rest` receives the decay minus a. */
LA_COLD void load_decays(const la_problem *p, const la_unit *u, int64_t t, int64_t n, real *a,
                         real *rest)
{
    const la_array *g = &p->array[LA_G];
    for (int64_t i = 0; i < n; i++) a[i] = load_element(at(g, u->b, t + i, u->hv), g->dtype);
    for (int64_t i = n; i < padded(n); i++) a[i] = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        lane less;
        lanes_of(a + i)[0] = decay_in_two(lanes_in(a + i)[0], p->gate, &less);
        lanes_of(rest + i)[0] = less;
    }
}

LA_COLD void load_key_decay(const la_problem *p, const la_unit *u, int64_t t, real *a)
{
    const la_array *g = &p->array[LA_G];
    load_row(a, p->K, at(g, u->b, t, u->hv), g->dtype);
    if (p->gate == LA_DECAY) return;
    for (int64_t i = 0; i < p->K; i += LANES)
        lanes_of(a + i)[0] = decay_of(lanes_in(a + i)[0], p->gate);
    for (int64_t i = p->K; i < padded(p->K); i++) a[i] = 0;
}

LA_COLD void load_number_decay(const la_problem *p, const la_unit *u, int64_t t, real *a)
{
    a[0] = decay_of(load_scalar(p, LA_G, u, t) - LANE_ZERO, p->gate)[0];
}

LA_FN void load_decay(const la_problem *p, const la_unit *u, int64_t t, real *a,
                      const la_decay decay)
{
    if (decay == LA_KEY)
        load_key_decay(p, u, t, a);
    else if (decay != LA_NONE)
        load_number_decay(p, u, t, a);
}

/* ---- decays that pay back their roundings ----
 *
 * In float32 a decay near 1 is rounded by up to 2^-25 of itself. Equal decays are always rounded to
 * the same side: over 65536 tokens of g = -1e-5 the state would be off by 3e-4. So the passes that
 * multiply a state by one decay after another keep the sum of the roundings so far, `owed`, and pay
 * it back with the next decay. A single decay of at most a quarter leaves nothing owed. */

LA_FN real paid_back(real2 decay, real *owed)
{
    const real2 due = decay * (1 + (real2)*owed);
    const real paid = (real)due;
    *owed = paid > (real).25 && paid <= 1 ? (real)((due - (real2)paid) / (real2)paid) : 0;
    return paid;
}

LA_COLD void load_number_paid_back(const la_problem *p, const la_unit *u, int64_t t, real *a,
                                   real *owed)
{
    lane rest;
    const lane decay = decay_in_two(load_scalar(p, LA_G, u, t) - LANE_ZERO, p->gate, &rest);
    a[0] = paid_back((real2)decay[0] + (real2)rest[0], owed);
}

LA_COLD void load_keys_paid_back(const la_problem *p, const la_unit *u, int64_t t, real *a,
                                 real *owed)
{
    const la_array *g = &p->array[LA_G];
    load_row(a, p->K, at(g, u->b, t, u->hv), g->dtype);
    for (int64_t i = 0; i < p->K; i += LANES)
        lanes_of(a + i)[0] = lane_decay_paid_back(lanes_in(a + i)[0], lanes_of(owed + i));
    for (int64_t i = p->K; i < padded(p->K); i++) a[i] = 0;
}

/* load_decay for passes that go token by token. `owed` is one number, or one per key. A step pays
 * back nothing: it knows no other token, and its bits do not depend on where its state lies. */
LA_FN void load_decay_paid_back(const la_problem *p, const la_unit *u, int64_t t, real *a,
                                real *owed, const la_decay decay)
{
    if (decay == LA_NONE || p->gate == LA_DECAY || p->pass == LA_STEP)
        load_decay(p, u, t, a, decay);
    else if (decay == LA_KEY)
        load_keys_paid_back(p, u, t, a, owed);
    else
        load_number_paid_back(p, u, t, a, owed);
}

/* Stores the user's dg, given da, the gradient of the decay. `room` is scratch of as many numbers,
 * in whole lanes. The gate's gradient takes the decay as it is, not one that has paid back. So its
 * bits do not depend on where da was summed. */
LA_COLD void store_gate_gradient(const la_problem *p, const la_unit *u, int64_t t, real *da,
                                 real *room, la_decay decay)
{
    const la_array *to = &p->array[LA_DG];
    const int64_t n = decay == LA_KEY ? p->K : 1;
    load_decay(p, u, t, room, decay);
    for (int64_t i = 0; i < n; i++) da[i] = gate_gradient(da[i], room[i], p->gate);
    store_row(at(to, u->b, t, u->hv), to->dtype, da, n);
}

/* Is any of n numbers, `stride` apart, above `highest` or below `lowest`? NaN is neither. 0 must
 * lie between the two, because the padding is 0. */
LA_COLD bool outside(const char *x, la_dtype dtype, int64_t n, int64_t stride, double lowest,
                     double highest)
{
    enum { PIECE = 32 * LANES };
    real room[PIECE] __attribute__((aligned(LA_LANE_BYTES)));
    const lane low = (real)lowest - (lane){0}, high = (real)highest - (lane){0};
    const int64_t size = la_size_of(dtype);

    for (int64_t i = 0; i < n; i += PIECE) {
        const int64_t m = i + PIECE < n ? PIECE : n - i;
        const char *from = x + i * stride * size;
        const lane_of_state *row = (const lane_of_state *)from;
        lane_int any = {0};
        if (dtype != REAL_DTYPE || stride != 1 || m % LANES) {
            row = (const lane_of_state *)room;
            if (stride == 1)
                convert_row(room, m, from, dtype);
            else
                for (int64_t j = 0; j < padded(m); j++)
                    room[j] = j < m ? load_element(from + j * stride * size, dtype) : 0;
        }
        for (int64_t j = 0; j < padded(m) / LANES; j++) any |= (row[j] > high) | (row[j] < low);
        for (int j = 0; j < LANES; j++)
            if (any[j]) return true;
    }
    return false;
}

/* The weight of a token's write, for kernels that have one. */
LA_FN real load_weight(const la_problem *p, const la_unit *u, int64_t t)
{
    return p->array[LA_WEIGHT].given ? load_scalar(p, LA_WEIGHT, u, t) : 1;
}

/* The factor of v in a read. */
LA_FN real load_skip(const la_problem *p, const la_unit *u)
{
    const la_array *x = &p->array[LA_SKIP];
    return load_element(at(x, u->hv, 0, 0), x->dtype);
}

/* The i-th head of a unit. */
LA_FN la_unit head_of(const la_problem *p, const la_unit *all, int64_t i)
{
    la_unit u = *all;
    u.hv += i;
    u.h = u.hv / (p->HV / p->H);
    u.heads = 1;
    return u;
}

/* ---- states: a panel [K][width] of columns v0..v1, whatever the user's layout ---- */

LA_COLD void load_state(const la_problem *p, la_name name, const la_unit *u, int64_t v0, int64_t v1,
                        real *S, int64_t width)
{
    const la_array *from = &p->array[name];
    if (!from->given) {
        fill(p->K * width, S, 0);
        return;
    }
    for (int64_t i = 0; i < p->K; i++) {
        real *row = S + i * width;
        const char *x = at(from, u->n, u->hv, i);
        if (from->stride[3] == 1) {
            load_row(row, v1 - v0, x + v0 * la_size_of(from->dtype), from->dtype);
        } else {
            for (int64_t j = v0; j < v1; j++)
                row[j - v0] =
                    load_element(x + j * from->stride[3] * la_size_of(from->dtype), from->dtype);
        }
        for (int64_t j = v1 - v0; j < width; j++) row[j] = 0;
    }
}

LA_COLD void store_state(const la_problem *p, la_name name, const la_unit *u, int64_t v0,
                         int64_t v1, const real *S, int64_t width)
{
    const la_array *to = &p->array[name];
    if (!to->given) return;
    for (int64_t i = 0; i < p->K; i++) {
        char *x = at(to, u->n, u->hv, i);
        if (to->stride[3] == 1) {
            store_row(x + v0 * la_size_of(to->dtype), to->dtype, S + i * width, v1 - v0);
        } else {
            for (int64_t j = v0; j < v1; j++)
                store_element(x + j * to->stride[3] * la_size_of(to->dtype), to->dtype,
                              S[i * width + j - v0]);
        }
    }
}

/* z [N,HV,K]: the sum of the keys so far. */
LA_FN void load_z(const la_problem *p, la_name name, const la_unit *u, real *z)
{
    const la_array *from = &p->array[name];
    if (from->given)
        load_row(z, p->K, at(from, u->n, u->hv, 0), from->dtype);
    else
        fill(padded(p->K), z, 0);
}

LA_FN void store_z(const la_problem *p, la_name name, const la_unit *u, const real *z)
{
    const la_array *to = &p->array[name];
    if (to->given) store_row(at(to, u->n, u->hv, 0), to->dtype, z, p->K);
}

/* ---- the read's end ---- */

/* divisor_of of a forward pass or a step. It tells the caller of a denominator below zero, which
 * maps that are never negative cannot give. Every thread would write the same. */
LA_FN real divisor_of_read(const la_problem *p, real den)
{
    const real scaled = den * (real)p->scale;
    if (scaled < 0 && p->clamped) __atomic_store_n(p->clamped, true, __ATOMIC_RELAXED);
    return divisor_of(p, scaled);
}

/* num += skip v, where the call has a skip. */
LA_FN void skip_row(const la_problem *p, const la_unit *u, real *row, const real *v, int64_t width)
{
    if (!p->array[LA_SKIP].given) return;
    const real skip = load_skip(p, u);
    for (int64_t w = 0; w < width; w += LANES) lanes_of(row + w)[0] += skip * lanes_in(v + w)[0];
}

/* o = scale num, or scale num / divisor(scale den). The scale comes last, so that it costs one
 * rounding. */
LA_FN void finish_row(const la_problem *p, real *row, int64_t width, bool normalised, real den)
{
    const real scale = (real)p->scale, by = normalised ? divisor_of_read(p, den) : 1;
    for (int64_t w = 0; w < width; w += LANES) {
        lanes_of(row + w)[0] *= scale;
        if (normalised) lanes_of(row + w)[0] /= by;
    }
}
