/* Whether a call that takes long is to end early. The calling thread asks about ten times a second; the
 * others look at `stop`. On the CPU alone: nothing waits for a device. */
#ifndef LINATTN_WATCH_H
#define LINATTN_WATCH_H

#include "linattn.h"

#include <stdatomic.h>

typedef struct la_watch {
    bool (*interrupted)(void *caller);
    void *caller;
    const void *thread; /* an address of the calling thread's own */
    int64_t next;       /* when it asks again, in nanoseconds */
    _Atomic bool stop;
} la_watch;

/* For the length of one call: which function says that it is to end early. */
void la_watch_begin(la_watch *w, bool (*interrupted)(void *caller), void *caller);

#endif
