/* The scratch memory of a call, in whole pages. */
#ifndef LINATTN_CPU_SCRATCH_H
#define LINATTN_CPU_SCRATCH_H

#include "../linattn.h"

/* NULL if there is not enough memory. The block may hold anything. */
void *la_scratch_take(size_t bytes);
void la_scratch_give(void *scratch);

/* The same for a call that makes calls: they have the block that is kept. */
void *la_scratch_beside(size_t bytes);
void la_scratch_end_beside(void *scratch);

/* The message and the status of a call whose scratch there is no memory for. */
la_status la_out_of_scratch(char message[LA_MESSAGE]);

#endif
