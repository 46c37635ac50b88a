/* Scratch memory of calls. */
#include "scratch.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static _Atomic int fail_countdown;

void la_fail_allocation(int n) { atomic_store(&fail_countdown, n); }

/* The block of the last call is kept for the next one: fresh memory costs a page fault every 4 KiB.
 * One block is kept, and only up to this size. A call that finds it in use allocates its own. */
#if defined(LA_POISON)
static const size_t MOST_KEPT = 0; /* each call's own: a sanitizer sees where it ends */
#else
static const size_t MOST_KEPT = (size_t)64 << 20;
#endif
enum { HEADER = 4096 }; /* in front of a block: its size, and room that keeps pages aligned */
static _Atomic(char *) kept;

/* Tests only: is this the allocation that is to fail? */
static bool is_to_fail(void)
{
    return atomic_load(&fail_countdown) > 0 && atomic_fetch_sub(&fail_countdown, 1) == 1;
}

/* Aligned to a page: tiles need cache lines of their own, and should share none with other
 * threads. */
void *la_scratch_take(size_t bytes)
{
    if (is_to_fail()) return NULL;
    if (bytes > PTRDIFF_MAX / 2) return NULL;
    char *block = atomic_exchange(&kept, NULL);
    if (block && *(size_t *)block < bytes) {
        free(block);
        block = NULL;
    }
    if (!block) {
        void *fresh;
        if (posix_memalign(&fresh, 4096, HEADER + bytes)) return NULL;
        block = fresh;
        *(size_t *)block = bytes;
    }
#if defined(LA_POISON)
    memset(block + HEADER, 0xff, bytes); /* NaN in every dtype shows what is read unwritten */
#endif
    return block + HEADER;
}

void la_scratch_give(void *scratch)
{
    char *block = (char *)scratch - HEADER;
    if (*(size_t *)block <= MOST_KEPT) block = atomic_exchange(&kept, block);
    free(block);
}

void *la_scratch_beside(size_t bytes)
{
    void *block;
    if (is_to_fail() || bytes > PTRDIFF_MAX / 2 || posix_memalign(&block, 64, bytes)) return NULL;
#if defined(LA_POISON)
    memset(block, 0xff, bytes);
#endif
    return block;
}

void la_scratch_end_beside(void *scratch) { free(scratch); }

la_status la_out_of_scratch(char message[LA_MESSAGE])
{
    static const char text[] = "not enough memory for the call's scratch";
    memcpy(message, text, sizeof text);
    return LA_MEMORY_ERROR;
}
