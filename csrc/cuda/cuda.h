/* The CUDA wing's door: what module.c and arrays.c call where LA_WITH_CUDA is defined. Plain C, without
 * CUDA's headers; a stream is a cudaStream_t (NULL: the legacy default stream).
 *
 * Nothing here waits for the device but la_cuda_synchronize. A failure leaves CUDA's own words in
 * p->message. The current device is the same after each call as before. */
#ifndef LINATTN_CUDA_H
#define LINATTN_CUDA_H

#ifdef __cplusplus
extern "C" {
#endif

#include "../linattn.h"

/* Why no device can be used, in words; NULL if one can. The string lives as long as the process. */
const char *la_cuda_why_not(void);
int la_cuda_device_count(void);

/* Which device holds this address; -1 if none does. */
int la_cuda_ordinal_of(const void *data);

/* After la_check and on p->device == LA_CUDA: enqueue the call on p->stream of p->ordinal. */
la_status la_cuda_forward(la_problem *p);
la_status la_cuda_backward(la_problem *p);
la_status la_cuda_step(la_problem *p);

/* Memory on p->ordinal in p->stream's order, at least 256-byte aligned. */
la_status la_cuda_allocate(la_problem *p, size_t bytes, void **data);
la_status la_cuda_release(int ordinal, void *stream, void *data);

/* Give what the pools keep for the next call back to the devices; NULL, or what CUDA says. */
const char *la_cuda_trim(void);

/* What is enqueued on p->stream from now on waits for all that `other` holds by now. */
la_status la_cuda_wait_stream(la_problem *p, void *other);

/* Return once p->stream is done: for arrays whose owner's stream nobody tells. */
la_status la_cuda_synchronize(la_problem *p);

#ifdef __cplusplus
}
#endif
#endif
