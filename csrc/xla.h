/* Handlers of XLA's FFI, which JAX registers (xla.c), and the memory layout of what XLA hands to them:
 * facts of an ABI, in our words. tests/test_jax_xla.py compares them with the header of the JAX at hand.
 *
 * Each struct begins with its size, which tells the versions of the ABI apart, and with a list of
 * extensions. No jaxlib is linked: all functions come with the call. */
#ifndef LINATTN_XLA_H
#define LINATTN_XLA_H

#include <stddef.h>
#include <stdint.h>

/* The version of the ABI that this file has. XLA takes a handler of its own version or an older one. */
enum { XLA_MAJOR = 0, XLA_MINOR = 1 };

/* Dtypes, as far as the core has them. */
enum {
    XLA_PRED = 1,
    XLA_S32 = 4,
    XLA_S64 = 5,
    XLA_F16 = 10,
    XLA_F32 = 11,
    XLA_F64 = 12,
    XLA_BF16 = 16
};

/* Codes of errors. */
enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_INTERNAL = 13 };

/* Types of an attribute. Arguments and results have one type alone, XLA_BUFFER. */
enum { XLA_BUFFER = 1, XLA_ARRAY = 1, XLA_SCALAR = 3, XLA_STRING = 4 };

/* XLA asks for the metadata of a handler by an extension of this type. */
enum { XLA_METADATA = 1 };

typedef struct xla_extension {
    size_t struct_size;
    int type;
    struct xla_extension *next;
} xla_extension;

typedef struct {
    size_t struct_size;
    xla_extension *extension;
    int major, minor;
} xla_version;

/* A handler's own description. XLA sets the fields behind these, and they stay as they are. */
typedef struct {
    size_t struct_size;
    xla_version version;
    uint32_t traits;
} xla_metadata;

typedef struct {
    xla_extension base;
    xla_metadata *metadata;
} xla_metadata_extension;

/* An array without gaps, the last axis fastest. */
typedef struct {
    size_t struct_size;
    xla_extension *extension;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
} xla_buffer;

typedef struct {
    const char *data;
    size_t size;
} xla_text;

typedef struct {
    int dtype;
    void *value;
} xla_scalar;

typedef struct {
    int dtype;
    size_t size;
    void *data;
} xla_array;

/* Arguments, or results. */
typedef struct {
    size_t struct_size;
    xla_extension *extension;
    int64_t size;
    int *types;
    void **buffers; /* an xla_buffer each */
} xla_buffers;

/* Sorted by name. */
typedef struct {
    size_t struct_size;
    xla_extension *extension;
    int64_t size;
    int *types;
    xla_text **names;
    void **values; /* an xla_array, an xla_scalar or an xla_text each */
} xla_attributes;

typedef struct xla_error xla_error; /* XLA's own; NULL: all is well */

typedef struct {
    size_t struct_size;
    xla_extension *extension;
    const char *message;
    int code;
} xla_error_create;

typedef struct {
    size_t struct_size;
    xla_extension *extension;
    void *context;
    void *stream; /* is written */
} xla_stream_get;

/* The functions, as far as the handlers call them. */
typedef struct {
    size_t struct_size;
    xla_extension *extension;
    xla_version version;
    const void *internal;
    xla_error *(*error_create)(xla_error_create *);
    void *error_get_message, *error_destroy, *handler_register;
    xla_error *(*stream_get)(xla_stream_get *);
} xla_api;

typedef struct {
    size_t struct_size;
    xla_extension *extension;
    const xla_api *api;
    void *context;
    int stage;
    xla_buffers arguments, results;
    xla_attributes attributes;
} xla_frame;

typedef xla_error *xla_handler(xla_frame *);

/* A target: its name and platform, as jax.ffi.register_ffi_target takes them, and the handler. */
typedef struct {
    const char *name, *platform;
    xla_handler *handler;
} la_xla_target;

extern const la_xla_target la_xla_targets[];
extern const int la_xla_target_count;

#endif
