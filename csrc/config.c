/* Settings of the whole process: whether tf32 is allowed, and scales that have been worked out. */
#include "linattn.h"

#include <math.h>
#include <stdatomic.h>

static _Atomic bool tf32_allowed;

void la_set_allow_tf32(bool allow) { tf32_allowed = allow; }
bool la_get_allow_tf32(void) { return tf32_allowed; }

/* K^-1/2 as NumPy rounds it: 1 / sqrt rounds twice, and pow takes 20 ns, so it is kept. */
double la_default_scale(int64_t K)
{
    enum { KEPT = 257 };
    static _Atomic double kept[KEPT];
    if (K >= KEPT) return pow((double)K, -0.5);
    double scale = atomic_load_explicit(&kept[K], memory_order_relaxed);
    if (scale == 0) {
        scale = pow((double)K, -0.5);
        atomic_store_explicit(&kept[K], scale, memory_order_relaxed);
    }
    return scale;
}
