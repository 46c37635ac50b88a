/* DLPack's memory layout, as far as linattn reads and writes it: facts of an ABI, in our words.
 *
 * A dl_tensor says where an array lies; a managed one comes with the function that ends it. The
 * exchange table (DLPack 1.2) does in tens of nanoseconds what the capsules of `__dlpack__` do. */
#ifndef LINATTN_DLPACK_H
#define LINATTN_DLPACK_H

#include <stdint.h>

/* Device types: numbers, for others may come. */
enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3, DL_CUDA_MANAGED = 13 };

/* Codes of dtypes. */
enum { DL_INT, DL_UINT, DL_FLOAT, DL_OPAQUE, DL_BFLOAT, DL_COMPLEX, DL_BOOL, DL_CODES };

/* Bits of a managed tensor's flags. */
enum { DL_READ_ONLY = 1, DL_IS_COPY = 2 };

typedef struct {
    int32_t type, id;
} dl_device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes; /* of vector dtypes; 1 */
} dl_dtype;

typedef struct {
    void *data;
    dl_device device;
    int32_t ndim;
    dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: contiguous, the last axis fastest */
    uint64_t byte_offset;
} dl_tensor;

/* In a capsule called "dltensor", "used_dltensor" once its tensor was taken over. */
typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *);
} dl_managed;

typedef struct {
    uint32_t major, minor;
} dl_version;

/* In a capsule called "dltensor_versioned", "used_dltensor_versioned". */
typedef struct dl_versioned {
    dl_version version;
    void *context;
    void (*deleter)(struct dl_versioned *);
    uint64_t flags;
    dl_tensor tensor;
} dl_versioned;

/* In a type's __dlpack_c_exchange_api__, a capsule called "dlpack_exchange_api". Functions return
 * 0, or -1 with an exception set (the allocator: after calling fail). None of them synchronises. */
typedef struct dl_exchange {
    dl_version version;
    const struct dl_exchange *older;
    int (*allocate)(dl_tensor *prototype, dl_versioned **made, void *context,
                    void (*fail)(void *context, const char *kind, const char *message));
    int (*managed_from_object)(void *object, dl_versioned **made);
    int (*object_from_managed)(dl_versioned *given, void **object);
    int (*borrow)(void *object, dl_tensor *tensor); /* may be NULL */
    int (*current_stream)(int32_t device_type, int32_t id, void **stream);
} dl_exchange;

#endif
