/* The functions of the CUDA part that module.c, arrays.c and xla.c call where LA_WITH_CUDA is defined.
 * Plain C, without the headers of CUDA. A stream is a cudaStream_t (NULL: the legacy default
 * stream).
 *
 * Only la_cuda_synchronize waits for the device. After a failure the message is the one of CUDA.
 * The current device is the same after each call as before. */
#ifndef LINATTN_CUDA_H
#define LINATTN_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

#include "../late.h"
#include "../layer.h"

/* The reason why no device can be used, in words; NULL if one can. The string lives as long as the
 * process. */
const char *la_cuda_why_not(void);
int la_cuda_device_count(void);

/* LINATTN_SHARED_LIMIT, if it is no number of bytes that a block can work with; else NULL. */
const char *la_cuda_limit_unreadable(void);

/* The number of the device that holds this address; -1 if there is none. */
int la_cuda_ordinal_of(const void *data);

/* After la_check, with p->device == LA_CUDA: enqueue the call on p->stream of device p->ordinal. */
la_status la_cuda_forward(la_problem *p);
la_status la_cuda_backward(la_problem *p);
la_status la_cuda_step(la_problem *p);

/* A gate from a projection, after la_gates_check: enqueue the pass. */
la_status la_cuda_gates(la_gating *j);

/* Late gradients, whose arrays fit each other: enqueue the kernel, if there is one. */
la_status la_cuda_late(la_late *j);

/* A call of a room, after la_room_check: enqueue the pass. */
la_status la_cuda_scan(la_room_job *j);
la_status la_cuda_convolution(la_room_job *j);

/* A layer's step, whose arrays between the stages have memory: enqueue it. */
la_status la_cuda_layer(const la_layer *j);

/* Memory on device p->ordinal, in the order of p->stream, aligned to 256 bytes at least. */
la_status la_cuda_allocate(la_problem *p, size_t bytes, void **data);
la_status la_cuda_release(int ordinal, void *stream, void *data);

/* Enqueue a copy on p->stream, from memory of device p->ordinal to another place there. */
la_status la_cuda_copy(la_problem *p, void *to, const void *from, size_t bytes);

/* Give the memory that the pools keep for the next call back to the devices. Returns NULL, or the
 * error. */
const char *la_cuda_trim(void);

/* Work that is enqueued on a device's `stream` from now on waits for all work that `other` holds
 * now. */
la_status la_cuda_wait_stream(int ordinal, void *stream, void *other, char message[LA_MESSAGE]);

/* Return when p->stream is done: for arrays whose owner does not say on which stream they are
 * used. */
la_status la_cuda_synchronize(la_problem *p);

#ifdef __cplusplus
}
#endif
#endif
