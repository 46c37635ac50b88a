/* The scratch memory of a call, whole pages of it. */
#ifndef LINATTN_CPU_SCRATCH_H
#define LINATTN_CPU_SCRATCH_H

#include <stddef.h>

/* NULL if it cannot be had. It may hold anything. */
void *la_scratch_take(size_t bytes);
void la_scratch_give(void *scratch);

#endif
