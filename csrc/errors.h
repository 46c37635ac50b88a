/* Exceptions that name an argument, and what is known of dtypes. All functions that raise return -1. */
#ifndef LINATTN_ERRORS_H
#define LINATTN_ERRORS_H

#include "call.h"

#include "layout.h"

/* The exception for a status, with this message; 0 for LA_OK. */
int la_raise(la_status status, const char *message);
int la_raise_from(PyObject *as, const char *text, const char *label);
int la_name_error(const char *label); /* the one at hand, as "label: ..." */
int la_refuse_strides(const char *label, const char *expected, int ndim, const int64_t *stride,
                      int64_t size);
int la_refuse_device(const la_call *c, la_name name, la_device device, int ordinal);
int la_refuse_object(const char *label, PyObject *object);
int la_as_flag(PyObject *object, const char *label, bool *flag); /* True or False */
int la_refuse_dtype(const char *label, la_name name, dl_dtype dtype);
PyObject *la_tuple_of(int count, const int64_t *numbers);

extern const dl_dtype la_dl_dtypes[LA_DTYPES];
/* LA_DTYPES for a dtype that the core does not have. */
la_dtype la_dtype_in(dl_dtype dtype);
const char *la_expected_dtypes(la_name name);

/* Why no call can run on CUDA; NULL if one can. */
const char *la_why_no_cuda(void);

#endif
