/* Sizes of memory, added and multiplied with a check: what is too large for a size_t stays so, as
 * LA_TOO_LARGE, which no allocation gives. A letter that is zero or more is a size. */
#ifndef LINATTN_SIZES_H
#define LINATTN_SIZES_H

#include <stddef.h>
#include <stdint.h>

#define LA_TOO_LARGE SIZE_MAX

static inline size_t la_plus(size_t x, size_t y)
{
    size_t sum;
    return __builtin_add_overflow(x, y, &sum) ? LA_TOO_LARGE : sum;
}

static inline size_t la_times(size_t x, size_t y)
{
    size_t product;
    return __builtin_mul_overflow(x, y, &product) ? LA_TOO_LARGE : product;
}

/* To the next multiple of a power of two. */
static inline size_t la_whole(size_t x, size_t unit)
{
    return x > LA_TOO_LARGE - unit ? LA_TOO_LARGE : (x + unit - 1) & ~(unit - 1);
}

#endif
