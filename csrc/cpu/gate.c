/* One pass over a gate before anything is computed: does some decay exceed one? */
#include "../linattn.h"

static double element(const char *x, la_dtype dtype)
{
    union {
        uint32_t u;
        float f;
    } y;
    uint16_t half;
    switch (dtype) {
    case LA_F64: return *(const double *)x;
    case LA_F32: return *(const float *)x;
    case LA_BF16: y.u = (uint32_t)*(const uint16_t *)x << 16; return y.f;
    default: /* float16, its exponent mended as in load.h; infinities and NaN apart */
        half = *(const uint16_t *)x;
        y.u = (uint32_t)(half & 0x7fff) << 13;
        if ((half & 0x7c00) == 0x7c00)
            y.u |= 0x7f800000;
        else
            y.f *= 0x1p112f;
        return half & 0x8000 ? -y.f : y.f;
    }
}

/* Any of n elements above `highest` or below `lowest`; NaN is neither. The float32 case, the usual
 * one, is left to the vectoriser. */
static bool outside(const char *x, la_dtype dtype, int64_t n, int64_t stride, double lowest,
                    double highest)
{
    if (dtype == LA_F32 && stride == 1) {
        const float *f = (const float *)x, low = (float)lowest, high = (float)highest;
        int any = 0;
        for (int64_t i = 0; i < n; i++) any |= (f[i] > high) | (f[i] < low);
        return any;
    }
    const int64_t size = dtype == LA_F64 ? 8 : dtype == LA_F32 ? 4 : 2;
    for (int64_t i = 0; i < n; i++) {
        double y = element(x + i * stride * size, dtype);
        if (y > highest || y < lowest) return true;
    }
    return false;
}

bool la_gate_above_one(const la_problem *p)
{
    const la_array *g = &p->array[LA_G];
    if (p->decay == LA_NONE) return false;
    const double lowest = p->gate == LA_LOG ? -__builtin_inf() : 0;
    const double highest = p->gate == LA_DECAY ? 1 : p->gate == LA_LOG ? 0 : __builtin_inf();
    const int64_t size = g->dtype == LA_F64 ? 8 : g->dtype == LA_F32 ? 4 : 2;
    const bool key = p->decay == LA_KEY, head = p->decay == LA_HEAD;
    const int64_t B = head ? 1 : p->B, T = head ? 1 : p->T;
    for (int64_t b = 0; b < B; b++)
        for (int64_t t = 0; t < T; t++) {
            const char *row = g->data + (b * g->stride[0] + t * g->stride[1]) * size;
            if (!key) {
                if (outside(row, g->dtype, p->HV, g->stride[2], lowest, highest)) return true;
                continue;
            }
            for (int64_t h = 0; h < p->HV; h++)
                if (outside(row + h * g->stride[2] * size, g->dtype, p->K, 1, lowest, highest))
                    return true;
        }
    return false;
}
