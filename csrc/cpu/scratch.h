/* The scratch memory of a call, in whole pages. */
#ifndef LINATTN_CPU_SCRATCH_H
#define LINATTN_CPU_SCRATCH_H

#include <stddef.h>

/* NULL if there is not enough memory. The block may hold anything. */
void *la_scratch_take(size_t bytes);
void la_scratch_give(void *scratch);

#endif
