#include "layout.h"

#include <string.h>

/* Bytes that an array may span: so little below 2^63 that sums of two such numbers fit. */
#define MOST_BYTES ((int64_t)1 << 61)

bool la_read_typestr(const char *text, dl_dtype *dtype)
{
    static const char letters[] = "iufVcb";
    static const uint8_t codes[] = {DL_INT, DL_UINT, DL_FLOAT, DL_OPAQUE, DL_COMPLEX, DL_BOOL};
    enum { MOST = 31 }; /* 8 times as many bits must fit in a byte */
    if (!text[0] || !strchr("<=|", text[0])) return false;
    const char *letter = text[1] ? strchr(letters, text[1]) : NULL;
    if (!letter) return false;
    int bytes = 0;
    for (const char *c = text + 2; *c; c++) {
        if (*c < '0' || *c > '9') return false;
        bytes = 10 * bytes + (*c - '0');
        if (bytes > MOST) return false;
    }
    if (!bytes) return false;
    *dtype = (dl_dtype){codes[letter - letters], (uint8_t)(8 * bytes), 1};
    return true;
}

int64_t la_element_bytes(dl_dtype dtype)
{
    const int64_t bytes = ((int64_t)dtype.bits * dtype.lanes + 7) / 8;
    return bytes ? bytes : 1;
}

static bool is_empty(const la_layout *x)
{
    for (int i = 0; i < x->ndim; i++)
        if (x->shape[i] == 0) return true;
    return false;
}

/* Sizes are known, and strides in elements. */
static la_layout_fault check_reach(la_layout *x, int64_t element)
{
    int64_t reach = element, elements = element;
    if (is_empty(x)) { /* strides of nothing mean nothing */
        memset(x->stride, 0, sizeof *x->stride * (size_t)x->ndim);
        return LA_LAYOUT_FITS;
    }
    for (int i = 0; i < x->ndim; i++) {
        int64_t step;
        if (__builtin_mul_overflow(elements, x->shape[i], &elements) || elements > MOST_BYTES)
            return LA_LAYOUT_TOO_LARGE;
        if (x->shape[i] == 1) continue;
        if (__builtin_mul_overflow(x->stride[i], element, &step) || step <= -MOST_BYTES ||
            __builtin_mul_overflow(step < 0 ? -step : step, x->shape[i] - 1, &step) ||
            __builtin_add_overflow(reach, step, &reach) || reach > MOST_BYTES)
            return LA_LAYOUT_TOO_LARGE;
    }
    return LA_LAYOUT_FITS;
}

la_layout_fault la_read_strides(la_layout *x, const int64_t *bytes, int64_t element)
{
    bool empty = false;
    for (int i = 0; i < x->ndim; i++) {
        if (x->shape[i] < 0) return LA_LAYOUT_BELOW_ZERO;
        empty = empty || x->shape[i] == 0;
    }
    int64_t dense = 1;
    for (int i = x->ndim - 1; i >= 0; i--) {
        const bool steps = x->shape[i] > 1 && !empty;
        if (bytes && steps && bytes[i] % element) return LA_LAYOUT_NOT_WHOLE;
        x->stride[i] = bytes ? bytes[i] / element : dense;
        if (__builtin_mul_overflow(dense, x->shape[i], &dense) && !empty)
            return LA_LAYOUT_TOO_LARGE;
    }
    return check_reach(x, element);
}

la_layout_fault la_read_tensor(la_layout *x, const dl_tensor *tensor)
{
    x->ndim = 0;
    if (tensor->ndim < 0) return LA_LAYOUT_BELOW_NONE;
    if (tensor->ndim > LA_LAYOUT_DIMS) return LA_LAYOUT_DIMENSIONS;
    if (tensor->ndim && !tensor->shape) return LA_LAYOUT_NO_SHAPE;
    x->ndim = tensor->ndim;
    const size_t all = sizeof *x->shape * (size_t)x->ndim;
    if (all) memcpy(x->shape, tensor->shape, all);
    const int64_t element = la_element_bytes(tensor->dtype);
    if (!tensor->strides) return la_read_strides(x, NULL, element);
    for (int i = 0; i < x->ndim; i++) {
        if (x->shape[i] < 0) return LA_LAYOUT_BELOW_ZERO;
        x->stride[i] = tensor->strides[i];
    }
    return check_reach(x, element);
}

void la_extent(int ndim, const int64_t *shape, const int64_t *stride, int64_t element, int64_t *low,
               int64_t *high)
{
    *low = 0;
    *high = element;
    for (int i = 0; i < ndim; i++) {
        const int64_t reach = (shape[i] - 1) * stride[i] * element;
        if (shape[i] == 0) {
            *low = *high = 0;
            return;
        }
        if (reach < 0)
            *low += reach;
        else
            *high += reach;
    }
}
