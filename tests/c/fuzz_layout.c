/* libFuzzer: bytes become the headers that arrays come with: a typestr, a DLPack tensor, strides in
 * bytes. A layout that fits spans what a pointer can reach. One that does not is named. */
#include "../../csrc/layout.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

static void must(bool so)
{
    if (!so) abort();
}

/* Without the arithmetic of layout.c: in 128 bits, which these sums cannot leave. */
static void check_fit(const la_layout *x, int64_t element)
{
    __int128 low = 0, high = element;
    int64_t got_low, got_high;
    bool empty = false;
    must(x->ndim >= 0 && x->ndim <= LA_LAYOUT_DIMS);
    for (int i = 0; i < x->ndim; i++) {
        must(x->shape[i] >= 0);
        empty = empty || x->shape[i] == 0;
        const __int128 reach = ((__int128)x->shape[i] - 1) * x->stride[i] * element;
        if (reach < 0)
            low += reach;
        else
            high += reach;
    }
    la_extent(x->ndim, x->shape, x->stride, element, &got_low, &got_high);
    must(empty ? got_low == 0 && got_high == 0 : got_low == low && got_high == high);
    must(got_low > INT64_MIN / 2 && got_high < INT64_MAX / 2 && got_low <= got_high);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct {
        uint8_t how, dims;
        dl_dtype dtype;
        int64_t shape[6], stride[6];
        char typestr[24];
    } from;
    memset(&from, 0, sizeof from);
    memcpy(&from, bytes, size < sizeof from ? size : sizeof from);
    from.typestr[sizeof from.typestr - 1] = 0;

    dl_dtype dtype = {0, 0, 0};
    if (la_read_typestr(from.typestr, &dtype))
        must(dtype.bits >= 8 && dtype.bits % 8 == 0 && dtype.lanes == 1);
    else
        must(!dtype.code && !dtype.bits && !dtype.lanes);

    la_layout x;
    const int64_t element = la_element_bytes(from.dtype);
    must(element >= 1);
    const int ndim = from.dims % 7;
    dl_tensor tensor = {.ndim = from.how & 4 ? (int8_t)from.dims : ndim,
                        .dtype = from.dtype,
                        .shape = from.how & 1 ? NULL : from.shape,
                        .strides = from.how & 2 ? NULL : from.stride};
    if (tensor.ndim <= 6 || tensor.ndim > LA_LAYOUT_DIMS)
        if (la_read_tensor(&x, &tensor) == LA_LAYOUT_FITS) check_fit(&x, element);
    x.ndim = ndim;
    memcpy(x.shape, from.shape, sizeof from.shape);
    if (la_read_strides(&x, from.how & 2 ? NULL : from.stride, element) == LA_LAYOUT_FITS)
        check_fit(&x, element);
    return 0;
}
