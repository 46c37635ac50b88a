/* Where an array lies, as the headers say that its owner hands over: DLPack's tensor, the entries of
 * __cuda_array_interface__. Any numbers may stand there. No Python here: tests/c/fuzz_layout.c. */
#ifndef LINATTN_LAYOUT_H
#define LINATTN_LAYOUT_H

#include "dlpack.h"

#include <stdbool.h>
#include <stddef.h>

enum { LA_LAYOUT_DIMS = 64 }; /* NumPy's own limit */

typedef struct {
    int ndim;
    int64_t shape[LA_LAYOUT_DIMS], stride[LA_LAYOUT_DIMS]; /* in elements */
} la_layout;

/* The fault of a layout. */
typedef enum {
    LA_LAYOUT_FITS,
    LA_LAYOUT_BELOW_NONE, /* less than 0 dimensions */
    LA_LAYOUT_DIMENSIONS, /* more than LA_LAYOUT_DIMS */
    LA_LAYOUT_NO_SHAPE,   /* dimensions, but no sizes */
    LA_LAYOUT_BELOW_ZERO, /* a size is */
    LA_LAYOUT_NOT_WHOLE,  /* a stride ends inside an element */
    LA_LAYOUT_TOO_LARGE,  /* no memory reaches so far */
} la_layout_fault;

/* "<f4" and the like: an order that is this machine's, a letter, bytes. 'V' is DL_OPAQUE: its owner
 * may know better. False, and nothing is written, for any other text. */
bool la_read_typestr(const char *text, dl_dtype *dtype);

/* Bytes of an element, one at least. */
int64_t la_element_bytes(dl_dtype dtype);

/* A tensor's sizes and strides. */
la_layout_fault la_read_tensor(la_layout *x, const dl_tensor *tensor);

/* x has its sizes: strides from bytes, or, from NULL, of an array without gaps. */
la_layout_fault la_read_strides(la_layout *x, const int64_t *bytes, int64_t element);

/* From its first byte to the one after its last, seen from its first element. Of a layout that fits. */
void la_extent(int ndim, const int64_t *shape, const int64_t *stride, int64_t element, int64_t *low,
               int64_t *high);

#endif
